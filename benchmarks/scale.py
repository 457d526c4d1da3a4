"""Measures how gnnplan's time and memory grow with a graph's edges, and with the number of ranks.

    python benchmarks/scale.py edges FOLDER [PICTURE [EDGES ...]]     by default 1e6 1e7 1e8
    python benchmarks/scale.py ranks [PICTURE]

edges: R-MAT graphs and communities with 20 edges per vertex, 32 features, a tenth of the vertices
trained on. Each graph is generated into FOLDER, partitioned into 8 and into 2 parts, planned on two
ranks of this machine, trained for three epochs on the full graph (GraphSAGE 2 x 32, graph_parallel)
and one on mini-batches (1024, fanouts 10 and 10, data_parallel), and validated. Every command is a
process of its own. The table has each command's seconds, CPU seconds of all cores, and the peak
memory of its largest process, ranks included. A graph and its files are removed before the next.

ranks: CPU seconds of plans and of simulated steps on 8 to 1,024 GPUs.

Nothing is asserted.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
from commands import header, line, words

from gnnplan.api.arguments import problem_of
from gnnplan.planner.decision.plan import make
from gnnplan.planner.decision.search import search
from gnnplan.planner.problem.inputs import ask_workload, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.simulator.player import play

GRAPHS = {
    "R-MAT": "synthetic:rmat?vertices={v}&edges={e}",
    "communities": "synthetic:community?vertices={v}&edges={e}&communities={c}",
}
LEARNED = "&features=32&classes=16&train=0.1"
SAGE = ("--model", "sage", "--layers", 2, "--hidden", 32, "--strategy")
TRAINED = {
    "full graph": ((*SAGE, "graph_parallel"), 3),
    "mini-batches": (
        (*SAGE, "data_parallel", "--mode", "mini", "--batch", 1024, "--fanout", "10,10"),
        1,
    ),
}


class Taken(NamedTuple):
    """The time and memory of a command."""

    seconds: float
    cpu: float  # seconds of all cores together
    peak: int  # [B] of the largest of its processes


def timed(*words: object) -> Taken:
    """Run a command of gnnplan, with its output on standard error. Raises SystemExit."""
    command = [sys.executable, "-m", "gnnplan", *map(str, words)]
    print("gnnplan", *words, file=sys.stderr, flush=True)
    started = time.perf_counter()
    toward = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    pid = os.posix_spawn(sys.executable, command, os.environ, file_actions=toward)
    _, status, used = os.wait4(pid, 0)
    if status:
        raise SystemExit(f"gnnplan {words[0]} failed")
    seconds = time.perf_counter() - started
    return Taken(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024)


def trained(folder: Path, kind: str, edges: int) -> dict[str, Taken]:
    """Run all commands from a graph's name to a validated model, and remove their files."""
    name = GRAPHS[kind].format(v=edges // 20, e=edges, c=edges // 10_000) + LEARNED
    graph, parts = folder / "graph", folder / "parts2"
    costs = {
        "convert (generate)": timed("convert", name, graph),
        "partition -k 8": timed("partition", graph, "-k", 8, "-o", folder / "parts8"),
        "partition -k 2": timed("partition", graph, "-k", 2, "-o", parts),
    }
    for mode, (options, epochs) in TRAINED.items():
        plan, run = folder / "plan.json", folder / mode.replace(" ", "-")
        where = ("--graph", parts, "--cluster", folder / "cluster.yaml", "--ranks", 2)
        costs[f"plan, {mode}"] = timed("plan", *where, *options, "-o", plan)
        costs[f"run, {mode}, epochs: {epochs}"] = timed(
            "run", plan, "--epochs", epochs, "--out", run
        )
        costs[f"validate, {mode}"] = timed("validate", run)
    for path in folder.iterdir():
        if path.name != "cluster.yaml":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return costs


def by_edges(folder: Path, picture: Path | None, sizes: list[int]) -> None:
    """Print a table for each kind of graph, and draw the CPU seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    timed("measure", "--ranks", 2, "-o", folder / "cluster.yaml")
    lines: dict[str, list[float]] = {}
    for kind in GRAPHS:
        found = [trained(folder, kind, edges) for edges in sizes]
        print(header(f"{kind}: seconds (of all cores), peak GB", *(f"{n:,} edges" for n in sizes)))
        for step in found[0]:
            each = [costs[step] for costs in found]
            cells = (f"{t.seconds:,.3g} ({t.cpu:,.3g}), {t.peak / 1e9:.2f}" for t in each)
            print(line(step, *cells), flush=True)
            if not step.startswith("validate"):
                lines[f"{kind}: {step}"] = [cost.cpu for cost in each]
    if picture:
        draw("edges", sizes, lines, picture)


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


def on(graph: str, ranks: int, options: dict[str, object]) -> Problem:
    cluster, workload = read_cluster(SERVER), ask_workload(None, options).workload
    settings = [f"servers={ranks // EACH}"]
    return problem_of(graph, cluster, workload, settings, None, "metis", False)


def planning(ranks: int, options: dict[str, object]) -> float:
    gc.collect()
    started = time.process_time()
    problem = on("ogbn-papers100M", ranks, options)
    with suppress(Infeasible):  # on few GPUs; the search then also looked for what would fit
        make(search(problem))
    return time.process_time() - started


def playing(text: str, ranks: int, options: dict[str, object]) -> float:
    """Return the seconds to schedule and simulate a step; nan if the strategy does not suit."""
    problem = on("ogbn-products", ranks, options)
    strategy = parse(text).settle(problem)
    try:
        strategy.check(problem)
    except SpecError:
        return float("nan")
    gc.collect()  # so that this time does not include freeing earlier simulations
    started = time.process_time()
    play(strategy.schedule(problem, 1), problem.cost)
    return time.process_time() - started


def by_ranks(picture: Path | None) -> None:
    """Print and draw the table over the number of ranks."""
    lines: dict[str, list[float]] = {}
    print(header("seconds of one core", *(f"{ranks:,} ranks" for ranks in RANKS)), flush=True)
    for name, options in PLANNED.items():
        lines[name] = [planning(ranks, options) for ranks in RANKS]
    for text, options in PLAYED.items():
        lines[f"play {text}"] = [playing(text, ranks, options) for ranks in RANKS]
    for name, seconds in lines.items():
        print(line(name, *("-" if np.isnan(s) else f"{s:.3g}" for s in seconds)), flush=True)
    if picture:
        draw("ranks", RANKS, lines, picture)


def draw(of: str, at: Sequence[int], lines: Mapping[str, list[float]], picture: Path) -> None:
    """Draw seconds over a size, both on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    first = ""
    for name, seconds in lines.items():
        first = first or name.partition(":")[0].partition(" ")[0]
        style = "-" if name.startswith(first) else "--"
        axes.loglog(at, seconds, marker="o", linestyle=style, label=name)
    axes.set_xticks(at, [f"{each:,}" for each in at])
    axes.set(xlabel=of, ylabel="seconds of all cores")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


if __name__ == "__main__":
    what, *rest = words(__doc__) or [""]
    if what == "edges" and rest:
        folder, picture, *sizes = rest if len(rest) > 1 else [rest[0], ""]
        numbers = [int(float(size)) for size in sizes] or [10**6, 10**7, 10**8]
        by_edges(Path(folder), Path(picture) if picture else None, numbers)
    elif what == "ranks":
        by_ranks(Path(rest[0]) if rest else None)
    else:
        raise SystemExit(__doc__)
