"""GNNPipe: a rank's share of a pipeline stage, chunk after chunk.

planner/strategies/gnnpipe.py draws the pipeline. A stage sends a chunk's rows to the next stage.
Members of a stage exchange the rows that their sub-chunks read of each other (the halo), when the
chunk is processed. Gradients are sent in the other direction. After a step
executor/ranks/learner.py all-reduces weight gradients over the members of a stage, and updates the
weights.

    Chunk     a sub-chunk: its rows, its edges, and exchanges with other members
    Inputs    layer 1 on constant features
    History   one layer on one chunk, forward and backward; rows cached from step to step
    Worker    a training step: chunks through the stage, messages between stages and members

A rank keeps the rows of its own sub-chunks, chunk after chunk, followed by its halo: the rows of
other members of its stage that its edges read.

    [ own rows of chunk 0 | own of chunk 1 | .. | halo of chunk 0 | halo of chunk 1 | .. ]

A stage of one member has no halo. Positions in this order are called places.

A layer runs in parts here (layers/layer.py): it gathers its neighbourhood from mixed rows, fresh
and historical, and adds the gradient of neighbours to the slope by hand. The forward pass returns a
backward function, which holds the tensors that the backward pass needs. For all rows that the rank
keeps, each layer with varying input has:

    past    historical input rows
    mixed   the rows that neighbours read: past rows, overwritten by fresh rows as chunks are
            processed. Both are prepared (norm and dropout).
    slope   the gradient of the mixed rows

Backward visits the chunks in reverse order. So a chunk may add gradient to rows that it read as
historical, after the backward pass of these rows' chunk. Such late gradient stays in `slope`. It is
unused, or with historical_gradients `carried` into the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of, features, weighted_block
from gnnplan.executor.layers.kernels import (
    Block,
    UniformWidth,
    aggregate_transposed,
    backward,
    cat,
    gradient_of,
)
from gnnplan.executor.layers.layer import Drop, Layer, no_dropout
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks.comm import Exchange, PendingReceive, send
from gnnplan.executor.ranks.rank import Rank, completed_future
from gnnplan.executor.strategies.base import NOTHING, Backward
from gnnplan.executor.strategies.base import Worker as StrategyWorker
from gnnplan.planner.graph.sampling import ROUNDING, Ids
from gnnplan.planner.ownership.layout import Chunks
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import settled
from gnnplan.planner.strategies.gnnpipe import SIGNS, Direction, GNNPipe, Piece, chunk_order
from gnnplan.planner.vocabulary.numbers import Group, offsets
from gnnplan.planner.vocabulary.schedule import Label


@dataclass
class Chunk:
    """A sub-chunk and the edges into it."""

    rows: slice  # places of own rows
    halo: slice  # places of the chunk's rows that other members own and this rank reads
    sources: Tensor  # int64 [S], places of source rows, own rows first
    blocks: dict[str, Block]  # by the kind of a layer's edges
    exchange: Exchange | None  # of the halo; None: no member reads another member's rows

    @property
    def size(self) -> int:
        """Number of own rows."""
        return int(self.rows.stop - self.rows.start)

    def select(self, rows: Tensor) -> Tensor:
        """Select the chunk's own rows and halo from all rows that the rank keeps."""
        return torch.cat([rows[self.rows], rows[self.halo]]) if self.exchange else rows[self.rows]

    def gather(self, layer: Layer, rows: Tensor) -> Tensor:
        """Gather the neighbourhood from all prepared rows that the rank keeps -> [size, width]."""
        return self.gather_sources(layer, rows.index_select(0, self.sources))

    def gather_sources(self, layer: Layer, sources: Tensor) -> Tensor:
        """Gather the neighbourhood from prepared source rows [S, H_in] -> [size, width]."""
        return layer.gather(self.blocks[layer.edges], layer.gathers(sources))


class Inputs:
    """The features of a rank of the first stage."""

    def __init__(
        self, rank: Rank, problem: Problem, net: Net, chunks: Sequence[Chunk], kept: Ids, own: int
    ) -> None:
        """kept: global ids of the rows that the rank keeps. own: number of own rows, the first."""
        self.net, self.chunks = net, chunks
        exchanges = [(chunk, chunk.exchange) for chunk in chunks if chunk.exchange]
        # of the halo, if layer 1 reads it: fetched once
        self.fetched = exchanges if problem.model.first_varying > 0 else []
        self.features = self._load(rank, problem, kept, own)
        self.by_chunk: list[Tensor] = []  # chunks' source rows, if only a product reads features
        if problem.model.rows(1).multiplied_first:
            self.by_chunk = [self.features.index_select(0, chunk.sources) for chunk in chunks]
            self.features = NOTHING  # `by_chunk` replaces it
        self.aggregated: list[Tensor] = []  # by chunk, if the aggregate is constant
        if problem.model.aggregate_cached(1):
            self.aggregated = [chunk.gather(net.layer(1), self.features) for chunk in chunks]
        # other dense features are prepared here in every step, unless a layer does so itself
        plain = net.encoder is None and not net.layer(1).reads_whole
        self.is_prepared = plain and not (self.by_chunk or self.aggregated)
        self.prepared = NOTHING

    def _load(self, rank: Rank, problem: Problem, kept: Ids, own: int) -> Tensor:
        """Load features of own rows, and of the halo if layer 1 reads it."""
        graph = problem.data
        rows = features(graph, kept[:own], problem.workload, rank.device)
        outgoing = [exchange.pack(rows[chunk.rows]) for chunk, exchange in self.fetched]
        if not outgoing:
            return rows
        with rank.recorder.sending(
            Label("input_halo", -1), "comm", sum(each.nbytes for each in outgoing)
        ):
            halo = [
                exchange.forward(packed, lengths=graph.lengths(kept[chunk.halo]))
                for (chunk, exchange), packed in zip(self.fetched, outgoing, strict=True)
            ]
        return cat([rows, *halo])

    def prepare(self, drop: Drop) -> None:
        """Apply a step's dropout to features, if layer 1 reads prepared features."""
        if self.is_prepared:
            self.prepared = self.net.layer(1).prepare(self.features, drop)

    def first_layer(self, c: int, drop: Callable[[Tensor], Drop]) -> Tensor:
        """Return layer 1's output for chunk c. drop: places -> dropout of the rows there."""
        chunk, layer, relu = self.chunks[c], self.net.layer(1), self.net.relu_after(1)
        if self.by_chunk or layer.reads_whole:
            rows = (
                self.by_chunk[c] if self.by_chunk else self.features.index_select(0, chunk.sources)
            )
            block, dropped = chunk.blocks[layer.edges], drop(chunk.sources)
            out: Tensor = layer(block, rows, dropped, None, relu)
            return out
        own = self.features[chunk.rows]
        if self.aggregated:
            return layer.update(self.aggregated[c], own, own, None, relu)
        gathered = chunk.gather(layer, self.prepared)
        return layer.update(gathered, self.prepared[chunk.rows], own, None, relu)


# backward function: (root of the layer's autograd graph, the root's gradient) -> gradient of the
# layer's input rows
BackwardFrom = Callable[[Tensor, Tensor], Tensor]


class History:
    """The past and mixed rows of one rank, and their gradients."""

    def __init__(
        self,
        net: Net,
        widths: dict[int, int],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        carries: bool,
    ) -> None:
        """widths: input width of every layer whose input varies. carries: historical_gradients."""

        def zeros() -> dict[int, Tensor]:
            return {
                layer: torch.zeros(rows, width, dtype=dtype, device=device)
                for layer, width in widths.items()
            }

        self.net = net
        self.past, self.mixed, self.slope = zeros(), zeros(), zeros()
        self.carried = zeros() if carries else {}
        self.refreshes = False  # whether a step's rows are copied to the past rows

    def begin_step(self, layer: int, drop_before: Drop, drop: Drop) -> None:
        """Prepare a layer's rows for a step.

        drop: dropout of this step. drop_before: of the step before, whose late gradient is carried.
        """
        net = self.net.layer(layer)
        if self.carried:
            # The late gradient is that of prepared rows; this makes it that of input rows. Here
            # `prepare` is dropout or the identity, and each is its own transpose.
            self.carried[layer] = net.prepare(self.slope[layer], drop_before).clone()
        self.slope[layer].zero_()
        with torch.no_grad():
            self.mixed[layer].copy_(net.prepare(self.past[layer], drop))

    def state(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: past rows, and late gradient if it is carried."""
        late = self.slope if self.carried else {}
        return {
            f"{name}.{layer}": rows
            for name, by_layer in (("past", self.past), ("slope", late))
            for layer, rows in by_layer.items()
        }

    def forward(
        self,
        layer: int,
        chunk: Chunk,
        inputs: Tensor,
        x0: Tensor | None,
        drop: Drop,
        checkpoint: bool,
    ) -> tuple[Tensor, BackwardFrom]:
        """Run a layer on a chunk's input rows, own rows and halo -> output, backward function.

        drop: dropout of these rows. checkpoint: recompute in the backward pass. The mixed rows
        cannot be recomputed, as they change before the chunk's backward pass: the rows read from
        them are kept (if gathering is linear, only their sums).
        """
        part, relu = self.net.layer(layer).during(drop), self.net.relu_after(layer)
        linear = part.linear and not part.projects_first  # rows' gradient follows from the sums'
        mixed, x = self.mixed[layer], inputs.detach().requires_grad_()

        def finish(prepared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return prepared rows with autograd graph, a leaf of own prepared rows, the output."""
            rows = prepared.detach()[: chunk.size].requires_grad_()
            gathered = read if linear else chunk.gather_sources(part, read)
            return prepared, rows, part.update(gathered, rows, x[: chunk.size], x0, relu)

        with torch.set_grad_enabled(not checkpoint):
            prepared = part.prepare(x, drop)
            own_and_halo = (chunk.rows, slice(0, chunk.size)), (chunk.halo, slice(chunk.size, None))
            for places, rows in own_and_halo:
                mixed[places] = prepared.detach()[rows]
                if self.refreshes:
                    self.past[layer][places] = x.detach()[rows]
            read = mixed.index_select(0, chunk.sources)
            read = (chunk.gather_sources(part, read) if linear else read).requires_grad_()
            *saved, out = finish(prepared)
        del prepared
        if checkpoint:
            saved = []

        def back(root: Tensor, gradient: Tensor) -> Tensor:
            """Return the gradient of input rows, own rows and halo."""
            prepared, rows, root = (*saved, root) if saved else finish(part.prepare(x, drop))
            backward([root], [gradient])
            to_read = gradient_of(read)
            if linear:
                to_read = aggregate_transposed(chunk.blocks[part.edges], to_read)
            slope = self.slope[layer]
            slope[chunk.rows] += to_read[: chunk.size]
            # own rows are added by slice above: index_add_ is several times as slow
            slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])
            del to_read  # the largest tensor
            if rows.grad is not None:
                slope[chunk.rows] += rows.grad
            backward([prepared], [chunk.select(slope)])
            if not self.carried:
                return gradient_of(x)
            for places in (chunk.rows, chunk.halo):
                slope[places].zero_()  # used up: gradient that is added later is late
            return gradient_of(x) + chunk.select(self.carried[layer])

        return out, back


@dataclass
class ChunkState:
    """A chunk between the stage's layers."""

    h: Tensor = NOTHING  # the next layer's input rows; after the last layer, logits
    x0: Tensor | None = None  # GCNII's initial rows, a leaf that all layers read
    loss: Tensor = field(default=NOTHING, init=False)  # on the last stage
    backwards: list[Backward] = field(default_factory=list, init=False)  # backward functions


class Worker(StrategyWorker):
    """One rank: member `member` of stage `stage`."""

    net: Net
    inputs: Inputs  # of the first stage

    def __init__(self, rank: Rank, problem: Problem, strategy: GNNPipe, first: int = 0) -> None:
        workload, device = problem.workload, rank.device
        self.rank, self.problem, self.strategy = rank, problem, strategy
        stages, self.members = strategy.pipeline(problem), strategy.members(problem)
        number, self.member = divmod(rank.rank, self.members)
        self.stage = stages[number]
        self.model, self.layers = self.stage.model, self.stage.layers
        self.varying = self.stage.varying
        self.previous, self.following = rank.rank - self.members, rank.rank + self.members
        if self.members > 1:
            for stage in stages:
                rank.groups.of(stage.ranks)
        rank.groups.open_pairs(self.members)
        self.dtype, self.seed = dtype_of(workload.precision), workload.seed
        self.codec = strategy.codec
        self.net = net_of(self.model, workload, self.layers).to(device)
        cut = problem.cut(settled(strategy.chunks), self.members)
        ids = np.concatenate([cut.own(self.member), cut.halos[self.member]])
        self.own, self.vertices = cut.own(self.member).size, torch.from_numpy(ids).to(device)
        self.chunks = self._make_chunks(cut, ids)
        self.targets = [
            Targets(problem.data, ids[chunk.rows], workload, device)
            for chunk in self.chunks
            if self.stage.is_last
        ]
        self.scorers = self.targets  # in chunk order; empty before the last stage
        if self.stage.number == 0:
            self.inputs = Inputs(rank, problem, self.net, self.chunks, ids, self.own)
        widths = {layer: self.model.input_width(layer) for layer in self.varying}
        self.history = History(
            self.net, widths, ids.size, self.dtype, device, strategy.historical_gradients
        )
        self.refill(first)  # the first step's historical rows are those of the initial weights

    @property
    def reduce_group(self) -> Group:
        return self.stage.ranks

    def _make_chunks(self, cut: Chunks, kept: np.ndarray) -> list[Chunk]:
        """Make the sub-chunks of this rank. cut: the graph in chunks, every chunk split over the
        members of a stage. kept: global ids of all rows that the rank keeps."""
        problem, device = self.problem, self.rank.device
        graph, member = problem.data, self.member
        place = np.full(graph.stats.vertices, -1, dtype=np.int64)
        place[kept] = np.arange(kept.size)
        position = np.empty(kept.size, dtype=np.int32)  # place -> position among a chunk's sources
        chunk_of_halo = cut.sub[kept[self.own :]] // cut.members
        halo_ends = self.own + np.searchsorted(chunk_of_halo, np.arange(cut.chunks + 1))
        chunks, start = list[Chunk](), 0
        for c in range(cut.chunks):
            ids = cut.rows(c, member)
            rows = slice(start, start + ids.size)
            start = rows.stop
            indptr = offsets(graph.degree_of(ids))
            columns, own_places = place[graph.neighbours(ids)], np.arange(rows.start, rows.stop)
            sources = np.concatenate([own_places, np.setdiff1d(columns, own_places)])
            position[sources] = np.arange(sources.size)
            edges = ids, kept[sources], indptr, position[columns], problem.workload
            blocks = {
                kind: weighted_block(graph, kind, *edges).to(device)
                for kind in {self.net.layer(layer).edges for layer in self.layers}
            }
            halo = slice(int(halo_ends[c]), int(halo_ends[c + 1]))
            places = torch.from_numpy(sources).to(device)
            chunks.append(Chunk(rows, halo, places, blocks, self._exchange(cut, c)))
        return chunks

    def _exchange(self, cut: Chunks, c: int) -> Exchange | None:
        """Make the members' exchange of chunk c's rows; None if no member reads another's rows."""
        rank, sends = self.rank, cut.facts.sends[c]
        if not sends.any():
            return None
        give = [np.zeros(0, dtype=np.int64)] * rank.world
        take = np.zeros(rank.world, dtype=np.int64)
        for other, peer in enumerate(self.reduce_group):
            give[peer], take[peer] = cut.given(c, self.member, other), sends[other, self.member]
        return Exchange(rank, give, take, self.reduce_group)

    # -- one step ---------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Run forward and backward of a training step.

        Returns this rank's part of the loss, and the logits [own, C] in chunk order (empty before
        the last stage).
        """
        order = chunk_order(self.seed, step, len(self.chunks), self.strategy.shuffle)
        # rows of epoch t = step + 1 become the historical rows of the next `period` epochs
        self.history.refreshes = (step + 1) % self.strategy.period == 0
        with self.computing("history", step):
            for layer in self.varying:
                drops = (self.drop(t, layer, self.vertices) for t in (step - 1, step))
                self.history.begin_step(layer, *drops)
            if self.stage.number == 0:
                self.inputs.prepare(self.drop(step, 1, self.vertices))
        device, dtype = self.rank.device, dtype_of(self.problem.workload.precision.weights)
        loss = torch.zeros((), dtype=dtype, device=device)
        shape = self.own if self.stage.is_last else 0, self.model.classes
        logits = torch.zeros(shape, dtype=self.dtype, device=device)
        states: dict[int, ChunkState] = {}

        def forward(c: int, received: list[Tensor]) -> list[Tensor]:
            state = states[c] = self._forward(step, c, received)
            if not self.stage.is_last:
                return [state.h] if state.x0 is None else [state.h, state.x0.detach()]
            loss.add_(state.loss)
            logits[self.chunks[c].rows] = state.h
            return []

        def backward(c: int, received: list[Tensor]) -> list[Tensor]:
            return self._backward(step, c, states.pop(c), received)

        self._pass(step, "f", order, forward)
        self._pass(step, "b", order[::-1], backward)
        return loss, logits

    def _pass(
        self,
        step: int,
        direction: Direction,
        order: list[int],
        compute: Callable[[int, list[Tensor]], list[Tensor]],
    ) -> None:
        """Receive, compute and send chunk after chunk.

        compute: (chunk, received tensors) -> tensors to send, none if no stage follows.
        """
        sign, sends = SIGNS[direction], list[Future[None]]()
        source, target = (self.previous, self.following)[::sign]
        width = (self.stage.received, self.stage.sent)[::sign][0]  # 0: no stage precedes
        columns, dtype = width, self.dtype
        if self.codec.packs:
            columns, dtype = self.codec.row_bytes(width, dtype.itemsize), torch.uint8
        # NCCL orders all messages of a pair of ranks: these are posted in the order in which the
        # peer sends, after the sends of the pass before have ended
        receives = {
            c: PendingReceive(self.rank, (self.chunks[c].size, columns), dtype, source)
            for c in (order if width else ())
        }
        for c in order:
            label = Label("receive", step, direction, chunk=c, peer=source)
            received = self._receive(label, receives.pop(c), width) if width else []
            if outgoing := compute(c, received):
                label = label._replace(op="pipeline", peer=target)
                sends.append(self._send(label, self.chunks[c], outgoing))
        for future in sends:
            future.result()

    def _receive(self, label: Label, message: PendingReceive, width: int) -> list[Tensor]:
        """Receive a chunk's rows, or their gradient, and GCNII's initial rows.

        Two tensors are copied apart: matrix products of non-contiguous rows are slow.
        """
        # an empty sub-chunk has no message
        is_sent = message.buffer.numel() > 0
        with self.rank.recorder.span(label, "receive") if is_sent else nullcontext():
            rows = message.wait()
        if self.codec.packs:
            with self.rank.recorder.span(label._replace(op="unpack", peer=None), "compute"):
                into = torch.empty(len(rows), width, dtype=self.dtype, device=rows.device)
                rows = UniformWidth(self.codec.on_average).unpack(rows, into)
        if not self.model.carried:
            return [rows]
        # `contiguous` would not copy an empty tensor, whose strides autograd then warns about
        parts = rows.tensor_split([width - self.model.carried], 1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def _send(self, label: Label, chunk: Chunk, parts: list[Tensor]) -> Future[None]:
        """Send a chunk's rows, with GCNII's initial rows as more columns, on the send lane."""
        rows, peer = parts[0] if len(parts) == 1 else torch.cat(parts, 1), label.peer
        if self.codec.packs:
            # the layer that reads the rows, on the receiving stage
            layer = self.layers.stop if label.direction == "f" else self.layers.start
            numbers = ROUNDING, self.seed, label.step, layer, "fb".index(label.direction)
            with self.rank.recorder.span(label._replace(op="pack", peer=None), "compute"):
                vertices = self.vertices[chunk.rows]
                rows = UniformWidth(self.codec.on_average).pack(rows, None, vertices, *numbers)
        if not rows.shape[0]:
            return completed_future(None)
        recorded = self.rank.recorder.sending(label, "send", rows.nbytes)

        def run() -> None:
            with recorded:
                send(self.rank, rows, settled(peer))

        return self.rank.lanes.submit("send", run)

    def _label(self, op: str, step: int, piece: Piece, c: int) -> Label:
        return Label(op, step, layer=piece[0] if self.members > 1 else None, chunk=c)

    def _halo(self, step: int, direction: str, layer: int, c: int, rows: Tensor) -> Tensor:
        """Exchange a chunk's rows between the members of the stage.

        Forward ('f') it sends own rows and returns the halo. Backward ('b') it sends the halo's
        gradient to the owners and returns the gradient of the own rows sent.
        """
        exchange = self.chunks[c].exchange
        assert exchange is not None
        with exchange.recorded(Label("halo", step, direction, layer, c), rows, direction):
            return exchange.swap(direction, exchange.pack(rows) if direction == "f" else rows)

    def _forward(self, step: int, c: int, received: list[Tensor]) -> ChunkState:
        """Run the stage's layers forward on a chunk."""
        chunk, state = self.chunks[c], ChunkState(*received)
        if state.x0 is not None:
            state.x0.requires_grad_()
        for piece in self.stage.pieces:
            halo = list[Tensor]()
            if chunk.exchange and piece[0] in self.varying:
                halo.append(self._halo(step, "f", piece[0], c, state.h))
            with self.rank.recorder.span(self._label("forward", step, piece, c), "compute"):
                inputs = torch.cat([state.h, *halo]) if halo else state.h
                for layer in piece:
                    root, back = self._layer(step, c, layer, state, inputs)
                    inputs = state.h = root.detach()
                    if layer == self.net.total:
                        root = self._end(step, c, state, root)
                    state.backwards.append(partial(back, root))
                del root
        return state

    def _layer(
        self, step: int, c: int, layer: int, state: ChunkState, inputs: Tensor
    ) -> tuple[Tensor, BackwardFrom]:
        """Run one layer (0: the encoder) on a chunk's rows -> output, backward function."""
        chunk = self.chunks[c]
        if layer in self.varying:
            drop = self.drop(step, layer, chunk.select(self.vertices))
            recomputes = self.strategy.checkpoint and layer < self.net.total
            return self.history.forward(layer, chunk, inputs, state.x0, drop, recomputes)
        if layer:  # constant features
            out = self.inputs.first_layer(
                c, lambda places: self.drop(step, layer, self.vertices[places])
            )
        else:
            rows = self.inputs.features[chunk.rows]
            out = self.net.encode(rows, self.drop(step, 0, self.vertices[chunk.rows]))
        x0 = state.x0 = out.detach().requires_grad_() if self.net.initial else None

        def back(root: Tensor, gradient: Tensor) -> Tensor:
            backward([root], [gradient if x0 is None else gradient + gradient_of(x0)])
            return gradient

        return out, back

    def _end(self, step: int, c: int, state: ChunkState, out: Tensor) -> Tensor:
        """Compute a chunk's logits and loss; return the loss with its autograd graph."""
        drop = self.drop(step, self.net.total + 1, self.vertices[self.chunks[c].rows])
        logits = self.net.decode(out, drop)
        loss = self.targets[c].loss(logits)
        state.h, state.loss = logits.detach(), loss.detach()
        return loss

    def _backward(
        self, step: int, c: int, state: ChunkState, received: list[Tensor]
    ) -> list[Tensor]:
        """Run the stage's layers backward on a chunk, from the gradient of its output rows.

        Returns the gradients of its input rows and of GCNII's initial rows; [] on the first stage.
        """
        chunk, x0, backwards = self.chunks[c], state.x0, state.backwards
        gradient, *to_initial = received or [torch.ones_like(state.loss)]
        if x0 is not None and to_initial:
            x0.grad = to_initial[0]
        for piece in reversed(self.stage.pieces):
            with self.rank.recorder.span(self._label("backward", step, piece, c), "compute"):
                for _ in piece:
                    gradient = backwards.pop()(gradient)
            if chunk.exchange and piece[0] in self.varying:
                gradient, halo = gradient[: chunk.size], gradient[chunk.size :]
                chunk.exchange.add_gradient(gradient, self._halo(step, "b", piece[0], c, halo))
        if self.stage.number == 0:
            return []
        if x0 is None:
            return [gradient.clone()]  # it may be a view of the history's `slope`
        return [gradient, torch.zeros_like(x0) if x0.grad is None else x0.grad]

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """Run forward on the full graph, without dropout or history, stage after stage.

        Returns logits [own, C] on the last stage, else an empty tensor. Writes the rows of this
        pass to the history's mixed rows.
        """
        first = ChunkState(*self._first_rows())
        h, x0 = first.h, first.x0
        for layer in self.layers:
            if layer not in self.varying:
                self.inputs.prepare(no_dropout)
                numbers = range(len(self.chunks))
                h = torch.cat([self.inputs.first_layer(c, lambda _: no_dropout) for c in numbers])
                continue
            halo = [
                chunk.exchange.forward(chunk.exchange.pack(h[chunk.rows]))
                for chunk in self.chunks
                if chunk.exchange
            ]
            h = torch.cat([h, *halo]) if halo else h
            del halo
            self.history.mixed[layer].copy_(h)
            part, relu = self.net.layer(layer), self.net.relu_after(layer)
            prepared, outs = part.prepare(h, no_dropout), list[Tensor]()
            for chunk in self.chunks:
                arguments = chunk.gather(part, prepared), prepared[chunk.rows], h[chunk.rows]
                outs.append(part.update(*arguments, None if x0 is None else x0[chunk.rows], relu))
            del prepared, arguments
            h = torch.cat(outs)
            del outs
        if self.stage.is_last:
            return self.net.decode(h)
        # separate messages: concatenated, the rows would need twice the memory
        for rows in (h, x0):
            if rows is not None:
                send(self.rank, rows, self.following)
        return self.vertices[:0]

    def _first_rows(self) -> list[Tensor]:
        """Return own rows that the stage's first layer reads, and GCNII's initial rows.

        [] if the layer reads constant features.
        """
        if self.stage.number:
            past = self.model.carried
            width = self.stage.received - past
            shapes = [(self.own, columns) for columns in (width, past) if columns]
            receives = [
                PendingReceive(self.rank, shape, self.dtype, self.previous) for shape in shapes
            ]
            return [arrival.wait() for arrival in receives]
        if self.net.encoder is None:
            return []
        h = self.net.encode(self.inputs.features)
        return [h, h] if self.net.initial else [h]

    def state(self) -> dict[str, Tensor]:
        """Return weights and history."""
        return self.trained() | self.history.state()

    def refill(self, step: int) -> None:
        """Recompute historical rows from the current weights, as before the first step."""
        self.evaluate(step)
        for layer in self.varying:
            self.history.past[layer].copy_(self.history.mixed[layer])


open_worker = Worker
