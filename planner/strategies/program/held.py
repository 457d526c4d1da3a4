"""Bytes that ranks hold while they go through their operations, and the fullest moment of each."""

from __future__ import annotations

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number

USES = ("features", "activations", "graph", "buffers")


class Held:
    """Bytes kept now, and those of each rank's fullest moment so far [uses, ranks].

    What is held at a moment without being kept counts as buffers.
    """

    def __init__(self, ranks: int) -> None:
        self.now, self.most = np.zeros((2, len(USES), ranks))

    def keep(self, *sizes: Number, use: str = "activations") -> None:
        for size in sizes:
            self.now[USES.index(use)] += size
        self.at()

    def free(self, *sizes: Number, use: str = "activations") -> None:
        for size in sizes:
            self.now[USES.index(use)] -= size

    def at(self, *sizes: Number) -> None:
        """A moment at which `sizes` are held besides what is kept."""
        moment = self.now.copy()
        moment[-1] += sum(sizes)
        np.copyto(self.most, moment, where=moment.sum(0) > self.most.sum(0))

    def let_go(self) -> None:
        """A step ends of which nothing stays."""
        self.now[:] = 0.0
