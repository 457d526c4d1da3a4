"""Offload: a device computes chunk by chunk, with all rows in the server's memory.

A rank's rows in the server's memory are in the order of its chunks, so that a chunk's own rows are
contiguous. A layer on a chunk is one autograd segment. It loads the rows of the rank's other chunks
from the server's memory, and receives the rows of other ranks as a halo. Its tensors on the device
are freed before the next chunk is loaded. On a GPU, copies in a thread overlap computation: while a
chunk is computed, the results of the chunk before are stored, and then the next chunk is loaded.
`order` in planner/strategies/layerwise/offload.py defines the sequence of operations; each
operation is a method here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of, features, weighted_block
from gnnplan.executor.layers.copies import staging
from gnnplan.executor.layers.kernels import (
    Block,
    Shapes,
    backward,
    gradient_of,
    keep_until_used,
    mapped,
    pin_no_more_than_asked,
)
from gnnplan.executor.layers.models import Moments, Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce
from gnnplan.executor.ranks.rank import Rank, completed_future
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import NOTHING
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Offload
from gnnplan.planner.strategies.base import settled
from gnnplan.planner.strategies.layerwise.offload import evaluation, order
from gnnplan.planner.strategies.layerwise.step import first_alike
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
HOST = torch.device("cpu")


@dataclass
class _Part:
    """A chunk's edges of a layer, in the server's memory."""

    block: Block
    # global ids of source rows, int64 [S]: of this chunk, of the rank's other chunks, of the halo
    vertices: Tensor
    places: Tensor  # of the source rows but the halo in the server's memory, int64 [S - halo]
    exchange: Exchange  # receives the halo, and sends boundary rows to other ranks' halos
    exchanges_rows: bool  # some ranks exchange rows in this turn


@dataclass
class _Chunk:
    number: int
    own: list[slice]  # places of own rows of h_0 .. h_L in the server's memory
    vertices: np.ndarray  # global ids of rows of h_0; the rows of h_l are a prefix
    targets: Targets
    parts: dict[int, _Part] = field(default_factory=dict)  # by layer; equal layers share a part

    def rows(self, layer: int) -> int:
        """Return the number of own rows of h_l."""
        own = self.own[layer]
        return int(own.stop - own.start)


@dataclass
class _Loaded:
    """The tensors on the device of one layer on one chunk."""

    # rows of h_{l-1} [S, H_{l-1}]; if the aggregate is constant, own rows if the layer reads them
    source: Tensor
    block: Block | None = None  # None: the aggregate is constant
    vertices: Tensor = NOTHING  # global ids of the source rows, int64 [S]
    aggregate: Tensor = NOTHING  # constant aggregate of layer 1 [R, F]
    # own rows to send to other ranks' halos; later their gradients, received [., H_{l-1}]
    boundary: Tensor = NOTHING
    targets: Targets | None = None  # for the loss
    out: Tensor = NOTHING  # rows of h_l [R, H_l]
    gradient: Tensor = NOTHING  # of h_l [R, H_l]


class Worker(base.Worker):
    """A rank, and its rows in the server's memory."""

    def __init__(
        self,
        rank: Rank,
        problem: Problem,
        strategy: Offload,
        first: int = 0,
        net: Net | None = None,
    ) -> None:
        """net: the model of the worker for which this worker evaluates."""
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.model, self.last = problem.model, len(problem.model.layers)
        self.net = net or net_of(problem.model, problem.workload).to(rank.device)
        self.moments: dict[int, Moments] = {}  # of this step's rows, by the layer that reads them
        chunks = settled(strategy.chunks)
        self.turns = range(chunks)  # every rank computes one chunk per turn
        self.overlaps_copies = rank.device.type == "cuda"  # copies overlap computation
        self.pending: Future[_Loaded] | None = None  # the next chunk
        self.last_store: Future[None] = completed_future(None)
        self.losses: list[Tensor] = []  # of a step's chunks
        self.sums: list[Tensor] = []  # of a layer's chunks, for the next layer's batch norm
        with rank.in_server_memory():
            layout = problem.chunked(chunks)
            rows = problem.trimmed(layout) if strategy.trim else layout
            assert isinstance(rows, Layout)
            self._allocate(rows, trains=net is None)
        self.scorers = [chunk.targets for chunk in self.chunks]

    def _number(self, rank: int, turn: int) -> int:
        """Return the number of a rank's chunk among the chunks of all ranks."""
        return rank * len(self.turns) + turn

    def _allocate(self, layout: Layout, trains: bool) -> None:
        """Make chunks, and allocate their rows in the server's memory."""
        numbers = [self._number(self.rank.rank, turn) for turn in self.turns]
        chunk_ids = [[layout.rows(number, h) for number in numbers] for h in range(self.last + 1)]
        ends = np.cumsum([[0] + [ids.size for ids in layer_ids] for layer_ids in chunk_ids], axis=1)
        self.chunks = [
            _Chunk(
                turn,
                [slice(int(end[turn]), int(end[turn + 1])) for end in ends],
                chunk_ids[0][turn],
                Targets(layout.graph, chunk_ids[-1][turn], self.problem.workload, HOST),
            )
            for turn in self.turns
        ]
        layers = range(1, self.last + 1)
        like = first_alike((layout.kind(n), self.net.layer(n).edges) for n in layers)
        for n in layers:
            own = np.concatenate(chunk_ids[n - 1])
            for chunk in self.chunks:
                part = chunk.parts.get(like[n])
                chunk.parts[n] = part or self._part(layout, chunk.number, n, own)

        dtype, on_gpu = dtype_of(self.problem.workload.precision), self.rank.device.type == "cuda"
        if on_gpu:
            pin_no_more_than_asked()

        def rows(layer: int, width: int) -> Tensor:
            """Return zeros for rows of h_l, in page-locked memory if a GPU reads them."""
            numbers = int(ends[layer, -1]) * width
            return torch.zeros(numbers, dtype=dtype, pin_memory=on_gpu).view(-1, width)

        outputs = enumerate(self.model.layers[:-1], 1)
        self.hidden = {layer: rows(layer, spec.h_out) for layer, spec in outputs}  # h_l
        # two buffers alternate: the gradient of h_l is no longer used when that of h_{l-2} begins
        most = max(map(Tensor.numel, self.hidden.values()), default=0)
        count = min(len(self.hidden), 2) * trains
        buffers = [torch.zeros(most, dtype=dtype, pin_memory=on_gpu) for _ in range(count)]
        self.gradients = {
            layer: buffers[layer % count][: hidden.numel()].view_as(hidden)
            for layer, hidden in self.hidden.items()
            if trains
        }
        self.logits = self.hidden[self.last] = rows(self.last, self.model.classes)
        self.aggregate = NOTHING
        if self.model.aggregate_cached(1):
            self.aggregate = rows(1, self.model.features)
            for chunk in self.chunks:
                part = chunk.parts.pop(1)
                x = self._features(part.vertices.numpy(), HOST)
                self.aggregate[chunk.own[1]] = self.net.layer(1).gather(part.block, x)

    def _part(self, layout: Layout, turn: int, layer: int, own: np.ndarray) -> _Part:
        """Make a chunk's part of a layer. own: ids of this rank's rows of h_{l-1}, in order."""
        number = self._number(self.rank.rank, turn)
        rank_of = layout.owner // len(self.turns)
        halos = [layout.piece(self._number(r, turn), layer).halo for r in range(self.rank.world)]
        wanted = [halo[rank_of[halo] != rank] for rank, halo in enumerate(halos)]
        # vertex -> place among own rows [N]; -1: another rank's vertex
        place = np.full(layout.graph.stats.vertices, -1, dtype=np.int64)
        place[own] = np.arange(own.size)
        source = np.concatenate([layout.rows(number, layer - 1), halos[self.rank.rank]])
        order = np.argsort(place[source] < 0, kind="stable")  # rows of this rank come first
        source = source[order]
        position = np.empty(order.size, dtype=np.int32)
        position[order] = np.arange(order.size, dtype=np.int32)
        indptr, indices = layout.block(number, layer)
        edges, workload = self.net.layer(layer).edges, self.problem.workload
        rows = layout.rows(number, layer)
        block = weighted_block(
            layout.graph, edges, rows, source, indptr, position[indices], workload
        )
        return _Part(
            mapped(block, Tensor.pin_memory) if self.rank.device.type == "cuda" else block,
            torch.from_numpy(source),
            torch.from_numpy(place[source[: source.size - wanted[self.rank.rank].size]]),
            Exchange.of_ids(self.rank, wanted, rank_of, own, HOST),
            any(ids.size for ids in wanted),
        )

    # -- loads and stores --------------------------------------------------------------------------

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device, also if the device is the CPU and already holds it."""
        return tensor.to(self.rank.device, copy=True, non_blocking=tensor.is_pinned())

    def _gather(self, rows: Tensor, places: Tensor, into: Tensor) -> Tensor:
        """Gather rows of the server's memory into `into`, on the device."""
        if into.device == rows.device:
            return torch.index_select(rows, 0, places, out=into)

        def gather(start: int, stop: int, buffer: Tensor) -> None:
            torch.index_select(rows, 0, places[start:stop], out=buffer)

        staging(self.rank.device).load(into, rows.dtype, gather)
        return into

    def _submit(self, copy: Callable[[], T]) -> Future[T]:
        """Run copies one after another; on a GPU they overlap computation."""
        if self.overlaps_copies:
            return self.rank.lanes.in_thread("copy", copy)
        return completed_future(copy())

    def _features(self, vertices: np.ndarray, device: torch.device) -> Tensor:
        return features(self.problem.data, vertices, self.problem.workload, device)

    def _load(self, label: Label, layer: int, chunk: _Chunk) -> _Loaded:
        """Load a layer's inputs for a chunk; for a backward pass, also the gradient of h_l."""
        part, spec, device = chunk.parts.get(layer), self.model.layers[layer - 1], self.rank.device
        varies, rows, b = layer > self.model.first_varying, chunk.rows(layer), self.logits.itemsize
        own = rows * spec.reads_own  # rows of features that a layer reads besides its aggregate
        if part is None:
            nbytes, read = 0, rows + own
        else:
            nbytes, sent = part.block.nbytes + part.vertices.nbytes, part.exchange.positions
            read = len(part.places) + len(sent) if varies else len(part.vertices)
        nbytes += read * spec.h_in * b
        if label.direction == "b":
            nbytes += rows * spec.h_out * b
        elif layer == self.last:
            nbytes += chunk.targets.y.nbytes + chunk.targets.train.nbytes
        with self.rank.recorder.span(label, "copy", nbytes):
            if part is None:
                source = self._features(chunk.vertices[:own], device)
                tensors = _Loaded(source, aggregate=self._copy(self.aggregate[chunk.own[1]]))
            else:
                if varies:
                    hidden = self.hidden[layer - 1]
                    source = hidden.new_empty(len(part.vertices), spec.h_in, device=device)
                    self._gather(hidden, part.places, source[: len(part.places)])
                else:
                    source = self._features(part.vertices.numpy(), device)
                tensors = _Loaded(source, mapped(part.block, self._copy), self._copy(part.vertices))
                if varies and part.exchanges_rows:
                    boundary = source.new_empty(len(sent), spec.h_in)
                    tensors.boundary = self._gather(hidden, sent, boundary)
            if label.direction == "b":
                tensors.gradient = self._copy(self.gradients[layer][chunk.own[layer]])
            elif layer == self.last and self.training:
                tensors.targets = chunk.targets.to_train_on(device)
            return tensors

    def _load_and_prefetch(self, label: Label, layer: int, chunk: _Chunk) -> _Loaded:
        """Return the loaded inputs of a chunk; on a GPU, start to load the next chunk."""
        if not self.overlaps_copies:
            return self._load(label, layer, chunk)
        tensors = (self.pending or self._submit(partial(self._load, label, layer, chunk))).result()
        self.pending, number = None, chunk.number + 1
        if number < len(self.chunks):
            label = label._replace(chunk=number)
            self.pending = self._submit(partial(self._load, label, layer, self.chunks[number]))
        if self.rank.device.type == "cuda":
            stream = torch.cuda.current_stream(self.rank.device)
            keep_until_used(stream, tensors, tensors.block, tensors.targets)
        return tensors

    def _store(self, label: Label, layer: int, chunk: _Chunk, tensors: _Loaded) -> None:
        """Store rows of h_l. In the backward pass store logits only, and add the gradient of source
        rows to that of other chunks."""
        local, received, out = NOTHING, tensors.boundary, tensors.out
        is_backward, stored = label.direction == "b", self.hidden[layer][chunk.own[layer]]
        if adds := is_backward and layer > self.model.first_varying:
            local = gradient_of(tensors.source)[: len(chunk.parts[layer].places)]
        nbytes = local.nbytes + received.nbytes + out.nbytes

        def store() -> None:
            with self.rank.recorder.span(label, "copy", nbytes):
                if layer == self.last or not is_backward:
                    stored.copy_(out, non_blocking=True)
                if adds:
                    self._add_gradients(layer, chunk, local, received)

        self.last_store = self._submit(store)

    def _swap_halo(self, label: Label, layer: int, chunk: _Chunk, tensors: _Loaded) -> None:
        """Receive halo rows; or, backward, return halo gradients to their owners."""
        # the forward pass is repeated in the backward pass, with its exchange ('halo_again')
        part, is_backward = chunk.parts[layer], (label.op, label.direction) == ("halo", "b")
        if not part.exchanges_rows:
            return
        halo = (gradient_of(tensors.source) if is_backward else tensors.source)[len(part.places) :]
        outgoing, into = (halo, None) if is_backward else (tensors.boundary, halo)
        with self.rank.recorder.sending(label, "comm", outgoing.nbytes):
            received = part.exchange.swap("b" if is_backward else "f", outgoing, into)
        tensors.boundary = received if is_backward else NOTHING

    def _add_gradients(self, layer: int, chunk: _Chunk, local: Tensor, received: Tensor) -> None:
        """Add gradients of the rank's rows that the chunk has read, or has sent to peers."""
        into, part = self.gradients[layer - 1], chunk.parts[layer]
        if chunk is self.chunks[0]:
            into.zero_()
        if local.device == HOST:
            into.index_add_(0, part.places, local)
        else:  # several threads may add: `places` has no row twice

            def add(start: int, stop: int, rows: Tensor) -> None:
                places = part.places[start:stop]
                if rows.itemsize < 4:  # index_add_ of 16-bit numbers also writes adjacent rows
                    into.index_copy_(0, places, into.index_select(0, places).add_(rows))
                else:
                    into.index_add_(0, places, rows)

            staging(local.device).store(local, add)
        part.exchange.add_gradient(into, received.to(HOST))

    # -- a step ------------------------------------------------------------------------------------

    def _compute(self, label: Label, layer: int, tensors: _Loaded) -> Tensor:
        """Compute a chunk's rows of h_l [R, H_l]."""
        net, relu, source = self.net.layer(layer), self.net.relu_after(layer), tensors.source
        source.requires_grad_(self.training and layer > self.model.first_varying)
        if tensors.block is None:
            return net.update(tensors.aggregate, source, source, None, relu)
        drop = self.drop(label.step, layer, tensors.vertices)
        moments = self.moments.get(layer) if self.training else None
        values = moments.values if moments else None
        out: Tensor = net(tensors.block, source, drop, None, relu, values)
        return out

    def _forward(self, label: Label, layer: int, chunk: _Chunk, tensors: _Loaded) -> None:
        """Run a layer forward; before the last layer, keep only rows and sums for batch norm."""
        norm = self.net.batch_norm(layer + 1) if self.training and layer < self.last else None
        learns = self.training and layer == self.last
        with self.rank.recorder.span(label, "compute"), torch.set_grad_enabled(learns):
            tensors.out = self._compute(label, layer, tensors)
            if norm is not None:
                self.sums.append(norm.sums(tensors.out))

    def _loss(self, label: Label, layer: int, chunk: _Chunk, tensors: _Loaded) -> None:
        assert tensors.targets is not None
        with self.rank.recorder.span(label, "compute"):
            leaf = tensors.out.detach().requires_grad_()
            loss = tensors.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
        tensors.gradient = gradient_of(leaf)
        self.losses.append(loss.detach())

    def _backward(self, label: Label, layer: int, chunk: _Chunk, tensors: _Loaded) -> None:
        """Run a layer backward, after recomputing its forward unless it is the last layer."""
        with self.rank.recorder.span(label, "compute"):
            out = tensors.out if layer == self.last else self._compute(label, layer, tensors)
            if layer + 1 in self.moments:
                self.moments[layer + 1].add_gradient(out, tensors.gradient)
            backward([out], [tensors.gradient])
        tensors.out, tensors.gradient = tensors.out.detach(), NOTHING

    def _moments(self, label: Label, layer: int) -> None:
        """All-reduce batch norm's sums over the layer's inputs, or the moments' gradient."""
        norm = self.net.batch_norm(layer) if self.training else None
        if norm is not None and label.direction == "b":
            all_reduce(self.rank, label, self.moments[layer].gradient, self.reduce_group)
        elif norm is not None:
            total, self.sums = reduce(add, self.sums), []
            all_reduce(self.rank, label, total, self.reduce_group)
            self.moments[layer] = Moments.of(norm, total, self.problem.stats.vertices)

    def _run(self, step: int, operations: Iterable[Label]) -> None:
        """Run operations one after another."""
        methods = {
            "halo": self._swap_halo,
            "halo_again": self._swap_halo,
            "forward": self._forward,
            "loss": self._loss,
            "backward": self._backward,
            "store": self._store,
        }
        tensors = _Loaded(NOTHING)
        with Shapes.varying(True):  # from chunk to chunk
            for label in (operation._replace(step=step) for operation in operations):
                layer = label.layer or self.last
                if label.chunk is None:
                    self._moments(label, layer)
                elif label.op == "load":
                    tensors = _Loaded(NOTHING)  # frees the chunk before, ahead of the load
                    tensors = self._load_and_prefetch(label, layer, self.chunks[label.chunk])
                else:
                    methods[label.op](label, layer, self.chunks[label.chunk], tensors)
        self.last_store.result()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of a step, and add gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits in the server's memory, chunk after
        chunk [own, C].
        """
        self.training, self.losses = True, []
        self.scorers = [chunk.targets for chunk in self.chunks]
        self._run(step, order(self.model, self.turns))
        return torch.stack(self.losses).sum(), self.logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Return logits [own, C] of all rows without dropout, chunk after chunk.

        With `trim` training has fewer rows: edges of all rows are made for each evaluation."""
        if self.strategy.trim:
            untrimmed = replace(self.strategy, trim=False)
            worker = Worker(self.rank, self.problem, untrimmed, step, self.net)
            self.scorers = worker.scorers
            return worker.evaluate(step)
        self.training = False
        self._run(step, evaluation(self.model, self.turns))
        return self.logits


open_worker = Worker
