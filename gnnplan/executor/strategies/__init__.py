"""One file per family, named as in planner/strategies: the same operations for real."""

from __future__ import annotations

from gnnplan.executor.strategies import gnnpipe, granndis, graph_parallel, minibatch, p3
from gnnplan.executor.worker import Rank
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.strategies import P3, DataParallel, GNNPipe, GraNNDis, GraphParallel, GSplit, Strategy


def open_worker(rank: Rank, job: Job, strategy: Strategy, first: int = 0) -> graph_parallel.Worker | gnnpipe.Worker:
    """The rank's part of a strategy. `first`: the step that it begins with, after `load` if it is not 0."""
    if isinstance(strategy, GNNPipe):
        return gnnpipe.Worker(rank, job, strategy)
    if isinstance(strategy, GraNNDis):
        return granndis.open_worker(rank, job, strategy)
    if isinstance(strategy, P3):
        return p3.Worker(rank, job, strategy, first)
    if isinstance(strategy, (DataParallel, GSplit)):
        return minibatch.Worker(rank, job, strategy, first)
    assert isinstance(strategy, GraphParallel)
    layout = job.layout()
    assert isinstance(layout, Layout)
    return graph_parallel.open_worker(rank, job, layout, strategy.manner, strategy.gamma)
