"""All-reduce of gradients over ranks, update of the weights, and the whole model's state by name.

A rank may train all weights, the weights of some layers (GNNPipe), or some columns of a weight
(P3): its `ModelPart`, whose tensors a checkpoint keeps under their names in the whole model,
independent of how ranks share them:

    worker.layers.1.weight   mean.layers.1.weight   square.layers.1.weight   best.layers.1.weight

`Best` keeps the best weights of a training by the validation metric, and decides on early stopping.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Label


class Optimizer:
    """The workload's optimizer, by the functions behind torch.optim's classes.

    The first object of a torch.optim class imports torch's compiler, which costs every rank more
    than a second and 25 MB. Weights equal those of torch.optim to the bit
    (tests/executor/test_models.py).

    It is SGD, with the workload's momentum if any; Adam (Kingma and Ba, arXiv 1412.6980) with
    torch's betas and epsilon; or AdamW. lr: the caller may change it from step to step. kept:
    kind ('momentum', 'mean', 'square', 'steps') -> one tensor per parameter.
    """

    def __init__(self, parameters: Iterable[Tensor], workload: Workload) -> None:
        self.parameters, self.lr, self.workload = list(parameters), workload.lr, workload
        self.is_sgd = workload.optimizer == "sgd"
        kinds = ["momentum"] * bool(workload.momentum) if self.is_sgd else ["mean", "square"]
        self.kept = {kind: [torch.zeros_like(p) for p in self.parameters] for kind in kinds}
        if not self.is_sgd:
            self.kept["steps"] = [torch.zeros((), device=p.device) for p in self.parameters]

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters with their gradients."""
        workload = self.workload
        gradients = _by_row(p.grad for p in self.parameters if p.grad is not None)
        parameters = _by_row(self.parameters)
        kept = {kind: _by_row(tensors) for kind, tensors in self.kept.items()}
        if self.is_sgd:
            sgd(
                parameters,
                gradients,
                [*kept.get("momentum", [None] * len(gradients))],
                weight_decay=workload.decay,
                momentum=workload.momentum,
                lr=self.lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
            return
        (adamw if workload.optimizer == "adamw" else adam)(
            parameters,
            gradients,
            kept["mean"],
            kept["square"],
            [],
            kept["steps"],
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=self.lr,
            weight_decay=workload.decay,
            eps=1e-8,
            maximize=False,
        )


def _by_row(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors with views of those that are stored by column, as a weight of compressed
    features is: torch's fused kernels copy these, which takes twice the time."""
    return [t.t() if t.dim() == 2 and not t.is_contiguous() else t for t in tensors]


class Gradients:
    """One flat buffer behind the .grad of some parameters, for one all-reduce over `group`.

    layer: for the all-reduce's label, if a step has several. after: the layer whose backward pass
    completes these gradients (0: the encoder); None: they are all-reduced at the end of a step.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        group: Group,
        layer: int | None = None,
        after: int | None = None,
    ) -> None:
        self.parameters, self.group, self.layer = list(parameters), group, layer
        self.after = after
        # a pipeline stage whose layers only aggregate has no parameters
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
        """All-reduce the gradients over the group."""
        comm.all_reduce(rank, self.label(step), self.flat, self.group)

    def label(self, step: int) -> Label:
        """Return the label of the all-reduce of a step."""
        return Label("all_reduce", step, layer=self.layer)


class Learner:
    """All-reduces the gradients that a step adds to .grad, then runs the optimizer."""

    def __init__(self, rank: Rank, workload: Workload, gradients: Sequence[Gradients]) -> None:
        self.rank, self.gradients = rank, gradients
        self.pending: list[Future[None]] = []  # all-reduces of this step
        parameters: list[Tensor] = [p for part in gradients for p in part.parameters]
        self.optimizer, self.clip = Optimizer(parameters, workload), workload.clip

    def zero(self) -> None:
        """Zero the gradients before a step."""
        for part in self.gradients:
            part.flat.zero_()

    def complete(self, step: int, layer: int) -> None:
        """Start the all-reduces that a layer's backward pass (0: the encoder's) has completed.

        Until the update, other all-reduces must use `comm.begin_all_reduce`, to keep their order.
        """
        for part in self.gradients:
            if part.after == layer:
                reduced = comm.begin_all_reduce(self.rank, part.label(step), part.flat, part.group)
                self.pending.append(reduced)

    def update(self, step: int) -> None:
        """All-reduce the gradients of a step and update the weights."""
        for part in self.gradients:
            if part.after is None:
                part.reduce(self.rank, step)
        for future in self.pending:
            future.result()
        self.pending.clear()
        self.apply_gradients(step)

    def apply_gradients(self, step: int) -> None:
        """Update the weights with the gradients, which are already all-reduced."""
        with self.rank.recorder.span(Label("update", step), "compute"):
            if self.clip is not None:
                self._clip(self.clip)
            self.optimizer.step()

    def _clip(self, max_norm: float) -> None:
        """Clip the norm of the whole model's gradient, as torch.nn.utils.clip_grad_norm_ does.

        A gradient that several ranks hold counts once. If all ranks hold all gradients, each rank
        computes the norm without communication.
        """
        rank, parts = self.rank, self.gradients
        replicated = all(len(part.group) == rank.world for part in parts)
        # float64: a pipeline stage without parameters has no type of its own
        squares = torch.zeros((), dtype=torch.float64, device=rank.device)
        for part in parts:
            if (replicated or part.group[0] == rank.rank) and part.parameters:
                squares += torch.linalg.vector_norm(part.flat, dtype=torch.float64).square()
        if not replicated:
            squares = comm.total(rank, squares)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for part in parts:
            part.flat.mul_(factor)

    def finish(self, step: int) -> None:
        """Finish training after the last step, for learners with pending batches (P3)."""


WORKER, BEST = "worker", "best"  # prefixes of names in a checkpoint


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank trains.

    weights, best: the weights, and the best so far, by their names in the whole model. columns:
    name of a weight [., H] that the rank has only in part -> the columns that it has.
    """

    weights: Mapping[str, Tensor]
    columns: Mapping[str, range]
    optimizer: Optimizer
    best: Mapping[str, Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Return weights, optimizer state and best weights by their names in the whole model."""
        name_of = {id(weight): name for name, weight in reversed([*self.weights.items()])}
        names = [name_of[id(parameter)] for parameter in self.optimizer.parameters]
        kept = {
            f"{kind}.{name}": tensor
            for kind, tensors in self.optimizer.kept.items()
            for name, tensor in zip(names, tensors, strict=True)
        }
        return named(WORKER, self.weights) | kept | named(BEST, self.best)

    def first_columns(self) -> dict[str, int]:
        """Return the column of the whole tensor at which the rank's begins, by name."""
        cut = {name: columns.start for name, columns in self.columns.items()}
        return {name: cut.get(name.partition(".")[2], 0) for name in self.tensors()}

    def take(self, whole: Mapping[str, Tensor]) -> None:
        """Load the rank's part of the whole model. Raises SpecError if its weights differ."""
        own = dict(whole)
        for name, tensor in whole.items():
            cut = self.columns.get(name.partition(".")[2])
            if cut is not None and tensor.dim() > 1:  # a step count has no columns
                own[name] = tensor[:, cut.start : cut.stop]
        fill(self.tensors(), own)


def side_by_side(parts: Mapping[int, Tensor]) -> Tensor:
    """Join a tensor's parts by their first columns; a step count is the same in every part."""
    first, *rest = (part for _, part in sorted(parts.items()))
    return first if first.dim() < 2 else torch.cat([first, *rest], 1)


def fill(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy `state` into `targets` by name. Raises SpecError if a type or shape differs."""
    for name, target in targets.items():
        saved = state.get(name)
        if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
            stored = "nothing" if saved is None else f"{saved.dtype} {list(saved.shape)}"
            raise SpecError(
                f"the checkpoint's {name} is {stored}, this training's {target.dtype}"
                f" {list(target.shape)}: it is of another training; start anew with another --out"
            )
        with torch.no_grad():
            target.copy_(saved)


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the host; copy tensors that share memory, as tied weights do."""
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    owner = {tensor.data_ptr(): name for name, tensor in on_host.items()}
    return {n: t if owner[t.data_ptr()] == n else t.clone() for n, t in on_host.items()}


def named(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors renamed to `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors named `prefix.name`, renamed to `name`: the inverse of `named`.

    >>> under("net", named("net", {"bias": torch.ones(1)}) | {"past.1": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{prefix}.")
    }


class Best:
    """A copy of a rank's best weights. All ranks see the same scores, so they decide alike.

    patience: epochs without a better score that end a training. falls: lower scores are better.
    """

    def __init__(self, weights: Mapping[str, Tensor], patience: int, falls: bool) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self.patience, self.sign = patience, -1.0 if falls else 1.0
        # epochs of the best weights and of the last score (0: none), and the best score; a
        # checkpoint and a run's summary keep them
        self.notes: Json = {"epoch": 0, "last": 0, "score": None}

    def see(self, epoch: int, score: float | None, weights: Mapping[str, Tensor]) -> None:
        """Record the score of an epoch, and copy its weights if they are the best."""
        self.notes["last"], best = epoch, self.notes["score"]
        if score is not None and (best is None or self.sign * score > self.sign * best):
            self.notes |= {"epoch": epoch, "score": score}
            fill(self.weights, weights)

    @property
    def epoch(self) -> int:
        """The epoch of the best weights, 0 without."""
        return int(self.notes["epoch"])

    @property
    def ends(self) -> bool:
        """Whether `patience` epochs have passed without a better score."""
        return is_over(self.notes, self.patience)


def is_over(best: Json, patience: int) -> bool:
    """Whether `patience` epochs have passed without a better score, by `Best.notes`."""
    return bool(best["last"] - best["epoch"] >= patience)
