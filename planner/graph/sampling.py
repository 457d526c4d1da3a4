"""Mini-batch sampling: the items of batches, sampled neighbours, and pairs for link prediction.

    task=node    items: training vertices    seeds: the same vertices
    task=link    items: edges                seeds: all vertices of the edges' pairs

An epoch goes over all items, `batch` at a time. Ranks split a batch's items, and each rank samples
around the seeds of its share. All draws are functions of (seed, epoch, batch, layer, vertex or
edge). So every rank draws the same neighbours for a vertex, whatever else the rank draws.

    fanouts 2,1, from the seeds outwards

    seeds {s}  <- layer 2 -  2 neighbours of s  <- layer 1 -  1 neighbour of each, and of s

Sampling is uniform and without replacement. Of d > k neighbours, k are drawn by Floyd's algorithm
(Bentley & Floyd 1987, "A sample of brilliance"): for j = d-k .. d-1 draw t from 0 .. j, and take j
if t is taken already. A draw is a word of a counter hash (splitmix64) of (vertex, j); its upper
half is scaled to 0 .. j. The draw deviates from uniform by less than j / 2^32.

Link prediction trains on some edges, and classifies pairs of vertices as edges or negatives.

    edges      | held out for validation | for test | all others |
               in no neighbourhood and no batch       messages pass along them, batches are
                                                      drawn from them
    a batch    B edges u -> v, each with Q negatives n_1 .. n_Q:
               pairs (u, v), (u, n_1) .. (u, n_Q)

A negative is any vertex with equal probability, also a neighbour of u, as in DGL's and PyG's
samplers. In an undirected graph an edge is two: u -> v, v -> u. Both are held out, or neither is.
Edges of a batch stay in the neighbourhoods of the batch, as in PyG's LinkNeighborLoader. The held
out edges depend on the graph alone: training with another seed is evaluated on the same edges. An
edge is held out for validation with probability HELD_OUT_SHARE, and for test with the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import Array, Graph, GraphStats, freeze, spread_of
from gnnplan.planner.vocabulary.numbers import Bools, Ints, offsets, ranges

# Streams of random numbers: the first number of each seed, so that draws for different purposes are
# independent. Do not reuse or change these numbers, or runs are no longer reproducible.
EXPANSION = 1  # GraNNDis: external neighbours of a server's part
BATCHES = 2  # GraNNDis: training vertices of the batches
BATCH_ORDER = 3  # GraNNDis: the order of the batches
SEEDS = 4  # mini-batches: the order of training vertices
BOUNDARY = 5  # boundary node sampling: halo rows that are sent
EDGES = 6  # link prediction: the order of edges
HELD_OUT = 7  # link prediction: edges for validation and test, and their negatives
ROUNDING = 8  # packed rows: stochastic rounding of numbers, up or down
TILES = 9  # tensor3d: the two orders of the vertices

# constants of splitmix64
GOLDEN, MIX1, MIX2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
AT_ONCE = 8192  # vertices sampled at a time, so that temporaries stay in the processor's cache
HELD_OUT_SHARE = 0.05  # share of all edges held out for validation; the same share for test

Ids = Ints
Words = NDArray[np.uint64]  # random words


def mix(z: Words) -> Words:
    """Apply splitmix64's finalizer to uint64 words, in place."""
    z ^= z >> np.uint64(30)
    z *= MIX1
    z ^= z >> np.uint64(27)
    z *= MIX2
    z ^= z >> np.uint64(31)
    return z


def key_of(*numbers: int) -> Words:
    """Return the key [1] of a stream of draws; a layer's numbers are seed, epoch, batch, layer."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = mix((key + np.uint64(number + 1)) * GOLDEN)
    return key


def taken(degree: Ids, fanout: int) -> Ids:
    """Return how many of each vertex's `degree` edges are sampled."""
    return degree if fanout == ALL else np.minimum(degree, fanout)


def draw(graph: Graph, vertices: Ids, fanout: int, key: Words) -> tuple[Ids, Ids]:
    """Sample at most `fanout` in-edges (ALL: every in-edge) of each vertex.

    Returns (indptr [V+1], places of the edges in graph.indices [edges])."""
    start, degree = graph.indptr[vertices], graph.degree_of(vertices)
    counts = taken(degree, fanout)
    indptr = offsets(counts)
    # the first edges of each vertex: already correct for vertices that keep every edge
    places = ranges(start, counts)
    sampled = np.flatnonzero(degree > counts)
    for first in range(0, sampled.size, AT_ONCE):
        some = sampled[first : first + AT_ONCE]
        keys = mix((vertices[some].astype(np.uint64) + key) * GOLDEN)
        places[indptr[some] + np.arange(fanout)[:, None]] = start[
            some
        ] + sample_without_replacement(keys, degree[some], fanout)
    return indptr, places


def sample_without_replacement(keys: Words, degree: Ints, k: int) -> Ints:
    """Draw k distinct numbers below each degree (> k) uniformly; return int64 [k, V].

    keys: a word per vertex [V] that starts the vertex's stream of draws."""
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
    """The rows and edges that the computation of some seeds needs.

    nodes[h] are the vertex ids of the rows of h_h: first the ids of nodes[h+1], then all further
    ids in ascending order. edges[l-1] are the edges (indptr, places) of layer l: positions in
    graph.indices of the neighbours sampled for nodes[l], row after row."""

    nodes: tuple[Ids, ...]  # h = 0 .. L
    edges: tuple[tuple[Ids, Ids], ...]  # l = 1 .. L


def frontier(
    graph: Graph, seeds: Ids, fanouts: tuple[int, ...], seed: int, epoch: int, batch: int
) -> Frontier:
    """Sample the rows and edges that the seeds need in all layers.

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
    """Pairs of vertices that the link loss scores: edges, each with Q negatives.

    heads: source of each edge [B]. tails: destination of the edge, then its negatives [B, 1+Q]."""

    heads: Ids
    tails: Ids

    @property
    def ends(self) -> Ids:
        """Sorted distinct vertices of all pairs."""
        return np.unique(np.concatenate([self.heads, self.tails.ravel()]))

    def of(self, chosen: Bools) -> Pairs:
        """Return the pairs of the edges that the mask `chosen` [B] selects."""
        return Pairs(self.heads[chosen], self.tails[chosen])


def fetched(parts: Sequence[Pairs], owner: Array, rank: int) -> Ids:
    """Return the vertices whose rows a rank fetches from other ranks, grouped by owner.

    A rank computes the scores of the pairs whose head it owns. owner: the rank of each vertex
    [N]."""
    ends = np.concatenate([pairs.tails[owner[pairs.heads] == rank].ravel() for pairs in parts])
    ids = np.unique(ends[owner[ends] != rank])
    return ids[np.argsort(owner[ids], kind="stable")]


def held_out_pairs(graph: Graph, part: int, negatives: int) -> Pairs:
    """Return the pairs that evaluate validation (part 0) or test (part 1), equal in all epochs."""
    heads, tails = graph.held_out[part]
    return _with_negatives(
        graph, heads, tails, np.arange(heads.size), negatives, key_of(HELD_OUT, part)
    )


def _with_negatives(
    graph: Graph, heads: Ids, tails: Ids, ids: Ids, negatives: int, key: Words
) -> Pairs:
    """Return the edges with `negatives` drawn for each, keyed by the edges' `ids` [B]."""
    words = mix((ids.astype(np.uint64) + key) * GOLDEN)[:, None]
    upper = mix(words + GOLDEN * np.arange(1, negatives + 1, dtype=np.uint64)) >> np.uint64(32)
    drawn = upper * np.uint64(graph.stats.vertices) >> np.uint64(32)
    return Pairs(heads, np.column_stack([tails, drawn.astype(np.int64)]))


def hold_out(graph: Graph) -> Graph:
    """Return the graph with validation and test edges moved from its CSR to `held_out`.

    The graph's hash changes with its edges. A graph that already has held-out edges is returned
    unchanged."""
    stats = graph.stats
    if stats.held_out:
        return graph
    n, source = np.uint64(stats.vertices), graph.indices.astype(np.int64)
    destination = np.repeat(np.arange(stats.vertices), graph.degree)
    ends = source, destination
    if not stats.directed:  # hold out both directions or neither
        ends = np.minimum(source, destination), np.maximum(source, destination)
    names = ends[0].astype(np.uint64) * n + ends[1].astype(np.uint64)
    upper = mix((names + key_of(HELD_OUT)) * GOLDEN) >> np.uint64(32)
    fate = (upper.astype(np.float64) / (2.0**32 * HELD_OUT_SHARE)).astype(np.int64)
    kept = fate > 1
    lengths = np.bincount(destination[kept], minlength=stats.vertices)
    indptr, indices = offsets(lengths), graph.indices[kept]
    held_out = [np.stack([source[fate == part], destination[fate == part]]) for part in (0, 1)]
    edge_fields = {name: field[kept] for name, field in graph.edge_fields.items()}
    freeze(indptr, indices, *held_out, *edge_fields.values())
    digest = blake2b(f"{stats.hash} without held-out edges".encode(), digest_size=16)
    fewer = _with_fewer_edges(stats, indices.size)
    stats = dataclasses.replace(fewer, hash=digest.hexdigest(), spread=spread_of(lengths))
    return graph.with_edges(indptr, indices, edge_fields, stats=stats, held_out=tuple(held_out))


def expect_held_out(stats: GraphStats) -> GraphStats:
    """Return the statistics after `hold_out`, with the expected number of edges."""
    if stats.held_out:
        return stats
    return _with_fewer_edges(stats, round(stats.edges * (1 - 2 * HELD_OUT_SHARE)))


def _with_fewer_edges(stats: GraphStats, edges: int) -> GraphStats:
    """Return the statistics with `edges` training edges, and count and note the held-out edges."""
    held_out = stats.edges - edges
    note = f"held out {held_out:,} of {stats.edges:,} directed edges, half of them for test"
    return dataclasses.replace(stats, edges=edges, held_out=held_out, notes=(*stats.notes, note))


def count_items(workload: Workload, stats: GraphStats) -> int:
    """Count the items of an epoch: training vertices, or edges."""
    return stats.edges if workload.task == "link" else stats.train_vertices


def per_epoch(workload: Workload, stats: GraphStats) -> int:
    """Return the number of batches per epoch."""
    return -(-count_items(workload, stats) // workload.batch)


def items_of(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """Return the items of each batch of an epoch: training vertices, or places in graph.indices.

    The order is random, and differs from epoch to epoch. The last batch may be smaller."""
    is_link = workload.task == "link"
    items: Any = graph.indices.size if is_link else np.flatnonzero(graph.train)
    stream = EDGES if is_link else SEEDS, workload.seed, epoch
    order: Ids = np.random.default_rng(stream).permutation(items)
    return [order[start : start + workload.batch] for start in range(0, order.size, workload.batch)]


def pairs_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Pairs | None:
    """Return the pairs that the loss of these items of a batch scores; None for node labels."""
    if workload.task == "node":
        return None
    heads = graph.indices[items].astype(np.int64)
    tails = np.searchsorted(graph.indptr, items, side="right") - 1
    # layer 0 in the key: neighbour sampling uses layers 1 .. L
    key = key_of(workload.seed, epoch, number, 0)
    return _with_negatives(graph, heads, tails, items, workload.negatives, key)


def seeds_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Ids:
    """Return the seeds of these items of a batch: vertices whose last-layer rows the loss reads."""
    pairs = pairs_in(graph, workload, items, epoch, number)
    return items if pairs is None else pairs.ends


def presampled(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """Return the items of the batches that an epoch of pre-sampling samples.

    These are all batches, up to about as many items as the graph has vertices. A graph has many
    more edges, but in random order, so the first batches represent all."""
    enough = -(-graph.stats.vertices // workload.batch)
    return items_of(graph, workload, epoch)[:enough]


def drawn_as(graph: Graph, workload: Workload) -> str:
    """Return a cache key of everything that batches and their frontiers depend on but the epoch."""
    train = blake2b(np.ascontiguousarray(graph.train).data, digest_size=8).hexdigest()
    w = workload
    drawn = f"{graph.stats.hash} {train} {w.seed} {w.batch} {w.fanouts}"
    return drawn if w.task == "node" else f"{drawn} link {w.negatives}"
