"""Bytes that a rank holds with mini-batches: the fullest of the batches that are known.

It has a batch's features, blocks and activations (layerwise/holds.py), the blocks of batches that
wait for their turn, what the feature store caches, and what evaluation needs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.gnn.kinds import Layer
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, before_training
from gnnplan.planner.strategies.layerwise.memory import blocks
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
    loaded_bytes,
    picks_there,
)
from gnnplan.planner.strategies.program.memory import fullest
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
    model, b = problem.model, problem.model.weight_itemsize
    zero = np.zeros(problem.ranks)
    known = list(dict.fromkeys(batches.first()))  # estimated ones are one, many times
    held = fullest(problem, program)
    activations, buffers = held["activations"], held["buffers"]
    if store:
        buffers = buffers + np.maximum(
            np.max([_arriving(problem, batch, store) for batch in known], axis=0)
            - activations
            - buffers,
            0.0,
        )
    features = np.max([_features(problem, batch) for batch in known], axis=0)
    graph = np.max([blocks(problem, batch) for batch in known], axis=0)
    there = lays_there(problem, batches.splits, lists)
    sampling = np.max([of_sampling(problem, batch, there) for batch in known], axis=0)
    if prefetch:  # samplers of their own have their own memory; the next batch is loaded
        buffers = buffers + np.maximum(sampling - graph, 0.0) * there
        waiting = prefetch * (problem.cluster.device.kind == "cpu")  # or in a server's memory
        graph = graph * (2 + waiting)
        coming = [store.loads_of(problem, batch).host for batch in known] if store else [features]
        features = features + np.max(coming, axis=0)
    graph = graph + of_sampler(problem, prefetch)
    if not prefetch:
        training = activations + buffers + features + graph
        buffers = buffers + np.maximum(sampling - training, 0.0)
    own_process = bool(prefetch) and not there
    graph = graph + of_lists(problem, lists, own_process, store) + of_order(problem, prefetch)
    if there and problem.stats.directed and any(s.edges == "gcn" for s in model.layers):
        graph = graph + ENTRY * problem.stats.vertices  # out-degrees
    cache = zero + (store.held(problem) if store else 0)
    if there and store and picks_there(problem, store):
        cache = cache + PLACE_IN_CACHE * problem.stats.vertices
    return {
        "parameters": zero + model.weights * b,
        "optimizer": zero + problem.workload.beside_a_weight * model.weights * b,
        "features": features,
        "cache": cache,
        "activations": activations,
        "halo": zero,
        "graph": graph,
        "buffers": buffers,
        **before_training(problem),
    }


def of_sampler(problem: Problem, prefetch: int) -> int:
    """Bytes of degrees, and of each vertex's place among the sources.

    Samplers in processes of their own have their own places, and share a rank's degrees. With a GPU
    all are in the server's memory.
    """
    places = 0 if prefetch else PLACE_AMONG_SOURCES * problem.stats.vertices
    return (problem.cluster.device.kind == "cpu") * (_degrees(problem) + places)


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


def _degrees(problem: Problem) -> int:
    return ENTRY * (1 + problem.stats.directed) * problem.stats.vertices


def of_order(problem: Problem, prefetch: int) -> int:
    """Bytes of the order of an epoch's edges, where links are learned on a CPU.

    The planner's batches have one, and so has a sampler that is not in a process of its own.
    The order of training vertices is small. With a GPU either is in the server's memory."""
    if problem.workload.task == "node" or problem.cluster.device.kind != "cpu":
        return 0
    return PLACE * problem.stats.edges * (1 if prefetch else 2)


def of_lists(
    problem: Problem, lists: Lists | None, own_process: bool, store: Features | None = None
) -> np.ndarray:
    """Bytes of the adjacency lists that a rank has in its own memory, degrees included [ranks].

    own_process: of its sampler, which draws on the host then. On a CPU this is its copy of a spread
    structure. With a GPU lists are in the server's memory, unless the GPU samples and has room for
    all of its lists.
    """
    if problem.cluster.device.kind != "cpu":
        return np.zeros(problem.ranks) + _drawn_from(problem, lists) * (
            lists_there(problem, store, lists) == 1.0 and not own_process
        )
    if lists is None:
        return np.zeros(problem.ranks)
    return _copied(problem, lists) - _degrees(problem)  # `of_sampler` has them


def _drawn_from(problem: Problem, lists: Lists | None) -> np.ndarray | float:
    """Bytes of the lists that a sampler draws from, and of their offsets [ranks]."""
    if lists is None:
        return float(NEIGHBOUR * problem.stats.edges + ENTRY * (problem.stats.vertices + 1))
    return _copied(problem, lists) - _degrees(problem)


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


def _features(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Bytes of the rows that layer 1 or the encoder reads [ranks]."""
    rows = batch.facts(1).sources if problem.model.first_varying else batch.row_counts(0)
    numbers = (
        loaded_bytes(problem, batch) / problem.model.sparse_itemsize
        if problem.model.nonzeros
        else None
    )
    return np.asarray(problem.model.features_held(rows, numbers), dtype=float)


def of_sampling(problem: Problem, batch: MiniBatch, there: bool = False) -> np.ndarray:
    """The most bytes that a sampler holds in a rank's own memory [ranks].

    On a CPU these are all drawn edges while it lays out a layer. With a GPU they are in the
    server's memory, unless the GPU lays out `there` what it draws.
    """
    if problem.cluster.device.kind != "cpu":
        return device_sampler.held(problem, batch) if there else np.zeros(problem.ranks)
    return _on_host(problem, batch)


def _on_host(problem: Problem, batch: MiniBatch) -> np.ndarray:
    facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
    return np.asarray(
        4 * np.sum([batch.sampled(layer) for layer, _ in enumerate(facts, 1)], axis=0)
        + 2 * problem.stats.vertices
        + laying(problem, list(zip(facts, problem.model.layers, strict=True)))
    )


def laying(problem: Problem, layers: Sequence[tuple[LayerFacts, Layer]]) -> np.ndarray:
    """The most bytes held while layers are laid out one after the other [ranks].

    Of the layer in work, per edge: positions (4 bytes), numbers sorted by source (12), a copy for
    the block (12), and weights. Per source: ids, degrees and offsets (72). Blocks of the layers
    before it stay.
    """
    most = done = np.zeros(problem.ranks)
    for f, spec in layers:
        # a weight and its copy, in both orders, and the order itself; GCN's are in 64 bits first
        each = 28 + (32 if spec.self_edges else 20) * spec.weighs_edges
        edges = f.edges + f.rows if spec.self_edges else f.edges
        most = np.maximum(most, done + (each + 4 * spec.self_edges) * edges + 72 * f.sources)
        done = done + block(problem.model, spec, f.rows, f.sources, f.edges)
    return np.asarray(most)
