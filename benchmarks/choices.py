"""Scores choices of strategies: would a plan have chosen the strategy that is fastest in print?

A printed comparison has two or more strategies for the same graph, GNN and GPUs. `score` predicts
each strategy as a plan does, on the testbed's preset. The choice is the strategy with the shortest
predicted epoch, exact or not. Its *regret* is its printed epoch divided by the shortest printed
epoch, minus one. `score` also makes the choice by predictions of the papers' code (figures.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from commands import header, line

from gnnplan.papers.figures import predict, question, testbed
from gnnplan.papers.published import DIFFERENT, JOB
from gnnplan.papers.question import Row, Skip, Testbeds
from gnnplan.planner.decision.candidate import Candidate, outlooks
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError


@dataclass(frozen=True)
class Choice:
    """A printed comparison, with the predictions that decide the choice."""

    job: tuple[str, ...]
    strategies: tuple[str, ...]  # names in print
    printed: tuple[float, ...]  # epochs, up to a common factor
    ours: tuple[float, ...]  # predicted epochs of our executor [s]
    theirs: tuple[float, ...]  # predicted epochs of the papers' code [s]
    chances: tuple[float, ...]  # probability that each is the fastest with our executor

    @property
    def chosen(self) -> int:
        return int(np.argmin(self.ours))

    @property
    def by_their_terms(self) -> int:
        return int(np.argmin(self.theirs))

    def regret(self, chosen: int) -> float:
        return self.printed[chosen] / min(self.printed) - 1

    @property
    def right(self) -> bool:
        """Whether the choice is the fastest in print, or within DIFFERENT of it."""
        return self.regret(self.chosen) <= DIFFERENT


def comparisons(rows: Iterable[Row]) -> list[list[tuple[Row, float]]]:
    """Return printed comparisons: rows of strategies, with their epochs up to a common factor.

    A comparison is all rows of one job that print epochs, or a row that prints a speedup and that
    row's baseline.
    """
    by_job: dict[tuple[str, ...], dict[str, tuple[Row, float]]] = {}
    ratios: list[list[tuple[Row, float]]] = []
    for row in rows:
        value = float(row["value"])
        if row["metric"] == "epoch_time_s":
            job = tuple(row[name] for name in JOB)
            by_job.setdefault(job, {}).setdefault(row["strategy"], (row, value))
        elif row["metric"] == "speedup_vs" and row["baseline"] not in ("", row["strategy"]):
            epoch = {**row, "metric": "epoch_time_s"}
            other = {**epoch, "strategy": row["baseline"], "baseline": ""}
            ratios.append([(epoch, 1.0), (other, value)])
    return [
        list(comparison.values()) for comparison in by_job.values() if len(comparison) > 1
    ] + ratios


def score(rows: Sequence[Row], testbeds: Testbeds = testbed) -> list[Choice]:
    """Return the choice for each printed comparison with two or more predictable strategies."""
    out = []
    for comparison in comparisons(rows):
        found: list[tuple[Row, float, Candidate, float]] = []
        for row, printed in comparison:
            try:
                found.append((row, printed, _candidate(row, testbeds), predict(row, testbeds)))
            except (Skip, GnnplanError):
                continue
        if len(found) < 2:
            continue
        used, printed_s, candidates, theirs = zip(*found, strict=True)
        out.append(
            Choice(
                tuple(used[0][name] for name in JOB),
                tuple(row["strategy"] for row in used),
                printed_s,
                tuple(float(candidate.predicted.epoch_s) for candidate in candidates),
                theirs,
                tuple(outlook.chance_fastest for outlook in outlooks(candidates)),
            )
        )
    return out


def _candidate(row: Row, testbeds: Testbeds) -> Candidate:
    """Return the row's strategy as a plan predicts it: with our layers, on the whole graph."""
    case = question(row, testbeds=testbeds)
    p = case.problem
    problem = Problem(p.stats, None, p.workload, p.cluster, p.method)
    return Candidate(case.strategy, case.strategy.predict(problem), problem)


def reliability(
    chances: Sequence[float], right: Sequence[bool], bins: int = 10
) -> list[tuple[float, float, int, float]]:
    """Return, for each bin of predicted chances: (from, to, count, share that came true).

    >>> reliability([0.05, 0.95, 0.9, 1.0], [False, True, False, True], 2)
    [(0.0, 0.5, 1, 0.0), (0.5, 1.0, 3, 0.6666666666666666)]
    """
    places = np.minimum((np.asarray(chances) * bins).astype(int), bins - 1)
    came_true = np.asarray(right)
    return [
        (place / bins, (place + 1) / bins, int(mask.sum()), float(came_true[mask].mean()))
        for place in range(bins)
        if (mask := places == place).any()
    ]


def chances_table(chances: Sequence[float], right: Sequence[bool], bins: int = 10) -> list[str]:
    """Return a Markdown table: chance of being the fastest, and share that was the fastest."""
    return [
        header("chance of being the fastest", "strategies", "were it"),
        *(
            line(f"{low:.0%} to {high:.0%}", count, f"{share:.0%}")
            for low, high, count, share in reliability(chances, right, bins)
        ),
    ]
