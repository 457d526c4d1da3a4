"""Which rank computes which rows of a mini-batch: a Layout of sampled edges.

    split (GSplit): one group                      data parallel: a group per rank
    rank 0   seeds | its rows of h_1 | of h_0      rank 0   its seeds | all they need of h_1 | of h_0      no halo: rows that two
    rank 1   seeds | its rows of h_1 | of h_0      rank 1   its seeds | all they need of h_1 | of h_0      ranks need both compute
             halos between them at every layer
    hybrid: a group per server, split inside it

A group has its own seeds, and a frontier around them (sampling.py). In a group every vertex has one owner, who alone samples its
neighbours, loads its features and computes its rows; the others are sent them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gnnplan.planner.graph import Graph
from gnnplan.planner.layout import Layout
from gnnplan.planner.sampling import Frontier, Ids, frontier, seeds_of
from gnnplan.planner.specs import Workload

MOST_EDGES = 20_000_000  # drawn to look at batches one by one
MOST_BATCHES = 64


class MiniBatch(Layout):
    """`frontiers`: of each group; `groups`: the group of each rank; `member`: int [N], who in a group owns a vertex (0 .. size - 1),
    None where every group is one rank."""

    def __init__(self, graph: Graph, frontiers: Sequence[Frontier], groups: tuple[int, ...], member: np.ndarray | None,
                 first_varying: int) -> None:  # fmt: skip
        self.graph, self.servers, self.ranks, self.first_varying = graph, groups, len(groups), first_varying
        self.layers = self.inside = len(frontiers[0].edges)
        self.depth = self.layers - first_varying
        self._frontiers, self._allowed = frontiers, {}
        self._share: list[np.ndarray] = []  # per rank: places of its rows among its group's nodes[0]
        self._members = []
        self.owner = np.full(graph.stats.vertices, -1, dtype=np.int32)  # of the seeds
        for rank, group in enumerate(groups):
            nodes = frontiers[group].nodes
            hop = np.repeat(np.arange(self.layers + 1), np.diff([0, *(rows.size for rows in nodes[::-1])])).astype(np.int16)
            mine = np.arange(nodes[0].size) if member is None else np.flatnonzero(member[nodes[0]] == groups[:rank].count(group))
            self._share.append(mine)
            self._members.append((nodes[0][mine], hop[mine]))
            self.owner[self.own(rank)] = rank
        self._forget()

    def _drawn(self, layer: int) -> int:
        return layer  # every layer draws anew

    def _edges(self, rank: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        indptr, places = self._frontiers[self.servers[rank]].edges[layer - 1]
        mine = self._share[rank][: self.rows(rank, layer).size]
        degree = np.diff(indptr)[mine]
        starts = np.repeat(indptr[mine] - np.concatenate([[0], np.cumsum(degree)])[:-1], degree)
        return self.graph.indices[places[starts + np.arange(starts.size)]], degree

    def crossing(self, layer: int) -> np.ndarray:
        """Edges of layer l whose source another rank owns [ranks]."""
        blocks = (self.block(rank, layer)[1] >= self.piece(rank, layer).local for rank in range(self.ranks))
        return np.array([np.count_nonzero(remote) for remote in blocks])

    def meets(self, layer: int) -> bool:
        return self.ranks > len(set(self.servers))

    def preloaded(self) -> np.ndarray:
        return np.zeros((self.ranks, self.ranks), dtype=np.int64)  # every batch loads its own rows


def per_epoch(workload: Workload, train: int) -> int:
    """Batches of an epoch over so many training vertices."""
    return -(-train // workload.batch)


def shares(seeds: Ids, groups: int) -> list[Ids]:
    """A batch's seeds, nearly equally many for each group."""
    return np.array_split(seeds, groups)


def frontiers(graph: Graph, workload: Workload, seeds: Ids, groups: int, epoch: int, number: int) -> list[Frontier]:
    """Of a batch, around each group's share of its seeds."""
    return [frontier(graph, part, workload.fanouts, workload.seed, epoch, number) for part in shares(seeds, groups)]


class Batches:
    """A workload's mini-batches as its ranks share them; the first ones exactly as training draws them, in their order. Beyond
    MOST_BATCHES, or fewer large ones, an earlier one is taken for like a later one."""

    def __init__(self, graph: Graph, workload: Workload, groups: tuple[int, ...], member: np.ndarray | None, first_varying: int) -> None:
        self.graph, self.workload, self.groups, self.member, self.first_varying = graph, workload, groups, member, first_varying
        self.steps = per_epoch(workload, int(graph.train.sum()))
        self._made: dict[int, MiniBatch] = {}
        self._seeds: dict[int, list[Ids]] = {}  # by epoch
        edges = sum(places.size for found in self._drawn(0) for _, places in found.edges)
        self.known = max(1, min(MOST_BATCHES, MOST_EDGES // max(edges, 1)))

    def _drawn(self, step: int) -> list[Frontier]:
        w, (epoch, number) = self.workload, divmod(step, self.steps)
        if epoch not in self._seeds:
            self._seeds[epoch] = seeds_of(self.graph, w.batch, w.seed, epoch)
        return frontiers(self.graph, w, self._seeds[epoch][number], len(set(self.groups)), epoch, number)

    def at(self, step: int) -> MiniBatch:
        step = step if step < self.known else step % self.known
        if step not in self._made:
            self._made[step] = MiniBatch(self.graph, self._drawn(step), self.groups, self.member, self.first_varying)
        return self._made[step]

    def first(self) -> list[MiniBatch]:
        """Those of the first epoch that are known."""
        return [self.at(step) for step in range(min(self.steps, self.known))]
