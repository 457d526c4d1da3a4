# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Sums over edges, attention over edges and dropout on GPUs, in Triton.

CUDA builds of torch contain Triton; `gpu.triton_kernels` imports this module where Triton works.

A Triton program computes one row (of one head). It sums the row's edges in their order, in float32
(float64 rows in float64), so results are reproducible to the bit. Backward passes use the
transposed edges; no kernel uses atomic additions.

    spmm            a CSR matrix times rows, plus other rows
    attend          softmax over a row's edges and the weighted sum, in one pass over the edges
    attend_pairs    the same, with logits of sums of two rows
    dropout         a hash decides, in forward and backward passes, so no mask is stored

The softmax is computed online, as in FlashAttention (Dao et al. 2022, Sec. 3.1): running sums are
rescaled when a larger logit appears. log(sum(exp(logit))) is saved per row and head.

Shapes: R destinations, S sources, E edges; H numbers a row, which are heads x W in attention."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from gnnplan.executor.layers.kernels.block import Block

MOST_COLUMNS = 256  # columns of a row that one program of `spmm` computes at most
PROGRAMS = 2048  # programs that share all rows, if the result is a sum over rows
WORDS = 256  # words of the hash that one program of `dropout` computes


def probe() -> None:
    """Raise an error if these kernels do not work on the current GPU."""
    ones, indices = (
        torch.ones(2, 16, device="cuda"),
        torch.zeros(2, dtype=torch.int32, device="cuda"),
    )
    indptr = torch.tensor([0, 2, 2], dtype=torch.int32, device="cuda")
    sums = spmm(indptr, indices, None, ones, ones)
    if sums.tolist() != [[3.0] * 16, [1.0] * 16]:
        raise RuntimeError(f"a sum of three ones is {sums[0, 0]}, one is {sums[1, 0]}")


def _by_rows(x: Tensor) -> Tensor:
    """Return rows that are each contiguous in memory."""
    return x if x.stride(1) == 1 or not x.numel() else x.contiguous()


def _power(width: int) -> int:
    """Return the least power of two, 16 or more, that is not below a row's width."""
    power: int = triton.next_power_of_2(width)
    return max(16, power)


def _sum_of(x: Tensor) -> tl.dtype:
    """Return the type in which rows are summed."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def _rows(x, stride, which, column, mask, SUM: tl.constexpr):
    """Load some columns [C] of some rows [B] of x -> [B, C]."""
    place = which.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(x + place, mask=mask, other=0.0).to(SUM)


@triton.jit
def _edges_from(
    first, end, indices, x, stride, column, inside, EDGES: tl.constexpr, SUM: tl.constexpr
):
    """Load the edges `first` .. end - 1, at most EDGES, and columns of the rows that they read.

    Returns the edges' places, which of them are edges, the rows' numbers, a mask, and the rows."""
    edge = first + tl.arange(0, EDGES)
    is_edge = edge < end
    which = tl.load(indices + edge, mask=is_edge, other=0)
    mask = is_edge[:, None] & inside[None, :]
    return edge, is_edge, which, mask, _rows(x, stride, which, column, mask, SUM)


# -- sums over edges -------------------------------------------------------------------------------


@triton.jit
def _spmm(
    indptr, indices, weight, x, stride_units, add, added, stride_add, out, width_units,
    UNIT: tl.constexpr, COLUMNS: tl.constexpr, EDGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row, stride, width = tl.program_id(0).to(tl.int64), stride_units * UNIT, width_units * UNIT
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros([COLUMNS], SUM)
    end = tl.load(indptr + row + 1)
    for first in range(tl.load(indptr + row), end, EDGES):
        edge, is_edge, _, _, rows = _edges_from(
            first, end, indices, x, stride, column, inside, EDGES, SUM
        )
        if weight is not None:
            rows *= tl.load(weight + edge, mask=is_edge, other=0.0).to(SUM)[:, None]
        total += tl.sum(rows, 0)
    if add is not None:
        more = tl.load(add + row * stride_add + column, mask=inside & (row < added), other=0.0)
        total += more.to(SUM)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)


def spmm(
    indptr: Tensor, indices: Tensor, weight: Tensor | None, x: Tensor, add: Tensor | None = None
) -> Tensor:
    """Multiply a CSR matrix [R, S] by x [S, H] -> [R, H]; without `weight` [E] its entries are 1.

    add: rows [., H] that are added to the first rows of the result.
    """
    x, rows, width = _by_rows(x), len(indptr) - 1, x.shape[1]
    add = None if add is None else _by_rows(add)
    out = x.new_empty(rows, width)
    if out.numel():
        # loads are vectorised only if Triton sees the common divisor of stride and width
        columns, unit = min(MOST_COLUMNS, _power(width)), gcd(16, x.stride(0), width)
        _spmm[(rows, triton.cdiv(width, columns))](
            indptr, indices, weight, x, x.stride(0) // unit, add,
            *((0, 0) if add is None else (len(add), add.stride(0))), out, width // unit,
            unit, columns, _edges(columns * x.element_size()), _sum_of(x), num_warps=1,
        )  # fmt: skip
    return out


def _edges(row_bytes: int) -> int:
    """Return the number of edges that a warp loads together: the fastest on an H200."""
    return 32 if row_bytes <= 256 else 8


# -- attention -------------------------------------------------------------------------------------
# GATv2 has `vectors`: a logit is vector . LeakyReLU(z_u + r_v), and `reader` holds rows r_v.
# GAT has none: a logit is LeakyReLU(source_u + reader_v), from one number per vertex and head.


@triton.jit
def _attend(
    indptr, indices, z, stride, source, stride_source, reader, stride_reader, vectors, out, saved,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr, EDGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    column = tl.arange(0, COLUMNS)
    inside = column < WIDTH
    if vectors is None:
        of_reader = tl.load(reader + row * stride_reader + head).to(SUM)
    else:
        of_reader = tl.load(
            reader + row * stride_reader + head * WIDTH + column, mask=inside, other=0.0
        ).to(SUM)
        vector = tl.load(vectors + head * WIDTH + column, mask=inside, other=0.0).to(SUM)
    slope = tl.full([], SLOPE, SUM)
    largest = tl.full([], float("-inf"), SUM)
    total = tl.zeros([], SUM)
    sums = tl.zeros([COLUMNS], SUM)
    end = tl.load(indptr + row + 1)
    for first in range(tl.load(indptr + row), end, EDGES):
        _, is_edge, which, _, rows = _edges_from(
            first, end, indices, z, stride, head * WIDTH + column, inside, EDGES, SUM
        )
        if vectors is None:
            place = source + which.to(tl.int64) * stride_source + head
            logit = tl.load(place, mask=is_edge, other=0.0).to(SUM) + of_reader
            logit = tl.where(logit > 0, logit, slope * logit)
        else:
            pair = rows + of_reader[None, :]
            logit = tl.sum(tl.where(pair > 0, pair, slope * pair) * vector[None, :], 1)
        logit = tl.where(is_edge, logit, float("-inf"))
        new = tl.maximum(largest, tl.max(logit, 0))
        shrink, weight = tl.exp(largest - new), tl.exp(logit - new)
        sums = sums * shrink + tl.sum(rows * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        largest = new
    has_edges = total > 0
    sums = tl.where(has_edges, sums / tl.where(has_edges, total, 1.0), 0.0)
    place = out + row * (HEADS * WIDTH) + head * WIDTH + column
    tl.store(place, sums.to(out.dtype.element_ty), mask=inside)
    log_total = tl.where(has_edges, largest + tl.log(tl.where(has_edges, total, 1.0)), 0.0)
    tl.store(saved + row * HEADS + head, log_total)


@triton.jit
def _attend_home(
    indptr, indices, order, z, stride, source, stride_source, reader, stride_reader, vectors,
    saved, gradient, inner, to_z, stride_to_z, to_source, to_logit,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr, EDGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a source's row and of its edges' logits, over the row's readers."""
    row, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    column = tl.arange(0, COLUMNS)
    inside, of_head = column < WIDTH, head * WIDTH + column
    own = tl.load(z + row * stride + of_head, mask=inside, other=0.0).to(SUM)
    if vectors is None:
        of_source = tl.load(source + row * stride_source + head).to(SUM)
    else:
        vector = tl.load(vectors + of_head, mask=inside, other=0.0).to(SUM)
    slope = tl.full([], SLOPE, SUM)
    sums, total = tl.zeros([COLUMNS], SUM), tl.zeros([], SUM)
    end = tl.load(indptr + row + 1)
    for first in range(tl.load(indptr + row), end, EDGES):
        edge, is_edge, which, mask, rows = _edges_from(
            first, end, indices, gradient, HEADS * WIDTH, of_head, inside, EDGES, SUM
        )
        of_row = which.to(tl.int64) * HEADS + head
        if vectors is None:
            place = reader + which.to(tl.int64) * stride_reader + head
            before = tl.load(place, mask=is_edge, other=0.0).to(SUM) + of_source
            slopes = tl.where(before > 0, 1.0, slope)
            logit = before * slopes
        else:
            pair = _rows(reader, stride_reader, which, of_head, mask, SUM) + own[None, :]
            slopes = tl.where(pair > 0, 1.0, slope) * vector[None, :]
            logit = tl.sum(pair * slopes, 1)
        log_total = tl.load(saved + of_row, mask=is_edge, other=0.0)
        weight = tl.where(is_edge, tl.exp(logit - log_total), 0.0)
        product = tl.sum(rows * own[None, :], 1)
        through = weight * (product - tl.load(inner + of_row, mask=is_edge, other=0.0).to(SUM))
        sums += tl.sum(rows * weight[:, None], 0)
        if vectors is None:
            through *= slopes
            total += tl.sum(through, 0)
        else:
            sums += tl.sum(slopes * through[:, None], 0)
        place = tl.load(order + edge, mask=is_edge, other=0).to(tl.int64) * HEADS + head
        tl.store(to_logit + place, through.to(to_logit.dtype.element_ty), mask=is_edge)
    tl.store(to_z + row * stride_to_z + of_head, sums.to(to_z.dtype.element_ty), mask=inside)
    if vectors is None:
        tl.store(to_source + row * HEADS + head, total.to(to_source.dtype.element_ty))


@triton.jit
def _pairs_home(
    indptr, indices, z, stride, reader, stride_reader, vectors, to_logit,
    to_reader, stride_to_reader, to_vectors, count,
    WIDTH: tl.constexpr, HEADS: tl.constexpr, SLOPE: tl.constexpr,
    COLUMNS: tl.constexpr, EDGES: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of readers' rows r_v and of the vector, over the edges of some rows."""
    head, column = tl.program_id(1), tl.arange(0, COLUMNS)
    inside, of_head = column < WIDTH, head * WIDTH + column
    vector = tl.load(vectors + of_head, mask=inside, other=0.0).to(SUM)
    slope, to_vector = tl.full([], SLOPE, SUM), tl.zeros([COLUMNS], SUM)
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        row = number + tl.zeros([], tl.int64)
        of_reader = tl.load(reader + row * stride_reader + of_head, mask=inside, other=0.0).to(SUM)
        sums = tl.zeros([COLUMNS], SUM)
        end = tl.load(indptr + row + 1)
        for first in range(tl.load(indptr + row), end, EDGES):
            edge, is_edge, _, _, rows = _edges_from(
                first, end, indices, z, stride, of_head, inside, EDGES, SUM
            )
            pair = rows + of_reader[None, :]
            of_edge = to_logit + edge.to(tl.int64) * HEADS + head
            through = tl.load(of_edge, mask=is_edge, other=0.0).to(SUM)
            slopes = tl.where(pair > 0, 1.0, slope) * through[:, None]
            sums += tl.sum(slopes, 0)
            to_vector += tl.sum(pair * slopes, 0)
        place = to_reader + row * stride_to_reader + of_head
        tl.store(place, (sums * vector).to(to_reader.dtype.element_ty), mask=inside)
    place = (tl.program_id(0) * HEADS + head) * WIDTH + column
    tl.store(to_vectors + place, to_vector.to(to_vectors.dtype.element_ty), mask=inside)


def _head_shape(width: int, x: Tensor) -> tuple[int, int, tl.dtype, int]:
    """Return columns, edges per load, type of sums, and warps of a program."""
    columns = _power(width)
    edges, warps = min(16, max(4, 512 // columns)), min(16, max(1, columns // 256))
    return columns, edges, _sum_of(x), warps


def _wide(x: Tensor, *shape: int) -> Tensor:
    """Allocate numbers of the type in which rows are summed."""
    return x.new_empty(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _strided(
    z: Tensor, source: Tensor | None, reader: Tensor
) -> tuple[Tensor, int, Tensor | None, int, Tensor, int]:
    of_source = 0 if source is None else source.stride(0)
    return z, z.stride(0), source, of_source, reader, reader.stride(0)


def attend(block: Block, z: Tensor, of_source: Tensor, of_reader: Tensor, slope: float) -> Tensor:
    """Compute attention.attend for all heads together."""
    out: Tensor = _Attend.apply(*map(_by_rows, (z, of_source, of_reader)), None, block, slope)
    return out


def attend_pairs(block: Block, rows: Tensor, vectors: Tensor, slope: float) -> Tensor:
    """Compute attention.attend_pairs for all heads together."""
    out: Tensor = _Attend.apply(_by_rows(rows), None, None, vectors.contiguous(), block, slope)
    return out


def _ends(rows: Tensor, reader: Tensor | None) -> Sequence[Tensor]:
    """Return z and what readers have: their logits, or else (GATv2) the second half of rows."""
    return rows.chunk(2, 1) if reader is None else (rows, reader)


class _Attend(torch.autograd.Function):
    """Autograd of `attend` and `attend_pairs`; logits are recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, source: Tensor | None, reader: Tensor | None,
        vectors: Tensor | None, block: Block, slope: float,
    ) -> Tensor:  # fmt: skip
        z, of_reader = _ends(rows, reader)
        heads = source.shape[1] if vectors is None else len(vectors)  # type: ignore[union-attr]
        width = z.shape[1] // heads
        columns, edges, sums, ctx.warps = _head_shape(width, z)
        ctx.block, ctx.shape = block, (width, heads, slope, columns, edges, sums)
        # the logarithm of each sum of exponentials
        out, total = z.new_empty(block.n_dst, z.shape[1]), _wide(z, block.n_dst, heads)
        if out.numel():
            _attend[(block.n_dst * heads,)](
                block.indptr, block.indices, *_strided(z, source, of_reader), vectors, out, total,
                *ctx.shape, num_warps=ctx.warps,
            )  # fmt: skip
        ctx.save_for_backward(rows, source, reader, vectors, out, total)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, source, reader, vectors, out, total = ctx.saved_tensors
        block, shape, warps, grad = ctx.block, ctx.shape, ctx.warps, grad.contiguous()
        (z, of_reader), to_rows = _ends(rows, reader), torch.empty_like(rows)
        to_z, to_reader = _ends(to_rows, reader)
        width, heads, *_ = shape
        inner = (grad * out).view(block.n_dst, heads, width).sum(2, dtype=total.dtype)
        to_logit, to_source = _wide(z, block.edges, heads), z.new_empty(block.n_src, heads)
        if block.n_src:
            _attend_home[(block.n_src * heads,)](
                block.t_indptr, block.t_indices, block.order, *_strided(z, source, of_reader),
                vectors, total, grad, inner, to_z, to_z.stride(0), to_source, to_logit,
                *shape, num_warps=warps,
            )  # fmt: skip
        if vectors is None:
            of_edges = torch.segment_reduce(to_logit, "sum", offsets=block.indptr, unsafe=True)
            return to_rows, to_source, of_edges.to(reader.dtype), None, None, None
        to_reader[block.n_dst :] = 0.0
        programs = min(PROGRAMS, max(block.n_dst, 1))
        to_vectors = _wide(z, programs, heads, width)
        _pairs_home[(programs, heads)](
            block.indptr, block.indices, z, z.stride(0), of_reader, of_reader.stride(0), vectors,
            to_logit, to_reader, to_reader.stride(0), to_vectors, block.n_dst,
            *shape, num_warps=warps,
        )  # fmt: skip
        return to_rows, None, None, to_vectors.sum(0).to(vectors.dtype), None, None


# -- dropout ---------------------------------------------------------------------------------------


@triton.jit
def _mix(z):
    """Compute splitmix64's finalizer on uint64."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


# The width is a constant, or Triton would not see that four columns share one word of memory.
@triton.jit(do_not_specialize=["seed", "epoch", "layer"])
def _dropout(
    x, vertices, out, rows, seed, epoch, layer, WIDTH: tl.constexpr, STRIDE: tl.constexpr,
    FIRST: tl.constexpr, THRESHOLD: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, WORDS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    now = tl.load(epoch) if epoch.dtype.is_ptr() else epoch
    key = tl.zeros([], tl.uint64)
    for number in tl.static_range(3):
        part = seed if number == 0 else now if number == 1 else layer
        key = _mix((key + part.to(tl.uint64) + 1) * golden)
    key = _mix((tl.load(vertices + row, mask=row < rows, other=0).to(tl.uint64) + key) * golden)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    words = _mix(key[:, None] + ((word + FIRST // 4 + 1).to(tl.uint64) * golden)[None, :])
    lane = tl.arange(0, 4)
    draw = ((words[:, :, None] >> (lane * 16).to(tl.uint64)[None, None, :]) & 0xFFFF).to(tl.int32)
    survives = tl.where(draw >= 32768, draw - 65536, draw) >= THRESHOLD
    column = word[None, :, None] * 4 + lane[None, None, :] - FIRST % 4
    inside = (row < rows)[:, None, None] & (column >= 0) & (column < WIDTH)
    values = tl.load(x + row[:, None, None] * STRIDE + column, mask=inside, other=0.0).to(SUM)
    values = tl.where(survives, values * tl.full([], SCALE, SUM), 0.0)
    place = out + row[:, None, None] * WIDTH + column
    tl.store(place, values.to(out.dtype.element_ty), mask=inside)


def dropout(
    x: Tensor, vertices: Tensor, seed: int, epoch: int | Tensor, layer: int, first: int,
    threshold: int, scale: float,
) -> Tensor:  # fmt: skip
    """Scale values of x [R, H] whose hash of (seed, epoch, layer, vertex, column) survives; else 0.

    vertices: int64 [R]. epoch: may be on the device, int64 []. first: the model's column that is
    column 0 of x. threshold: the least signed 16-bit number that survives.
    """
    out: Tensor = _Dropout.apply(x, vertices, seed, epoch, layer, first, threshold, scale)
    return out


class _Dropout(torch.autograd.Function):
    """Autograd of `dropout`; the backward pass recomputes the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, vertices: Tensor, *numbers: Any) -> Tensor:
        ctx.numbers = numbers
        ctx.save_for_backward(vertices)
        return _dropped(x, vertices, *numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (vertices,) = ctx.saved_tensors
        return _dropped(grad, vertices, *ctx.numbers), *[None] * (1 + len(ctx.numbers))


def _dropped(
    x: Tensor, vertices: Tensor, seed: int, epoch: int | Tensor, layer: int, first: int,
    threshold: int, scale: float,
) -> Tensor:  # fmt: skip
    x, (rows, width) = _by_rows(x), x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    words = triton.cdiv(first % 4 + width, 4)
    together = min(WORDS, triton.next_power_of_2(words))
    each = WORDS // together
    rounded = float(torch.tensor(scale, dtype=x.dtype))
    _dropout[(triton.cdiv(rows, each), triton.cdiv(words, together))](
        x, vertices, out, rows, seed, epoch, layer, width, x.stride(0),
        first, threshold, rounded, each, together, _sum_of(x), num_warps=4,
    )  # fmt: skip
    return out
