"""What data parallelism computes twice, and what splitting functions cost, by counting sampled batches (no training):

    python benchmarks/minibatch.py redundancy [GRAPH ...]     edges computed and features loaded, as GSplit's Table 1
    python benchmarks/minibatch.py splitters [SHARE] [GRAPH ...]   cross edges and imbalance by layer, as GSplit's Fig. 5
    python benchmarks/minibatch.py sampler                    edges per second beside DGL's, one thread

Graphs are names of .npz files in $GNNPLAN_DATASETS. Four ranks, fanouts 15,15,15; one epoch, or its first 20 batches.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from gnnplan.planner.graph import Graph, load
from gnnplan.planner.minibatch import MiniBatch
from gnnplan.planner.sampling import draw, frontier, key_of, seeds_of
from gnnplan.planner.splitting import SPLITTERS, presample, split

DATASETS = Path(os.environ.get("GNNPLAN_DATASETS", Path(__file__).resolve().parents[2] / "shared" / "datasets"))
RANKS, FANOUTS, MOST = 4, (15, 15, 15), 20
LAYERS = range(1, len(FANOUTS) + 1)


def graph_of(name: str) -> Graph:
    graph = load(str(DATASETS / f"{name}.npz"))
    assert isinstance(graph, Graph)
    return graph


def redundancy(names: list[str]) -> None:
    print(f"{RANKS} ranks, batch 1024, fanout 15, 3 layers; per epoch\n")
    print("| graph | edges: micro | mini | ratio | features: micro | mini | ratio |\n|---|--:|--:|--:|--:|--:|--:|")
    for name in names:
        graph, edges, rows = graph_of(name), np.zeros(2), np.zeros(2)
        for number, seeds in enumerate(seeds_of(graph, 1024, 0, 0)):
            for i, shares in enumerate((np.array_split(seeds, RANKS), [seeds])):  # micro-batches, one per rank; one mini-batch
                found = [frontier(graph, share, FANOUTS, 0, 0, number) for share in shares if share.size]
                edges[i] += sum(places.size for one in found for _, places in one.edges)
                rows[i] += sum(one.nodes[0].size for one in found)
        print(f"| {name} | {edges[0]:,.0f} | {edges[1]:,.0f} | {edges[0] / edges[1]:.2f} | {rows[0]:,.0f} | {rows[1]:,.0f} | "
              f"{rows[0] / rows[1]:.2f} |", flush=True)  # fmt: skip


def splitters(share: float, names: list[str]) -> None:
    """With a share of the vertices to train on (batches of 128), or with the graph's own (share 0, batches of 1024)."""
    batch = 128 if share else 1024
    print(f"{RANKS} ranks, batch {batch}, fanout 15, training vertices: {f'{share:.0%} of all' if share else 'the published split'}\n")
    print("| graph | splitter | cross edges, layer 3 | 2 | 1 | in all | most edges over mean, layer 3 | 2 | 1 | in all |")
    print("|---|---|" + "--:|" * 8)
    for name in names:
        graph = graph_of(name)
        if share:
            train = np.zeros(graph.stats.vertices, dtype=bool)
            train[np.random.default_rng(0).permutation(train.size)[: round(share * train.size)]] = True
            graph = replace(graph, train=train)
        frequency = presample(graph, batch, FANOUTS, 0)
        batches = [frontier(graph, seeds, FANOUTS, 0, 0, i) for i, seeds in enumerate(seeds_of(graph, batch, 0, 0)[:MOST])]
        for splitter in SPLITTERS:
            owner = split(graph, RANKS, splitter, 0, frequency)
            made = [MiniBatch(graph, [found], (0,) * RANKS, owner, first_varying=1) for found in batches]
            edges = np.array([[one.facts(layer).edges for layer in LAYERS] for one in made], dtype=float)  # [batches, L, ranks]
            cross = np.array([[one.crossing(layer) for layer in LAYERS] for one in made]).sum((0, 2)) / edges.sum((0, 2))
            both = np.concatenate([edges, edges.sum(1, keepdims=True)], axis=1)
            worst = (both.max(2) / both.mean(2)).mean(0)
            every = float(cross @ edges.sum((0, 2)) / edges.sum())
            cells = [*(f"{c:.1%}" for c in (*cross[::-1], every)), *(f"{w:.2f}" for w in (*worst[2::-1], worst[3]))]
            print(f"| {name} | {splitter} | {' | '.join(cells)} |", flush=True)


def sampler() -> None:
    """Median of rounds in turn."""
    import dgl
    import torch

    torch.set_num_threads(1)
    graph = load("synthetic:community?vertices=20000&edges=1000000&features=8&classes=16&seed=0")
    assert isinstance(graph, Graph)
    source, target = graph.indices.astype(np.int64), np.repeat(np.arange(graph.stats.vertices), graph.degree)
    theirs = dgl.graph((torch.from_numpy(source), torch.from_numpy(target)), num_nodes=graph.stats.vertices).formats("csc")
    vertices = np.random.default_rng(0).permutation(graph.stats.vertices)
    for fanout in (5, 10, 15):
        seconds: dict[str, list[float]] = {"ours": [], "DGL": []}
        for turn in range(9):
            start = time.perf_counter()
            edges = draw(graph, vertices, fanout, key_of(0, 0, turn, 1))[1].size
            middle = time.perf_counter()
            theirs.sample_neighbors(torch.from_numpy(vertices), fanout)
            seconds["ours"].append(middle - start)
            seconds["DGL"].append(time.perf_counter() - middle)
        rate = {name: edges / float(np.median(times)) / 1e6 for name, times in seconds.items()}
        print(f"fanout {fanout:2d}: ours {rate['ours']:6.1f} M edges/s, DGL {rate['DGL']:6.1f}; {rate['ours'] / rate['DGL']:.2f}x")


if __name__ == "__main__":
    verb, rest = sys.argv[1], sys.argv[2:]
    if verb == "redundancy":
        redundancy(rest or ["flickr", "ogbn_arxiv", "amazon_photo"])
    elif verb == "splitters":
        splitters(float(rest[0]) if rest else 0.01, rest[1:] or ["flickr", "ogbn_arxiv"])
    else:
        sampler()
