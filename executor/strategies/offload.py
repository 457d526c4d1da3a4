"""Offload: one device computes chunk by chunk, and the server's memory has what chunks read.

Rows in the server's memory are in the order of chunks, so that a chunk's own rows are neighbours. A
layer of a chunk is a segment of its own, as graph parallelism's of a rank; where a rank would
receive its halo, a chunk reads it from the rows that other chunks have stored. What is loaded for
it is let go before the next chunk is loaded (planner/strategies/layerwise/chunked.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import Targets, dtype_of, features
from gnnplan.executor.layers.kernels import Block, Rows, backward, dropout
from gnnplan.executor.layers.models import BatchNorm, Net
from gnnplan.executor.minibatch.share import share_of
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.whole import counts_of
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Offload
from gnnplan.planner.vocabulary.schedule import Label


@dataclass
class _Part:
    """A chunk's edges of a layer, in the server's memory."""

    block: Block
    vertices: Tensor  # global ids of the rows that it reads, its own first, int64 [S]
    places: Tensor  # of these rows in the server's memory, int64 [S]


@dataclass
class _Chunk:
    number: int
    own: slice  # places of its rows in the server's memory
    vertices: np.ndarray  # their global ids, int64 [R]
    parts: dict[int, _Part]  # by layer; layers that are alike have the same one
    targets: Targets


@dataclass
class _Loaded:
    """What a layer of a chunk has on the device."""

    # rows of h_{l-1} [S, H_{l-1}]; with a constant aggregate the own ones, if the layer reads them
    source: Tensor
    block: Block | None = None
    vertices: Tensor | None = None  # whose rows these are, int64 [S]
    aggregate: Tensor | None = None  # of layer 1, where it is constant [R, F]
    gradient: Tensor | None = None  # of h_l [R, H_l], for a backward pass
    targets: Targets | None = None  # for a loss


class Worker(base.Worker):
    """The only rank, and what it keeps in the server's memory."""

    def __init__(self, rank: Rank, problem: Problem, strategy: Offload) -> None:
        self.rank, self.problem = rank, problem
        self.shapes, self.last = problem.model, len(problem.model.layers)
        self.net = Net(problem.model, problem.workload).to(rank.device)
        self.moments: dict[int, Tensor] = {}  # of this step's rows, by the layer that reads them
        self.sums = torch.empty(0)  # of the rows of which moments are made next
        assert strategy.chunks is not None
        with rank.in_server_memory():
            layout = problem.chunked(strategy.chunks)
            assert isinstance(layout, Layout)
            self._keep(layout)

    def _keep(self, layout: Layout) -> None:
        own = [layout.own(c) for c in range(layout.ranks)]
        order = np.concatenate(own)
        place = np.empty(order.size, dtype=np.int64)
        place[order] = np.arange(order.size)
        self.chunks = [self._chunk(layout, number, place) for number in range(layout.ranks)]

        def rows(width: int) -> Tensor:
            """Zeros [N, width]; in page-locked memory if a GPU is to read them."""
            zeros = torch.zeros(order.size, width, dtype=dtype_of(self.problem.workload))
            return zeros.pin_memory() if self.rank.device.type == "cuda" else zeros

        widths = {layer: spec.h_out for layer, spec in enumerate(self.shapes.layers[:-1], 1)}
        self.hidden = {layer: rows(width) for layer, width in widths.items()}  # h_l
        # two buffers take turns: the gradient of h_l is used up when that of h_{l-2} is begun
        buffers = [rows(max(widths.values())).view(-1) for _ in range(min(len(widths), 2))]
        self.gradients = {
            layer: buffers[layer % len(buffers)][: order.size * width].view(-1, width)
            for layer, width in widths.items()
        }
        self.logits = rows(self.shapes.classes)
        self.aggregate: Tensor | None = None
        if self.shapes.aggregate_cached(1):
            self.aggregate, cpu = rows(self.shapes.features), torch.device("cpu")
            for chunk in self.chunks:
                part = chunk.parts.pop(1)
                x = self._features(part.vertices.numpy(), cpu)
                self.aggregate[chunk.own] = self.net.layer(1).gather(part.block, x)

    def _chunk(self, layout: Layout, number: int, place: np.ndarray) -> _Chunk:
        workload, on_gpu = self.problem.workload, self.rank.device.type == "cuda"
        edges = [self.net.layer(layer).edges for layer in range(1, self.last + 1)]
        share = share_of(layout, number, edges, workload, None)
        parts = {
            id(part): _Part(
                part.block.pinned() if on_gpu else part.block,
                torch.from_numpy(part.source),
                torch.from_numpy(place[part.source]),
            )
            for part in share.parts
        }
        start = int(place[share.own[0]])
        return _Chunk(
            number,
            slice(start, start + share.own.size),
            share.own,
            {layer: parts[id(part)] for layer, part in enumerate(share.parts, 1)},
            Targets(layout.graph, share.own, workload, torch.device("cpu")),
        )

    # -- loads and stores --------------------------------------------------------------------------

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy on the device; of a CPU rank too, whose device holds what is copied."""
        return tensor.to(self.rank.device, copy=True)

    def _features(self, vertices: np.ndarray, device: torch.device) -> Tensor:
        assert self.problem.graph is not None
        return features(self.problem.graph, vertices, self.problem.workload, device)

    def _load(self, step: int, way: str, layer: int, chunk: _Chunk) -> _Loaded:
        """What a layer of the chunk reads, and for a backward pass the gradient of its rows."""
        label, part = Label("load", step, way, layer, chunk.number), chunk.parts.get(layer)
        with self.rank.span(label, "copy", self._bytes_to_load(way, layer, chunk)):
            if part is None:
                assert self.aggregate is not None
                own = chunk.vertices if self.shapes.layers[0].reads_own else chunk.vertices[:0]
                source = self._features(own, self.rank.device)
                loaded = _Loaded(source, aggregate=self._copy(self.aggregate[chunk.own]))
            else:
                if layer == 1:
                    source = self._features(part.vertices.numpy(), self.rank.device)
                else:
                    picked = self.hidden[layer - 1].index_select(0, part.places)
                    source = picked.to(self.rank.device)
                    source.requires_grad_(self.training)
                block = part.block.mapped(self._copy)
                loaded = _Loaded(source, block, self._copy(part.vertices))
            if way == "b":
                loaded.gradient = self._copy(self.gradients[layer][chunk.own])
            elif layer == self.last and self.training:
                loaded.targets = chunk.targets.to_train_on(self.rank.device)
            return loaded

    def _bytes_to_load(self, way: str, layer: int, chunk: _Chunk) -> int:
        part, targets, b = chunk.parts.get(layer), chunk.targets, self.logits.element_size()
        rows = len(chunk.vertices)
        if part is None:
            edges, read = 0, rows * (2 if self.shapes.layers[0].reads_own else 1)
        else:
            edges, read = part.block.nbytes + part.vertices.nbytes, len(part.vertices)
        nbytes = edges + read * self.shapes.layers[layer - 1].h_in * b
        if way == "b":
            return nbytes + rows * self.shapes.layers[layer - 1].h_out * b
        labels = targets.y.nbytes + targets.masks[0].nbytes
        return nbytes + (labels if layer == self.last else 0)

    def _store_rows(self, step: int, layer: int, chunk: _Chunk, out: Tensor) -> None:
        label = Label("store", step, "f", layer, chunk.number)
        with self.rank.span(label, "copy", out.nbytes):
            self.hidden[layer][chunk.own] = out

    def _store_gradient(
        self, step: int, layer: int, chunk: _Chunk, loaded: _Loaded, logits: Tensor | None = None
    ) -> None:
        """Add the gradient of the rows read to what other chunks have added; keep logits."""
        gradient = loaded.source.grad
        nbytes = sum(each.nbytes for each in (gradient, logits) if each is not None)
        with self.rank.span(Label("store", step, "b", layer, chunk.number), "copy", nbytes):
            if logits is not None:
                self.logits[chunk.own] = logits
            if gradient is None:
                return
            into = self.gradients[layer - 1]
            if chunk is self.chunks[0]:
                into.zero_()
            into.index_add_(0, chunk.parts[layer].places, gradient.to("cpu"))

    # -- a step ------------------------------------------------------------------------------------

    def _compute(self, step: int, layer: int, loaded: _Loaded) -> Tensor:
        """A layer's rows of a chunk [R, H_l]."""
        net, relu, source = self.net.layer(layer), self.net.relu_after(layer), loaded.source
        if loaded.aggregate is not None:
            return net.update(loaded.aggregate, source, source, None, relu)
        assert loaded.block is not None and loaded.vertices is not None
        vertices, workload = loaded.vertices, self.problem.workload
        p = workload.dropout if self.training else 0.0

        def drop(rows: Rows) -> Rows:
            return dropout(rows, workload.seed, step, layer, vertices, p)

        moments = self.moments.get(layer) if self.training else None
        out: Tensor = net(loaded.block, source, drop, None, relu, moments)
        return out

    def _forward(self, step: int, layer: int, chunk: _Chunk) -> None:
        """A layer before the last: nothing but its rows stays."""
        loaded = self._load(step, "f", layer, chunk)
        label = Label("forward", step, layer=layer, chunk=chunk.number)
        with self.rank.span(label, "compute"), torch.no_grad():
            out = self._compute(step, layer, loaded)
            self._add_to_moments(layer + 1, chunk, out)
        self._store_rows(step, layer, chunk, out)

    def _add_to_moments(self, layer: int, chunk: _Chunk, rows: Tensor) -> None:
        """Batch norm before a layer: its moments are complete with the last chunk's rows."""
        norm = self.net.batch_norm(layer)
        if norm is None or not self.training:
            return
        sums = norm.sums(rows)
        self.sums = sums if chunk is self.chunks[0] else self.sums + sums
        if chunk is self.chunks[-1]:
            self.moments[layer] = norm.moments(self.sums, len(self.logits)).requires_grad_()

    def _through_moments(self, layer: int, rows: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of rows what they get through the moments before a layer."""
        if (moments := self.moments.get(layer)) is not None:
            assert moments.grad is not None
            gradient += BatchNorm.home(rows.detach(), moments, moments.grad, len(self.logits))

    def _forward_and_backward(self, step: int, chunk: _Chunk) -> Tensor:
        """The last layer, forward and backward; returns the chunk's part of the loss."""
        loaded = self._load(step, "f", self.last, chunk)
        label = Label("forward", step, layer=self.last, chunk=chunk.number)
        with self.rank.span(label, "compute"):
            out = self._compute(step, self.last, loaded)
        assert loaded.targets is not None
        with self.rank.span(label._replace(op="loss", layer=None), "compute"):
            leaf = out.detach().requires_grad_()
            loss = loaded.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
        with self.rank.span(label._replace(op="backward"), "compute"):
            assert leaf.grad is not None
            backward([out], [leaf.grad])
        self._store_gradient(step, self.last, chunk, loaded, leaf.detach())
        return loss.detach()

    def _backward(self, step: int, layer: int, chunk: _Chunk) -> None:
        """A layer before the last: forward again, and backward."""
        loaded = self._load(step, "b", layer, chunk)
        label = Label("backward", step, layer=layer, chunk=chunk.number)
        with self.rank.span(label, "compute"):
            assert loaded.gradient is not None
            out = self._compute(step, layer, loaded)
            self._through_moments(layer + 1, out, loaded.gradient)
            backward([out], [loaded.gradient])
        if layer > self.shapes.first_varying:
            self._store_gradient(step, layer, chunk, loaded)

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward; adds gradients to the parameters' .grad.

        Returns the loss, and the logits in the server's memory, chunk after chunk [N, C].
        """
        self.training = True
        for layer in range(1, self.last):
            for chunk in self.chunks:
                self._forward(step, layer, chunk)
        loss = torch.stack([self._forward_and_backward(step, chunk) for chunk in self.chunks]).sum()
        for layer in range(self.last - 1, 0, -1):
            for chunk in self.chunks:
                self._backward(step, layer, chunk)
        return loss, self.logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [N, C] without dropout, in the order of `step`'s."""
        self.training = False
        for layer in range(1, self.last):
            for chunk in self.chunks:
                self._forward(step, layer, chunk)
        for chunk in self.chunks:
            loaded = self._load(step, "f", self.last, chunk)
            self.logits[chunk.own] = self._compute(step, self.last, loaded)
        return self.logits

    def counts(self, logits: Tensor) -> Tensor:
        """Right and wrong answers [3, 2] of all rows."""
        return counts_of([chunk.targets for chunk in self.chunks], logits)


def open_worker(rank: Rank, problem: Problem, strategy: Offload, first: int) -> Worker:
    """The worker of the only rank."""
    return Worker(rank, problem, strategy)
