"""The feature store: where a vertex's features are, as each rank sees it.

    hit       in the cache of its own GPU                     static: the hottest rows, as many as the budget holds
    peer      in the cache of another GPU of its server       where these cache different rows and read each other's (Quiver)
    host      in its server's memory                          all rows; or, spread, those that are at home there (DistDGL)
    remote    in another server's memory                      one of that server's ranks sends it

Hottest first: by how often its row is read when batches are drawn (pre-sampling), or by how many vertices read from it (its out-degree:
PaGraph). Where a group splits a batch (GSplit) a vertex is read by its owner alone, so only the owner caches it; and if one group is all
there is, spread features are at home on the owner's server. Everyone knows the store, so nobody looks for a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.errors import SpecError
from gnnplan.planner.expected import EstimatedBatch, EstimatedBatches, Expected, Population
from gnnplan.planner.files import suggest
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, MiniBatch, shares
from gnnplan.planner.partition import Stopwatch, cached, partition
from gnnplan.planner.sampling import Ids, frontier, seeds_of
from gnnplan.planner.specs import Workload
from gnnplan.planner.splitting import BEFORE, EPOCHS
from gnnplan.planner.units import show_bytes

HOT = ("frequency", "degree")
PLACES = ("everywhere", "spread")
CLASSES = ("hit", "peer", "host", "remote")
HIT, PEER, HOST, REMOTE = range(4)
MOST = 2**31 - 1  # times that a row is counted


@dataclass(frozen=True)
class Loads:
    """What a batch's rows are to ranks: bytes from their server's memory and from their own caches [ranks], ids that i asks of j and
    bytes that i sends j for them [ranks, ranks], rows by class [ranks, 4]."""

    host: NDArray[np.int64]
    hits: NDArray[np.int64]
    asked: NDArray[np.int64]
    fetched: NDArray[np.int64]
    rows: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Store:
    """`servers`: of each rank. `cached`: what each rank's GPU holds, hottest first; ranks with the same have the same array. `home`: the
    server [N] whose memory has a row; None: every server has all. `shared`: GPUs of a server read each other's caches."""

    servers: tuple[int, ...]
    cached: tuple[Ids, ...]
    home: NDArray[np.int32] | None
    shared: bool
    vertices: int
    seconds: float = 0.0  # that it took to make
    _slots: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)
    _holders: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)
    _loads: WeakKeyDictionary[MiniBatch, Loads] = field(default_factory=WeakKeyDictionary, repr=False)

    def of(self, rank: int, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        """Class of these vertices' rows for a rank [R], and the rank that provides each [R]: itself for hits and rows of its server."""
        provider = self.sender(rank, ids)
        kind = np.where(provider == rank, HOST, REMOTE).astype(np.int8)
        if self.shared:
            held = self._holder(self.servers[rank])[ids]
            kind[held >= 0], provider[held >= 0] = PEER, held[held >= 0]
        hit = self.slot(rank)[ids] >= 0
        kind[hit], provider[hit] = HIT, rank
        return kind, provider

    def sender(self, rank: int, ids: Ids) -> NDArray[np.int32]:
        """The rank [R] that has these rows in its server's memory: itself, or one of the home's ranks, which share such work by id."""
        out = np.full(ids.size, rank, np.int32)
        if self.home is not None:
            home = self.home[ids]
            for server in set(self.servers) - {self.servers[rank]}:
                away = np.flatnonzero(home == server)
                ranks = np.flatnonzero(np.equal(self.servers, server))
                out[away] = ranks[ids[away] % ranks.size]
        return out

    def slot(self, rank: int) -> NDArray[np.int32]:
        """Place of each vertex [N] in the rank's cache; -1: it is not there."""
        ids = self.cached[rank]
        if id(ids) not in self._slots:
            self._slots[id(ids)] = place = np.full(self.vertices, -1, np.int32)
            place[ids] = np.arange(ids.size, dtype=np.int32)
        return self._slots[id(ids)]

    def _holder(self, server: int) -> NDArray[np.int32]:
        """The rank of the server [N] that caches a vertex; -1: none does."""
        if server not in self._holders:
            self._holders[server] = holder = np.full(self.vertices, -1, np.int32)
            for rank, where in enumerate(self.servers):
                if where == server:
                    holder[self.cached[rank]] = rank
        return self._holders[server]

    @property
    def caches(self) -> bool:
        return any(ids.size for ids in self.cached)

    @property
    def asks(self) -> NDArray[np.bool_]:
        """Whether a rank may ever ask another for rows [ranks, ranks]."""
        same = np.equal.outer(self.servers, self.servers)
        others = np.zeros_like(same) if self.home is None else ~same
        return np.asarray(others | (same & ~np.eye(len(self.servers), dtype=bool) & self.shared))

    def loads_of(self, job: Job, batch: MiniBatch) -> Loads:
        if batch not in self._loads:
            self._loads[batch] = self.loads(job, [batch.rows(rank, 0) for rank in range(batch.ranks)])
        return self._loads[batch]

    def loads(self, job: Job, rows: list[Ids]) -> Loads:
        """Of the rows [R] that each rank reads."""
        m = len(self.servers)
        host, hits, classes = np.zeros(m, np.int64), np.zeros(m, np.int64), np.zeros((m, len(CLASSES)), np.int64)
        asked, fetched = np.zeros((m, m), np.int64), np.zeros((m, m), np.int64)
        for rank, ids in enumerate(rows):
            kind, provider = self.of(rank, ids)
            nbytes = job.features_bytes(ids)
            classes[rank] = np.bincount(kind, minlength=len(CLASSES))
            host[rank], hits[rank] = nbytes[kind == HOST].sum(), nbytes[kind == HIT].sum()
            away = provider != rank
            asked[rank] = np.bincount(provider[away], minlength=m)
            fetched[:, rank] = np.bincount(provider[away], weights=nbytes[away], minlength=m)
        return Loads(host, hits, asked, fetched, classes)

    def filled(self, job: Job) -> NDArray[np.int64]:
        """Bytes that i sends j before the first step, of rows that j caches and its server does not have [ranks, ranks]."""
        m = len(self.servers)
        sent = np.zeros((m, m), np.int64)
        for rank, ids in enumerate(self.cached):
            sender = self.sender(rank, ids)
            sent[:, rank] = np.bincount(sender, weights=job.features_bytes(ids), minlength=m)
            sent[rank, rank] = 0
        return sent

    def held(self, job: Job) -> NDArray[np.int64]:
        """Bytes of each rank's cache [ranks]."""
        return np.array([int(row_bytes(job, ids).sum()) for ids in self.cached])


@dataclass(frozen=True, eq=False)
class EstimatedStore:
    """The same of a graph known by statistics: each GPU has so many rows `each`, of the classes that are read most (expected.py); what is
    elsewhere is spread evenly. `spread`: over servers, by a hash."""

    servers: tuple[int, ...]
    groups: tuple[int, ...]
    each: int
    spread: bool
    shared: bool
    stats: GraphStats
    seconds: float = 0.0
    _loads: WeakKeyDictionary[MiniBatch, Loads] = field(default_factory=WeakKeyDictionary, repr=False)

    @property
    def caches(self) -> bool:
        return self.each > 0

    @property
    def asks(self) -> NDArray[np.bool_]:
        same = np.equal.outer(self.servers, self.servers)
        return np.asarray((self.spread & ~same) | (same & ~np.eye(len(self.servers), dtype=bool) & self.shared))

    def together(self, rank: int) -> int:
        """GPUs that cache different rows, this one among them: a server's, or those of its group, which read none but their own."""
        return self.servers.count(self.servers[rank]) if self.shared else self.groups.count(self.groups[rank])

    def held_share(self, need: Expected, rows: int) -> float:
        """The share of what a batch reads that is among so many rows, the most read of all."""
        of = Population.of(self.stats)
        order = np.argsort(-need.read / np.maximum(of.vertices, 1e-300), kind="stable")
        below = np.concatenate([[0.0], np.cumsum(of.vertices[order])])
        reads = np.concatenate([[0.0], np.cumsum(need.read[order])])
        return float(np.interp(rows, below, reads) / max(reads[-1], 1e-300))

    def loads_of(self, job: Job, batch: MiniBatch) -> Loads:
        if batch not in self._loads:
            assert isinstance(batch, EstimatedBatch)
            self._loads[batch] = self.loads(job, batch)
        return self._loads[batch]

    def loads(self, job: Job, batch: EstimatedBatch) -> Loads:
        m, each = len(self.servers), int(job.features_bytes(np.zeros(1, np.int64))[0])
        rows, same = batch.row_counts(0), np.equal.outer(self.servers, self.servers)
        classes, asked = np.zeros((m, len(CLASSES)), np.int64), np.zeros((m, m), np.int64)
        shares: dict[tuple[int, int], float] = {}  # of a group's reads, by how many cache different rows
        for rank in range(m):
            group, sharing = self.groups[rank], self.together(rank)
            if (group, sharing) not in shares:
                shares[group, sharing] = self.held_share(batch.needs[group], self.each * sharing)
            here = round(int(rows[rank]) * shares[group, sharing])
            classes[rank, HIT] = here // sharing if self.shared else here
            if self.shared:
                asked[rank] += _evenly(here - int(classes[rank, HIT]), same[rank], rank)
                classes[rank, PEER] = asked[rank].sum()
            if self.spread:
                away = round((int(rows[rank]) - classes[rank, [HIT, PEER]].sum()) * (~same[rank]).mean())
                asked[rank] += _evenly(away, ~same[rank], rank)
                classes[rank, REMOTE] = away
            classes[rank, HOST] = int(rows[rank]) - classes[rank].sum()
        return Loads(each * classes[:, HOST], each * classes[:, HIT], asked, each * asked.T, classes)

    def filled(self, job: Job) -> NDArray[np.int64]:
        """Of a spread row's cached copies most are at home on other servers."""
        m, each = len(self.servers), int(job.features_bytes(np.zeros(1, np.int64))[0])
        sent = np.zeros((m, m), np.int64)
        for rank in range(m) if self.spread else ():
            others = np.not_equal(self.servers, self.servers[rank])
            sent[:, rank] = each * _evenly(round(self.each * others.mean()), others, rank)
        return sent

    def held(self, job: Job) -> NDArray[np.int64]:
        return np.full(len(self.servers), self.each * job.model.features * job.model.itemsize)


def _evenly(count: int, among: NDArray[np.bool_], me: int) -> NDArray[np.int64]:
    """So many over these ranks but me [ranks]."""
    peers = np.flatnonzero(among & (np.arange(among.size) != me))
    out = np.zeros(among.size, np.int64)
    if peers.size:
        out[peers] = count // peers.size + (np.arange(peers.size) < count % peers.size)
    return out


def feature_store(job: Job, batches: Batches, cache: int, hot: str, features: str, shared: bool = False, epochs: int = EPOCHS
                  ) -> Store | EstimatedStore | None:  # fmt: skip
    """The store of a job's mini-batches, each GPU caching so many bytes; pre-sampled for so many epochs. None where every rank reads
    every row from its server's memory. Made once."""
    spread = features == "spread" and len(set(job.servers)) > 1
    if not cache and not spread:
        return None
    key = job.servers, job.method, cache, hot, spread, shared, epochs
    known = _known.setdefault(batches, {})
    if key not in known and isinstance(batches, EstimatedBatches):
        alone = len(set(batches.groups)) == 1 < job.ranks  # a row is at home with its owner
        rows = min(cache // (job.model.features * job.model.itemsize), job.stats.vertices)
        known[key] = EstimatedStore(job.servers, batches.groups, rows, spread and not alone, shared, job.stats)
    if key not in known:
        graph, member, groups = batches.graph, batches.member, batches.groups
        with Stopwatch() as watch:
            home = None
            if spread:
                servers = np.unique(job.servers).astype(np.int32)
                alone = member is not None and len(set(groups)) == 1
                home = np.asarray(job.servers, np.int32)[member] if alone else servers[partition(graph, servers.size, job.method)]
            held = _cached(job, batches, cache, hot, shared, epochs) if cache else [np.zeros(0, np.int64)] * job.ranks
        known[key] = Store(job.servers, tuple(held), home, shared, graph.stats.vertices, watch.seconds)
    return known[key]


_known: WeakKeyDictionary[Batches, dict[object, Store | EstimatedStore]] = WeakKeyDictionary()


def _cached(job: Job, batches: Batches, cache: int, hot: str, shared: bool, epochs: int) -> list[Ids]:
    """What each rank caches, hottest first: what fits of all rows; of every so-manieth, where a server's GPUs share; of its own, where a
    group splits a batch."""
    graph, groups, member = batches.graph, batches.groups, batches.member
    order = hottest(graph, batches.workload, hot, len(set(groups)), epochs)
    made: dict[tuple[int, int], Ids] = {}
    held = []
    for rank, group in enumerate(groups):
        where = job.servers[rank]
        turn = (job.servers[:rank].count(where), job.servers.count(where)) if shared else (0, 1)
        if member is not None:
            turn = (groups[:rank].count(group), 0)
        if turn not in made:
            mine = order[turn[0] :: turn[1]] if member is None else order[member[order] == turn[0]]
            made[turn] = that_fit(mine, row_bytes(job, mine), cache).astype(np.int64)
        held.append(made[turn])
    return held


def that_fit(ids: Ids, sizes: NDArray[np.int64], budget: int) -> Ids:
    """The first of these vertices whose bytes together are within a budget."""
    return ids[: int(np.searchsorted(np.cumsum(sizes), budget, side="right"))]


def row_bytes(job: Job, ids: Ids) -> NDArray[np.int64]:
    """What each of these rows takes in a cache [R]: of a sparse one every number has a column, and the row an end (int32 both)."""
    if not job.model.nonzeros:
        return np.full(ids.size, job.model.features * job.model.itemsize)
    assert job.graph is not None
    return np.asarray(job.graph.lengths[ids] * (job.model.itemsize + 4) + 4)


def hottest(graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS) -> Ids:
    """All vertices [N], the hottest first; of equals the first."""
    return np.argsort(-heat(graph, workload, hot, groups, epochs), kind="stable")


def heat(graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS) -> NDArray[np.int64]:
    """How often a vertex is read [N], or how many vertices read from it."""
    found = frequency(graph, workload, groups, epochs) if hot == "frequency" else np.bincount(graph.indices, minlength=graph.stats.vertices)
    return found.astype(np.int64)


def frequency(graph: Graph, workload: Workload, groups: int, epochs: int = EPOCHS) -> NDArray[np.int32]:
    """How often a group of ranks reads each vertex's row [N] in so many epochs of pre-sampling, which are none that training reaches.
    Once per batch and group, however many layers have the vertex (splitting.presample counts layers). Found once, then from disk."""
    w, train = workload, blake2b(np.ascontiguousarray(graph.train).data, digest_size=8).hexdigest()

    def compute() -> NDArray[np.int32]:
        heat = np.zeros(graph.stats.vertices, np.int32)
        for epoch in range(BEFORE, BEFORE + epochs):
            for number, seeds in enumerate(seeds_of(graph, w.batch, w.seed, epoch)):
                for part in shares(seeds, groups):
                    heat[frontier(graph, part, w.fanouts, w.seed, epoch, number).nodes[0]] += 1
        return heat

    return cached(f"heat {graph.stats.hash} {train} {groups} {w.seed} {w.batch} {w.fanouts} {epochs}", graph.stats.vertices, MOST, compute)


def check_store(name: str, job: Job, cache: int, hot: str, features: str, shared: bool = False) -> None:
    """Raises SpecError where a strategy's knobs make no store."""
    room = int(job.cluster.device.memory)
    if cache < 0:
        raise SpecError(f"{name}: cache is a number of bytes per GPU, 0 or more, not {cache:,}; use 0 for no cache")
    if cache > room:
        raise SpecError(f"{name}: the cache is larger than the memory that it is in (cache: {show_bytes(cache)}, device.memory: "
                        f"{show_bytes(room)}); use cache={room // 2} or less")  # fmt: skip
    if hot not in HOT:
        raise SpecError(f"{name}: hot says which rows to cache, and {hot!r} is unknown{suggest(hot, HOT)}")
    if features not in PLACES:
        raise SpecError(f"{name}: features says whose memory has them, and {features!r} is unknown{suggest(features, PLACES)}")
    if shared and not cache:
        raise SpecError(f"{name}: GPUs that share their caches have some (shared_cache: True, cache: 0); use cache=1000000000 (1 GB each), "
                        "or shared_cache=False")  # fmt: skip
