"""A strategy that fits, and what a plan says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gnnplan.planner.decision.plan import COUNTED, OUTLOOK
from gnnplan.planner.strategies import named


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
        names = (name for names in COUNTED.values() for name in names)
        counted = {name: found[name] for name in names if name in found}
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
