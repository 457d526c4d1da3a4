"""Cuts a user's module, and proves on small graphs that the pieces compute what the module does.

The graphs are random; every field has its own numbers. Parts of a graph run each layer as ranks
would: a part has rows of its own vertices and of those that they read. Outputs, and gradients
of all parameters, must equal the module's own, in training and in evaluation. Dropout draws the
same numbers in both."""

from __future__ import annotations

import copy
import sys
import traceback
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.norms import BatchNorm
from gnnplan.executor.modules import elsewhere
from gnnplan.executor.modules.bind import MATRICES, VERTICES, GraphFields, Small, block_of
from gnnplan.executor.modules.cut import (
    Program,
    cut,
    differing,
    keep_still,
)
from gnnplan.executor.modules.evaluate import Place
from gnnplan.executor.modules.kept import copied, must_learn_its_own, numbers_of
from gnnplan.executor.modules.pieces import Pieces, Tail, drawn, pair_ids
from gnnplan.executor.modules.record import (
    DROPOUTS,
    Node,
    Recorded,
    Unfit,
    dropout_of,
    line_of,
    named_in,
    record,
    with_sizes,
)
from gnnplan.executor.modules.structure import Structure
from gnnplan.planner.graph.graph import Whole

T = TypeVar("T")
WITHIN = 1e-9


def run_once(module: nn.Module, graph: GraphFields, dtype: torch.dtype = torch.float32) -> Tensor:
    """What forward makes of a small graph of such fields. Raises Unfit."""
    small = Small(VERTICES[0], module, graph)
    with torch.no_grad():
        run = partial(_output, module, small, small.given(dtype), nullcontext)
        made = _guarded(small, run)
    if not isinstance(made, Tensor):
        raise Unfit(f"forward returns a {type(made).__name__}; return the logits alone")
    return made


def _guarded(small: Small, run: Callable[[], T]) -> T:
    """What the user's code makes, or Unfit with its line."""
    try:
        with (
            _one_product(),
            _as_written(),
            _computed_once(),
            warnings.catch_warnings(action="ignore"),
            torch.sparse.check_sparse_tensor_invariants(),  # type: ignore[no-untyped-call]
        ):
            return run()
    except Unfit as unfit:
        raise Unfit(f"{line_of(unfit)}{unfit}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            most = f"{elsewhere.FORWARD_BYTES / 1e9:.0f} GB; make there what rows need alone"
            raise Unfit(f"{line_of(error)}it allocates more than {most}") from error
        code = traceback.extract_tb(error.__traceback__)[-1].line  # of assert, without words
        words = (str(error).strip().splitlines() or [code or ""])[0]
        raise Unfit(
            f"{line_of(error)}forward fails on a small graph of {small.x.shape[1]} features"
            f" ({type(error).__name__}: {words:.150}){_hint(error, words, small)}"
        ) from error


def _hint(error: BaseException, words: str, small: Small) -> str:
    """What may have led to an error of torch's with such words."""
    if any(frame.name == "embedding" for frame in traceback.extract_tb(error.__traceback__)):
        return (
            "; features are random numbers there, and no ids; let forward take ids by name, from a"
            " field of vertices of whole numbers"
        )
    takes = small.binding.takes
    if matrix := next((name for name in MATRICES if takes.get(name) == "edge_index"), ""):
        return (
            f"; {matrix} is edge_index [2, E] here, whose matrix is torch.sparse_coo_tensor("
            f"{matrix}.flip(0), weights, (x.size(0), x.size(0))): make that, and its weights, in"
            " forward"
        )
    if isinstance(error, KeyError) and "g" in small.binding.inputs:
        rows, edges = (
            [name[len(kind) :] for name in small.binding.inputs if name.startswith(kind)]
            for kind in ("vertex ", "edge ")
        )
        return (
            f"; ndata of its graph has {', '.join(['feat', *rows])}, and edata"
            f" {', '.join(edges) or 'nothing'}: name the fields of your graph's file so"
        )
    found = {
        "index out of range": "vertex 0 of that graph has no edges into it, as the first of a part"
        " may have none",
        f"({small.vertices})": f"that graph has {small.vertices} vertices: a module's own tensors"
        " cannot have a row per vertex of yours, fields can",
        f"(2x{small.whole.indices.size} ": "it multiplies by edge_index [2, E], whose matrix is"
        " torch.sparse_coo_tensor(edge_index.flip(0), weights, (x.size(0), x.size(0)))",
    }
    return next((f"; {hint}" for part, hint in found.items() if part in words), "")


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


def _as_written() -> AbstractContextManager[Any]:
    """What a file has given to torch.compile runs as it is written: compiled, it hides its calls,
    and the compiler would follow ours. Only such a file has imported it, which takes a second."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _computed_once() -> Iterator[None]:
    """What torch.utils.checkpoint would compute again in the backward pass is computed once, where
    its calls are seen; a strategy has its own way not to keep rows."""
    function: Any = checkpoint.CheckpointFunction
    again: Any = checkpoint._checkpoint_without_reentrant_generator

    def once(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def as_reentrant(run: Callable[..., T], preserve: bool, *given: Any) -> T:
        learns = any(isinstance(each, Tensor) and each.requires_grad for each in given)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return run(*given)

    function.apply = staticmethod(as_reentrant)
    checkpoint._checkpoint_without_reentrant_generator = once
    try:
        yield
    finally:
        del function.apply
        checkpoint._checkpoint_without_reentrant_generator = again


def followed(
    module: nn.Module, graph: GraphFields, dtype: torch.dtype, by_kernels: bool | None = None
) -> tuple[Pieces, Small]:
    """The module in pieces, in both of its modes. Raises Unfit, with the line.

    A part that gives a graph of DGL to its kernels is called as a whole where that does, and else
    each of the kernels by itself: where it drops, hops twice or reads what forward has put into the
    graph. by_kernels: which of the two, if it is known."""
    small = Small(VERTICES[0], module, graph)
    if by_kernels is None and "g" in small.binding.inputs:
        try:
            pieces = _in_pieces(module, small, torch.float64, by_kernels=False)
            by_kernels = not _evaluates_alike(pieces, small)
            if dtype == torch.float64 and not by_kernels:
                return pieces, small
        except Unfit:
            by_kernels = True  # which says again what is no matter of these
    return _in_pieces(module, small, dtype, bool(by_kernels)), small


def _evaluates_alike(pieces: Pieces, small: Small) -> bool:
    """Whether pieces make of parts of a graph what the module makes of all of it."""
    again, values = copy.copy(pieces), small.given(pieces.dtype)
    own = again.module = copied(pieces.module).to(pieces.dtype).eval()
    with torch.no_grad():
        expected = _guarded(small, partial(small.binding.call, own, values))
        try:
            found = in_parts(again, small, values, is_training=False)
        except (RuntimeError, LookupError, ValueError):
            return False
    return differing(expected, found) is None


def _in_pieces(module: nn.Module, small: Small, dtype: torch.dtype, by_kernels: bool) -> Pieces:
    shared: dict[Hashable, Node] = {}
    still: set[Any] = set()  # running means of batch norms that evaluate in training

    def program(is_training: bool) -> Program:
        seen, recorded = recorded_of(module, small, is_training, dtype, (), by_kernels)
        keep_still(recorded.nodes, is_training, still)
        trained = {name for name, p in seen.named_parameters() if p.requires_grad}
        return cut(recorded, Place(named_in(seen), dtype=dtype), trained, shared)

    training, evaluation = program(True), program(False)
    for node in evaluation.live:
        if node.drops:
            raise Unfit(
                f"{node.place}dropout drops in evaluation too, unless it is told; write"
                " training=self.training"
            )
    told = [
        f"{sum(map(sum, mode.widths))} numbers per vertex in {len(mode.layers)} layers"
        for mode in (training, evaluation)
    ]
    # what dropout makes another in training may be the same in evaluation, and handed on once
    is_same = training.widths == evaluation.widths
    evaluation = evaluation if is_same else training
    structure = Structure((training, evaluation))
    loops, binding = small.whole.loops, small.binding
    pieces = Pieces(module, training, evaluation, structure, dtype, loops, binding, by_kernels)
    for own in small.parts:
        structure.look(pieces.place, block_of(small.whole, own))
    if not is_same and not _evaluates_alike(pieces, small):
        raise Unfit(
            f"forward hands on {told[0]} in training, and {told[1]} in evaluation; let both modes"
            " read the same edges and rows, and drop weights of edges after their norm"
        )
    return pieces


def recorded_of(
    module: nn.Module,
    small: Small,
    is_training: bool,
    dtype: torch.dtype,
    parts: Collection[str] = (),
    by_kernels: bool = False,
) -> tuple[nn.Module, Recorded]:
    """A copy of the module, and what its forward computes of a small graph, as it does of a large
    one. parts, by_kernels: as of `record`. Raises Unfit."""

    def of(graph: Small) -> tuple[nn.Module, Recorded]:
        seen = copied(module).to(dtype).train(is_training)  # a forward may keep what it is given
        given = graph.given(dtype)
        run = partial(graph.binding.call, seen, given)
        recorded = partial(record, seen, given, run, graph.vertices, parts, by_kernels)
        return seen, _guarded(graph, recorded)

    (seen, few), (_, many) = of(small), of(small.larger)
    return seen, with_sizes(few, many)


# What is computed instead of a module: the output, and when that has had its gradient, those of the
# module's parameters, and its buffers, by name.
Tried = tuple[Tensor, Callable[[], Mapping[str, Tensor | None]]]


def prove(module: nn.Module, pieces: Pieces, small: Small) -> None:
    """Raise Unfit if the pieces compute something else than the module. Both are in float64."""
    pieces.structure.must_answer_alike(small.whole, pieces.place)

    shared = partial(as_pieces_draw, pieces, pieces.training, small.whole, Drop(0.0, 7))

    def tried(values: Mapping[str, Any], is_training: bool) -> Tried:
        again = copy.copy(pieces)
        own = again.module = copy.deepcopy(module).to(torch.float64)
        found = in_parts(again, small, values, is_training)
        return found, lambda: gradients_of(own) | dict(own.named_buffers())

    must_compute(module, small, shared, tried)


def must_compute(
    module: nn.Module,
    small: Small,
    shared: Callable[[], TorchFunctionMode],
    tried: Callable[[Mapping[str, Any], bool], Tried],
) -> None:
    """Raise Unfit if `tried` computes something else than the module. Both are in float64.

    shared: in it the module's own dropout draws what it draws in `tried`, which is told whether it
    is training."""
    for is_training in (True, False):
        own, new = (copy.deepcopy(module).to(torch.float64).train(is_training) for _ in range(2))
        values = small.given(torch.float64)
        # in evaluation nothing drops, and nothing stands between the module and torch
        within = shared if is_training else nullcontext
        run = partial(_output, small=small, values=values, shared=within)
        expected = _guarded(small, partial(run, own))
        kept = numbers_of(own)
        if not bool(expected.isfinite().all()):
            raise Unfit(
                "forward makes numbers that are not finite on a small graph, of which vertex 0 has"
                " no edges into it: where it divides by a degree, let that be deg.clamp(min=1)"
            )
        if not expected.requires_grad:
            raise Unfit("no parameter of it learns; let some have requires_grad=True")
        must_learn_its_own(expected, own)
        weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
        _guarded(small, (expected.flatten() * weights).sum().backward)
        buffers = {name: buffer.clone() for name, buffer in own.named_buffers()}
        with torch.no_grad():
            for parameter in (*own.parameters(), *new.parameters()):
                if parameter.requires_grad:  # a step of training, which what it keeps may not know
                    parameter.mul_(1.1).add_(0.01)
            again, first = (_guarded(small, partial(run, each)) for each in (own, new))
            if differing(again, first) is not None:
                raise Unfit(
                    "its second call on a graph makes other rows than its first: it keeps numbers"
                    " between calls, or changes what it is given; let forward change neither"
                )
        left = numbers_of(own)
        if changed := [n for n in {**kept, **left} if kept.get(n) != left.get(n)]:
            raise Unfit(
                f"forward changes {changed[0]} from call to call, and it is recorded once; leave"
                " that out, or train a module per value"
            )
        try:
            output, tensors = tried(values, is_training)
            (output.flatten() * weights).sum().backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, LookupError, ValueError) as error:
            words = (str(error).strip().splitlines() or [""])[0]
            raise Unfit(
                f"its calls of torch fail on parts of a graph ({words:.150}): a number of vertices"
                " or edges is among them, or the place of an edge; write sizes, as x.size(0), and"
                " add up rows over edges by index_add"
            ) from error
        _must_equal(expected, output, "output", is_training)
        found, gradients = tensors(), gradients_of(own)
        # what adds up to nothing, as the gradient of a bias before a batch norm, is noise of these
        most = max(float(g.abs().max()) for g in gradients.values() if g is not None and g.numel())
        for name, gradient in gradients.items():
            mine = found.get(name)
            if gradient is not None and mine is not None:
                _must_equal(gradient, mine, f"gradient of {name}", is_training, max(most, 1.0))
            elif gradient is not mine:
                raise Unfit(
                    f"{name} has a gradient in one of forward and what is trained for it alone:"
                    " forward does something that is not in its calls of torch, as a"
                    " torch.autograd.Function"
                )
        for name, buffer in buffers.items():
            mine = found.get(name)
            if mine is not None and mine.is_floating_point():
                _must_equal(buffer, mine, f"buffer {name}", is_training)


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """By all names of parameters."""
    return {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}


def _output(
    module: nn.Module,
    small: Small,
    values: Mapping[str, Any],
    shared: Callable[[], AbstractContextManager[Any]],
) -> Tensor:
    """What the module itself makes of a graph, with dropout as its twin draws it."""
    with shared():
        output = small.binding.call(module, values)
    made: Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return made


def _must_equal(
    expected: Tensor, found: Tensor, what: str, is_training: bool, most: float = 1.0
) -> None:
    """most: the size of the numbers that it may be a difference of."""
    expected, found = expected.detach(), found.detach()
    largest = float(expected.abs().nan_to_num().max()) if expected.numel() else 0.0
    largest = max(largest, 1e-3 * most)
    gap = float((expected - found).abs().max()) if expected.numel() else 0.0
    if not gap <= WITHIN * largest:
        mode = "training" if is_training else "evaluation"
        raise Unfit(
            f"its {what} in {mode} is another when its calls of torch run in pieces, on parts"
            f" of a graph (off by {gap:.3g} of {largest:.3g}): something of it is not in these"
            " calls, as code outside torch, or numbers that were kept from an earlier call; or it"
            " reads how many vertices there are, or their places, as x.size(0) and torch.arange do;"
            " or edges that leave a vertex, of which a part knows those into its own"
        )


def in_parts(pieces: Pieces, small: Small, values: Mapping[str, Any], is_training: bool) -> Tensor:
    """The output of all vertices, each layer computed on the parts of the graph."""
    mode = pieces.training if is_training else pieces.evaluation
    layers = [pieces.layer(number) for number in range(1, pieces.layers + 1)]
    rows = inputs_of(pieces, values)
    blocks = [block_of(small.whole, own) for own in small.parts]
    for layer in layers:
        moments = None
        if layer.norm is not None and is_training:
            moments = moments_of(layer.norm, rows)
        made = []
        for block in blocks:
            drop = Drop(0.0, 7, 0, layer.number, block.source, training=is_training)
            made.append(layer(block, rows[block.source], drop, moments=moments))
        rows = torch.cat(made)[torch.argsort(torch.cat(small.parts))]
    if mode.ends.nodes:
        tail = Tail(layers[-1])
        moments = moments_of(tail.norm, rows) if is_training else None
        drop = Drop(0.0, 7, 0, len(layers) + 1, torch.arange(small.vertices), training=is_training)
        rows = tail(rows, drop, moments)
    return rows


def moments_of(norm: BatchNorm, rows: Tensor) -> Tensor:
    """Moments of rows [2, W], with their graph; running averages move on."""
    norm.moments(norm.sums(rows.detach()), len(rows))
    return torch.stack([rows.mean(0), rows.var(0, unbiased=False)])


def inputs_of(pieces: Pieces, values: Mapping[str, Any]) -> Tensor:
    """What layer 1 is given of all vertices [N, W]."""
    parts = [values[node.name] for node in pieces.training.inputs]
    return torch.cat([part.reshape(len(part), -1).to(pieces.dtype) for part in parts], 1)


class Dropouts(TorchFunctionMode):
    """Has a module's own dropout drop by `draw`, which is given rows and p."""

    def __init__(self, draw: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        p, training, in_place = dropout_of(args, kwargs or {})
        rows = args[0] if args else (kwargs or {})["input"]
        if not (training and p):
            return rows
        out = self.draw(rows, p)
        return rows.copy_(out) if in_place else out


def as_pieces_draw(pieces: Pieces, mode: Program, whole: Whole, drop: Drop) -> Dropouts:
    """Has a module's own dropout, on a whole graph, draw as its pieces' does, call by call."""
    nodes = iter([node for node in mode.recorded.nodes if node.drops])

    def draw(rows: Tensor, p: float) -> Tensor:
        node = next(nodes)
        ids = torch.arange(rows.shape[node.dim])
        edges = mode.drawn.get(node)
        if edges is not None:
            ids = pair_ids(*pieces.structure.values_on(whole, pieces.place, [edges])[edges])
        return drawn(rows, node.dim, mode.numbers[node], ids, drop, p)

    return Dropouts(draw)
