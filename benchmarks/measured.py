"""Compares predictions with measurements, on clusters emulated on this machine.

    python benchmarks/measured.py run DATASETS [PROBLEM ...]   add runs missing in runs.csv
    python benchmarks/measured.py predict DATASETS             update the predictions in runs.csv
    python benchmarks/measured.py table                        print errors and regrets
    python benchmarks/measured.py quote                        write traces/quoted/measured.csv
    python benchmarks/measured.py minibatch run DATASETS [..]  the same for mini-batches; also with
                                                               predict and table

`run` takes every problem on every cluster with every suitable family: it measures the constants of
the cluster alone (`gnnplan measure`), plans, runs and compares. Rows go to traces/measured/runs.csv
(mini-batches: traces/measured/minibatch/runs.csv); the cluster files lie beside them. Then all runs
are repeated with new constants: the difference between two such runs is noise. Other tenants may
slow this machine down, so a row has the machine's pace before and after, and `table` also sums up
the rows with a constant pace. `run` needs Linux, root and iproute2, on an otherwise idle machine.

`predict` predicts the rows with today's code, from the constants with which each row was planned.
`table` prints the tables of docs/reference/measured-runs.md. `quote` writes the file from which a
plan knows which differences are noise.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import commands
import numpy as np
from commands import gnnplan, header, line, words, write

from gnnplan.api import DEFAULT_GRAPH
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.evidence.runs import Compared, Run, summarise
from gnnplan.planner.evidence.validate import MOVED, compare_operations, per_operation, rank_bytes
from gnnplan.simulator.player import play
from gnnplan.simulator.replay import replay

TRACES, QUOTED = commands.TRACES / "measured", commands.TRACES / "quoted" / "measured.csv"
EPOCHS = 12  # fewest epochs of a run; half as many if an epoch is predicted to exceed LONG
LONG = 1.5  # [s]
# cluster -> its newest file, time of measurement [s], and the machine's paces before and after
MEASURED: dict[str, tuple[Path, float, list[float]]] = {}
# time for which constants are used [s]; other tenants come and go, so constants expire soon
FRESH = 300.0
# length of a run of short epochs [s], and its most epochs: a process needs seconds to reach its
# pace
SETTLED, MOST = 10.0, 100
STEADY = 1.2  # largest ratio of the slowest to the fastest pace of a steady machine
SENT = ("all_reduce", *MOVED)  # operations that send
TIMES = 2  # number of runs of each case, half an hour or more apart
Job = tuple[str, dict[str, Any]]  # a graph, and options of its workload
WIDE = {"model": "sage", "layers": 3, "hidden": 256}
JOBS: dict[str, Job] = {
    "squirrel": ("squirrel", {"model": "gcnii", "layers": 32, "hidden": 64, "dropout": 0.5}),
    "flickr": ("flickr", WIDE),
    "physics": ("coauthor_physics", {"model": "gcn", "layers": 3, "hidden": 128}),
    "synthetic": (DEFAULT_GRAPH, WIDE),
}
CLUSTERS = [
    (2, 2, "400Mbit/s"),
    (2, 1, "400Mbit/s"),
    (2, 2, "100Mbit/s"),
    (1, 2, ""),
    (1, 4, ""),
    (2, 2, "unshaped"),
    (2, 1, "unshaped"),
    # servers, ranks per server, rate of a NIC
    (2, 1, "100Mbit/s"),
    (2, 2, "2Gbit/s"),
    (2, 1, "2Gbit/s"),
]
FAMILIES = (
    "graph_parallel",
    "graph_parallel(narrow=True)",
    "pipegcn",
    "pipegcn(narrow=True)",
    "gnnpipe",
)
SHARING = ("granndis(depth=1)", "granndis")  # families that need several servers
SAMPLED = {"mode": "mini", "layers": 3, "hidden": 128, "batch": 1024}
SAGE = {"model": "sage", "fanout": "10,10,5", **SAMPLED}
GCN = {"model": "gcn", "fanout": "15,10,5", "dropout": 0.5, **SAMPLED}
MINI_JOBS: dict[str, Job] = {
    "actor": ("actor", SAGE),
    "cs": ("coauthor_cs", SAGE),
    "facebook": ("musae_facebook", SAGE),
    "photo": ("amazon_photo", SAGE),
    "tolokers": ("tolokers", SAGE),
    "arxiv": ("ogbn_arxiv", GCN),
    "flickr": ("flickr", SAGE),
    "physics": ("coauthor_physics", SAGE),
}
MINI_CLUSTERS = [(1, 2, ""), (2, 1, "400Mbit/s"), (2, 2, "400Mbit/s"), (2, 2, "unshaped")]
MINI_FAMILIES = ("data_parallel", "gsplit", "p3", "p3(pipelined=True)")


@dataclass(frozen=True)
class Study:
    """A set of questions, and the folder of their rows."""

    folder: Path
    jobs: Mapping[str, Job]
    clusters: Sequence[tuple[int, int, str]]
    families: tuple[str, ...]
    sharing: tuple[str, ...] = ()  # families for several servers

    @property
    def rows(self) -> Path:
        return self.folder / "runs.csv"


FULL = Study(TRACES, JOBS, CLUSTERS, FAMILIES, SHARING)
MINI = Study(TRACES / "minibatch", MINI_JOBS, MINI_CLUSTERS, MINI_FAMILIES)


def name(servers: int, each: int, rate: str) -> str:
    """Return the name of a cluster's file."""
    return f"{servers}x{each}" + (f"_{rate.split('/')[0]}" if rate else "")


def _work(core: int) -> float:
    held, sum_, since = np.zeros(1 << 22), 0, time.perf_counter()
    for _ in range(25):
        held.copy()
        for number in range(400_000):
            sum_ += number
    return time.perf_counter() - since


def pace() -> float:
    """Return the seconds of a fixed work on all cores at the same time, on the slowest core.

    The work is copies of 32 MB and a loop in Python.
    """
    with get_context("spawn").Pool() as cores:  # a fork of a process with threads may hang
        return max(cores.map(_work, range(os.cpu_count() or 1), chunksize=1))


def amid(*command: object, **options: object) -> list[float]:
    """Run a command of gnnplan; return the paces before and after."""
    before = pace()
    gnnplan(*command, **options)
    return [before, pace()]


def steady(row: dict[str, str]) -> bool:
    """Return whether the machine was as fast in training as when constants were measured."""
    paces = json.loads(row["paces_s"])
    return max(paces) <= STEADY * min(paces)


def constants(study: Study, servers: int, each: int, rate: str) -> tuple[Path, list[float]]:
    """Return the cluster's file and the paces around its measurement.

    The cluster is measured again if its file is older than FRESH.
    """
    cluster = name(servers, each, rate)
    path, since, paces = MEASURED.get(cluster, (None, 0.0, []))
    if path is None or time.monotonic() - since > FRESH:
        study.folder.mkdir(parents=True, exist_ok=True)
        number = len(list(study.folder.glob(f"{cluster}.*.yaml"))) + 1
        path = study.folder / f"{cluster}.{number}.yaml"
        emulated = {"servers": servers, "emulate": rate} if rate else {}
        paces = amid("measure", ranks=each, **emulated, output=path)
        MEASURED[cluster] = path, time.monotonic(), paces
    return path, paces


def rows(study: Study) -> list[dict[str, str]]:
    """Return all rows of the study."""
    return commands.rows(study.rows)


def plan(
    study: Study, datasets: Path, problem: str, constants: Path, strategy: str, out: str
) -> dict[str, Any]:
    """Write a plan to `out`, and return its document."""
    graph, workload = study.jobs[problem]
    source = graph if ":" in graph else datasets / f"{graph}.npz"
    commands.plan(out, graph=source, **workload, cluster=constants, strategy=strategy)
    return read(out)


def run(study: Study, datasets: Path, problems: list[str]) -> None:
    """Run every case that has fewer rows than TIMES."""
    done = Counter((row["job"], row["cluster"], row["strategy"]) for row in rows(study))
    for before, cluster, problem in itertools.product(
        range(TIMES), study.clusters, problems or study.jobs
    ):
        servers, _, rate = cluster
        for strategy in study.families + (study.sharing if servers > 1 else ()):
            # no layer is narrower than its input
            alike = "narrow" in strategy and study.jobs[problem][1]["model"] == "gcnii"
            if alike or done[problem, name(*cluster), strategy] > before:
                continue
            with tempfile.TemporaryDirectory() as scratch:
                planned, out = f"{scratch}/plan.json", f"{scratch}/run"
                measured, paces = constants(study, *cluster)
                found = plan(study, datasets, problem, measured, strategy, planned)
                predicted = found["best"]["predicted"]["epoch_s"]
                # PipeGCN's exchanges lag more from step to step, until they lag by one step
                settled = "pipegcn" not in strategy
                least = EPOCHS // 2 if predicted > LONG and settled else EPOCHS
                epochs = min(max(least, int(SETTLED / predicted)), MOST)
                how = {"eval_every": 0, "checkpoint_every": 0, "timeout": 120}
                around = amid("run", planned, epochs=epochs, **how, out=out, emulate=rate or None)
                case = {
                    "job": problem,
                    "cluster": name(*cluster),
                    "strategy": strategy,
                    "constants": measured.stem,
                }
                append(study, case, paces + around, replay(Path(out)).run)
                done[problem, name(*cluster), strategy] += 1


def append(study: Study, case: dict[str, str], paces: list[float], seen: Run) -> None:
    """Append a row, and print a line about it."""
    comparison, step = seen.comparison, seen.comparison["step"]
    row = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": f"{os.cpu_count()} cores, {platform.machine()}, Gloo",
        **case,
        **{key: f"{step[key]:.6g}" for key in ("predicted_s", "simulated_s", "measured_s")},
        "bytes_equal": comparison["bytes"]["equal"],
        "order_equal": comparison["order"]["equal"],
        "memory_predicted": round(comparison["memory"]["predicted_bytes"]),
        "memory_measured": round(comparison["memory"]["measured_bytes"]),
        "paces_s": json.dumps([round(each, 4) for each in paces]),
        "told": json.dumps(comparison["operations"]),
        "epochs_s": json.dumps([round(epoch, 6) for epoch in seen.epochs_s]),
    }
    write(study.rows, [row], "a")
    print(
        f"{case['job']:10s} {case['cluster']:14s} {case['strategy']:28s}"
        f" predicted {step['predicted_s']:.4f} s, measured {step['measured_s']:.4f} s"
        f" ({step['predicted_error']:+.0%}); {' '.join(f'{each:.2f}' for each in paces)}",
        flush=True,
    )


def predict(study: Study, datasets: Path) -> None:
    """Update the predictions of every row."""
    study_rows = rows(study)
    for row in study_rows:
        cluster = study.folder / f"{row['constants']}.yaml"
        with tempfile.TemporaryDirectory() as scratch:
            out = f"{scratch}/plan.json"
            document = plan(study, datasets, row["job"], cluster, row["strategy"], out)
        problem, strategy = question(document), chosen(document)
        candidate = evaluate(problem, strategy)
        played = play(strategy.schedule(problem, 5), problem.cost)
        simulated = per_operation(played.spans, range(1, 5))
        seen = {each["operation"]: each["measured_s"] for each in json.loads(row["told"])}
        row |= {
            "predicted_s": f"{float(candidate.predicted.epoch_s):.6g}",
            "simulated_s": f"{played.epoch_s(1):.6g}",
            "memory_predicted": str(round(rank_bytes(candidate.memory).max())),
            "told": json.dumps(compare_operations(candidate.predicted, simulated, seen)),
        }
        error = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        print(row["job"], row["cluster"], row["strategy"], f"{error:+.0%}")
    write(study.rows, study_rows)


def runs(study: Study, of: Callable[[dict[str, str]], bool] = lambda row: True) -> list[Compared]:
    """Return the rows for which `of` is true, as runs for `summarise`."""
    return [
        Compared(
            "",
            f"{row['job']} {row['cluster']}",
            f"{row['job']}, {row['cluster']}",
            int(row["cluster"][0]),
            row["strategy"],
            {
                "step": {
                    key: float(row[key]) for key in ("predicted_s", "simulated_s", "measured_s")
                },
                "operations": json.loads(row["told"]),
                "memory": {
                    "of": "data",
                    "predicted_bytes": float(row["memory_predicted"]),
                    "measured_bytes": float(row["memory_measured"]),
                },
                "bytes": {"equal": row["bytes_equal"] == "True", "predicted": SENT},
                "order": {"equal": row["order_equal"] == "True"},
            },
            tuple(json.loads(row["epochs_s"])),
        )
        for row in rows(study)
        if of(row)
    ]


def table(study: Study) -> None:
    """Print Markdown tables: errors by cluster, strategy and operation, and choices."""
    seen, on_steady = runs(study), runs(study, steady)
    summary, even = summarise(seen), summarise(on_steady)["step"] if on_steady else {}

    def show(what: str, of: dict[str, float] | None) -> None:
        cells = [f"{of[figure]:.1%}" for figure in ("mean", "p95", "max")] if of else ["-"] * 3
        print(line(what, of["n"] if of else "-", *cells))

    def order(tau: float | None) -> str:
        return "-" if tau is None else f"{tau:.2f}"

    print(header("", "runs", "mean", "95 % have at most", "largest"))
    for method in ("predicted", "simulated"):
        show(f"step, {method}", summary["step"][method])
        show(f"step, {method}, machine steady", even.get(method))
    for cluster in dict.fromkeys(run.question.split()[1] for run in seen):
        there = summarise([run for run in seen if run.question.endswith(f" {cluster}")])
        show(f"step, predicted, {cluster}", there["step"]["predicted"])
    for strategy in dict.fromkeys(run.strategy for run in seen):
        alike = summarise([run for run in seen if run.strategy == strategy])
        show(f"step, predicted, {strategy}", alike["step"]["predicted"])
    for op, of in sorted(summary["operations"].items(), key=lambda item: -item[1]["share"]):
        show(f"{op} ({of['share']:.0%} of the step), predicted", of["predicted"])
    show("memory", summary["memory"])
    print(
        f"\nBytes as predicted in {summary['bytes_equal']} of {summary['runs']} runs. Noise from"
        f" run to run: {summary['noise']:.1%}.\n"
    )
    print("| question | strategies | tau | chosen | fastest | regret |\n|---|--:|--:|---|---|--:|")
    for one in summary["rankings"]:
        names = one["choice"], one["fastest"]
        regret = f"{one['regret']:.1%}"
        print(line(one["question"], one["strategies"], order(one["tau"]), *names, regret))
    if every := summary["ranking"]:
        print(
            f"| all {every['questions']} || {order(every['tau'])} | right or within noise |"
            f" {every['right']:.0%} | {every['regret']:.1%} |"
        )


def quote() -> None:
    """Write the numbers of the rows that a plan reads."""
    quoted = [
        {"job": run.question, "strategy": run.strategy}
        | {key: run.comparison["step"][key] for key in ("predicted_s", "measured_s")}
        for run in runs(FULL)
    ]
    write(QUOTED, quoted)


if __name__ == "__main__":
    arguments = words(__doc__)
    study = MINI if arguments[:1] == ["minibatch"] else FULL
    match arguments[study is MINI :]:
        case ["run", datasets, *problems]:
            run(study, Path(datasets), problems)
        case ["predict", datasets]:
            predict(study, Path(datasets))
        case ["table"]:
            table(study)
        case ["quote"] if study is FULL:
            quote()
        case _:
            raise SystemExit(__doc__)
