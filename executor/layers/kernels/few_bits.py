"""Rows as codes of few bits per number, rounded at random, and back.

    a row of d numbers         x_0 .. x_{d-1}
    its bytes, 2 bits          w = ceil(d / 4) bytes | lowest number | spacing      w + 4 bytes
    byte j                     codes of columns j, j + w, j + 2w, j + 3w

A code is q = floor((x - lowest) / spacing + u) with u uniform in [0, 1), which is the nearest whole
number to (x - lowest) / spacing + u - 1/2. The reader has lowest + q spacing, whose mean over u is
x. `lowest` and `spacing` are bfloat16, and both ends calculate with these rounded numbers. `lowest`
is rounded down and `spacing` up, so no number is outside of the codes' range and none is clamped:
a clamp would be a bias. Rows of one number lose nothing, nor does a zero in rows without negatives.

u has 16 bits of a hash of (numbers of the caller, vertex, column), so a mean is off by at most
2^-17 of the spacing. Source: AdaQP (MLSys 2023), Eq. 4 and 5; there the parameters are rounded to
the nearest.

`Mix`: rows of 8, 4 or 2 bits per number, which together fill the bytes of as many rows of 4 bits.

    bits of four rows         4      8      2  2
    their planes              a a    b b b b    c  d         a plane: w = ceil(d / 4) bytes
    as they cross             |a a|p0|  |b b|p1|  |b b|p2|  |c d|p3|        2 w + 4 bytes a row

A row takes a plane per two bits, and planes follow one another. Wherever a row rises from 4 to 8
bits two others of the same peer fall to 2, so a peer's rows end where its bytes end. A row's lowest
number and spacing stay in the row's own place.

`assigned` chooses the bits from ranges. Rounding a number to one of 2^bits levels has a variance
that grows with the square of the spacing, range / (2^bits - 1), of which it is a sixth on average.
So a row counts as range^2 / (2^bits - 1)^2, times the sum of squares of what its readers multiply
it by (gradients are added as they are). Of a peer's rows the j-th widest rises while that lowers
the sum, with the j-th narrowest pair. Both ends know the ranges of the rows that crossed: they are
spacing (2^bits - 1). So both choose alike, and nothing about bits crosses. The first exchange has 4
bits for all; bits are chosen after it, and then every PERIOD exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix, vertex_keys
from gnnplan.planner.gnn.codec import ADAPTIVE, AT_ONCE, BITS, PARAMETERS, Codec

PERIOD = 10  # exchanges after which bits are chosen anew
LEAST = 2.0**-126  # of a spacing: its inverse is a float32, too


class Even(NamedTuple):
    """All rows have as many bits."""

    bits: int

    def pack(
        self, rows: Tensor, positions: Tensor | None, vertices: Tensor, *numbers: int
    ) -> Tensor:
        """Some rows [S, H] as bytes: uint8 [R, row_bytes].

        positions: which rows, int64 [R]; None: all. vertices: whose they are, int64 [R], global
        ids. With equal `numbers` a vertex's equal rows have equal bytes on every rank.
        """
        count, width = len(vertices), rows.shape[1]
        nbytes = Codec(self.bits).row_bytes(width, rows.element_size())
        packed = torch.empty(count, nbytes, dtype=torch.uint8, device=rows.device)
        keys = vertex_keys(vertices, *numbers)
        steps = torch.arange(1, (width + 3) // 4 + 1, device=rows.device) * GOLDEN
        for part in _parts(count, width, rows.device):
            chosen = rows[part] if positions is None else rows.index_select(0, positions[part])
            lowest, spacing = _range(chosen, self.bits)
            scaled = (chosen - lowest.to(rows.dtype)).mul_(1 / spacing.to(rows.dtype))
            words = mix(keys[part, None] + steps).view(torch.int16)[:, :width]
            scaled.add_(words.to(rows.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17)
            packed[part, :-PARAMETERS] = _together(scaled, self.bits)
            packed[part, -PARAMETERS:] = torch.cat([lowest, spacing], 1).view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor, into: Tensor) -> Tensor:
        """`into` [R, H], filled with the rows that were packed."""
        count, width = into.shape
        stride, mask = packed.shape[1] - PARAMETERS, (1 << self.bits) - 1
        for part in _parts(count, width, into.device):
            codes, rows = packed[part, :-PARAMETERS], into[part]
            # a copy, for no two bytes at an odd place are seen as one number
            parameters = packed[part, -PARAMETERS:].clone(memory_format=torch.contiguous_format)
            lowest, spacing = parameters.view(torch.bfloat16).to(into.dtype).tensor_split(2, 1)
            for place in range(8 // self.bits):
                columns = rows[:, place * stride : (place + 1) * stride]
                if columns.shape[1]:
                    columns.copy_((codes[:, : columns.shape[1]] >> (place * self.bits)) & mask)
            rows.mul_(spacing).add_(lowest)
        return into


def _parts(count: int, width: int, device: torch.device) -> list[slice]:
    """The rows in parts of AT_ONCE numbers; on a GPU all at once."""
    size = max(1, AT_ONCE // max(width, 1)) if device.type == "cpu" else max(count, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _range(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Lowest number and spacing of each row [R, 1], as bfloat16."""
    least = rows.amin(1, keepdim=True)  # aminmax takes ten times as long
    lowest = least.to(torch.bfloat16)
    infinity = lowest.new_full((), torch.inf)
    lowest = torch.where(lowest > least, torch.nextafter(lowest, -infinity), lowest)
    spacing = (rows.amax(1, keepdim=True) - lowest) / ((1 << bits) - 1)
    # above what it is rounded from by more than the rounding of the division by it
    return lowest, torch.nextafter(spacing.to(torch.bfloat16).clamp_(min=LEAST), infinity)


def _together(scaled: Tensor, bits: int) -> Tensor:
    """Several codes per byte: numbers [R, H], of which the whole part counts -> int16 [R, .]."""
    each, width = 8 // bits, scaled.shape[1]
    stride = -(-width // each)
    # to int16: torch's conversion to uint8 takes six times as long
    codes = scaled.to(torch.int16)
    if each * stride > width:
        codes = torch.nn.functional.pad(codes, (0, each * stride - width))
    together = codes[:, :stride]
    for place in range(1, each):
        columns = codes[:, place * stride : (place + 1) * stride]
        together = torch.add(together, columns, alpha=1 << (place * bits))
    return together


@dataclass
class Mix:
    """Bits of each row that crosses, uint8 [R], and for how many exchanges more."""

    bits: Tensor
    left: int
    # per number of bits: which rows have it, int64 [r], and the places of their planes, int64
    groups: dict[int, tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        planes = self.bits.long() // 2
        first, self.groups = planes.cumsum(0) - planes, {}
        for bits in BITS:
            rows = (self.bits == bits).nonzero()[:, 0]
            places = first[rows, None] + torch.arange(bits // 2, device=rows.device)
            self.groups[bits] = rows, places.flatten()

    @classmethod
    def even(cls, count: int, device: torch.device) -> Mix:
        """4 bits for all of `count` rows, of which no range is known yet."""
        return cls(torch.full((count,), 4, dtype=torch.uint8, device=device), 1)

    def after(self, packed: Tensor, peers: Sequence[int], weights: Tensor | None = None) -> Mix:
        """What the next exchange takes, after one of these rows [R, bytes]; peers: rows of each.

        weights: of each row's variance, float32 [R]; None: 1.
        """
        if self.left > 1:
            self.left -= 1
            return self
        spacing = packed[:, -2:].clone(memory_format=torch.contiguous_format)
        spacing = spacing.view(torch.bfloat16)[:, 0].double()
        ranges = spacing * (2.0 ** self.bits.double() - 1)
        return Mix(
            assigned(ranges if weights is None else ranges * weights.double().sqrt(), peers), PERIOD
        )

    def pack(
        self, rows: Tensor, positions: Tensor | None, vertices: Tensor, *numbers: int
    ) -> Tensor:
        """As `Even` does, with the bits of each row: uint8 [R, row_bytes]."""
        count, width = len(vertices), rows.shape[1]
        nbytes = Codec(ADAPTIVE).row_bytes(width, rows.element_size())
        packed = torch.zeros(count, nbytes, dtype=torch.uint8, device=rows.device)
        planes = _planes(packed)
        for bits, (chosen, places) in self.groups.items():
            where = chosen if positions is None else positions[chosen]
            alone = Even(bits).pack(rows, where, vertices[chosen], *numbers)
            codes, room = alone[:, :-PARAMETERS], bits // 2 * planes.shape[2]
            codes = torch.nn.functional.pad(codes, (0, room - codes.shape[1]))
            planes[places // 2, places % 2] = codes.reshape(len(places), planes.shape[2])
            packed[chosen, -PARAMETERS:] = alone[:, -PARAMETERS:]
        return packed

    def unpack(self, packed: Tensor, into: Tensor) -> Tensor:
        """`into` [R, H], filled with the rows that were packed."""
        planes, width = _planes(packed), into.shape[1]
        for bits, (chosen, places) in self.groups.items():
            codes = planes[places // 2, places % 2].view(len(chosen), bits // 2 * planes.shape[2])
            codes = codes[:, : Codec(bits).row_bytes(width, into.element_size()) - PARAMETERS]
            alone = torch.cat([codes, packed[chosen, -PARAMETERS:]], 1)
            into[chosen] = Even(bits).unpack(alone, into.new_empty(len(chosen), width))
        return into


def assigned(ranges: Tensor, peers: Sequence[int]) -> Tensor:
    """Bits of each row, uint8 [R], with the least rounding variance in the bytes of 4 bits.

    ranges: highest less lowest number of each row, float64 [R], grouped by peer, times the root of
    its variance's weight.
    """
    bits = torch.full(ranges.shape, 4, dtype=torch.uint8, device=ranges.device)
    risen, fallen = 1 / 15**2 - 1 / 255**2, 1 / 3**2 - 1 / 15**2
    for of_peer, chosen in zip(
        torch.split(ranges, list(peers)), torch.split(bits, list(peers)), strict=True
    ):
        widest_first = of_peer.argsort(descending=True, stable=True)
        square, most = of_peer[widest_first].square(), len(of_peer) // 3
        pairs = square.flip(0)[: 2 * most].view(most, 2).sum(1)
        rise = int((square[:most] * risen > pairs * fallen).sum())
        chosen[widest_first[:rise]] = 8
        chosen[widest_first[len(of_peer) - 2 * rise :]] = 2
    return bits


def _planes(packed: Tensor) -> Tensor:
    """The packed rows' codes as planes [R, 2, w]."""
    return packed[:, :-PARAMETERS].view(len(packed), 2, -1)
