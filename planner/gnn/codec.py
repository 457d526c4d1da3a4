"""How rows between layers, and their gradients, are written that cross: a codec.

    whole     compute  |forward 1|        |forward 2|
              comm               |halo f 2|

    bits 2    compute  |forward 1|pack f 2|        |unpack f 2|forward 2|
              comm                        |halo f 2|

Rows cross whole, and of some the reader uses a moving average (PipeGCN's smoothing). Or they cross
in 8, 4 or 2 bits per number, the knob `bits` of a strategy (AdaQP): a row of d numbers takes
ceil(d bits / 8) + 4 bytes. Every number is rounded at random to one of 2^bits levels between its
row's lowest and highest, so that its mean over draws is the number itself
(executor/layers/kernels/few_bits.py). Both passes do it. Evaluation, all-reduces, and the rows at
the ends of pairs (link prediction) are left as they are. Draws are a hash of (seed, step, layer,
way, vertex, column): any number of ranks draws alike for a row, and so does a resumed run.

A layer's sum over neighbours is on average that of its inputs; what ReLU and the loss make of it is
not unbiased. Each number is off by up to one of 2^bits - 1 spacings, which is the price of 2 bits.

With bits='adaptive' rows have 8, 4 or 2 bits, 4 on average: 2 ceil(d / 4) + 4 a row. Both ends
choose them alike, from the ranges of rows that crossed before.

Source: Wan et al., AdaQP (MLSys 2023), Sec. 3.1 and 3.2. There a program weighs variance against
seconds, so bytes follow from ranges, and rows whose neighbours are all local are computed
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.precision import Precision
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


@dataclass(frozen=True)
class Codec:
    """How rows are written that cross.

    bits: of a number, 8, 4 or 2; 'adaptive': of each row its own; None: rows cross whole.
    smoothing: the reader averages whole rows ('f'), gradients ('g') or both ('gf') with those that
    came before, which weigh `gamma`.
    """

    bits: int | str | None = None
    smoothing: str = ""
    gamma: float = 0.0

    @property
    def packs(self) -> bool:
        """Whether rows are packed, and so rounded."""
        return self.bits is not None

    @property
    def adapts(self) -> bool:
        """Whether rows have bits of their own."""
        return self.bits == ADAPTIVE

    @property
    def on_average(self) -> int:
        """Bits of a packed number."""
        return 4 if self.adapts else int(self.bits or 0)

    @property
    def averaged(self) -> str:
        """The ways of what is smoothed: forward ('f'), backward ('b')."""
        return self.smoothing.replace("g", "b")

    @property
    def carries(self) -> str:
        """What both ends carry from step to step, in words."""
        return "each row's bits" if self.adapts else ""

    def check(self, name: str, precision: Precision, adapts: bool) -> None:
        """Raises SpecError if rows of the strategy `name` cannot cross so.

        adapts: whether they may have bits of their own.
        """
        if self.packs and precision.rounds_rows:
            raise SpecError(
                f"{name}: few bits are made of float32 rows (bits: {self.bits!r}, dtype:"
                f" {precision.name}); leave bits out, or use --dtype float32"
            )
        if self.adapts and not adapts:
            raise SpecError(
                f"{name}: only graph_parallel and pipegcn give each row bits of its own (bits:"
                f" {self.bits!r}); use bits=4, or graph_parallel(bits={self.bits!r})"
            )
        if self.packs and self.bits not in (*BITS, ADAPTIVE):
            raise SpecError(
                f"{name}: bits per number of a row that crosses are 8, 4 or 2, 'adaptive', or None"
                f" for rows as they are (bits: {self.bits}); use bits=2"
            )
        if self.packs and self.smoothing:
            raise SpecError(
                f"{name}: a moving average is of whole rows, and with bits they arrive packed"
                f" (smoothing: {self.smoothing!r}, bits: {self.bits}); use"
                f" pipegcn(bits={self.bits!r}) or {name}"
            )
        if self.smoothing and precision.rounds_rows:
            raise SpecError(
                f"{name}: {precision.coarseness} are too few for a moving average (smoothing:"
                f" {self.smoothing!r}, dtype: {precision.name}); use pipegcn, or --dtype float32"
            )

    def row_bytes(self, width: int, itemsize: int) -> int:
        """Of a row of `width` numbers that crosses [B].

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
        """Work of packing so many rows, `picked` from among others; none of whole rows."""
        if not self.packs:
            return
        each = 8 // self.on_average
        # bytes per number: random words, codes in two bytes, several put together, one byte
        in_bytes = 2 + 2 + (6 * (each - 1) / each if each > 1 else 0) + 3 / each
        in_bytes += PLACED * self.adapts
        passes = PACK + PICKED * (picked or self.adapts)
        numbers = rows * width
        yield Compute(
            elementwise_bytes=(passes * itemsize + in_bytes) * numbers,
            launches=PACK_LAUNCHES * (len(BITS) if self.adapts else 1),
            itemsize=itemsize,
            hash_ops=1.0 * numbers,
        )

    def unpack(self, rows: Number, width: int, itemsize: int, added: bool) -> Iterator[Compute]:
        """Work of unpacking so many rows, `added` to others; none of whole rows.

        It goes by parts, too, but to memory that is in no cache.
        """
        if not self.packs:
            return
        in_bytes = 5 + FETCHED * self.adapts  # shift, mask and copy read, the first two write
        passes = UNPACK + ADDED * added + SORTED * self.adapts
        yield Compute(
            elementwise_bytes=(passes * itemsize + in_bytes) * (rows * width),
            launches=UNPACK_LAUNCHES * (len(BITS) if self.adapts else 1),
            itemsize=itemsize,
        )


WHOLE = Codec()
