"""Products of rows with a matrix, and how many shapes of them oneDNN makes code for."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

# Numbers of a product's operands that its backward pass reads at a time (the executor's products
# work block by block), by their bytes: where they take 2, a product is so fast that small blocks
# cost time.
BLOCK = {2: 2_048_000, 4: 512_000, 8: 512_000}
# Rows of the smallest piece that gets machine code of its own, where row counts vary from step to
# step: the executor cuts rows in whole blocks and powers of two of these.
LEAST = 128
PIECES = 3  # about as many sizes of pieces does a product then have


def block_rows(h_in: int, h_out: int, itemsize: int) -> int:
    """Rows that the backward pass of a product [., h_in] -> [., h_out] reads at a time."""
    return max(1000, BLOCK[itemsize] // (h_in + h_out))


class Product(NamedTuple):
    """A product of rows of h_in numbers with a matrix [h_in, h_out]."""

    h_in: int
    h_out: int
    varies: bool = True  # the rows get a gradient
    # What follows the product ('bias', 'bias relu', ''). oneDNN makes code for each separately.
    after: tuple[str, ...] = ("bias",)


def shapes(
    products: Collection[Product], itemsize: int, pieces: float = 1, rows: float = np.inf
) -> float:
    """About how many shapes of these get code of their own, for pieces of so many rows.

    Forward all rows of a piece go at once, and backward in blocks, of which the last is smaller.

    >>> shapes([Product(64, 32, False)] * 2, 4), shapes([Product(64, 32)], 4, 3, rows=1000)
    (3, 9)
    """
    forward = {(p.h_in, p.h_out, after) for p in products for after in p.after}
    backward = {(p.h_in, p.h_out, of_rows) for p in products for of_rows in (False, p.varies)}
    blocks = sum(rows > block_rows(h_in, h_out, itemsize) for h_in, h_out, _ in backward)
    return pieces * (len(forward) + len(backward)) + blocks
