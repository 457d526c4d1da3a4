"""GNNPipe: stages of consecutive layers form a pipeline, through which the graph passes in chunks.

Every rank (or group of ranks) is a stage: it has some consecutive layers, of the whole graph. The
graph is cut into chunks, which pass all stages forward and then, in reverse order, backward. A row
that a chunk reads from a chunk that comes later is historical: it is taken from an earlier epoch.

    pipeline: 3 stages, 4 chunks, one step; f: forward of the stage's layers on a chunk, b: backward
    stage 0  |f0|f1|f2|f3|                    |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|              |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update

    hybrid: a stage is a group of g ranks (rank = stage * g + member), and member i owns sub-chunk i
    of every chunk; below, one chunk in a stage of 2 layers, g = 2; xx: halo exchange in the group
    member 0  receive|  |f l1|  |f l2|send      receive|b l2|  |b l1|  |send
    member 1  receive|xx|f l1|xx|f l2|send      receive|b l2|xx|b l1|xx|send
              after the last chunk: all-reduce in the group, update

Fresh and historical rows: rows of chunks that this step has already processed, the own chunk
included, are fresh; all others are historical. Because backward runs in reverse order, a fresh row
has its whole gradient before that gradient is passed on.

Hybrid: a member keeps copies of the rows of others that its own rows read. Such a row crosses once
per layer, when its own chunk is processed; its gradient goes home when backward comes to that
chunk. A remote row is thus fresh exactly when a local one would be, and the hybrid computes what
the pipeline with the same chunks computes.

Three tricks, each with its knob:

    shuffle                 a new order of chunks in every epoch, the same on all stages
    historical_gradients    True: the previous epoch's gradients are added at historical rows;
                            False: no gradient passes through them
    period (alpha)          epoch t reads the embeddings of epoch alpha * floor((t-1) / alpha);
                            1 is off

Epoch 0 is an evaluation pass with the initial weights. Our choices where the paper is silent:

    GCNII's encoder output is a hidden row like any other, so layer 1 may read it historically.
    With shuffling, historical gradients follow what was read in the step before.
    There are 4 x stages chunks by default.
    Stages get layers by cost, so that the slowest stage is as fast as possible.

Exact: the gradient of one process with one chunk only; else historical rows approximate it.

Bytes per epoch, for N vertices, rows of H numbers of b bytes, g ranks per stage and W weights of
all stages:

    2 (stages-1) N H b        chunks between stages; twice for GCNII, which hands initial rows on;
                              a model whose layers' rows are summed hands the sum on
    2 b sum_l H_{l-1} halo    hybrid: over layers whose input varies; halo: rows that other members
                              of the group read, in whichever chunk (formulas.hybrid_bytes)
    2 (g-1) W b               hybrid: all-reduces, each of a stage's weights in its group

Without groups no term has a factor L. Source: GNNPipe (arXiv 2308.10087), Alg. 1 and Sec. 3.2.
(Counting as halo only neighbours inside the same chunk gives two thirds of the printed bytes.)

See also pipeline.py (knobs, work and bytes of a chunk), flowshop.py (seconds) and memory.py in this
folder; planner/ownership/chunks.py for chunks; executor/strategies/gnnpipe/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from gnnplan.planner.cluster.placement import Phase
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Prediction
from gnnplan.planner.strategies.gnnpipe import flowshop
from gnnplan.planner.strategies.gnnpipe.memory import memory
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline, chunk_order
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Label,
    Recv,
    Schedule,
    Send,
    Task,
    Work,
    all_reduce,
)


@dataclass(frozen=True)
class GNNPipe(Pipeline):
    """A `Pipeline` with its predictions: seconds, memory, schedule and traffic."""

    def settle(self, problem: Problem) -> GNNPipe:
        layers, stages = problem.workload.layers, self.stages
        if stages is None:
            stages = next(
                s for s in range(min(problem.ranks, layers), 0, -1) if problem.ranks % s == 0
            )
        settled = replace(
            self, stages=stages, chunks=4 * stages if self.chunks is None else self.chunks
        )
        if settled.layers_per_stage is None and settled._mistake(problem) is None:
            settled = replace(
                settled,
                layers_per_stage=flowshop.balance(flowshop.layer_seconds(settled, problem), stages),
            )
        return settled

    def predict(self, problem: Problem) -> Prediction:
        return flowshop.predict(self, problem)

    def memory(self, problem: Problem) -> Memory:
        return memory(self, problem)

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        assert self.chunks is not None
        program = _Program(self, problem)
        out = Schedule(problem.ranks, steps)
        out.setup += self.setup(problem)
        for step in range(steps):
            order = chunk_order(problem.workload.seed, step, self.chunks, self.shuffle)
            for rank in range(problem.ranks):
                out.tasks += _RankStep(program, rank, step).tasks(order)
        return out

    def setup(self, problem: Problem) -> list[Task]:
        """The first stage's members exchange constant inputs once."""
        group, sent = tuple(self.group(problem, 0)), self.inputs_sent(problem)
        if not sent.any():
            return []
        label = Label("input_halo", -1)
        return [
            Task(label, rank, "comm", _exchange(group, sent[rank].astype(int).tolist()))
            for rank in group
        ]

    def preparation(self, problem: Problem) -> dict[str, float]:
        """Seconds to cut the graph, and of epoch 0: a forward pass, stage after stage."""
        assert self.stages is not None and self.chunks is not None
        partitioning_s = (
            0.0
            if problem.graph is None
            else problem.seconds_of(problem.cut(self.chunks, self.members(problem)))
        )
        return {
            "partitioning": partitioning_s,
            "first pass": float(self.predict(problem).by_op["forward"]) * self.stages,
        }

    def traffic(self, problem: Problem) -> list[Phase]:
        """Bytes [ranks, ranks] of the mean chunk and layer: halo exchanges inside all groups, rows
        handed on from member to member, and the groups' all-reduce rings."""
        assert self.stages is not None and self.chunks is not None
        g, b, facts = self.members(problem), problem.model.itemsize, self.facts(problem)
        halo, onward, rings = np.zeros((3, problem.ranks, problem.ranks))
        most_exchanges = 0  # of a stage, per chunk
        for stage in range(self.stages):
            group = np.array(self.group(problem, stage))
            widths = [
                width
                for piece in self.pieces(problem, stage)
                if (width := self.exchanged(problem, piece))
            ]
            if widths:
                halo[np.ix_(group, group)] = facts.sends.mean(0) * b * sum(widths) / len(widths)
                most_exchanges = max(most_exchanges, len(widths))
            if stage + 1 < self.stages:
                onward[group, group + g] = facts.rows.mean(0) * b * self.boundary(problem, stage)
            if g > 1:
                ring_bytes = 2 * (g - 1) / g * b * self.weights(problem, stage)
                rings[group, np.roll(group, -1)] = ring_bytes
        both_ways = [(halo, self.chunks * most_exchanges), (onward, self.chunks)]
        return [
            *(Phase(sent, times) for forward, times in both_ways for sent in (forward, forward.T)),
            Phase(rings, 1),
        ]


class _Program:
    """What ranks do in every step: work and exchanges of chunks, shared by all tasks of them."""

    def __init__(self, pipe: Pipeline, problem: Problem) -> None:
        assert pipe.stages is not None
        self.pipe, self.problem, self.facts = pipe, problem, pipe.facts(problem)
        self.g, self.itemsize = pipe.members(problem), problem.model.itemsize
        self.groups = [tuple(pipe.group(problem, stage)) for stage in range(pipe.stages)]
        self.pieces = [pipe.pieces(problem, stage) for stage in range(pipe.stages)]
        self._work: dict[tuple[int, ...], dict[str, list[Compute]]] = {}
        for piece in chain.from_iterable(self.pieces):
            works = pipe.work(problem, piece, self.facts)
            self._work[piece] = {
                way: [work.at(i) for i in range(self.facts.rows.size)]
                for way, work in zip("fb", works, strict=True)
            }
        self._exchanges: dict[tuple[int, int, str, int], Collective | None] = {}

    def work(self, piece: tuple[int, ...], way: str, chunk: int, member: int) -> Compute:
        return self._work[piece][way][chunk * self.g + member]

    def exchange(
        self, rank: int, chunk: int, way: str, piece: tuple[int, ...]
    ) -> Collective | None:
        """A rank's share of its group's exchange for a piece; None if nobody sends anything."""
        row_bytes = self.pipe.exchanged(self.problem, piece) * self.itemsize
        key = rank, chunk, way, row_bytes
        if key not in self._exchanges:
            stage, member = divmod(rank, self.g)
            sends = self.facts.sends[chunk] if way == "f" else self.facts.sends[chunk].T
            self._exchanges[key] = (
                _exchange(self.groups[stage], (sends[member] * row_bytes).tolist())
                if row_bytes and sends.any()
                else None
            )
        return self._exchanges[key]


class _RankStep:
    """The tasks of one rank in one step, in the order in which it does them.

    refresh history; every chunk forward; every chunk backward, the last one first; update

    A chunk:  receive -> [exchange ->] compute ... -> send      forward, from the stage before
              receive -> compute [-> exchange] ... -> send      backward, from the stage after
    """

    def __init__(self, program: _Program, rank: int, step: int) -> None:
        self.program, self.rank, self.step = program, rank, step
        self.stage, self.member = divmod(rank, program.g)
        self.rows = program.facts.rows[:, self.member].tolist()  # of the member's sub-chunks
        self.computed = Label("history", step)  # the last computation
        # transfers since then, which the next computation waits for
        self.transfers: tuple[Label, ...] = ()

    def tasks(self, order: Sequence[int]) -> Iterator[Task]:
        pipe, problem = self.program.pipe, self.program.problem
        kept = pipe.kept(problem)[self.member]
        yield self._task(self.computed, "compute", pipe.refresh_work(problem, self.stage, kept), ())
        for chunk in order:
            yield from self._chunk("f", chunk)
        for chunk in reversed(order):
            yield from self._chunk("b", chunk)
        weights = pipe.weights(problem, self.stage)
        if self.program.g > 1:
            group = self.program.groups[self.stage]
            reduce = Label("all_reduce", self.step)
            after = (self.computed, *self.transfers)
            yield all_reduce(reduce, self.rank, group, weights * self.program.itemsize, after)
            self.transfers = (reduce,)
        update = Label("update", self.step)
        yield self._task(update, "compute", problem.model.update(weights), self.transfers)

    def _chunk(self, way: str, chunk: int) -> Iterator[Task]:
        """One chunk through the stage: receive it, compute on it, send it on."""
        ahead = self.program.g if way == "f" else -self.program.g
        source, target = self._neighbour(-ahead), self._neighbour(ahead)
        rows = self.rows[chunk]
        if rows and source is not None:
            yield self._receive(way, chunk, source)
        pieces = self.program.pieces[self.stage]
        for piece in pieces if way == "f" else reversed(pieces):
            yield from self._piece(way, chunk, piece)
        if rows and target is not None:
            yield self._send(way, chunk, target)

    def _receive(self, way: str, chunk: int, source: int) -> Task:
        arrival = Label("receive", self.step, way, chunk=chunk, peer=source)
        sent = Label("pipeline", self.step, way, chunk=chunk, peer=self.rank)
        self.transfers += (arrival,)
        return self._task(arrival, "receive", Recv(source, sent), ())

    def _piece(self, way: str, chunk: int, piece: tuple[int, ...]) -> Iterator[Task]:
        """Computation of a piece, after its halo rows (forward) or before their gradients go home
        (backward)."""
        exchange = self.program.exchange(self.rank, chunk, way, piece)
        halo = Label("halo", self.step, way, piece[0], chunk)
        if exchange and way == "f":
            yield self._task(halo, "comm", exchange, (self.computed, *self.transfers))
            self.transfers = (halo,)
        self.computed = Label(
            "forward" if way == "f" else "backward",
            self.step,
            layer=piece[0] if self.program.g > 1 else None,
            chunk=chunk,
        )
        work = self.program.work(piece, way, chunk, self.member)
        yield self._task(self.computed, "compute", work, self.transfers)
        self.transfers = ()
        if exchange and way == "b":
            yield self._task(halo, "comm", exchange, (self.computed,))
            self.transfers = (halo,)

    def _send(self, way: str, chunk: int, target: int) -> Task:
        """The chunk's rows, or their gradients, to the same member of the next stage."""
        boundary = min(self.stage, target // self.program.g)  # of this stage and the one above
        row_bytes = (
            self.program.pipe.boundary(self.program.problem, boundary) * self.program.itemsize
        )
        return self._task(
            Label("pipeline", self.step, way, chunk=chunk, peer=target),
            "send",
            Send(target, self.rows[chunk] * row_bytes),
            self.transfers or (self.computed,),
        )

    def _neighbour(self, distance: int) -> int | None:
        """The rank so far away; None beyond the first and the last stage."""
        rank = self.rank + distance
        return rank if 0 <= rank < self.program.problem.ranks else None

    def _task(self, label: Label, lane: str, work: Work, after: tuple[Label, ...]) -> Task:
        return Task(label, self.rank, lane, work, after)


def _exchange(group: tuple[int, ...], nbytes: Sequence[int]) -> Collective:
    """One member's share of an exchange: bytes to each member of the group."""
    sent = tuple((peer, n) for peer, n in zip(group, nbytes, strict=True) if n)
    return Collective("exchange", group, sent)
