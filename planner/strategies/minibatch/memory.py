"""Bytes that a rank holds with mini-batches: the fullest of the batches that are known.

It has a batch's features, blocks and activations (layerwise/memory.py), the blocks of batches that
wait for their turn, what the feature store caches, and what evaluation needs.

Graph data are in servers' memories, whose ranks share one copy:

    features    all rows, or those at home at the server; P3: the columns of its ranks
    lists       all adjacency lists, or those at home or cached there; offsets and degrees of all
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.gnn.products import PIECES
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.layerwise.memory import blocks, constant
from gnnplan.planner.strategies.minibatch import device_sampler
from gnnplan.planner.strategies.minibatch.adjacency_store import ENTRY, Lists, bytes_at
from gnnplan.planner.strategies.minibatch.feature_store import Features, Store
from gnnplan.planner.strategies.minibatch.supply import Supply
from gnnplan.planner.strategies.program.memory import machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Program

PLACE = 8  # [B] of an edge's place in the order of an epoch
PLACE_IN_CACHE = 4  # [B] of a vertex's, on a GPU that lays out its batches
PLACE_AMONG_SOURCES = 4  # [B] of a vertex


def memory(program: Program, supply: Supply) -> Memory:
    """Bytes per rank by use: the batch in training, blocks of batches that wait, and caches.

    The graph in a server's memory is not included.
    """
    problem, store, prefetch = supply.problem, supply.store, supply.prefetch
    on_cpu = problem.cluster.device.kind == "cpu"
    features = most(supply, partial(constant, problem))
    graph = most(supply, partial(blocks, problem))
    sampling, elsewhere = most(supply, partial(of_sampling, supply)), 0.0 * features
    if not supply.is_plain:
        elsewhere = features + most(supply, partial(_arriving, supply))
    buffers = 0.0 * features
    if prefetch:  # samplers of their own have their own memory; the next batch is loaded
        buffers = np.maximum(sampling - graph, 0.0) * supply.lays_there
        features = 2.0 * features
        graph = graph * (2 + prefetch * on_cpu)
    else:
        elsewhere = np.maximum(elsewhere, sampling - graph)
    cache = 0.0 * features + store.held(problem)
    if supply.lays_there and supply.picks_there:
        cache = cache + PLACE_IN_CACHE * problem.stats.vertices
    return on_ranks(
        problem,
        program,
        code=machine_code(problem, PIECES),
        features=features,
        cache=cache,
        graph=graph + of_structure(supply),
        buffers=buffers,
        elsewhere=elsewhere,
    )


def most(supply: Supply, held: Callable[[MiniBatch], np.ndarray]) -> np.ndarray:
    """The most that is held of any known batch [ranks]."""
    known = dict.fromkeys(supply.batches.first())  # estimated ones are one, many times
    return np.asarray(np.max([held(batch) for batch in known], axis=0))


def of_samplers(supply: Supply) -> Memory:
    """Bytes of batches that are made and wait in each server's memory, and of what each of their
    samplers has [servers]."""
    problem, waiting = supply.problem, 0 if supply.lays_there else supply.prefetch
    if not waiting:
        return {}
    stats, links = problem.stats, problem.workload.task == "link"
    of_draws = PLACE_AMONG_SOURCES * stats.vertices + links * PLACE * stats.edges
    each = most(supply, partial(_on_host, problem)) + of_draws
    place = {server: i for i, server in enumerate(dict.fromkeys(problem.servers))}
    servers = [place[server] for server in problem.servers]
    return {"batches": np.bincount(servers, weights=waiting * each)}


def of_structure(supply: Supply) -> np.ndarray:
    """Bytes in a rank's own memory of what its sampler draws from [ranks].

    On a CPU: degrees, the place of each vertex among the sources, the order of an epoch's edges
    where links are learned, and the rank's copy of a spread structure. Samplers in processes of
    their own share a rank's degrees. With a GPU all is in the server's memory, unless the GPU
    samples and has room for all of its lists.
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
    """Bytes while rows arrive [ranks]: rows by class, next to where they are put, and rows sent."""
    loads = supply.store.loads_of(supply.problem, batch)
    return np.asarray(
        loads.host + loads.hits + loads.fetched.sum(0) + loads.fetched.sum(1), dtype=float
    )


def of_sampling(supply: Supply, batch: MiniBatch) -> np.ndarray:
    """The most bytes that a sampler holds in a rank's own memory [ranks].

    On a CPU these are all drawn edges while it lays out a layer. With a GPU they are in the
    server's memory, unless the GPU lays out what it draws.
    """
    problem = supply.problem
    if problem.cluster.device.kind == "cpu":
        return _on_host(problem, batch)
    return device_sampler.held(problem, batch) if supply.lays_there else np.zeros(problem.ranks)


def _on_host(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Drawn edges, and the most that is held while layers are laid out one after the other.

    Of the layer in work, per edge: positions (4 bytes), numbers sorted by source (12) and a copy
    for the block (12). Then its weights are made, beside positions and the block: the edge's reader
    (4) and a weight in both orders; GCN's are float64 first (8), times what an edge stands for
    (8), unless it is a self edge (1). Per source: ids, degrees and offsets (72). Blocks of the
    layers before it stay.
    """
    model, most, done, drawn = problem.model, *np.zeros((3, problem.ranks))
    for layer, spec in enumerate(model.layers, 1):
        f = batch.facts(layer)
        weighing = 20 + 2 * model.itemsize + 17 * spec.self_edges
        each = max(28, weighing * spec.weighs_edges)
        edges = f.edges + f.rows if spec.self_edges else f.edges
        most = np.maximum(most, done + each * edges + 72 * f.sources)
        done = done + block(model, spec, f.rows, f.sources, f.edges)
        drawn = drawn + 4 * batch.sampled(layer)
    return np.asarray(drawn + 2 * problem.stats.vertices + most)


# -- in servers' memories


def of_rows(problem: Problem, store: Features, features: str) -> np.ndarray:
    """Bytes of the features in each server's memory [servers]; rows may be spread."""
    servers = list(dict.fromkeys(problem.servers))
    if isinstance(store, Store) and store.home is not None:
        rows = [np.flatnonzero(store.home == server) for server in servers]
        return np.array([float(problem.features_bytes(ids).sum()) for ids in rows])
    spread = features == "spread" and problem.graph is None
    share = 1 / len(servers) if spread else 1.0
    return np.full(len(servers), share * of_all_rows(problem, problem.features_bytes))


def of_all_rows(problem: Problem, sizes: Callable[[Ids], np.ndarray]) -> int:
    """Bytes of all vertices' rows; sizes: those of some."""
    n = problem.stats.vertices
    return (
        int(sizes(np.zeros(1, np.int64))[0]) * n
        if problem.graph is None
        else int(sizes(np.arange(n)).sum())
    )


def of_lists(problem: Problem, lists: Lists | None) -> np.ndarray:
    """Bytes of adjacency lists, offsets and degrees in each server's memory [servers]."""
    servers = np.array(problem.servers)
    at_server = (
        np.flatnonzero(servers == server).tolist() for server in dict.fromkeys(problem.servers)
    )
    return np.array([bytes_at(problem, lists, ranks) for ranks in at_server])
