"""The feature store: from where each rank gets the features of a vertex.

    hit       the cache of the rank's own GPU                the hottest rows that fit the cache
    peer      the cache of another GPU of the rank's server  if GPUs cache different rows (Quiver)
    host      the memory of the rank's server                all rows, or the server's own (DistDGL)
    remote    the memory of another server                   sent by one of that server's ranks

The hottest rows are those read most often in pre-sampled batches, or those that most vertices read
(out-degree, as PaGraph). If a group splits a batch (GSplit), only the owner of a vertex reads its
row, so only the owner caches it. If all ranks are one such group, spread features are in the memory
of the owner's server. Every rank knows where all rows are, so no rank searches for a row.

If a rank reads some columns of several ranks' rows (P3), it caches these columns. In the simplest
store no rank caches rows, and each rank reads all rows from its server's memory.

A graph known by statistics has an `EstimatedStore` with the same methods.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.spec import MOST_PAIRED
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.disk_cache import Stopwatch, cached
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.partition import BEFORE, EPOCHS, partition
from gnnplan.planner.graph.sampling import Ids, drawn_as, presampled
from gnnplan.planner.ownership.estimated import (
    EstimatedBatch,
    EstimatedBatches,
    Expected,
    Population,
)
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch, frontiers, places_in
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.numbers import (
    Bools,
    Group,
    Ints,
    Outer,
    PerRank,
    RankMatrix,
    offsets,
)

HOT = {"frequency": "rows read most often", "degree": "rows that most vertices read"}
SOURCES = ("hit", "peer", "host", "remote")
HIT, PEER, HOST, REMOTE = range(4)  # positions in SOURCES
MOST_READS = 2**31 - 1  # largest number of reads of a row that can be counted


@dataclass(frozen=True)
class Slice:
    """The features that a rank reads of a batch."""

    ranks: Group  # the rank reads the rows of these ranks ..
    columns: range  # .. in these columns


@dataclass(frozen=True)
class Loads:
    """The sources of a batch's rows.

    host: bytes that each rank reads from its server's memory [ranks].
    hits: bytes that each rank reads from its own cache [ranks].
    asked: number of rows that rank i requests from rank j [ranks, ranks].
    fetched: bytes of requested rows that rank i sends to rank j [ranks, ranks].
    rows: number of rows by source (SOURCES) [ranks, 4].
    """

    host: Ints
    hits: Ints
    asked: RankMatrix
    fetched: RankMatrix
    rows: Ints


@dataclass(frozen=True, eq=False)
class Store:
    """The feature store of a graph with known edges.

    servers: the server of each rank.
    slices: the features that each rank reads.
    cached: the vertices in each rank's cache, hottest first; equal caches are the same array.
    home: the server whose memory has each row [N]; None: every server has all rows.
    shared: whether GPUs of a server read each other's caches.
    seconds: the time that it took to compute the store.
    """

    servers: PerRank
    slices: tuple[Slice, ...]
    cached: tuple[Ids, ...]
    home: NDArray[np.int32] | None
    shared: bool
    vertices: int
    seconds: float = 0.0
    _slots: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)
    _holders: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)

    def of(self, rank: int, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        """Return the source of each vertex's row for a rank [R], and the rank that provides it [R].

        A rank itself provides hits and rows in its server's memory.
        """
        provider = self.sender(rank, ids)
        kind = np.where(provider == rank, HOST, REMOTE).astype(np.int8)
        if self.shared:
            holder = self._holder(self.servers[rank])[ids]
            kind[holder >= 0], provider[holder >= 0] = PEER, holder[holder >= 0]
        if self.caches:
            hit = self.slot(rank)[ids] >= 0
            kind[hit], provider[hit] = HIT, rank
        return kind, provider

    def sender(self, rank: int, ids: Ids) -> NDArray[np.int32]:
        """Return the rank that reads each row from its server's memory for `rank` [R].

        That is `rank` itself if its server has the row, else one of the ranks of the row's server.
        """
        if self.home is None:
            return np.full(ids.size, rank, np.int32)
        return provider_of(self.servers, rank, self.home[ids], ids)

    def slot(self, rank: int) -> NDArray[np.int32]:
        """Return the position of each vertex in the rank's cache [N]; -1: not cached."""
        ids = self.cached[rank]
        # the first rank with the same cache
        first = next(other for other, cached_ids in enumerate(self.cached) if cached_ids is ids)
        if first not in self._slots:
            self._slots[first] = slots = np.full(self.vertices, -1, np.int32)
            slots[ids] = np.arange(ids.size, dtype=np.int32)
        return self._slots[first]

    def _holder(self, server: int) -> NDArray[np.int32]:
        """Return the rank of a server that caches each vertex [N]; -1: no rank."""
        if server not in self._holders:
            self._holders[server] = holder = np.full(self.vertices, -1, np.int32)
            for rank, its_server in enumerate(self.servers):
                if its_server == server:
                    holder[self.cached[rank]] = rank
        return self._holders[server]

    @property
    def caches(self) -> bool:
        return any(ids.size for ids in self.cached)

    @property
    def asks(self) -> Bools:
        """Whether rank i may request rows from rank j in any batch [ranks, ranks]."""
        same = np.equal.outer(self.servers, self.servers)
        others = np.zeros_like(same) if self.home is None else ~same
        return np.asarray(others | (same & ~np.eye(len(self.servers), dtype=bool) & self.shared))

    def loads(self, problem: Problem, batch: MiniBatch) -> Loads:
        """Return the sources of a batch's rows."""
        m = len(self.servers)
        (host, hits), rows = np.zeros((2, m), np.int64), np.zeros((m, len(SOURCES)), np.int64)
        asked, fetched = np.zeros((2, m, m), np.int64)
        for rank, each in enumerate(self.slices):
            ids = np.concatenate([batch.rows(of, 0) for of in each.ranks])
            kind, provider = self.of(rank, ids)
            nbytes = problem.features_bytes(ids, each.columns)
            rows[rank] = np.bincount(kind, minlength=len(SOURCES))
            host[rank], hits[rank] = nbytes[kind == HOST].sum(), nbytes[kind == HIT].sum()
            other = provider != rank
            asked[rank] = np.bincount(provider[other], minlength=m)
            fetched[:, rank] = np.bincount(provider[other], weights=nbytes[other], minlength=m)
        return Loads(host, hits, asked, fetched, rows)

    def filled(self, problem: Problem) -> Ints:
        """Return the bytes that rank i sends to rank j before the first step [ranks, ranks].

        These are rows that j caches and the memory of j's server does not have.
        """
        m = len(self.servers)
        sent = np.zeros((m, m), np.int64)
        for rank, ids in enumerate(self.cached):
            sender = self.sender(rank, ids)
            sent[:, rank] = np.bincount(sender, weights=problem.features_bytes(ids), minlength=m)
            sent[rank, rank] = 0
        return sent

    def held(self, problem: Problem) -> Ints:
        """Return the bytes of each rank's cache [ranks]."""
        each = zip(self.cached, self.slices, strict=True)
        return np.array([int(row_bytes(problem, ids, read.columns).sum()) for ids, read in each])


@dataclass(frozen=True, eq=False)
class EstimatedStore:
    """The feature store of a graph known by statistics.

    servers, slices, shared, seconds: as in `Store`.
    groups: the group of each rank; a group splits a batch.
    cached_rows: number of rows that each GPU caches, of the classes of vertices that are read most
        (planner/ownership/estimated.py).
    spread: whether each row is in one server's memory, chosen by a hash.
    """

    servers: PerRank
    slices: tuple[Slice, ...]
    groups: PerRank
    cached_rows: int
    spread: bool
    shared: bool
    stats: GraphStats
    seconds: float = 0.0

    @property
    def caches(self) -> bool:
        return self.cached_rows > 0

    @property
    def asks(self) -> Outer:
        """Whether rank i may request rows from rank j, as `Store.asks`."""
        if self.spread and self.shared:
            return Outer.of([0] * len(self.servers), True, 1)
        return Outer.of(self.servers, self.shared, int(self.spread or self.shared))

    def held_share(self, need: Expected, rows: int) -> float:
        """Return the share of a batch's reads that are of the `rows` most read rows."""
        population = Population.of(self.stats)
        order = np.argsort(-need.read / np.maximum(population.vertices, 1e-300), kind="stable")
        below = offsets(population.vertices[order])
        reads = offsets(need.read[order])
        return float(np.interp(rows, below, reads) / max(reads[-1], 1e-300))

    def loads(self, problem: Problem, batch: MiniBatch) -> Loads:
        """Return the expected sources of a batch's rows."""
        assert isinstance(batch, EstimatedBatch)
        counts, one = batch.row_counts(0), np.zeros(1, np.int64)
        widths = {each.columns for each in self.slices}
        row_bytes = {each: int(problem.features_bytes(one, each)[0]) for each in widths}
        rows = np.array([counts[list(each.ranks)].sum() for each in self.slices])
        row = np.array([row_bytes[each.columns] for each in self.slices])
        # GPUs that cache different rows: of a server, or of a group, whose GPUs read only own rows
        sharing = np.unique(self.servers if self.shared else self.groups, return_inverse=True)[1]
        together = np.bincount(sharing)[sharing]
        needs = [batch.needs[group] for group in self.groups]
        held = [*zip(needs, (together * self.cached_rows).tolist(), strict=True)]
        shares = {each: self.held_share(*each) for each in {*held}}
        cached = np.rint(rows * [shares[each] for each in held]).astype(np.int64)
        hits = cached // together if self.shared else cached
        peer = (cached - hits) * (together > 1)
        remote, asked = 0 * rows, cast(RankMatrix, Outer.of(self.servers, True, 0))
        if self.shared:
            asked = self._evenly(peer, True)
        if self.spread:
            others = Outer.of(self.servers, False, 1).sum(1) / rows.size  # share of the ranks
            remote = np.rint((rows - hits - peer) * others).astype(np.int64)
            from_servers = self._evenly(remote, False)
            asked = np.asarray(asked) + np.asarray(from_servers) if self.shared else from_servers
        host = rows - hits - peer - remote
        by_source = np.stack([hits, peer, host, remote], axis=1)
        return Loads(row * host, row * hits, asked, row * asked.T, by_source)

    def _evenly(self, counts: Ints, same: bool) -> RankMatrix:
        """Divide each rank's count evenly over the other ranks of its server (`same`), or over the
        ranks of other servers [ranks, ranks]. Whole numbers; sums are exact unless ranks are many.
        """
        peers = Outer.of(self.servers, same, 1)
        number = np.maximum(peers.sum(1), 1)  # of peers [ranks]
        if len(self.servers) > MOST_PAIRED:
            return Outer.of(self.servers, same, np.rint(counts / number).astype(np.int64))
        among, (whole, rest) = np.asarray(peers), (n[:, None] for n in np.divmod(counts, number))
        return np.asarray(among * (whole + (among.cumsum(1) <= rest)))

    def filled(self, problem: Problem) -> RankMatrix:
        """Return the bytes of `Store.filled`; most cached rows are in other servers' memories."""
        row = int(problem.features_bytes(np.zeros(1, np.int64))[0])
        others = Outer.of(self.servers, False, 1).sum(1) / len(self.servers)
        rows = np.rint(self.cached_rows * others * self.spread).astype(np.int64)
        sent: RankMatrix = row * self._evenly(rows, False).T
        return sent

    def held(self, problem: Problem) -> Ints:
        """Return the bytes of each rank's cache [ranks]."""
        widths = [len(each.columns) for each in self.slices]
        return self.cached_rows * np.array(widths) * problem.model.itemsize


Features = Store | EstimatedStore


def feature_store(
    problem: Problem,
    batches: Batches,
    cache: int,
    hot: str,
    features: str,
    shared: bool,
    epochs: int,
    slices: tuple[Slice, ...],
) -> Features:
    """Return the feature store of a problem's mini-batches; results are cached.

    cache: bytes that each GPU caches. epochs: number of pre-sampled epochs that count reads.
    slices: the features that each rank reads; (): all columns of its own rows. hot, features,
    shared: as the knobs `hot`, `features` and `shared_cache`.
    """
    spread = features == "spread" and problem.server_count > 1
    everything = range(problem.model.features)
    read = slices or tuple(Slice((rank,), everything) for rank in range(problem.ranks))
    # in one group, a row is in the memory of its owner's server
    one_group = len(set(batches.groups)) == 1 < problem.ranks

    def estimated() -> Features:
        widest = max(len(each.columns) for each in read)
        rows = min(cache // (widest * problem.model.itemsize), problem.stats.vertices)
        over_servers = spread and not one_group
        groups, stats = batches.groups, problem.stats
        return EstimatedStore(problem.servers, read, groups, rows, over_servers, shared, stats)

    def cached_by_rank() -> Iterator[Ids]:
        """Yield the vertices that each rank caches, hottest first, as many as fit.

        They are chosen from all rows; from every n-th row if n GPUs of a server share caches; or
        from the rank's own rows if a group splits a batch.
        """
        member, servers = batches.member, problem.servers
        order = hottest(batches.graph, batches.workload, hot, len(set(batches.groups)), epochs)
        caches: dict[tuple[int, int, range], Ids] = {}  # equal caches are one array
        # the GPUs that cache different rows
        together = batches.groups if batches.splits else servers if shared else range(len(read))
        for rank, (place, each) in enumerate(zip(places_in(together), read, strict=True)):
            count = servers.count(servers[rank]) if shared else 1
            if (kind := (place, count, each.columns)) not in caches:
                eligible = order[member[order] == place] if batches.splits else order[place::count]
                sizes = row_bytes(problem, eligible, each.columns)
                caches[kind] = fitting_prefix(eligible, sizes, cache).astype(np.int64)
            yield caches[kind]

    def counted() -> Features:
        graph, home = batches.graph, None
        held: Sequence[Ids] = [np.zeros(0, np.int64)] * problem.ranks
        with Stopwatch() as watch:
            if spread and one_group:
                home = np.asarray(problem.servers, np.int32)[batches.member]
            elif spread:
                servers = np.unique(problem.servers).astype(np.int32)
                home = servers[partition(graph, servers.size, problem.method)]
            if cache:
                held = list(cached_by_rank())
        vertices = graph.stats.vertices
        return Store(problem.servers, read, tuple(held), home, shared, vertices, watch.seconds)

    key = problem.servers, problem.method, problem.workload, cache, hot, spread, shared, epochs
    make = estimated if isinstance(batches, EstimatedBatches) else counted
    return problem.cache.get(("feature store", batches, *key, slices), make)


def provider_of(
    places: Sequence[int], rank: int, home: NDArray[Any], turn: Ids
) -> NDArray[np.int32]:
    """Return the rank that provides each item to `rank` [R]: `rank` itself if the item is at its
    place, else one of the ranks at the item's place, in turns.

    places: the place of each rank. home: the place of each item [R]. turn: numbers that select one
    of a place's ranks [R]."""
    provider = np.full(home.size, rank, np.int32)
    for place in set(places) - {places[rank]}:
        items, ranks = np.flatnonzero(home == place), np.flatnonzero(np.equal(places, place))
        provider[items] = ranks[turn[items] % ranks.size]
    return provider


def fitting_prefix(ids: Ids, sizes: Ints, budget: int) -> Ids:
    """Return the longest prefix of `ids` whose sizes together are within a budget."""
    return ids[: int(np.searchsorted(np.cumsum(sizes), budget, side="right"))]


def row_bytes(problem: Problem, ids: Ids, columns: range | None = None) -> Ints:
    """Return the bytes of each of these rows, or of some of their columns, in a cache [R]."""
    inputs = problem.model.inputs
    return inputs.cache_bytes(
        problem.features_bytes(ids, columns) // inputs.transit_bytes_per_number
    )


def hottest(graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS) -> Ids:
    """Return all vertices [N], the hottest first; equally hot vertices by their ids."""
    return np.argsort(-heat(graph, workload, hot, groups, epochs), kind="stable")


def heat(graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS) -> Ints:
    """Return the heat of each vertex [N]: how often groups read its row in `epochs` epochs of
    pre-sampling ('frequency'), or how many vertices read it ('degree').

    Training does not draw the batches of these epochs. A row counts once per batch and group, even
    if several layers have the vertex (`splitting.presample` counts layers). Frequencies are cached
    on disk.
    """
    vertices = graph.stats.vertices
    if hot == "degree":
        return np.bincount(graph.indices, minlength=vertices).astype(np.int64)

    def compute() -> NDArray[np.int32]:
        reads = np.zeros(vertices, np.int32)
        for epoch in range(BEFORE, BEFORE + epochs):
            for number, items in enumerate(presampled(graph, workload, epoch)):
                for frontier in frontiers(graph, workload, items, groups, epoch, number):
                    reads[frontier.nodes[0]] += 1
        return reads

    key = f"heat {drawn_as(graph, workload)} {groups} {epochs}"
    return cached(key, vertices, MOST_READS, compute).astype(np.int64)
