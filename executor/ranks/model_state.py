"""The whole model's weights and optimizer state by name, independent of how ranks share them.

A rank may train all weights, the weights of some layers (GNNPipe), or some columns of a weight
(P3): its `ModelPart`, whose tensors a checkpoint keeps under their names in the whole model:

    worker.layers.1.weight   mean.layers.1.weight   square.layers.1.weight   best.layers.1.weight

`Best` keeps the best weights of a training by the validation metric, and decides on early stopping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gnnplan.executor.ranks.learner import Optimizer
from gnnplan.planner.vocabulary.errors import SpecError

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
        fill(self.tensors(), {name: self._part_of(name, tensor) for name, tensor in whole.items()})

    def _part_of(self, name: str, tensor: Tensor) -> Tensor:
        cut = self.columns.get(name.partition(".")[2])
        return tensor if cut is None or tensor.dim() < 2 else tensor[:, cut.start : cut.stop]


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
        self.epoch, self.last = 0, 0  # of the best weights, and of the last score; 0: none
        self.score: float | None = None

    def see(self, epoch: int, score: float | None, weights: Mapping[str, Tensor]) -> None:
        """Record the score of an epoch, and copy its weights if they are the best."""
        self.last = epoch
        if score is not None and (self.score is None or self.sign * score > self.sign * self.score):
            self.epoch, self.score = epoch, score
            fill(self.weights, weights)

    @property
    def ends(self) -> bool:
        """Whether `patience` epochs have passed without a better score."""
        return self.last - self.epoch >= self.patience

    def notes(self) -> dict[str, Any]:
        """Return the numbers that a checkpoint and a run's summary keep beside the weights."""
        return {"epoch": self.epoch, "last": self.last, "score": self.score}

    def load(self, notes: Mapping[str, Any]) -> None:
        """Resume from the `notes` of another process."""
        self.epoch, self.last, self.score = notes["epoch"], notes["last"], notes["score"]
