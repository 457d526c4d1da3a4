"""Layouts: which rank computes which rows of each layer, and which rows it receives from whom.

Every rank owns a part of the graph. With depth 0 a rank computes its own rows only, and receives
its halo before every layer. With depth d >= 1 (GraNNDis' preload) a server recomputes the first d
hidden layers of the rows around its part, so that servers do not exchange rows of these layers. The
rows that a server computes are its *region*; they are divided among the server's GPUs.

    region of a server, 3 layers, full preload
        own part | 1 hop | 2 hops | 3 hops (features only)      all edges into these rows
    with an Expansion (max_hop 1)
        own part | sampled external rows                        the edges among these rows only
    a batch of the region
        targets  | 1 hop | 2 hops | 3 hops                      the same edges on the same GPUs

`needed` restricts a layout to the rows that some target vertices need: it leaves out a row of h_l
that no target reads through the layers after l.

Layer l reads h_{l-1} and writes h_l. `first_varying` (gnn/model.py) is 1 if h_0 are the constant
features, and 0 if an encoder computes h_0. On a full graph the planner reads counts and the
executor reads indices of the same object, so they agree about bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b

import numpy as np

from gnnplan.planner.graph.disk_cache import cached
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.partition import (
    edges_between,
    library_of,
    locality_order,
    partition_weighted,
    version_of,
)
from gnnplan.planner.graph.sampling import BATCHES, EXPANSION
from gnnplan.planner.vocabulary.numbers import PerRank, RankMatrix, offsets, runs, split

FAR = np.iinfo(np.int16).max  # "unreachable", in hops: more than any model has layers
AT_ONCE = 1 << 22  # edges per block, so that temporaries are small compared to the graph


@dataclass(frozen=True)
class Expansion:
    """GraNNDis' expansion-aware sampling of the rows around a server's own part.

    A server takes external vertices within `max_hop` (m) hops: at most `fanout` (k) in-neighbours
    of each visited vertex, drawn once. It uses all edges among its rows, own and drawn."""

    max_hop: int
    fanout: int
    seed: int


@dataclass(frozen=True)
class RankLayer:
    """One rank's share of one layer: its source rows are `local` rows of h_{l-1}, then the halo."""

    rows: int  # destinations, which are a prefix of the rank's rows
    local: int  # rows of h_{l-1} that the rank computed itself, or has as features
    halo: np.ndarray  # global ids, grouped by sender, int64 [halo]
    received: np.ndarray  # halo rows by sender, int64 [ranks]
    edges: int  # without self edges

    @property
    def by_sender(self) -> list[np.ndarray]:
        """The ids of the halo rows of each sender."""
        return split(self.halo, self.received)


@dataclass(frozen=True)
class LayerCounts:
    """The counts of one layer over all ranks."""

    rows: np.ndarray  # destinations [ranks]
    sources: np.ndarray  # rows read: local rows and halo rows [ranks]
    edges: np.ndarray  # without self edges [ranks]
    halo: RankMatrix  # halo[i, j]: rows of rank i that rank j has when it computes the layer
    # rows of h_{l-1} that each rank computed; set if some of them serve other ranks only [ranks]
    computed_rows: np.ndarray | None = None
    # if the rows are partial sums: partial sums that each rank adds up to its sources [ranks]
    partial_sums: np.ndarray | None = None
    # destinations whose own row another rank has, and adds to its partial sum [ranks]
    remote_own: np.ndarray | None = None
    fresh: RankMatrix | None = None  # halo rows sent in this step; None: all [ranks, ranks]
    # halo rows that each rank has, received in this step or cached from earlier [ranks]
    halo_rows: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "halo_rows", np.asarray(self.halo.sum(0)))

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """R rows, S sources and E edges, on which a layer's work and memory depend [ranks]."""
        return self.rows, self.sources, self.edges

    @property
    def sends(self) -> RankMatrix:
        """Rows that rank i sends to rank j before the layer [ranks, ranks]."""
        return self.halo if self.fresh is None else self.fresh

    @property
    def local(self) -> np.ndarray:
        """Rows of h_{l-1} that each rank has before it receives the halo [ranks]."""
        return (
            np.asarray(self.sources - self.halo_rows)
            if self.computed_rows is None
            else self.computed_rows
        )

    @property
    def available_rows(self) -> np.ndarray:
        """Rows of h_{l-1} that each rank has with the halo, read or unread [ranks]."""
        return np.asarray(self.local + self.halo_rows)

    @property
    def sent_rows(self) -> np.ndarray:
        """Rows that each rank sends before the layer [ranks]."""
        return np.asarray(self.sends.sum(1))

    @property
    def received_rows(self) -> np.ndarray:
        """Halo rows that each rank receives before the layer [ranks]."""
        return self.halo_rows if self.fresh is None else np.asarray(self.fresh.sum(0))


class Facts(ABC):
    """The counts of the layers of a layout, counted or estimated."""

    _facts: dict[object, LayerCounts]  # kind of layer -> its counts

    @abstractmethod
    def kind(self, layer: int) -> object:
        """Return a key that is equal for layers with equal rows, edges and exchanges."""

    @abstractmethod
    def _counted(self, layer: int) -> LayerCounts:
        """Count or estimate a layer over all ranks."""

    def facts(self, layer: int) -> LayerCounts:
        """Return the counts of a layer over all ranks; layers of one `kind` share an object."""
        if (kind := self.kind(layer)) not in self._facts:
            self._facts[kind] = self._counted(layer)
        return self._facts[kind]

    def exchanges_rows(self, layer: int) -> bool:
        """Whether ranks exchange rows before the layer."""
        return bool(self.facts(layer).sends.any())


class Layout(Facts):
    """The rows of every rank in every layer.

    owner: the rank that owns each vertex, int [N]. servers: the server of each rank, or another
    group of ranks that preloads together (an island of GPUs). depth: the number of hidden layers
    that a server recomputes; with an expansion, a server recomputes all hidden layers. method: the
    partitioner, which also divides regions and orders rows."""

    def __init__(
        self,
        graph: Graph,
        owner: np.ndarray,
        servers: PerRank,
        layers: int,
        first_varying: int,
        depth: int = 0,
        expansion: Expansion | None = None,
        method: str = "metis",
    ):
        self.graph, self.servers, self.layers = graph, servers, layers
        self.method, self.ranks = method, len(servers)
        several = len(set(servers)) > 1
        # servers do not exchange rows of h_0 .. h_{inside - 1}
        depth = min(depth, layers - first_varying) if several else 0
        self.inside = first_varying + depth if depth else 0
        self.owner = np.asarray(owner, dtype=np.int32)
        # server -> bool [N]: the rows that it may read; a server without an entry may read all rows
        self._allowed: dict[int, np.ndarray] = {}
        if expansion and several:
            self.inside = layers  # even for a single layer, where depth is 0
            self._allowed = {
                server: expand(graph, self._part(server), expansion, server)
                for server in set(servers)
            }
        # rank -> (ids, last): global ids of its rows; the rank computes h_0 .. h_last of a row
        self._rank_rows = self._regions() if self.inside else self._parts()
        self._clear_caches()

    @classmethod
    def of_one(cls, graph: Graph, method: str = "metis") -> Layout:
        """Make the layout of a single layer on a single rank, which has all rows."""
        owner = np.zeros(graph.stats.vertices, np.int32)
        return cls(graph, owner, servers=(0,), layers=1, first_varying=1, method=method)

    def _clear_caches(self) -> None:
        self._pieces: dict[tuple[int, object], RankLayer] = {}
        self._row_counts: dict[int, PerRank] = {}
        self._facts = {}
        self.__dict__.pop("_position", None)

    def recomputed(self, layer: int) -> bool:
        """Whether a rank receives the layer's inputs from ranks of its own server only."""
        return layer - 1 < self.inside

    def kind(self, layer: int) -> object:
        return self._sizes(layer - 1), self._sizes(layer), self.recomputed(layer)

    def _sizes(self, h: int) -> PerRank:
        """Return the number of rows of h_h that each rank computes."""
        if h not in self._row_counts:
            self._row_counts[h] = tuple(
                int(np.searchsorted(-last, -h, side="right")) for _, last in self._rank_rows
            )
        return self._row_counts[h]

    # -- regions -------------------------------------------------------------------------------

    @property
    def _order(self) -> np.ndarray:
        """Sort key of each vertex [N], close for vertices in one dense cluster of the graph."""
        return locality_order(self.graph, self.method)

    def _part(self, server: int) -> np.ndarray:
        """Return the server's own rows, bool [N]."""
        return np.asarray(np.asarray(self.servers)[self.owner] == server)

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, last) of each rank for depth 0: its own rows."""
        last = np.full(self.owner.size, self.layers, dtype=np.int16)
        return [
            self._sorted(np.flatnonzero(self.owner == rank), last) for rank in range(self.ranks)
        ]

    def _regions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return (ids, last) of each rank: its share of its server's region."""
        owner, members = self.owner.copy(), dict[int, tuple[np.ndarray, np.ndarray]]()
        for server, last in self._lasts(np.ones(owner.size, dtype=bool)):
            ranks = np.flatnonzero(np.asarray(self.servers) == server)
            region = np.flatnonzero(last >= 0)
            if len(ranks) == 1:
                rank_of = np.full(region.size, ranks[0])
            else:
                inside = edges_between(self.graph, region)
                # A row weighs as many layers as it is computed in, and at least 1.
                weights = np.maximum(last[region].astype(np.int64), 1)
                rank_of = ranks[partition_weighted(inside, weights, len(ranks), self.method)]
            own = self._part(server)[region]
            owner[region[own]] = rank_of[own]
            members |= {int(rank): self._sorted(region[rank_of == rank], last) for rank in ranks}
        self.owner = owner
        return [members[rank] for rank in range(self.ranks)]

    def _lasts(self, targets: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield each server, and for each vertex the last l of the h_l that the server computes.

        targets: the vertices whose h_L is needed, bool [N]. The last l is int16 [N]; negative: the
        server does not have the row. For l >= inside, only owners compute h_l, for the targets of
        all servers. For smaller l, every server computes the rows that its own h_inside needs."""
        hop = distances(self.graph, targets, self.layers - self.inside)
        by_owner = np.where(hop < FAR, self.layers - hop, -1).astype(np.int16)
        for server in sorted(set(self.servers)):
            part = self._part(server)
            own = np.where(part, by_owner, -1).astype(np.int16)
            around = distances(
                self.graph, own >= self.inside, self.inside, self._allowed.get(server)
            )
            yield server, np.maximum(own, self.inside - around)

    def _sorted(self, ids: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sort rows by falling `last`, then by locality; return (ids, last of these rows).

        last: of all vertices [N]."""
        lasts = last[ids]
        sort = np.lexsort((self._order[ids], -lasts))
        return ids[sort], lasts[sort]

    def drawn(self, rows: np.ndarray, count: int, seed: int) -> np.ndarray:
        """Divide `rows` (bool [N]) at random into batches; return each row's batch, int32 [N].

        Vertices outside `rows` get -1. Each server divides its own rows into `count` nearly equal
        batches."""
        batch_of = np.full(rows.size, -1, dtype=np.int32)
        for server in set(self.servers):
            order = np.random.default_rng((BATCHES, seed, server)).permutation(
                np.flatnonzero(self._part(server) & rows)
            )
            batch_of[order] = np.arange(order.size) * count // max(order.size, 1)
        return batch_of

    def needed(self, targets: np.ndarray, inside: int | None = None) -> Layout:
        """Return the layout restricted to the rows that `targets` (bool [N]) need.

        Every row stays on its rank. inside: servers do not exchange rows of h_0 .. h_{inside - 1};
        default: as in this layout. If it is the number of layers, as for a batch, a server computes
        the targets among its own rows, and the rows that they need are found for the server as a
        whole."""
        out = object.__new__(Layout)
        out.__dict__.update(self.__dict__)
        out.inside = self.inside if inside is None else inside
        out._clear_caches()
        lasts = dict(out._lasts(targets))
        out._rank_rows = [
            self._sorted(ids[lasts[server][ids] >= 0], lasts[server])
            for server, (ids, _) in zip(self.servers, self._rank_rows, strict=True)
        ]
        return out

    def _holders(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the sender of each row of h_{l-1} to the rank, and the row's position there.

        Both are int32 [N]; -1 if no rank has the row."""
        if not self.recomputed(layer):
            return self.owner, self._position
        rank_of, position = np.full((2, self.graph.stats.vertices), -1, dtype=np.int32)
        for peer in np.flatnonzero(np.equal(self.servers, self.servers[rank])):
            ids = self._rank_rows[peer][0]
            rank_of[ids], position[ids] = peer, np.arange(ids.size)
        return rank_of, position

    @cached_property
    def _position(self) -> np.ndarray:
        """The position of each vertex among its owner's rows, int32 [N]; -1 if it is left out."""
        position = np.full(self.graph.stats.vertices, -1, dtype=np.int32)
        for rank, (ids, _) in enumerate(self._rank_rows):
            own = np.flatnonzero(self.owner[ids] == rank)
            position[ids[own]] = own
        return position

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Return the ids of the rows of h_h that the rank computes (h = 0: has), int64 [rows]."""
        return self._rank_rows[rank][0][: self._sizes(h)[rank]]

    def row_counts(self, h: int) -> np.ndarray:
        """Return the number of rows of h_h that each rank computes [ranks]."""
        return np.array(self._sizes(h))

    def own(self, rank: int) -> np.ndarray:
        """Return the ids of the rows in the rank's loss: its own vertices, or a batch's targets."""
        return self.rows(rank, self.layers)

    # -- layers --------------------------------------------------------------------------------

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the in-neighbours of the rank's rows of h_l, row by row, and each row's degree."""
        return self._allowed_edges(rank, self.rows(rank, layer))

    def _allowed_edges(self, rank: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the in-neighbours of `rows` that the server may read, and each row's degree."""
        columns, degree = self.graph.neighbours(rows), self.graph.degree_of(rows)
        allowed = self._allowed.get(self.servers[rank])
        if allowed is None:
            return columns, degree
        kept = allowed[columns]
        return columns[kept], np.bincount(
            np.repeat(np.arange(rows.size), degree)[kept], minlength=rows.size
        )

    def piece(self, rank: int, layer: int) -> RankLayer:
        """Return the rank's share of a layer."""
        rows, local = self.rows(rank, layer), self.rows(rank, layer - 1)
        # Rows are prefixes of the rank's rows, so equal sizes mean equal rows.
        if (key := (rank, self.kind(layer))) not in self._pieces:
            self._pieces[key] = self._piece(rank, layer, rows.size, local.size)
        return self._pieces[key]

    def _piece(self, rank: int, layer: int, rows: int, local: int) -> RankLayer:
        columns, _ = self._edges(rank, layer)
        wanted = np.zeros(self.graph.stats.vertices, dtype=bool)
        wanted[columns] = True
        wanted[self._rank_rows[rank][0][:local]] = False
        halo = np.flatnonzero(wanted)
        sender, place = (by_vertex[halo] for by_vertex in self._holders(rank, layer))
        sort = np.lexsort((place, sender))
        return RankLayer(
            rows, local, halo[sort], np.bincount(sender, minlength=self.ranks), int(columns.size)
        )

    def sent(self, rank: int, layer: int) -> list[np.ndarray]:
        """Return, per peer, the positions among the rank's rows of the rows that the rank sends.

        The rank sends them before the layer. The result is a list over peers of int64 [rows]."""
        _, position = self._holders(rank, layer)
        wanted = (self.piece(peer, layer).by_sender[rank] for peer in range(self.ranks))
        return [position[rows].astype(np.int64) for rows in wanted]

    def block(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rank's edges of a layer as CSR (indptr int64, indices int32) by destination.

        Indices are positions among the rank's source rows."""
        piece = self.piece(rank, layer)
        columns, degree = self._edges(rank, layer)
        position = np.empty(self.graph.stats.vertices, dtype=np.int32)
        position[self.rows(rank, layer - 1)] = np.arange(piece.local, dtype=np.int32)
        position[piece.halo] = piece.local + np.arange(piece.halo.size, dtype=np.int32)
        for start in range(0, columns.size, AT_ONCE):  # numpy copies indices to int64
            block = columns[start : start + AT_ONCE]
            block[:] = position[block]
        return offsets(degree), columns

    def degrees(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the in- and out-degrees [N] among the rows that the rank's server may read."""
        rows = np.flatnonzero(
            self._allowed.get(self.servers[rank], np.ones(self.graph.stats.vertices, dtype=bool))
        )
        columns, degree = self._allowed_edges(rank, rows)
        in_degree = np.zeros(self.graph.stats.vertices, dtype=np.int64)
        in_degree[rows] = degree
        return in_degree, np.bincount(columns, minlength=in_degree.size)

    def _counted(self, layer: int) -> LayerCounts:
        pieces = [self.piece(rank, layer) for rank in range(self.ranks)]
        return LayerCounts(
            np.array([p.rows for p in pieces]),
            np.array([p.local + p.halo.size for p in pieces]),
            np.array([p.edges for p in pieces]),
            np.stack([p.received for p in pieces]).T,
        )

    def preloaded(self) -> np.ndarray:
        """Return the feature rows that rank i sends to rank j once, before training [ranks, ranks].

        Afterwards rank j has the features of all rows that it computes."""
        sends = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for rank in range(self.ranks if self.inside else 0):
            np.add.at(sends[:, rank], self.owner[self.rows(rank, 0)[self.own(rank).size :]], 1)
        return sends


def _blocks(graph: Graph, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield blocks of `rows` with about AT_ONCE edges each: (rows, in-neighbours of the rows)."""
    for block in runs(graph.degree_of(rows), AT_ONCE):
        yield rows[block], graph.neighbours(rows[block])


def distances(
    graph: Graph, roots: np.ndarray, reach: int, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Return the hops of each vertex from the roots (bool [N]), against the edges: int16 [N].

    Vertices more than `reach` hops away get FAR. allowed: the vertices that may be visited
    (bool [N]); default: all."""
    hop = np.full(graph.stats.vertices, FAR, dtype=np.int16)
    frontier = np.flatnonzero(roots)
    hop[frontier] = 0
    for distance in range(1, reach + 1):
        if frontier.size in (0, hop.size):
            break
        near = np.zeros(hop.size, dtype=bool)
        for _, columns in _blocks(graph, frontier):
            near[columns] = True
        near &= hop == FAR
        if allowed is not None:
            near &= allowed
        frontier = np.flatnonzero(near)
        hop[frontier] = distance
    return hop


def reached(graph: Graph, reach: int) -> list[int]:
    """Return the number of vertices within 0, 1, .. `reach` hops (`distances`) of training ones."""
    if len(graph.reached) > reach:
        return list(graph.reached[: reach + 1])
    hops = distances(graph, np.asarray(graph.train), reach)
    return [int(np.count_nonzero(hops <= most)) for most in range(reach + 1)]


def expand(graph: Graph, own: np.ndarray, expansion: Expansion, server: int) -> np.ndarray:
    """Return the rows that a server may read: its own rows (bool [N]) and rows drawn around them.

    Every rank draws the same rows for the same seed and server."""
    random = np.random.default_rng((EXPANSION, expansion.seed, server))
    allowed, frontier = own.copy(), np.flatnonzero(own)
    for _ in range(expansion.max_hop):
        drawn = np.zeros(own.size, dtype=bool)
        for rows, columns in _blocks(graph, frontier):
            reader = np.repeat(np.arange(rows.size), graph.degree_of(rows))
            external = ~own[columns]
            reader, columns = reader[external], columns[external]
            degree = np.bincount(reader, minlength=rows.size)
            sampled = degree[reader] > expansion.fanout
            drawn[columns[~sampled]] = True
            reader, columns = reader[sampled], columns[sampled]
            degree[degree <= expansion.fanout] = 0
            # Shuffle each reader's neighbours, and take the first k of them.
            sort = np.argsort(reader + random.random(reader.size))
            place = np.arange(reader.size) - (np.cumsum(degree) - degree)[reader]
            drawn[columns[sort[place < expansion.fanout]]] = True
        frontier = np.flatnonzero(drawn & ~allowed)
        allowed |= drawn
    return allowed


# -- chunks of a pipeline --------------------------------------------------------------------------

# The members of a stage are its ranks. Member i owns sub-chunk i of every chunk. If another member
# reads a row for any chunk, the owner sends it the row once per layer, when the row's own chunk is
# processed.


@dataclass(frozen=True)
class ChunkCounts:
    """The counts of K chunks over g members."""

    rows: np.ndarray  # rows of each sub-chunk [K, g]
    edges: np.ndarray  # edges into each sub-chunk [K, g]
    sources: np.ndarray  # distinct source rows of these edges and own rows of the sub-chunk [K, g]
    sends: RankMatrix  # sends[c, i, j]: rows of chunk c that member i sends to member j [K, g, g]

    @property
    def sizes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows, sources and edges of each sub-chunk, as `LayerCounts.sizes` [K, g]."""
        return self.rows.astype(float), self.sources.astype(float), self.edges.astype(float)


class Chunks:
    """The rows of every member in every chunk.

    chunk: the chunk of each vertex, int [N]. method: the partitioner that divides a chunk."""

    def __init__(
        self,
        graph: Graph,
        chunk: np.ndarray,
        chunks: int,
        members: int,
        method: str = "metis",
    ) -> None:
        self.graph, self.chunks, self.members = graph, chunks, members
        # sub-chunk of each vertex [N]: chunk * members + member
        self.sub = np.asarray(chunk, dtype=np.int64) * members + cut_parts(
            graph, chunk, chunks, members, method
        )
        self.order = np.argsort(self.sub, kind="stable")  # vertices by chunk, member, id
        self.bounds = np.searchsorted(self.sub[self.order], np.arange(chunks * members + 1))
        # `ChunkCounts.sources`; for each member the ids of other members' rows that it reads, by
        # chunk, then by owner
        self.sources, self.halos = self._read()

    def rows(self, chunk: int, member: int) -> np.ndarray:
        """Return the global ids of a sub-chunk's rows."""
        sub = chunk * self.members + member
        return np.asarray(self.order[self.bounds[sub] : self.bounds[sub + 1]])

    def own(self, member: int) -> np.ndarray:
        """Return the global ids of all rows of a member, chunk by chunk."""
        return np.asarray(self.order[self.sub[self.order] % self.members == member])

    def given(self, chunk: int, owner: int, reader: int) -> np.ndarray:
        """Return the positions of the rows sent to the reader among the owner's rows of a chunk."""
        halo = self.halos[reader]
        sent = halo[self.sub[halo] == chunk * self.members + owner]
        return np.asarray(np.searchsorted(self.rows(chunk, owner), sent))

    @property
    def facts(self) -> ChunkCounts:
        """The counts over all chunks and members."""
        shape = self.chunks, self.members
        count = self.chunks * self.members
        sends = [np.bincount(self.sub[ids], minlength=count).reshape(shape) for ids in self.halos]
        edges = np.bincount(self.sub, self.graph.degree, count).astype(np.int64)
        return ChunkCounts(
            np.diff(self.bounds).reshape(shape),
            edges.reshape(shape),
            self.sources,
            np.stack(sends, axis=2),
        )

    def _read(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return `ChunkCounts.sources` [K, g], and each member's halo.

        Neighbours are marked in a mask instead of sorted, which is faster for many edges."""
        sources, halos = np.zeros((self.chunks, self.members), dtype=np.int64), []
        for member in range(self.members):
            read_by_member = np.zeros(self.sub.size, dtype=bool)
            for chunk in range(self.chunks):
                rows, read = self.rows(chunk, member), np.zeros(self.sub.size, dtype=bool)
                read[self.graph.neighbours(rows)] = True
                read_by_member |= read
                read[rows] = True
                sources[chunk, member] = np.count_nonzero(read)
            remote = read_by_member & (self.sub % self.members != member)
            halos.append(self.order[remote[self.order]])
        return sources, halos


def cut_parts(
    graph: Graph, part: np.ndarray, parts: int, pieces: int, method: str = "metis"
) -> np.ndarray:
    """Divide every part into pieces by the method's partitioner; return the pieces, int64 [N].

    A part with fewer vertices than pieces has empty pieces."""
    if pieces == 1:
        return np.zeros(part.size, dtype=np.int64)

    def compute() -> np.ndarray:
        piece = np.zeros(part.size, np.int32)
        by_part = np.argsort(part, kind="stable")
        for p, rows in enumerate(
            np.split(by_part, np.searchsorted(part[by_part], np.arange(1, parts)))
        ):
            if rows.size <= pieces:
                piece[rows] = (np.arange(rows.size) + p) % pieces
            else:
                piece[rows] = partition_weighted(edges_between(graph, rows), None, pieces, method)
        return piece

    # A rank that finds the pieces in the cache reads no edges of other ranks' parts.
    digest = blake2b(np.ascontiguousarray(part, np.int32).data, digest_size=16).hexdigest()
    key = f"{version_of(library_of(method))} inside {graph.stats.hash} {digest} {pieces}"
    return cached(key, part.size, pieces, compute).astype(np.int64)
