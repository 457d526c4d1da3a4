"""What a rank fills with mini-batches: the fullest of those that are known, its features and blocks, and what evaluation needs."""

from __future__ import annotations

import numpy as np

from gnnplan.planner.footprint import RUNTIME, block, kernels
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, MiniBatch
from gnnplan.planner.store import Store
from gnnplan.planner.strategies import layerwise_memory
from gnnplan.planner.strategies.batchwise import loaded_bytes
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory


def memory(job: Job, batches: Batches, how: Manner, prefetch: int, store: Store | None = None) -> Memory:
    """Bytes per rank by use: a batch under way, the blocks of those that wait for their turn, and what the feature store caches."""
    model, b = job.model, job.model.itemsize
    zero = np.zeros(job.ranks)
    known = batches.first()
    steps = [layerwise_memory.moments(job, batch, how) for batch in known]
    fullest = np.argmax([m.activations + m.buffers for m, _ in steps], axis=0)
    activations, buffers = (np.choose(fullest, [getattr(m, use) for m, _ in steps]) for use in ("activations", "buffers"))
    if job.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels([product for _, products in steps for product in products], job.ranks)
    if store:
        buffers = buffers + np.maximum(np.max([_arriving(job, batch, store) for batch in known], axis=0) - activations - buffers, 0.0)
    return {
        "parameters": zero + model.weights * b,
        "optimizer": zero + (3 if job.workload.optimizer == "adam" else 1) * model.weights * b,
        "features": np.max([_features(job, batch) for batch in known], axis=0),
        "cache": zero + (store.held(job) if store else 0), "activations": activations, "halo": zero,
        "graph": np.max([_blocks(job, batch) for batch in known], axis=0) * (1 + prefetch),
        "buffers": buffers,
        "runtime": zero + RUNTIME[job.cluster.device.kind],
    }  # fmt: skip


def _arriving(job: Job, batch: MiniBatch, store: Store) -> np.ndarray:
    """Rows by class beside what they are put together in, and those for others."""
    loads = store.loads(job, [batch.rows(rank, 0) for rank in range(batch.ranks)])
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
