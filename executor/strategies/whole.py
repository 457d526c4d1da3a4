"""The full graph, on which strategies that train on mini-batches evaluate."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.links import compared
from gnnplan.executor.layers.models import Net
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import graph_parallel
from gnnplan.executor.strategies.base import Scored as Scored
from gnnplan.planner.graph.sampling import Pairs, fetched, held_out_pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions


class Whole:
    """One rank's part of the full graph, with halos exchanged, and what its rows are scored by."""

    def __init__(self, rank: Rank, problem: Problem, net: Net) -> None:
        layout = problem.layout()
        assert isinstance(layout, Layout)
        self.worker = graph_parallel.worker_on(rank, problem, layout, ExchangeOptions(), net=net)
        self.targets: Scored = self.worker.targets
        if problem.workload.task == "link":
            self.targets = HeldOut(rank, problem, layout)


class HeldOut:
    """Link prediction's held-out edges, scored with rows of the full graph.

    Every rank has the rows of its own vertices. It scores the held-out edges that begin at one of
    them, and fetches the rows of the other ends, which everybody knows beforehand.
    """

    def __init__(self, rank: Rank, problem: Problem, layout: Layout) -> None:
        graph, negatives, me = problem.data, problem.workload.negatives, rank.rank
        own, owner = layout.own(me), layout.owner
        self.size = own.size  # rows
        parts = [held_out_pairs(graph, part, negatives) for part in range(len(graph.held_out))]
        wanted = [fetched(parts, owner, peer) for peer in range(layout.ranks)]
        self.exchange = Exchange.of_ids(rank, wanted, owner, own)
        place = np.empty(owner.size, dtype=np.int64)
        place[np.concatenate([own, wanted[me]])] = np.arange(own.size + wanted[me].size)
        self.parts = []
        for pairs in parts:
            mine = owner[pairs.heads] == me
            self.parts.append(Pairs(place[pairs.heads[mine]], place[pairs.tails[mine]]))

    def counts(self, rows: Tensor) -> Tensor:
        """Comparisons of own rows [own, H], right and all, float64 [3, 2, 1]; all ranks call it.

        Those of training, the first row, are none.
        """
        rows = torch.cat([rows, self.exchange.forward(self.exchange.pack(rows))])
        none = rows.new_zeros(2, dtype=torch.float64)
        return torch.stack([none, *(compared(rows, pairs) for pairs in self.parts)])[:, :, None]
