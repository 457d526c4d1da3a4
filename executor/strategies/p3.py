"""P3: layer 1 on a rank's columns of the features, for the blocks of all its peers.

planner/strategies/minibatch/p3.py draws the pipeline. Peers (a rail) have other columns of the
features, and the same batch.

    ColumnSampler   batches, drawn as in data parallel; layer 1's block is pushed to all peers
    Delayed         the weight update, with the gradient of three batches ago
    Worker          a training step: front, body and tail of a batch; three batches at once

The front (F_M) computes partial sums of layer 1, over this rank's columns, for the blocks of all
peers, and starts to exchange them. The body (F_D, B_D) trains layers 2 .. L on the sums over all
columns. The tail (B_M) computes the gradient of this rank's columns of the first weight. Messages
run on the comm lane.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block, backward, collecting, gradient_of, root_of
from gnnplan.executor.layers.layer import ColumnLayer, partial_sums
from gnnplan.executor.layers.models import Net
from gnnplan.executor.layers.targets import LinkTargets, Targets
from gnnplan.executor.minibatch.sampler import Drawn, Sampled, Sampler
from gnnplan.executor.minibatch.share import Part, Share, targets_of
from gnnplan.executor.modules.read import net_of
from gnnplan.executor.ranks import comm
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.learner import Gradients, Learner, fill, named
from gnnplan.executor.ranks.rank import Rank, completed_future
from gnnplan.executor.strategies.minibatch import OnBatches, Scorer
from gnnplan.planner.graph.sampling import count_items
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import P3
from gnnplan.planner.strategies.minibatch.p3 import DELAY, HEADER, period, sliced
from gnnplan.planner.vocabulary.numbers import offsets, ranges
from gnnplan.planner.vocabulary.schedule import Label


@dataclass
class Pushed(Part):
    """Layer 1 of all peers' blocks merged: all peers' destinations, then all other sources.

    The rank sends each peer the sums of the peer's destinations, and receives sums of its own."""

    own: slice = field(kw_only=True)  # the rank's own destinations


class ColumnSampler(Sampler):
    """A sampler that pushes layer 1's block to its rail."""

    def __init__(self, *args: Any, rail: Sequence[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.rail = list(rail)

    def _lay(self, sampled: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        first, *above = drawn
        below, columns, index = first.below, first.columns, self._index
        index[below] = np.arange(below.size, dtype=np.int32)
        header = np.array([below.size, first.rows.size, columns.size])
        own = np.concatenate([header, below, np.diff(first.indptr), index[columns]]).astype(
            np.int32
        )
        blocks = [own] * len(self.rail)
        if len(self.rail) > 1:
            blocks = self._all_to_all(sampled, Label("push", step), blocks, self.rail)
        with self._span(sampled, Label("lay", step)):
            rest = (self._part(*layer) for layer in zip(self.edges[1:], above, strict=True))
            sampled.share.parts = [self._merge_blocks(blocks), *rest]

    def _merge_blocks(self, blocks: Sequence[np.ndarray]) -> Pushed:
        """Merge the blocks of all peers. A block: header, sources' ids, degrees, positions."""
        # by peer: numbers of sources, rows, edges
        sources, rows, edges = np.array([block[:HEADER] for block in blocks], dtype=np.int64).T
        parts = [np.split(block[HEADER:], np.cumsum(block[: HEADER - 1])) for block in blocks]
        ids, degrees, positions = map(np.concatenate, zip(*parts, strict=True))
        is_extra = ranges(0 * sources, sources) >= np.repeat(rows, sources)
        order = np.argsort(is_extra, kind="stable")  # the rows of all peers come first
        place = np.empty(order.size, dtype=np.int32)
        place[order] = np.arange(order.size, dtype=np.int32)
        indices = place[np.repeat(offsets(sources)[:-1], edges) + positions]
        source, first, indptr = ids[order].astype(np.int64), offsets(rows), offsets(degrees)
        laid = source[: first[-1]], source, indptr, indices, self.workload, self._degrees
        merged = weighted_block(self.graph, self.edges[0], *laid, drawn=True)
        give, take = [indptr[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
        own = self.rail.index(self.me)
        for i, peer in enumerate(self.rail):
            if i != own:
                give[peer], take[peer] = np.arange(first[i], first[i + 1]), rows[own]
        own_rows = slice(int(first[own]), int(first[own + 1]))
        return Pushed(source, source.size, give, take, False, merged, own=own_rows)


class Delayed(Learner):
    """A worker's learner whose all-reduce overlaps the computation of a period."""

    def __init__(self, worker: Worker) -> None:
        gradients = worker.gradients(worker.sliced)
        super().__init__(worker.rank, worker.problem.workload, gradients)
        self.worker, self.pending_reduce = worker, completed_future(None)

    def start(self, batch: int) -> None:
        """Start the all-reduce of a batch's gradient."""

        def reduce() -> None:
            for buffer in self.worker.gradients_of(batch):
                buffer.reduce(self.rank, batch)

        self.pending_reduce = self.rank.lanes.submit("reduce", reduce)

    def update(self, step: int) -> None:
        """Update the weights with the gradient of three batches ago."""
        due, problem = step - DELAY, self.worker.problem
        if due < 0:
            return
        self.pending_reduce.result()
        for own, reduced in zip(self.gradients, self.worker.gradients_of(due), strict=True):
            own.flat.copy_(reduced.flat)
        epoch = due // self.worker.strategy.steps(problem)
        self.optimizer.lr = problem.workload.lr_of(epoch)
        self.apply_gradients(due)

    def finish(self, step: int) -> None:
        """Play the pending batches to their end."""
        for later in range(step, step + DELAY):
            self.worker.play(later, step)
            self.update(later)


HOST = torch.device("cpu")
NO_ROWS = torch.empty(0)
NOTHING = completed_future(NO_ROWS)


class _PeerSum(torch.autograd.Function):
    """A sum over peers, whose gradient is summed over peers, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Callable[[Tensor, str], Tensor]) -> Tensor:
        ctx.total = total
        return total(x, "f")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.total(gradient, "b"), None


@dataclass
class PendingBatch:
    """A batch between its front and its tail, with the weights that it reads."""

    step: int
    net: Net
    share: Share
    exchange: Exchange
    # layers 2 .. L: blocks, ids of source rows, and targets
    above: tuple[list[Block], list[Tensor], Targets | LinkTargets]
    partial: Tensor  # layer 1's partial sums for all peers' blocks, with autograd graph
    own: slice  # rows of this rank's block in `partial`
    pulled: Future[Tensor] = NOTHING  # peers' partial sums of this rank's block
    pushed: Future[Tensor] = NOTHING  # gradients of the sums of peers' blocks
    gradient: Tensor = NO_ROWS  # of the sum of this rank's block


class Worker(OnBatches):
    """One rank. `net`: the whole model, for evaluation; `sliced`: the part that the rank trains."""

    def __init__(self, rank: Rank, problem: Problem, strategy: P3, first: int = 0) -> None:
        self.strategy, me = strategy, rank.rank
        own, twins = strategy.slices(problem)[me], strategy.twins(problem)
        self.rail, self.columns = own.ranks, own.columns
        self.twins = next(ranks for ranks in twins if me in ranks)  # with the same columns
        # batches that are pending between two epochs
        self.resumed_steps = range(max(first - 2, 0), first) if strategy.pipelined else range(0)
        first = self.resumed_steps.start if self.resumed_steps else first
        super().__init__(rank, problem, strategy, first, partial(ColumnSampler, rail=self.rail))
        self.column_slice = slice(self.columns.start, self.columns.stop)
        # weights cut by columns -> the columns that this rank has
        self.cut = {f"layers.1.{name}": self.columns for name in self.net.layer(1).by_columns}
        self.sliced = self._cut()
        for group in (*twins, *strategy.rails(problem)):
            if len(group) > 1:
                rank.groups.of(group)
        self.learner: Learner
        if strategy.pipelined:
            self.nets = [copy.deepcopy(self.sliced) for _ in range(DELAY + 1)]
            self.buffers = [self.gradients(net) for net in self.nets]
            self.learner = Delayed(self)
        else:
            self.nets, self.buffers = [self.sliced], []
            self.learner = Learner(rank, problem.workload, self.gradients(self.sliced))
        self.batches: dict[int, PendingBatch] = {}  # by batch
        self.scorers: list[Scorer] = []
        self.tail_spans = ExitStack()  # open spans of the running tail

    # -- weights ----------------------------------------------------------------------------------

    def _cut(self) -> Net:
        """Make the model with this rank's columns of the first weights."""
        model = sliced(self.problem, self.columns)
        net = net_of(model, self.problem.workload).to(self.rank.device)
        for name, p in self.net.named_parameters():
            values = p.data[:, self.column_slice] if name in self.cut else p.data
            net.get_parameter(name).data.copy_(values)
        return net

    def gradients(self, net: Net) -> list[Gradients]:
        """Make buffers for the gradient of `net`: of whole weights, and of those cut by columns."""
        named = dict(net.named_parameters())
        cut = [p for name, p in named.items() if name in self.cut]
        rest = [p for name, p in named.items() if name not in self.cut]
        return [Gradients(rest, self.reduce_group), Gradients(cut, self.twins, 1)]

    def gradients_of(self, batch: int) -> list[Gradients]:
        """Return the buffers of a batch's gradient in the pipeline."""
        return self.buffers[batch % len(self.nets)]

    @torch.no_grad()
    def _assemble(self) -> None:
        """Assemble the whole model on every rank; of each set of twins, one rank adds columns."""
        contributes = self.twins[0] == self.rank.rank
        for name, p in self.sliced.named_parameters():
            full = self.net.get_parameter(name)
            if name not in self.cut:
                full.copy_(p)
                continue
            full.zero_()
            if contributes:
                full[:, self.column_slice] = p
            full.copy_(comm.total(self.rank, full))

    # -- a batch ----------------------------------------------------------------------------------

    def _front(self, step: int) -> PendingBatch:
        """Compute partial sums of layer 1, and start to exchange them with peers."""
        rank, share = self.rank, self.arriving.next(step)[0]
        net = self.nets[step % len(self.nets)]
        if net is not self.sliced:
            for stashed, p in zip(net.parameters(), self.sliced.parameters(), strict=True):
                stashed.data.copy_(p.data)
            for buffer in self.gradients_of(step):
                buffer.flat.zero_()
                label = Label("all_reduce", step, layer=buffer.layer)
                nbytes = comm.reduced_bytes(rank, buffer.flat, buffer.group)
                rank.recorder.count_ahead(label, nbytes)
        batch = self._run_first_layer(step, share)
        rows = batch.exchange.pack(batch.partial.detach())
        batch.pulled = self._move(Label("pull", step, "f", 1), batch.exchange, rows, "f")
        return batch

    def _run_first_layer(self, step: int, share: Share) -> PendingBatch:
        """Run layer 1 on this rank's columns, for all peers' blocks."""
        rank, problem, net = self.rank, self.problem, self.nets[step % len(self.nets)]
        part, *rest = share.parts
        assert isinstance(part, Pushed)
        layer = cast(ColumnLayer, net.layer(1))
        targets = targets_of(problem, share, HOST, share.total)
        above = [each.block for each in rest], [each.vertices for each in rest], targets
        tensors = part.block, part.vertices, Exchange(rank, part.give, part.take, device=HOST)
        span = partial(rank.recorder.span, Label("load", step), "copy")
        loaded, (block, vertices, exchange, above) = self._load(share, span, (*tensors, above))
        x = self.store.complete(loaded, part.source, step)
        attends = bool(problem.model.layers[0].heads) and len(self.rail) > 1
        with ExitStack() as spans:
            first = Label("scatter", step, "f", 1) if attends else Label("forward", step, layer=1)
            spans.enter_context(rank.recorder.span(first, "compute"))
            total = partial(self._sum_over_peers, step, spans)

            def sync(numbers: Tensor) -> Tensor:
                if not attends:
                    return numbers
                return cast(Tensor, _PeerSum.apply(numbers, total))  # type: ignore[no-untyped-call]

            drop = self.drop(step, 1, vertices, self.columns.start)
            # a user's module need not drop features
            rows = drop(x) if problem.model.layers[0].drops else x
            sums = partial_sums(layer, block, rows, sync)
        del loaded, x, rows  # autograd keeps the tensors that it needs
        return PendingBatch(step, net, share, exchange, above, sums, part.own)

    def _sum_over_peers(
        self, step: int, spans: ExitStack, numbers: Tensor, direction: str
    ) -> Tensor:
        """All-reduce attention logits over peers, inside a compute span.

        It interrupts the span in `spans`, or in the backward pass ('b') the tail's span."""
        rank, forward = self.rank, direction == "f"
        interrupted = spans if forward else self.tail_spans
        interrupted.close()
        out, label = numbers.contiguous().clone(), Label("logits", step, direction, 1)
        if forward and self.strategy.pipelined:
            nbytes = comm.reduced_bytes(rank, out, self.rail)
            rank.recorder.count_ahead(label._replace(direction="b"), nbytes)
        reduce = partial(comm.all_reduce, rank, label, out, self.rail)
        rank.lanes.submit("reduce", reduce).result()
        after = Label("forward", step, layer=1) if forward else Label("scatter", step, "b", 1)
        interrupted.enter_context(rank.recorder.span(after, "compute"))
        return out

    def _move(
        self, label: Label, exchange: Exchange, rows: Tensor, direction: str
    ) -> Future[Tensor]:
        """Exchange rows ('f'), or their gradients ('b'), with peers on the comm lane."""
        if len(self.rail) == 1:
            return completed_future(rows)
        recorded = exchange.recorded(label, rows, direction)
        # a list, to free the rows once they are sent: the lane's thread holds this function longer
        outgoing = [rows]

        def swap() -> Tensor:
            with recorded:
                return exchange.swap(direction, outgoing.pop())

        return self.rank.lanes.submit("comm", swap)

    def _body(self, batch: PendingBatch) -> tuple[Tensor, Tensor]:
        """Run layers 2 .. L forward and backward, on the sum of all columns' partial sums.

        Returns this rank's part of the loss and its logits.
        """
        step, net, share, workload = batch.step, batch.net, batch.share, self.problem.workload
        batch.pulled.result()  # wait here, outside the span
        blocks, sources, targets = batch.above
        with self.computing("forward", step):
            summed, to_sums = collecting(self._sum_columns(batch))
            h = cast(ColumnLayer, net.layer(1)).apply(summed, net.relu_after(1))
            del summed
            for number, (block, source) in enumerate(zip(blocks, sources, strict=True), 2):
                drop = self.drop(step, number, source)
                h = net.layer(number)(block, h, drop, None, net.relu_after(number))
        with self.computing("loss", step):
            leaf, root = h.detach().requires_grad_(), root_of(h)
            del h
            logits = net.decode(leaf)
            loss = targets.loss(logits)
            loss.backward()  # type: ignore[no-untyped-call]
        with self.computing("backward", step):
            backward([root], [gradient_of(leaf)])
            batch.gradient = to_sums()
        batch.pushed = self._move(
            Label("pull", step, "b", 1),
            batch.exchange,
            batch.gradient.repeat(len(self.rail) - 1, 1),
            "b",
        )
        self.scorers.append(targets)
        items = count_items(workload, self.problem.stats)
        return loss.detach() * (share.everyone / items), logits.detach()

    def _sum_columns(self, batch: PendingBatch) -> Tensor:
        """Return the sum of all columns' partial sums of this rank's block.

        Frees the partial sums received, and views of them, before the layers above fill memory."""
        pulled, batch.pulled = batch.pulled.result(), NOTHING
        summed = batch.partial.detach()[batch.own].clone()
        for part in pulled.view(len(self.rail) - 1, *summed.shape):
            summed += part
        return summed

    def _tail(self, batch: PendingBatch) -> None:
        """Compute the gradient of this rank's columns of the first weight, for all blocks."""
        pushed, step = batch.pushed.result(), batch.step
        with ExitStack() as self.tail_spans:
            self.tail_spans.enter_context(self.computing("backward", step, layer=1))
            gradient = torch.empty_like(batch.partial)
            gradient[batch.own] = batch.gradient
            gradient[batch.exchange.positions] = pushed
            backward([batch.partial], [gradient])

    def step(self, step: int) -> tuple[Tensor, Tensor]:
        """Play one step; in the pipeline most batches end one step late.

        Returns this rank's part of the ending batches' contribution to the mean loss over all
        training vertices (edges), and their rows of the last layer.
        """
        self.scorers = []
        done = self.play(step)
        if len(done) == 1:
            return done[0]
        total = torch.zeros((), device=self.rank.device)
        rows = total.new_zeros(0, self.problem.model.classes)
        return sum((loss for loss, _ in done), total), torch.cat(
            [rows, *(logits for _, logits in done)]
        )

    def play(self, t: int, steps: int | None = None) -> list[tuple[Tensor, Tensor]]:
        """Play period t of the pipeline, or step t, without the learner's update.

        steps: number of batches of a run that ends. Returns the results of the period's bodies.
        """
        done, epoch, in_order = [], self.strategy.steps(self.problem), ("front", "body", "tail")
        all_of_one = ((phase, t) for phase in in_order)
        for phase, batch in period(t, epoch, steps) if self.strategy.pipelined else all_of_one:
            if phase == "reduce":
                assert isinstance(self.learner, Delayed)
                self.learner.start(batch)
            elif phase == "front":
                self.batches[batch] = self._front(batch)
            elif phase == "body":
                done.append(self._body(self.batches[batch]))
            elif phase == "tail":
                self._tail(self.batches.pop(batch))
        return done

    def evaluate(self, step: int) -> Tensor:
        """Return logits on the full graph, with the weights of all columns."""
        self._assemble()
        return super().evaluate(step)

    def open_learner(self) -> Learner:
        return self.learner

    def drain(self) -> None:
        """Wait for messages; batches stay pending."""
        for batch in self.batches.values():
            for future in (batch.pulled, batch.pushed):
                future.result()
        self._assemble()

    def trained(self) -> dict[str, Tensor]:
        return dict(self.sliced.state_dict(keep_vars=True))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint between two epochs.

        They are the weights; in the pipeline also the stashed weights, their gradients, and the
        gradients that `_tail` needs for pending batches, whose body is done. `load` runs layer 1 of
        these batches again.
        """
        out = self.trained()
        if self.strategy.pipelined:
            for i, (net, buffers) in enumerate(zip(self.nets, self.buffers, strict=True)):
                out |= named(f"stash.{i}", net.state_dict()) | {
                    f"gradient.{i}.{j}": buffer.flat for j, buffer in enumerate(buffers)
                }
        for batch in self.batches.values():
            out |= {
                f"flight.{batch.step}.own": batch.gradient,
                f"flight.{batch.step}.pushed": batch.pushed.result(),
            }
        return out

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Resume from the `state` of another process."""
        fill(self.state(), state)
        recording, self.rank.recorder.recording = self.rank.recorder.recording, False
        for step in self.resumed_steps:
            batch = self.batches[step] = self._run_first_layer(step, self.arriving.next(step)[0])
            batch.gradient, pushed = (
                state[f"flight.{step}.{name}"].to(self.rank.device, copy=True)
                for name in ("own", "pushed")
            )
            batch.pushed = completed_future(pushed)
        self.rank.recorder.recording = recording


open_worker = Worker
