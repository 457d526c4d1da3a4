"""Feature parallel: sums over edges on columns of all vertices' rows, all else on a rank's rows.

A rank has an equal range of the vertices, and all edges. Every layer is two autograd segments:
`prepare` computes the rows that are summed over edges, and `forward` computes the output from the
sums. Between the segments an all-to-all turns rows into columns, the columns are summed outside of
autograd, and a second all-to-all turns the sums into rows. Which layers do so, and in which order
they multiply, is decided in planner/strategies/layerwise/feature_parallel.py. Encoder, decoder and
loss are those of layerwise.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import features, weighted_block
from gnnplan.executor.layers.kernels import (
    Root,
    aggregate_transposed,
    backward,
    collecting,
    gradient_of,
    root_of,
)
from gnnplan.executor.layers.models import BuiltInLayer
from gnnplan.executor.minibatch.share import Part, Share
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import ColumnExchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import layerwise
from gnnplan.executor.strategies.base import NOTHING, Backward
from gnnplan.executor.strategies.layerwise import LayerInput, backward_prepared
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import FeatureParallel
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.feature_parallel import spans
from gnnplan.planner.vocabulary.schedule import Label


class Worker(layerwise.Worker):
    """A rank that owns a range of the vertices, and reads no halo."""

    uses_cuda_graph = False

    def __init__(
        self, rank: Rank, problem: Problem, strategy: FeatureParallel, first: int = 0
    ) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        model, self.courses = strategy.arranged(problem)
        net = net_of(model, workload).to(device)
        # in an order in which sums over edges find their rows in the processor's cache
        whole, everyone = Layout.of_one(graph, problem.method), graph.stats.vertices
        self.owned_ranges, order = spans(everyone, rank.world), whole.rows(0, 1)
        own = order[self.owned_ranges[rank.rank]]
        self.all_vertices = torch.from_numpy(order).to(device)
        # the edges are the same in all layers
        block = weighted_block(graph, net.edges[0], order, order, *whole.block(0, 1), workload)
        nothing = [own[:0]] * rank.world
        part = Part(own, own.size, nothing, np.zeros(rank.world, np.int64), False, block)
        share = Share(own, everyone, everyone, [part] * len(self.courses))
        super().__init__(rank, problem, share, ExchangeOptions(), net)
        self.model, self.block = model, self.blocks[1]
        self.features = features(graph, own, workload, device)
        if self.courses[0] is None:
            self.cached = self._sum_features(self.features)
            if not self.model.layers[0].reads_own:
                self.features = self.features[:0].clone()

    def _sum_features(self, x: Tensor) -> Tensor:
        """Return layer 1's sums over edges for own vertices [R, F], which are constant."""
        exchange = self._exchange(x.shape[1])
        columns = exchange.to_columns(Label("input_to_columns", -1), exchange.split(x))
        columns = self.net.layer(1).gather(self.block, columns)
        pieces = exchange.to_rows(Label("input_to_rows", -1), columns)
        del columns
        return exchange.join(pieces)

    def _exchange(self, width: int) -> ColumnExchange:
        """Make the all-to-all between rows of `width` numbers and their columns."""
        return ColumnExchange(self.rank, self.owned_ranges, spans(width, self.rank.world))

    def _run_layer(self, step: int, layer: int, inputs: LayerInput) -> tuple[LayerInput, Backward]:
        """Run one layer forward; return the next layer's input and the backward function."""
        net, relu = self.net.layer(layer), self.net.relu_after(layer)
        reads_features = layer == 1 and self.net.encoder is None
        course = self.courses[layer - 1]
        if course is None:
            return super()._run_layer(step, layer, inputs)
        self._reduce_moments(step, layer, inputs)
        varies = inputs.leaf.requires_grad
        x, to_x = collecting(self.features if reads_features else inputs.leaf.detach(), varies)
        if inputs.moments is None:
            inputs.leaf = NOTHING
        exchange, learns = self._exchange(course.width), course.backward and self.training
        outputs, leaf = list[Root](), None  # of the first segment; see backward_prepared
        with self.computing("prepare", step, "f", layer):
            drop = self.drop(step, layer, self.own_vertices)
            if not course.cuts:
                width = self.model.layers[layer - 1].h_in
                first = spans(width, self.rank.world)[self.rank.rank].start
                drop = self.drop(step, layer, self.all_vertices, first)
            moments = inputs.moments.values if inputs.moments else None
            prepared = net.prepare(x, drop, moments)
            sent, own = net.gathers(prepared), prepared
            if prepared.requires_grad and self.model.layers[layer - 1].reads_own:
                own = prepared.detach().requires_grad_()
                leaf = own if learns else None
            outgoing = sent.detach()
            pieces = exchange.split(outgoing) if course.cuts else [outgoing]
            if learns:
                outputs += map(root_of, [sent] if leaf is None else [sent, prepared])
            del outgoing, sent, prepared
        label = Label("aggregate", step, "f", layer)
        with torch.no_grad():
            gather = partial(net.gather, self.block)
            parts = self._sum_columns(label, exchange, pieces, gather, course.cuts, course.joins)
        with self.computing("forward", step, layer=layer):
            sums = [exchange.join(parts) if course.joins else parts[0]]
            del parts
            sums[0].requires_grad_(learns)
            if course.joins:
                out = net.update(sums[0], own, x, self.x0, relu)
            else:  # GCN or SGC, of which bias and ReLU are left
                out, built_in = sums[0], cast(BuiltInLayer, net)
                if built_in.spec.bias:
                    out = out + net.get_parameter("bias")[exchange.columns[self.rank.rank]]
                out = out.relu() if relu else out
            next_inputs, saved = self._make_input(out, step, layer + 1)[0], [root_of(out)]
            del out, x, own

        def back(gradient: Tensor) -> Tensor:
            with self.computing("backward", step, layer=layer):
                backward([saved.pop()], [gradient])
                if not course.backward:
                    return gradient
                gradient = gradient_of(sums.pop())
                pieces = exchange.split(gradient) if course.joins else [gradient]
                del gradient
            gather = partial(aggregate_transposed, self.block)
            parts = self._sum_columns(
                label._replace(direction="b"), exchange, pieces, gather, course.joins, course.cuts
            )
            with self.computing("prepare", step, "b", layer):
                gradient = exchange.join(parts) if course.cuts else parts[0]
                del parts
                backward_prepared(outputs, gradient, leaf)
                outputs.clear()
            if not varies:
                return gradient
            gradient = to_x()
            self._add_moment_grad(step, layer, inputs, gradient)
            return gradient

        return next_inputs, back

    def _sum_columns(
        self,
        label: Label,
        exchange: ColumnExchange,
        pieces: list[Tensor],
        aggregate: Callable[[Tensor], Tensor],
        cuts: bool,
        joins: bool,
    ) -> list[Tensor]:
        """Aggregate own columns of all rows; empties `pieces`.

        pieces: if `cuts`, own rows cut by columns, one piece per peer; else own columns of all
        rows. Returns, if `joins`, pieces of own rows, one per peer; else own columns of all rows.
        """
        columns = pieces[0]
        if cuts:
            columns = exchange.to_columns(label._replace(op="to_columns"), pieces)
        pieces.clear()
        with self.rank.recorder.span(label, "compute"):
            columns = aggregate(columns)
        return exchange.to_rows(label._replace(op="to_rows"), columns) if joins else [columns]


open_worker = Worker
