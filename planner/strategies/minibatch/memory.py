"""Memory of ranks that train on mini-batches: the peak over the known batches.

A rank has a batch's features, blocks and activations (layerwise/memory.py), the blocks of
prefetched batches, the cache of the feature store, and the data of evaluation.

Graph data are in the servers' memories; ranks of a server share one copy:

    features    all rows, or the rows spread to the server; P3: the columns of the server's ranks
    lists       all adjacency lists, or those spread to or cached at the server; offsets and degrees
                of all vertices
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gnnplan.planner.gnn.model import block
from gnnplan.planner.gnn.trace import PIECES
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.memory import blocks, constant
from gnnplan.planner.strategies.minibatch.adjacency_store import ENTRY, Lists, bytes_at
from gnnplan.planner.strategies.minibatch.feature_store import Features, Store
from gnnplan.planner.strategies.minibatch.supply import Supply, held_by_sampler
from gnnplan.planner.strategies.program.memory import Memory, Resident, machine_code

PLACE = 8  # bytes of an edge's position in the order of an epoch
PLACE_IN_CACHE = 4  # bytes of a vertex's position in the cache, on a GPU that lays out its batches
PLACE_AMONG_SOURCES = 4  # bytes of a vertex's position among a layer's sources


def resident(supply: Supply) -> Resident:
    """Return what ranks have besides a step's tensors, without graph data in servers' memories."""
    problem, store, prefetch = supply.problem, supply.store, supply.prefetch
    on_cpu = problem.cluster.device.kind == "cpu"
    features = peak_over_batches(supply, partial(constant, problem))
    graph = peak_over_batches(supply, partial(blocks, problem))
    sampling, elsewhere = peak_over_batches(supply, partial(sampling_peak, supply)), 0.0 * features
    if not supply.is_plain:
        elsewhere = features + peak_over_batches(supply, partial(_arriving, supply))
    buffers = 0.0 * features
    if prefetch:  # sampler processes have their own memory, and the next batch is loaded
        buffers = np.maximum(sampling - graph, 0.0) * supply.lays_there
        features = 2.0 * features
        graph = graph * (2 + prefetch * on_cpu)
    else:
        elsewhere = np.maximum(elsewhere, sampling - graph)
    cache = 0.0 * features + store.held(problem)
    if supply.lays_there and supply.picks_there:
        cache = cache + PLACE_IN_CACHE * problem.stats.vertices
    graph = graph + structure_bytes(supply)
    data = {"features": features, "cache": cache, "graph": graph, "buffers": buffers}
    return Resident(data, code=machine_code(problem, PIECES), elsewhere=elsewhere)


def peak_over_batches(supply: Supply, nbytes: Callable[[MiniBatch], np.ndarray]) -> np.ndarray:
    """Return the largest number of bytes over all known batches [ranks]."""
    distinct = dict.fromkeys(supply.batches.first())  # estimated batches are equal
    return np.asarray(np.max([nbytes(batch) for batch in distinct], axis=0))


def sampler_memory(supply: Supply) -> Memory:
    """Return the bytes of sampler processes and their finished batches in each server's memory
    [servers]."""
    problem, waiting = supply.problem, 0 if supply.lays_there else supply.prefetch
    if not waiting:
        return {}
    stats, links = problem.stats, problem.workload.task == "link"
    positions = PLACE_AMONG_SOURCES * stats.vertices + links * PLACE * stats.edges
    each = peak_over_batches(supply, partial(_on_host, problem)) + positions
    place = {server: i for i, server in enumerate(dict.fromkeys(problem.servers))}
    servers = [place[server] for server in problem.servers]
    return {"batches": np.bincount(servers, weights=waiting * each)}


def structure_bytes(supply: Supply) -> np.ndarray:
    """Return the bytes of adjacency data in a rank's own memory, from which its sampler draws
    [ranks].

    On a CPU: degrees, the position of each vertex among the sources, the order of an epoch's edges
    for link prediction, and the rank's copy of spread lists. Sampler processes share a rank's
    degrees. With a GPU all data are in the server's memory, unless the GPU samples and has room for
    all of its lists.
    """
    problem, lists, inline = supply.problem, supply.lists, not supply.prefetch
    stats, ranks = problem.stats, range(problem.ranks)
    degrees = ENTRY * (1 + stats.directed) * stats.vertices
    copied = np.array([bytes_at(problem, lists, [rank]) for rank in ranks]) - degrees
    if problem.cluster.device.kind != "cpu":
        return copied * (supply.lists_there == 1.0 and (supply.lays_there or inline))
    order = PLACE * stats.edges * (1 + inline) * (problem.workload.task == "link")
    own = degrees + PLACE_AMONG_SOURCES * stats.vertices * inline + order
    return own + copied * (lists is not None)


def _arriving(supply: Supply, batch: MiniBatch) -> np.ndarray:
    """Return the bytes of row buffers during loading, besides the batch's features [ranks]."""
    loads = supply.store.loads_of(supply.problem, batch)
    return np.asarray(
        loads.host + loads.hits + loads.fetched.sum(0) + loads.fetched.sum(1), dtype=float
    )


def sampling_peak(supply: Supply, batch: MiniBatch) -> np.ndarray:
    """Return the peak bytes of a sampler in a rank's own memory [ranks].

    With a GPU a sampler's data are in the server's memory, unless the GPU lays out its batches.
    """
    problem = supply.problem
    if problem.cluster.device.kind == "cpu":
        return _on_host(problem, batch)
    return held_by_sampler(problem, batch) if supply.lays_there else np.zeros(problem.ranks)


def _on_host(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Return the bytes of drawn edges, and the peak while layers are laid out one by one [ranks].

    For the current layer, per edge: positions (4 bytes), numbers sorted by source (12) and a copy
    for the block (12). Then, besides positions and the block, its weights: the edge's reader (4)
    and a weight in both orders; GCN's weights are float64 first (8), with a factor per edge (8) and
    a mask of self edges (1). Per source: ids, degrees and offsets (72). Blocks of earlier layers
    stay.
    """
    model, peak, finished, drawn = problem.model, *np.zeros((3, problem.ranks))
    for layer, spec in enumerate(model.layers, 1):
        f = batch.facts(layer)
        weighing = 20 + 2 * model.itemsize + 17 * spec.self_edges
        each = max(28, weighing * spec.weighs_edges)
        edges = f.edges + f.rows if spec.self_edges else f.edges
        peak = np.maximum(peak, finished + each * edges + 72 * f.sources)
        finished = finished + block(model, spec, f.rows, f.sources, f.edges)
        drawn = drawn + 4 * batch.sampled(layer)
    return np.asarray(drawn + 2 * problem.stats.vertices + peak)


# -- in servers' memories


def features_by_server(problem: Problem, store: Features, features: str) -> np.ndarray:
    """Return the bytes of features in each server's memory [servers].

    features: the knob, 'everywhere' or 'spread'.
    """
    servers = list(dict.fromkeys(problem.servers))
    if isinstance(store, Store) and store.home is not None:
        rows = [np.flatnonzero(store.home == server) for server in servers]
        return np.array([float(problem.features_bytes(ids).sum()) for ids in rows])
    spread = features == "spread" and problem.graph is None
    share = 1 / len(servers) if spread else 1.0
    return np.full(len(servers), share * all_rows_bytes(problem, problem.features_bytes))


def all_rows_bytes(problem: Problem, sizes: Callable[[Ids], np.ndarray]) -> int:
    """Return the bytes of all vertices' rows; sizes: ids -> bytes of their rows."""
    n = problem.stats.vertices
    return (
        int(sizes(np.zeros(1, np.int64))[0]) * n
        if problem.graph is None
        else int(sizes(np.arange(n)).sum())
    )


def lists_by_server(problem: Problem, lists: Lists | None) -> np.ndarray:
    """Return the bytes of adjacency lists, offsets and degrees in each server's memory."""
    servers = np.array(problem.servers)
    at_server = (
        np.flatnonzero(servers == server).tolist() for server in dict.fromkeys(problem.servers)
    )
    return np.array([bytes_at(problem, lists, ranks) for ranks in at_server])
