"""Cuts a user's module, and proves on small graphs that the pieces compute what the module does.

The graphs are random; every field has its own numbers. Parts of a graph run each layer as ranks
would: a part has rows of its own vertices and of those that they read. Outputs, and gradients
of all parameters, must equal the module's own, in training and in evaluation. Dropout draws the
same numbers in both."""

from __future__ import annotations

import copy
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.norms import BatchNorm
from gnnplan.executor.modules import limits
from gnnplan.executor.modules.bind import Bound, Fields, bound, uses_dgl
from gnnplan.executor.modules.cut import cut, differing, is_batch_norm
from gnnplan.executor.modules.evaluate import Place
from gnnplan.executor.modules.pieces import Mode, Pieces, Tail, drawn, pair_ids
from gnnplan.executor.modules.record import (
    DROPOUTS,
    Node,
    Unfit,
    dropout_of,
    line_of,
    record,
    tensors_of,
)
from gnnplan.executor.modules.structure import Structure, dgl_graph, edge_index_of
from gnnplan.planner.graph.graph import Whole

T = TypeVar("T")
VERTICES = (53, 78)  # of the graph that a module is followed on, and of another to prove it on
PARTS = 4
NO_ROWS_OF_ITS_OWN = "a module's own tensors cannot have a row per vertex of yours, fields can"
EACH = 4  # rows of each whole number, if there are enough
WITHIN = 1e-9


class Small:
    """A random graph of so many vertices, with fields of some shapes."""

    def __init__(
        self, vertices: int, x: int, vertex: Fields, edge: Fields, directed: bool, loops: bool
    ) -> None:
        draw = np.random.default_rng(vertices)
        dense = draw.random((vertices, vertices)) < 1.5 / vertices
        dense[np.arange(vertices), (np.arange(vertices) + 1) % vertices] = True
        dense[0, :] = False  # a vertex that reads nobody
        if not directed:
            dense[:, 0] = False
            dense |= dense.T
        np.fill_diagonal(dense, False)
        readers, sources = np.nonzero(dense)
        indptr = np.concatenate([[0], np.cumsum(dense.sum(1))])
        self.vertices = vertices
        self.x = torch.from_numpy(draw.standard_normal((vertices, x)))
        self.fields = {name: _drawn(draw, vertices, *shape) for name, shape in vertex.items()}
        on_edges = {name: _drawn(draw, len(sources), *shape) for name, shape in edge.items()}
        self.whole = Whole(indptr, sources.astype(np.int32), on_edges, loops)
        # parts of which none reads all vertices
        self.parts = torch.from_numpy(draw.permutation(vertices)).tensor_split(PARTS)
        del readers

    def values(self, dtype: torch.dtype) -> dict[str, Any]:
        """What forward may be given, by name."""
        edges = edge_index_of(self.whole)
        on_edges = {name: _typed(values, dtype) for name, values in self.whole.fields.items()}
        values: dict[str, Any] = {"vertex x": self.x.to(dtype), "edge_index": edges}
        values |= {f"vertex {name}": _typed(v, dtype) for name, v in self.fields.items()}
        values |= {f"edge {name}": v for name, v in on_edges.items()}
        return values

    def graph_of_dgl(self, values: Mapping[str, Any]) -> Any:
        on_edges = {n.removeprefix("edge "): v for n, v in values.items() if n.startswith("edge ")}
        return dgl_graph(self.whole, values["edge_index"], on_edges, None)

    def block(self, own: Tensor) -> tuple[Block, Tensor]:
        """The edges into some vertices, and the ids of these and of what they read."""
        return block_of(self.whole, own)


def block_of(whole: Whole, own: Tensor) -> tuple[Block, Tensor]:
    """The edges into some vertices, and the ids of its sources, the vertices first."""
    starts, stops = whole.indptr[own], whole.indptr[own + 1]
    neighbours = np.concatenate([whole.indices[a:b] for a, b in zip(starts, stops, strict=True)])
    others = np.setdiff1d(neighbours, own.numpy())
    source = np.concatenate([own.numpy(), others]).astype(np.int64)
    place = np.zeros(whole.vertices, dtype=np.int32)
    place[source] = np.arange(source.size)
    indptr = np.concatenate([[0], np.cumsum(stops - starts)]).astype(np.int32)
    block = Block(indptr, place[neighbours], source.size)
    block.source, block.whole = torch.from_numpy(source), whole
    return block, block.source


def _drawn(
    draw: np.random.Generator, rows: int, sizes: tuple[int, ...], kind: str, kinds: int
) -> np.ndarray:
    if np.dtype(kind).kind in "iu":
        numbers = draw.integers(0, kinds, (rows, *sizes))
        if EACH * kinds <= rows and np.bincount(numbers.ravel(), minlength=kinds).min() < EACH:
            # a module may take edges of one kind, and none has no size
            numbers = np.resize(draw.permutation(rows) % kinds, (*sizes, rows)).T
        return numbers.reshape(rows, *sizes).astype(kind)
    if np.dtype(kind).kind == "b":
        return draw.random((rows, *sizes)) < 0.5
    return draw.random((rows, *sizes)) + 0.25


def _typed(values: np.ndarray, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(values)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def run_once(module: nn.Module, x: int, vertex: Fields, edge: Fields, directed: bool) -> None:
    """Run forward in float32 on a small graph. Raises Unfit."""
    small = Small(VERTICES[0], x, vertex, edge, directed, uses_dgl(module) and needs_loops(module))
    binding = bound(module, ["x", *vertex], list(edge))
    with torch.no_grad():
        _guarded(module, small, lambda: binding.call(module, given_of(binding, small)))


def given_of(binding: Bound, small: Small, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """What forward is given of a small graph, by the graph's names."""
    values = small.values(dtype)
    if "g" in binding.inputs:
        values["g"] = small.graph_of_dgl(values)
    return {name: values[name] for name in binding.inputs}


def _guarded(module: nn.Module, small: Small, run: Callable[[], T]) -> T:
    """What the user's code makes, or Unfit with its line."""
    held = sum(p.numel() * 8 for p in module.parameters() if not is_lazy(p))
    try:
        with (
            _one_product(),
            limits.seconds(
                limits.FORWARD_SECONDS, f"forward on a graph of {small.vertices} vertices"
            ),
            limits.memory(limits.FORWARD_BYTES + 4 * held),
        ):
            return run()
    except Unfit as unfit:
        raise Unfit(f"{line_of(unfit, module)}{unfit}") from None
    except (Exception, SystemExit) as error:
        words = (str(error).strip().splitlines() or [_code_of(error)])[0]
        counted = isinstance(error, RuntimeError) and f"({small.vertices})" in words
        raise Unfit(
            f"{line_of(error, module)}forward fails on a small graph of {small.x.shape[1]} features"
            f" ({type(error).__name__}: {words:.150})"
            + (
                f"; that graph has {small.vertices} vertices: {NO_ROWS_OF_ITS_OWN}"
                if counted
                else ""
            )
        ) from error


def _code_of(error: BaseException) -> str:
    """The line that raised it, for errors without words, as those of assert."""
    return traceback.extract_tb(error.__traceback__)[-1].line or ""


@contextmanager
def _one_product() -> Iterator[None]:
    """RGCNConv of PyG asks how many edges each type has, to choose between two equal products."""
    backend: Any = sys.modules.get("torch_geometric.backend")
    if backend is None:
        yield
        return
    before = backend.use_segment_matmul
    backend.use_segment_matmul = False
    try:
        yield
    finally:
        backend.use_segment_matmul = before


def followed(
    module: nn.Module,
    x: int,
    vertex: Fields,
    edge: Fields,
    directed: bool,
    dtype: torch.dtype,
    vertices: int = VERTICES[0],
) -> tuple[Pieces, Small]:
    """The module in pieces, in both of its modes. Raises Unfit, with the line."""
    has_dgl = uses_dgl(module)
    small = Small(vertices, x, vertex, edge, directed, loops=has_dgl and needs_loops(module))
    binding = bound(module, ["x", *vertex], list(edge))
    values = given_of(binding, small, dtype)
    modes = []
    for is_training in (True, False):
        try:
            modes.append(_mode(module, binding, values, small, is_training, dtype))
        except Unfit as unfit:
            raise Unfit(f"{line_of(unfit, module)}{unfit}") from None
    training, evaluation = modes
    if training.program.widths != evaluation.program.widths:
        raise Unfit(
            "forward hands on other rows in evaluation than in training; let both modes read the"
            " same edges and rows"
        )
    for node in evaluation.program.live:
        if node.drops:
            raise Unfit(
                f"{node.place}dropout drops in evaluation too, unless it is told; write"
                " training=self.training"
            )
    structure = Structure((training.program, evaluation.program))
    pieces = Pieces(module, training, evaluation, structure, dtype, small.whole.loops, binding)
    for own in small.parts:
        block, source = small.block(own)
        readers = block.per_edge(torch.arange(block.n_dst))
        edges = torch.stack([block.indices.long(), readers])
        structure.look(pieces.place(small.vertices), small.whole, source, edges, block.n_dst)
    return pieces, small


def needs_loops(module: nn.Module) -> bool:
    """Whether a convolution of DGL refuses vertices that read nobody: users add self-loops then."""
    return any(hasattr(part, "_allow_zero_in_degree") for part in module.modules())


def _mode(
    module: nn.Module,
    binding: Bound,
    values: Mapping[str, Any],
    small: Small,
    is_training: bool,
    dtype: torch.dtype,
) -> Mode:
    try:
        seen = copy.deepcopy(module).to(dtype)  # a forward may keep what it is given
    except Exception as error:
        raise Unfit(f"it cannot be copied ({type(error).__name__}: {error})") from error
    seen.train(is_training)
    given = {
        name: value.clone() if isinstance(value, Tensor) else value
        for name, value in values.items()
    }
    trained = {name for name, p in seen.named_parameters() if p.requires_grad}
    recorded = _guarded(
        module,
        small,
        lambda: record(seen, given, lambda: binding.call(seen, given), small.vertices),
    )
    modules = dict(seen.named_modules())
    place = Place(tensors_of(seen), modules, small.vertices, lambda _, rows, __: rows, dtype)
    program = cut(recorded, place, trained)
    for node in program.live:
        if is_batch_norm(node) and is_training:
            _must_keep_averages(node)
    return Mode.of(program)


def _must_keep_averages(node: Node) -> None:
    names = ("input", "running_mean", "running_var", "weight", "bias", "training")
    told = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if told.get("running_mean") is None:
        raise Unfit(
            f"{node.place}a batch norm without running averages has no moments in evaluation; use"
            " track_running_stats=True"
        )
    if node.value.ndim != 2:
        raise Unfit(f"{node.place}batch norm of {node.value.ndim} dimensions; flatten its rows")


def prove(module: nn.Module, pieces: Pieces, small: Small) -> None:
    """Raise Unfit if the pieces compute something else than the module. Both are in float64."""
    for mode, is_training in ((pieces.training, True), (pieces.evaluation, False)):
        own = copy.deepcopy(module).to(torch.float64).train(is_training)
        values = given_of(pieces.binding, small, torch.float64)
        run = partial(_output, own, pieces, values, mode, small.whole)
        expected = _guarded(module, small, run)
        if not expected.requires_grad:
            raise Unfit("no parameter of it learns; let some have requires_grad=True")
        weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
        _guarded(module, small, (expected.flatten() * weights).sum().backward)
        buffers = {name: buffer.clone() for name, buffer in own.named_buffers()}
        with torch.no_grad():
            if differing(expected.detach(), _guarded(module, small, run)) is not None:
                raise Unfit(
                    "its second call on a graph makes other rows than its first: it keeps numbers"
                    " between calls, or changes what it is given; let forward change neither"
                )
        again = copy.copy(pieces)
        again.module = copy.deepcopy(module).to(torch.float64)
        try:
            found = in_parts(again, small, values, is_training)
            (found.flatten() * weights).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            words = (str(error).strip().splitlines() or [""])[0]
            raise Unfit(
                f"its calls of torch fail on parts of a graph ({words:.150}): a number of vertices"
                " or edges is among them; write sizes, as x.size(0)"
            ) from error
        _must_equal(expected, found, "output", is_training)
        theirs = dict(own.named_parameters())
        for name, parameter in again.module.named_parameters():
            gradient, other = theirs[name].grad, parameter.grad
            if not parameter.requires_grad:
                continue
            zeros = torch.zeros_like(parameter)
            _must_equal(
                zeros if gradient is None else gradient,
                zeros if other is None else other,
                f"gradient of {name}",
                is_training,
            )
        for name, buffer in again.module.named_buffers():
            if buffer.is_floating_point():
                _must_equal(buffers[name], buffer, f"buffer {name}", is_training)


def _output(
    module: nn.Module, pieces: Pieces, values: Mapping[str, Any], mode: Mode, whole: Whole
) -> Tensor:
    """What the module itself makes of a graph, with dropout as its pieces draw it."""
    with Shared(pieces, mode, whole, Drop(0.0, 7)):
        output = pieces.binding.call(module, values)
    made: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return made


def _must_equal(expected: Tensor, found: Tensor, what: str, is_training: bool) -> None:
    expected, found = expected.detach(), found.detach()
    largest = max(
        float(expected.detach().abs().nan_to_num().max()) if expected.numel() else 0, 1e-3
    )
    gap = float((expected - found).abs().max()) if expected.numel() else 0.0
    if not gap <= WITHIN * largest:
        mode = "training" if is_training else "evaluation"
        raise Unfit(
            f"its {what} in {mode} is another when its calls of torch run in pieces, on parts"
            f" of a graph (off by {gap:.3g} of {largest:.3g}): something of it is not in these"
            " calls, as code outside torch, or numbers that were kept from an earlier call; or it"
            " reads how many vertices there are, or their places, as x.size(0) and torch.arange do"
        )


def in_parts(pieces: Pieces, small: Small, values: Mapping[str, Any], is_training: bool) -> Tensor:
    """The output of all vertices, each layer computed on the parts of the graph."""
    mode = pieces.training if is_training else pieces.evaluation
    layers = [pieces.layer(number) for number in range(1, pieces.layers + 1)]
    rows = inputs_of(pieces, values, small.whole)
    blocks = [small.block(own) for own in small.parts]
    for layer in layers:
        moments = None
        if layer.norm is not None and is_training:
            moments = moments_of(layer.norm, rows)
        made = []
        for block, source in blocks:
            drop = Drop(0.0, 7, 0, layer.number, source, training=is_training)
            made.append(layer(block, rows[source], drop, moments=moments))
        rows = torch.cat(made)[torch.argsort(torch.cat(small.parts))]
    if mode.program.ends is not None:
        tail = Tail(layers[-1])
        moments = moments_of(tail.norm, rows) if is_training else None
        drop = Drop(0.0, 7, 0, len(layers) + 1, torch.arange(small.vertices), training=is_training)
        rows = tail(rows, drop, moments)
    return rows


def moments_of(norm: BatchNorm, rows: Tensor) -> Tensor:
    """Moments of rows [2, W], with their graph; running averages move on."""
    norm.moments(norm.sums(rows.detach()), len(rows))
    return torch.stack([rows.mean(0), rows.var(0, unbiased=False)])


def inputs_of(pieces: Pieces, values: Mapping[str, Any], whole: Whole) -> Tensor:
    """What layer 1 is given of all vertices [N, W]."""
    program, structure, place = pieces.training.program, pieces.structure, pieces.place(0)
    of_field = {field: node for node, field in program.fields.items()}
    parts = []
    for node in program.inputs:
        if node in of_field:
            value = structure.on_whole(whole, place)[structure.first[of_field[node]]]
        else:
            value = values[node.name]
        parts.append(value.reshape(value.shape[0], -1).to(pieces.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


class Shared(TorchFunctionMode):
    """Has a module's own dropout, on a whole graph, draw as its pieces' does, call by call."""

    def __init__(self, pieces: Pieces, mode: Mode, whole: Whole, drop: Drop) -> None:
        super().__init__()
        self.pieces, self.mode, self.whole, self.drop = pieces, mode, whole, drop
        self.nodes = [node for node in mode.program.recorded.nodes if node.drops]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        p, training, in_place = dropout_of(args, kwargs or {})
        rows = args[0] if args else (kwargs or {})["input"]
        if not (training and p):
            return rows
        node = self.nodes.pop(0)
        ids = torch.arange(len(rows))
        edges = self.mode.program.drawn.get(node)
        if edges is not None:
            structure, place = self.pieces.structure, self.pieces.place(0)
            first = structure.first[edges]
            ids = pair_ids(*structure.values_on(self.whole, place, [first])[first])
        out = drawn(rows, self.mode.numbers[node], ids, self.drop, p)
        return rows.copy_(out) if in_place else out
