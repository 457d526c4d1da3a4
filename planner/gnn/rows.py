"""Storage of a layer's input rows: dense, or for sparse features as a CSR matrix of the nonzeros.

CSR stores the column of each number and the end of each row. The gradient of a product also needs
the transpose: the row and the position of each number, and the end of each column."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number

INDEX = 4  # size of an index [B]
# for messages: the reason why sparse rows are multiplied first, and a remedy
SPARSE = (
    "its features are sparse, so their rows are multiplied before anything is summed; save x dense"
    " (x.toarray()), and the graph with gnnplan convert, in whose folder it stays so"
)


@dataclass(frozen=True)
class RowFormat:
    """The storage format of rows of `width` columns."""

    width: int
    itemsize: int  # bytes per number [B]
    numbers: float  # stored numbers per row, on average
    index: int = 0  # size of an index [B]; 0: dense rows, without indices

    @classmethod
    def of(cls, width: int, itemsize: int, stored: float = 0.0) -> RowFormat:
        """Make the format of rows; stored: nonzeros per sparse row, on average; 0: dense rows."""
        return cls(width, itemsize, stored, INDEX) if stored else cls(width, itemsize, width)

    @property
    def multiplied_first(self) -> bool:
        """Whether a layer must multiply the rows before it aggregates, because they are sparse."""
        return self.index > 0

    @property
    def why_unsummed(self) -> str:
        """The reason why the rows cannot be aggregated as stored, with a remedy; '' if they can."""
        return SPARSE if self.multiplied_first else ""

    @property
    def is_dense(self) -> bool:
        """Whether all rows have the same number of bytes."""
        return not self.index

    @property
    def transit_bytes_per_number(self) -> int:
        """Bytes per stored number in transit [B]: an index takes at least as many as a number."""
        return self.itemsize + (max(self.itemsize, self.index) if self.index else 0)

    def transit_bytes(self, rows: Number) -> Number:
        """Return the bytes of average rows in transit [B]."""
        return rows * (self.numbers * self.transit_bytes_per_number)

    def cache_bytes(self, numbers: np.ndarray) -> np.ndarray:
        """Return the bytes of each row in a cache (without a transpose), by stored numbers [R]."""
        return numbers * (self.itemsize + self.index) + self.index

    def stored_bytes(self, rows: Number) -> Number:
        """Return the bytes of average rows in memory, with their transpose [B]."""
        ends = self.index * (rows + self.width)
        return rows * self.numbers * (self.itemsize + 3 * self.index) + ends

    def product_index_bytes(self, rows: Number) -> Number:
        """Return the bytes of the indices for a product of a subset of the rows [B]: the start of
        each row, and the transpose of the subset."""
        return rows * (2 * self.index * self.numbers + self.index) + self.index * self.width

    def of_columns(self, width: int) -> RowFormat:
        """Return the format of the rows restricted to `width` of their columns."""
        return replace(self, width=width, numbers=self.numbers * width / self.width)
