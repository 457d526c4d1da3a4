"""A strategy that fits and what a plan says of it, and the question in a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.plan import OUTLOOK, KnownAnswer
from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.strategies import named
from gnnplan.planner.vocabulary.units import show_count


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
        predicted, strategy = found["predicted"], dict(found["strategy"])
        call = str(named(strategy.pop("name"), strategy))
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
