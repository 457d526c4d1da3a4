"""Views of a plan: a strategy with its numbers, the question in a line, and the plan with another
of its strategies as the best."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import Candidate, evaluate, placed
from gnnplan.planner.decision.plan import OUTLOOK, KnownAnswer, strategy_of
from gnnplan.planner.decision.search import Search, SearchResult, parts
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.units import show_count

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
        outlook = {name: found.get(name) for name in OUTLOOK}
        counted = {k: found[k] for k in found if k not in KnownAnswer.__annotations__}
        gpus, exact = found["gpus"], found["exact"]
        return cls(call, exact, gpus, seconds, memory, predicted, **outlook, counted=counted)

    @property
    def range_s(self) -> tuple[float, float] | None:
        """10th and 90th percentile of an epoch [s]; None in plans of version 0.1."""
        low, high = self.epoch_low_s, self.epoch_high_s
        return None if low is None or high is None else (low, high)

    @property
    def row(self) -> dict[str, Any]:
        """The numbers as a row of a table."""
        return {
            "strategy": self.strategy,
            "exact": self.exact,
            "gpus": self.gpus,
            **{
                field: self.predicted[field]
                for field in ("epoch_s", "compute_s", "comm_s", "bubble_s", "bytes_total")
            },
            **{field: getattr(self, field) for field in OUTLOOK},
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


def take(document: dict[str, Any], problem: Problem, text: str) -> dict[str, Any]:
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
    compared = {name: value for name, value in document.items() if name != "sizes"}
    return {
        **compared,
        "best": {**found, "placement": strategy.placement(candidate.problem)},
        "alternatives": others,
        "summary": summarise(only, ()),
        "explanation": [f"--strategy chose it from a plan that recommends {strategy_of(best)}"],
    }


def _find(document: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the entry of the plan that `text` names. Raises SpecError."""
    entries: list[dict[str, Any]] = [document["best"], *document.get("alternatives", [])]
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
