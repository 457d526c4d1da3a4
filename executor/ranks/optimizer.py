"""SGD, Adam and AdamW by torch's functions.

The classes of torch.optim compute the same, but the first one that is made imports torch's
compiler, which costs every rank more than a second and 25 MB. Weights must equal those of
torch.optim to the bit (tests/executor/test_optimizer.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gnnplan.planner.gnn.workload import Workload


class Optimizer(ABC):
    """Updates parameters with their gradients, and what it keeps of each of them.

    lr: may change from step to step.
    """

    def __init__(self, parameters: Iterable[Tensor], workload: Workload) -> None:
        self.parameters, self.lr, self.workload = list(parameters), workload.lr, workload
        self.kept: dict[str, list[Tensor]] = {}  # a tensor per parameter, by kind

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step, by kind and the parameter's number."""
        return {
            f"{kind}.{i}": tensors[i]
            for i in range(len(self.parameters))
            for kind, tensors in self.kept.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        self.descend([p.grad for p in self.parameters if p.grad is not None])

    @abstractmethod
    def descend(self, gradients: list[Tensor]) -> None:
        """Update the parameters."""


class SGD(Optimizer):
    """Stochastic gradient descent, with momentum where the workload has it."""

    def __init__(self, parameters: Iterable[Tensor], workload: Workload) -> None:
        super().__init__(parameters, workload)
        if workload.momentum:
            self.kept = {"momentum": [torch.zeros_like(p) for p in self.parameters]}

    def descend(self, gradients: list[Tensor]) -> None:
        sgd(
            self.parameters,
            gradients,
            [*self.kept.get("momentum", [None] * len(gradients))],
            weight_decay=self.workload.decay,
            momentum=self.workload.momentum,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Adam(Optimizer):
    """Adam (Kingma and Ba, arXiv 1412.6980), or AdamW, with torch's betas and epsilon."""

    def __init__(self, parameters: Iterable[Tensor], workload: Workload) -> None:
        super().__init__(parameters, workload)
        self.kept = {
            "mean": [torch.zeros_like(p) for p in self.parameters],
            "square": [torch.zeros_like(p) for p in self.parameters],
            "steps": [torch.zeros((), device=p.device) for p in self.parameters],
        }

    def descend(self, gradients: list[Tensor]) -> None:
        (adamw if self.workload.optimizer == "adamw" else adam)(
            self.parameters,
            gradients,
            self.kept["mean"],
            self.kept["square"],
            [],
            self.kept["steps"],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=self.workload.decay,
            eps=1e-8,
            maximize=False,
        )


def optimizer_of(parameters: Iterable[Tensor], workload: Workload) -> Optimizer:
    """The workload's optimizer of some parameters."""
    return (SGD if workload.optimizer == "sgd" else Adam)(parameters, workload)
