"""SGD and Adam by torch's functions.

The classes of torch.optim compute the same, but the first one that is made imports torch's
compiler, which costs every rank more than a second and 25 MB. Weights must equal those of
torch.optim to the bit (tests/executor/test_optimizer.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd


class SGD:
    """Stochastic gradient descent, without momentum."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step, by name: nothing."""
        return {}

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sgd(
            self.parameters,
            gradients,
            [None] * len(gradients),
            weight_decay=0.0,
            momentum=0.0,
            lr=self.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )


class Adam:
    """Adam with the betas and epsilon of Kingma and Ba (arXiv 1412.6980)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.mean = [torch.zeros_like(p) for p in self.parameters]
        self.square = [torch.zeros_like(p) for p in self.parameters]
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step: both moments of every parameter, and the step."""
        lists = {"mean": self.mean, "square": self.square, "steps": self.steps}
        return {
            f"{name}.{i}": tensors[i]
            for i in range(len(self.parameters))
            for name, tensors in lists.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        adam(
            self.parameters,
            gradients,
            self.mean,
            self.square,
            [],
            self.steps,
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=0.0,
            eps=1e-8,
            maximize=False,
        )
