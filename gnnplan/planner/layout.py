"""Which rank computes which rows of which layer, and whose rows it must be sent: graph parallelism at any depth.

Every rank owns a part. With depth 0 it computes its own rows only and fetches its halo before every layer. With depth
d >= 1 (GraNNDis' preload) a server recomputes the first d hidden layers of what surrounds it, so that those layers'
rows never cross servers; the rows a server computes, its *region*, are spread over its GPUs. The same object serves
the planner (counts) and the executor (indices), so bytes agree by construction.

    a server's region, 3 layers, full preload       with an Expansion (max_hop 1)         a batch of it
    own part | 1 hop | 2 hops | 3 hops: features    own part | drawn external rows       targets | 1 hop | 2 | 3 hops
    all their edges                                 the edges among these rows only      the same edges on the same GPUs

Layer l reads h_{l-1} and writes h_l. `first_varying` (gnn.py) is 1 where h_0 are constant features, 0 after an encoder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gnnplan.planner.graph import Graph
from gnnplan.planner.partition import locality_order, partition_weighted

FAR = np.iinfo(np.int16).max  # hops: more than a model has layers
EXPANSION, BATCHES = 1, 2  # streams of random numbers
AT_ONCE = 1 << 22  # edges looked at together: what is made of them stays small beside the graph


@dataclass(frozen=True)
class Expansion:
    """GraNNDis' expansion-aware sampling: outside its own part a server takes vertices within `max_hop` (m) hops, at most
    `fanout` (k) external in-neighbours of each vertex visited, drawn once; then all edges among the rows it has."""

    max_hop: int
    fanout: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """One rank's share of one layer. Source rows: the `local` rows of h_{l-1} it has, then its halo."""

    rows: int  # destinations: a prefix of the rank's rows
    local: int  # rows of h_{l-1} that it computed itself (or its features)
    halo: np.ndarray  # int64 [halo], global ids, grouped by provider
    received: np.ndarray  # int64 [ranks], halo rows by provider
    edges: int  # without self edges


@dataclass(frozen=True)
class LayerFacts:
    """Counts of one layer over all ranks: arrays [ranks]; `sends[i, j]` rows go from i to j before it."""

    rows: np.ndarray
    sources: np.ndarray
    edges: np.ndarray
    sends: np.ndarray  # [ranks, ranks]

    @cached_property
    def given(self) -> np.ndarray:
        """Rows that each rank sends [ranks]."""
        return np.asarray(self.sends.sum(1))

    @cached_property
    def taken(self) -> np.ndarray:
        """Rows of others that each rank gets [ranks]."""
        return np.asarray(self.sends.sum(0))


class Layout:
    """The rows of every rank at every layer.

    owner: int [N], the rank that owns each vertex; servers: the server of each rank, or whatever else preloads as one (an island
    of GPUs); depth: hidden layers recomputed (with an expansion all of them).
    """

    def __init__(self, graph: Graph, owner: np.ndarray, servers: tuple[int, ...], layers: int, first_varying: int, depth: int = 0,
                 expansion: Expansion | None = None):  # fmt: skip
        self.graph, self.servers, self.layers = graph, servers, layers
        self.first_varying, self.ranks = first_varying, len(servers)
        several = len(set(servers)) > 1
        self.depth = min(layers if expansion else depth, layers - first_varying) if several else 0
        self.inside = first_varying + self.depth if self.depth else 0  # h_0 .. h_{inside - 1} never cross servers
        self.owner = np.asarray(owner, dtype=np.int32)
        self._allowed: dict[int, np.ndarray] = {}  # server -> bool [N]: the rows it may have; absent: all
        if expansion and several:
            self.inside = layers  # of one layer too
            self._allowed = {server: expand(graph, self._part(server), expansion, server) for server in set(servers)}
        self._members = self._regions() if self.inside else self._parts()
        self._forget()

    def _forget(self) -> None:
        self._pieces: dict[tuple[int, int, int, bool, int], Piece] = {}
        self._within_hops: dict[int, tuple[int, ...]] = {}
        self._facts: dict[object, LayerFacts] = {}
        self.__dict__.pop("_home", None)

    def hops(self, h: int) -> int:
        """How far around its own rows a server computes h_h (or holds features, h = 0)."""
        return max(0, self.inside - h)

    def recomputed(self, layer: int) -> bool:
        """Whether layer l's inputs come from the own server only."""
        return layer - 1 < self.inside

    def kind(self, layer: int) -> object:
        """Equal for layers with equal rows, edges and exchanges."""
        return self._sizes(self.hops(layer - 1)), self._sizes(self.hops(layer)), self.recomputed(layer), self._drawn(layer)

    def _sizes(self, hops: int) -> tuple[int, ...]:
        """Rows of each rank within so many hops."""
        if hops not in self._within_hops:
            self._within_hops[hops] = tuple(int(np.searchsorted(hop, hops, side="right")) for _, hop in self._members)
        return self._within_hops[hops]

    # -- regions ---------------------------------------------------------------------------------------------------

    @cached_property
    def _order(self) -> np.ndarray:
        return locality_order(self.graph)

    def _part(self, server: int) -> np.ndarray:
        """The server's own rows, bool [N]."""
        return np.asarray(np.asarray(self.servers)[self.owner] == server)

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [self._sorted(np.flatnonzero(self.owner == rank)) for rank in range(self.ranks)]

    def _regions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per rank its share of its server's region."""
        owner, members = self.owner.copy(), dict[int, tuple[np.ndarray, np.ndarray]]()
        for server in sorted(set(self.servers)):
            mine = np.flatnonzero(np.asarray(self.servers) == server)
            hop = distances(self.graph, self._part(server), self.hops(0), self._allowed.get(server))
            region = np.flatnonzero(hop < FAR)
            if len(mine) == 1:
                rank_of = np.full(region.size, mine[0])
            else:  # weight: the number of layers in which a row is computed
                weight = np.array([sum(self.hops(j) >= h for j in range(1, self.layers + 1)) or 1 for h in range(self.hops(0) + 1)])
                indptr, indices = _induced(self.graph, region)
                rank_of = mine[partition_weighted(indptr, indices, weight[hop[region]], len(mine), seed=0)]
            own = hop[region] == 0
            owner[region[own]] = rank_of[own]
            members |= {int(rank): self._sorted(region[rank_of == rank], hop) for rank in mine}
        self.owner = owner
        return [members[rank] for rank in range(self.ranks)]

    def _sorted(self, ids: np.ndarray, hop: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(global ids, hop) of rows: own rows first, near before far, METIS clusters together."""
        far = np.zeros(ids.size, dtype=np.int16) if hop is None else hop[ids]
        sort = np.lexsort((self._order[ids], far))
        return ids[sort], far[sort]

    def drawn(self, rows: np.ndarray, count: int, seed: int) -> np.ndarray:
        """The batch of each of `rows` (bool [N]), -1 elsewhere: every server's are cut in `count` nearly equal ones. int32 [N]."""
        batch_of = np.full(rows.size, -1, dtype=np.int32)
        for server in set(self.servers):
            mine = np.random.default_rng((BATCHES, seed, server)).permutation(np.flatnonzero(self._part(server) & rows))
            batch_of[mine] = np.arange(mine.size) * count // max(mine.size, 1)
        return batch_of

    def batch(self, targets: np.ndarray) -> Layout:
        """Of these rows only what the targets (bool [N]) need: fetched for a server as a whole, then split over its GPUs as this
        layout is, so that every row a rank needs is among those it has here. A server's targets are among its own rows."""
        batch = object.__new__(Layout)
        batch.__dict__.update(self.__dict__)
        batch.depth, batch.inside = self.layers - self.first_varying, self.layers
        batch._forget()
        hops = {server: distances(self.graph, self._part(server) & targets, batch.inside, self._allowed.get(server))
                for server in set(self.servers)}  # fmt: skip
        batch._members = []
        for server, (ids, _) in zip(self.servers, self._members, strict=True):
            hop = hops[server]
            batch._members.append(self._sorted(ids[hop[ids] < FAR], hop))
        return batch

    def _where(self, server: int) -> tuple[np.ndarray, np.ndarray]:
        """(rank of the server that has each row, its position among that rank's rows), int32 [N]; -1 where none has it."""
        rank_of, position = np.full((2, self.graph.stats.vertices), -1, dtype=np.int32)
        for rank in np.flatnonzero(np.asarray(self.servers) == server):
            ids = self._members[rank][0]
            rank_of[ids], position[ids] = rank, np.arange(ids.size)
        return rank_of, position

    @cached_property
    def _home(self) -> np.ndarray:
        """Position of each vertex among its owner's rows, int32 [N]."""
        position = np.full(self.graph.stats.vertices, -1, dtype=np.int32)
        for rank in range(self.ranks):
            own = self.own(rank)
            position[own] = np.arange(own.size)
        return position

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Global ids of the rows of h_h that the rank computes (features: that it holds), int64 [rows]."""
        ids, hop = self._members[rank]
        return ids[: np.searchsorted(hop, self.hops(h), side="right")]

    def row_counts(self, h: int) -> np.ndarray:
        """Rows of h_h of each rank [ranks]."""
        return np.array(self._sizes(self.hops(h)))

    def own(self, rank: int) -> np.ndarray:
        """Global ids of the rows that it owns (its share of the loss; of a batch its targets)."""
        return self.rows(rank, self.layers)

    # -- layers ----------------------------------------------------------------------------------------------------

    def _drawn(self, layer: int) -> int:
        """Equal for layers that have the same edges into the same rows."""
        return 0

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """In-neighbours of the rank's rows of h_l, one row's after the other, and how many each row has."""
        return self._within(rank, self.rows(rank, layer))

    def _within(self, rank: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In-neighbours of `rows` that the rank's server may have, one row's after the other, and how many each row has."""
        columns, degree = neighbours(self.graph, rows), np.diff(self.graph.indptr)[rows]
        allowed = self._allowed.get(self.servers[rank])
        if allowed is None:
            return columns, degree
        kept = allowed[columns]
        return columns[kept], np.bincount(np.repeat(np.arange(rows.size), degree)[kept], minlength=rows.size)

    def piece(self, rank: int, layer: int) -> Piece:
        """The rank's share of layer l; rows are prefixes of the rank's, so equal sizes are equal rows."""
        rows, local = self.rows(rank, layer), self.rows(rank, layer - 1)
        key = (rank, rows.size, local.size, self.recomputed(layer), self._drawn(layer))
        if key not in self._pieces:
            self._pieces[key] = self._piece(rank, layer, rows.size, local.size)
        return self._pieces[key]

    def _piece(self, rank: int, layer: int, rows: int, local: int) -> Piece:
        columns, _ = self._edges(rank, layer)
        rank_of, position = self._where(self.servers[rank])
        wanted = np.zeros(self.graph.stats.vertices, dtype=bool)
        wanted[columns] = True
        wanted &= (rank_of != rank) | (position >= local)
        halo = np.flatnonzero(wanted)
        provider, place = (rank_of[halo], position[halo]) if self.recomputed(layer) else (self.owner[halo], self._home[halo])
        sort = np.lexsort((place, provider))
        return Piece(rows, local, halo[sort], np.bincount(provider, minlength=self.ranks), int(columns.size))

    def sent(self, rank: int, layer: int) -> list[np.ndarray]:
        """Positions among the rank's rows that it sends to each peer before layer l, int64 [ranks][rows]."""
        out = []
        position = self._where(self.servers[rank])[1] if self.recomputed(layer) else self._home
        for peer in range(self.ranks):
            piece = self.piece(peer, layer)
            start = int(piece.received[:rank].sum())
            wanted = piece.halo[start : start + int(piece.received[rank])]
            out.append(position[wanted].astype(np.int64))
        return out

    def block(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """CSR over the rank's destinations of layer l with local source positions: (indptr int64, indices int32)."""
        piece = self.piece(rank, layer)
        columns, degree = self._edges(rank, layer)
        where = np.empty(self.graph.stats.vertices, dtype=np.int32)
        where[self.rows(rank, layer - 1)] = np.arange(piece.local, dtype=np.int32)
        where[piece.halo] = piece.local + np.arange(piece.halo.size, dtype=np.int32)
        return np.concatenate([[0], np.cumsum(degree)]), where[columns]

    def degrees(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """In- and out-degree [N] of every row among the rows that the rank's server may have."""
        rows = np.flatnonzero(self._allowed.get(self.servers[rank], np.ones(self.graph.stats.vertices, dtype=bool)))
        columns, degree = self._within(rank, rows)
        ins = np.zeros(self.graph.stats.vertices, dtype=np.int64)
        ins[rows] = degree
        return ins, np.bincount(columns, minlength=ins.size)

    def facts(self, layer: int) -> LayerFacts:
        """Counts of layer l over all ranks; layers that are alike have the same object."""
        if (kind := self.kind(layer)) not in self._facts:
            pieces = [self.piece(rank, layer) for rank in range(self.ranks)]
            self._facts[kind] = LayerFacts(
                np.array([p.rows for p in pieces]),
                np.array([p.local + p.halo.size for p in pieces]),
                np.array([p.edges for p in pieces]),
                np.stack([p.received for p in pieces]).T,
            )
        return self._facts[kind]

    def meets(self, layer: int) -> bool:
        """Whether ranks meet before layer l, for rows to cross."""
        return bool(self.facts(layer).sends.any())

    def preloaded(self) -> np.ndarray:
        """Feature rows that i sends to j once, before training, so that j holds all rows it computes. [ranks, ranks]."""
        sends = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for rank in range(self.ranks):
            np.add.at(sends[:, rank], self.owner[self.rows(rank, 0)[self.own(rank).size :]], 1)
        return sends


def neighbours(graph: Graph, rows: np.ndarray) -> np.ndarray:
    """In-neighbours of `rows`, one after the other, int32 [edges]."""
    start, degree = graph.indptr[rows], np.diff(graph.indptr)[rows]
    if not rows.size or not degree.sum():
        return np.zeros(0, dtype=graph.indices.dtype)
    offsets = np.repeat(start - np.concatenate([[0], np.cumsum(degree)[:-1]]), degree)
    return np.asarray(graph.indices[offsets + np.arange(degree.sum())])


def _in_turn(graph: Graph, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`rows` a few at a time, each time with about AT_ONCE edges: (rows, their in-neighbours)."""
    ends = np.cumsum(np.diff(graph.indptr)[rows])
    cuts = np.searchsorted(ends, np.arange(AT_ONCE, ends[-1] if ends.size else 0, AT_ONCE)) + 1
    for some in np.split(rows, np.unique(cuts)):
        yield some, neighbours(graph, some)


def distances(graph: Graph, roots: np.ndarray, reach: int, allowed: np.ndarray | None = None) -> np.ndarray:
    """Hops from the roots (bool [N]) against the edges, among `allowed` rows (bool [N]), up to `reach`; FAR beyond. int16 [N]."""
    hop = np.full(graph.stats.vertices, FAR, dtype=np.int16)
    frontier = np.flatnonzero(roots)
    hop[frontier] = 0
    for distance in range(1, reach + 1):
        near = np.zeros(hop.size, dtype=bool)
        for _, columns in _in_turn(graph, frontier):
            near[columns] = True
        near &= hop == FAR
        if allowed is not None:
            near &= allowed
        frontier = np.flatnonzero(near)
        if not frontier.size:
            break
        hop[frontier] = distance
    return hop


def expand(graph: Graph, own: np.ndarray, expansion: Expansion, server: int) -> np.ndarray:
    """The rows a server may have: its own (bool [N]) and those drawn around them. Equal seeds draw equal rows wherever asked."""
    random = np.random.default_rng((EXPANSION, expansion.seed, server))
    allowed, frontier = own.copy(), np.flatnonzero(own)
    for _ in range(expansion.max_hop):
        found = np.zeros(own.size, dtype=bool)
        for rows, columns in _in_turn(graph, frontier):
            reader = np.repeat(np.arange(rows.size), np.diff(graph.indptr)[rows])
            external = ~own[columns]
            reader, columns = reader[external], columns[external]
            degree = np.bincount(reader, minlength=rows.size)
            crowded = degree[reader] > expansion.fanout
            found[columns[~crowded]] = True
            reader, columns = reader[crowded], columns[crowded]
            degree[degree <= expansion.fanout] = 0
            sort = np.argsort(reader + random.random(reader.size))  # each reader's in a random order, of which the first k
            place = np.arange(reader.size) - (np.cumsum(degree) - degree)[reader]
            found[columns[sort[place < expansion.fanout]]] = True
        frontier = np.flatnonzero(found & ~allowed)
        allowed |= found
    return allowed


def _induced(graph: Graph, region: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """CSR of the subgraph induced by `region`."""
    place = np.full(graph.stats.vertices, -1, dtype=np.int64)
    place[region] = np.arange(region.size)
    columns = place[neighbours(graph, region)]
    row = np.repeat(np.arange(region.size), np.diff(graph.indptr)[region])[columns >= 0]
    counts = np.bincount(row, minlength=region.size)
    return np.concatenate([[0], np.cumsum(counts)]), columns[columns >= 0]
