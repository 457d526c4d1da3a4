"""GraNNDis: graph parallel over a Layout whose groups recompute hidden layers.

With cooperative batches there is a worker of its own (layerwise.py) for each batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import weight_of
from gnnplan.executor.minibatch.share import share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import Scored
from gnnplan.executor.strategies.constant_rows import ConstantRows
from gnnplan.executor.strategies.graph_parallel import worker_on
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis
from gnnplan.planner.strategies.layerwise.buckets import buckets_of
from gnnplan.planner.vocabulary.schedule import Label


def open_worker(rank: Rank, problem: Problem, strategy: GraNNDis, first: int) -> Worker | CoBatches:
    """This rank's part of the strategy."""
    layout = strategy.layout(problem)
    assert isinstance(layout, Layout)
    if strategy.steps(problem) > 1:
        return CoBatches(rank, problem, strategy, layout)
    options = strategy.exchange_options
    return worker_on(rank, problem, layout, options, strategy.degrees, trim=strategy.trim)


class CoBatches(base.Worker):
    """Several batches per epoch over the same weights.

    Constant rows of the whole layout stay in the server's memory. Those of a batch are loaded
    before its step and dropped after it; its edges stay on the device. The edges of evaluation are
    made for each evaluation.
    """

    net: Net

    def __init__(self, rank: Rank, problem: Problem, strategy: GraNNDis, layout: Layout) -> None:
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.options = strategy.exchange_options
        self.buckets = buckets_of(problem, self.options.buckets, self.options.narrow)
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        self.kept = ConstantRows(rank, problem, layout, self.net, strategy.degrees)
        self.batches = []
        for batch in strategy.layouts(problem):
            assert isinstance(batch, Layout)
            self.batches.append((self._open(batch), self.kept.places(batch)))
        self.evaluation = _evaluation(problem, layout, strategy.steps(problem))

    def _open(self, batch: Layout) -> Worker:
        edges, workload = self.net.edges, self.problem.workload
        share = share_of(batch, self.rank.rank, edges, workload, self.strategy.degrees)
        return Worker(
            self.rank,
            self.problem,
            share,
            self.options,
            self.net,
            batch=share.total,
        )

    def _load(self, worker: Worker, places: Tensor, step: int) -> None:
        """Give a batch's worker its constant rows."""
        chosen = self.kept.at(places)
        with self.rank.recorder.span(
            Label("load", step), "copy", sum(rows.nbytes for rows in chosen)
        ):
            worker.features, worker.cached = self.kept.on_device(chosen)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of one batch.

        Returns this rank's part of what the batch adds to the mean loss over all training vertices,
        and its logits [targets, C].
        """
        worker, places = self.batches[self.strategy.turn(self.problem, step)]
        worker.learner = self.learner
        self._load(worker, places, step)
        loss, logits = worker.step(step)
        worker.features, worker.cached = torch.empty(0), None
        self.scored_by = [worker.targets]
        everything = weight_of(self.problem.data, self.problem.workload)
        return loss * (worker.targets.total / everything), logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits without dropout, batch after batch.

        The neighbourhoods are whole, so the numbers are those of the full graph, in a batch's
        memory.
        """
        scored_by, logits = list[Scored](), []
        for batch in self.evaluation:
            worker = self._open(batch)
            self._load(worker, self.kept.places(batch), step)
            logits.append(worker.evaluate(step))
            scored_by.append(worker.targets)
        self.scored_by = scored_by
        return torch.cat(logits)


def _evaluation(problem: Problem, layout: Layout, batches: int) -> list[Layout]:
    """Validation and test vertices, in batches no larger on any server than those of training."""
    graph = layout.graph
    rows = graph.val | graph.test
    server_of = np.asarray(layout.servers)[layout.owner]
    count = 1
    for server in set(layout.servers):
        here = server_of == server
        in_a_batch = -(-int(graph.train[here].sum()) // batches)
        count = max(count, -(-int(rows[here].sum()) // in_a_batch))
    batch_of = layout.drawn(rows, count, problem.workload.seed)
    return [layout.batch(batch_of == b) for b in range(count)]
