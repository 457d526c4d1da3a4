"""The operations of every strategy with torch: one file or folder per family.

They are named as in planner/strategies/, and record their spans under the labels of its schedules.

    graph_parallel.py   layer after layer over a layout, halos exchanged before each
    constant_rows.py    its features, fetched at set-up
    granndis.py         graph parallel over deeper layouts, and cooperative batches
    minibatch.py        data parallel and GSplit
    p3/                 layer 1 by columns of the features
    gnnpipe/            layers in a pipeline, the graph in chunks

This room may import layers/, ranks/ and minibatch/ of the executor.
"""

from __future__ import annotations

from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import gnnpipe, granndis, graph_parallel, minibatch, p3
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import (
    P3,
    DataParallel,
    GNNPipe,
    GraNNDis,
    GraphParallel,
    GSplit,
    Strategy,
)

Worker = graph_parallel.Worker | granndis.CoBatches | minibatch.Worker | p3.Worker | gnnpipe.Worker


def open_worker(rank: Rank, problem: Problem, strategy: Strategy, first: int = 0) -> Worker:
    """The rank's part of a strategy.

    first: the step that it begins with; if that is not 0, `load` must be called before.
    """
    if isinstance(strategy, GNNPipe):
        return gnnpipe.Worker(rank, problem, strategy)
    if isinstance(strategy, GraNNDis):
        return granndis.open_worker(rank, problem, strategy)
    if isinstance(strategy, P3):
        return p3.Worker(rank, problem, strategy, first)
    if isinstance(strategy, (DataParallel, GSplit)):
        return minibatch.Worker(rank, problem, strategy, first)
    assert isinstance(strategy, GraphParallel)
    layout = problem.layout()
    assert isinstance(layout, Layout)
    return graph_parallel.open_worker(
        rank, problem, layout, strategy.exchange_options, strategy.gamma
    )
