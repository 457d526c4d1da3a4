"""Aggregations whose weights are a softmax over a destination's edges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnnplan.executor.layers.kernels.aggregation import aggregate_transposed, no_beta_warning, spmm
from gnnplan.executor.layers.kernels.block import Block, check_rows
from gnnplan.executor.layers.kernels.runtime import apply, triton_kernels
from gnnplan.planner.gnn.layer import EDGE_NUMBERS


def softmax_aggregate(block: Block, m: Tensor) -> Tensor:
    """Average messages m [S, H] over edges, with their softmax per column as weights -> [R, H].

    Destinations without edges get zero. The result is a ratio of two aggregates,

        sum(exp(m - c) m) / sum(exp(m - c)),

    so nothing of shape [E, H] is allocated. Any c per column gives the same ratio; here c is the
    middle of the column's smallest and largest message. Exponents are clamped to +-60 (float64:
    +-600): the result is exact while the messages of a column lie within 120 of each other, and
    always finite.
    """
    return apply(_SoftmaxAggregate, m, block)


class _SoftmaxAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Tensor, block: Block) -> Tensor:
        check_rows(block, m)
        limit = 600.0 if m.dtype == torch.float64 else 60.0
        e = m.clone()
        if len(m):
            low, high = m.aminmax(dim=0)
            e = (m - (low + high) / 2).clamp_(-limit, limit).exp_()
        total = spmm(block.indptr, block.indices, block.weight, e)
        total.masked_fill_(total == 0, 1.0)  # no edges
        out = spmm(block.indptr, block.indices, block.weight, e * m).div_(total)
        ctx.block = block
        ctx.save_for_backward(m, e, total, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient: d out_v / d m_u = w (1 + m_u - out_v), with w = e_u / total_v."""
        m, e, total, out = ctx.saved_tensors
        grad = grad / total
        through_out = aggregate_transposed(ctx.block, grad * out)
        return aggregate_transposed(ctx.block, grad).mul_(m + 1).sub_(through_out).mul_(e), None


def attend(
    block: Block, z: Tensor, of_source: Tensor, of_reader: Tensor, slope: float = 0.2
) -> Tensor:
    """Sum z_u [S, H] over edges, weighted by the softmax of the edges' logits per head -> [R, H].

    The logit of an edge u -> v is LeakyReLU(of_source[u] + of_reader[v]), with of_source [S, heads]
    and of_reader [R, heads], or [S] and [R] for one head. Heads are side by side in z. Destinations
    without edges get zero. Edge weights of the block have no effect.
    """
    check_rows(block, z)
    if of_source.dim() == 1:
        of_source, of_reader = of_source[:, None], of_reader[:, None]
    if z.is_cuda and (ours := triton_kernels()):
        return cast(Tensor, ours.attend(block, z, of_source, of_reader, slope))
    return apply(_Attend, z, of_source, of_reader, None, block, slope)


def attend_pairs(block: Block, rows: Tensor, vectors: Tensor, slope: float = 0.2) -> Tensor:
    """Attend over edges as GATv2 does (Brody et al. 2022): rows [S, 2 H] -> [R, H].

    A row is [z | r], with heads side by side in each half. Per head the result is the sum of z_u
    over edges u -> v, weighted by the softmax of logits a . LeakyReLU(z_u + r_v), with `vectors` a
    [heads, H / heads]. Destinations without edges get zero. Edge weights of the block have no
    effect.

    Without Triton z_u + r_v is computed for some edges at a time, and twice more in the backward
    pass: in the order of readers and in the order of sources.
    """
    check_rows(block, rows)
    if rows.is_cuda and (ours := triton_kernels()):
        return cast(Tensor, ours.attend_pairs(block, rows, vectors, slope))
    return apply(_Attend, rows.contiguous(), None, None, vectors, block, slope)


class _Attend(torch.autograd.Function):
    """Autograd of `attend` (without vectors) and of `attend_pairs` (with `vectors` only).

    It saves rows, outputs, and per edge and head a weight and, for `attend`, the sign of a logit.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        of_source: Tensor,
        of_reader: Tensor,
        vectors: Tensor | None,
        block: Block,
        slope: float,
    ) -> Tensor:
        readers, heads = block.readers, of_source.shape[1] if vectors is None else len(vectors)
        logits, rises = rows.new_empty(heads, block.edges), None
        if vectors is None:
            for logit, source, reader in zip(logits, of_source.T, of_reader.T, strict=True):
                torch.index_select(source, 0, block.indices, out=logit)
                logit.add_(reader.index_select(0, readers))
            rises = logits > 0
            F.leaky_relu_(logits, slope)
        else:
            for part, pairs in _pairs(rows, block.indices, readers):
                each = F.leaky_relu_(pairs, slope).chunk(heads, 1)
                for of_head, vector, logit in zip(each, vectors, logits[:, part], strict=True):
                    torch.mv(of_head, vector, out=logit)
        weights, out = _attended(block, _sources(rows, vectors), logits, readers)
        ctx.block, ctx.slope = block, slope
        ctx.save_for_backward(rows, vectors, rises, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """With s = z_u + r_v, the gradient of a pair's logit flows to a times LeakyReLU(s) =
        s LeakyReLU'(s), and to both rows times a LeakyReLU'(s)."""
        (rows, vectors, rises, weights, out), block = ctx.saved_tensors, ctx.block
        to_sums = _to_logits(block, _sources(rows, vectors), weights, out, grad)
        to_rows = torch.zeros_like(rows)
        if vectors is None:
            _add_to_rows(block, weights, grad, to_rows)
            to_source, to_reader, one = [], [], grad.new_ones(())  # in the precision of rows
            for to_sum, rise in zip(to_sums, rises, strict=True):
                to_sum.mul_(torch.where(rise, one, ctx.slope))
                to_reader.append(_reduce_rows("sum", to_sum, block.indptr))
                by_source = to_sum.index_select(0, block.order)
                to_source.append(_reduce_rows("sum", by_source, block.t_indptr))
            return to_rows, torch.stack(to_source, 1), torch.stack(to_reader, 1), None, None, None
        by = to_sums.T.contiguous()
        del to_sums

        def add_slopes(indptr: Tensor, sources: Tensor, readers: Tensor, into: Tensor) -> None:
            for part, pairs in _pairs(rows, sources, readers):
                slopes = torch.ops.aten.leaky_relu_backward(
                    by[part, :, None], pairs.view(-1, *vectors.shape), ctx.slope, False
                )
                _add_edges(slopes.view_as(pairs), indptr, part.start, into)

        to_z, to_r = to_rows.chunk(2, 1)
        add_slopes(block.indptr, block.indices, block.readers, to_r)
        by = by.index_select(0, block.order)
        sources = block.indices.index_select(0, block.order)
        add_slopes(block.t_indptr, sources, block.t_indices, to_z)
        of_halves = zip((to_z, to_r), rows.chunk(2, 1), strict=True)
        to_vectors = sum((to * half).sum(0) for to, half in of_halves).view_as(vectors)
        to_rows.view(-1, *vectors.shape).mul_(vectors)
        _add_to_rows(block, weights, grad, to_z)
        return to_rows, None, None, to_vectors, None, None


def _sources(rows: Tensor, vectors: Tensor | None) -> Tensor:
    """Return what is summed over edges: z, which with `vectors` is the first half of rows."""
    return rows if vectors is None else rows[:, : rows.shape[1] // 2]


def _pairs(rows: Tensor, sources: Tensor, readers: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of edges, and their z_u + r_v [., H]; rows [S, 2 H] are [z | r]."""
    halves = rows.view(2 * len(rows), rows.shape[1] // 2)  # z_u is row 2 u, r_v is row 2 v + 1
    places = torch.stack([sources, readers], 1).mul_(2)
    places[:, 1] += 1
    each = max(1, EDGE_NUMBERS[rows.device.type] // halves.shape[1])
    for start in range(0, len(places), each):
        part = slice(start, start + each)
        yield part, F.embedding_bag(places[part], halves, mode="sum")


def _add_edges(values: Tensor, indptr: Tensor, start: int, into: Tensor) -> None:
    """Add values [n, H], of the edges from `start` on, to the edges' rows in a CSR."""
    stop = start + len(values)
    ends = torch.tensor([start, stop - 1], dtype=indptr.dtype, device=indptr.device)
    first, last = torch.searchsorted(indptr, ends, right=True).tolist()
    offsets = (indptr[first - 1 : last + 1] - start).clamp_(0, len(values))
    each = torch.arange(len(values), dtype=indptr.dtype, device=indptr.device)
    into[first - 1 : last] += F.embedding_bag(
        each, values, offsets, mode="sum", include_last_offset=True
    )


def _attended(block: Block, z: Tensor, logits: Tensor, readers: Tensor) -> tuple[Tensor, Tensor]:
    """Turn logits [heads, E] into their softmax in place; also return the weighted sums [R, H].

    readers: the destination of every edge [E]."""
    sums = []
    for logit, of_head in zip(logits, z.chunk(len(logits), 1), strict=True):
        logit -= _reduce_rows("max", logit, block.indptr).index_select(0, readers)
        # the largest term is 1, so a sum is at least 1, or 0 without edges
        total = _reduce_rows("sum", logit.exp_(), block.indptr).clamp_(min=1.0)
        logit /= total.index_select(0, readers)
        sums.append(spmm(block.indptr, block.indices, logit, of_head.contiguous()))
    return logits, torch.cat(sums, 1)


def _to_logits(block: Block, z: Tensor, weights: Tensor, out: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of logits [heads, E].

    One head's is w_e (g_v . z_u - g_v . out_v) for an edge u -> v, with g the gradient of out."""
    to_logits, heads = torch.zeros_like(weights), len(weights)
    for to_logit, g, of_sources in zip(
        to_logits, grad.chunk(heads, 1), z.chunk(heads, 1), strict=True
    ):
        _add_edge_products(block, g.contiguous(), of_sources.contiguous(), to_logit)
    of_out, readers = (grad * out).chunk(heads, 1), block.readers
    for to_logit, of_head in zip(to_logits, of_out, strict=True):
        to_logit -= of_head.sum(1).index_select(0, readers)
    return to_logits.mul_(weights)


def _add_to_rows(block: Block, weights: Tensor, grad: Tensor, into: Tensor) -> None:
    """Add to `into` [S, H] the gradient that rows get as terms of the weighted sums."""
    heads = len(weights)
    for weight, g, part in zip(weights, grad.chunk(heads, 1), into.chunk(heads, 1), strict=True):
        by_source = weight.index_select(0, block.order)
        part += spmm(block.t_indptr, block.t_indices, by_source, g.contiguous())


def _reduce_rows(reduction: str, values: Tensor, indptr: Tensor) -> Tensor:
    """Reduce values per edge [E] over each row of a CSR -> [rows]."""
    return torch.segment_reduce(values, reduction, offsets=indptr, unsafe=True)


def _add_edge_products(block: Block, a: Tensor, b: Tensor, into: Tensor) -> None:
    """Add to `into` [E] the inner product a_v . b_u of every edge u -> v: a [R, H], b [S, H]."""
    if not block.edges:
        return
    # with int64 indices this is 4x as fast as gathering rows in blocks
    indptr, indices, shape = block.indptr.long(), block.indices.long(), (block.n_dst, block.n_src)
    with no_beta_warning():
        products = torch.sparse_csr_tensor(indptr, indices, into, shape)  # shares `into`
        torch.sparse.sampled_addmm(products, a, b.t(), out=products)
