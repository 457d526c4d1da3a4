"""Sparse features: rows in CSR, and the sparsity pattern that several row tensors share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import sparse
from scipy.sparse import csr_matrix
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from gnnplan.executor.layers.kernels.aggregation import spmm
from gnnplan.executor.layers.kernels.block import by_column
from gnnplan.executor.layers.kernels.page_locked import sent
from gnnplan.executor.layers.kernels.runtime import apply


class Pattern:
    """A sparsity pattern: CSR of Z stored values, indptr [R + 1] and columns [Z], int32.

    Row tensors with values at the same places share a pattern, and with it the pattern's transpose
    and slices, which are computed once.
    """

    def __init__(
        self, indptr: Tensor, columns: Tensor, width: int, on_host: Tensor | None = None
    ) -> None:
        """on_host: a copy of indptr in host memory; None: `cut` blocks the host."""
        self.indptr, self.columns, self.width = indptr, columns, width
        self.on_host = indptr if on_host is None else on_host
        self._slices: dict[tuple[int, int], tuple[Pattern, slice]] = {}

    def per_number(self, values: Tensor) -> Tensor:
        """Repeat a value per row [R] for each stored value of the row [Z]."""
        return values.repeat_interleave(self.indptr.diff(), output_size=len(self.columns))

    @functools.cached_property
    def transposed(self) -> tuple[Tensor, Tensor, Tensor]:
        """The CSR over columns: indptr [width + 1], rows [Z], and the place of each value [Z]."""
        rows = torch.arange(len(self.indptr) - 1, dtype=torch.int32, device=self.columns.device)
        if self.columns.device.type != "cpu":
            return by_column(self.per_number(rows), self.columns, self.width)
        # takes half the time of torch's sort, or less
        places = np.arange(len(self.columns), dtype=np.int32)
        matrix = sparse.csr_array(
            (places, self.columns.numpy(), self.indptr.numpy()), shape=(len(rows), self.width)
        ).tocsc()
        indptr, of_numbers, order = map(
            torch.from_numpy, (matrix.indptr, matrix.indices, matrix.data)
        )
        return indptr, of_numbers, order

    def cut(self, start: int, stop: int) -> tuple[Pattern, slice]:
        """Return the pattern of rows [start, stop), and the slice of their stored values."""
        if (start, stop) not in self._slices:
            first, last = self.on_host[[start, stop]].tolist()
            rows, numbers = slice(start, stop + 1), slice(first, last)
            indptr, on_host = self.indptr[rows] - first, self.on_host[rows] - first
            pattern = Pattern(indptr, self.columns[numbers], self.width, on_host)
            self._slices[start, stop] = pattern, slice(first, last)
        return self._slices[start, stop]


def _offsets(counts: Tensor) -> Tensor:
    return F.pad(counts.cumsum(0), (1, 0)).int()


class SparseRows(Tensor):
    """Rows [R, F] of mostly zeros: a pattern and its stored values [Z].

    They are features, so they get no gradient. They are a Tensor, so that code for dense features
    accepts them; but they support only the operations below, `linear` and `dropout`.
    """

    pattern: Pattern
    stored: Tensor

    @staticmethod
    def __new__(cls, pattern: Pattern, stored: Tensor) -> SparseRows:
        result: SparseRows = Tensor._make_wrapper_subclass(
            cls,
            (len(pattern.indptr) - 1, pattern.width),
            dtype=stored.dtype,
            device=stored.device,
        )
        result.pattern, result.stored = pattern, stored
        return result

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> None:
        raise TypeError(f"{operation} is not done on sparse rows")

    @classmethod
    def of(cls, lengths: Tensor, columns: Tensor, values: Tensor, width: int) -> SparseRows:
        """Build rows from their numbers of stored values [R], and all columns and values [Z]."""
        return cls(Pattern(_offsets(lengths), columns.int(), width), values)

    @classmethod
    def of_csr(cls, x: csr_matrix, dtype: torch.dtype, room: int = 0) -> SparseRows:
        """Build rows from a matrix, and `room` more empty rows. The arrays are shared if writeable,
        else copied."""
        indices, data = (
            array if array.flags.writeable else array.copy() for array in (x.indices, x.data)
        )
        lengths = F.pad(torch.from_numpy(np.diff(x.indptr).astype(np.int64)), (0, room))
        columns, values = torch.from_numpy(indices), torch.from_numpy(data).to(dtype)
        return cls.of(lengths, columns, values, x.shape[1])

    @classmethod
    def cat(cls, parts: Sequence[SparseRows]) -> SparseRows:
        """Concatenate the rows of all parts."""
        lengths = torch.cat([part.lengths for part in parts])
        columns = torch.cat([part.pattern.columns for part in parts])
        return cls.of(lengths, columns, torch.cat([p.stored for p in parts]), parts[0].shape[1])

    @property
    def lengths(self) -> Tensor:
        """Number of stored values of each row [R]."""
        return self.pattern.indptr.diff()

    @property
    def column_type(self) -> torch.dtype:
        """The type of columns in messages: as wide as a value, and at least int32."""
        return torch.int64 if self.stored.itemsize == 8 else torch.int32

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Size in messages [B]: a column and a value per stored value."""
        return len(self.stored) * (self.column_type.itemsize + self.stored.itemsize)

    def swapped(
        self, swap: Callable[..., Tensor], gives: list[int], takes: list[int], lengths: Tensor
    ) -> SparseRows:
        """Send `gives` of these rows to each peer, and return the `takes` rows received from each.

        lengths [sum takes]: stored values of the received rows. A peer gets one message of bytes:
        the columns of all stored values, then the values."""
        # copied where a single value or none has stride 0, of which torch makes no bytes
        columns, values = (
            each if each.stride(0) == 1 else each.clone(memory_format=torch.contiguous_format)
            for each in (self.pattern.columns.to(self.column_type), self.stored)
        )
        sent_counts = [int(part.sum()) for part in torch.split(self.lengths, gives)]
        received_counts = [int(part.sum()) for part in torch.split(lengths, takes)]
        messages = zip(*(torch.split(part, sent_counts) for part in (columns, values)), strict=True)
        outgoing = torch.cat([part.view(torch.uint8) for pair in messages for part in pair])
        sizes = columns.itemsize, values.itemsize
        incoming = swap(
            outgoing[:, None],
            [n * sum(sizes) for n in sent_counts],
            [n * sum(sizes) for n in received_counts],
        )
        parts = torch.split(incoming[:, 0], [n * size for n in received_counts for size in sizes])
        return SparseRows.of(
            lengths.to(values.device),
            torch.cat(parts[::2]).view(columns.dtype),
            torch.cat(parts[1::2]).view(values.dtype),
            self.shape[1],
        )

    def times(self, weight: Tensor) -> Tensor:
        """Multiply by the transpose of weight [H, F] -> [R, H]."""
        return apply(_Linear, weight, self.pattern, self.stored)

    def __getitem__(self, rows: slice) -> SparseRows:  # type: ignore[override]
        start, stop, _ = rows.indices(self.shape[0])
        if (start, stop) == (0, self.shape[0]):
            return self
        pattern, places = self.pattern.cut(start, stop)
        return SparseRows(pattern, self.stored[places])

    def __setitem__(self, rows: slice, others: SparseRows) -> None:  # type: ignore[override]
        start, stop, _ = rows.indices(self.shape[0])
        filled = SparseRows.cat([self[:start], others, self[stop:]])
        self.pattern, self.stored = filled.pattern, filled.stored

    def new_empty(self, rows: int, width: int) -> SparseRows:  # type: ignore[override]
        """Return rows without stored values."""
        lengths = self.pattern.indptr.new_zeros(rows)
        return SparseRows.of(lengths, self.pattern.columns[:0], self.stored[:0], width)

    def index_select(self, dim: int, rows: Tensor) -> SparseRows:
        """Gather rows in the given order; dim is 0."""
        lengths = self.lengths.index_select(0, rows)
        starts = self.pattern.indptr.index_select(0, rows) - _offsets(lengths)[:-1]
        total = int(lengths.sum())
        places = torch.arange(
            total, dtype=torch.int32, device=rows.device
        ) + starts.repeat_interleave(lengths, output_size=total)
        columns = self.pattern.columns.index_select(0, places)
        return SparseRows.of(lengths, columns, self.stored.index_select(0, places), self.shape[1])

    def to(self, device: torch.device | str) -> SparseRows:  # type: ignore[override]
        if self.stored.device == torch.device(device):
            return self
        parts = self.pattern.indptr, self.pattern.columns, self.stored
        indptr, columns, values = sent(parts, torch.device(device))
        pattern = Pattern(indptr, columns, self.shape[1], on_host=self.pattern.on_host)
        return SparseRows(pattern, values)

    def record_stream(self, stream: Any) -> None:
        for part in (self.pattern.indptr, self.pattern.columns, self.stored):
            part.record_stream(stream)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SparseRows(shape={tuple(self.shape)}, numbers={len(self.stored)})"


def cat(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate rows. With sparse ones among them torch.cat would import sympy: a second."""
    sparse = [part for part in parts if isinstance(part, SparseRows)]
    return SparseRows.cat(sparse) if sparse else torch.cat(list(parts))


class _Linear(torch.autograd.Function):
    """Autograd of `linear` of sparse rows; bfloat16 rows have float32 weights and gradients."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, pattern: Pattern, values: Tensor) -> Tensor:
        ctx.pattern, ctx.dtype = pattern, weight.dtype
        ctx.save_for_backward(values)
        # no copy if the weight is stored in column-major order (models.Net)
        columns = weight.to(values.dtype).t().contiguous()
        return spmm(pattern.indptr, pattern.columns, values, columns)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        indptr, rows, order = ctx.pattern.transposed
        (values,) = ctx.saved_tensors
        gradient = spmm(indptr, rows, values.index_select(0, order), grad.contiguous())
        return gradient.t().to(ctx.dtype), None, None
