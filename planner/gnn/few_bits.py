"""Rows in few bits per number: their bytes on the wire, and the work of packing and unpacking.

executor/layers/kernels/few_bits.py packs them, and says how. `bits` None: rows cross as they are.
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

BITS = (8, 4, 2)
PARAMETERS = 4  # bytes of a row's lowest number and spacing
AT_ONCE = 2**18  # numbers that a CPU packs or unpacks at a time, so that they stay in its cache
# Passes over tensors of a row's numbers: two extrema, difference, product, random numbers and their
# sum, a half; and codes as numbers, product, sum.
PACK, UNPACK = 13, 5
PICKED, ADDED = 2, 3  # rows that are picked for peers; gradients that are added to those of rows
PACK_LAUNCHES, UNPACK_LAUNCHES = 60, 12


def row_bytes(width: int, itemsize: int, bits: int | None) -> int:
    """Of a row of `width` numbers that crosses [B].

    >>> row_bytes(256, 4, None), row_bytes(256, 4, 2), row_bytes(7, 4, 4)
    (1024, 68, 8)
    """
    return width * itemsize if bits is None else -(-width * bits // 8) + PARAMETERS


def pack(rows: Number, width: int, itemsize: int, bits: int, picked: bool) -> Compute:
    """Work of packing so many rows; `picked` from among others."""
    each = 8 // bits
    # bytes per number: random words, codes in two bytes, those of several put together, one byte
    in_bytes = 2 + 2 + (6 * (each - 1) / each if each > 1 else 0) + 3 / each
    passes = PACK + PICKED * picked
    numbers = rows * width
    return Compute(
        elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
        launches=PACK_LAUNCHES,
        itemsize=itemsize,
        tensor_bytes=1.0 * itemsize * np.minimum(numbers, AT_ONCE),
        hash_ops=1.0 * numbers,
    )


def unpack(rows: Number, width: int, itemsize: int, added: bool) -> Compute:
    """Work of unpacking so many rows; `added`: to others.

    It goes by parts, too, but to memory that is in no cache.
    """
    in_bytes = 5  # shift, mask and copy read, the first two write
    passes = UNPACK + ADDED * added
    numbers = rows * width
    return Compute(
        elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
        launches=UNPACK_LAUNCHES,
        itemsize=itemsize,
        tensor_bytes=1.0 * itemsize * numbers,
    )


def room(numbers: Number, itemsize: int, device: str) -> Number:
    """Bytes that packing so many numbers needs besides what it reads and makes [B]."""
    at_once = np.minimum(numbers, AT_ONCE) if device == "cpu" else numbers
    return (3 * itemsize + 2) * at_once
