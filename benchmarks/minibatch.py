"""Counts the work of mini-batch strategies, and measures their speed.

    python benchmarks/minibatch.py VERB ...

    redundancy [GRAPH ...]           edges computed and features loaded, as in GSplit's Table 1
    splitters [SHARE] [GRAPH ...]    cross edges and imbalance by layer, as in GSplit's Fig. 5
    balance [SHARE] [GRAPH ...]      the same over all layers, for several imbalances of gsplit
    sampler                          edges per second on one thread, compared with DGL's
    ddp [ROUNDS]                     epochs on two ranks, in turn with DGL's data-parallel loop
    split [ROUNDS] [GRAPH ...]       gsplit in turn with data_parallel, also on these graphs

Graphs are names of .npz files in $GNNPLAN_DATASETS. `redundancy`, `splitters` and `balance` have
four ranks and fanouts 15,15,15, for an epoch or its first 20 batches. `ddp` and `split` train the
GraphSAGE of spine.py on its graph: 2048 seeds per step on two Gloo ranks with one thread each; 5,
10 and 15 neighbours from the seeds outwards. Both print ratios and assert nothing.
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
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median

import numpy as np
from commands import DATASETS, header, in_turn, line, plan, ratio, train, words
from floor import GRAPH, HIDDEN, LAYERS, LR, MODEL

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import SPLITTERS, Frequency, presample, split
from gnnplan.planner.graph.sampling import Frontier, draw, frontier, items_of, key_of
from gnnplan.planner.ownership.minibatch import MiniBatch

RANKS, FANOUTS, MOST = 4, (15, 15, 15), 20
IMBALANCES = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0)  # for `balance`
BATCH, OUTWARDS = 2048, (5, 10, 15)  # for `ddp`: batch size, fanouts from the seeds outwards
EPOCHS, WARM = 8, 2  # epochs that each side trains; first ones, which are not counted


def graph_of(name: str) -> Graph:
    graph = load(str(DATASETS / f"{name}.npz"))
    assert isinstance(graph, Graph)
    return graph


def in_batches_of(size: int) -> Workload:
    return Workload(mode="mini", layers=len(FANOUTS), batch=size, fanout=FANOUTS)


def redundancy(names: list[str]) -> None:
    print(f"{RANKS} ranks, batch 1024, fanout 15, 3 layers; per epoch\n")
    columns = ("edges: micro", "mini", "ratio", "features: micro", "mini", "ratio")
    print(header("graph", *columns))
    for name in names:
        graph, edges, rows = graph_of(name), np.zeros(2), np.zeros(2)
        for number, seeds in enumerate(items_of(graph, in_batches_of(1024), 0)):
            # i = 0: micro-batches, one per rank; i = 1: one mini-batch
            for i, shares in enumerate((np.array_split(seeds, RANKS), [seeds])):
                found = [
                    frontier(graph, share, FANOUTS, 0, 0, number) for share in shares if share.size
                ]
                edges[i] += sum(places.size for one in found for _, places in one.edges)
                rows[i] += sum(one.nodes[0].size for one in found)
        cells = (
            cell
            for of in (edges, rows)
            for cell in (f"{of[0]:,.0f}", f"{of[1]:,.0f}", f"{of[0] / of[1]:.2f}")
        )
        print(line(name, *cells), flush=True)


def _setting(share: float) -> tuple[int, str]:
    """Return the batch size, and a table's description of the training vertices.

    share: of the vertices that train, in batches of 128; 0: the published split, in batches of
    1024.
    """
    return (128, f"{share:.0%} of all") if share else (1024, "the published split")


def _sampled(name: str, share: float) -> tuple[Graph, Frequency, list[Frontier]]:
    """Return the graph with its training vertices, its access frequencies, and first batches."""
    graph, (batch, _) = graph_of(name), _setting(share)
    if share:
        train = np.zeros(graph.stats.vertices, dtype=bool)
        train[np.random.default_rng(0).permutation(train.size)[: round(share * train.size)]] = True
        graph = replace(graph, train=train)
    workload = in_batches_of(batch)
    batches = [
        frontier(graph, seeds, FANOUTS, 0, 0, i)
        for i, seeds in enumerate(items_of(graph, workload, 0)[:MOST])
    ]
    return graph, presample(graph, workload), batches


def _shared(
    graph: Graph, batches: list[Frontier], owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return edges [batches, L, ranks], cross edges [L], and the number of rows sent."""
    layers = range(1, len(FANOUTS) + 1)
    mini_batches = [MiniBatch(graph, [found], (0,) * RANKS, owner) for found in batches]
    edges = [[one.facts(layer).edges for layer in layers] for one in mini_batches]
    crossing = np.array([[one.crossing(layer) for layer in layers] for one in mini_batches])
    rows = sum(int(one.facts(layer).sends.sum()) for one in mini_batches for layer in layers)
    return np.array(edges, dtype=float), crossing.sum((0, 2)), rows


def splitters(share: float, names: list[str]) -> None:
    """Print cross edges and imbalance of every splitting function."""
    batch, trained = _setting(share)
    print(f"{RANKS} ranks, batch {batch}, fanout 15, training vertices: {trained}\n")
    columns = [f"{what}, layer 3" for what in ("cross edges", "most edges over mean")]
    columns = [cell for column in columns for cell in (column, "2", "1", "in all")]
    print(header("graph", "splitter", *columns, left=2))
    for name in names:
        graph, frequency, batches = _sampled(name, share)
        for splitter in SPLITTERS:
            owner = split(graph, RANKS, splitter, 0, frequency)
            edges, crossing, _ = _shared(graph, batches, owner)
            cross = crossing / edges.sum((0, 2))
            both = np.concatenate([edges, edges.sum(1, keepdims=True)], axis=1)
            worst = (both.max(2) / both.mean(2)).mean(0)
            cells = [
                *(f"{c:.1%}" for c in (*cross[::-1], crossing.sum() / edges.sum())),
                *(f"{w:.2f}" for w in (*worst[2::-1], worst[3])),
            ]
            print(line(name, splitter, *cells), flush=True)


def balance(share: float, names: list[str]) -> None:
    """Print cross edges and loads of gsplit's owners, by the imbalance that METIS may use.

    Loads are divided by the mean: that of the fullest owner as pre-sampling expects it, and the
    edges of the fullest rank in a batch.
    """
    batch, trained = _setting(share)
    print(f"{RANKS} ranks, batch {batch}, fanout 15, training vertices: {trained}\n")
    columns = ("expected load over mean", "most edges", "cross edges", "rows sent")
    print(header("graph", "imbalance", *columns))
    for name in names:
        graph, frequency, batches = _sampled(name, share)
        for imbalance in IMBALANCES:
            owner = split(graph, RANKS, "gsplit", 0, frequency, imbalance)
            edges, crossing, rows = _shared(graph, batches, owner)
            load, of_ranks = np.bincount(owner, frequency.vertices, RANKS), edges.sum(1)
            most = f"{(of_ranks.max(1) / of_ranks.mean(1)).mean():.3f}"
            cross = f"{crossing.sum() / edges.sum():.1%}"
            over = f"{load.max() / load.mean():.3f}"
            print(line(name, f"{imbalance:g}", over, most, cross, f"{rows:,}"), flush=True)


def sampler() -> None:
    """Print the edges per second of gnnplan's and DGL's samplers, as medians of rounds in turn."""
    import dgl
    import torch

    torch.set_num_threads(1)
    graph = load("synthetic:community?vertices=20000&edges=1000000&features=8&classes=16&seed=0")
    assert isinstance(graph, Graph)
    targets = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    ends = torch.from_numpy(graph.indices.astype(np.int64)), torch.from_numpy(targets)
    theirs = dgl.graph(ends, num_nodes=graph.stats.vertices).formats("csc")
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
        print(
            f"fanout {fanout:2d}: ours {rate['ours']:6.1f} M edges/s, DGL {rate['DGL']:6.1f};"
            f" {rate['ours'] / rate['DGL']:.2f}x"
        )


def dgl_child() -> None:
    """Run one process of DGL's data-parallel loop, as in DGL's documentation.

    Rank 0 prints the seconds of the epochs.
    """
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.nn.parallel import DistributedDataParallel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import dgl
        from dgl.dataloading import DataLoader, NeighborSampler
        from dgl.nn import SAGEConv

    warnings.filterwarnings("ignore", module="dgl")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    data = load(GRAPH)
    assert isinstance(data, Graph)
    graph = dgl.graph(
        ("csc", (torch.tensor(data.indptr), torch.tensor(data.indices).long(), [])),
        num_nodes=data.stats.vertices,
    )
    graph.ndata["x"], graph.ndata["y"] = torch.tensor(data.x), torch.tensor(data.y)
    seeds = torch.tensor(data.train).nonzero().squeeze(1)
    # DGL's fanouts begin at the features
    sampler = NeighborSampler(list(OUTWARDS[::-1]))
    how = {"use_ddp": True, "shuffle": True, "drop_last": False, "num_workers": 0}
    loader = DataLoader(graph, seeds, sampler, batch_size=BATCH // ranks, **how)
    widths = [data.stats.features] + [HIDDEN] * (LAYERS - 1) + [data.stats.classes]
    layers = torch.nn.ModuleList(SAGEConv(a, b, "mean") for a, b in itertools.pairwise(widths))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, blocks: list[dgl.DGLGraph], h: torch.Tensor) -> torch.Tensor:
            for layer, block in zip(self.layers[:-1], blocks[:-1], strict=True):
                h = layer(block, h).relu()
            return self.layers[-1](blocks[-1], h)

    net = DistributedDataParallel(Net())
    optimizer = torch.optim.Adam(net.parameters(), lr=LR)
    seconds = []
    for _ in range(EPOCHS):
        dist.barrier()
        begin = time.perf_counter()
        for _, _, blocks in loader:  # in a new order every time
            loss = F.cross_entropy(net(blocks, blocks[0].srcdata["x"]), blocks[-1].dstdata["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def theirs(ranks: int) -> float:
    """Return the median epoch of DGL's data-parallel loop [s]."""
    run = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split()
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env = {**os.environ, **threads, "DGLBACKEND": "pytorch", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, *run, __file__, "dgl-child"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    output = next(
        line for line in done.stdout.splitlines() if line.startswith("[") and line.endswith("]")
    )
    return median(json.loads(output)[WARM:])


def ours(strategy: str, ranks: int, graph: str = GRAPH) -> float:
    """Return the median epoch of the same training by `gnnplan run` [s]."""
    batches = {"mode": "mini", "batch": BATCH, "fanout": ",".join(map(str, OUTWARDS))}
    question = {"graph": graph, **MODEL, **batches, "lr": LR, "ranks": ranks, "strategy": strategy}
    with tempfile.TemporaryDirectory() as folder:
        plan(f"{folder}/plan.json", **question)
        epochs = train(f"{folder}/plan.json", f"{folder}/run", epochs=EPOCHS)
    return median(epoch["epoch_s"] for epoch in epochs[WARM:])


def ddp(rounds: int) -> None:
    """Print median epochs of rounds in turn, and medians of the ratios within rounds."""
    sides: dict[str, Callable[[], float]] = {
        "DGL, DistributedDataParallel, 2 ranks": partial(theirs, 2)
    }
    for strategy in ("data_parallel", "data_parallel(prefetch=2)", "gsplit"):
        sides[f"{strategy}, 2 ranks"] = partial(ours, strategy, 2)
    sides["data_parallel, 1 rank"] = partial(ours, "data_parallel", 1)
    seconds = in_turn(sides, rounds)
    floor, peer = seconds["data_parallel, 1 rank"], next(iter(seconds.values()))
    print(
        f"{LAYERS}-layer GraphSAGE-mean {HIDDEN}, 20k vertices, 1M edges, batches of {BATCH};"
        f" median epoch of {rounds} rounds in turn"
    )
    for name, series in seconds.items():
        print(
            f"{name:40s} {median(series):.3f} s  {ratio(series, peer):.2f}x DGL's loop "
            f" {ratio(series, floor):.2f}x one rank"
        )


def split_against_data_parallel(rounds: int, names: list[str]) -> None:
    """Print epochs of gsplit (ranks split a batch) and data_parallel (a batch per rank).

    Both run on two ranks. Ratios are medians of ratios within rounds.
    """
    strategies = ("data_parallel", "gsplit", "gsplit(narrow=True)")
    graphs = {name: str(DATASETS / f"{name}.npz") for name in names}
    for name, graph in {"synthetic, 50 edges a vertex": GRAPH, **graphs}.items():
        seconds = in_turn({s: partial(ours, s, 2, graph) for s in strategies}, rounds)
        for strategy, series in seconds.items():
            print(
                f"{name:30s} {strategy:20s} {median(series):.3f} s "
                f" {ratio(series, seconds['data_parallel']):.2f}x data_parallel",
                flush=True,
            )


if __name__ == "__main__":
    verb, *rest = words(__doc__)
    if verb == "redundancy":
        redundancy(rest or ["flickr", "ogbn_arxiv", "amazon_photo"])
    elif verb == "splitters":
        splitters(float(rest[0]) if rest else 0.01, rest[1:] or ["flickr", "ogbn_arxiv"])
    elif verb == "balance":
        balance(float(rest[0]) if rest else 0.01, rest[1:] or ["flickr", "ogbn_arxiv"])
    elif verb == "ddp":
        ddp(int(rest[0]) if rest else 3)
    elif verb == "split":
        split_against_data_parallel(int(rest[0]) if rest else 3, rest[1:])
    elif verb == "dgl-child":
        dgl_child()
    else:
        sampler()
