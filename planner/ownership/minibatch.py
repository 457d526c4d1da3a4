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

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

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
        self.scored, self.member = scored, member
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

    def kind(self, layer: int) -> object:
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

    def totals(self) -> tuple[list[int], list[int]]:
        """Rows of h_0 .. h_L, and edges of layers 1 .. L, of all ranks."""
        layers = range(1, self.layers + 1)
        rows = [int(self.row_counts(h).sum()) for h in (0, *layers)]
        return rows, [int(self.facts(layer).edges.sum()) for layer in layers]

    def _counted(self, layer: int) -> LayerFacts:
        if self.splits:
            return super()._counted(layer)
        edges = np.array([self._frontiers[g].edges[layer - 1][1].size for g in self.servers])
        nothing = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        return LayerFacts(self.row_counts(layer), self.row_counts(layer - 1), edges, nothing)


class AloneAbove(MiniBatch):
    """A split batch of which layer 1 alone is split.

    A rank needs what its own seeds need of h_L .. h_1, and computes layers L .. 2 of it alone."""

    first: LayerFacts  # of layer 1
    given: np.ndarray  # rows of h_1 that i sends to j before layer 2 [ranks, ranks]
    added: np.ndarray | None = None  # LayerFacts.added of layer 2

    def __init__(self, whole: MiniBatch, alone: MiniBatch) -> None:
        """whole: the same batch with all layers split. alone: as if each rank had its own seeds."""
        self.__dict__.update(whole.__dict__)
        self._clear_caches()
        layers, ranks = range(1, self.layers + 1), range(self.ranks)
        self._alone = {layer: alone.facts(layer) for layer in layers}
        # of each rank: ids in h_0 or h_1, where not those it owns
        self._ids: dict[int, list[np.ndarray]] = {}
        self._cut(whole, [alone.rows(rank, 1) for rank in ranks])

    @abstractmethod
    def _cut(self, whole: MiniBatch, needed: Sequence[np.ndarray]) -> None:
        """Count layer 1, and what crosses after it. needed: which rows of h_1 each rank needs."""

    def rows(self, rank: int, h: int) -> np.ndarray:
        """Rows of h_0 that a rank reads, and of h_1 that it computes or sums a part of.

        Of other rows there are as many as it owns."""
        return self._ids[h][rank] if h in self._ids else super().rows(rank, h)

    def row_counts(self, h: int) -> np.ndarray:
        if h < 2:
            return np.array([self.rows(rank, h).size for rank in range(self.ranks)])
        return self._alone[h].rows

    def meets(self, layer: int) -> bool:
        return layer == 2

    def asks(self, layer: int) -> bool:
        return self.meets(layer) and self.pushed is None

    def _counted(self, layer: int) -> LayerFacts:
        if layer == 1:
            return self.first
        facts = self._alone[layer]
        if not self.meets(layer):
            return facts
        return replace(facts, halo=self.given, made=self.row_counts(1), added=self.added)


class ByDestinations(AloneAbove):
    """Owners compute the rows of h_1 that any rank of the group needs, and read all their sources.

    h_1 crosses, and nothing else does."""

    def _cut(self, whole: MiniBatch, needed: Sequence[np.ndarray]) -> None:
        assert whole.member is not None
        ranks, groups = range(whole.ranks), np.array(whole.servers)
        edges = [whole._edges(rank, 1)[0] for rank in ranks]
        self._ids = {0: [np.union1d(whole.rows(rank, 1), edges[rank]) for rank in ranks]}
        self.given = np.zeros((whole.ranks, whole.ranks), dtype=np.int64)
        for rank, ids in enumerate(needed):
            peers = np.flatnonzero(groups == groups[rank])
            self.given[peers, rank] = np.bincount(whole.member[ids], minlength=peers.size)
        np.fill_diagonal(self.given, 0)
        drawn, nothing = np.array([ids.size for ids in edges]), np.zeros_like(self.given)
        self.first = LayerFacts(whole.row_counts(1), self.row_counts(0), drawn, nothing)


class BySources(AloneAbove):
    """Owners sum layer 1 over the edges whose sources are theirs, of all rows that anyone needs.

    A rank draws all edges of the rows of h_1 that it needs, and pushes each edge to its source's
    owner. Partial sums come back, one of each row and owner of some of its sources or of itself."""

    def sampled(self, layer: int) -> np.ndarray:
        return self._alone[layer].edges

    def _cut(self, whole: MiniBatch, needed: Sequence[np.ndarray]) -> None:
        assert whole.member is not None
        partial = [np.zeros(0, np.int64)] * whole.ranks  # rows of h_1 that each sums a part of
        summed, own, added = np.zeros((3, whole.ranks), dtype=np.int64)
        sends, pushed = np.zeros((2, whole.ranks, whole.ranks), dtype=np.int64)
        for group in set(whole.servers):
            ranks = np.flatnonzero(np.equal(whole.servers, group))
            found = whole._frontiers[group]
            rows, (indptr, places) = found.nodes[1], found.edges[0]
            # edges of each row by their sources' owner [rows, members]
            edges = np.zeros((rows.size, ranks.size), dtype=np.int64)
            reader = np.repeat(np.arange(rows.size), np.diff(indptr))
            np.add.at(edges, (reader, whole.member[whole.graph.indices[places]]), 1)
            parts = (edges > 0) | (whole.member[rows][:, None] == np.arange(ranks.size))
            own[ranks] = np.bincount(whole.member[rows], minlength=ranks.size)
            summed[ranks] = edges.sum(0)
            for place, rank in enumerate(ranks.tolist()):
                partial[rank] = rows[parts[:, place]]
                of_others, its = ranks != rank, np.isin(rows, needed[rank])
                given, drawn = parts[its].sum(0), edges[its].sum(0)
                sends[ranks, rank] = given * of_others
                pushed[rank, ranks] = (PUSHED + 2 * given + drawn) * of_others
                added[rank] = given.sum()
        self._ids, self.given, self.added, self.pushed = {1: partial}, sends, added, pushed
        read, made, nothing = whole.row_counts(0), self.row_counts(1), np.zeros_like(sends)
        self.first = LayerFacts(made, read, summed, nothing, away=made - own)


SPLIT = {"first": ByDestinations, "source": BySources}  # how layer 1 alone may be split


def shares(items: Ids, groups: int) -> list[Ids]:
    """A batch's items, split nearly equally over the groups."""
    return np.array_split(items, groups)


def frontiers(
    graph: Graph, workload: Workload, items: Ids, groups: int, epoch: int, number: int
) -> list[Frontier]:
    """The frontiers of a batch, around the seeds of each group's share of its items."""
    seeds = [seeds_in(graph, workload, part, epoch, number) for part in shares(items, groups)]
    asked = workload.fanouts, workload.seed, epoch, number
    return [frontier(graph, some, *asked) for some in seeds]


class Batches:
    """A workload's mini-batches, and how ranks share them.

    The first `known` batches are those that training draws, in the same order. A later batch is
    taken to be like an earlier one. At most MOST_BATCHES are known, fewer if they are large.

    split: 'all' layers are split in a group, or layer 1 alone (`SplitBelow`): as the 'first', by
    destinations, or by 'source'."""

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
        self._epoch, self._items = -1, list[Ids]()  # of the epoch that was asked for last
        self.steps = per_epoch(workload, graph.stats)
        # they are not kept: ranks that train draw their own
        edges = sum(places.size for found in self._found(0) for _, places in found.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

    @property
    def splits(self) -> bool:
        """Whether ranks share a batch."""
        return len(self.groups) > len(set(self.groups))

    def _found(self, step: int) -> list[Frontier]:
        epoch, number = divmod(step, self.steps)
        items, groups = self.items_in(epoch)[number], len(set(self.groups))
        return frontiers(self.graph, self.workload, items, groups, epoch, number)

    def _drawn(self, step: int) -> MiniBatch:
        """The batch of a known step."""
        shared = self.groups, self.member, self.first_varying
        return MiniBatch(self.graph, self._found(step), *shared, self._scored(step))

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

    def at(self, step: int) -> MiniBatch:
        """The batch of a step, counted over epochs."""
        step %= self.known
        if step not in self._made:
            self._made[step] = self._drawn(step)
        return self._made[step]

    def first(self) -> list[MiniBatch]:
        """The batches of the first epoch that are known."""
        return [self.at(step) for step in range(min(self.steps, self.known))]


class SplitBelow(Batches):
    """The same batches, of which groups split layer 1 alone, in one of the ways of `SPLIT`."""

    def __init__(self, whole: Batches, split: str) -> None:
        self.__dict__.update(whole.__dict__)
        self.whole, self.split, self._made = whole, split, {}

    def _drawn(self, step: int) -> MiniBatch:
        whole = self.whole.at(step)
        if not whole.splits:
            return whole
        asked = self.workload.fanouts, self.workload.seed, *divmod(step, self.steps)
        alone = [frontier(self.graph, whole.own(rank), *asked) for rank in range(whole.ranks)]
        each = MiniBatch(self.graph, alone, (*range(whole.ranks),), None, self.first_varying)
        return SPLIT[self.split](whole, each)
