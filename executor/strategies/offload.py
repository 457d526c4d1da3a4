"""Offload: devices compute chunk by chunk, and the server's memory has what chunks read.

A rank's rows in the server's memory are in the order of its chunks, so that a chunk's own rows are
neighbours. A layer of a chunk is a segment of its own, as graph parallelism's of a rank. What it
reads of its rank's other chunks it finds in the server's memory, where these have stored it; what
it reads of other ranks crosses as a halo. What is loaded for it is let go before the next chunk is
loaded. On a GPU a thread copies beside computation: while a chunk is computed, what the one before
has made goes back, and then the next one's rows come. What is done in which order is written in
planner/strategies/layerwise/chunked.py (`order`); here each operation is a method.
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
    backward,
    gradient_of,
    keep_until_used,
    mapped,
    pin_no_more_than_asked,
)
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.norms import Moments
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
from gnnplan.planner.strategies.layerwise.chunked import evaluation, order
from gnnplan.planner.strategies.layerwise.step import first_alike
from gnnplan.planner.vocabulary.schedule import Label

T = TypeVar("T")
HOST = torch.device("cpu")
NOTHING = torch.empty(0)


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
class _There:
    """What is on the device of a layer of a chunk: what was loaded, and what is made of it."""

    # rows of h_{l-1} [S, H_{l-1}]; with a constant aggregate the own ones, if the layer reads them
    source: Tensor
    block: Block | None = None  # None: the aggregate is there
    vertices: Tensor = NOTHING  # whose rows these are, int64 [S]
    aggregate: Tensor = NOTHING  # of layer 1, where it is constant [R, F]
    # rows of other ranks' halos, which leave; then their gradients, which came home [., H_{l-1}]
    crossing: Tensor = NOTHING
    targets: Targets | None = None  # for a loss
    out: Tensor = NOTHING  # rows of h_l [R, H_l]
    gradient: Tensor = NOTHING  # of h_l [R, H_l]


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
        self.coming: Future[_There] | None = None  # the next chunk's
        self.storing: Future[None] = completed_future(None)  # the last store
        self.losses: list[Tensor] = []  # of a step's chunks
        self.sums: list[Tensor] = []  # of a layer's chunks, for the next one's batch norm
        with rank.in_server_memory():
            layout = problem.chunked(chunks)
            rows = problem.trimmed(layout) if strategy.trim else layout
            assert isinstance(rows, Layout)
            self._keep(rows, trains=net is None)
        self.scorers = [chunk.targets for chunk in self.chunks]

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
        layers = range(1, self.last + 1)
        like = first_alike((layout.kind(n), self.net.layer(n).edges) for n in layers)
        for n in layers:
            own = np.concatenate(each[n - 1])
            for chunk in self.chunks:
                same = chunk.parts.get(like[n])
                chunk.parts[n] = same or self._part(layout, chunk.number, n, own)

        dtype, on_gpu = dtype_of(self.problem.workload.precision), self.rank.device.type == "cuda"
        if on_gpu:
            pin_no_more_than_asked()

        def room(numbers: int) -> Tensor:
            """Zeros [numbers]; in page-locked memory if a GPU is to read them."""
            return torch.zeros(numbers, dtype=dtype, pin_memory=on_gpu)

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
        self.logits = self.hidden[self.last] = rows(self.last, self.shapes.classes)
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

    def _load(self, label: Label, layer: int, chunk: _Chunk) -> _There:
        """What a layer of the chunk reads, and for a backward pass the gradient of its rows."""
        part, device = chunk.parts.get(layer), self.rank.device
        with self.rank.recorder.span(label, "copy", self._bytes_to_load(label.way, layer, chunk)):
            if part is None:
                assert self.aggregate is not None
                own = chunk.rows(1) if self.shapes.layers[0].reads_own else 0
                source = self._features(chunk.vertices[:own], device)
                there = _There(source, aggregate=self._copy(self.aggregate[chunk.own[1]]))
            else:
                if layer <= self.shapes.first_varying:
                    source = self._features(part.vertices.numpy(), device)
                else:
                    rows, width = self.hidden[layer - 1], self.shapes.input_width(layer)
                    source = rows.new_empty(len(part.vertices), width, device=device)
                    self._pick(rows, part.places, source[: len(part.places)])
                there = _There(source, mapped(part.block, self._copy), self._copy(part.vertices))
                if layer > self.shapes.first_varying and part.meets:
                    given = part.exchange.positions
                    there.crossing = self._pick(rows, given, source.new_empty(len(given), width))
            if label.way == "b":
                there.gradient = self._copy(self.gradients[layer][chunk.own[layer]])
            elif layer == self.last and self.training:
                there.targets = chunk.targets.to_train_on(device)
            return there

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

    def _loaded(self, label: Label, layer: int, chunk: _Chunk) -> _There:
        """`_load`. On a GPU the next chunk's of the layer is then under way."""
        if not self.copies_beside:
            return self._load(label, layer, chunk)
        there = (self.coming or self._submit(partial(self._load, label, layer, chunk))).result()
        self.coming, following = None, chunk.number + 1
        if following < len(self.chunks):
            label = label._replace(chunk=following)
            self.coming = self._submit(partial(self._load, label, layer, self.chunks[following]))
        if self.rank.device.type == "cuda":
            stream = torch.cuda.current_stream(self.rank.device)
            keep_until_used(stream, there, there.block, there.targets)
        return there

    def _store(self, label: Label, nbytes: int, write: Callable[[], object]) -> None:
        def store() -> None:
            with self.rank.recorder.span(label, "copy", nbytes):
                write()

        self.storing = self._submit(store)

    def _store_rows(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        stored, out = self.hidden[layer][chunk.own[layer]], there.out
        self._store(label, out.nbytes, lambda: stored.copy_(out, non_blocking=True))

    def _store_gradient(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        """Add the gradient of the rows read to what other chunks have added; keep logits."""
        near, home, out = NOTHING, there.crossing, there.out
        if varies := layer > self.shapes.first_varying:
            near = gradient_of(there.source)[: len(chunk.parts[layer].places)]

        def write() -> None:
            if layer == self.last:
                self.logits[chunk.own[layer]].copy_(out, non_blocking=True)
            if varies:
                self._add(layer, chunk, near, home)

        self._store(label, near.nbytes + home.nbytes + out.nbytes, write)

    def _swap_halo(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        """Rows read that other ranks have come; or their gradients go home."""
        part, home = chunk.parts[layer], (label.op, label.way) == ("halo", "b")
        if not part.meets:
            return
        far = (gradient_of(there.source) if home else there.source)[len(part.places) :]
        leaving, into = (far, None) if home else (there.crossing, far)
        with self.rank.recorder.sending(label, "comm", leaving.nbytes):
            came = part.exchange.swap("b" if home else "f", leaving, into)
        there.crossing = came if home else NOTHING

    def _add(self, layer: int, chunk: _Chunk, near: Tensor, home: Tensor) -> None:
        """Add gradients of rows that a layer of the chunk read, and of those that it gave."""
        into, part = self.gradients[layer - 1], chunk.parts[layer]
        if chunk is self.chunks[0]:
            into.zero_()
        if near.device == HOST:
            into.index_add_(0, part.places, near)
        else:  # threads may share this: no row is there twice

            def add(start: int, stop: int, rows: Tensor) -> None:
                its = part.places[start:stop]
                if rows.itemsize < 4:  # index_add_ of such numbers writes others' rows, too
                    into.index_copy_(0, its, into.index_select(0, its).add_(rows))
                else:
                    into.index_add_(0, its, rows)

            staging(near.device).store(near, add)
        part.exchange.add_home(into, home.to(HOST))

    # -- a step ------------------------------------------------------------------------------------

    def _compute(self, label: Label, layer: int, there: _There) -> Tensor:
        """A layer's rows of a chunk [R, H_l]."""
        net, relu, source = self.net.layer(layer), self.net.relu_after(layer), there.source
        source.requires_grad_(self.training and layer > self.shapes.first_varying)
        if there.block is None:
            return net.update(there.aggregate, source, source, None, relu)
        drop = self.drop(label.step, layer, there.vertices)
        moments = self.moments.get(layer) if self.training else None
        values = moments.values if moments else None
        out: Tensor = net(there.block, source, drop, None, relu, values)
        return out

    def _forward(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        """Of a layer before the last nothing but its rows stays, and their sums for a norm."""
        norm = self.net.batch_norm(layer + 1) if self.training and layer < self.last else None
        learns = self.training and layer == self.last
        with self.rank.recorder.span(label, "compute"), torch.set_grad_enabled(learns):
            there.out = self._compute(label, layer, there)
            if norm is not None:
                self.sums.append(norm.sums(there.out))

    def _loss(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        assert there.targets is not None
        with self.rank.recorder.span(label, "compute"):
            leaf = there.out.detach().requires_grad_()
            loss = there.targets.loss(leaf)
            loss.backward()  # type: ignore[no-untyped-call]
        there.gradient = gradient_of(leaf)
        self.losses.append(loss.detach())

    def _backward(self, label: Label, layer: int, chunk: _Chunk, there: _There) -> None:
        """The forward pass is repeated, but of the last layer."""
        with self.rank.recorder.span(label, "compute"):
            out = there.out if layer == self.last else self._compute(label, layer, there)
            if layer + 1 in self.moments:
                self.moments[layer + 1].add_home(out, there.gradient)
            backward([out], [there.gradient])
        there.out, there.gradient = there.out.detach(), NOTHING

    def _moments(self, label: Label, layer: int) -> None:
        """Sum what all chunks know of the moments of the layer's inputs, or of their gradient."""
        norm = self.net.batch_norm(layer) if self.training else None
        if norm is not None and label.way == "b":
            all_reduce(self.rank, label, self.moments[layer].gradient, self.reduce_group)
        elif norm is not None:
            total, self.sums = reduce(add, self.sums), []
            all_reduce(self.rank, label, total, self.reduce_group)
            self.moments[layer] = Moments.of(norm, total, self.problem.stats.vertices)

    def _do(self, step: int, operations: Iterable[Label]) -> None:
        """One after the other."""
        methods = {
            "halo f": self._swap_halo,
            "halo b": self._swap_halo,
            "halo_again b": self._swap_halo,
            "forward": self._forward,
            "loss": self._loss,
            "backward": self._backward,
            "store f": self._store_rows,
            "store b": self._store_gradient,
        }
        there = _There(NOTHING)
        for label in (each._replace(step=step) for each in operations):
            layer = label.layer or self.last
            if label.chunk is None:
                self._moments(label, layer)
            elif label.op == "load":
                there = _There(NOTHING)  # nothing of the chunk before is left when a load begins
                there = self._loaded(label, layer, self.chunks[label.chunk])
            else:
                method = methods[f"{label.op} {label.way}".rstrip()]
                method(label, layer, self.chunks[label.chunk], there)
        self.storing.result()

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward; adds gradients to the parameters' .grad.

        Returns this rank's part of the loss, and its logits in the server's memory, chunk after
        chunk [own, C].
        """
        self.training, self.losses = True, []
        self.scorers = [chunk.targets for chunk in self.chunks]
        self._do(step, order(self.shapes, self.turns))
        return torch.stack(self.losses).sum(), self.logits

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] without dropout, chunk after chunk; of all rows, though fewer are trained
        on: their edges are made for each evaluation."""
        if self.strategy.trim:
            every = replace(self.strategy, trim=False)
            whole = Worker(self.rank, self.problem, every, step, self.net)
            self.scorers = whole.scorers
            return whole.evaluate(step)
        self.training = False
        self._do(step, evaluation(self.shapes, self.turns))
        return self.logits


open_worker = Worker
