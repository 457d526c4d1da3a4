"""GSplit's splitting function: the GPU that owns each vertex, found once before training from how often what is sampled.

    pre-sampling    w(v) = times that v is in a layer's frontier, w(e) = times that edge e is drawn, both per mini-batch
    gsplit          METIS: cut least w(e), parts with equal sums of w(v)
    node            equal sums of w(v), every edge counts the same
    edge            nothing sampled: equal in-edges and training vertices together, every edge counts the same
    random          each vertex anywhere

Paper: GSplit (arXiv 2303.13775) Sec. 4, ten epochs of pre-sampling. METIS takes whole numbers and one weight per vertex: weights are
scaled, an edge counts at least 1, both its directions together; `edge` adds both loads, each scaled to the same sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import pymetis
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import suggest
from gnnplan.planner.graph import Graph
from gnnplan.planner.partition import cached, check_parts, for_metis, repair
from gnnplan.planner.sampling import frontier, seeds_of
from gnnplan.planner.specs import Workload

SPLITTERS = ("gsplit", "node", "edge", "random")
EPOCHS = 10  # of pre-sampling, the paper's
BEFORE = 1 << 20  # epochs of pre-sampling are counted from here: none that training reaches


@dataclass(frozen=True)
class Frequency:
    """How often each vertex [N] and each place of graph.indices [E] is sampled, over so many mini-batches."""

    vertices: NDArray[np.int32]
    edges: NDArray[np.int32]
    batches: int


def presample(graph: Graph, batch: int, fanouts: tuple[int, ...], seed: int, epochs: int = EPOCHS,
              progress: Callable[[int, int], None] = lambda done, of: None) -> Frequency:  # fmt: skip
    """Run the sampler as training would, on draws of its own. `progress` is told how many batches are done."""
    vertices, edges = np.zeros(graph.stats.vertices, np.int32), np.zeros(graph.indices.size, np.int32)
    done = 0
    for epoch in range(BEFORE, BEFORE + epochs):
        batches = seeds_of(graph, batch, seed, epoch)
        for number, seeds in enumerate(batches):
            found = frontier(graph, seeds, fanouts, seed, epoch, number)
            for nodes in found.nodes:
                vertices[nodes] += 1
            for _, places in found.edges:
                edges[places] += 1
            done += 1
            progress(done, epochs * len(batches))
    return Frequency(vertices, edges, done)


def owners(graph: Graph, parts: int, splitter: str, workload: Workload, epochs: int = EPOCHS) -> NDArray[np.int32]:
    """Owner [N] of each vertex for a workload's batches, pre-sampled for so many epochs where the splitter asks for it. Found once, then
    from disk."""
    w, train = workload, blake2b(np.ascontiguousarray(graph.train).data, digest_size=8).hexdigest()
    key = f"owners {graph.stats.hash} {train} {splitter} {parts} {w.seed} {w.batch} {w.fanouts} {epochs}"

    def compute() -> NDArray[np.int32]:
        return split(graph, parts, splitter, w.seed,
                     presample(graph, w.batch, w.fanouts, w.seed, epochs) if splitter in ("gsplit", "node") else None)  # fmt: skip

    return cached(key, graph.stats.vertices, parts, compute)


def split(graph: Graph, parts: int, splitter: str, seed: int, frequency: Frequency | None = None) -> NDArray[np.int32]:
    """Owner [N] of each vertex, in [0, parts). gsplit and node need what pre-sampling counted."""
    if splitter not in SPLITTERS:
        raise SpecError(f"splitter {splitter!r} is unknown{suggest(splitter, SPLITTERS)}")
    check_parts(parts, graph.stats.vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(graph.stats.vertices, np.int32)
    if splitter == "random":
        return np.random.default_rng(seed).integers(0, parts, graph.stats.vertices, dtype=np.int32)
    if splitter == "edge":
        load = graph.degree / max(graph.degree.sum(), 1) + graph.train / max(graph.train.sum(), 1)
    else:
        assert frequency is not None
        load = frequency.vertices.astype(float)
    # an edge that was never drawn is still one, so that METIS keeps neighbours together where no batch has been
    drawn = frequency.edges + np.int32(1) if splitter == "gsplit" and frequency is not None else np.ones(graph.indices.size, np.int32)
    one_way = sp.csr_matrix((drawn, graph.indices, graph.indptr), shape=(load.size, load.size))
    both = sp.csr_matrix(one_way + one_way.T)
    del frequency, drawn, one_way  # METIS needs the room
    if parts == load.size or not both.nnz:
        return np.asarray(np.arange(load.size) * parts // load.size, dtype=np.int32)
    adjacency, weights = for_metis(both.indptr, both.indices, _whole(both.data, 2**30) if splitter == "gsplit" else None)
    del both
    part = pymetis.part_graph(parts, adjacency, vweights=_whole(load, 2**30 - load.size), eweights=weights, recursive=False,
                              options=pymetis.Options(seed=seed + 1)).vertex_part  # fmt: skip
    return repair(np.asarray(part, dtype=np.int32), parts)


def _whole(weights: NDArray[Any], most: float) -> NDArray[np.int64]:
    """At least 1, shares kept to a thousandth of the largest where the sum leaves room."""
    scale = min(1000 / max(float(weights.max(initial=0)), 1e-300), most / max(float(weights.sum()), 1e-300))
    return (scale * weights).astype(np.int64) + 1
