"""Link prediction's evaluation: held-out edges are scored with rows of the full graph.

Every rank has the rows of its own vertices. It scores the held-out edges that begin at one of them,
and fetches the rows of the other ends, which everybody knows beforehand.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.links import compared
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.graph.links import Pairs, fetched, held_out_pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem


class HeldOut:
    """One rank's held-out edges, and the exchange of the rows that they end at."""

    def __init__(self, rank: Rank, problem: Problem, layout: Layout) -> None:
        graph, negatives, me = problem.data, problem.workload.negatives, rank.rank
        self.size = layout.own(me).size  # rows
        parts = [held_out_pairs(graph, part, negatives) for part in range(len(graph.held_out))]
        owner = layout.owner
        place = np.empty(graph.stats.vertices, dtype=np.int64)  # of a vertex among its owner's rows
        for peer in range(layout.ranks):
            place[layout.own(peer)] = np.arange(layout.own(peer).size)
        wanted = [fetched(parts, owner, peer) for peer in range(layout.ranks)]
        self.exchange = Exchange(
            rank,
            [place[ids[owner[ids] == me]] for ids in wanted],
            np.bincount(owner[wanted[me]], minlength=layout.ranks),
        )
        place[wanted[me]] = layout.own(me).size + np.arange(wanted[me].size)
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
