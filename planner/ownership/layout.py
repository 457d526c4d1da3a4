"""Graph parallelism at any depth: which rank computes which rows, and whose rows it is sent.

Every rank owns a part of the graph. With depth 0 a rank computes its own rows only, and fetches its
halo before every layer. With depth d >= 1 (GraNNDis' preload) a server recomputes the first d
hidden layers of the rows around its own, so that these layers' rows never cross servers. The rows
that a server computes are its *region*; they are spread over its GPUs.

    region of a server, 3 layers, full preload
        own part | 1 hop | 2 hops | 3 hops (features only)      all edges into these rows
    with an Expansion (max_hop 1)
        own part | sampled external rows                        the edges among these rows only
    a batch of it
        targets  | 1 hop | 2 hops | 3 hops                      the same edges on the same GPUs

A layout of all rows becomes one of those that some targets need (`needed`): a row that no target
reaches in the layers that are left is left out.

Layer l reads h_{l-1} and writes h_l. `first_varying` (gnn/model.py) is 1 where h_0 are constant
features, 0 after an encoder. The planner reads counts and the executor reads indices of the same
object, so they agree about bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.partition import edges_between, locality_order, partition_weighted
from gnnplan.planner.graph.sampling import BATCHES, EXPANSION
from gnnplan.planner.vocabulary.numbers import runs
from gnnplan.planner.vocabulary.outer import Pairs

FAR = np.iinfo(np.int16).max  # hops: more than any model has layers
AT_ONCE = 1 << 22  # edges handled at a time, so that temporaries are small compared to the graph


@dataclass(frozen=True)
class Expansion:
    """GraNNDis' expansion-aware sampling of the rows around a server's own part.

    A server takes vertices within `max_hop` (m) hops: at most `fanout` (k) external in-neighbours
    of each vertex visited, drawn once. It has all edges among the rows that it then has."""

    max_hop: int
    fanout: int
    seed: int


@dataclass(frozen=True)
class Piece:
    """One rank's share of one layer. Its source rows are `local` rows of h_{l-1}, then its halo."""

    rows: int  # destinations: a prefix of the rank's rows
    local: int  # rows of h_{l-1} that it computed itself, or its features
    halo: np.ndarray  # int64 [halo], global ids, grouped by sender
    received: np.ndarray  # int64 [ranks], halo rows by sender
    edges: int  # without self edges


@dataclass(frozen=True)
class LayerFacts:
    """Counts of one layer over all ranks."""

    rows: np.ndarray  # [ranks], destinations
    sources: np.ndarray  # [ranks], rows read: local ones and halo
    edges: np.ndarray  # [ranks], without self edges
    halo: Pairs  # [ranks, ranks]: halo[i, j] rows of i are there when j computes the layer
    # rows of h_{l-1} that each rank has made, if it made some for other ranks alone [ranks]
    made: np.ndarray | None = None
    # if these are partial sums: how many each rank adds up to the sources that it reads [ranks]
    added: np.ndarray | None = None
    # destinations whose own row is with another rank, which adds its part of the sum [ranks]
    away: np.ndarray | None = None
    fresh: Pairs | None = None  # rows of the halo that cross before the layer, if not all

    def __post_init__(self) -> None:
        self.sends.setflags(write=False)

    @property
    def sends(self) -> Pairs:
        """Rows that go from i to j before the layer [ranks, ranks]."""
        return self.halo if self.fresh is None else self.fresh

    @property
    def returned(self) -> Pairs:
        """Rows whose gradients go from i to j after the layer: the other way [ranks, ranks]."""
        return self.sends.T

    @property
    def local(self) -> np.ndarray:
        """Rows of h_{l-1} that each rank has before the halo comes [ranks]."""
        return np.asarray(self.sources - self.there) if self.made is None else self.made

    @property
    def present(self) -> np.ndarray:
        """Rows of h_{l-1} that are with each rank when the halo is there, read or not [ranks]."""
        return np.asarray(self.local + self.there)

    @cached_property
    def there(self) -> np.ndarray:
        """Halo rows that are with each rank, whenever they came [ranks]."""
        return np.asarray(self.halo.sum(0))

    @cached_property
    def given(self) -> np.ndarray:
        """Rows that each rank sends [ranks]."""
        return np.asarray(self.sends.sum(1))

    @cached_property
    def taken(self) -> np.ndarray:
        """Halo rows that each rank gets before the layer [ranks]."""
        return np.asarray(self.sends.sum(0))


class Layout:
    """The rows of every rank at every layer.

    owner: the rank that owns each vertex, int [N]. servers: the server of each rank, or another
    group of ranks that preloads together (an island of GPUs). depth: the number of hidden layers
    that are recomputed; with an expansion, all of them are."""

    def __init__(
        self,
        graph: Graph,
        owner: np.ndarray,
        servers: tuple[int, ...],
        layers: int,
        first_varying: int,
        depth: int = 0,
        expansion: Expansion | None = None,
        method: str = "metis",
    ):
        self.graph, self.servers, self.layers = graph, servers, layers
        self.method = method  # the partitioner, which cuts regions and orders rows, too
        self.first_varying, self.ranks = first_varying, len(servers)
        several = len(set(servers)) > 1
        self.depth = min(layers if expansion else depth, layers - first_varying) if several else 0
        # h_0 .. h_{inside - 1} never cross servers
        self.inside = first_varying + self.depth if self.depth else 0
        self.owner = np.asarray(owner, dtype=np.int32)
        # server -> bool [N]: the rows that it may have; servers that are absent may have all
        self._allowed: dict[int, np.ndarray] = {}
        if expansion and several:
            self.inside = layers  # also where there is one layer
            self._allowed = {
                server: expand(graph, self._part(server), expansion, server)
                for server in set(servers)
            }
        # per rank: (global ids, last) of its rows; it computes a row of h_0 .. h_last
        self._members = self._regions() if self.inside else self._parts()
        self._clear_caches()

    @classmethod
    def of_one(cls, graph: Graph, method: str = "metis") -> Layout:
        """Of one layer on one rank, which has all rows."""
        owner = np.zeros(graph.stats.vertices, np.int32)
        return cls(graph, owner, servers=(0,), layers=1, first_varying=1, method=method)

    def _clear_caches(self) -> None:
        self._pieces: dict[tuple[int, object], Piece] = {}
        self._row_counts: dict[int, tuple[int, ...]] = {}
        self._facts: dict[object, LayerFacts] = {}
        self.__dict__.pop("_position", None)

    def recomputed(self, layer: int) -> bool:
        """Whether the layer's inputs come from the own server only."""
        return layer - 1 < self.inside

    def kind(self, layer: int) -> object:
        """A key that is equal for layers with equal rows, edges and exchanges."""
        return self._sizes(layer - 1), self._sizes(layer), self.recomputed(layer)

    def _sizes(self, h: int) -> tuple[int, ...]:
        """Rows of h_h of each rank."""
        if h not in self._row_counts:
            self._row_counts[h] = tuple(
                int(np.searchsorted(-last, -h, side="right")) for _, last in self._members
            )
        return self._row_counts[h]

    # -- regions -------------------------------------------------------------------------------

    @property
    def _order(self) -> np.ndarray:
        return locality_order(self.graph, self.method)

    def _part(self, server: int) -> np.ndarray:
        """The server's own rows, bool [N]."""
        return np.asarray(np.asarray(self.servers)[self.owner] == server)

    def _parts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each rank's own rows."""
        last = np.full(self.owner.size, self.layers, dtype=np.int16)
        return [
            self._sorted(np.flatnonzero(self.owner == rank), last) for rank in range(self.ranks)
        ]

    def _regions(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Each rank's share of its server's region."""
        owner, members = self.owner.copy(), dict[int, tuple[np.ndarray, np.ndarray]]()
        for server, last in self._lasts(np.ones(owner.size, dtype=bool)):
            ranks = np.flatnonzero(np.asarray(self.servers) == server)
            region = np.flatnonzero(last >= 0)
            if len(ranks) == 1:
                rank_of = np.full(region.size, ranks[0])
            else:
                inside = edges_between(self.graph, region)
                # the layers are balanced in which rows are computed, at least 1
                weights = np.maximum(last[region].astype(np.int64), 1)
                rank_of = ranks[partition_weighted(inside, weights, len(ranks), self.method)]
            own = self._part(server)[region]
            owner[region[own]] = rank_of[own]
            members |= {int(rank): self._sorted(region[rank_of == rank], last) for rank in ranks}
        self.owner = owner
        return [members[rank] for rank in range(self.ranks)]

    def _lasts(self, targets: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Each server, and the last h_l of which it computes each row for the targets: int16 [N].

        Negative: it does not have the row. Owners compute h_l for l >= inside, for the targets of
        all servers; below, every server computes what its own rows of h_inside need."""
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
        """(global ids, last) of rows, those of most layers first; alike, METIS clusters together.

        last: of all vertices, [N]."""
        lasts = last[ids]
        sort = np.lexsort((self._order[ids], -lasts))
        return ids[sort], lasts[sort]

    def drawn(self, rows: np.ndarray, count: int, seed: int) -> np.ndarray:
        """The random batch of each of `rows` (bool [N]), -1 elsewhere: int32 [N].

        Each server's rows are cut in `count` nearly equal batches."""
        batch_of = np.full(rows.size, -1, dtype=np.int32)
        for server in set(self.servers):
            order = np.random.default_rng((BATCHES, seed, server)).permutation(
                np.flatnonzero(self._part(server) & rows)
            )
            batch_of[order] = np.arange(order.size) * count // max(order.size, 1)
        return batch_of

    def needed(self, targets: np.ndarray, inside: int | None = None) -> Layout:
        """The layout of the rows that some targets (bool [N]) need, on the ranks that have them.

        inside: h_0 .. h_{inside - 1} never cross servers; default: as here."""
        out = object.__new__(Layout)
        out.__dict__.update(self.__dict__)
        out.inside = self.inside if inside is None else inside
        out._clear_caches()
        lasts = dict(out._lasts(targets))
        out._members = [
            self._sorted(ids[lasts[server][ids] >= 0], lasts[server])
            for server, (ids, _) in zip(self.servers, self._members, strict=True)
        ]
        return out

    def batch(self, targets: np.ndarray) -> Layout:
        """The layout of the rows that some targets (bool [N]) need.

        A server's targets are among its own rows. What they need is found for the server as a
        whole, then split over its GPUs as in this layout. So every row that a rank needs is among
        the rows that it has here."""
        batch = self.needed(targets, inside=self.layers)
        batch.depth = self.layers - self.first_varying
        return batch

    def _holders(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Who sends the rank a row of h_{l-1} that it lacks, and the row's position among theirs.

        Both are int32 [N], -1 where nobody has the row."""
        if not self.recomputed(layer):
            return self.owner, self._position
        rank_of, position = np.full((2, self.graph.stats.vertices), -1, dtype=np.int32)
        for peer in np.flatnonzero(np.equal(self.servers, self.servers[rank])):
            ids = self._members[peer][0]
            rank_of[ids], position[ids] = peer, np.arange(ids.size)
        return rank_of, position

    @cached_property
    def _position(self) -> np.ndarray:
        """Position of each vertex among its owner's rows, int32 [N]; -1 if it is left out."""
        position = np.full(self.graph.stats.vertices, -1, dtype=np.int32)
        for rank, (ids, _) in enumerate(self._members):
            own = np.flatnonzero(self.owner[ids] == rank)
            position[ids[own]] = own
        return position

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Global ids of the rows of h_h that the rank computes (h = 0: has), int64 [rows]."""
        return self._members[rank][0][: self._sizes(h)[rank]]

    def row_counts(self, h: int) -> np.ndarray:
        """Rows of h_h of each rank [ranks]."""
        return np.array(self._sizes(h))

    def own(self, rank: int) -> np.ndarray:
        """Global ids of the rows that the rank owns: those in its loss, or a batch's targets."""
        return self.rows(rank, self.layers)

    # -- layers --------------------------------------------------------------------------------

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """In-neighbours of the rank's rows of h_l, row after row, and the degree of each row."""
        return self._allowed_edges(rank, self.rows(rank, layer))

    def _allowed_edges(self, rank: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In-neighbours of `rows` that the rank's server may have, and the degree of each row."""
        columns, degree = self.graph.neighbours(rows), self.graph.degree_of(rows)
        allowed = self._allowed.get(self.servers[rank])
        if allowed is None:
            return columns, degree
        kept = allowed[columns]
        return columns[kept], np.bincount(
            np.repeat(np.arange(rows.size), degree)[kept], minlength=rows.size
        )

    def piece(self, rank: int, layer: int) -> Piece:
        """The rank's share of a layer."""
        rows, local = self.rows(rank, layer), self.rows(rank, layer - 1)
        # rows are prefixes of the rank's rows, so equal sizes are equal rows
        if (key := (rank, self.kind(layer))) not in self._pieces:
            self._pieces[key] = self._piece(rank, layer, rows.size, local.size)
        return self._pieces[key]

    def _piece(self, rank: int, layer: int, rows: int, local: int) -> Piece:
        columns, _ = self._edges(rank, layer)
        wanted = np.zeros(self.graph.stats.vertices, dtype=bool)
        wanted[columns] = True
        wanted[self._members[rank][0][:local]] = False
        halo = np.flatnonzero(wanted)
        sender, place = (of_all[halo] for of_all in self._holders(rank, layer))
        sort = np.lexsort((place, sender))
        return Piece(
            rows, local, halo[sort], np.bincount(sender, minlength=self.ranks), int(columns.size)
        )

    def sent(self, rank: int, layer: int) -> list[np.ndarray]:
        """Positions, among the rank's rows, of those that it sends to each peer before the layer.

        A list over peers of int64 [rows]."""
        _, position = self._holders(rank, layer)
        pieces = (self.piece(peer, layer) for peer in range(self.ranks))
        wanted = (np.split(piece.halo, np.cumsum(piece.received)[:-1])[rank] for piece in pieces)
        return [position[rows].astype(np.int64) for rows in wanted]

    def block(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """The rank's edges of a layer: CSR (indptr int64, indices int32) over its destinations.

        Indices are positions among its source rows."""
        piece = self.piece(rank, layer)
        columns, degree = self._edges(rank, layer)
        position = np.empty(self.graph.stats.vertices, dtype=np.int32)
        position[self.rows(rank, layer - 1)] = np.arange(piece.local, dtype=np.int32)
        position[piece.halo] = piece.local + np.arange(piece.halo.size, dtype=np.int32)
        for start in range(0, columns.size, AT_ONCE):  # numpy makes 64-bit copies of indices
            some = columns[start : start + AT_ONCE]
            some[:] = position[some]
        return np.concatenate([[0], np.cumsum(degree)]), columns

    def degrees(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """In- and out-degrees [N] among the rows that the rank's server may have."""
        rows = np.flatnonzero(
            self._allowed.get(self.servers[rank], np.ones(self.graph.stats.vertices, dtype=bool))
        )
        columns, degree = self._allowed_edges(rank, rows)
        in_degree = np.zeros(self.graph.stats.vertices, dtype=np.int64)
        in_degree[rows] = degree
        return in_degree, np.bincount(columns, minlength=in_degree.size)

    def facts(self, layer: int) -> LayerFacts:
        """Counts of a layer over all ranks. Layers of the same `kind` have the same object."""
        if (kind := self.kind(layer)) not in self._facts:
            self._facts[kind] = self._counted(layer)
        return self._facts[kind]

    def _counted(self, layer: int) -> LayerFacts:
        pieces = [self.piece(rank, layer) for rank in range(self.ranks)]
        return LayerFacts(
            np.array([p.rows for p in pieces]),
            np.array([p.local + p.halo.size for p in pieces]),
            np.array([p.edges for p in pieces]),
            np.stack([p.received for p in pieces]).T,
        )

    def meets(self, layer: int) -> bool:
        """Whether ranks exchange rows before the layer."""
        return bool(self.facts(layer).sends.any())

    def preloaded(self) -> np.ndarray:
        """Feature rows that rank i sends to rank j once, before training: [ranks, ranks].

        After that j has the features of all rows that it computes."""
        sends = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for rank in range(self.ranks if self.inside else 0):
            np.add.at(sends[:, rank], self.owner[self.rows(rank, 0)[self.own(rank).size :]], 1)
        return sends


def _blocks(graph: Graph, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of `rows` with about AT_ONCE edges each: (rows, their in-neighbours)."""
    for some in runs(graph.degree_of(rows), AT_ONCE):
        yield rows[some], graph.neighbours(rows[some])


def distances(
    graph: Graph, roots: np.ndarray, reach: int, allowed: np.ndarray | None = None
) -> np.ndarray:
    """Hops from the roots (bool [N]) against the edges, up to `reach`; FAR beyond: int16 [N].

    allowed: the rows that may be visited (bool [N]); default: all."""
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
    """How many vertices lie within 0, 1, .. `reach` hops of training vertices, as `distances`."""
    if len(graph.reached) > reach:
        return list(graph.reached[: reach + 1])
    hops = distances(graph, np.asarray(graph.train), reach)
    return [int(np.count_nonzero(hops <= most)) for most in range(reach + 1)]


def expand(graph: Graph, own: np.ndarray, expansion: Expansion, server: int) -> np.ndarray:
    """The rows that a server may have: its own (bool [N]), and those drawn around them.

    Every rank draws the same rows for the same seed and server."""
    random = np.random.default_rng((EXPANSION, expansion.seed, server))
    allowed, frontier = own.copy(), np.flatnonzero(own)
    for _ in range(expansion.max_hop):
        found = np.zeros(own.size, dtype=bool)
        for rows, columns in _blocks(graph, frontier):
            reader = np.repeat(np.arange(rows.size), graph.degree_of(rows))
            external = ~own[columns]
            reader, columns = reader[external], columns[external]
            degree = np.bincount(reader, minlength=rows.size)
            sampled = degree[reader] > expansion.fanout
            found[columns[~sampled]] = True
            reader, columns = reader[sampled], columns[sampled]
            degree[degree <= expansion.fanout] = 0
            # put each reader's neighbours in random order, and take the first k of them
            sort = np.argsort(reader + random.random(reader.size))
            place = np.arange(reader.size) - (np.cumsum(degree) - degree)[reader]
            found[columns[sort[place < expansion.fanout]]] = True
        frontier = np.flatnonzero(found & ~allowed)
        allowed |= found
    return allowed
