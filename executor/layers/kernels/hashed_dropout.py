"""Dropout whose mask is a hash of (seed, epoch, layer, vertex, column).

Every rank that computes a vertex's row drops the same values of the row, on any device, whichever
other rows it has. The hash must never change: losses are compared between versions."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnplan.executor.layers.kernels.rows import Pattern, SparseRows
from gnnplan.executor.layers.kernels.runtime import apply, kernel, triton_kernels

# splitmix64's constants, as int64
GOLDEN, _MIX1, _MIX2 = (
    n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
LEAST = 256


def mix(z: Tensor) -> Tensor:
    """Apply splitmix64's finalizer in place, on int64 with wrap-around."""
    # torch's >> keeps the sign: the masks make it a logical shift
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def dropout(
    x: Tensor,
    seed: int,
    epoch: int | Tensor,
    layer: int,
    vertices: Tensor,
    p: float,
    first: int = 0,
) -> Tensor:
    """Set a share p of the values of x [R, H] to zero, and scale the others by 1 / (1 - p).

    vertices: global ids of the rows, int64 [R]. first: the model's column that is column 0 of x, if
    x has only some columns. With our GPU kernels the epoch may be on the device, int64 [].
    """
    if p == 0.0:
        return x
    if isinstance(x, SparseRows):
        assert isinstance(epoch, int)
        mask = _mask_at(vertex_keys(vertices, seed, epoch, layer), x.pattern, p, first)
        return SparseRows(x.pattern, _masked(x.stored, mask, 1.0 / (1.0 - p)))
    if not x.numel():
        return x
    if x.is_cuda and (ours := triton_kernels()):
        numbers = seed, epoch, layer, first, _threshold(p), 1.0 / (1.0 - p)
        return cast(Tensor, ours.dropout(x, vertices, *numbers))
    assert isinstance(epoch, int)
    with kernel:
        mask = dropout_mask(seed, epoch, layer, vertices, x.shape[1], p, first)
        return apply(_Mask, x, mask, 1.0 / (1.0 - p))


def dropout_mask(
    seed: int, epoch: int, layer: int, vertices: Tensor, width: int, p: float, first: int = 0
) -> Tensor:
    """Return which values survive: bool [R, width], for columns first .. first + width - 1.

    The mask is a pure function of (seed, epoch, layer, vertex, column): the same on every device
    and for any subset or order of the vertices (int64 [R], global ids). An int16 decides each
    value, so p is accurate to 1 / 65536.
    """
    device, threshold = vertices.device, _threshold(p)
    keys = vertex_keys(vertices, seed, epoch, layer)
    word, offset = divmod(first, 4)  # a word of the hash decides four columns
    steps = torch.arange(word + 1, (first + width + 3) // 4 + 1, device=device) * GOLDEN
    mask = torch.empty(len(vertices), width, dtype=torch.bool, device=device)
    # on CPUs 512 KiB of words at a time, which stay in cache; but at least LEAST rows, so that
    # counting a layer sees one piece (executor/layers/count.py)
    rows = max(LEAST, 2**16 // max(len(steps), 1)) if device.type == "cpu" else len(vertices)
    for start in range(0, len(vertices), max(rows, 1)):
        words = mix(keys[start : start + rows, None] + steps)
        torch.ge(
            words.view(torch.int16)[:, offset : offset + width],
            threshold,
            out=mask[start : start + rows],
        )
    return mask


def vertex_keys(vertices: Tensor, *numbers: int) -> Tensor:
    """Return a word per vertex, int64 [R], from which the words of its columns are derived."""
    key = 0
    for number in numbers:
        key = _mixed((key + number + 1) * GOLDEN)
    signed = (key + 2**63) % 2**64 - 2**63
    return mix((vertices + signed) * GOLDEN)


def _mixed(z: int) -> int:
    """Apply `mix` to a Python int."""
    z &= 2**64 - 1
    z = (z ^ (z >> 30)) * _MIX1 & 2**64 - 1
    z = (z ^ (z >> 27)) * _MIX2 & 2**64 - 1
    return z ^ (z >> 31)


def _threshold(p: float) -> int:
    """Return the smallest 16-bit number (signed) that survives."""
    return min(round(p * 2**16), 2**16 - 1) - 2**15


def _mask_at(keys: Tensor, pattern: Pattern, p: float, first: int) -> Tensor:
    """Return dropout_mask at the pattern's places: bool [Z]. Hashes only the words it needs."""
    columns, threshold = pattern.columns + first, _threshold(p)
    keys, offsets = pattern.per_number(keys), (columns & 3).long()
    mask = torch.empty(len(columns), dtype=torch.bool, device=columns.device)
    size = 2**16 if columns.device.type == "cpu" else max(len(columns), 1)
    for start in range(0, len(columns), size):
        part = slice(start, start + size)
        words = mix(keys[part] + ((columns[part] >> 2).long() + 1) * GOLDEN)
        torch.ge(
            words.view(torch.int16).view(-1, 4).gather(1, offsets[part, None])[:, 0],
            threshold,
            out=mask[part],
        )
    return mask


class _Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)  # freed with the graph
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        with kernel:
            return _masked(grad, mask, ctx.scale), None, None


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    # bool -> float is 4x slower than uint8 -> float, and x * bool 3x
    return mask.view(torch.uint8).to(x.dtype).mul_(scale).mul_(x)
