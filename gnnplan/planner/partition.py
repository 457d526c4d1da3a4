"""Which part each vertex belongs to. METIS where it pays, cached on disk by the graph's content."""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, ClassVar, Literal

import numpy as np
import pymetis
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import cache_dir, suggest, write_atomically
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.sampling import GOLDEN, mix
from gnnplan.planner.units import show_bytes

Array = NDArray[Any]
METHODS = ("metis", "metis-volume", "hash", "random")
VERSION = 2  # of what is cached: raise it when the same key should give another partition
MOST_EDGES = 80_000_000  # directed, that METIS is given; with the graph beside it that is 11 GB
EDGE_BYTES = 120  # [B] of METIS per directed edge: 64-bit numbers, a graph per level; 76 to 120 measured (benchmarks/scale.py)
SMALL = 2_000  # vertices; below, all features fit the processor's cache and order does not matter


def partition(graph: Graph | GraphStats, parts: int, method: str = "metis", seed: int = 0,
              balance: Literal["vertices", "train"] = "vertices") -> NDArray[np.int32]:
    """Part [N] of each vertex, in [0, parts), no part empty.

    metis cuts few edges, metis-volume sends few rows, hash and random know nothing of edges. `balance` is what METIS makes even:
    vertices, or training vertices as much as vertices (random splits are even without it). Edge directions do not count.
    Raises SpecError for more parts than vertices, an unknown method, or a graph of statistics only.
    """
    if not isinstance(graph, Graph):
        raise SpecError(f"{graph.source}: statistics only, so there is nothing to partition; give the graph itself (.npz or synthetic:...)")
    if method not in METHODS:
        raise SpecError(f"partitioner {method!r} is unknown{suggest(method, METHODS)}")
    vertices = graph.stats.vertices
    check_parts(parts, vertices, graph.stats.source)
    if parts == 1:
        return np.zeros(vertices, np.int32)
    if method == "hash":
        return repair(_hashed(vertices, parts), parts)
    if method == "random":
        return (np.random.default_rng(seed).permutation(vertices) % parts).astype(np.int32)

    def compute() -> NDArray[np.int32]:
        weights = None
        if balance == "train" and (trained := int(graph.train.sum())):
            weights = 1 + graph.train * max(1, round(vertices / trained))  # METIS takes one weight here: both halves of it equally large
        return repair(_metis(*undirected(graph), weights, parts, seed, volume=method == "metis-volume"), parts)

    return cached(f"{graph.stats.hash} {parts} {method} {seed} {balance}", vertices, parts, compute)


def partition_weighted(indptr: Array, indices: Array, weights: Array | None, parts: int, seed: int = 0) -> NDArray[np.int32]:
    """Part [n] of each vertex of a symmetric CSR without self-loops, METIS edge cut, balanced by `weights` (whole numbers >= 0).

    Weights so uneven that a part would hold fewer than three of the largest are ignored.
    """
    vertices = len(indptr) - 1
    check_parts(parts, vertices, "the subgraph")
    digest = blake2b(digest_size=16)
    for array in (indptr, indices, *(() if weights is None else (weights,))):
        digest.update(np.ascontiguousarray(array, dtype=np.int64).data)
    key = f"weighted {digest.hexdigest()} {parts} {seed} {weights is None}"
    return cached(key, vertices, parts, lambda: repair(_metis(indptr, indices, weights, parts, seed), parts))


def locality_order(graph: Graph, clusters: int = 64) -> NDArray[np.int32]:
    """Rank [N] of each vertex in an order that keeps METIS clusters together, so that aggregation finds its rows in cache.

    Row v moves to row rank[v]; identity for small graphs.
    """
    vertices = graph.stats.vertices
    rank = np.arange(vertices, dtype=np.int32)
    if vertices >= SMALL:
        rank[np.argsort(partition(graph, clusters), kind="stable")] = np.arange(vertices, dtype=np.int32)
    return rank


def undirected(graph: Graph) -> tuple[Array, Array]:
    """CSR (indptr, indices) in which every edge goes both ways."""
    if not graph.stats.directed:
        return graph.indptr, graph.indices
    both = sp.csr_matrix(graph.adjacency + graph.adjacency.T)
    return both.indptr, both.indices


def repair(part: NDArray[np.int32], parts: int) -> NDArray[np.int32]:
    """Give every empty part an even share, or half, of the largest part's last vertices. METIS leaves parts empty when they are small."""
    sizes = np.bincount(part, minlength=parts)
    for empty in np.flatnonzero(sizes == 0):
        largest = int(sizes.argmax())
        take = max(1, min(len(part) // parts, int(sizes[largest]) // 2))
        part[np.flatnonzero(part == largest)[-take:]] = empty
        sizes[largest] -= take
        sizes[empty] = take
    return part


def check_parts(parts: int, vertices: int, what: str) -> None:
    if not 1 <= parts <= vertices:
        raise SpecError(f"{what}: parts must lie in [1, {vertices:,}] (no more parts than vertices), got {parts:,}")


def _hashed(vertices: int, parts: int) -> NDArray[np.int32]:
    """Fibonacci hashing of the vertex id: the top bits of id * 2**32 / golden ratio."""
    mixed = np.arange(vertices, dtype=np.uint64) * np.uint64(2654435769) & np.uint64(0xFFFFFFFF)
    return (mixed * np.uint64(parts) >> np.uint64(32)).astype(np.int32)


def _metis(indptr: Array, indices: Array, weights: Array | None, parts: int, seed: int, volume: bool = False) -> NDArray[np.int32]:
    vertices = len(indptr) - 1
    if parts == 1 or len(indices) == 0 or parts == vertices:  # METIS divides by the number of edges
        return (np.arange(vertices) * parts // max(vertices, 1)).astype(np.int32)
    adjacency, _ = for_metis(indptr, indices)
    options = pymetis.Options(objtype=int(volume), seed=seed + 1)  # to C's random numbers, seeds 0 and 1 are the same
    whole = None
    weights = None if weights is None else np.asarray(weights, dtype=np.int64)
    if weights is not None and int(weights.sum()) >= 3 * parts * int(weights.max()) > 0:
        # METIS stumbles, and prints, over weights of 0 and where a part would hold a vertex or two, so there they do not count
        grain = max(1, min(1000, 2**30 // int(weights.sum())))
        whole = 1 + grain * weights
    return np.asarray(pymetis.part_graph(parts, adjacency, vweights=whole, recursive=False, options=options).vertex_part, dtype=np.int32)


def for_metis(indptr: Array, indices: Array, weights: Array | None = None) -> tuple[pymetis.CSRAdjacency, Array | None]:
    """A symmetric CSR and its edges' weights in METIS's own width, so that nothing is converted slowly; thinned where it is large."""
    metis_must_fit(min(len(indices), MOST_EDGES))
    if len(indices) > MOST_EDGES:
        stays = thinned(indptr, indices, MOST_EDGES)
        indptr = np.concatenate([[0], np.cumsum(stays, dtype=np.int64)])[indptr]
        indices, weights = indices[stays], None if weights is None else weights[stays]
    adjacency = pymetis.CSRAdjacency(indptr.astype(np.int64), indices.astype(np.int64))
    return adjacency, None if weights is None else weights.astype(np.int64, copy=False)


def thinned(indptr: Array, indices: Array, most: int) -> NDArray[np.bool_]:
    """Which about `most` of a symmetric CSR's edges stay [E], both directions or none, the same on every machine.

    Edge (u, v) stays with chance min(1, c / min(degree u, degree v)): what two hubs have between them matters least to a cut, and nobody
    loses all neighbours (effective resistances, which sparsifiers sample by, are about 1 / degree; Spielman & Srivastava 2008).
    """
    degree = np.diff(indptr).astype(np.int32)
    into = np.repeat(np.arange(len(degree), dtype=np.int32), degree)
    low = np.minimum(degree[into], degree[indices])
    edges, each = np.bincount(low), np.arange(low.max() + 1).clip(min=1)
    stay = np.cumsum(edges) + np.arange(edges.size) * (np.sum(edges / each) - np.cumsum(edges / each))  # were c 0, 1, 2, ..
    c = np.interp(most, stay, np.arange(edges.size))
    pair = np.minimum(into, indices).astype(np.uint64) << np.uint64(32) | np.maximum(into, indices).astype(np.uint64)
    del into
    chance = (np.minimum(1, c / each) * 2.0**32).astype(np.uint64)
    return np.asarray(mix(pair * GOLDEN) >> np.uint64(32) < chance[low])


def metis_must_fit(edges: int) -> None:
    """Refuse before METIS runs into the end of memory, where the system kills the process without a word."""
    need, room = EDGE_BYTES * edges, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if need > room:
        raise SpecError(f"METIS takes up to about {EDGE_BYTES} bytes per directed edge (edges: {edges:,}, so {show_bytes(need)}; memory of "
                        f"this machine: {show_bytes(room)}); use the partitioner hash or random (gsplit: splitter='random'), or a machine "
                        "with more memory")  # fmt: skip


class Stopwatch:
    """Seconds of what is done within it, as if no partition had come from the cache: those count as when they were made."""

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
        for watch in cls._running:
            watch.seconds += seconds


def cached(key: str, vertices: int, parts: int, compute: Callable[[], NDArray[np.int32]]) -> NDArray[np.int32]:
    """What `compute` gives, from disk if it is there, whole and plausible. How long it took is kept beside it."""
    name = blake2b(f"{VERSION} {pymetis.version} {key}".encode(), digest_size=16).hexdigest()
    path = cache_dir() / "partitions" / f"{name}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # absent or damaged: compute it again
        part = np.load(path, allow_pickle=False)
        if part.shape == (vertices,) and part.dtype == np.int32 and part.min() >= 0 and part.max() < parts:
            Stopwatch.saved(float(path.with_suffix(".seconds").read_text()))
            return np.asarray(part)
    start = time.perf_counter()
    part = compute()
    seconds = time.perf_counter() - start
    buffer = io.BytesIO()
    np.save(buffer, part, allow_pickle=False)
    with contextlib.suppress(SpecError):  # a closed or full cache costs time, not the answer
        write_atomically(path, buffer.getvalue(), parents=True)
        write_atomically(path.with_suffix(".seconds"), f"{seconds:.3g}\n")
    return part
