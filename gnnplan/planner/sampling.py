"""Neighbour sampling as a function of (seed, epoch, batch, layer, vertex): whoever samples a vertex, on whatever rank and beside
whichever others, draws the same neighbours.

    fanouts 2,1 from the seeds outwards:   seeds {s}  <- layer 2 -  2 of s's neighbours  <- layer 1 -  1 neighbour of each, and of s

Uniform without replacement: k of d > k neighbours by Floyd's algorithm (Bentley & Floyd 1987, "A sample of brilliance"): for
j = d-k .. d-1 draw t from 0 .. j, and take j where t is taken already. The draws are words of a counter hash (splitmix64), one per
(vertex, j), scaled to 0 .. j by their upper 32 bits: off uniform by less than j / 2^32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph import Graph
from gnnplan.planner.specs import ALL

GOLDEN, MIX1, MIX2 = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # splitmix64
SEEDS = 4  # a stream of random numbers beside those in layout.py and granndis.py
AT_ONCE = 8192  # vertices drawn for together: what is made of them stays in the cache

Ids = NDArray[np.int64]


def mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finalizer, in place, uint64 with wrap-around."""
    z ^= z >> np.uint64(30)
    z *= MIX1
    z ^= z >> np.uint64(27)
    z *= MIX2
    z ^= z >> np.uint64(31)
    return z


def key_of(seed: int, epoch: int, batch: int, layer: int) -> NDArray[np.uint64]:
    """The word [1] that a layer's draws start from."""
    key = np.zeros(1, np.uint64)
    for number in (seed, epoch, batch, layer):
        key = mix((key + np.uint64(number + 1)) * GOLDEN)
    return key


def seeds_of(graph: Graph, batch: int, seed: int, epoch: int) -> list[Ids]:
    """The training vertices in a new order every epoch, `batch` at a time; the last are what is left."""
    order = np.random.default_rng((SEEDS, seed, epoch)).permutation(np.flatnonzero(graph.train))
    return [order[start : start + batch] for start in range(0, order.size, batch)]


def taken(degree: Ids, fanout: int) -> Ids:
    """How many edges are drawn of so many."""
    return degree if fanout == ALL else np.minimum(degree, fanout)


def draw(graph: Graph, vertices: Ids, fanout: int, key: NDArray[np.uint64]) -> tuple[Ids, Ids]:
    """At most `fanout` edges (ALL: every one) into each vertex -> (indptr [V+1], their places in graph.indices [edges])."""
    start, degree = graph.indptr[vertices], graph.indptr[vertices + 1] - graph.indptr[vertices]
    each = taken(degree, fanout)
    indptr = np.concatenate([[0], np.cumsum(each)])
    out = np.repeat(start - indptr[:-1], each) + np.arange(indptr[-1])  # the first of each; right where all are taken
    crowded = np.flatnonzero(degree > each)
    for first in range(0, crowded.size, AT_ONCE):
        some = crowded[first : first + AT_ONCE]
        keys = mix((vertices[some].astype(np.uint64) + key) * GOLDEN)
        out[indptr[some] + np.arange(fanout)[:, None]] = start[some] + floyd(keys, degree[some], fanout)
    return indptr, out


def floyd(keys: NDArray[np.uint64], degree: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """k different numbers below each degree (> k), uniformly: [k, V]. A word per number follows from the vertex's key [V]."""
    taken = np.empty((k, degree.size), dtype=np.int64)
    words = keys.copy()
    for i in range(k):
        words += GOLDEN
        last = degree - (k - i)  # Floyd's j
        drawn = ((mix(words.copy()) >> np.uint64(32)) * (last + 1).astype(np.uint64) >> np.uint64(32)).astype(np.int64)
        again = (taken[:i] == drawn).any(0)
        taken[i] = np.where(again, last, drawn)
    return taken


@dataclass(frozen=True)
class Frontier:
    """What the seeds need. nodes[h]: ids of the rows of h_h, those of h_{h+1} first, the others in order. Layer l (1 .. L) has the
    edges (indptr, places) = edges[l-1]: places in graph.indices of the neighbours drawn for nodes[l], one row's after the other."""

    nodes: tuple[Ids, ...]  # h = 0 .. L
    edges: tuple[tuple[Ids, Ids], ...]  # l = 1 .. L


def frontier(graph: Graph, seeds: Ids, fanouts: tuple[int, ...], seed: int, epoch: int, batch: int) -> Frontier:
    """The rows and edges of all layers for these seeds. `fanouts` from the seeds outwards, as users write them."""
    nodes, edges = [seeds], []
    here = np.zeros(graph.stats.vertices, dtype=bool)
    here[seeds] = True
    for out, fanout in enumerate(fanouts):
        layer = len(fanouts) - out
        indptr, places = draw(graph, nodes[-1], fanout, key_of(seed, epoch, batch, layer))
        near = np.zeros(here.size, dtype=bool)
        near[graph.indices[places]] = True
        new = np.flatnonzero(near & ~here)
        here[new] = True
        nodes.append(np.concatenate([nodes[-1], new]))
        edges.append((indptr, places))
    return Frontier(tuple(nodes[::-1]), tuple(edges[::-1]))
