"""A counter of a user's layer: its work and memory, from the operations that torch dispatches.

The layer runs forward and backward on a few small blocks of different sizes. The counter records
the work of each operation, and when each tensor is allocated and freed. All counts must be linear
in rows, sources and edges: four sizes give the factors, a fifth checks them
(planner/gnn/kinds.py)."""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.kernels.runtime import kernel
from gnnplan.executor.layers.layer import ColumnLayer, Drop, Layer, no_dropout
from gnnplan.executor.layers.models import BatchNorm
from gnnplan.planner.gnn.kinds import Counted, Linear, amount
from gnnplan.planner.gnn.layer import VECTOR

# (rows, sources, edges): four sizes give the factors, the last checks them. All rows of a block
# have the same number of edges, as DGL calls a user's function once for each degree
SIZES = ((64, 128, 512), (128, 192, 512), (64, 192, 512), (64, 128, 1024), (160, 224, 1600))
# field of Counted -> its name in errors for the author of the layer
WORDS = {
    "flops": "flops",
    "gemm_bytes": "gemm bytes",
    "elementwise_bytes": "elementwise bytes",
    "gathers": "gathers",
    "maxima": "maxima",
    "products": "products",
    "forward_events": "allocated tensors",
    "backward_events": "allocated tensors",
    "kept": "bytes kept for edges",
}
PRODUCTS = ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_linear_pointwise", "linear")
ARITHMETIC = ("mul", "add", "sub", "div", "pow")
# operations that read rows by index, and operations that write rows by index
PICKS = ("index_select", "embedding", "index", "gather")
PUTS = ("index_add", "index_put", "scatter", "scatter_add", "scatter_reduce")
INDEX = 8  # [B] of an index
# how far bytes may be from linear, as a share and in bytes: oneDNN rounds an LSTM's memory to pages
ROUNDED = {"elementwise bytes": (0.02, 8192), "allocated tensors": (0.02, 8192)}
PUT_PASSES = 9.0  # cost, in passes over memory, of writing rows narrower than VECTOR by index
# operations that do not read their first argument
UNREAD = (
    "copy_",
    "fill_",
    "zero_",
    "new_zeros",
    "new_full",
    "zeros_like",
    "ones_like",
    "full_like",
)
FREE = (
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "is_pinned",
    "sparse_compressed_tensor",
    "values",
)


class Unmeasured(Exception):
    """A layer that cannot be counted, so that no plan can be made; the message has the reason."""


@dataclass
class Work:
    """Work of one pass on one block: the fields of CountedWork."""

    flops: float = 0.0  # matrix products only
    gemm_bytes: float = 0.0
    elementwise_bytes: float = 0.0
    gathers: list[dict[str, Any]] = field(default_factory=list)
    maxima: float = 0.0
    launches: int = 0

    def add_indexed(self, name: str, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> bool:
        """Add an operation that reads or writes rows by index; return False for other operations.

        A device has measured rates for sums of rows only. Rows read by index count as copies.
        Narrow rows written by index cost several passes (PUT_PASSES)."""
        if name in ("_embedding_bag", "_embedding_bag_forward_only"):
            table, indices = args[:2]
            self.add_sum(indices.numel(), table.shape[1], len(table), len(outputs[0]))
        elif name == "sparse_sampled_addmm":  # an inner product of two rows per edge
            edges, table = args[0], args[2].t()
            self.add_sum(edges._nnz(), table.shape[1], len(table), len(edges))
        elif name in PICKS and outputs[0].ndim:
            self.elementwise_bytes += 2.0 * outputs[0].nbytes + INDEX * len(outputs[0])
        elif name.rstrip("_") in PUTS and (rows := _most_rows(args[1:])):
            width = max(1, outputs[0].numel() // max(1, len(outputs[0])))
            self.maxima += rows * (args[4:5] in (("amax",), ("amin",)))
            if width < VECTOR:
                self.elementwise_bytes += PUT_PASSES * rows * width * outputs[0].itemsize
            else:
                self.add_sum(rows, width, rows, rows)
        else:
            return False
        return True

    def add_sum(self, rows: int, width: int, among: int, into: int) -> None:
        """Add a sum: `rows` rows, read by index among `among` rows, are added to `into` rows."""
        sizes = {"rows": float(rows), "among": float(among), "into": float(into)}
        self.gathers.append({"width": width, **sizes})


class Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A record of a layer's work on one block, and of the allocation and release of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.structure, self.forward, self.backward = Work(), Work(), Work()
        self.structure_bytes = 0  # allocated for the block's edges, and kept
        self.products = list[dict[str, Any]]()  # forward, by oneDNN
        # part of the step -> (bytes allocated, or freed if negative; part that allocated them)
        self.events = defaultdict[str, list[tuple[int, str]]](list)
        self.keeps_inputs = self.reads_host = False
        self.known = weakref.WeakSet[Any]()
        self.part, self.work = "", self.forward
        self.entered = kernel.entered  # the last `with kernel` block whose launch is counted

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        self.part = part
        direction = "backward" if part.endswith("backward") else "forward"
        self.work = getattr(self, "structure" if part == "structure" else direction)
        with self:
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _is_dense(leaf)]
        outputs = [leaf for leaf in tree_leaves(out) if _is_dense(leaf)]
        storages = {tensor.untyped_storage() for tensor in inputs}
        name = func.overloadpacket.__name__.split(".")[-1]
        casts = _casts(inputs, outputs[0]) if name.rstrip("_") in ARITHMETIC else []
        if self.part != "structure" and _reads_host(func, args):
            self.reads_host = True
        events = self.events[self.part]
        events += [(size, f"{self.part} cast") for size in casts]
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage not in storages and storage not in self.known:
                self._record_allocation(storage)
        events += [(-size, f"{self.part} cast") for size in casts]
        is_view = outputs and not func._schema.is_mutable
        is_view = is_view and all(t.untyped_storage() in storages for t in outputs)
        if not is_view:
            for size in casts:
                self.work.elementwise_bytes += 2 * size
            unread = (kwargs or {}).get("out", args[0] if name in UNREAD else None)
            self._record_operation(
                name, args, [tensor for tensor in inputs if tensor is not unread], outputs
            )
        return out

    def _record_allocation(self, storage: Any) -> None:
        size, part, events = storage.nbytes(), self.part, self.events
        if not size:
            return
        self.known.add(storage)
        events[part].append((size, part))
        weakref.finalize(storage, lambda: events[self.part].append((-size, part)))

    def _record_operation(
        self, name: str, args: tuple[Any, ...], inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> None:
        work = self.work
        if name in FREE:
            return
        if not kernel.inside or kernel.entered != self.entered:
            self.entered = kernel.entered
            work.launches += 1
        if name.startswith("mkldnn_rnn_layer"):  # of an LSTM in float32; else a step is a launch
            work.launches += len(inputs[0]) - 1
        if work.add_indexed(name, args, outputs):
            return
        operands = [tensor for tensor in inputs if tensor.ndim >= 2][-2:]
        if name in PRODUCTS and len(operands) == 2:  # else one of them is sparse
            first, second = operands
            work.flops += 2.0 * max(first.shape[-1], VECTOR) * _padded(outputs[0])
            if name == "_linear_pointwise" and work is self.forward:
                after = f"{'bias' if len(inputs) > 2 else ''} {args[3]}"
                widths = {"h_in": first.shape[1], "h_out": len(second), "after": after}
                self.products.append({"rows": float(len(first)), **widths})
            work.gemm_bytes += _bytes(first) + _bytes(second) + _bytes(outputs[0])
        else:
            work.elementwise_bytes += sum(map(_bytes, [*inputs, *outputs]))


def _casts(inputs: Sequence[Tensor], outputs: Tensor) -> list[int]:
    """Return the sizes of temporary copies that CPUs make of operands with another type [B]."""
    return [t.numel() * outputs.itemsize for t in inputs if t.ndim and t.dtype != outputs.dtype]


def _reads_host(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the host waits for the GPU: for a value, or for the number of rows of a result."""
    by_place = func.overloadpacket is torch.ops.aten.index  # waits only if indexed by a mask
    if by_place:
        places = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        return any(leaf.dtype in (torch.bool, torch.uint8) for leaf in places)
    waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(waits & set(func.tags))


def _most_rows(args: Sequence[Any]) -> int:
    """Return the number of rows of the longest tensor."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return max((len(tensor) for tensor in tensors if tensor.ndim), default=0)


def _is_dense(leaf: Any) -> bool:
    """Whether a leaf is a dense tensor; a sparse tensor only refers to dense ones."""
    return isinstance(leaf, Tensor) and leaf.layout == torch.strided


def _padded(out: Tensor) -> float:
    """Return the numbers of a product; dimensions below VECTOR cost as much as VECTOR."""
    return float(np.prod([max(size, VECTOR) for size in out.shape[-2:]]) * np.prod(out.shape[:-2]))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor that are read or written; expanded dimensions count once."""
    sizes = [size for size, step in zip(tensor.shape, tensor.stride(), strict=True) if step]
    return int(np.prod(sizes)) * tensor.element_size()


def count(
    layer: Layer, h_in: int, h_out: int, relu: bool, varies: bool, dtype: torch.dtype
) -> Counted:
    """Count the work and memory of a layer, for any block. Resets its parameters' gradients.

    relu: whether it ends in ReLU. varies: whether its inputs need a gradient. Raises Unmeasured,
    and any error that the layer itself raises.
    """
    layer.train()
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    _must_fit(layer, h_in, h_out, dtype)  # also triggers torch's one-time allocations
    each = [_note(layer, h_in, relu, varies, dtype, sizes) for sizes in SIZES]
    works = [(notes.structure, notes.forward, notes.backward) for notes in each]
    if len({tuple(work.launches for work in of_block) for of_block in works}) > 1:
        raise Unmeasured("the number of operations depends on the size of the block")

    table = torch.zeros(1, h_in, dtype=dtype)
    with torch.no_grad():
        gathered = layer.gathers(layer.prepare(table, no_dropout)).shape[1]
    return Counted(
        edges=layer.edges,
        projects_first=layer.projects_first,
        linear=layer.linear,
        gathered=gathered,
        weights=sum(parameter.numel() for parameter in layer.parameters()),
        by_column=sum(layer.get_parameter(name).numel() // h_in for name in layer.by_columns),
        keeps_inputs=each[0].keeps_inputs,
        reads_host=any(notes.reads_host for notes in each),
        **_fitted([_observed(notes) for notes in each], ""),
    )


def _observed(notes: Notes) -> dict[str, Any]:
    """Return the fields of Counted that depend on the block's size."""

    def events(*parts: str) -> list[dict[str, Any]]:
        born = [event for part in parts for event in notes.events[part]]
        return [
            {
                "bytes": float(n),
                "of_gather": by.startswith("gather"),
                "cast": by.endswith("cast"),
            }
            for n, by in born
        ]

    return {
        "products": notes.products,
        "forward": vars(notes.forward),
        "backward": vars(notes.backward),
        "forward_events": events("gather", "update"),
        "backward_events": events("update backward", "gather backward"),
        "structure": {"kept": float(notes.structure_bytes), "work": vars(notes.structure)},
    }


def _must_fit(layer: Layer, h_in: int, h_out: int, dtype: torch.dtype) -> None:
    """Raise Unmeasured if the output is not [R, H_out], or depends on no parameter."""
    rows, sources, edges = SIZES[0]
    block = block_of(layer, rows, sources, edges, dtype)
    drop = Drop(vertices=torch.arange(sources))  # in training: evaluation needs no gradients
    out = layer(block, layer.possible(torch.randn(sources, h_in, dtype=dtype)), drop)
    if out.shape != (rows, h_out):
        raise Unmeasured(
            f"a layer of {h_in} -> {h_out} numbers returns shape {list(out.shape)} for {rows} rows,"
            f" not {[rows, h_out]}; return rows of h_out numbers"
        )
    if out.requires_grad:
        out.sum().backward()
    elif not layer.reads_whole:  # a user's module may aggregate before it multiplies
        raise Unmeasured("the output depends on no parameter; define one in __init__, and use it")


def must_sum_columns(layer: Layer, h_in: int, h_out: int, relu: bool, dtype: torch.dtype) -> None:
    """Raise Unmeasured if the methods of ColumnLayer give another output than `forward`."""
    rows, sources, edges = SIZES[0]
    block = block_of(layer, rows, sources, edges, dtype)
    x = layer.possible(torch.randn(sources, h_in, dtype=dtype))
    parts = cast(ColumnLayer, layer)
    with torch.no_grad():
        summed = parts.transform(parts.gather(block, parts.scatter(block, x, no_dropout)), x[:rows])
        out, expected = parts.apply(summed, relu), layer(block, x, relu=relu)
    if out.shape != expected.shape or not torch.allclose(out, expected, rtol=1e-4, atol=1e-5):
        raise Unmeasured(
            "scatter, gather, transform and apply, in this order, give another output than gather"
            " and update; make them equal, or leave by_columns out (P3 then refuses the layer)"
        )


def _note(
    layer: Layer,
    h_in: int,
    relu: bool,
    varies: bool,
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
) -> Notes:
    """Run the layer forward and backward on one block, and return the record."""
    rows, sources, edges = sizes
    block = block_of(layer, rows, sources, edges, dtype)
    x = layer.possible(torch.randn(sources, h_in, dtype=dtype))
    moments: Tensor | None = None
    if isinstance(getattr(layer, "norm", None), BatchNorm):
        moments = torch.stack([torch.zeros(h_in), torch.ones(h_in)]).to(dtype)
    notes = Notes()
    is_collecting = gc.isenabled()
    gc.disable()

    def saved(tensor: Tensor) -> Tensor:
        is_input = tensor.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()
        notes.keeps_inputs = notes.keeps_inputs or is_input
        return tensor

    try:
        if layer.reads_whole:
            with notes.during("structure"):
                notes.structure_bytes = layer.open(block)
            leaf = x.requires_grad_(varies)
            drop = Drop(vertices=torch.arange(sources))
            with saved_tensors_hooks(saved, lambda tensor: tensor), notes.during("update"):
                out = layer(block, leaf, drop, moments=moments)
        else:
            with notes.during("gather"):
                prepared = layer.prepare(x.requires_grad_(varies), no_dropout)
                leaf = prepared.detach().requires_grad_(prepared.requires_grad)
            with saved_tensors_hooks(saved, lambda tensor: tensor), notes.during("gather"):
                gathered = layer.gather(block, layer.gathers(leaf))
                read = gathered.detach().requires_grad_(gathered.requires_grad)
            with saved_tensors_hooks(saved, lambda tensor: tensor), notes.during("update"):
                out = layer.update(read, leaf[:rows], x[:rows], None, relu)
        gradient = torch.ones_like(out)
        with notes.during("update backward"):
            if out.requires_grad:
                out.backward(gradient)
        if not layer.reads_whole:
            with notes.during("gather backward"):
                if read.grad is not None:
                    gathered.backward(read.grad)  # type: ignore[no-untyped-call]
                read.grad = None
                if prepared is not x and prepared.requires_grad and leaf.grad is not None:
                    prepared.backward(leaf.grad)  # type: ignore[no-untyped-call]
    finally:
        if is_collecting:
            gc.enable()
    notes.part = "after"
    return notes


def block_of(layer: Layer, rows: int, sources: int, edges: int, dtype: torch.dtype) -> Block:
    """Return a block of evenly spread edges, with the weights that the layer needs."""
    indptr = np.linspace(0, edges, rows + 1).astype(np.int32)
    indices = (np.arange(edges) % sources).astype(np.int32)
    if layer.reads_whole:  # no self edges: a user's module may drop them
        indices = (rows + np.arange(edges) % (sources - rows)).astype(np.int32)
    block = Block(indptr, indices, sources)
    if layer.reads_whole:
        nobody = np.full(sources - rows, edges)
        block.graph_edges = layer.on(np.concatenate([indptr, nobody]), indices)
        block.source = torch.arange(sources)
    weighted = layer.edges in ("gcn", "mean")
    return block.mean(dtype) if weighted else block


def factors_of(values: Sequence[Sequence[float]]) -> list[Linear]:
    """Return the factors of each number, from values [sizes, numbers] at the first four sizes."""
    points = np.column_stack([np.array(SIZES[:4], dtype=float), np.ones(4)])
    solved = np.linalg.solve(points, np.array(values[:4], dtype=float))
    return [tuple(round(float(a), 6) + 0.0 for a in column) for column in solved.T]  # type: ignore[misc]


def _fitted(values: Sequence[Any], what: str) -> Any:
    """Replace the numbers observed on each block by their factors. Raises Unmeasured."""
    first = values[0]
    if isinstance(first, dict):
        return {
            name: _fitted([value[name] for value in values], WORDS.get(name, what))
            for name in first
        }
    if isinstance(first, float):
        return _line(values, what)
    if not isinstance(first, list):
        return first
    if len({len(value) for value in values}) > 1:
        raise Unmeasured(f"{what} depend on the size of the block")
    return [_fitted(each, what) for each in zip(*values, strict=True)]


def _line(values: Sequence[float], what: str) -> Linear:
    """Return the factors of one number, from its value on each block. Raises Unmeasured."""
    (line,) = factors_of([[value] for value in values])
    (rows, sources, edges), value = SIZES[4], values[4]
    expected = amount(line, rows, sources, edges)
    share, least = ROUNDED.get(what, (1e-3, 8))
    if abs(expected - value) > share * abs(value) + least:
        raise Unmeasured(
            f"{what} are not linear in rows, sources and edges, so that no plan can be made:"
            f" {value:g} with {rows} rows, {sources} sources and {edges} edges, where smaller"
            f" blocks predict {expected:g}; do the same work for every row and for every edge"
        )
    return line
