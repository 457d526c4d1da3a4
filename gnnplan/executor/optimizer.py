"""torch's SGD and Adam by their functions. The classes of torch.optim compute the same, but the first of them to be made imports torch's
compiler: more than a second and 25 MB for every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd


class SGD:
    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step."""
        return {}

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        sgd(self.parameters, gradients, [None] * len(gradients), weight_decay=0.0, momentum=0.0, lr=self.lr, dampening=0.0, nesterov=False,
            maximize=False)  # fmt: skip


class Adam:
    """With the betas and epsilon of Kingma and Ba (arXiv 1412.6980)."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.mean, self.square = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step: both moments of every parameter, and how many steps they are of."""
        each = zip(self.mean, self.square, self.steps, strict=True)
        return {f"{name}.{i}": p for i, of in enumerate(each) for name, p in zip(("mean", "square", "steps"), of, strict=True)}

    @torch.no_grad()
    def step(self) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        adam(self.parameters, gradients, self.mean, self.square, [], self.steps, fused=True, amsgrad=False, beta1=0.9, beta2=0.999,
             lr=self.lr, weight_decay=0.0, eps=1e-8, maximize=False)  # fmt: skip
