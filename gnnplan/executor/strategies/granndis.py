"""GraNNDis for real: graph parallel over a Layout whose groups recompute hidden layers; cooperative batches, a Worker each."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.checkpoint import Resumable
from gnnplan.executor.data import Targets, counts_of, weighted_block
from gnnplan.executor.models import Net
from gnnplan.executor.strategies.graph_parallel import Worker, constant_rows, whole_share
from gnnplan.executor.strategies.graph_parallel import open_worker as open_whole
from gnnplan.executor.worker import Rank
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import GraNNDis


def open_worker(rank: Rank, job: Job, strategy: GraNNDis) -> Worker | CoBatches:
    layout = strategy.layout(job)
    assert isinstance(layout, Layout)
    if strategy.steps(job) > 1:
        return CoBatches(rank, job, strategy, layout)
    return open_whole(rank, job, layout, strategy.manner, degrees=strategy.degrees)


class CoBatches(Resumable):
    """R batches per epoch over the same weights. Constant rows of the whole layout stay in the server's memory; a batch's are
    loaded before its step and dropped after it. Its edges stay on the device; those of evaluation are made when it comes."""

    def __init__(self, rank: Rank, job: Job, strategy: GraNNDis, layout: Layout) -> None:
        self.rank, self.job, self.strategy = rank, job, strategy
        self.net = Net(job.model, job.workload).to(rank.device)
        self.reduce_group = tuple(range(rank.world))
        self.cached = job.model.aggregate_cached(1)
        self._keep(layout)
        self.batches = [(self._open(batch), self._places(batch)) for batch in strategy.layouts(job)]
        self.evaluation = _evaluation(job, layout, strategy.steps(job))
        self.scored: list[Targets] = []  # whose rows the last logits are

    def _keep(self, layout: Layout) -> None:
        """What batches load from: the rows that layer 1 (or the encoder) reads, or its aggregate (and GraphSAGE's own rows)."""
        me, job = self.rank.rank, self.job
        x = constant_rows(self.rank, job, layout).to("cpu")
        ids = self._constant(layout)
        self.kept = [x]
        if self.cached:
            layer, source = self.net.layer(1), np.concatenate([layout.rows(me, 0), layout.piece(me, 1).halo])
            degrees = layout.degrees(me) if self.strategy.degrees == "local" else None
            block = weighted_block(job.graph, layer.edges, ids, source, *layout.block(me, 1), job.workload, degrees)
            self.kept = [layer.gather(block, x), *([x[: ids.size].clone()] if job.workload.model == "sage" else [])]
        self.place = np.full(layout.graph.stats.vertices, -1)
        self.place[ids] = np.arange(ids.size)

    def _constant(self, layout: Layout) -> np.ndarray:
        """Global ids of the constant rows that a layout needs of those kept."""
        me = self.rank.rank
        if self.cached:
            return layout.rows(me, 1)
        local = layout.rows(me, 0)
        return np.concatenate([local, layout.piece(me, 1).halo]) if self.job.model.first_varying else local

    def _places(self, batch: Layout) -> Tensor:
        return torch.from_numpy(self.place[self._constant(batch)])

    def _open(self, batch: Layout) -> Worker:
        targets = sum(batch.own(rank).size for rank in range(batch.ranks))
        share = whole_share(self.rank, self.job, batch, self.net, self.strategy.degrees)
        return Worker(self.rank, self.job, share, self.strategy.manner, self.net, batch=targets)

    def _load(self, worker: Worker, places: Tensor, step: int) -> None:
        chosen = [kept.index_select(0, places) for kept in self.kept]
        with self.rank.span(Label("load", step), "copy", sum(rows.nbytes for rows in chosen)):
            rows = [rows.to(self.rank.device) for rows in chosen]
            worker.features = rows[-1]
            if self.cached:
                worker.cached = rows[0]

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One batch: (this rank's part of what it adds to the mean loss over all training vertices, logits [targets, C])."""
        worker, places = self.batches[self.strategy.turn(self.job, step)]
        self._load(worker, places, step)
        loss, logits = worker.step(step)
        worker.features, worker.cached = torch.empty(0), None
        self.scored = [worker.targets]
        return loss * (worker.targets.total / self.job.stats.train_vertices), logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits without dropout, batch after batch: whole neighbourhoods, so the same numbers in the memory of a batch."""
        self.scored, logits = [], []
        for batch in self.evaluation:
            worker = self._open(batch)
            self._load(worker, self._places(batch), step)
            logits.append(worker.evaluate(step))
            self.scored.append(worker.targets)
        return torch.cat(logits)

    def counts(self, logits: Tensor) -> Tensor:
        return counts_of(self.scored, logits)

    def drain(self) -> None:
        """Every step ends with its exchanges done."""


def _evaluation(job: Job, layout: Layout, batches: int) -> list[Layout]:
    """Validation and test vertices in batches that are on no server larger than those of training."""
    graph = layout.graph
    rows = graph.val | graph.test
    server_of = np.asarray(layout.servers)[layout.owner]
    count = 1
    for server in set(layout.servers):
        here = server_of == server
        count = max(count, -(-int(rows[here].sum()) // -(-int(graph.train[here].sum()) // batches)))
    batch_of = layout.drawn(rows, count, job.workload.seed)
    return [layout.batch(batch_of == b) for b in range(count)]
