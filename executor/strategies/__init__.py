"""Training steps of all strategies with torch: one file per family of strategies.

Files have the names of planner/strategies/. Spans have the labels of the planner's schedules.

    base.py              the interface of a strategy to the training loop
    graph_parallel.py    graph parallel, PipeGCN, bns: halos exchanged before each layer;
                         features, fetched at set-up
    layerwise.py         their training step, forward and backward; errors of its gradient
    halo.py              their halo exchange: fresh, cached, stale and packed rows
    feature_parallel.py  sums over edges on columns of all rows
    tensor3d.py          a tile of every tensor on each rank of a grid
    offload.py           chunks that pass the device, with vertex data in the server's memory
    granndis.py          graph parallel over deeper layouts, and cooperative batches
    minibatch.py         data parallel and GSplit; their evaluation on the full graph
    p3.py                layer 1 by columns of the features
    gnnpipe.py           layers in a pipeline, the graph in chunks

This room may import layers/, ranks/ and minibatch/ of the executor. A strategy's planner half names
its module here (`Strategy.executor`), and only that module is imported.
"""

from __future__ import annotations

from importlib import import_module

from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.base import Worker as Worker
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy


def open_worker(rank: Rank, problem: Problem, strategy: Strategy, first: int = 0) -> Worker:
    """Open a rank's part of a strategy.

    first: the first step to train; if it is not 0, call `load` before.
    """
    module = import_module(strategy.executor)
    worker: Worker = module.open_worker(rank, problem, strategy, first)
    return worker
