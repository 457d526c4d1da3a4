"""plan.json: the question (graph, workload, cluster), the recommended strategy, the alternatives,
and the reasons.

`simulate`, `run` and `validate` need nothing but the plan and the graph that it names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from gnnplan import __version__
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import Candidate, Outlook, evaluate, placed, range_of
from gnnplan.planner.decision.objective import ONE, Objective
from gnnplan.planner.decision.search import Search, SearchResult, parts
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import declared, load
from gnnplan.planner.graph.partition import METHODS
from gnnplan.planner.problem.inputs import as_of_now, checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, named, parse
from gnnplan.planner.vocabulary.errors import Infeasible, Mismatch, OtherData, SpecError
from gnnplan.planner.vocabulary.files import (
    MOST_SHOWN,
    Json,
    dotted,
    read_json,
    suggest,
    write_atomically,
)
from gnnplan.planner.vocabulary.numbers import Floats, PerRank
from gnnplan.planner.vocabulary.units import show_count

AGAIN = "make it again with `gnnplan plan`"
BEFORE = "0.1.0"  # an earlier release whose plans are still read; its field names cause a notice
SIZES = ("bytes_total", "bytes", "bytes_by_link", "setup_bytes")  # fields of `Prediction`
MAX_PLAN = 64 * 2**20  # [B]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def make(found: SearchResult, depths: bool = False) -> Json:
    """Return the plan of a search result, JSON-ready.

    depths: add to the reasons the numbers of layers at which another family wins; this takes as
    long as several plans.
    """
    # imported here: the imports take 0.1 s, and every rank imports this file to read plans
    from gnnplan.planner.decision.explain import explain, of_depths, turning_sentences
    from gnnplan.planner.decision.summary import summarise

    turning_points = turning_sentences(found)
    return {
        **runnable_part(found),
        "alternatives": [
            answer(candidate, outlook)
            for candidate, outlook in zip(found.ranked, found.outlooks, strict=True)
            if candidate is not found.best
        ],
        "settles": found.settled._asdict() if found.settled else None,
        "rejected": [{"strategy": name, "reason": reason} for name, reason in found.rejected],
        "summary": summarise(found, turning_points),
        "explanation": explain(found, [*turning_points, *(of_depths(found) if depths else ())]),
    }


def runnable_part(found: SearchResult) -> Json:
    """Return the part of a plan that is needed to run it: the question and the best strategy."""
    problem, best = found.problem, found.best
    placement = best.strategy.placement(best.problem)
    return {
        "gnnplan": __version__,
        "torch": version("torch"),  # from the package's metadata: the planner imports no torch
        "graph": graph_of(problem),
        "workload": problem.workload.model_dump(mode="json"),
        "cluster": problem.cluster.model_dump(mode="json"),
        "partitioner": problem.partitioner,
        "exact": found.how.exact,
        **objective_fields(found.objective, best.problem),
        "best": {**answer(best, found.outlook(best)), "placement": placement},
    }


def objective_fields(objective: Objective, problem: Problem) -> Json:
    """Return the objective's fields of a plan, JSON-ready."""
    out: Json = {"objective": objective.of}
    if (by_mode := objective.epochs_by_mode) is not None:
        out["epochs"] = {mode: asdict(of_mode) for mode, of_mode in by_mode.items()}
    if target := objective.target:
        out["target_accuracy"] = target.accuracy
        out["evidence"] = [run.folder for run in target.of_question(problem)]
    return out


def graph_of(problem: Problem) -> Json:
    """Return the graph's fields of a plan, JSON-ready."""
    stats = problem.stats
    fields = {name: getattr(stats, name) for name in _Graph.__annotations__ if name != "notes"}
    return {**fields, "notes": list(stats.notes)}


def answer(candidate: Candidate, outlook: Outlook) -> Json:
    """Return a candidate as an entry of a plan, JSON-ready."""
    p = candidate.predicted
    seconds = ("epoch_s", "compute_s", "comm_s", "bubble_s")
    period = [{"epoch_s": float(each.epoch_s), "bytes": each.bytes} for each in p.epochs_of_period]
    named = {"name": candidate.strategy.name, **candidate.strategy.knobs()}
    return {
        "strategy": json.loads(json.dumps(named)),  # tuples become lists, as in a file
        "exact": candidate.strategy.exact,
        "gpus": candidate.problem.ranks,
        "epoch_s": float(p.epoch_s),
        **outlook._asdict(),
        **counted(candidate),
        "predicted": {
            **{name: float(getattr(p, name)) for name in seconds},
            **{name: getattr(p, name) for name in SIZES},
            "memory_bytes": candidate.memory_bytes,
            "memory": candidate.fullest(),
            **({"host_bytes": candidate.host_bytes} if candidate.host_bytes else {}),
            "bottleneck": p.bottleneck,
            "by_op": {kind: float(seconds) for kind, seconds in p.by_op.items()},
            **({"period": period} if period else {}),
            **({} if candidate.dollars is None else {"epoch_dollars": candidate.dollars}),
        },
    }


def counted(candidate: Candidate) -> dict[str, float]:
    """Return the numbers of a candidate's objective, as 'cost', 'cost_low' and 'cost_high'.

    Low and high are the 10th and 90th percentiles. Cost and energy are those of all epochs that the
    objective counts. Empty if the objective is the time of an epoch.
    """
    objective, epochs, out = candidate.objective, candidate.epochs, dict[str, float]()

    def add(name: str, value: float, drawn: Floats) -> None:
        names = (name.format(end) for end in ("", "_low", "_high"))
        out.update(zip(names, (value, *range_of(drawn, value)), strict=True))

    if epochs != ONE:
        names = "epochs_to_accuracy{}", "time_to_accuracy{}_s"
        names = names if objective.epochs_by_mode is None else ("epochs{}", "training{}_s")
        add(names[0], epochs.usual, epochs.drawn)
        add(names[1], candidate.time_s, candidate.drawn_time_s)
    if objective.of != "time":
        name = "energy{}_j" if objective.of == "energy" else objective.of + "{}"
        add(name, candidate.value, candidate.drawn)
    return out


# -- reading -----------------------------------------------------------------------------------


class _Predicted(TypedDict):
    """The fields of a prediction that are read; `answer` writes more."""

    epoch_s: Finite
    compute_s: Finite
    comm_s: Finite
    bubble_s: Finite
    bytes_total: int
    bytes: dict[str, int]
    bytes_by_link: dict[str, int]
    setup_bytes: int
    memory_bytes: Finite
    memory: dict[str, Finite]
    bottleneck: str
    by_op: dict[str, Finite]


class _Place(TypedDict):
    rank: int
    server: int
    gpu: int


class _Named(TypedDict):
    """A strategy's name; `strategies.named` reads the knobs in the same object."""

    name: str


class KnownAnswer(TypedDict, total=False):
    """An entry that `answer` writes, without the numbers of the objective (`counted`)."""

    strategy: Required[_Named]
    exact: Required[bool]
    gpus: Required[int]
    epoch_s: Finite
    epoch_low_s: Finite | None
    epoch_high_s: Finite | None
    chance_fastest: Finite | None
    expected_regret: Finite | None
    predicted: Required[_Predicted]
    placement: list[_Place]


class _Epochs(TypedDict):
    usual: Finite
    spread: Finite
    source: str


class _Rejected(TypedDict):
    strategy: str
    reason: str


class _Graph(TypedDict, total=False):
    source: Required[str]
    hash: Required[str]
    name: str
    vertices: int
    edges: int
    features: int
    classes: int
    directed: Required[bool]
    known: bool
    notes: list[str]


class _Document(TypedDict, total=False):
    """The fields of a plan that are read; `make` writes more."""

    graph: Required[_Graph]
    workload: Required[Json]
    cluster: Required[Json]
    partitioner: Required[str]
    best: Required[KnownAnswer]
    exact: bool
    objective: str
    target_accuracy: Finite
    evidence: list[str]
    epochs: dict[str, _Epochs]
    alternatives: list[KnownAnswer]
    settles: Json | None
    rejected: list[_Rejected]
    summary: dict[str, str]
    explanation: list[str]


_READABLE = TypeAdapter(_Document)


def read(path: str | Path, of_any_version: bool = False) -> Json:
    """Read a plan, and check every field that is used later.

    of_any_version: also read a plan of another version, if it has the same fields. Raises SpecError
    if the file is not a plan, Mismatch if another version wrote it.
    """
    make = "make one with `gnnplan plan -o plan.json`"
    document: Json = read_json(path, MAX_PLAN, make)
    fields = ("gnnplan", "graph", "workload", "cluster", "partitioner", "best")
    is_object = isinstance(document, dict)
    if missing := [name for name in fields if name not in document] if is_object else ["all"]:
        raise SpecError(f"{path}: not a plan (missing: {', '.join(missing)}); {make}")
    other = None
    if document["gnnplan"] not in (__version__, BEFORE):
        other = Mismatch(
            f"{path} was made by gnnplan {str(document['gnnplan'])[:MOST_SHOWN]}, this is"
            f" {__version__}; plan again"
        )
    if other and not of_any_version:
        raise other
    try:
        if isinstance(document["cluster"], dict):
            document["cluster"] = as_of_now(document["cluster"], str(path))
        _inspect(path, document)
    except SpecError as error:
        if other:  # the fields differ because another version wrote them
            raise other from error
        raise
    return document


def _inspect(path: str | Path, document: Json) -> None:
    """Raise SpecError with the file and the field if a field is not what `make` writes."""
    try:
        _READABLE.validate_python(document, strict=True)
    except ValidationError as error:
        mistake = error.errors()[0]
        rule = f": {mistake['msg'].replace('Input should be', 'must be')}"
        if mistake["type"] in _KINDS:
            rule = f" must be {_KINDS[mistake['type']]}"
        raise SpecError(f"{path}: {dotted(mistake['loc'])}{rule}; {AGAIN}") from error
    if document["partitioner"].partition(" ")[0] not in METHODS:
        raise SpecError(
            f"{path}: partitioner {document['partitioner']!r} is"
            f" unknown{suggest(document['partitioner'], METHODS)}"
        )
    try:
        checked(Cluster, document["cluster"], f"{path}: cluster.")
        checked(Workload, document["workload"], f"{path}: workload.")
    except SpecError as error:
        raise SpecError(f"{error}; {AGAIN}") from error
    for name, read_field in (("strategy", chosen), ("placement", placement)):
        try:
            read_field(document)
        except SpecError as error:
            raise SpecError(f"{path}: best.{name}: {error}") from error


_KINDS = {
    "dict_type": "an object",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "missing": "given",
}


def question(document: Json) -> Problem:
    """Return the problem that a plan from `read` answers, with its ranks on the plan's GPUs.

    Raises SpecError, or OtherData if the graph or its partition has changed since the plan was
    made.
    """
    _inspect("plan", document)
    about = document["graph"]
    for name, size in declared(about["source"]).items():  # before the graph is generated
        if about.get(name, size) != size:
            raise OtherData(
                f"the plan was made for other data: {about['source']} has {size:,} {name}, the plan"
                f" says {about[name]:,}; plan again",
                here=f"{size:,} {name}, not {about[name]:,}",
            )
    try:
        graph = load(about["source"], about["directed"])
    except SpecError as error:
        raise SpecError(f"{error}; the plan is of it: put it back, or plan again") from error
    stats = graph.stats if isinstance(graph, Graph) else graph
    problem = Problem(
        stats,
        graph if isinstance(graph, Graph) else None,
        Workload.model_validate(document["workload"]),
        Cluster.model_validate(document["cluster"]),
        document["partitioner"].partition(" ")[0],
    )
    found = problem.stats.hash  # for link prediction, the hash without the held-out edges
    if found != about["hash"]:
        raise OtherData(
            f"the plan was made for other data: {about['source']} hashes to {found}, the plan says"
            f" {about['hash']}; plan again",
            here=f"hash {found[:12]}",
        )
    if problem.partitioner != document["partitioner"]:
        raise OtherData(
            f"the plan was made for other parts: those of {about['source']} are by"
            f" {problem.partitioner}, the plan's by {document['partitioner']}; plan again",
            here=f"parts by {problem.partitioner}",
        )
    return problem.placed(placement(document))


def chosen(document: Json) -> Strategy:
    """Return the recommended strategy of a plan. Raises SpecError."""
    return strategy_of(document["best"])


def strategy_of(answer: Mapping[str, Any]) -> Strategy:
    """Return the strategy of an entry of a plan, the best or an alternative. Raises SpecError."""
    knobs = dict(answer["strategy"])
    return named(knobs.pop("name"), knobs)


def is_exact(document: Json) -> bool:
    """Whether the plan was made with --exact."""
    return bool(document.get("exact", False))


def placement(document: Json) -> PerRank:
    """Return the GPU of every rank of a plan, numbered over all servers. Raises SpecError."""
    cluster = Cluster.model_validate(document["cluster"])
    servers, each = cluster.servers, cluster.gpus_per_server
    found = sorted(
        (place["rank"], place["server"], place["gpu"])
        for place in document["best"].get("placement", ())
    )
    for rank, server, gpu in found:
        if not (0 <= server < servers and 0 <= gpu < each):
            raise SpecError(
                f"rank {rank} sits on GPU {gpu} of server {server}, but there are {servers} servers"
                f" of {each} GPUs, counted from 0; {AGAIN}"
            )
    gpus = tuple(server * each + gpu for _, server, gpu in found)
    ranks = [rank for rank, _, _ in found]
    if not ranks or ranks != list(range(len(ranks))) or len(set(gpus)) < len(gpus):
        raise SpecError(
            f"must have a GPU of its own for every rank, counted from 0 without a gap; {AGAIN}"
        )
    return gpus


def write(path: str | Path, document: Json) -> None:
    """Write a plan atomically. Raises ValueError, and writes nothing, if it is not valid JSON."""
    write_atomically(path, json.dumps(document, indent=1, allow_nan=False) + "\n")


# -- views of a plan -------------------------------------------------------------------------------

# A strategy with its numbers, the question in a line, and the plan with another of its strategies
# as the best.

NEXT = "NEXT"  # the fastest alternative
MOST_NAMED = 8  # candidates that an error lists


@dataclass(frozen=True)
class Answer:
    """A strategy of a plan, with its predicted numbers."""

    strategy: str  # as `strategy=` and --strategy take it
    exact: bool
    gpus: int
    epoch_s: float  # [s]
    memory_bytes: float  # memory of the fullest rank [B]
    predicted: Mapping[str, Any]  # the strategy's `predicted` in plan.json
    # Over draws of uncertain constants and predictions; None in plans of version 0.1.
    epoch_low_s: float | None = None  # 10th percentile [s]
    epoch_high_s: float | None = None  # 90th percentile [s]
    chance_fastest: float | None = None  # among all strategies that fit
    expected_regret: float | None = None  # mean of epoch / fastest epoch - 1
    # Numbers of the objective, by plan.json's names; empty if it is the time of an epoch.
    counted: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Answer:
        """Return the answer in an entry (`best`, or one of `alternatives`) of plan.json."""
        predicted, call = found["predicted"], str(strategy_of(found))
        seconds, memory = predicted["epoch_s"], predicted["memory_bytes"]
        outlook = {name: found.get(name) for name in Outlook._fields}
        counted = {k: found[k] for k in found if k not in KnownAnswer.__annotations__}
        gpus, exact = found["gpus"], found["exact"]
        return cls(call, exact, gpus, seconds, memory, predicted, **outlook, counted=counted)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """10th and 90th percentile of an epoch [s]; None in plans of version 0.1."""
        low, high = self.epoch_low_s, self.epoch_high_s
        return None if low is None or high is None else (low, high)

    @property
    def row(self) -> Json:
        """The numbers as a row of a table."""
        return {
            "strategy": self.strategy,
            "exact": self.exact,
            "gpus": self.gpus,
            **{
                field: self.predicted[field]
                for field in ("epoch_s", "compute_s", "comm_s", "bubble_s", "bytes_total")
            },
            **{field: getattr(self, field) for field in Outlook._fields},
            **self.counted,
            "memory_bytes": self.memory_bytes,
            "bottleneck": self.predicted["bottleneck"],
        }


def describe_question(graph: Mapping[str, Any], workload: Workload, cluster: Cluster) -> str:
    """Describe the question in a line; `graph` is as plan.json has it."""
    return (
        f"{describe_training(graph, workload)}; {cluster.name}:"
        f" {show_count(cluster.servers, 'server')} x {cluster.gpus_per_server}"
        f" {cluster.device.name}"
    )


def describe_training(graph: Mapping[str, Any], workload: Workload) -> str:
    """Describe the graph and the GNN in a line."""
    layers = describe(workload, graph["features"], graph["classes"]).layers
    deep, name = show_count(workload.layers, "layer"), workload.module and workload.module.name
    model = f"{f'{name}, ' if name else ''}{workload.model} {deep} x {layers[0].h_out}"
    return (
        f"{graph['name']}: {graph['vertices']:,} vertices, {graph['edges']:,} edges; "
        # a user's module that is cut into layers has its own widths and dropout
        f"{f'{name}, {deep}' if workload.is_cut else f'{model}, dropout {workload.dropout:g}'}"
    )


def take(document: Json, problem: Problem, text: str) -> Json:
    """Return the plan with the strategy that `text` names as `best`, the old best an alternative.

    problem: the plan's question. text: NEXT, or a strategy as the plan prints it; if the plan has
    the strategy on several numbers of GPUs, the fastest is taken. Raises SpecError if the plan does
    not have the strategy, or the strategy does not fit.
    """
    found = _find(document, text)
    if found is document["best"]:
        return document
    # imported here: a run without --strategy does not need it
    from gnnplan.planner.decision.summary import summarise

    strategy, whole = strategy_of(found), problem.placed(())
    # A plan has the placement of its best candidate only; others are placed as in the search.
    fitting = list[Candidate]()
    for choice in [tuple(range(whole.ranks)), *parts(whole.cluster)]:
        if len(choice) == found["gpus"]:
            with suppress(SpecError, Infeasible):
                fitting.append(evaluate(placed(whole.placed(choice), strategy), strategy))
    if not fitting:
        raise SpecError(
            f"--strategy {text}: {strategy} does not fit on {found['gpus']} GPUs, though the plan"
            " says so; plan again"
        )
    epoch_s = found["predicted"]["epoch_s"]
    candidate = min(fitting, key=lambda c: abs(c.epoch_s - epoch_s))
    only = SearchResult(whole, [candidate], how=Search(forced=strategy))
    best = {name: value for name, value in document["best"].items() if name != "placement"}
    others = [best, *(entry for entry in document["alternatives"] if entry is not found)]
    return {
        **{name: value for name, value in document.items() if name != "sizes"},
        "best": {**found, "placement": strategy.placement(candidate.problem)},
        "alternatives": others,
        "summary": summarise(only, ()),
        "explanation": [f"--strategy chose it from a plan that recommends {strategy_of(best)}"],
    }


def _find(document: Json, text: str) -> Json:
    """Return the entry of the plan that `text` names. Raises SpecError."""
    entries: list[Json] = [document["best"], *document.get("alternatives", [])]
    if text == NEXT:
        if len(entries) < 2:
            raise SpecError(
                f"--strategy {NEXT}: the plan holds {strategy_of(entries[0])} and no alternative;"
                " plan again without --strategy"
            )
        return entries[1]
    asked = str(parse(text))
    names = [str(strategy_of(entry)) for entry in entries]
    if asked in names:
        return entries[names.index(asked)]
    reasons = {entry["strategy"]: entry["reason"] for entry in document.get("rejected", [])}
    if asked in reasons:
        why = f"the plan rejected it: {reasons[asked]}"
    else:
        why = "the plan did not consider it"
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - MOST_NAMED} more" if len(distinct) > MOST_NAMED else ""
    raise SpecError(
        f"--strategy {text}: {why}; the plan holds {', '.join(distinct[:MOST_NAMED])}{more}; for"
        f" another strategy plan again: gnnplan plan --strategy '{asked}'"
    )
