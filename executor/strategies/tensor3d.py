"""3D tensor parallel: ranks form a grid, and have a tile of every tensor of a layer.

Which axis shares what in which layer is said in planner/strategies/layerwise/tiles.py. Passes are
called by hand: a layer is a sum over the edges of a tile, whose partial sums an all-reduce adds up,
and a product with a tile of the weights, whose partial sums another one adds up. A rank trains its
share of each tile of the weights; before a product, ranks put together the whole tile.

Outputs are on all ranks along the axis of columns: so are the last layer's rows, and the loss,
which the first of these ranks counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import features, tile
from gnnplan.executor.layers.kernels import (
    Block,
    aggregate,
    aggregate_transposed,
    dropout,
    dropout_mask,
    gradient_of,
    linear,
    weight_gradient,
)
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Turn, all_reduce
from gnnplan.executor.ranks.learner import Gradients, Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Tensor3D
from gnnplan.planner.strategies.layerwise.columns import spans
from gnnplan.planner.strategies.layerwise.tiles import AXES, Axis, Tiles, layers_of, orders
from gnnplan.planner.vocabulary.schedule import Label


class Weights:
    """A layer's tile of the weights [D' tile, m D tile], with the bias where a rank has it.

    Its numbers in a row are shared out along the axis of rows; this rank trains `own` of them.
    """

    def __init__(self, net: Net, tiles: Tiles, rank: int, place: Mapping[Axis, int]) -> None:
        grid, axes, layer = tiles.grid, tiles.axes, net.layer(tiles.layer)
        self.columns = spans(tiles.spec.h_in, grid.size(axes.columns))[place[axes.columns]]
        self.outputs = spans(tiles.spec.h_out, grid.size(axes.sources))[place[axes.sources]]
        self.matrices = ["weight", "weight_self"][: tiles.spec.matrices]
        self.has_bias = tiles.spec.bias and place[axes.columns] == 0
        self.shape = (self.outputs.stop - self.outputs.start, int(tiles.summed[rank]))
        self.runs = spans(int(tiles.weights[rank]), grid.size(axes.rows))
        parts = [layer.get_parameter(name)[self.outputs, self.columns] for name in self.matrices]
        tensors = [torch.cat(parts, 1).reshape(-1)]
        if self.has_bias:
            tensors.append(layer.get_parameter("bias")[self.outputs])
        self.own = nn.Parameter(torch.cat(tensors).detach()[self.runs[place[axes.rows]]].clone())

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor | None]:
        """All numbers of the tile -> the matrix, and the bias if it is here."""
        numbers = self.shape[0] * self.shape[1]
        return flat[:numbers].view(self.shape), flat[numbers:] if self.has_bias else None

    @torch.no_grad()
    def put_into(self, net: Net, layer: int, flat: Tensor) -> None:
        """Write the tile's numbers to their place in the whole model."""
        matrix, bias = self.split(flat)
        width = self.columns.stop - self.columns.start
        for place, name in enumerate(self.matrices):
            part = matrix[:, place * width : (place + 1) * width]
            net.layer(layer).get_parameter(name)[self.outputs, self.columns] = part
        if bias is not None:
            net.layer(layer).get_parameter("bias")[self.outputs] = bias


@dataclass
class _Kept:
    """What a layer's forward keeps for its backward, which lets go of it piece by piece."""

    sums: Tensor | None  # [rows, m D tile]
    stopped: Tensor | None = None  # inputs that ReLU and dropout set to zero; None: none
    gradient: Tensor | None = None  # of the outputs [rows, D' tile], once it is there


class Worker(base.Worker):
    """One rank. `net` is the whole model, as it began and, after `close`, as it ended."""

    def __init__(self, rank: Rank, problem: Problem, strategy: Tensor3D, first: int = 0) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        self.rank, self.problem, self.training = rank, problem, False
        self.layers = layers_of(problem, strategy.grid)
        self.grid, model = strategy.grid, self.layers[0].model
        self.places = {axis: int(self.grid.places(axis)[rank.rank]) for axis in AXES}
        self.groups: dict[Axis, tuple[int, ...]] = {}
        for axis in AXES:
            for group in self.grid.groups(axis):
                if len(group) > 1:
                    rank.groups.of(group)
                if rank.rank in group:
                    self.groups[axis] = group
        self.net = net_of(model, workload).to(device)
        self.weights = [Weights(self.net, tiles, rank.rank, self.places) for tiles in self.layers]
        # from all of a tile's numbers in a row on every rank along the axis to a share of them
        self.shares = [
            Turn(rank, spans(len(weights.runs), len(weights.runs)), weights.runs, self.groups[axis])
            for axis, weights in zip((t.axes.rows for t in self.layers), self.weights, strict=True)
        ]
        both = orders(graph.stats.vertices, workload.seed)
        self.tiles: dict[int, Block] = {}  # by what layers have in common
        self.own: dict[int, tuple[Tensor, Tensor]] = {}
        self.sources: list[Tensor] = []  # vertices of every layer's inputs
        for tiles in self.layers:
            src = self._run(both[(tiles.layer - 1) % 2], tiles.axes.sources)
            dst = self._run(both[tiles.layer % 2], tiles.axes.rows)
            self.sources.append(torch.from_numpy(src).to(device))
            key = _key(tiles.layer)
            if tiles.is_summed and key not in self.tiles:
                edges = self.net.layer(tiles.layer).edges
                self.tiles[key] = tile(graph, edges, dst, src, workload, device)
                if tiles.spec.reads_own:
                    self.own[key] = self._places(dst, src)
        last = self.layers[-1]
        turned = last.axes.sources
        runs, classes = (spans(n, self.grid.size(turned)) for n in (dst.size, last.spec.h_out))
        self.turn = Turn(rank, runs, classes, self.groups[turned])
        whole = dst[runs[self.places[turned]]]
        self.targets = Targets(graph, whole, workload, device)
        # ranks along the axis of columns have the same logits: the first of them counts
        self.counting = self.places[last.axes.columns] == 0
        if self.layers[0].is_summed:
            src = self._run(both[0], self.layers[0].axes.sources)
            self.features = features(graph, src, workload, device)[
                :, self.weights[0].columns
            ].clone()
        else:
            self.features = self._sum_features(both)

    def _run(self, order: Ids, axis: Axis) -> Ids:
        """This rank's run of vertices in an order that an axis shares."""
        return order[spans(order.size, self.grid.size(axis))[self.places[axis]]]

    def _places(self, dst: Ids, src: Ids) -> tuple[Tensor, Tensor]:
        """Where vertices that are in both are in each."""
        _, there, here = np.intersect1d(dst, src, assume_unique=True, return_indices=True)
        device = self.rank.device
        return torch.from_numpy(there).to(device), torch.from_numpy(here).to(device)

    def _sum_features(self, both: tuple[Ids, Ids]) -> Tensor:
        """Layer 1's sums [rows, m D tile]; they stay the same. A rank makes its own, run by run."""
        graph, workload, device = self.problem.data, self.problem.workload, self.rank.device
        first, columns = self.layers[0], self.weights[0].columns
        dst, edges = self._run(both[1], first.axes.rows), self.net.layer(1).edges
        width = columns.stop - columns.start
        dtype = self.weights[0].own.dtype
        sums = torch.zeros(dst.size, width * first.spec.matrices, dtype=dtype, device=device)
        for run in spans(both[0].size, self.grid.size(first.axes.sources)):
            src = both[0][run]
            x = features(graph, src, workload, device)[:, columns]
            block = tile(graph, edges, dst, src, workload, device)
            sums[:, :width] += aggregate(block, x.contiguous())
            if first.spec.reads_own:
                there, here = self._places(dst, src)
                sums[there, width:] = x[here]
        return sums

    # -- tensors of several ranks ------------------------------------------------------------------

    def _sum(self, label: Label, tensor: Tensor, axis: Axis) -> Tensor:
        """Sum a tensor over the ranks along an axis, in place."""
        all_reduce(self.rank, label, tensor, self.groups[axis])
        return tensor

    def _gather_weights(self, step: int, tiles: Tiles, way: str) -> tuple[Tensor, Tensor | None]:
        """The layer's tile of the weights, and the bias where it is here."""
        weights, turn = self.weights[tiles.layer - 1], self.shares[tiles.layer - 1]
        label = Label("gather_weights", step, way, tiles.layer)
        for_all = weights.own.detach().expand(len(turn.group), -1)
        return weights.split(turn.together(turn.to_rows(label, for_all))[0])

    # -- one step ----------------------------------------------------------------------------------

    def _forward(self, step: int) -> tuple[list[_Kept], Tensor]:
        """Forward of all layers -> what each keeps, and this rank's tile of the logits."""
        kept, h = [], self.features
        for tiles in self.layers:
            layer, axes = tiles.layer, tiles.axes
            each = self._aggregate(step, tiles, h) if tiles.is_summed else _Kept(h)
            del h
            assert each.sums is not None
            if tiles.is_summed:
                self._sum(Label("sum_aggregates", step, "f", layer), each.sums, axes.sources)
            matrix, bias = self._gather_weights(step, tiles, "f")
            with self.rank.recorder.span(Label("forward", step, layer=layer), "compute"):
                h = linear(each.sums, matrix, bias)
                del matrix, bias
            self._sum(Label("sum_outputs", step, "f", layer), h, axes.columns)
            if self.training:
                kept.append(each)
            del each
        return kept, h

    def _aggregate(self, step: int, tiles: Tiles, inputs: Tensor) -> _Kept:
        """Partial sums [rows, m D tile] of the inputs [sources, D tile], which ReLU changes."""
        layer, relu = tiles.layer, self.net.relu_after(tiles.layer - 1)
        p = self.problem.workload.dropout if self.training and tiles.spec.drops else 0.0
        with self.rank.recorder.span(Label("aggregate", step, "f", layer), "compute"):
            if relu:
                inputs.relu_()
            seed, first = self.problem.workload.seed, self.weights[layer - 1].columns.start
            x = dropout(inputs, seed, step, layer, self.sources[layer - 1], p, first)
            stopped = None
            if self.training and tiles.varies and relu:
                stopped = x <= 0
            elif self.training and tiles.varies and p:
                which = self.sources[layer - 1]
                stopped = ~dropout_mask(seed, step, layer, which, x.shape[1], p, first)
            sums = aggregate(self.tiles[_key(layer)], x)
            if tiles.spec.reads_own:
                width = x.shape[1]
                both = sums.new_zeros(len(sums), 2 * width)
                both[:, :width] = sums
                sums = both
                there, here = self.own[_key(layer)]
                sums[:, width:].index_copy_(0, there, x.index_select(0, here))
        return _Kept(sums, stopped)

    def _backward(self, step: int, tiles: Tiles, kept: _Kept) -> Tensor | None:
        """From the gradient of the outputs to that of the inputs; None where they are constant.

        Adds the weights' to that of this rank's share.
        """
        layer, axes, weights = tiles.layer, tiles.axes, self.weights[tiles.layer - 1]
        matrix, bias = self._gather_weights(step, tiles, "b")
        with self.rank.recorder.span(Label("backward", step, layer=layer), "compute"):
            gradient, sums = kept.gradient, kept.sums
            kept.gradient = kept.sums = None
            assert gradient is not None and sums is not None
            to_weights = [weight_gradient(gradient, sums).reshape(-1)]
            del sums
            if bias is not None:
                to_weights.append(gradient.sum(0))
            flat = torch.cat(to_weights)
            del to_weights
            to_sums = None
            if tiles.varies:
                to_sums = linear(gradient, matrix.t().contiguous())
            del matrix, bias, gradient
        turn, label = self.shares[layer - 1], Label("scatter_weights", step, "b", layer)
        own = gradient_of(weights.own)
        for piece in turn.to_columns(label, turn.pieces(flat[None])):
            own += piece
        del flat
        if to_sums is None:
            return None
        self._sum(Label("sum_aggregates", step, "b", layer), to_sums, axes.sources)
        with self.rank.recorder.span(Label("aggregate", step, "b", layer), "compute"):
            width = to_sums.shape[1] // tiles.spec.matrices
            inputs = aggregate_transposed(self.tiles[_key(layer)], to_sums[:, :width])
            if tiles.spec.reads_own:
                there, here = self.own[_key(layer)]
                inputs.index_add_(0, here, to_sums[:, width:].index_select(0, there))
            if kept.stopped is not None:
                inputs.masked_fill_(kept.stopped, 0.0)
                if self.problem.workload.dropout and tiles.spec.drops:
                    inputs *= 1.0 / (1.0 - self.problem.workload.dropout)
        return self._sum(Label("sum_inputs", step, "b", layer), inputs, axes.rows)

    def _to_rows(self, step: int, own: Tensor) -> Tensor:
        """Own columns of the logits [rows, C tile] -> some of these rows, whole [R, C]."""
        return self.turn.together(self.turn.to_rows(Label("to_rows", step, "f"), own))

    @torch.no_grad()
    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step; adds gradients to the shares' .grad.

        Returns this rank's part of the loss, and the logits of its rows.
        """
        self.training = True
        kept, h = self._forward(step)
        logits = self._to_rows(step, h)
        del h
        with self.rank.recorder.span(Label("loss", step), "compute"), torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
            loss, of_rows, leaf.grad = loss.detach(), gradient_of(leaf), None
        pieces = self.turn.pieces(of_rows)
        del leaf, of_rows
        kept[-1].gradient = self.turn.to_columns(Label("to_columns", step, "b"), pieces)
        del pieces
        for tiles in reversed(self.layers):
            gradient = self._backward(step, tiles, kept.pop())
            if kept:
                kept[-1].gradient = gradient
            del gradient
        return loss if self.counting else torch.zeros_like(loss), logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [R, C] without dropout."""
        self.training = False
        return self._to_rows(step, self._forward(step)[1])

    def counts(self, logits: Tensor) -> Tensor:
        found = self.targets.counts(logits)
        return found if self.counting else torch.zeros_like(found)

    # -- weights -----------------------------------------------------------------------------------

    def open_learner(self) -> Learner:
        """Nothing is left to sum: every number of the weights is one rank's."""
        shares = Gradients([weights.own for weights in self.weights], (self.rank.rank,))
        self.learner = Learner(self.rank, self.problem.workload, [shares])
        return self.learner

    @property
    def held(self) -> None:
        return None  # a rank's numbers of a weight are a run of a tile, not columns

    def trained(self) -> dict[str, Tensor]:
        return {f"layer{i}": weights.own for i, weights in enumerate(self.weights, 1)}

    def close(self) -> None:
        """Put the whole model together: ranks write their tiles, and the sum is everybody's."""
        self.rank.recorder.recording = False
        for tiles, weights in zip(self.layers, self.weights, strict=True):
            matrix, bias = self._gather_weights(-1, tiles, "f")
            layer = self.net.layer(tiles.layer)
            flat = matrix.reshape(-1) if bias is None else torch.cat([matrix.reshape(-1), bias])
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.zero_()
            if self.places[tiles.axes.rows] == 0:
                weights.put_into(self.net, tiles.layer, flat)
            for parameter in layer.parameters():
                everyone = tuple(range(self.rank.world))
                all_reduce(self.rank, Label("whole", -1), parameter.data, everyone)
        self.rank.recorder.recording = True


def _key(layer: int) -> int:
    """Layers with an equal key have the same tile of the adjacency: three roles, two orders."""
    return (layer - 1) % 6


open_worker = Worker
