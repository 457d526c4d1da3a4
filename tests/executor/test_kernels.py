"""Every operation against the plain one: dense, DGL's, by differences, exact hash values."""

from typing import Any

import numpy as np
import pytest
import torch
from calls import raising
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from gnnplan.executor.layers.kernels import (
    Block,
    SparseRows,
    aggregate,
    attend,
    attend_pairs,
    cat,
    dropout,
    dropout_mask,
    linear_sum,
    matmul,
    softmax_aggregate,
)
from gnnplan.executor.layers.kernels.aggregation import sparse_product
from gnnplan.executor.layers.kernels.block import by_column
from gnnplan.planner.gnn.layer import EDGE_NUMBERS
from gnnplan.planner.gnn.trace import block_rows

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


def random_block(
    n_dst: int, n_src: int, edges: int, weighted: bool = True, dtype: torch.dtype = torch.float32
) -> Block:
    """Sorted rows, duplicates allowed, some rows empty by chance."""
    random = np.random.default_rng(0)
    rows = np.sort(random.integers(0, max(n_dst, 1), edges))
    indptr = np.searchsorted(rows, np.arange(n_dst + 1))
    indices = random.integers(0, max(n_src, 1), edges)
    weight = torch.tensor(random.random(edges), dtype=dtype) if weighted else None
    return Block(indptr, indices, n_src, weight)


def dense(block: Block) -> torch.Tensor:
    """[R, S] in float64."""
    matrix = torch.zeros(block.n_dst, block.n_src, dtype=torch.float64)
    rows = torch.arange(block.n_dst).repeat_interleave(block.indptr.diff().long())
    weight = torch.ones(block.edges) if block.weight is None else block.weight
    return matrix.index_put((rows, block.indices.long()), weight.double(), accumulate=True)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n_dst", "n_src", "edges"), [(0, 3, 0), (3, 3, 0), (9, 12, 40)])
def test_aggregate_is_a_matrix_product_both_ways(n_dst, n_src, edges, dtype, weighted):
    block = random_block(n_dst, n_src, edges, weighted, dtype)
    x = torch.randn(block.n_src, 7, dtype=dtype, requires_grad=True)
    out = aggregate(block, x)
    torch.testing.assert_close(out, (dense(block) @ x.double()).to(dtype))
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(x.grad, (dense(block).t() @ grad.double()).to(dtype))


@pytest.mark.parametrize(
    ("indptr", "indices", "n_src", "weight"),
    [
        ([0, 1], [3], 3, None),
        ([0, 1, 1, 1], [0], 2, None),
        ([0, 1], [0], 1, [1.0, 2.0]),
        ([0, 2], [0], 1, None),
        ([0, 1], [-1], 2, None),
    ],
)
def test_a_block_refuses_what_would_read_foreign_memory(indptr, indices, n_src, weight):
    with pytest.raises(ValueError):
        Block(
            np.array(indptr), np.array(indices), n_src, None if weight is None else np.array(weight)
        )
    with pytest.raises(ValueError, match="source rows"):
        aggregate(Block(np.array([0, 1]), np.array([0]), 1), torch.ones(2, 1))


@pytest.mark.parametrize("weighted", [True, False])
def test_what_gpus_use_gives_the_same_on_the_processor(weighted):
    """cuSPARSE's product and the transposition by sorting, whose rest is torch's anywhere."""
    block = random_block(300, 400, 5000, weighted)
    x = torch.randn(400, 33)
    product = sparse_product(block.indptr, block.indices, block.weight, x)
    torch.testing.assert_close(product, aggregate(block, x))
    pattern = sparse_rows(torch.randn(50, 20).relu()).pattern
    rows = pattern.per_number(torch.arange(50, dtype=torch.int32))
    by_sorting = by_column(rows, pattern.columns, pattern.width)
    for ours, theirs in zip(by_sorting, pattern.transposed, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype == torch.int32


def dense_softmax(block: Block, m: torch.Tensor) -> torch.Tensor:
    """[S, H] -> [R, H] by [R, S, H]; edges that occur twice count twice."""
    count = dense(block)[:, :, None]
    weight = count * (m - m.amax(0)).exp()
    return (weight * m).sum(1) / weight.sum(1).where(count.sum(1) > 0, 1.0)


def dense_attention(
    block: Block, z: torch.Tensor, of_source: torch.Tensor, of_reader: torch.Tensor
) -> torch.Tensor:
    count = dense(block)
    weight = count * F.leaky_relu(of_reader[:, None] + of_source[None, :], 0.2).exp()
    return (weight / weight.sum(1, keepdim=True).where(count.sum(1, keepdim=True) > 0, 1.0)) @ z


@pytest.mark.parametrize("at_once", [8, 1 << 18])
@pytest.mark.parametrize(("n_dst", "n_src", "edges"), [(0, 0, 0), (3, 3, 0), (9, 12, 60)])
def test_attention_by_pairs_of_rows(n_dst, n_src, edges, at_once, monkeypatch):
    """Taken two at a time, a row's edges are in several parts. A batch's rank may have no rows."""
    monkeypatch.setitem(EDGE_NUMBERS, "cpu", at_once)
    block = random_block(n_dst, n_src, edges, weighted=False)
    rows = torch.randn(n_src, 8, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    out = attend_pairs(block, rows, vectors)
    z, r = rows.view(n_src, 2, 2, 2).unbind(1)  # [S, heads, W]
    logits = (F.leaky_relu(z[None] + r[:n_dst, None], 0.2) * vectors).sum(3)
    weight = dense(block)[:, :, None] * logits.exp()
    weight = weight / weight.sum(1, keepdim=True).where(weight.sum(1, keepdim=True) > 0, 1.0)
    expected = torch.einsum("rsh,shw->rhw", weight, z).flatten(1)
    torch.testing.assert_close(out, expected)
    gradient = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(o, (rows, vectors), gradient) for o in (out, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("edges", [0, 1, 40, 900])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_softmax_and_attention_are_dense_ones(edges, dtype):
    """Values and all gradients, with rows without edges and edges that occur twice."""
    block = random_block(30, 40, edges, weighted=False)
    close = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {}
    messages = torch.randn(40, 9, dtype=dtype).abs() * 3
    inputs = [torch.randn(shape, dtype=dtype) for shape in ((40, 9), 40, 30)]
    softmax, attention = (softmax_aggregate, dense_softmax), (attend, dense_attention)
    for (ours, theirs), leaves in ((softmax, [messages]), (attention, inputs)):
        kinds = dtype, torch.float64
        a, b = ([leaf.clone().to(kind).requires_grad_() for leaf in leaves] for kind in kinds)
        out, expected = ours(block, *a), theirs(block, *b)
        torch.testing.assert_close(out, expected.to(dtype), **close)
        gradient = torch.randn(30, 9, dtype=dtype)
        exact = torch.autograd.grad(expected, b, gradient.double())
        found = torch.autograd.grad(out, a, gradient)
        torch.testing.assert_close(found, tuple(y.to(dtype) for y in exact), **close)


def test_softmax_and_attention_survive_large_numbers():
    """A destination whose messages all lie far below the column's largest keeps its softmax; logits
    of thousands do not overflow; messages further apart than float32's exponents stay finite."""
    block = Block(np.array([0, 2, 4]), np.array([0, 1, 2, 3]), 4)
    m = torch.tensor([[100.0], [99.0], [1.0], [0.0]], requires_grad=True)
    out = softmax_aggregate(block, m)
    torch.testing.assert_close(out, dense_softmax(block, m.double()).float())
    torch.testing.assert_close(
        *(torch.autograd.grad(o.sum(), m)[0] for o in (out, dense_softmax(block, m.double())))
    )
    far = torch.tensor([[1e6], [0.0], [1.0], [0.0]], requires_grad=True)
    out = softmax_aggregate(block, far)
    assert out.isfinite().all() and out[0] == 1e6 and 0 <= out[1] <= 1
    assert torch.autograd.grad(out.sum(), far)[0].isfinite().all()
    z, logits = torch.eye(4), torch.tensor([5000.0, 4000.0, -9000.0, -9000.0])
    assert attend(block, z, logits, torch.zeros(2)).tolist() == [[1, 0, 0, 0], [0, 0, 0.5, 0.5]]


@pytest.mark.parametrize("rows", [0, 1, 127, 1000, 2500, 4093])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("library", ["MKL", "oneDNN", "oneDNN, rows that vary"])
def test_sums_of_linear_layers_by_blocks_of_rows(rows, relu, library, monkeypatch):
    """Against torch's own in float64. Rows that vary go by pieces of few sizes: oneDNN kept 0.6 MB of
    code per number of rows, 212 MB after three epochs."""
    onednn, vary = library != "MKL" and matmul.has_onednn(), "vary" in library
    if vary and not onednn:
        pytest.skip("this torch has no oneDNN product")
    monkeypatch.setattr(matmul, "by_onednn", lambda: onednn)
    monkeypatch.setattr(matmul.Shapes, "vary", vary)
    sizes: set[int] = set()
    if vary:
        made = torch.ops.mkldnn._linear_pointwise

        def noted(x: Tensor, *more: Any) -> Tensor:
            sizes.update({len(x)} if x.shape[1] == 300 else ())
            return made(x, *more)

        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    shapes = [(rows, 300), (260, 300), (rows, 7), (260, 7), (260,)]
    ours = [torch.randn(shape, requires_grad=True) for shape in shapes]
    theirs = [t.detach().double().requires_grad_() for t in ours]
    (x, w, y, v, bias), (a, b, c, d, e) = ours, theirs
    plain = F.linear(a, b, e) + F.linear(c, d)
    outs = [linear_sum([(x, w), (y, v)], bias, relu), plain.relu() if relu else plain]
    torch.testing.assert_close(outs[0], outs[1].float(), atol=1e-4, rtol=1e-4)
    # not at the kink, where rounding decides
    grad = torch.randn(rows, 260) * (outs[1].detach().abs() > 1e-3)
    for out in outs:
        out.backward(grad.to(out.dtype))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad.float(), atol=2e-3, rtol=1e-4)
    assert sizes <= {1000, 128, 256, 512}


def test_the_probe_survives_a_torch_without_the_operation(monkeypatch):
    monkeypatch.setattr(matmul, "_onednn", raising(AttributeError("no such operation")))
    assert matmul.has_onednn() is False


def sparse_rows(x: torch.Tensor) -> SparseRows:
    rows, columns = x.nonzero().unbind(1)
    return SparseRows.of(rows.bincount(minlength=len(x)), columns, x[rows, columns], x.shape[1])


def dense_rows(x: SparseRows) -> torch.Tensor:
    rows = torch.arange(x.shape[0]).repeat_interleave(x.lengths)
    return torch.zeros(x.shape, dtype=x.stored.dtype).index_put(
        (rows, x.pattern.columns.long()), x.stored, accumulate=True
    )


thin = st.builds(
    lambda rows, width, density, seed: torch.from_numpy(
        np.random.default_rng(seed).standard_normal((rows, width))
        * (np.random.default_rng(seed + 1).random((rows, width)) < density)
    ),
    st.integers(0, 12),
    st.integers(1, 30),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 2**31),
)


@given(thin, st.data())
def test_sparse_rows_are_cut_chosen_and_joined_like_dense_ones(x, data):
    ours, rows = sparse_rows(x), st.integers(0, len(x))
    start, stop = sorted(data.draw(st.tuples(rows, rows)))
    chosen = torch.tensor(
        data.draw(st.lists(st.integers(0, max(len(x) - 1, 0)), max_size=20 if len(x) else 0)),
        dtype=torch.int64,
    )
    cut, picked = ours[start:stop], ours.index_select(0, chosen)
    for sparse, plain in (
        *((each, x) for each in (ours, ours[:], ours.to("cpu"))),
        *((cut, x[start:stop]), (picked, x[chosen])),
        (cat([ours, cut, picked]), torch.cat([x, x[start:stop], x[chosen]])),
        (cat([ours, ours.new_empty(3, x.shape[1])]), F.pad(x, (0, 0, 0, 3))),
    ):
        assert sparse.shape == tuple(plain.shape)
        assert sparse.nbytes == 2 * 8 * int((plain != 0).sum())
        assert torch.equal(dense_rows(sparse), plain)
        indptr, where, order = sparse.pattern.transposed
        turned = SparseRows.of(indptr.diff(), where, sparse.stored[order.long()], len(plain))
        assert torch.equal(dense_rows(turned), plain.t())


@given(thin, st.data())
def test_room_among_sparse_rows_is_filled_like_that_among_dense_ones(x, data):
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(x))] * 2)))
    ours = sparse_rows(torch.cat([x[:start], x.new_zeros(stop - start, x.shape[1]), x[stop:]]))
    ours[start:stop] = sparse_rows(x)[start:stop]
    assert torch.equal(dense_rows(ours), x)


def test_what_sparse_rows_do_not_do_is_said():
    with pytest.raises(TypeError, match="is not done on sparse rows"):
        sparse_rows(torch.eye(3)).relu()


def test_a_cut_is_sorted_once():
    """Rows with other numbers, as dropout makes them every epoch, share it."""
    x = sparse_rows(torch.eye(6))
    assert x[2:4].pattern is SparseRows(x.pattern, x.stored * 2)[2:4].pattern and x[:6] is x
    assert x.pattern.transposed is SparseRows(x.pattern, x.stored * 2).pattern.transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0 - 1e-6])
def test_dropout_of_sparse_rows_is_that_of_dense_ones_bit_for_bit(p, dtype):
    """More numbers than are hashed at once."""
    x = torch.randn(700, 131, dtype=dtype)
    x[torch.rand(x.shape) < 0.1] = 0.0
    x[5] = 0.0
    vertices = torch.randperm(10**6)[:700]
    for rows in (slice(None), slice(3, 9), slice(0, 0)):
        ours = dropout(sparse_rows(x)[rows], 1, 2, 3, vertices[rows], p)
        assert torch.equal(dense_rows(ours), dropout(x[rows], 1, 2, 3, vertices[rows], p))
    assert len(ours.stored) == 0 and dropout(ours, 1, 2, 3, vertices[:0], 0.0) is ours


def test_masks_are_fixed_for_ever():
    """Plans and papers compare losses between versions: the hash may never change."""
    mask = dropout_mask(0, 0, 0, torch.tensor([0, 1, 10**12]), 10, 0.5)
    known = ["0110000001", "0101000000", "1010110111"]
    assert ["".join("01"[b] for b in row) for row in mask.tolist()] == known
    mask = dropout_mask(7, 3, 2, torch.tensor([5, 6]), 10, 0.3)
    assert ["".join("01"[b] for b in row) for row in mask.tolist()] == ["0001011111", "0101101111"]


def test_masks_do_not_depend_on_which_rows_are_asked_for():
    many = torch.arange(5000)  # several blocks of rows
    alone = dropout_mask(1, 2, 3, many[4321:4322], 200, 0.4)
    assert torch.equal(dropout_mask(1, 2, 3, many, 200, 0.4)[4321:4322], alone)


@pytest.mark.parametrize("rows", [1, 127, 2500, 4093])
def test_products_in_bfloat16_that_vary_go_by_pieces_too(monkeypatch, rows):
    """oneDNN multiplies them on all cores with AVX-512, and keeps 0.7 MB of code for each shape."""
    monkeypatch.setattr(matmul, "code_of", lambda dtype: 0.7e6)
    monkeypatch.setattr(matmul.Shapes, "vary", True)
    sizes: set[int] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            factors = [t for t in args if isinstance(t, Tensor) and t.dim() == 2]
            if func.overloadpacket in PRODUCTS and factors[-1].dtype == torch.bfloat16:
                sizes.update(size for t in factors for size in t.shape if size not in (300, 260))
            return func(*args, **(kwargs or {}))

    a = torch.randn(rows, 300, dtype=torch.bfloat16, requires_grad=True)
    w, bias = torch.randn(260, 300, requires_grad=True), torch.randn(260, requires_grad=True)
    with Watch():
        out = linear_sum([(a, w), (a, w)], bias)
        gradients = torch.autograd.grad(out.sum(), (a, w, bias))
    whole = 2 * F.linear(a.double(), w.double()) + bias.double()
    torch.testing.assert_close(out.double(), whole, rtol=2e-2, atol=0.5)
    for mine, exact in zip(gradients, torch.autograd.grad(whole.sum(), (a, w, bias)), strict=True):
        near = 2e-2 * float(exact.abs().max())
        torch.testing.assert_close(mine.double(), exact.double(), rtol=0, atol=near)
    assert sizes <= {block_rows(300, 260, 2), *(128 << power for power in range(6))}
