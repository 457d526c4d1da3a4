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
from gnnplan.executor.layers.kernels import sent
from gnnplan.executor.minibatch.share import Part, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.constant_rows import constant_rows, own_again
from gnnplan.executor.strategies.halo import fresh_places
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label


class Vanishing(Worker):
    """One rank. It evaluates on the whole halo."""

    def __init__(
        self, rank: Rank, problem: Problem, layout: Layout, options: ExchangeOptions
    ) -> None:
        net = net_of(problem.model, problem.workload).to(rank.device)
        self.layout, self.leaving_out = layout, options
        self.share = share_of(layout, rank.rank, net.edges, problem.workload)
        # the share of a step has the rows that cross
        super().__init__(rank, problem, self.share, replace(options, policy=FRESH), net)
        self.keep(constant_rows(rank, problem, layout), own_again(rank, problem, layout))

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        varying = self.share.parts[self.problem.model.first_varying :]
        if not any(part.meets for part in varying):
            return super().step(step)
        with self.rank.recorder.span(Label("lay", step), "compute"):
            parts = [self._fresh_part(part, step, n) for n, part in enumerate(self.share.parts, 1)]
            share = replace(self.share, parts=parts)
            worker = Worker(self.rank, self.problem, share, self.options, self.net)
        worker.features, worker.cached = self.features, self.cached
        worker.learner, worker.clock = self.learner, self.clock
        return worker.step(step)

    def _fresh_part(self, part: Part, step: int, layer: int) -> Part:
        """The layer's part with the rows and edges of this step."""
        block = self.blocks[layer]
        if layer <= self.problem.model.first_varying or not part.meets:
            return replace(part, block=block)
        ids, positions, seed = part.source, np.concatenate(part.give), self.problem.workload.seed
        given, kept = fresh_places(
            self.leaving_out.policy,
            *(ids[positions], [*map(len, part.give)], ids[part.local :], part.take.tolist()),
            Crossing(seed, step, layer, self.rank.rank),
        )
        give = [positions[places] for places in given]
        take = np.array([rows.size for rows in kept])
        scale = np.ones(ids.size)  # how much more each row's edges weigh
        halo = scale[part.local :]
        halo[:] = 0.0  # of rows that do not come
        for rows, count, whole in zip(kept, take, part.take, strict=True):
            halo[rows] = whole / max(count, 1)
        everything = np.concatenate([np.arange(part.local), part.local + np.concatenate(kept)])
        come, weigh = sent(
            [torch.from_numpy(each) for each in (everything, scale)], self.rank.device
        )
        return Part(
            ids[everything],
            part.local,
            give,
            take,
            bool(self.leaving_out.facts(self.problem, self.layout, layer, step).halo.any()),
            block.among(come, weigh, dtype_of(self.problem.workload)),
        )
