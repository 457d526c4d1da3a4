"""GNNPipe for real: this rank's share of a stage of the pipeline, chunk after chunk (planner/strategies/gnnpipe.py has the drawing).

A rank keeps rows of its own sub-chunks, chunk after chunk, then those of other members of its stage that its edges read
(none in a stage of one). For every layer input that varies it keeps of all these rows:
  past    historical rows, as the layer before left them
  mixed   what neighbours read: past rows, overwritten by fresh ones as chunks are processed (both prepared: norm, dropout)
  slope   gradient of the mixed rows. Backward visits chunks in reverse order, so what a chunk adds to rows that were
          historical to it arrives after those rows' turn: it stays there, unused, or (historical_gradients) for the next step.
A chunk's rows of other members come when the chunk is processed; their gradient goes home when backward comes to it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.checkpoint import Resumable
from gnnplan.executor.comm import Arrival, Exchange, send
from gnnplan.executor.data import Targets, dtype_of, features, lengths_of, sparse_features, weighted_block
from gnnplan.executor.kernels import Block, SparseRows, aggregate_transposed, backward, dropout
from gnnplan.executor.models import Drop, Net, keep
from gnnplan.executor.worker import Rank
from gnnplan.planner.chunks import Chunks
from gnnplan.planner.job import Job
from gnnplan.planner.layout import neighbours
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import GNNPipe
from gnnplan.planner.strategies.gnnpipe import chunk_order


@dataclass
class Chunk:
    """A sub-chunk and the edges into it. Ids are places among the rows that the rank keeps."""

    rows: slice  # its own
    far: slice  # of the whole chunk, other members' rows that this rank reads (in whichever chunk)
    sources: Tensor  # int64 [S], what its edges read, its own rows first
    blocks: dict[str, Block]  # by the layers' kind of edges
    exchange: Exchange | None  # None: no member reads another one's rows of this chunk

    @property
    def size(self) -> int:
        return self.rows.stop - self.rows.start

    def of(self, rows: Tensor) -> Tensor:
        """Its own and far rows among all that the rank keeps."""
        return torch.cat([rows[self.rows], rows[self.far]]) if self.exchange else rows[self.rows]


@dataclass
class _Kept:
    """Of one chunk at one layer, from forward to backward. Leaves: the chunk's inputs (own, then far rows), its own prepared rows,
    and what its gradient to neighbours is found from: the rows read, or where gathering is linear the gathered rows. These are kept
    with checkpoint too, since the rows of neighbours change before backward comes to the chunk."""

    x: Tensor | None = None
    read: Tensor | None = None
    prepared: Tensor | None = None  # own and far rows, with their graph from x
    rows: Tensor | None = None
    out: Tensor | None = None
    again: Callable[[], None] | None = None  # checkpoint: computes the last three


@dataclass
class _Passage:
    """A chunk's way through the stage."""

    h: Tensor | None  # the next layer's input rows; None: constant features
    x0: Tensor | None = None  # GCNII's initial rows, a leaf
    encoded: Tensor | None = None  # with its graph
    loss: Tensor | None = None  # on the last stage, with its graph
    gradient: Tensor | None = None  # of h, on the way back


class Worker(Resumable):
    """Runs the steps of one rank."""

    def __init__(self, rank: Rank, job: Job, strategy: GNNPipe) -> None:
        assert job.graph is not None and strategy.chunks is not None and strategy.stages is not None
        self.rank, self.job, self.strategy = rank, job, strategy
        graph, workload, device = job.graph, job.workload, rank.device
        self.shapes, stages = strategy.shape(job)
        self.members, self.stages = strategy.members(job), strategy.stages
        self.stage, self.member = divmod(rank.rank, self.members)
        self.layers, self.pieces = stages[self.stage], strategy.pieces(job, self.stage)
        self.reduce_group = tuple(strategy.group(job, self.stage))
        if self.members > 1:
            for stage in range(self.stages):
                rank.group(tuple(strategy.group(job, stage)))
        self.dtype, self.seed = dtype_of(workload), workload.seed
        self.net = Net(self.shapes, workload, self.layers).to(device)
        cut = job.cut(strategy.chunks, self.members)
        own, halo = cut.own(self.member), cut.halo(self.member)
        kept = np.concatenate([own, halo])
        self.own, self.vertices = own.size, torch.from_numpy(kept).to(device)
        self.chunks = self._cut(cut, kept, halo)
        self.targets = [Targets(graph, own[c.rows], workload, device) for c in self.chunks] if self.is_last else []
        self.features = self._features(kept) if self.is_first else None
        self.read: list[SparseRows] = []  # of sparse features, what each chunk's edges read
        if isinstance(self.features, SparseRows) and self.net.encoder is None:
            self.read = [self.features.index_select(0, chunk.sources) for chunk in self.chunks]
            self.features = None  # each chunk has its own
        self.varying = [layer for layer in self.layers if layer > self.shapes.first_varying]
        width = {layer: self.shapes.input_width(layer) for layer in self.varying}

        def rows_of_all_layers() -> dict[int, Tensor]:
            return {layer: torch.zeros(kept.size, width[layer], dtype=self.dtype, device=device) for layer in self.varying}

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

    def _cut(self, cut: Chunks, kept: np.ndarray, halo: np.ndarray) -> list[Chunk]:
        graph, workload, device, group = self.job.graph, self.job.workload, self.rank.device, self.reduce_group
        assert graph is not None
        place = np.full(graph.stats.vertices, -1, dtype=np.int64)
        place[kept] = np.arange(kept.size)
        kinds = {self.net.layer(layer).edges for layer in self.layers}
        far = self.own + np.searchsorted(cut.sub[halo] // self.members, np.arange(cut.chunks + 1))
        out, start = [], 0
        for c in range(cut.chunks):
            mine = cut.rows(c, self.member)
            rows = slice(start, start + mine.size)
            start = rows.stop
            indptr = np.concatenate([[0], np.cumsum(np.diff(graph.indptr)[mine])])
            columns = place[neighbours(graph, mine)]
            inside = (columns >= rows.start) & (columns < rows.stop)
            others = np.unique(columns[~inside])
            sources = np.concatenate([np.arange(rows.start, rows.stop), others])
            local = np.where(inside, columns - rows.start, mine.size + np.searchsorted(others, columns)).astype(np.int32)
            blocks = {kind: weighted_block(graph, kind, mine, kept[sources], indptr, local, workload).to(device) for kind in kinds}
            exchange, sends = None, cut.facts.sends[c]
            if sends.any():
                give, take = [np.zeros(0, dtype=np.int64)] * self.rank.world, np.zeros(self.rank.world, dtype=np.int64)
                for member, peer in enumerate(group):
                    give[peer], take[peer] = cut.given(c, self.member, member), sends[member, self.member]
                exchange = Exchange(self.rank, give, take, group)
            out.append(Chunk(rows, slice(int(far[c]), int(far[c + 1])), torch.from_numpy(sources).to(device), blocks, exchange))
        return out

    def _features(self, kept: np.ndarray) -> Tensor | SparseRows:
        """Constant inputs: own rows, and where they are layer 1's also those of other members, which cross once."""
        graph, own = self.job.graph, kept[: self.own]
        assert graph is not None
        if self.shapes.nonzeros:
            return self._sparse_features(kept)
        x = features(graph, own, self.job.workload, self.rank.device)
        meeting = [chunk.exchange for chunk in self.chunks if chunk.exchange]
        if self.shapes.first_varying == 0 or not meeting:
            return x
        label = Label("input_halo", -1)
        nbytes = self.rank.count(label, sum(exchange.nbytes(x.shape[1], x.element_size(), "f") for exchange in meeting))
        with self.rank.span(label, "comm", nbytes):
            return self._with_far(x)

    def _sparse_features(self, kept: np.ndarray) -> SparseRows:
        graph, label = self.job.graph, Label("input_halo", -1)
        assert graph is not None
        own = sparse_features(graph, kept[: self.own], self.job.workload, self.rank.device)
        meeting = [(chunk, chunk.exchange) for chunk in self.chunks if chunk.exchange]
        if self.shapes.first_varying == 0 or not meeting:
            return own
        leaving = [exchange.pack(own[chunk.rows]) for chunk, exchange in meeting]
        with self.rank.span(label, "comm", self.rank.count(label, sum(rows.nbytes for rows in leaving))):
            far = [exchange.forward_sparse(rows, lengths_of(graph, kept[chunk.far]))
                   for (chunk, exchange), rows in zip(meeting, leaving, strict=True)]  # fmt: skip
        return SparseRows.cat([own, *far])

    def _with_far(self, own: Tensor) -> Tensor:
        """All own rows [own, H], and below them those of other members, fetched chunk by chunk."""
        far = [chunk.exchange.forward(chunk.exchange.pack(own[chunk.rows])) for chunk in self.chunks if chunk.exchange]
        return torch.cat([own, *far]) if far else own

    def _read(self, chunk: Chunk, layer: int, rows: Tensor) -> Tensor:
        """The chunk's neighbourhood, gathered from all prepared rows -> [chunk, width]."""
        net = self.net.layer(layer)
        rows = rows.index_select(0, chunk.sources)
        return net.gather(chunk.blocks[net.edges], net.project(rows) if net.projects_first else rows)

    def _drop(self, step: int, layer: int, vertices: Tensor) -> Drop:
        """Dropout of the rows of these vertices before the layer (0: encoder, L + 1: decoder)."""
        return lambda x: dropout(x, self.seed, step, layer, vertices, self.job.workload.dropout)

    # -- one step ----------------------------------------------------------------------------------------------------

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Forward and backward of a training step: (this rank's part of the loss, logits [own, C] in chunk order or empty)."""
        order = chunk_order(self.seed, step, len(self.chunks), self.strategy.shuffle)
        refresh = (step + 1) % self.strategy.period == 0  # epoch t = step + 1 becomes the history of the next `period` epochs
        with self.rank.span(Label("history", step), "compute"):
            self._lay_out_history(step)
        before, behind = self.rank.rank - self.members, self.rank.rank + self.members
        arrivals = self._expect(order, before)
        kept: dict[int, tuple[_Passage, dict[int, _Kept]]] = {}
        loss = torch.zeros((), dtype=self.dtype, device=self.rank.device)
        logits = loss.new_zeros(self.own if self.is_last else 0, self.shapes.classes)
        departures: list[Future[None]] = []
        for c in order:
            message = self._receive(arrivals, step, c, "f", before)
            passage, layers = kept[c] = self._forward(step, c, message, refresh)
            if passage.loss is not None:
                loss, logits[self.chunks[c].rows] = loss + passage.loss.detach(), passage.h.detach()
            elif passage.h is not None:
                onward = passage.h if passage.x0 is None else torch.cat([passage.h, passage.x0.detach()], 1)
                departures += self._send(step, c, "f", behind, onward)
        del passage, layers  # of the last chunk, which would stay until the end
        for departure in departures:  # NCCL keeps one order of messages per pair of ranks: what we wait for comes after what we sent
            departure.result()
        departures.clear()
        arrivals = self._expect(order[::-1], behind)
        for c in order[::-1]:
            message = self._receive(arrivals, step, c, "b", behind)
            departures += self._send(step, c, "b", before, self._backward(step, c, *kept.pop(c), message))
        for departure in departures:
            departure.result()
        self._last_step = step
        return loss, logits

    def _lay_out_history(self, step: int) -> None:
        for layer in self.varying:
            if self.carried:  # what arrived too late in the step before, as a gradient of undropped rows
                prepare = self.net.layer(layer).prepare  # dropout or nothing, which are their own transposes
                self.carried[layer] = prepare(self.slope[layer], self._drop(step - 1, layer, self.vertices)).clone()
            self.slope[layer].zero_()
            with torch.no_grad():
                self.mixed[layer].copy_(self.net.layer(layer).prepare(self.past[layer], self._drop(step, layer, self.vertices)))
        if self.features is not None and not self.cached and not self.read and self.net.encoder is None:
            self.inputs = self.net.layer(1).prepare(self.features, self._drop(step, 1, self.vertices))  # features are never historical

    def _expect(self, order: list[int], peer: int) -> dict[int, Arrival]:
        """Buffers for what the peer will send, in its order."""
        if not 0 <= peer < self.rank.world:
            return {}
        width = self.strategy.boundary(self.job, min(peer // self.members, self.stage))
        return {c: Arrival(self.rank, (self.chunks[c].size, width), self.dtype, peer) for c in order if self.chunks[c].size}

    def _receive(self, arrivals: dict[int, Arrival], step: int, c: int, way: str, peer: int) -> Tensor | None:
        if c not in arrivals:
            return None
        with self.rank.span(Label("receive", step, way, chunk=c, peer=peer), "receive"):
            return arrivals.pop(c).wait()

    def _send(self, step: int, c: int, way: str, peer: int, rows: Tensor | None) -> list[Future[None]]:
        if rows is None or not rows.shape[0] or not 0 <= peer < self.rank.world:
            return []
        label = Label("pipeline", step, way, chunk=c, peer=peer)
        nbytes = self.rank.count(label, rows.numel() * rows.element_size())

        def leave() -> None:
            with self.rank.span(label, "send", nbytes):
                send(self.rank, rows, peer)

        return [self.rank.submit("send", leave)]

    def _label(self, op: str, step: int, piece: tuple[int, ...], c: int) -> Label:
        return Label(op, step, layer=piece[0] if self.members > 1 else None, chunk=c)

    def _halo(self, step: int, way: str, layer: int, c: int, rows: Tensor) -> Tensor:
        """The chunk's rows [own] to their readers, far rows [far] come; or the far rows' gradients home, those of own rows come."""
        exchange = self.chunks[c].exchange
        assert exchange is not None
        label = Label("halo", step, way, layer, c)
        nbytes = self.rank.count(label, exchange.nbytes(rows.shape[1], rows.element_size(), way))
        with self.rank.span(label, "comm", nbytes):
            return exchange.forward(exchange.pack(rows)) if way == "f" else exchange.backward(rows)

    def _forward(self, step: int, c: int, message: Tensor | None, refresh: bool) -> tuple[_Passage, dict[int, _Kept]]:
        """The stage's layers on a chunk: its passage (on the last stage h are the logits), and what is kept by layer."""
        chunk = self.chunks[c]
        passage = self._enter(chunk, message)
        kept: dict[int, _Kept] = {}
        for piece in self.pieces:
            far = None
            if chunk.exchange and piece[0] in self.varying:
                assert passage.h is not None
                far = self._halo(step, "f", piece[0], c, passage.h)
            with self.rank.span(self._label("forward", step, piece, c), "compute"):
                for layer in piece:
                    if not layer:
                        self._encode(step, chunk, passage)
                        continue
                    kept[layer] = self._layer(step, c, layer, passage, far, refresh)
                if self.net.total in piece:
                    passage.h = self.net.decode(kept[self.net.total].out, self._drop(step, self.net.total + 1, self.vertices[chunk.rows]))
                    passage.loss = self.targets[c].loss(passage.h)
        return passage, kept

    def _enter(self, chunk: Chunk, message: Tensor | None) -> _Passage:
        if self.is_first:
            return _Passage(None)
        if message is None:  # an empty sub-chunk
            message = torch.zeros(0, self.strategy.boundary(self.job, self.stage - 1), dtype=self.dtype, device=self.rank.device)
        h, x0 = self._split(message)
        return _Passage(h, x0.requires_grad_() if self.slots else None)

    def _split(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """A message's rows, and a copy of the initial ones that travel with them."""
        width = message.shape[1] - self.slots
        return message[:, :width], message[:, width:].clone(memory_format=torch.contiguous_format)

    def _encode(self, step: int, chunk: Chunk, passage: _Passage) -> None:
        assert self.features is not None
        passage.encoded = self.net.encode(self.features[chunk.rows], self._drop(step, 0, self.vertices[chunk.rows]))
        passage.h = passage.encoded.detach()
        passage.x0 = passage.encoded.detach().requires_grad_() if self.slots else None

    def _layer(self, step: int, c: int, layer: int, passage: _Passage, far: Tensor | None, refresh: bool) -> _Kept:
        """One layer on a chunk's input rows and those that came from other members; the passage goes on with its output."""
        chunk, net, relu, h, x0 = self.chunks[c], self.net.layer(layer), self.net.relu_after(layer), passage.h, passage.x0
        rows = chunk.rows
        if h is None:  # constant features
            assert self.read or self.features is not None
            if self.read:
                out = net(chunk.blocks[net.edges], self.read[c], self._drop(step, layer, self.vertices[chunk.sources]), x0, relu)
            elif self.cached:
                out = net.update(self.cached[c], self.features[rows], self.features[rows], x0, relu)
            else:
                out = net.update(self._read(chunk, layer, self.inputs), self.inputs[rows], self.features[rows], x0, relu)
            passage.h = out.detach()
            return _Kept(out=out)
        x = (h if far is None else torch.cat([h, far])).detach().requires_grad_()
        drop, linear = self._drop(step, layer, chunk.of(self.vertices)), net.linear and not net.projects_first

        def finish(prepared: Tensor, read: Tensor) -> None:
            kept.prepared, kept.rows = prepared, prepared.detach()[: chunk.size].requires_grad_()
            gathered = read if linear else net.gather(chunk.blocks[net.edges], net.project(read) if net.projects_first else read)
            kept.out = net.update(gathered, kept.rows, x[: chunk.size], x0, relu)

        forgets = self.strategy.checkpoint and layer < self.net.total
        with torch.set_grad_enabled(not forgets):
            prepared = net.prepare(x, drop)
            for place, part in ((rows, slice(0, chunk.size)), (chunk.far, slice(chunk.size, None))):
                self.mixed[layer][place] = prepared.detach()[part]
                if refresh:
                    self.past[layer][place] = x.detach()[part]
            mixed = self.mixed[layer]
            read = (self._read(chunk, layer, mixed) if linear else mixed.index_select(0, chunk.sources)).requires_grad_()
            kept = _Kept(x, read)
            finish(prepared, read)
        assert kept.out is not None
        passage.h = kept.out.detach()
        if forgets:
            kept.prepared = kept.rows = kept.out = None
            kept.again = lambda: finish(net.prepare(x, drop), read)
        return kept

    def _backward(self, step: int, c: int, passage: _Passage, kept: dict[int, _Kept], message: Tensor | None) -> Tensor | None:
        """The gradient of the chunk's output rows through the stage -> that of its input rows (and x0's), for the stage before."""
        chunk, x0 = self.chunks[c], passage.x0
        if passage.loss is None:
            if message is None:  # an empty sub-chunk
                message = torch.zeros(0, self.strategy.boundary(self.job, self.stage), dtype=self.dtype, device=self.rank.device)
            passage.gradient, to_x0 = self._split(message)
            if x0 is not None:
                x0.grad = to_x0
        for piece in reversed(self.pieces):
            with self.rank.span(self._label("backward", step, piece, c), "compute"):
                for layer in reversed(piece):
                    if layer:
                        passage.gradient = self._layer_backward(chunk, layer, kept.pop(layer), passage)
                    else:
                        assert passage.encoded is not None and passage.gradient is not None
                        backward([passage.encoded], [passage.gradient if x0 is None else passage.gradient + x0.grad])
            if chunk.exchange and piece[0] in self.varying:
                assert passage.gradient is not None
                own, far = passage.gradient[: chunk.size], passage.gradient[chunk.size :]
                chunk.exchange.add_home(own, self._halo(step, "b", piece[0], c, far))
                passage.gradient = own
        if self.is_first:
            return None
        assert passage.gradient is not None
        if x0 is None:
            return passage.gradient.clone()
        return torch.cat([passage.gradient, x0.grad if x0.grad is not None else torch.zeros_like(x0)], 1)

    def _layer_backward(self, chunk: Chunk, layer: int, part: _Kept, passage: _Passage) -> Tensor | None:
        """The passage's gradient of the layer's output -> that of its input rows, own and then far ones; None: these are constant."""
        if part.again:
            part.again()
            part.again = None  # it holds the part: a circle would outlive the step
        if layer == self.net.total:
            assert passage.loss is not None
            passage.loss.backward()
            passage.loss = passage.h = None  # their graph would hold the layer's rows while those before it go backward
        else:
            backward([part.out], [passage.gradient])
        if part.x is None or part.read is None or part.rows is None:
            return None
        slope, net = self.slope[layer], self.net.layer(layer)
        linear = net.linear and not net.projects_first
        to_read = aggregate_transposed(chunk.blocks[net.edges], part.read.grad) if linear else part.read.grad
        slope[chunk.rows] += to_read[: chunk.size]
        slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])  # several times as slow as a slice's sum
        del to_read  # the largest of all
        if part.rows.grad is not None:
            slope[chunk.rows] += part.rows.grad
        backward([part.prepared], [chunk.of(slope)])
        gradient = part.x.grad
        if self.carried:
            for place in (chunk.rows, chunk.far):
                slope[place].zero_()  # passed on; what is added from here on is historical
            gradient = gradient + chunk.of(self.carried[layer])
        return gradient

    # -- evaluation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _whole(self) -> Tensor:
        """Exact forward of the whole graph without dropout, stage after stage -> logits [own, C] on the last, else empty. Fills
        `mixed` with this pass's rows."""
        x0 = None
        if not self.is_first:
            shape = self.own, self.strategy.boundary(self.job, self.stage - 1)
            message = Arrival(self.rank, shape, self.dtype, self.rank.rank - self.members).wait()
            h, x0 = self._split(message) if self.slots else (message, None)
        elif self.net.encoder is not None:
            h = self.net.encode(self.features)
            x0 = h if self.slots else None
        else:
            h = self.features
        for layer in self.layers:
            if layer in self.mixed:
                h = self._with_far(h)
                self.mixed[layer].copy_(h)
            net, relu = self.net.layer(layer), self.net.relu_after(layer)
            if self.read and layer == 1:
                h = torch.cat([net(chunk.blocks[net.edges], x, keep, None, relu) for chunk, x in zip(self.chunks, self.read, strict=True)])
                continue
            parts, rows = [], net.prepare(h, keep)
            for i, chunk in enumerate(self.chunks):
                gathered = self.cached[i] if self.cached and layer == 1 else self._read(chunk, layer, rows)
                parts.append(net.update(gathered, rows[chunk.rows], h[chunk.rows], None if x0 is None else x0[chunk.rows], relu))
            h = torch.cat(parts)
        if self.is_last:
            return self.net.decode(h)
        send(self.rank, h if x0 is None else torch.cat([h, x0], 1), self.rank.rank + self.members)
        return self.vertices[:0]

    def evaluate(self, step: int) -> Tensor:
        return self._whole()

    def _remember_epoch_zero(self) -> None:
        """Epoch 0 does not exist in training: its embeddings are those of the initial weights."""
        self._whole()
        for layer in self.varying:
            self.past[layer].copy_(self.mixed[layer])

    def counts(self, logits: Tensor) -> Tensor:
        """Targets.counts over this rank's rows (on the last stage; zeros elsewhere)."""
        total = torch.zeros(3, 2, dtype=torch.float64)
        for chunk, targets in zip(self.chunks, self.targets, strict=False):
            total += targets.counts(logits[chunk.rows])
        return total

    def drain(self) -> None:
        """Every step ends with its messages gone."""

    def state(self) -> dict[str, Tensor]:
        """Weights, the history, and where late gradients are carried on to the next step, these. `mixed` is made from the history."""
        late = self.slope if self.carried else {}
        kept = {f"{name}.{layer}": rows for name, of in (("past", self.past), ("slope", late)) for layer, rows in of.items()}
        return super().state() | kept
