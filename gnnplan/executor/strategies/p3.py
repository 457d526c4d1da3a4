"""P3 for real: layer 1 on a rank's columns for all its peers' blocks, the rest on its own; in the pipeline three batches at once.

A batch under way is a Flight: front (F_M) makes partial sums and has them pulled, body (F_D, B_D) trains layers 2 .. L on their sum,
tail (B_M) brings the sum's gradient to this rank's columns of the first weight. What crosses goes on the comm lane's thread.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor import comm
from gnnplan.executor.checkpoint import Resumable, fill, named
from gnnplan.executor.comm import Exchange
from gnnplan.executor.data import Targets, counts_of, dtype_of, sparse_rows, weighted_block
from gnnplan.executor.kernels import Rows, backward, dropout
from gnnplan.executor.learner import Gradients, Learner
from gnnplan.executor.models import CALLS, Net
from gnnplan.executor.sampler import Arriving, Sampled, Sampler, drawing_device
from gnnplan.executor.share import Part, Share
from gnnplan.executor.strategies import graph_parallel
from gnnplan.executor.worker import Rank, there
from gnnplan.planner.errors import SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.schedule import Label
from gnnplan.planner.strategies import P3
from gnnplan.planner.strategies.batchwise import ID
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.p3 import DELAY, HEADER, INT, period


@dataclass
class Pushed(Part):
    """Layer 1 of all peers' blocks side by side: destinations of all, then the other sources. `rows`: destinations of each peer."""

    rows: Sequence[int] = ()


class ColumnSampler(Sampler):
    """As data parallel draws; then layer 1's block goes to all peers, who have other columns."""

    def __init__(self, *args: Any, rail: Sequence[int], **more: Any) -> None:
        super().__init__(*args, **more)
        self.rail = list(rail)

    def _lay(self, made: Sampled, step: int, drawn: Sequence[tuple[Any, ...]]) -> None:
        rows, below, indptr, columns, *_ = drawn[0]
        where = self._where
        where[below] = np.arange(below.size, dtype=np.int32)
        block = [np.array([below.size, rows.size, columns.size]), below, np.diff(indptr), where[columns]]
        mine = np.concatenate(block).astype(np.int32)
        blocks, nothing = [mine], mine[:0]
        if len(self.rail) > 1:
            with self._span(made, Label("push", step), (INT * mine.size + ID) * (len(self.rail) - 1)):
                blocks = self._swap([nothing if peer == self.me else mine for peer in self.rail], self.rail)
            blocks[self.rail.index(self.me)] = mine
        with self._span(made, Label("lay", step)):
            rest = [self._part(kind, *layer) for kind, layer in zip(self.edges[1:], drawn[1:], strict=True)]
            made.share.parts = [self._merged(blocks), *rest]

    def _merged(self, blocks: Sequence[np.ndarray]) -> Pushed:
        counts = np.array([block[:HEADER] for block in blocks], dtype=np.int64)  # sources, rows, edges
        first = np.concatenate([[0], np.cumsum(counts[:, 1])])
        beyond = first[-1] + np.concatenate([[0], np.cumsum(counts[:, 0] - counts[:, 1])])
        source, degrees, indices = np.empty(counts[:, 0].sum(), np.int64), [], []
        for i, (block, (sources, rows, edges)) in enumerate(zip(blocks, counts.tolist(), strict=True)):
            ids, degree, places = np.split(block[HEADER:], [sources, sources + rows])
            position = np.concatenate([first[i] + np.arange(rows), beyond[i] + np.arange(sources - rows)]).astype(np.int32)
            source[position] = ids
            degrees.append(degree)
            indices.append(position[places])
            assert places.size == edges
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(degrees))])
        merged = weighted_block(self.graph, self.edges[0], source[: first[-1]], source, indptr, np.concatenate(indices), self.workload,
                                self._degrees, drawn=True)  # fmt: skip
        return Pushed(source, source.size, [], np.zeros(0, np.int64), False, merged, counts[:, 1].tolist())


class _Summed(torch.autograd.Function):
    """Numbers summed over peers, and so is their gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor, str], Tensor]) -> Tensor:
        ctx.total = total
        return total(x, "f")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradient, "b"), None


@dataclass
class Flight:
    """A batch under way, with the weights that it reads."""

    step: int
    net: Net
    share: Share
    exchange: Exchange
    partial: Tensor  # of all peers' blocks, with its graph
    own: slice  # this rank's block's rows of it
    pulled: Future[Tensor] | None = None
    pushed: Future[Tensor] | None = None  # the gradients of the peers' sums
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))  # of its own


class Worker(Resumable):
    """Runs the steps of one rank. `net` is the whole model's, for evaluation and what is saved; `sliced` is trained."""

    def __init__(self, rank: Rank, job: Job, strategy: P3, first: int = 0) -> None:
        assert job.graph is not None
        self.rank, self.job, self.strategy = rank, job, strategy
        me, device = rank.rank, rank.device
        self.rail, self.mine = strategy.rail(job, me), strategy.columns(job, me)
        self.net = Net(job.model, job.workload).to(device)
        self.sliced = self._cut()
        kind = type(self.sliced.layer(1))
        if missing := [call for call in CALLS if getattr(kind, call, None) in (None, getattr(torch.nn.Module, call, None))]:
            raise SpecError(f"p3: layer 1 ({kind.__name__}) has no {', '.join(missing)}: a layer runs under P3 if its sums are over "
                            "feature columns; use data_parallel or gsplit, which run any layer")  # fmt: skip
        self.reduce_group = tuple(range(rank.world))
        for twins in dict.fromkeys(strategy.twins(job, r) for r in range(rank.world)):
            rank.group(twins)
        for rail in strategy.rails(job):
            rank.group(rail)
        edges = [self.net.layer(layer).edges for layer in range(1, job.workload.layers + 1)]
        lists = strategy.lists(job)
        device = drawing_device(rank, job, strategy.prefetch, None, lists)
        sampler = ColumnSampler(strategy.batches(job), me, edges, rank.timeout_s, lists, device, rail=self.rail)
        self.landing = range(max(first - 2, 0), first) if strategy.pipelined else range(0)  # under way between two epochs
        self.arriving = Arriving(rank, sampler, strategy.prefetch, self.landing.start if self.landing else first)
        x = job.graph.x
        self.x = x[:, self.mine.start : self.mine.stop]  # this server's columns, in its memory, or in the file that is mapped
        if isinstance(x, np.ndarray) and not isinstance(x, np.memmap):
            self.x = np.ascontiguousarray(self.x)
        self.learner: Learner = _Delayed(self) if strategy.pipelined else Learner(rank, job.workload, self.gradients(self.sliced))
        self.nets = [copy.deepcopy(self.sliced) for _ in range(DELAY + 1)] if strategy.pipelined else [self.sliced]
        self.buffers = [self.gradients(net) for net in self.nets] if strategy.pipelined else []
        self.flights: dict[int, Flight] = {}  # by batch
        self.scored: list[Targets] = []  # whose rows the last logits are
        self.whole: graph_parallel.Worker | None = None

    # -- weights -----------------------------------------------------------------------------------------------------

    def _cut(self) -> Net:
        """The model with this rank's columns of the first weights."""
        sliced = Net(self.strategy.sliced(self.job, self.rank.rank), self.job.workload).to(self.rank.device)
        for name, p in self.net.named_parameters():
            target = sliced.get_parameter(name)
            target.data.copy_(p.data if p.shape == target.shape and not self._is_cut(name) else p.data[:, self.mine.start : self.mine.stop])
        return sliced

    def _is_cut(self, name: str) -> bool:
        return name in ("layers.1.weight", "layers.1.weight_self")

    def gradients(self, net: Net) -> list[Gradients]:
        named = dict(net.named_parameters())
        cut = [p for name, p in named.items() if self._is_cut(name)]
        rest = [p for name, p in named.items() if not self._is_cut(name)]
        return [Gradients(rest, self.reduce_group), Gradients(cut, self.strategy.twins(self.job, self.rank.rank), 1)]

    @torch.no_grad()
    def _assemble(self) -> None:
        """The whole model's weights on every rank: one of each set of twins gives its columns."""
        gives = self.strategy.twins(self.job, self.rank.rank)[0] == self.rank.rank
        for name, p in self.sliced.named_parameters():
            whole = self.net.get_parameter(name)
            if not self._is_cut(name):
                whole.copy_(p)
                continue
            whole.zero_()
            if gives:
                whole[:, self.mine.start : self.mine.stop] = p
            if self.rank.world > 1:
                wire = self.rank.staged(whole)
                dist.all_reduce(wire)
                whole.copy_(wire)

    # -- a batch -----------------------------------------------------------------------------------------------------

    def _front(self, step: int) -> Flight:
        rank, share, net = self.rank, self.arriving.next(step), self.nets[step % len(self.nets)]
        if net is not self.sliced:
            for stashed, p in zip(net.parameters(), self.sliced.parameters(), strict=True):
                stashed.data.copy_(p.data)
            for each in self.buffers[step % len(self.nets)]:
                each.flat.zero_()
                label = Label("all_reduce", step, layer=each.layer)
                rank.count_ahead(label, comm.reduced_bytes(rank, label, each.flat, each.group))
        flight = self._partial(step, share, net)
        rows = flight.exchange.pack(flight.partial.detach())
        flight.pulled = self._move(Label("pull", step, "f", 1), flight.exchange, rows, "f")
        return flight

    def _partial(self, step: int, share: Share, net: Net) -> Flight:
        """Layer 1 on this rank's columns, of all peers' blocks."""
        rank, job, workload = self.rank, self.job, self.job.workload
        part = share.parts[0]
        assert isinstance(part, Pushed)
        with rank.span(Label("load", step), "copy", int(job.features_bytes(part.source, self.mine).sum())):
            x = self._columns(part.source)
        layer: Any = net.layer(1)
        block, vertices = part.block.to(rank.device), torch.from_numpy(part.source).to(rank.device)
        with ExitStack() as spans:
            attends = bool(job.model.layers[0].heads) and len(self.rail) > 1
            spans.enter_context(rank.span(Label("scatter", step, "f", 1) if attends else Label("forward", step, layer=1), "compute"))

            def total(numbers: Tensor, way: str) -> Tensor:
                """Over peers, in the middle of a span."""
                (spans if way == "f" else self.spans).close()
                out, back = numbers.contiguous().clone(), Label("logits", step, "b", 1)
                if way == "f" and self.strategy.pipelined:
                    rank.count_ahead(back, comm.reduced_bytes(rank, back, out, self.rail))
                rank.submit("reduce", lambda: comm.all_reduce(rank, Label("logits", step, way, 1), out, self.rail)).result()
                after = Label("forward", step, layer=1) if way == "f" else Label("scatter", step, "b", 1)
                (spans if way == "f" else self.spans).enter_context(rank.span(after, "compute"))
                return out

            rows = dropout(x, workload.seed, step, 1, vertices, workload.dropout, self.mine.start)
            sync: Callable[[Tensor], Tensor] = (lambda numbers: _Summed.apply(numbers, total)) if attends else lambda numbers: numbers
            gathered = layer.gather(block, layer.scatter(block, rows, sync))
            partial = layer.transform(gathered, rows[: block.n_dst])
        del x, rows, gathered  # what autograd needs of them it has
        ends = np.cumsum(part.rows)
        mine = self.rail.index(rank.rank)
        own = slice(int(ends[mine] - part.rows[mine]), int(ends[mine]))
        give, take = [np.zeros(0, np.int64)] * rank.world, np.zeros(rank.world, np.int64)
        for peer, end, count in zip(self.rail, ends.tolist(), part.rows, strict=True):
            if peer != rank.rank:
                give[peer], take[peer] = np.arange(end - count, end), part.rows[mine]
        return Flight(step, net, share, Exchange(rank, give, take), partial, own)

    def _columns(self, rows: np.ndarray) -> Rows:
        picked, workload, device = self.x[rows], self.job.workload, self.rank.device
        if isinstance(picked, np.ndarray):
            return torch.from_numpy(picked).to(device, dtype_of(workload))
        return sparse_rows(picked, workload, device)

    def _move(self, label: Label, exchange: Exchange, rows: Tensor, way: str) -> Future[Tensor]:
        if len(self.rail) == 1:  # nobody to meet
            return there(rows)
        nbytes = self.rank.count(label, exchange.nbytes(rows.shape[1], rows.element_size(), way))
        leaving = [rows]  # gone when they have left, whenever the lane's thread lets go of this function

        def swap() -> Tensor:
            with self.rank.span(label, "comm", nbytes):
                return exchange.forward(leaving.pop()) if way == "f" else exchange.backward(leaving.pop())

        return self.rank.submit("comm", swap)

    def _body(self, flight: Flight) -> tuple[Tensor, Tensor]:
        """Layers 2 .. L and back, on the sum of all columns' partials."""
        step, net, share, workload = flight.step, flight.net, flight.share, self.job.workload
        assert flight.pulled is not None
        pulled, device = flight.pulled.result(), self.rank.device
        with self.rank.span(Label("forward", step), "compute"):
            summed = flight.partial.detach()[flight.own].clone()
            for part in pulled.view(len(self.rail) - 1, *summed.shape):
                summed += part
            flight.pulled = pulled = None
            summed.requires_grad_()
            layer: Any = net.layer(1)
            h = layer.apply(summed, net.relu_after(1))
            for number, part in enumerate(share.parts[1:], 2):
                vertices = torch.from_numpy(part.source).to(device)

                def drop(rows: Rows, number: int = number, vertices: Tensor = vertices) -> Rows:
                    return dropout(rows, workload.seed, step, number, vertices, workload.dropout)

                h = net.layer(number)(part.block.to(device), h, drop, None, net.relu_after(number))
        seeds = share.everyone
        with self.rank.span(Label("loss", step), "compute"):
            leaf = h.detach().requires_grad_()
            targets = Targets(self.job.graph, share.own, workload, device, seeds)  # type: ignore[arg-type]
            loss = targets.loss(leaf)
            loss.backward()
        with self.rank.span(Label("backward", step), "compute"):
            backward([h], [leaf.grad])
            assert summed.grad is not None
            flight.gradient = summed.grad
        flight.pushed = self._move(Label("pull", step, "b", 1), flight.exchange, flight.gradient.repeat(len(self.rail) - 1, 1), "b")
        self.scored.append(targets)
        return loss.detach() * (seeds / self.job.stats.train_vertices), leaf.detach()

    def _tail(self, flight: Flight) -> None:
        """The gradient of this rank's columns of the first weight, from all peers' blocks."""
        assert flight.pushed is not None
        pushed, step = flight.pushed.result(), flight.step
        with ExitStack() as self.spans:
            self.spans.enter_context(self.rank.span(Label("backward", step, layer=1), "compute"))
            gradient = torch.empty_like(flight.partial)
            gradient[flight.own] = flight.gradient
            gradient[flight.exchange.positions] = pushed
            backward([flight.partial], [gradient])

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """(This rank's part of what its batches add to the mean loss over all training vertices, their logits). In the pipeline batches
        are one step late, but for an epoch's last."""
        self.scored = []
        if not self.strategy.pipelined:
            flight = self._front(step)
            loss, logits = self._body(flight)
            self._tail(flight)
            return loss, logits
        done = self.play(step)
        losses, logits = [loss for loss, _ in done], [rows for _, rows in done]
        return sum(losses, torch.zeros(())), torch.cat(logits) if logits else torch.zeros(0, self.job.stats.classes)

    def play(self, t: int, steps: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Period t of the pipeline (of a run of so many batches), but for its update, which the learner does -> what its bodies give."""
        assert isinstance(self.learner, _Delayed)
        done = []
        for phase, batch in period(t, self.strategy.steps(self.job), steps):
            if phase == "reduce":
                self.learner.start(batch)
            elif phase == "front":
                self.flights[batch] = self._front(batch)
            elif phase == "body":
                done.append(self._body(self.flights[batch]))
            elif phase == "tail":
                self._tail(self.flights.pop(batch))
        return done

    @torch.no_grad()
    def evaluate(self, step: int) -> Tensor:
        """On the full graph, with the weights of all columns."""
        self._assemble()
        if self.whole is None:
            layout = self.job.layout()
            assert isinstance(layout, Layout)
            self.whole = graph_parallel.open_worker(self.rank, self.job, layout, Manner(), net=self.net)
        self.scored = [self.whole.targets]
        return self.whole.evaluate(step)

    def counts(self, logits: Tensor) -> Tensor:
        return counts_of(self.scored, logits)

    def drain(self) -> None:
        """Wait for what is on its way; batches under way stay so."""
        for flight in self.flights.values():
            for moving in (flight.pulled, flight.pushed):
                if moving is not None:
                    moving.result()
        self._assemble()

    def state(self) -> dict[str, Tensor]:
        """Between two epochs: the weights; in the pipeline also the stashed ones, their gradients, and of the batches under way, whose body
        is done, what `_tail` has to bring home. Layer 1 of these is computed again."""
        out = named("sliced", self.sliced.state_dict())
        if self.strategy.pipelined:
            for i, (net, buffers) in enumerate(zip(self.nets, self.buffers, strict=True)):
                out |= named(f"stash.{i}", net.state_dict()) | {f"gradient.{i}.{j}": each.flat for j, each in enumerate(buffers)}
        for flight in self.flights.values():
            assert flight.pushed is not None
            out |= {f"flight.{flight.step}.own": flight.gradient, f"flight.{flight.step}.pushed": flight.pushed.result()}
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        fill(self.state(), state)
        recording, self.rank.recording = self.rank.recording, False
        for step in self.landing:
            flight = self._partial(step, self.arriving.next(step), self.nets[step % len(self.nets)])
            flight.gradient = state[f"flight.{step}.own"].to(self.rank.device, copy=True)
            flight.pushed = there(state[f"flight.{step}.pushed"].to(self.rank.device, copy=True))
            self.flights[step] = flight
        self.rank.recording = recording


class _Delayed(Learner):
    """Updates with the gradient of three batches ago, whose sum over ranks goes on beside a period's computation."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.rank, worker.job.workload, worker.gradients(worker.sliced))
        self.worker = worker
        self.summing: Future[None] | None = None

    def start(self, step: int) -> None:
        """The all-reduce of a batch's gradients."""
        buffers = self.worker.buffers[step % len(self.worker.nets)]

        def reduce() -> None:
            for each in buffers:
                each.reduce(self.rank, step)

        self.summing = self.rank.submit("reduce", reduce)

    def update(self, step: int) -> None:
        """Of the batch three before."""
        due = step - DELAY
        if due < 0:
            return
        assert self.summing is not None
        self.summing.result()
        for mine, theirs in zip(self.gradients, self.worker.buffers[due % len(self.worker.nets)], strict=True):
            mine.flat.copy_(theirs.flat)
        self.descend(due)

    def finish(self, step: int) -> None:
        for later in range(step, step + DELAY):
            self.worker.play(later, step)
            self.update(later)
