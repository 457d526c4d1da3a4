"""Gradients summed over ranks, and the update of the weights that they make."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from gnnplan.executor import comm
from gnnplan.executor.optimizer import SGD, Adam
from gnnplan.executor.worker import Rank
from gnnplan.planner.schedule import Label
from gnnplan.planner.specs import Workload


class Gradients:
    """One buffer behind the .grad of some parameters, summed over `group` at once. `layer`: in its label, where there are several."""

    def __init__(self, parameters: Iterable[nn.Parameter], group: tuple[int, ...], layer: int | None = None) -> None:
        self.parameters, self.group, self.layer = list(parameters), group, layer
        first = self.parameters[0] if self.parameters else torch.empty(0)  # none: a stage of layers that only aggregate
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters), dtype=first.dtype, device=first.device)
        offset = 0
        for p in self.parameters:
            p.grad = self.flat[offset : offset + p.numel()].as_strided(p.shape, p.stride())  # numbers in the order of p's in memory
            offset += p.numel()

    def reduce(self, rank: Rank, step: int) -> None:
        comm.all_reduce(rank, Label("all_reduce", step, layer=self.layer), self.flat, self.group)


class Learner:
    """Plain: what a step leaves in .grad is summed and used."""

    def __init__(self, rank: Rank, workload: Workload, gradients: Sequence[Gradients]) -> None:
        self.rank, self.gradients = rank, gradients
        parameters: list[Tensor] = [p for each in gradients for p in each.parameters]
        self.optimizer = (SGD if workload.optimizer == "sgd" else Adam)(parameters, workload.lr)

    def zero(self) -> None:
        for each in self.gradients:
            each.flat.zero_()

    def update(self, step: int) -> None:
        for each in self.gradients:
            each.reduce(self.rank, step)
        self.descend(step)

    def descend(self, step: int) -> None:
        with self.rank.span(Label("update", step), "compute"):
            self.optimizer.step()

    def finish(self, step: int) -> None:
        """After the last step."""
