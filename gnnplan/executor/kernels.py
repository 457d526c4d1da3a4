"""The hot operations of a GNN: aggregate (weighted, by softmax, by attention), linear (of dense and of sparse rows), dropout, and an
allocator that keeps its pages.

Shapes: R destination rows, S source rows, E edges, H numbers per row (H_in, H_out for a linear layer).
On CPUs torch's own choices cost a factor of two here, so each operation names the faster public or probed kernel.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from scipy import sparse
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnnplan.planner.footprint import LEAST

# -- aggregation ---------------------------------------------------------------------------------------------------------


class Block:
    """A bipartite piece of the graph in CSR over destinations, with its transpose for the backward pass.

    The first n_dst source rows are the destinations themselves (as in DGL). `order` [E] says which edge of the CSR an edge
    of the transposed CSR is, so that the same structure carries several weights (`weighted`) without sorting again.
    """

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, n_src: int, weight: np.ndarray | None = None) -> None:
        """indptr [R + 1], indices [E] in [0, n_src), weight [E] or None (every edge counts once)."""
        self.n_dst, self.n_src, self.edges = len(indptr) - 1, n_src, len(indices)
        if not self.n_dst <= n_src:
            raise ValueError(f"the {self.n_dst} destinations must be the first of the {n_src} sources")
        if self.edges >= 2**31:
            raise ValueError(f"a block holds at most 2^31 - 1 edges (given: {self.edges}); use more parts")
        forward = sparse.csr_array((np.arange(self.edges, dtype=np.int32), indices, indptr), shape=(self.n_dst, n_src))
        forward.check_format(full_check=True)  # an index out of range would read foreign memory
        backward = forward.tocsc()
        self.indptr, self.indices = _int32(indptr), _int32(indices)
        self.t_indptr, self.t_indices, self.order = _int32(backward.indptr), _int32(backward.indices), _int32(backward.data)
        self.weight = self.t_weight = None
        if weight is not None:
            self._weigh(torch.tensor(weight))

    def _weigh(self, weight: Tensor) -> None:
        if weight.shape != (self.edges,):
            raise ValueError(f"{self.edges} edges need as many weights, not {tuple(weight.shape)}")
        self.weight = weight.contiguous().to(self.indptr.device)
        self.t_weight = self.weight[self.order.long()]

    def per_edge(self, values: Tensor) -> Tensor:
        """A number per destination [R], repeated for each of its edges [E]."""
        return values.repeat_interleave(self.indptr.diff(), output_size=self.edges)

    def weighted(self, weight: np.ndarray | Tensor) -> Block:
        """The same edges with weights [E]; shares the structure."""
        block = self._copy()
        block._weigh(weight if isinstance(weight, Tensor) else torch.tensor(weight))
        return block

    def mean(self, dtype: torch.dtype = torch.float32) -> Block:
        """The same edges with weight 1 / (edges into the destination): aggregate takes the mean, zero for empty rows."""
        degree = self.indptr.diff().long()
        return self.weighted((1.0 / degree.clamp(min=1).to(dtype)).repeat_interleave(degree))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Block:
        """Moved to a device; `dtype` is that of the weights (indices stay int32)."""
        block = self._copy()
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                block.__dict__[name] = value.to(device, dtype if value.is_floating_point() else None)
        return block

    def pinned(self) -> Block:
        """In page-locked memory."""
        block = self._copy()
        block.__dict__.update({name: value.pin_memory() for name, value in vars(self).items() if isinstance(value, Tensor)})
        return block

    def _copy(self) -> Block:
        block = object.__new__(Block)
        block.__dict__.update(self.__dict__)
        return block

    def __repr__(self) -> str:
        return f"Block(n_dst={self.n_dst}, n_src={self.n_src}, edges={self.edges}, weighted={self.weight is not None})"


def _int32(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(array, dtype=np.int32))  # a copy: a graph's arrays are read-only, which torch warns about


def aggregate(block: Block, x: Tensor) -> Tensor:
    """Sum over a destination's edges of weight times source row: x [S, H] -> [R, H]. No gradient to the weights."""
    _fits(block, x)
    return _Aggregate.apply(x, block)


def _fits(block: Block, x: Tensor) -> None:
    if x.shape[0] != block.n_src:
        raise ValueError(f"{block} needs {block.n_src} source rows, not {x.shape[0]}")


def aggregate_transposed(block: Block, gradient: Tensor) -> Tensor:
    """The gradient of aggregate's sources from that of its result, by hand: [R, H] -> [S, H]."""
    return _spmm(block.t_indptr, block.t_indices, block.t_weight, gradient.contiguous())


class _Aggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        ctx.block = block
        return _spmm(block.indptr, block.indices, block.weight, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return aggregate_transposed(ctx.block, grad), None


def _spmm(indptr: Tensor, indices: Tensor, weight: Tensor | None, x: Tensor) -> Tensor:
    """CSR [R, S] times x [S, H] -> [R, H]."""
    rows = len(indptr) - 1
    if not (rows and len(indices) and x.shape[1]):
        return x.new_zeros(rows, x.shape[1])
    weight = weight if weight is None or weight.dtype == x.dtype else weight.to(x.dtype)
    if x.device.type == "cpu":  # 3x MKL's CSR product, 1.5x DGL's
        return F.embedding_bag(indices, x, indptr, mode="sum", per_sample_weights=weight, include_last_offset=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        values = torch.ones(len(indices), dtype=x.dtype, device=x.device) if weight is None else weight
        return torch.sparse_csr_tensor(indptr, indices, values, (rows, x.shape[0]), check_invariants=False) @ x


# -- softmax and attention -----------------------------------------------------------------------------------------------


def softmax_aggregate(block: Block, m: Tensor) -> Tensor:
    """Per column, the mean of a destination's messages m [S, H] weighted by their softmax over its edges -> [R, H]; zero without edges.

    A ratio of two aggregates, sum(exp(m - c) m) / sum(exp(m - c)): any c per column gives the same, so that no [E, H] is made. c is
    halfway between the column's smallest and largest message, and exponents are held within +-60 (float64: +-600): exact while
    messages of a column lie within 120 of each other, finite always.
    """
    return _SoftmaxAggregate.apply(m, block)


class _SoftmaxAggregate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, m: Tensor, block: Block) -> Tensor:
        _fits(block, m)
        ctx.block, most = block, 600.0 if m.dtype == torch.float64 else 60.0
        e = m.clone()
        if len(m):
            low, high = m.aminmax(dim=0)
            e = (m - (low + high) / 2).clamp_(-most, most).exp_()
        total = _spmm(block.indptr, block.indices, block.weight, e)
        total.masked_fill_(total == 0, 1.0)  # no edges
        out = _spmm(block.indptr, block.indices, block.weight, e * m).div_(total)
        ctx.save_for_backward(m, e, total, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """d out_v / d m_u = w (1 + m_u - out_v), w = e_u / total_v."""
        m, e, total, out = ctx.saved_tensors
        grad = grad / total
        above = aggregate_transposed(ctx.block, grad * out)
        return aggregate_transposed(ctx.block, grad).mul_(m + 1).sub_(above).mul_(e), None


def attend(block: Block, z: Tensor, of_source: Tensor, of_reader: Tensor, slope: float = 0.2) -> Tensor:
    """One head of attention: sum of z_u [S, H] over a destination's edges, weighted by the softmax of LeakyReLU(of_source [S] of u plus
    of_reader [R] of the destination) -> [R, H]; zero without edges. Edge weights of the block play no part."""
    return _Attend.apply(z, of_source, of_reader, block, slope)


class _Attend(torch.autograd.Function):
    """Keeps two numbers per edge; nothing is ever [E, H]."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, of_source: Tensor, of_reader: Tensor, block: Block, slope: float) -> Tensor:
        _fits(block, z)
        z = z.contiguous()
        logit = of_source.index_select(0, block.indices).add_(block.per_edge(of_reader))
        rise = torch.full_like(logit, slope).masked_fill_(logit > 0, 1.0)
        logit.mul_(rise)
        top = _segments("max", logit, block.indptr)
        weight = logit.sub_(block.per_edge(top)).exp_()
        total = _segments("sum", weight, block.indptr).clamp_(min=1.0)  # its largest term is 1; 0 without edges
        weight.div_(block.per_edge(total))
        out = _spmm(block.indptr, block.indices, weight, z)
        ctx.block = block
        ctx.save_for_backward(z, rise, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """With g the gradient of out: d logit_e = w_e (g_v . z_u - g_v . out_v), then the slope of LeakyReLU."""
        (z, rise, weight, out), block = ctx.saved_tensors, ctx.block
        grad = grad.contiguous()
        order = block.order.long()
        to_z = _spmm(block.t_indptr, block.t_indices, weight[order], grad)
        to_logit = _products(block, grad, z).sub_(block.per_edge((grad * out).sum(1))).mul_(weight).mul_(rise)
        return to_z, _segments("sum", to_logit[order], block.t_indptr), _segments("sum", to_logit, block.indptr), None, None


def _segments(how: str, values: Tensor, indptr: Tensor) -> Tensor:
    """values [E] reduced over each row of a CSR -> [rows]."""
    return torch.segment_reduce(values, how, offsets=indptr, unsafe=True)


def _products(block: Block, a: Tensor, b: Tensor) -> Tensor:
    """a_v . b_u of every edge: a [R, H], b [S, H] -> [E]. With int64 indices four times as fast as gathering rows block by block."""
    if not block.edges:
        return a.new_zeros(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        pattern = torch.sparse_csr_tensor(block.indptr.long(), block.indices.long(), a.new_zeros(block.edges),
                                          (block.n_dst, block.n_src), check_invariants=False)  # fmt: skip
        return torch.sparse.sampled_addmm(pattern, a, b.t(), beta=0.0).values()


# -- sparse rows ---------------------------------------------------------------------------------------------------------


class Pattern:
    """Where sparse rows have their Z numbers: CSR, indptr [R + 1] and columns [Z], int32. Rows with other numbers at the same places
    share it, and with it what is sorted and cut once."""

    def __init__(self, indptr: Tensor, columns: Tensor, width: int) -> None:
        self.indptr, self.columns, self.width = indptr, columns, width
        self._cuts: dict[tuple[int, int], tuple[Pattern, slice]] = {}

    def per_number(self, values: Tensor) -> Tensor:
        """A number per row [R], repeated for each number of the row [Z]."""
        return values.repeat_interleave(self.indptr.diff(), output_size=len(self.columns))

    @functools.cached_property
    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """CSR over columns: indptr [width + 1], rows [Z], and which number each is [Z]."""
        order = torch.argsort(self.columns, stable=True)
        rows = self.per_number(torch.arange(len(self.indptr) - 1, dtype=torch.int32, device=order.device))
        return _offsets(torch.bincount(self.columns, minlength=self.width)), rows[order], order.int()

    def cut(self, start: int, stop: int) -> tuple[Pattern, slice]:
        """Of rows [start, stop), and which numbers are theirs."""
        if (start, stop) not in self._cuts:
            first, last = self.indptr[[start, stop]].tolist()
            pattern = Pattern(self.indptr[start : stop + 1] - first, self.columns[first:last], self.width)
            self._cuts[start, stop] = pattern, slice(first, last)
        return self._cuts[start, stop]


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).int()


class SparseRows:
    """Rows [R, F] of mostly zeros: a pattern and its numbers [Z]. Constant (features), so no gradient goes to them. Has what a layer
    and an exchange ask of a Tensor."""

    requires_grad = False

    def __init__(self, pattern: Pattern, values: Tensor) -> None:
        self.pattern, self.values = pattern, values

    @classmethod
    def of(cls, lengths: Tensor, columns: Tensor, values: Tensor, width: int) -> SparseRows:
        """From how many numbers each row has [R], and row after row their columns and values [Z]."""
        return cls(Pattern(_offsets(lengths), columns.int(), width), values)

    @classmethod
    def cat(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """Below each other."""
        lengths, columns = (torch.cat(found) for found in zip(*((p.lengths, p.pattern.columns) for p in parts), strict=True))
        return cls.of(lengths, columns, torch.cat([p.values for p in parts]), parts[0].shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.pattern.indptr) - 1, self.pattern.width

    @property
    def lengths(self) -> Tensor:
        return self.pattern.indptr.diff()

    @property
    def nbytes(self) -> int:
        """In transit: a column and a value per number, of the values' type."""
        return 2 * self.values.nbytes

    def __getitem__(self, rows: slice) -> SparseRows:
        start, stop, _ = rows.indices(self.shape[0])
        if (start, stop) == (0, self.shape[0]):
            return self
        pattern, numbers = self.pattern.cut(start, stop)
        return SparseRows(pattern, self.values[numbers])

    def index_select(self, dim: int, rows: Tensor) -> SparseRows:
        """The rows in that order (dim is 0, as of a Tensor)."""
        lengths = self.lengths.index_select(0, rows)
        starts = self.pattern.indptr.index_select(0, rows) - _offsets(lengths)[:-1]
        total = int(lengths.sum())
        places = torch.arange(total, dtype=torch.int32, device=rows.device) + starts.repeat_interleave(lengths, output_size=total)
        columns, values = self.pattern.columns.index_select(0, places), self.values.index_select(0, places)
        return SparseRows.of(lengths, columns, values, self.shape[1])

    def to(self, device: torch.device | str) -> SparseRows:
        return SparseRows.of(self.lengths.to(device), self.pattern.columns.to(device), self.values.to(device), self.shape[1])

    def __repr__(self) -> str:
        return f"SparseRows(shape={self.shape}, numbers={len(self.values)})"


Rows = TypeVar("Rows", Tensor, SparseRows)


class _SparseLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, pattern: Pattern, values: Tensor) -> Tensor:
        ctx.pattern = pattern
        ctx.save_for_backward(values)
        return _spmm(pattern.indptr, pattern.columns, values, weight.t().contiguous())  # no copy of a weight that lies turned (Net._turn)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        indptr, rows, order = ctx.pattern.transposed
        (values,) = ctx.saved_tensors
        return _spmm(indptr, rows, values.index_select(0, order), grad.contiguous()).t(), None, None


# -- linear --------------------------------------------------------------------------------------------------------------


def linear(x: Tensor | SparseRows, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """x [R, H_in] times weight [H_out, H_in] transposed, plus bias [H_out], then perhaps ReLU -> [R, H_out].

    In float32 on CPUs by oneDNN (twice MKL's speed on AMD), else F.linear; of sparse rows a sum of the weight's columns.
    """
    if isinstance(x, SparseRows):
        out = _SparseLinear.apply(weight, x.pattern, x.values)
        out = out if bias is None else out.add_(bias)
        return out.relu_() if relu else out
    return linear_sum([(x, weight)], bias, relu)


def linear_sum(terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """`linear` summed over several (x, weight) before the ReLU, as in GraphSAGE: one pass over the gradient serves them all."""
    tensors = [t for term in terms for t in term]
    if all(t.device.type == "cpu" and t.dtype == torch.float32 and t.numel() for t in tensors) and has_onednn():
        return _LinearSum.apply(bias, relu, *tensors)
    out = F.linear(*terms[0], bias)
    for x, weight in terms[1:]:
        out = out + F.linear(x, weight)
    return out.relu() if relu else out


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, after: str = "none", summed: bool = False) -> Tensor:
    """a [R, K], b [H, K] -> a b^T + bias [R, H]; transposed views cost nothing. `summed`: K are the rows that may vary, else R."""
    if Shapes.vary and a.shape[summed] < Shapes.least:  # what `_pieces` leaves over
        out = F.linear(a, b, bias)
        return out.relu_() if after == "relu" else out
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, after, [], "")


class Shapes:
    """oneDNN makes code for every shape that it meets (half a millisecond and megabytes of it) and keeps it. Mini-batches have another
    number of rows at every step: then products go by pieces of few sizes."""

    vary = False
    least = LEAST  # rows of a piece; fewer go to MKL, which makes no code

    @classmethod
    @contextmanager
    def varying(cls, vary: bool) -> Iterator[None]:
        """For as long as it lasts."""
        before, cls.vary = cls.vary, vary
        try:
            yield
        finally:
            cls.vary = before


def _pieces(rows: int, size: int) -> Iterator[slice]:
    """Of `size` rows, then of `least` times a power of two, and what is left.

    >>> [piece.stop - piece.start for piece in _pieces(2500, 1000)]
    [1000, 1000, 256, 128, 116]
    """
    start = 0
    while rows - start >= size:
        yield slice(start, start := start + size)
    while (left := rows - start) >= Shapes.least:
        yield slice(start, start := start + (Shapes.least << (left // Shapes.least).bit_length() - 1))
    if left:
        yield slice(start, rows)


@functools.cache
def has_onednn() -> bool:
    """Whether this torch has the private operation, and it computes what is expected."""
    generator = torch.Generator().manual_seed(0)
    a, b, bias, grad = (torch.rand(shape, generator=generator) - 0.5 for shape in ((5, 3), (4, 3), (4,), (5, 4)))
    try:
        return (torch.allclose(_product(a, b, bias, "relu"), F.linear(a, b, bias).relu(), atol=1e-6)
                and torch.allclose(_product(grad.t(), a.t()), grad.t() @ a, atol=1e-6))  # fmt: skip
    except (AttributeError, RuntimeError):
        return False


class _LinearSum(torch.autograd.Function):
    """Backward goes by blocks of rows, so that a block of the gradient stays in cache for everything that is made of it:
    a three-layer GraphSAGE of width 256 trains 7 % faster than by whole matrices."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, relu: bool, *tensors: Tensor) -> Tensor:
        xs, weights = tensors[::2], tensors[1::2]
        parts = _blocks(xs[0].shape[0], weights[0].shape[0], max(x.shape[1] for x in xs)) if Shapes.vary else [slice(None)]
        out = xs[0].new_empty(xs[0].shape[0], weights[0].shape[0]) if Shapes.vary else None
        for part in parts:
            piece = _product(xs[0][part], weights[0], bias, "relu" if relu and len(xs) == 1 else "none")
            for x, weight in zip(xs[1:], weights[1:], strict=True):
                piece += _product(x[part], weight)
            if relu and len(xs) > 1:
                piece.relu_()
            if out is None:
                out = piece
            else:
                out[part] = piece
        assert out is not None
        ctx.save_for_backward(*tensors, out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out = ctx.saved_tensors
        need_bias, _, *need = ctx.needs_input_grad
        found: list[Any] = [None] * len(tensors)
        for i, tensor in enumerate(tensors):
            if need[i]:
                found[i] = torch.empty_like(tensor) if i % 2 == 0 else torch.zeros_like(tensor)
        turned = [weight.t().contiguous() for weight in tensors[1::2]]
        bias = grad.new_zeros(grad.shape[1]) if need_bias else None
        for part in _blocks(*grad.shape, max(x.shape[1] for x in tensors[::2])):
            piece = grad[part] if out is None else torch.ops.aten.threshold_backward(grad[part], out[part], 0)
            for i in range(0, len(tensors), 2):
                if need[i]:
                    found[i][part] = _product(piece, turned[i // 2])
                if need[i + 1]:
                    found[i + 1] += _product(piece.t(), tensors[i][part].t(), summed=True)
            if need_bias:
                bias += piece.sum(0)
        return bias, None, *found


def _blocks(rows: int, h_out: int, h_in: int) -> Iterator[slice]:
    """Rows of a product's gradients whose operands take 2 MB: weight gradients reach 175 GFLOP/s, 140 at once, 93 by MKL."""
    size = max(1000, 512_000 // (h_in + h_out))
    if Shapes.vary:
        return _pieces(rows, size)
    return (slice(start, start + size) for start in range(0, rows, size))


# -- dropout -------------------------------------------------------------------------------------------------------------

GOLDEN, _MIX1, _MIX2 = (n - 2**64 for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64, as int64


def mix(z: Tensor) -> Tensor:
    """splitmix64's finalizer, in place, on int64 with wrap-around (masks make the shifts logical)."""
    z.bitwise_xor_((z >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX1)
    z.bitwise_xor_((z >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX2)
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


def dropout_mask(seed: int, epoch: int, layer: int, vertices: Tensor, width: int, p: float, first: int = 0) -> Tensor:
    """Which numbers live: bool [R, width], a pure function of (seed, epoch, layer, vertex, column); columns count from `first`.

    The same on every device and for any subset or order of the vertices (int64 [R], global ids). 16 bits per number, so p
    is met to 1 / 65536.
    """
    device, threshold = vertices.device, _threshold(p)
    keys = _keys(seed, epoch, layer, vertices)
    word, lane = divmod(first, 4)  # a word gives four columns
    steps = torch.arange(word + 1, (first + width + 3) // 4 + 1, device=device) * GOLDEN
    mask = torch.empty(len(vertices), width, dtype=torch.bool, device=device)
    rows = max(1, 2**16 // max(len(steps), 1)) if device.type == "cpu" else max(len(vertices), 1)  # 512 KiB of words: stay in cache
    for start in range(0, len(vertices), rows):
        words = mix(keys[start : start + rows, None] + steps)
        torch.ge(words.view(torch.int16)[:, lane : lane + width], threshold, out=mask[start : start + rows])
    return mask


def _keys(seed: int, epoch: int, layer: int, vertices: Tensor) -> Tensor:
    """A word per vertex, int64 [R]; those of its columns follow from it."""
    key = torch.zeros(1, dtype=torch.int64)
    for number in (seed, epoch, layer):
        key = mix((key + number + 1) * GOLDEN)
    return mix((vertices + key.to(vertices.device)) * GOLDEN)


def _threshold(p: float) -> int:
    """The least 16 bits that live."""
    return min(round(p * 2**16), 2**16 - 1) - 2**15


def _sparse_mask(keys: Tensor, pattern: Pattern, p: float, first: int) -> Tensor:
    """dropout_mask where the pattern has numbers: bool [Z], from the words of these alone."""
    columns, threshold = pattern.columns + first, _threshold(p)
    keys, lane = pattern.per_number(keys), (columns & 3).long()
    mask = torch.empty(len(columns), dtype=torch.bool, device=columns.device)
    size = 2**16 if columns.device.type == "cpu" else max(len(columns), 1)
    for start in range(0, len(columns), size):
        part = slice(start, start + size)
        words = mix(keys[part] + ((columns[part] >> 2).long() + 1) * GOLDEN)
        torch.ge(words.view(torch.int16).view(-1, 4).gather(1, lane[part, None])[:, 0], threshold, out=mask[part])
    return mask


def dropout(x: Rows, seed: int, epoch: int, layer: int, vertices: Tensor, p: float, first: int = 0) -> Rows:
    """x [R, H] with a share p of its numbers zero and the others scaled by 1 / (1 - p); row r belongs to vertices[r]. `first`: the
    column that its first one is, where it has some of a row's columns."""
    if p == 0.0:
        return x
    if isinstance(x, SparseRows):
        mask = _sparse_mask(_keys(seed, epoch, layer, vertices), x.pattern, p, first)
        return SparseRows(x.pattern, _masked(x.values, mask, 1.0 / (1.0 - p)))
    if not x.numel():
        return x
    return _Mask.apply(x, dropout_mask(seed, epoch, layer, vertices, x.shape[1], p, first), 1.0 / (1.0 - p))


class _Mask(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)  # freed with the graph
        ctx.scale = scale
        return _masked(x, mask, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _masked(grad, *ctx.saved_tensors, ctx.scale), None, None


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return mask.view(torch.uint8).to(x.dtype).mul_(scale).mul_(x)  # bool -> float is 4x slower than uint8 -> float, x * bool 3x


# -- gradients -----------------------------------------------------------------------------------------------------------


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """torch.autograd.backward, but without its check of symbolic shapes: to import sympy for it takes a rank 0.4 s and 30 MB. The engine
    checks shapes as well."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


# -- allocator -----------------------------------------------------------------------------------------------------------


def keep_allocator() -> bool:
    """Let glibc keep large buffers instead of giving them back: fresh pages cost more than many of our kernels.

    True when it took effect (glibc only; call once, before the first large tensor).
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    try:
        libc = ctypes.CDLL(None)
        kept = libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_threshold, 32 << 20)  # older glibc refuses more than 32 MiB
        return bool(kept and libc.mallopt(trim_threshold, 2**31 - 1))
    except (AttributeError, OSError):  # musl, macOS, Windows
        return False
