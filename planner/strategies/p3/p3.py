"""P3 (push-pull): layer 1 is computed where the features are, all other layers data parallel.

Feature columns are cut over servers, and the first layer's weight with them. A rank pushes layer
1's block of edges to its peers, one on each server; each peer computes a partial sum on its own
columns and sends it back (pull). So rows of H_1 numbers cross, in the place of rows of F features.

    a mini-batch of one rank, its columns on S servers
    host     |draw|push|lay|
    copy                   |load|
    compute                     |F_M|    |F_D|loss|B_D|      |B_M|          |update|
    comm                            |pull|            |pull b|
    reduce                                                       |all_reduce|

    push      layer 1's block goes to the rank's peer on every server
    load      each peer loads its columns of all peers' source rows
    F_M       layer 1 forward: partial sums on the peer's columns, for all peers' blocks
    pull      partial sums go to the rank whose block it is
    F_D, B_D  layers 2 .. L forward and backward, data parallel
    pull b    the gradient of the sum goes to all peers
    B_M       layer 1 backward: the gradient of each peer's columns of the weight

    pipelined: three batches in flight, period k
    compute  |F_M k|F_D k-1|B_D k-1|B_M k-2|update k-3|    a pull hides behind the next phase,
    reduce   |all_reduce k-3 . . . . . . . .|              the all-reduce behind all phases

Peers are the ranks at the same place of every server; a server's ranks have the same columns. With
over='rank' all ranks are peers, each with columns of its own. With `copies` c, every S/c servers
(ranks) in a row have all columns among them, F c/S each. A block goes to peers of its own group;
twins, one in each group, have the same columns:

    S = 4, c = 2     server 0 |columns 0 .. F/2|   server 1 |columns F/2 .. F|
                     server 2 |columns 0 .. F/2|   server 3 |columns F/2 .. F|
                     blocks and partial sums cross inside a pair (0, 1) and (2, 3); the first
                     weight's gradient is added up between twins (0, 2) and (1, 3)

With c = S every server has all columns, and nothing is pushed or pulled: this is data parallelism.

Exact without `pipelined`: the gradient of one process on the same batch. Pipelined, batch t reads
the weights after max(0, t - 3) updates, forward and backward (w_{t+1} = w_t - lr grad f(w_{t-3}),
the paper's Eq. 3), so four sets of weights are kept. An epoch's last batch goes through at once, so
that its loss counts in its own epoch.

Adjacency lists are independent of columns (minibatch/adjacency_store.py). They are with every
sampler, or vertex v's list is on server v mod S (over='rank': on rank v mod M), with
`structure_cache` bytes of the hottest other lists on every server:

    host     |ask_edges 3|draw 3|edges 3| .. |ask_edges 1|draw 1|edges 1|push|lay|

Attention needs its logits over all columns before it knows an edge's weight, so heads (f1 + f2)
numbers are added up over peers first (`logits`). In the paper's words a layer is partition,
scatter, gather, transform, sync, apply (executor/layers/models.py).

Bytes per batch, for f1 rows and f2 source rows of a rank's layer 1, M ranks and W weights:

    2 (S/c - 1) f1 H_1 b       pulls of each rank, forward and backward
    4 (S/c - 1) (f1 + f2 + e)  pushes of each rank, with e edges, plus headers
    2 (M-1) W' b               all-reduce; W': without the first layer's sliced weights
    2 (c - 1) (slice) b        all-reduce of each slice over its c twins

Data parallelism with features spread over servers fetches (S-1)/S f2 F b instead
(formulas.p3_break_even). Source: P3 (OSDI 2021), Sec. 3.1-3.4; copies: Table 5.

See also slices.py (who has which columns) and memory.py in this folder; minibatch/step.py and
program/ for operations; executor/strategies/p3/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import slowest
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.arithmetic import largest, total
from gnnplan.planner.strategies.base import Memory, Prediction
from gnnplan.planner.strategies.minibatch import step as batchwise
from gnnplan.planner.strategies.p3 import memory as p3_memory
from gnnplan.planner.strategies.p3.slices import DELAY, FOLLOWING, HEADER, INT, Slices
from gnnplan.planner.strategies.program.account import account, busiest_port_s, scaled
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.strategies.program.schedule import part
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute, Label, Schedule, Task

Phases = dict[str, list[Op]]  # a batch's operations by phase, in order


@dataclass(frozen=True)
class P3(Slices):
    """`Slices` with its operations, and what is predicted of them."""

    def phases(self, problem: Problem, batch: MiniBatch) -> Phases:
        """A batch's operations by phase.

        host    sampling, pushes, laying out blocks
        front   load, layer 1 forward, up to the pulled partial sums
        body    layers 2 .. L and the loss, forward and backward, up to the pulled gradients
        tail    layer 1 backward
        end     all-reduce, update
        """
        ranks, model, b = range(problem.ranks), problem.model, problem.model.itemsize
        layers = range(1, problem.workload.layers + 1)
        facts = {layer: batch.facts(layer) for layer in layers}
        f1, f2, e1 = facts[1].rows, facts[1].sources, facts[1].edges
        width = model.layers[0].h_out
        pushed, pulled = np.zeros((2, problem.ranks, problem.ranks), dtype=np.int64)
        # rows, sources and edges of all blocks that a rank computes on
        blocks = np.zeros((3, problem.ranks))
        loaded = np.zeros(problem.ranks, dtype=np.int64)
        for rank in ranks:
            peers = np.array(self.rail(problem, rank))
            blocks[:, rank] = f1[peers].sum(), f2[peers].sum(), e1[peers].sum()
            loaded[rank] = batchwise.row_bytes_read(
                problem, batch, peers.tolist(), self.columns(problem, rank)
            )
            others = peers[peers != rank]
            pushed[rank, others] = INT * (HEADER + f2[rank] + f1[rank] + e1[rank]) + batchwise.ID
            pulled[rank, others] = f1[others] * width * b
        edges_above = sum(facts[layer].edges for layer in layers if layer > 1)
        has_peers = len(self.rail(problem, 0)) > 1

        host = list(batchwise.drawing(problem, batch, e1 + edges_above, self.lists(problem)))
        if has_peers:
            host.append(Op("push", sent=pushed, ahead=True))
        host.append(Op("lay", host=("lay", edges_above + blocks[2]), ahead=True))
        if self.prefetch:
            host.append(Op("wait", work=Compute(), idle=True))

        sliced = self.sliced(problem, self.rail(problem, 0)[-1])  # the widest slice
        front = [Op("load", loaded=loaded)]
        tail = [Op("backward", layer=1, work=sliced.backward(1, *blocks))]
        if has_peers and model.layers[0].heads:
            scatter, logits_f, logits_b = self._attention(problem, blocks)
            front += [Op("scatter", "f", 1, work=scatter), logits_f]
            tail += [logits_b, Op("scatter", "b", 1, work=scatter)]
        front.append(Op("forward", layer=1, work=sliced.forward(1, *blocks)))
        body = self._body(problem, facts)
        if has_peers:
            front.append(Op("pull", "f", 1, sent=pulled))
            body.append(Op("pull", "b", 1, sent=pulled.T))
        return {
            "host": host,
            "front": front,
            "body": body,
            "tail": tail,
            "end": self._end(problem),
        }

    def _attention(self, problem: Problem, blocks: np.ndarray) -> tuple[Compute, Op, Op]:
        """Projection of the blocks' source rows, and the all-reduces of logits over peers."""
        first, b = problem.model.layers[0], problem.model.itemsize
        work = Compute(
            elementwise_bytes=4.0 * blocks[1] * first.projected * b, launches=8, itemsize=b
        )
        rails = tuple(self.rails(problem))
        sizes = tuple(
            int(first.heads * (blocks[0, rail[0]] + blocks[1, rail[0]]) * b) for rail in rails
        )
        forward, backward = (Op("logits", way, 1, groups=rails, sizes=sizes) for way in ("f", "b"))
        return work, forward, backward

    def _body(self, problem: Problem, facts: Mapping[int, LayerFacts]) -> list[Op]:
        """Partial sums are added and applied; then layers 2 .. L and the loss."""
        model = problem.model
        passes = (3.0 + len(self.rail(problem, 0))) * facts[1].rows * model.layers[0].h_out
        forward = backward = Compute(
            elementwise_bytes=passes * model.itemsize, launches=4, itemsize=model.itemsize
        )
        own = facts[max(facts)].rows
        for layer, f in facts.items():
            added_forward, added_backward = model.add_up(layer, own)
            forward, backward = forward + added_forward, backward + added_backward
            if layer > 1:
                forward = forward + model.forward(layer, f.rows, f.sources, f.edges)
                backward = backward + model.backward(layer, f.rows, f.sources, f.edges)
        loss_forward, loss_backward = model.finish(own)
        return [
            Op("forward", work=forward),
            Op("loss", work=loss_forward + loss_backward),
            Op("backward", work=backward),
        ]

    def _end(self, problem: Problem) -> list[Op]:
        """All-reduces of shared weights and of slices that have twins, and the update."""
        model, sliced = problem.model, self.sliced_weights(problem)
        shared = model.weights - sliced
        end = [Op("all_reduce", size=shared * model.itemsize)]
        if len(self.twins(problem, 0)) > 1:
            groups = tuple(
                dict.fromkeys(self.twins(problem, rank) for rank in range(problem.ranks))
            )
            column_bytes = sliced // problem.stats.features * model.itemsize
            sizes = tuple(column_bytes * len(self.columns(problem, group[0])) for group in groups)
            end.append(Op("all_reduce", layer=1, groups=groups, sizes=sizes))
        own = shared + sliced // len(self.rail(problem, 0))
        return [*end, Op("update", work=model.update(own))]

    def program(self, problem: Problem) -> Program:
        """Batch after batch; the pipeline overlaps their phases (`predict`, `schedule`)."""
        batches = self.batches(problem)
        phases = self._phases_on(problem)
        return Program(
            [_ops(phases(batch)) for batch in batches.first()],
            batches.steps,
            lambda t: _ops(phases(batches.at(t))),
            prefetch=self.prefetch,
        )

    def _phases_on(self, problem: Problem) -> Callable[[MiniBatch], Phases]:
        """`phases` of a batch; estimated batches are one object, many times."""
        return cache(lambda batch: self.phases(problem, batch))

    def predict(self, problem: Problem) -> Prediction:
        if not self.pipelined:
            return super().predict(problem)
        batches, phases = self.batches(problem), self._phases_on(problem)
        known = [phases(batch) for batch in batches.first()]
        p = account(problem, _all_ops(known), prefetch=self.prefetch)
        p = self._overlapped(problem, p, known)
        return p if len(known) == batches.steps else scaled(p, batches.steps / len(known))

    def _overlapped(self, problem: Problem, p: Prediction, known: Sequence[Phases]) -> Prediction:
        """The pipelined epoch: the longest of a rank's own work, sampling, and the busiest port.

        `p`: the same batches one after the other. Ranks wait for the slowest in every phase, or,
        where nothing is pulled or asked, in all-reduces only.
        """
        alone = len(self.rail(problem, 0)) == 1 and self.lists(problem) is None
        seconds = {id(phases): _PhaseSeconds.of(problem, phases, alone) for phases in known}
        batches = [seconds[id(phases)] for phases in known]
        epoch = _PipelineClock(batches, sampled_in_line=not self.prefetch).epoch_s()
        if self.prefetch:
            epoch = np.maximum(epoch, total(batch.sampled_s for batch in batches))
        epoch = largest([busiest_port_s(problem, _all_ops(known)), p.compute_s], epoch)
        return replace(p, epoch_s=epoch, comm_s=epoch - p.compute_s, bubble_s=0.0 * epoch)

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        if not self.pipelined:
            return super().schedule(problem, steps)
        batches, phases = self.batches(problem), self._phases_on(problem)
        out = Schedule(problem.ranks, steps)
        for rank in range(problem.ranks):
            out.tasks += _PipelinedRank(problem, rank, self.prefetch).tasks(
                steps, self.steps(problem), lambda t: phases(batches.at(t))
            )
        return out

    def memory(self, problem: Problem) -> Memory:
        return p3_memory.memory(self, problem)

    def preparation(self, problem: Problem) -> dict[str, float]:
        return {}


def _ops(phases: Phases) -> list[Op]:
    return [op for ops in phases.values() for op in ops]


def _all_ops(batches: Sequence[Phases]) -> list[Op]:
    return [op for phases in batches for op in _ops(phases)]


def period(t: int, epoch: int, steps: int | None = None) -> Iterator[tuple[str, int]]:
    """What a rank does in period t of the pipeline: (phase, batch), one after the other.

    Phases are those of `P3.phases`, with 'reduce' and 'update' for the two halves of 'end'. `epoch`
    is the number of batches of an epoch, `steps` that of the run, whose last batch ends an epoch
    too (None: the run goes on).

    >>> [f"{phase} {batch}" for phase, batch in period(4, epoch=5)]
    ['reduce 1', 'front 4', 'body 3', 'tail 2', 'body 4', 'update 1']
    """

    def exists(batch: int) -> bool:
        return batch >= 0 and (steps is None or batch < steps)

    def ends_epoch(batch: int) -> bool:
        return (batch + 1) % epoch == 0 or batch + 1 == steps

    order = [
        ("reduce", t - DELAY, True),
        ("front", t, True),
        ("body", t - 1, not ends_epoch(t - 1)),
        ("tail", t - 2, True),
        ("body", t, ends_epoch(t)),  # an epoch's last batch goes through at once
        ("update", t - DELAY, True),
    ]
    return ((phase, batch) for phase, batch, due in order if due and exists(batch))


class _PhaseSeconds(NamedTuple):
    """Seconds of a batch: of its phases front, body and tail by lane, and of the rest.

    Own seconds are arrays [ranks] where ranks do not wait for each other in every phase.
    """

    own: dict[str, Number]  # phase -> what a rank does itself
    pulled: dict[str, Number]  # phase -> comm lane
    logits: dict[str, Number | None]  # phase -> reduce lane; None: the phase has no logits
    sampling: Number  # of the rank itself, in line
    sampled_s: Number  # of all ranks
    all_reduce: Number
    update: Number

    @classmethod
    def of(cls, problem: Problem, phases: Phases, alone: bool) -> _PhaseSeconds:
        """`alone`: ranks wait for each other in all-reduces only."""
        accounts = {phase: account(problem, ops) for phase, ops in phases.items()}
        own: dict[str, Number] = {}
        pulled: dict[str, Number] = {}
        logits: dict[str, Number | None] = {}
        for phase in ("front", "body", "tail"):
            by_op = accounts[phase].by_op
            pulls = total(seconds for op, seconds in by_op.items() if op.startswith("pull"))
            sums = [seconds for op, seconds in by_op.items() if op.startswith("logits")]
            own[phase] = (
                _own_seconds(problem, phases[phase])
                if alone
                else accounts[phase].epoch_s - pulls - total(sums)
            )
            pulled[phase], logits[phase] = pulls, total(sums) if sums else None
        host, end = accounts["host"].epoch_s, accounts["end"].by_op
        return cls(
            own,
            pulled,
            logits,
            _own_seconds(problem, phases["host"]) if alone else host,
            host,
            total(seconds for op, seconds in end.items() if "all_reduce" in op),
            end["update"],
        )


class _PipelineClock:
    """Goes through the pipeline's periods, and keeps the time at which each lane is free.

        rank     |F_M k|F_D k-1|B_D k-1|B_M k-2|up k-3|      `now`
        comm     |pull k-1 . |pull b k-2 . |pull k           `comm_free`: pulls, one after the other
        reduce   |all_reduce k-3 . . . . . .|                `reduce_free`: all-reduces and logits

    A phase begins when the rank is free and what it waits for is there (`ready`).
    """

    def __init__(self, batches: Sequence[_PhaseSeconds], sampled_in_line: bool) -> None:
        self.batches, self.sampled_in_line = batches, sampled_in_line
        self.now: Number = 0.0
        self.comm_free: Number = 0.0
        self.reduce_free: Number = 0.0
        self.ready: dict[tuple[str, int], Number] = {}  # (phase, batch) -> when it may begin

    def epoch_s(self) -> Number:
        """Seconds of an epoch in steady state: the last of enough epochs."""
        batches = len(self.batches)
        epochs = 1 + -(-DELAY // batches)  # in the last epoch every period has an update
        ends: list[Number] = []
        for t in range(batches * epochs):
            for phase, batch in period(t, batches):
                self._do(phase, batch)
            if t % batches == batches - 1:
                ends.append(slowest(self.now))
        return ends[-1] - ends[-2]

    def _do(self, phase: str, t: int) -> None:
        batch = self.batches[t % len(self.batches)]
        if phase == "reduce":
            self.reduce_free = np.maximum(slowest(self.now), self.reduce_free) + batch.all_reduce
            self.ready["update", t] = self.reduce_free
        elif phase == "update":
            self.now = np.maximum(self.now, self.ready["update", t]) + batch.update
        else:
            if phase == "front" and self.sampled_in_line:
                self.now = self.now + batch.sampling
            self._compute(phase, t, batch)

    def _compute(self, phase: str, t: int, batch: _PhaseSeconds) -> None:
        """A phase of layers: it computes, adds up logits if it has them, and pulls."""
        self.now = np.maximum(self.now, self.ready.get((phase, t), 0.0)) + batch.own[phase]
        if (logits := batch.logits[phase]) is not None:
            self.now = self.reduce_free = np.maximum(self.now, self.reduce_free) + logits
        if phase == "tail":  # pulls nothing
            self.ready[FOLLOWING[phase], t] = self.now
        else:
            self.comm_free = np.maximum(self.now, self.comm_free) + batch.pulled[phase]
            self.ready[FOLLOWING[phase], t] = self.comm_free


def _own_seconds(problem: Problem, ops: Sequence[Op]) -> Number:
    """Seconds of what each rank does itself [ranks]."""
    cost = problem.cost
    seconds: Number = np.zeros(problem.ranks)
    for op in ops:
        if op.work is not None:
            seconds = seconds + cost.compute_s(op.work) * cost.full_load_slowdown
        elif op.loaded is not None:
            seconds = seconds + cost.load_s(op.loaded) * cost.full_load_slowdown
        elif op.host is not None:
            seconds = seconds + cost.host_s(*op.host) * cost.full_load_slowdown
    return seconds


class _PipelinedRank:
    """One rank's tasks of a pipelined run, period by period."""

    def __init__(self, problem: Problem, rank: int, prefetch: int) -> None:
        self.rank, self.everyone, self.prefetch = rank, tuple(range(problem.ranks)), prefetch
        self.done: list[Task] = []
        self.last: tuple[Label, ...] = ()  # the last computation or load
        self.period_ends: list[Label] = []  # the last computation or load of each period
        # (phase, batch) -> what the phase waits for
        self.waits: dict[tuple[str, int], tuple[Label, ...]] = {}

    def tasks(self, steps: int, epoch: int, phases: Callable[[int], Phases]) -> list[Task]:
        """All tasks of a run of so many batches, `epoch` of them per epoch."""
        for t in range(steps + DELAY):
            for phase, batch in period(t, epoch, steps):
                ops = phases(batch)
                if phase == "front":
                    self._sample(batch, ops["host"])
                if phase == "reduce":
                    self._reduce(batch, ops["end"][:-1])
                elif phase == "update":
                    self._compute(ops["end"][-1], batch, self.waits["end", batch])
                else:
                    self._layers(batch, phase, ops[phase])
            if self.last:
                self.period_ends.append(self.last[-1])
        return self.done

    def _sample(self, t: int, ops: Sequence[Op]) -> None:
        """Sampling follows the period before; with prefetch, a period that is so many earlier."""
        start = len(self.period_ends) - 1 - self.prefetch
        after: tuple[Label, ...] = (self.period_ends[start],) if start >= 0 else ()
        for op in ops:
            if op.idle:
                self._add(op, t, "compute", ())
                self.last = (op.label(t),)
                after += (op.label(t),)
            else:
                after = self._add(op, t, "host", after)
        self.waits["front", t] = after

    def _layers(self, t: int, phase: str, ops: Sequence[Op]) -> None:
        after = self.waits.get((phase, t), ())
        for op in ops:
            if op.work is not None:
                after = self._compute(op, t, after)
            elif op.loaded is not None:
                after = self._add(op, t, "copy", after + self.last)
                self.last = after
            else:
                after = self._add(op, t, "comm" if op.sent is not None else "reduce", after)
        self.waits[FOLLOWING[phase], t] = after

    def _reduce(self, t: int, ops: Sequence[Op]) -> None:
        for op in ops:
            self.waits["end", t] = self._add(op, t, "reduce", self.waits["end", t])

    def _compute(self, op: Op, t: int, after: tuple[Label, ...]) -> tuple[Label, ...]:
        self.last = self._add(op, t, "compute", after)
        return self.last

    def _add(self, op: Op, t: int, lane: str, after: tuple[Label, ...]) -> tuple[Label, ...]:
        """Add the rank's share of an operation; returns what waits for it."""
        label = op.label(t)
        self.done.append(Task(label, self.rank, lane, part(op, self.rank, self.everyone), after))
        return (label,)
