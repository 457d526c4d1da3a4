"""GraNNDis: graph parallel over a Layout whose groups recompute hidden layers.

With cooperative batches, each batch has its own worker (layerwise.py).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import weight_of
from gnnplan.executor.minibatch.share import share_of
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import Scorer
from gnnplan.executor.strategies.graph_parallel import ConstantRows, worker_on
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis
from gnnplan.planner.strategies.layerwise.exchange import buckets_of
from gnnplan.planner.vocabulary.schedule import Label


def open_worker(rank: Rank, problem: Problem, strategy: GraNNDis, first: int) -> Worker | CoBatches:
    """Open this rank's part of the strategy."""
    layout = strategy.layout(problem)
    assert isinstance(layout, Layout)
    if strategy.steps(problem) > 1:
        return CoBatches(rank, problem, strategy, layout)
    options = strategy.exchange_options
    return worker_on(rank, problem, layout, options, strategy.degrees, trim=strategy.trim)


class CoBatches(base.Worker):
    """A rank that trains on several batches per epoch.

    Constant rows of the whole layout stay in the server's memory. The constant rows of a batch are
    loaded before its step and dropped after it, while the batch's edges stay on the device. The
    edges of evaluation batches are made for each evaluation.
    """

    net: Net

    def __init__(self, rank: Rank, problem: Problem, strategy: GraNNDis, layout: Layout) -> None:
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.options = strategy.exchange_options
        self.buckets = buckets_of(problem, self.options.buckets, self.options.narrow)
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        self.constants = ConstantRows(rank, problem, layout, self.net, strategy.degrees)
        self.batches = list[tuple[Worker, Layout]]()
        for batch in strategy.layouts(problem):
            assert isinstance(batch, Layout)
            self.batches.append((self._open(batch), batch))
        self.evaluation = _evaluation_batches(problem, layout, strategy.steps(problem))

    def _open(self, batch: Layout) -> Worker:
        edges, workload = self.net.edges, self.problem.workload
        share = share_of(batch, self.rank.rank, edges, workload, self.strategy.degrees)
        given = self.rank, self.problem, share, self.options, self.net
        return Worker(*given, batch=share.total)

    def _load(self, worker: Worker, batch: Layout, step: int) -> None:
        """Give a batch's worker its constant rows."""
        loaded = self.constants.load(batch)
        nbytes = sum(rows.nbytes for rows in loaded)
        with self.rank.recorder.span(Label("load", step), "copy", nbytes):
            worker.features, worker.cached = self.constants.on_device(loaded)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of one batch.

        Returns this rank's part of the batch's contribution to the mean loss over all training
        vertices, and its logits [targets, C].
        """
        worker, batch = self.batches[self.strategy.turn(self.problem, step)]
        worker.learner = self.learner
        self._load(worker, batch, step)
        loss, logits = worker.step(step)
        worker.features, worker.cached = torch.empty(0), None
        self.scorers = [worker.targets]
        total = weight_of(self.problem.data, self.problem.workload)
        return loss * (worker.targets.total / total), logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Return logits without dropout, computed batch after batch.

        The neighbourhoods are whole, so the logits equal the full graph's, in a batch's memory.
        """
        scorers, logits = list[Scorer](), []
        for batch in self.evaluation:
            worker = self._open(batch)
            self._load(worker, batch, step)
            logits.append(worker.evaluate(step))
            scorers.append(worker.targets)
        self.scorers = scorers
        return torch.cat(logits)


def _evaluation_batches(problem: Problem, layout: Layout, batches: int) -> list[Layout]:
    """Return batches of validation and test vertices, no larger per server than training's."""
    graph = layout.graph
    rows = graph.val | graph.test
    server_of = np.asarray(layout.servers)[layout.owner]
    count = 1
    for server in set(layout.servers):
        on_server = server_of == server
        targets_per_batch = -(-int(graph.train[on_server].sum()) // batches)
        count = max(count, -(-int(rows[on_server].sum()) // targets_per_batch))
    batch_of = layout.drawn(rows, count, problem.workload.seed)
    return [layout.needed(batch_of == b, layout.layers) for b in range(count)]
