"""Cuts a user's module, and proves on small graphs that the pieces compute what the module does.

The graphs are random; every field has its own numbers. Each layer runs on parts of a graph as ranks
run it: a part has the rows of its own vertices and of the vertices that they read. Outputs,
gradients of all parameters, and buffers must equal the module's own, in training and in evaluation
mode. Dropout draws the same masks in both."""

from __future__ import annotations

import copy
import os
import pickle
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import BatchNorm
from gnnplan.executor.modules.bind import (
    FORWARD_BYTES,
    MATRICES,
    VERTICES,
    GraphFields,
    Small,
    block_of,
    copied,
)
from gnnplan.executor.modules.cut import Cutter, Program, differing
from gnnplan.executor.modules.evaluate import Place, tensors
from gnnplan.executor.modules.pieces import Pieces, drawn, pair_ids
from gnnplan.executor.modules.record import (
    CHOSEN,
    COUNTER,
    DROPOUTS,
    INNER,
    OF_TURNED,
    Asked,
    Cuts,
    Named,
    Node,
    Recorded,
    Unfit,
    dropout_of,
    edge_sets_of,
    is_sparse,
    is_the_users,
    line_of,
    named_in,
    record,
    replaced,
)
from gnnplan.executor.modules.rewrite import (
    flip,
    freeze_norms,
    is_batch_norm,
    rewritten,
    sums_at,
)
from gnnplan.executor.modules.structure import Structure
from gnnplan.planner.graph.graph import CsrEdges

T = TypeVar("T")
WITHIN = 1e-9  # of the largest number


def run_once(module: nn.Module, graph: GraphFields, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the output of `forward` on a small graph with such fields. Raises Unfit."""
    small = Small(VERTICES[0], module, graph)
    with torch.set_grad_enabled(module.training):  # as in a training, which may ask
        return _output(module, small, small.given(dtype)).detach()


@contextmanager
def plainly() -> Iterator[None]:
    """Let the user's code call torch in the way that is recorded, without warnings."""
    with (
        _one_product(),
        _uncompiled(),
        _without_recomputation(),
        warnings.catch_warnings(action="ignore"),
        torch.sparse.check_sparse_tensor_invariants(),  # type: ignore[no-untyped-call]
    ):
        yield


def _guarded(small: Small, run: Callable[[], T]) -> T:
    """Run the user's code. Raises Unfit with its line instead of other errors."""
    try:
        with plainly():
            return run()
    except Unfit as unfit:
        raise Unfit(f"{line_of(unfit)}{unfit}") from None
    except (Exception, SystemExit) as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            most = f"{FORWARD_BYTES / 1e9:.0f} GB; make there what rows need alone"
            raise Unfit(f"{line_of(error)}it allocates more than {most}") from error
        code = traceback.extract_tb(error.__traceback__)[-1].line  # for an assert without a text
        words = (str(error).strip().splitlines() or [code or ""])[0]
        raise Unfit(
            f"{line_of(error)}forward fails on a small graph of {small.graph.features} features"
            f" ({type(error).__name__}: {words:.150}){_hint(error, words, small)}"
        ) from error


def _hint(error: BaseException, words: str, small: Small) -> str:
    """Return the likely cause of a torch error with such a text; '' if unknown."""
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
    if "Storage' object has no" in words and "data" in takes.values():  # of a PyG Data
        return (
            f"; data has {', '.join(small.binding.attributes)}: name the fields of your graph's"
            " file so, and return a row of each vertex, without masks"
        )
    own = (
        f"that graph has {small.vertices} vertices: a module's own tensors cannot have a row per"
        " vertex of yours, fields can"
    )
    device = "leave out what moves tensors to a device: each rank has its own"
    found = {
        "index out of range": "vertex 0 of that graph has no edges into it, as the first of a part"
        " may have none",
        "dim_size": "edges lead from all vertices to all, and no convolution between two sets of"
        " vertices has its own: give both ends all rows, as conv((x, x), edge_index)",
        "SyncBatchNorm": "torch.nn.BatchNorm1d has the moments of all ranks' rows here",
        "CUDA": device,
        "same device": device,
        f"({small.vertices})": own,
        f"(got {small.vertices - 1})": own,
        f"size {small.vertices} but": own,
        "not enough values to unpack": "rows of vertices are in one chunk there, as ranks have"
        " other rows: split columns alone, by dim=1",
        f"(2x{small.whole.indices.size} ": "it multiplies by edge_index [2, E], whose matrix is"
        " torch.sparse_coo_tensor(edge_index.flip(0), weights, (x.size(0), x.size(0)))",
    }
    if words.startswith(("tuple", "list")):  # Python's own indices, not those of vertices
        del found["index out of range"]
    fields = [
        name
        for name, field in takes.items()
        if field.startswith(("edge ", "vertex ")) and name not in small.binding.needed
    ]
    if fields:
        found[""] = (
            f"it gets the graph's fields as {', '.join(fields)}, which it could do without: leave"
            " them out of the graph, or out of forward's parameters"
        )
    for name, (sizes, *_) in small.graph.edge.items():
        if sizes and f"edge {name}" in small.binding.inputs and not fields:
            found["edge"] = (
                f"convolutions that get {name} need edge_dim={sizes[0]}; others go without {name}"
            )
    return next((f"; {hint}" for part, hint in found.items() if part in words), "")


def _one_product() -> AbstractContextManager[Any]:
    """Let PyG's RGCNConv always choose the same one of two equal products.

    Else it asks how many edges each type has."""
    backend = sys.modules.get("torch_geometric.backend")
    return replaced(backend, "use_segment_matmul", False) if backend else nullcontext()


def _uncompiled() -> AbstractContextManager[Any]:
    """Run uncompiled what the user's file has compiled by torch.compile.

    Compiled code hides its calls, and the compiler would follow ours. A file that compiles has
    imported torch._dynamo; other files need not wait the second that the import takes."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _without_recomputation() -> Iterator[None]:
    """Make torch.utils.checkpoint keep rows, where it would compute them again in the backward
    pass: the calls are recorded there. Strategies have an activation checkpointing of their own."""

    def once(*_: Any, **__: Any) -> Iterator[None]:
        yield

    def apply(run: Callable[..., T], preserve: bool, *given: Any) -> T:
        learns = any(isinstance(each, Tensor) and each.requires_grad for each in given)
        with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
            return run(*given)

    with (
        replaced(checkpoint.CheckpointFunction, "apply", staticmethod(apply)),
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", once),
    ):
        yield


def followed(module: nn.Module, graph: GraphFields, dtype: torch.dtype) -> tuple[Pieces, Small]:
    """Record a module of this dtype in both modes and cut it. Raises Unfit with the line.

    Parameters without a gradient are frozen, as of rows that `forward` detaches: torch's optimizers
    leave them as they are, with weight decay too."""
    small = Small(VERTICES[0], module, graph)
    first = copied(module).to(dtype).train()
    learns = {*map(id, leaves_of_gradient(_output(first, small, small.given(dtype))))}
    before, after = (dict(each.named_buffers(remove_duplicate=False)) for each in (module, first))
    calls = {n: int(after[n] - before[n]) for n in after if n.endswith(COUNTER)}
    for copy_of, parameter in zip(first.parameters(), module.parameters(), strict=True):
        if learns and id(copy_of) not in learns:
            parameter.requires_grad_(False)
    shared: dict[Hashable, Node] = {}
    frozen: set[Any] = set()  # running means of batch norms that evaluate in training

    def program(is_training: bool) -> Program:
        own, recorded = recorded_of(module, small, is_training, dtype)
        freeze_norms(recorded.nodes, is_training, frozen)
        trained = {name for name, p in own.named_parameters() if p.requires_grad}
        return Cutter(recorded, Place(named_in(own)), trained, shared).cut()

    modes = program(True), program(False)
    for node in modes[1].live:
        if node.drops:
            raise Unfit(
                f"{node.place}dropout drops in evaluation too, unless it is told; write"
                " training=self.training"
            )
    training, evaluation, differs = *modes, ""
    if training.widths != evaluation.widths:
        handed = [
            f"{sum(map(sum, mode.widths))} numbers per vertex in {len(mode.layers)} layers"
            for mode in modes
        ]
        differs = (
            f"forward hands on {handed[0]} in training, and {handed[1]} in evaluation; let both"
            " modes read the same edges and rows, and drop weights of edges after their norm"
        )
        # dropout may have kept equal calls apart: then the calls of training evaluate too
        evaluation = training
    answers = {node: n for mode in modes for node, n in mode.recorded.answers.items()}
    structure = Structure((training, evaluation), answers, Place(named_in(module)), dtype)
    loops, binding = small.whole.loops, small.binding
    pieces = Pieces(module, training, evaluation, differs, structure, loops, binding, calls)
    for own in small.parts:
        structure.find_whole(block_of(small.whole, own))
    return pieces, small


def recorded_of(
    module: nn.Module,
    small: Small,
    is_training: bool,
    dtype: torch.dtype,
    parts: Collection[str] = (),
) -> tuple[nn.Module, Recorded]:
    """Return a copy of the module, and its recording on a small graph, with sizes from a large one.

    parts: see `record`. Raises Unfit."""

    def on(graph: Small, takes_constants: bool) -> tuple[nn.Module, Recorded]:
        own = copied(module).to(dtype).train(is_training)  # forward may keep its arguments
        if graph is not small:  # with other parameters, lest what they make pass for a constant
            make_a_step(own)
        given = graph.given(dtype, is_recorded=True)
        run = partial(graph.binding.call, own, given)
        recorded = partial(record, own, given, run, graph.vertices, parts, takes_constants)
        return own, _guarded(graph, recorded)

    def on_both(takes_constants: bool) -> tuple[nn.Module, Recorded]:
        (own, few), (_, many) = (on(graph, takes_constants) for graph in (small, small.larger))
        if few.cuts or many.cuts:
            _must_not_read_chunks(module, small, is_training, few.cuts or many.cuts)
        return own, rewritten(few, many, small.graph.directed, Place(named_in(own)))

    try:
        return on_both(takes_constants=True)
    except Unfit as first:
        try:
            return on_both(takes_constants=False)
        except Unfit as second:
            raise (first if "random numbers" in str(first) else second) from None


def make_a_step(*modules: nn.Module) -> None:
    """Change all parameters that modules train, as a step of an optimizer does: equal modules
    alike, and each number otherwise."""
    for module in modules:
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for each in module.parameters():
                if each.requires_grad:
                    noise = torch.rand(each.shape, generator=draw, dtype=each.dtype)
                    each.mul_(1.1).add_(0.1 * noise)


def stirred(module: nn.Module) -> nn.Module:
    """Return a copy in float64 with other parameters, as training makes them: those that are 0 at
    first would hide rows, and gradients that they multiply."""
    own = copy.deepcopy(module).to(torch.float64)
    make_a_step(own)
    return own


# what is compared with a module: an output, and a function that returns, after the backward pass,
# the gradients of the module's parameters and its buffers, by name
Candidate = tuple[Tensor, Callable[[], Mapping[str, Tensor | None]]]


def prove(module: nn.Module, pieces: Pieces, small: Small) -> None:
    """Raise Unfit if the pieces compute something else than the module. Both are in float64."""
    asked, module = None, stirred(module)
    try:
        pieces.structure.must_answer_alike(small.whole, small.fields)
    except Asked as error:  # Python may do the same with it
        asked = error

    dropout_mode = partial(as_pieces_draw, pieces, small.whole, Drop(0.0, 7))

    def candidate(is_training: bool) -> Candidate:
        own = copy.deepcopy(module).to(torch.float64)
        output = in_parts(replace(pieces, module=own), small, is_training)
        return output, lambda: gradients_of(own) | dict(own.named_buffers())

    try:
        must_compute(module, small, dropout_mode, candidate, partial(_suspected, pieces, small))
    except Unfit as error:
        raise asked or error from None


def _suspected(pieces: Pieces, small: Small, is_training: bool) -> str:
    """Return why pieces may compute something else, as a call that may look at more than the edges
    into a vertex, as the start of an error message; '': nothing is known."""
    if pieces.differs and not is_training:
        return pieces.differs
    if small.adds_loops:
        return "forward also reads the graph without the self-loops that it adds; add them first"
    edge_sets = [edges.value for edges in edge_sets_of(pieces.training.live)]
    sizes = {small.vertices, *(edges.shape[1] for edges in edge_sets)}
    added, reader = dict(sums_at(pieces.training.recorded)), pieces.training.recorded.reader
    for node in pieces.training.live:
        if added.get(node, reader) != reader:
            why = (
                "a part knows the edges into its vertices; add up rows of edge_index[0] at"
                " edge_index[1] (if the graph is undirected, write col, row = edge_index), or turn"
                " the edges in the graph's file"
                if small.graph.directed
                else "other sums are at edge_index[1]: of an undirected graph both are equal if"
                " neither dropout nor edge features, as edge_weight, are in them; add up at one"
            )
            return (
                f"{node.place}{node.what} adds rows up at edge_index[0], where edges start, and"
                f" {why}"
            )
        if node.call is flip:
            return f"{node.place}{OF_TURNED}"
        if isinstance(node.call, Named):
            return (
                f"{node.place}{node.call.name} ({node.call.kind}) is called as a whole, since torch"
                f" does not see all{node.call.unseen}: that must follow from the edges into each"
                " vertex, looked at once"
            )
        shapes = [value.shape for value in tensors(node.value) if node.kind == INNER]
        if shapes and not any({*shape} & sizes for shape in shapes):
            return (
                f"{node.place}{node.what} makes {[*shapes[0]]} of all edges or vertices, as a"
                " graph's readout does; a row here is made of its vertex's own and its neighbours'"
            )
    for node in pieces.training.live:
        if isinstance(getattr(node.call, "__self__", None), type):  # `apply` of a Function
            return (
                f"{node.place}{node.what} makes a gradient of its own, which must be linear: each"
                " rank that reads a row has a part of its gradient, and none of all rows'; leave"
                " out what clips or norms gradients (--set clip=.. clips those of all parameters)"
            )
    live = {*pieces.training.live}
    for node in pieces.training.recorded.nodes:
        if is_training and is_batch_norm(node) and node not in live:
            return (
                f"{node.place}no row of the output is made of this batch norm's, and ranks keep no"
                " running averages of them; leave it out there, as in a last layer"
            )
    return ""


def must_compute(
    module: nn.Module,
    small: Small,
    dropout_mode: Callable[[], TorchFunctionMode],
    candidate: Callable[[bool], Candidate],
    suspected: Callable[[bool], str],
) -> None:
    """Raise Unfit if `candidate` computes something else than the module. Both are in float64.

    dropout_mode: makes a mode in which the module's dropout draws the masks that `candidate` draws.
    candidate, suspected: are called with whether to train; see Candidate, _suspected."""

    def run(own: nn.Module, is_training: bool, values: Mapping[str, Any]) -> Tensor:
        # in evaluation nothing drops, and no mode stands between the module and torch
        within = dropout_mode if is_training else nullcontext
        chunks = Cuts(values, small.vertices) if is_training else nullcontext()
        with chunks:  # recorded dropout draws for all rows at once
            return _output(own.train(is_training), small, values, within)

    def must_equal(
        one: Tensor, other: Tensor, what: str, is_training: bool, most: float = 1.0
    ) -> None:
        """Raise Unfit if tensors differ; most: the largest number that they are differences of."""
        one, other = one.detach(), other.detach()
        largest = float(one.abs().nan_to_num().max()) if one.numel() else 0.0
        largest = max(largest, 1e-3 * most)
        gap = float((one - other).abs().max()) if one.numel() else 0.0
        if gap <= WITHIN * largest:
            return
        _must_not_read_order(module, small)  # which says more
        seen = (
            f"its {what} in {'training' if is_training else 'evaluation'} is another when its calls"
            f" of torch run in pieces, on parts of a graph (off by {gap:.3g} of {largest:.3g})"
        )
        raise Unfit(
            f"{why}; {seen}"
            if (why := suspected(is_training))
            else f"{seen}: something of it is not in these calls, as code outside torch, or numbers"
            " that were kept from an earlier call; or it reads how many vertices there are, or"
            " their places, as x.size(0) and torch.arange do; or edges that leave a vertex, of"
            " which a part knows those into its own"
        )

    for is_training in (True, False):
        own, new = (copy.deepcopy(module).to(torch.float64) for _ in range(2))
        values = small.given(torch.float64)
        expected = run(own, is_training, values)
        kept = numbers_of(own)
        if not bool(expected.isfinite().all()):
            raise Unfit(
                "forward makes numbers that are not finite on a small graph, of which vertex 0 has"
                " no edges into it: where it divides by a degree, let that be deg.clamp(min=1)"
            )
        must_learn_its_own(expected, own)
        weights = torch.linspace(0.5, 1.5, expected.numel(), dtype=torch.float64)
        if is_training:  # evaluation may change in place what a gradient would need
            if not expected.requires_grad:
                raise Unfit("no parameter of it learns; let some have requires_grad=True")
            _guarded(small, (expected.flatten() * weights).sum().backward)
        buffers = {name: buffer.clone() for name, buffer in own.named_buffers()}
        make_a_step(own, new)  # numbers that forward has kept know nothing of it
        with torch.set_grad_enabled(is_training):
            again, first = (run(each, is_training, values) for each in (own, new))
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
        if not is_training:
            with_gradients = run(copy.deepcopy(new), is_training, values)
            if differing(with_gradients, first) is not None:
                raise Unfit(
                    "forward makes other rows in evaluation where autograd is off, as it asks"
                    " torch.is_grad_enabled(); let it ask self.training"
                )
        new = copy.deepcopy(module).to(torch.float64)
        _must_keep_nothing_else(
            own, new, partial(run, values=small.given(torch.float64)), is_training
        )
        try:
            output, tensors = candidate(is_training)
            loss = (output.flatten() * weights).sum()
            if is_training:
                loss.backward()  # type: ignore[no-untyped-call]
        except (RuntimeError, LookupError, ValueError) as error:
            words = (str(error).strip().splitlines() or [""])[0]
            seen = f"its calls of torch fail on parts of a graph ({words:.150})"
            place = _place_of(error)
            if not place and (why := suspected(is_training)):
                raise Unfit(f"{why}; {seen}") from error
            raise Unfit(
                f"{place}{seen}: a number of vertices or edges is among them, or the place of an"
                " edge or vertex, as nonzero() of degrees tells; write sizes, as x.size(0), masks,"
                " and add up rows over edges by index_add"
            ) from error
        must_equal(expected, output, "output", is_training)
        found, gradients = tensors(), gradients_of(own) if is_training else {}
        if thin := next((name for name, g in gradients.items() if is_sparse(g)), ""):
            raise Unfit(
                f"{thin} has sparse gradients, and ranks add dense ones; leave out sparse=True"
            )
        # a gradient that cancels, as of a bias before a batch norm, is rounding error of this size
        sizes = (float(g.abs().max()) for g in gradients.values() if g is not None and g.numel())
        most = max(sizes, default=0.0)
        for name, gradient in gradients.items():
            other = found.get(name)
            if gradient is not None and other is not None:
                must_equal(gradient, other, f"gradient of {name}", is_training, max(most, 1.0))
            elif gradient is not other:
                raise Unfit(
                    f"{name} has a gradient in one of forward and what is trained for it alone:"
                    " forward does something that is not in its calls of torch, as a"
                    " torch.autograd.Function that is given modules; leave out what saves memory so"
                    " (PyG's GroupAddRev(.., disable=True)): ranks keep fewer rows"
                )
        for name, buffer in buffers.items():
            other = found.get(name)
            if other is not None and other.is_floating_point():
                must_equal(buffer, other, f"buffer {name}", is_training)


def _place_of(error: BaseException) -> str:
    """Return the place of the recorded call that raised an error; '': it is in none."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = [f.f_locals["node"].place for f in frames if f.f_code is Place.call.__code__]
    return places[-1] if places else ""


def _must_keep_nothing_else(
    used: nn.Module, new: nn.Module, run: Callable[[nn.Module, bool], Tensor], was_training: bool
) -> None:
    """Raise Unfit if a module that was used in one mode makes, in the other, other rows than a new
    one with its parameters and buffers, which are all that a rank has of it."""
    kept = {**dict(used.named_parameters()), **dict(used.named_buffers())}
    modes = ("training", "evaluation") if was_training else ("evaluation", "training")
    with torch.no_grad():
        for name, tensor in (*new.named_parameters(), *new.named_buffers()):
            tensor.copy_(kept.get(name, tensor))
    with torch.set_grad_enabled(not was_training):
        first, second = (run(each, not was_training) for each in (used, new))
    if differing(first, second) is not None:
        raise Unfit(
            f"forward keeps something of {modes[0]} that {modes[1]} reads, beside parameters and"
            " buffers, which are all that ranks keep; compute it anew in each call"
        )


def leaves_of_gradient(output: Tensor) -> list[Tensor]:
    """Return the tensors to which a backward pass from the output adds gradients."""
    seen, todo, leaves = set(), [output.grad_fn], []
    while todo:
        node: Any = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaves += [node.variable] if hasattr(node, "variable") else []
        todo += [read for read, _ in node.next_functions]
    return leaves


def must_learn_its_own(output: Tensor, module: nn.Module) -> None:
    """Raise Unfit if the output depends on a trained tensor that is no parameter of the module."""
    own = {*map(id, module.parameters())}
    for leaf in leaves_of_gradient(output):
        if id(leaf) not in own:
            raise Unfit(
                f"forward reads a tensor {list(leaf.shape)} that learns and is none of its"
                " parameters, but a file's, or of a part that a function has kept, as in"
                " conv.forward = lambda *given: old(*given); make it a parameter, and the function"
                " a method"
            )


class _WithoutTensors(pickle.Pickler):
    """A pickler that leaves out tensors and modules, which training changes."""

    def persistent_id(self, value: Any) -> str | None:
        return "" if isinstance(value, (Tensor, nn.Module)) else None


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Return the state that a module, its submodules, functions and the user's files keep, by name.

    That is numbers and texts, tensors of one number or of integers, the sizes of containers, and
    the states of other objects without their tensors; but not batch norm's count of batches."""
    found: dict[str, Any] = {}
    files = {
        name: code
        for name, code in tuple(sys.modules.items())
        if is_the_users(getattr(code, "__file__", None) or "<none>")
    }

    def note(name: str, value: Any, depth: int) -> None:
        """Add a value, and values inside it to a depth."""
        if isinstance(value, (list, tuple, dict, set, deque)):
            found[f"the size of {name}"] = len(value)
        if isinstance(value, (int, float, str, np.generic)):
            if value == value:  # NaN differs from itself
                found[name] = value
        elif isinstance(value, Tensor):
            counts = value.numel() == 1 or not value.is_floating_point()
            learns = isinstance(value, nn.Parameter) or value.grad_fn is not None
            if counts and not learns and value.layout == torch.strided:
                found[name] = value.tolist()
        elif depth and isinstance(value, (list, tuple)):
            note(name, dict(enumerate(value)), depth)
        elif depth and isinstance(value, dict):
            for key, each in tuple(value.items()):
                note(f"{name}.{key}", each, depth - 1)
        elif isinstance(value, (nn.Module, ModuleType)):
            return
        elif getattr(value, "__module__", None) in files and (own := own_state(value)) is not None:
            note(name, own, depth)
            if isinstance(value, FunctionType):
                captured = [c.cell_contents for c in value.__closure__ or () if c != CellType()]
                note(name, [*(value.__defaults__ or ()), *captured], depth)
        elif depth and not callable(value) and not isinstance(value, (set, deque)):
            state = BytesIO()
            try:
                _WithoutTensors(state).dump(value)
                found[name] = state.getvalue()
            except Exception:  # it holds a lambda, for instance
                note(name, own_state(value) or {}, depth - 1)

    note("os.environ", dict(os.environ), 1)
    for path, part in module.named_modules():
        counts_batches = isinstance(part, _NormBase)  # and keeps running moments
        state = vars(part) | {"_buffers": {}} if counts_batches else vars(part)
        note(f"self.{path}".rstrip("."), state, 3)
    for code in files.values():
        file = Path(str(code.__file__)).name
        for name, value in tuple(vars(code).items()):
            if name != "__warningregistry__":  # Python's, of warnings that have been shown
                note(f"{file}: {name}", value, 3)
    return found


def own_state(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes; None if it has none, or raises something when it is asked."""
    try:
        return dict(vars(value))
    except Exception:
        return None


def gradients_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return gradients by all names of the parameters."""
    return {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}


def _output(
    module: nn.Module,
    small: Small,
    values: Mapping[str, Any],
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Tensor:
    """Return the module's own output on a graph; within: makes the mode that draws its dropout.

    Raises Unfit, with the user's line where there is one."""

    def run() -> Tensor:
        with within():
            return small.binding.call(module, values)

    return _guarded(small, run)


def _must_not_read_order(module: nn.Module, small: Small) -> None:
    """Raise Unfit if the module's output changes when vertices are numbered in reverse."""
    twin, whole = copy.copy(small), small.whole
    indptr, indices = whole.indices.size - whole.indptr[::-1], small.vertices - 1 - whole.indices
    on_edges = {name: field[::-1] for name, field in whole.fields.items()}
    twin.whole = CsrEdges(indptr, indices[::-1], on_edges, whole.loops)
    twin.fields = {name: field[::-1] for name, field in small.fields.items()}
    own = copied(module).to(torch.float64).eval()
    with torch.no_grad():
        first, second = (_output(own, each, each.given(torch.float64)) for each in (small, twin))
    if differing(first, second.flip(0)) is not None:
        raise Unfit(
            "forward makes other rows when vertices are numbered in reverse: it depends on the"
            " order of edges, as an LSTM over neighbours does, or on vertices' places, and a part"
            " has others; take the sum, mean, maximum or attention of neighbours"
        )


def _must_not_read_chunks(module: nn.Module, small: Small, is_training: bool, place: str) -> None:
    """Raise Unfit if the module makes other rows where rows are cut into other chunks.

    place: of the call that cuts them."""
    own, values = copied(module).to(torch.float64).train(is_training), small.given(torch.float64)

    @contextmanager
    def cutting(chunks: int) -> Iterator[None]:
        with Dropouts(lambda rows, p: rows), Cuts(values, small.vertices, chunks):
            yield

    with torch.no_grad():
        rows = [_output(own, small, values, partial(cutting, chunks)) for chunks in (1, 2, 5)]
    if any(differing(rows[0], others) is not None for others in rows[1:]):
        raise Unfit(
            f"{place} cuts rows into chunks, and forward makes other rows where there are more or"
            " fewer of them, as ranks have; compute each row of a chunk from itself alone, and read"
            " no number of a chunk"
        )


def in_parts(pieces: Pieces, small: Small, is_training: bool) -> Tensor:
    """Return the output of all vertices, with each layer computed on the parts of the graph."""
    layers = [pieces.layer(number) for number in range(1, pieces.layers + 1)]
    dtype = pieces.structure.dtype
    given = small.given(dtype)
    fields = [given[node.name] for node in pieces.training.inputs]
    rows = torch.cat([field.reshape(len(field), -1).to(dtype) for field in fields], 1)
    blocks = [block_of(small.whole, own) for own in small.parts]
    for layer in layers:
        moments = moments_of(layer.norm, rows, is_training)
        outputs = []
        for block in blocks:
            drop = Drop(0.0, 7, 0, layer.number, block.source, training=is_training)
            outputs.append(layer(block, rows[block.source], drop, moments=moments))
        rows = torch.cat(outputs)[torch.argsort(torch.cat(small.parts))]
    drop = Drop(0.0, 7, 0, len(layers) + 1, torch.arange(small.vertices), training=is_training)
    return layer.finish(rows, drop, moments_of(layer.norm_after, rows, is_training))


def moments_of(norm: BatchNorm | None, rows: Tensor, is_training: bool) -> Tensor | None:
    """Return moments of rows [2, W] with their autograd graph, and update the running moments.

    None: without a norm, and in evaluation, in which it takes the running ones."""
    if norm is None or not is_training:
        return None
    norm.moments(norm.sums(rows.detach()), len(rows))
    return torch.stack([rows.mean(0), rows.var(0, unbiased=False)])


class Dropouts(TorchFunctionMode):
    """A mode in which a module's own dropout drops by `draw(rows, p)`."""

    def __init__(self, draw: Callable[[Tensor, float], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in DROPOUTS:
            return func(*args, **(kwargs or {}))
        rows, p, in_place = dropout_of(args, kwargs or {})
        if not p:
            return rows
        out = self.draw(rows, p)
        return rows.copy_(out) if in_place else out


def as_pieces_draw(pieces: Pieces, whole: CsrEdges, drop: Drop) -> Dropouts:
    """Return the mode in which a module trained on a whole graph drops as its pieces do."""
    nodes = iter([node for node in pieces.training.recorded.nodes if node.drops])

    def draw(rows: Tensor, p: float) -> Tensor:
        node = next(nodes)
        ids = torch.arange(whole.vertices if node.kind == CHOSEN else rows.shape[node.dim])
        if (edges := node.edges) is not None:
            ids = pair_ids(*pieces.structure.values_on(whole, [edges], {})[edges])
        return drawn(rows, node, ids, drop, p)

    return Dropouts(draw)
