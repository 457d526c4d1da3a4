"""Strategies on parts of the graph: a step layer after layer (layerwise.py) over a rank's part.

It is the executor of every strategy that is told by its exchange options alone: graph_parallel,
pipegcn, bns, and those of packages (planner/strategies/layerwise/on_parts.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gnnplan.executor.layers.kernels import give_back
from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.share import block_of, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.constant_rows import ConstantRows, constant_rows, own_again
from gnnplan.executor.strategies.halo import RowWeights
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.executor.strategies.vanishing import Vanishing
from gnnplan.planner.gnn.few_bits import ADAPTIVE
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, ExchangeOptions
from gnnplan.planner.strategies.layerwise.on_parts import OnParts


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
        adaptive = options.bits == ADAPTIVE
        counted = variance_weights(rank, problem, rows, weights) if adaptive else {}
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
    worker.evaluator = lambda: loaded(
        layout, replace(options, policy=FRESH, smoothing="", bits=None)
    )
    return worker


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
