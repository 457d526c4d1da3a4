"""Mini-batches, data parallel or split (GSplit).

In every step a sampler gives a rank its share of a batch. Its rows are loaded, and then
layerwise.py trains on it.
"""

from __future__ import annotations

from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import lengths_of
from gnnplan.executor.layers.kernels import FeatureRows, SparseRows
from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.feature_store import FeatureStore
from gnnplan.executor.minibatch.sampler import Arriving, Sampler, drawing_device
from gnnplan.executor.minibatch.share import Part, Share
from gnnplan.executor.minibatch.source_sampler import SourceSampler
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base, layerwise
from gnnplan.executor.strategies.whole import Scored, Whole
from gnnplan.planner.graph.batches import count_items
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import DataParallel, GSplit
from gnnplan.planner.strategies.layerwise.buckets import Bucket, buckets_of
from gnnplan.planner.strategies.minibatch.adjacency_store import Structure
from gnnplan.planner.strategies.minibatch.feature_store import Store
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")


class Worker(base.Worker):
    """One rank. It evaluates its part of the full graph, with halos exchanged."""

    net: Net

    def __init__(
        self, rank: Rank, problem: Problem, strategy: DataParallel | GSplit, first: int = 0
    ) -> None:
        self.rank, self.problem, self.exchange_options = rank, problem, strategy.exchange_options
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        batches = strategy.batches(problem)
        store, lists = strategy.store(problem), strategy.lists(problem)
        assert store is None or isinstance(store, Store)
        assert lists is None or isinstance(lists, Structure)
        # before the sampler forks: the fork would keep a copy of the features
        self.store = FeatureStore(rank, problem, store)
        device = drawing_device(rank, problem, strategy.prefetch, store, lists)
        kind = SourceSampler if batches.split == "source" else Sampler
        sampler = kind(batches, rank.rank, self.net.edges, rank.timeout_s, lists, device)
        self.arriving = Arriving(rank, sampler, strategy.prefetch, first)
        self.whole: Whole | None = None  # made for the first evaluation
        self.scored: Scored | None = None  # what the last logits are counted by

    @property
    def buckets(self) -> list[Bucket]:
        options = self.exchange_options
        return buckets_of(self.problem, options.buckets, options.narrow)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of one batch.

        Returns this rank's part of what the batch adds to the mean loss over all training vertices
        (edges), and its rows of the last layer [own seeds, C].
        """
        share = self.arriving.next(step)
        worker = layerwise.Worker(
            self.rank,
            self.problem,
            share,
            self.exchange_options,
            self.net,
            batch=share.total,
            bring=partial(self._load, share, step),
        )
        worker.learner = self.learner
        worker.features = self._features(share, worker, step)
        self.scored = worker.targets
        loss, logits = worker.step(step)
        items = count_items(self.problem.workload, self.problem.stats)
        return loss * (share.everyone / items), logits

    def _reads_halo(self, first: Part) -> bool:
        return first.meets and self.problem.model.first_varying > 0

    def _load(self, share: Share, step: int, beside: T) -> tuple[FeatureRows, T]:
        """Own rows of what layer 1 or the encoder reads, with room for a halo, and what else a
        worker has on the device."""
        first = share.parts[0]
        own, halo = np.split(first.source, [first.local])
        room = halo.size * self._reads_halo(first)
        return self.store.read(own, step, beside, share.laid_bytes(self.rank.device), room)

    def _features(self, share: Share, worker: layerwise.Worker, step: int) -> Tensor | SparseRows:
        """What layer 1 or the encoder reads: own rows, loaded, and a halo that its owners send."""
        first, rows = share.parts[0], worker.features
        if not self._reads_halo(first):
            return rows
        label, exchange = Label("halo", step, "f", 1), worker.plain_halo.exchanges[1]
        if isinstance(rows, Tensor):
            exchange.fetch(label, rows, into=rows[first.local :])
            return rows
        lengths = lengths_of(self.problem.data, first.source[first.local :])
        return SparseRows.cat([rows, exchange.fetch_sparse(label, rows, lengths)])

    @property
    def rows(self) -> dict[str, int]:
        """Rows that this rank has read from its feature store, by where they were."""
        return dict(self.store.rows)

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] on the full graph, without dropout."""
        if self.whole is None:
            self.whole = Whole(self.rank, self.problem, self.net)
        self.scored = self.whole.targets
        return self.whole.worker.evaluate(step)

    def counts(self, logits: Tensor) -> Tensor:
        assert self.scored is not None
        return self.scored.counts(logits)

    def close(self) -> None:
        """End the sampler."""
        self.arriving.close()


def open_worker(
    rank: Rank, problem: Problem, strategy: DataParallel | GSplit, first: int
) -> Worker:
    """This rank's part of the strategy."""
    return Worker(rank, problem, strategy, first)
