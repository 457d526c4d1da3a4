"""Rows: the storage of a layer's input rows, and the encoding of rows that ranks send."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Number, Precision
from gnnplan.planner.vocabulary.schedule import Compute

# -- storage ---------------------------------------------------------------------------------------

# Storage of a layer's input rows: dense, or for sparse features as a CSR matrix of the nonzeros.
#
# CSR stores the column of each number and the end of each row. The gradient of a product also needs
# the transpose: the row and the position of each number, and the end of each column.


INDEX = 4  # size of an index in our own structures [B]
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


# -- encoding --------------------------------------------------------------------------------------

# A codec: the encoding of rows and row gradients that ranks send to each other between layers.
#
#     whole     compute  |forward 1|        |forward 2|
#               comm               |halo f 2|
#
#     bits 2    compute  |forward 1|pack f 2|        |unpack f 2|forward 2|
#               comm                        |halo f 2|
#
# Ranks send rows whole, or quantized ("packed"). The reader of whole rows may use a moving average
# over steps (PipeGCN's smoothing). Packed rows have 8, 4 or 2 bits per number, a strategy's knob
# `bits` (AdaQP): a row of d numbers takes ceil(d bits / 8) + 4 bytes. Stochastic rounding maps
# every number to one of 2^bits levels between the row's minimum and maximum, so that the expected
# value is the number itself (executor/layers/kernels/few_bits.py). Both passes quantize.
# Evaluation, all-reduces, and the rows at the ends of pairs (link prediction) are not quantized.
# The random numbers are a hash of (seed, step, layer, direction, vertex, column): a row is rounded
# alike on any number of ranks, and in a resumed run.
#
# A layer's sum over neighbours is unbiased; the results of ReLU and of the loss are not. The error
# of a number is at most one of the row's 2^bits - 1 spacings, which is large for 2 bits.
#
# With bits='adaptive' each row has 8, 4 or 2 bits, and rows have 4 bits on average: 2 ceil(d / 4) +
# 4 bytes per row. Sender and receiver choose the same bits from the ranges of the rows sent before.
#
# Source: Wan et al., AdaQP (MLSys 2023), Sec. 3.1 and 3.2. AdaQP itself chooses bits by a program
# that weighs variance against seconds, so its bytes depend on ranges, and it overlaps the exchange
# with the computation of rows whose neighbours are all local.


BITS = (8, 4, 2)
ADAPTIVE = "adaptive"  # value of `bits` for a number of bits per row, 4 on average
PARAMETERS = 4  # bytes of a row's minimum and spacing [B]
AT_ONCE = 2**18  # numbers that a CPU packs or unpacks at a time, so that they stay in its cache
# Passes over the numbers of packed rows. PACK_PASSES: two extrema, difference, product, random
# numbers and their sum, a half. UNPACK_PASSES: codes to numbers, product, sum. CODE_BYTES: packing
# also writes and reads random words, and a number's code until several are combined in a byte [B].
PACK_PASSES, UNPACK_PASSES, CODE_BYTES = 13, 5, 8.5
# Passes to gather rows for peers, and to add received gradients to rows.
GATHER_PASSES, ADD_PASSES = 2, 3
PACK_CALLS, UNPACK_CALLS = 60, 12
# Bytes per number (PLACED, FETCHED) and passes (SORTED) of adaptive rows, packed bit width by bit
# width: codes (half a byte per number) are cleared, padded and scattered to their positions, later
# gathered from there, and the unpacked rows of a bit width are scattered to their positions.
PLACED, FETCHED, SORTED = 2.5, 2, 2
PLACES = 25  # bytes of an adaptive row's bits, and of the positions of its bit planes [B]


@dataclass(frozen=True)
class Codec:
    """The encoding of rows that a rank sends.

    bits: bits per number, 8, 4 or 2; 'adaptive': a number of bits per row; None: whole rows.
    smoothing: the reader averages rows ('f'), gradients ('g') or both ('gf') over steps; `gamma` is
    the weight of the average of earlier steps.
    """

    bits: int | str | None = None
    smoothing: str = ""
    gamma: float = 0.0

    @property
    def packs(self) -> bool:
        """Whether rows are quantized to few bits per number."""
        return self.bits is not None

    @property
    def adapts(self) -> bool:
        """Whether each row has its own number of bits."""
        return self.bits == ADAPTIVE

    @property
    def on_average(self) -> int:
        """Bits per packed number, on average; 0 for whole rows."""
        return 4 if self.adapts else int(self.bits or 0)

    @property
    def averaged(self) -> str:
        """The directions that are smoothed: forward ('f'), backward ('b')."""
        return self.smoothing.replace("g", "b")

    @property
    def carries(self) -> str:
        """The state that sender and receiver carry from step to step, in words; '' for none."""
        return "each row's bits" if self.adapts else ""

    def check(self, name: str, precision: Precision, adapts: bool) -> None:
        """Raise SpecError if the strategy `name` cannot send rows of this precision in this codec.

        adapts: whether the strategy supports a number of bits per row.
        """
        if self.packs and precision.rounds_rows:
            raise SpecError(
                f"{name}: bits quantizes unrounded rows only (bits: {self.bits!r}, dtype:"
                f" {precision.name}); leave bits out, or use --dtype float32"
            )
        if self.adapts and not adapts:
            raise SpecError(
                f"{name}: only graph_parallel and pipegcn give each row bits of its own (bits:"
                f" {self.bits!r}); use bits=4, or graph_parallel(bits={self.bits!r})"
            )
        if self.packs and self.bits not in (*BITS, ADAPTIVE):
            raise SpecError(
                f"{name}: bits per number of a row that ranks send are 8, 4 or 2, 'adaptive', or"
                f" None for unrounded rows (bits: {self.bits}); use bits=2"
            )
        if self.packs and self.smoothing:
            raise SpecError(
                f"{name}: a moving average needs unrounded rows, and bits rounds them"
                f" (smoothing: {self.smoothing!r}, bits: {self.bits}); use"
                f" pipegcn(bits={self.bits!r}) or {name}"
            )
        if self.smoothing and precision.rounds_rows:
            raise SpecError(
                f"{name}: {precision.coarseness} are too few for a moving average (smoothing:"
                f" {self.smoothing!r}, dtype: {precision.name}); use pipegcn, or --dtype float32"
            )

    def row_bytes(self, width: int, itemsize: int) -> int:
        """Return the bytes of an encoded row of `width` numbers [B].

        >>> Codec().row_bytes(256, 4), Codec(2).row_bytes(256, 4), Codec(4).row_bytes(7, 4)
        (1024, 68, 8)
        >>> Codec("adaptive").row_bytes(7, 4)  # two planes of 2 bits
        8
        """
        if not self.packs:
            return width * itemsize
        numbers = -(-width // 4) * 4 if self.adapts else width
        return -(-numbers * self.on_average // 8) + PARAMETERS

    def pack(self, rows: Number, width: int, itemsize: int, picked: bool) -> Iterator[Compute]:
        """Yield the work of packing `rows` rows; nothing for whole rows.

        picked: whether the rows are gathered from among other rows.
        """
        if not self.packs:
            return
        in_bytes = CODE_BYTES + PLACED * self.adapts
        passes = PACK_PASSES + GATHER_PASSES * (picked or self.adapts)
        numbers = rows * width
        yield Compute(
            elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
            calls=PACK_CALLS * (len(BITS) if self.adapts else 1),
            itemsize=itemsize,
            hash_ops=1.0 * numbers,
        )

    def unpack(self, rows: Number, width: int, itemsize: int, added: bool) -> Iterator[Compute]:
        """Yield the work of unpacking `rows` rows; nothing for whole rows.

        added: whether the rows are gradients that are added to other rows. Like packing, it goes
        AT_ONCE numbers at a time, but writes to memory outside the cache.
        """
        if not self.packs:
            return
        in_bytes = 5 + FETCHED * self.adapts  # shift, mask and copy read; shift and mask write
        passes = UNPACK_PASSES + ADD_PASSES * added + SORTED * self.adapts
        yield Compute(
            elementwise_bytes=(passes * itemsize + in_bytes) * (rows * width),
            calls=UNPACK_CALLS * (len(BITS) if self.adapts else 1),
            itemsize=itemsize,
        )


WHOLE = Codec()
