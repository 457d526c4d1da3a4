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
the nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels.hashed_dropout import GOLDEN, mix, vertex_keys
from gnnplan.planner.gnn.few_bits import AT_ONCE, PARAMETERS, row_bytes

LEAST = 2.0**-126  # of a spacing: its inverse is a float32, too


def pack(
    rows: Tensor, positions: Tensor | None, bits: int, vertices: Tensor, *numbers: int
) -> Tensor:
    """Some rows [S, H] as bytes: uint8 [R, row_bytes].

    positions: which rows, int64 [R]; None: all. vertices: whose they are, int64 [R], global ids.
    With equal `numbers` a vertex's equal rows have equal bytes on every rank.
    """
    count, width = len(vertices), rows.shape[1]
    nbytes = row_bytes(width, rows.element_size(), bits)
    packed = torch.empty(count, nbytes, dtype=torch.uint8, device=rows.device)
    keys = vertex_keys(vertices, *numbers)
    steps = torch.arange(1, (width + 3) // 4 + 1, device=rows.device) * GOLDEN
    for part in _parts(count, width, rows.device):
        chosen = rows[part] if positions is None else rows.index_select(0, positions[part])
        lowest, spacing = _range(chosen, bits)
        scaled = (chosen - lowest.to(rows.dtype)).mul_(1 / spacing.to(rows.dtype))
        words = mix(keys[part, None] + steps).view(torch.int16)[:, :width]
        scaled.add_(words.to(rows.dtype), alpha=2.0**-16).add_(0.5 + 2.0**-17)
        packed[part, :-PARAMETERS] = _together(scaled, bits)
        packed[part, -PARAMETERS:] = torch.cat([lowest, spacing], 1).view(torch.uint8)
    return packed


def unpack(packed: Tensor, bits: int, into: Tensor) -> Tensor:
    """`into` [R, H], filled with the rows that were packed."""
    count, width = into.shape
    stride, mask = packed.shape[1] - PARAMETERS, (1 << bits) - 1
    for part in _parts(count, width, into.device):
        codes, rows = packed[part, :-PARAMETERS], into[part]
        # a copy, for no two bytes at an odd place are seen as one number
        parameters = packed[part, -PARAMETERS:].clone(memory_format=torch.contiguous_format)
        lowest, spacing = parameters.view(torch.bfloat16).to(into.dtype).tensor_split(2, 1)
        for place in range(8 // bits):
            columns = rows[:, place * stride : (place + 1) * stride]
            if columns.shape[1]:
                columns.copy_((codes[:, : columns.shape[1]] >> (place * bits)) & mask)
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
