"""Partitioning: the part of each vertex, by a library (partitioners.py) or ignoring edges.

Partitions of libraries are cached on disk, keyed by the hash of the graph's content
(disk_cache.py)."""

from __future__ import annotations

from hashlib import blake2b
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.workload import AUTO
from gnnplan.planner.graph.disk_cache import cached
from gnnplan.planner.graph.graph import (
    Array,
    Csr,
    CsrEdges,
    Graph,
    GraphStats,
    Owner,
    both_ways,
    matrix_of,
)
from gnnplan.planner.graph.part_folder import PartGraph
from gnnplan.planner.graph.partitioners import (
    METHODS,
    MOST_MARKED,
    cut,
    even_out,
    library_of,
    version_of,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import one_of
from gnnplan.planner.vocabulary.numbers import runs

FEW_EDGES = 5_000_000  # directed edges up to which METIS takes only seconds
AT_ONCE = 1 << 22  # edges processed at a time
# Largest share of vertices that may change parts to balance training vertices. Few move where
# training vertices lie all over the graph: one of 64 parts of an R-MAT graph (2M edges) had 1.24 of
# the mean; to correct that, 0.1 % of the vertices move, for 0.02 % more halo rows.
FEW_MOVED = 0.005
CLUSTERS = 64  # groups of vertices that order the rows (locality_order)
# Vertices. All features of a smaller graph fit the processor's cache, so their order is irrelevant.
SMALL = 2_000


def chosen(method: str, graph: Graph | GraphStats) -> str:
    """Resolve the partitioner auto: METIS, or KaMinPar for a large graph if it is installed.

    A graph that comes with a partition keeps the partition's method. Raises SpecError for an
    unknown name."""
    if (method := one_of("--partitioner", method, (AUTO, *METHODS))) != AUTO:
        return method
    if isinstance(graph, Graph) and graph.cut is not None:
        return graph.cut.method
    large = isinstance(graph, Graph) and graph.stats.edges > FEW_EDGES
    return "kaminpar" if large and find_spec("kaminpar") else "metis"


def partition(graph: Graph | GraphStats, parts: int, method: str = "metis", seed: int = 0) -> Owner:
    """Return the part [N] of each vertex, in [0, parts), no part empty.

    method: 'metis' and 'kaminpar' minimise the edge cut, 'metis-volume' the rows sent;
    'kaminpar-train' also balances training vertices; 'hash' and 'random' ignore edges. Edge
    directions do not matter. A graph that comes with such a partition keeps it. Raises SpecError
    for more parts than vertices, an unknown method, or statistics only."""
    if not isinstance(graph, Graph):
        raise SpecError(
            f"{graph.source}: statistics only, so there is nothing to partition; give the graph"
            " itself (.npz or synthetic:...)"
        )
    method = one_of("partitioner", method, METHODS)
    vertices = graph.stats.vertices
    check_parts(parts, vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(vertices, np.int32)
    if graph.cut is not None and (graph.cut.parts, graph.cut.method) == (parts, method):
        return graph.cut.owner
    if method == "hash":
        # Fibonacci hashing: the upper digits of id * 2**32 / golden ratio
        mixed = np.arange(vertices, dtype=np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)
        return repair((mixed * np.uint64(parts) >> np.uint64(32)).astype(np.int32), parts)
    if method == "random":
        return (np.random.default_rng(seed).permutation(vertices) % parts).astype(np.int32)

    key = f"{version_of(library_of(method))} {graph.stats.hash} {parts} {method} {seed}"
    return cached(
        key, vertices, parts, lambda: evenly(method, undirected(graph), parts, seed, graph.train)
    )


def evenly(method: str, edges: Csr, parts: int, seed: int, train: NDArray[np.bool_]) -> Owner:
    """Partition a symmetric CSR by a library, fill empty parts, and balance KaMinPar's parts."""
    part = repair(cut(method, edges, parts, seed), parts)
    if library_of(method) == "kaminpar":
        even_out(edges, part, parts, np.ones(part.size, bool))
        counts = np.bincount(part[train], minlength=parts)
        move = np.maximum(counts - MOST_MARKED * counts.mean(), 0).sum()
        if method == "kaminpar-train" or move <= FEW_MOVED * part.size:
            even_out(edges, part, parts, train)
    return part


def partition_weighted(
    edges: Csr, weights: Array | None, parts: int, method: str = "metis"
) -> Owner:
    """Return the part [n] of each vertex of a symmetric CSR without self-loops, by a library.

    The library minimises the edge cut and balances `weights` (whole numbers >= 0). Weights are
    ignored if they are so uneven that a part would hold fewer than three of the largest."""
    vertices = len(edges.indptr) - 1
    check_parts(parts, vertices, "the subgraph")
    library = library_of(method)
    digest = blake2b(digest_size=16)
    for array in (edges.indptr, edges.indices, *(() if weights is None else (weights,))):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    key = f"{version_of(library)} weighted {digest.hexdigest()} {parts} 0 {weights is None}"
    return cached(
        key, vertices, parts, lambda: repair(cut(library, edges, parts, 0, weights), parts)
    )


def locality_order(graph: Graph, method: str = "metis") -> Owner:
    """Return each vertex's position [N] in an order that groups clusters of the method's library.

    In this order aggregation finds more rows in cache. A small graph keeps its order."""
    vertices, library = graph.stats.vertices, library_of(method)
    if isinstance(graph, PartGraph) and library_of(graph.folder.about.partitioner) == library:
        return graph.folder.array(None, "order")
    rank = np.arange(vertices, dtype=np.int32)
    if vertices >= SMALL:
        order = np.argsort(partition(graph, CLUSTERS, library), kind="stable")
        rank[order] = rank.copy()
    return rank


def undirected(graph: Graph) -> Csr:
    """Return the edges with every edge in both directions."""
    if not graph.stats.directed:
        return graph.csr_edges
    return both_ways(graph.adjacency)


def edges_between(graph: Graph, rows: Array) -> Csr:
    """Return the edges between the vertices `rows` (ascending) in both directions, [rows, rows].

    Of a partitioned folder only edges into these rows are read, some at a time."""
    place = np.full(graph.stats.vertices, -1, np.int32)
    place[rows] = np.arange(rows.size, dtype=np.int32)
    degree, found, inside = graph.degree_of(rows), [], []
    for run in runs(degree, AT_ONCE):
        ends = place[graph.neighbours(rows[run])]
        found.append(ends[ends >= 0])
        inside.append(np.append(0, np.cumsum(ends >= 0))[np.append(0, np.cumsum(degree[run]))])
    indptr = np.append(0, np.cumsum(np.concatenate([np.diff(ends) for ends in inside])))
    columns = np.concatenate(found)
    edges = matrix_of(CsrEdges(indptr, columns), np.ones(columns.size, bool))
    return both_ways(edges) if graph.stats.directed else edges


def repair(part: Owner, parts: int) -> Owner:
    """Fill empty parts, in place, and return the partition.

    METIS leaves some parts empty when parts are small. An empty part gets the last vertices of the
    largest part: an even share, but at most half of them.

    >>> repair(np.array([0, 0, 0, 0], np.int32), 2).tolist()
    [0, 0, 1, 1]
    """
    sizes = np.bincount(part, minlength=parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        take = max(1, min(len(part) // parts, int(sizes[largest]) // 2))
        part[np.flatnonzero(part == largest)[-take:]] = empty
        sizes[largest] -= take
        sizes[empty] = take
    return part


def check_parts(parts: int, vertices: int, what: str) -> None:
    """Raise SpecError for more parts than vertices; `what` names the graph."""
    if not 1 <= parts <= vertices:
        raise SpecError(
            f"{what}: parts must lie in [1, {vertices:,}] (no more parts than vertices), got"
            f" {parts:,}"
        )
