"""Where torch's or glibc's default way is too slow for a rank: autograd calls and the allocator."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor


class Kernel:
    """Operations of torch that are one kernel on a GPU: `with kernel: ..`.

    layers/count.py, which sees the operations, counts one launch."""

    entered = 0  # times
    inside = False

    def __enter__(self) -> None:
        self.entered, self.inside = self.entered + 1, True

    def __exit__(self, *_: object) -> None:
        self.inside = False


kernel = Kernel()


def apply(function: type[torch.autograd.Function], *inputs: object) -> Tensor:
    """`function.apply(*inputs)` of a function with one output; torch leaves it without types."""
    output: Tensor = function.apply(*inputs)  # type: ignore[no-untyped-call]
    return output


def gradient_of(leaf: Tensor) -> Tensor:
    """The gradient of a leaf, after a backward pass; 0 if nothing that learns has read it, as where
    a module looks at rows under torch.no_grad."""
    if leaf.grad is None:
        leaf.grad = torch.zeros_like(leaf)
    return leaf.grad


def backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """torch.autograd.backward without its check of symbolic shapes.

    That check imports sympy, which costs a rank 0.4 s and 30 MB. The autograd engine checks shapes
    too. What nothing that learns has made is left out, as sums of constant features are.
    """
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    if not pairs:
        return
    learns, its_gradients = zip(*pairs, strict=True)
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        learns,
        its_gradients,
        False,
        False,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def pin_no_more_than_asked() -> None:
    """Let page-locked memory be as large as what is kept there.

    torch rounds it up to a power of two. Whoever has set the allocator keeps it so.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    with suppress(AttributeError, RuntimeError, ValueError):  # private, and not in every torch
        torch._C._accelerator_setAllocatorSettings("pinned_max_round_threshold_mb:1")


def keep_allocator() -> bool:
    """Let glibc keep large freed buffers: fresh pages cost more than many of our kernels.

    Call it once, before the first large tensor. Returns whether it took effect (glibc only).
    """
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    try:
        libc = ctypes.CDLL(None)
        # older glibc refuses more than 32 MiB
        kept = libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_threshold, 32 << 20)
        return bool(kept and libc.mallopt(trim_threshold, 2**31 - 1))
    except (AttributeError, OSError):  # musl, macOS, Windows
        return False


def give_back() -> None:
    """Give the pages of freed buffers back to the system (glibc only).

    What makes a rank's part of the graph takes several times as much as the part, and never again.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
