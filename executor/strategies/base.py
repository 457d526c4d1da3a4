"""What every strategy's executor offers the training loop (train.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Protocol

import torch
from torch import Tensor

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.ranks.learner import Gradients, Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.whole import Held, fill
from gnnplan.planner.problem.problem import Problem

# What forward leaves for backward: from the gradient of what was made to that of what it is made of
Back = Callable[[Tensor], Tensor]


class Scored(Protocol):
    """What answers of some rows are counted by."""

    @property
    def size(self) -> int:
        """Rows."""

    def counts(self, rows: Tensor, /) -> Tensor:
        """What the metric counts of the rows (layers/targets.py)."""


class Worker(ABC):
    """One rank's part of a strategy.

    Every rank makes its worker, then calls `step` for step 0, 1, .. of all epochs, each followed by
    an update by its learner. What is defined here holds for a worker that carries nothing but
    weights from step to step, and whose ranks all hold the same ones.
    """

    rank: Rank
    problem: Problem
    net: Net
    # layers whose gradients are summed together beside the backward pass, their weights, and the
    # layer whose backward completes them; none: all are summed after it
    buckets: Sequence[tuple[range, int, int]] = ()
    learner: Learner | None = None
    clock: Tensor | None = None  # the number of the step, int64 [], where a replayed step reads it
    scored_by: Sequence[Scored] = ()  # what the last logits are of, which follow each other
    training: bool = True  # or it evaluates, and drops nothing

    def drop(self, step: int, layer: int, vertices: Tensor, first: int = 0) -> Drop:
        """Dropout of rows of `vertices` [S] before the layer (0: encoder, L + 1: decoder).

        first: the column of the model's row that these begin with.
        """
        workload, epoch = self.problem.workload, step if self.clock is None else self.clock
        p = workload.dropout if self.training else 0.0
        return Drop(p, workload.seed, epoch, layer, vertices, first, self.training)

    @property
    def replays(self) -> bool:
        """Whether a step may become a CUDA graph: it reads from the host nothing but its number."""
        return False

    @property
    def reduce_group(self) -> tuple[int, ...]:
        """The ranks that hold the same weights as this one."""
        return tuple(range(self.rank.world))

    @abstractmethod
    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward: this rank's part of the loss, and the logits of its rows."""

    @abstractmethod
    def evaluate(self, step: int) -> Tensor:
        """Logits of this rank's rows without dropout and staleness."""

    def counts(self, logits: Tensor) -> Tensor | int:
        """What the metric counts of the rows that step or evaluate has just returned; 0: nothing.

        See layers/targets.py.
        """
        shares = torch.split(logits, [each.size for each in self.scored_by])
        found = [each.counts(its) for each, its in zip(self.scored_by, shares, strict=True)]
        return reduce(add, found) if found else 0

    def open_learner(self) -> Learner:
        """What sums the gradients over ranks and updates the weights; asked for once."""
        group = self.reduce_group
        gradients = [
            Gradients(self.net.parameters_of(layers), group, layers.start, after)
            for layers, _, after in self.buckets
        ]
        gradients = gradients or [Gradients(self.net.parameters(), group)]
        self.learner = Learner(self.rank, self.problem.workload, gradients)
        return self.learner

    @property
    def held(self) -> Held | None:
        """The part of the model that this rank trains, for other plans to go on from.

        None where the strategy hands over nothing.
        """
        assert self.learner is not None
        return Held(self.net, {}, self.learner.optimizer)

    def drain(self) -> None:  # noqa: B027  by default nothing is under way
        """Wait for messages that are under way."""

    def close(self) -> None:  # noqa: B027  by default nothing works beside the steps
        """After the last step: end what works beside the steps, such as samplers."""

    def trained(self) -> dict[str, Tensor]:
        """What this rank trains, by name: the tensors themselves, no copies."""
        return dict(self.net.state_dict())

    def state(self) -> dict[str, Tensor]:
        """What training goes on from after a step, by name: weights, and what is carried.

        `drain` is called first.
        """
        return self.trained()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from the `state` of another process."""
        fill(self.state(), state)

    def refill(self, step: int) -> None:  # noqa: B027  by default nothing is carried
        """Make what is carried from step to step anew, as `step` would have left it.

        Asked for where weights are those of another plan's training (`held.take`). All ranks ask
        at once. Weights stay as they are.
        """
