"""What a plan says: of a strategy that fits, of its question in a line, and with another of its
strategies in the place of the recommended one."""

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
MOST_NAMED = 8  # candidates in an error


@dataclass(frozen=True)
class Answer:
    """A strategy, and what is predicted of it."""

    strategy: str  # as `strategy=` and --strategy take it
    exact: bool
    gpus: int
    epoch_s: float  # [s]
    memory_bytes: float  # of the fullest rank [B]
    predicted: Mapping[str, Any]  # all that plan.json holds of it
    # In doubt about constants and predictions; None in plans of version 0.1.
    epoch_low_s: float | None = None  # 10th percentile [s]
    epoch_high_s: float | None = None  # 90th percentile [s]
    chance_fastest: float | None = None  # of all strategies that fit
    expected_regret: float | None = None  # of choosing it: mean of epoch / fastest epoch - 1
    # What the objective counts of it, by plan.json's names; empty for the time of an epoch.
    counted: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> Answer:
        """The answer of an entry of plan.json."""
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
        """Its numbers, as a row of a table."""
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
    """The graph and the GNN, in a line."""
    layers = describe(workload, graph["features"], graph["classes"]).layers
    deep, name = show_count(workload.layers, "layer"), workload.module and workload.module.name
    model = f"{f'{name}, ' if name else ''}{workload.model} {deep} x {layers[0].h_out}"
    return (
        f"{graph['name']}: {graph['vertices']:,} vertices, {graph['edges']:,} edges; "
        # a module that is cut has widths and dropout of its own
        f"{f'{name}, {deep}' if workload.is_cut else f'{model}, dropout {workload.dropout:g}'}"
    )


def take(document: dict[str, Any], problem: Problem, text: str) -> dict[str, Any]:
    """The plan with the candidate that `text` names as `best`; what was best is an alternative.

    problem: the plan's question. text: NEXT, or a strategy as the plan prints it; where the plan
    holds it on several numbers of GPUs, the fastest. Raises SpecError where it does not hold it.
    """
    found = _find(document, text)
    if found is document["best"]:
        return document
    # imported here: a run without --strategy does not need it
    from gnnplan.planner.decision.summary import summarise

    strategy, whole = strategy_of(found), problem.placed(())
    # A plan keeps the placement of its best candidate only; others are placed as the search did.
    placed_on = list[Candidate]()
    for choice in [tuple(range(whole.ranks)), *parts(whole.cluster)]:
        if len(choice) == found["gpus"]:
            with suppress(SpecError, Infeasible):
                placed_on.append(evaluate(placed(whole.placed(choice), strategy), strategy))
    if not placed_on:
        raise SpecError(
            f"--strategy {text}: {strategy} does not fit on {found['gpus']} GPUs, though the plan"
            " says so; plan again"
        )
    epoch_s = found["predicted"]["epoch_s"]
    candidate = min(placed_on, key=lambda c: abs(c.epoch_s - epoch_s))
    alone = SearchResult(whole, [candidate], how=Search(forced=strategy))
    best = {name: value for name, value in document["best"].items() if name != "placement"}
    others = [best, *(one for one in document["alternatives"] if one is not found)]
    compared = {name: value for name, value in document.items() if name != "sizes"}
    return {
        **compared,
        "best": {**found, "placement": strategy.placement(candidate.problem)},
        "alternatives": others,
        "summary": summarise(alone, ()),
        "explanation": [f"--strategy chose it from a plan that recommends {strategy_of(best)}"],
    }


def _find(document: dict[str, Any], text: str) -> dict[str, Any]:
    """The candidate of the plan that `text` names."""
    held: list[dict[str, Any]] = [document["best"], *document.get("alternatives", [])]
    if text == NEXT:
        if len(held) < 2:
            raise SpecError(
                f"--strategy {NEXT}: the plan holds {strategy_of(held[0])} and no alternative; plan"
                " again without --strategy"
            )
        return held[1]
    asked = str(parse(text))
    names = [str(strategy_of(one)) for one in held]
    if asked in names:
        return held[names.index(asked)]
    reasons = {one["strategy"]: one["reason"] for one in document.get("rejected", [])}
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
