"""Products of rows with a matrix, and the number of shapes that oneDNN compiles code for."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

# Bytes per number -> numbers of a product's operands in a block of rows: the executor's backward
# pass multiplies block by block. Products of 2-byte numbers are so fast that small blocks are slow.
BLOCK = {2: 2_048_000, 4: 512_000, 8: 512_000}
# If row counts vary from step to step, the executor cuts rows into pieces of few sizes, so that
# oneDNN reuses its code: whole blocks, and LEAST rows times powers of two.
LEAST = 128
PIECES = 3  # typical number of piece sizes per product


def block_rows(h_in: int, h_out: int, itemsize: int) -> int:
    """Return the rows per block in the backward pass of a product [., h_in] -> [., h_out]."""
    return max(1000, BLOCK[itemsize] // (h_in + h_out))


class Product(NamedTuple):
    """A product of rows of h_in numbers with a matrix [h_in, h_out]."""

    h_in: int
    h_out: int
    varies: bool = True  # the rows get a gradient
    # Operations fused into the product ('bias', 'bias relu' or ''); oneDNN compiles code for each.
    after: tuple[str, ...] = ("bias",)


def shapes(
    products: Collection[Product], itemsize: int, pieces: float = 1, rows: float = np.inf
) -> float:
    """Estimate the number of product shapes that oneDNN compiles code for.

    pieces: sizes of pieces per product. rows: rows of a piece. The forward pass multiplies a piece
    at once; the backward pass goes in blocks, and the last block is smaller.

    >>> shapes([Product(64, 32, False)] * 2, 4), shapes([Product(64, 32)], 4, 3, rows=1000)
    (3, 9)
    """
    forward = {(p.h_in, p.h_out, after) for p in products for after in p.after}
    backward = {(p.h_in, p.h_out, of_rows) for p in products for of_rows in (False, p.varies)}
    blocks = sum(rows > block_rows(h_in, h_out, itemsize) for h_in, h_out, _ in backward)
    return pieces * (len(forward) + len(backward)) + blocks
