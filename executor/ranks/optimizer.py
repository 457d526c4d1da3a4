"""SGD, Adam and AdamW by torch's functions.

The classes of torch.optim compute the same, but the first one that is made imports torch's
compiler, which costs every rank more than a second and 25 MB. Weights must equal those of
torch.optim to the bit (tests/executor/test_optimizer.py)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gnnplan.planner.gnn.workload import Workload


class Optimizer:
    """The workload's optimizer of some parameters.

    It is SGD, with momentum where the workload has it; Adam (Kingma and Ba, arXiv 1412.6980) with
    torch's betas and epsilon; or AdamW. lr: may change from step to step. kept: by kind, a tensor
    per parameter.
    """

    def __init__(self, parameters: Iterable[Tensor], workload: Workload) -> None:
        self.parameters, self.lr, self.workload = list(parameters), workload.lr, workload
        self.is_sgd = workload.optimizer == "sgd"
        kinds = ["momentum"] * bool(workload.momentum) if self.is_sgd else ["mean", "square"]
        self.kept = {kind: [torch.zeros_like(p) for p in self.parameters] for kind in kinds}
        if not self.is_sgd:
            self.kept["steps"] = [torch.zeros((), device=p.device) for p in self.parameters]

    def state(self) -> dict[str, Tensor]:
        """What it carries from step to step, by kind and the parameter's number."""
        return {
            f"{kind}.{i}": tensors[i]
            for i in range(len(self.parameters))
            for kind, tensors in self.kept.items()
        }

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters with their gradients."""
        gradients, workload = [p.grad for p in self.parameters if p.grad is not None], self.workload
        if self.is_sgd:
            sgd(
                self.parameters,
                gradients,
                [*self.kept.get("momentum", [None] * len(gradients))],
                weight_decay=workload.decay,
                momentum=workload.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        (adamw if workload.optimizer == "adamw" else adam)(
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
            weight_decay=workload.decay,
            eps=1e-8,
            maximize=False,
        )
