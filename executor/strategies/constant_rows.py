"""Set-up of full-graph training: the constant features that a rank keeps.

A rank loads the features of its own vertices. From their owners it fetches the features of its
preload (vertices of other ranks that it computes too) and, if layer 1 reads them, of its halo. A
rank that trains on fewer rows than its layout has keeps all of them in the server's memory, and
loads the rows that it needs from there (ConstantRows).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.layers.models import Net
from gnnplan.executor.minibatch.share import block_of, source_of
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
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


def own_features(rank: Rank, problem: Problem, layout: Layout) -> Callable[[], Tensor] | None:
    """Return a function that loads features of layer 1's destinations; None if not all are own."""
    own = layout.own(rank.rank)
    if layout.rows(rank.rank, 1).size > own.size:
        return None
    return partial(features, problem.data, own, problem.workload, rank.device)


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

    def places(self, layout: Layout) -> Tensor:
        """Return the places of a layout's constant rows among the kept rows."""
        return torch.from_numpy(self.place_of[self._needed_ids(layout)])

    def copy_rows(self, places: Tensor) -> list[Tensor]:
        """Return copies of the rows at these places."""
        return [kept.index_select(0, places) for kept in self.kept]

    def load(self, layout: Layout) -> list[Tensor]:
        """Return the constant rows of a layout: all kept rows, or copies of some."""
        return self.kept if layout is self.layout else self.copy_rows(self.places(layout))

    def on_device(self, rows: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Move rows to the device: the input of layer 1 or the encoder, and a cached aggregate."""
        loaded = [each.to(self.rank.device) for each in rows]
        if not self.cached:
            return loaded[0], None
        own = loaded[1] if len(loaded) > 1 else loaded[0][:0]
        return own, loaded[0]
