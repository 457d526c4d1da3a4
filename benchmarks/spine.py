"""How fast the spine is, side by side in one run on this machine: `python benchmarks/spine.py`. Prints ratios, asserts nothing.

Part A, the floor: what one process of DGL, the best exact single-process peer, needs for the same training.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import warnings
from typing import Any

GRAPH = "synthetic:community?vertices=20000&edges=1000000&features=128&classes=16&seed=0"
HIDDEN, LAYERS, LR = 256, 3, 0.01


def floor(threads: int, epochs: int = 12) -> dict[str, Any]:
    """DGL full batch, 3-layer GraphSAGE-mean 256, Adam, in a process of its own: {'epoch_s': median [s], 'min_s', 'losses', 'rss_mb'}."""
    count = str(threads)
    env = {**os.environ, "OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "DGLBACKEND": "pytorch"}
    command = [sys.executable, __file__, "dgl-child", count, str(epochs)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def dgl_child(threads: int, epochs: int) -> dict[str, Any]:
    """The process of `floor`: DGL as its documentation has it (SAGEConv, loss on the training vertices, torch's Adam)."""
    import resource
    import statistics

    import torch
    from torch.nn import functional as F

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dgl
        from dgl.nn import SAGEConv

    from gnnplan.planner.graph import load

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    data = load(GRAPH)
    graph = dgl.graph(("csc", (torch.tensor(data.indptr), torch.tensor(data.indices).long(), [])), num_nodes=data.stats.vertices)
    graph.create_formats_()  # CSR and CSC before the clock starts
    x, y, train = torch.tensor(data.x), torch.tensor(data.y), torch.tensor(data.train).nonzero().squeeze(1)
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
    return {"threads": threads, "epoch_s": statistics.median(seconds[2:]), "min_s": min(seconds[2:]), "losses": losses, "rss_mb": rss}


def main() -> None:
    if sys.argv[1:2] == ["dgl-child"]:
        warnings.filterwarnings("ignore", module="dgl")
        print(json.dumps(dgl_child(int(sys.argv[2]), int(sys.argv[3]))))
        return
    for threads in (1, 2):
        result = floor(threads)
        print(f"DGL, one process, {threads} thread(s): {result['epoch_s']:.3f} s/epoch (fastest {result['min_s']:.3f}), "
              f"loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}, {result['rss_mb']:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
