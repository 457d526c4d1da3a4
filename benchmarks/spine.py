"""Times full-graph training with gnnplan, DGL and PyG, side by side on this machine.

    python benchmarks/spine.py [ROUNDS]

The peers are single processes: DGL with one and with two threads, DGL that aggregates the features
only once (as SAR does), and PyG. gnnplan's families train the same model on two Gloo ranks with one
thread each. All sides take turns in several rounds, because the machine's speed drifts. All start
from the same weights, and the benchmark fails if the losses of an exact family differ from the
peers'. Exact epochs are compared with their floor, measured in the same rounds (floor.py). On CPUs
with AVX-512 bfloat16 is compared with float32. Prints ratios, asserts no time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from commands import in_turn, plan, ratio, train, words
from floor import GRAPH, HIDDEN, MODEL, floor, problem_of, shown

EPOCHS = 14
AGREE = 1e-3  # largest relative difference between losses of the same training
STALE = ("pipegcn", "gnnpipe")  # read rows of earlier epochs
PEERS = (("dgl", 1), ("dgl", 2), ("dgl_once", 1), ("pyg", 1))  # library, threads


def peer(library: str, threads: int) -> dict[str, Any]:
    """Train with another library in a process of its own.

    Returns {'epoch_s': median [s], 'losses', 'rss_mb'}.
    """
    count = str(threads)
    env = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "DGLBACKEND": "pytorch"}
    command = [sys.executable, __file__, "peer", library, count]
    done = subprocess.run(
        command, env=os.environ | env, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def as_peer(library: str, threads: int) -> dict[str, Any]:
    """Run the process of `peer`."""
    import resource

    import torch
    from gpu_stages import peers

    torch.set_num_threads(threads)
    epoch = getattr(peers, library)(problem_of(1), torch.device("cpu"))

    seconds, losses = [], []
    for _ in range(EPOCHS):
        begin = time.perf_counter()
        losses.append(float(epoch()))
        seconds.append(time.perf_counter() - begin)
    return {
        "epoch_s": median(seconds[2:]),  # two to warm up
        "losses": losses,
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


def ours(strategy: str, ranks: int, dtype: str) -> dict[str, Any]:
    """Train the same model by `gnnplan run`.

    Returns {'epoch_s': median [s], 'losses', 'rss_mb': of the fullest rank}.
    """
    question = {"graph": GRAPH, **MODEL, "ranks": ranks, "dtype": dtype, "strategy": strategy}
    with tempfile.TemporaryDirectory() as folder:
        plan(f"{folder}/plan.json", **question)
        epochs = train(f"{folder}/plan.json", f"{folder}/run", epochs=EPOCHS)
        left = [json.loads(path.read_text()) for path in Path(folder, "run").glob("rank*.json")]
    return {
        "epoch_s": median(epoch["epoch_s"] for epoch in epochs[2:]),
        "rss_mb": max(rank["peak_rss_bytes"] for rank in left) / 1e6,
        "losses": [epoch["loss"] for epoch in epochs],
    }


OURS = (
    ("graph_parallel(narrow=True)", 1, "float32"),
    ("graph_parallel(narrow=True)", 2, "float32"),
    ("graph_parallel", 2, "float32"),
    ("pipegcn", 2, "float32"),
    ("gnnpipe", 2, "float32"),
)
ROUNDED = (
    ("graph_parallel(narrow=True)", 1, "bfloat16"),
    ("graph_parallel(narrow=True)", 2, "bfloat16"),
)


def main() -> None:
    words(__doc__)
    if sys.argv[1:2] == ["peer"]:
        warnings.simplefilter("ignore")  # warnings of the libraries
        print(json.dumps(as_peer(sys.argv[2], int(sys.argv[3]))))
        return
    import torch

    from gnnplan.executor.layers.kernels import code_of

    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    mine = {
        f"{strategy}, {ranks} rank(s), {dtype}": (strategy, ranks, dtype)
        for strategy, ranks, dtype in OURS + ROUNDED * (code_of(torch.bfloat16) > 0)
    }
    exact = [
        name
        for name, (strategy, _, dtype) in mine.items()
        if dtype == "float32" and not strategy.startswith(STALE)
    ]
    runs = {
        f"{library}, {threads} thread(s)": partial(peer, library, threads)
        for library, threads in PEERS
    }
    for name, each in mine.items():
        runs[name] = partial(ours, *each)
        if name in exact:
            runs[f"{name}, floor"] = partial(floor, *each[:2])
    results = in_turn(runs, rounds)
    floors = {name: results.pop(f"{name}, floor") for name in exact}
    seconds = {name: [each["epoch_s"] for each in of] for name, of in results.items()}
    losses = {name: of[-1]["losses"] for name, of in results.items()}
    first, *others = results
    print(
        f"3-layer GraphSAGE-mean {HIDDEN}, 20k vertices, 1M edges, 128 features; median epoch of"
        f" {rounds} rounds in turn"
    )
    for name, series in seconds.items():
        print(
            f"{name:50s} {median(series):.3f} s  {ratio(series, seconds[first]):.2f}x {first}"
            f"  {max(each['rss_mb'] for each in results[name]):.0f} MB/process"
        )
    for name, (strategy, ranks, dtype) in mine.items():
        if dtype != "float32":
            plain = f"{strategy}, {ranks} rank(s), float32"
            by = ", ".join(
                f"{ratio(seconds[name], seconds[other]):.2f}x {other}"
                for other in (plain, "dgl_once, 1 thread(s)")
            )
            print(f"{name:50s} {by}")
    for name, found in floors.items():
        sums = [sum(each.values()) for each in found]
        over = ratio(seconds[name], sums)
        least = {part: median(each[part] for each in found) for part in found[0]}
        print(f"{name:50s} {over:.2f}x its floor, {shown(least)}")
    for name in others:
        apart = max(abs(a / b - 1) for a, b in zip(losses[name], losses[first], strict=True))
        print(f"{name}: losses of {EPOCHS} epochs within {apart:.1e} of {first}'s")
        if apart > AGREE and (name in exact or name not in mine):
            raise SystemExit("that is not the same training")


if __name__ == "__main__":
    main()
