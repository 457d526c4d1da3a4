"""Reads a user's model as a workload, and makes the Net of any workload.

The model is FILE.py:NAME, or a live object: a torch.nn.Module, a class of modules, or a function
that returns one. A module runs as it is written, cut into pieces (cut.py) that are proved to
compute the same (prove.py). A chain of convolutions that built-in layers compute too is converted
to these (convert.py): they are faster, and every strategy can split them.

In a file, the model may also be a class of layers.Layer. The work of its layers is counted
(layers/count.py), and each rank makes them again from the file."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.count import Unmeasured, count, must_sum_columns
from gnnplan.executor.layers.layer import EDGES, Layer
from gnnplan.executor.layers.models import Net
from gnnplan.executor.modules.bind import (
    EACH,
    VERTICES,
    Fields,
    GraphFields,
    Small,
    copied,
    field_of,
)
from gnnplan.executor.modules.branches import must_call_alike
from gnnplan.executor.modules.convert import Parameters, converted
from gnnplan.executor.modules.make import (
    PICKLED,
    as_planned,
    imports_of,
    in_file,
    keep,
    loaded,
    make,
    must_equal_in_ranks,
    seeded,
    source_of,
)
from gnnplan.executor.modules.pieces import Pieces
from gnnplan.executor.modules.prove import followed, prove, run_once
from gnnplan.executor.modules.record import Asked, Named, Unfit, words_of
from gnnplan.executor.modules.rewrite import norm_edges
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload
from gnnplan.planner.graph.data import unread_by
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.planner.vocabulary.units import show_percent

MAX_PARAMETERS = 1 << 40  # [B] of a live module's file
# of refusals of sizes
OF_SIZES = ("is another call", "is no number of", "fails on a part", "fail on parts")
# FILE.py:NAME, or a live object
Source = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class UserModule:
    """A user's module, as it was read, or their class of layers.

    fields: what the model decides of the Workload. trained: the pieces of the module, or the
    parameters of built-in layers. module, trained: None for a class of layers."""

    fields: Mapping[str, Any]
    description: Module
    module: nn.Module | None = None
    trained: Parameters | Pieces | None = None

    @property
    def pieces(self) -> Pieces | None:
        """None if the module is converted to built-in layers."""
        return self.trained if isinstance(self.trained, Pieces) else None


def with_user_model(
    problem: Problem,
    model: Source,
    given: Iterable[str] = (),
    folder: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Problem, list[str]]:
    """Return the problem with the user's model, and notes.

    model: `FILE.py:NAME`; or a live torch.nn.Module, which is not changed, and from whose
    parameters training starts; or a class or function, which is called with the graph's widths.
    Of a class of layers.Layer the workload's `layers` and `hidden` give the number and the width.
    given: fields of the workload that the user set, which the module must not contradict. folder:
    see `read`. more: fields that depend on what the module decides, as fanout. Raises SpecError.

    >>> problem, notes = with_user_model(problem, MyGNN(100, 64, 47))  # doctest: +SKIP
    """
    graph, dtype = GraphFields.of(problem), dtype_of(problem.workload.precision.weights)
    user = read(model, problem.workload, graph, folder)
    if user.module is not None:
        _as_read(problem, user.description, user.module, user.pieces, graph, dtype)
    given = list(given)
    workload = with_module(problem.workload, user, given, more)
    return replace(problem, workload=workload), _notes(user, problem, given)


def _as_read(
    problem: Problem,
    description: Module,
    module: nn.Module,
    pieces: Pieces | None,
    fields: GraphFields,
    dtype: torch.dtype,
) -> Graph | None:
    """Return the graph that a module is given: with self-loops, if DGL convolutions need them.

    Raises SpecError if `forward` makes other calls on it than when recorded."""
    graph, asked = problem.graph, None
    with _told_of(description), redirect_stdout(sys.stderr):
        if pieces and graph is not None:
            graph = replace(graph, loops=True) if pieces.loops else graph
            try:
                pieces.structure.must_answer_alike(graph.csr_edges, graph.vertex_fields)
            except Asked as error:
                asked = error
        sizes = problem.stats.vertices, problem.stats.edges
        must_call_alike(module, fields, dtype, sizes, graph, asked)
    return graph


@contextmanager
def _told_of(module: Module) -> Iterator[None]:
    """Raise SpecError, with the module's file and name, for Unfit."""
    try:
        yield
    except Unfit as unfit:
        raise SpecError(f"{module.file}: {module.name}: {unfit}") from unfit


def read(
    model: Source,
    workload: Workload,
    graph: GraphFields,
    folder: Path | None = None,
) -> UserModule:
    """Read the user's model for such a graph. Raises SpecError, with the line if it has a file.

    A class or function is called with the widths of the graph and fields of `workload` that its
    parameters name (bind.py). torch's and numpy's random numbers start from the workload's seed
    before a file is executed.

    A live object may be from a notebook. Ranks read it from a file, which is written to `folder`
    (default: modules/ in gnnplan's cache directory) under a name with its SHA-256. Ranks on other
    servers need the file at the same path."""
    file: Path | None = None
    name, sha256 = getattr(model, "__name__", type(model).__name__), ""
    if isinstance(model, str):
        file, name, sha256 = source_of(model)

    def find() -> object:
        return in_file(file, name) if file else model

    def made_of(found: object) -> tuple[nn.Module, dict[str, Any]]:
        widths = {"features": graph.features, "classes": graph.classes}
        return make(found, name, file, workload.model_dump() | widths)

    def made_again() -> nn.Module:
        with seeded(workload.seed):
            return made_of(find())[0]

    with seeded(workload.seed):
        found = find()
        imports = imports_of(file) if file else ()
        if issubclass(found if isinstance(found, type) else type(found), Layer):
            return _layers(workload, file, name, sha256, imports, graph)
        module, arguments = made_of(found)
    dtype = dtype_of(workload.precision.weights)
    trained: Parameters | Pieces
    try:
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
            rows = partial(_rows, graph=graph, seed=workload.seed)
            must_equal_in_ranks(module, made_again, rows)
            materialise(module, graph, workload.seed)
            for place, tensor in (*module.named_parameters(), *module.named_buffers()):
                if tensor.is_meta:
                    raise Unfit(f"{place} is on the device meta: it has no numbers; use the CPU")
            module = copy.deepcopy(module).to("cpu", dtype)  # a live module is not changed
            graph = _with_its_widths(module, graph, dtype)
            try:
                chain = converted(module, graph)
                fields, own = chain.fields, chain.own
                trained = Parameters(dict(module.state_dict()), chain.places)
            except Unfit:
                trained = proved(module, graph, dtype)
                fields, own = _described(trained, graph, dtype)
            if file is None:
                kept = module if isinstance(trained, Pieces) else trained
                file, sha256 = keep(kept, folder or cache_dir() / "modules", name)
    except Unfit as unfit:
        words = f"{unfit}{_without_some_kinds(unfit, graph)}"
        raise SpecError(f"{f'{file}: ' if file else ''}{name}: {words}") from unfit
    description = Module(
        file=str(file),
        name=name,
        sha256=sha256,
        imports=imports,
        features=graph.features,
        classes=graph.classes,
        arguments=tuple(arguments.items()),
        **own,
    )
    return UserModule(fields, description, module, trained)


def _without_some_kinds(unfit: Unfit, graph: GraphFields) -> str:
    """Return the cause of a refusal of sizes if small graphs lack edges of some kinds; else ''."""
    for name, (_, _, kinds) in graph.edge.items():
        if EACH * kinds > VERTICES[0] and any(words in str(unfit) for words in OF_SIZES):
            return (
                f". {name} has {kinds} kinds, and graphs of {VERTICES[0]} vertices have no edges of"
                " some: if forward runs once per kind, as RGCNConv does, look weights up by kind"
                " instead, as FastRGCNConv does"
            )
    return ""


def _described(
    pieces: Pieces, graph: GraphFields, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return pieces as fields of a Workload and of a Module. Raises Unfit."""
    owners = pieces.owners
    ends = bool(pieces.training.ends.nodes)

    def described(number: int) -> ModuleLayer:
        layer, (h_in, h_out) = pieces.layer(number), pieces.widths[number - 1 : number + 1]
        try:
            counted = count(layer, h_in, h_out, False, number > 1, dtype)
        except Unmeasured as error:
            for call in (node.call for node in layer.cut.gather.nodes):
                if isinstance(call, Named):
                    raise Unfit(
                        f"layer {number}, in {call.name} ({call.kind}), which is called as a whole:"
                        f" {error}. A Python function of mailboxes, as an LSTM, runs once per"
                        " degree; reduce by a function of dgl.function, as its sum and mean"
                    ) from error
            raise Unfit(f"layer {number}: {error}") from error
        weights = sum(p.numel() for p, of in owners.items() if of[0] == number)
        return ModuleLayer(
            h_in=h_in,
            h_out=h_out,
            norm="batch" if layer.norm else "none",
            drops=False,
            counted=counted.model_copy(update={"weights": weights}),
            shares=min((of[0] for of in owners.values() if number in of[1:]), default=0),
        )

    layers = tuple(described(number) for number in range(1, pieces.layers + 1))
    has_norm = ends or any(layer.norm == "batch" for layer in layers)
    fields = {
        "model": "own",
        "layers": len(layers),
        "norm": "batch" if has_norm else "none",
        "dropout": 0.0,  # the module drops by itself
    }
    return fields, {
        "layers": layers,
        "relu": False,
        "cut": True,
        "inputs": pieces.inputs,
        "directed": graph.directed,
        "vertex_fields": _shapes("vertex", graph.vertex, pieces),
        "edge_fields": _shapes("edge", graph.edge, pieces),
        "ends": ends,
        "norms_edges": any(n.call is norm_edges and n.args[2] for n in pieces.training.live),
    }


def proved(module: nn.Module, graph: GraphFields, dtype: torch.dtype) -> Pieces:
    """Return the module in pieces that are proved to compute the same. Raises Unfit."""
    pieces, small = followed(module, graph, dtype)
    double = pieces
    if dtype != torch.float64:
        double, _ = followed(copied(module).double(), graph, torch.float64)
    if (double.training.widths, double.differs) != (pieces.training.widths, pieces.differs):
        raise Unfit("forward hands on other rows in float64 than in float32")
    prove(module, double, small)
    prove(module, double, Small(VERTICES[1], module, graph))
    width = pieces.training.recorded.output.value.shape[1]
    if width != graph.classes:
        raise Unfit(
            f"forward writes rows of {width} numbers, and the graph has {graph.classes} classes;"
            f" make the two equal, by a parameter named out_channels for instance"
        )
    return pieces


def _rows(module: nn.Module, graph: GraphFields, seed: int) -> list[Tensor]:
    """Return a module's outputs on a small graph, in training and evaluation mode. Raises Unfit."""
    outputs = []
    for is_training in (True, False):
        own = copied(module).train(is_training)
        materialise(own, graph, seed)
        torch.manual_seed(seed)
        outputs.append(run_once(own, _with_its_widths(own, graph, torch.float32)))
    return outputs


def _with_its_widths(module: nn.Module, graph: GraphFields, dtype: torch.dtype) -> GraphFields:
    """Return the graph with the module's widths, where it may have its own (GraphFields.own)."""
    if not any(graph.own):
        return graph
    sizes = [p.shape[-1] for p in module.parameters() if p.ndim >= 2]
    widths = [graph.features, *dict.fromkeys(sizes)] if graph.own[0] else [graph.features]
    for features in widths:
        with suppress(Exception):  # whatever fails, the module reads no rows of this width
            found = replace(graph, features=features)
            classes = run_once(copy.deepcopy(module), found, dtype).shape[1]
            return replace(found, classes=classes if graph.own[1] else graph.classes)
    return graph


def materialise(module: nn.Module, graph: GraphFields, seed: int) -> None:
    """Initialise lazy parameters (in_channels=-1) by a first call of `forward`. Raises Unfit."""
    if any(is_lazy(parameter) for parameter in module.parameters()):
        torch.manual_seed(seed)
        run_once(module, graph)


@lru_cache(maxsize=2)
def read_again(workload: Workload) -> Parameters | Pieces:
    """Return the pieces or parameters that a plan's workload trains.

    Raises SpecError if the file has changed since the plan."""
    module = workload.own
    path = Path(module.file)
    with redirect_stdout(sys.stderr), seeded(workload.seed):
        if path.suffix == PICKLED:
            made = loaded(as_planned(path, module.sha256, MAX_PARAMETERS))
        else:
            made, _ = make(object_of(module), module.name, path, {}, dict(module.arguments))
        return made if isinstance(made, Parameters) else _understood_again(workload, made)


def _understood_again(workload: Workload, made: nn.Module) -> Parameters | Pieces:
    """Return what a plan's module is trained as. Raises SpecError if that is not as planned."""
    module = workload.own
    dtype = dtype_of(workload.precision.weights)
    graph = _fields_of(module)
    try:
        materialise(made, graph, workload.seed)
        made = made.to(dtype)
        if module.cut:
            pieces, _ = followed(made, graph, dtype)
            widths = pieces.widths
        else:
            chain = converted(made, graph, proves=False)
            widths = _widths_of(chain.own["layers"])
    except Unfit as unfit:
        raise SpecError(f"{module.file}: {module.name}: {unfit}; plan again") from unfit
    if widths != (planned := _widths_of(module.layers)):
        raise SpecError(
            f"{module.file}: {module.name} has layers of {widths} numbers, and the plan has"
            f" {planned}; the module decides them, so plan again"
        )
    return pieces if module.cut else Parameters(made.state_dict(), chain.places)


def _fields_of(module: Module) -> GraphFields:
    """Return what a plan's module may know of a graph."""
    vertex, edge = (
        {name: (sizes, kind, kinds) for name, sizes, kind, kinds in fields}
        for fields in (module.vertex_fields, module.edge_fields)
    )
    return GraphFields(module.features, module.classes, module.directed, False, vertex, edge)


def _widths_of(layers: Sequence[ModuleLayer]) -> list[int]:
    return [layers[0].h_in, *(layer.h_out for layer in layers)]


def _shapes(kind: str, fields: Fields, pieces: Pieces) -> tuple[Any, ...]:
    """Return the fields of a graph that a module receives, as a Module stores them."""
    inputs = pieces.binding.inputs
    return tuple((name, *shape) for name, shape in fields.items() if f"{kind} {name}" in inputs)


def with_module(
    workload: Workload,
    user: UserModule,
    given: Iterable[str],
    more: Mapping[str, Any] | None = None,
) -> Workload:
    """Return the workload with the user's module as its model.

    given: fields that the user set. Raises SpecError if the module decides another value of one of
    them, or breaks a rule of the workload."""
    given = list(given)
    used = {field_of(argument) for argument, _ in user.description.arguments}
    for field in given:
        is_decided = user.trained is not None and field in user.fields and field not in used
        if is_decided and getattr(workload, field) != user.fields[field]:
            raise SpecError(
                f"{field}: {user.description.name} of {user.description.file} decides {field}"
                f" ({field}: {getattr(workload, field)}, the module's: {user.fields[field]}); leave"
                f" {field} out, or change the module"
            )
    own = {**user.fields, "module": user.description.model_dump()}
    return checked(
        Workload,
        workload.model_dump() | own | dict(more or {}),
        f"{user.description.file}: {user.description.name}: ",
        given,
    )


def _notes(user: UserModule, problem: Problem, given: Collection[str]) -> list[str]:
    """Return notes on dense features, arguments, optional fields and unread fields."""
    name, graph, stats, notes = user.description.name, problem.graph, problem.stats, list[str]()
    if user.trained is None:
        return unread_by(name, graph)
    if user.pieces and not stats.dense:
        share = show_percent(stats.stored_per_row / stats.features, 1)
        notes.append(
            f"the features of {stats.name} are made dense, of which {share} are not 0: a module"
            " that is run as it is written may do anything with them"
        )
    notes += [
        f"{name} is made with {argument}={value}, the default, since it requires one and none was"
        f" given; --set {field}=.. gives another"
        for argument, value in user.description.arguments
        if (field := field_of(argument)) not in ("features", "classes", *given)
    ]
    used = {*user.fields, *(field_of(argument) for argument, _ in user.description.arguments)}
    notes += [
        f"--{field} has no effect: {name} is made without it; set it in the module, or take the"
        " default off its parameter"
        for field in ("hidden", "heads")
        if field in given and field not in used
    ]
    notes += optional(user)
    if graph is None:
        return notes
    reads = user.pieces.reads if user.pieces else set()
    if "g" in reads:  # a DGL graph has all fields of edges
        reads |= {f"edge {field}" for field in graph.edge_fields}
    return notes + unread_by(name, graph, reads)


def optional(user: UserModule) -> list[str]:
    """Return a note for each field of the graph that `forward` receives instead of a default."""
    pieces = user.pieces
    if pieces is None:
        return []
    return [
        f"forward of {user.description.name} gets the graph's {name.partition(' ')[2]} as"
        f" {parameter}, which has a default; leave the field out of the graph, or the parameter out"
        " of forward, to train without"
        for parameter, name in pieces.binding.takes.items()
        if name in pieces.reads - {"vertex x", "edge_index"}
        and parameter not in pieces.binding.needed
    ]


def with_structure(problem: Problem) -> Problem:
    """Return the problem, with self-loops if DGL convolutions need them, after computing what the
    module computes from the edges of the whole graph. Raises SpecError."""
    pieces, module = read_again(problem.workload), problem.workload.own
    if not isinstance(pieces, Pieces):
        return problem
    dtype = pieces.structure.dtype
    graph = _as_read(problem, module, pieces.module, pieces, _fields_of(module), dtype)
    if graph is None:
        return problem
    pieces.structure.on_whole(graph.csr_edges)
    return replace(problem, graph=graph) if pieces.loops else problem


# -- layers of the user's own class, and the Net of any workload -----------------------------------


def _layers(
    workload: Workload,
    file: Path | None,
    name: str,
    sha256: str,
    imports: tuple[tuple[str, str], ...],
    graph: GraphFields,
) -> UserModule:
    """Return a user's class of layers, with the layers' work. Raises SpecError."""
    if file is None:
        raise SpecError(
            f"every rank makes its own {name}; name the file that it is in, as 'layer.py:{name}'"
        )
    if graph.unsummed:
        raise SpecError(
            f"{file}: {name}: a layer of your own reads whole rows, and {graph.unsummed}"
        )
    if workload.norm not in (None, "none"):
        raise SpecError(
            f"norm: {name} of {file} is a layer of your own, which norms in its prepare or update"
            f" (norm: {workload.norm}); leave norm out"
        )
    classes = max(graph.classes, 1)
    widths = pairwise([graph.features, *[workload.hidden] * (workload.layers - 1), classes])
    shapes = [ModuleLayer(h_in=h_in, h_out=h_out) for h_in, h_out in widths]
    description = Module(
        file=str(file),
        name=name,
        sha256=sha256,
        imports=imports,
        features=graph.features,
        classes=classes,
        layers=tuple(shapes),
    )
    fields = {"model": "own", "norm": "none", "hidden": shapes[0].h_out}
    asked = with_module(workload, UserModule(fields, description), ())
    counted: dict[tuple[int, int, bool, bool], ModuleLayer] = {}
    layers = []
    for number, shape in enumerate(shapes, 1):
        varies, relu = number > 1, number < len(shapes)
        key = shape.h_in, shape.h_out, varies, relu
        if key not in counted:
            counted[key] = _counted(asked, number, shape, varies, relu)
        layers.append(counted[key])
    return UserModule(fields, description.model_copy(update={"layers": tuple(layers)}))


def _counted(
    workload: Workload, number: int, shape: ModuleLayer, varies: bool, relu: bool
) -> ModuleLayer:
    """Return a layer of this shape with its counted work. Raises SpecError."""
    dtype = dtype_of(workload.precision.weights)
    where = f"{workload.own.file}: {workload.own.name}"
    layer = made(workload, number, shape.h_in, shape.h_out).to(dtype)
    _must_be_whole(layer, where)
    cut = shape.h_in // 2 if number == 1 and _has_calls_of_p3(layer) else 0
    try:
        found = count(layer, shape.h_in, shape.h_out, relu, varies, dtype)
        half = None
        if cut:
            must_sum_columns(layer, shape.h_in, shape.h_out, relu, dtype)
            sliced = made(workload, number, cut, shape.h_out).to(dtype)
            half = count(sliced, cut, shape.h_out, relu, varies, dtype)
    except Unmeasured as error:
        raise SpecError(f"{where}: {error}") from error
    except Exception as error:
        raise SpecError(
            f"{where}: layer {number} of {shape.h_in} -> {shape.h_out} numbers fails on a small"
            f" block ({words_of(error)})"
        ) from error
    return shape.model_copy(update={"counted": found, "half": half})


def _must_be_whole(layer: Layer, where: str) -> None:
    """Raise SpecError if the class lacks an attribute or method that every layer needs."""
    edges = getattr(layer, "edges", None)
    if edges not in EDGES:
        raise SpecError(
            f"{where}: edges must be one of {', '.join(map(repr, EDGES))}, not {edges!r}"
        )
    called = ["update", *(["project"] if layer.projects_first else [])]
    missing = [name for name in called if getattr(type(layer), name) is getattr(Layer, name)]
    if missing:
        raise SpecError(
            f"{where} has no {' and no '.join(missing)}; docs/how-to/bring-your-model.md shows a"
            " layer of your own"
        )


def _has_calls_of_p3(layer: Layer) -> bool:
    """Whether the class has the methods of layers.ColumnLayer."""
    has = [getattr(type(layer), name, None) for name in ("scatter", "transform", "apply")]
    return bool(layer.by_columns) and not {None, nn.Module.apply} & {*has}


def made(workload: Workload, number: int, h_in: int, h_out: int) -> Layer:
    """Make layer `number` of the user's class, with random numbers from (seed, number).

    Raises SpecError if the file has changed since the plan."""
    module = workload.own
    file = Path(module.file)
    with seeded(workload.seed * 1_000_003 + number):
        values = workload.model_dump() | {"features": h_in, "classes": h_out}
        layer, _ = make(class_in(module), module.name, file, values)
    if not isinstance(layer, Layer):
        raise SpecError(f"{file}: {module.name} makes a {type(layer).__name__}, and no Layer")
    return layer


@lru_cache(maxsize=2)
def class_in(module: Module) -> object:
    """Return, and cache, the class of layers in a plan's file. Raises SpecError."""
    return object_of(module)


def object_of(module: Module) -> object:
    """Return the object in a plan's file. Raises SpecError if the file, or one that it imports, has
    changed since the plan."""
    for file, sha256 in ((module.file, module.sha256), *module.imports):
        as_planned(Path(file), sha256)
    return in_file(Path(module.file), module.name)


def net_of(model: Model, workload: Workload, which: range | None = None) -> Net:
    """Return the layers `which` (None: all): built-in, of the user's class, or of their module."""
    if workload.is_module:
        return read_again(workload).net(model, workload, which)
    if workload.model != "own":
        return Net(model, workload, which)

    def layer(number: int) -> Layer:
        shape = model.layers[number - 1]
        return made(workload, number, shape.h_in, shape.h_out)

    return Net(model, workload, which, layer)
