"""The steps of one rank: chunks through its stage, and messages between stages and members.

Stages pass each other a chunk's rows; members of a stage exchange the rows that their sub-chunks
read of each other (the halo), when the chunk is processed. Gradients go the same ways back.
After a step executor/ranks/learner.py adds weight gradients up over the members of a stage, and
updates the weights.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import Even, backward, gradient_of
from gnnplan.executor.layers.layer import keep
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Arrival, send
from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.base import Backward
from gnnplan.executor.strategies.gnnpipe.chunks import make_chunks, with_far
from gnnplan.executor.strategies.gnnpipe.inputs import Inputs
from gnnplan.executor.strategies.gnnpipe.layers import BackFrom, History
from gnnplan.planner.graph.sampling import ROUNDING
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GNNPipe
from gnnplan.planner.strategies.base import settled
from gnnplan.planner.strategies.gnnpipe.pipeline import chunk_order
from gnnplan.planner.vocabulary.schedule import Label

NOTHING = torch.empty(0)


@dataclass
class Passage:
    """A chunk's way through the stage."""

    h: Tensor = NOTHING  # the next layer's input rows, and last the logits
    x0: Tensor | None = None  # GCNII's initial rows, a leaf; they go past all layers
    loss: Tensor = field(default=NOTHING, init=False)  # on the last stage
    way_back: list[Backward] = field(default_factory=list, init=False)  # of each layer


class Worker(base.Worker):
    """One rank: member `member` of stage `stage`."""

    net: Net
    inputs: Inputs  # what the first stage reads

    def __init__(self, rank: Rank, problem: Problem, strategy: GNNPipe, first: int = 0) -> None:
        graph, workload, device = problem.data, problem.workload, rank.device
        self.rank, self.problem, self.strategy = rank, problem, strategy
        self.shapes, layers_by_stage = strategy.shape(problem)
        self.members, self.stages = strategy.members(problem), settled(strategy.stages)
        self.stage, self.member = divmod(rank.rank, self.members)
        self.before, self.behind = rank.rank - self.members, rank.rank + self.members
        self.layers = layers_by_stage[self.stage]
        # runs of layers without an exchange in between
        self.pieces = strategy.pieces(problem, self.stage)
        if self.members > 1:
            for stage in range(self.stages):
                rank.groups.of(tuple(strategy.group(problem, stage)))
        rank.groups.open_pairs(self.members)
        self.dtype, self.seed = dtype_of(workload.precision), workload.seed
        self.codec = strategy.codec
        self.net = net_of(self.shapes, workload, self.layers).to(device)
        cut = problem.cut(settled(strategy.chunks), self.members)
        kinds = {self.net.layer(layer).edges for layer in self.layers}
        kept, self.chunks = make_chunks(
            rank, graph, workload, cut, self.member, self.reduce_group, kinds
        )
        self.own, self.vertices = cut.own(self.member).size, torch.from_numpy(kept).to(device)
        own_ids = kept[: self.own]
        self.targets = (
            [Targets(graph, own_ids[chunk.rows], workload, device) for chunk in self.chunks]
            if self.is_last
            else []
        )
        self.scorers = self.targets  # in chunk order; no stage but the last has some
        if self.is_first:
            self.inputs = Inputs(rank, problem, self.net, self.chunks, kept, self.own)
        self.varying = [layer for layer in self.layers if layer > self.shapes.first_varying]
        widths = {layer: self.shapes.input_width(layer) for layer in self.varying}
        self.history = History(
            self.net, widths, kept.size, self.dtype, device, strategy.historical_gradients
        )
        # epoch 0 does not exist in training: its embeddings are those of the initial weights
        self._whole_graph()
        self.history.remember()

    @property
    def reduce_group(self) -> tuple[int, ...]:
        return tuple(self.strategy.group(self.problem, self.stage))

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    # -- one step ---------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step.

        Returns this rank's part of the loss, and the logits [own, C] in chunk order (empty before
        the last stage).
        """
        order = chunk_order(self.seed, step, len(self.chunks), self.strategy.shuffle)
        # epoch t = step + 1 becomes the history of the next `period` epochs
        refresh = (step + 1) % self.strategy.period == 0
        with self.rank.recorder.span(Label("history", step), "compute"):
            for layer in self.varying:
                drops = (self.drop(at, layer, self.vertices) for at in (step - 1, step))
                self.history.begin_step(layer, *drops)
            if self.is_first:
                self.inputs.prepare(self.drop(step, 1, self.vertices))
        device, dtype = self.rank.device, dtype_of(self.problem.workload.precision.weights)
        loss = torch.zeros((), dtype=dtype, device=device)
        shape = self.own if self.is_last else 0, self.shapes.classes
        logits = torch.zeros(shape, dtype=self.dtype, device=device)
        arrivals, departures = self._expect(order, self.before), list[Future[None]]()
        passages: dict[int, Passage] = {}
        for c in order:
            entering = self._received(arrivals, step, c, "f", self.before)
            passage = passages[c] = self._forward(step, c, entering, refresh)
            if self.is_last:
                loss = loss + passage.loss
                logits[self.chunks[c].rows] = passage.h
            else:
                leaving = [passage.h] if passage.x0 is None else [passage.h, passage.x0.detach()]
                departures.append(self._send(step, c, "f", self.behind, leaving))
        del passage  # of the last chunk, which would stay until the end
        # NCCL keeps one order of messages for each pair of ranks, so receives are posted after all
        # sends are done.
        for departure in departures:
            departure.result()
        departures.clear()
        arrivals = self._expect(order[::-1], self.behind)
        for c in order[::-1]:
            entering = self._received(arrivals, step, c, "b", self.behind)
            leaving = self._backward(step, c, passages.pop(c), entering)
            if leaving:
                departures.append(self._send(step, c, "b", self.before, leaving))
        for departure in departures:
            departure.result()
        return loss, logits

    def _expect(self, order: list[int], peer: int) -> dict[int, Arrival]:
        """Buffers for what the peer will send, by chunk, in its order."""
        if not 0 <= peer < self.rank.world:
            return {}
        below = min(peer // self.members, self.stage)
        width, dtype = self.strategy.boundary(self.problem, below), self.dtype
        if self.codec.packs:
            width, dtype = self.codec.row_bytes(width, dtype.itemsize), torch.uint8
        return {c: Arrival(self.rank, (self.chunks[c].size, width), dtype, peer) for c in order}

    def _received(
        self, arrivals: dict[int, Arrival], step: int, c: int, way: str, peer: int
    ) -> list[Tensor]:
        """Chunk c's rows, or their gradient, and what goes past all layers; nothing of no peer.

        Both are copies where there are two: products of rows that stand apart in memory are slow.
        """
        if c not in arrivals:
            return []
        label = Label("receive", step, way, chunk=c, peer=peer)
        # an empty sub-chunk has no message
        is_sent = self.chunks[c].size > 0
        with self.rank.recorder.span(label, "receive") if is_sent else nullcontext():
            message = arrivals.pop(c).wait()
        if self.codec.packs:
            width = self.strategy.boundary(self.problem, self.stage - (way == "f"))
            with self.rank.recorder.span(label._replace(op="unpack", peer=None), "compute"):
                rows = torch.empty(len(message), width, dtype=self.dtype, device=message.device)
                message = Even(self.codec.on_average).unpack(message, rows)
        if not self.shapes.carried:
            return [message]
        # `contiguous` would leave rows apart where there are none, of which autograd warns
        parts = message.tensor_split([message.shape[1] - self.shapes.carried], 1)
        return [part.clone(memory_format=torch.contiguous_format) for part in parts]

    def _send(self, step: int, c: int, way: str, peer: int, parts: list[Tensor]) -> Future[None]:
        """Send chunk c's rows on the send lane, with what goes past all layers beside them."""
        rows = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        label = Label("pipeline", step, way, chunk=c, peer=peer)
        if self.codec.packs:
            # the layer that reads the rows, on the stage after
            layer = self.layers.stop if way == "f" else self.layers.start
            numbers = ROUNDING, self.seed, step, layer, "fb".index(way)
            with self.rank.recorder.span(label._replace(op="pack", peer=None), "compute"):
                vertices = self.vertices[self.chunks[c].rows]
                rows = Even(self.codec.on_average).pack(rows, None, vertices, *numbers)
        if not rows.shape[0]:
            return completed_future(None)
        recorded = self.rank.recorder.sending(label, "send", rows.nbytes)

        def leave() -> None:
            with recorded:
                send(self.rank, rows, peer)

        return self.rank.lanes.submit("send", leave)

    def _label(self, op: str, step: int, piece: tuple[int, ...], c: int) -> Label:
        return Label(op, step, layer=piece[0] if self.members > 1 else None, chunk=c)

    def _halo(self, step: int, way: str, layer: int, c: int, rows: Tensor) -> Tensor:
        """Exchange a chunk's rows between the members of the stage.

        Forward ('f') own rows go to their readers and far rows come. Backward ('b') the gradients
        of far rows go home and those of own rows come.
        """
        exchange = self.chunks[c].exchange
        assert exchange is not None
        with exchange.recorded(Label("halo", step, way, layer, c), rows, way):
            return exchange.swap(way, exchange.pack(rows) if way == "f" else rows)

    def _forward(self, step: int, c: int, entering: list[Tensor], refresh: bool) -> Passage:
        """The stage's layers on a chunk."""
        chunk, passage = self.chunks[c], Passage(*entering)
        if passage.x0 is not None:
            passage.x0.requires_grad_()
        for piece in self.pieces:
            far = list[Tensor]()
            if chunk.exchange and piece[0] in self.varying:
                far.append(self._halo(step, "f", piece[0], c, passage.h))
            with self.rank.recorder.span(self._label("forward", step, piece, c), "compute"):
                inputs = torch.cat([passage.h, *far]) if far else passage.h
                for layer in piece:
                    root, back = self._layer(step, c, layer, passage, inputs, refresh)
                    inputs = passage.h = root.detach()
                    if layer == self.net.total:
                        root = self._end(step, c, passage, root)
                    passage.way_back.append(partial(back, root))
                del root
        return passage

    def _layer(
        self, step: int, c: int, layer: int, passage: Passage, inputs: Tensor, refresh: bool
    ) -> tuple[Tensor, BackFrom]:
        """One layer (0: the encoder) on a chunk's rows -> its output, and the way back."""
        chunk = self.chunks[c]
        if layer in self.varying:
            drop = self.drop(step, layer, chunk.of(self.vertices))
            forgets = self.strategy.checkpoint and layer < self.net.total
            return self.history.forward(layer, chunk, inputs, passage.x0, drop, refresh, forgets)
        if layer:  # constant features
            out = self.inputs.first_layer(
                c, lambda places: self.drop(step, layer, self.vertices[places])
            )
        else:
            out = self.inputs.encode(chunk, self.drop(step, 0, self.vertices[chunk.rows]))
        x0 = passage.x0 = out.detach().requires_grad_() if self.net.initial else None

        def back(root: Tensor, gradient: Tensor) -> Tensor:
            backward([root], [gradient if x0 is None else gradient + gradient_of(x0)])
            return gradient

        return out, back

    def _end(self, step: int, c: int, passage: Passage, out: Tensor) -> Tensor:
        """Logits of a chunk -> its loss, with its graph."""
        drop = self.drop(step, self.net.total + 1, self.vertices[self.chunks[c].rows])
        logits = self.net.decode(out, drop)
        loss = self.targets[c].loss(logits)
        passage.h, passage.loss = logits.detach(), loss.detach()
        return loss

    def _backward(
        self, step: int, c: int, passage: Passage, entering: list[Tensor]
    ) -> list[Tensor]:
        """The gradient of the chunk's output rows through the stage.

        Returns that of its input rows, and of what goes past all layers, for a stage before.
        """
        chunk, x0, way_back = self.chunks[c], passage.x0, passage.way_back
        gradient, *of_initial = entering or [torch.ones_like(passage.loss)]
        if x0 is not None and of_initial:
            x0.grad = of_initial[0]
        for piece in reversed(self.pieces):
            with self.rank.recorder.span(self._label("backward", step, piece, c), "compute"):
                for _ in piece:
                    gradient = way_back.pop()(gradient)
            if chunk.exchange and piece[0] in self.varying:
                gradient, far = gradient[: chunk.size], gradient[chunk.size :]
                chunk.exchange.add_home(gradient, self._halo(step, "b", piece[0], c, far))
        if self.is_first:
            return []
        if x0 is None:
            return [gradient.clone()]  # it may be a part of the history's `slope`
        return [gradient, torch.zeros_like(x0) if x0.grad is None else x0.grad]

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def _whole_graph(self) -> Tensor:
        """Exact forward of the whole graph without dropout, stage after stage.

        Returns the logits [own, C] on the last stage, else nothing. Fills the history's mixed rows
        with those of this pass.
        """
        first = Passage(*self._first_rows())
        h, x0 = first.h, first.x0
        for layer in self.layers:
            if layer not in self.varying:
                h = self.inputs.first_layer_exactly()
                continue
            h = with_far(self.chunks, h)
            self.history.mixed[layer].copy_(h)
            part, relu = self.net.layer(layer), self.net.relu_after(layer)
            prepared, outs = part.prepare(h, keep), list[Tensor]()
            for chunk in self.chunks:
                of_chunk = chunk.gather(part, prepared), prepared[chunk.rows], h[chunk.rows]
                outs.append(part.update(*of_chunk, None if x0 is None else x0[chunk.rows], relu))
            del prepared, of_chunk
            h = torch.cat(outs)
            del outs
        if self.is_last:
            return self.net.decode(h)
        # one by one: side by side they would be held twice
        for rows in (h, x0):
            if rows is not None:
                send(self.rank, rows, self.behind)
        return self.vertices[:0]

    def _first_rows(self) -> list[Tensor]:
        """Own rows that the stage's first layer reads, and what goes past all layers; nothing of
        constant features."""
        if not self.is_first:
            past = self.shapes.carried
            width = self.strategy.boundary(self.problem, self.stage - 1) - past
            shapes = [(self.own, columns) for columns in (width, past) if columns]
            arrivals = [Arrival(self.rank, shape, self.dtype, self.before) for shape in shapes]
            return [arrival.wait() for arrival in arrivals]
        if self.net.encoder is None:
            return []
        h = self.net.encode(self.inputs.features)
        return [h, h] if self.net.initial else [h]

    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] on the last stage, else nothing; without dropout or history."""
        return self._whole_graph()

    def state(self) -> dict[str, Tensor]:
        """Weights and history."""
        return self.trained() | self.history.state()

    def refill(self, step: int) -> None:
        """Historical rows are those of the weights, as they are before the first step."""
        self._whole_graph()
        self.history.remember()
