"""Mini-batches of a graph known by statistics only: how many rows and edges each rank has, and no ids.

Vertices are cut in classes that are alike. In class k a vertex has d_k neighbours to draw from and is read by r_k; both are lognormal
over vertices, each with the mean degree and with a spread of its own (GraphStats.batch_spread). Where edges go both ways they are of the
same vertices in the same order (a hub is both); in a directed graph they have nothing to do with each other.

A drawn edge that nobody knew leads to a vertex in proportion to r. When a share q of the unknown edges has been drawn,

    exp(-r_k q)     of class k has not been reached,     and those have d_k (1 - q) unknown edges, where edges go both ways

With spread 0 this is a uniform random graph, whose degrees follow Poisson's law. Real graphs are clustered besides: neighbours of
neighbours are often neighbours. That is in the spreads too, which are those that give frontiers their size rather than those of degrees.
With one spread fitted to each, rows and edges of nine real graphs with edges both ways are off by 7 % (mean; 2 to 10 %), of four directed
ones by 22 %; with the usual one, by 20 % and 75 % (tests/planner/test_expected.py). A graph with both spreads counted: GSplit Table 1
within 11 %.

Ranks that split a batch (GSplit) have shares of it, the fullest rank as much more than the others as real splits have it (FULLEST);
else shares are equal. A share phi (m - 1) / m of drawn edges leads to another of m ranks, phi the
graph's mixing (estimate.py), so that of class k, drawn so many times t_k in a layer, each other rank asks for a vertex with chance
1 - exp(-t_k phi / m).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, pdtr, pdtrc

from gnnplan.planner.estimate import mixing_of
from gnnplan.planner.graph import GraphStats
from gnnplan.planner.layout import LayerFacts
from gnnplan.planner.minibatch import MOST_BATCHES, Batches, MiniBatch, per_epoch, shares
from gnnplan.planner.specs import ALL, Workload

CLASSES = 100  # of degrees; in a directed graph a quarter so many each way
LOWEST = -5.0  # standard deviations
USUAL = {False: 1.3, True: 1.85}  # spreads where nobody counted: means of nine real graphs (1.0 to 1.8) and of four directed (1.3 to 2.2)

# Most edges of a rank over the mean, by splitter, with 1 % and 50 % of the vertices to train on: means of Flickr and ogbn-arxiv on four
# ranks (docs/minibatch.md). A splitter that has seen no samples balances edges of which most are never drawn.
FULLEST = {"gsplit": (1.17, 1.10), "node": (1.16, 1.10), "edge": (1.47, 1.135), "random": (1.02, 1.015)}

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Population:
    """Classes [K]: vertices, neighbours that one draws from, and readers that one has."""

    vertices: Floats
    drawn_from: Floats
    readers: Floats
    directed: bool

    @classmethod
    @lru_cache(maxsize=16)
    def of(cls, stats: GraphStats) -> Population:
        mean, (drawn, reached) = stats.edges / stats.vertices, stats.batch_spread or (USUAL[stats.directed],) * 2
        highest = max(1.0, float(ndtri(1.0 - 1.0 / max(stats.vertices, 3))))  # the graph has one vertex above
        if not stats.directed:
            z = np.linspace(LOWEST, highest, CLASSES)
            share = np.exp(-z * z / 2)
            return cls(stats.vertices * share / share.sum(), _lognormal(z, share, drawn, mean), _lognormal(z, share, reached, mean), False)
        z = np.linspace(LOWEST, highest, CLASSES // 4)
        share = np.exp(-z * z / 2)
        each, ones = share / share.sum(), np.ones(z.size)
        return cls(stats.vertices * np.outer(each, each).ravel(), np.outer(_lognormal(z, share, drawn, mean), ones).ravel(),
                   np.outer(ones, _lognormal(z, share, reached, mean)).ravel(), True)  # fmt: skip

    @property
    def all(self) -> float:
        return float(self.vertices.sum())

    @property
    def edges(self) -> float:
        return float(self.vertices @ self.readers)


def _lognormal(z: Floats, share: Floats, spread: float, mean: float) -> Floats:
    values = np.exp(spread * (z - z[-1]))
    return np.asarray(values * mean * share.sum() / (share @ values))


def taken(fanout: int, mean: Floats) -> Floats:
    """E[min(degree, fanout)] of degrees by Poisson's law."""
    if fanout == ALL:
        return np.asarray(mean)
    below = mean * pdtr(fanout - 2, mean) if fanout > 1 else 0.0  # of degrees below the fanout: k P(k) = mean P(k - 1)
    return np.asarray(below + fanout * pdtrc(fanout - 1, mean))


@dataclass(frozen=True)
class Expected:
    """What so many seeds need: rows of h_0 .. h_L, edges of layers 1 .. L, and by class [K] the rows of h_0."""

    rows: tuple[float, ...]
    edges: tuple[float, ...]
    read: Floats


@lru_cache(maxsize=256)
def expected_frontier(stats: GraphStats, seeds: int, fanouts: tuple[int, ...]) -> Expected:
    """Of random training vertices; of popular ones, in proportion to degrees, where the graph says so."""
    of = Population.of(stats)
    n, everything = of.vertices, of.edges
    chosen = n * of.drawn_from if stats.train_popular else n
    unreached = n * np.exp(-seeds * chosen / max(float(chosen.sum()), 1e-300) / np.maximum(n, 1e-300))
    unreached = unreached * (of.all - seeds) / max(float(unreached.sum()), 1e-300)
    left, known = of.drawn_from, 0.0
    rows, edges = [float(seeds)], []
    for fanout in fanouts:
        drawn = float((n * taken(fanout, of.drawn_from) - unreached * taken(fanout, left)).sum())
        theirs = float((n * of.drawn_from - unreached * left).sum())  # edges of the rows
        everywhere = max(everything - known, 1.0)
        new = min(drawn * max(theirs - known, 0.0) / max(theirs, 1.0), everywhere)
        unreached = unreached * np.exp(-of.readers * new / everywhere)
        if of.directed:
            known += new
        else:
            known += 2 * new - new * new / everywhere  # both ways, once where both were drawn
            left = left * (1.0 - new / everywhere)
        edges.append(drawn)
        rows.append(of.all - float(unreached.sum()))
    return Expected(tuple(rows[::-1]), tuple(edges[::-1]), n - unreached)


class EstimatedBatch(MiniBatch):
    """A batch of counts: what each group of ranks needs [groups], of which its first rank has `fullest` times an equal share.
    `crossing`: the share of edges that lead to another rank of the group."""

    def __init__(self, stats: GraphStats, groups: tuple[int, ...], needs: list[Expected], first_varying: int, crossing: float,
                 fullest: float = 1.0) -> None:  # fmt: skip
        self.stats, self.servers, self.needs, self.first_varying, self.cross = stats, groups, needs, first_varying, crossing
        self.layers = self.inside = len(needs[0].edges)
        self.depth, self.ranks = self.layers - first_varying, len(groups)
        self._size, self._fullest = groups.count(groups[0]), fullest
        self._facts = {}
        self._rows: dict[int, NDArray[np.int64]] = {}
        seen: Counter[int] = Counter()
        self._places = np.zeros(self.ranks, dtype=np.int64)  # of each rank in its group
        for rank, group in enumerate(groups):
            self._places[rank], seen[group] = seen[group], seen[group] + 1

    def _each(self, totals: list[float]) -> NDArray[np.int64]:
        """A rank's whole share of its group's total [ranks]; shares add up."""
        whole = np.rint(totals).astype(np.int64)[list(self.servers)]
        others = self._size - 1
        if not others:
            return np.asarray(whole)
        most = np.rint(np.minimum(whole * self._fullest / self._size, whole)).astype(np.int64)
        left, place = whole - most, self._places - 1
        return np.where(self._places == 0, most, left // others + (place < left % others))

    def row_counts(self, h: int) -> NDArray[np.int64]:
        if h not in self._rows:
            self._rows[h] = self._each([need.rows[h] for need in self.needs])
        return self._rows[h]

    def rows(self, rank: int, h: int) -> NDArray[np.int64]:
        """As many as there are: whose they are is not known."""
        return np.arange(self.row_counts(h)[rank])

    def kind(self, layer: int) -> object:
        return layer

    def crossing(self, layer: int) -> NDArray[np.int64]:
        return np.rint(self.facts(layer).edges * self.cross).astype(np.int64)

    def facts(self, layer: int) -> LayerFacts:
        if layer not in self._facts:
            local, sends = self.row_counts(layer - 1), np.zeros((self.ranks, self.ranks), dtype=np.int64)
            if self._size > 1:
                peers = np.equal.outer(self.servers, self.servers) & ~np.eye(self.ranks, dtype=bool)
                sends = peers * np.rint([self._asked(need, layer) for need in self.needs]).astype(np.int64)[list(self.servers)]
            self._facts[layer] = LayerFacts(self.row_counts(layer), local + sends.sum(0),
                                            self._each([need.edges[layer - 1] for need in self.needs]), sends)  # fmt: skip
        return self._facts[layer]

    def _asked(self, need: Expected, layer: int) -> float:
        """Rows of h_{l-1} that a rank needs of one other."""
        of = Population.of(self.stats)
        times = need.edges[layer - 1] * of.readers / of.edges * self.cross / (self._size - 1)  # that one other rank draws a vertex
        asked = float((of.vertices * -np.expm1(-times)).sum()) / self._size
        return min(asked, need.rows[layer - 1] / self._size)

    def meets(self, layer: int) -> bool:
        return self._size > 1


class EstimatedBatches(Batches):
    """An epoch's batches are alike but for the last."""

    def __init__(self, stats: GraphStats, workload: Workload, groups: tuple[int, ...], first_varying: int, splitter: str = "") -> None:
        self.stats, self.workload, self.groups, self.first_varying = stats, workload, groups, first_varying
        self.steps = per_epoch(workload, stats.train_vertices)
        self.known = min(self.steps, MOST_BATCHES)
        size = groups.count(groups[0])
        self.mixed = mixing_of(stats, splitter).at(size)
        self.crossing = self.mixed * (size - 1) / size
        share = np.log(max(stats.train_vertices, 1) / stats.vertices)
        self.fullest = float(np.interp(share, np.log([0.01, 0.5]), FULLEST.get(splitter, (1.0, 1.0))))
        self._made = {}

    def at(self, step: int) -> MiniBatch:
        step %= self.steps
        size = min(self.workload.batch, self.stats.train_vertices - step * self.workload.batch)
        if size not in self._made:
            seeds = [share.size for share in shares(np.arange(size), len(set(self.groups)))]
            needs = [expected_frontier(self.stats, count, self.workload.fanouts) for count in seeds]
            self._made[size] = EstimatedBatch(self.stats, self.groups, needs, self.first_varying, self.crossing, self.fullest)
        return self._made[size]
