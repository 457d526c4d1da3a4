"""What mini-batches draw: their items, the neighbours around these, and edges to tell apart.

    task=node    items: training vertices    seeds: the same vertices
    task=link    items: edges                seeds: all ends of the edges' pairs

An epoch goes over all items, `batch` at a time. Ranks share a batch's items, and sample around the
seeds of their share. All draws are functions of (seed, epoch, batch, layer, vertex or edge). So the
same neighbours are drawn for a vertex on every rank, whatever else is drawn there.

    fanouts 2,1, from the seeds outwards

    seeds {s}  <- layer 2 -  2 neighbours of s  <- layer 1 -  1 neighbour of each, and of s

Sampling is uniform and without replacement. Of d > k neighbours, k are drawn by Floyd's algorithm
(Bentley & Floyd 1987, "A sample of brilliance"): for j = d-k .. d-1 draw t from 0 .. j, and take j
if t is taken already. A draw is a word of a counter hash (splitmix64) of (vertex, j), scaled to
0 .. j by its upper half. It is off uniform by less than j / 2^32.

Link prediction: which edges a model learns from, and which pairs of vertices it tells apart.

    edges      | held out for validation | for test | all others |
               in no neighbourhood and no batch       messages pass along them, batches are
                                                      drawn from them
    a batch    B edges u -> v, each with Q negatives n_1 .. n_Q:
               pairs (u, v), (u, n_1) .. (u, n_Q)

A negative is any vertex with equal probability, a neighbour of u too, as DGL's and PyG's samplers
draw them. In an undirected graph an edge is two: u -> v, v -> u. Both are held out, or neither is.
Edges of a batch stay in the neighbourhoods of the batch, as in PyG's LinkNeighborLoader. Which
edges are held out follows from the graph alone: training with another seed is measured on the same
ones. Each is held out for validation with probability HELD_OUT_SHARE, and so for test."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import Graph, GraphStats, freeze, spread_of
from gnnplan.planner.vocabulary.numbers import ranges

# Streams of random numbers: the first number of a seed. What is drawn for one purpose says nothing
# about another. Numbers are never reused, for a run must draw tomorrow what it draws today.
EXPANSION = 1  # GraNNDis: external neighbours of a server's part
BATCHES = 2  # GraNNDis: training vertices of its batches
BATCH_ORDER = 3  # GraNNDis: which batch a step takes
SEEDS = 4  # mini-batches: the order of training vertices
BOUNDARY = 5  # boundary node sampling: halo rows that are sent
EDGES = 6  # link prediction: the order of edges
HELD_OUT = 7  # link prediction: edges for validation and test, and what they are compared with
ROUNDING = 8  # rows that cross packed: which way their numbers are rounded
TILES = 9  # tensor3d: the two orders of the vertices

# constants of splitmix64
GOLDEN, MIX1, MIX2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
AT_ONCE = 8192  # vertices sampled at a time, so that temporaries stay in the processor's cache
HELD_OUT_SHARE = 0.05  # of all edges, for validation; and as many for test

Ids = NDArray[np.int64]


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: mixes uint64 words, in place."""
    z ^= z >> np.uint64(30)
    z *= MIX1
    z ^= z >> np.uint64(27)
    z *= MIX2
    z ^= z >> np.uint64(31)
    return z


def key_of(*numbers: int) -> NDArray[np.uint64]:
    """The word [1] that draws start from; a layer's: of seed, epoch, batch and layer."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix((key + np.uint64(number + 1)) * GOLDEN)
    return key


def seeds_of(graph: Graph, batch: int, seed: int, epoch: int) -> list[Ids]:
    """The seeds of an epoch's mini-batches: training vertices in random order, `batch` at a time.

    The order differs from epoch to epoch. The last batch has what is left."""
    return _in_batches(np.flatnonzero(graph.train), batch, SEEDS, seed, epoch)


def _in_batches(items: Ids | int, batch: int, *stream: int) -> list[Ids]:
    order: Ids = np.random.default_rng(stream).permutation(items)
    return [order[start : start + batch] for start in range(0, order.size, batch)]


def taken(degree: Ids, fanout: int) -> Ids:
    """The number of edges that are drawn of `degree` edges."""
    return degree if fanout == ALL else np.minimum(degree, fanout)


def draw(graph: Graph, vertices: Ids, fanout: int, key: NDArray[np.uint64]) -> tuple[Ids, Ids]:
    """Draw at most `fanout` edges (ALL: every one) into each vertex.

    Returns (indptr [V+1], places of the edges in graph.indices [edges])."""
    start, degree = graph.indptr[vertices], graph.indptr[vertices + 1] - graph.indptr[vertices]
    counts = taken(degree, fanout)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    # the first edges of each vertex: right for all vertices that keep every edge
    places = ranges(start, counts)
    sampled = np.flatnonzero(degree > counts)
    for first in range(0, sampled.size, AT_ONCE):
        some = sampled[first : first + AT_ONCE]
        keys = mix((vertices[some].astype(np.uint64) + key) * GOLDEN)
        places[indptr[some] + np.arange(fanout)[:, None]] = start[some] + floyd(
            keys, degree[some], fanout
        )
    return indptr, places


def floyd(keys: NDArray[np.uint64], degree: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """k distinct numbers below each degree (> k), uniformly drawn: int64 [k, V].

    keys: a word per vertex [V], from which the words of its draws follow."""
    drawn = np.empty((k, degree.size), dtype=np.int64)
    words = keys.copy()
    for i in range(k):
        words += GOLDEN
        j = degree - (k - i)
        t = (
            (mix(words.copy()) >> np.uint64(32)) * (j + 1).astype(np.uint64) >> np.uint64(32)
        ).astype(np.int64)
        again = (drawn[:i] == t).any(0)
        drawn[i] = np.where(again, j, t)
    return drawn


@dataclass(frozen=True)
class Frontier:
    """The rows and edges that some seeds need.

    nodes[h] are the ids of the rows of h_h: first those of h_{h+1}, then the others in order.
    edges[l-1] are the edges (indptr, places) of layer l: places in graph.indices of the neighbours
    drawn for nodes[l], row after row."""

    nodes: tuple[Ids, ...]  # h = 0 .. L
    edges: tuple[tuple[Ids, Ids], ...]  # l = 1 .. L


def frontier(
    graph: Graph, seeds: Ids, fanouts: tuple[int, ...], seed: int, epoch: int, batch: int
) -> Frontier:
    """The rows and edges that the seeds need in all layers.

    fanouts: neighbours per layer, from the seeds outwards, as users write them."""
    nodes, edges = [seeds], []
    reached = np.zeros(graph.stats.vertices, dtype=bool)
    reached[seeds] = True
    for hop, fanout in enumerate(fanouts):
        layer = len(fanouts) - hop
        indptr, places = draw(graph, nodes[-1], fanout, key_of(seed, epoch, batch, layer))
        near = np.zeros(reached.size, dtype=bool)
        near[graph.indices[places]] = True
        new = np.flatnonzero(near & ~reached)
        reached[new] = True
        nodes.append(np.concatenate([nodes[-1], new]))
        edges.append((indptr, places))
    return Frontier(tuple(nodes[::-1]), tuple(edges[::-1]))


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
    return _in_batches(graph.indices.size, batch, EDGES, seed, epoch)


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
    words = mix((ids.astype(np.uint64) + key) * GOLDEN)[:, None]
    upper = mix(words + GOLDEN * np.arange(1, negatives + 1, dtype=np.uint64)) >> np.uint64(32)
    drawn = upper * np.uint64(graph.stats.vertices) >> np.uint64(32)
    return Pairs(heads, np.column_stack([tails, drawn.astype(np.int64)]))


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
    held_out = [np.stack([source[fate == part], destination[fate == part]]) for part in (0, 1)]
    edge_fields = {name: field[kept] for name, field in graph.edge_fields.items()}
    freeze(indptr, indices, *held_out, *edge_fields.values())
    digest = blake2b(f"{stats.hash} without held-out edges".encode(), digest_size=16)
    fewer = _with_fewer_edges(stats, indices.size)
    stats = dataclasses.replace(fewer, hash=digest.hexdigest(), spread=spread_of(lengths))
    return graph.with_edges(indptr, indices, edge_fields, stats=stats, held_out=tuple(held_out))


def expect_held_out(stats: GraphStats) -> GraphStats:
    """`hold_out` of a graph known by statistics only: the expected number of edges."""
    if stats.held_out:
        return stats
    return _with_fewer_edges(stats, round(stats.edges * (1 - 2 * HELD_OUT_SHARE)))


def _with_fewer_edges(stats: GraphStats, edges: int) -> GraphStats:
    held_out = stats.edges - edges
    note = f"held out {held_out:,} of {stats.edges:,} directed edges, half of them for test"
    return dataclasses.replace(stats, edges=edges, held_out=held_out, notes=(*stats.notes, note))


def count_items(workload: Workload, stats: GraphStats) -> int:
    """Items that an epoch goes over: training vertices, or edges."""
    return stats.edges if workload.task == "link" else stats.train_vertices


def per_epoch(workload: Workload, stats: GraphStats) -> int:
    """Batches of an epoch."""
    return -(-count_items(workload, stats) // workload.batch)


def items_of(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """The items of an epoch's batches."""
    draw = edges_of if workload.task == "link" else seeds_of
    return draw(graph, workload.batch, workload.seed, epoch)


def pairs_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Pairs | None:
    """The pairs that the loss of some items of a batch is of; None: it is of labels."""
    if workload.task == "node":
        return None
    return pairs_of(graph, items, workload.negatives, workload.seed, epoch, number)


def seeds_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Ids:
    """The seeds of some items of a batch: vertices whose rows of the last layer the loss reads."""
    pairs = pairs_in(graph, workload, items, epoch, number)
    return items if pairs is None else pairs.ends


def presampled(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """The items of the batches that an epoch of pre-sampling looks at.

    These are all batches, but no more items than the graph has vertices. Of edges there are many
    more, in random order, so that the first of them tell what all do."""
    enough = -(-graph.stats.vertices // workload.batch)
    return items_of(graph, workload, epoch)[:enough]


def drawn_as(graph: Graph, workload: Workload) -> str:
    """All that batches and their frontiers depend on, but their epoch: for a cache on disk."""
    train = blake2b(np.ascontiguousarray(graph.train).data, digest_size=8).hexdigest()
    w = workload
    drawn = f"{graph.stats.hash} {train} {w.seed} {w.batch} {w.fanouts}"
    return drawn if w.task == "node" else f"{drawn} link {w.negatives}"
