"""Times full-graph training, side by side in one run on this machine.

    python benchmarks/spine.py [ROUNDS]

The peer is one process of DGL, the best exact one, with one and with two threads. Beside it are our
families on two Gloo ranks (one thread each) for the same training, in turn and several times,
because these machines drift. Prints ratios, asserts nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from statistics import median
from typing import Any

from commands import words

GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
HIDDEN, LAYERS, LR = 256, 3, 0.01


def floor(threads: int, epochs: int = 12) -> dict[str, Any]:
    """Train with DGL in a process of its own: full batch, 3-layer GraphSAGE-mean 256, Adam.

    {'epoch_s': median [s], 'min_s', 'losses', 'rss_mb'}.
    """
    count = str(threads)
    env = {
        **os.environ,
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "DGLBACKEND": "pytorch",
    }
    command = [sys.executable, __file__, "dgl-child", count, str(epochs)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def dgl_child(threads: int, epochs: int) -> dict[str, Any]:
    """Be the process of `floor`: DGL as its documentation has it.

    SAGEConv, loss on the training vertices, torch's Adam.
    """
    import resource

    import torch
    from torch.nn import functional as F

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dgl
        from dgl.nn import SAGEConv

    from gnnplan.planner.graph.load import load

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    data = load(GRAPH)
    graph = dgl.graph(
        ("csc", (torch.tensor(data.indptr), torch.tensor(data.indices).long(), [])),
        num_nodes=data.stats.vertices,
    )
    graph.create_formats_()  # CSR and CSC before the clock starts
    x, y, train = (
        torch.tensor(data.x),
        torch.tensor(data.y),
        torch.tensor(data.train).nonzero().squeeze(1),
    )
    widths = [data.stats.features] + [HIDDEN] * (LAYERS - 1) + [data.stats.classes]
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths))
    optimizer = torch.optim.Adam(layers.parameters(), lr=LR)

    seconds, losses = [], []
    for _ in range(epochs + 2):  # two to warm up
        begin = time.perf_counter()
        h = x
        for layer in layers[:-1]:
            h = layer(graph, h).relu()
        loss = F.cross_entropy(layers[-1](graph, h)[train], y[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    return {
        "threads": threads,
        "epoch_s": median(seconds[2:]),
        "min_s": min(seconds[2:]),
        "losses": losses,
        "rss_mb": rss,
    }


def ours(strategy: str, ranks: int, epochs: int = 14) -> dict[str, Any]:
    """The same training by `gnnplan run`.

    {'epoch_s': median [s], 'rss_mb': of the fullest rank, 'loss'}.
    """
    with tempfile.TemporaryDirectory() as folder:
        plan, out = f"{folder}/plan.json", f"{folder}/run"
        gnnplan = [sys.executable, "-m", "gnnplan"]
        question = [
            "--graph",
            GRAPH,
            "--model",
            "sage",
            "--layers",
            str(LAYERS),
            "--hidden",
            str(HIDDEN),
            "--ranks",
            str(ranks),
        ]
        subprocess.run(
            [*gnnplan, "plan", *question, "--strategy", strategy, "-o", plan],
            check=True,
            capture_output=True,
        )
        command = [
            *gnnplan,
            "run",
            plan,
            "--epochs",
            str(epochs),
            "--eval-every",
            "0",
            "--out",
            out,
            "--json",
        ]
        done = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    result = json.loads(done.stdout)
    return {
        "epoch_s": result["epoch_s"],
        "rss_mb": max(result["peak_rss_bytes"]) / 1e6,
        "loss": result["loss"],
    }


OURS = (
    ("graph_parallel(narrow=True)", 1),
    ("graph_parallel(narrow=True)", 2),
    ("graph_parallel", 2),
    ("pipegcn", 2),
    ("gnnpipe", 2),
)


def main() -> None:
    words(__doc__)
    if sys.argv[1:2] == ["dgl-child"]:
        warnings.filterwarnings("ignore", module="dgl")
        print(json.dumps(dgl_child(int(sys.argv[2]), int(sys.argv[3]))))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    seconds: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    for i in range(rounds):
        for name, once in [
            *((f"DGL, one process, {t} thread(s)", partial(floor, t)) for t in (1, 2)),
            *(
                (f"{strategy}, {ranks} rank(s)", partial(ours, strategy, ranks))
                for strategy, ranks in OURS
            ),
        ]:
            print(f"round {i + 1}/{rounds}: {name}", file=sys.stderr)
            result = once()
            seconds.setdefault(name, []).append(result["epoch_s"])
            memory[name] = max(memory.get(name, 0.0), result["rss_mb"])
    floors = seconds["DGL, one process, 1 thread(s)"]
    print(
        f"3-layer GraphSAGE-mean {HIDDEN}, 20k vertices, 1M edges, 128 features; median epoch of"
        f" {rounds} rounds in turn"
    )
    for name, series in seconds.items():
        ratio = median(a / b for a, b in zip(series, floors, strict=True))
        print(
            f"{name:40s} {median(series):.3f} s  {ratio:.2f}x DGL on one thread  {memory[name]:.0f}"
            " MB/process"
        )


if __name__ == "__main__":
    main()
