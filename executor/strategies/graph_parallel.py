"""Strategies on parts of the graph: a step layer after layer (layerwise.py) over a rank's part.

It is the executor of every strategy that is told by its exchange options alone: graph_parallel,
pipegcn, bns, and those of packages (planner/strategies/layerwise/on_parts.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import give_back, sent
from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.share import Part, block_of, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.constant_rows import ConstantRows, constant_rows, own_again
from gnnplan.executor.strategies.halo import RowWeights, fresh_places
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.gnn.codec import WHOLE
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions
from gnnplan.planner.strategies.layerwise.on_parts import OnParts
from gnnplan.planner.vocabulary.schedule import Label


def open_worker(rank: Rank, problem: Problem, strategy: OnParts, first: int) -> Worker:
    """This rank's part of the strategy."""
    layout, options = problem.layout(), strategy.exchange_options
    assert isinstance(layout, Layout)
    if options.policy.vanishes:
        return Vanishing(rank, problem, layout, options)
    return worker_on(rank, problem, layout, options, trim=bool(strategy.layouts(problem)))


def worker_on(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    degrees: str = "global",
    net: Net | None = None,
    trim: bool = False,
) -> Worker:
    """A worker on the full graph, with its features.

    degrees: of the whole graph ('global') or of the rank's layout ('local'). net: weights that it
    shares with another worker. trim: it trains on those rows of the layout that training vertices
    need, and evaluates on the whole layout, whose edges are made for each evaluation.
    """
    weights = net or net_of(problem.model, problem.workload).to(rank.device)

    def on(rows: Layout, options: ExchangeOptions) -> Worker:
        adapts = options.codec.adapts
        counted = variance_weights(rank, problem, rows, weights) if adapts else {}
        share = share_of(rows, rank.rank, weights.edges, problem.workload, degrees)
        return Worker(rank, problem, share, options, weights, counted)

    if not trim:
        worker = on(layout, options)
        give_back()
        worker.keep(constant_rows(rank, problem, layout), own_again(rank, problem, layout))
        return worker
    kept = ConstantRows(rank, problem, layout, weights, degrees)

    def loaded(rows: Layout, options: ExchangeOptions) -> Worker:
        worker = on(rows, options)
        worker.features, worker.cached = kept.on_device(kept.of(rows))
        return worker

    trimmed = problem.trimmed(layout)
    assert isinstance(trimmed, Layout)
    worker = loaded(trimmed, options)
    worker.evaluator = lambda: loaded(layout, replace(options, policy=FRESH, codec=WHOLE))
    return worker


class Vanishing(Worker):
    """A rank on blocks from which rows vanish that are not fresh in a step; bns is such a strategy.

    Every step cuts each layer's block down to the halo rows that its policy lets cross, which both
    ends find alike, and trains on it with a worker of its own on the same weights. Edges of the
    rows that come weigh as much more as there are fewer of them. It evaluates on the whole halo.
    """

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
        ids, positions, gives = part.source, np.concatenate(part.give), [*map(len, part.give)]
        crossing = Crossing(self.problem.workload.seed, step, layer, self.rank.rank)
        given, kept = fresh_places(
            self.leaving_out.policy, ids, positions, gives, part.take.tolist(), crossing
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
            block.among(come, weigh, dtype_of(self.problem.workload.precision)),
        )


def variance_weights(rank: Rank, problem: Problem, layout: Layout, net: Net) -> RowWeights:
    """How much the rounding of each row that crosses counts, float32, by end and layer.

    It is the sum of squares of what its readers multiply the row by. Sender and reader both count
    it, from the reader's edges, so that nothing crosses.
    """
    found = {}
    alike: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    for layer in range(problem.model.first_varying + 1, len(problem.model.layers) + 1):
        edges = net.layer(layer).edges
        if not layout.meets(layer):
            continue
        if (kind := (layout.kind(layer), edges)) not in alike:
            pieces = [_squares(problem, layout, at, layer, edges) for at in range(layout.ranks)]
            out = np.concatenate([by_sender[rank.rank] for by_sender in pieces])
            alike[kind] = out, np.concatenate(pieces[rank.rank])
        for end, weights in zip(("out", "in"), alike[kind], strict=True):
            found[end, layer] = torch.from_numpy(weights).to(rank.device)
    return found


def _squares(
    problem: Problem, layout: Layout, reader: int, layer: int, edges: str
) -> list[np.ndarray]:
    """Of a reader's halo before a layer, by sender: sums of squared edge weights."""
    piece = layout.piece(reader, layer)
    block = block_of(layout, reader, layer, edges, problem.workload)
    weight = np.ones(block.edges) if block.weight is None else block.weight.double().numpy()
    sums = np.bincount(block.indices.numpy(), weight**2, minlength=block.n_src)
    squares = sums.astype(np.float32)  # rows that count alike do so whatever the order of sums
    return np.split(squares[piece.local :], np.cumsum(piece.received)[:-1])
