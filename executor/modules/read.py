"""A user's module as a workload, with its parameters.

It is FILE.py:NAME, or a live object: a torch.nn.Module, a class of one, or a function that makes
one. It is run as it is written, cut in pieces (cut.py) that are proved to compute the same
(prove.py). Where it is a chain of convolutions that our own layers compute too, these are taken:
they are faster, and every strategy can split them."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.count import Unmeasured, count
from gnnplan.executor.modules.bind import VERTICES, Fields, GraphFields, Small
from gnnplan.executor.modules.convert import NoChain, Parameters, converted
from gnnplan.executor.modules.elsewhere import must_be_alike
from gnnplan.executor.modules.kept import copied
from gnnplan.executor.modules.make import (
    MAX_SOURCE,
    PICKLED,
    as_planned,
    field_of,
    in_file,
    keep,
    loaded,
    make,
    source_of,
)
from gnnplan.executor.modules.pieces import Pieces
from gnnplan.executor.modules.prove import (
    followed,
    prove,
    run_once,
)
from gnnplan.executor.modules.record import Unfit
from gnnplan.planner.gnn.counted import Counted
from gnnplan.planner.gnn.workload import Module, ModuleLayer, Workload
from gnnplan.planner.graph.fields import unread_by
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.planner.vocabulary.units import show_percent

MAX_PARAMETERS = 1 << 40  # [B] of a live module's file
# FILE.py:NAME, or a live object
Source = str | nn.Module | Callable[..., nn.Module]


@dataclass(frozen=True)
class UserModule:
    """A user's module, and what it is.

    fields: of the Workload. trained: its pieces, or the parameters that our layers start with."""

    module: nn.Module
    fields: Mapping[str, Any]
    description: Module
    trained: Parameters | Pieces

    @property
    def pieces(self) -> Pieces | None:
        """None where our layers are taken."""
        return self.trained if isinstance(self.trained, Pieces) else None


def with_user_module(
    problem: Problem,
    model: Source,
    given: Iterable[str] = (),
    folder: Path | None = None,
    more: Mapping[str, Any] | None = None,
) -> tuple[Problem, list[str]]:
    """The problem with the user's module as its model, and notes on how that was made.

    model: `FILE.py:NAME`; or a live torch.nn.Module, which stays as it is and whose parameters
    training starts from; or its class, or a function that makes it, which is called with the
    graph's widths. given: fields of the workload that the user set, which the module must not
    contradict. folder: see `read`. more: fields whose rules ask for what the module decides, as
    fanout does. Raises SpecError.

    >>> problem, notes = with_user_module(problem, MyGNN(100, 64, 47))  # doctest: +SKIP
    """
    user = read(model, problem.workload, GraphFields.of(problem), folder)
    if user.pieces and problem.graph is not None:
        _must_answer_alike(user.description, user.pieces, problem.graph)
    given = list(given)
    workload = with_module(problem.workload, user, given, more)
    return replace(problem, workload=workload), [
        *made_dense(user, problem.stats),
        *assumed(user, given),
        *optional(user),
        *unread(user, problem.graph),
    ]


def _must_answer_alike(module: Module, pieces: Pieces, graph: Graph) -> None:
    """Raise SpecError if forward would be told something else of a graph's edges than it was."""
    whole = replace(graph, loops=pieces.loops).whole if pieces.loops else graph.whole
    try:
        pieces.structure.must_answer_alike(whole, pieces.place)
    except Unfit as unfit:
        raise SpecError(f"{module.file}: {module.name}: {unfit}") from unfit


def made_dense(user: UserModule, stats: GraphStats) -> list[str]:
    """Say that features are made dense for the module, if they are not."""
    if user.pieces is None or stats.dense:
        return []
    share = stats.stored_per_row / stats.features
    return [
        f"the features of {stats.name} are made dense, of which {show_percent(share, 1)} are not 0:"
        " a module that is run as it is written may do anything with them"
    ]


def read(
    model: Source,
    workload: Workload,
    graph: GraphFields,
    folder: Path | None = None,
    own_widths: tuple[bool, bool] = (False, False),
) -> UserModule:
    """The user's module, for such a graph.

    A class or a function is called with what it requires: widths of the graph, and fields of
    `workload`, as `field_of` knows them by name. torch's random numbers start from the workload's
    seed, before a file is executed.

    A live object may be from anywhere, a notebook's cell too: ranks read its parameters from a
    file, which is written to `folder` (default: modules/ in gnnplan's cache directory), under a
    name that says its content. Ranks on other servers need it at the same path.

    own_widths: whether features and classes of `graph` are but what a class is called with, and the
    module may read and write rows of other widths.

    Raises SpecError, of a file with its line."""
    file: Path | None = None
    name, sha256 = getattr(model, "__name__", type(model).__name__), ""
    if isinstance(model, str):
        file, name, sha256 = source_of(model)

    def made() -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(workload.seed)
        found = in_file(file, name) if file else model
        return make(found, name, file, workload, graph.features, graph.classes)

    with torch.random.fork_rng(devices=[]):
        module, arguments = made()
    dtype = dtype_of(workload.precision.weights)
    trained: Parameters | Pieces
    try:
        with torch.random.fork_rng(devices=[]), redirect_stdout(sys.stderr):
            rows = partial(_rows, graph=graph, seed=workload.seed, own_widths=own_widths)
            must_be_alike(module, lambda: made()[0], rows)
            materialise(module, graph, workload.seed)
            module = copy.deepcopy(module).to("cpu", dtype)  # a live one stays as it is
            graph = _with_its_widths(module, graph, own_widths, dtype)
            try:
                chain = converted(module, graph)
                fields, own = chain.fields, chain.own
                trained = Parameters(dict(module.state_dict()), chain.places)
            except NoChain:
                trained = proved(module, graph, dtype)
                fields, own = _described(trained, graph, dtype)
            if file is None:
                kept = module if isinstance(trained, Pieces) else trained
                file, sha256 = keep(kept, folder or cache_dir() / "modules", name)
    except Unfit as unfit:
        raise SpecError(f"{f'{file}: ' if file else ''}{name}: {unfit}") from unfit
    description = Module(
        file=str(file),
        name=name,
        sha256=sha256,
        features=graph.features,
        classes=graph.classes,
        arguments=tuple(arguments.items()),
        **own,
    )
    return UserModule(module, fields, description, trained)


def _described(
    pieces: Pieces, graph: GraphFields, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Pieces as fields of a Workload and of a Module. Raises Unfit."""
    layers = range(1, pieces.layers + 1)
    norms = [bool(pieces.layer(number).norm) for number in layers]
    ends = bool(pieces.training.ends.nodes)
    owners = pieces.owners
    fields = {
        "model": "own",
        "layers": pieces.layers,
        "norm": "batch" if any(norms) or ends else "none",
        "dropout": 0.0,  # the module drops by itself
    }
    return fields, {
        "layers": tuple(
            ModuleLayer(
                h_in=pieces.width(number - 1),
                h_out=pieces.width(number),
                norm="batch" if has_norm else "none",
                drops=False,
                counted=_counted(pieces, number, dtype).model_copy(
                    update={
                        "weights": sum(p.numel() for p, of in owners.items() if of[0] == number)
                    }
                ),
                shares=min((of[0] for of in owners.values() if number in of[1:]), default=0),
            )
            for number, has_norm in zip(layers, norms, strict=True)
        ),
        "relu": False,
        "cut": True,
        "inputs": pieces.inputs,
        "directed": graph.directed,
        "vertex_fields": _shapes("vertex", graph.vertex, pieces),
        "edge_fields": _shapes("edge", graph.edge, pieces),
        "ends": ends,
    }


def _counted(pieces: Pieces, number: int, dtype: torch.dtype) -> Counted:
    """What a layer does. Raises Unfit."""
    try:
        widths = pieces.width(number - 1), pieces.width(number)
        return count(pieces.layer(number), *widths, False, number > 1, dtype)
    except Unmeasured as error:
        raise Unfit(f"layer {number}: {error}") from error


def proved(module: nn.Module, graph: GraphFields, dtype: torch.dtype) -> Pieces:
    """The module in pieces, which compute the same. Raises Unfit."""
    double, small = followed(module, graph, torch.float64)
    pieces, _ = followed(module, graph, dtype, double.by_kernels)
    if double.training.widths != pieces.training.widths:
        raise Unfit("forward hands on other rows in float64 than in float32")
    prove(module, double, small)
    prove(module, double, Small(VERTICES[1], module, graph))
    width = pieces.training.output.value.shape[1]
    if width != graph.classes:
        raise Unfit(
            f"forward writes rows of {width} numbers, and the graph has {graph.classes} classes;"
            f" make the two equal, by a parameter named out_channels for instance"
        )
    return pieces


def _rows(
    module: nn.Module, graph: GraphFields, seed: int, own_widths: tuple[bool, bool]
) -> list[Tensor]:
    """What a module makes of a small graph, in both of its modes. Raises Unfit."""
    found = []
    for is_training in (True, False):
        own = copied(module).train(is_training)
        materialise(own, graph, seed)
        torch.manual_seed(seed)
        found.append(run_once(own, _with_its_widths(own, graph, own_widths, torch.float32)))
    return found


def _with_its_widths(
    module: nn.Module, graph: GraphFields, own: tuple[bool, bool], dtype: torch.dtype
) -> GraphFields:
    """The graph with the widths that the module has of its own, where it may have some."""
    if not any(own):
        return graph
    sizes = [p.shape[-1] for p in module.parameters() if p.ndim >= 2]
    widths = [graph.features, *dict.fromkeys(sizes)] if own[0] else [graph.features]
    for features in widths:
        with suppress(Exception):  # however it fails on rows of this width
            found = replace(graph, features=features)
            classes = run_once(copy.deepcopy(module), found, dtype).shape[1]
            return replace(found, classes=classes if own[1] else graph.classes)
    return graph


def materialise(module: nn.Module, graph: GraphFields, seed: int) -> None:
    """Let lazy parameters (in_channels=-1) be made, as a first forward does. Raises Unfit."""
    if any(is_lazy(parameter) for parameter in module.parameters()):
        torch.manual_seed(seed)
        run_once(module, graph)


@lru_cache(maxsize=2)
def read_again(workload: Workload) -> Parameters | Pieces:
    """What training of a plan's workload starts from.

    Raises SpecError if the file is no longer what was planned."""
    module = workload.own
    path = Path(module.file)
    is_pickled = path.suffix == PICKLED
    source = as_planned(path, module.sha256, MAX_PARAMETERS if is_pickled else MAX_SOURCE)
    with redirect_stdout(sys.stderr), torch.random.fork_rng(devices=[]):
        if is_pickled:
            made = loaded(source)
        else:
            torch.manual_seed(workload.seed)
            found, given = in_file(path, module.name), dict(module.arguments)
            made, _ = make(found, module.name, path, workload, 0, 0, given=given)
        return made if isinstance(made, Parameters) else _understood_again(workload, made)


def _understood_again(workload: Workload, made: nn.Module) -> Parameters | Pieces:
    """What a plan's module is trained as. Raises SpecError if that is not what was planned."""
    module = workload.own
    dtype = dtype_of(workload.precision.weights)
    vertex, edge = (
        {name: (sizes, kind, kinds) for name, sizes, kind, kinds in fields}
        for fields in (module.vertex_fields, module.edge_fields)
    )
    graph = GraphFields(module.features, module.classes, module.directed, False, vertex, edge)
    try:
        materialise(made, graph, workload.seed)
        made = made.to(dtype)
        if module.cut:
            pieces, _ = followed(made, graph, dtype)
            widths = [pieces.width(n) for n in range(pieces.layers + 1)]
        else:
            chain = converted(made, graph, proves=False)
            widths = _widths_of(chain.own["layers"])
    except (Unfit, NoChain) as unfit:
        raise SpecError(f"{module.file}: {module.name}: {unfit}; plan again") from unfit
    if widths != (planned := _widths_of(module.layers)):
        raise SpecError(
            f"{module.file}: {module.name} has layers of {widths} numbers, and the plan has"
            f" {planned}; the module decides them, so plan again"
        )
    return pieces if module.cut else Parameters(made.state_dict(), chain.places)


def _widths_of(layers: Sequence[ModuleLayer]) -> list[int]:
    return [layers[0].h_in, *(layer.h_out for layer in layers)]


def _shapes(kind: str, fields: Fields, pieces: Pieces) -> tuple[Any, ...]:
    """Fields of a graph that a module is given, as a Module keeps them."""
    given = pieces.binding.inputs
    return tuple((name, *shape) for name, shape in fields.items() if f"{kind} {name}" in given)


def with_module(
    workload: Workload,
    user: UserModule,
    given: Iterable[str],
    more: Mapping[str, Any] | None = None,
) -> Workload:
    """The workload with the user's module as its model.

    given: fields that the user set; SpecError if the module has another value of one of them, and
    if it breaks a rule of the workload."""
    given = list(given)
    used = {field_of(argument) for argument, _ in user.description.arguments}
    for field in given:
        if field in used or field not in user.fields:
            continue
        if getattr(workload, field) != user.fields[field]:
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


def assumed(user: UserModule, given: Collection[str]) -> list[str]:
    """A note for each argument of the module that has the workload's default, as nobody gave it."""
    return [
        f"{user.description.name} is made with {argument}={value}, the default, since it requires"
        f" one and none was given; --set {field}=.. gives another"
        for argument, value in user.description.arguments
        if (field := field_of(argument)) not in ("features", "classes", *given)
    ]


def optional(user: UserModule) -> list[str]:
    """A note for each field of the graph that forward gets though it could do without."""
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


def unread(user: UserModule, graph: Graph | None) -> list[str]:
    """A note on fields of the graph that the module does not read."""
    if graph is None:
        return []
    reads = user.pieces.reads if user.pieces else set()
    if "g" in reads:  # DGL's graph has the edges' fields
        reads |= {f"edge {name}" for name in graph.edge_fields}
    return unread_by(user.description.name, graph, reads)


def with_structure(problem: Problem) -> Problem:
    """The problem whose graph has self-loops, if convolutions of DGL need them, and of which is
    known what its module computes of the whole graph."""
    graph, pieces = problem.graph, read_again(problem.workload)
    if graph is None or not isinstance(pieces, Pieces):
        return problem
    if pieces.loops:
        graph = replace(graph, loops=True)
        problem = replace(problem, graph=graph)
    _must_answer_alike(problem.workload.own, pieces, graph)
    pieces.structure.on_whole(graph.whole, pieces.place)
    return problem
