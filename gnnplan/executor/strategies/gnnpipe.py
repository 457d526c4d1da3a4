"""GNNPipe for real: this rank's stage of the pipeline, chunk after chunk (planner/strategies/gnnpipe.py has the drawing).

Vertices are renumbered so that chunks are contiguous. For every layer input that varies the stage keeps, for all N rows:
  past    historical rows, as the layer before left them
  mixed   what neighbours read: past rows, overwritten by fresh ones as chunks are processed (both prepared: norm, dropout)
  slope   gradient of the mixed rows. Backward visits chunks in reverse order, so what a chunk adds to rows that were
          historical to it arrives after those rows' turn: it stays there, unused, or (historical_gradients) for the next step.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.comm import Arrival, send
from gnnplan.executor.data import Targets, dtype_of, features, weighted_block
from gnnplan.executor.kernels import Block, aggregate_transposed, dropout
from gnnplan.executor.models import Drop, Net, keep
from gnnplan.executor.worker import Rank
from gnnplan.planner.job import Job
from gnnplan.planner.layout import neighbours
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import GNNPipe
from gnnplan.planner.strategies.gnnpipe import chunk_order


@dataclass
class Chunk:
    """A contiguous run of renumbered vertices and the edges into it."""

    rows: slice
    sources: Tensor  # int64 [S], renumbered ids that its edges read, its own rows first
    blocks: dict[str, Block]  # by the layers' kind of edges


@dataclass
class _Kept:
    """Of one chunk at one layer, from forward to backward. Leaves: the chunk's inputs, its prepared rows, and what its gradient
    to neighbours is found from: the rows read, or where gathering is linear the gathered rows."""

    out: Tensor
    x: Tensor | None = None
    prepared: Tensor | None = None  # with its graph from x
    rows: Tensor | None = None
    read: Tensor | None = None


class Worker:
    """Runs the steps of one stage."""

    def __init__(self, rank: Rank, job: Job, strategy: GNNPipe) -> None:
        assert job.graph is not None and strategy.chunks is not None
        self.rank, self.job, self.strategy = rank, job, strategy
        graph, workload, device = job.graph, job.workload, rank.device
        self.shapes, stages = strategy.shape(job)
        self.layers, self.stages, self.stage = stages[rank.rank], len(stages), rank.rank
        self.dtype, self.seed = dtype_of(workload), workload.seed
        self.net = Net(self.shapes, workload, self.layers).to(device)
        of = job.chunk_of(strategy.chunks)
        order = np.argsort(of, kind="stable")  # new -> old
        self.vertices = torch.from_numpy(order).to(device)
        self.chunks = [self._chunk(c, of, order) for c in range(strategy.chunks)]
        self.targets = [Targets(graph, order[c.rows], workload, device) for c in self.chunks] if self.is_last else []
        n = graph.stats.vertices
        self.features = features(graph, order, workload, device) if self.is_first else None
        self.varying = [layer for layer in self.layers if layer > self.shapes.first_varying]
        width = {layer: self.shapes.input_width(layer) for layer in self.varying}


        def rows_of_all_layers() -> dict[int, Tensor]:
            return {layer: torch.zeros(n, width[layer], dtype=self.dtype, device=device) for layer in self.varying}

        self.past, self.mixed, self.slope = rows_of_all_layers(), rows_of_all_layers(), rows_of_all_layers()
        self.carried = rows_of_all_layers() if strategy.historical_gradients else {}
        self.cached: list[Tensor] = []  # layer 1's aggregates of constant features, by chunk
        if self.features is not None and self.shapes.aggregate_cached(1):
            self.cached = [self._read(chunk, 1, self.features) for chunk in self.chunks]
        self.slots = self.shapes.layers[0].h_in if self.shapes.hands_on_initial else 0  # numbers of x0 that travel with a row
        self._remember_epoch_zero()

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def _chunk(self, c: int, of: np.ndarray, order: np.ndarray) -> Chunk:
        graph = self.job.graph
        assert graph is not None
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        start = int(np.searchsorted(of[order], c))
        stop = int(np.searchsorted(of[order], c, side="right"))
        mine = order[start:stop]
        indptr = np.concatenate([[0], np.cumsum(np.diff(graph.indptr)[mine])])
        columns = place[neighbours(graph, mine)]
        inside = (columns >= start) & (columns < stop)
        others = np.unique(columns[~inside])
        sources = np.concatenate([np.arange(start, stop), others])
        local = np.where(inside, columns - start, mine.size + np.searchsorted(others, columns)).astype(np.int32)
        device, workload = self.rank.device, self.job.workload
        kinds = {self.net.layer(layer).edges for layer in self.layers}
        blocks = {kind: weighted_block(graph, kind, mine, order[sources], indptr, local, workload).to(device) for kind in kinds}
        return Chunk(slice(start, stop), torch.from_numpy(sources).to(device), blocks)

    def _read(self, chunk: Chunk, layer: int, rows: Tensor) -> Tensor:
        """The chunk's neighbourhood, gathered from all N prepared rows -> [chunk, width]."""
        net = self.net.layer(layer)
        rows = rows.index_select(0, chunk.sources)
        return net.gather(chunk.blocks[net.edges], net.project(rows) if net.projects_first else rows)

    def _drop(self, step: int, layer: int, rows: slice = slice(None)) -> Drop:
        """Dropout of a chunk's (or all) rows before the layer (0: encoder, L + 1: decoder)."""
        return lambda x: dropout(x, self.seed, step, layer, self.vertices[rows], self.job.workload.dropout)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step: (this rank's part of the loss, logits [N, C] in chunk order or empty)."""
        order = chunk_order(self.seed, step, len(self.chunks), self.strategy.shuffle)
        refresh = (step + 1) % self.strategy.period == 0  # epoch t = step + 1 becomes the history of the next `period` epochs
        with self.rank.span(Label("history", step), "compute"):
            self._lay_out_history(step)
        arrivals = self._expect(order, self.stage - 1)
        kept: dict[int, tuple] = {}
        loss = torch.zeros((), dtype=self.dtype, device=self.rank.device)
        logits = loss.new_zeros(len(self.vertices) if self.is_last else 0, self.shapes.classes)
        departures: list[Future] = []
        for c in order:
            message = self._receive(arrivals, step, c, "f", self.stage - 1)
            with self.rank.span(Label("forward", step, chunk=c), "compute"):
                kept[c] = self._forward(step, c, message, refresh)
                if self.is_last:
                    part, answer = kept[c][3]
                    loss, logits[self.chunks[c].rows] = loss + part.detach(), answer.detach()
            departures += self._send(step, c, "f", self.stage + 1, kept[c][2])
        arrivals = self._expect(order[::-1], self.stage + 1)
        for c in order[::-1]:
            message = self._receive(arrivals, step, c, "b", self.stage + 1)
            with self.rank.span(Label("backward", step, chunk=c), "compute"):
                home = self._backward(step, c, kept.pop(c), message)
            departures += self._send(step, c, "b", self.stage - 1, home)
        for departure in departures:
            departure.result()
        self._last_step = step
        return loss, logits

    def _lay_out_history(self, step: int) -> None:
        for layer in self.varying:
            if self.carried:  # what arrived too late in the step before, as a gradient of undropped rows
                self.carried[layer] = self._drop(step - 1, layer)(self.slope[layer]).clone()  # dropout is linear: its own transpose
            self.slope[layer].zero_()
            with torch.no_grad():
                self.mixed[layer].copy_(self.net.layer(layer).prepare(self.past[layer], self._drop(step, layer)))
        if self.features is not None and not self.cached and self.net.encoder is None:
            self.inputs = self.net.layer(1).prepare(self.features, self._drop(step, 1))  # features are never historical

    def _expect(self, order: list[int], peer: int) -> dict[int, Arrival]:
        """Buffers for what the peer will send, in its order."""
        if not 0 <= peer < self.stages:
            return {}
        width = self.strategy.boundary(self.job, min(peer, self.stage))
        sizes = {c: self.chunks[c].rows.stop - self.chunks[c].rows.start for c in order}
        return {c: Arrival(self.rank, (sizes[c], width), self.dtype, peer) for c in order}

    def _receive(self, arrivals: dict[int, Arrival], step: int, c: int, way: str, peer: int) -> Tensor | None:
        if c not in arrivals:
            return None
        with self.rank.span(Label("receive", step, way, chunk=c, peer=peer), "receive"):
            return arrivals.pop(c).wait()

    def _send(self, step: int, c: int, way: str, peer: int, rows: Tensor | None) -> list[Future]:
        if rows is None or not 0 <= peer < self.stages:
            return []

        label = Label("pipeline", step, way, chunk=c, peer=peer)
        nbytes = self.rank.count(label, rows.numel() * rows.element_size())

        def leave() -> None:
            with self.rank.span(label, "comm", nbytes):
                send(self.rank, rows, peer)

        return [self.rank.submit("comm", leave)]

    def _forward(self, step: int, c: int, message: Tensor | None, refresh: bool) -> tuple:
        """The stage's layers on a chunk: (kept by layer, (encoded, x0), rows for the next stage, (loss, logits) of the last)."""
        chunk = self.chunks[c]
        rows, encoded, x0 = chunk.rows, None, None
        if message is not None:
            h = message[:, : message.shape[1] - self.slots]
            x0 = message[:, message.shape[1] - self.slots :].clone().requires_grad_() if self.slots else None
        elif self.net.encoder is not None:
            assert self.features is not None
            encoded = self.net.encode(self.features[rows], self._drop(step, 0, rows))
            h = encoded.detach()
            x0 = encoded.detach().requires_grad_() if self.slots else None
        else:
            h = None
        kept: list[_Kept] = []
        for layer in self.layers:
            kept.append(self._layer(step, c, layer, h, x0, refresh))
            h = kept[-1].out.detach()
        assert h is not None
        last = None
        if self.is_last:
            leaf = kept[-1].out
            answer = self.net.decode(leaf, self._drop(step, self.net.total + 1, rows))
            last = (self.targets[c].loss(answer), answer)
        onward = None if self.is_last else torch.cat([h, x0.detach()], 1) if x0 is not None else h
        return kept, (encoded, x0), onward, last

    def _layer(self, step: int, c: int, layer: int, h: Tensor | None, x0: Tensor | None, refresh: bool) -> _Kept:
        """One layer on a chunk's input rows h; None: layer 1 on constant features."""
        chunk, net, relu = self.chunks[c], self.net.layer(layer), self.net.relu_after(layer)
        rows, edges = chunk.rows, chunk.blocks[net.edges]
        if h is None:
            if self.cached:
                return _Kept(net.update(self.cached[c], self.features[rows], self.features[rows], x0, relu))
            return _Kept(net.update(self._read(chunk, layer, self.inputs), self.inputs[rows], self.features[rows], x0, relu))
        if refresh:
            self.past[layer][rows] = h
        x = h.detach().requires_grad_()
        prepared = net.prepare(x, self._drop(step, layer, rows))
        self.mixed[layer][rows] = prepared.detach()
        own = prepared.detach().requires_grad_()
        if net.linear and not net.projects_first:
            read = gathered = self._read(chunk, layer, self.mixed[layer]).requires_grad_()
        else:
            read = self.mixed[layer].index_select(0, chunk.sources).requires_grad_()
            gathered = net.gather(edges, net.project(read) if net.projects_first else read)
        return _Kept(net.update(gathered, own, x, x0, relu), x, prepared, own, read)

    def _backward(self, step: int, c: int, forward: tuple, message: Tensor | None) -> Tensor | None:
        """The gradient of the chunk's output rows through the stage -> that of its input rows (and x0's), for the stage before."""
        kept, (encoded, x0), _, last = forward
        chunk, gradient = self.chunks[c], None
        if message is not None:
            gradient = message[:, : message.shape[1] - self.slots]
            if x0 is not None:
                x0.grad = message[:, message.shape[1] - self.slots :].clone()
        for layer, part in zip(reversed(self.layers), reversed(kept), strict=True):
            if gradient is None:
                last[0].backward()
            else:
                torch.autograd.backward(part.out, gradient)
            if part.x is None or part.read is None or part.rows is None:
                return None  # constant features
            slope, net = self.slope[layer], self.net.layer(layer)
            linear = net.linear and not net.projects_first
            to_read = aggregate_transposed(chunk.blocks[net.edges], part.read.grad) if linear else part.read.grad
            slope.index_add_(0, chunk.sources, to_read)
            if part.rows.grad is not None:
                slope[chunk.rows] += part.rows.grad
            torch.autograd.backward(part.prepared, slope[chunk.rows])
            gradient = part.x.grad
            if self.carried:
                gradient = gradient + self.carried[layer][chunk.rows]
                slope[chunk.rows].zero_()  # passed on; what is added from here on is historical
        if encoded is not None:
            torch.autograd.backward(encoded, gradient if x0 is None else gradient + x0.grad)
            return None
        assert gradient is not None
        if x0 is None:
            return gradient.clone()
        return torch.cat([gradient, x0.grad if x0.grad is not None else torch.zeros_like(x0)], 1)

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _whole(self) -> Tensor:
        """Exact forward of the whole graph without dropout, stage after stage -> logits [N, C] on the last, else empty. Fills
        `mixed` with this pass's rows."""
        n = len(self.vertices)
        x0 = None
        if not self.is_first:
            message = Arrival(self.rank, (n, self.strategy.boundary(self.job, self.stage - 1)), self.dtype, self.stage - 1).wait()
            h = message[:, : message.shape[1] - self.slots]
            x0 = message[:, message.shape[1] - self.slots :] if self.slots else None
        elif self.net.encoder is not None:
            h = self.net.encode(self.features)
            x0 = h if self.slots else None
        else:
            h = self.features
        for layer in self.layers:
            if layer in self.mixed:
                self.mixed[layer].copy_(h)
            net, relu = self.net.layer(layer), self.net.relu_after(layer)
            parts = []
            rows = net.prepare(h, keep)
            for i, chunk in enumerate(self.chunks):
                gathered = self.cached[i] if self.cached and layer == 1 else self._read(chunk, layer, rows)
                parts.append(net.update(gathered, rows[chunk.rows], h[chunk.rows], None if x0 is None else x0[chunk.rows], relu))
            h = torch.cat(parts)
        if self.is_last:
            return self.net.decode(h)
        send(self.rank, h if x0 is None else torch.cat([h, x0], 1), self.stage + 1)
        return self.vertices[:0]

    def evaluate(self, step: int) -> Tensor:
        return self._whole()

    def _remember_epoch_zero(self) -> None:
        """Epoch 0 does not exist in training: its embeddings are those of the initial weights."""
        self._whole()
        for layer in self.varying:
            self.past[layer].copy_(self.mixed[layer])

    def counts(self, logits: Tensor) -> Tensor:
        """Targets.counts over all chunks (on the last stage; zeros elsewhere)."""
        total = torch.zeros(3, 2, dtype=torch.float64)
        for chunk, targets in zip(self.chunks, self.targets, strict=False):
            total += targets.counts(logits[chunk.rows])
        return total

    def drain(self) -> None:
        """Every step ends with its messages gone."""
