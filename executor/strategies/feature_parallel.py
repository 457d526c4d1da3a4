"""Feature parallel: sums over edges on columns of all vertices' rows, all else on a rank's rows.

A rank has an equal run of the vertices, and all edges. Every layer is two segments, whose inputs
are leaves and whose backward is called by hand: what is done to its input rows before the sum
(`prepare`), and what is done to the sums (`forward`). Between them rows are turned into columns,
summed outside of autograd, and turned back. Which layers do so, and in which order they multiply,
is decided in planner/strategies/layerwise/columns.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import (
    features,
    sparse_features,
    weighted_block,
)
from gnnplan.executor.layers.kernels import (
    FeatureRows,
    aggregate_transposed,
    backward,
    gradient_of,
)
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import GCNLayer
from gnnplan.executor.layers.norms import Moments
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Turn, all_reduce
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import FeatureParallel
from gnnplan.planner.strategies.layerwise.columns import Course, spans
from gnnplan.planner.vocabulary.schedule import Label


@dataclass
class _Layer:
    """What a layer's forward keeps for its backward."""

    inputs: FeatureRows  # leaf: own rows [R, H_in], or own columns of all rows [N, C]
    moments: Moments | None = None  # batch norm's
    prepared: FeatureRows | None = None  # with its graph; what is summed is made of it
    made: Tensor | None = None  # what is summed, with its graph
    own: FeatureRows | None = None  # leaf: prepared rows that the layer reads besides the sums
    sums: Tensor | None = None  # leaf
    out: Tensor | None = None  # h_l, with its graph


class Worker(base.Worker):
    """One rank, with its run of the vertices."""

    def __init__(self, rank: Rank, problem: Problem, strategy: FeatureParallel) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        self.rank, self.problem, self.training = rank, problem, False
        self.shapes, self.courses = strategy.arranged(problem)
        self.net = net_of(self.shapes, workload).to(device)
        count = graph.stats.vertices
        whole = Layout.of_one(graph)  # in an order in which a sum finds its rows in cache
        self.runs, everything = spans(count, rank.world), whole.rows(0, 1)
        own = everything[self.runs[rank.rank]]
        self.everyone = torch.from_numpy(everything).to(device)
        self.own_vertices = self.everyone[self.runs[rank.rank]]
        edges = self.net.layer(1).edges  # layers of a kind have one kind of edges
        self.block = weighted_block(
            graph, edges, everything, everything, *whole.block(0, 1), workload
        ).to(device)
        self.targets = Targets(graph, own, workload, device)
        read = sparse_features if problem.model.nonzeros else features
        self.features: FeatureRows = read(graph, own, workload, device)
        self.cached: Tensor | None = None
        self.x0: Tensor | None = None  # leaf: the initial rows that layers of GCNII read
        if self.courses[0] is None:
            self.cached = self._sum_features(cast(Tensor, self.features))
            if not self.shapes.layers[0].reads_own:
                self.features = cast(Tensor, self.features)[:0].clone()

    def _sum_features(self, x: Tensor) -> Tensor:
        """Layer 1's sums of own rows [R, F]; they stay the same."""
        turn = self._turn(x.shape[1])
        columns = self._to_columns(Label("input_to_columns", -1), turn, turn.pieces(x))
        columns = self.net.layer(1).gather(self.block, columns)
        pieces = self._to_rows(Label("input_to_rows", -1), turn, columns)
        del columns
        return turn.together(pieces)

    # -- rows and columns --------------------------------------------------------------------------

    def _turn(self, width: int) -> Turn:
        """Between rows of `width` numbers and columns of them."""
        return Turn(self.rank, self.runs, spans(width, self.rank.world))

    def _to_columns(self, label: Label, turn: Turn, pieces: Sequence[Tensor]) -> Tensor:
        if self.rank.world == 1:
            return pieces[0]
        nbytes = self.rank.count(label, turn.nbytes("to_columns", pieces[0].element_size()))
        with self.rank.span(label, "comm", nbytes):
            return turn.to_columns(pieces)

    def _to_rows(self, label: Label, turn: Turn, columns: Tensor) -> list[Tensor]:
        if self.rank.world == 1:
            return [columns]
        nbytes = self.rank.count(label, turn.nbytes("to_rows", columns.element_size()))
        with self.rank.span(label, "comm", nbytes):
            return turn.to_rows(columns)

    # -- one step ----------------------------------------------------------------------------------

    def _drop(self, step: int, layer: int, by_columns: bool = False) -> Drop:
        """Dropout before the layer (0: encoder, L + 1: decoder) of own rows or own columns."""
        seed = self.problem.workload.seed
        p = self.problem.workload.dropout if self.training else 0.0
        if not by_columns:
            return Drop(p, seed, step, layer, self.own_vertices, training=self.training)
        width = self.shapes.layers[layer - 1].h_in
        first = spans(width, self.rank.world)[self.rank.rank].start
        return Drop(p, seed, step, layer, self.everyone, first, self.training)

    def _leaf(self, h: Tensor, layer: int) -> Tensor:
        """h_{l-1} as the input of a layer (L + 1: of the decoder)."""
        return h.detach().requires_grad_(self.training and layer > self.shapes.first_varying)

    def _moments(self, step: int, layer: int, entered: _Layer) -> None:
        """Batch norm's moments of h_{l-1}, of the vertices of all ranks."""
        norm = self.net.batch_norm(layer)
        if norm is None or not self.training:
            return
        sums = norm.sums(cast(Tensor, entered.inputs))
        all_reduce(self.rank, Label("moments", step, "f", layer), sums, self.reduce_group)
        entered.moments = Moments.of(norm, sums, len(self.everyone))

    def _moments_home(self, step: int, layer: int, entered: _Layer) -> None:
        """Add to the inputs' gradient what they get through the moments."""
        moments, inputs = entered.moments, cast(Tensor, entered.inputs)
        if moments is not None:
            label = Label("moments", step, "b", layer)
            all_reduce(self.rank, label, moments.gradient, self.reduce_group)
            moments.add_home(inputs, gradient_of(inputs))

    def _prepare(self, step: int, layer: int, entered: _Layer, course: Course) -> None:
        """From the layer's inputs to what is summed."""
        net, drop = self.net.layer(layer), self._drop(step, layer, not course.cuts)
        with torch.set_grad_enabled(self.training):
            x = entered.inputs
            if entered.moments is None:
                prepared: FeatureRows = net.prepare(x, drop)
            else:
                prepared = net.prepare(cast(Tensor, x), drop, entered.moments.values)
            entered.made = net.gathers(prepared)
        entered.prepared = entered.own = prepared
        if self.shapes.layers[layer - 1].reads_own and isinstance(prepared, Tensor):
            entered.own = prepared.detach().requires_grad_(prepared.requires_grad)

    def _layer(self, step: int, layer: int, entered: _Layer) -> Tensor:
        """Forward of one layer -> h_l without its graph, by rows or by columns."""
        net, course, relu = (
            self.net.layer(layer),
            self.courses[layer - 1],
            self.net.relu_after(layer),
        )
        if course is None:
            assert self.cached is not None
            with self.rank.span(Label("forward", step, layer=layer), "compute"):
                with torch.set_grad_enabled(self.training):
                    x = entered.inputs
                    entered.out = net.update(self.cached, x, x, None, relu)
                return entered.out.detach()
        self._moments(step, layer, entered)
        turn = self._turn(course.width)
        with self.rank.span(Label("prepare", step, "f", layer), "compute"):
            self._prepare(step, layer, entered, course)
            assert entered.made is not None
            outgoing = entered.made.detach()
            pieces = turn.pieces(outgoing) if course.cuts else [outgoing]
            del outgoing
            if not (course.backward and self.training):
                entered.made = entered.prepared = None
        columns = pieces[0]
        if course.cuts:
            columns = self._to_columns(Label("to_columns", step, "f", layer), turn, pieces)
        del pieces
        with self.rank.span(Label("aggregate", step, "f", layer), "compute"), torch.no_grad():
            columns = net.gather(self.block, columns)
        joined = [columns]
        if course.joins:
            joined = self._to_rows(Label("to_rows", step, "f", layer), turn, columns)
        del columns
        with self.rank.span(Label("forward", step, layer=layer), "compute"):
            sums = turn.together(joined) if course.joins else joined[0]
            del joined
            entered.sums = sums = sums.requires_grad_(self.training and course.backward)
            with torch.set_grad_enabled(self.training):
                if course.joins:
                    assert entered.own is not None
                    out = net.update(sums, entered.own, entered.inputs, self.x0, relu)
                else:
                    out = self._end_by_columns(cast(GCNLayer, net), sums, turn, relu)
            entered.out = out
            return out.detach()

    def _end_by_columns(self, net: GCNLayer, sums: Tensor, turn: Turn, relu: bool) -> Tensor:
        """What a layer of GCN or SGC does to sums [N, C], of own columns."""
        if net.bias is not None:
            sums = sums + net.bias[turn.columns[self.rank.rank]]
        return sums.relu() if relu else sums

    def _backward(self, step: int, layer: int, entered: _Layer, home: Tensor) -> Tensor | None:
        """Backward of one layer: the gradient of h_l -> that of h_{l-1}.

        None if h_{l-1} is constant.
        """
        course = self.courses[layer - 1]
        gradient: Tensor | None = None
        pieces: Sequence[Tensor] = ()
        with self.rank.span(Label("backward", step, layer=layer), "compute"):
            assert entered.out is not None
            backward([entered.out], [home])
            entered.out = None
            del home
            if course is None or not course.backward:
                return None
            assert entered.sums is not None and entered.made is not None
            gradient, entered.sums = gradient_of(entered.sums), None
            turn = self._turn(course.width)
            pieces = turn.pieces(gradient) if course.joins else [gradient]
            del gradient
        columns = pieces[0]
        if course.joins:
            columns = self._to_columns(Label("to_columns", step, "b", layer), turn, pieces)
        del pieces
        with self.rank.span(Label("aggregate", step, "b", layer), "compute"):
            columns = aggregate_transposed(self.block, columns)
        joined = [columns]
        if course.cuts:
            joined = self._to_rows(Label("to_rows", step, "b", layer), turn, columns)
        del columns
        with self.rank.span(Label("prepare", step, "b", layer), "compute"):
            gradient = turn.together(joined) if course.cuts else joined[0]
            del joined
            outputs, gradients = [entered.made], [gradient]
            own = entered.own
            if isinstance(own, Tensor) and own is not entered.prepared and own.grad is not None:
                outputs.append(cast(Tensor, entered.prepared))
                gradients.append(own.grad)
            backward(outputs, gradients)
            del outputs, gradients, gradient
            entered.made = entered.prepared = entered.own = None
        self._moments_home(step, layer, entered)
        inputs = entered.inputs
        return inputs.grad if isinstance(inputs, Tensor) else None

    def _forward(self, step: int) -> tuple[list[_Layer], Tensor | None]:
        """Forward of all layers.

        Returns what each keeps, last the decoder, whose inputs are h_L [R, H_L]; and the encoder's
        output with its graph, if there is an encoder.
        """
        encoded, self.x0, h = None, None, self.features
        if self.net.encoder is not None:
            with self.rank.span(Label("encode", step, "f"), "compute"):
                with torch.set_grad_enabled(self.training):
                    encoded = self.net.encode(self.features, self._drop(step, 0))
                if self.net.initial:
                    self.x0 = encoded.detach().requires_grad_(self.training)
                h = self._leaf(encoded, 1)
        kept = [_Layer(h)]
        for layer in range(1, len(self.courses) + 1):
            out = self._layer(step, layer, kept[-1])
            if not self.training:
                kept.clear()
            kept.append(_Layer(self._leaf(out, layer + 1)))
        self._moments(step, len(self.courses) + 1, kept[-1])
        return kept, encoded

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step; adds gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits [R, C].
        """
        self.training, layers = True, len(self.courses)
        kept, encoded = self._forward(step)
        last = kept.pop()
        inputs = cast(Tensor, last.inputs)
        with self.rank.span(Label("loss", step), "compute"):
            moments = last.moments.values if last.moments else None
            logits = self.net.decode(inputs, self._drop(step, layers + 1), moments)
            loss = self.targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        loss, logits = loss.detach(), logits.detach()  # their graphs hold h_L
        self._moments_home(step, layers + 1, last)
        gradient = inputs.grad
        del last, inputs
        for layer in range(layers, 0, -1):
            assert gradient is not None
            gradient = self._backward(step, layer, kept.pop(), gradient)
        if encoded is not None:
            with self.rank.span(Label("encode", step, "b"), "compute"):
                assert gradient is not None
                if self.x0 is not None and self.x0.grad is not None:
                    gradient = gradient + self.x0.grad
                backward([encoded], [gradient])
        self.x0 = None
        return loss, logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [R, C] without dropout."""
        self.training = False
        return self.net.decode(cast(Tensor, self._forward(step)[0][-1].inputs))

    def counts(self, logits: Tensor) -> Tensor:
        return self.targets.counts(logits)


def open_worker(rank: Rank, problem: Problem, strategy: FeatureParallel, first: int) -> Worker:
    """This rank's part of the strategy."""
    return Worker(rank, problem, strategy)
