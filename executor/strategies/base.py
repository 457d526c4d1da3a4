"""The interface of a strategy's executor to the training loop (train.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from operator import add
from typing import Protocol

import torch
from torch import Tensor

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import no_counts
from gnnplan.executor.ranks.learner import Gradients, Learner, fill
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Label

NOTHING = torch.empty(0)
Backward = Callable[[Tensor], Tensor]  # the gradient of a segment's output -> that of its input


class Scorer(Protocol):
    """Labels or pairs by which logits are scored."""

    @property
    def size(self) -> int:
        """The number of rows that are scored."""

    def counts(self, rows: Tensor, /) -> Tensor:
        """Return the metric's counts over the rows, such as correct answers (layers/targets.py)."""


class Worker(ABC):
    """One rank's part of a strategy.

    Every rank makes its worker, then calls `step` for step 0, 1, .. of all epochs, each followed by
    an update by its learner. The defaults of this class suit a worker that carries only weights
    from step to step, where all ranks hold the same weights.
    """

    rank: Rank
    problem: Problem
    net: Net
    # layers whose gradients are all-reduced together, number of their weights, and the layer whose
    # backward completes these gradients; empty: one all-reduce after the backward pass
    buckets: Sequence[tuple[range, int, int]] = ()
    learner: Learner | None = None
    cut: Mapping[str, range] = {}  # name of a weight [., H] -> the columns that this rank has
    clock: Tensor | None = None  # the step's number, int64 [], on the device, for a replayed step
    scorers: Sequence[Scorer] = ()  # of the last logits, whose rows follow in the scorers' order
    training: bool = True  # False: evaluation, without dropout

    def drop(self, step: int, layer: int, vertices: Tensor, first: int = 0) -> Drop:
        """Return the dropout of rows of `vertices` [S] before a layer (0: encoder, L + 1: decoder).

        first: the column of the model's row at which the rows begin.
        """
        workload, epoch = self.problem.workload, step if self.clock is None else self.clock
        p = workload.dropout if self.training else 0.0
        return Drop(p, workload.seed, epoch, layer, vertices, first, self.training)

    def computing(
        self, op: str, step: int, direction: str = "", layer: int | None = None
    ) -> AbstractContextManager[None]:
        """Return the span of a computation, under the schedule's label."""
        return self.rank.recorder.span(Label(op, step, direction, layer), "compute")

    @property
    def uses_cuda_graph(self) -> bool:
        """Whether a step can become a CUDA graph: the host gives it nothing but its number."""
        return False

    @property
    def reduce_group(self) -> Group:
        """The ranks that hold the same weights as this rank."""
        return tuple(range(self.rank.world))

    @abstractmethod
    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward; return this rank's part of the loss and its rows' logits."""

    @abstractmethod
    def evaluate(self, step: int) -> Tensor:
        """Return logits of this rank's rows, without dropout and staleness."""

    def counts(self, logits: Tensor) -> Tensor:
        """Return the metric's counts over the logits of the last step or evaluation.

        See layers/targets.py.
        """
        if not self.scorers:  # a pipeline stage before the last, or a step that ends no batch
            return no_counts(self.problem, self.rank.device)
        parts = torch.split(logits, [scorer.size for scorer in self.scorers])
        counts = (scorer.counts(rows) for scorer, rows in zip(self.scorers, parts, strict=True))
        return reduce(add, counts)

    def open_learner(self) -> Learner:
        """Make what all-reduces gradients and updates weights. It is called once."""
        group = self.reduce_group
        gradients = [
            Gradients(self.net.parameters_of(layers), group, layers.start, after)
            for layers, _, after in self.buckets
        ]
        gradients = gradients or [Gradients(self.net.parameters(), group)]
        self.learner = Learner(self.rank, self.problem.workload, gradients)
        return self.learner

    def drain(self) -> None:  # noqa: B027  by default nothing is under way
        """Wait for pending messages."""

    def close(self) -> None:  # noqa: B027  by default no process or thread works for the steps
        """End processes that work for the steps, such as samplers, after the last step."""

    def trained(self) -> dict[str, Tensor]:
        """Return the tensors that this rank trains, by name, without copying them."""
        return dict(self.net.state_dict(keep_vars=True))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which training resumes after a step, by name.

        They are weights, and what is carried from step to step. `drain` is called before.
        """
        return self.trained()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the `state` of another process."""
        fill(self.state(), state)

    def refill(self, step: int) -> None:  # noqa: B027  by default nothing is carried
        """Recompute the tensors that are carried from step to step, as `step` would leave them.

        All ranks call it together, after they have taken weights from another plan's training
        (`ModelPart.take`). Weights do not change.
        """
