"""Rows that cross between parts in few bits per number, written plainly: what a reader gets, and
what the owner gets of the reader's gradient.

Nothing of the executor's packing is used but the hash, which is part of the specification: 16 bits
of a function of (stream, seed, step, layer, way, vertex, column)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from plain import Plain, Read
from torch import Tensor

from gnnplan.executor.layers.kernels import GOLDEN, mix
from gnnplan.executor.layers.kernels.hashed_dropout import vertex_keys
from gnnplan.planner.graph.streams import ROUNDING


def uniform(rows: Tensor, seed: int, step: int, layer: int, way: str) -> Tensor:
    """Of every number of all N rows, in [0, 1)."""
    words = (rows.shape[1] + 3) // 4
    keys = vertex_keys(torch.arange(len(rows)), ROUNDING, seed, step, layer, "fb".index(way))
    bits = mix(keys[:, None] + torch.arange(1, words + 1) * GOLDEN).view(torch.int16)
    return (bits[:, : rows.shape[1]].double() + 2**15 + 0.5) / 2**16


def coarser(x: np.ndarray, up: bool) -> np.ndarray:
    """The nearest number below (or above) that has 8 digits, as bfloat16 has."""
    power = 2.0 ** np.floor(np.log2(np.where(x == 0, 1.0, np.abs(x))) - 7)
    return (np.ceil if up else np.floor)(x / power) * power


def rounded(rows: Tensor, bits: int, u: Tensor) -> Tensor:
    """What arrives of the rows [N, H]."""
    x = rows.detach().numpy()
    lowest = coarser(x.min(1, keepdims=True), up=False)
    gap = (x.max(1, keepdims=True) - lowest) / (2**bits - 1)
    down, up = coarser(gap, up=False), coarser(gap, up=True)
    nearest = np.where(gap - down < up - gap, down, up)
    above = coarser(nearest * (1 + 2.0**-20), up=True)
    above[gap == 0] = 1.0
    return torch.from_numpy(lowest + np.floor((x - lowest) / above + u.numpy()) * above)


class Crossing(torch.autograd.Function):
    """Rows of all owners to one reader, and the gradient back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bits: int, forth: Tensor, back: Tensor) -> Tensor:
        ctx.bits, ctx.back = bits, back
        return rounded(rows, bits, forth)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return rounded(gradient, ctx.bits, ctx.back), None, None, None


def crossed(rows: Tensor, bits: int, seed: int, step: int, layer: int) -> Tensor:
    """The rows as a reader has them; every reader asks for its own."""
    ways = (uniform(rows, seed, step, layer, way) for way in "fb")
    return Crossing.apply(rows, bits, *ways)  # type: ignore[no-untyped-call]


def by_reader(operator: Tensor, part: np.ndarray) -> Tensor:
    """The operator [N, N] as one of (own rows, those that part 0 reads, those that part 1 reads,
    ..): [N, (1 + parts) N]."""
    same = torch.from_numpy(part[:, None] == part[None, :])
    readers = [torch.from_numpy(part == reader)[:, None] for reader in range(part.max() + 1)]
    return torch.cat([operator * same, *(operator * ~same * reads for reads in readers)], 1)


def reading(plain: Plain, part: np.ndarray, bits: int, step: int, scale: Any = None) -> Read:
    """Rows of other parts in `bits`; `scale(layer)` [N, N] weighs edges."""

    def read(layer: int, h: Tensor) -> tuple[Tensor, Tensor]:
        if not plain.varies(layer):
            return plain.operator, plain.prepare(layer, step, h)
        operator = plain.operator if scale is None else plain.operator * scale(layer)
        seed = plain.workload.seed
        far = [crossed(h, bits, seed, step, layer) for _ in range(part.max() + 1)]
        return by_reader(operator, part), plain.prepare(layer, step, h, *far)

    return read
