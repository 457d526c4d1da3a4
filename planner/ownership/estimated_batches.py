"""Estimates of mini-batches for a graph known by statistics only: row and edge counts, no ids.

Model: vertices belong to classes. A vertex of class k has d_k neighbours, which it can sample, and
r_k readers, which can sample it. Both are lognormal over vertices, with the mean degree as their
mean and a spread each (GraphStats.batch_spread). In an undirected graph, a vertex with a high d_k
has a high r_k. In a directed graph d and r are independent.

An edge that is sampled for the first time leads to a vertex with probability proportional to r_k.
When a share q of the unknown edges has been sampled,

    exp(-r_k q)     is the share of class k that is not reached yet, and
    d_k (1 - q)     unknown edges are left at each of these vertices (undirected graphs)

With spread 0 this is a uniform random graph, whose degrees have a Poisson distribution. Real graphs
are also clustered: neighbours of neighbours are often neighbours. The spreads account for that too:
they are fitted to the sizes of frontiers, and differ from the spreads of degrees. They cannot tell
duplicates near one seed from duplicates between seeds, of which large batches have more. Where both
were counted, GraphStats.near_seed is the number P of vertices near a seed: of s seeds, e sampled
edges lead to s P (1 - exp(-e / (s P))) vertices, before duplicates between seeds.

Errors of rows and edges (tests/planner/test_expected.py): with one spread fitted to each graph, 7 %
for nine undirected graphs (mean; 2 to 10 %) and 22 % for four directed ones; with the usual spread,
20 % and 75 %. With both spreads counted, GSplit's Table 1 is reproduced within 11 %, and with the
vertices near a seed GNNLab's batch of the same graph within 13 % (42 % without).

Ranks that split a batch (GSplit) get equal shares, except the fullest rank, which gets more, as in
real splits (FULLEST). A share phi (m - 1) / m of the sampled edges leads to another of m ranks, for
the graph's mixing phi (estimated_layout.py). If a vertex of class k is sampled t_k times in a
layer, each other rank asks for the vertex with probability 1 - exp(-t_k phi / m)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, pdtr, pdtrc

from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.estimated_layout import mixing_of
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.ownership.minibatch import MOST_BATCHES, Batches, MiniBatch, Scored, shares
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.values import ByContent

CLASSES = 100  # classes of vertices; a directed graph has all pairs of 25 values of d and 25 of r
LOWEST = -5.0  # the lowest class [standard deviations]
# directed -> spread of graphs whose spreads were not counted: means of nine undirected graphs (1.0
# to 1.8) and of four directed ones (1.3 to 2.2)
USUAL = {False: 1.3, True: 1.85}

# splitter -> edges of the fullest rank over the mean, with 1 % and with 50 % training vertices:
# means of Flickr and ogbn-arxiv on four ranks (docs/reference/mini-batches.md). The splitter 'edge'
# does not pre-sample, so it balances edges that are mostly never sampled.
FULLEST = {
    "gsplit": (1.17, 1.10),
    "node": (1.16, 1.10),
    "edge": (1.47, 1.135),
    "random": (1.02, 1.015),
}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """The K classes of a graph's vertices."""

    vertices: Floats  # vertices in each class [K]
    drawn_from: Floats  # d_k, neighbours of a vertex [K]
    readers: Floats  # r_k, readers of a vertex [K]
    directed: bool

    @classmethod
    def of(cls, stats: GraphStats) -> Population:
        """Make the classes of a graph from its mean degree and spreads."""
        mean = stats.edges / stats.vertices
        spreads = stats.batch_spread or (USUAL[stats.directed],) * 2
        # the highest class: one vertex is expected beyond it [standard deviations]
        highest = max(1.0, float(ndtri(1.0 - 1.0 / max(stats.vertices, 3))))
        z = np.linspace(LOWEST, highest, CLASSES // 4 if stats.directed else CLASSES)
        density = np.exp(-z * z / 2)
        d, r = (_lognormal(z, density, spread, mean) for spread in spreads)
        if not stats.directed:
            return cls(stats.vertices * density / density.sum(), d, r, False)
        share = density / density.sum()
        vertices = stats.vertices * np.outer(share, share).ravel()
        return cls(vertices, np.repeat(d, z.size), np.tile(r, z.size), True)

    @property
    def all(self) -> float:
        """The vertices of all classes together."""
        return float(self.vertices.sum())

    @property
    def edges(self) -> float:
        """The edges of all classes together."""
        return float(self.vertices @ self.readers)


def _lognormal(z: Floats, share: Floats, spread: float, mean: float) -> Floats:
    """Return lognormal values at z standard deviations, with this mean over the shares [K]."""
    values = np.exp(spread * (z - z[-1]))
    return np.asarray(values * mean * share.sum() / (share @ values))


def taken(fanout: int, mean: Floats) -> Floats:
    """Return E[min(degree, fanout)] for Poisson degrees with these means."""
    if fanout == ALL:
        return np.asarray(mean)
    # sum of k P(k) below the fanout, where k P(k) = mean P(k - 1)
    below = mean * pdtr(fanout - 2, mean) if fanout > 1 else 0.0
    return np.asarray(below + fanout * pdtrc(fanout - 1, mean))


@dataclass(frozen=True, eq=False)
class Expected(ByContent):
    """The expected frontier of some seeds."""

    rows: tuple[float, ...]  # rows of h_0 .. h_L
    edges: tuple[float, ...]  # edges of layers 1 .. L
    read: Floats  # rows of h_0 in each class [K]


def expected_frontier(stats: GraphStats, seeds: int, fanouts: tuple[int, ...]) -> Expected:
    """Return the expected frontier of random training vertices.

    Seeds are drawn uniformly, or in proportion to degrees if vertices with many neighbours are
    training vertices more often (GraphStats.train_popular). fanouts: from the seeds outwards."""
    population = Population.of(stats)
    vertices = population.vertices
    weights = vertices * population.drawn_from if stats.train_popular else vertices
    unreached = vertices * np.exp(
        -seeds * weights / max(float(weights.sum()), 1e-300) / np.maximum(vertices, 1e-300)
    )
    unreached = unreached * (population.all - seeds) / max(float(unreached.sum()), 1e-300)
    return _expected(population, unreached, float(seeds), fanouts, seeds * stats.near_seed)


def expected_frontier_of_edges(
    stats: GraphStats, edges: int, negatives: int, fanouts: tuple[int, ...]
) -> Expected:
    """Return the expected frontier of the ends of random edges, with negatives for each edge.

    An edge begins at a vertex in proportion to the vertex's readers r_k, and ends at a vertex in
    proportion to the vertex's neighbours d_k; a negative is a uniformly random vertex. So a vertex
    of class k is not reached with probability exp(-edges (r_k + d_k) / E - edges negatives / N)."""
    population = Population.of(stats)
    along = edges * (population.readers + population.drawn_from) / max(population.edges, 1.0)
    unreached = population.vertices * np.exp(-along - edges * negatives / population.all)
    seeds = population.all - float(unreached.sum())
    return _expected(population, unreached, seeds, fanouts)


def _expected(
    population: Population,
    unreached: Floats,
    seeds: float,
    fanouts: tuple[int, ...],
    near: float = np.inf,
) -> Expected:
    """Return the expected frontier of `seeds` seeds; unreached: other vertices per class [K].

    near: the number of vertices near the seeds, as if no two seeds shared one."""
    vertices, read = population.vertices, 0.0  # edges read on behalf of the seeds
    # edges known so far; unknown edges of an unreached vertex [K]
    known, unknown_each = 0.0, population.drawn_from
    rows, edges = [seeds], []
    for fanout in fanouts:
        sampled = float(
            (
                vertices * taken(fanout, population.drawn_from)
                - unreached * taken(fanout, unknown_each)
            ).sum()
        )
        # edges that the reached vertices could sample
        candidates = float((vertices * population.drawn_from - unreached * unknown_each).sum())
        unknown = max(population.edges - known, 1.0)
        new = min(sampled * max(candidates - known, 0.0) / max(candidates, 1.0), unknown)
        led = near * np.exp(-read / near) * -np.expm1(-new / near) if near < np.inf else new
        unreached, read = unreached * np.exp(-population.readers * led / unknown), read + new
        if population.directed:
            known += new
        else:
            # an edge becomes known in both directions; once, if both directions were sampled
            known += 2 * new - new * new / unknown
            unknown_each = unknown_each * (1.0 - new / unknown)
        edges.append(sampled)
        rows.append(population.all - float(unreached.sum()))
    return Expected(tuple(rows[::-1]), tuple(edges[::-1]), vertices - unreached)


class EstimatedBatch(MiniBatch):
    """The expected counts of a mini-batch.

    groups: the group of each rank. needs: the frontier of each group. crossing: the share of edges
    that lead to another rank of the group. fullest: the first rank's share of its group's rows and
    edges over the mean share. scored: link prediction's edges per batch, and negatives per edge;
    None for losses of labels."""

    def __init__(
        self,
        stats: GraphStats,
        groups: tuple[int, ...],
        needs: list[Expected],
        first_varying: int,
        crossing: float,
        fullest: float = 1.0,
        scored: tuple[int, int] | None = None,
    ) -> None:
        self.stats, self.servers, self.needs = stats, groups, needs
        self.first_varying, self.cross = first_varying, crossing
        self.layers = self.inside = len(needs[0].edges)
        self.depth, self.ranks = self.layers - first_varying, len(groups)
        self._size, self._fullest = groups.count(groups[0]), fullest
        self._facts, seen = {}, Counter[int]()
        self._member = np.zeros(self.ranks, dtype=np.int64)  # index of each rank in its group
        for rank, group in enumerate(groups):
            self._member[rank], seen[group] = seen[group], seen[group] + 1
        self._rows = self._shared([need.rows for need in needs])
        self._edges_in = self._shared([need.edges for need in needs])
        self.scored = None if scored is None else self._scored(*scored)

    def _scored(self, batch: int, negatives: int) -> Scored:
        """Return the expected edges that each rank scores, and the rows sent for that."""
        counts = [part.size for part in shares(np.arange(batch), len(self.needs))]
        edges, sends = self._shared(counts), self._to_peers([0] * len(counts))
        if self._size > 1:
            population, peers = Population.of(self.stats), self._size - 1
            wanted = []
            for count in counts:
                # expected number of ends of one other rank's edges at a vertex of each class [K]
                along = count * population.drawn_from / max(population.edges, 1.0)
                times = along * self.cross / peers + count * negatives / self._size / population.all
                reached = population.vertices @ -np.expm1(-times)
                wanted.append(round(float(reached) / self._size))
            sends = self._to_peers(wanted)
        return Scored(edges, sends, self._size > 1)

    def _shared(self, totals: Sequence[Any]) -> NDArray[np.int64]:
        """Divide each group's totals among its ranks, in integers that add up [.., ranks]."""
        total = np.rint(totals).astype(np.int64)[list(self.servers)].T
        peers = self._size - 1
        if not peers:
            return np.asarray(total)
        first = np.rint(np.minimum(total * self._fullest / self._size, total)).astype(np.int64)
        left = total - first
        rest = left // peers + (self._member - 1 < left % peers)
        return np.where(self._member == 0, first, rest)

    def row_counts(self, h: int) -> NDArray[np.int64]:
        return np.asarray(self._rows[h])

    def rows(self, rank: int, h: int) -> NDArray[np.int64]:
        """Return as many numbers as the rank has rows; the vertices' ids are not known."""
        return np.arange(self.row_counts(h)[rank])

    def crossing(self, layer: int) -> NDArray[np.int64]:
        return np.rint(self.facts(layer).edges * self.cross).astype(np.int64)

    def _counted(self, layer: int) -> LayerCounts:
        halo = [round(self._halo(need, layer)) if self._size > 1 else 0 for need in self.needs]
        sends = self._to_peers(halo)
        return LayerCounts(
            self.row_counts(layer),
            self.row_counts(layer - 1) + sends.sum(0),
            self._edges_in[layer - 1],
            sends,
        )

    def _to_peers(self, rows: Sequence[int]) -> Outer:
        """Return the matrix in which a rank receives rows[group] rows from each group member."""
        return Outer.of(self.servers, True, np.array(rows)[list(self.servers)]).T

    def _halo(self, need: Expected, layer: int) -> float:
        """Return the rows of h_{l-1} that a rank needs from one other rank of its group."""
        population = Population.of(self.stats)
        # expected number of times that one other rank samples a vertex of each class [K]
        times = (
            need.edges[layer - 1]
            * population.readers
            / population.edges
            * self.cross
            / (self._size - 1)
        )
        needed = float((population.vertices * -np.expm1(-times)).sum()) / self._size
        return min(needed, need.rows[layer - 1] / self._size)


class EstimatedBatches(Batches):
    """The expected batches of an epoch; all are equal except the last, which may be smaller."""

    def __init__(
        self,
        stats: GraphStats,
        workload: Workload,
        groups: tuple[int, ...],
        first_varying: int,
        splitter: str = "",
    ) -> None:
        self.stats, self.workload = stats, workload
        self.groups, self.first_varying = groups, first_varying
        self.items, self.steps = count_items(workload, stats), per_epoch(workload, stats)
        self.known = min(self.steps, MOST_BATCHES)
        size = groups.count(groups[0])
        self.crossing = mixing_of(stats, splitter).at(size) * (size - 1) / size
        share = np.log(min(max(self.items, 1) / stats.vertices, 1.0))
        self.fullest = float(
            np.interp(share, np.log([0.01, 0.5]), FULLEST.get(splitter, (1.0, 1.0)))
        )
        self._batches = {}

    def at(self, step: int) -> MiniBatch:
        workload, groups = self.workload, len(set(self.groups))
        size = min(workload.batch, self.items - step % self.steps * workload.batch)
        if size not in self._batches:
            needs = [self._need(share.size) for share in shares(np.arange(size), groups)]
            scored = (size, workload.negatives) if workload.task == "link" else None
            others = self.first_varying, self.crossing, self.fullest, scored
            self._batches[size] = EstimatedBatch(self.stats, self.groups, needs, *others)
        return self._batches[size]

    def _need(self, items: int) -> Expected:
        """Return the expected frontier of a group's share of a batch."""
        workload = self.workload
        if workload.task == "node":
            return expected_frontier(self.stats, items, workload.fanouts)
        return expected_frontier_of_edges(self.stats, items, workload.negatives, workload.fanouts)
