"""Graph parallel: a step layer after layer (layerwise.py), over this rank's part of a Layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.share import Share, block_of, share_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.constant_rows import ConstantRows, constant_rows
from gnnplan.executor.strategies.halo import RowWeights
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.gnn.few_bits import ADAPTIVE
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraphParallel
from gnnplan.planner.strategies.layerwise.step import ExchangeOptions


def open_worker(rank: Rank, problem: Problem, strategy: GraphParallel, first: int) -> Worker:
    """This rank's part of the strategy."""
    layout = problem.layout()
    assert isinstance(layout, Layout)
    make = trimmed_worker_on if strategy.trim else worker_on
    return make(rank, problem, layout, strategy.exchange_options)


def worker_on(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    degrees: str = "global",
    net: Net | None = None,
) -> Worker:
    """A worker on the full graph, with its features.

    degrees: of the whole graph ('global') or of the rank's layout ('local'). net: weights that it
    shares with another worker.
    """
    net = net or net_of(problem.model, problem.workload).to(rank.device)
    worker = _worker(rank, problem, layout, options, degrees, net)
    worker.keep(constant_rows(rank, problem, layout))
    return worker


def trimmed_worker_on(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    degrees: str = "global",
) -> Worker:
    """A worker on those rows of a layout that training vertices need.

    It evaluates on the whole layout, whose edges are made for each evaluation.
    """
    net, trimmed = net_of(problem.model, problem.workload).to(rank.device), problem.trimmed(layout)
    assert isinstance(trimmed, Layout)
    kept = ConstantRows(rank, problem, layout, net, degrees)

    def on(rows: Layout, options: ExchangeOptions) -> Worker:
        worker = _worker(rank, problem, rows, options, degrees, net)
        worker.features, worker.cached = kept.on_device(kept.of(rows))
        return worker

    worker = on(trimmed, options)
    worker.evaluator = lambda: on(layout, replace(options, staleness=0, smoothing="", bits=None))
    return worker


def _worker(
    rank: Rank,
    problem: Problem,
    layout: Layout,
    options: ExchangeOptions,
    degrees: str,
    net: Net,
) -> Worker:
    """A worker on a layout, without features."""
    share = whole_share(rank, problem, layout, net, degrees)
    adaptive = options.bits == ADAPTIVE
    weights = variance_weights(rank, problem, layout, net) if adaptive else {}
    return Worker(rank, problem, share, options, net, weights)


def whole_share(rank: Rank, problem: Problem, layout: Layout, net: Net, degrees: str) -> Share:
    """This rank's share of a layout."""
    edges = [net.layer(layer).edges for layer in range(1, problem.workload.layers + 1)]
    return share_of(layout, rank.rank, edges, problem.workload, degrees)


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
    piece, block = (
        layout.piece(reader, layer),
        block_of(layout, reader, layer, edges, problem.workload),
    )
    weight = np.ones(block.edges) if block.weight is None else block.weight.double().numpy()
    sums = np.bincount(block.indices.numpy(), weight**2, minlength=block.n_src)
    squares = sums.astype(np.float32)  # rows that count alike do so whatever the order of sums
    return np.split(squares[piece.local :], np.cumsum(piece.received)[:-1])
