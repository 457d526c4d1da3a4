"""Mini-batches: which rank computes which rows of a batch. A batch is a Layout of sampled edges.

    split (GSplit): one group of all ranks; ranks exchange halos before every layer
        rank 0    its seeds | its rows of h_1 | its rows of h_0
        rank 1    its seeds | its rows of h_1 | its rows of h_0

    data parallel: a group per rank; no halo, and two ranks may compute the same row
        rank 0    its seeds | all they need of h_1 | all they need of h_0
        rank 1    its seeds | all they need of h_1 | all they need of h_0

    hybrid: a group per server, split inside it

A group has its own seeds, and a frontier around them (graph/sampling.py). In a group every vertex
has one owner. The owner alone samples its neighbours, loads its features and computes its rows, and
sends them to the ranks that need them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Frontier, Ids, frontier, seeds_of
from gnnplan.planner.ownership.layout import Layout

MOST_EDGES = 20_000_000  # sampled in all batches that are looked at one by one
MOST_BATCHES = 64  # that are looked at one by one


class MiniBatch(Layout):
    """The rows of every rank in one mini-batch.

    frontiers: of each group. groups: the group of each rank. member: which member of a group
    (0 .. size - 1) owns each vertex, int [N]; None where every group is one rank."""

    def __init__(
        self,
        graph: Graph,
        frontiers: Sequence[Frontier],
        groups: tuple[int, ...],
        member: np.ndarray | None,
        first_varying: int,
    ) -> None:
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

    def meets(self, layer: int) -> bool:
        return self.ranks > len(set(self.servers))

    def preloaded(self) -> np.ndarray:
        return np.zeros((self.ranks, self.ranks), dtype=np.int64)  # every batch loads its own rows


def per_epoch(workload: Workload, train: int) -> int:
    """Batches of an epoch with `train` training vertices."""
    return -(-train // workload.batch)


def shares(seeds: Ids, groups: int) -> list[Ids]:
    """A batch's seeds, split nearly equally over the groups."""
    return np.array_split(seeds, groups)


def frontiers(
    graph: Graph, workload: Workload, seeds: Ids, groups: int, epoch: int, number: int
) -> list[Frontier]:
    """The frontiers of a batch, around each group's share of its seeds."""
    return [
        frontier(graph, part, workload.fanouts, workload.seed, epoch, number)
        for part in shares(seeds, groups)
    ]


class Batches:
    """A workload's mini-batches, and how ranks share them.

    The first `known` batches are those that training draws, in the same order. A later batch is
    taken to be like an earlier one. At most MOST_BATCHES are known, fewer if they are large."""

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
        self.steps = per_epoch(workload, int(graph.train.sum()))
        self._made: dict[int, MiniBatch] = {}
        self._seeds: dict[int, list[Ids]] = {}  # by epoch
        edges = sum(places.size for found in self._drawn(0) for _, places in found.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

    def _drawn(self, step: int) -> list[Frontier]:
        workload, (epoch, number) = self.workload, divmod(step, self.steps)
        if epoch not in self._seeds:
            self._seeds[epoch] = seeds_of(self.graph, workload.batch, workload.seed, epoch)
        seeds = self._seeds[epoch][number]
        return frontiers(self.graph, workload, seeds, len(set(self.groups)), epoch, number)

    def at(self, step: int) -> MiniBatch:
        """The batch of a step, counted over epochs."""
        step = step if step < self.known else step % self.known
        if step not in self._made:
            self._made[step] = MiniBatch(
                self.graph, self._drawn(step), self.groups, self.member, self.first_varying
            )
        return self._made[step]

    def first(self) -> list[MiniBatch]:
        """The batches of the first epoch that are known."""
        return [self.at(step) for step in range(min(self.steps, self.known))]
