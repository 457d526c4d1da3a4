"""Graph parallelism over blocks from which rows vanish that are not fresh in a step.

Every step cuts each layer's block down to the halo rows that its policy lets cross, which both ends
find alike, and trains on it with a worker of its own (layerwise.py) on the same weights. Edges of
the rows that come weigh as much more as there are fewer of them. bns is such a strategy
(planner/strategies/layerwise/bns.py).
"""

from __future__ import annotations

from dataclasses import replace

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
from gnnplan.executor.strategies.halo import fresh_places
from gnnplan.executor.strategies.layerwise import Worker as LayerwiseWorker
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.buckets import Bucket
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label


class Vanishing(base.Worker):
    """One rank. It evaluates on the whole halo."""

    def __init__(
        self, rank: Rank, problem: Problem, layout: Layout, options: ExchangeOptions
    ) -> None:
        self.rank, self.problem, self.layout, self.options = rank, problem, layout, options
        self.net = net_of(problem.model, problem.workload).to(rank.device)
        self.share = share_of(layout, rank.rank, self.net.edges, problem.workload)
        self.whole = self._on(self.share)
        self.whole.keep(constant_rows(rank, problem, layout))

    def _on(self, share: Share) -> LayerwiseWorker:
        options = replace(self.options, policy=FRESH)  # the share has the rows that cross
        return LayerwiseWorker(self.rank, self.problem, share, options, self.net)

    @property
    def buckets(self) -> list[Bucket]:
        return self.whole.buckets

    @property
    def replays(self) -> bool:
        return self.whole.replays  # of one rank, which leaves nothing out

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        worker = self.whole
        varying = self.share.parts[self.problem.model.first_varying :]
        if any(part.meets for part in varying):
            with self.rank.span(Label("lay", step), "host"):
                parts = [
                    self._fresh_part(part, step, n) for n, part in enumerate(self.share.parts, 1)
                ]
                worker = self._on(replace(self.share, parts=parts))
            worker.features, worker.cached = self.whole.features, self.whole.cached
        worker.learner, worker.clock = self.learner, self.clock
        return worker.step(step)

    def evaluate(self, step: int) -> Tensor:
        return self.whole.evaluate(step)

    def counts(self, logits: Tensor) -> Tensor:
        return self.whole.counts(logits)

    def _fresh_part(self, part: Part, step: int, layer: int) -> Part:
        """The layer's part with the rows and edges of this step."""
        if layer <= self.problem.model.first_varying or not part.meets:
            return part
        ids, positions, seed = part.source, np.concatenate(part.give), self.problem.workload.seed
        given, kept = fresh_places(
            self.options.policy,
            *(ids[positions], [*map(len, part.give)], ids[part.local :], part.take.tolist()),
            Crossing(seed, step, layer, self.rank.rank),
        )
        give = [positions[places] for places in given]
        take = np.array([rows.size for rows in kept])
        # of each halo row: how much more its edges weigh; 0: it does not come
        scale = np.zeros(ids.size - part.local)
        for rows, count, whole in zip(kept, take, part.take, strict=True):
            scale[rows] = whole / max(count, 1)
        dtype = dtype_of(self.problem.workload)
        everything = np.concatenate([np.arange(part.local), part.local + np.concatenate(kept)])
        return Part(
            ids[everything],
            part.local,
            give,
            take,
            bool(self.options.facts(self.problem, self.layout, layer, step).halo.any()),
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
