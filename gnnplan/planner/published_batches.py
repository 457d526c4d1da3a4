"""Printed figures of mini-batch systems (P3, GSplit): what their papers count and time, in our words.

    P3 Table 4       dag      sampling, and in DGL the features that come over the network        copy     onto the GPU
                     compute  all else: forward, backward, update, and what its pipeline leaves to wait for
    GSplit Table 3   sample   sampling, splitting, laying out      load     input features       forward_backward   all else, exchanges
                              of rows included
    GSplit Table 1   what micro-batches (one per GPU) and the mini-batch (split) of an epoch compute and load

DistDGL and P3 count a batch by trainer: P3's 1000 are each GPU's, so that a step has 16,000 (its compute times leave under a millisecond
per step otherwise). GSplit's 1024 are those of all GPUs, as its Table 1 says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnplan.planner.expected import EstimatedBatch, expected_frontier
from gnnplan.planner.formulas import p3_bytes
from gnnplan.planner.job import Job
from gnnplan.planner.specs import Cluster, Link
from gnnplan.planner.strategies import Strategy, named
from gnnplan.planner.strategies.gsplit import GSplit
from gnnplan.planner.strategies.p3 import P3

if TYPE_CHECKING:
    from gnnplan.planner.published import Question

PARTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("p3", "dag_time_s"): ("draw", "read", "ask_edges", "edges", "lay", "ask", "fetch"),
    ("p3", "copy_time_s"): ("load",),
    ("gsplit", "sample_time_s"): ("draw", "read", "ids", "ask_edges", "edges", "lay", "push"),
    ("gsplit", "load_time_s"): ("load", "pick", "ask", "fetch"),
}
LIST_ENTRY = 8  # [B] of a neighbour in DGL's adjacency lists (64 bits unless it is told otherwise); GSplit spreads them over GPUs
REST = {"compute_time_s": "p3", "forward_backward_time_s": "gsplit"}
SAMPLED = ("edges_computed", "features_loaded", "frontier_vertices")  # of batches, on whatever machine
Row = Mapping[str, str]


def by_trainer(row: Row) -> bool:
    """Whether the batch that a row states is each trainer's."""
    return row["paper"] == "p3"


def strategy(name: str, params: Mapping[str, Any], job: Job) -> Strategy:
    """The system of that name, with caches in the memory that training leaves, as GSplit Sec. 6.1 sets them."""
    several = job.cluster.servers > 1
    half = int(job.cluster.device.memory) // 2
    if name == "dgl_data_parallel":  # on several servers DistDGL's, whose features and structure are hash-partitioned
        return named("data_parallel", {"features": "spread", "structure": "spread"} if several else {})
    if name == "quiver":
        return named("data_parallel", {"cache": half, "shared_cache": True})
    if name == "p3star":
        return named("p3", {"over": "rank"})
    if name.startswith("p3"):
        servers, lists = job.cluster.servers, int(params.get("graph_copies", 1))
        knobs: dict[str, Any] = {"pipelined": name == "p3_push_pull", "copies": int(params.get("feature_copies", 1))}
        if lists < servers:
            everything = 4 * job.stats.edges + 8 * job.stats.vertices
            return named("p3", {**knobs, "structure": "spread", "structure_cache": everything * (lists - 1) // servers})
        return named("p3", knobs)
    splitter = {"gsplit": "gsplit", "gsplit_rand": "random"}.get(name, name.removeprefix("gsplit_"))
    each = job.model.features * job.model.itemsize * job.stats.vertices // job.ranks + 1
    lists = LIST_ENTRY * job.stats.edges // job.ranks
    most = int(min(0.6 * job.cluster.device.memory, job.cluster.device.memory - lists))
    return named("gsplit", {"splitter": splitter, "cache": max(0, min(most, each)), "structure": "spread"})


def on_device(name: str, job: Job, cluster: Cluster) -> Cluster:
    """P3* keeps its columns on the GPU where all of them fit ('only for the Orkut graph'): loads are then reads of its memory."""
    columns = job.model.features * job.model.itemsize * job.stats.vertices / job.ranks
    if name != "p3star" or columns > cluster.device.memory / 2:
        return cluster
    return cluster.model_copy(update={"host": Link(bandwidth=cluster.device.memory_bandwidth / 2, latency=0.0)})


def part(what: str, asked: Question) -> float:
    """Seconds per epoch of what a paper calls so."""
    told, paper, chosen = asked.prediction, asked.row["paper"], asked.strategy
    laid = len(chosen.rail(asked.job, 0)) if paper == "p3" and isinstance(chosen, P3) else 1  # its sampling lays out the own block only

    def seconds(name: str) -> float:
        took = sum(float(np.max(s)) / (laid if kind == "lay" else 1)
                   for kind, s in told.by_op.items() if kind.partition(":")[0] in PARTS[paper, name])  # fmt: skip
        return took + (staged(asked) if name == "copy_time_s" else 0.0) - (in_place(asked) if name == "load_time_s" else 0.0)

    if what in REST:
        return epoch(asked) - sum(seconds(name) for of, name in PARTS if of == paper)
    return seconds(what)


def epoch(asked: Question) -> float:
    """Seconds per epoch, with what their systems do and ours do not, and without what ours alone do."""
    return float(asked.prediction.epoch_s) + staged(asked) - in_place(asked)


def in_place(asked: Question) -> float:
    """Seconds per epoch in which we copy rows that a GPU's cache holds to where a batch expects them. GSplit 'can skip loading an input
    feature if it is already cached locally' (Sec. 3): layer 1 reads it where it is."""
    if asked.row["paper"] != "gsplit" or not isinstance(asked.strategy, GSplit):
        return 0.0
    return float(np.max(asked.prediction.by_op.get("pick", 0.0)))


def staged(asked: Question) -> float:
    """Seconds per epoch of what P3's testbed copies between GPUs and their servers' memory, through which its KVStore sends: features that
    have come, and partial sums and their gradients, on their way out and in."""
    if asked.row["paper"] != "p3" or asked.job.workload.mode != "mini":
        return 0.0
    moved = asked.prediction.bytes.get("fetch", 0) + 2 * asked.prediction.bytes.get("pull", 0)
    link = asked.job.cluster.host or asked.job.cluster.intra_node
    return moved / asked.job.ranks / link.bandwidth


def sampled(what: str, asked: Question) -> float:
    """Of an epoch; frontier_vertices of one batch, so many hops from its seeds."""
    job, params = asked.job, json.loads(asked.row["strategy_params"] or "{}")
    if what == "frontier_vertices":
        need = expected_frontier(job.stats, int(params["batch"]), job.workload.fanouts)
        return need.rows[job.workload.layers - int(params.get("hop", job.workload.layers))]
    groups = (0,) * job.ranks if isinstance(asked.strategy, GSplit) else tuple(range(job.ranks))
    batch, times = job.minibatches(groups).at(0), job.stats.train_vertices / job.workload.batch
    if what == "features_loaded":
        return times * sum(batch.rows(rank, 0).size for rank in range(job.ranks))
    return times * sum(int(batch.facts(layer).edges.sum()) for layer in range(1, job.workload.layers + 1))


def crossing(asked: Question) -> float:
    """The share of a batch's edges that lead to another rank of those that split it."""
    batch = asked.job.minibatches((0,) * asked.job.ranks, str(asked.strategy.knobs()["splitter"])).at(0)
    assert isinstance(batch, EstimatedBatch)
    return batch.cross


def volume(asked: Question) -> float:
    """Bytes per mini-batch; P3's example is one trainer's batch, all its features or its partial sums of the forward pass."""
    job = asked.job
    if not asked.row["gpus_per_node"]:
        need = expected_frontier(job.stats, job.workload.batch // job.ranks, job.workload.fanouts)
        if isinstance(asked.strategy, P3):
            return float(p3_bytes(job.ranks, need.rows[1], job.model.layers[0].h_out, job.model.itemsize, ways=1))
        return need.rows[0] * job.model.features * job.model.itemsize
    return asked.prediction.bytes_total / asked.strategy.steps(job)
