"""Profiles of graphs: degrees, and per number of parts the halo, edge cut, balance and growth.

The halo B_i of part i is the set of vertices outside part i with an edge into it. The rank of part
i receives the halo's rows before it aggregates."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.disk_cache import VERSION as PARTITION_VERSION
from gnnplan.planner.graph.disk_cache import remembered
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.partition import check_parts, partition
from gnnplan.planner.ownership.estimated import (
    EstimatedLayout,
    expected_halo_rows,
    mixing_of,
)
from gnnplan.planner.ownership.layout import distances
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import Ints, shares

Array = NDArray[Any]
VERSION = 1  # version of cached profiles
MOST_HOPS = 1000
# fields of GraphStats that a profile repeats
FACTS = (
    *("name", "source", "vertices", "edges", "features", "classes"),
    *("train_vertices", "multilabel", "directed"),
)


def profile(
    graph: Graph | GraphStats,
    parts: Sequence[int],
    method: str = "metis",
    servers: int | None = None,
    hops: int = 3,
) -> Json:
    """Return facts about a graph and its partitions, as data for JSON.

    {"graph": {...}, "parts": {"8": {"halo_rows", "halo_rows_per_part", "edge_cut", ...}}}

    Rows are vertices; edges are directed. `growth` has an entry for each h = 1 .. hops: (own rows +
    rows within h hops) / own rows, as a mean over servers. servers: part p is on server p * servers
    // parts; default: a server per part. If only statistics are known, figures are expectations and
    are marked as "estimated". Raises SpecError for numbers of parts that do not fit."""
    stats = graph.stats if isinstance(graph, Graph) else graph
    if not 1 <= hops <= MOST_HOPS:
        raise SpecError(f"hops must lie in [1, {MOST_HOPS}], got {hops}")
    if servers is not None and servers < 1:
        raise SpecError(f"servers must be at least 1, got {servers}")
    entries = {}
    for count in dict.fromkeys(parts):
        check_parts(count, stats.vertices, stats.source)
        if servers is not None and servers > count:
            raise SpecError(
                f"{stats.source}: {count} parts cannot fill {servers} servers; use parts >= servers"
            )
        groups = servers or count
        entries[str(count)] = (
            _measured(graph, count, method, groups, hops)
            if isinstance(graph, Graph)
            else _expected(graph, count, method, groups, hops)
        )
    return {"graph": _facts(graph, stats), "parts": entries}


def within(graph: Graph, part: Array, parts: int, hops: int) -> Ints:
    """Return the rows within h = 0 .. hops hops of each part, own rows included [hops+1, parts].

    A part needs these rows to compute h layers without other parts. The rows at one hop are the
    part's halo."""
    sizes = np.zeros((hops + 1, parts), np.int64)
    for number in range(parts):
        hop = np.minimum(distances(graph, part == number, hops), hops + 1)
        sizes[:, number] = np.cumsum(np.bincount(hop, minlength=hops + 2))[:-1]
    return sizes


def _facts(graph: Graph | GraphStats, stats: GraphStats) -> Json:
    degree: dict[str, float] = {"mean": stats.edges / stats.vertices}
    if isinstance(graph, Graph):
        low, median, p90, p99, high = np.percentile(graph.degree, [0, 50, 90, 99, 100]).tolist()
        degree = {
            "min": int(low),
            "median": median,
            **degree,
            "p90": p90,
            "p99": p99,
            "max": int(high),
        }
    return {
        **{name: getattr(stats, name) for name in FACTS},
        "statistics_only": not stats.known,
        "hash": stats.hash,
        "notes": list(stats.notes),
        "degree": degree,
    }


def _measured(graph: Graph, parts: int, method: str, servers: int, hops: int) -> Json:
    """Return an entry of `parts` for a known graph, from the cache if it is there."""
    question = parts, method, servers, hops
    key = " ".join(map(str, (VERSION, PARTITION_VERSION, graph.stats.hash, *question)))
    entry, cached = remembered("profiles", key, lambda: _counted(graph, *question))
    return {**entry, "cached": cached}


def _counted(graph: Graph, parts: int, method: str, servers: int, hops: int) -> Json:
    start = time.perf_counter()
    part = partition(graph, parts, method)
    around = within(graph, part.astype(np.int64) * servers // parts, servers, hops)
    near = around if servers == parts else within(graph, part, parts, 1)
    external = (near[1] - near[0]).tolist()

    def in_each(weights: Array | None = None) -> list[int]:
        counts: list[int] = np.bincount(part, weights, parts).astype(int).tolist()
        return counts

    return {
        "method": method,
        "seed": 0,  # of `partition`
        "servers": servers,
        "estimated": False,
        "halo_rows": sum(external),
        "halo_rows_per_part": external,
        # directed edges between parts
        "edge_cut": int(np.count_nonzero(np.repeat(part, graph.degree) != part[graph.indices])),
        "rows_per_part": in_each(),
        "edges_per_part": in_each(graph.degree),  # edges into the part
        "train_per_part": in_each(graph.train),
        "balance": max(in_each()) * parts / part.size,
        "growth": (around[1:] / around[0]).mean(axis=1).tolist(),
        "seconds": time.perf_counter() - start,
    }


def _expected(stats: GraphStats, parts: int, method: str, servers: int, hops: int) -> Json:
    """Return an entry of `parts` for a graph known by statistics only.

    If the graph's file declares halo rows for this number of parts, they are used. Otherwise halo
    rows are estimated from other numbers of parts or from other graphs (estimated.Mixing);
    for a random partition, they are those of a random graph."""
    n = stats.vertices
    mixing = mixing_of(stats, method)
    declared = parts in stats.halo_rows and bool(mixing.known)
    probability = min(1.0, stats.edges / max(1, n * (n - 1)) * mixing.at(parts))
    rows = stats.halo_rows[parts] if declared else round(expected_halo_rows(n, parts, probability))
    around = EstimatedLayout(n, stats.edges, tuple(range(servers)), hops, 0, hops, mixing=mixing)
    steps = [around.region(hops - hop) / (n / servers) for hop in range(1, hops + 1)]

    def even(total: int) -> list[int]:
        each: list[int] = shares(total, parts).tolist()
        return each

    return {
        "method": "declared" if declared else "estimated" if mixing.known else "random graph",
        "servers": servers,
        "estimated": True,
        "halo_rows": rows,
        "halo_rows_per_part": even(rows),
        "edge_cut": None if mixing.known else round(stats.edges * (1 - 1 / parts)),
        "rows_per_part": even(n),
        "edges_per_part": even(stats.edges),
        "train_per_part": even(stats.train_vertices),
        "balance": 1.0,
        "growth": steps,
        "seconds": 0.0,
        "cached": False,
    }
