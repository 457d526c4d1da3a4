"""Candidates per second of the closed forms on one core: `python benchmarks/planner.py`.

A candidate is a set of knobs on a cluster. Clusters come as arrays: predict() broadcasts over them. The graph is profiled once.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import time
from dataclasses import replace

import numpy as np

from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import Job
from gnnplan.planner.specs import Cluster, Device, Link, Workload
from gnnplan.planner.strategies import Strategy, parse

KNOBS = {
    "graph_parallel": ["graph_parallel", "graph_parallel(narrow=True)"],
    "pipegcn": ["pipegcn"],
    "gnnpipe": ["gnnpipe(chunks=8)", "gnnpipe(chunks=16)", "gnnpipe(chunks=32)", "gnnpipe(chunks=64)"],
    "granndis": ["granndis(depth=1)", "granndis(depth=2)", "granndis(depth=3)", "granndis"],
}
CLUSTERS = 1_000  # at a time: what a prediction works on stays in the cache


def question(layers: int) -> Job:
    """The default synthetic graph on two servers of four GPUs."""
    graph = load("synthetic:community")
    assert isinstance(graph, Graph)
    device = Device(memory=24e9, gemm=1e13, memory_bandwidth=5e11)
    link = Link(bandwidth=1e10)
    where = Cluster(servers=2, gpus_per_server=4, device=device, intra_node=link, inter_node=link)
    return Job(graph.stats, graph, Workload(model="sage", layers=layers, hidden=256), where)


def over(job: Job, count: int) -> Job:
    """The question on `count` clusters at once; model_copy does not validate, so numbers may be columns [count, 1]."""
    rng = np.random.default_rng(0)

    def column(low: float, high: float) -> np.ndarray:
        return np.exp(rng.uniform(np.log(low), np.log(high), (count, 1)))

    def link() -> Link:
        return job.cluster.intra_node.model_copy(update={"bandwidth": column(1e8, 1e11), "latency": column(1e-6, 1e-3)})

    device = job.cluster.device.model_copy(update={"gemm": column(1e12, 1e14), "memory_bandwidth": column(1e11, 2e12)})
    return replace(job, cluster=job.cluster.model_copy(update={"device": device, "intra_node": link(), "inter_node": link()}))


def rate(strategies: list[Strategy], job: Job, seconds: float = 1.0) -> tuple[float, float]:
    """Best and median candidates per second of rounds over all strategies."""
    for strategy in strategies:
        strategy.predict(job)  # partitions and counts of the graph are made once
    rates, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        for strategy in strategies:
            assert strategy.predict(job).epoch_s.shape == (CLUSTERS, 1)
        rates.append(len(strategies) * CLUSTERS / (time.perf_counter() - start))
    return max(rates), float(np.median(rates))


def main() -> None:
    for layers in (3, 8, 32):
        job = question(layers)
        many = over(job, CLUSTERS)
        for family, texts in KNOBS.items():
            settled = [parse(text).settle(job) for text in texts]
            suitable = [s for s in settled if family != "gnnpipe" or layers >= job.ranks]
            if suitable:
                best, median = rate(suitable, many)
                print(f"{family:>14}, {layers} layers: best {best:9,.0f}, median {median:9,.0f} candidates/s")


if __name__ == "__main__":
    main()
