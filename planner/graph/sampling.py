"""Neighbour sampling as a function of (seed, epoch, batch, layer, vertex).

The same neighbours are drawn for a vertex on every rank, whatever else is drawn there.

    fanouts 2,1, from the seeds outwards

    seeds {s}  <- layer 2 -  2 neighbours of s  <- layer 1 -  1 neighbour of each, and of s

Sampling is uniform and without replacement. Of d > k neighbours, k are drawn by Floyd's algorithm
(Bentley & Floyd 1987, "A sample of brilliance"): for j = d-k .. d-1 draw t from 0 .. j, and take j
if t is taken already. A draw is a word of a counter hash (splitmix64) of (vertex, j), scaled to
0 .. j by its upper 32 bits. It is off uniform by less than j / 2^32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.streams import SEEDS
from gnnplan.planner.vocabulary.numbers import ranges

# constants of splitmix64
GOLDEN, MIX1, MIX2 = (
    np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
AT_ONCE = 8192  # vertices sampled at a time, so that temporaries stay in the processor's cache

Ids = NDArray[np.int64]


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer: mixes the bits of uint64 words, in place."""
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
    order = np.random.default_rng((SEEDS, seed, epoch)).permutation(np.flatnonzero(graph.train))
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
