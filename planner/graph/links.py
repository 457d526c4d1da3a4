"""Link prediction: which edges a model learns from, and which pairs of vertices it tells apart.

    edges      | held out for validation | for test | all others |
               in no neighbourhood and no batch       messages pass along them, batches are
                                                      drawn from them
    a batch    B edges u -> v, each with Q negatives n_1 .. n_Q:
               pairs (u, v), (u, n_1) .. (u, n_Q)

A negative is any vertex with equal probability, a neighbour of u too, as DGL's and PyG's samplers
draw them. It is a function of seed, epoch, batch and edge, so it does not matter who draws it. In
an undirected graph an edge is two: u -> v, v -> u. Both are held out, or neither is. Edges of a
batch stay in the neighbourhoods of the batch, as in PyG's LinkNeighborLoader.

Which edges are held out follows from the graph alone: training with another seed is measured on the
same edges. Each is held out for validation with probability HELD_OUT_SHARE, and so for test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import Graph, GraphStats, spread_of
from gnnplan.planner.graph.sampling import GOLDEN, Ids, key_of, mix
from gnnplan.planner.graph.streams import EDGES, HELD_OUT

HELD_OUT_SHARE = 0.05  # of all edges, for validation; and as many for test


@dataclass(frozen=True)
class Pairs:
    """Edges, each with the vertices that it is told from.

    heads: where each edge begins [B]. tails: where it ends, then its negatives [B, 1 + Q]."""

    heads: Ids
    tails: Ids

    @property
    def ends(self) -> Ids:
        """All vertices of the pairs, sorted, each once."""
        return np.unique(np.concatenate([self.heads, self.tails.ravel()]))

    def of(self, chosen: NDArray[np.bool_]) -> Pairs:
        """Those of the edges that are chosen [B]."""
        return Pairs(self.heads[chosen], self.tails[chosen])


def fetched(parts: Sequence[Pairs], owner: NDArray[Any], rank: int) -> Ids:
    """Vertices whose rows a rank needs of other ranks, grouped by their owners.

    A rank computes the scores of the pairs that begin at a vertex of its own. owner: the rank of
    each vertex [N]."""
    ends = np.concatenate([pairs.tails[owner[pairs.heads] == rank].ravel() for pairs in parts])
    ids = np.unique(ends[owner[ends] != rank])
    return ids[np.argsort(owner[ids], kind="stable")]


def edges_of(graph: Graph, batch: int, seed: int, epoch: int) -> list[Ids]:
    """An epoch's batches of edges: places in graph.indices in random order, `batch` at a time.

    The order differs from epoch to epoch. The last batch has what is left."""
    order = np.random.default_rng((EDGES, seed, epoch)).permutation(graph.indices.size)
    return [order[start : start + batch] for start in range(0, order.size, batch)]


def pairs_of(graph: Graph, edges: Ids, negatives: int, seed: int, epoch: int, batch: int) -> Pairs:
    """The pairs of a batch's edges, or of some of them, given by their places in graph.indices."""
    heads = graph.indices[edges].astype(np.int64)
    tails = np.searchsorted(graph.indptr, edges, side="right") - 1
    # layer 0: the layers' own draws are of layers 1 .. L
    return _with_negatives(graph, heads, tails, edges, negatives, key_of(seed, epoch, batch, 0))


def held_out_pairs(graph: Graph, part: int, negatives: int) -> Pairs:
    """The pairs that validation (part 0) or test (part 1) is measured on, in any epoch."""
    heads, tails = graph.held_out[part]
    return _with_negatives(
        graph, heads, tails, np.arange(heads.size), negatives, key_of(HELD_OUT, part)
    )


def _with_negatives(
    graph: Graph, heads: Ids, tails: Ids, ids: Ids, negatives: int, key: NDArray[np.uint64]
) -> Pairs:
    """Edges with their negatives, which are drawn by the edges' ids [B]."""
    words = mix((ids.astype(np.uint64) + key) * GOLDEN)
    columns = [tails]
    for _ in range(negatives):
        words = words + GOLDEN
        upper = mix(words.copy()) >> np.uint64(32)
        drawn = upper * np.uint64(graph.stats.vertices) >> np.uint64(32)
        columns.append(drawn.astype(np.int64))
    return Pairs(heads, np.stack(columns, 1))


def hold_out(graph: Graph) -> Graph:
    """The graph without the edges that are held out, which `held_out` has.

    Its hash says that it has fewer edges. A graph that has held some out already stays as it is."""
    stats = graph.stats
    if stats.held_out:
        return graph
    n, source = np.uint64(stats.vertices), graph.indices.astype(np.int64)
    destination = np.repeat(np.arange(stats.vertices), graph.degree)
    ends = source, destination
    if not stats.directed:  # both directions have one fate
        ends = np.minimum(source, destination), np.maximum(source, destination)
    names = ends[0].astype(np.uint64) * n + ends[1].astype(np.uint64)
    upper = mix((names + key_of(HELD_OUT)) * GOLDEN) >> np.uint64(32)
    fate = (upper.astype(np.float64) / (2.0**32 * HELD_OUT_SHARE)).astype(np.int64)
    kept = fate > 1
    lengths = np.bincount(destination[kept], minlength=stats.vertices)
    indptr, indices = np.concatenate([[0], np.cumsum(lengths)]), graph.indices[kept]
    held_out: list[NDArray[Any]] = [
        np.stack([source[fate == part], destination[fate == part]]) for part in (0, 1)
    ]
    edge_fields = {name: field[kept] for name, field in graph.edge_fields.items()}
    for array in (indptr, indices, *held_out, *edge_fields.values()):
        array.flags.writeable = False
    digest = blake2b(f"{stats.hash} without held-out edges".encode(), digest_size=16)
    fewer = _with_fewer_edges(stats, indices.size)
    stats = dataclasses.replace(fewer, hash=digest.hexdigest(), spread=spread_of(lengths))
    return dataclasses.replace(
        graph,
        stats=stats,
        indptr=indptr,
        indices=indices,
        held_out=tuple(held_out),
        edge_fields=edge_fields,
        folder=None,
    )


def expect_held_out(stats: GraphStats) -> GraphStats:
    """`hold_out` of a graph known by statistics only: the expected number of edges."""
    if stats.held_out:
        return stats
    return _with_fewer_edges(stats, round(stats.edges * (1 - 2 * HELD_OUT_SHARE)))


def _with_fewer_edges(stats: GraphStats, edges: int) -> GraphStats:
    held_out = stats.edges - edges
    note = f"held out {held_out:,} of {stats.edges:,} directed edges, half of them for test"
    return dataclasses.replace(stats, edges=edges, held_out=held_out, notes=(*stats.notes, note))
