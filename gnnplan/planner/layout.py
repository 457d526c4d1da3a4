"""Which rank computes which rows of which layer, and whose rows it must be sent: graph parallelism at any depth.

Every rank owns a part. With depth 0 it computes its own rows only and fetches its halo before every layer. With depth
d >= 1 (GraNNDis' preload) a server recomputes the first d hidden layers of what surrounds it, so that those layers'
rows never cross servers; the rows a server computes, its *region*, are spread over its GPUs. The same object serves
the planner (counts) and the executor (indices), so bytes agree by construction.

Layer l reads h_{l-1} and writes h_l. `first_varying` (gnn.py) is 1 where h_0 are constant features, 0 after an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from gnnplan.planner.graph import Graph
from gnnplan.planner.partition import locality_order, partition_weighted

FAR = np.iinfo(np.int32).max


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


class Layout:
    """The rows of every rank at every layer.

    owner: int [N], the rank that owns each vertex; servers: the server of each rank; depth: hidden layers recomputed.
    """

    def __init__(self, graph: Graph, owner: np.ndarray, servers: tuple[int, ...], layers: int, first_varying: int, depth: int = 0):
        self.graph, self.servers, self.layers = graph, servers, layers
        self.first_varying, self.ranks = first_varying, len(servers)
        self.depth = min(depth, layers - first_varying) if len(set(servers)) > 1 else 0
        self.order = locality_order(graph)
        self.owner = np.asarray(owner, dtype=np.int32)
        self._assigned: dict[int, np.ndarray] = {}
        self._hop: dict[int, np.ndarray] = {}
        if self.depth:
            self._grow_regions()
        self._pieces: dict[tuple[int, int, int, bool], Piece] = {}

    def hops(self, h: int) -> int:
        """How far around its own rows a server computes h_h (or holds features, h = 0)."""
        return max(0, min(self.first_varying + self.depth - h, self.layers - h)) if self.depth else 0

    def recomputed(self, layer: int) -> bool:
        """Whether layer l's inputs come from the own server only."""
        return bool(self.depth) and layer - 1 < self.first_varying + self.depth

    # -- regions ---------------------------------------------------------------------------------------------------

    def _grow_regions(self) -> None:
        """Hop distance of every vertex from each server's own rows, and the region's cut over the server's GPUs."""
        server_of = np.asarray(self.servers)[self.owner]
        reach, graph = self.hops(0), self.graph
        owner = self.owner.copy()
        for server in sorted(set(self.servers)):
            hop = np.full(graph.stats.vertices, FAR, dtype=np.int32)
            frontier = np.flatnonzero(server_of == server)
            hop[frontier] = 0
            for distance in range(1, reach + 1):
                near = np.unique(neighbours(graph, frontier)) if frontier.size else frontier
                frontier = near[hop[near] == FAR]
                hop[frontier] = distance
            mine = np.flatnonzero(np.asarray(self.servers) == server)
            region = np.flatnonzero(hop < FAR)
            assigned = np.full(graph.stats.vertices, -1, dtype=np.int32)
            if len(mine) == 1:
                assigned[region] = mine[0]
            else:  # weight: the number of layers in which a row is computed
                weight = np.array([sum(self.hops(j) >= h for j in range(1, self.layers + 1)) or 1 for h in range(reach + 1)])[hop[region]]
                indptr, indices = _induced(graph, region)
                assigned[region] = mine[partition_weighted(indptr, indices, weight, len(mine), seed=0)]
            self._assigned[server], self._hop[server] = assigned, hop
            own = hop == 0
            owner[own] = assigned[own]
        self.owner = owner

    @cached_property
    def _members(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per rank: (global ids, hop) of all rows it ever computes, own rows first, near before far, METIS clusters together."""
        out = []
        for rank, server in enumerate(self.servers):
            if self.depth:
                ids = np.flatnonzero(self._assigned[server] == rank)
                hop = self._hop[server][ids]
            else:
                ids = np.flatnonzero(self.owner == rank)
                hop = np.zeros(ids.size, dtype=np.int32)
            sort = np.lexsort((self.order[ids], hop))
            out.append((ids[sort], hop[sort]))
        return out

    @cached_property
    def _positions(self) -> list[np.ndarray]:
        """Per rank: position of each vertex among its rows, -1 where it has none. int32 [ranks][N]."""
        out = []
        for ids, _ in self._members:
            position = np.full(self.graph.stats.vertices, -1, dtype=np.int32)
            position[ids] = np.arange(ids.size, dtype=np.int32)
            out.append(position)
        return out

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Global ids of the rows of h_h that the rank computes (features: that it holds), int64 [rows]."""
        ids, hop = self._members[rank]
        return ids[: np.searchsorted(hop, self.hops(h), side="right")]

    def own(self, rank: int) -> np.ndarray:
        """Global ids of the rows that it owns (its share of the loss)."""
        return self.rows(rank, self.layers)

    # -- layers ----------------------------------------------------------------------------------------------------

    def piece(self, rank: int, layer: int) -> Piece:
        """The rank's share of layer l."""
        key = (rank, self.hops(layer), self.hops(layer - 1), self.recomputed(layer))
        if key not in self._pieces:
            self._pieces[key] = self._piece(rank, layer)
        return self._pieces[key]

    def _piece(self, rank: int, layer: int) -> Piece:
        rows, local = self.rows(rank, layer), self.rows(rank, layer - 1)
        columns = neighbours(self.graph, rows)
        position = self._positions[rank][columns]
        halo = np.unique(columns[(position < 0) | (position >= local.size)])
        provider = self._assigned[self.servers[rank]][halo] if self.recomputed(layer) else self.owner[halo]
        place = np.zeros(halo.size, dtype=np.int64)
        for peer in np.unique(provider):
            from_peer = provider == peer
            place[from_peer] = self._positions[peer][halo[from_peer]]
        sort = np.lexsort((place, provider))
        return Piece(rows.size, local.size, halo[sort], np.bincount(provider, minlength=self.ranks), int(columns.size))

    def sent(self, rank: int, layer: int) -> list[np.ndarray]:
        """Positions among the rank's rows that it sends to each peer before layer l, int64 [ranks][rows]."""
        out = []
        for peer in range(self.ranks):
            piece = self.piece(peer, layer)
            start = int(piece.received[:rank].sum())
            wanted = piece.halo[start : start + int(piece.received[rank])]
            out.append(self._positions[rank][wanted].astype(np.int64))
        return out

    def block(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """CSR over the rank's destinations of layer l with local source positions: (indptr int64, indices int32)."""
        piece, rows = self.piece(rank, layer), self.rows(rank, layer)
        where = self._positions[rank].copy()
        where[where >= piece.local] = -1
        where[piece.halo] = piece.local + np.arange(piece.halo.size, dtype=np.int32)
        degree = np.diff(self.graph.indptr)[rows]
        return np.concatenate([[0], np.cumsum(degree)]), where[neighbours(self.graph, rows)]

    def facts(self, layer: int) -> LayerFacts:
        """Counts of layer l over all ranks."""
        pieces = [self.piece(rank, layer) for rank in range(self.ranks)]
        return LayerFacts(
            np.array([p.rows for p in pieces]),
            np.array([p.local + p.halo.size for p in pieces]),
            np.array([p.edges for p in pieces]),
            np.stack([p.received for p in pieces]).T,
        )

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


def _induced(graph: Graph, region: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """CSR of the subgraph induced by `region`."""
    place = np.full(graph.stats.vertices, -1, dtype=np.int64)
    place[region] = np.arange(region.size)
    columns = place[neighbours(graph, region)]
    row = np.repeat(np.arange(region.size), np.diff(graph.indptr)[region])[columns >= 0]
    counts = np.bincount(row, minlength=region.size)
    return np.concatenate([[0], np.cumsum(counts)]), columns[columns >= 0]
