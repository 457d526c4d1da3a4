"""Mini-batches: which rank computes which rows of a batch. A batch is a Layout of sampled edges.

    split (GSplit): one group of all ranks; ranks exchange halos before every layer
        rank 0    its seeds | its rows of h_1 | its rows of h_0
        rank 1    its seeds | its rows of h_1 | its rows of h_0

    data parallel: a group per rank; no halo, and two ranks may compute the same row
        rank 0    its seeds | all they need of h_1 | all they need of h_0
        rank 1    its seeds | all they need of h_1 | all they need of h_0

    hybrid: a group per server, split inside it

    first layer split (DNP): owners compute the rows of h_1; above, ranks compute what they need
        rank 0    its seeds | all they need of h_2 | its rows of h_1 | all they read of h_0
        rank 1    its seeds | all they need of h_2 | its rows of h_1 | all they read of h_0

    first layer split by sources (SNP): owners of h_0 sum their part of the rows of h_1
        rank 0    its seeds | all they need of h_2 | sums of h_1 over | its rows of h_0
        rank 1    its seeds | all they need of h_2 | sums of h_1 over | its rows of h_0

A group has its own seeds, and a frontier around them (graph/sampling.py). In a group every vertex
has one owner. The owner alone samples its neighbours, loads its features and computes its rows, and
sends them to the ranks that need them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import (
    Frontier,
    Ids,
    fetched,
    frontier,
    items_of,
    pairs_in,
    seeds_in,
)
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.vocabulary.numbers import ranges
from gnnplan.planner.vocabulary.outer import Pairs

MOST_EDGES = 20_000_000  # sampled in all batches that are looked at one by one
MOST_BATCHES = 64  # that are looked at one by one
PUSHED = 1  # numbers before pushed edges: of how many rows they are


@dataclass(frozen=True)
class Scored:
    """Link prediction: the edges of which each rank computes the loss.

    edges: of each rank [ranks]. sends: rows of h_L that rank i sends rank j, who scores edges that
    end there [ranks, ranks]. meets: whether ranks of a group send each other such rows."""

    edges: np.ndarray
    sends: Pairs
    meets: bool


class MiniBatch(Layout):
    """The rows of every rank in one mini-batch.

    frontiers: of each group. groups: the group of each rank. member: which member of a group
    (0 .. size - 1) owns each vertex, int [N]; None where every group is one rank. scored: who
    computes the loss of which edges; None: it is of labels."""

    # numbers of edges that rank i pushes to rank j, [ranks, ranks]; None: nobody pushes
    pushed: np.ndarray | None = None

    def __init__(
        self,
        graph: Graph,
        frontiers: Sequence[Frontier],
        groups: tuple[int, ...],
        member: np.ndarray | None,
        first_varying: int,
        scored: Scored | None = None,
    ) -> None:
        self.scored = scored
        self.graph, self.servers, self.ranks = graph, groups, len(groups)
        self.first_varying = first_varying
        self.layers = self.inside = len(frontiers[0].edges)
        self.depth = self.layers - first_varying
        self._frontiers, self._allowed = frontiers, {}
        # per rank: places of its rows among nodes[0] of its group
        self._places: list[np.ndarray] = []
        self._members = []
        self.owner = np.full(graph.stats.vertices, -1, dtype=np.int32)  # of the seeds
        for rank, group in enumerate(groups):
            nodes = frontiers[group].nodes
            last = np.repeat(
                np.arange(self.layers, -1, -1), np.diff([0, *(rows.size for rows in nodes[::-1])])
            ).astype(np.int16)
            places = (
                np.arange(nodes[0].size)
                if member is None
                else np.flatnonzero(member[nodes[0]] == groups[:rank].count(group))
            )
            self._places.append(places)
            self._members.append((nodes[0][places], last[places]))
        self._clear_caches()
        for rank in range(self.ranks):
            self.owner[self.own(rank)] = rank

    def _drawn(self, layer: int) -> int:
        return layer  # every layer draws anew

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        indptr, edges = self._frontiers[self.servers[rank]].edges[layer - 1]
        rows = self._places[rank][: self.rows(rank, layer).size]
        degree = np.diff(indptr)[rows]
        return self.graph.indices[edges[ranges(indptr[rows], degree)]], degree

    def crossing(self, layer: int) -> np.ndarray:
        """Edges of a layer whose source another rank owns [ranks]."""
        blocks = (
            self.block(rank, layer)[1] >= self.piece(rank, layer).local
            for rank in range(self.ranks)
        )
        return np.array([np.count_nonzero(remote) for remote in blocks])

    @property
    def splits(self) -> bool:
        """Whether ranks share a batch."""
        return self.ranks > len(set(self.servers))

    def meets(self, layer: int) -> bool:
        return self.splits

    def asks(self, layer: int) -> bool:
        """Whether ranks tell owners which rows of h_{l-1} they need."""
        return self.meets(layer)

    def sampled(self, layer: int) -> np.ndarray:
        """Edges of a layer that each rank draws [ranks]."""
        return self.facts(layer).edges

    def preloaded(self) -> np.ndarray:
        return np.zeros((self.ranks, self.ranks), dtype=np.int64)  # every batch loads its own rows


@dataclass(frozen=True)
class First:
    """Layer 1 of a batch of which it alone is split."""

    rows: dict[int, list[np.ndarray]]  # of each rank: ids in h_0 or h_1, where not those it owns
    facts: LayerFacts
    sends: np.ndarray  # rows of h_1 that i sends to j before layer 2 [ranks, ranks]
    added: np.ndarray | None = None  # LayerFacts.added of layer 2
    sampled: np.ndarray | None = None  # edges that each rank draws, if not those that it sums
    pushed: np.ndarray | None = None  # MiniBatch.pushed


class AloneAbove(MiniBatch):
    """A split batch of which layer 1 alone is split, in one of the ways of `SPLIT`.

    A rank needs what its own seeds need of h_L .. h_1, and computes layers L .. 2 of it alone."""

    def __init__(self, whole: MiniBatch, split: str) -> None:
        """whole: the same batch with all layers split."""
        self.__dict__.update(whole.__dict__)
        self._clear_caches()
        # per rank: rows of h_1 .. h_L, and edges of layers 2 .. L
        self._needed = np.zeros((self.ranks, self.layers), dtype=np.int64)
        self._edges_above = np.zeros((self.ranks, self.layers - 1), dtype=np.int64)
        self._first = SPLIT[split](whole, [self._needed_above(rank) for rank in range(self.ranks)])
        self.pushed = self._first.pushed

    def _needed_above(self, rank: int) -> np.ndarray:
        """Which of its group's rows of h_1 a rank's seeds need, bool; counts rows and edges."""
        found = self._frontiers[self.servers[rank]]
        nodes = found.nodes
        where = np.empty(self.graph.stats.vertices, dtype=np.int32)  # among the group's rows
        where[nodes[1]] = np.arange(nodes[1].size, dtype=np.int32)
        needed = np.zeros(nodes[1].size, dtype=bool)
        needed[self._places[rank][: self._sizes(self.layers)[rank]]] = True
        for layer in range(self.layers, 1, -1):
            self._needed[rank, layer - 1] = needed.sum()
            indptr, places = found.edges[layer - 1]
            drawn = np.repeat(needed[: nodes[layer].size], np.diff(indptr))
            needed[where[self.graph.indices[places[drawn]]]] = True
            self._edges_above[rank, layer - 2] = drawn.sum()
        self._needed[rank, 0] = needed.sum()
        return needed

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Rows of h_0 that a rank reads, and of h_1 that it computes or sums a part of.

        Of other rows there are as many as it owns."""
        rows = self._first.rows.get(h)
        return super().rows(rank, h) if rows is None else rows[rank]

    def row_counts(self, h: int) -> np.ndarray:
        if h < 2:
            return np.array([self.rows(rank, h).size for rank in range(self.ranks)])
        return self._needed[:, h - 1]

    def kind(self, layer: int) -> object:
        return layer

    def meets(self, layer: int) -> bool:
        return layer == 2

    def asks(self, layer: int) -> bool:
        return self.meets(layer) and self.pushed is None

    def sampled(self, layer: int) -> np.ndarray:
        drawn = self._first.sampled
        return drawn if layer == 1 and drawn is not None else super().sampled(layer)

    def crossing(self, layer: int) -> np.ndarray:
        return super().crossing(layer) * (layer == 1)

    def _counted(self, layer: int) -> LayerFacts:
        if layer == 1:
            return self._first.facts
        counts = self.row_counts(layer), self._needed[:, layer - 2], self._edges_above[:, layer - 2]
        if not self.meets(layer):
            return LayerFacts(*counts, np.zeros_like(self._first.sends))
        first = self._first
        return LayerFacts(*counts, first.sends, made=self.row_counts(1), added=first.added)


def by_destinations(whole: MiniBatch, needed: Sequence[np.ndarray]) -> First:
    """Owners compute the rows of h_1 that any rank of the group needs, and read all their sources.

    h_1 crosses, and nothing else does. needed: which of its group's rows of h_1 each rank needs."""
    ranks = range(whole.ranks)
    edges = [whole._edges(rank, 1)[0] for rank in ranks]
    read = [np.union1d(whole.rows(rank, 1), edges[rank]) for rank in ranks]
    sends = np.zeros((whole.ranks, whole.ranks), dtype=np.int64)
    for rank, peer in permutations(ranks, 2):
        if whole.servers[rank] == whole.servers[peer]:
            own = whole._places[peer]
            sends[peer, rank] = needed[rank][own[own < needed[rank].size]].sum()
    sources, drawn = (np.array([ids.size for ids in each]) for each in (read, edges))
    facts = LayerFacts(whole.row_counts(1), sources, drawn, np.zeros_like(sends))
    return First({0: read}, facts, sends)


def by_sources(whole: MiniBatch, needed: Sequence[np.ndarray]) -> First:
    """Owners sum layer 1 over the edges whose sources are theirs, of all rows that anyone needs.

    A rank draws all edges of the rows of h_1 that it needs, and pushes each edge to its source's
    owner. Partial sums come back, one of each row and owner of some of its sources or of itself."""
    partial = [np.zeros(0, np.int64)] * whole.ranks  # rows of h_1 that each sums a part of
    summed, own, added, sampled = np.zeros((4, whole.ranks), dtype=np.int64)
    sends, pushed = np.zeros((2, whole.ranks, whole.ranks), dtype=np.int64)
    for group in set(whole.servers):
        ranks = np.flatnonzero(np.equal(whole.servers, group)).tolist()
        owner, edges = _edges_by_owner(whole, ranks)
        parts = edges > 0
        parts[np.arange(owner.size), owner] = True
        own[ranks] = np.bincount(owner, minlength=len(ranks))
        summed[ranks] = edges.sum(0)
        for place, rank in enumerate(ranks):
            partial[rank] = whole._frontiers[group].nodes[1][parts[:, place]]
            of_others = np.arange(len(ranks)) != place
            given, drawn = parts[needed[rank]].sum(0), edges[needed[rank]].sum(0)
            sends[ranks, rank] = given * of_others
            pushed[rank, ranks] = (PUSHED + 2 * given + drawn) * of_others
            added[rank], sampled[rank] = given.sum(), drawn.sum()
    rows = np.array([ids.size for ids in partial])
    nothing = np.zeros_like(sends)
    facts = LayerFacts(rows, whole.row_counts(0), summed, nothing, away=rows - own)
    return First({1: partial}, facts, sends, added, sampled, pushed)


def _edges_by_owner(whole: MiniBatch, ranks: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of a group's rows of h_1: which member owns each, and its edges by their sources' owner.

    int [rows] and [rows, members]."""
    found = whole._frontiers[whole.servers[ranks[0]]]
    owner = np.empty(whole.graph.stats.vertices, dtype=np.int64)
    for place, rank in enumerate(ranks):
        owner[found.nodes[0][whole._places[rank]]] = place
    indptr, places = found.edges[0]
    rows, members = found.nodes[1].size, len(ranks)
    reader = np.repeat(np.arange(rows), np.diff(indptr))
    pair = reader * members + owner[whole.graph.indices[places]]
    edges = np.bincount(pair, minlength=rows * members).reshape(rows, members)
    return owner[found.nodes[1]], edges


SPLIT = {"first": by_destinations, "source": by_sources}  # how layer 1 alone may be split


def shares(items: Ids, groups: int) -> list[Ids]:
    """A batch's items, split nearly equally over the groups."""
    return np.array_split(items, groups)


def frontiers(
    graph: Graph, workload: Workload, items: Ids, groups: int, epoch: int, number: int
) -> list[Frontier]:
    """The frontiers of a batch, around the seeds of each group's share of its items."""
    return [
        frontier(
            graph,
            seeds_in(graph, workload, part, epoch, number),
            workload.fanouts,
            workload.seed,
            epoch,
            number,
        )
        for part in shares(items, groups)
    ]


class Batches:
    """A workload's mini-batches, and how ranks share them.

    The first `known` batches are those that training draws, in the same order. A later batch is
    taken to be like an earlier one. At most MOST_BATCHES are known, fewer if they are large.

    split: 'all' layers are split in a group, or layer 1 alone: as the 'first', by destinations, or
    by 'source'."""

    split = "all"

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        groups: tuple[int, ...],
        member: np.ndarray | None,
        first_varying: int,
    ) -> None:
        self.graph, self.workload, self.groups = graph, workload, groups
        self.member, self.first_varying = member, first_varying
        self._made: dict[int, MiniBatch] = {}
        self._split: dict[int, MiniBatch] = {}  # those of which layer 1 alone is split
        self._epoch, self._items = -1, list[Ids]()  # of the epoch that was asked for last
        self.steps = len(self.items_in(0))
        edges = sum(places.size for found in self._drawn(0) for _, places in found.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

    @property
    def splits(self) -> bool:
        """Whether ranks share a batch."""
        return len(self.groups) > len(set(self.groups))

    def _drawn(self, step: int) -> list[Frontier]:
        workload, (epoch, number) = self.workload, divmod(step, self.steps)
        items = self.items_in(epoch)[number]
        return frontiers(self.graph, workload, items, len(set(self.groups)), epoch, number)

    def items_in(self, epoch: int) -> list[Ids]:
        """The items of the epoch's batches. Those of one epoch are kept: edges are many."""
        if epoch != self._epoch:
            self._epoch, self._items = epoch, []
            self._items = items_of(self.graph, self.workload, epoch)
        return self._items

    def _scored(self, step: int) -> Scored | None:
        """Who computes the loss of which edges; None: it is of labels."""
        epoch, number = divmod(step, self.steps)
        ranks = len(self.groups)
        edges, sends = np.zeros(ranks, np.int64), np.zeros((ranks, ranks), np.int64)
        parts = shares(self.items_in(epoch)[number], len(set(self.groups)))
        for group, part in enumerate(parts):
            pairs = pairs_in(self.graph, self.workload, part, epoch, number)
            if pairs is None:
                return None
            members = [rank for rank in range(ranks) if self.groups[rank] == group]
            if self.member is None:
                edges[members] = part.size
                continue
            for place, rank in enumerate(members):
                edges[rank] = np.count_nonzero(self.member[pairs.heads] == place)
                wanted = self.member[fetched([pairs], self.member, place)]
                sends[members, rank] = np.bincount(wanted, minlength=len(members))
        return Scored(edges, sends, self.member is not None)

    def with_split(self, split: str) -> Batches:
        """The same batches, of which groups split layer 1 alone, in one of the ways of `SPLIT`."""
        out = copy.copy(self)  # what either draws, both have
        out.split, out._split = split, {}
        return out

    def at(self, step: int) -> MiniBatch:
        """The batch of a step, counted over epochs."""
        step %= self.known
        whole = self._whole(step)
        if self.split == "all" or not whole.splits:
            return whole
        if step not in self._split:
            self._split[step] = AloneAbove(whole, self.split)
        return self._split[step]

    def _whole(self, step: int) -> MiniBatch:
        """The batch of a known step with all layers split."""
        if step not in self._made:
            self._made[step] = MiniBatch(
                self.graph,
                self._drawn(step),
                self.groups,
                self.member,
                self.first_varying,
                self._scored(step),
            )
        return self._made[step]

    def first(self) -> list[MiniBatch]:
        """The batches of the first epoch that are known."""
        return [self.at(step) for step in range(min(self.steps, self.known))]
