"""Gradients summed over ranks, and the update of the weights that follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.schedule import Label


class Optimizer:
    """The workload's optimizer of some parameters, by torch's functions.

    The classes of torch.optim compute the same, but the first one that is made imports torch's
    compiler, which costs every rank more than a second and 25 MB. Weights must equal those of
    torch.optim to the bit (tests/executor/test_optimizer.py).

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
