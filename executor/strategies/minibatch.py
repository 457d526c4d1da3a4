"""Mini-batches, data parallel or split (GSplit).

In every step a sampler gives a rank its share of a batch. The share's rows are loaded, then
layerwise.py trains on it. With `prefetch` a thread loads rows from the server's memory (on a GPU
with a stream), while the rank trains on the batch before. `Scorer` evaluates on the full graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import keep_until_used, sent, together
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import LinkTargets
from gnnplan.executor.minibatch.feature_store import FeatureStore
from gnnplan.executor.minibatch.sampler import Sampled, Sampler, SourceSampler, drawing_device
from gnnplan.executor.minibatch.share import Part, Share
from gnnplan.executor.minibatch.share_queue import ShareQueue
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import now
from gnnplan.executor.strategies import base, graph_parallel, layerwise
from gnnplan.executor.strategies.base import Scorer as Scorer
from gnnplan.planner.graph.sampling import Pairs, count_items, fetched, held_out_pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3, DataParallel, GSplit
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, buckets_of
from gnnplan.planner.strategies.minibatch.adjacency_store import Structure
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span


class HeldOut:
    """Link prediction's held-out edges, scored with rows of the full graph.

    Every rank scores the held-out edges whose heads it owns. It fetches the rows of their other
    ends, which all ranks know beforehand.
    """

    def __init__(self, rank: Rank, problem: Problem, layout: Layout) -> None:
        graph, negatives, me = problem.data, problem.workload.negatives, rank.rank
        own, owner = layout.own(me), layout.owner
        self.size = own.size  # rows
        parts = [held_out_pairs(graph, part, negatives) for part in range(len(graph.held_out))]
        wanted = [fetched(parts, owner, peer) for peer in range(layout.ranks)]
        self.exchange = Exchange.of_ids(rank, wanted, owner, own)
        place = np.empty(owner.size, dtype=np.int64)
        place[np.concatenate([own, wanted[me]])] = np.arange(own.size + wanted[me].size)
        self.parts = []
        for pairs in parts:
            mine = owner[pairs.heads] == me
            places = Pairs(place[pairs.heads[mine]], place[pairs.tails[mine]])
            self.parts.append(LinkTargets(places, self.size, mine.sum()))

    def counts(self, rows: Tensor) -> Tensor:
        """Count the comparisons that rows [own, H] get right, and all, float64 [3, 2, 1].

        All ranks call it. The first row, of training, is zero.
        """
        rows = torch.cat([rows, self.exchange.forward(self.exchange.pack(rows))])
        training = rows.new_zeros(2, dtype=torch.float64)
        return torch.stack([training, *(part.compared(rows) for part in self.parts)])[:, :, None]


T = TypeVar("T")
_Recorded = Callable[[int], AbstractContextManager[None]]  # number of bytes -> span of their load


class OnBatches(base.Worker):
    """A rank that trains on batches of its sampler, and evaluates its part of the full graph."""

    net: Net

    def __init__(
        self,
        rank: Rank,
        problem: Problem,
        strategy: DataParallel | GSplit | P3,
        first: int,
        sampler: Callable[..., Sampler],
        load: Callable[[int, Sampled], layerwise.Worker] | None = None,
    ) -> None:
        """first: the step of the first batch. load: loads a batch while the rank trains."""
        self.rank, self.problem, supply = rank, problem, strategy.supply(problem)
        self.stream = torch.cuda.current_stream(rank.device) if rank.device.type == "cuda" else None
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        # opened before the sampler forks, or the fork would keep a copy of the features
        self.store = FeatureStore(rank, supply)
        self.rows = self.store.rows  # number of rows read, by class
        lists, device = supply.lists, drawing_device(rank, supply)
        assert lists is None or isinstance(lists, Structure)
        rank.groups.await_all(None)  # samplers wait for each other no longer than for a message
        lays_on_device = device is not None and supply.lays_there
        own = supply.batches, rank.rank, self.net.edges
        ours = sampler(*own, rank.groups.timeout_s, lists, device, lays_on_device)
        self.arriving = ShareQueue(rank, ours, strategy.prefetch, first, load)

    def _load(self, share: Share, span: _Recorded, others: T) -> tuple[Tensor, T]:
        """Copy to the device: a share's rows in the server's memory, and `others`.

        The rows are those that layer 1 or the encoder reads, with room for a halo.
        """
        own, room = self._own_rows(share.parts[0])
        (ids, nbytes), device = self.store.in_host(own), self.rank.device
        with span(nbytes + share.laid_bytes(device)):
            loaded = self.store.load(ids, room), together(others, partial(sent, device=device))
        if self.stream is not None:
            keep_until_used(self.stream, *loaded)
        return loaded

    def _own_rows(self, first: Part) -> tuple[np.ndarray, int]:
        """Return ids of own rows of layer 1 or the encoder, and the number of halo rows."""
        own, halo = np.split(first.source, [first.local])
        return own, halo.size * (first.exchanges_rows and self.problem.model.first_varying > 0)

    @cached_property
    def evaluator(self) -> tuple[layerwise.Worker, Scorer]:
        """A worker on the rank's part of the full graph, and what scores its logits."""
        rank, problem, layout = self.rank, self.problem, self.problem.layout()
        assert isinstance(layout, Layout)
        options = ExchangeOptions()
        with rank.groups.reading():
            worker = graph_parallel.worker_on(rank, problem, layout, options, net=self.net)
        is_link = problem.workload.task == "link"
        return worker, HeldOut(rank, problem, layout) if is_link else worker.targets

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Return logits [own, C] on the full graph, without dropout, with halos exchanged."""
        worker, scorer = self.evaluator
        self.scorers = [scorer]
        return worker.evaluate(step)

    def close(self) -> None:
        """End the sampler."""
        self.arriving.close()


class Worker(OnBatches):
    """A rank that trains on whole feature rows (P3 splits them)."""

    def __init__(
        self, rank: Rank, problem: Problem, strategy: DataParallel | GSplit, first: int = 0
    ) -> None:
        self.options = strategy.exchange_options
        self.buckets = buckets_of(problem, self.options.buckets, self.options.narrow)
        kind = SourceSampler if strategy.batches(problem).split == "source" else Sampler
        super().__init__(rank, problem, strategy, first, kind, self._load_ahead)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of one batch.

        Returns this rank's part of the batch's contribution to the mean loss over all training
        vertices (edges), and its rows of the last layer [own seeds, C].
        """
        share, worker = self.arriving.next(step)
        span = partial(self.rank.recorder.span, Label("load", step), "copy")
        worker = worker or self._open(share, span)
        worker.learner = self.learner
        worker.features = self._features(share, worker, step)
        self.scorers = [worker.targets]
        loss, logits = worker.step(step)
        items = count_items(self.problem.workload, self.problem.stats)
        return loss * (share.everyone / items), logits

    def _open(self, share: Share, span: _Recorded) -> layerwise.Worker:
        """Make the worker that trains on a share, with rows loaded from the server's memory."""
        total, transfer = share.total, partial(self._load, share, span)
        return layerwise.Worker(
            self.rank, self.problem, share, self.options, self.net, batch=total, transfer=transfer
        )

    def _load_ahead(self, step: int, sampled: Sampled) -> layerwise.Worker:
        """Make the worker that trains on a share and load its rows, in a thread with a stream."""
        label, device = Label("load", step), self.rank.device

        @contextmanager
        def span(nbytes: int) -> Iterator[None]:
            began = now()
            yield
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            timed = "copy", began, now(), nbytes, step
            sampled.spans.append(Span(str(label), label.op, self.rank.rank, *timed))

        return self._open(sampled.share, span)

    def _features(self, share: Share, worker: layerwise.Worker, step: int) -> Tensor:
        """Return the rows that layer 1 or the encoder reads: own rows, and the halo from owners."""
        first = share.parts[0]
        own, room = self._own_rows(first)
        rows = self.store.complete(worker.features, own, step, room, first.ids)
        if not (first.exchanges_rows and self.problem.model.first_varying):
            return rows
        label, exchange = Label("halo", step, "f", 1), worker.plain_halo.exchanges[1]
        lengths = self.problem.data.lengths(first.source[first.local :])
        exchange.fill(label, rows, first.local, lengths)
        return rows


open_worker = Worker
