"""The full graph, on which strategies that train on mini-batches evaluate."""

from __future__ import annotations

from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.held_out import HeldOut
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import graph_parallel
from gnnplan.executor.strategies.base import Scored as Scored
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
