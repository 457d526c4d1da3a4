"""Counts and times of the papers on mini-batches (P3, GSplit), in gnnplan's operations.

    P3 Table 4
        dag               sampling, and in DGL the features that are fetched over the network
        copy              copies to the GPU
        compute           the rest: forward, backward, update, and waiting of the pipeline
    GSplit Table 3
        sample            sampling, splitting, building blocks
        load              input features
        forward_backward  the rest, with the exchanges of rows
    GSplit Table 1        edges computed and features loaded per epoch, for micro-batches (one per
                          GPU) and for a mini-batch (split)

DistDGL and P3 state the batch of one trainer: P3's batch of 1000 is that of each of 16 GPUs, so a
step has 16,000 seeds. (With 1000 per step, its compute times would leave less than a millisecond
per step.) GSplit's batch of 1024 is that of all GPUs, as its Table 1 says.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gnnplan.papers.question import Params, Question, System, params_of
from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.ownership.estimated import EstimatedBatch, expected_frontier
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.gsplit import GSplit
from gnnplan.planner.strategies.minibatch.p3 import P3

# (paper, metric) -> the operations that the metric adds up
PARTS: dict[tuple[str, str], tuple[str, ...]] = {
    ("p3", "dag_time_s"): ("draw", "read", "ask_edges", "edges", "lay", "ask", "fetch"),
    ("p3", "copy_time_s"): ("load",),
    ("gsplit", "sample_time_s"): ("draw", "read", "ids", "ask_edges", "edges", "lay", "push"),
    ("gsplit", "load_time_s"): ("load", "pick", "ask", "fetch"),
}
# metric -> the paper in which the metric is the epoch without PARTS
REST = {"compute_time_s": "p3", "forward_backward_time_s": "gsplit"}
# metrics of batches, which do not depend on the machine
SAMPLED = ("edges_computed", "features_loaded", "frontier_vertices")


# -- systems as gnnplan's strategies ---------------------------------------------------------------


def _spread(params: Params, problem: Problem) -> dict[str, Any]:
    """Return DGL's knobs: on several servers DistDGL, which spreads features and structure."""
    several = problem.cluster.servers > 1
    return {"features": "spread", "structure": "spread"} if several else {}


def _half_cached(params: Params, problem: Problem) -> dict[str, Any]:
    return {"cache": int(problem.cluster.device.memory) // 2, "shared_cache": True}


def _p3(pipelined: bool, params: Params, problem: Problem) -> dict[str, Any]:
    servers, structure_copies = problem.cluster.servers, int(params.get("graph_copies", 1))
    knobs = {"pipelined": pipelined, "copies": int(params.get("feature_copies", 1))}
    if structure_copies >= servers:
        return knobs
    whole = 4 * problem.stats.edges + 8 * problem.stats.vertices  # bytes of the structure
    cache = whole * (structure_copies - 1) // servers
    return {**knobs, "structure": "spread", "structure_cache": cache}


def _gsplit(splitter: str, params: Params, problem: Problem) -> dict[str, Any]:
    """Return GSplit's knobs; a cache fills the memory that training leaves (GSplit Sec. 6.1)."""
    most = int(0.6 * problem.cluster.device.memory)
    cache = min(most, _features(problem) // problem.ranks + 1)
    return {"splitter": splitter, "cache": cache, "structure": "spread"}


# Systems in the file that train on mini-batches -> gnnplan's strategy and its knobs.
SYSTEMS: dict[str, System] = {
    "dgl_data_parallel": ("data_parallel", _spread),
    "quiver": ("data_parallel", _half_cached),
    "p3_push_pull": ("p3", partial(_p3, True)),
    "p3_push_pull_nopipe": ("p3", partial(_p3, False)),
    "p3star": ("p3", lambda params, problem: {"over": "rank"}),
    "gsplit": ("gsplit", partial(_gsplit, "gsplit")),
    "gsplit_edge": ("gsplit", partial(_gsplit, "edge")),
    "gsplit_node": ("gsplit", partial(_gsplit, "node")),
    "gsplit_rand": ("gsplit", partial(_gsplit, "random")),
}


def _features(problem: Problem) -> int:
    """Return the bytes of all features."""
    return problem.model.features * problem.model.itemsize * problem.stats.vertices


def as_theirs(problem: Problem, name: str) -> Problem:
    """Return the problem with P3*'s feature columns on the GPU, if the system is P3* and they fit.

    The paper says that they fit 'only for the Orkut graph'. Loads then run at the rate at which the
    GPU's memory is read and written.
    """
    device = problem.cluster.device
    if name != "p3star" or _features(problem) / problem.ranks > device.memory / 2:
        return problem
    host = Link(bandwidth=device.memory_bandwidth / 2, latency=0.0)
    return replace(problem, cluster=problem.cluster.model_copy(update={"host": host}))


# -- times -----------------------------------------------------------------------------------------


def part(metric: str, case: Question) -> float:
    """Return the seconds per epoch of the part of a step that the paper calls `metric`."""
    paper = case.row["paper"]
    if metric in REST:
        parts = [name for of, name in PARTS if of == paper]
        return epoch(case) - sum(_listed_s(name, case) for name in parts)
    return _listed_s(metric, case)


def _listed_s(metric: str, case: Question) -> float:
    """Return the seconds per epoch of the operations in PARTS."""
    paper, chosen = case.row["paper"], case.strategy
    blocks = 1  # blocks that a rank builds per batch
    if paper == "p3" and isinstance(chosen, P3):
        blocks = len(chosen.slices(case.problem)[0].ranks)  # a rank of P3 builds only its own block
    seconds = 0.0
    for kind, by_rank in case.prediction.by_op.items():
        if kind.partition(":")[0] in PARTS[paper, metric]:
            seconds += float(np.max(by_rank)) / (blocks if kind == "lay" else 1)
    if metric == "copy_time_s":
        seconds += staged(case)
    if metric == "load_time_s":
        seconds -= in_place(case)
    return seconds


def epoch(case: Question) -> float:
    """Return the seconds per epoch: gnnplan's prediction, corrected by the systems' differences."""
    return float(case.prediction.epoch_s) + staged(case) - in_place(case)


def in_place(case: Question) -> float:
    """Return the seconds per epoch in which gnnplan, but not GSplit, copies cached rows.

    GSplit 'can skip loading an input feature if it is already cached locally' (Sec. 3): layer 1
    reads such a row in the cache.
    """
    if case.row["paper"] != "gsplit" or not isinstance(case.strategy, GSplit):
        return 0.0
    return float(np.max(case.prediction.by_op.get("pick", 0.0)))


def staged(case: Question) -> float:
    """Return the seconds per epoch in which P3's testbed, but not gnnplan, copies over host links.

    P3's KVStore sends from the servers' memory: received features are copied to the GPU, partial
    sums and their gradients from and to the GPU.
    """
    if case.row["paper"] != "p3" or case.problem.workload.mode != "mini":
        return 0.0
    nbytes = case.prediction.bytes
    moved = nbytes.get("fetch", 0) + 2 * nbytes.get("pull", 0)
    link = case.problem.cluster.host or case.problem.cluster.intra_node
    return moved / case.problem.ranks / link.bandwidth


# -- counts ----------------------------------------------------------------------------------------


def sampled(metric: str, case: Question) -> float:
    """Return edges computed or features loaded per epoch; frontier_vertices: rows of one batch.

    The frontier is the row's `hop` hops from the seeds; default: all layers.
    """
    problem, params = case.problem, params_of(case.row)
    layers = problem.workload.layers
    if metric == "frontier_vertices":
        need = expected_frontier(problem.stats, int(params["batch"]), problem.workload.fanouts)
        return need.rows[layers - int(params.get("hop", layers))]
    split = isinstance(case.strategy, GSplit)
    groups = (0,) * problem.ranks if split else tuple(range(problem.ranks))
    batch = problem.minibatches(groups).at(0)
    batches = problem.stats.train_vertices / problem.workload.batch
    if metric == "features_loaded":
        return float(batches * batch.row_counts(0).sum())
    return batches * sum(int(batch.facts(layer).edges.sum()) for layer in range(1, layers + 1))


def crossing(case: Question) -> float:
    """Return the share of a batch's edges between different ranks that split the batch."""
    splitter = str(case.strategy.knobs()["splitter"])
    batch = case.problem.minibatches((0,) * case.problem.ranks, splitter).at(0)
    assert isinstance(batch, EstimatedBatch)
    return batch.cross


def volume(case: Question) -> float:
    """Return the bytes sent per mini-batch.

    P3's example, which states no number of GPUs, counts one trainer's batch: all its features, or
    its partial sums in the forward pass.
    """
    problem, model = case.problem, case.problem.model
    if case.row["gpus_per_node"]:
        return case.prediction.bytes_total / case.strategy.steps(problem)
    seeds = problem.workload.batch // problem.ranks
    need = expected_frontier(problem.stats, seeds, problem.workload.fanouts)
    if isinstance(case.strategy, P3):
        width = model.layers[0].h_out
        return float((problem.ranks - 1) * need.rows[1] * width * model.itemsize)
    return need.rows[0] * model.features * model.itemsize
