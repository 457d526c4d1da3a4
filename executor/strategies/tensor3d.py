"""3D tensor parallel: ranks form a grid, and each has a tile of every tensor of a layer.

planner/strategies/layerwise/tensor3d.py defines which axis of the grid shares which dimension in
which layer. Forward and backward passes are written by hand. A layer sums over the edges of a tile
and all-reduces the partial sums; then it multiplies by a tile of the weights and all-reduces the
partial products. A rank trains its share of each tile of the weights, and gathers the whole tile
before a product.

All ranks along the axis of columns have the same outputs: so the last layer's rows, too, and the
loss, which only the first of these ranks counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import ColumnExchange, all_reduce
from gnnplan.executor.ranks.learner import Gradients, Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import NOTHING
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Tensor3D
from gnnplan.planner.strategies.layerwise.feature_parallel import spans
from gnnplan.planner.strategies.layerwise.tensor3d import AXES, Axis, Tiles, layers_of, orders
from gnnplan.planner.vocabulary.numbers import Group
from gnnplan.planner.vocabulary.schedule import Label


class Weights:
    """A layer's tile of the weights [D' tile, m D tile], and the bias on ranks that have it.

    The flattened tile is split along the axis of rows; this rank trains the share `own`.
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
        """Split the flattened tile into the matrix, and the bias if this rank has it."""
        numbers = self.shape[0] * self.shape[1]
        return flat[:numbers].view(self.shape), flat[numbers:] if self.has_bias else None

    @torch.no_grad()
    def write_into(self, net: Net, layer: int, flat: Tensor) -> None:
        """Write the flattened tile into the whole model."""
        matrix, bias = self.split(flat)
        width = self.columns.stop - self.columns.start
        for place, name in enumerate(self.matrices):
            part = matrix[:, place * width : (place + 1) * width]
            net.layer(layer).get_parameter(name)[self.outputs, self.columns] = part
        if bias is not None:
            net.layer(layer).get_parameter("bias")[self.outputs] = bias


class Tile(NamedTuple):
    """A rank's tile of the adjacency. GraphSAGE also reads own rows: places of the vertices that
    are destinations and sources in the tile, among the destinations and among the sources."""

    block: Block
    own: tuple[Tensor, Tensor] | None

    def sum(self, x: Tensor) -> Tensor:
        """Sum rows [sources, D tile] over edges, with own rows beside them -> [rows, m D tile]."""
        sums = aggregate(self.block, x)
        if self.own is None:
            return sums
        (dst_places, src_places), width = self.own, x.shape[1]
        widened = sums.new_zeros(len(sums), 2 * width)
        widened[:, :width] = sums
        widened[:, width:].index_copy_(0, dst_places, x.index_select(0, src_places))
        return widened

    def sum_back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the rows from that of their sums [rows, m D tile]."""
        if self.own is None:
            return aggregate_transposed(self.block, gradient)
        (dst_places, src_places), width = self.own, gradient.shape[1] // 2
        rows = aggregate_transposed(self.block, gradient[:, :width])
        rows.index_add_(0, src_places, gradient[:, width:].index_select(0, dst_places))
        return rows


@dataclass
class _Saved:
    """Tensors that a layer's forward saves for its backward, which frees them one by one."""

    sums: Tensor  # over edges [rows, m D tile]
    zeroed: Tensor | None = None  # mask of inputs that ReLU or dropout set to zero; None: none
    gradient: Tensor = NOTHING  # of the outputs [rows, D' tile], set by the backward pass


class Worker(base.Worker):
    """One rank. `net` is the whole model: with its initial and, after `close`, final weights."""

    def __init__(self, rank: Rank, problem: Problem, strategy: Tensor3D, first: int = 0) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        self.rank, self.problem, self.training = rank, problem, False
        self.layers = layers_of(problem, strategy.grid)
        self.grid, model = strategy.grid, self.layers[0].model
        self.places = {axis: int(self.grid.places(axis)[rank.rank]) for axis in AXES}
        self.groups: dict[Axis, Group] = {}
        for axis in AXES:
            for group in self.grid.groups(axis):
                if len(group) > 1:
                    rank.groups.of(group)
                if rank.rank in group:
                    self.groups[axis] = group
        self.net = net_of(model, workload).to(device)
        self.weights = [Weights(self.net, tiles, rank.rank, self.places) for tiles in self.layers]
        # between a flattened tile on every rank along the axis, and a share of it on each rank
        self.weight_exchanges = [
            ColumnExchange(rank, spans(len(w.runs), len(w.runs)), w.runs, self.groups[axis])
            for axis, w in zip((t.axes.rows for t in self.layers), self.weights, strict=True)
        ]
        vertex_orders = orders(graph.stats.vertices, workload.seed)
        self.tiles: dict[int, Tile] = {}  # by _key of a layer
        self.sources: list[Tensor] = []  # vertices of every layer's inputs
        for tiles in self.layers:
            src = self._own_range(vertex_orders[(tiles.layer - 1) % 2], tiles.axes.sources)
            dst = self._own_range(vertex_orders[tiles.layer % 2], tiles.axes.rows)
            self.sources.append(torch.from_numpy(src).to(device))
            if tiles.is_summed and (key := _key(tiles.layer)) not in self.tiles:
                self.tiles[key] = self._tile(tiles, dst, src)
        last = self.layers[-1]
        axis = last.axes.sources
        runs, classes = (spans(n, self.grid.size(axis)) for n in (dst.size, last.spec.h_out))
        self.logits_exchange = ColumnExchange(rank, runs, classes, self.groups[axis])
        vertices = dst[runs[self.places[axis]]]
        self.targets = Targets(graph, vertices, workload, device)
        # ranks along the axis of columns have the same logits: the first of them counts
        self.counting = self.places[last.axes.columns] == 0
        if self.layers[0].is_summed:
            src = self._own_range(vertex_orders[0], self.layers[0].axes.sources)
            self.features = features(graph, src, workload, device)[
                :, self.weights[0].columns
            ].clone()
        else:
            self.features = self._sum_features(vertex_orders)

    def _own_range(self, order: Ids, axis: Axis) -> Ids:
        """Return this rank's range of the vertices, which an axis splits in this order."""
        return order[spans(order.size, self.grid.size(axis))[self.places[axis]]]

    def _tile(self, tiles: Tiles, dst: Ids, src: Ids) -> Tile:
        """Make the tile of a layer's adjacency with these destinations and sources."""
        graph, workload, device = self.problem.data, self.problem.workload, self.rank.device
        edges, own = self.net.layer(tiles.layer).edges, None
        if tiles.spec.reads_own:
            places = np.intersect1d(dst, src, assume_unique=True, return_indices=True)[1:]
            own = torch.from_numpy(places[0]).to(device), torch.from_numpy(places[1]).to(device)
        return Tile(tile(graph, edges, dst, src, workload, device), own)

    def _sum_features(self, vertex_orders: tuple[Ids, Ids]) -> Tensor:
        """Compute layer 1's sums over edges [rows, m D tile], which are constant.

        The rank computes them without communication, one range of sources after another.
        """
        first, columns = self.layers[0], self.weights[0].columns
        dst = self._own_range(vertex_orders[1], first.axes.rows)
        width = (columns.stop - columns.start) * first.spec.matrices
        sums = self.weights[0].own.detach().new_zeros(dst.size, width)
        for run in spans(vertex_orders[0].size, self.grid.size(first.axes.sources)):
            src = vertex_orders[0][run]
            x = features(self.problem.data, src, self.problem.workload, self.rank.device)
            sums += self._tile(first, dst, src).sum(x[:, columns].contiguous())
        return sums

    # -- tensors of several ranks ------------------------------------------------------------------

    def _all_reduce(self, label: Label, tensor: Tensor, axis: Axis) -> Tensor:
        """Sum a tensor over the ranks along an axis, in place."""
        all_reduce(self.rank, label, tensor, self.groups[axis])
        return tensor

    def _gather_weights(
        self, step: int, tiles: Tiles, direction: str
    ) -> tuple[Tensor, Tensor | None]:
        """Gather the layer's tile of the weights, and the bias if this rank has it."""
        weights, exchange = self.weights[tiles.layer - 1], self.weight_exchanges[tiles.layer - 1]
        label = Label("gather_weights", step, direction, tiles.layer)
        copies = weights.own.detach().expand(len(exchange.group), -1)
        return weights.split(exchange.join(exchange.to_rows(label, copies))[0])

    # -- one step ----------------------------------------------------------------------------------

    def _forward(self, step: int) -> tuple[list[_Saved], Tensor]:
        """Run all layers forward; return their saved tensors and this rank's tile of the logits."""
        saved, h = [], self.features
        for tiles in self.layers:
            layer, axes = tiles.layer, tiles.axes
            each = self._aggregate(step, tiles, h) if tiles.is_summed else _Saved(h)
            del h
            if tiles.is_summed:
                self._all_reduce(Label("sum_aggregates", step, "f", layer), each.sums, axes.sources)
            matrix, bias = self._gather_weights(step, tiles, "f")
            with self.computing("forward", step, layer=layer):
                h = linear(each.sums, matrix, bias)
                del matrix, bias
            self._all_reduce(Label("sum_outputs", step, "f", layer), h, axes.columns)
            if self.training:
                saved.append(each)
            del each
        return saved, h

    def _aggregate(self, step: int, tiles: Tiles, inputs: Tensor) -> _Saved:
        """Sum inputs [sources, D tile] over edges -> partial sums [rows, m D tile].

        ReLU changes the inputs in place.
        """
        layer, relu = tiles.layer, self.net.relu_after(tiles.layer - 1)
        p = self.problem.workload.dropout if self.training and tiles.spec.drops else 0.0
        with self.computing("aggregate", step, "f", layer):
            if relu:
                inputs.relu_()
            seed, first = self.problem.workload.seed, self.weights[layer - 1].columns.start
            x = dropout(inputs, seed, step, layer, self.sources[layer - 1], p, first)
            zeroed = None
            if self.training and tiles.varies and relu:
                zeroed = x <= 0
            elif self.training and tiles.varies and p:
                vertices = self.sources[layer - 1]
                zeroed = ~dropout_mask(seed, step, layer, vertices, x.shape[1], p, first)
            return _Saved(self.tiles[_key(layer)].sum(x), zeroed)

    def _backward(self, step: int, tiles: Tiles, saved: _Saved) -> Tensor:
        """Return the gradient of the inputs from that of the outputs; empty for constant inputs.

        Adds the gradient of the weights to the gradient of this rank's share.
        """
        layer, axes, weights = tiles.layer, tiles.axes, self.weights[tiles.layer - 1]
        matrix, bias = self._gather_weights(step, tiles, "b")
        with self.computing("backward", step, layer=layer):
            gradient, sums = saved.gradient, saved.sums
            saved.gradient = saved.sums = NOTHING
            to_weights = [weight_gradient(gradient, sums).reshape(-1)]
            del sums
            if bias is not None:
                to_weights.append(gradient.sum(0))
            flat = torch.cat(to_weights)
            del to_weights
            to_sums = linear(gradient, matrix.t().contiguous()) if tiles.varies else NOTHING
            del matrix, bias, gradient
        exchange, own = self.weight_exchanges[layer - 1], gradient_of(weights.own)
        label = Label("scatter_weights", step, "b", layer)
        for piece in exchange.to_columns(label, exchange.split(flat[None])):
            own += piece
        del flat
        if not tiles.varies:
            return NOTHING
        self._all_reduce(Label("sum_aggregates", step, "b", layer), to_sums, axes.sources)
        with self.computing("aggregate", step, "b", layer):
            inputs = self.tiles[_key(layer)].sum_back(to_sums)
            if saved.zeroed is not None:
                inputs.masked_fill_(saved.zeroed, 0.0)
                if self.problem.workload.dropout and tiles.spec.drops:
                    inputs *= 1.0 / (1.0 - self.problem.workload.dropout)
        return self._all_reduce(Label("sum_inputs", step, "b", layer), inputs, axes.rows)

    def _to_rows(self, step: int, own: Tensor) -> Tensor:
        """Exchange own columns of the logits [rows, C tile] for whole rows [R, C] of them."""
        return self.logits_exchange.join(
            self.logits_exchange.to_rows(Label("to_rows", step, "f"), own)
        )

    @torch.no_grad()
    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of a training step, and add gradients to the shares' .grad.

        Returns this rank's part of the loss, and the logits of its rows.
        """
        self.training = True
        saved, h = self._forward(step)
        logits = self._to_rows(step, h)
        del h
        with self.computing("loss", step), torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = self.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
            loss, to_logits, leaf.grad = loss.detach(), gradient_of(leaf), None
        pieces = self.logits_exchange.split(to_logits)
        del leaf, to_logits
        saved[-1].gradient = self.logits_exchange.to_columns(Label("to_columns", step, "b"), pieces)
        del pieces
        for tiles in reversed(self.layers):
            gradient = self._backward(step, tiles, saved.pop())
            if saved:
                saved[-1].gradient = gradient
            del gradient
        return loss if self.counting else torch.zeros_like(loss), logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Return logits [R, C] without dropout."""
        self.training = False
        return self._to_rows(step, self._forward(step)[1])

    def counts(self, logits: Tensor) -> Tensor:
        counts = self.targets.counts(logits)
        return counts if self.counting else torch.zeros_like(counts)

    # -- weights -----------------------------------------------------------------------------------

    def open_learner(self) -> Learner:
        """Make a learner that all-reduces nothing: ranks train disjoint shares of the weights."""
        shares = Gradients([weights.own for weights in self.weights], (self.rank.rank,))
        self.learner = Learner(self.rank, self.problem.workload, [shares])
        return self.learner

    def trained(self) -> dict[str, Tensor]:
        return {f"layer{i}": weights.own for i, weights in enumerate(self.weights, 1)}

    def close(self) -> None:
        """Assemble the whole model on all ranks: an all-reduce adds up the ranks' tiles."""
        self.rank.recorder.recording = False
        for tiles, weights in zip(self.layers, self.weights, strict=True):
            matrix, bias = self._gather_weights(-1, tiles, "f")
            layer = self.net.layer(tiles.layer)
            flat = matrix.reshape(-1) if bias is None else torch.cat([matrix.reshape(-1), bias])
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter.zero_()
            if self.places[tiles.axes.rows] == 0:
                weights.write_into(self.net, tiles.layer, flat)
            for parameter in layer.parameters():
                all_ranks = tuple(range(self.rank.world))
                all_reduce(self.rank, Label("whole", -1), parameter.data, all_ranks)
        self.rank.recorder.recording = True


def _key(layer: int) -> int:
    """Return a key of the layer's tile of the adjacency matrix: 3 roles of axes, 2 orders."""
    return (layer - 1) % 6


open_worker = Worker
