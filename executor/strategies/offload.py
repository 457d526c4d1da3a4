"""Offload: devices compute chunk by chunk, and the server's memory has what chunks read.

A rank's rows in the server's memory are in the order of its chunks, so that a chunk's own rows are
neighbours. A layer of a chunk is a segment of its own, as graph parallelism's of a rank. What it
reads of its rank's other chunks it finds in the server's memory, where these have stored it; what
it reads of other ranks crosses as a halo. What is loaded for it is let go before the next chunk is
loaded (planner/strategies/layerwise/chunked.py). On a GPU a thread copies beside computation: while
a chunk is computed, what the one before has made goes back, and then the next one's rows come.
"""

from __future__ import annotations

from collections.abc import Callable
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
    backward,
    gradient_of,
    keep_until_used,
    mapped,
    pin_no_more_than_asked,
)
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import BatchNorm, Moments
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Exchange, all_reduce
from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Offload
from gnnplan.planner.strategies.base import settled
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
HOST = torch.device("cpu")


@dataclass
class _Part:
    """A chunk's edges of a layer, in the server's memory."""

    block: Block
    # global ids of the rows that it reads, its own first, then those of its rank, int64 [S]
    vertices: Tensor
    places: Tensor  # in the server's memory, of those of its rank, int64 [S - halo]
    exchange: Exchange  # of the halo, and of what this rank has of other ranks' halos
    meets: bool  # some ranks exchange rows in this turn


@dataclass
class _Chunk:
    number: int
    own: list[slice]  # places of its rows of h_0 .. h_L in the server's memory
    vertices: np.ndarray  # global ids of those of h_0, with those of h_1 and all others first
    targets: Targets
    parts: dict[int, _Part] = field(default_factory=dict)  # by layer; alike ones are the same

    def rows(self, layer: int) -> int:
        """Its rows of h_l."""
        own = self.own[layer]
        return int(own.stop - own.start)


@dataclass
class _Loaded:
    """What a layer of a chunk has on the device."""

    # rows of h_{l-1} [S, H_{l-1}]; with a constant aggregate the own ones, if the layer reads them
    source: Tensor
    block: Block | None = None
    vertices: Tensor | None = None  # whose rows these are, int64 [S]
    aggregate: Tensor | None = None  # of layer 1, where it is constant [R, F]
    outgoing: Tensor | None = None  # rows of other ranks' halos
    gradient: Tensor | None = None  # of h_l [R, H_l], for a backward pass
    targets: Targets | None = None  # for a loss


class Worker(base.Worker):
    """A rank, and what it keeps in the server's memory."""

    def __init__(
        self,
        rank: Rank,
        problem: Problem,
        strategy: Offload,
        first: int = 0,
        net: Net | None = None,
    ) -> None:
        """net: of the worker that this one evaluates for."""
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.shapes, self.last = problem.model, len(problem.model.layers)
        self.net = net or net_of(problem.model, problem.workload).to(rank.device)
        self.moments: dict[int, Moments] = {}  # of this step's rows, by the layer that reads them
        chunks = settled(strategy.chunks)
        self.turns = range(chunks)  # in each of them every rank has a chunk
        self.copies_beside = rank.device.type == "cuda"  # computation
        self.coming: Future[_Loaded] | None = None  # the next chunk's
        self.storing: Future[None] = completed_future(None)  # the last store
        with rank.in_server_memory():
            layout = problem.chunked(chunks)
            rows = problem.trimmed(layout) if strategy.trim else layout
            assert isinstance(rows, Layout)
            self._keep(rows, trains=net is None)
        self.scored_by = [chunk.targets for chunk in self.chunks]

    def _number(self, rank: int, turn: int) -> int:
        """A chunk, among those of all ranks."""
        return rank * len(self.turns) + turn

    def _keep(self, layout: Layout, trains: bool) -> None:
        """Make chunks, and room for what they store."""
        numbers = [self._number(self.rank.rank, turn) for turn in self.turns]
        each = [[layout.rows(number, h) for number in numbers] for h in range(self.last + 1)]
        ends = np.cumsum([[0] + [ids.size for ids in of_chunks] for of_chunks in each], axis=1)
        self.chunks = [
            _Chunk(
                turn,
                [slice(int(end[turn]), int(end[turn + 1])) for end in ends],
                each[0][turn],
                Targets(layout.graph, each[-1][turn], self.problem.workload, HOST),
            )
            for turn in self.turns
        ]
        alike: list[dict[object, _Part]] = [{} for _ in self.turns]
        for layer in range(1, self.last + 1):
            kind = layout.kind(layer), self.net.layer(layer).edges
            own = np.concatenate(each[layer - 1])
            for chunk, parts in zip(self.chunks, alike, strict=True):
                if kind not in parts:
                    parts[kind] = self._part(layout, chunk.number, layer, own)
                chunk.parts[layer] = parts[kind]

        on_gpu = self.rank.device.type == "cuda"
        if on_gpu:
            pin_no_more_than_asked()

        def room(numbers: int) -> Tensor:
            """Zeros [numbers]; in page-locked memory if a GPU is to read them."""
            return torch.zeros(numbers, dtype=dtype_of(self.problem.workload), pin_memory=on_gpu)

        def rows(layer: int, width: int) -> Tensor:
            return room(int(ends[layer, -1]) * width).view(-1, width)

        widths = {layer: spec.h_out for layer, spec in enumerate(self.shapes.layers[:-1], 1)}
        sizes = {layer: int(ends[layer, -1]) * width for layer, width in widths.items()}
        self.hidden = {layer: rows(layer, width) for layer, width in widths.items()}  # h_l
        # two buffers take turns: the gradient of h_l is used up when that of h_{l-2} is begun
        buffers = [room(max(sizes.values())) for _ in range(min(len(widths), 2) * trains)]
        self.gradients = {
            layer: buffers[layer % len(buffers)][: sizes[layer]].view(-1, width)
            for layer, width in widths.items()
            if trains
        }
        self.logits = rows(self.last, self.shapes.classes)
        self.aggregate: Tensor | None = None
        if self.shapes.aggregate_cached(1):
            self.aggregate = rows(1, self.shapes.features)
            for chunk in self.chunks:
                part = chunk.parts.pop(1)
                x = self._features(part.vertices.numpy(), HOST)
                self.aggregate[chunk.own[1]] = self.net.layer(1).gather(part.block, x)

    def _part(self, layout: Layout, turn: int, layer: int, own: np.ndarray) -> _Part:
        """own: ids of this rank's rows of h_{l-1}, in their order."""
        number = self._number(self.rank.rank, turn)
        of_rank = layout.owner // len(self.turns)
        halos = [layout.piece(self._number(r, turn), layer).halo for r in range(self.rank.world)]
        wanted = [halo[of_rank[halo] != rank] for rank, halo in enumerate(halos)]
        # of each vertex among own rows [N]; -1: another rank has it
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
            Exchange.of_ids(self.rank, wanted, of_rank, own, HOST),
            any(ids.size for ids in wanted),
        )

    # -- loads and stores --------------------------------------------------------------------------

    def _copy(self, tensor: Tensor) -> Tensor:
        """A copy on the device; of a CPU rank too, whose device holds what is copied."""
        return tensor.to(self.rank.device, copy=True, non_blocking=tensor.is_pinned())

    def _pick(self, rows: Tensor, places: Tensor, into: Tensor) -> Tensor:
        """Copy rows of the server's memory to the device -> `into`."""
        if into.device == rows.device:
            return torch.index_select(rows, 0, places, out=into)

        def gather(start: int, stop: int, buffer: Tensor) -> None:
            torch.index_select(rows, 0, places[start:stop], out=buffer)

        staging(self.rank.device).load(into, rows.dtype, gather)
        return into

    def _submit(self, copy: Callable[[], T]) -> Future[T]:
        """Copy, on a GPU beside computation, one copy after the other."""
        return (
            self.rank.lanes.in_thread("copy", copy)
            if self.copies_beside
            else completed_future(copy())
        )

    def _features(self, vertices: np.ndarray, device: torch.device) -> Tensor:
        return features(self.problem.data, vertices, self.problem.workload, device)

    def _load(self, step: int, way: str, layer: int, chunk: _Chunk) -> _Loaded:
        """What a layer of the chunk reads, and for a backward pass the gradient of its rows."""
        label, part = Label("load", step, way, layer, chunk.number), chunk.parts.get(layer)
        with self.rank.recorder.span(label, "copy", self._bytes_to_load(way, layer, chunk)):
            if part is None:
                assert self.aggregate is not None
                own = chunk.rows(1) if self.shapes.layers[0].reads_own else 0
                source = self._features(chunk.vertices[:own], self.rank.device)
                loaded = _Loaded(source, aggregate=self._copy(self.aggregate[chunk.own[1]]))
            else:
                outgoing = None
                if layer <= self.shapes.first_varying:
                    source = self._features(part.vertices.numpy(), self.rank.device)
                else:
                    rows = self.hidden[layer - 1]
                    source = rows.new_empty(
                        len(part.vertices), rows.shape[1], device=self.rank.device
                    )
                    self._pick(rows, part.places, source[: len(part.places)])
                    if part.meets:
                        given = part.exchange.positions
                        outgoing = source.new_empty(len(given), rows.shape[1])
                        self._pick(rows, given, outgoing)
                block = mapped(part.block, self._copy)
                loaded = _Loaded(source, block, self._copy(part.vertices), outgoing=outgoing)
            if way == "b":
                loaded.gradient = self._copy(self.gradients[layer][chunk.own[layer]])
            elif layer == self.last and self.training:
                loaded.targets = chunk.targets.to_train_on(self.rank.device)
            return loaded

    def _bytes_to_load(self, way: str, layer: int, chunk: _Chunk) -> int:
        part, targets, b = chunk.parts.get(layer), chunk.targets, self.logits.element_size()
        rows = chunk.rows(layer)
        if part is None:
            edges, read = 0, rows * (2 if self.shapes.layers[0].reads_own else 1)
        else:
            edges, read = part.block.nbytes + part.vertices.nbytes, len(part.vertices)
            if layer > self.shapes.first_varying:
                read = len(part.places) + sum(part.exchange.gives)
        nbytes = edges + read * self.shapes.layers[layer - 1].h_in * b
        if way == "b":
            return nbytes + rows * self.shapes.layers[layer - 1].h_out * b
        labels = targets.y.nbytes + targets.train.nbytes
        return nbytes + (labels if layer == self.last else 0)

    def _store(self, label: Label, nbytes: int, write: Callable[[], object]) -> None:
        def store() -> None:
            with self.rank.recorder.span(label, "copy", nbytes):
                write()

        self.storing = self._submit(store)

    def _arrived(self, step: int, way: str, layer: int, chunk: _Chunk) -> _Loaded:
        """`_load`. On a GPU the next chunk's of the layer is then under way."""
        if not self.copies_beside:
            return self._load(step, way, layer, chunk)
        load, following = partial(self._load, step, way, layer), chunk.number + 1
        coming, self.coming = self.coming or self._submit(partial(load, chunk)), None
        loaded = coming.result()
        if following < len(self.chunks):
            self.coming = self._submit(partial(load, self.chunks[following]))
        if self.rank.device.type == "cuda":
            stream = torch.cuda.current_stream(self.rank.device)
            keep_until_used(stream, loaded, loaded.block, loaded.targets)
        return loaded

    def _read(self, step: int, way: str, layer: int, chunk: _Chunk) -> _Loaded:
        """`_arrived`, and the rows read that other ranks have."""
        loaded = self._arrived(step, way, layer, chunk)
        if loaded.outgoing is not None:
            part, outgoing, loaded.outgoing = chunk.parts[layer], loaded.outgoing, None
            op = "halo" if way == "f" else "halo_again"
            label = Label(op, step, way, layer, chunk.number)
            with self.rank.recorder.sending(label, "comm", outgoing.nbytes):
                part.exchange.forward(outgoing, loaded.source[len(part.places) :])
        if layer > self.shapes.first_varying:
            loaded.source.requires_grad_(self.training)
        return loaded

    def _halo_home(self, step: int, layer: int, chunk: _Chunk, gradient: Tensor) -> Tensor | None:
        """The halo's gradient goes home -> that of the rows given [given, H_{l-1}], if any rank's
        is."""
        if not chunk.parts[layer].meets:
            return None
        part, label = chunk.parts[layer], Label("halo", step, "b", layer, chunk.number)
        far = gradient[len(part.places) :]
        with self.rank.recorder.sending(label, "comm", far.nbytes):
            return part.exchange.swap("b", far)

    def _store_gradient(
        self, step: int, layer: int, chunk: _Chunk, loaded: _Loaded, logits: Tensor | None = None
    ) -> None:
        """Add the gradient of the rows read to what other chunks have added; keep logits."""
        source, near, home = loaded.source, None, None
        if source.requires_grad:
            gradient = gradient_of(source)
            near = gradient[: len(chunk.parts[layer].places)]
            home = self._halo_home(step, layer, chunk, gradient)
        nbytes = sum(each.nbytes for each in (near, home, logits) if each is not None)

        def write() -> None:
            if logits is not None:
                self.logits[chunk.own[self.last]].copy_(logits, non_blocking=True)
            if near is not None:
                self._add(layer, chunk, near, home)

        self._store(Label("store", step, "b", layer, chunk.number), nbytes, write)

    def _add(self, layer: int, chunk: _Chunk, near: Tensor, home: Tensor | None) -> None:
        """Add gradients of rows that a layer of the chunk read, and of those that it gave."""
        into, part = self.gradients[layer - 1], chunk.parts[layer]
        if chunk is self.chunks[0]:
            into.zero_()
        if near.device == HOST:
            into.index_add_(0, part.places, near)
        else:  # threads may share this: no row is there twice

            def add(start: int, stop: int, rows: Tensor) -> None:
                its = part.places[start:stop]
                if rows.dtype == torch.bfloat16:  # index_add_ of it writes others' rows, too
                    into.index_copy_(0, its, into.index_select(0, its).add_(rows))
                else:
                    into.index_add_(0, its, rows)

            staging(near.device).store(near, add)
        if home is not None:
            part.exchange.add_home(into, home.to(HOST))

    # -- a step ------------------------------------------------------------------------------------

    def _compute(self, step: int, layer: int, loaded: _Loaded) -> Tensor:
        """A layer's rows of a chunk [R, H_l]."""
        net, relu, source = self.net.layer(layer), self.net.relu_after(layer), loaded.source
        if loaded.aggregate is not None:
            return net.update(loaded.aggregate, source, source, None, relu)
        assert loaded.block is not None and loaded.vertices is not None
        drop = self.drop(step, layer, loaded.vertices)
        moments = self.moments.get(layer) if self.training else None
        values = moments.values if moments else None
        out: Tensor = net(loaded.block, source, drop, None, relu, values)
        return out

    def _forward(
        self, step: int, layer: int, chunk: _Chunk, norm: BatchNorm | None
    ) -> Tensor | None:
        """A layer before the last: nothing but its rows stays, and their sums for the next norm."""
        loaded = self._read(step, "f", layer, chunk)
        label = Label("forward", step, layer=layer, chunk=chunk.number)
        with self.rank.recorder.span(label, "compute"), torch.no_grad():
            out = self._compute(step, layer, loaded)
            sums = None if norm is None else norm.sums(out)
        stored = self.hidden[layer][chunk.own[layer]]
        label = label._replace(op="store", way="f")
        self._store(label, out.nbytes, lambda: stored.copy_(out, non_blocking=True))
        return sums

    def _forward_and_backward(self, step: int, chunk: _Chunk) -> Tensor:
        """The last layer, forward and backward; returns the chunk's part of the loss."""
        loaded = self._read(step, "f", self.last, chunk)
        label = Label("forward", step, layer=self.last, chunk=chunk.number)
        with self.rank.recorder.span(label, "compute"):
            out = self._compute(step, self.last, loaded)
        assert loaded.targets is not None
        with self.rank.recorder.span(label._replace(op="loss", layer=None), "compute"):
            leaf = out.detach().requires_grad_()
            loss = loaded.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
        with self.rank.recorder.span(label._replace(op="backward"), "compute"):
            backward([out], [gradient_of(leaf)])
        self._store_gradient(step, self.last, chunk, loaded, leaf.detach())
        return loss.detach()

    def _backward(self, step: int, layer: int, chunk: _Chunk) -> None:
        """A layer before the last: forward again, and backward."""
        loaded = self._read(step, "b", layer, chunk)
        label = Label("backward", step, layer=layer, chunk=chunk.number)
        with self.rank.recorder.span(label, "compute"):
            assert loaded.gradient is not None
            out = self._compute(step, layer, loaded)
            if layer + 1 in self.moments:
                self.moments[layer + 1].add_home(out, loaded.gradient)
            backward([out], [loaded.gradient])
        if layer > self.shapes.first_varying:
            self._store_gradient(step, layer, chunk, loaded)

    def _forward_to_the_last(self, step: int) -> None:
        """All layers before the last, of all chunks."""
        for layer in range(1, self.last):
            norm = self.net.batch_norm(layer + 1) if self.training else None
            found = [self._forward(step, layer, chunk, norm) for chunk in self.chunks]
            if norm is not None:
                total = reduce(add, [sums for sums in found if sums is not None])
                label = Label("moments", step, "f", layer + 1)
                all_reduce(self.rank, label, total, self.reduce_group)
                moments = Moments.of(norm, total, self.problem.stats.vertices)
                self.moments[layer + 1] = moments

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward; adds gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits in the server's memory, chunk after
        chunk [own, C].
        """
        self.training = True
        self.scored_by = [chunk.targets for chunk in self.chunks]
        self._forward_to_the_last(step)
        loss = torch.stack([self._forward_and_backward(step, chunk) for chunk in self.chunks]).sum()
        for layer in range(self.last - 1, 0, -1):
            if (moments := self.moments.get(layer + 1)) is not None:
                label = Label("moments", step, "b", layer + 1)
                all_reduce(self.rank, label, moments.gradient, self.reduce_group)
            for chunk in self.chunks:
                self._backward(step, layer, chunk)
        self.storing.result()
        return loss, self.logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] without dropout, chunk after chunk; of all rows, though fewer are trained
        on: their edges are made for each evaluation."""
        if self.strategy.trim:
            every = replace(self.strategy, trim=False)
            whole = Worker(self.rank, self.problem, every, step, self.net)
            self.scored_by = whole.scored_by
            return whole.evaluate(step)
        self.training = False
        self._forward_to_the_last(step)
        for chunk in self.chunks:
            loaded = self._read(step, "f", self.last, chunk)
            self.logits[chunk.own[self.last]] = self._compute(step, self.last, loaded)
        return self.logits


open_worker = Worker
