"""Replacements where torch's or glibc's default is too slow: autograd calls and the allocator.

`triton_kernels` chooses between our own Triton kernels and torch's kernels on this GPU."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Kernel:
    """A mark around operations of torch that are one kernel on a GPU: `with kernel: ..`.

    layers/count.py, which sees each operation on CPUs, then counts one launch."""

    entered = 0  # number of `with` blocks so far
    inside = False

    def __enter__(self) -> None:
        self.entered, self.inside = self.entered + 1, True

    def __exit__(self, *_: object) -> None:
        self.inside = False


kernel = Kernel()


def apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    """Call `function.apply` of a function with one output; torch's method has no types."""
    output: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def gradient_of(leaf: Tensor) -> Tensor:
    """Return a leaf's gradient after a backward pass; 0 if nothing trainable depends on the leaf,
    as if a module reads rows under torch.no_grad."""
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, into: list[Tensor]) -> Tensor:
        ctx.into = into
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.into.append(gradient)
        return None, None, None


def collecting(rows: Tensor, varies: bool = True) -> tuple[Tensor, Callable[[], Tensor]]:
    """Return rows that get a gradient, and a function that sums the gradients of all backward
    passes so far, and forgets them; 0 if nothing trainable depends on the rows, or if they are
    constant.

    Unlike a leaf of autograd, the rows are freed as soon as no later operation reads them.
    """
    into: list[Tensor] = []
    zeros = partial(torch.zeros, rows.shape, dtype=rows.dtype, device=rows.device)

    def taken() -> Tensor:
        total = into.pop().contiguous() if into else zeros()
        while into:
            total = total + into.pop()
        return total

    anchor = torch.empty(0, requires_grad=True)
    return apply(_Collect, anchor, rows, into) if varies else rows, taken


Root = Tensor | GradientEdge  # where a backward pass begins


def root_of(output: Tensor) -> Root:
    """Return the root of a backward pass from `output`: its node, which holds no rows."""
    return get_gradient_edge(output) if output.requires_grad else output


def backward(outputs: Sequence[Root], gradients: Sequence[Tensor]) -> None:
    """Run torch.autograd.backward without its check of symbolic shapes.

    That check imports sympy, which costs a rank 0.4 s and 30 MB. The autograd engine checks shapes
    too. Outputs that need no gradient are skipped: sums of constant features, for instance.
    """
    pairs = [
        (root, gradient)
        for root, gradient in zip(outputs, gradients, strict=True)
        if isinstance(root, GradientEdge) or root.requires_grad
    ]
    if not pairs:
        return
    roots, root_gradients = zip(*pairs, strict=True)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        roots,
        root_gradients,
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def pin_no_more_than_asked() -> None:
    """Allocate page-locked memory in the requested size.

    torch would round it up to a power of two. A user's allocator settings take precedence.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    with suppress(AttributeError, RuntimeError, ValueError):  # private, missing in some versions
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


def keep_allocator() -> None:
    """Make glibc keep large freed buffers: fresh pages cost more than many of our kernels.

    Call it once, before the first large tensor.
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    libc = ctypes.CDLL(None)
    # older versions of glibc refuse more than 32 MiB
    if libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_threshold, 32 << 20):
        libc.mallopt(trim_threshold, -1)


def release_memory() -> None:
    """Return the pages of freed buffers to the system.

    Building a rank's part of the graph takes several times the memory of the part, only once.
    """
    ctypes.CDLL(None).malloc_trim(0)


# -- the choice of kernels on a GPU ----------------------------------------------------------------


@functools.cache
def triton_kernels() -> ModuleType | None:
    """Return triton_kernels.py if Triton works on this GPU; else None, for torch's kernels.

    Triton comes with torch's builds for CUDA; to start kernels it also needs a C compiler.
    """
    try:
        from gnnplan.executor.layers.kernels import triton_kernels as ours

        ours.probe()
    except Exception as reason:  # the compiler's, the driver's, or a missing package's
        warnings.warn(
            f"Triton does not work here ({type(reason).__name__}: {reason}); sums over edges,"
            " attention and dropout take torch's kernels, which are slower and need more memory",
            stacklevel=2,
        )
        return None
    return ours
