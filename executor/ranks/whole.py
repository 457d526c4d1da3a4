"""What a training has learned, whatever its ranks: weights and the optimizer's state by name.

A rank may train all weights, those of some layers (GNNPipe), or some columns of a weight (P3). Its
checkpoint says which (`Held.about`); `Joined` puts the parts of all ranks together, and
`Held.take` takes a rank's part of another plan's whole:

    weight.layers.1.weight   mean.layers.1.weight   square.layers.1.weight   steps.layers.1.weight

`Best` has the best weights of a training by its metric of validation, and stops it early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnnplan.executor.ranks.learner import Optimizer
from gnnplan.planner.vocabulary.errors import SpecError

WORKER, OPTIMIZER, BEST = "worker", "optimizer", "best"  # begin the names of a checkpoint's tensors


@dataclass(frozen=True)
class Held:
    """The part of a model that a rank trains.

    net: its weights by their names in the whole model. columns: which columns of the whole weight
    [., H] the rank has, of weights of which it has some only.
    """

    net: nn.Module
    columns: Mapping[str, range]
    optimizer: Optimizer
    best: Mapping[str, Tensor] = field(default_factory=dict)  # weights, by the same names

    def about(self) -> dict[str, Any]:
        """Which of a checkpoint's tensors these are, for its header.

        `weights`: name -> None, or first and last column. `optimizer`: the name of the weight that
        the optimizer counts as number 0, 1, .. `kinds`: of what it keeps of each. `best`: names.
        """
        name_of = {id(p): name for name, p in self.net.named_parameters()}
        cut = {name: [its.start, its.stop] for name, its in self.columns.items()}
        return {
            "weights": {name: cut.get(name) for name in self.net.state_dict()},
            "optimizer": [name_of[id(p)] for p in self.optimizer.parameters],
            "kinds": sorted({name.split(".")[0] for name in self.optimizer.state()}),
            "best": list(self.best),
        }

    def take(self, whole: Mapping[str, Tensor]) -> None:
        """Take the rank's part of the whole. Raises SpecError if it has other weights."""
        about, targets = self.about(), named(BEST, self.best)
        for name, weight in self.net.state_dict().items():
            targets[f"weight.{name}"] = weight
        for place, kept in self.optimizer.state().items():
            kind, number = place.split(".")
            targets[f"{kind}.{about['optimizer'][int(number)]}"] = kept
        fill(targets, {name: self._part_of(name, tensor) for name, tensor in whole.items()})

    def _part_of(self, name: str, tensor: Tensor) -> Tensor:
        its = self.columns.get(name.partition(".")[2])
        return tensor if its is None or tensor.dim() < 2 else tensor[:, its.start : its.stop]


class Joined:
    """The whole, put together of ranks' parts."""

    def __init__(self) -> None:
        self._parts: dict[str, dict[int, Tensor]] = {}  # name in the whole -> first column -> part

    def add(self, about: Mapping[str, Any], read: Callable[[str], Tensor]) -> None:
        """Add what a rank has saved, as far as no other has given the same.

        about: its `Held.about`. read: gives a tensor of its checkpoint by the name in it.
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
        """By name; parts of a weight side by side."""
        return {name: _side_by_side(parts) for name, parts in self._parts.items()}


def _side_by_side(parts: Mapping[int, Tensor]) -> Tensor:
    """The columns of a weight; a number that is kept of all of it is the same of every part."""
    first, *others = (part for _, part in sorted(parts.items()))
    return first if first.dim() < 2 else torch.cat([first, *others], 1)


def fill(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `state` into `targets`, by name; SpecError if types or shapes differ."""
    for name, target in targets.items():
        saved = state.get(name)
        if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
            there = "nothing" if saved is None else f"{saved.dtype} {list(saved.shape)}"
            raise SpecError(
                f"the checkpoint's {name} is {there}, this training's {target.dtype}"
                f" {list(target.shape)}: it is of another training; start anew with another --out"
            )
        with torch.no_grad():
            target.copy_(saved)


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the host; those that share memory, as tied weights do, become copies."""
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    of = {tensor.data_ptr(): name for name, tensor in kept.items()}
    return {n: t if of[t.data_ptr()] == n else t.clone() for n, t in kept.items()}


def named(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named `prefix.name`, as `name`: the inverse of `named`.

    >>> under("net", named("net", {"bias": torch.ones(1)}) | {"past.1": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{prefix}.")
    }


class Best:
    """A copy of a rank's best weights. All ranks are told the same scores, and decide alike.

    patience: epochs in which none is better that end a training. falls: less is better.
    """

    def __init__(self, weights: Mapping[str, Tensor], patience: int, falls: bool) -> None:
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self.patience, self.sign = patience, -1.0 if falls else 1.0
        self.epoch, self.last = 0, 0  # that left them, and that was seen last; 0: none
        self.score: float | None = None

    def see(self, epoch: int, score: float | None, weights: Mapping[str, Tensor]) -> None:
        """An epoch was evaluated."""
        self.last = epoch
        if score is not None and (self.score is None or self.sign * score > self.sign * self.score):
            self.epoch, self.score = epoch, score
            fill(self.weights, weights)

    @property
    def ends(self) -> bool:
        """Whether training has lasted long enough without a better score."""
        return self.last - self.epoch >= self.patience

    def notes(self) -> dict[str, Any]:
        """What a checkpoint keeps beside the weights, and a run of its end."""
        return {"epoch": self.epoch, "last": self.last, "score": self.score}

    def load(self, notes: Mapping[str, Any]) -> None:
        """Go on from the `notes` of another process."""
        self.epoch, self.last, self.score = notes["epoch"], notes["last"], notes["score"]
