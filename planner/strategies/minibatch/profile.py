"""Statistics of a graph's mini-batches, from the first batches that training would draw.

    frontier   rows of h_0 .. h_L and edges of layers 1 .. L of a mini-batch: mean and 95th
               percentile over batches
    overlap    rows and edges of all micro-batches, one per rank, divided by those of their
               mini-batch (GSplit, Table 1)
    hits       share of reads that hit a cache on every GPU, by the share of all rows in the cache
               (Quiver, PaGraph)
    split      with GSplit's owners: share of edges between owners, largest number of edges of a
               rank over the mean, and bytes that rank i sends to rank j per batch

For a graph known by statistics only, frontier and overlap are expectations for a random graph; hits
and split are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.gnn.model import Model, describe
from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.partition import owners
from gnnplan.planner.ownership.estimated import EstimatedBatches
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.strategies.minibatch.feature_store import HOT, hottest
from gnnplan.planner.strategies.minibatch.on_batches import check_batches
from gnnplan.planner.strategies.minibatch.supply import ID
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import Ints, offsets
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_count

CACHED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # sizes of caches, as shares of all rows
HIGH = 95  # percentile


def probe(graph: Graph | GraphStats, workload: Workload, ranks: Sequence[int]) -> Json:
    """Return the profile of a graph's mini-batches for these numbers of ranks, JSON-ready.

    {"batch", "fanouts", "batches": number per epoch, "probed": number drawn, "estimated",
     "rows": of h_0 .. h_L, "edges": of layers 1 .. L, both {"mean": [..], "p95": [..]},
     "ranks": {"4": {"overlap", "hits", "split"}, ..}}

    Raises SpecError if the graph has no batches of this size.
    """
    stats = graph.stats if isinstance(graph, Graph) else graph
    check_batches(workload, stats, max(ranks), "leave --batch out")
    model = describe(workload, stats.features, stats.classes, stats.stored_per_row)
    each: dict[int, Batches] = {}  # number of ranks -> batches, of which each rank has its share
    for count in (1, *ranks):
        notify("drawing mini-batches", show_count(count, "rank"))
        groups = tuple(range(count))
        each[count] = (
            Batches(graph, workload, groups, np.zeros(stats.vertices, np.int32))
            if isinstance(graph, Graph)
            else EstimatedBatches(graph, workload, groups)
        )
    steps = each[1].steps
    # estimated batches are equal, so one is enough
    probed = min(steps, *(b.known for b in each.values())) if isinstance(graph, Graph) else 1
    counts = {count: _counts(batches, probed) for count, batches in each.items()}
    by_ranks = {}
    for count in ranks:
        hits = split = None
        if isinstance(graph, Graph):
            notify("comparing what ranks share", show_count(count, "rank"))
            hits = _hits(graph, workload, each[count], probed)
        if isinstance(graph, Graph) and count > 1:
            member = owners(graph, count, "gsplit", workload)
            split = _split(model, Batches(graph, workload, (0,) * count, member), probed)
        (rows, edges), (batch_rows, batch_edges) = counts[count], counts[1]
        features = float(rows[:, 0].sum() / max(batch_rows[:, 0].sum(), 1))
        overlap = {"features": features, "edges": float(edges.sum() / max(batch_edges.sum(), 1))}
        by_ranks[str(count)] = {"overlap": overlap, "hits": hits, "split": split}
    return {
        "batch": workload.batch,
        "fanouts": ["all" if f == ALL else f for f in workload.fanouts],
        "batches": steps,
        "probed": probed,
        "estimated": not isinstance(graph, Graph),
        "rows": _spread(counts[1][0]),
        "edges": _spread(counts[1][1]),
        "ranks": by_ranks,
    }


def _counts(batches: Batches, probed: int) -> tuple[Ints, Ints]:
    """Return sums over ranks: rows of h_0 .. h_L [batches, L + 1], edges [batches, L]."""
    rows, edges = zip(*(batches.at(step).totals() for step in range(probed)), strict=True)
    return np.array(rows), np.array(edges)


def _spread(counts: Ints) -> dict[str, list[float]]:
    """Return mean and 95th percentile over batches, of counts [batches, ..]."""
    return {
        "mean": counts.mean(0).tolist(),
        f"p{HIGH}": np.percentile(counts, HIGH, axis=0).tolist(),
    }


def _hits(graph: Graph, w: Workload, batches: Batches, probed: int) -> dict[str, dict[str, float]]:
    """Return the share of reads that hit, by the measure of heat (HOT) and the cache's size."""
    n, ranks, hits = graph.stats.vertices, range(len(batches.groups)), {}
    for hot in HOT:
        position = np.empty(n, np.int64)  # of each vertex, the hottest first
        position[hottest(graph, w, hot, len(ranks))] = np.arange(n)
        reads = np.zeros(n, np.int64)
        for step in range(probed):
            for rank in ranks:
                reads[position[batches.at(step).rows(rank, 0)]] += 1
        below = offsets(reads)
        hits[hot] = {f"{share:g}": float(below[round(share * n)] / below[-1]) for share in CACHED}
    return hits


def _split(model: Model, batches: Batches, probed: int) -> Json:
    """Return statistics of GSplit's split of these batches.

    For layers 1 .. L: the share of edges between owners, and the largest number of edges of a rank
    over the mean. Bytes per batch [ranks, ranks]: ids, rows (forward), gradients (backward).
    """
    ranks, layers = len(batches.groups), range(1, batches.workload.layers + 1)
    edges, crossing = np.zeros((2, len(layers), ranks), np.int64)
    sent = np.zeros((ranks, ranks))
    for step in range(probed):
        batch = batches.at(step)
        for layer in layers:
            facts, constant = batch.facts(layer), layer <= model.first_varying
            edges[layer - 1] += facts.edges
            crossing[layer - 1] += batch.crossing(layer)
            row = (
                model.feature_transit_bytes(1.0)
                if constant
                else model.exchanged_width(layer, narrow=False) * model.itemsize
            )
            sends = np.asarray(facts.sends)
            sent += (
                sends * row
                + sends.T * (ID + (0 if constant else row))
                + ID * ~np.eye(ranks, dtype=bool)
            )
    return {
        "cross_edges": (crossing.sum(1) / np.maximum(edges.sum(1), 1)).tolist(),
        "balance": (edges.max(1) / np.maximum(edges.mean(1), 1e-9)).tolist(),
        "bytes": (sent / probed).tolist(),
    }
