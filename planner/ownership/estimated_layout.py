"""Estimates of layouts for a graph known by statistics only: row and edge counts, no ids.

Model: an edge leads to a random vertex with probability phi (the graph's *mixing*), and stays in
its part with probability 1 - phi. For N vertices of mean degree d in m equal parts:

    halo rows of all parts           H(m)   = N (m-1) (1 - exp(-phi d / m))
    so one counted halo gives        phi(m) = -m/d ln(1 - H / (N (m-1)))

phi grows with the number of parts, because smaller parts keep fewer edges. Between counted halos
log phi is interpolated over log m. Outside their range phi grows as m^0.5: METIS's halos of five
real graphs at 2, 8 and 32 parts have exponents 0.2 to 1.0 (mean 0.6) up to 8 parts, and 0.2 to 0.6
(mean 0.4) above. Without a counted halo, phi is that of usual graphs (USUAL). In a random partition
phi is 1, as in a random graph, which no partitioner can cut well (GNNPipe Sec. 3.1.1).

Neighbourhoods grow in two pools, the own part and all other parts. A row that is reached in another
part has its neighbours in that pool.

Errors (tests/planner/test_estimate.py, three real graphs): the model treats all vertices alike, but
hubs are reached first, so real neighbourhoods have more edges than estimated. Neighbourhoods of
parts overlap, so two hops have up to 25 % fewer rows than estimated. In a dense graph (Squirrel,
mean degree 76) the estimated exchanges inside preloading servers are half of the real ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.partition import BLIND
from gnnplan.planner.ownership.layout import Expansion, LayerCounts
from gnnplan.planner.vocabulary.outer import Outer

GROWTH = 0.5  # slope of log phi over log m outside the range of counted halos
# (parts, phi): geometric mean of eight graphs, 0.007 (papers100M, Reddit) to 0.5 (Squirrel)
USUAL = 8, 0.04


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
class EstimatedLayout:
    """The expected counts of a Layout with equal parts; it has the methods of Layout.

    servers: the server (or group) of each rank, with the same number of ranks each. The other
    fields are as in Layout."""

    vertices: int
    edges: int
    servers: tuple[int, ...]
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
        own = self._needed(self.inside) / self.groups
        external, new_own, new_external = 0.0, own, 0.0
        mixed = self.mixing.at(self.groups)
        # edges of a row to any one vertex by mixing, and edges of a row that stay in its pool
        anywhere, near = self._degree * mixed / self.vertices, self._degree * (1 - mixed)
        for _ in range(hops):
            # edges of the new rows to one vertex of each pool
            to_own = (new_own + new_external) * anywhere + new_own * near / self._own_rows
            to_external = (new_own + new_external) * anywhere + (
                new_external * near / self._external_rows if self._external_rows else 0.0
            )
            new_own = (self._own_rows - own) * -np.expm1(-to_own)
            new_external = (self._allowed - external) * -np.expm1(-to_external)
            own, external = own + new_own, external + new_external
        return float(own), float(external)

    def _kept_edges(self, own: float, external: float) -> float:
        """Return the edges into `own` and `external` rows from rows that the server may read."""
        allowed = self._allowed / self._external_rows if self._external_rows else 1.0
        # probability that an edge leads to one given part by mixing
        crossing = self.mixing.at(self.groups) / self.groups
        return self._degree * (
            own * (1 - (self.groups - 1) * crossing * (1 - allowed))
            + external * (crossing + (1 - crossing) * allowed)
        )

    def facts(self, layer: int) -> LayerCounts:
        """Return the counts of a layer over all ranks; layers of one `kind` share an object."""
        if (kind := self.kind(layer)) not in self._facts:
            self._facts[kind] = self._counted(layer)
        return self._facts[kind]

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

    def exchanges_rows(self, layer: int) -> bool:
        return bool(self.facts(layer).sends.any())

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
        else Mixing((USUAL,))
    )


def _evenly(groups: tuple[int, ...], same: bool, rows: float) -> Outer:
    """Return the matrix in which every rank receives `rows` rows, the same number from each peer.

    The peers are the other ranks of its group (`same`), or the ranks of other groups. Entries are
    rounded to whole rows."""
    size = groups.count(groups[0])
    peers = size - 1 if same else len(groups) - size
    return Outer.of(groups, same, round(rows / max(peers, 1)))
