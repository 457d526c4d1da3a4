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

A group has its own seeds, and a frontier around them (graph/sampling.py). In a group every vertex
has one owner. The owner alone samples its neighbours, loads its features and computes its rows, and
sends them to the ranks that need them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.batches import items_of, pairs_in, seeds_in
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.links import fetched
from gnnplan.planner.graph.sampling import Frontier, Ids, frontier
from gnnplan.planner.ownership.layout import LayerFacts, Layout

MOST_EDGES = 20_000_000  # sampled in all batches that are looked at one by one
MOST_BATCHES = 64  # that are looked at one by one


@dataclass(frozen=True)
class Scored:
    """Link prediction: the edges of which each rank computes the loss.

    edges: of each rank [ranks]. sends: rows of h_L that rank i sends rank j, who scores edges that
    end there [ranks, ranks]. meets: whether ranks of a group send each other such rows."""

    edges: np.ndarray
    sends: np.ndarray
    meets: bool


class MiniBatch(Layout):
    """The rows of every rank in one mini-batch.

    frontiers: of each group. groups: the group of each rank. member: which member of a group
    (0 .. size - 1) owns each vertex, int [N]; None where every group is one rank. scored: who
    computes the loss of which edges; None: it is of labels."""

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
        self.graph, self.servers, self.ranks, self.first_varying = (
            graph,
            groups,
            len(groups),
            first_varying,
        )
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
        starts = np.repeat(indptr[rows] - np.concatenate([[0], np.cumsum(degree)])[:-1], degree)
        return self.graph.indices[edges[starts + np.arange(starts.size)]], degree

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

    def preloaded(self) -> np.ndarray:
        return np.zeros((self.ranks, self.ranks), dtype=np.int64)  # every batch loads its own rows


class FirstSplit(MiniBatch):
    """A split batch of which layer 1 alone is split.

    A rank needs what its own seeds need of h_L .. h_1. Owners compute the rows of h_1 that any rank
    of the group needs, and read all their sources; h_1 crosses, and nothing else does."""

    def __init__(self, whole: MiniBatch) -> None:
        """whole: the same batch with all layers split."""
        self.__dict__.update(whole.__dict__)
        self._clear_caches()
        self._read: list[Ids] = []  # per rank: its rows of h_0
        counts = []  # per rank: rows of h_1 .. h_L, edges of layers 2 .. L, needs of h_1 by owner
        for rank in range(self.ranks):
            columns, _ = whole._edges(rank, 1)
            own = whole.rows(rank, 1)
            self._read.append(np.union1d(own, columns))
            counts.append(self._needed_above(rank))
        rows, edges, needs = zip(*counts, strict=True)
        self._needed, self._edges_above = np.array(rows), np.array(edges)
        self._needs = np.array(needs)  # [ranks, ranks]: rows of h_1 that i needs of j

    def _needed_above(self, rank: int) -> tuple[list[int], list[int], Ids]:
        """Of a rank's seeds: rows of h_1 .. h_L, edges of layers 2 .. L, rows of h_1 by owner."""
        found = self._frontiers[self.servers[rank]]
        nodes = found.nodes
        where = np.empty(self.graph.stats.vertices, dtype=np.int32)  # among the group's rows
        where[nodes[1]] = np.arange(nodes[1].size, dtype=np.int32)
        needed = np.zeros(nodes[1].size, dtype=bool)
        seeds = self._places[rank][: self._sizes(self.layers)[rank]]
        needed[seeds] = True
        rows, edges = [seeds.size], list[int]()
        for layer in range(self.layers, 1, -1):
            indptr, places = found.edges[layer - 1]
            drawn = np.repeat(needed[: nodes[layer].size], np.diff(indptr))
            needed[where[self.graph.indices[places[drawn]]]] = True
            edges.append(int(drawn.sum()))
            rows.append(int(needed.sum()))
        by_owner = np.zeros(self.ranks, dtype=np.int64)
        for peer in range(self.ranks):
            if self.servers[peer] == self.servers[rank]:
                own = self._places[peer]
                by_owner[peer] = needed[own[own < needed.size]].sum()
        return rows[::-1], edges[::-1], by_owner

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Rows of h_0 that the rank reads, and of h_1 that it computes; of others, the number."""
        return self._read[rank] if h == 0 else super().rows(rank, h)

    def row_counts(self, h: int) -> np.ndarray:
        if h == 0:
            return np.array([ids.size for ids in self._read])
        return super().row_counts(1) if h == 1 else self._needed[:, h - 1]

    def kind(self, layer: int) -> object:
        return layer

    def meets(self, layer: int) -> bool:
        return layer == 2

    def crossing(self, layer: int) -> np.ndarray:
        return super().crossing(layer) * (layer == 1)

    def facts(self, layer: int) -> LayerFacts:
        if layer not in self._facts:
            nothing = np.zeros((self.ranks, self.ranks), dtype=np.int64)
            rows = self.row_counts(layer)
            if layer == 1:
                edges = np.array([self._edges(rank, 1)[0].size for rank in range(self.ranks)])
                self._facts[layer] = LayerFacts(rows, self.row_counts(0), edges, nothing)
            else:
                sends = self._needs.T * ~np.eye(self.ranks, dtype=bool) if layer == 2 else nothing
                self._facts[layer] = LayerFacts(
                    rows,
                    self._needed[:, layer - 2],
                    self._edges_above[:, layer - 2],
                    sends,
                    made=self.row_counts(1) if layer == 2 else None,
                )
        return self._facts[layer]


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

    split: which layers a group splits, 'all' of them or the 'first' alone."""

    split = "all"

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        groups: tuple[int, ...],
        member: np.ndarray | None,
        first_varying: int,
    ) -> None:
        self.graph, self.workload, self.groups, self.member, self.first_varying = (
            graph,
            workload,
            groups,
            member,
            first_varying,
        )
        self._made: dict[int, MiniBatch] = {}
        self._first_split: dict[MiniBatch, MiniBatch] = {}
        self._epoch, self._items = -1, list[Ids]()  # of the epoch that was asked for last
        self.steps = len(self.items_in(0))
        edges = sum(places.size for found in self._drawn(0) for _, places in found.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

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

    def with_first_split(self) -> Batches:
        """The same batches, of which groups split the first layer alone."""
        out = copy.copy(self)  # what either draws, both have
        out.split, out._first_split = "first", {}
        return out

    def at(self, step: int) -> MiniBatch:
        """The batch of a step, counted over epochs."""
        whole = self._whole(step)
        if self.split == "all" or not whole.splits:
            return whole
        if whole not in self._first_split:
            self._first_split[whole] = self._split_first(whole)
        return self._first_split[whole]

    def _split_first(self, whole: MiniBatch) -> MiniBatch:
        return FirstSplit(whole)

    def _whole(self, step: int) -> MiniBatch:
        """The batch of a step with all layers split."""
        step = step if step < self.known else step % self.known
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
