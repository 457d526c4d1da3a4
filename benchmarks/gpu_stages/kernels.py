"""Kernels against the card's own rates, which are measured in the same run, and against the
planner's roofline of an H100.

The largest graphs have the size of ogbn-products. A row that is gathered again may come from the
L2, so gathers can be faster than copies; sources of local graphs lie close together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.kernels import (
    Block,
    aggregate,
    attend,
    attend_pairs,
    dropout,
    linear,
    softmax_aggregate,
)
from gnnplan.executor.layers.kernels.aggregation import no_beta_warning, sparse_product, spmm
from gnnplan.planner.cluster.compute import Roofline
from gnnplan.planner.graph.graph import spread_of
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.schedule import Compute, Gather
from gpu_stages import graphs
from gpu_stages.clock import kernel_s
from gpu_stages.record import LeftOut, Record, Row, Setting

PRODUCTS = 2_449_029, 123_718_280  # vertices, edges
WIDTHS = (256, 100, 47)  # hidden rows, features and classes of ogbn-products
# vertices, edges: rows that the L2 holds, and rows that it does not
FEWER, FEWER_WIDTHS = ((20_000, 1_000_000), (400_000, 4_000_000)), (16, 64, 256)
ATTENDED = 1_000_000, 20_000_000
SHAPES = ((PRODUCTS[0], 256, 256), (200_000, 602, 256))  # rows, H_in, H_out
DTYPES = (torch.float32, torch.bfloat16)
KINDS = ((torch.float32, False), (torch.float32, True), (torch.bfloat16, False))  # with TF32?
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of sums, by the largest of them
CHECKED = 2000  # rows whose sums are made again in float64


@dataclass(frozen=True)
class Edges:
    """A mean over edges on the device, in CSR by destination; as many sources as destinations."""

    name: str
    indptr: Tensor
    indices: Tensor
    weight: Tensor

    @staticmethod
    def drawn(device: torch.device, vertices: int, edges: int, local: bool) -> Edges:
        indptr, indices = graphs.csr(device, vertices, edges, local)
        degree = indptr.diff().long()
        weight = (1.0 / degree.clamp(min=1)).repeat_interleave(degree, output_size=len(indices))
        return Edges("local" if local else "random", indptr, indices, weight)

    @property
    def vertices(self) -> int:
        return len(self.indptr) - 1

    def block(self) -> Block:
        """The same with its transpose."""
        csr = self.indptr.cpu().numpy(), self.indices.cpu().numpy()
        return Block(*csr, self.vertices, self.weight.cpu()).to(self.indptr.device)


@dataclass
class Card:
    """The device, and the rate at which it copies [B/s]; 0 until that is measured."""

    device: torch.device
    small: bool
    bandwidth: float = 0.0

    def seconds(self, work: Callable[[], Any]) -> float:
        """Seconds of the work's kernels."""
        return kernel_s(self.device, work, self.small)

    def of_copy(self, nbytes: float, seconds: float) -> float | None:
        """How fast so many bytes are moved, as a share of a copy's rate."""
        return nbytes / seconds / self.bandwidth if self.bandwidth else None

    def rows(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*shape, device=self.device).to(dtype)

    def copy(self) -> Row:
        x = torch.zeros(1 << (20 if self.small else 28), device=self.device)
        y = torch.empty_like(x)
        seconds = self.seconds(lambda: y.copy_(x))
        self.bandwidth = 2 * x.nbytes / seconds
        return {"kernel": "copy", "bytes": 2 * x.nbytes, "seconds": seconds, "rate": self.bandwidth}


def run(setting: Setting, record: Record) -> None:
    card, small = Card(setting.torch_device, setting.small), setting.small
    record.attempt("copy", card.copy)

    def aggregations(vertices: int, edges: int, widths: tuple[int, ...], local: bool) -> None:
        made = cache(partial(Edges.drawn, card.device, vertices, edges, local))
        for width, dtype, by in product(widths, DTYPES, (ours, sparse, pyg)):
            record.attempt(
                f"aggregation {'local' if local else 'random'} of {vertices} rows x {width}"
                f" {_name(dtype)} by {by.__name__}",
                partial(_aggregation, card, made, by, width, dtype),
            )

    for local in (False, True):
        aggregations(*((200, 2_000) if small else PRODUCTS), (8,) if small else WIDTHS, local)
    for width, dtype, by in product((16,) if small else WIDTHS[:2], DTYPES, ("ours", "torch")):
        what = f"dropout of rows x {width} {_name(dtype)} by {by}"
        record.attempt(what, partial(_dropout, card, by, width, dtype))
    for kind in KINDS:
        work = partial(_product, card, 64 if small else 8192, *kind)
        record.attempt(f"product {_name(*kind)}", work)
    peaks = {row["dtype"]: row["flops"] for row in record.rows if row["kernel"] == "product"}
    for shape, kind in product(((50, 8, 8),) if small else SHAPES, KINDS):
        work = partial(_linear, card, shape, *kind, peaks.get(_name(*kind)))
        record.attempt(f"linear {shape} {_name(*kind)}", work)
    attended = cache(
        lambda: Edges.drawn(
            card.device, *((200, 2_000) if small else ATTENDED), local=False
        ).block()
    )
    for name in ATTENTIONS:
        record.attempt(name, partial(_attention, card, attended, name, 8 if small else 64))
    for size in () if small else FEWER:
        aggregations(*size, FEWER_WIDTHS, local=False)


TYPES = {2: "bfloat16"}  # of products, by the bytes of a number


def _name(dtype: torch.dtype, tf32: bool = False) -> str:
    return str(dtype).removeprefix("torch.") + " TF32" * tf32


def _predicted(work: Compute, measured_s: float, degrees: Tensor | None = None) -> Row:
    """The planner's seconds of the work on an H100, and how far they are off."""
    device = read_cluster("dgx_h100").device.multiplying(TYPES.get(work.itemsize, "float32"))
    spread = 0.0 if degrees is None else spread_of(degrees.cpu().numpy().astype(np.int64))
    seconds = float(Roofline(device, spread, exchange_bandwidth=1.0).compute_s(work))
    return {"predicted_s": seconds, "roofline_error": seconds / measured_s - 1}


# -- products --------------------------------------------------------------------------------------


def _with_tf32(tf32: bool, seconds: Callable[[], float]) -> float:
    """The seconds, with products of float32 allowed to be TF32 or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        return seconds()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(card: Card, n: int, dtype: torch.dtype, tf32: bool) -> Row:
    a, b = (card.rows(n, n, dtype=dtype) for _ in range(2))
    seconds = _with_tf32(tf32, lambda: card.seconds(lambda: a @ b))
    work = Compute(2.0 * n**3, launches=1, itemsize=a.itemsize, gemm_bytes=3.0 * a.nbytes)
    return {
        "kernel": "product",
        "shape": [n, n, n],
        "dtype": _name(dtype, tf32),
        "seconds": seconds,
        "flops": 2 * n**3 / seconds,
        **_predicted(work, seconds),
    }


def _linear(
    card: Card, shape: tuple[int, int, int], dtype: torch.dtype, tf32: bool, peak: float | None
) -> list[Row]:
    rows, h_in, h_out = shape
    x = card.rows(rows, h_in, dtype=dtype).requires_grad_()
    weight = card.rows(h_out, h_in, dtype=dtype).requires_grad_()
    gradient = card.rows(rows, h_out, dtype=dtype)

    def forward() -> object:
        return linear(x.detach(), weight.detach())

    def both() -> object:
        return torch.autograd.grad(linear(x, weight), (x, weight), gradient)

    found = list[Row]()
    once, moved = 2.0 * rows * h_in * h_out, 1.0 * rows * (h_in + h_out) * x.itemsize
    for work, times in ((forward, 1), (both, 3)):
        seconds = _with_tf32(tf32, lambda work=work: card.seconds(work))
        counted = Compute(
            times * once, launches=times, itemsize=x.itemsize, gemm_bytes=times * moved
        )
        found.append(
            {
                "kernel": "linear",
                "shape": list(shape),
                "dtype": _name(dtype, tf32),
                "pass": work.__name__,
                "seconds": seconds,
                "flops": times * once / seconds,
                "of_peak": times * once / seconds / peak if peak else None,
                **_predicted(counted, seconds),
            }
        )
    return found


# -- aggregation -----------------------------------------------------------------------------------


def ours(edges: Edges, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    weight = edges.weight.to(dtype)
    return lambda x: spmm(edges.indptr, edges.indices, weight, x)


def sparse(edges: Edges, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """torch.sparse, which is cuSPARSE."""
    weight = edges.weight.to(dtype)
    return lambda x: sparse_product(edges.indptr, edges.indices, weight, x)


def csr(indptr: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    """torch's matrix, with int64 indices as its users have them."""
    with no_beta_warning():
        places, size = (indptr.long(), indices.long()), (len(indptr) - 1, columns)
        return torch.sparse_csr_tensor(*places, values, size, check_invariants=False)


def pyg(edges: Edges, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """PyG's `spmm`, which uses torch.sparse, or torch-sparse where that is installed."""
    imported("torch_geometric")
    from torch_geometric.utils import spmm

    matrix = csr(edges.indptr, edges.indices, edges.weight.to(dtype), edges.vertices)
    return lambda x: spmm(matrix, x, "sum")


def imported(name: str) -> Any:
    """A library, or LeftOut with the reason."""
    from importlib import import_module

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return import_module(name)
        except Exception as error:  # not only ImportError: DGL's parts fail in many ways
            raise LeftOut(f"{name} cannot be imported ({type(error).__name__}: {error})") from error


def _checked(edges: Edges, x: Tensor) -> Tensor:
    """The first sums in float64."""
    indptr = edges.indptr[: CHECKED + 1]
    sources = edges.indices[: int(indptr[-1])].long()
    readers = torch.repeat_interleave(indptr.diff().long())
    weighted = x[sources].double() * edges.weight[: len(sources), None].double()
    out = torch.zeros(len(indptr) - 1, x.shape[1], dtype=torch.float64, device=x.device)
    return out.index_add_(0, readers, weighted)


def _aggregation(
    card: Card,
    made: Callable[[], Edges],
    by: Callable[[Edges, torch.dtype], Callable[[Tensor], Tensor]],
    width: int,
    dtype: torch.dtype,
) -> Row:
    edges = made()
    count, vertices = len(edges.indices), edges.vertices
    x = card.rows(vertices, width, dtype=dtype)
    work, expected = by(edges, dtype), _checked(edges, x)
    try:
        out = work(x)
    except NotImplementedError as reason:  # torch.sparse on bfloat16 and CPUs
        if by is ours:
            raise
        raise LeftOut(str(reason)) from reason
    error = float((out[:CHECKED].double() - expected).abs().max() / expected.abs().max())
    repeats = torch.equal(out, work(x))
    del out
    seconds = card.seconds(lambda: work(x))
    gathered = count * width * x.itemsize
    read_once = 4 * (count + vertices) + x.itemsize * count + 2 * x.nbytes
    gather = Gather(count, width, vertices, vertices)
    counted = Compute(gathers=(gather,), launches=1, itemsize=x.itemsize)
    return {
        "kernel": "aggregation",
        "by": by.__name__,
        "graph": edges.name,
        "rows": vertices,
        "edges": count,
        "width": width,
        "dtype": _name(dtype),
        "seconds": seconds,
        "gathered_rate": gathered / seconds,
        "gathered_of_copy": card.of_copy(gathered, seconds),
        "of_roofline": card.of_copy(read_once, seconds),
        "error": error,
        "repeats": repeats,
        **(_predicted(counted, seconds, edges.indptr.diff()) if by is ours else {}),
        "wrong": []
        if error <= TOLERANCES[dtype]
        else [f"sums are up to {error:.1e} of the largest off"],
    }


# -- attention and dropout -------------------------------------------------------------------------


# name -> the kernel, and the shapes of what it takes from sources and destinations of some width
ATTENTIONS: dict[str, tuple[Any, Callable[[int, int, int], list[tuple[int, ...]]]]] = {
    "aggregate": (aggregate, lambda sources, readers, width: [(sources, width)]),
    "attend": (attend, lambda sources, readers, width: [(sources, width), (sources,), (readers,)]),
    "attend_pairs": (
        attend_pairs,
        lambda sources, readers, width: [(sources, 2 * width), (1, width)],
    ),
    "softmax_aggregate": (softmax_aggregate, lambda sources, readers, width: [(sources, width)]),
}


def _attention(card: Card, made: Callable[[], Block], name: str, width: int) -> Row:
    block, (kernel, shapes_of) = made(), ATTENTIONS[name]
    work, shapes = partial(kernel, block), shapes_of(block.n_src, block.n_dst, width)
    leaves = [card.rows(*shape).requires_grad_() for shape in shapes]
    gradient = torch.ones_like(work(*leaves))
    forward = card.seconds(lambda: work(*(leaf.detach() for leaf in leaves)))
    both = card.seconds(lambda: torch.autograd.grad(work(*leaves), leaves, gradient))
    width = gradient.shape[1]
    least = 8 * block.edges + 4 * (block.n_src + block.n_dst) * width
    return {
        "kernel": name,
        "rows": block.n_dst,
        "edges": block.edges,
        "width": width,
        "dtype": "float32",
        "forward_s": forward,
        "both_s": both,
        "gathered_of_copy": card.of_copy(4 * block.edges * width, forward),
        "of_roofline": card.of_copy(least, forward),
    }


def _dropout(card: Card, by: str, width: int, dtype: torch.dtype) -> Row:
    rows = 500 if card.small else PRODUCTS[0]
    x = card.rows(rows, width, dtype=dtype).requires_grad_()
    vertices, gradient = torch.arange(rows, device=card.device), torch.ones_like(x)

    def work(x: Tensor) -> Tensor:
        out = dropout(x, 0, 0, 1, vertices, 0.5) if by == "ours" else F.dropout(x, 0.5)
        assert isinstance(out, Tensor)
        return out

    kept = float((work(x.detach()) != 0).float().mean())
    seconds = card.seconds(lambda: work(x.detach()))
    both = card.seconds(lambda: torch.autograd.grad(work(x), x, gradient))
    counted = Compute(elementwise_bytes=2.0 * x.nbytes, launches=1, itemsize=x.itemsize)
    return {
        "kernel": "dropout",
        "by": by,
        "rows": rows,
        "width": width,
        "dtype": _name(dtype),
        "forward_s": seconds,
        "both_s": both,
        "floor_s": 2 * x.nbytes / card.bandwidth if card.bandwidth else None,
        "of_roofline": card.of_copy(2 * x.nbytes, seconds),
        "kept": kept,
        **(_predicted(counted, seconds) if by == "ours" else {}),
    }
