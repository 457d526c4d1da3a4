"""Estimates for a graph known by statistics only: counts of layouts and mini-batches, no ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtri, pdtr, pdtrc

from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.partition import BLIND
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.layout import ChunkCounts, Expansion, Facts, LayerCounts
from gnnplan.planner.ownership.minibatch import (
    MOST_BATCHES,
    Batches,
    MiniBatch,
    Scored,
    places_in,
)
from gnnplan.planner.vocabulary.numbers import ByContent, Floats, Ints, Outer, PerRank, shares

# -- layouts ---------------------------------------------------------------------------------------

# Model: an edge leads to a random vertex with probability phi (the graph's *mixing*), and stays in
# its part with probability 1 - phi. For N vertices of mean degree d in m equal parts:
#
#     halo rows of all parts           H(m)   = N (m-1) (1 - exp(-phi d / m))
#     so one counted halo gives        phi(m) = -m/d ln(1 - H / (N (m-1)))
#
# phi grows with the number of parts, because smaller parts keep fewer edges. Between counted halos
# log phi is interpolated over log m. Outside their range phi grows as m^0.5: METIS's halos of five
# real graphs at 2, 8 and 32 parts have exponents 0.2 to 1.0 (mean 0.6) up to 8 parts, and 0.2 to
# 0.6 (mean 0.4) above. Without a counted halo, phi is that of usual graphs (USUAL_MIXING). In a
# random partition phi is 1, as in a random graph, which no partitioner can cut well (GNNPipe Sec.
# 3.1.1).
#
# Neighbourhoods grow in two pools, the own part and all other parts. A row that is reached in
# another part has its neighbours in that pool.
#
# Errors (tests/planner/test_estimate.py, three real graphs): the model treats all vertices alike,
# but hubs are reached first, so real neighbourhoods have more edges than estimated. Neighbourhoods
# of parts overlap, so two hops have up to 25 % fewer rows than estimated. In a dense graph
# (Squirrel, mean degree 76) the estimated exchanges inside preloading servers are half of the real
# ones.


GROWTH = 0.5  # slope of log phi over log m outside the range of counted halos
# (parts, phi): geometric mean of eight graphs, 0.007 (papers100M, Reddit) to 0.5 (Squirrel)
USUAL_MIXING = 8, 0.04


def expected_halo_rows(vertices: int, parts: int, edge_probability: float) -> float:
    """Return the expected halo rows of all parts of a random graph with independent edges [rows].

    Real graphs have fewer. Source: GNNPipe Sec. 3.1.1.
    """
    with np.errstate(divide="ignore"):  # p = 1: log 0 = -inf, and exp(-inf) is the right 0
        share = -np.expm1(vertices / parts * np.log1p(-edge_probability))
    return float(vertices * (parts - 1) * share)


@dataclass(frozen=True)
class Mixing:
    """A graph's mixing phi as a function of the number of parts; without points, phi is 1."""

    known: tuple[tuple[int, float], ...] = ()  # counted points (m, phi(m)), in order of m

    @classmethod
    def of(cls, vertices: int, edges: int, halo_rows: Mapping[int, int]) -> Mixing:
        """Make the mixing from counted halos; halo_rows: parts -> halo rows of all parts."""
        points = []
        for parts, rows in sorted(halo_rows.items()):
            if parts > 1 and rows > 0:
                share = min(rows / (vertices * (parts - 1)), 1 - 1e-9)
                points.append(
                    (parts, min(1.0, -parts / (edges / vertices) * float(np.log1p(-share))))
                )
        return cls(tuple(points))

    def at(self, parts: float) -> float:
        """Return phi for a partition into `parts` equal parts."""
        if not self.known:
            return 1.0
        log_parts, log_phi = (np.log([point[i] for point in self.known]) for i in (0, 1))
        here = np.log(max(parts, 1.0))
        beyond = GROWTH * (here - np.clip(here, log_parts[0], log_parts[-1]))
        return float(min(1.0, np.exp(np.interp(here, log_parts, log_phi) + beyond)))


@dataclass(frozen=True)
class EstimatedLayout(Facts):
    """The expected counts of a Layout with equal parts; it has the methods of Layout.

    servers: the server (or group) of each rank, with the same number of ranks each. The other
    fields are as in Layout."""

    vertices: int
    edges: int
    servers: PerRank
    layers: int
    first_varying: int
    depth: int
    expansion: Expansion | None = None
    mixing: Mixing = Mixing()
    targets: float | None = None  # vertices per server whose h_L is needed; None: all own vertices
    _facts: dict[object, LayerCounts] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    # (own rows, external rows) of each of h_0 .. h_L that a server computes (h_0: has)
    _regions: tuple[tuple[float, float], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        grown = [self._grown(self.inside - h) for h in range(self.inside)]
        above = range(self.inside, self.layers + 1)
        own = ((self._needed(h) / self.groups, 0.0) for h in above)
        object.__setattr__(self, "_regions", (*grown, *own))

    @property
    def ranks(self) -> int:
        return len(self.servers)

    @property
    def groups(self) -> int:
        """The number of servers."""
        return len(set(self.servers))

    @property
    def inside(self) -> int:
        if self.expansion and self.groups > 1:
            return self.layers
        return min(self.first_varying + self.depth, self.layers) if self.depth else 0

    def recomputed(self, layer: int) -> bool:
        return layer - 1 < self.inside

    def kind(self, layer: int) -> object:
        return tuple(
            round(rows) for h in (layer, layer - 1) for rows in self._regions[h]
        ), self.recomputed(layer)

    # -- a server's region ---------------------------------------------------------------------

    @property
    def _own_rows(self) -> float:
        """The rows of a server's own part."""
        return self.vertices / self.groups

    @property
    def _external_rows(self) -> float:
        """The rows of all other servers' parts."""
        return self.vertices - self._own_rows

    @property
    def _degree(self) -> float:
        """The mean degree."""
        return self.edges / self.vertices

    @property
    def _allowed(self) -> float:
        """The external rows that a server may read: all, or the rows that an expansion draws."""
        if not self.expansion or not self._external_rows:
            return self._external_rows
        reached, new, mixed = 0.0, self._own_rows, self.mixing.at(self.groups)
        # external neighbours of an own row; below, of an external row, nearly all its neighbours
        external = self._degree * mixed * (1 - 1 / self.groups)
        for _ in range(self.expansion.max_hop):
            new = (self._external_rows - reached) * -np.expm1(
                -new * min(self.expansion.fanout, external) / self._external_rows
            )
            reached += new
            external = self._degree * (1 - mixed / self.groups)
        return float(reached)

    def _needed(self, h: int) -> float:
        """Return the rows of h_h that the targets of all servers need from their owners."""
        if self.targets is None:
            return float(self.vertices)
        new = rows = self.targets * self.groups
        for _ in range(self.layers - h):
            new = (self.vertices - rows) * -np.expm1(-new * self._degree / self.vertices)
            rows += new
        return float(rows)

    def _grown(self, hops: int) -> tuple[float, float]:
        """Return the own and the external rows within `hops` hops of a server's own h_inside."""
        pools = np.array([self._own_rows, self._external_rows or np.inf])
        most, mixed = np.array([self._own_rows, self._allowed]), self.mixing.at(self.groups)
        # edges of a row to any one vertex by mixing, and edges of a row that stay in its pool
        anywhere, near = self._degree * mixed / self.vertices, self._degree * (1 - mixed)
        rows = new = np.array([self._needed(self.inside) / self.groups, 0.0])
        for _ in range(hops):
            edges = new.sum() * anywhere + new * near / pools  # to one vertex of each pool
            new = (most - rows) * -np.expm1(-edges)
            rows = rows + new
        own, external = rows.tolist()
        return own, external

    def _kept_edges(self, own: float, external: float) -> float:
        """Return the edges into `own` and `external` rows from rows that the server may read."""
        allowed = self._allowed / self._external_rows if self._external_rows else 1.0
        # probability that an edge leads to one given part by mixing
        crossing = self.mixing.at(self.groups) / self.groups
        return self._degree * (
            own * (1 - (self.groups - 1) * crossing * (1 - allowed))
            + external * (crossing + (1 - crossing) * allowed)
        )

    def _counted(self, layer: int) -> LayerCounts:
        ranks, per_server = self.ranks, self.ranks // self.groups
        (own, external), among = self._regions[layer], sum(self._regions[layer - 1])
        rows, local = (own + external) / per_server, among / per_server
        if self.recomputed(layer):
            edges = self._kept_edges(own, external) / per_server
            parts, groups = (local, among), self.servers
        else:
            edges, among = rows * self._degree, among * self.groups
            parts, groups = (self.vertices / ranks, self.vertices), (0,) * ranks
        sends = _evenly(groups, True, self._halo(rows, local, among, parts))
        ones = np.ones(ranks)
        return LayerCounts(rows * ones, local + sends.sum(0), edges * ones, sends)

    def _halo(self, rows: float, local: float, among: float, parts: tuple[float, float]) -> float:
        """Return the halo rows of a rank with `local` of the `among` source rows of its group.

        rows: the rank's destinations. parts: the rows of the rank's part of the graph, and of the
        group's. Halo rows are at the ends of edges that leave the rank's part, but stay in the
        group's."""
        if local >= among:
            return 0.0
        leave_rank, leave_group = map(self.leaving, parts)
        rate = self._degree * max(leave_rank - leave_group, 0.0) / (among - local)
        return float((among - local) * -np.expm1(-rows * rate))

    def leaving(self, rows: float) -> float:
        """Return the share of edges that leave a part of `rows` rows."""
        return self.mixing.at(self.vertices / rows) * (1 - rows / self.vertices)

    def preloaded(self) -> Outer:
        rows = (self.region(0) - self._own_rows) / (self.ranks // self.groups)
        return _evenly(self.servers, False, rows)

    def row_counts(self, h: int) -> np.ndarray:
        return np.full(self.ranks, self.region(h) * self.groups / self.ranks)

    def region(self, h: int) -> float:
        """Return a server's own and external rows of h_h together."""
        return sum(self._regions[h])


def mixing_of(stats: GraphStats, method: str = "metis") -> Mixing:
    """Return a graph's mixing under a partitioner, from counted halos, else of usual graphs."""
    if method in BLIND:
        return Mixing()
    return (
        Mixing.of(stats.vertices, stats.edges, stats.halo_rows)
        if stats.halo_rows
        else Mixing((USUAL_MIXING,))
    )


def _evenly(groups: PerRank, same: bool, rows: float) -> Outer:
    """Return the matrix in which every rank receives `rows` rows, the same number from each peer.

    The peers are the other ranks of its group (`same`), or the ranks of other groups. Entries are
    rounded to whole rows."""
    size = groups.count(groups[0])
    peers = size - 1 if same else len(groups) - size
    return Outer.of(groups, same, round(rows / max(peers, 1)))


def estimated_chunks(stats: GraphStats, chunks: int, members: int, method: str) -> ChunkCounts:
    """Return the expected counts of a graph known by statistics only.

    Sub-chunks have equal sizes. The graph's mixing (estimated.Mixing) gives the probability
    of an edge between two vertices of different sub-chunks."""
    vertices, edges = stats.vertices, stats.edges
    probability = min(edges / vertices**2 * mixing_of(stats, method).at(chunks * members), 0.5)
    rows = shares(shares(vertices, chunks), members)
    parts = min(chunks * members, vertices)
    sources = rows + expected_halo_rows(vertices, parts, probability) / parts
    sent = 0 * rows  # rows that each member sends to each other member
    if members > 1:
        halo = expected_halo_rows(vertices, min(members, vertices), probability)
        # rows of one member that one other member reads
        read = round(halo / (members * (members - 1)))
        sent = np.minimum(shares(read, chunks)[:, None], rows)
    return ChunkCounts(
        rows, rows * (edges / vertices), sources, Outer.of([0] * members, True, sent)
    )


# -- mini-batches ----------------------------------------------------------------------------------

# Model: vertices belong to classes. A vertex of class k has d_k neighbours, which it can sample,
# and r_k readers, which can sample it. Both are lognormal over vertices, with the mean degree as
# their mean and a spread each (GraphStats.batch_spread). In an undirected graph, a vertex with a
# high d_k has a high r_k. In a directed graph d and r are independent.
#
# An edge that is sampled for the first time leads to a vertex with probability proportional to r_k.
# When a share q of the unknown edges has been sampled,
#
#     exp(-r_k q)     is the share of class k that is not reached yet, and
#     d_k (1 - q)     unknown edges are left at each of these vertices (undirected graphs)
#
# With spread 0 this is a uniform random graph, whose degrees have a Poisson distribution. Real
# graphs are also clustered: neighbours of neighbours are often neighbours. The spreads account for
# that too: they are fitted to the sizes of frontiers, and differ from the spreads of degrees. They
# cannot tell duplicates near one seed from duplicates between seeds, of which large batches have
# more. Where both were counted, GraphStats.near_seed is the number P of vertices near a seed: of s
# seeds, e sampled edges lead to s P (1 - exp(-e / (s P))) vertices, before duplicates between
# seeds.
#
# Errors of rows and edges (tests/planner/test_estimate.py): with one spread fitted to each graph, 7
# % for nine undirected graphs (mean; 2 to 10 %) and 22 % for four directed ones; with the usual
# spread, 20 % and 75 %. With both spreads counted, GSplit's Table 1 is reproduced within 11 %, and
# with the vertices near a seed GNNLab's batch of the same graph within 13 % (42 % without).
#
# Ranks that split a batch (GSplit) get equal shares, except the fullest rank, which gets more, as
# in real splits (FULLEST). A share phi (m - 1) / m of the sampled edges leads to another of m
# ranks, for the graph's mixing phi. If a vertex of class k is sampled t_k
# times in a layer, each other rank asks for the vertex with probability 1 - exp(-t_k phi / m).


VERTEX_CLASSES = 100  # a directed graph has all pairs of 25 values of d and 25 of r
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
        z = np.linspace(LOWEST, highest, VERTEX_CLASSES // 4 if stats.directed else VERTEX_CLASSES)
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
        groups: PerRank,
        needs: list[Expected],
        crossing: float,
        fullest: float,
        scored: tuple[int, int] | None,
    ) -> None:
        self.population, self.servers, self.needs = Population.of(stats), groups, needs
        self.layers = self.inside = len(needs[0].edges)
        self.cross, self.ranks = crossing, len(groups)
        self._size, self._fullest = groups.count(groups[0]), fullest
        self._facts, self._member = {}, np.array(places_in(groups))
        self._rows = self._shared([need.rows for need in needs])
        self._edges_in = self._shared([need.edges for need in needs])
        self.scored = None if scored is None else self._scored(*scored)

    def _scored(self, batch: int, negatives: int) -> Scored:
        """Return the expected edges that each rank scores, and the rows sent for that."""
        counts = shares(batch, len(self.needs)).tolist()
        edges, sends = self._shared(counts), self._to_peers([0] * len(counts))
        if self._size > 1:
            population, peers = self.population, self._size - 1
            wanted = []
            for count in counts:
                # expected number of ends of one other rank's edges at a vertex of each class [K]
                along = count * population.drawn_from / max(population.edges, 1.0)
                times = along * self.cross / peers + count * negatives / self._size / population.all
                reached = population.vertices @ -np.expm1(-times)
                wanted.append(round(float(reached) / self._size))
            sends = self._to_peers(wanted)
        return Scored(edges, sends, self._size > 1)

    def _shared(self, totals: Sequence[Any]) -> Ints:
        """Divide each group's totals among its ranks, in integers that add up [.., ranks]."""
        total = np.rint(totals).astype(np.int64)[list(self.servers)].T
        peers = self._size - 1
        if not peers:
            return np.asarray(total)
        first = np.rint(np.minimum(total * self._fullest / self._size, total)).astype(np.int64)
        left = total - first
        rest = left // peers + (self._member - 1 < left % peers)
        return np.where(self._member == 0, first, rest)

    def row_counts(self, h: int) -> Ints:
        return np.asarray(self._rows[h])

    def rows(self, rank: int, h: int) -> Ints:
        """Return as many numbers as the rank has rows; the vertices' ids are not known."""
        return np.arange(self.row_counts(h)[rank])

    def crossing(self, layer: int) -> Ints:
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
        population = self.population
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
        groups: PerRank,
        splitter: str = "",
    ) -> None:
        self.stats, self.workload, self.groups = stats, workload, groups
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
            needs = [self._need(part) for part in shares(size, groups).tolist()]
            scored = (size, workload.negatives) if workload.task == "link" else None
            others = self.crossing, self.fullest, scored
            self._batches[size] = EstimatedBatch(self.stats, self.groups, needs, *others)
        return self._batches[size]

    def _need(self, items: int) -> Expected:
        """Return the expected frontier of a group's share of a batch."""
        workload = self.workload
        if workload.task == "node":
            return expected_frontier(self.stats, items, workload.fanouts)
        return expected_frontier_of_edges(self.stats, items, workload.negatives, workload.fanouts)
