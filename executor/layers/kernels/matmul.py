"""Linear layers: matrix products, on CPUs by MKL or oneDNN.

oneDNN is called by a private operation of torch, so `has_onednn` probes it first.
Shapes: R rows, H_in and H_out values per row of input and output."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnnplan.executor.layers.kernels.rows import SparseRows
from gnnplan.executor.layers.kernels.runtime import apply, backward
from gnnplan.planner.gnn.trace import LEAST, block_rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, relu: bool = False) -> Tensor:
    """Multiply x [R, H_in] by weight [H_out, H_in] transposed, add bias [H_out] -> [R, H_out].

    `relu`: apply ReLU to the result.
    """
    if isinstance(x, SparseRows):
        out = x.times(weight)
        out = out if bias is None else out.add_(bias)
        return out.relu_() if relu else out
    return linear_sum([(x, weight)], bias, relu)


def linear_sum(
    terms: Sequence[tuple[Tensor, Tensor]], bias: Tensor | None = None, relu: bool = False
) -> Tensor:
    """Sum `linear` over several (x, weight), as in GraphSAGE, with one bias and ReLU.

    The backward pass reads the gradient once for all of them.
    """
    return apply(_LinearSum, bias, relu, *(tensor for term in terms for tensor in term))


class Shapes:
    """The process-wide setting whether the number of rows varies from step to step.

    oneDNN compiles a kernel for every new shape, which takes 0.5 ms, and keeps its code (`CODE`).
    If shapes vary, as in mini-batches, products are therefore split into pieces of a few sizes
    (`_pieces`).
    """

    vary = False
    least = LEAST  # rows of the smallest piece; MKL, which compiles nothing, takes fewer rows

    @classmethod
    @contextmanager
    def varying(cls, vary: bool) -> Iterator[None]:
        """Set `vary` inside the with block."""
        before, cls.vary = cls.vary, vary
        try:
            yield
        finally:
            cls.vary = before


# [B] of machine code that oneDNN keeps per shape, of either type (torch 2.13: 0.55 to 0.63 MB on
# AMD's cores, 0.7 MB for bfloat16 on Intel's; torch 2.11: 0.04 MB, and 0.31 with a bias)
CODE = 0.6e6


@functools.cache
def by_onednn() -> bool:
    """Whether oneDNN multiplies float32 rows: on cores with AVX-512 that are not Intel's.

    On AMD's cores MKL leaves half of AVX-512 idle. On Intel's (fourth generation) MKL is faster in
    gradients of weights: 135 GFLOP/s per core against 106. With AVX2 (AMD's third generation) MKL
    is as fast (60 to 76 GFLOP/s per core), faster with few rows or narrow layers (oneDNN: 42 to
    62), and compiles nothing.
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    cpu: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # not in older torch
    return "Intel" not in str(cpu.get("cpu_name")) and has_onednn()


@functools.cache
def warm_up(device: torch.device) -> None:
    """Make cuBLAS, MKL or oneDNN allocate their permanent workspaces, tens of MB, once per process.

    Call it before memory is measured. cuBLAS has a workspace per stream and host thread, and
    autograd's thread is one of these. MKL packs the factors of a product, also of the few rows that
    oneDNN leaves to it; with AVX-512 no wider layer needs more workspace than the one here.
    """
    if device.type == "cuda":
        rows = torch.zeros(16, 16, device=device, requires_grad=True)
        # makes the device's context current in autograd's thread, which cuBLAS does not do
        backward([rows * 2.0], [torch.zeros_like(rows)])
        out = F.linear(rows, rows) + F.linear(rows, rows, rows[0])
        backward([out], [torch.zeros_like(out)])
        return
    rows, weight, grad = torch.zeros(512, 4096), torch.zeros(512, 4096), torch.zeros(512, 512)
    F.linear(rows, weight), grad @ weight, grad.t() @ rows
    by_onednn()  # its probe runs a product
    if code_of(torch.bfloat16):
        F.linear(torch.zeros(1, 1).bfloat16(), torch.zeros(1, 1).bfloat16())


def code_of(dtype: torch.dtype) -> float:
    """Return the machine code kept per shape of a product of such rows [B]; 0 if none is.

    torch multiplies bfloat16 rows by oneDNN on all cores with AVX-512."""
    keeps = dtype == torch.float32 and by_onednn()
    if dtype == torch.bfloat16:
        with suppress(AttributeError):  # torch built without oneDNN
            keeps = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return CODE * keeps


def product_codes() -> dict[str, float]:
    """Return `code_of` as fields of a Device (planner/cluster/spec.py)."""
    return {
        "product_code": code_of(torch.float32),
        "product_code_bfloat16": code_of(torch.bfloat16),
    }


def _by_pieces(rows: Tensor) -> bool:
    """Whether products of these rows are split into pieces of a few sizes."""
    return Shapes.vary and not rows.is_cuda and code_of(rows.dtype) > 0


def has_onednn() -> bool:
    """Whether this torch has the private oneDNN operation, and its results are right."""
    generator = torch.Generator().manual_seed(0)
    a, b, bias, grad = (
        torch.rand(shape, generator=generator) - 0.5 for shape in ((5, 3), (4, 3), (4,), (5, 4))
    )
    try:
        return torch.allclose(
            _onednn(a, b, bias, "relu"), F.linear(a, b, bias).relu(), atol=1e-6
        ) and torch.allclose(_onednn(grad.t(), a.t()), grad.t() @ a, atol=1e-6)
    except (AttributeError, RuntimeError):
        return False


def _product(
    a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none", summed: bool = False
) -> Tensor:
    """Multiply a [R, K] by b [H, K] transposed, add bias [H] -> [R, H], and apply `activation`.

    summed: whether K, the summed dimension, is the one that varies; else R varies.
    """
    is_last_piece = _is_last_piece(a, summed)
    if _is_private(a, b) and not is_last_piece:
        return _onednn(a, b, bias, activation)
    if a.dtype == torch.bfloat16 and is_last_piece:
        bias = None if bias is None else bias.float()
        return _product(a.float(), b.float(), bias, activation, summed).to(a.dtype)
    out = F.linear(a, b, bias)
    return out.relu_() if activation == "relu" else out


def _store(out: Tensor, a: Tensor, b: Tensor, add: bool = False, summed: bool = False) -> None:
    """Write `_product` of a and b into out [R, H], or add it.

    MKL writes and adds in place, and so does oneDNN with bfloat16 rows; its private operation does
    not. cuBLAS sums into a wider type without rounding.
    """
    if _is_private(a, b) or out.dtype != a.dtype or _is_last_piece(a, summed):
        product = (
            torch.mm(a, b.t(), out_dtype=out.dtype) if a.is_cuda else _product(a, b, summed=summed)
        )
        out.add_(product) if add else out.copy_(product)
    elif add:
        out.addmm_(a, b.t())
    else:
        torch.mm(a, b.t(), out=out)


def _is_private(a: Tensor, b: Tensor) -> bool:
    """Whether oneDNN's private operation multiplies a and b; it takes no empty ones."""
    is_float32 = not a.is_cuda and a.dtype == torch.float32 and by_onednn()
    return is_float32 and a.numel() > 0 and b.numel() > 0


def _is_last_piece(a: Tensor, summed: bool) -> bool:
    """Whether `a` is the short last piece of `_pieces`, for which oneDNN shall compile nothing."""
    return a.shape[summed] < Shapes.least and _by_pieces(a)


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """Compute `_product` by oneDNN, which copies a transposed `a` but not a transposed `b`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(a, b, bias, activation, [], "")
    return product


def _add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add grad [R, H_out] transposed times x [R, H_in] to total [H_out, H_in].

    oneDNN copies the first factor. With 10 columns of x and 128 of grad it takes half the time if
    the first factor is x.
    """
    if x.shape[1] < grad.shape[1]:
        total, grad, x = total.t(), x, grad
    _store(total, grad.t(), x.t(), add=True, summed=True)


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Return a weight's gradient, outside autograd: gradient [R, H_out]^T times x [R, H_in].

    Like the backward pass of `linear` it sums over blocks of rows -> [H_out, H_in].
    """
    if x.is_cuda:
        return gradient.t() @ x
    out = x.new_zeros(gradient.shape[1], x.shape[1])
    for part in _row_blocks([x], out.shape[0]):
        _add_weight_gradient(out, gradient[part], x[part])
    return out


class _LinearSum(torch.autograd.Function):
    """Autograd of `linear_sum`. bfloat16 rows have float32 weights.

    Weight gradients are summed over blocks in float32; autograd would round them to bfloat16.
    On GPUs they are added to .grad itself (`_total`).

    On CPUs the backward pass goes by blocks of rows: a block of the gradient stays in cache for
    everything that is computed from it. So a three-layer GraphSAGE of width 256 trains 7 % faster
    than with whole matrices.
    """

    @staticmethod
    def forward(ctx: Any, bias: Tensor | None, relu: bool, *tensors: Tensor) -> Tensor:
        xs, dtype = tensors[::2], tensors[0].dtype
        weights = [weight.to(dtype) for weight in tensors[1::2]]
        bias_parameter, bias = bias, None if bias is None else bias.to(dtype)

        def compute(part: slice) -> Tensor:
            relu_inside = relu and len(xs) == 1
            out = _product(xs[0][part], weights[0], bias, "relu" if relu_inside else "none")
            for x, weight in zip(xs[1:], weights[1:], strict=True):
                _store(out, x[part], weight, add=True)
            return out.relu_() if relu and not relu_inside else out

        if _by_pieces(xs[0]):
            out = xs[0].new_empty(xs[0].shape[0], weights[0].shape[0])
            for part in _row_blocks(xs, out.shape[1]):
                out[part] = compute(part)
        else:
            out = compute(slice(None))
        ctx.save_for_backward(*tensors, bias_parameter, out if relu else None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, bias, out = ctx.saved_tensors
        xs, weights = tensors[::2], tensors[1::2]
        need_bias, _, *need = ctx.needs_input_grad
        to_x = [
            torch.empty_like(x) if needed else None for x, needed in zip(xs, need[::2], strict=True)
        ]
        to_weight = [
            _total(weight) if needed else None
            for weight, needed in zip(weights, need[1::2], strict=True)
        ]
        to_bias = _total(bias) if need_bias else None
        transposed = [weight.to(grad.dtype).t() for weight in weights]
        if not grad.is_cuda:  # cuBLAS takes transposed operands without a copy
            transposed = [weight.contiguous() for weight in transposed]
        for part in _row_blocks(xs, grad.shape[1]):
            piece = grad[part]
            if out is not None:
                piece = torch.ops.aten.threshold_backward(piece, out[part], 0)
            for i, x in enumerate(xs):
                if (gradient := to_x[i]) is not None:
                    _store(gradient[part], piece, transposed[i])
                if (gradient := to_weight[i]) is not None:
                    _add_weight_gradient(gradient, piece, x[part])
            if to_bias is not None:
                # with a dtype, torch would copy the piece on CPUs
                to_bias += piece.sum(0, dtype=to_bias.dtype if piece.is_cuda else None)
        left = [
            None if total is None or total is parameter.grad else total
            for total, parameter in zip((to_bias, *to_weight), (bias, *weights), strict=True)
        ]
        gradients = [g for pair in zip(to_x, left[1:], strict=True) for g in pair]
        return left[0], None, *gradients


def _total(parameter: Tensor) -> Tensor:
    """Return the tensor to which a parameter's gradient is added: zeros, or on GPUs its .grad.

    Zeros on GPUs would cost a launch to fill, and another to add them to .grad.
    """
    if parameter.is_cuda and parameter.is_leaf and parameter.grad is not None:
        return parameter.grad
    return torch.zeros_like(parameter)


def _row_blocks(xs: Sequence[Tensor], h_out: int) -> Iterable[slice]:
    """Return blocks of rows of xs [R, H_in] whose operands take 2 MB (bfloat16: 4 MB).

    On an AMD core with AVX-512, weight gradients reach 175 GFLOP/s by blocks, 140 without, and 93
    by MKL. With AMX, bfloat16 gradients take a quarter less time in blocks of 4 MB than of 1 MB.
    """
    rows, h_in, dtype = len(xs[0]), max(x.shape[1] for x in xs), xs[0].dtype
    if xs[0].is_cuda:
        return [slice(None)]
    size = block_rows(h_in, h_out, dtype.itemsize)
    if _by_pieces(xs[0]):
        return _pieces(rows, size)
    return (slice(start, start + size) for start in range(0, rows, size))


def _pieces(rows: int, size: int) -> Iterator[slice]:
    """Yield pieces of `size` rows, then of `least` times powers of two, then the rest.

    >>> [piece.stop - piece.start for piece in _pieces(2500, 1000)]
    [1000, 1000, 256, 128, 116]
    """
    start = 0
    while rows - start >= size:
        yield slice(start, start := start + size)
    while (left := rows - start) >= Shapes.least:
        power = (left // Shapes.least).bit_length() - 1
        yield slice(start, start := start + (Shapes.least << power))
    if left:
        yield slice(start, rows)
