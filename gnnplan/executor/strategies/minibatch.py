"""Mini-batches for real, data parallel or split: a sampler's share per step, its rows loaded, then a graph-parallel step on it."""

from __future__ import annotations

import torch
from torch import Tensor

from gnnplan.executor.checkpoint import Resumable
from gnnplan.executor.data import Targets, lengths_of
from gnnplan.executor.kernels import Rows, SparseRows
from gnnplan.executor.models import Net
from gnnplan.executor.sampler import Arriving, Sampler, drawing_device
from gnnplan.executor.share import Share
from gnnplan.executor.store import FeatureStore
from gnnplan.executor.strategies import graph_parallel
from gnnplan.executor.worker import Rank
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import DataParallel, GSplit
from gnnplan.planner.strategies.layerwise import Manner


class Worker(Resumable):
    """Runs the steps of one rank. Evaluation is of the full graph: every rank its part, halos exchanged."""

    def __init__(self, rank: Rank, job: Job, strategy: DataParallel | GSplit, first: int = 0) -> None:
        self.rank, self.job, self.manner = rank, job, strategy.manner
        self.net = Net(job.model, job.workload).to(rank.device)
        self.reduce_group = tuple(range(rank.world))
        batches = strategy.batches(job)
        store, lists = strategy.store(job), strategy.lists(job)
        self.store = FeatureStore(rank, job, store)  # before a sampler forks, which would keep a copy of the features
        edges = [self.net.layer(layer).edges for layer in range(1, job.workload.layers + 1)]
        device = drawing_device(rank, job, strategy.prefetch, store, lists)
        sampler = Sampler(batches, rank.rank, edges, rank.timeout_s, lists, device)
        self.arriving = Arriving(rank, sampler, strategy.prefetch, first)
        self.whole: graph_parallel.Worker | None = None  # made when it is first asked for
        self.scored: Targets | None = None  # whose rows the last logits are

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """One batch: (this rank's part of what it adds to the mean loss over all training vertices, logits [own seeds, C])."""
        share = self.arriving.next(step)
        seeds = share.everyone
        worker = graph_parallel.Worker(self.rank, self.job, share, self.manner, self.net, batch=seeds)
        worker.features = self._features(share, worker, step)
        self.scored = worker.targets
        loss, logits = worker.step(step)
        return loss * (seeds / self.job.stats.train_vertices), logits

    def _features(self, share: Share, worker: graph_parallel.Worker, step: int) -> Rows:
        """What layer 1 or the encoder reads: own rows, loaded, and the rows that others own, from them."""
        job, part = self.job, share.parts[0]
        assert job.graph is not None
        local, halo = part.source[: part.local], part.source[part.local :]
        meets = part.meets and job.model.first_varying > 0
        rows = self.store.read(local, step, halo.size * meets)
        if not meets:
            return rows
        label, exchange = Label("halo", step, "f", 1), worker.exchanges[1]
        packed = exchange.pack(rows)
        with self.rank.span(label, "comm", self.rank.count(label, packed.nbytes)):
            if isinstance(rows, Tensor):
                exchange.forward(packed, into=rows[part.local :])
                return rows
            return SparseRows.cat([rows, exchange.forward_sparse(packed, lengths_of(job.graph, halo))])

    @property
    def rows(self) -> dict[str, int]:
        """Rows that this rank has had from its store, by class."""
        return dict(self.store.rows)

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        if self.whole is None:
            layout = self.job.layout()
            assert isinstance(layout, Layout)
            self.whole = graph_parallel.open_worker(self.rank, self.job, layout, Manner(), net=self.net)
        self.scored = self.whole.targets
        return self.whole.evaluate(step)

    def counts(self, logits: Tensor) -> Tensor:
        assert self.scored is not None
        return self.scored.counts(logits)

    def drain(self) -> None:
        """Every step ends with its exchanges done."""
