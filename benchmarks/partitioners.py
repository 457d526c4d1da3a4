"""Measures the partitions that partitioners find, and their time and memory.

    python benchmarks/partitioners.py FOLDER --edges 1e6,1e7 --parts 2,8,64 --by metis,kaminpar
    python benchmarks/partitioners.py FOLDER --graphs ogbn_arxiv.npz,flickr.npz

The first form generates R-MAT graphs (a, b, c = 0.57, 0.19, 0.19; 20 edges per vertex) and the
generator's communities into FOLDER, once. Each partition is computed in a process of its own, and
twice for graphs of up to 20 million edges: `again` is 0 if the two differ. Halo rows and cut edges
are sums over all parts. Balances are the vertices, edges and training vertices of the largest part,
divided by the mean. Seconds are CPU seconds of all cores. Memory is the increase by partitioning.
kaminpar:2 has two threads. mtkahypar is not a partitioner of gnnplan: it takes edges as a Python
list. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import CsrEdges, Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import by_kaminpar, evenly, undirected

PER_VERTEX, TRAINED = 20, 0.1
ONCE = 20_000_000  # larger graphs are partitioned once
COLUMNS = ("halo", "cut", "vertices", "edges", "training", "seconds", "MB", "again")


def generate(folder: Path, kind: str, edges: int) -> None:
    own = f"&communities={edges // 10_000}" * (kind == "community")
    sizes = f"vertices={edges // PER_VERTEX}&edges={edges}&features=1&train={TRAINED}"
    graph = load(f"synthetic:{kind}?{sizes}{own}")
    assert isinstance(graph, Graph)
    folder.mkdir(parents=True)
    for name in ("indptr", "indices", "train"):
        np.save(folder / f"{name}.npy", getattr(graph, name))


def by_mtkahypar(indptr: NDArray, indices: NDArray, parts: int) -> NDArray[np.int32]:
    import mtkahypar

    library = mtkahypar.initialize(1)
    context = library.context_from_preset(mtkahypar.PresetType.DETERMINISTIC)
    context.set_partitioning_parameters(parts, 0.03, mtkahypar.Objective.CUT)
    into = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    once = indices < into
    edges = list(zip(indices[once].tolist(), into[once].tolist(), strict=True))
    graph = library.create_graph(context, len(indptr) - 1, len(edges), edges)
    return np.array(graph.partition(context).get_partition(), np.int32)


def resident(what: str) -> float:
    """Return the memory of this process [MB]: now ('VmRSS') or its peak ('VmHWM')."""
    status = Path("/proc/self/status").read_text()
    return float(status.partition(f"{what}:")[2].split()[0]) / 1e3


def case(path: Path, by: str, parts: int) -> dict[str, float]:
    if path.suffix:
        graph = load(str(path))
        assert isinstance(graph, Graph)
        edges, train = undirected(graph), graph.train
    else:
        edges = CsrEdges(np.load(path / "indptr.npy"), np.load(path / "indices.npy"))
        train = np.load(path / "train.npy")
    indptr, indices = edges.indptr, edges.indices
    method, _, threads = by.partition(":")

    def partition() -> NDArray[np.int32]:
        if method == "mtkahypar":
            return by_mtkahypar(indptr, indices, parts)
        if threads:
            return by_kaminpar(edges, parts, 0, threads=int(threads))
        return evenly(method, edges, parts, 0, train)

    before, start = resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak memory
    part = partition()
    seconds, added = time.process_time() - start, resident("VmHWM") - before
    into = np.repeat(part.astype(np.int16), np.diff(indptr))
    crosses = into != part[indices]
    read = [np.unique(indices[crosses & (into == reader)]).size for reader in range(parts)]

    def balance(weights: NDArray | None) -> float:
        loads = np.bincount(part, weights, parts)
        return float(loads.max() / loads.mean())

    balances = (balance(weights) for weights in (None, np.diff(indptr), train))
    again = len(indices) > ONCE or np.array_equal(part, partition())
    values = sum(read), int(crosses.sum()), *balances, seconds, added
    return dict(zip(COLUMNS, (*values, int(again)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--edges", default="")
    parser.add_argument("--graphs", default="")
    parser.add_argument("--parts", default="2,8,64")
    parser.add_argument("--by", default="metis,kaminpar")
    parser.add_argument("--case", action="store_true")
    arguments = parser.parse_args()
    parts, methods = map(int, arguments.parts.split(",")), arguments.by.split(",")
    if arguments.case:
        print(json.dumps(case(arguments.folder, methods[0], next(parts))))
        return
    graphs = [arguments.folder / name for name in arguments.graphs.split(",") if name]
    for edges in filter(None, arguments.edges.split(",")):
        for kind in ("rmat", "community"):
            graphs.append(arguments.folder / f"{kind}-{edges}")
            if not graphs[-1].exists():
                generate(graphs[-1], kind, int(float(edges)))
    print("|", " | ".join(("graph", "parts", "by", *COLUMNS)), "|\n|---" + "|--:" * 10 + "|")
    for count in parts:
        for graph in graphs:
            for method in methods:
                command = [sys.executable, __file__, str(graph), "--case", "--by", method]
                output = subprocess.run(
                    [*command, "--parts", str(count)], check=True, stdout=subprocess.PIPE
                )
                found = json.loads(output.stdout).values()
                shown = (f"{one:.3g}" if isinstance(one, float) else f"{one:,}" for one in found)
                print("|", " | ".join((graph.stem, str(count), method, *shown)), "|", flush=True)


if __name__ == "__main__":
    main()
