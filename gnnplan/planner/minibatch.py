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
from gnnplan.planner.sampling import Frontier


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

    def preloaded(self) -> np.ndarray:
        return np.zeros((self.ranks, self.ranks), dtype=np.int64)  # every batch loads its own rows
