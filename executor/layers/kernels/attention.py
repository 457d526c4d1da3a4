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
from gnnplan.executor.layers.kernels.gpu import triton_kernels
from gnnplan.executor.layers.kernels.runtime import apply
from gnnplan.planner.gnn.operations import EDGE_NUMBERS


def softmax_aggregate(block: Block, m: Tensor) -> Tensor:
    """Mean of messages m [S, H], weighted per column by their softmax over the edges -> [R, H].

    Destinations without edges get zero. The result is a ratio of two aggregates,

        sum(exp(m - c) m) / sum(exp(m - c)),

    so nothing of shape [E, H] is made. Any c per column gives the same ratio; here c is halfway
    between the column's smallest and largest message. Exponents are clamped to +-60 (float64:
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
        """d out_v / d m_u = w (1 + m_u - out_v), with w = e_u / total_v."""
        m, e, total, out = ctx.saved_tensors
        grad = grad / total
        through_out = aggregate_transposed(ctx.block, grad * out)
        return aggregate_transposed(ctx.block, grad).mul_(m + 1).sub_(through_out).mul_(e), None


def attend(
    block: Block, z: Tensor, of_source: Tensor, of_reader: Tensor, slope: float = 0.2
) -> Tensor:
    """Attention: sum of z_u [S, H] over edges, by softmax of logits per head -> [R, H].

    The logit of an edge u -> v is LeakyReLU(of_source[u] + of_reader[v]), with of_source [S, heads]
    and of_reader [R, heads], or [S] and [R] for one head. Heads lie side by side in z. Destinations
    without edges get zero. Edge weights of the block play no part.
    """
    check_rows(block, z)
    if of_source.dim() == 1:
        of_source, of_reader = of_source[:, None], of_reader[:, None]
    if z.is_cuda and (ours := triton_kernels()):
        return cast(Tensor, ours.attend(block, z, of_source, of_reader, slope))
    heads = [
        apply(_Attend, of_head, *logits, block, slope)
        for of_head, *logits in zip(
            z.chunk(of_source.shape[1], 1), of_source.T, of_reader.T, strict=True
        )
    ]
    return heads[0] if len(heads) == 1 else torch.cat(heads, 1)


class _Attend(torch.autograd.Function):
    """One head. Saves two values per edge for backward; nothing is ever [E, H]."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, of_source: Tensor, of_reader: Tensor, block: Block, slope: float
    ) -> Tensor:
        z = z.contiguous()
        logit = of_source.index_select(0, block.indices).add_(block.per_edge(of_reader))
        derivative = torch.full_like(logit, slope).masked_fill_(logit > 0, 1.0)
        weight = _softmax_(block, logit.mul_(derivative))  # LeakyReLU
        out = spmm(block.indptr, block.indices, weight, z)
        ctx.block = block
        ctx.save_for_backward(z, derivative, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """d logit_e = w_e (g_v . z_u - g_v . out_v) for the gradient g of out, then LeakyReLU's."""
        (z, derivative, weight, out), block = ctx.saved_tensors, ctx.block
        grad = grad.contiguous()
        order = block.order.long()
        to_z = spmm(block.t_indptr, block.t_indices, weight[order], grad)
        to_logit = _to_logits(block, grad, z, out, weight).mul_(derivative)
        to_source = _reduce_rows("sum", to_logit[order], block.t_indptr)
        to_reader = _reduce_rows("sum", to_logit, block.indptr)
        return to_z, to_source, to_reader, None, None


def attend_pairs(block: Block, rows: Tensor, vectors: Tensor, slope: float = 0.2) -> Tensor:
    """Attention whose logits are of sums of two rows (Brody et al. 2022): rows [S, 2 H] -> [R, H].

    A row is [z | r], with heads side by side in each half. Per head the result is the sum of z_u
    over edges u -> v, by softmax of the logits a . LeakyReLU(z_u + r_v), with `vectors` a
    [heads, H / heads]. Destinations without edges get zero. Edge weights of the block play no part.

    Without Triton a sum of two rows is made for some edges at a time, and made again in the
    backward pass, which on CUDA adds in no fixed order.
    """
    check_rows(block, rows)
    if rows.is_cuda and (ours := triton_kernels()):
        return cast(Tensor, ours.attend_pairs(block, rows, vectors, slope))
    return apply(_AttendPairs, rows, vectors, block, slope)


class _AttendPairs(torch.autograd.Function):
    """Saves the rows, the outputs, and one value per edge and head."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, vectors: Tensor, block: Block, slope: float) -> Tensor:
        h_out = rows.shape[1] // 2
        readers = _readers(block)
        out = rows.new_empty(block.n_dst, h_out)
        weights = rows.new_empty(len(vectors), block.edges)
        for part, vector, weight in zip(_heads(h_out, vectors), vectors, weights, strict=True):
            z, r = rows[:, part].contiguous(), rows[: block.n_dst, h_out:][:, part]
            for some in _some_edges(block, len(vector)):
                sums = z.index_select(0, block.indices[some])
                sums += r.index_select(0, readers[some])
                torch.mv(F.leaky_relu_(sums, slope), vector, out=weight[some])
            _softmax_(block, weight)
            out[:, part] = spmm(block.indptr, block.indices, weight, z)
        ctx.block, ctx.slope = block, slope
        ctx.save_for_backward(rows, vectors, weights, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """d logit as in `attend`; with s = z_u + r_v it goes to a, and by a LeakyReLU'(s) to both
        rows."""
        (rows, vectors, weights, out), block = ctx.saved_tensors, ctx.block
        h_out, readers, order = rows.shape[1] // 2, _readers(block), block.order.long()
        to_rows, to_vectors = torch.zeros_like(rows), torch.zeros_like(vectors)

        def one_head(part: slice, vector: Tensor, weight: Tensor, to_vector: Tensor) -> None:
            z, r = rows[:, part].contiguous(), rows[: block.n_dst, h_out:][:, part]
            g = grad[:, part].contiguous()
            to_logit = _to_logits(block, g, z, out[:, part], weight)
            to_z = spmm(block.t_indptr, block.t_indices, weight[order], g)
            to_r = torch.zeros_like(g)
            for some in _some_edges(block, len(vector)):
                sources, reader, by = block.indices[some], readers[some], to_logit[some, None]
                sums = z.index_select(0, sources)
                sums += r.index_select(0, reader)
                to_vector += torch.mv(F.leaky_relu(sums, ctx.slope).t(), by[:, 0])
                sums = torch.where(sums > 0, vector, ctx.slope * vector) * by
                to_z.index_add_(0, sources, sums)
                to_r.index_add_(0, reader, sums)
            to_rows[:, part] = to_z
            to_rows[: block.n_dst, h_out:][:, part] = to_r

        for head in zip(_heads(h_out, vectors), vectors, weights, to_vectors, strict=True):
            one_head(*head)
        return to_rows, to_vectors, None, None


def _heads(h_out: int, vectors: Tensor) -> list[slice]:
    """The columns of each head."""
    width = h_out // len(vectors)
    return [slice(i * width, (i + 1) * width) for i in range(len(vectors))]


def _readers(block: Block) -> Tensor:
    """The destination of every edge, int32 [E]."""
    return block.per_edge(torch.arange(block.n_dst, dtype=torch.int32, device=block.indptr.device))


def _some_edges(block: Block, width: int) -> Iterator[slice]:
    """Edges in pieces of EDGE_NUMBERS."""
    each = max(1, EDGE_NUMBERS[block.indptr.device.type] // width)
    for start in range(0, block.edges, each):
        yield slice(start, min(start + each, block.edges))


def _softmax_(block: Block, logit: Tensor) -> Tensor:
    """Logits [E], made their softmax over each row's edges in place."""
    logit -= block.per_edge(_reduce_rows("max", logit, block.indptr))
    # a sum is at least 1, its largest term; 0 without edges
    total = _reduce_rows("sum", logit.exp_(), block.indptr).clamp_(min=1.0)
    logit /= block.per_edge(total)
    return logit


def _to_logits(block: Block, grad: Tensor, z: Tensor, out: Tensor, weight: Tensor) -> Tensor:
    """The gradient of logits [E] of one head: w_e (g_v . z_u - g_v . out_v)."""
    products = _edge_products(block, grad, z)
    return products.sub_(block.per_edge((grad * out).sum(1))).mul_(weight)


def _reduce_rows(reduction: str, values: Tensor, indptr: Tensor) -> Tensor:
    """Values per edge [E], reduced over each row of a CSR -> [rows]."""
    return torch.segment_reduce(values, reduction, offsets=indptr, unsafe=True)


def _edge_products(block: Block, a: Tensor, b: Tensor) -> Tensor:
    """The inner product a_v . b_u of every edge u -> v: a [R, H], b [S, H] -> [E]."""
    if not block.edges:
        return a.new_zeros(0)
    with no_beta_warning():
        # with int64 indices 4x as fast as gathering rows block by block
        pattern = torch.sparse_csr_tensor(
            block.indptr.long(),
            block.indices.long(),
            a.new_zeros(block.edges),
            (block.n_dst, block.n_src),
        )
        products: Tensor = torch.sparse.sampled_addmm(pattern, a, b.t(), beta=0.0).values()
        return products
