"""Compares the choices of `plan` and `tune` with the fastest strategy by measurement.

    python benchmarks/tune.py run DATASETS [QUESTION ...]   add the questions missing in tune.csv
    python benchmarks/tune.py table                         print tune.csv as a Markdown table

A question is a graph with a GNN on a cluster that this machine emulates. The cluster's constants
are measured, and `plan` and `tune` choose. Then all strategies take turns for ROUNDS rounds; each
turn is a new run, and every round reverses the order of the previous one. Regret is how much slower
the chosen strategy is than the fastest. `tune` may spend SHARE of a training that is predicted to
take TRAINING seconds. Rows go to traces/measured/tune.csv, with the machine's pace before and
after. The benchmark needs Linux, root and iproute2, on an otherwise idle machine.
"""

from __future__ import annotations

import json
import tempfile
from datetime import UTC, datetime
from itertools import product
from math import ceil, exp, log
from pathlib import Path
from statistics import fmean, median
from typing import Any

import commands
from commands import line, words, write
from measured import FAMILIES, JOBS, SHARING, TRACES, name, pace

import gnnplan
from gnnplan import GnnplanError, Plan
from gnnplan.api.running import rate_of
from gnnplan.executor.launch.tune import train_briefly
from gnnplan.planner.evidence.halving import TURN_S

ROWS = TRACES / "tune.csv"
GRAPHS = ("physics", "squirrel")
CLUSTERS = ((1, 2, ""), (1, 4, ""), (2, 2, "400Mbit/s"), (2, 2, "100Mbit/s"))
TRAINING, SHARE = 900.0, 0.1  # length of the training [s]; share of it that `tune` may spend
ROUNDS, WARM_UP = 12, 2  # turns of every strategy; first epochs of a turn, which are not counted
LONGEST = 300.0  # longest turn [s]


def measured(plans: dict[str, Plan], emulate: str | None) -> dict[str, float]:
    """Return the seconds per epoch of every strategy.

    They are the median, over all rounds, of the strategy's ratio to the round's geometric mean,
    times the geometric mean of all rounds."""
    rounds: dict[str, list[float]] = {strategy: [] for strategy in plans}
    with tempfile.TemporaryDirectory() as out:

        def turn(number: int, strategy: str, epochs: int) -> float:
            folder, document = Path(out) / f"{number}-{strategy}", plans[strategy].document
            rows, why, _ = train_briefly(
                document, folder, WARM_UP + epochs, LONGEST, rate_of(emulate)
            )
            if why:
                raise SystemExit(f"{strategy}: {why}")
            return median(row["epoch_s"] for row in rows[WARM_UP:])

        epochs_s = {strategy: turn(-1, strategy, 1) for strategy in plans}
        for number in range(ROUNDS):
            for strategy in list(plans) if number % 2 == 0 else list(plans)[::-1]:
                epochs_s[strategy] = turn(number, strategy, ceil(TURN_S / epochs_s[strategy]))
                rounds[strategy].append(log(epochs_s[strategy]))
    means = [fmean(of_round) for of_round in zip(*rounds.values(), strict=True)]
    return {
        strategy: exp(fmean(means) + median(a - b for a, b in zip(logs, means, strict=True)))
        for strategy, logs in rounds.items()
    }


def answer(graph: str, servers: int, each: int, rate: str, cluster: Any, source: str) -> None:
    """Let `plan` and `tune` choose, measure all strategies, and append the question's row."""
    emulate, workload = rate or None, JOBS[graph][1]
    plan = gnnplan.plan(source, cluster, **workload)
    epochs = ceil(TRAINING / plan.best.epoch_s)
    before = pace()
    with tempfile.TemporaryDirectory() as out:
        tuned = gnnplan.tune(plan, f"{out}/tune", share=SHARE, epochs=epochs, emulate=emulate)
    asked = [*FAMILIES, *(SHARING if servers > 1 else ()), plan.best.strategy, tuned.best.strategy]
    plans: dict[str, Plan] = {}
    for strategy in asked:
        try:
            forced = gnnplan.plan(source, cluster, strategy=strategy, **workload)
        except GnnplanError:  # GCNII has nothing to narrow
            continue
        plans.setdefault(forced.best.strategy, forced)
    seconds = measured(plans, emulate)
    fastest = min(seconds.values())
    found = tuned.document["tuned"]
    row = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "question": f"{graph}, {name(servers, each, rate)}",
        "epochs": epochs,  # length of the training
        "plan": plan.best.strategy,
        "tune": tuned.best.strategy,
        "plan_regret": round(seconds[plan.best.strategy] / fastest - 1, 4),
        "tune_regret": round(seconds[tuned.best.strategy] / fastest - 1, 4),
        "certain": found.get("certain", ""),
        "why": found["why"],
        "budget_s": round(found["budget_s"], 2),
        "spent_s": round(found.get("spent_s", 0.0), 2),
        # strategy -> seconds per epoch
        "measured_s": json.dumps({strategy: round(s, 5) for strategy, s in seconds.items()}),
        "paces_s": json.dumps([round(before, 3), round(pace(), 3)]),
    }
    write(ROWS, [row], "a")
    print(json.dumps(row), flush=True)


def run(datasets: Path, wanted: list[str]) -> None:
    """Answer the questions that have no row."""
    done = {row["question"] for row in commands.rows(ROWS)}
    for (servers, each, rate), graph in product(CLUSTERS, GRAPHS):
        question = f"{graph}, {name(servers, each, rate)}"
        if question in done or (wanted and question not in wanted):
            continue
        cluster = gnnplan.measure(each, servers=servers, emulate=rate or "unshaped")
        answer(graph, servers, each, rate, cluster, str(datasets / f"{JOBS[graph][0]}.npz"))


def table() -> None:
    """Print the answers as a Markdown table."""
    print("| question | `plan` | regret | `tune` | regret | certain | cost |")
    print("|---|---|--:|---|--:|---|--:|")
    found = commands.rows(ROWS)
    for row in found:
        plan, tune = ((row[way], f"{float(row[f'{way}_regret']):.1%}") for way in ("plan", "tune"))
        certain, cost = row["certain"] == "True", float(row["spent_s"]) / TRAINING
        print(line(row["question"], *plan, *tune, "yes" if certain else "no", f"{cost:.1%}"))
    regrets = [fmean(float(row[f"{way}_regret"]) for row in found) for way in ("plan", "tune")]
    cost = fmean(float(row["spent_s"]) for row in found) / TRAINING
    print(f"| mean | | {regrets[0]:.1%} | | {regrets[1]:.1%} | | {cost:.1%} |")


if __name__ == "__main__":
    match words(__doc__):
        case ["run", datasets, *questions]:
            run(Path(datasets), questions)
        case ["table"]:
            table()
        case _:
            raise SystemExit(__doc__)
