"""Facts of a graph that a plan needs: degrees, and per part count the halo, the cut, the balance and the growth by hops.

B_i, the halo of part i: the vertices outside part i that have an edge into it, whose rows part i fetches before it aggregates.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.estimate import EstimatedLayout, mixing_of
from gnnplan.planner.files import cache_dir, write_atomically
from gnnplan.planner.formulas import expected_halo_rows
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.partition import VERSION as PARTITION_VERSION
from gnnplan.planner.partition import partition

Array = NDArray[Any]
VERSION = 1  # of what is cached
MOST_HOPS = 1000


def profile(graph: Graph | GraphStats, parts: Sequence[int], method: str = "metis", servers: int | None = None, hops: int = 3,
            seed: int = 0) -> dict[str, Any]:
    """JSON-ready facts: {"graph": {...}, "parts": {"8": {"halo_rows", "halo_rows_per_part", "edge_cut", ...}}}.

    Rows are vertices, edges are directed; an entry of `growth` is (own rows + rows within h hops) / own rows, mean over servers,
    for h = 1 .. hops. With `servers`, consecutive parts share one (part p sits on server p * servers // parts); else each part is
    a server. Of a graph of statistics only the figures are expectations for a random graph and say so ("estimated").
    Raises SpecError for part counts that do not fit.
    """
    stats = graph.stats if isinstance(graph, Graph) else graph
    if not 1 <= hops <= MOST_HOPS:
        raise SpecError(f"hops must lie in [1, {MOST_HOPS}], got {hops}")
    if servers is not None and servers < 1:
        raise SpecError(f"servers must be at least 1, got {servers}")
    entries = {}
    for count in dict.fromkeys(parts):
        if not 1 <= count <= stats.vertices:
            raise SpecError(f"{stats.source}: parts must lie in [1, {stats.vertices:,}] (no more parts than vertices), got {count:,}")
        if servers is not None and servers > count:
            raise SpecError(f"{stats.source}: {count} parts cannot fill {servers} servers; use parts >= servers")
        groups = servers or count
        entries[str(count)] = _measured(graph, count, method, groups, hops, seed) if isinstance(graph, Graph) else _expected(
            graph, count, method, groups, hops)
    return {"graph": _facts(graph, stats), "parts": entries}


def halo(indptr: Array, indices: Array, part: Array, parts: int) -> list[NDArray[np.int32]]:
    """B_i of every part: sorted vertices outside part i with an edge into it."""
    vertices = len(indptr) - 1
    into = np.repeat(part, np.diff(indptr))
    cut = into != part[indices]
    keys = np.unique(into[cut].astype(np.int64) * vertices + indices[cut])
    return np.split((keys % vertices).astype(np.int32), np.searchsorted(keys, vertices * np.arange(1, parts)))


def growth(indptr: Array, indices: Array, part: Array, parts: int, hops: int) -> NDArray[np.int64]:
    """Rows [hops+1, parts] within h = 0 .. hops hops of each part, its own included: what it needs to compute h layers alone."""
    vertices = len(indptr) - 1
    source_order = np.argsort(indices, kind="stable")  # as out-neighbours: v is needed by whoever one of its targets is needed by
    target = np.repeat(np.arange(vertices), np.diff(indptr))[source_order]
    degree = np.bincount(indices, minlength=vertices)
    starts, occupied = (np.cumsum(degree) - degree)[degree > 0], degree > 0
    sizes = np.zeros((hops + 1, parts), np.int64)
    for first in range(0, parts, 64):  # 64 parts at a time, a bit each
        mine = (part >= first) & (part < first + 64)
        reached = np.where(mine, np.uint64(1) << np.where(mine, part - first, 0).astype(np.uint64), np.uint64(0))
        for hop in range(hops + 1):
            if hop and len(target):
                needed = np.bitwise_or.reduceat(reached[target], starts)
                reached[occupied] |= needed
            bits = np.unpackbits(reached.astype("<u8").view(np.uint8).reshape(vertices, 8), axis=1, bitorder="little")
            sizes[hop, first : first + 64] = bits.sum(axis=0)[: parts - first]
    return sizes


def _facts(graph: Graph | GraphStats, stats: GraphStats) -> dict[str, Any]:
    degree: dict[str, float] = {"mean": stats.edges / stats.vertices}
    if isinstance(graph, Graph):
        low, median, p90, p99, high = np.percentile(graph.degree, [0, 50, 90, 99, 100]).tolist()
        degree = {"min": int(low), "median": median, "mean": stats.edges / stats.vertices, "p90": p90, "p99": p99, "max": int(high)}
    return {"name": stats.name, "source": stats.source, "vertices": stats.vertices, "edges": stats.edges, "features": stats.features,
            "classes": stats.classes, "train_vertices": stats.train_vertices, "multilabel": stats.multilabel, "directed": stats.directed,
            "statistics_only": not stats.known, "hash": stats.hash, "notes": list(stats.notes), "degree": degree}  # fmt: skip


def _measured(graph: Graph, parts: int, method: str, servers: int, hops: int, seed: int) -> dict[str, Any]:
    key = f"{VERSION} {PARTITION_VERSION} {graph.stats.hash} {parts} {method} {servers} {hops} {seed}"
    path = cache_dir() / "profiles" / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):  # absent or damaged: count again
        entry = json.loads(path.read_text())
        if isinstance(entry, dict) and entry.pop("key", None) == key:
            return {**entry, "cached": True}
    start = time.perf_counter()
    part = partition(graph, parts, method, seed)
    external = [len(rows) for rows in halo(graph.indptr, graph.indices, part, parts)]
    rows = np.bincount(part, minlength=parts)
    within = growth(graph.indptr, graph.indices, part.astype(np.int64) * servers // parts, servers, hops)
    entry = {
        "method": method, "seed": seed, "servers": servers, "estimated": False,
        "halo_rows": sum(external), "halo_rows_per_part": external,
        "edge_cut": int(np.count_nonzero(np.repeat(part, graph.degree) != part[graph.indices])),  # directed edges between parts
        "rows_per_part": rows.tolist(),
        "edges_per_part": np.bincount(part, weights=graph.degree, minlength=parts).astype(int).tolist(),  # edges into the part
        "train_per_part": np.bincount(part, weights=graph.train, minlength=parts).astype(int).tolist(),
        "balance": float(rows.max() / rows.mean()),
        "growth": (within[1:] / within[0]).mean(axis=1).tolist(),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    with contextlib.suppress(SpecError):  # a closed or full cache costs time, not the answer
        write_atomically(path, json.dumps({**entry, "key": key}), parents=True)
    return {**entry, "cached": False}


def _expected(stats: GraphStats, parts: int, method: str, servers: int, hops: int) -> dict[str, Any]:
    """The halo rows that the file states, or what those of other part counts, of other graphs say of this one (estimate.Mixing); cut
    at random, expectations for a random graph."""
    n = stats.vertices
    mixing = mixing_of(stats, method)
    declared = parts in stats.halo_rows and bool(mixing.known)
    probability = min(1.0, stats.edges / max(1, n * (n - 1)) * mixing.at(parts))
    rows = stats.halo_rows[parts] if declared else round(float(expected_halo_rows(n, parts, probability)))
    around = EstimatedLayout(n, stats.edges, tuple(range(servers)), hops, 0, hops, mixing=mixing)
    steps = [around.region(hops - hop) / (n / servers) for hop in range(1, hops + 1)]

    def even(total: int) -> list[int]:
        return [total // parts + (i < total % parts) for i in range(parts)]

    return {
        "method": "declared" if declared else "estimated" if mixing.known else "random graph", "servers": servers, "estimated": True,
        "halo_rows": rows, "halo_rows_per_part": even(rows), "edge_cut": None if mixing.known else round(stats.edges * (1 - 1 / parts)),
        "rows_per_part": even(n), "edges_per_part": even(stats.edges), "train_per_part": even(stats.train_vertices),
        "balance": 1.0, "growth": steps, "seconds": 0.0, "cached": False,
    }  # fmt: skip
