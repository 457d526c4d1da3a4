"""SGD and Adam with torch's own kernels. torch.optim computes the same numbers, but its first optimizer imports torch's compiler:
seconds and 25 MB for every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class SGD:
    """w <- w - lr dw."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr

    @torch.no_grad()
    def step(self) -> None:
        for p in self.parameters:
            assert p.grad is not None
            p.add_(p.grad, alpha=-self.lr)


class Adam:
    """Kingma and Ba (arXiv 1412.6980) Alg. 1, with its betas and epsilon."""

    def __init__(self, parameters: Iterable[Tensor], lr: float) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.mean, self.square = ([torch.zeros_like(p) for p in self.parameters] for _ in range(2))
        self.steps = [torch.zeros((), device=p.device) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        torch._foreach_add_(self.steps, 1)
        torch._fused_adam_(self.parameters, [p.grad for p in self.parameters], self.mean, self.square, [], self.steps, lr=self.lr,
                           beta1=0.9, beta2=0.999, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip
