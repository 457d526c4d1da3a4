"""How a layer's input rows are stored: all numbers of them; or of features that are sparse, as CSR,
those that are not zero.

What is stored then has indices: the column of a number, and where a row ends. A product's gradient
needs the transpose beside them: of each number its row and its place, and where a column ends."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number

INDEX = 4  # [B]
# why nothing is done to rows before they are multiplied
SPARSE = (
    "its features are sparse, so their rows are multiplied before anything is summed; save x dense"
    " (x.toarray()), and the graph with gnnplan convert, in whose folder it stays so"
)


@dataclass(frozen=True)
class Rows:
    """Rows of `width` columns, of which `numbers` are stored on average."""

    width: int
    itemsize: int  # [B] of a number
    numbers: float
    index: int = 0  # [B]; 0: all numbers are stored, and none needs an index

    @classmethod
    def of(cls, width: int, itemsize: int, stored: float = 0.0) -> Rows:
        """stored: numbers of a sparse row, on average; 0: the rows are dense."""
        return cls(width, itemsize, stored, INDEX) if stored else cls(width, itemsize, width)

    @property
    def multiplied_first(self) -> bool:
        """Whether a layer can only multiply them, and adds up products along edges."""
        return self.index > 0

    @property
    def why_unsummed(self) -> str:
        """Why rows themselves are not added up along edges, with a remedy; '' if they may be."""
        return SPARSE if self.multiplied_first else ""

    @property
    def alike(self) -> bool:
        """Whether they have equally many bytes."""
        return not self.index

    @property
    def number_moved(self) -> int:
        """Bytes of a number in transit [B]: an index is as wide as the number there, at least."""
        return self.itemsize + (max(self.itemsize, self.index) if self.index else 0)

    def moved(self, rows: Number) -> Number:
        """Bytes of some rows in transit [B]."""
        return rows * (self.numbers * self.number_moved)

    def cached(self, numbers: np.ndarray) -> np.ndarray:
        """Bytes of each row in a cache, where nothing multiplies it; of so many numbers [R]."""
        return numbers * (self.itemsize + self.index) + self.index

    def held(self, rows: Number) -> Number:
        """Bytes of some rows in memory, with their transpose [B]."""
        ends = self.index * (rows + self.width)
        return rows * self.numbers * (self.itemsize + 3 * self.index) + ends

    def sorted(self, rows: Number) -> Number:
        """Bytes of indices to multiply some of the rows alone [B]: where each of them begins, and
        the transpose of these rows."""
        return rows * (2 * self.index * self.numbers + self.index) + self.index * self.width

    def of_columns(self, width: int) -> Rows:
        """The same rows with so many of their columns."""
        return replace(self, width=width, numbers=self.numbers * width / self.width)
