"""Mini-batches: layouts of sampled edges, which say which rank computes which rows of a batch.

    split (GSplit): one group of all ranks; ranks exchange halos before every layer
        rank 0    its seeds | its rows of h_1 | its rows of h_0
        rank 1    its seeds | its rows of h_1 | its rows of h_0

    data parallel: a group per rank; no halo, and two ranks may compute the same row
        rank 0    its seeds | all they need of h_1 | all they need of h_0
        rank 1    its seeds | all they need of h_1 | all they need of h_0

    hybrid: a group per server, which splits batches among its ranks

    layer 1 split by destinations (DNP): owners compute the rows of h_1; ranks compute later layers
        rank 0    its seeds | all they need of h_2 | its rows of h_1 | all they read of h_0
        rank 1    its seeds | all they need of h_2 | its rows of h_1 | all they read of h_0

    layer 1 split by sources (SNP): owners of h_0 compute partial sums of the rows of h_1
        rank 0    its seeds | all they need of h_2 | sums of h_1 over | its rows of h_0
        rank 1    its seeds | all they need of h_2 | sums of h_1 over | its rows of h_0

A group has its own seeds, and a frontier around them (graph/sampling.py). Every vertex has one
owner in a group. Only the owner samples the vertex's neighbours, loads its features and computes
its rows, which the owner sends to the ranks that need them.

The executor samples its own share (executor/minibatch/sampler.py); tests compare both."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

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
    per_epoch,
    seeds_in,
)
from gnnplan.planner.ownership.layout import LayerCounts, Layout
from gnnplan.planner.vocabulary.numbers import PerRank, RankMatrix, ranges

MOST_EDGES = 20_000_000  # sampled edges in all batches that are counted one by one
MOST_BATCHES = 64  # batches that are counted one by one
PUSHED = 1  # numbers in the header of a push of edges: the number of rows


@dataclass(frozen=True)
class Scored:
    """Link prediction: the edges that each rank scores, which means that it computes their loss.

    edges: edges that each rank scores [ranks]. sends: rows of h_L that rank i sends to rank j,
    because they are ends of edges that rank j scores [ranks, ranks]. exchanges_rows: whether ranks
    of a group exchange rows of h_L."""

    edges: np.ndarray
    sends: RankMatrix
    exchanges_rows: bool


class MiniBatch(Layout):
    """The rows of every rank in one mini-batch.

    frontiers: the frontier of each group. groups: the group of each rank. member: the member of a
    group (0 .. size - 1) that owns each vertex, int32 [N]. scored: the edges that each rank scores
    in link prediction; None for losses of labels."""

    # numbers that rank i sends to rank j to push edges [ranks, ranks]; None: no rank pushes edges
    pushed: np.ndarray | None = None

    def __init__(
        self,
        graph: Graph,
        frontiers: Sequence[Frontier],
        groups: PerRank,
        member: np.ndarray,
        scored: Scored | None = None,
    ) -> None:
        self.scored, self.member = scored, member
        self.graph, self.servers, self.ranks = graph, groups, len(groups)
        self.layers = self.inside = len(frontiers[0].edges)
        self._frontiers, self._allowed = frontiers, {}
        # rank -> positions of its rows among nodes[0] of its group
        self._places: list[np.ndarray] = []
        self._rank_rows = []
        self.owner = np.full(graph.stats.vertices, -1, dtype=np.int32)  # set for seeds only
        for group, place in zip(groups, places_in(groups), strict=True):
            nodes = frontiers[group].nodes
            last = np.repeat(
                np.arange(self.layers, -1, -1), np.diff([0, *(rows.size for rows in nodes[::-1])])
            ).astype(np.int16)
            places = np.flatnonzero(member[nodes[0]] == place)
            self._places.append(places)
            self._rank_rows.append((nodes[0][places], last[places]))
        self._clear_caches()
        for rank in range(self.ranks):
            self.owner[self.own(rank)] = rank

    def kind(self, layer: int) -> object:
        return layer  # every layer samples its own edges

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        indptr, edges = self._frontiers[self.servers[rank]].edges[layer - 1]
        rows = self._places[rank][: self.rows(rank, layer).size]
        degree = np.diff(indptr)[rows]
        return self.graph.indices[edges[ranges(indptr[rows], degree)]], degree

    def crossing(self, layer: int) -> np.ndarray:
        """Return the number of each rank's edges of a layer with a remote source [ranks]."""
        sources = (self._edges(rank, layer)[0] for rank in range(self.ranks))
        pairs = zip(sources, places_in(self.servers), strict=True)
        return np.array([np.count_nonzero(self.member[ids] != place) for ids, place in pairs])

    @property
    def splits(self) -> bool:
        """Whether several ranks share a batch."""
        return self.ranks > len(set(self.servers))

    def exchanges_rows(self, layer: int) -> bool:
        return self.splits

    def asks(self, layer: int) -> bool:
        """Whether ranks send owners the ids of the rows of h_{l-1} that they need."""
        return self.exchanges_rows(layer)

    def sampled(self, layer: int) -> np.ndarray:
        """Return the number of edges of a layer that each rank samples [ranks]."""
        return self.facts(layer).edges

    def totals(self) -> tuple[list[int], list[int]]:
        """Return the rows of h_0 .. h_L, and the edges of layers 1 .. L, summed over ranks."""
        layers = range(1, self.layers + 1)
        rows = [int(self.row_counts(h).sum()) for h in (0, *layers)]
        return rows, [int(self.facts(layer).edges.sum()) for layer in layers]

    def _counted(self, layer: int) -> LayerCounts:
        if self.splits:
            return super()._counted(layer)
        edges = np.array([self._frontiers[g].edges[layer - 1][1].size for g in self.servers])
        nothing = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        return LayerCounts(self.row_counts(layer), self.row_counts(layer - 1), edges, nothing)


class FirstLayerSplit(MiniBatch):
    """A batch in which ranks split layer 1 only.

    Ranks exchange rows of h_1. From these, each rank computes layers 2 .. L for its own seeds.

    whole: the same batch with all layers split. separate: the same batch with a group per rank,
    whose seeds are the rank's own. ids: h (0 or 1) -> ids of the rows of h_h of each rank, if they
    are not the rows that it owns. first, second: counts of layers 1 and 2. pushed: as in MiniBatch,
    if layer 1 is split by sources."""

    def __init__(
        self,
        whole: MiniBatch,
        separate: MiniBatch,
        ids: dict[int, list[np.ndarray]],
        first: LayerCounts,
        second: LayerCounts,
        pushed: np.ndarray | None = None,
    ) -> None:
        self.__dict__.update(whole.__dict__)
        self._clear_caches()
        self._separate, self._ids, self.pushed = separate, ids, pushed
        self._facts |= {1: first, 2: second}
        self._facts |= {layer: separate.facts(layer) for layer in range(3, self.layers + 1)}

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Return the ids of the rows of h_0 that a rank reads, or of h_1 that it (partly) computes.

        For other h, the ids are those of the rows that the rank owns."""
        return self._ids[h][rank] if h in self._ids else super().rows(rank, h)

    def row_counts(self, h: int) -> np.ndarray:
        if h < 2:
            return np.array([self.rows(rank, h).size for rank in range(self.ranks)])
        return self.facts(h).rows

    def exchanges_rows(self, layer: int) -> bool:
        return layer == 2

    def asks(self, layer: int) -> bool:
        return self.exchanges_rows(layer) and self.pushed is None

    def sampled(self, layer: int) -> np.ndarray:
        return (self if self.pushed is None else self._separate).facts(layer).edges


def split_by_destinations(whole: MiniBatch, separate: MiniBatch) -> FirstLayerSplit:
    """Return the batch in which owners compute the rows of h_1 that any rank of the group needs.

    An owner reads all sources of its rows. Ranks exchange rows of h_1 only."""
    ranks, groups = range(whole.ranks), np.array(whole.servers)
    edges = [whole._edges(rank, 1)[0] for rank in ranks]
    read = [np.union1d(whole.rows(rank, 1), edges[rank]) for rank in ranks]
    sends, nothing = np.zeros((2, whole.ranks, whole.ranks), dtype=np.int64)
    for rank in ranks:
        peers, needed = np.flatnonzero(groups == groups[rank]), separate.rows(rank, 1)
        sends[peers, rank] = np.bincount(whole.member[needed], minlength=peers.size)
    np.fill_diagonal(sends, 0)
    computed = whole.row_counts(1)
    sources, sampled = (np.array([ids.size for ids in each]) for each in (read, edges))
    first = LayerCounts(computed, sources, sampled, nothing)
    second = replace(separate.facts(2), halo=sends, computed_rows=computed)
    return FirstLayerSplit(whole, separate, {0: read}, first, second)


def split_by_sources(whole: MiniBatch, separate: MiniBatch) -> FirstLayerSplit:
    """Return the batch in which each source's owner sums layer 1 over the edges from its sources.

    A rank samples all edges of the rows of h_1 that it needs, and pushes each edge to its source's
    owner. For each row it receives a partial sum from every owner of a source of the row, and from
    the owner of the row itself."""
    partial = [np.zeros(0, np.int64)] * whole.ranks  # ids of each rank's partial sums of h_1
    summed, own, added = np.zeros((3, whole.ranks), dtype=np.int64)
    sends, pushed, nothing = np.zeros((3, whole.ranks, whole.ranks), dtype=np.int64)
    for group in set(whole.servers):
        ranks = np.flatnonzero(np.equal(whole.servers, group))
        shared = whole._frontiers[group]
        rows, (indptr, positions) = shared.nodes[1], shared.edges[0]
        # edges of each row by the owner of their source [rows, members]
        edges = np.zeros((rows.size, ranks.size), dtype=np.int64)
        reader = np.repeat(np.arange(rows.size), np.diff(indptr))
        np.add.at(edges, (reader, whole.member[whole.graph.indices[positions]]), 1)
        # whether each member has a partial sum of each row [rows, members]
        parts = (edges > 0) | (whole.member[rows][:, None] == np.arange(ranks.size))
        own[ranks] = np.bincount(whole.member[rows], minlength=ranks.size)
        summed[ranks] = edges.sum(0)
        for member, rank in enumerate(ranks.tolist()):
            partial[rank] = rows[parts[:, member]]
            is_peer, is_needed = ranks != rank, np.isin(rows, separate.rows(rank, 1))
            received, sampled = parts[is_needed].sum(0), edges[is_needed].sum(0)
            sends[ranks, rank] = received * is_peer
            pushed[rank, ranks] = (PUSHED + 2 * received + sampled) * is_peer
            added[rank] = received.sum()
    sums = np.array([ids.size for ids in partial])
    first = LayerCounts(sums, whole.row_counts(0), summed, nothing, remote_own=sums - own)
    second = replace(separate.facts(2), halo=sends, computed_rows=sums, partial_sums=added)
    return FirstLayerSplit(whole, separate, {1: partial}, first, second, pushed)


# `Batches.split` -> how layer 1 of a batch is split
SPLIT = {"first": split_by_destinations, "source": split_by_sources}


def places_in(groups: Iterable[int]) -> list[int]:
    """Return the place of each rank among the ranks of its group.

    >>> places_in([0, 0, 1, 0])
    [0, 1, 0, 2]
    """
    seen = defaultdict[int, Iterator[int]](count)
    return [next(seen[group]) for group in groups]


def frontiers(
    graph: Graph, workload: Workload, items: Ids, groups: int, epoch: int, number: int
) -> list[Frontier]:
    """Sample a batch's frontier for each group, around the seeds of the group's items."""
    seeds = [
        seeds_in(graph, workload, part, epoch, number) for part in np.array_split(items, groups)
    ]
    sampling = workload.fanouts, workload.seed, epoch, number
    return [frontier(graph, some, *sampling) for some in seeds]


class Batches:
    """A workload's mini-batches, divided among ranks.

    The first `known` batches are those that training samples, in the same order. Later batches are
    assumed to repeat them. At most MOST_BATCHES batches are known, fewer if they are large.

    split: the layers that the ranks of a group split: 'all', or layer 1 only, by destinations
    ('first') or by sources ('source')."""

    def __init__(
        self,
        graph: Graph,
        workload: Workload,
        groups: PerRank,
        member: np.ndarray,
        split: str = "all",
    ) -> None:
        self.graph, self.workload, self.groups = graph, workload, groups
        self.member, self.split = member, split
        self._batches: dict[int, MiniBatch] = {}
        self._epoch, self._items = -1, list[Ids]()  # the last epoch that `items_in` was asked for
        self.steps = per_epoch(workload, graph.stats)
        # These frontiers are not cached: a training rank samples its own.
        edges = sum(places.size for sampled in self._frontiers(0) for _, places in sampled.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

    @property
    def splits(self) -> bool:
        """Whether several ranks share a batch."""
        return len(self.groups) > len(set(self.groups))

    def _frontiers(self, step: int) -> list[Frontier]:
        """Sample the frontier of each group in a step."""
        epoch, number = divmod(step, self.steps)
        items, groups = self.items_in(epoch)[number], len(set(self.groups))
        return frontiers(self.graph, self.workload, items, groups, epoch, number)

    def _drawn(self, step: int) -> MiniBatch:
        """Sample the batch of a step."""
        shared = self.groups, self.member, self._scored(step)
        whole = MiniBatch(self.graph, self._frontiers(step), *shared)
        if self.split == "all" or not whole.splits:
            return whole
        sampling = self.workload.fanouts, self.workload.seed, *divmod(step, self.steps)
        own = [frontier(self.graph, whole.own(rank), *sampling) for rank in range(whole.ranks)]
        alone = tuple(range(whole.ranks)), np.zeros(self.member.size, np.int32)
        separate = MiniBatch(self.graph, own, *alone)
        return SPLIT[self.split](whole, separate)

    def items_in(self, epoch: int) -> list[Ids]:
        """Return the items of each batch of an epoch; only the last epoch's items are cached."""
        if epoch != self._epoch:
            self._epoch, self._items = epoch, []
            self._items = items_of(self.graph, self.workload, epoch)
        return self._items

    def _scored(self, step: int) -> Scored | None:
        """Return the edges that each rank scores in a step; None for losses of labels."""
        epoch, number = divmod(step, self.steps)
        ranks = len(self.groups)
        edges, sends = np.zeros(ranks, np.int64), np.zeros((ranks, ranks), np.int64)
        parts = np.array_split(self.items_in(epoch)[number], len(set(self.groups)))
        for group, part in enumerate(parts):
            pairs = pairs_in(self.graph, self.workload, part, epoch, number)
            if pairs is None:
                return None
            members = [rank for rank in range(ranks) if self.groups[rank] == group]
            for member, rank in enumerate(members):
                edges[rank] = np.count_nonzero(self.member[pairs.heads] == member)
                wanted = self.member[fetched([pairs], self.member, member)]
                sends[members, rank] = np.bincount(wanted, minlength=len(members))
        return Scored(edges, sends, self.splits)

    def at(self, step: int) -> MiniBatch:
        """Return the batch of a step; steps count on from epoch to epoch."""
        step %= self.known
        if step not in self._batches:
            self._batches[step] = self._drawn(step)
        return self._batches[step]

    def first(self) -> list[MiniBatch]:
        """Return the known batches of the first epoch."""
        return [self.at(step) for step in range(min(self.steps, self.known))]
