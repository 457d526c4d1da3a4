"""Products of rows with a matrix, and the shapes for which oneDNN makes code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gnnplan.planner.gnn.amounts import Block

# Numbers of a product's operands that its backward pass reads at a time (the executor's products
# work block by block), by their bytes: where they take 2, a product is so fast that small blocks
# cost time.
BLOCK = {2: 2_048_000, 4: 512_000, 8: 512_000}
# Rows of the smallest piece that gets machine code of its own, where row counts vary from step to
# step.
LEAST = 128


def block_rows(h_in: int, h_out: int, itemsize: int) -> int:
    """Rows that the backward pass of a product [., h_in] -> [., h_out] reads at a time."""
    return max(1000, BLOCK[itemsize] // (h_in + h_out))


@dataclass(frozen=True, eq=False)
class Product:
    """A product of `rows` rows of h_in numbers with a matrix [h_in, h_out]."""

    rows: Any  # a Number; an Amount as long as no block is known
    h_in: int
    h_out: int
    varies: bool = True  # the rows get a gradient
    # What follows the product ('bias', 'bias relu', ''). oneDNN makes code for each separately.
    after: tuple[str, ...] = ("bias",)

    def on(self, block: Block) -> Product:
        return replace(self, rows=self.rows.on(block))

    def shapes(self, rows: int, itemsize: int, vary: bool = False) -> Iterator[tuple[object, ...]]:
        """Shapes of all products of one rank, forward and backward, of numbers of so many bytes.

        vary: row counts differ from step to step, so the executor cuts rows in pieces of few
        sizes: whole blocks, and powers of two of LEAST rows."""
        if not rows:
            return
        block = block_rows(self.h_in, self.h_out, itemsize)
        if vary:
            left = (rows % block) // LEAST
            powers = [LEAST << bit for bit in range(left.bit_length()) if left >> bit & 1]
            for piece in [block] * (rows >= block) + powers:
                yield from self._forward_shapes(piece)
                yield from self._backward_shapes(piece)
            return
        yield from self._forward_shapes(rows)
        blocks = {rows}
        if rows > block:
            blocks = {block, rows % block or block}
        for piece in blocks:
            yield from self._backward_shapes(piece)

    def _forward_shapes(self, rows: int) -> Iterator[tuple[object, ...]]:
        yield from ((rows, self.h_in, self.h_out, after) for after in self.after)

    def _backward_shapes(self, rows: int) -> Iterator[tuple[object, ...]]:
        yield self.h_out, rows, self.h_in, "weight"
        if self.varies:
            yield rows, self.h_out, self.h_in, ""


def distinct(
    products: Iterable[Product], ranks: int, itemsize: int, vary: bool = False
) -> np.ndarray:
    """How many different shapes the products have, on each rank [ranks].

    A product's rows are [ranks], or [pieces, ranks] where it is done piece by piece."""
    shapes_by_rank: list[set[tuple[object, ...]]] = [set() for _ in range(ranks)]
    for product in products:
        for piece in np.reshape(np.ceil(product.rows), (-1, ranks)):
            for shapes, rows in zip(shapes_by_rank, piece, strict=True):
                shapes.update(product.shapes(int(rows), itemsize, vary))
    return np.array([len(shapes) for shapes in shapes_by_rank])
