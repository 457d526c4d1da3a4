"""Scores choices of strategies against print: would a plan have named the fastest one?

A comparison is printed: two or more strategies for the same graph, GNN and GPUs. `score` asks for
each of them what a plan asks on the testbed's preset, and the one with the shortest predicted epoch
is chosen, exact or not. The *regret* is its printed epoch over the fastest printed one, minus one.
The same choice by the papers' own terms (interpret.py) is scored beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from commands import header, line

from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import question, testbed
from gnnplan.papers.published import DIFFERENT
from gnnplan.papers.question import Row, Skip, Testbeds
from gnnplan.papers.rows import JOB
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.recommendation import outlooks
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import GnnplanError


@dataclass(frozen=True)
class Choice:
    """One printed comparison, and what was chosen."""

    job: tuple[str, ...]
    strategies: tuple[str, ...]  # as print names them
    printed: tuple[float, ...]  # epochs, up to a factor that all of them share
    ours: tuple[float, ...]  # predicted epochs of our executor [s]
    theirs: tuple[float, ...]  # predicted epochs of the papers' code [s]
    chances: tuple[float, ...]  # of being the fastest, in our terms

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
    """Printed comparisons: rows of strategies, each with its epoch up to a factor.

    Rows of equal jobs print epochs. A row that prints a speedup compares itself with its baseline.
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
    return [list(told.values()) for told in by_job.values() if len(told) > 1] + ratios


def score(rows: Sequence[Row], testbeds: Testbeds = testbed) -> list[Choice]:
    """The choice of every printed comparison of which two strategies or more can be predicted."""
    out = []
    for told in comparisons(rows):
        found: list[tuple[Row, float, Candidate, float]] = []
        for row, printed in told:
            try:
                found.append((row, printed, _candidate(row, testbeds), predict(row, testbeds)))
            except (Skip, GnnplanError):
                continue
        if len(found) < 2:
            continue
        kept, printed_s, candidates, theirs = zip(*found, strict=True)
        sure = outlooks(
            [candidate.epoch_s for candidate in candidates],
            np.stack([candidate.drawn_s for candidate in candidates]),
        )
        out.append(
            Choice(
                tuple(kept[0][name] for name in JOB),
                tuple(row["strategy"] for row in kept),
                printed_s,
                tuple(float(candidate.predicted.epoch_s) for candidate in candidates),
                theirs,
                tuple(outlook.chance_fastest for outlook in sure),
            )
        )
    return out


def _candidate(row: Row, testbeds: Testbeds) -> Candidate:
    """The row's strategy on a problem of ours: our layers, on the graph as a plan takes it."""
    asked = question(row, testbeds=testbeds)
    p = asked.problem
    problem = Problem(p.stats, None, p.workload, p.cluster, p.method)
    return Candidate(asked.strategy, asked.strategy.predict(problem), problem)


def reliability(
    chances: Sequence[float], right: Sequence[bool], bins: int = 10
) -> list[tuple[float, float, int, float]]:
    """How often what was said with a chance came true: (from, to, how many, share that did).

    >>> reliability([0.05, 0.95, 0.9, 1.0], [False, True, False, True], 2)
    [(0.0, 0.5, 1, 0.0), (0.5, 1.0, 3, 0.6666666666666666)]
    """
    places = np.minimum((np.asarray(chances) * bins).astype(int), bins - 1)
    came = np.asarray(right)
    return [
        (place / bins, (place + 1) / bins, int(mask.sum()), float(came[mask].mean()))
        for place in range(bins)
        if (mask := places == place).any()
    ]


def chances_table(chances: Sequence[float], right: Sequence[bool], bins: int = 10) -> list[str]:
    """Markdown: how often strategies were the fastest that had a chance of being it."""
    return [
        header("chance of being the fastest", "strategies", "were it"),
        *(
            line(f"{low:.0%} to {high:.0%}", count, f"{share:.0%}")
            for low, high, count, share in reliability(chances, right, bins)
        ),
    ]
