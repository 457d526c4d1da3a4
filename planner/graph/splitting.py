"""GSplit's splitting functions: the GPU that owns each vertex of a mini-batch.

Owners are computed once, before training. Pre-sampling runs the sampler for some epochs and counts
how often the mini-batches use each vertex and edge:

    w(v)      times that vertex v is in a layer's frontier
    w(e)      times that edge e is drawn

    gsplit    METIS: least cut of w(e), parts with equal sums of w(v)
    node      METIS: least cut of edges, parts with equal sums of w(v)
    edge      METIS without pre-sampling: least cut of edges, parts with equal sums of in-edges
              and training vertices together
    random    a random owner for every vertex

Loads may differ: no part has more than 1 + imbalance times the mean (Eq. 2's tunable constant,
METIS's ufactor). A looser balance leaves METIS more cuts to choose from. METIS balances the mean
load that pre-sampling measures; the load of a single batch deviates from the mean.

Paper: GSplit (arXiv 2303.13775) Sec. 4, with ten epochs of pre-sampling. METIS takes whole numbers
and one weight per vertex. So weights are scaled; an edge has at least weight 1, for both directions
together; and `edge` adds both loads, each scaled to the same sum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.disk_cache import cached
from gnnplan.planner.graph.graph import Graph, Owner, both_ways, matrix_of
from gnnplan.planner.graph.partition import by_metis, check_parts, repair, version_of
from gnnplan.planner.graph.sampling import drawn_as, frontier, presampled, seeds_in
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import suggest

SPLITTERS = ("gsplit", "node", "edge", "random")
EPOCHS = 10  # of pre-sampling, as in the paper
IMBALANCE = 0.03  # METIS's default for k-way cuts; the paper does not print its own
FINEST, LOOSEST = 0.001, 10.0  # allowed imbalances; ufactor is a whole number of thousandths
BEFORE = 1 << 20  # the first epoch number of pre-sampling; training never reaches it


@dataclass(frozen=True)
class Frequency:
    """Counts of how often pre-sampling drew each vertex [N] and each edge of graph.indices [E]."""

    vertices: NDArray[np.int32]
    edges: NDArray[np.int32]


def presample(graph: Graph, workload: Workload, epochs: int = EPOCHS) -> Frequency:
    """Run the training sampler with other random draws; count the sampled vertices and edges."""
    vertices = np.zeros(graph.stats.vertices, np.int32)
    edges = np.zeros(graph.indices.size, np.int32)
    for epoch in range(BEFORE, BEFORE + epochs):
        for number, items in enumerate(presampled(graph, workload, epoch)):
            seeds = seeds_in(graph, workload, items, epoch, number)
            found = frontier(graph, seeds, workload.fanouts, workload.seed, epoch, number)
            for nodes in found.nodes:
                vertices[nodes] += 1
            for _, places in found.edges:
                edges[places] += 1
    return Frequency(vertices, edges)


def owners(
    graph: Graph,
    parts: int,
    splitter: str,
    workload: Workload,
    epochs: int = EPOCHS,
    imbalance: float = IMBALANCE,
) -> Owner:
    """Return the owner [N] of each vertex for a workload's batches, cached on disk.

    epochs: of pre-sampling, if the splitter needs it. imbalance: as in `split`."""
    asked = f"{splitter} {parts} {epochs} {_ufactor(imbalance)}"
    key = f"{version_of('metis')} owners {drawn_as(graph, workload)} {asked}"

    def compute() -> Owner:
        counted = splitter in ("gsplit", "node")
        frequency = presample(graph, workload, epochs) if counted else None
        return split(graph, parts, splitter, workload.seed, frequency, imbalance)

    return cached(key, graph.stats.vertices, parts, compute)


def split(
    graph: Graph,
    parts: int,
    splitter: str,
    seed: int,
    frequency: Frequency | None = None,
    imbalance: float = IMBALANCE,
) -> Owner:
    """Return the owner [N] of each vertex, in [0, parts).

    imbalance: share by which a part's load may exceed the mean; random owners ignore it. gsplit and
    node balance the `frequency` of pre-sampling, edge balances in-edges and training vertices.
    Raises SpecError for an unknown splitter or more parts than vertices."""
    if splitter not in SPLITTERS:
        raise SpecError(f"splitter {splitter!r} is unknown{suggest(splitter, SPLITTERS)}")
    check_parts(parts, graph.stats.vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(graph.stats.vertices, np.int32)
    if splitter == "random":
        return np.random.default_rng(seed).integers(0, parts, graph.stats.vertices, dtype=np.int32)
    if splitter == "edge" or frequency is None:
        load = graph.degree / max(graph.degree.sum(), 1) + graph.train / max(graph.train.sum(), 1)
    else:
        load = frequency.vertices.astype(float)
    drawn = np.ones(graph.indices.size, np.int32)
    if splitter == "gsplit" and frequency is not None:
        drawn += frequency.edges  # weight >= 1: unsampled edges also keep neighbours together
    both = both_ways(matrix_of(graph.csr_edges, drawn))
    del frequency, drawn  # METIS needs the memory
    if parts == load.size or not both.nnz:
        return np.asarray(np.arange(load.size) * parts // load.size, dtype=np.int32)
    part = by_metis(
        both,
        parts,
        seed,
        _whole(load, 2**30 - load.size),
        _whole(both.data, 2**30) if splitter == "gsplit" else None,
        ufactor=_ufactor(imbalance),
    )
    return repair(part, parts)


def _ufactor(imbalance: float) -> int:
    """Return METIS's ufactor: the allowed excess load of a part in thousandths of the mean.

    >>> _ufactor(0.03), _ufactor(0.001)
    (30, 1)
    """
    return round(1000 * imbalance)


def _whole(weights: NDArray[Any], most: float) -> NDArray[np.int64]:
    """Scale the weights to whole numbers >= 1 whose sum is about `most` or less.

    If the sum allows it, the largest weight is 1001, so that shares keep three digits."""
    scale = min(
        1000 / max(float(weights.max(initial=0)), 1e-300), most / max(float(weights.sum()), 1e-300)
    )
    return (scale * weights).astype(np.int64) + 1
