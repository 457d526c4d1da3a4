"""Rows in few bits per number: their bytes on the wire, and the work of packing and unpacking.

executor/layers/kernels/few_bits.py packs them, and says how; and ADAPTIVE rows, of 8, 4 or 2 bits
each, in the bytes of 4. `bits` None: rows cross as they are.
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

BITS = (8, 4, 2)
ADAPTIVE = "adaptive"  # as `bits`: of each row its own, 4 on average
PARAMETERS = 4  # bytes of a row's lowest number and spacing
AT_ONCE = 2**18  # numbers that a CPU packs or unpacks at a time, so that they stay in its cache
# Passes over tensors of a row's numbers: two extrema, difference, product, random numbers and their
# sum, a half; and codes as numbers, product, sum.
PACK, UNPACK = 13, 5
PICKED, ADDED = 2, 3  # rows that are picked for peers; gradients that are added to those of rows
PACK_LAUNCHES, UNPACK_LAUNCHES = 60, 12
# Adaptive rows are packed kind by kind. Their codes are cleared, padded and put into their places,
# and fetched from there, half a byte per number; the rows of a kind then go to theirs.
PLACED, FETCHED, SORTED = 2.5, 2, 2
PLACES = 25  # [B] of an adaptive row's bits, and where its planes are


def row_bytes(width: int, itemsize: int, bits: int | str | None) -> int:
    """Of a row of `width` numbers that crosses [B].

    >>> row_bytes(256, 4, None), row_bytes(256, 4, 2), row_bytes(7, 4, 4)
    (1024, 68, 8)
    >>> row_bytes(7, 4, "adaptive")  # two planes of 2 bits
    8
    """
    if bits is None:
        return width * itemsize
    numbers = -(-width // 4) * 4 if bits == ADAPTIVE else width
    return -(-numbers * on_average(bits) // 8) + PARAMETERS


def on_average(bits: int | str) -> int:
    """Bits of a number that crosses."""
    return 4 if bits == ADAPTIVE else int(bits)


def pack(rows: Number, width: int, itemsize: int, bits: int | str, picked: bool) -> Compute:
    """Work of packing so many rows; `picked` from among others."""
    each, adaptive = 8 // on_average(bits), bits == ADAPTIVE
    # bytes per number: random words, codes in two bytes, those of several put together, one byte
    in_bytes = 2 + 2 + (6 * (each - 1) / each if each > 1 else 0) + 3 / each
    in_bytes += PLACED * adaptive
    passes = PACK + PICKED * (picked or adaptive)
    numbers = rows * width
    return Compute(
        elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
        launches=PACK_LAUNCHES * (len(BITS) if adaptive else 1),
        itemsize=itemsize,
        hash_ops=1.0 * numbers,
    )


def unpack(rows: Number, width: int, itemsize: int, bits: int | str, added: bool) -> Compute:
    """Work of unpacking so many rows; `added`: to others.

    It goes by parts, too, but to memory that is in no cache.
    """
    adaptive = bits == ADAPTIVE
    in_bytes = 5 + FETCHED * adaptive  # shift, mask and copy read, the first two write
    passes = UNPACK + ADDED * added + SORTED * adaptive
    numbers = rows * width
    return Compute(
        elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
        launches=UNPACK_LAUNCHES * (len(BITS) if adaptive else 1),
        itemsize=itemsize,
    )


def room(numbers: Number, itemsize: int, device: str) -> Number:
    """Bytes that packing so many numbers needs besides what it reads and makes [B]."""
    at_once = np.minimum(numbers, AT_ONCE) if device == "cpu" else numbers
    return (3 * itemsize + 2) * at_once
