"""What a rank fills with mini-batches: the fullest of those that are known, its features and blocks, and what evaluation needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.footprint import RUNTIME, block, kernels
from gnnplan.planner.gnn import Layer
from gnnplan.planner.job import Job
from gnnplan.planner.layout import LayerFacts
from gnnplan.planner.minibatch import Batches, MiniBatch
from gnnplan.planner.strategies import layerwise_memory
from gnnplan.planner.strategies.batchwise import Features, Lists, lists_there, loaded_bytes
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory
from gnnplan.planner.structure import ENTRY, NEIGHBOUR, EstimatedStructure


def memory(job: Job, batches: Batches, how: Manner, prefetch: int, store: Features | None = None, lists: Lists | None = None
           ) -> Memory:  # fmt: skip
    """Bytes per rank by use: a batch under way, the blocks of those that wait for their turn, and what the feature store caches. The
    graph in a server's memory is not among them."""
    model, b = job.model, job.model.itemsize
    zero = np.zeros(job.ranks)
    known = list({id(batch): batch for batch in batches.first()}.values())  # estimated ones are alike
    steps = [layerwise_memory.moments(job, batch, how) for batch in known]
    activations, buffers = layerwise_memory.fullest([m for m, _ in steps], job.ranks)
    if job.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels([product for _, products in steps for product in products], job.ranks, vary=True)
    if store:
        buffers = buffers + np.maximum(np.max([_arriving(job, batch, store) for batch in known], axis=0) - activations - buffers, 0.0)
    features = np.max([_features(job, batch) for batch in known], axis=0)
    graph = np.max([_blocks(job, batch) for batch in known], axis=0) * (1 + prefetch)
    if not prefetch:  # a sampler of its own has its own memory
        graph = graph + of_sampler(job)
        held = activations + buffers + features + graph
        buffers = buffers + np.maximum(np.max([_sampling(job, batch) for batch in known], axis=0) - held, 0.0)
    graph = graph + of_lists(job, lists, prefetch, store)
    return {
        "parameters": zero + model.weights * b,
        "optimizer": zero + (3 if job.workload.optimizer == "adam" else 1) * model.weights * b,
        "features": features,
        "cache": zero + (store.held(job) if store else 0), "activations": activations, "halo": zero,
        "graph": graph, "buffers": buffers,
        "runtime": zero + RUNTIME[job.cluster.device.kind],
    }  # fmt: skip


def of_sampler(job: Job) -> int:
    """Degrees, and where a vertex is among the sources."""
    return (8 * (1 + job.stats.directed) + 4) * job.stats.vertices


def of_lists(job: Job, lists: Lists | None, prefetch: int, store: Features | None = None) -> np.ndarray:
    """What a rank copies of a structure that is spread, degrees included [ranks]; beside a GPU it is in the server's memory, but for all
    lists of a GPU that samples."""
    if job.cluster.device.kind != "cpu":
        return np.zeros(job.ranks) + _drawn_from(job, lists) * (lists_there(job, store, lists) == 1.0 and not prefetch)
    if lists is None:
        return np.zeros(job.ranks)
    counted = 0 if prefetch else 8 * (1 + job.stats.directed) * job.stats.vertices  # degrees, with the sampler's own
    if isinstance(lists, EstimatedStructure):
        return lists.copied(job.stats) - counted
    assert job.graph is not None
    return lists.copied(job.graph) - counted


def _drawn_from(job: Job, lists: Lists | None) -> np.ndarray | float:
    """Lists with a sampler, and where each is [ranks]."""
    if lists is None:
        return float(NEIGHBOUR * job.stats.edges + ENTRY * (job.stats.vertices + 1))
    copied = lists.copied(job.stats) if isinstance(lists, EstimatedStructure) else lists.copied(job.graph)  # type: ignore[arg-type]
    return np.asarray(copied - ENTRY * (1 + job.stats.directed) * job.stats.vertices)


def _arriving(job: Job, batch: MiniBatch, store: Features) -> np.ndarray:
    """Rows by class beside what they are put together in, and those for others."""
    loads = store.loads_of(job, batch)
    return np.asarray(loads.host + loads.hits + loads.fetched.sum(0) + loads.fetched.sum(1), dtype=float)


def _features(job: Job, batch: MiniBatch) -> np.ndarray:
    """Of the rows that layer 1 or the encoder reads."""
    rows = batch.facts(1).sources if job.model.first_varying else np.array([batch.rows(rank, 0).size for rank in range(batch.ranks)])
    numbers = loaded_bytes(job, batch) / (2 * job.model.itemsize) if job.model.nonzeros else None
    return np.asarray(job.model.features_held(rows, numbers), dtype=float)


def _blocks(job: Job, batch: MiniBatch) -> np.ndarray:
    total = np.zeros(job.ranks)
    for layer, spec in enumerate(job.model.layers, 1):
        f = batch.facts(layer)
        total = total + block(job.workload.model, job.model, spec, f.rows, f.sources, f.edges) + 8 * f.sends.sum(1)
    return np.asarray(total + 16 * f.rows)


def _sampling(job: Job, batch: MiniBatch) -> np.ndarray:
    """The most that a sampler holds, when it lays out a layer: drawn edges of all (4 bytes each) beside it."""
    facts = [batch.facts(layer) for layer in range(1, job.workload.layers + 1)]
    return np.asarray(4 * np.sum([f.edges for f in facts], axis=0) + 2 * job.stats.vertices
                      + laying(job, list(zip(facts, job.model.layers, strict=True))))  # fmt: skip


def laying(job: Job, layers: Sequence[tuple[LayerFacts, Layer]]) -> np.ndarray:
    """The most while these are laid out, one after the other: edges of one as positions (4 bytes each), numbered and sorted by source (12),
    copied for the block (12), and their weights; ids, degrees and offsets of its rows (72); blocks of the layers before it."""
    sage, weighted = job.workload.model == "sage", job.workload.model not in ("gat", "resgcn")
    each = 28 + (20 if sage else 32) * weighted  # a weight with its copy, both orders, and the order itself; gcn's in 64 bits first
    most = done = np.zeros(job.ranks)
    for f, spec in layers:
        edges = f.edges + f.rows if spec.self_edges else f.edges
        most = np.maximum(most, done + (each + 4 * spec.self_edges) * edges + 72 * f.sources)
        done = done + block(job.workload.model, job.model, spec, f.rows, f.sources, f.edges)
    return np.asarray(most)
