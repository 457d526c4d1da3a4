"""Feature parallel: sums over edges on columns of all vertices' rows, all else on a rank's rows.

A rank has an equal run of the vertices, and all edges. Every layer is two segments, whose inputs
are leaves and whose backward is called by hand: what is done to its input rows before the sum
(`prepare`), and what is done to the sums (`forward`). Between them rows are turned into columns,
summed outside of autograd, and turned back. Which layers do so, and in which order they multiply,
is decided in planner/strategies/layerwise/columns.py. What is around the layers is as of any worker
that goes layer after layer (layerwise.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import features, weighted_block
from gnnplan.executor.layers.kernels import (
    aggregate_transposed,
    backward,
    gradient_of,
)
from gnnplan.executor.layers.known import KnownLayer
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Turn
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import layerwise
from gnnplan.executor.strategies.base import Back
from gnnplan.executor.strategies.halo import Halo
from gnnplan.executor.strategies.layerwise import Entered, back_to_leaves
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import FeatureParallel
from gnnplan.planner.strategies.layerwise.columns import spans
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.vocabulary.schedule import Label


class Worker(layerwise.Worker):
    """One rank, with its run of the vertices; it reads no halo."""

    replays = False

    def __init__(
        self, rank: Rank, problem: Problem, strategy: FeatureParallel, first: int = 0
    ) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        self.rank, self.problem, self.options = rank, problem, ExchangeOptions()
        self.shapes, self.courses = strategy.arranged(problem)
        self.layers = range(1, len(self.courses) + 1)
        self.net = net_of(self.shapes, workload).to(device)
        self.plain_halo = self.halo = Halo(rank, {})
        self.errors = self.halo.errors
        self.vertices_in_all = graph.stats.vertices
        # in an order in which a sum finds its rows in cache
        whole = Layout.of_one(graph, problem.method)
        self.runs, everything = spans(self.vertices_in_all, rank.world), whole.rows(0, 1)
        own = everything[self.runs[rank.rank]]
        self.everyone = torch.from_numpy(everything).to(device)
        self.own_vertices = self.scored_vertices = self.everyone[self.runs[rank.rank]]
        self.vertices = {1: self.own_vertices}
        edges = self.net.layer(1).edges  # layers of a kind have one kind of edges
        self.block = weighted_block(
            graph, edges, everything, everything, *whole.block(0, 1), workload
        ).to(device)
        self.targets = Targets(graph, own, workload, device)
        self.scored_by = [self.targets]
        self.features = features(graph, own, workload, device)
        self.cached: Tensor | None = None
        self.to_sum: Tensor | None = None
        if self.courses[0] is None:
            self.cached = self._sum_features(self.features)
            if not self.shapes.layers[0].reads_own:
                self.features = self.features[:0].clone()

    def _sum_features(self, x: Tensor) -> Tensor:
        """Layer 1's sums of own rows [R, F]; they stay the same."""
        turn = self._turn(x.shape[1])
        columns = turn.to_columns(Label("input_to_columns", -1), turn.pieces(x))
        columns = self.net.layer(1).gather(self.block, columns)
        pieces = turn.to_rows(Label("input_to_rows", -1), columns)
        del columns
        return turn.together(pieces)

    def _turn(self, width: int) -> Turn:
        """Between rows of `width` numbers and columns of them."""
        return Turn(self.rank, self.runs, spans(width, self.rank.world))

    def _layer(self, step: int, layer: int, entered: Entered) -> tuple[Entered, Back]:
        """Forward of one layer, by rows or by columns -> the next layer's, and the way back."""
        net, relu = self.net.layer(layer), self.net.relu_after(layer)
        reads_features = layer == 1 and self.net.encoder is None
        x = self.features if reads_features else entered.leaf
        course = self.courses[layer - 1]
        if course is None:
            return self._of_constant_sums(step, x)
        self._moments(step, layer, entered)
        turn, learns = self._turn(course.width), course.backward and self.training
        made, leaf = list[Tensor](), None  # what is sent and, with a leaf beside it, own rows
        with self.rank.recorder.span(Label("prepare", step, "f", layer), "compute"):
            drop = self.drop(step, layer, self.own_vertices)
            if not course.cuts:
                width = self.shapes.layers[layer - 1].h_in
                first = spans(width, self.rank.world)[self.rank.rank].start
                drop = self.drop(step, layer, self.everyone, first)
            moments = entered.moments.values if entered.moments else None
            prepared = net.prepare(x, drop, moments)
            sent, own = net.gathers(prepared), prepared
            if prepared.requires_grad and self.shapes.layers[layer - 1].reads_own:
                own = prepared.detach().requires_grad_()
                leaf = own if learns else None
            outgoing = sent.detach()
            pieces = turn.pieces(outgoing) if course.cuts else [outgoing]
            if learns:
                made += [sent] if leaf is None else [sent, prepared]
            del outgoing, sent, prepared
        where = Label("aggregate", step, "f", layer)
        with torch.no_grad():
            gather = partial(net.gather, self.block)
            joined = self._sum_columns(where, turn, pieces, gather, course.cuts, course.joins)
        with self.rank.recorder.span(Label("forward", step, layer=layer), "compute"):
            sums = [turn.together(joined) if course.joins else joined[0]]
            del joined
            sums[0].requires_grad_(learns)
            if course.joins:
                out = net.update(sums[0], own, x, self.x0, relu)
            else:
                out = self._end_by_columns(cast(KnownLayer, net), sums[0], turn, relu)
            following, kept = self._enter(out, step, layer + 1)[0], [out]
            del out

        def back(gradient: Tensor) -> Tensor:
            with self.rank.recorder.span(Label("backward", step, layer=layer), "compute"):
                backward([kept.pop()], [gradient])
                if not course.backward:
                    return gradient
                gradient = gradient_of(sums.pop())
                pieces = turn.pieces(gradient) if course.joins else [gradient]
                del gradient
            gather = partial(aggregate_transposed, self.block)
            joined = self._sum_columns(
                where._replace(way="b"), turn, pieces, gather, course.joins, course.cuts
            )
            with self.rank.recorder.span(Label("prepare", step, "b", layer), "compute"):
                gradient = turn.together(joined) if course.cuts else joined[0]
                del joined
                back_to_leaves(made, gradient, leaf)
                made.clear()
            if not entered.leaf.requires_grad:
                return gradient
            gradient = gradient_of(entered.leaf)
            self._moments_home(step, layer, entered, gradient)
            return gradient

        return following, back

    def _of_constant_sums(self, step: int, x: Tensor) -> tuple[Entered, Back]:
        """Layer 1, where its sums were made at set-up."""
        net, label = self.net.layer(1), Label("forward", step, layer=1)
        assert self.cached is not None
        with self.rank.recorder.span(label, "compute"):
            out = net.update(self.cached, x, x, None, self.net.relu_after(1))
            following, _ = self._enter(out, step, 2)

        def back(gradient: Tensor) -> Tensor:
            with self.rank.recorder.span(label._replace(op="backward"), "compute"):
                backward([out], [gradient])
            return gradient

        return following, back

    def _sum_columns(
        self,
        label: Label,
        turn: Turn,
        pieces: list[Tensor],
        aggregate: Callable[[Tensor], Tensor],
        cuts: bool,
        joins: bool,
    ) -> list[Tensor]:
        """Aggregate columns of all rows.

        cuts: they are cut of own rows, whose `pieces` these are; else they are the one. joins: what
        is made is cut into pieces to be joined to own rows. `pieces` is left empty.
        """
        columns = pieces[0]
        if cuts:
            columns = turn.to_columns(label._replace(op="to_columns"), pieces)
        pieces.clear()
        with self.rank.recorder.span(label, "compute"):
            columns = aggregate(columns)
        return turn.to_rows(label._replace(op="to_rows"), columns) if joins else [columns]

    def _end_by_columns(self, net: KnownLayer, sums: Tensor, turn: Turn, relu: bool) -> Tensor:
        """What a layer of GCN or SGC does to sums [N, C], of own columns."""
        if net.spec.bias:
            sums = sums + net.get_parameter("bias")[turn.columns[self.rank.rank]]
        return sums.relu() if relu else sums


open_worker = Worker
