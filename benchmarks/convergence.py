"""Convergence studies: does a strategy that changes the gradient reach the accuracy of one process, and in how many epochs?

    python benchmarks/convergence.py run gcnii_chameleon     trains what is missing, appends to traces/convergence/<study>.csv
    python benchmarks/convergence.py table                   the tables of docs/convergence.md, from what is there

Every run is `gnnplan plan` and `gnnplan run` as a user would call them, seeds are paired (the same initial weights and
dropout masks), and an interrupted study goes on where it stopped. Test accuracy is that of the epoch with the best
validation accuracy; differences are per seed, against the study's first variant, with two standard errors.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import mean, stdev

TRACES = Path(__file__).resolve().parent.parent / "traces" / "convergence"
DATASETS = Path(os.environ.get("GNNPLAN_DATASETS", Path(__file__).resolve().parents[2] / "shared" / "datasets"))
FIELDS = ("variant", "seed", "epoch", "loss", "train_accuracy", "val_accuracy", "test_accuracy")


@dataclass(frozen=True)
class Study:
    """`variants`: name -> (ranks, strategy, more options of `gnnplan plan`); the first is the reference."""

    graph: str
    workload: tuple[str, ...]
    epochs: int
    seeds: int
    variants: dict[str, tuple[int, str, tuple[str, ...]]]


GCNII = ("--model", "gcnii", "--layers", "32", "--hidden", "64", "--set", "dropout=0.5", "--set", "lr=0.001")
PIPELINES = {
    "one process": (1, "graph_parallel", ()),
    "pipeline": (2, "gnnpipe(chunks=8)", ()),
    "no shuffle": (2, "gnnpipe(chunks=8,shuffle=False)", ()),
    "historical gradients": (2, "gnnpipe(chunks=8,historical_gradients=True)", ()),
    "moving history": (2, "gnnpipe(chunks=8,period=1)", ()),
}
STUDIES = {
    "gcnii_chameleon": Study("chameleon", GCNII, 600, 10, PIPELINES),
    "gcnii_squirrel": Study("squirrel", GCNII, 1000, 10, PIPELINES),
}


def run(name: str) -> None:
    """Train every (seed, variant) that the study's file does not have yet."""
    study, path = STUDIES[name], TRACES / f"{name}.csv"
    done = {(row["variant"], row["seed"]) for row in _rows(path)} if path.exists() else set()
    for seed in range(study.seeds):
        for variant, (ranks, strategy, more) in study.variants.items():
            if (variant, str(seed)) not in done:
                print(f"{name}: {variant}, seed {seed}", file=sys.stderr, flush=True)
                _append(path, variant, seed, _train(study, ranks, strategy, more, seed))


def _train(study: Study, ranks: int, strategy: str, more: tuple[str, ...], seed: int) -> list[dict[str, object]]:
    """metrics.jsonl's evaluated epochs of one run."""
    with tempfile.TemporaryDirectory() as scratch:
        plan, out = f"{scratch}/plan.json", f"{scratch}/run"
        question = ["--graph", str(DATASETS / f"{study.graph}.npz"), "--ranks", str(ranks), "--strategy", strategy]
        _call("plan", *question, *study.workload, *more, "--set", f"seed={seed}", "-o", plan)
        _call("run", plan, "--epochs", str(study.epochs), "--eval-every", "10", "--out", out, "--timeout", "600")
        lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["test_accuracy"] is not None]


def _call(*arguments: str) -> None:
    command = [sys.executable, "-m", "gnnplan", *arguments]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def _append(path: Path, variant: str, seed: int, lines: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        for line in lines:
            numbers = [f"{float(str(line[field])):.6g}" for field in FIELDS[3:]]
            writer.writerow([variant, seed, line["epoch"], *numbers])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(name: str) -> None:
    """A row per variant: test accuracy, its paired difference to the reference, final training loss, epoch of the best validation."""
    runs: dict[str, dict[str, list[dict[str, str]]]] = {}
    for row in _rows(TRACES / f"{name}.csv"):
        runs.setdefault(row["variant"], {}).setdefault(row["seed"], []).append(row)
    best = {variant: {seed: max(rows, key=lambda row: float(row["val_accuracy"])) for seed, rows in of.items()}
            for variant, of in runs.items()}  # fmt: skip
    reference = next(iter(best.values()))
    print(f"\n| {name} | seeds | test accuracy [%] | minus {next(iter(runs))} [points] | final training loss | best epoch |")
    print("|---|--:|--:|--:|--:|--:|")
    for variant, of in best.items():
        accuracy = {seed: 100 * float(row["test_accuracy"]) for seed, row in of.items()}
        gaps = [accuracy[seed] - 100 * float(reference[seed]["test_accuracy"]) for seed in of if seed in reference]
        losses = [float(rows[-1]["loss"]) for rows in runs[variant].values()]
        epoch = mean(float(row["epoch"]) for row in of.values())
        cells = [_with_error(list(accuracy.values())), _with_error(gaps), _with_error(losses, 4), f"{epoch:.0f}"]
        print(f"| {variant} | {len(of)} | {' | '.join(cells)} |")


def _with_error(values: list[float], digits: int = 2) -> str:
    """Mean and two standard errors."""
    error = f" ± {2 * stdev(values) / sqrt(len(values)):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{error}"


if __name__ == "__main__":
    verb, names = sys.argv[1], sys.argv[2:] or list(STUDIES)
    for name in names:
        (run if verb == "run" else table)(name)
