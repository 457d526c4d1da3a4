"""Gradients summed over ranks, and the update of the weights that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.optimizer import SGD, Adam
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.schedule import Label


class Gradients:
    """One buffer behind the .grad of some parameters, so one all-reduce over `group` sums them.

    `layer`: the layer in the all-reduce's label, where a step has several.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: tuple[int, ...], layer: int | None = None
    ) -> None:
        self.parameters, self.group, self.layer = list(parameters), group, layer
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
        comm.all_reduce(rank, Label("all_reduce", step, layer=self.layer), self.flat, self.group)


class Learner:
    """Sums over ranks what a step leaves in .grad, and lets the optimizer use it."""

    def __init__(self, rank: Rank, workload: Workload, gradients: Sequence[Gradients]) -> None:
        self.rank, self.gradients = rank, gradients
        parameters: list[Tensor] = [p for part in gradients for p in part.parameters]
        self.optimizer = (SGD if workload.optimizer == "sgd" else Adam)(parameters, workload.lr)

    def zero(self) -> None:
        """Before a step."""
        for part in self.gradients:
            part.flat.zero_()

    def update(self, step: int) -> None:
        """After a step: all-reduce the gradients and update the weights."""
        for part in self.gradients:
            part.reduce(self.rank, step)
        self.descend(step)

    def descend(self, step: int) -> None:
        """Update the weights with the gradients as they are."""
        with self.rank.span(Label("update", step), "compute"):
            self.optimizer.step()

    def finish(self, step: int) -> None:
        """After the last step; P3's pipeline has batches left."""
