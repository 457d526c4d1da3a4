"""The feature store: where a vertex's features are, as each rank sees it.

    hit       in the cache of its own GPU                the hottest rows that the budget holds
    peer      in the cache of another GPU of its server  if GPUs cache different rows (Quiver)
    host      in its server's memory                     all rows, or those at home there (DistDGL)
    remote    in another server's memory                 one of that server's ranks sends it

Rows are hottest by how often they are read when batches are drawn (pre-sampling), or by how many
vertices read from them (out-degree, as PaGraph). Where a group splits a batch (GSplit), only the
owner reads a vertex, so only the owner caches it. If that one group is all ranks, spread features
are at home on the owner's server. Every rank knows the whole store, so nobody searches for a row.

Where a rank reads columns of several ranks' rows (P3), its cache has these columns.

A graph known by statistics only has an `EstimatedStore`, which answers the same questions.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster.spec import MOST_PAIRED
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.kept import Stopwatch, cached
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.graph.sampling import Ids, drawn_as, presampled
from gnnplan.planner.graph.splitting import BEFORE, EPOCHS
from gnnplan.planner.ownership.estimated_batches import (
    EstimatedBatch,
    EstimatedBatches,
    Expected,
    Population,
)
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch, frontiers
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import show_size
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import suggest
from gnnplan.planner.vocabulary.outer import Outer, Pairs
from gnnplan.planner.vocabulary.units import show_bytes

HOT = ("frequency", "degree")
PLACES = ("everywhere", "spread")
CLASSES = ("hit", "peer", "host", "remote")
HIT, PEER, HOST, REMOTE = range(4)  # places in CLASSES
MOST = 2**31 - 1  # the most readings of a row that are counted


@dataclass(frozen=True)
class Slice:
    """What a rank reads of a batch: some columns of the rows of these ranks."""

    ranks: tuple[int, ...]
    columns: range


@dataclass(frozen=True)
class Loads:
    """Where a batch's rows come from.

    host: bytes from each rank's server's memory [ranks].
    hits: bytes from its own cache [ranks].
    asked: ids that rank i asks of rank j [ranks, ranks].
    fetched: bytes that rank i sends rank j for them [ranks, ranks].
    rows: rows by class (CLASSES) [ranks, 4].
    """

    host: NDArray[np.int64]
    hits: NDArray[np.int64]
    asked: Pairs
    fetched: Pairs
    rows: NDArray[np.int64]

    def __post_init__(self) -> None:
        for crossing in (self.asked, self.fetched):
            crossing.setflags(write=False)  # so that what is found out about them can be kept


@dataclass(frozen=True, eq=False)
class Store:
    """The store of a graph whose edges are known.

    servers: the server of each rank.
    cached: the vertices in each rank's cache, hottest first; equal caches are one array.
    home: the server [N] whose memory has a row; None: every server has all rows.
    shared: whether GPUs of a server read each other's caches.
    slices: what each rank reads; None: all columns of its own rows.
    """

    servers: tuple[int, ...]
    cached: tuple[Ids, ...]
    home: NDArray[np.int32] | None
    shared: bool
    vertices: int
    seconds: float = 0.0  # to make the store
    slices: tuple[Slice, ...] | None = None
    _slots: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)
    _holders: dict[int, NDArray[np.int32]] = field(default_factory=dict, repr=False)
    _loads: WeakKeyDictionary[MiniBatch, Loads] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    def of(self, rank: int, ids: Ids) -> tuple[NDArray[np.int8], NDArray[np.int32]]:
        """The class of these vertices' rows for a rank [R], and the rank that provides each [R].

        A rank provides hits and rows of its server to itself.
        """
        provider = self.sender(rank, ids)
        kind = np.where(provider == rank, HOST, REMOTE).astype(np.int8)
        if self.shared:
            held = self._holder(self.servers[rank])[ids]
            kind[held >= 0], provider[held >= 0] = PEER, held[held >= 0]
        hit = self.slot(rank)[ids] >= 0
        kind[hit], provider[hit] = HIT, rank
        return kind, provider

    def sender(self, rank: int, ids: Ids) -> NDArray[np.int32]:
        """The rank [R] that has these rows in its server's memory.

        It is the rank itself, or one of the ranks of the row's home, which share this work by id.
        """
        out = np.full(ids.size, rank, np.int32)
        if self.home is not None:
            home = self.home[ids]
            for server in set(self.servers) - {self.servers[rank]}:
                away = np.flatnonzero(home == server)
                ranks = np.flatnonzero(np.equal(self.servers, server))
                out[away] = ranks[ids[away] % ranks.size]
        return out

    def slot(self, rank: int) -> NDArray[np.int32]:
        """The place of each vertex [N] in the rank's cache; -1: it is not cached."""
        ids = self.cached[rank]
        first = next(other for other, its in enumerate(self.cached) if its is ids)  # that has them
        if first not in self._slots:
            self._slots[first] = place = np.full(self.vertices, -1, np.int32)
            place[ids] = np.arange(ids.size, dtype=np.int32)
        return self._slots[first]

    def _holder(self, server: int) -> NDArray[np.int32]:
        """The rank of a server that caches each vertex [N]; -1: none does."""
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
        """Whether rank i may ask rank j for rows in any batch [ranks, ranks]."""
        same = np.equal.outer(self.servers, self.servers)
        others = np.zeros_like(same) if self.home is None else ~same
        return np.asarray(others | (same & ~np.eye(len(self.servers), dtype=bool) & self.shared))

    def loads_of(self, problem: Problem, batch: MiniBatch) -> Loads:
        if batch not in self._loads:
            self._loads[batch] = self.loads(
                problem,
                [
                    np.concatenate([batch.rows(of, 0) for of in ranks])
                    for ranks in _read_ranks(self.slices, batch.ranks)
                ],
            )
        return self._loads[batch]

    def loads(self, problem: Problem, rows: list[Ids]) -> Loads:
        """Where the rows come from that each rank reads ([R] of each rank)."""
        m = len(self.servers)
        host, hits, classes = (
            np.zeros(m, np.int64),
            np.zeros(m, np.int64),
            np.zeros((m, len(CLASSES)), np.int64),
        )
        asked, fetched = np.zeros((m, m), np.int64), np.zeros((m, m), np.int64)
        for rank, ids in enumerate(rows):
            kind, provider = self.of(rank, ids)
            nbytes = problem.features_bytes(ids, _columns(self.slices, rank))
            classes[rank] = np.bincount(kind, minlength=len(CLASSES))
            host[rank], hits[rank] = nbytes[kind == HOST].sum(), nbytes[kind == HIT].sum()
            away = provider != rank
            asked[rank] = np.bincount(provider[away], minlength=m)
            fetched[:, rank] = np.bincount(provider[away], weights=nbytes[away], minlength=m)
        return Loads(host, hits, asked, fetched, classes)

    def filled(self, problem: Problem) -> NDArray[np.int64]:
        """Bytes that rank i sends rank j before the first step [ranks, ranks].

        These are rows that j caches and its server does not have.
        """
        m = len(self.servers)
        sent = np.zeros((m, m), np.int64)
        for rank, ids in enumerate(self.cached):
            sender = self.sender(rank, ids)
            sent[:, rank] = np.bincount(sender, weights=problem.features_bytes(ids), minlength=m)
            sent[rank, rank] = 0
        return sent

    def held(self, problem: Problem) -> NDArray[np.int64]:
        """Bytes of each rank's cache [ranks]."""
        return np.array(
            [
                int(row_bytes(problem, ids, _columns(self.slices, rank)).sum())
                for rank, ids in enumerate(self.cached)
            ]
        )


@dataclass(frozen=True, eq=False)
class EstimatedStore:
    """The store of a graph known by statistics.

    Each GPU caches `cached_rows` rows of the classes of vertices that are read most
    (planner/ownership/estimated_batches.py). Other rows are spread evenly.

    servers, groups: of each rank; a group splits a batch.
    spread: features are over servers, by a hash.
    slices: as in `Store`.
    """

    servers: tuple[int, ...]
    groups: tuple[int, ...]
    cached_rows: int
    spread: bool
    shared: bool
    stats: GraphStats
    seconds: float = 0.0
    slices: tuple[Slice, ...] | None = None
    _loads: WeakKeyDictionary[MiniBatch, Loads] = field(
        default_factory=WeakKeyDictionary, repr=False
    )

    @property
    def caches(self) -> bool:
        return self.cached_rows > 0

    @property
    def asks(self) -> Outer:
        """As `Store.asks`."""
        if self.spread and self.shared:
            return Outer.of([0] * len(self.servers), True, 1)
        return Outer.of(self.servers, self.shared, int(self.spread or self.shared))

    @property
    def together(self) -> list[int]:
        """Of each rank, how many GPUs, its own included, cache different rows [ranks].

        They are those of its server, or of its group, whose members read only their own rows.
        """
        sharing = self.servers if self.shared else self.groups
        members = Counter(sharing)
        return [members[one] for one in sharing]

    def held_share(self, need: Expected, rows: int) -> float:
        """The share of a batch's reads that falls on so many rows, the most read of all."""
        of = Population.of(self.stats)
        order = np.argsort(-need.read / np.maximum(of.vertices, 1e-300), kind="stable")
        below = np.concatenate([[0.0], np.cumsum(of.vertices[order])])
        reads = np.concatenate([[0.0], np.cumsum(need.read[order])])
        return float(np.interp(rows, below, reads) / max(reads[-1], 1e-300))

    def loads_of(self, problem: Problem, batch: MiniBatch) -> Loads:
        if batch not in self._loads:
            assert isinstance(batch, EstimatedBatch)
            self._loads[batch] = self.loads(problem, batch)
        return self._loads[batch]

    def loads(self, problem: Problem, batch: EstimatedBatch) -> Loads:
        m = len(self.servers)
        one = np.zeros(1, np.int64)
        row = np.array(
            [int(problem.features_bytes(one, _columns(self.slices, rank))[0]) for rank in range(m)]
        )
        counts, read = batch.row_counts(0), _read_ranks(self.slices, m)
        rows = np.array([counts[list(ranks)].sum() for ranks in read])
        classes = np.zeros((m, len(CLASSES)), np.int64)
        # (what a group needs, GPUs that cache different rows) -> share of the group's reads
        shares: dict[tuple[Expected, int], float] = {}
        together = self.together
        for rank in range(m):
            need, sharing = batch.needs[self.groups[rank]], together[rank]
            if (need, sharing) not in shares:
                shares[need, sharing] = self.held_share(need, self.cached_rows * sharing)
            cached = round(int(rows[rank]) * shares[need, sharing])
            classes[rank, HIT] = cached // sharing if self.shared else cached
            classes[rank, PEER] = (cached - classes[rank, HIT]) * (sharing > 1)
        asked = self._evenly(classes[:, PEER], True)
        if self.spread:
            others = Outer.of(self.servers, False, 1).sum(1) / m  # share of the ranks
            classes[:, REMOTE] = np.rint((rows - classes.sum(1)) * others)
            away = self._evenly(classes[:, REMOTE], False)
            asked = np.asarray(asked) + np.asarray(away) if self.shared else away
        classes[:, HOST] = rows - classes.sum(1)
        return Loads(row * classes[:, HOST], row * classes[:, HIT], asked, row * asked.T, classes)

    def _evenly(self, counts: NDArray[np.int64], same: bool) -> Pairs:
        """So much from each rank [ranks] evenly to the others of its server, or of other servers:
        in whole numbers that add up, or of many ranks the nearest whole numbers."""
        peers = Outer.of(self.servers, same, 1)
        of_each = np.maximum(peers.sum(1), 1)
        if len(self.servers) > MOST_PAIRED:
            return Outer.of(self.servers, same, np.rint(counts / of_each).astype(np.int64))
        among, (whole, rest) = np.asarray(peers), (n[:, None] for n in np.divmod(counts, of_each))
        return np.asarray(among * (whole + (among.cumsum(1) <= rest)))

    def filled(self, problem: Problem) -> Pairs:
        """As `Store.filled`: most cached rows have their home on another server."""
        row = int(problem.features_bytes(np.zeros(1, np.int64))[0])
        others = Outer.of(self.servers, False, 1).sum(1) / len(self.servers)
        rows = np.rint(self.cached_rows * others * self.spread).astype(np.int64)
        sent: Pairs = row * self._evenly(rows, False).T
        return sent

    def held(self, problem: Problem) -> NDArray[np.int64]:
        widths = [
            len(_columns(self.slices, rank) or range(problem.model.features))
            for rank in range(len(self.servers))
        ]
        return self.cached_rows * np.array(widths) * problem.model.itemsize


def _columns(slices: tuple[Slice, ...] | None, rank: int) -> range | None:
    """The columns that a rank reads; None: all."""
    return slices[rank].columns if slices else None


def _read_ranks(slices: tuple[Slice, ...] | None, ranks: int) -> list[tuple[int, ...]]:
    """Whose rows each rank reads."""
    return [each.ranks for each in slices] if slices else [(rank,) for rank in range(ranks)]


def feature_store(
    problem: Problem,
    batches: Batches,
    cache: int,
    hot: str = "frequency",
    features: str = "everywhere",
    shared: bool = False,
    epochs: int = EPOCHS,
    slices: tuple[Slice, ...] | None = None,
) -> Store | EstimatedStore | None:
    """The store of a problem's mini-batches; each is made once.

    Each GPU caches `cache` bytes; heat is counted in so many `epochs` of pre-sampling. None: every
    rank reads every row from its server's memory. slices: as in `Store`.
    """
    spread = features == "spread" and len(set(problem.servers)) > 1
    if not cache and not spread:
        return None

    def estimated() -> Store | EstimatedStore:
        # with one group, a row's home is its owner's server
        one_group = len(set(batches.groups)) == 1 < problem.ranks
        widest = max(len(each.columns) for each in slices) if slices else problem.model.features
        rows = min(cache // (widest * problem.model.itemsize), problem.stats.vertices)
        return EstimatedStore(
            problem.servers,
            batches.groups,
            rows,
            spread and not one_group,
            shared,
            problem.stats,
            slices=slices,
        )

    def counted() -> Store | EstimatedStore:
        graph, member, groups = batches.graph, batches.member, batches.groups
        with Stopwatch() as watch:
            home = None
            if spread:
                servers = np.unique(problem.servers).astype(np.int32)
                one_group = member is not None and len(set(groups)) == 1
                home = (
                    np.asarray(problem.servers, np.int32)[member]
                    if one_group
                    else servers[partition(graph, servers.size, problem.method)]
                )
            held = (
                _cached(problem, batches, cache, hot, shared, epochs, slices)
                if cache
                else [np.zeros(0, np.int64)] * problem.ranks
            )
        return Store(
            problem.servers, tuple(held), home, shared, graph.stats.vertices, watch.seconds, slices
        )

    asked = problem.servers, problem.method, problem.workload, cache, hot, spread, shared, epochs
    make = estimated if isinstance(batches, EstimatedBatches) else counted
    return problem.known.answer(("feature store", batches, *asked, slices), make)


def _cached(
    problem: Problem,
    batches: Batches,
    cache: int,
    hot: str,
    shared: bool,
    epochs: int,
    slices: tuple[Slice, ...] | None,
) -> list[Ids]:
    """The vertices that each rank caches, hottest first: as many as fit.

    They are taken from all rows; from every n-th row, if n GPUs of a server share caches; or from
    the rows that the rank owns, if a group splits a batch.
    """
    graph, groups, member = batches.graph, batches.groups, batches.member
    order = hottest(graph, batches.workload, hot, len(set(groups)), epochs)
    caches: dict[tuple[int, int, range | None], Ids] = {}  # equal caches are one array
    held = []
    for rank, group in enumerate(groups):
        server = problem.servers[rank]
        if member is not None:
            place, count = groups[:rank].count(group), 0
        elif shared:
            place, count = problem.servers[:rank].count(server), problem.servers.count(server)
        else:
            place, count = 0, 1
        columns = _columns(slices, rank)
        if (place, count, columns) not in caches:
            own = order[place::count] if member is None else order[member[order] == place]
            fitting = that_fit(own, row_bytes(problem, own, columns), cache)
            caches[place, count, columns] = fitting.astype(np.int64)
        held.append(caches[place, count, columns])
    return held


def that_fit(ids: Ids, sizes: NDArray[np.int64], budget: int) -> Ids:
    """The longest run of first vertices whose sizes together are within a budget."""
    return ids[: int(np.searchsorted(np.cumsum(sizes), budget, side="right"))]


def row_bytes(problem: Problem, ids: Ids, columns: range | None = None) -> NDArray[np.int64]:
    """Bytes of each of these rows, or of some of their columns, in a cache [R].

    In a sparse row every number has a column, and the row has an end (int32 both).
    """
    itemsize = problem.model.itemsize
    if not problem.model.nonzeros:
        return np.full(ids.size, len(columns or range(problem.model.features)) * itemsize)
    numbers = problem.features_bytes(ids, columns) // problem.model.sparse_itemsize
    return np.asarray(numbers * (itemsize + 4) + 4)


def hottest(graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS) -> Ids:
    """All vertices [N], the hottest first; equally hot ones in their order."""
    return np.argsort(-heat(graph, workload, hot, groups, epochs), kind="stable")


def heat(
    graph: Graph, workload: Workload, hot: str, groups: int, epochs: int = EPOCHS
) -> NDArray[np.int64]:
    """How hot each vertex is [N]: how often it is read, or how many vertices read from it."""
    found = (
        frequency(graph, workload, groups, epochs)
        if hot == "frequency"
        else np.bincount(graph.indices, minlength=graph.stats.vertices)
    )
    return found.astype(np.int64)


def frequency(
    graph: Graph, workload: Workload, groups: int, epochs: int = EPOCHS
) -> NDArray[np.int32]:
    """How often groups read each vertex's row [N] in so many epochs of pre-sampling.

    Training reaches none of these epochs. A row counts once per batch and group, in however many
    layers the vertex is (`splitting.presample` counts layers). The result is cached on disk.
    """

    def compute() -> NDArray[np.int32]:
        heat = np.zeros(graph.stats.vertices, np.int32)
        for epoch in range(BEFORE, BEFORE + epochs):
            for number, items in enumerate(presampled(graph, workload, epoch)):
                for found in frontiers(graph, workload, items, groups, epoch, number):
                    heat[found.nodes[0]] += 1
        return heat

    return cached(
        f"heat {drawn_as(graph, workload)} {groups} {epochs}",
        graph.stats.vertices,
        MOST,
        compute,
    )


def check_store(
    name: str,
    problem: Problem,
    cache: int,
    hot: str = "frequency",
    features: str = "everywhere",
    shared: bool = False,
) -> None:
    """Raises SpecError if a strategy's knobs make no store."""
    room = int(problem.cluster.device.memory)
    if cache < 0:
        raise SpecError(
            f"{name}: cache is a number of bytes per GPU, 0 or more, not {cache:,}; use 0 for no"
            " cache"
        )
    if cache > room:
        raise SpecError(
            f"{name}: the cache is larger than the memory that it is in (cache:"
            f" {show_bytes(cache)}, device.memory: {show_bytes(room)}); use"
            f" cache={show_size(room // 2)!r} or less"
        )
    if shared and features == "spread" and problem.ranks > MOST_PAIRED:
        raise SpecError(
            f"{name}: where rows come from caches of the same server and from other servers, a plan"
            f" looks at every pair of ranks, of at most {MOST_PAIRED:,} (ranks: {problem.ranks:,});"
            " use shared_cache=False, features='everywhere', or fewer ranks"
        )
    if hot not in HOT:
        raise SpecError(
            f"{name}: hot says which rows to cache, and {hot!r} is unknown{suggest(hot, HOT)}"
        )
    if features not in PLACES:
        raise SpecError(
            f"{name}: features says whose memory has them, and {features!r} is"
            f" unknown{suggest(features, PLACES)}"
        )
    if shared and not cache:
        raise SpecError(
            f"{name}: GPUs that share their caches have some (shared_cache: True, cache: 0); use"
            " cache='1GB', or shared_cache=False"
        )
