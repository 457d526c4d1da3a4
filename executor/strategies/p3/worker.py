"""The steps of one rank under P3.

A batch under way is a Flight. Its front (F_M) makes partial sums of layer 1 for all peers, and has
the sums of all columns pulled. Its body (F_D, B_D) trains layers 2 .. L on them. Its tail (B_M)
brings the sums' gradient to this rank's columns of the first weight. Messages go on the comm lane's
thread. In the pipeline three batches are under way at once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import Block, backward, gradient_of
from gnnplan.executor.layers.layer import ColumnLayer, partial_sums
from gnnplan.executor.layers.links import LinkTargets
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import Targets
from gnnplan.executor.minibatch.share import Share, targets_of
from gnnplan.executor.modules.nets import net_of
from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.lanes import completed_future
from gnnplan.executor.ranks.learner import Gradients, Learner
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.whole import Held, fill, named
from gnnplan.executor.strategies.minibatch import OnBatches
from gnnplan.executor.strategies.p3.learner import Delayed
from gnnplan.executor.strategies.p3.sampler import ColumnSampler, Pushed
from gnnplan.executor.strategies.whole import Scorer
from gnnplan.planner.graph.sampling import count_items
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3
from gnnplan.planner.strategies.p3.p3 import period
from gnnplan.planner.strategies.p3.slices import DELAY
from gnnplan.planner.vocabulary.schedule import Label

HOST = torch.device("cpu")
NO_ROWS = torch.empty(0)
NOTHING = completed_future(NO_ROWS)


class _Summed(torch.autograd.Function):
    """Numbers summed over peers; their gradient is summed over peers too."""

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
    # of the layers above the first: edges, ids of rows that they read, and targets
    above: tuple[list[Block], list[Tensor], Targets | LinkTargets]
    partial: Tensor  # layer 1's partial sums for all peers' blocks, with their graph
    own: slice  # the rows of this rank's block among them
    pulled: Future[Tensor] = NOTHING  # the peers' partial sums of this rank's block
    pushed: Future[Tensor] = NOTHING  # the gradients of the peers' sums
    gradient: Tensor = NO_ROWS  # of this rank's sum


class Worker(OnBatches):
    """One rank. `net` is the whole model, evaluated and saved; `sliced` is what it trains."""

    def __init__(self, rank: Rank, problem: Problem, strategy: P3, first: int = 0) -> None:
        self.strategy, me = strategy, rank.rank
        self.rail, self.columns = strategy.rail(problem, me), strategy.columns(problem, me)
        # batches that are under way between two epochs
        self.landing = range(max(first - 2, 0), first) if strategy.pipelined else range(0)
        first = self.landing.start if self.landing else first
        super().__init__(rank, problem, strategy, first, partial(ColumnSampler, rail=self.rail))
        self.its = slice(self.columns.start, self.columns.stop)
        # weights of which it has these columns
        self.cut = {f"layers.1.{name}": self.columns for name in self.net.layer(1).by_columns}
        self.sliced = self._cut()
        for group in (*strategy.all_twins(problem), *strategy.rails(problem)):
            if len(group) > 1:
                rank.groups.of(group)
        trained = rank, problem.workload, self.gradients(self.sliced)
        self.learner: Learner
        if strategy.pipelined:
            self.nets = [copy.deepcopy(self.sliced) for _ in range(DELAY + 1)]
            self.buffers = [self.gradients(net) for net in self.nets]
            self.learner = Delayed(*trained, self.gradients_of, self.play, strategy.steps(problem))
        else:
            self.nets, self.buffers, self.learner = [self.sliced], [], Learner(*trained)
        self.flights: dict[int, Flight] = {}  # by batch
        self.scorers: list[Scorer] = []
        self.tail_spans = ExitStack()  # those of the tail that is running

    # -- weights ----------------------------------------------------------------------------------

    def _cut(self) -> Net:
        """The model with this rank's columns of the first weights."""
        sliced = net_of(
            self.strategy.sliced(self.problem, self.rank.rank), self.problem.workload
        ).to(self.rank.device)
        for name, p in self.net.named_parameters():
            its = p.data[:, self.its] if name in self.cut else p.data
            sliced.get_parameter(name).data.copy_(its)
        return sliced

    @property
    def held(self) -> Held:
        return Held(self.sliced, self.cut, self.learner.optimizer)

    def gradients(self, net: Net) -> list[Gradients]:
        """Buffers for the gradient of `net`: of whole weights, and of those cut by columns."""
        named = dict(net.named_parameters())
        cut = [p for name, p in named.items() if name in self.cut]
        rest = [p for name, p in named.items() if name not in self.cut]
        return [
            Gradients(rest, self.reduce_group),
            Gradients(cut, self.strategy.twins(self.problem, self.rank.rank), 1),
        ]

    def gradients_of(self, batch: int) -> list[Gradients]:
        """The buffers that hold a batch's gradient, in the pipeline."""
        return self.buffers[batch % len(self.nets)]

    @torch.no_grad()
    def _assemble(self) -> None:
        """Give every rank the whole model: one rank of each set of twins gives its columns."""
        gives = self.strategy.twins(self.problem, self.rank.rank)[0] == self.rank.rank
        for name, p in self.sliced.named_parameters():
            whole = self.net.get_parameter(name)
            if name not in self.cut:
                whole.copy_(p)
                continue
            whole.zero_()
            if gives:
                whole[:, self.its] = p
            whole.copy_(comm.total(self.rank, whole))

    # -- a batch ----------------------------------------------------------------------------------

    def _front(self, step: int) -> Flight:
        """Make partial sums of layer 1, and let the sums of all columns be pulled."""
        rank, share, net = (
            self.rank,
            self.arriving.next(step).share,
            self.nets[step % len(self.nets)],
        )
        if net is not self.sliced:
            for stashed, p in zip(net.parameters(), self.sliced.parameters(), strict=True):
                stashed.data.copy_(p.data)
            for buffer in self.gradients_of(step):
                buffer.flat.zero_()
                label = Label("all_reduce", step, layer=buffer.layer)
                nbytes = comm.reduced_bytes(rank, buffer.flat, buffer.group)
                rank.recorder.count_ahead(label, nbytes)
        flight = self._partial(step, share, net)
        rows = flight.exchange.pack(flight.partial.detach())
        flight.pulled = self._move(Label("pull", step, "f", 1), flight.exchange, rows, "f")
        return flight

    def _partial(self, step: int, share: Share, net: Net) -> Flight:
        """Layer 1 on this rank's columns, for all peers' blocks."""
        rank, problem = self.rank, self.problem
        part, *rest = share.parts
        assert isinstance(part, Pushed)
        layer = cast(ColumnLayer, net.layer(1))
        targets = targets_of(problem, share, HOST, share.total)
        above = [each.block for each in rest], [each.vertices for each in rest], targets
        read = part.block, part.vertices, Exchange(rank, part.give, part.take, at=HOST)
        span = partial(rank.recorder.span, Label("load", step), "copy")
        loaded, (block, vertices, exchange, above) = self._load(share, span, (*read, above))
        x = self.store.complete(loaded, part.source, step)
        attends = bool(problem.model.layers[0].heads) and len(self.rail) > 1
        with ExitStack() as spans:
            first = Label("scatter", step, "f", 1) if attends else Label("forward", step, layer=1)
            spans.enter_context(rank.recorder.span(first, "compute"))
            total = self._total_over_peers(step, spans)

            def sync(numbers: Tensor) -> Tensor:
                if not attends:
                    return numbers
                return cast(Tensor, _Summed.apply(numbers, total))  # type: ignore[no-untyped-call]

            drop = self.drop(step, 1, vertices, self.columns.start)
            # a user's module may leave its features whole
            rows = drop(x) if problem.model.layers[0].drops else x
            sums = partial_sums(layer, block, rows, sync)
        del loaded, x, rows  # autograd keeps what it needs of them
        return Flight(step, net, share, exchange, above, sums, part.own)

    def _total_over_peers(self, step: int, spans: ExitStack) -> Callable[[Tensor, str], Tensor]:
        """What sums attention's logits over peers, in the middle of a span of computation.

        Forward ('f') it interrupts the span that `spans` holds, backward ('b') that of the tail.
        """
        rank = self.rank

        def total(numbers: Tensor, way: str) -> Tensor:
            interrupted = spans if way == "f" else self.tail_spans
            interrupted.close()
            out, back = numbers.contiguous().clone(), Label("logits", step, "b", 1)
            if way == "f" and self.strategy.pipelined:
                rank.recorder.count_ahead(back, comm.reduced_bytes(rank, out, self.rail))
            rank.lanes.submit(
                "reduce",
                lambda: comm.all_reduce(rank, Label("logits", step, way, 1), out, self.rail),
            ).result()
            forward = way == "f"
            after = Label("forward", step, layer=1) if forward else Label("scatter", step, "b", 1)
            interrupted.enter_context(rank.recorder.span(after, "compute"))
            return out

        return total

    def _move(self, label: Label, exchange: Exchange, rows: Tensor, way: str) -> Future[Tensor]:
        """Exchange rows with peers on the comm lane, forward ('f') or their gradients back."""
        if len(self.rail) == 1:
            return completed_future(rows)
        recorded = exchange.recorded(label, rows, way)
        # a list, to drop the rows when they have left: the lane's thread holds this function longer
        leaving = [rows]

        def swap() -> Tensor:
            with recorded:
                return exchange.swap(way, leaving.pop())

        return self.rank.lanes.submit("comm", swap)

    def _body(self, flight: Flight) -> tuple[Tensor, Tensor]:
        """Layers 2 .. L, forward and backward, on the sum of all columns' partial sums.

        Returns this rank's part of the loss and its logits.
        """
        step, net, share, workload = flight.step, flight.net, flight.share, self.problem.workload
        flight.pulled.result()  # a rank waits before its span begins
        blocks, sources, targets = flight.above
        with self.rank.recorder.span(Label("forward", step), "compute"):
            summed = self._summed(flight).requires_grad_()
            h = cast(ColumnLayer, net.layer(1)).apply(summed, net.relu_after(1))
            for number, (block, source) in enumerate(zip(blocks, sources, strict=True), 2):
                drop = self.drop(step, number, source)
                h = net.layer(number)(block, h, drop, None, net.relu_after(number))
        with self.rank.recorder.span(Label("loss", step), "compute"):
            leaf = h.detach().requires_grad_()
            logits = net.decode(leaf)
            loss = targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        with self.rank.recorder.span(Label("backward", step), "compute"):
            backward([h], [gradient_of(leaf)])
            flight.gradient = gradient_of(summed)
        flight.pushed = self._move(
            Label("pull", step, "b", 1),
            flight.exchange,
            flight.gradient.repeat(len(self.rail) - 1, 1),
            "b",
        )
        self.scorers.append(targets)
        items = count_items(workload, self.problem.stats)
        return loss.detach() * (share.everyone / items), logits.detach()

    def _summed(self, flight: Flight) -> Tensor:
        """The sum of all columns' partial sums of this rank's block.

        What was pulled is let go with the call, views of it too, before the layers above fill
        memory.
        """
        pulled, flight.pulled = flight.pulled.result(), NOTHING
        summed = flight.partial.detach()[flight.own].clone()
        for part in pulled.view(len(self.rail) - 1, *summed.shape):
            summed += part
        return summed

    def _tail(self, flight: Flight) -> None:
        """Bring the gradient of all peers' blocks to this rank's columns of the first weight."""
        pushed, step = flight.pushed.result(), flight.step
        with ExitStack() as self.tail_spans:
            self.tail_spans.enter_context(
                self.rank.recorder.span(Label("backward", step, layer=1), "compute")
            )
            gradient = torch.empty_like(flight.partial)
            gradient[flight.own] = flight.gradient
            gradient[flight.exchange.positions] = pushed
            backward([flight.partial], [gradient])

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Play one step; in the pipeline most batches end one step late.

        Returns this rank's part of what the batches that end add to the mean loss over all training
        vertices (edges), and their rows of the last layer.
        """
        self.scorers = []
        done = self.play(step)
        if len(done) == 1:
            return done[0]
        total = torch.zeros((), device=self.rank.device)
        rows = total.new_zeros(0, self.problem.model.classes)
        return sum((loss for loss, _ in done), total), torch.cat([rows, *(its for _, its in done)])

    def play(self, t: int, steps: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Play period t of the pipeline, or step t, without its update, which the learner does.

        steps: batches of the run, if it ends. Returns what the bodies of the period return.
        """
        done, epoch, in_order = [], self.strategy.steps(self.problem), ("front", "body", "tail")
        all_of_one = ((phase, t) for phase in in_order)
        for phase, batch in period(t, epoch, steps) if self.strategy.pipelined else all_of_one:
            if phase == "reduce":
                assert isinstance(self.learner, Delayed)
                self.learner.start(batch)
            elif phase == "front":
                self.flights[batch] = self._front(batch)
            elif phase == "body":
                done.append(self._body(self.flights[batch]))
            elif phase == "tail":
                self._tail(self.flights.pop(batch))
        return done

    def evaluate(self, step: int) -> Tensor:
        """Logits on the full graph, with the weights of all columns."""
        self._assemble()
        return super().evaluate(step)

    def open_learner(self) -> Learner:
        return self.learner

    def drain(self) -> None:
        """Wait for messages; batches stay under way."""
        for flight in self.flights.values():
            for moving in (flight.pulled, flight.pushed):
                moving.result()
        self._assemble()

    def trained(self) -> dict[str, Tensor]:
        return dict(self.sliced.state_dict())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint between two epochs keeps.

        These are the weights; in the pipeline also the stashed weights, their gradients, and for
        the batches under way, whose body is done, the gradients that `_tail` needs. Layer 1 of
        these batches is computed again.
        """
        out = self.trained()
        if self.strategy.pipelined:
            for i, (net, buffers) in enumerate(zip(self.nets, self.buffers, strict=True)):
                out |= named(f"stash.{i}", net.state_dict()) | {
                    f"gradient.{i}.{j}": buffer.flat for j, buffer in enumerate(buffers)
                }
        for flight in self.flights.values():
            out |= {
                f"flight.{flight.step}.own": flight.gradient,
                f"flight.{flight.step}.pushed": flight.pushed.result(),
            }
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from another process's state."""
        fill(self.state(), state)
        recording, self.rank.recorder.recording = self.rank.recorder.recording, False
        for step in self.landing:
            flight = self._partial(
                step, self.arriving.next(step).share, self.nets[step % len(self.nets)]
            )
            flight.gradient = state[f"flight.{step}.own"].to(self.rank.device, copy=True)
            flight.pushed = completed_future(
                state[f"flight.{step}.pushed"].to(self.rank.device, copy=True)
            )
            self.flights[step] = flight
        self.rank.recorder.recording = recording
