"""Arguments of the API's functions: checked by annotations, and read into a Problem.

An argument of a wrong type raises the same error everywhere, instead of an error from deep inside;
numbers of NumPy and PyTorch become Python's numbers. A graph, a GNN and a cluster may have any form
that a user has them in."""

from __future__ import annotations

import inspect
import operator
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import wraps
from hashlib import blake2b
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ParamSpec, TypeVar, get_args, get_origin

import numpy as np

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.gnn.workload import AUTO, TASKS, Workload
from gnnplan.planner.graph.data import unread_by
from gnnplan.planner.graph.graph import Cut, Graph
from gnnplan.planner.graph.load import load, source_of, well_known
from gnnplan.planner.graph.part_folder import digest_of
from gnnplan.planner.graph.partition import METHODS, chosen
from gnnplan.planner.problem.inputs import (
    apply_overrides,
    ask_workload,
    checked,
    fields_after,
    read_fitted,
    with_fields,
)
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir, one_of
from gnnplan.planner.vocabulary.progress import notify

P = ParamSpec("P")
T = TypeVar("T")
WORDS: dict[type, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    os.PathLike: "a path",
    Path: "a path",
    Mapping: "a mapping",
    Iterable: "several values",
    Sequence: "several values",
}


def typed(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function: it raises SpecError for arguments of other types than annotated."""
    parameters = inspect.signature(function).parameters
    by_place = [name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

    def kinds(name: str) -> tuple[Any, ...]:
        """Return an argument's types; `Any` without an annotation that exists at run time."""
        try:
            found = eval(parameters[name].annotation, vars(sys.modules[function.__module__]))
        except (KeyError, NameError, TypeError):
            return (Any,)
        return get_args(found) if isinstance(found, UnionType) else (found,)

    def read(name: str, value: object) -> Any:
        return value_of(name, value, *kinds(name))

    @wraps(function)
    def called(*args: P.args, **options: P.kwargs) -> T:
        first = [read(name, value) for name, value in zip(by_place, args, strict=False)]
        by_name = {name: read(name, value) for name, value in options.items()}
        return function(*first, *args[len(first) :], **by_name)  # type: ignore[arg-type]

    return called


def value_of(name: str, value: object, *kinds: Any) -> Any:
    """Return a value as the first of the types that it has. Raises SpecError if it has none.

    >>> value_of("ranks", np.int64(2), int), value_of("exact", 1, bool), value_of("lr", 1, float)
    (2, True, 1.0)
    """
    plain = [get_origin(kind) or kind for kind in kinds]
    if Any in plain or (value is None and NoneType in plain):
        return value
    for kind in plain:
        if (found := _as(kind, value)) is not None:
            return found
    words = dict.fromkeys(WORDS.get(kind, kind.__name__) for kind in plain if kind is not NoneType)
    remedy = "; save it with numpy.save, and name the file" if hasattr(value, "shape") else ""
    raise SpecError(f"{name} must be {' or '.join(words)}, not {value!r:.80}{remedy}")


def _as(kind: Any, value: Any) -> Any:
    """Return the value as this type; None if it is of another."""
    is_truth = isinstance(value, bool | np.bool_)
    if kind is bool:
        is_flag = is_truth or (isinstance(value, int | np.integer) and value in (0, 1))
        return bool(value) if is_flag else None
    if kind is int:
        with suppress(TypeError):  # a tensor of fractions has __index__ too
            return None if is_truth else operator.index(value)
        return None
    if kind is float:
        return float(value) if isinstance(value, Real) and not is_truth else None
    is_protocol = getattr(kind, "_is_protocol", False)
    return value if is_protocol or isinstance(value, kind) else None


# -- the question ----------------------------------------------------------------------------------


# {'servers': 16}, 'servers=16' (as --set takes it), or a list of such strings
Overrides = Mapping[str, object] | Iterable[str]
AnyCluster = str | Path | Mapping[str, Any] | Cluster  # a preset or file, fields, or the object
AnyWorkload = str | Path | Mapping[str, Any] | Workload
AnyPath = str | os.PathLike[str]

OF_LABELS = ("none", "regression")  # values of --task that describe the graph's labels


@dataclass(frozen=True)
class Question:
    """A problem, with notes on how the user's input was read."""

    problem: Problem
    notes: tuple[str, ...]
    given: frozenset[str] = frozenset()  # names of the fields that the user set
    chooses_dtype: bool = False  # the plan chooses the rows' dtype (decision/choices.py)


@typed
def ask(
    graph: Any,
    cluster: AnyCluster,
    workload: AnyWorkload | None,
    *,
    features: str | int | os.PathLike[str] | None = None,
    labels: AnyPath | None = None,
    split: AnyPath | None = None,
    task: str | None = None,
    overrides: Overrides = (),
    ranks: int | None = None,
    partitioner: str = "auto",
    directed: bool = False,
    may_choose_dtype: bool = False,
    **fields: object,
) -> Question:
    """Return the question that the arguments describe; `gnnplan.plan` documents each argument.

    may_choose_dtype: the field dtype may be 'auto'. Raises SpecError.
    """
    if task is not None:
        task = one_of("--task", task, (*TASKS, *OF_LABELS))
    if task in TASKS:  # a field of the workload; OF_LABELS describe the graph instead
        fields, task = {**fields, "task": task}, None
    settings = settings_of(overrides)
    fields_set = [setting.partition("=")[0].strip() for setting in settings]
    chooses_dtype = may_choose_dtype and str(fields.get("dtype")).lower() == AUTO
    of_cluster = fields_after(cluster) if isinstance(cluster, str) else {}
    for setting, field in zip(settings, fields_set, strict=True):
        for option, value in (
            (f"--{field.replace('_', '-')}", fields.get(field)),
            (f"--cluster {cluster}", of_cluster.get(field)),
        ):
            if value is not None and text_of(value) != setting.partition("=")[2].strip():
                raise SpecError(f"--set {setting} and {option} name one field; leave one out")
    if chooses_dtype:
        fields = {**fields, "dtype": "float32"}  # the plan tries the other dtypes later
    model = fields.get("model")
    if isinstance(model, os.PathLike):
        model = fields["model"] = os.fspath(model)
    live: Any = None if isinstance(model, str) else model  # a torch.nn.Module, or its class
    if isinstance(workload, Workload):
        workload = workload.model_dump(exclude_unset=True)
    workload = str(workload) if isinstance(workload, Path) else workload
    wanted = ask_workload(workload, {**fields, "model": None} if live else fields)
    asked, module = wanted.workload, live or wanted.module
    machine, fitted = _cluster_of(cluster, asked.model)
    says_loss = asked.loss is not None or "loss" in fields_set
    name, written_notes = source_name(graph, numbers=says_loss or task == "regression")
    notify(f"reading {name}")
    if says_loss and task is None and "task=" not in name and os.path.exists(name.split("?")[0]):
        task = "regression"
    source = source_of(name, features, labels, split, task)
    problem = problem_of(
        source, machine, asked, settings, ranks, partitioner, directed, written_notes
    )
    model_notes = [] if module else unread_by(asked.model, problem.graph)
    if module:
        from gnnplan.executor.modules.read import with_user_model

        notify("reading the model")
        more = {} if wanted.fanout is None else {"fanout": wanted.fanout}
        try:
            problem, model_notes = with_user_model(
                problem, module, [*wanted.given, *fields_set], more=more
            )
        except SpecError as error:  # a field may be missing because its file's was left out
            words, notes = str(error), problem.stats.notes
            left = [n for n in notes if n.startswith("left ") and n.split()[1] in words]
            raise SpecError("; ".join([words, *left])) from error
        if problem.workload.model != asked.model:  # a testbed may have constants per model
            machine, fitted = _cluster_of(cluster, problem.workload.model)
            machine, _ = apply_overrides(machine, asked, settings)
            problem = replace(problem, cluster=with_ranks(machine, ranks))
    notes = (*problem.stats.notes, *model_notes, *([fitted] if fitted else []))
    return Question(problem, notes, frozenset([*wanted.given, *fields_set]), chooses_dtype)


def source_name(graph: Any, numbers: bool = False) -> tuple[str, list[str]]:
    """Return the name by which `load` finds a graph, and notes; write an object to the cache first.

    numbers: the labels are numbers to predict, even if they look like classes. Raises SpecError.
    """
    if isinstance(graph, str | Path):
        return str(graph), []
    if isinstance(graph, Graph):
        return graph.stats.source, []
    from gnnplan.planner.graph.formats import Extras, convert

    # ranks are separate processes and read the graph from a folder named by the graph's hash
    kept = cache_dir() / "graphs"
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept) as folder:
        made = Path(folder) / "graph"
        _, _, notes = convert(graph, made, Extras(numbers=numbers))
        content = " ".join(f"{file.name} {digest_of(file)}" for file in sorted(made.iterdir()))
        target = kept / blake2b(content.encode(), digest_size=8).hexdigest()
        if not target.exists():
            try:
                os.rename(made, target)
            except OSError:  # another process may have written the same graph
                if not target.exists():
                    raise
        shutil.rmtree(made, ignore_errors=True)
    return str(target), notes


def _cluster_of(cluster: AnyCluster, model: str) -> tuple[Cluster, str]:
    """Return the cluster, and a note on constants fitted to published figures ('' if none are).

    A name or path may set fields, as `with_fields` says.
    """
    if isinstance(cluster, Cluster):
        return cluster, ""
    if isinstance(cluster, Mapping):
        return checked(Cluster, cluster, "cluster: "), ""
    machine, fitted = read_fitted(str(cluster).partition("?")[0], model)
    return with_fields(machine, str(cluster)), fitted


def settings_of(overrides: Overrides) -> list[str]:
    """Return overrides as a list of 'field=value'. Raises SpecError.

    >>> settings_of({"inter_node": {"latency": "9us"}, "fanout": [15, 10]})
    ['inter_node.latency=9us', 'fanout=15,10']
    """
    if not isinstance(overrides, Mapping):
        return [value_of("an override", setting, str) for setting in several(overrides)]
    nested = {field: value for field, value in overrides.items() if isinstance(value, Mapping)}
    inner = {f"{field}.{name}": v for field, of in nested.items() for name, v in of.items()}
    own = (f"{field}={text_of(value)}" for field, value in overrides.items() if field not in nested)
    return [*(settings_of(inner) if inner else []), *own]


def text_of(value: Any) -> str:
    """Return a field's value as --set takes it."""
    listed = isinstance(value, Iterable) and not isinstance(value, str)
    return ",".join(map(str, value)) if listed else str(value)


def several(names: Iterable[Any] | AnyPath) -> list[Any]:
    """Return one name or several names as a list."""
    return [names] if isinstance(names, str | os.PathLike) else list(names)


def problem_of(
    graph: str,
    cluster: Cluster,
    workload: Workload,
    settings: Sequence[str],
    ranks: int | None,
    method: str,
    directed: bool,
    written_notes: Sequence[str] = (),
) -> Problem:
    """Load the graph and return the problem; written_notes: notes of writing the graph.

    Raises SpecError.
    """
    method = one_of("--partitioner", method, (AUTO, *METHODS))
    cluster, workload = apply_overrides(cluster, workload, settings)
    cluster = with_ranks(cluster, ranks)
    head, mark, query = graph.partition("?")
    if not head.startswith("synthetic:") and not well_known(head):
        graph = os.path.realpath(head) + mark + query  # the plan may be run from another folder
    loaded = load(graph, directed)
    stats = loaded.stats if isinstance(loaded, Graph) else loaded
    stats = replace(stats, notes=(*written_notes, *stats.notes))
    if cluster.ranks > stats.vertices:
        raise SpecError(
            f"every rank needs a vertex (vertices: {stats.vertices:,}, ranks: {cluster.ranks:,}); "
            f"use --ranks {stats.vertices} or less"
        )
    known = replace(loaded, stats=stats) if isinstance(loaded, Graph) else None
    if known is not None and known.cut is not None:
        cluster = with_parts(known.cut, stats.source, cluster, ranks, method)
    return Problem(stats, known, workload, cluster, chosen(method, loaded))


def with_parts(cut: Cut, source: str, cluster: Cluster, ranks: int | None, method: str) -> Cluster:
    """Return the cluster with one rank per part of a graph that is partitioned already.

    ranks, method: the number of ranks and the partitioner that the user asks for. Raises SpecError.
    """
    if ranks not in (None, cut.parts):
        raise SpecError(
            f"{source} has a part for each of {cut.parts:,} ranks, and --ranks asks for {ranks:,};"
            f" leave it out, or cut the graph anew (gnnplan partition -k {ranks})"
        )
    if method not in (AUTO, cut.method):
        raise SpecError(
            f"{source} is cut by {cut.method}, and --partitioner names {method}; leave it out, or"
            f" cut the graph anew (gnnplan partition --partitioner {method})"
        )
    try:
        return with_ranks(cluster, cut.parts)
    except SpecError as error:
        raise SpecError(
            f"{source} has a part for each of {cut.parts:,} ranks: {error}; or cut the graph anew"
            f" (gnnplan partition -k {cluster.ranks})"
        ) from error
