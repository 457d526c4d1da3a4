"""The layout of a graph known by statistics only: how many rows a part's surroundings have, where a graph is cut well.

A graph's edges lead anywhere with probability phi (its *mixing*), and stay in their part with 1 - phi. Cut in m equal parts, mean degree d:

    halo of all parts    H(m) = N (m-1) (1 - exp(-phi d / m))        so that one counted halo gives   phi(m) = -m/d ln(1 - H / (N (m-1)))

phi grows with the number of parts, since smaller parts keep fewer edges. Between counted halos it is interpolated, log phi over log m;
beyond them it grows as m^0.5: METIS's halos of five real graphs at 2, 8 and 32 parts have exponents 0.2 to 1.0 (mean 0.6) up to 8 and 0.2
to 0.6 (mean 0.4) after. Where none has been counted it is what graphs usually have (USUAL); cut at random phi is 1, as in a random graph,
which nobody can cut (GNNPipe Sec. 3.1.1).

Neighbourhoods grow in two pools, of the own part and of all others: a row reached elsewhere has its neighbours there. Vertices are taken
for alike, so hubs, which are reached first, make real surroundings heavier in edges than this says; and parts' surroundings overlap, so two
hops are up to 25 % fewer rows than it says (tests/planner/test_estimate.py, three real graphs). In a dense one (Squirrel, 76 edges each)
exchanges inside servers that preload come out half as large as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from gnnplan.planner.graph import GraphStats
from gnnplan.planner.layout import Expansion, LayerFacts

GROWTH = 0.5  # of log phi over log m, where one halo or none is near
USUAL = 8, 0.04  # parts, phi: geometric mean of eight graphs, 0.007 (papers100M, Reddit) to 0.5 (Squirrel)


@dataclass(frozen=True)
class Mixing:
    """`known`: (m, phi(m)) in order of m, as counted."""

    known: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, vertices: int, edges: int, halo_rows: Mapping[int, int]) -> Mixing:
        """From halo rows, all parts together, by number of parts."""
        points = []
        for parts, rows in sorted(halo_rows.items()):
            if parts > 1 and rows > 0:
                share = min(rows / (vertices * (parts - 1)), 1 - 1e-9)
                points.append((parts, min(1.0, -parts / (edges / vertices) * float(np.log1p(-share)))))
        return cls(tuple(points))

    def at(self, parts: float) -> float:
        """phi, for as many equal parts."""
        if not self.known:
            return 1.0
        counts, values = (np.log([point[i] for point in self.known]) for i in (0, 1))
        here = np.log(max(parts, 1.0))
        beyond = GROWTH * (here - np.clip(here, counts[0], counts[-1]))
        return float(min(1.0, np.exp(np.interp(here, counts, values) + beyond)))


@dataclass(frozen=True)
class EstimatedLayout:
    """What a Layout says, of equal parts. Servers (or groups) hold equally many ranks."""

    vertices: int
    edges: int
    servers: tuple[int, ...]
    layers: int
    first_varying: int
    depth: int
    expansion: Expansion | None = None
    mixing: Mixing = Mixing()
    targets: float | None = None  # of a batch, per server; otherwise all own rows
    _facts: dict[object, LayerFacts] = field(default_factory=dict, init=False, compare=False, repr=False)
    _regions: dict[int, tuple[float, float]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def ranks(self) -> int:
        return len(self.servers)

    @cached_property
    def inside(self) -> int:
        if self.targets is not None or (self.expansion and len(set(self.servers)) > 1):
            return self.layers
        return self.first_varying + self.depth if self.depth else 0

    def hops(self, h: int) -> int:
        return max(0, self.inside - h)

    def recomputed(self, layer: int) -> bool:
        return layer - 1 < self.inside

    def kind(self, layer: int) -> object:
        return tuple(round(rows) for h in (layer, layer - 1) for rows in self._region(self.hops(h))), self.recomputed(layer)

    # -- a server's surroundings -------------------------------------------------------------------------------------------

    @cached_property
    def _home(self) -> float:
        """Rows of a server's own part."""
        return self.vertices / len(set(self.servers))

    @cached_property
    def _away(self) -> float:
        return self.vertices - self._home

    @property
    def _degree(self) -> float:
        return self.edges / self.vertices

    @cached_property
    def _allowed(self) -> float:
        """External rows that a server may have: all, or those drawn around its own."""
        if not self.expansion or not self._away:
            return self._away
        servers, reached, new = len(set(self.servers)), 0.0, self._home
        mixed = self.mixing.at(servers)
        external = self._degree * mixed * (1 - 1 / servers)  # neighbours elsewhere of an own row; of others nearly all are
        for _ in range(self.expansion.max_hop):
            new = (self._away - reached) * -np.expm1(-new * min(self.expansion.fanout, external) / self._away)
            reached += new
            external = self._degree * (1 - mixed / servers)
        return float(reached)

    def _region(self, hops: int) -> tuple[float, float]:
        """Rows of a server's part (of a batch its targets) and all within `hops` of them that it may have: its own, external ones."""
        if hops not in self._regions:
            self._regions[hops] = self._grown(hops)
        return self._regions[hops]

    def _grown(self, hops: int) -> tuple[float, float]:
        own = self._home if self.targets is None else self.targets
        external, new, far, mixed = 0.0, own, 0.0, self.mixing.at(len(set(self.servers)))
        for _ in range(hops):
            anywhere, near = self._degree * mixed / self.vertices, self._degree * (1 - mixed)  # edges into a vertex, per row
            to_own = (new + far) * anywhere + new * near / self._home
            to_external = (new + far) * anywhere + (far * near / self._away if self._away else 0.0)
            new, far = (self._home - own) * -np.expm1(-to_own), (self._allowed - external) * -np.expm1(-to_external)
            own, external = own + new, external + far
        return float(own), float(external)

    def _kept(self, own: float, external: float) -> float:
        """Edges into these rows from rows that the server may have."""
        servers, allowed = len(set(self.servers)), self._allowed / self._away if self._away else 1.0
        crossing = self.mixing.at(servers) / servers  # chance that an edge leads to one certain part by mixing
        return self._degree * (own * (1 - (servers - 1) * crossing * (1 - allowed)) + external * (crossing + (1 - crossing) * allowed))

    def facts(self, layer: int) -> LayerFacts:
        """Layers that are alike have the same object."""
        if (kind := self.kind(layer)) not in self._facts:
            self._facts[kind] = self._counted(layer)
        return self._facts[kind]

    def _counted(self, layer: int) -> LayerFacts:
        m, servers = self.ranks, len(set(self.servers))
        if self.recomputed(layer):
            group = m // servers
            own, external = self._region(self.hops(layer))
            rows, among, edges = (own + external) / group, sum(self._region(self.hops(layer - 1))), self._kept(own, external) / group
            local, others = among / group, _pairs(self.servers, True)
        else:
            rows = local = self.vertices / m
            among, edges, others = float(self.vertices), self.edges / m, _pairs((0,) * m, True)
        sends = _even(others, self._halo(rows, local, among))
        count = np.full(m, 1.0)
        return LayerFacts(rows * count, local + sends.sum(0), edges * count, sends)

    def _halo(self, rows: float, local: float, among: float) -> float:
        """Rows that a rank with `rows` destinations and `local` source rows needs of the others `among` whom rows are cut: what leaves a
        part of its size and does not leave them all."""
        if local >= among:
            return 0.0
        n = self.vertices
        leaves, leaves_all = (self.mixing.at(n / size) * (1 - size / n) for size in (local, among))
        rate = self._degree * max(leaves - leaves_all, 0.0) / (among - local)
        return float((among - local) * -np.expm1(-rows * rate))

    def meets(self, layer: int) -> bool:
        return bool(self.facts(layer).sends.any())

    def preloaded(self) -> np.ndarray:
        m, servers = self.ranks, len(set(self.servers))
        own, external = self._region(self.hops(0))
        return _even(_pairs(self.servers, False), (own + external - self._home) / (m // servers))

    def region(self, h: int) -> float:
        """Rows of h_h that a server has."""
        return sum(self._region(self.hops(h)))


def mixing_of(stats: GraphStats, method: str = "metis") -> Mixing:
    if method in ("random", "hash"):
        return Mixing()
    return Mixing.of(stats.vertices, stats.edges, stats.halo_rows) if stats.halo_rows else Mixing((USUAL,))


@lru_cache(maxsize=8)
def _pairs(groups: tuple[int, ...], same: bool) -> np.ndarray:
    """Whether two ranks are in the same group, or in different ones. bool [ranks, ranks]."""
    within = np.equal.outer(groups, groups)
    return np.asarray(within & ~np.eye(len(groups), dtype=bool) if same else ~within)


def _even(peers: np.ndarray, rows: float) -> np.ndarray:
    """Whole rows [ranks, ranks] that every rank gets from its `peers`, equally many from each."""
    return peers * round(rows / max(int(peers[0].sum()), 1))
