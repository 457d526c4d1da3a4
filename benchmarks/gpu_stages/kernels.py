"""Kernels against the card's own rates, which are measured in the same run.

The roofline of an aggregation counts every row once: its edges, the source rows that it reads and
the rows that it makes. A graph whose rows fit the L2 may do better with what it reads again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
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
from gnnplan.executor.layers.kernels.aggregation import no_beta_warning
from gpu_stages.clock import kernel_s
from gpu_stages.record import LeftOut, Record, Row, Setting

SYNTHETIC = "synthetic:community?vertices={}&edges={}&features=8&classes=16&seed=0"
# vertices and edges: rows that the L2 holds, and rows that it does not
GRAPHS = ((20_000, 1_000_000), (100_000, 5_000_000), (400_000, 4_000_000))
WIDTHS = (16, 64, 256)
SHAPES = ((20_000, 256, 256), (200_000, 256, 256), (200_000, 602, 256))  # rows, H_in, H_out
DTYPES = (torch.float32, torch.bfloat16)
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}  # of sums, by the largest of them


def run(setting: Setting, record: Record) -> None:
    device, small = setting.torch_device, setting.small
    bandwidth = 0.0

    def copy_rate() -> Row:
        nonlocal bandwidth
        x = torch.zeros(1 << (20 if small else 28), device=device)
        y = torch.empty_like(x)
        seconds = kernel_s(device, lambda: y.copy_(x), small)
        bandwidth = 2 * x.nbytes / seconds
        return {"kernel": "copy", "bytes": 2 * x.nbytes, "seconds": seconds, "rate": bandwidth}

    record.attempt("copy", copy_rate)
    for n, dtype, tf32 in (
        (8192, torch.float32, False),
        (8192, torch.float32, True),
        (8192, torch.bfloat16, False),
    ):
        what = f"product {dtype}{' TF32' if tf32 else ''}"
        record.attempt(what, partial(_product, device, 64 if small else n, dtype, tf32, small))
    peaks = {
        row["dtype"]: row["flops"] for row in record.rows if row["kernel"] == "product" and row
    }
    for shape in ((50, 8, 8),) if small else SHAPES:
        for dtype in DTYPES:
            peak = peaks.get(_name(dtype))
            record.attempt(
                f"linear {shape} {dtype}", partial(_linear, device, shape, dtype, peak, small)
            )
    for vertices, edges in ((200, 2_000),) if small else GRAPHS:
        made: list[Block] = []

        def block(vertices: int = vertices, edges: int = edges, made: list[Block] = made) -> Block:
            if not made:
                made.append(_block(vertices, edges).to(device))
            return made[0]

        for width in (8,) if small else WIDTHS:
            for dtype in DTYPES:
                for by in (ours, sparse, gather_and_add, dgl, pyg):
                    record.attempt(
                        f"aggregation of {vertices} rows x {width} {dtype} by {by.__name__}",
                        partial(_aggregation, block, by, width, dtype, bandwidth, small),
                    )
        for name, attention in _attentions(device, 8 if small else 64):
            record.attempt(
                f"{name} on {vertices} rows",
                partial(_attention, block, name, attention, bandwidth, small),
            )
    for dtype in DTYPES:
        for by in ("ours", "torch"):
            record.attempt(
                f"dropout {dtype} by {by}", partial(_dropout, device, by, dtype, bandwidth, small)
            )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _block(vertices: int, edges: int) -> Block:
    from gnnplan.planner.graph.load import load

    graph = load(SYNTHETIC.format(vertices, edges))
    indptr = np.asarray(graph.indptr)
    return Block(indptr, np.asarray(graph.indices, np.int32), vertices).mean()


# -- products --------------------------------------------------------------------------------------


def _product(device: torch.device, n: int, dtype: torch.dtype, tf32: bool, small: bool) -> Row:
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        seconds = kernel_s(device, lambda: a @ b, small)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    name = _name(dtype) + (" TF32" if tf32 else "")
    return {
        "kernel": "product",
        "shape": [n, n, n],
        "dtype": name,
        "seconds": seconds,
        "flops": 2 * n**3 / seconds,
    }


def _linear(
    device: torch.device,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    peak: float | None,
    small: bool,
) -> list[Row]:
    rows, h_in, h_out = shape
    x = torch.randn(rows, h_in, device=device).to(dtype).requires_grad_()
    weight = torch.randn(h_out, h_in, device=device).to(dtype).requires_grad_()
    gradient = torch.randn(rows, h_out, device=device).to(dtype)

    def both() -> object:
        return torch.autograd.grad(linear(x, weight), (x, weight), gradient)

    found: list[Row] = []
    for way, work, times in (
        ("forward", lambda: linear(x.detach(), weight.detach()), 1),
        ("both", both, 3),
    ):
        seconds = kernel_s(device, work, small)
        flops = times * 2 * rows * h_in * h_out / seconds
        found.append(
            {
                "kernel": "linear",
                "shape": list(shape),
                "dtype": _name(dtype),
                "pass": way,
                "seconds": seconds,
                "flops": flops,
                "of_peak": flops / peak if peak else None,
            }
        )
    return found


# -- aggregation -----------------------------------------------------------------------------------


def ours(block: Block, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda x: aggregate(block, x)


def csr(indptr: Tensor, indices: Tensor, values: Tensor, columns: int) -> Tensor:
    """torch's matrix, with int64 indices as its users have them."""
    with no_beta_warning():
        return torch.sparse_csr_tensor(
            indptr.long(),
            indices.long(),
            values,
            (len(indptr) - 1, columns),
            check_invariants=False,
        )


def _weights(block: Block, dtype: torch.dtype) -> Tensor:
    assert block.weight is not None
    return csr(block.indptr, block.indices, block.weight.to(dtype), block.n_src)


def sparse(block: Block, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """torch.sparse."""
    matrix = _weights(block, dtype)
    return lambda x: matrix @ x


def gather_and_add(block: Block, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A row per edge, then added up: what PyG does without an extension."""
    assert block.weight is not None
    sources = block.indices.long()
    readers = block.per_edge(torch.arange(block.n_dst, device=sources.device))
    weight = block.weight.to(dtype)[:, None]

    def work(x: Tensor) -> Tensor:
        out = x.new_zeros(block.n_dst, x.shape[1])
        return out.index_add_(0, readers, x.index_select(0, sources) * weight)

    return work


def dgl(block: Block, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    library = imported("dgl")
    assert block.weight is not None
    graph = library.create_block(
        ("csc", (block.indptr.cpu().long(), block.indices.cpu().long(), [])),
        num_src_nodes=block.n_src,
        num_dst_nodes=block.n_dst,
    )
    try:
        graph = graph.to(block.indptr.device)
    except Exception as error:  # DGLError: a build without CUDA
        raise LeftOut(f"DGL {library.__version__} cannot use this device ({error})") from error
    weight = block.weight.to(dtype)[:, None]
    return lambda x: library.ops.u_mul_e_sum(graph, x, weight)


def pyg(block: Block, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """PyG's `spmm`, which uses torch.sparse, or torch-sparse where that is installed."""
    imported("torch_geometric")
    from torch_geometric.utils import spmm

    matrix = _weights(block, dtype)
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


def _aggregation(
    block: Callable[[], Block],
    by: Callable[[Block, torch.dtype], Callable[[Tensor], Tensor]],
    width: int,
    dtype: torch.dtype,
    bandwidth: float,
    small: bool,
) -> list[Row]:
    edges = block()
    device = edges.indptr.device
    x = torch.randn(edges.n_src, width, device=device).to(dtype)
    work = by(edges, dtype)
    expected = gather_and_add(edges, torch.float32)(x.float())
    scale = expected.abs().max()
    try:
        error = float((work(x).float() - expected).abs().max() / scale)
    except NotImplementedError as reason:  # torch.sparse on bfloat16 and CPUs
        if by is ours:
            raise
        raise LeftOut(str(reason)) from reason
    size = x.element_size()
    index = 4 * (edges.edges + edges.n_dst) + size * edges.edges
    least = index + (edges.n_src + edges.n_dst) * width * size
    found: list[Row] = []
    most = TOLERANCES[dtype]
    wrong = [] if error <= most else [f"sums are up to {error:.1e} of the largest off"]

    def row(way: str, seconds: float, times: int) -> None:
        found.append(
            {
                "kernel": "aggregation",
                "by": by.__name__,
                "rows": edges.n_dst,
                "edges": edges.edges,
                "width": width,
                "dtype": _name(dtype),
                "pass": way,
                "seconds": seconds,
                "of_roofline": times * least / bandwidth / seconds if bandwidth else None,
                "gathered_rate": times * edges.edges * width * size / seconds,
                "error": error,
                "wrong": wrong,
            }
        )

    row("forward", kernel_s(device, lambda: work(x), small), 1)
    if by is ours:
        leaf, gradient = x.clone().requires_grad_(), torch.ones_like(expected, dtype=dtype)
        both = kernel_s(device, lambda: torch.autograd.grad(work(leaf), leaf, gradient), small)
        row("both", both, 2)
    return found


# -- attention and dropout -------------------------------------------------------------------------


def _attentions(
    device: torch.device, width: int
) -> Iterator[tuple[str, Callable[[Block], tuple[Callable[..., Tensor], list[Tensor]]]]]:
    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, requires_grad=True)

    yield (
        "attend",
        lambda block: (
            partial(attend, block),
            [leaf(block.n_src, width), leaf(block.n_src), leaf(block.n_dst)],
        ),
    )
    yield (
        "attend_pairs",
        lambda block: (
            partial(attend_pairs, block),
            [leaf(block.n_src, 2 * width), leaf(1, width)],
        ),
    )
    yield (
        "softmax_aggregate",
        lambda block: (partial(softmax_aggregate, block), [leaf(block.n_src, width)]),
    )


def _attention(
    block: Callable[[], Block],
    name: str,
    attention: Callable[[Block], tuple[Callable[..., Tensor], list[Tensor]]],
    bandwidth: float,
    small: bool,
) -> Row:
    edges = block()
    work, leaves = attention(edges)
    gradient = torch.ones_like(work(*leaves))
    device = edges.indptr.device
    forward = kernel_s(device, lambda: work(*(leaf.detach() for leaf in leaves)), small)
    both = kernel_s(device, lambda: torch.autograd.grad(work(*leaves), leaves, gradient), small)
    width = gradient.shape[1]
    least = 8 * edges.edges + 4 * (edges.n_src + edges.n_dst) * width
    return {
        "kernel": name,
        "rows": edges.n_dst,
        "edges": edges.edges,
        "width": width,
        "dtype": "float32",
        "forward_s": forward,
        "both_s": both,
        "of_roofline": least / bandwidth / forward if bandwidth else None,
    }


def _dropout(
    device: torch.device, by: str, dtype: torch.dtype, bandwidth: float, small: bool
) -> Row:
    rows, width = (500, 16) if small else (200_000, 256)
    x = torch.randn(rows, width, device=device).to(dtype)
    vertices = torch.arange(rows, device=device)
    work = {
        "ours": lambda: dropout(x, 0, 0, 1, vertices, 0.5),
        "torch": lambda: F.dropout(x, 0.5, training=True),
    }[by]
    kept = float((work() != 0).float().mean())
    seconds = kernel_s(device, work, small)
    return {
        "kernel": "dropout",
        "by": by,
        "rows": rows,
        "width": width,
        "dtype": _name(dtype),
        "seconds": seconds,
        "of_roofline": 2 * x.nbytes / bandwidth / seconds if bandwidth else None,
        "kept": kept,
    }
