"""Partitions a graph: the part of each vertex, by METIS or by simpler methods.

METIS partitions are cached on disk under the hash of the graph's content."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import pymetis
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.sampling import GOLDEN, mix
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir, suggest, write_atomically
from gnnplan.planner.vocabulary.units import show_bytes

Array = NDArray[Any]
METHODS = ("metis", "metis-volume", "hash", "random")
VERSION = 2  # of the cache: raise it when the same key should give another partition
MOST_EDGES = 80_000_000  # directed edges that METIS is given; with the graph that takes 11 GB
# [B] that METIS takes per directed edge: 64-bit numbers, and a graph per level. 76 to 120 were
# measured (benchmarks/scale.py).
EDGE_BYTES = 120
# Vertices. All features of a smaller graph fit the processor's cache, so their order is irrelevant.
SMALL = 2_000


def partition(
    graph: Graph | GraphStats,
    parts: int,
    method: str = "metis",
    seed: int = 0,
) -> NDArray[np.int32]:
    """Part [N] of each vertex, in [0, parts), no part empty.

    method: 'metis' minimises the edge cut, 'metis-volume' the rows sent; 'hash' and 'random' ignore
    edges. Edge directions do not matter. A graph that is cut so already keeps its parts. Raises
    SpecError for more parts than vertices, an unknown method, or statistics only."""
    if not isinstance(graph, Graph):
        raise SpecError(
            f"{graph.source}: statistics only, so there is nothing to partition; give the graph"
            " itself (.npz or synthetic:...)"
        )
    if method not in METHODS:
        raise SpecError(f"partitioner {method!r} is unknown{suggest(method, METHODS)}")
    vertices = graph.stats.vertices
    check_parts(parts, vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(vertices, np.int32)
    if graph.cut is not None and (graph.cut.parts, graph.cut.method) == (parts, method):
        return graph.cut.owner
    if method == "hash":
        return repair(_hashed(vertices, parts), parts)
    if method == "random":
        return (np.random.default_rng(seed).permutation(vertices) % parts).astype(np.int32)

    def compute() -> NDArray[np.int32]:
        volume = method == "metis-volume"
        return repair(_metis(*undirected(graph), None, parts, seed, volume), parts)

    return cached(f"{graph.stats.hash} {parts} {method} {seed} vertices", vertices, parts, compute)


def partition_weighted(
    indptr: Array, indices: Array, weights: Array | None, parts: int
) -> NDArray[np.int32]:
    """Part [n] of each vertex of a symmetric CSR without self-loops, by METIS.

    METIS minimises the edge cut and balances `weights` (whole numbers >= 0). Weights are ignored if
    they are so uneven that a part would hold fewer than three of the largest."""
    vertices = len(indptr) - 1
    check_parts(parts, vertices, "the subgraph")
    digest = blake2b(digest_size=16)
    for array in (indptr, indices, *(() if weights is None else (weights,))):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    key = f"weighted {digest.hexdigest()} {parts} 0 {weights is None}"
    return cached(
        key, vertices, parts, lambda: repair(_metis(indptr, indices, weights, parts, 0), parts)
    )


def locality_order(graph: Graph, clusters: int = 64) -> NDArray[np.int32]:
    """Position [N] of each vertex in an order that keeps METIS clusters together.

    In this order aggregation finds more of its rows in cache. A small graph keeps its order."""
    vertices = graph.stats.vertices
    rank = np.arange(vertices, dtype=np.int32)
    if vertices >= SMALL:
        rank[np.argsort(partition(graph, clusters), kind="stable")] = np.arange(
            vertices, dtype=np.int32
        )
    return rank


def undirected(graph: Graph) -> tuple[Array, Array]:
    """CSR (indptr, indices) of the graph with every edge in both directions."""
    if not graph.stats.directed:
        return graph.whole.indptr, graph.whole.indices
    both = sp.csr_matrix(graph.adjacency + graph.adjacency.T)
    return both.indptr, both.indices


def repair(part: NDArray[np.int32], parts: int) -> NDArray[np.int32]:
    """The partition without empty parts, changed in place.

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
    """Raises SpecError for more parts than vertices; `what` names the graph."""
    if not 1 <= parts <= vertices:
        raise SpecError(
            f"{what}: parts must lie in [1, {vertices:,}] (no more parts than vertices), got"
            f" {parts:,}"
        )


def _hashed(vertices: int, parts: int) -> NDArray[np.int32]:
    """Part of each vertex by Fibonacci hashing: the top bits of id * 2**32 / golden ratio."""
    mixed = np.arange(vertices, dtype=np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)
    return (mixed * np.uint64(parts) >> np.uint64(32)).astype(np.int32)


def _metis(
    indptr: Array,
    indices: Array,
    weights: Array | None,
    parts: int,
    seed: int,
    volume: bool = False,
) -> NDArray[np.int32]:
    """METIS's part of each vertex; contiguous parts where METIS cannot be called."""
    vertices = len(indptr) - 1
    if parts == 1 or len(indices) == 0 or parts == vertices:  # METIS divides by the number of edges
        return (np.arange(vertices) * parts // max(vertices, 1)).astype(np.int32)
    vertex_weights = None
    weights = None if weights is None else np.asarray(weights, dtype=np.int64)
    # METIS prints warnings and fails with weights of 0, and where a part would hold one or two
    # vertices. So weights are raised above 0, and ignored where a part would be that small.
    if weights is not None and int(weights.sum()) >= 3 * parts * int(weights.max()) > 0:
        scale = max(1, min(1000, 2**30 // int(weights.sum())))
        vertex_weights = 1 + scale * weights
    return by_metis(indptr, indices, parts, seed, vertex_weights, objtype=int(volume))


def by_metis(
    indptr: Array,
    indices: Array,
    parts: int,
    seed: int,
    loads: Array | None = None,
    weights: Array | None = None,
    **options: int,
) -> NDArray[np.int32]:
    """METIS's part of each vertex of a symmetric CSR. loads: of vertices; weights: of edges."""
    adjacency, weights = for_metis(indptr, indices, weights)
    # C's random numbers are the same for seeds 0 and 1
    chosen = pymetis.Options(seed=seed + 1, **options)
    found = pymetis.part_graph(
        parts, adjacency, vweights=loads, eweights=weights, recursive=False, options=chosen
    )
    return np.asarray(found.vertex_part, dtype=np.int32)


def for_metis(
    indptr: Array, indices: Array, weights: Array | None = None
) -> tuple[pymetis.CSRAdjacency, Array | None]:
    """A symmetric CSR and its edges' weights as 64-bit integers, which METIS need not convert.

    A CSR of more than MOST_EDGES edges is thinned. Raises SpecError if METIS would not fit."""
    edges = min(len(indices), MOST_EDGES)
    need, memory = EDGE_BYTES * edges, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > memory:  # the system would kill the process without a message
        raise SpecError(
            f"METIS takes up to about {EDGE_BYTES} bytes per directed edge (edges: {edges:,}, so"
            f" {show_bytes(need)}; memory of this machine: {show_bytes(memory)}); use the"
            " partitioner hash or random (gsplit: splitter='random'), or a machine with more memory"
        )
    if len(indices) > MOST_EDGES:
        kept = thinned(indptr, indices, MOST_EDGES)
        indptr = np.concatenate([[0], np.cumsum(kept, dtype=np.int64)])[indptr]
        indices, weights = indices[kept], None if weights is None else weights[kept]
    adjacency = pymetis.CSRAdjacency(indptr.astype(np.int64), indices.astype(np.int64))
    return adjacency, None if weights is None else weights.astype(np.int64, copy=False)


def thinned(indptr: Array, indices: Array, most: int) -> NDArray[np.bool_]:
    """Whether each edge of a symmetric CSR is kept [E]; about `most` are.

    An edge is kept in both directions or in none, and the same edges are kept on every machine.

    Edge (u, v) is kept with probability min(1, c / min(degree u, degree v)). Edges between two hubs
    matter least to a cut, and no vertex loses all its neighbours. Sparsifiers sample by effective
    resistance, which is about 1 / degree (Spielman & Srivastava 2008)."""
    degree = np.diff(indptr).astype(np.int32)
    into = np.repeat(np.arange(len(degree), dtype=np.int32), degree)
    low = np.minimum(degree[into], degree[indices])
    edges, degrees = np.bincount(low), np.arange(low.max() + 1).clip(min=1)
    # edges kept for c = 0, 1, 2, ..
    kept = np.cumsum(edges) + np.arange(edges.size) * (
        np.sum(edges / degrees) - np.cumsum(edges / degrees)
    )
    c = np.interp(most, kept, np.arange(edges.size))
    pair = np.minimum(into, indices).astype(np.uint64) << np.uint64(32) | np.maximum(
        into, indices
    ).astype(np.uint64)
    del into
    threshold = (np.minimum(1, c / degrees) * 2.0**32).astype(np.uint64)
    return np.asarray(mix(pair * GOLDEN) >> np.uint64(32) < threshold[low])


class Stopwatch:
    """A context that measures seconds, as if every partition was computed in it.

    A partition from the cache counts the seconds that it took when it was computed."""

    _running: ClassVar[list[Stopwatch]] = []

    def __enter__(self) -> Stopwatch:
        self.seconds, self._start = 0.0, time.perf_counter()
        self._running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.remove(self)
        self.seconds += time.perf_counter() - self._start

    @classmethod
    def saved(cls, seconds: float) -> None:
        """Add the seconds that the cache has saved to all running watches."""
        for watch in cls._running:
            watch.seconds += seconds


def cached(
    key: str, vertices: int, parts: int, compute: Callable[[], NDArray[np.int32]]
) -> NDArray[np.int32]:
    """The partition that `compute` makes, or the one on disk, if it is complete and plausible.

    The seconds that it took are stored with it."""
    name = blake2b(f"{VERSION} {pymetis.version} {key}".encode(), digest_size=16).hexdigest()
    path = cache_dir() / "partitions" / f"{name}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # absent or damaged: compute it again
        part = np.load(path, allow_pickle=False)
        if (
            part.shape == (vertices,)
            and part.dtype == np.int32
            and part.min() >= 0
            and part.max() < parts
        ):
            Stopwatch.saved(float(path.with_suffix(".seconds").read_text()))
            return np.asarray(part)
    start = time.perf_counter()
    part = compute()
    seconds = time.perf_counter() - start
    buffer = io.BytesIO()
    np.save(buffer, part, allow_pickle=False)
    with contextlib.suppress(SpecError):  # a closed or full cache costs time, not the answer
        write_atomically(path, buffer.getvalue(), parents=True)
        # a number that the disk has lost is no number: the partition is computed again
        write_atomically(path.with_suffix(".seconds"), f"{seconds:.3g}\n", at_once=True)
    return part
