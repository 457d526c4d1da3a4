"""What a graph's mini-batches are like, from the first batches that training would draw.

    frontier   rows of h_0 .. h_L and edges of layers 1 .. L of a mini-batch: mean and 95th
               percentile over batches
    overlap    rows and edges of all micro-batches, one per rank, over those of their mini-batch
               (GSplit, Table 1)
    hits       share of the rows read that a cache on every GPU has, by the share of all rows that
               it holds (Quiver, PaGraph)
    split      with GSplit's owners: share of edges that cross, most edges over the mean, and bytes
               that rank i sends rank j per batch

For a graph of statistics only, frontier and overlap are expectations for a random graph; hits and
split are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.model import Model, describe
from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.sampling import Frontier, items_of, per_epoch
from gnnplan.planner.graph.splitting import owners
from gnnplan.planner.ownership.estimated_batches import EstimatedBatches
from gnnplan.planner.ownership.minibatch import (
    MOST_BATCHES,
    MOST_EDGES,
    MiniBatch,
    frontiers,
)
from gnnplan.planner.strategies.minibatch.feature_store import HOT, hottest
from gnnplan.planner.strategies.minibatch.step import ID, check_batches
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_count

CACHED = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # shares of all rows
HIGH = 95  # percentile


def probe(graph: Graph | GraphStats, workload: Workload, ranks: Sequence[int]) -> dict[str, Any]:
    """The profile of a graph's mini-batches for these numbers of ranks, JSON-ready.

    {"batch", "fanouts", "batches": of an epoch, "probed": how many were drawn, "estimated",
     "rows": of h_0 .. h_L, "edges": of layers 1 .. L, both {"mean": [..], "p95": [..]},
     "ranks": {"4": {"overlap", "hits", "split"}, ..}}

    Raises SpecError if the graph has no such batches.
    """
    stats = graph.stats if isinstance(graph, Graph) else graph
    check_batches(workload, stats, max(ranks), "leave --batch out")
    model = describe(workload, stats.features, stats.classes, stats.nonzeros / stats.vertices)
    by_ranks: dict[str, Any]
    if isinstance(graph, Graph):
        whole, micro = _drawn(graph, workload, ranks)
        counts = [_counts([found]) for found in whole]
        by_ranks = {}
        for count in ranks:
            notify("comparing what ranks share", show_count(count, "rank"))
            by_ranks[str(count)] = {
                "overlap": _overlap(counts, [_counts(parts) for parts in micro[count]]),
                "hits": _hits(graph, workload, micro[count]),
                "split": _split(graph, workload, model, whole, count) if count > 1 else None,
            }
    else:
        counts = [_expected(graph, workload, 1, model)]
        by_ranks = {
            str(count): {
                "overlap": _overlap(counts, [_expected(graph, workload, count, model)]),
                "hits": None,
                "split": None,
            }
            for count in ranks
        }
    rows, edges = (np.array([pair[i] for pair in counts]) for i in (0, 1))
    return {
        "batch": workload.batch,
        "fanouts": ["all" if f == ALL else f for f in workload.fanouts],
        "batches": per_epoch(workload, stats),
        "probed": len(counts),
        "estimated": not isinstance(graph, Graph),
        "rows": _spread(rows),
        "edges": _spread(edges),
        "ranks": by_ranks,
    }


def _drawn(
    graph: Graph, w: Workload, ranks: Sequence[int]
) -> tuple[list[Frontier], dict[int, list[list[Frontier]]]]:
    """Batches of the first epoch, whole and as micro-batches for each number of ranks.

    It stops after MOST_BATCHES batches or MOST_EDGES edges.
    """
    whole: list[Frontier] = []
    micro: dict[int, list[list[Frontier]]] = {count: [] for count in ranks}
    drawn = 0
    for number, items in enumerate(items_of(graph, w, 0)[:MOST_BATCHES]):
        if drawn > MOST_EDGES:
            break
        notify("drawing mini-batches", str(number + 1))
        whole += frontiers(graph, w, items, 1, 0, number)
        for count in ranks:
            micro[count].append(
                frontiers(graph, w, items, count, 0, number) if count > 1 else [whole[-1]]
            )
        drawn += sum(
            int(_counts(parts)[1].sum())
            for parts in ([whole[-1]], *(micro[count][-1] for count in ranks))
        )
    return whole, micro


def _counts(parts: Sequence[Frontier]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows of h_0 .. h_L and edges of layers 1 .. L, summed over all parts."""
    return (
        np.sum([[nodes.size for nodes in found.nodes] for found in parts], axis=0),
        np.sum([[places.size for _, places in found.edges] for found in parts], axis=0),
    )


def _expected(
    stats: GraphStats, w: Workload, ranks: int, model: Model
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """As `_counts`, expected of a random graph."""
    batch = EstimatedBatches(stats, w, tuple(range(ranks)), model.first_varying).at(0)
    facts = [batch.facts(layer) for layer in range(1, w.layers + 1)]
    return (
        np.array([facts[0].sources.sum(), *(fact.rows.sum() for fact in facts)]),
        np.array([fact.edges.sum() for fact in facts]),
    )


def _spread(counts: NDArray[np.int64]) -> dict[str, list[float]]:
    """Mean and 95th percentile over batches, of [batches, ..]."""
    return {
        "mean": counts.mean(0).tolist(),
        f"p{HIGH}": np.percentile(counts, HIGH, axis=0).tolist(),
    }


def _overlap(
    whole: Sequence[tuple[Any, Any]], micro: Sequence[tuple[Any, Any]]
) -> dict[str, float]:
    """Micro-batches together over their mini-batch: rows of h_0, and edges."""

    def ratio(pick: Callable[[tuple[Any, Any]], int]) -> float:
        return sum(map(pick, micro)) / max(sum(map(pick, whole)), 1)

    return {
        "features": ratio(lambda counts: counts[0][0]),
        "edges": ratio(lambda counts: counts[1].sum()),
    }


def _hits(
    graph: Graph, w: Workload, micro: Sequence[Sequence[Frontier]]
) -> dict[str, dict[str, float]]:
    """Share of reads that hit, by how rows are ranked (HOT) and by the share of rows cached."""
    n, out = graph.stats.vertices, {}
    for hot in HOT:
        turn = np.empty(n, np.int64)
        turn[hottest(graph, w, hot, len(micro[0]))] = np.arange(n)
        reads = np.sum(
            [np.bincount(turn[found.nodes[0]], minlength=n) for parts in micro for found in parts],
            axis=0,
        )
        below = np.concatenate([[0], np.cumsum(reads)])
        out[hot] = {f"{share:g}": float(below[round(share * n)] / below[-1]) for share in CACHED}
    return out


def _split(
    graph: Graph, w: Workload, model: Model, whole: Sequence[Frontier], ranks: int
) -> dict[str, Any]:
    """How GSplit would split these batches.

    Per layer 1 .. L: the share of edges that cross, and the most edges of a rank over the mean.
    Bytes per batch [ranks, ranks]: ids, rows of the forward pass, gradients of the backward pass.
    """
    member = owners(graph, ranks, "gsplit", w)
    layers = range(1, w.layers + 1)
    edges, crossing = np.zeros((w.layers, ranks), np.int64), np.zeros((w.layers, ranks), np.int64)
    sent = np.zeros((ranks, ranks))
    for found in whole:
        batch = MiniBatch(graph, [found], (0,) * ranks, member, model.first_varying)
        for layer in layers:
            facts, constant = batch.facts(layer), layer <= model.first_varying
            edges[layer - 1] += facts.edges
            crossing[layer - 1] += batch.crossing(layer)
            row = (
                model.features_moved(1.0)
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
        "bytes": (sent / len(whole)).tolist(),
    }
