"""Times the closed forms (candidates per second of one core) and the growth of GraNNDis' regions.

    python benchmarks/planner.py

A candidate is a strategy with its knobs on a cluster. Numbers of clusters are arrays over which
predict() broadcasts. Every round has new clusters, so that no prediction is cached: the time of a
round includes all programs and prices. The graph is partitioned once.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import resource
import time
from dataclasses import replace

import numpy as np
from commands import words

from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.layout import FAR, Expansion, distances, expand
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse

KNOBS = {
    "graph_parallel": ["graph_parallel", "graph_parallel(narrow=True)"],
    "pipegcn": ["pipegcn"],
    "gnnpipe": [f"gnnpipe(chunks={chunks})" for chunks in (8, 16, 32, 64)],
    "granndis": [*(f"granndis(depth={depth})" for depth in (1, 2, 3)), "granndis"],
}
CLUSTERS = 1_000  # at a time, so that the arrays of a prediction stay in the processor's cache


def question(layers: int) -> Problem:
    """Return the problem of the default synthetic graph on two servers of four GPUs."""
    graph = load("synthetic:community")
    assert isinstance(graph, Graph)
    device = Device(memory=24e9, gemm=1e13, memory_bandwidth=5e11)
    link = Link(bandwidth=1e10)
    where = Cluster(servers=2, gpus_per_server=4, device=device, intra_node=link, inter_node=link)
    return Problem(graph.stats, graph, Workload(model="sage", layers=layers, hidden=256), where)


def over(problem: Problem, count: int, seed: int = 0) -> Problem:
    """Return the problem on `count` clusters at once.

    The clusters' numbers are columns [count, 1]; model_copy does not validate them.
    """
    rng = np.random.default_rng(seed)

    def column(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), (count, 1)))

    def link() -> Link:
        numbers = {"bandwidth": column(1e8, 1e11), "latency": column(1e-6, 1e-3)}
        return problem.cluster.intra_node.model_copy(update=numbers)

    numbers = {"gemm": column(1e12, 1e14), "memory_bandwidth": column(1e11, 2e12)}
    device = problem.cluster.device.model_copy(update=numbers)
    parts = {"device": device, "intra_node": link(), "inter_node": link()}
    return replace(problem, cluster=problem.cluster.model_copy(update=parts))


def rate(strategies: list[Strategy], problem: Problem, seconds: float = 1.0) -> tuple[float, float]:
    """Return the best and the median number of candidates per second over several rounds."""
    for strategy in strategies:
        strategy.program(problem)  # partitions the graph and counts rows, for all clusters alike
    rates, end = list[float](), time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        fresh = over(problem, CLUSTERS, seed=len(rates))
        start = time.process_time()
        for strategy in strategies:
            assert strategy.predict(fresh).epoch_s.shape == (CLUSTERS, 1)
        rates.append(len(strategies) * CLUSTERS / (time.process_time() - start))
    return max(rates), float(np.median(rates))


def growth(servers: int = 4, hops: int = 3) -> None:
    """Print time and size of the servers' regions, with and without expansion-aware sampling."""
    graph = load("synthetic:rmat?vertices=1000000&edges=20000000&features=1&classes=2")
    assert isinstance(graph, Graph)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    server_of = np.random.default_rng(1).permutation(graph.stats.vertices) % servers
    for name, expansion in (("full depth", None), ("max_hop 1, fanout 15", Expansion(1, 15, 0))):
        start, rows = time.perf_counter(), []
        for server in range(servers):
            allowed = expand(graph, server_of == server, expansion, server) if expansion else None
            rows.append(int((distances(graph, server_of == server, hops, allowed) < FAR).sum()))
        seconds = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(
            f"{graph.stats.vertices:,} vertices, {graph.stats.edges:,} edges, {servers} servers,"
            f" {hops} hops, {name}: {seconds:.1f} s, growth"
            f" {np.mean(rows) * servers / graph.stats.vertices:.2f}, peak memory {peak / 2**20:.2f}"
            f" GiB (making the graph: {before / 2**20:.2f})"
        )


def main() -> None:
    growth()
    for layers in (3, 8, 32):
        problem = question(layers)
        for family, texts in KNOBS.items():
            settled = [parse(text).settle(problem) for text in texts]
            suitable = [s for s in settled if family != "gnnpipe" or layers >= problem.ranks]
            if suitable:
                best, median = rate(suitable, problem)
                print(
                    f"{family:>14}, {layers} layers: best {best:9,.0f}, median {median:9,.0f}"
                    " candidates/s"
                )


if __name__ == "__main__":
    words(__doc__)
    main()
