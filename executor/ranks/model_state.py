"""The whole model's weights and optimizer state by name, independent of how ranks share them.

A rank may train all weights, the weights of some layers (GNNPipe), or some columns of a weight
(P3). Its checkpoint says which (`ModelPart.about`). `Joined` joins the parts of all ranks, and
`ModelPart.take` loads a rank's part from the whole model of another plan. Names in the whole model:

    weight.layers.1.weight   mean.layers.1.weight   square.layers.1.weight   steps.layers.1.weight

`Best` keeps the best weights of a training by the validation metric, and decides on early stopping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.executor.ranks.learner import Optimizer
from gnnplan.planner.vocabulary.errors import SpecError

WORKER, OPTIMIZER, BEST = "worker", "optimizer", "best"  # prefixes of names in a checkpoint


@dataclass(frozen=True)
class ModelPart:
    """The part of a model that a rank trains.

    net: weights by their names in the whole model. columns: name of a weight [., H] that the rank
    has only in part -> the columns that it has.
    """

    net: nn.Module
    columns: Mapping[str, range]
    optimizer: Optimizer
    best: Mapping[str, Tensor] = field(default_factory=dict)  # weights, by the same names

    def about(self) -> dict[str, Any]:
        """Describe this part, for the header of a checkpoint.

        weights: name -> None (whole), or first column and end. optimizer: names of the weights, in
        the optimizer's order. kinds: of the optimizer's buffers. best: names of best weights.
        """
        name_of = {id(p): name for name, p in self.net.named_parameters()}
        cut = {name: [columns.start, columns.stop] for name, columns in self.columns.items()}
        return {
            "weights": {name: cut.get(name) for name in self.net.state_dict()},
            "optimizer": [name_of[id(p)] for p in self.optimizer.parameters],
            "kinds": sorted({name.split(".")[0] for name in self.optimizer.state()}),
            "best": list(self.best),
        }

    def take(self, whole: Mapping[str, Tensor]) -> None:
        """Load the rank's part of the whole model. Raises SpecError if its weights differ."""
        about, targets = self.about(), named(BEST, self.best)
        for name, weight in self.net.state_dict().items():
            targets[f"weight.{name}"] = weight
        for place, kept in self.optimizer.state().items():
            kind, number = place.split(".")
            targets[f"{kind}.{about['optimizer'][int(number)]}"] = kept
        fill(targets, {name: self._part_of(name, tensor) for name, tensor in whole.items()})

    def _part_of(self, name: str, tensor: Tensor) -> Tensor:
        cut = self.columns.get(name.partition(".")[2])
        return tensor if cut is None or tensor.dim() < 2 else tensor[:, cut.start : cut.stop]


class Joined:
    """The whole model, joined from the parts of ranks."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, Tensor]] = {}  # name in the whole -> first column -> part

    def add(self, about: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
        """Add a rank's tensors, unless an earlier rank has added the same part.

        about: the rank's `ModelPart.about`. read: returns a tensor of its checkpoint by name.
        """
        saved = {f"weight.{name}": (f"{WORKER}.{name}", name) for name in about["weights"]}
        saved |= {f"{BEST}.{name}": (f"{BEST}.{name}", name) for name in about.get("best", ())}
        for number, name in enumerate(about["optimizer"]):
            for kind in about["kinds"]:
                saved[f"{kind}.{name}"] = f"{OPTIMIZER}.{kind}.{number}", name
        for name, (tensor, weight) in saved.items():
            start = (about["weights"][weight] or [0])[0]
            parts = self._parts.setdefault(name, {})
            if start not in parts:
                parts[start] = read(tensor)

    def tensors(self) -> dict[str, Tensor]:
        """Return the whole tensors by name; the columns of a weight are concatenated."""
        return {name: _side_by_side(parts) for name, parts in self._parts.items()}


def _side_by_side(parts: Mapping[int, Tensor]) -> Tensor:
    """Concatenate parts by columns; a scalar (the step count) is the same in every part."""
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
