"""The weight update of P3's pipeline, with the gradient of three batches ago."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.learner import Gradients, Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies.p3.slices import DELAY


class Delayed(Learner):
    """A learner whose all-reduce overlaps the computation of a period."""

    def __init__(
        self,
        rank: Rank,
        workload: Workload,
        gradients: Sequence[Gradients],
        gradients_of: Callable[[int], Sequence[Gradients]],
        play: Callable[[int, int], object],
        steps: int,
    ) -> None:
        """gradients_of: returns the buffers of a batch's gradient. steps: batches of an epoch.

        play: plays a period (its number) of a run (its number of batches).
        """
        super().__init__(rank, workload, gradients)
        self.gradients_of, self.play = gradients_of, play
        self.workload, self.steps = workload, steps
        self.pending_reduce: Future[None] = completed_future(None)

    def start(self, batch: int) -> None:
        """Start the all-reduce of a batch's gradient."""
        buffers = self.gradients_of(batch)

        def reduce() -> None:
            for buffer in buffers:
                buffer.reduce(self.rank, batch)

        self.pending_reduce = self.rank.lanes.submit("reduce", reduce)

    def update(self, step: int) -> None:
        """Update the weights with the gradient of three batches ago."""
        due = step - DELAY
        if due < 0:
            return
        self.pending_reduce.result()
        for own, reduced in zip(self.gradients, self.gradients_of(due), strict=True):
            own.flat.copy_(reduced.flat)
        self.optimizer.lr = self.workload.lr_of(due // self.steps)  # of the batch's epoch
        self.apply_gradients(due)

    def finish(self, step: int) -> None:
        """Play the pending batches to their end."""
        for later in range(step, step + DELAY):
            self.play(later, step)
            self.update(later)
