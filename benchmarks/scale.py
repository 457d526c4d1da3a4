"""Measures how much time and memory planning takes on large graphs and on many ranks.

    python benchmarks/scale.py [FOLDER] [STEP ...]     5M vertices, 100M edges, by step
    python benchmarks/scale.py ranks [PICTURE]         seconds of one core over the number of ranks

The first form generates the graph once into FOLDER (2.5 GB; by default a folder that is removed at
the end): the generator's communities with power-law degrees, seed 0, 100 features, 1 % to train on.
Each step then runs in a process of its own, one after the other. The table has the seconds of one
core from when the graph is loaded, and the most memory that the process had resident, the graph
included. Steps find on disk what earlier ones left there, as a user's would: `gsplit` does not
split anew what `split` has split. `plan`, the command itself, runs only where it is named, since it
weighs all strategies of the full graph too, each with METIS. Nothing is asserted.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from commands import header, line, words

from gnnplan.api.asking import problem_of
from gnnplan.cli import app
from gnnplan.planner.decision.plan import make
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.graph.splitting import owners, presample
from gnnplan.planner.problem.inputs import read_cluster, read_workload
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.strategies.minibatch.feature_store import hottest
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.simulator.player import play

SOURCE = (
    "synthetic:community?vertices=5000000&edges=100000000&features=100&classes=47"
    "&communities=1000&seed=0"
)
TRAINED, GPUS, LIMIT = 0.01, 4, 12e9  # share of the vertices, GPUs of the server, [B]
CLUSTER = "gsplit_p3_8xlarge"
WORKLOAD = Workload(mode="mini", model="sage", layers=3, hidden=256, batch=1024, fanout=(15, 10, 5))
ASKED = (
    "--mode mini --model sage --layers 3 --hidden 256 --batch 1024 --fanout 15,10,5"
    f" --cluster {CLUSTER} --ranks {GPUS} --strategy data_parallel"
)


def generate(folder: Path) -> None:
    """Write the graph as a folder whose features are mapped into memory.

    It has every edge once, because it becomes undirected when it is read.
    """
    graph = load(SOURCE)
    assert isinstance(graph, Graph)
    n = graph.stats.vertices
    dst = np.repeat(np.arange(n, dtype=np.int32), graph.degree)
    once = graph.indices < dst
    train = np.zeros(n, bool)
    train[np.random.default_rng(0).permutation(n)[: round(TRAINED * n)]] = True
    folder.mkdir(parents=True)
    edges = {"src": graph.indices[once], "dst": dst[once]}
    for name, array in {**edges, "y": graph.y, "train_mask": train, "x": graph.x}.items():
        np.save(folder / f"{name}.npy", array)


def of_graph(step: Callable[[Graph], object]) -> Callable[[Path], float]:
    def timed(folder: Path) -> float:
        graph = load(str(folder))
        assert isinstance(graph, Graph)
        started = time.process_time()
        step(graph)
        return time.process_time() - started

    return timed


def loading(folder: Path) -> float:
    started = time.process_time()
    load(str(folder))
    return time.process_time() - started


def weighing(strategy: str) -> Callable[[Path], float]:
    """Settle the strategy, place its ranks, predict its memory and time."""

    def timed(folder: Path) -> float:
        problem = problem_of(str(folder), read_cluster(CLUSTER), WORKLOAD, [], GPUS, "metis", False)
        started = time.process_time()
        found = search(problem, forced=parse(strategy)).ranked[0]
        epoch_s = float(found.predicted.epoch_s)
        print(f"{found.strategy}: {epoch_s:.3g} s per epoch", file=sys.stderr)
        return time.process_time() - started

    return timed


def plan(folder: Path) -> float:
    started = time.process_time()
    app(["plan", "--graph", str(folder), *ASKED.split()], standalone_mode=False)
    return time.process_time() - started


STEPS: dict[str, tuple[str, Callable[[Path], float]]] = {
    "first": ("load, the features looked at for the first time", loading),
    "load": ("load", loading),
    "presample": ("pre-sampling, 10 epochs", of_graph(lambda graph: presample(graph, WORKLOAD))),
    "hottest": (
        "hot rows by frequency, 10 epochs",
        of_graph(lambda graph: hottest(graph, WORKLOAD, "frequency", GPUS)),
    ),
    "metis": (f"METIS, {GPUS} parts", of_graph(lambda graph: partition(graph, GPUS))),
    "split": (
        f"pre-sampling and weighted METIS, {GPUS} GPUs",
        of_graph(lambda graph: owners(graph, GPUS, "gsplit", WORKLOAD)),
    ),
    **{name: (f"weighing {name}", weighing(name)) for name in ("data_parallel", "gsplit", "p3")},
}
NAMED = {"plan": ("`gnnplan plan --mode mini --strategy data_parallel`", plan)}


def run(step: str, folder: Path, cache: Path) -> None:
    """Run a step in a process of its own and print its line of the table."""
    done = subprocess.run(
        [sys.executable, __file__, "--step", step, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"GNNPLAN_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
    )
    what = (STEPS | NAMED)[step][0] if step in STEPS | NAMED else step
    if done.returncode:
        print(f"| {what} | failed ({done.returncode}) | |", flush=True)
        return
    seconds, peak = json.loads(done.stdout.splitlines()[-1])
    most = f"{peak / 1e9:.1f}{'' if peak < LIMIT else ' (!)'}"
    print(line(what, f"{seconds:,.0f}", most), flush=True)


RANKS, EACH = (8, 64, 256, 1024), 8  # GPUs of a DGX A100
SERVER = "dgx_a100"
DEEP = {"layers": 32, "hidden": 64}  # so that pipelines have a layer for each of 16 stages
MINI = {"mode": "mini"}
PLANNED: dict[str, dict[str, object]] = {
    "plan, full graph": {},
    "plan, full graph, 32 layers": {"model": "gcnii", **DEEP},
    "plan, mini-batches": MINI,
}
PLAYED: dict[str, dict[str, object]] = {
    "graph_parallel": {},
    "pipegcn": {},
    "granndis(depth=1)": {},
    "gnnpipe(stages=16)": DEEP,
    "data_parallel": MINI,
    "gsplit": MINI,
    "p3": MINI,
}


def on(graph: str, ranks: int, asked: dict[str, object]) -> Problem:
    cluster, workload = read_cluster(SERVER), read_workload(None, asked)
    settings = [f"servers={ranks // EACH}"]
    return problem_of(graph, cluster, workload, settings, None, "metis", False)


def planning(ranks: int, asked: dict[str, object]) -> str:
    gc.collect()
    started = time.process_time()
    problem = on("ogbn-papers100M", ranks, asked)
    with suppress(Infeasible):  # on few GPUs: then what would make room has been looked for
        make(problem, search(problem))
    return f"{time.process_time() - started:.3g}"


def playing(text: str, ranks: int, asked: dict[str, object]) -> str:
    """Seconds of playing a step, its schedule included; '' where the strategy does not suit."""
    problem = on("ogbn-products", ranks, asked)
    strategy = parse(text).settle(problem)
    try:
        strategy.check(problem)
    except SpecError:
        return ""
    gc.collect()  # what was played before is not this one's to clear away
    started = time.process_time()
    play(strategy.schedule(problem, 1), problem.cost)
    return f"{time.process_time() - started:.3g}"


def growth(picture: Path | None) -> None:
    """Print the table over the number of ranks, and draw it."""
    lines: dict[str, list[str]] = {}
    print(header("seconds of one core", *(f"{ranks:,} ranks" for ranks in RANKS)), flush=True)
    for name, asked in PLANNED.items():
        lines[name] = [planning(ranks, asked) for ranks in RANKS]
        print(line(name, *lines[name]), flush=True)
    for text, asked in PLAYED.items():
        name = f"play {text}"
        lines[name] = [playing(text, ranks, asked) for ranks in RANKS]
        print(line(name, *(seconds or "-" for seconds in lines[name])), flush=True)
    if picture:
        draw(lines, picture)


def draw(lines: dict[str, list[str]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 5), layout="constrained")
    for name, told in lines.items():
        points = [(ranks, float(s)) for ranks, s in zip(RANKS, told, strict=True) if s]
        style = "-" if name.startswith("plan") else "--"
        axes.loglog(*zip(*points, strict=True), marker="o", linestyle=style, label=name)
    axes.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    axes.set(xlabel="ranks", ylabel="seconds of one core")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def main(folder: Path, steps: list[str]) -> None:
    print(header("step", "seconds of one core", "peak GB"), flush=True)
    if not folder.exists():
        run("generate", folder, folder.parent)
    with tempfile.TemporaryDirectory(dir=folder.parent) as cache:
        for step in steps or STEPS:
            run(step, folder, Path(cache))
    print(f"\n(!): more than {LIMIT / 1e9:.0f} GB")


def one(step: str, folder: Path) -> None:
    if step == "generate":
        generate(folder)
        seconds = time.process_time()
    else:
        seconds = (STEPS | NAMED)[step][1](folder)
    print(json.dumps((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)))


if __name__ == "__main__":
    words(__doc__)
    if sys.argv[1:2] == ["--step"]:
        one(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["ranks"]:
        growth(Path(sys.argv[2]) if sys.argv[2:] else None)
    elif sys.argv[1:]:
        main(Path(sys.argv[1]), sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch) / "graph", [])
