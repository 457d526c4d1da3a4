"""Bytes of an epoch, and its seconds without contention, from the operations of its steps.

    synchronous    |forward 1|. .|forward 2|loss|backward 2|. . .|backward 1|. . . . . .|update|
    transfers                |f 2|                         |b 2|            |all_reduce|
    segments       |----1----|   |------------2------------|   |-----3------|          |--4---|

    epoch = sum over segments of the slowest rank's computation + sum over transfers

In a synchronous step every transfer is a barrier: all ranks wait there for the slowest one. With
stale exchanges (PipeGCN) only all-reduces are barriers, and exchanges overlap with computation.
Operations done ahead (sampling with `prefetch`) overlap with everything else. All-reduces beside
the backward pass are no transfers of this sum; what ranks wait for them is (beside.py).

An operation is priced once (price.py), however often it occurs: layers and batches that are alike
share their work. Steps that overlap take the seconds of lanes.py instead, and chunks that pass
stages those of flowshop.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.transfer import PortSeconds, add, busiest
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program import flowshop, lanes
from gnnplan.planner.strategies.program.beside import waited_s
from gnnplan.planner.strategies.program.prediction import Prediction, mean
from gnnplan.planner.strategies.program.price import (
    Price,
    Steps,
    bytes_of,
    price_of,
    unlike_ranks,
)
from gnnplan.planner.strategies.program.program import Exchange, Kind, Op, Program
from gnnplan.planner.vocabulary.numbers import Number, largest, slowest, total
from gnnplan.planner.vocabulary.schedule import Compute, Label


def predict(problem: Problem, program: Program) -> Prediction:
    """One epoch: the mean of its known steps, times the steps that it has; each of a period."""
    known = list(program.known())
    if any(op.chunks for op in program.ops(known[0])):
        return flowshop.predict(problem, program)
    starts = range(0, len(known), len(known) // program.period)
    return mean([_epoch(problem, program, known[at : at + starts.step]) for at in starts])


def _epoch(problem: Problem, program: Program, known: Sequence[Hashable]) -> Prediction:
    """The epoch of these known steps."""
    numbers: dict[Kind, int] = {}
    steps = {
        name: [(numbers.setdefault(op.kind, len(numbers)), op) for op in program.ops(name)]
        for name in dict.fromkeys(known)
    }
    ops = {number: op for step in steps.values() for number, op in step}
    unlike = unlike_ranks(problem, ops.values())
    priced = [price_of(problem, op, unlike) for op in ops.values()]
    counts = _Counts(known, steps, program.prefetch)
    p = _account(problem, program, counts, ops, priced)
    if program.order is not None:
        busiest_s = busiest(_port_s(problem.cost, priced, list(counts.all.items())))
        by_kind = dict(zip(numbers, priced, strict=True))
        epoch = lanes.epoch_s(problem.cost, program, program.order, by_kind)
        epoch = largest((busiest_s, p.compute_s), epoch)
        p = replace(p, epoch_s=epoch, comm_s=epoch - p.compute_s, bubble_s=0.0 * epoch)
    return p if len(known) == program.steps else _scaled(p, program.steps / len(known))


def _scaled(p: Prediction, factor: float) -> Prediction:
    """The prediction of an epoch with so many times as many steps."""

    def whole(counts: dict[str, int]) -> dict[str, int]:
        return {name: round(count * factor) for name, count in counts.items()}

    return Prediction(
        p.epoch_s * factor,
        p.compute_s * factor,
        p.comm_s * factor,
        p.bubble_s * factor,
        whole(p.bytes),
        whole(p.bytes_by_link),
        p.setup_bytes,
        {op: seconds * factor for op, seconds in p.by_op.items()},
    )


def _account(
    problem: Problem,
    program: Program,
    counts: _Counts,
    ops: Mapping[int, Op],
    priced: Sequence[Price],
) -> Prediction:
    """The prediction of an epoch of these operations, step after step."""
    cost, prefetch = problem.cost, program.prefetch
    seconds = [price.seconds for price in priced]
    computed = _sum(counts.computed, seconds)  # [.., ranks]
    compute_s = cost.cores.all_done_s(computed)
    waited: Number = 0.0
    if counts.beside:
        waited = waited_s(cost, counts.known, counts.steps, priced, not program.late, prefetch > 0)
    epoch, exposed = (_stale_epoch if program.late else _synchronous_epoch)(
        cost, counts, priced, seconds, waited
    )
    if prefetch:
        longer = np.maximum(epoch, _ahead_s(cost, counts, priced, seconds))
        epoch, exposed = longer, exposed + longer - epoch
    waiting = np.maximum(epoch - compute_s - exposed, 0.0)
    by_op = _by_operation(cost, counts, priced)
    return Prediction(
        epoch,
        compute_s,
        exposed,
        waiting,
        *bytes_of(problem, ((ops[number], count) for number, count in counts.all.items())),
        program.setup_bytes,
        by_op,
    )


class _Counts:
    """How often each operation occurs in an epoch, by what it holds up."""

    def __init__(self, known: Sequence[Hashable], steps: Steps, prefetch: int) -> None:
        self.known, self.steps = known, steps
        self.all = Counter[int]()
        self.computed = Counter[int]()
        self.hosted = Counter[int]()  # loads, and sampling that is not done ahead
        self.exchanged = Counter[int]()
        self.reduced = Counter[int]()
        self.beside = Counter[int]()  # all-reduces that hold up the update alone
        self.exchanged_ahead = Counter[int]()
        self.labelled = Counter[tuple[Label, int]]()
        between = {name: _Between() for name in steps}
        for name, times in Counter(known).items():
            for number, op in steps[name]:
                self._count(number, op, times, op.ahead and prefetch > 0, between[name])
        in_order = [between[name] for name in known]
        self.segments = BarrierSegments(each.transfers for each in in_order)
        self.reduce_segments = BarrierSegments(each.all_reduces for each in in_order)
        self.ahead_segments = BarrierSegments(each.exchanges_ahead for each in in_order)

    def _count(self, number: int, op: Op, times: int, ahead: bool, between: _Between) -> None:
        self.all[number] += times
        self.labelled[op.label(0)._replace(chunk=None), number] += times
        if op.beside:
            self.beside[number] += times
            return
        if op.op == "update" and self.beside:  # all ranks wait for them
            between.transfers.append([])
            between.all_reduces.append([])
        if isinstance(op.work, Compute):
            self.computed[number] += times
            between.transfers[-1].append(number)
            between.all_reduces[-1].append(number)
        elif op.lane == "reduce":
            self.reduced[number] += times
            between.transfers.append([])
            between.all_reduces.append([])
        elif isinstance(op.work, Exchange):
            (self.exchanged_ahead if ahead else self.exchanged)[number] += times
            (between.exchanges_ahead if ahead else between.transfers).append([])
        elif ahead:
            between.exchanges_ahead[-1].append(number)
        else:
            self.hosted[number] += times
            between.transfers[-1].append(number)


class _Between:
    """A step's operations between its barriers: a list before, between and after them."""

    def __init__(self) -> None:
        self.transfers: list[list[int]] = [[]]  # work
        self.all_reduces: list[list[int]] = [[]]  # computation
        self.exchanges_ahead: list[list[int]] = [[]]  # work done ahead


class BarrierSegments:
    """What ranks do between barriers, where all ranks wait for the slowest.

    `steps`: of each step, what is done before, between and after its barriers. What is after the
    last one belongs to the next step's first barrier. Equal segments are counted.
    """

    def __init__(self, steps: Iterable[Sequence[Sequence[int]]]) -> None:
        self._ended: Counter[tuple[int, ...]] = Counter()
        current: tuple[int, ...] = ()
        for first, *others in steps:
            current += tuple(first)
            for segment in others:
                self._ended[current] += 1
                current = tuple(segment)
        self._ended[current] += 1
        del self._ended[()]

    def all_done_s(self, cost: Cost, seconds: Sequence[Number]) -> Number:
        """How long all segments take, each until its slowest rank is done [s]."""
        return total(
            cost.cores.all_done_s(_sum(Counter(segment), seconds)) * count
            for segment, count in self._ended.items()
        )


def _synchronous_epoch(
    cost: Cost,
    counts: _Counts,
    priced: Sequence[Price],
    seconds: Sequence[Number],
    waited: Number,
) -> tuple[Number, Number]:
    """Seconds of the epoch, and those of its exposed transfers, loads and sampling.

    `waited`: for all-reduces beside computation.
    """
    transfers = _sum(counts.exchanged, seconds) + _sum(counts.reduced, seconds) + waited
    computed = _sum(counts.computed, seconds)
    with_host = computed + _sum(counts.hosted, seconds)
    host_s = cost.cores.all_done_s(with_host) - cost.cores.all_done_s(computed)
    return counts.segments.all_done_s(cost, seconds) + transfers, transfers + host_s


def _stale_epoch(
    cost: Cost,
    counts: _Counts,
    priced: Sequence[Price],
    seconds: Sequence[Number],
    waited: Number,
) -> tuple[Number, Number]:
    """Seconds of the epoch, and those that are not computation.

    All layers' exchanges share one communication lane, which runs beside computation. The
    all-reduce follows computation, and updates have `waited` for those beside it. No epoch is
    shorter than its busiest port is busy.
    """
    computing_s = counts.reduce_segments.all_done_s(cost, seconds)
    ports = cost.cores.core_busy_s(_sum(counts.computed, seconds))
    for number, count in (counts.exchanged + counts.reduced + counts.beside).items():
        add(ports, priced[number].transfer.ports, count)
    lanes_s = (
        computing_s + _sum(counts.reduced, seconds) + waited,
        _sum(counts.exchanged, seconds),
    )
    epoch = largest(lanes_s, busiest(ports))
    return epoch, epoch - computing_s


def _ahead_s(
    cost: Cost,
    counts: _Counts,
    priced: Sequence[Price],
    seconds: Sequence[Number],
) -> Number:
    """The shortest epoch that sampling ahead allows: its own lane, and the cores that it shares
    with computation [s]."""
    lane_s = counts.ahead_segments.all_done_s(cost, seconds)
    lane_s = lane_s + _sum(counts.exchanged_ahead, seconds)
    if not cost.cores.count:
        return lane_s
    ports = _port_s(cost, priced, [(key, count) for (_, key), count in counts.labelled.items()])
    return np.maximum(slowest(ports["cores"]), lane_s)


def _by_operation(cost: Cost, counts: _Counts, priced: Sequence[Price]) -> dict[str, Number]:
    """Seconds of each kind of operation on its slowest rank."""
    by_op: dict[str, Number] = {}
    slowest_s = [
        price.seconds if price.is_transfer else cost.cores.all_done_s(price.seconds)
        for price in priced
    ]
    for (label, number), count in counts.labelled.items():
        by_op[label.kind] = by_op.get(label.kind, 0.0) + slowest_s[number] * count
    return by_op


def _port_s(cost: Cost, priced: Sequence[Price], counted: Sequence[tuple[int, int]]) -> PortSeconds:
    """How long each port is busy with operations, each so many times [s]; shared CPU cores are a
    port."""
    ports = cost.cores.core_busy_s(
        total(
            priced[number].seconds * count
            for number, count in counted
            if not priced[number].is_transfer
        )
    )
    for number, count in counted:
        add(ports, priced[number].transfer.ports, count)
    return ports


def _sum(counted: Mapping[int, int], seconds: Sequence[Number]) -> Number:
    """The operations' seconds, each as often as it is counted."""
    return total(seconds[number] * count for number, count in counted.items())
