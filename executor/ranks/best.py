"""The best weights of a training by its metric of validation, and early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gnnplan.executor.ranks.whole import fill


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
