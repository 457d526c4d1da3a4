"""Quantization of rows: codes of few bits per number, with stochastic rounding.

    a row of d numbers         x_0 .. x_{d-1}
    its bytes, 2 bits          w = ceil(d / 4) bytes | lowest number | spacing      w + 4 bytes
    byte j                     codes of columns j, j + w, j + 2w, j + 3w

A code is q = floor((x - lowest) / spacing + u) with u uniform in [0, 1), which is the nearest whole
number to (x - lowest) / spacing + u - 1/2. The reader computes lowest + q spacing, whose mean over
u is x. `lowest` and `spacing` are bfloat16, and both ends compute with the rounded numbers.
`lowest` is rounded down and `spacing` up, so every number lies within the codes' range and none is
clamped: clamping would add a bias. Rows of equal numbers are exact, and so are zeros in rows
without negative numbers.

u is 16 bits of a hash of (numbers of the caller, vertex, column), so a mean is off by at most
2^-17 of the spacing. Source: AdaQP (MLSys 2023), Eq. 4 and 5; AdaQP rounds the parameters to
nearest.

`MixedWidth`: rows of 8, 4 or 2 bits per number, which together have the size of rows of 4 bits.

    bits of four rows         4      8      2  2
    their planes              a a    b b b b    c  d         a plane: w = ceil(d / 4) bytes
    in the message            |a a|p0|  |b b|p1|  |b b|p2|  |c d|p3|        2 w + 4 bytes a row

A row has a plane per two bits, and planes are contiguous across rows. For every row that rises from
4 to 8 bits, two other rows of the same peer fall to 2, so the peer's message keeps its size. A
row's lowest number and spacing (p) stay at the row's own place.

`assigned` chooses the bits from the rows' ranges. Rounding a number to one of 2^bits levels has a
variance of a sixth of the squared spacing on average; the spacing is range / (2^bits - 1). So a
row's cost is range^2 / (2^bits - 1)^2, times the sum of squares of the weights by which readers
multiply the row (gradients are added, with weight 1). Among a peer's rows the j-th widest rises,
and the j-th narrowest pair falls, while this lowers the total cost. Both ends know the ranges of
exchanged rows, spacing (2^bits - 1). So both choose the same bits, and no message contains them.
The first exchange has 4 bits in all rows; bits are chosen after it and every PERIOD exchanges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix, vertex_keys
from gnnplan.planner.gnn.rows import ADAPTIVE, AT_ONCE, BITS, PARAMETERS, Codec

PERIOD = 10  # exchanges with the same bits
LEAST = 2.0**-126  # least spacing, so that its inverse is a finite float32


class UniformWidth(NamedTuple):
    """A quantizer with the same number of bits for all rows."""

    bits: int

    def pack(
        self, rows: Tensor, positions: Tensor | None, vertices: Tensor, *numbers: int
    ) -> Tensor:
        """Quantize some rows [S, H] -> uint8 [R, row_bytes].

        positions: of the rows to quantize, int64 [R]; None: all. vertices: their global ids,
        int64 [R]. With equal `numbers`, equal rows of a vertex have equal bytes on every rank.
        """
        count, width = len(vertices), rows.shape[1]
        nbytes = Codec(self.bits).row_bytes(width, rows.element_size())
        packed = torch.empty(count, nbytes, dtype=torch.uint8, device=rows.device)
        keys = vertex_keys(vertices, *numbers)
        steps = torch.arange(1, (width + 3) // 4 + 1, device=rows.device) * GOLDEN
        for part in _parts(count, width, rows.device):
            selected = rows[part] if positions is None else rows.index_select(0, positions[part])
            lowest, spacing = _range(selected, self.bits)
            scaled = (selected - lowest.to(rows.dtype)).mul_(1 / spacing.to(rows.dtype))
            words = mix(keys[part, None] + steps).view(torch.int16)[:, :width]
            scaled.add_(words.to(rows.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17)
            packed[part, :-PARAMETERS] = _pack_codes(scaled, self.bits)
            packed[part, -PARAMETERS:] = torch.cat([lowest, spacing], 1).view(torch.uint8)
        return packed

    def unpack(self, packed: Tensor, into: Tensor) -> Tensor:
        """Dequantize rows into `into` [R, H], and return it."""
        count, width = into.shape
        stride, mask = packed.shape[1] - PARAMETERS, (1 << self.bits) - 1
        for part in _parts(count, width, into.device):
            codes, rows = packed[part, :-PARAMETERS], into[part]
            # copied, as a view as bfloat16 needs an even address
            parameters = packed[part, -PARAMETERS:].clone(memory_format=torch.contiguous_format)
            lowest, spacing = parameters.view(torch.bfloat16).to(into.dtype).tensor_split(2, 1)
            for place in range(8 // self.bits):
                columns = rows[:, place * stride : (place + 1) * stride]
                if columns.shape[1]:
                    columns.copy_((codes[:, : columns.shape[1]] >> (place * self.bits)) & mask)
            rows.mul_(spacing).add_(lowest)
        return into


def _parts(count: int, width: int, device: torch.device) -> list[slice]:
    """Return slices of rows with AT_ONCE numbers each; on a GPU one slice."""
    size = max(1, AT_ONCE // max(width, 1)) if device.type == "cpu" else max(count, 1)
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _range(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return lowest number and spacing of each row [R, 1], as bfloat16."""
    least = rows.amin(1, keepdim=True)  # aminmax takes ten times as long
    lowest = least.to(torch.bfloat16)
    infinity = lowest.new_full((), torch.inf)
    lowest = torch.where(lowest > least, torch.nextafter(lowest, -infinity), lowest)
    spacing = (rows.amax(1, keepdim=True) - lowest) / ((1 << bits) - 1)
    # rounded up by more than a division by it can round up, so no code exceeds its range
    return lowest, torch.nextafter(spacing.to(torch.bfloat16).clamp_(min=LEAST), infinity)


def _pack_codes(scaled: Tensor, bits: int) -> Tensor:
    """Pack several codes per byte: the whole parts of numbers [R, H] -> int16 [R, .]."""
    each, width = 8 // bits, scaled.shape[1]
    stride = -(-width // each)
    # to int16: torch's conversion to uint8 takes six times as long
    codes = scaled.to(torch.int16)
    if each * stride > width:
        codes = torch.nn.functional.pad(codes, (0, each * stride - width))
    packed = codes[:, :stride]
    for place in range(1, each):
        columns = codes[:, place * stride : (place + 1) * stride]
        packed = torch.add(packed, columns, alpha=1 << (place * bits))
    return packed


@dataclass
class MixedWidth:
    """A quantizer with bits per row, uint8 [R], for the next `left` exchanges."""

    bits: Tensor
    left: int
    # number of bits -> the rows that have it, int64 [r], and the places of their planes, int64
    groups: dict[int, tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        planes = self.bits.long() // 2
        first, self.groups = planes.cumsum(0) - planes, {}
        for bits in BITS:
            rows = (self.bits == bits).nonzero()[:, 0]
            places = first[rows, None] + torch.arange(bits // 2, device=rows.device)
            self.groups[bits] = rows, places.flatten()

    @classmethod
    def even(cls, count: int, device: torch.device) -> MixedWidth:
        """Return a quantizer with 4 bits for `count` rows whose ranges are not known yet."""
        return cls(torch.full((count,), 4, dtype=torch.uint8, device=device), 1)

    def after(
        self, packed: Tensor, peers: Sequence[int], weights: Tensor | None = None
    ) -> MixedWidth:
        """Return the quantizer of the next exchange, given the rows packed in this one [R, bytes].

        peers: rows of each peer. weights: of each row's variance, float32 [R]; None: 1.
        """
        if self.left > 1:
            self.left -= 1
            return self
        spacing = packed[:, -2:].clone(memory_format=torch.contiguous_format)
        spacing = spacing.view(torch.bfloat16)[:, 0].double()
        ranges = spacing * (2.0 ** self.bits.double() - 1)
        return MixedWidth(
            assigned(ranges if weights is None else ranges * weights.double().sqrt(), peers), PERIOD
        )

    def pack(
        self, rows: Tensor, positions: Tensor | None, vertices: Tensor, *numbers: int
    ) -> Tensor:
        """Quantize rows as `UniformWidth` does, with the bits of each row: uint8 [R, row_bytes]."""
        count, width = len(vertices), rows.shape[1]
        nbytes = Codec(ADAPTIVE).row_bytes(width, rows.element_size())
        packed = torch.zeros(count, nbytes, dtype=torch.uint8, device=rows.device)
        planes = _planes(packed)
        for bits, (selected, places) in self.groups.items():
            where = selected if positions is None else positions[selected]
            packed_rows = UniformWidth(bits).pack(rows, where, vertices[selected], *numbers)
            codes, plane_bytes = packed_rows[:, :-PARAMETERS], bits // 2 * planes.shape[2]
            codes = torch.nn.functional.pad(codes, (0, plane_bytes - codes.shape[1]))
            planes[places // 2, places % 2] = codes.reshape(len(places), planes.shape[2])
            packed[selected, -PARAMETERS:] = packed_rows[:, -PARAMETERS:]
        return packed

    def unpack(self, packed: Tensor, into: Tensor) -> Tensor:
        """Dequantize rows into `into` [R, H], and return it."""
        planes, width = _planes(packed), into.shape[1]
        for bits, (selected, places) in self.groups.items():
            codes = planes[places // 2, places % 2].view(len(selected), bits // 2 * planes.shape[2])
            codes = codes[:, : Codec(bits).row_bytes(width, into.element_size()) - PARAMETERS]
            packed_rows = torch.cat([codes, packed[selected, -PARAMETERS:]], 1)
            into[selected] = UniformWidth(bits).unpack(
                packed_rows, into.new_empty(len(selected), width)
            )
        return into


def assigned(ranges: Tensor, peers: Sequence[int]) -> Tensor:
    """Return the bits of each row, uint8 [R], that minimise rounding variance at 4 bits on average.

    ranges: highest minus lowest number of each row, times the root of the weight of its variance,
    float64 [R], grouped by peer.
    """
    bits = torch.full(ranges.shape, 4, dtype=torch.uint8, device=ranges.device)
    gain, loss = 1 / 15**2 - 1 / 255**2, 1 / 3**2 - 1 / 15**2
    for of_peer, peer_bits in zip(
        torch.split(ranges, list(peers)), torch.split(bits, list(peers)), strict=True
    ):
        widest_first = of_peer.argsort(descending=True, stable=True)
        square, most = of_peer[widest_first].square(), len(of_peer) // 3
        pairs = square.flip(0)[: 2 * most].view(most, 2).sum(1)
        rise = int((square[:most] * gain > pairs * loss).sum())
        peer_bits[widest_first[:rise]] = 8
        peer_bits[widest_first[len(of_peer) - 2 * rise :]] = 2
    return bits


def _planes(packed: Tensor) -> Tensor:
    """View the codes of packed rows as planes [R, 2, w]."""
    return packed[:, :-PARAMETERS].view(len(packed), 2, -1)
