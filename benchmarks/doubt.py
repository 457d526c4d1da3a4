"""Compares the doubt that plans state with measured epochs.

    python benchmarks/doubt.py DATASETS

Every row of the studies (benchmarks/measured.py) is predicted again with the constants that it was
planned with. Prints a Markdown row per study: the share of measured epochs in the 80 % range, and
the regret of the recommended one of the strategies that ran. A second table compares the predicted
chance of being the fastest strategy with the share of strategies that were the fastest.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from choices import chances_table
from commands import header, line, words
from measured import FULL, MINI, Study, plan, rows

from gnnplan.planner.decision.candidate import Candidate, evaluate, outlooks, placed
from gnnplan.planner.decision.plan import question
from gnnplan.planner.decision.search import recommend
from gnnplan.planner.strategies import parse

AGAIN = replace(FULL, folder=FULL.folder / "program")
STUDIES = {"146 runs": FULL, "38 later runs": AGAIN, "mini-batches": MINI}


@dataclass(frozen=True)
class Measured:
    """A candidate with its measured epoch [s]."""

    candidate: Candidate
    epoch_s: float


def questions(study: Study, datasets: Path, scratch: str) -> list[list[Measured]]:
    """Return the study's rows as candidates, grouped by question."""
    by_question: dict[tuple[str, str], list[dict[str, str]]] = defaultdict(list)
    for row in rows(study):
        if row["job"] in study.jobs:
            by_question[row["job"], row["constants"]].append(row)
    found = []
    for (job, constants), question_rows in by_question.items():
        cluster, first = study.folder / f"{constants}.yaml", question_rows[0]["strategy"]
        problem = question(plan(study, datasets, job, cluster, first, scratch)).placed(())
        found.append(
            [
                Measured(evaluate(placed(problem, strategy), strategy), float(row["measured_s"]))
                for row in question_rows
                for strategy in [parse(row["strategy"])]
            ]
        )
    return found


def print_study(name: str, groups: list[list[Measured]]) -> list[tuple[float, bool]]:
    """Print a study's row; return each candidate's chance, and whether it was the fastest."""
    inside, regrets, among_exact, lossy = [], [], [], 0
    chances: list[tuple[float, bool]] = []
    for measured in groups:
        epochs_s = [one.epoch_s for one in measured]
        exact = [one.candidate.strategy.exact for one in measured]
        candidates = [one.candidate for one in measured]
        looks = list(zip(outlooks(candidates), epochs_s, strict=True))
        inside += [o.epoch_low_s <= s <= o.epoch_high_s for o, s in looks]
        if len(measured) < 3:
            continue
        choice = candidates.index(recommend(candidates))
        chances += [(o.chance_fastest, s == min(epochs_s)) for o, s in looks]
        lossy += not exact[choice]
        regrets.append(epochs_s[choice] / min(epochs_s) - 1)
        rivals = [s for s, is_exact in zip(epochs_s, exact, strict=True) if is_exact]
        among_exact.append(epochs_s[choice] / min(rivals) - 1 if exact[choice] else 0.0)
    means = (f"{np.mean(each):.1%}" for each in (regrets, among_exact))
    print(line(name, len(inside), f"{np.mean(inside):.0%}", len(regrets), lossy, *means))
    return chances


def main(datasets: str) -> None:
    columns = ("epochs", "in their range", "questions", "lossy", "regret", "among exact")
    print(header("study", *columns))
    chances: list[tuple[float, bool]] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, study in STUDIES.items():
            if study.rows.exists():
                groups = questions(study, Path(datasets), f"{scratch}/plan.json")
                chances += print_study(name, groups)
    print("\n" + "\n".join(chances_table(*zip(*chances, strict=True), bins=5)))


if __name__ == "__main__":
    main(*words(__doc__))
