"""The operations of every strategy with torch: one file or folder per family.

They are named as in planner/strategies/, and record their spans under the labels of its schedules.

    base.py             what each of them offers the training loop
    graph_parallel.py   graph parallel, PipeGCN, bns: halos exchanged before each layer
    layerwise.py        its step, forward and backward
    halo.py             its exchanges: which rows are fresh, which stay or lag; packed rows
    constant_rows.py    its features, fetched at set-up
    gradient_errors.py  how far a step's gradient is from the exact one
    feature_parallel.py sums over edges on columns of all rows
    tensor3d.py         a tile of every tensor on each rank of a grid
    offload.py          devices go chunk by chunk, with vertex data in servers' memories
    granndis.py         graph parallel over deeper layouts, and cooperative batches
    minibatch.py        data parallel and GSplit
    whole.py            the full graph, on which mini-batch strategies evaluate
    p3/                 layer 1 by columns of the features
    gnnpipe/            layers in a pipeline, the graph in chunks

This room may import layers/, ranks/ and minibatch/ of the executor. A family's planner half names
the module here that trains it (`Strategy.executor`); only that one is imported.
"""

from __future__ import annotations

from importlib import import_module

from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.base import Worker as Worker
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy


def open_worker(rank: Rank, problem: Problem, strategy: Strategy, first: int = 0) -> Worker:
    """The rank's part of a strategy.

    first: the step that it begins with; if that is not 0, `load` must be called before.
    """
    module = import_module(strategy.executor)
    worker: Worker = module.open_worker(rank, problem, strategy, first)
    return worker
