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
from scipy.special import pdtr

from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.layout import LayerFacts, Layout
from gnnplan.planner.sampling import Frontier, Ids, frontier, seeds_of
from gnnplan.planner.specs import ALL, Workload

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
        parts = shares(self._seeds[epoch][number], len(set(self.groups)))
        return [frontier(self.graph, part, w.fanouts, w.seed, epoch, number) for part in parts]

    def at(self, step: int) -> MiniBatch:
        step = step if step < self.known else step % self.known
        if step not in self._made:
            self._made[step] = MiniBatch(self.graph, self._drawn(step), self.groups, self.member, self.first_varying)
        return self._made[step]

    def first(self) -> list[MiniBatch]:
        """Those of the first epoch that are known."""
        return [self.at(step) for step in range(min(self.steps, self.known))]


class EstimatedBatch(MiniBatch):
    """A batch of data parallel on a graph known by statistics only: counts, and no ids. `nodes[h]` rows and `edges[l-1]` edges of each
    rank [ranks], as expected_frontier has them."""

    def __init__(self, nodes: np.ndarray, edges: np.ndarray, first_varying: int) -> None:
        self.nodes, self.edges, self.first_varying = nodes, edges, first_varying
        self.layers = self.inside = len(edges)
        self.depth, self.ranks = self.layers - first_varying, nodes.shape[1]
        self.servers = tuple(range(self.ranks))

    def rows(self, rank: int, h: int) -> np.ndarray:
        """As many as there are: whose they are is not known."""
        return np.arange(self.nodes[h, rank])

    def kind(self, layer: int) -> object:
        return layer

    def facts(self, layer: int) -> LayerFacts:
        nothing = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        return LayerFacts(self.nodes[layer], self.nodes[layer - 1], self.edges[layer - 1], nothing)


def expected_frontier(stats: GraphStats, seeds: np.ndarray, fanouts: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows [L + 1, ranks] and edges [L, ranks] that so many random seeds [ranks] need on a uniform random graph of this size.

    Its degrees follow Poisson's law with mean d = E / N. A drawn edge that nobody knew leads anywhere; one that was drawn before, or
    leads back to the row that reached its reader, leads to a row that is there already. When a share q of the unknown edges has been
    drawn, a share exp(-d q) of the vertices has not been reached, and those have degrees of mean d (1 - q): a vertex with many neighbours
    is reached first. Within 5 % of uniform random graphs; where two or three neighbours each are most of what there is, a little too
    large. Skewed and clustered graphs have smaller frontiers, since many of their edges lead to the same vertices.
    """
    n, mean = float(stats.vertices), stats.edges / stats.vertices

    def taken(fanout: int, mean: np.ndarray | float) -> np.ndarray:
        """E[min(degree, fanout)] = sum over j < fanout of P(degree > j)."""
        if fanout == ALL:
            return np.asarray(mean)
        return np.asarray(sum(1.0 - pdtr(j, mean) for j in range(fanout)))

    unreached, left, known = n - seeds.astype(float), np.full(seeds.size, mean), np.zeros(seeds.size)
    nodes, edges = [seeds.astype(float)], []
    for fanout in fanouts:
        drawn = n * taken(fanout, mean) - unreached * taken(fanout, left)
        unknown, everywhere = n * mean - unreached * left - known, np.maximum(stats.edges - known, 1.0)  # edges of the rows, of all
        new = drawn * unknown / np.maximum(unknown + known, 1.0)
        known = known + 2 * new - new * new / everywhere  # both ways, once where both were drawn
        share = new / everywhere
        unreached, left = unreached * np.exp(-left * share), left * (1.0 - share)
        edges.append(drawn)
        nodes.append(n - unreached)
    return np.rint(nodes[::-1]).astype(np.int64), np.rint(edges[::-1]).astype(np.int64)


class EstimatedBatches(Batches):
    """Batches of data parallel on a graph known by statistics only: those of an epoch are alike but for the last."""

    def __init__(self, stats: GraphStats, workload: Workload, ranks: int, first_varying: int) -> None:
        self.stats, self.workload, self.groups, self.first_varying = stats, workload, tuple(range(ranks)), first_varying
        self.steps = per_epoch(workload, stats.train_vertices)
        self.known = min(self.steps, MOST_BATCHES)
        self._made = {}

    def at(self, step: int) -> MiniBatch:
        step %= self.steps
        size = min(self.workload.batch, self.stats.train_vertices - step * self.workload.batch)
        if size not in self._made:
            seeds = np.array([share.size for share in shares(np.arange(size), len(self.groups))])
            self._made[size] = EstimatedBatch(*expected_frontier(self.stats, seeds, self.workload.fanouts), self.first_varying)
        return self._made[size]
