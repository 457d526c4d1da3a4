"""Gradients summed over ranks, and the update of the weights that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.optimizer import Optimizer
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.schedule import Label


class Gradients:
    """One buffer behind the .grad of some parameters, so one all-reduce over `group` sums them.

    `layer`: the layer in the all-reduce's label, where a step has several. `after`: the layer whose
    backward pass completes them (0: the encoder's); None: they are summed at the end of a step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: tuple[int, ...],
        layer: int | None = None,
        after: int | None = None,
    ) -> None:
        self.parameters, self.group, self.layer = list(parameters), group, layer
        self.after = after
        # a stage whose layers only aggregate has no parameters
        first = self.parameters[0] if self.parameters else torch.empty(0)
        self.flat = torch.zeros(
            sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device
        )
        offset = 0
        for p in self.parameters:
            # with p's strides: the buffer has the values in the order of p's memory
            p.grad = self.flat[offset : offset + p.numel()].as_strided(p.shape, p.stride())
            offset += p.numel()

    def reduce(self, rank: Rank, step: int) -> None:
        """Sum them over the group."""
        comm.all_reduce(rank, self._label(step), self.flat, self.group)

    def begin(self, rank: Rank, step: int) -> Future[None]:
        """Begin to sum them, beside what the rank does next."""
        return comm.begin_all_reduce(rank, self._label(step), self.flat, self.group)

    def _label(self, step: int) -> Label:
        return Label("all_reduce", step, layer=self.layer)


class Learner:
    """Sums over ranks what a step leaves in .grad, and lets the optimizer use it."""

    def __init__(self, rank: Rank, workload: Workload, gradients: Sequence[Gradients]) -> None:
        self.rank, self.gradients = rank, gradients
        self.under_way: list[Future[None]] = []  # sums of this step
        parameters: list[Tensor] = [p for part in gradients for p in part.parameters]
        self.optimizer, self.clip = Optimizer(parameters, workload), workload.clip

    def zero(self) -> None:
        """Before a step."""
        for part in self.gradients:
            part.flat.zero_()

    def complete(self, step: int, layer: int) -> None:
        """The backward pass of a layer (0: of the encoder) is done: begin to sum what it completes.

        Until the update, other all-reduces must begin behind these (`comm.begin_all_reduce`).
        """
        for part in self.gradients:
            if part.after == layer:
                self.under_way.append(part.begin(self.rank, step))

    def update(self, step: int) -> None:
        """After a step: all-reduce the gradients and update the weights."""
        for part in self.gradients:
            if part.after is None:
                part.reduce(self.rank, step)
        for ends in self.under_way:
            ends.result()
        self.under_way.clear()
        self.descend(step)

    def descend(self, step: int) -> None:
        """Update the weights with the gradients as they are."""
        with self.rank.recorder.span(Label("update", step), "compute"):
            if self.clip is not None:
                self._clip(self.clip)
            self.optimizer.step()

    def _clip(self, longest: float) -> None:
        """Shorten the gradient of the whole model, as torch.nn.utils.clip_grad_norm_ does.

        A number that several ranks have counts once. Where all ranks have all numbers, each rank
        knows the norm.
        """
        rank, parts = self.rank, self.gradients
        shared = all(len(part.group) == rank.world for part in parts)
        # in float64, for a stage without parameters has no type
        squares = torch.zeros((), dtype=torch.float64, device=rank.device)
        for part in parts:
            if (shared or part.group[0] == rank.rank) and part.parameters:
                squares += torch.linalg.vector_norm(part.flat, dtype=torch.float64).square()
        if not shared:
            squares = comm.total(rank, squares)
        factor = (longest / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for part in parts:
            part.flat.mul_(factor)

    def finish(self, step: int) -> None:
        """After the last step; P3's pipeline has batches left."""
