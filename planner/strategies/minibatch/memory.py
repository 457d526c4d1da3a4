"""Bytes that a rank holds with mini-batches: the fullest of the batches that are known.

It has a batch's features, blocks and activations (layerwise/memory.py), the blocks of batches that
wait for their turn, what the feature store caches, and what evaluation needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.gnn.products import PIECES
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.layerwise.memory import blocks, constant
from gnnplan.planner.strategies.minibatch import device_sampler
from gnnplan.planner.strategies.minibatch.adjacency_store import (
    ENTRY,
    NEIGHBOUR,
    EstimatedStructure,
)
from gnnplan.planner.strategies.minibatch.step import (
    Features,
    Lists,
    lays_there,
    lists_there,
    picks_there,
)
from gnnplan.planner.strategies.program.memory import machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Program

PLACE = 8  # [B] of an edge's place in the order of an epoch
PLACE_IN_CACHE = 4  # [B] of a vertex's, on a GPU that lays out its batches
PLACE_AMONG_SOURCES = 4  # [B] of a vertex


def memory(
    problem: Problem,
    program: Program,
    batches: Batches,
    prefetch: int,
    store: Features | None = None,
    lists: Lists | None = None,
) -> Memory:
    """Bytes per rank by use: the batch in training, blocks of batches that wait, and caches.

    The graph in a server's memory is not included.
    """
    zero, on_cpu = np.zeros(problem.ranks), problem.cluster.device.kind == "cpu"
    known = list(dict.fromkeys(batches.first()))  # estimated ones are one, many times

    def most(held: Callable[[MiniBatch], np.ndarray]) -> np.ndarray:
        return np.asarray(np.max([held(batch) for batch in known], axis=0))

    features, graph = most(partial(constant, problem)), most(partial(blocks, problem))
    there = lays_there(problem, batches.splits, lists)
    sampling = most(lambda batch: of_sampling(problem, batch, there))
    elsewhere = features + most(lambda batch: _arriving(problem, batch, store)) if store else zero
    if prefetch:  # samplers of their own have their own memory; the next batch is loaded
        buffers = np.maximum(sampling - graph, 0.0) * there
        coming = most(lambda b: store.loads_of(problem, b).host) if store else features
        features, graph = features + coming, graph * (2 + prefetch * on_cpu)
    else:
        buffers, elsewhere = zero, np.maximum(elsewhere, sampling - graph)
    graph = graph + of_structure(problem, prefetch, lists, store, there)
    cache = zero + (store.held(problem) if store else 0)
    if there and store and picks_there(problem, store):
        cache = cache + PLACE_IN_CACHE * problem.stats.vertices
    return on_ranks(
        problem,
        program,
        code=machine_code(problem, PIECES),
        features=features,
        cache=cache,
        graph=graph,
        buffers=buffers,
        elsewhere=elsewhere,
    )


def of_samplers(problem: Problem, batches: Batches, prefetch: int) -> Memory:
    """Bytes of batches that are made and wait in each server's memory, and of what each of their
    samplers has [servers]."""
    if not prefetch:
        return {}
    made = np.max([_on_host(problem, batch) for batch in dict.fromkeys(batches.first())], axis=0)
    links = problem.workload.task == "link"
    each = made + PLACE_AMONG_SOURCES * problem.stats.vertices + links * PLACE * problem.stats.edges
    place = {server: i for i, server in enumerate(dict.fromkeys(problem.servers))}
    servers = [place[server] for server in problem.servers]
    return {"batches": np.bincount(servers, weights=prefetch * each)}


def of_structure(
    problem: Problem,
    prefetch: int,
    lists: Lists | None,
    store: Features | None,
    there: bool = False,
) -> np.ndarray:
    """Bytes in a rank's own memory of what its sampler draws from [ranks].

    On a CPU: degrees, the place of each vertex among the sources, the order of an epoch's edges
    where links are learned, and the rank's copy of a spread structure. Samplers in processes of
    their own share a rank's degrees. With a GPU all is in the server's memory, unless the GPU
    samples and has room for all of its lists.
    """
    stats, zero = problem.stats, np.zeros(problem.ranks)
    degrees = ENTRY * (1 + stats.directed) * stats.vertices
    copied = lists is not None and _copied(problem, lists) - degrees
    if problem.cluster.device.kind != "cpu":
        draws_there = lists_there(problem, store, lists) == 1.0 and (there or not prefetch)
        every_list = NEIGHBOUR * stats.edges + ENTRY * (stats.vertices + 1)
        return zero + (every_list if lists is None else copied) * draws_there
    inline = not prefetch
    order = PLACE * stats.edges * (1 + inline) * (problem.workload.task == "link")
    return zero + degrees + PLACE_AMONG_SOURCES * stats.vertices * inline + order + copied


def _copied(problem: Problem, lists: Lists) -> np.ndarray:
    if isinstance(lists, EstimatedStructure):
        return lists.copied(problem.stats)
    return lists.copied(problem.data)


def _arriving(problem: Problem, batch: MiniBatch, store: Features) -> np.ndarray:
    """Bytes while rows arrive [ranks]: rows by class, next to where they are put, and rows sent."""
    loads = store.loads_of(problem, batch)
    return np.asarray(
        loads.host + loads.hits + loads.fetched.sum(0) + loads.fetched.sum(1), dtype=float
    )


def of_sampling(problem: Problem, batch: MiniBatch, there: bool = False) -> np.ndarray:
    """The most bytes that a sampler holds in a rank's own memory [ranks].

    On a CPU these are all drawn edges while it lays out a layer. With a GPU they are in the
    server's memory, unless the GPU lays out `there` what it draws.
    """
    if problem.cluster.device.kind != "cpu":
        return device_sampler.held(problem, batch) if there else np.zeros(problem.ranks)
    return _on_host(problem, batch)


def _on_host(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Drawn edges, and the most that is held while layers are laid out one after the other.

    Of the layer in work, per edge: positions (4 bytes), numbers sorted by source (12), a copy for
    the block (12), and weights. Per source: ids, degrees and offsets (72). Blocks of the layers
    before it stay.
    """
    model, most, done, drawn = problem.model, *np.zeros((3, problem.ranks))
    for layer, spec in enumerate(model.layers, 1):
        f = batch.facts(layer)
        # a weight and its copy, in both orders, and the order itself; GCN's are in 64 bits first
        each = 28 + 20 * spec.weighs_edges + 16 * spec.self_edges
        edges = f.edges + f.rows if spec.self_edges else f.edges
        most = np.maximum(most, done + each * edges + 72 * f.sources)
        done = done + block(model, spec, f.rows, f.sources, f.edges)
        drawn = drawn + 4 * batch.sampled(layer)
    return np.asarray(drawn + 2 * problem.stats.vertices + most)
