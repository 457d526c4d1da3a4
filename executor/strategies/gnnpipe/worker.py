"""The steps of one rank: chunks through its stage, and messages between stages and members.

Stages pass each other a chunk's rows; members of a stage exchange the rows that their sub-chunks
read of each other (the halo), when the chunk is processed. Gradients go the same ways back.
executor/train.py adds up weight gradients in `reduce_group` and updates the weights.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import dtype_of, weight_dtype_of
from gnnplan.executor.layers.kernels import backward, gradient_of, pack, unpack
from gnnplan.executor.layers.layer import Drop, keep
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks.comm import Arrival, send
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import base
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk, make_chunks, with_far
from gnnplan.executor.strategies.gnnpipe.inputs import Inputs
from gnnplan.executor.strategies.gnnpipe.layers import (
    Constant,
    History,
    Kept,
    Passage,
)
from gnnplan.planner.graph.sampling import ROUNDING
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GNNPipe
from gnnplan.planner.strategies.base import settled
from gnnplan.planner.strategies.gnnpipe.pipeline import chunk_order
from gnnplan.planner.vocabulary.schedule import Label


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
        self.layers = layers_by_stage[self.stage]
        # runs of layers without an exchange in between
        self.pieces = strategy.pieces(problem, self.stage)
        if self.members > 1:
            for stage in range(self.stages):
                rank.groups.of(tuple(strategy.group(problem, stage)))
        rank.groups.open_pairs(self.members)
        self.dtype, self.seed = dtype_of(workload), workload.seed
        self.bits = strategy.bits if isinstance(strategy.bits, int) else None
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
        self.scored_by = self.targets  # in chunk order; no stage but the last has some
        if self.is_first:
            self.inputs = Inputs(rank, problem, self.net, self.chunks, kept, self.own)
        self.varying = [layer for layer in self.layers if layer > self.shapes.first_varying]
        widths = {layer: self.shapes.input_width(layer) for layer in self.varying}
        self.history = History(
            self.net, widths, kept.size, self.dtype, device, strategy.historical_gradients
        )
        # columns of x0, which travel with every row past all layers
        self.carried_columns = self.shapes.carried
        # epoch 0 does not exist in training: its embeddings are those of the initial weights
        self._whole_graph()
        self.history.remember(self.varying)

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
        before, behind = self.rank.rank - self.members, self.rank.rank + self.members
        arrivals = self._expect(order, before)
        kept: dict[int, tuple[Passage, dict[int, Kept | Constant]]] = {}
        device, dtype = self.rank.device, weight_dtype_of(self.problem.workload)
        loss = torch.zeros((), dtype=dtype, device=device)
        shape = self.own if self.is_last else 0, self.shapes.classes
        logits = torch.zeros(shape, dtype=self.dtype, device=device)
        departures: list[Future[None]] = []
        for c in order:
            message = self._receive(arrivals, step, c, "f", before)
            passage, layers = kept[c] = self._forward(step, c, message, refresh)
            if passage.h is not None and passage.loss is not None:
                loss = loss + passage.loss.detach()
                logits[self.chunks[c].rows] = passage.h.detach()
            elif passage.h is not None:
                onward = passage.h
                if passage.carried is not None:
                    onward = torch.cat([onward, passage.carried], 1)
                departures += self._send(step, c, "f", behind, onward)
                del onward
        del passage, layers  # of the last chunk, which would stay until the end
        # NCCL keeps one order of messages for each pair of ranks, so receives are posted after all
        # sends are done.
        for departure in departures:
            departure.result()
        departures.clear()
        arrivals = self._expect(order[::-1], behind)
        for c in order[::-1]:
            message = self._receive(arrivals, step, c, "b", behind)
            departures += self._send(
                step, c, "b", before, self._backward(step, c, *kept.pop(c), message)
            )
        for departure in departures:
            departure.result()
        return loss, logits

    def _expect(self, order: list[int], peer: int) -> dict[int, Arrival]:
        """Buffers for what the peer will send, by chunk, in its order."""
        if not 0 <= peer < self.rank.world:
            return {}
        width, dtype = self._message_like(peer)
        return {c: Arrival(self.rank, (self.chunks[c].size, width), dtype, peer) for c in order}

    def _message_like(self, peer: int) -> tuple[int, torch.dtype]:
        """Columns and type of what this stage and the peer's hand each other."""
        below = min(peer // self.members, self.stage)
        if self.bits is None:
            return self.strategy.boundary(self.problem, below), self.dtype
        return self.strategy.handed_bytes(self.problem, below), torch.uint8

    def _receive(
        self, arrivals: dict[int, Arrival], step: int, c: int, way: str, peer: int
    ) -> Tensor | None:
        """The message for chunk c; None if there is no peer."""
        if c not in arrivals:
            return None
        label = Label("receive", step, way, chunk=c, peer=peer)
        # an empty sub-chunk has no message
        is_sent = self.chunks[c].size > 0
        with self.rank.recorder.span(label, "receive") if is_sent else nullcontext():
            message = arrivals.pop(c).wait()
        if self.bits is None:
            return message
        width = self.strategy.boundary(self.problem, self.stage - (way == "f"))
        with self.rank.recorder.span(label._replace(op="unpack", peer=None), "compute"):
            rows = torch.empty(len(message), width, dtype=self.dtype, device=message.device)
            return unpack(message, self.bits, rows)

    def _send(
        self, step: int, c: int, way: str, peer: int, rows: Tensor | None
    ) -> list[Future[None]]:
        """Send chunk c's rows on the send lane; nothing if there are no rows or no peer."""
        if rows is None or not 0 <= peer < self.rank.world:
            return []
        label = Label("pipeline", step, way, chunk=c, peer=peer)
        if self.bits is not None:
            # the layer that reads the rows, on the stage after
            layer = self.layers.stop if way == "f" else self.layers.start
            numbers = ROUNDING, self.seed, step, layer, "fb".index(way)
            with self.rank.recorder.span(label._replace(op="pack", peer=None), "compute"):
                rows = pack(rows, None, self.bits, self.vertices[self.chunks[c].rows], *numbers)
        if not rows.shape[0]:
            return []
        recorded = self.rank.recorder.sending(label, "send", rows.nbytes)

        def leave() -> None:
            with recorded:
                send(self.rank, rows, peer)

        return [self.rank.lanes.submit("send", leave)]

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

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """A message's rows, and what travels with them past all layers.

        Both are copies where there are two: products of rows that stand apart in memory are slow.
        And `contiguous` would leave them apart where there are none, of which autograd warns.
        """
        width = message.shape[1] - self.carried_columns
        if not self.carried_columns:
            return message, message[:, width:]
        rows, carried = message.tensor_split([width], 1)
        whole = torch.contiguous_format
        return rows.clone(memory_format=whole), carried.clone(memory_format=whole)

    # -- forward ----------------------------------------------------------------------------------

    def _forward(
        self, step: int, c: int, message: Tensor | None, refresh: bool
    ) -> tuple[Passage, dict[int, Kept | Constant]]:
        """The stage's layers on a chunk.

        Returns its passage, whose h are the logits on the last stage, and what each layer keeps.
        """
        chunk, last_layer = self.chunks[c], self.net.total
        passage = self._enter(message)
        kept: dict[int, Kept | Constant] = {}
        for piece in self.pieces:
            far = None
            if chunk.exchange and piece[0] in self.varying:
                assert passage.h is not None
                far = self._halo(step, "f", piece[0], c, passage.h)
            with self.rank.recorder.span(self._label("forward", step, piece, c), "compute"):
                for layer in piece:
                    if not layer:
                        self._encode(step, chunk, passage)
                        continue
                    kept[layer] = self._layer(step, c, layer, passage, far, refresh)
                if last_layer in piece:
                    out = kept[last_layer].finish().out
                    passage.h = self.net.decode(out, self._drop_next(step, last_layer, chunk))
                    passage.loss = self.targets[c].loss(passage.h)
        return passage, kept

    def _enter(self, message: Tensor | None) -> Passage:
        if message is None:
            return Passage(None)
        h, carried = self._split(message)
        return Passage(h, carried.requires_grad_() if self.net.initial else None)

    def _encode(self, step: int, chunk: Chunk, passage: Passage) -> None:
        drop = self.drop(step, 0, self.vertices[chunk.rows])
        passage.encoded = self.inputs.encode(chunk, drop)
        passage.h = passage.encoded.detach()
        if self.net.initial:
            passage.x0 = passage.encoded.detach().requires_grad_()

    def _drop_next(self, step: int, layer: int, chunk: Chunk) -> Drop:
        """Dropout of a chunk's own rows before the layer that follows."""
        return self.drop(step, layer + 1, self.vertices[chunk.rows])

    def _layer(
        self, step: int, c: int, layer: int, passage: Passage, far: Tensor | None, refresh: bool
    ) -> Kept | Constant:
        """One layer on a chunk; the passage goes on with its output."""
        chunk = self.chunks[c]
        kept: Kept | Constant
        if passage.h is None:  # constant features

            def drop_sources(places: Tensor) -> Drop:
                return self.drop(step, layer, self.vertices[places])

            kept = Constant(self.inputs.first_layer(c, drop_sources, passage.x0))
            passage.h = kept.out.detach()
        else:
            drop = self.drop(step, layer, chunk.of(self.vertices))
            forgets = self.strategy.checkpoint and layer < self.net.total
            kept = self.history.forward(layer, chunk, passage, far, drop, refresh, forgets)
        return kept

    # -- backward ---------------------------------------------------------------------------------

    def _backward(
        self,
        step: int,
        c: int,
        passage: Passage,
        kept: dict[int, Kept | Constant],
        message: Tensor | None,
    ) -> Tensor | None:
        """The gradient of the chunk's output rows through the stage.

        Returns the gradient of its input rows, and of what goes past all layers, for the stage
        before.
        """
        chunk = self.chunks[c]
        if message is not None:
            passage.gradient, to_carried = self._split(message)
            if passage.x0 is not None:
                passage.x0.grad = to_carried
        for piece in reversed(self.pieces):
            with self.rank.recorder.span(self._label("backward", step, piece, c), "compute"):
                for layer in reversed(piece):
                    if layer:
                        passage.gradient = self.history.backward(
                            layer, chunk, kept.pop(layer), passage
                        )
                    else:
                        self._encode_backward(passage)
            if chunk.exchange and piece[0] in self.varying:
                assert passage.gradient is not None
                own, far = passage.gradient[: chunk.size], passage.gradient[chunk.size :]
                chunk.exchange.add_home(own, self._halo(step, "b", piece[0], c, far))
                passage.gradient = own
        if self.is_first:
            return None
        assert passage.gradient is not None
        carried = passage.carried_gradient
        if carried is None:
            return passage.gradient.clone()
        return torch.cat([passage.gradient, carried], 1)

    @staticmethod
    def _encode_backward(passage: Passage) -> None:
        gradient, x0 = passage.gradient, passage.x0
        assert passage.encoded is not None and gradient is not None
        if x0 is not None:
            gradient = gradient + gradient_of(x0)
        backward([passage.encoded], [gradient])

    # -- evaluation -------------------------------------------------------------------------------

    @torch.no_grad()
    def _whole_graph(self) -> Tensor:
        """Exact forward of the whole graph without dropout, stage after stage.

        Returns the logits [own, C] on the last stage, else nothing. Fills the history's mixed rows
        with those of this pass.
        """
        h, carried = self._first_rows()
        for layer in self.layers:
            if h is None:
                h = self.inputs.first_layer_exactly()
            else:
                if layer in self.history.mixed:
                    h = with_far(self.chunks, h)
                    self.history.mixed[layer].copy_(h)
                part, relu = self.net.layer(layer), self.net.relu_after(layer)
                prepared, outs = part.prepare(h, keep), list[Tensor]()
                for chunk in self.chunks:
                    of_chunk = chunk.gather(part, prepared), prepared[chunk.rows], h[chunk.rows]
                    initial = None if carried is None else carried[chunk.rows]
                    outs.append(part.update(*of_chunk, initial, relu))
                del prepared, of_chunk
                h = torch.cat(outs)
                del outs
        assert h is not None
        if self.is_last:
            return self.net.decode(h)
        # one by one: side by side they would be held twice
        for rows in (h, carried):
            if rows is not None:
                send(self.rank, rows, self.rank.rank + self.members)
        return self.vertices[:0]

    def _first_rows(self) -> tuple[Tensor | None, Tensor | None]:
        """What the stage's first layer reads of own rows, and what goes past all layers.

        The first is None if these are constant features.
        """
        if not self.is_first:
            width = self.strategy.boundary(self.problem, self.stage - 1) - self.carried_columns
            widths = (width, self.carried_columns) if self.carried_columns else (width,)
            before = self.rank.rank - self.members
            arrivals = [Arrival(self.rank, (self.own, w), self.dtype, before) for w in widths]
            h, carried = [*(arrival.wait() for arrival in arrivals), None][:2]
            return h, carried
        if self.net.encoder is not None:
            assert self.inputs.features is not None
            h = self.net.encode(self.inputs.features)
            return h, h if self.net.initial else None
        return None, None

    def evaluate(self, step: int) -> Tensor:
        """Logits [own, C] on the last stage, else nothing; without dropout or history."""
        return self._whole_graph()

    def state(self) -> dict[str, Tensor]:
        """Weights and history."""
        return self.trained() | self.history.state()

    def refill(self, step: int) -> None:
        """Historical rows are those of the weights, as they are before the first step."""
        self._whole_graph()
        self.history.remember(self.varying)
