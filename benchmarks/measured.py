"""Predicted against measured, on clusters emulated on this machine: `python benchmarks/measured.py run DATASETS [JOB ...]`, then
`table` and `tell`; `predict DATASETS` where predictions have changed since.

Every job on every cluster with every family that fits: constants from `gnnplan measure` of that cluster alone, plan, run, compare. When all
has been run it is run again, with constants of its own: what two runs of the same differ by is noise. Other tenants take of this machine
what they like; how fast it was before and after what is compared is in the row, and the table tells apart where it kept its pace.
What is missing is run; rows are appended to traces/measured/runs.csv, what was measured of clusters is kept beside. Needs Linux, root and
iproute2, and a machine that does nothing else. `predict` puts into the rows what the code as it is predicts from the constants that each
was planned by: these and what was measured stay. `table` prints errors, regret and what to doubt as docs/measured.md has them; `tell`
writes gnnplan/traces/measured.csv, by which a plan knows what differences are noise.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import gnnplan, write

from gnnplan.cli.validate import examine
from gnnplan.planner.plan import chosen, question, read
from gnnplan.planner.runs import Run, summarise
from gnnplan.planner.search import weigh
from gnnplan.planner.validate import beside, fullest, per_operation
from gnnplan.simulator.player import play

TRACES = Path(__file__).resolve().parent.parent / "traces" / "measured"
ROWS = TRACES / "runs.csv"
TOLD = Path(__file__).resolve().parent.parent / "gnnplan" / "traces" / "measured.csv"
EPOCHS, LONG = 12, 1.5  # [s] a predicted epoch that half as many must do for, if it begins as it goes on
MEASURED: dict[str, tuple[Path, float, list[float]]] = {}  # the last file of each cluster, since when [s], and the paces around
FRESH = 300.0  # [s] that constants are used for: other tenants come and go, and the machine is another one some minutes later
SETTLED, MOST = 10.0, 100  # [s] that short epochs are repeated for, and how often at most: a process takes seconds to come to its pace
STEADY = 1.2  # times its fastest pace that a steady machine's slowest may take
TIMES = 2  # that each is run, some hours or half hours apart
JOBS = {
    "squirrel": ("squirrel", ("--model", "gcnii", "--layers", "32", "--hidden", "64", "--dropout", "0.5")),
    "flickr": ("flickr", ("--model", "sage", "--layers", "3", "--hidden", "256")),
    "physics": ("coauthor_physics", ("--model", "gcn", "--layers", "3", "--hidden", "128")),
    "synthetic": ("synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0",
                  ("--model", "sage", "--layers", "3", "--hidden", "256")),
}  # fmt: skip
CLUSTERS = [(2, 2, "400Mbit/s"), (2, 1, "400Mbit/s"), (2, 2, "100Mbit/s"), (1, 2, ""), (1, 4, ""), (2, 2, "unshaped"), (2, 1, "unshaped"),
            (2, 1, "100Mbit/s"), (2, 2, "2Gbit/s"), (2, 1, "2Gbit/s")]  # servers, ranks of each, their cards
FAMILIES = ("graph_parallel", "graph_parallel(narrow=True)", "pipegcn", "pipegcn(narrow=True)", "gnnpipe")
SHARING = ("granndis(depth=1)", "granndis")  # between servers
FIELDS = ("date", "hardware", "job", "cluster", "strategy", "constants", "predicted_s", "simulated_s", "measured_s", "bytes_equal",
          "order_equal", "memory_predicted", "memory_measured", "paces_s", "told", "epochs_s")  # fmt: skip


def name(servers: int, each: int, rate: str) -> str:
    """Of a cluster, as a file."""
    return f"{servers}x{each}" + (f"_{rate.split('/')[0]}" if rate else "")


def _work(core: int) -> float:
    held, sum_, since = np.zeros(1 << 22), 0, time.perf_counter()
    for _ in range(25):
        held.copy()
        for number in range(400_000):
            sum_ += number
    return time.perf_counter() - since


def pace() -> float:
    """Seconds [s] that the same work takes on every core at once, on the slowest: copies of 32 MB, and a loop of Python."""
    with Pool() as cores:
        return max(cores.map(_work, range(os.cpu_count() or 1), chunksize=1))


def amid(*command: str) -> list[float]:
    """gnnplan's command; the paces before and after."""
    before = pace()
    gnnplan(*command)
    return [before, pace()]


def steady(row: dict[str, str]) -> bool:
    """The machine was as fast when it trained as when its constants were measured."""
    paces = json.loads(row["paces_s"])
    return max(paces) <= STEADY * min(paces)


def constants(servers: int, each: int, rate: str) -> tuple[Path, list[float]]:
    """The cluster's file, by this process and fresh, or measured anew; and the paces around."""
    cluster = name(servers, each, rate)
    path, since, paces = MEASURED.get(cluster, (None, 0.0, []))
    if path is None or time.monotonic() - since > FRESH:
        TRACES.mkdir(parents=True, exist_ok=True)
        path = TRACES / f"{cluster}.{len(list(TRACES.glob(f'{cluster}.*.yaml'))) + 1}.yaml"
        emulated = ("--servers", str(servers), "--emulate", rate) if rate else ()
        paces = amid("measure", "--ranks", str(each), *emulated, "-o", str(path))
        MEASURED[cluster] = path, time.monotonic(), paces
    return path, paces


def rows() -> list[dict[str, str]]:
    """All that there are."""
    if not ROWS.exists():
        return []
    with ROWS.open(newline="") as file:
        return list(csv.DictReader(file))


def plan(datasets: Path, job: str, constants: Path, strategy: str, out: str) -> dict[str, Any]:
    """The document, which is left in `out`."""
    graph, workload = JOBS[job]
    source = graph if ":" in graph else str(datasets / f"{graph}.npz")
    gnnplan("plan", "--graph", source, *workload, "--cluster", str(constants), "--strategy", strategy, "-o", out)
    return read(Path(out))


def run(datasets: Path, jobs: list[str]) -> None:
    """Everything that has fewer rows than TIMES."""
    done = Counter((row["job"], row["cluster"], row["strategy"]) for row in rows())
    for before, cluster, job in itertools.product(range(TIMES), CLUSTERS, jobs or JOBS):
        servers, _, rate = cluster
        for strategy in FAMILIES + (SHARING if servers > 1 else ()):
            alike = "narrow" in strategy and "gcnii" in JOBS[job][1]  # no layer is narrower than its input
            if alike or done[job, name(*cluster), strategy] > before:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                planned, out = f"{scratch}/plan.json", f"{scratch}/run"
                measured, paces = constants(*cluster)
                predicted = plan(datasets, job, measured, strategy, planned)["best"]["predicted"]["epoch_s"]
                settled = "pipegcn" not in strategy  # whose exchanges lag more from step to step, until they lag by one
                least = EPOCHS // 2 if predicted > LONG and settled else EPOCHS
                epochs = min(max(least, int(SETTLED / predicted)), MOST)
                around = amid("run", planned, "--epochs", str(epochs), "--eval-every", "0", "--checkpoint-every", "0",
                              "--out", out, "--timeout", "120", *(("--emulate", rate) if rate else ()))  # fmt: skip
                append(job, name(*cluster), strategy, measured.stem, paces + around, examine(Path(out)))
                done[job, name(*cluster), strategy] += 1


def append(job: str, cluster: str, strategy: str, constants: str, paces: list[float], seen: Run) -> None:
    """A row, and a line for whoever watches."""
    step, told = seen.told["step"], seen.told
    row = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}", "hardware": f"{os.cpu_count()} cores, {platform.machine()}, Gloo",
        "job": job, "cluster": cluster, "strategy": strategy, "constants": constants,
        **{key: f"{step[key]:.6g}" for key in ("predicted_s", "simulated_s", "measured_s")},
        "bytes_equal": told["bytes"]["equal"], "order_equal": told["order"]["equal"],
        "memory_predicted": round(told["memory"]["predicted_bytes"]), "memory_measured": round(told["memory"]["measured_bytes"]),
        "paces_s": json.dumps([round(each, 4) for each in paces]),
        "told": json.dumps(told["operations"]), "epochs_s": json.dumps([round(epoch, 6) for epoch in seen.epochs_s]),
    }  # fmt: skip
    new = not ROWS.exists()
    with ROWS.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(row)
    print(f"{job:10s} {cluster:14s} {strategy:28s} predicted {step['predicted_s']:.4f} s, measured {step['measured_s']:.4f} s "
          f"({step['predicted_s'] / step['measured_s'] - 1:+.0%}); {' '.join(f'{each:.2f}' for each in paces)}", flush=True)  # fmt: skip


def predict(datasets: Path) -> None:
    """Every row's predictions anew."""
    told = rows()
    for row in told:
        with tempfile.TemporaryDirectory() as scratch:
            document = plan(datasets, row["job"], TRACES / f"{row['constants']}.yaml", row["strategy"], f"{scratch}/plan.json")
        job, strategy = question(document), chosen(document)
        candidate, played = weigh(job, strategy), play(strategy.schedule(job, 5), job.cost)
        seen = {each["operation"]: each["measured_s"] for each in json.loads(row["told"])}
        row |= {"predicted_s": f"{float(candidate.predicted.epoch_s):.6g}", "simulated_s": f"{played.step_s:.6g}",
                "memory_predicted": str(round(fullest(candidate.memory, runtime=False))),
                "told": json.dumps(beside(candidate.predicted, per_operation(played.spans, range(1, 5)), seen))}  # fmt: skip
        print(row["job"], row["cluster"], row["strategy"], f"{float(row['predicted_s']) / float(row['measured_s']) - 1:+.0%}")
    write(ROWS, told)


def runs(of: Callable[[dict[str, str]], bool] = lambda row: True) -> list[Run]:
    """The rows, or those of a kind, as runs that can be summed up."""
    return [Run(
        "", f"{row['job']} {row['cluster']}", f"{row['job']}, {row['cluster']}", int(row["cluster"][0]), row["strategy"],
        {"step": {key: float(row[key]) for key in ("predicted_s", "simulated_s", "measured_s")}, "operations": json.loads(row["told"]),
         "memory": {"of": "data", "predicted_bytes": float(row["memory_predicted"]), "measured_bytes": float(row["memory_measured"])},
         "bytes": {"equal": row["bytes_equal"] == "True"}, "order": {"equal": row["order_equal"] == "True"}},
        tuple(json.loads(row["epochs_s"])),
    ) for row in rows() if of(row)]  # fmt: skip


def table() -> None:
    """Markdown: errors by cluster and by operation, choices, what to doubt."""
    seen = runs()
    told, even = summarise(seen), summarise(runs(steady))

    def line(what: str, of: dict[str, float] | None) -> str:
        return f"| {what} | - | - | - | - |" if of is None else (
            f"| {what} | {of['n']} | {of['mean']:.1%} | {of['p95']:.1%} | {of['max']:.1%} |")  # fmt: skip

    def order(tau: float | None) -> str:
        return "-" if tau is None else f"{tau:.2f}"

    print("| | runs | mean | 95 % have at most | largest |\n|---|--:|--:|--:|--:|")
    for way in ("predicted", "simulated"):
        print(line(f"step, {way}", told["step"][way]))
        print(line(f"step, {way}, machine steady", even["step"][way]))
    for cluster in dict.fromkeys(run.question.split()[1] for run in seen):
        there = summarise([run for run in seen if run.question.endswith(f" {cluster}")])
        print(line(f"step, predicted, {cluster}", there["step"]["predicted"]))
    for op, of in sorted(told["operations"].items(), key=lambda item: -item[1]["share"]):
        print(line(f"{op} ({of['share']:.0%} of the step), predicted", of["predicted"]))
    print(line("memory", told["memory"]))
    print(f"\nBytes as predicted in {told['bytes_equal']} of {told['runs']} runs. Noise from run to run: {told['noise']:.1%}.\n")
    print("| question | strategies | tau | chosen | fastest | regret |\n|---|--:|--:|---|---|--:|")
    for one in told["rankings"]:
        names = f"{one['choice']} | {one['fastest']}"
        print(f"| {one['question']} | {one['strategies']} | {order(one['tau'])} | {names} | {one['regret']:.1%} |")
    if every := told["ranking"]:
        print(f"| all {every['questions']} || {order(every['tau'])} | right or within noise | {every['right']:.0%} "
              f"| {every['regret']:.1%} |")  # fmt: skip


def tell() -> None:
    """What a plan needs to know of the rows."""
    write(TOLD, [{"job": run.question, "strategy": run.strategy, **{key: run.told["step"][key] for key in ("predicted_s", "measured_s")}}
                 for run in runs()])  # fmt: skip


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", datasets, *jobs]:
            run(Path(datasets), jobs)
        case ["predict", datasets]:
            predict(Path(datasets))
        case ["table"]:
            table()
        case ["tell"]:
            tell()
        case _:
            raise SystemExit(__doc__)
