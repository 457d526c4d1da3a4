"""Bytes that ranks hold while they go through their operations, and the fullest moment of each."""

from __future__ import annotations

import numpy as np

from gnnplan.planner.gnn.products import Product
from gnnplan.planner.vocabulary.numbers import Number

USES = ("features", "activations", "graph", "buffers")


class Held:
    """Bytes kept now, and those of each rank's fullest moment so far [uses, ranks].

    What is held at a moment without being kept counts as buffers. `handed_on` are bytes that an
    operation tells those after it: of rows that they free, or of a gradient that is there beside
    what they need. `products` are the matrix products done so far, each once: machine code is kept
    for their shapes.
    """

    def __init__(self, ranks: int) -> None:
        self.now, self.most = np.zeros((2, len(USES), ranks))
        self.handed_on: Number = 0.0
        self.leaving: Number = 0.0
        self.products: dict[Product, None] = {}
        self._most_in_all = np.zeros(ranks)

    def keep(self, *sizes: Number, use: str = "activations") -> None:
        for size in sizes:
            self.now[USES.index(use)] += size
        self.at()

    def free(self, *sizes: Number, use: str = "activations") -> None:
        for size in sizes:
            self.now[USES.index(use)] -= size

    def at(self, *sizes: Number) -> None:
        """A moment at which `sizes` are held besides what is kept."""
        buffers = sum(sizes, self.now[-1])
        in_all = np.add.reduce(self.now[:-1]) + buffers
        fuller = in_all > self._most_in_all
        np.copyto(self.most, self.now, where=fuller)
        np.copyto(self.most[-1], buffers, where=fuller)
        np.copyto(self._most_in_all, in_all, where=fuller)

    def leave(self, size: Number) -> None:
        """Something is sent while the rank goes on: its buffer stays until the next is sent.

        What was sent before it has left, because the lane sends one thing after the other.
        """
        self.free(self.leaving, use="buffers")
        self.leaving = size
        self.keep(size, use="buffers")

    def multiply(self, *products: Product) -> None:
        self.products.update(dict.fromkeys(products))

    def let_go(self) -> None:
        """A step ends of which nothing stays."""
        self.now[:] = 0.0
        self.handed_on = 0.0
