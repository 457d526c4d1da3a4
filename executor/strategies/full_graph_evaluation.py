"""Evaluation of mini-batch strategies on the full graph."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.links import compared
from gnnplan.executor.layers.models import Net
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import graph_parallel
from gnnplan.executor.strategies.base import Scorer as Scorer
from gnnplan.planner.graph.sampling import Pairs, fetched, held_out_pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions


class FullGraphEvaluation:
    """One rank's part of the full graph, with halo exchange, and the targets that score it."""

    def __init__(self, rank: Rank, problem: Problem, net: Net) -> None:
        layout = problem.layout()
        assert isinstance(layout, Layout)
        self.worker = graph_parallel.worker_on(rank, problem, layout, ExchangeOptions(), net=net)
        self.targets: Scorer = self.worker.targets
        if problem.workload.task == "link":
            self.targets = HeldOut(rank, problem, layout)


class HeldOut:
    """Link prediction's held-out edges, scored with rows of the full graph.

    Every rank scores the held-out edges whose heads it owns. It fetches the rows of their other
    ends, which all ranks know beforehand.
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
        """Count the comparisons that rows [own, H] get right, and all, float64 [3, 2, 1].

        All ranks call it. The first row, of training, is zero.
        """
        rows = torch.cat([rows, self.exchange.forward(self.exchange.pack(rows))])
        training = rows.new_zeros(2, dtype=torch.float64)
        return torch.stack([training, *(compared(rows, pairs) for pairs in self.parts)])[:, :, None]
