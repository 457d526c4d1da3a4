"""Strategies on parts of the graph: a rank trains on its part layer after layer (layerwise.py).

This module trains every strategy that its exchange options define: graph_parallel, pipegcn, bns,
and strategies of other packages (planner/strategies/layerwise/graph_parallel.py).

A rank loads the features of its own vertices. From their owners it fetches the features of its
preload (vertices of other ranks that it computes too) and, if layer 1 reads them, of its halo. A
rank that trains on fewer rows than its layout has keeps all of them in the server's memory, and
loads the rows that it needs from there (ConstantRows).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of, features
from gnnplan.executor.layers.kernels import release_memory, sent
from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.share import Part, block_of, share_of, source_of
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.halo import RowWeights, fresh_places
from gnnplan.executor.strategies.layerwise import Worker
from gnnplan.planner.gnn.rows import WHOLE
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions
from gnnplan.planner.strategies.layerwise.graph_parallel import OnParts
from gnnplan.planner.vocabulary.numbers import split
from gnnplan.planner.vocabulary.schedule import Label

PRELOAD, INPUT_HALO = Label("preload", -1), Label("input_halo", -1)


def constant_rows(rank: Rank, problem: Problem, layout: Layout) -> Tensor:
    """Load features [S, F] of rows that this rank computes, and of the halo if layer 1 reads it."""
    graph, me, device = problem.data, rank.rank, rank.device
    own, rows, piece = layout.own(me), layout.rows(me, 0), layout.piece(me, 1)
    reads_halo = problem.model.first_varying == 1 and bool(layout.facts(1).sends.any())
    halo_rows = rows.size - own.size + piece.halo.size * reads_halo
    x = features(graph, own, problem.workload, device, halo_rows)
    if layout.preloaded().any():
        wanted = [layout.rows(peer, 0)[layout.own(peer).size :] for peer in range(layout.ranks)]
        exchange = Exchange.of_ids(rank, wanted, layout.owner, own)
        order = np.argsort(layout.owner[wanted[me]], kind="stable")
        received = exchange.fetch(PRELOAD, x, lengths=graph.lengths(wanted[me][order]))
        places = torch.from_numpy(np.argsort(order)).to(device)
        x[own.size : rows.size] = received.index_select(0, places)
    if reads_halo:
        exchange = Exchange(rank, layout.sent(me, 1), piece.received)
        exchange.fill(INPUT_HALO, x, rows.size, graph.lengths(piece.halo))
    return x


def keep_constant_rows(worker: Worker, layout: Layout) -> None:
    """Load a worker's constant rows; if layer 1's aggregate is constant too, compute it once."""
    rank, problem, model = worker.rank, worker.problem, worker.problem.model
    x = constant_rows(rank, problem, layout)
    if not model.aggregate_cached(1):
        worker.features = x
        return
    release_memory()  # the memory of the exchange
    worker.cached = worker.net.layer(1).gather(worker.blocks[1], x)
    own, rows = layout.own(rank.rank), worker.blocks[1].n_dst * model.layers[0].reads_own
    if rows == own.size:  # loaded again once `x` is freed, which takes less memory than a copy
        del x
        worker.features = features(problem.data, own, problem.workload, rank.device)
    else:
        worker.features = x[:rows].clone()


class ConstantRows:
    """The constant rows of a layout, in the server's memory; layouts of fewer rows load from them.

    They are the rows that layer 1 or the encoder reads. If layer 1's aggregate is constant, they
    are its aggregate, and the own rows if layer 1 reads them too.
    """

    def __init__(
        self, rank: Rank, problem: Problem, layout: Layout, net: Net, degrees: str
    ) -> None:
        self.rank, self.problem, self.layout = rank, problem, layout
        self.cached = problem.model.aggregate_cached(1)
        x = constant_rows(rank, problem, layout).to("cpu")
        self.kept: list[Tensor] = [x]
        ids = self._needed_ids(layout)
        if self.cached:
            layer = net.layer(1)
            block = block_of(layout, rank.rank, 1, layer.edges, problem.workload, degrees)
            self.kept = [layer.gather(block, x)]
            if problem.model.layers[0].reads_own:
                self.kept.append(x[: ids.size].clone())
        self.place_of = np.full(layout.graph.stats.vertices, -1)
        self.place_of[ids] = np.arange(ids.size)

    def _needed_ids(self, layout: Layout) -> np.ndarray:
        """Return global ids of the constant rows that a layout needs."""
        me = self.rank.rank
        if self.cached:
            return layout.rows(me, 1)
        reads_halo = self.problem.model.first_varying > 0
        return source_of(layout, me, 1) if reads_halo else layout.rows(me, 0)

    def load(self, layout: Layout) -> list[Tensor]:
        """Return the constant rows of a layout: all kept rows, or copies of some."""
        if layout is self.layout:
            return self.kept
        places = torch.from_numpy(self.place_of[self._needed_ids(layout)])
        return [kept.index_select(0, places) for kept in self.kept]

    def on_device(self, rows: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Move rows to the device: the input of layer 1 or the encoder, and a cached aggregate."""
        loaded = [each.to(self.rank.device) for each in rows]
        if not self.cached:
            return loaded[0], None
        own = loaded[1] if len(loaded) > 1 else loaded[0][:0]
        return own, loaded[0]


def open_worker(rank: Rank, problem: Problem, strategy: OnParts, first: int) -> Worker:
    """Open this rank's part of the strategy."""
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
    """Make a worker on the full graph, with its features.

    degrees: of the whole graph ('global') or of the rank's layout ('local'). net: the model, if
    another worker shares it. trim: train only on the layout's rows that training vertices need,
    and evaluate on the whole layout, whose edges are made for each evaluation.
    """
    weights = net or net_of(problem.model, problem.workload).to(rank.device)

    def make_worker(rows: Layout, options: ExchangeOptions) -> Worker:
        adapts = options.codec.adapts
        counted = variance_weights(rank, problem, rows, weights) if adapts else {}
        share = share_of(rows, rank.rank, weights.edges, problem.workload, degrees)
        return Worker(rank, problem, share, options, weights, counted)

    if not trim:
        worker = make_worker(layout, options)
        release_memory()
        keep_constant_rows(worker, layout)
        return worker
    constants = ConstantRows(rank, problem, layout, weights, degrees)

    def load_worker(rows: Layout, options: ExchangeOptions) -> Worker:
        worker = make_worker(rows, options)
        worker.features, worker.cached = constants.on_device(constants.load(rows))
        return worker

    trimmed = problem.trimmed(layout)
    assert isinstance(trimmed, Layout)
    worker = load_worker(trimmed, options)
    worker.evaluator = lambda: load_worker(layout, replace(options, policy=FRESH, codec=WHOLE))
    return worker


class Vanishing(Worker):
    """A rank whose blocks keep only the halo rows that are fresh in a step, as in bns.

    For every step it cuts each layer's block down to the fresh halo rows, which sender and receiver
    choose alike, and trains on them with a temporary worker on the same weights. Edges from fresh
    rows are scaled up by the inverse of the owner's share of fresh rows. Evaluation exchanges the
    whole halo.
    """

    def __init__(
        self, rank: Rank, problem: Problem, layout: Layout, options: ExchangeOptions
    ) -> None:
        net = net_of(problem.model, problem.workload).to(rank.device)
        self.layout, self.vanishing_options = layout, options
        self.whole_share = share_of(layout, rank.rank, net.edges, problem.workload)
        # the policy is applied to a step's share: the temporary worker exchanges all of its halo
        super().__init__(rank, problem, self.whole_share, replace(options, policy=FRESH), net)
        keep_constant_rows(self, layout)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        varying = self.whole_share.parts[self.problem.model.first_varying :]
        if not any(part.exchanges_rows for part in varying):
            return super().step(step)
        with self.computing("lay", step):
            parts = [
                self._fresh_part(part, step, n) for n, part in enumerate(self.whole_share.parts, 1)
            ]
            share = replace(self.whole_share, parts=parts)
            worker = Worker(self.rank, self.problem, share, self.options, self.net)
        worker.features, worker.cached = self.features, self.cached
        worker.learner, worker.clock = self.learner, self.clock
        return worker.step(step)

    def _fresh_part(self, part: Part, step: int, layer: int) -> Part:
        """Return the layer's part with the fresh rows of this step and their edges."""
        block = self.blocks[layer]
        if layer <= self.problem.model.first_varying or not part.exchanges_rows:
            return replace(part, block=block)
        ids, positions, gives = part.source, np.concatenate(part.give), [*map(len, part.give)]
        crossing = Crossing(self.problem.workload.seed, step, layer, self.rank.rank)
        give, take, _, halo_places = fresh_places(
            self.vanishing_options.policy, ids, positions, gives, part.take.tolist(), crossing
        )
        edge_scale = np.ones(ids.size)  # of each source row
        halo = edge_scale[part.local :]
        halo[:] = 0.0  # rows that are not fresh
        halo[halo_places] = np.repeat(part.take / np.maximum(take, 1), take)
        kept = np.concatenate([np.arange(part.local), part.local + halo_places])
        source_places, scales = sent(
            [torch.from_numpy(each) for each in (kept, edge_scale)], self.rank.device
        )
        return Part(
            ids[kept],
            part.local,
            give,
            take,
            bool(self.vanishing_options.facts(self.problem, self.layout, layer, step).halo.any()),
            block.among(source_places, scales, dtype_of(self.problem.workload.precision)),
        )


def variance_weights(rank: Rank, problem: Problem, layout: Layout, net: Net) -> RowWeights:
    """Return (end, layer) -> how much each exchanged row's rounding adds to variance, float32.

    The weight is the sum of squares of the edge weights by which readers multiply the row. Sender
    and reader both compute it from the reader's edges, so they need not send it.
    """
    weights_of = {}
    by_kind: dict[object, tuple[np.ndarray, np.ndarray]] = {}
    for layer in range(problem.model.first_varying + 1, len(problem.model.layers) + 1):
        edges = net.layer(layer).edges
        if not layout.exchanges_rows(layer):
            continue
        if (kind := (layout.kind(layer), edges)) not in by_kind:
            pieces = [_squares(problem, layout, r, layer, edges) for r in range(layout.ranks)]
            out = np.concatenate([by_sender[rank.rank] for by_sender in pieces])
            by_kind[kind] = out, np.concatenate(pieces[rank.rank])
        for end, weights in zip(("out", "in"), by_kind[kind], strict=True):
            weights_of[end, layer] = torch.from_numpy(weights).to(rank.device)
    return weights_of


def _squares(
    problem: Problem, layout: Layout, reader: int, layer: int, edges: str
) -> list[np.ndarray]:
    """Return, by sender, the sums of squared edge weights of a reader's halo rows."""
    piece = layout.piece(reader, layer)
    block = block_of(layout, reader, layer, edges, problem.workload)
    weight = np.ones(block.edges) if block.weight is None else block.weight.double().numpy()
    sums = np.bincount(block.indices.numpy(), weight**2, minlength=block.n_src)
    squares = sums.astype(np.float32)  # rounded: equal weights tie, whatever the order of sums
    return split(squares[piece.local :], piece.received)
