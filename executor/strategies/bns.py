"""Boundary node sampling: graph parallelism over the blocks of an epoch's sample.

Every step takes a sample of each layer's halo, which both ends draw alike, cuts the layer's block
down to it, and trains on it with a worker of graph parallelism (layerwise.py) on the same weights.
Which rows are drawn is decided in planner/strategies/layerwise/bns.py.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.minibatch.share import Part, Share, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.constant_rows import constant_rows
from gnnplan.executor.strategies.layerwise import Worker as LayerwiseWorker
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import BNS
from gnnplan.planner.strategies.layerwise.bns import drawn
from gnnplan.planner.strategies.layerwise.buckets import Bucket
from gnnplan.planner.vocabulary.schedule import Label


class Worker(base.Worker):
    """One rank. It evaluates on the whole halo."""

    def __init__(self, rank: Rank, problem: Problem, strategy: BNS) -> None:
        layout = problem.layout()
        assert isinstance(layout, Layout)
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        self.share = share_of(layout, rank.rank, self.net.edges, problem.workload)
        self.whole = self._on(self.share)
        self.whole.keep(constant_rows(rank, problem, layout))

    def _on(self, share: Share) -> LayerwiseWorker:
        options = self.strategy.exchange_options
        return LayerwiseWorker(self.rank, self.problem, share, options, self.net)

    @property
    def buckets(self) -> list[Bucket]:
        return self.whole.buckets

    @property
    def replays(self) -> bool:
        return self.whole.replays and not self._samples()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        worker = self.whole
        if self._samples():
            with self.rank.span(Label("lay", step), "host"):
                parts = [self._sampled(part, step, n) for n, part in enumerate(self.share.parts, 1)]
                worker = self._on(replace(self.share, parts=parts))
            worker.features, worker.cached = self.whole.features, self.whole.cached
        worker.learner, worker.clock = self.learner, self.clock
        return worker.step(step)

    def evaluate(self, step: int) -> Tensor:
        return self.whole.evaluate(step)

    def counts(self, logits: Tensor) -> Tensor:
        return self.whole.counts(logits)

    def _samples(self) -> bool:
        """Whether any layer leaves rows out."""
        varying = self.share.parts[self.problem.model.first_varying :]
        return self.strategy.p < 1 and any(part.meets for part in varying)

    def _sampled(self, part: Part, step: int, layer: int) -> Part:
        """The layer's part with the rows and edges of this step's sample."""
        if layer <= self.problem.model.first_varying or not part.meets:
            return part
        me, ids = self.rank.rank, part.source
        halo, starts = ids[part.local :], np.cumsum([0, *part.take])

        def chosen(rows: np.ndarray, reader: int) -> np.ndarray:
            seed = self.problem.workload.seed
            return drawn(rows, self.strategy.p, seed, step, layer, reader)

        give = [
            positions[chosen(ids[positions], reader)] for reader, positions in enumerate(part.give)
        ]
        kept = [start + chosen(halo[start:end], me) for start, end in pairwise(starts)]
        take = np.array([rows.size for rows in kept])
        # of each halo row: how much more its edges weigh; 0: it does not come
        scale = np.zeros(halo.size)
        for rows, count, whole in zip(kept, take, part.take, strict=True):
            scale[rows] = whole / max(count, 1)
        dtype = dtype_of(self.problem.workload)
        everything = np.concatenate([np.arange(part.local), part.local + np.concatenate(kept)])
        return Part(
            ids[everything],
            part.local,
            give,
            take,
            self.strategy.p > 0,
            _cut(part.block, everything, np.concatenate([np.ones(part.local), scale]), dtype),
        )


def _cut(block: Block, kept: np.ndarray, scale: np.ndarray, dtype: torch.dtype) -> Block:
    """A block on the source rows `kept`, whose edges weigh `scale` [S] times as much."""
    place = np.full(block.n_src, -1, dtype=np.int32)
    place[kept] = np.arange(kept.size, dtype=np.int32)
    indptr, indices = block.indptr.cpu().numpy(), block.indices.cpu().numpy()
    stays = place[indices] >= 0
    ends = np.concatenate([[0], np.cumsum(stays)])[indptr]
    weight = torch.from_numpy(scale[indices[stays]])
    if block.weight is not None:
        weight = weight * block.weight.cpu()[torch.from_numpy(stays)]
    return Block(ends, place[indices[stays]], kept.size).weighted(weight.to(dtype))


def open_worker(rank: Rank, problem: Problem, strategy: BNS, first: int) -> Worker:
    """This rank's part of the strategy."""
    return Worker(rank, problem, strategy)
