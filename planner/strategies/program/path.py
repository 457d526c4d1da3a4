"""Seconds of an epoch: the longest path over the lanes of all ranks.

    compute  |forward 1|. .|forward 2|loss|backward 2|. . .|backward 1|. . . . . .|update|
    comm               |f 2|                         |b 2|
    reduce                                                            |all_reduce|

An operation begins when its lane is free and what it waits for has ended (order.py). Computation,
sampling and loads begin on each rank by itself. A transfer begins when the last of its ranks is
ready, and ends on all of them at once: there they meet. What ranks do after they met is added up
first, for how long it takes them together depends on the cores that they share. Exchanges and
all-reduces that are under way at once take ports of each other; nothing else that overlaps does.

Chunks that pass stages need no loop over chunks:

    stage 0  |c0|c1|c2|          A chunk enters a stage when it has arrived there and the chunk
    link        |c0|c1|c2|       before it has left. It leaves when its own work is done. Links
    stage 1        |c0|c1|c2|    work the same way.

For equal chunks this is (K + stages - 1) slots forward and as many backward (GNNPipe, arXiv
2308.10087, Sec. 3.2).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import groupby, pairwise
from operator import or_
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.shared_cores import SharedCores
from gnnplan.planner.cluster.transfer import busiest
from gnnplan.planner.strategies.program.order import by_ranks, queue
from gnnplan.planner.strategies.program.price import Price
from gnnplan.planner.strategies.program.program import (
    Group,
    Kind,
    Message,
    Op,
    Program,
    Queued,
    Receipt,
    Step,
)
from gnnplan.planner.vocabulary.numbers import Number, largest, slowest, total
from gnnplan.planner.vocabulary.schedule import Label

FEW = 9  # steps that stand for an epoch of equal ones: its begin, its middle and its end
BESIDE = {"comm": "reduce", "reduce": "comm"}  # lanes whose transfers may share ports
LEAD = 2  # steps, beyond which a longer lead shifts sampling and changes no step's duration
MANY = 200  # problems, from which on it is faster to go through the chunks one by one
Prices = Sequence[Price]  # of each kind of operation, by its number


def path_of(
    program: Program, known: Sequence[Hashable], numbers: Mapping[Kind, int]
) -> _Stages | _Steps:
    """An epoch of these known steps, ready to be priced again and again.

    `numbers`: of the kinds of their operations.
    """
    if any(op.chunks for op in program.ops(known[0])):
        return _Stages(program.step(0), numbers)
    return _Steps(program, known, numbers)


# -- steps


class _Steps:
    """Known steps, one after the other: of equal ones in a row a few, of which the last counts for
    the others. A step takes from the end of the one before to its own end; the first that counts
    begins when all that overlaps is under way, and what the last leaves under way meets the next.

    A step has ended when all of its operations have; where a program has an order of its own, when
    its loss is known, for the last update of a run waits for no later step. One sampler that
    is k times as fast stands for k that take turns: both make k batches in the time of one.
    """

    def __init__(
        self, program: Program, known: Sequence[Hashable], numbers: Mapping[Kind, int]
    ) -> None:
        names, self.weights, self.before = _played(program, known)
        steps, epoch = len(self.weights) + program.late, len(names)
        if program.order and len(known) < program.steps:  # none that counts ends an epoch or run
            steps, epoch = steps + program.in_flight, program.steps + steps + program.in_flight
        played = replace(program, at=lambda t: names[t % len(names)], steps=epoch)
        self.begins, self.ends = _begins(queue(played, steps), numbers, program.by_loss)
        ops = (op for name in dict.fromkeys(known) for op in program.ops(name))
        self.sampled = {numbers[op.kind] for op in ops if op.lane == "host"}
        self.samplers = program.samplers

    def seconds(self, cores: SharedCores, prices: Prices) -> Number:
        """Of the epoch in the steady state, if operations take so long [s]."""
        if self.samplers > 1:
            each = 1 / self.samplers
            prices = [p.times(each if i in self.sampled else 1.0) for i, p in enumerate(prices)]
        at = [0.0, *_ends_s(cores, self.begins, self.ends, prices)]
        counted = range(self.before, len(self.weights))
        return total((at[step + 1] - at[step]) * self.weights[step] for step in counted)


def _played(program: Program, known: Sequence[Hashable]) -> tuple[list[Hashable], list[int], int]:
    """The steps to play, for how many each counts, and how many are played before they count."""
    if program.order is not None:
        names = list(known if len(set(known)) > 1 else known[:FEW])
        before = -(-program.in_flight // len(names)) * len(names)
        weights = [1] * (before + len(names))
        weights[before + len(names) // 2] += len(known) - len(names)  # in the middle of an epoch
        return names, weights, before
    before = program.late + min(program.lead, len(known), LEAD)
    names = [known[step % len(known)] for step in range(-before, 0)]
    weights = [1] * before
    for name, run in groupby(known):
        alike = len(list(run))
        few = min(alike, before + 2)
        names += [name] * few
        weights += [1] * (few - 1) + [alike - few + 1]
    return names, weights, before


class _Begin(NamedTuple):
    """When an operation begins, in terms of places in the queue."""

    kind: int  # its number
    after: list[int]
    beside: list[int]  # of a transfer: those of the other lane that may be under way, in order


def _begins(
    queued: Iterable[Queued], numbers: Mapping[Kind, int], by_loss: bool
) -> tuple[list[_Begin], list[list[int]]]:
    """When each operation begins, and the places of those with which each step ends.

    What another that it waits for has waited for is left out: mostly one is left.
    """
    begins, over = list[_Begin](), list[int]()  # over: a bit for each place over when one begins
    last: dict[Label | str, int] = {}  # place of an operation, and of the last one of a lane
    ends = defaultdict[int, dict[str, int]](dict)  # step -> lane -> place of its last operation
    transfers = defaultdict[str, list[int]](list)  # lane -> those that the other may overlap

    def latest(places: set[int]) -> list[int]:
        before = reduce(or_, (over[place] for place in places), 0)
        return [place for place in places if not before >> place & 1]

    for place, (op, step, after, _) in enumerate(queued):
        awaited = latest({last[name] for name in (*after, op.lane) if name in last})
        over.append(reduce(or_, (over[other] | 1 << other for other in awaited), 0))
        last[op.label(step)] = last[op.lane] = place
        beside = list[int]()
        if lane := BESIDE.get(op.lane):
            beside = [other for other in transfers[lane] if not over[place] >> other & 1]
            transfers[lane] = beside.copy()
            transfers[op.lane].append(place)
        begins.append(_Begin(numbers[op.kind], awaited, beside))
        if op.op == "loss" or not by_loss:
            ends[step][op.lane] = place
    return begins, [latest(set(of_lanes.values())) for of_lanes in ends.values()]


class _Moment(NamedTuple):
    """When ranks are ready: they met, each was late by some seconds, and has worked since then."""

    met: Number = 0.0  # [.., 1] [s]
    late: Number = 0.0  # [.., ranks] [s]
    worked: tuple[tuple[int, int], ...] = ()  # kinds of operations, and how often each was done

    def and_then(self, kind: int) -> _Moment:
        """When ranks have done one more such operation."""
        worked = dict(self.worked)
        worked[kind] = worked.get(kind, 0) + 1
        return self._replace(worked=tuple(worked.items()))


def _ends_s(
    cores: SharedCores, begins: Sequence[_Begin], ends: Iterable[Iterable[int]], prices: Prices
) -> list[Number]:
    """When each step has ended [s]. Ranks mostly do between two meetings what they did before."""

    @cache
    def seconds(worked: tuple[tuple[int, int], ...]) -> Number:
        return total(prices[kind].seconds * times for kind, times in worked)

    @cache
    def done_s(worked: tuple[tuple[int, int], ...]) -> Number:
        return cores.all_done_s(seconds(worked))

    def of_all(moment: _Moment) -> Number:
        """When the last rank is ready [s]."""
        met, late, worked = moment
        if np.ndim(late):
            return met + cores.all_done_s(late + seconds(worked))
        return met + done_s(worked)

    def or_later(one: _Moment, other: _Moment) -> _Moment:
        """When each rank is ready for both."""
        met = np.maximum(one.met, other.met)
        if not any(each.worked or np.ndim(each.late) for each in (one, other)):
            return _Moment(met)
        ready = (each.late + seconds(each.worked) - (met - each.met) for each in (one, other))
        return _Moment(met, np.atleast_1d(np.maximum(*ready)))

    @cache
    def crowding(one: int, other: int) -> Number:
        return _crowding(prices[one], prices[other])

    ended, began = list[_Moment](), dict[int, Number]()  # began: when transfers did
    for place, (kind, after, beside) in enumerate(begins):
        price = prices[kind]
        start = reduce(or_later, [ended[other] for other in after] or [_Moment()])
        if not price.is_transfer:
            ended.append(start.and_then(kind))
            continue
        began[place] = begin = of_all(start)
        end, free = begin + price.seconds, 0.0  # free: when the other lane is
        for other in beside:
            if not np.any(ended[other].met > begin):
                continue
            its = prices[begins[other].kind]
            moved = np.maximum(free - began[other], 0.0)
            began[other], until = began[other] + moved, ended[other].met + moved
            ports_from = np.maximum(
                begin + price.transfer.latency, began[other] + its.transfer.latency
            )
            common = np.maximum(np.minimum(until, end) - ports_from, 0.0)
            lost = common * crowding(kind, begins[other].kind)
            free, end = until + lost, end + lost
            ended[other] = _Moment(free)
        ended.append(_Moment(end))
    return [largest(of_all(ended[place]) for place in places) for places in ends]


def _crowding(one: Price, other: Price) -> Number:
    """What both lose of the time in which they are under way together.

    Of a port that they want for the shares f and g of the time each gets what it wants while f + g
    <= 1. Beyond that both take longer, by f + g - 1: two transfers over one wire by all of it.
    """
    shares = (
        {
            kind: busy / np.maximum(price.seconds - price.transfer.latency, 1e-30)
            for kind, busy in price.transfer.ports.items()
        }
        for price in (one, other)
    )
    f, g = shares
    return busiest(
        {
            kind: np.where(g[kind] > 0, np.maximum(f[kind] + g[kind] - 1.0, 0.0), 0.0)
            for kind in f
            if kind in g
        }
    )


# -- chunks that pass stages


class _Stages:
    """Groups of ranks that chunks pass: all forward, all backward, then each stage's update.

    stage 0   history |c0|c1|c2|                    |c2|c1|c0|update|
    stage 1              |c0|c1|c2|        |c2|c1|c0|update|
    stage 2                 |c0|c1|c2|c2|c1|c0|update|
    """

    def __init__(self, step: Step, numbers: Mapping[Kind, int]) -> None:
        stages = [groupby(ops, lambda op: op.chunks) for ops in by_ranks(step).values()]
        runs = [[[(op, numbers[op.kind]) for op in run] for _, run in stage] for stage in stages]
        # what stages do chunk by chunk, or once, in the order in which chunks come to them
        self.runs = [
            run for alike in zip(*runs, strict=True) for run in alike[:: alike[0][0][0].chunks or 1]
        ]

    def seconds(self, cores: SharedCores, prices: Prices) -> Number:
        """Of the epoch, if operations take so long [s]."""
        ended: dict[Group, Number] = {}  # stage -> when
        arrived: dict[Op, Number] = {}  # message -> when its chunks have arrived
        for run in self.runs:
            first, priced = run[0][0], [(op, prices[number]) for op, number in run]
            ranks, start = first.ranks, ended.get(first.ranks, 0.0)
            if first.chunks:
                ended[ranks] = _pass(priced, start, arrived)
            else:
                ended[ranks] = start + total(slowest(price.seconds) for _, price in priced)
        last = np.asarray(largest(ended.values()))
        return last.item() if last.size == 1 else last


def _pass(run: Sequence[tuple[Op, Price]], start: Number, arrived: dict[Op, Number]) -> Number:
    """When a stage, free from `start` on, has ended with all chunks; its messages arrive later."""
    receipts = (op.work for op, _ in run if isinstance(op.work, Receipt))
    ready = largest((arrived[receipt.sender] for receipt in receipts), start)
    by_chunk = np.atleast_2d(total(price.by_chunk for _, price in run))[:, :: run[0][0].chunks]
    each = np.ascontiguousarray(by_chunk.T)[..., None]  # [chunks, problems, 1]
    ends = _through(ready, each, _running(np.add, each.copy()))
    for op, price in run:
        if isinstance(op.work, Message):  # a link takes as long for each chunk
            number = np.arange(1, len(ends) + 1)[:, None, None]
            arrived[op] = _through(ends, price.link, number * price.link)
    done: Number = ends[-1]
    return done


def _through(ready: Number, each: Number, end: np.ndarray) -> np.ndarray:
    """When chunks that are `ready` there have left a stage or a link [chunks, problems, 1].

    It takes so long for `each`, and without waits it has done with chunk k at end(k). Chunk j
    delays it and all chunks after it by how much later than begin(j) it can begin:

        ends(k) = max_{j <= k} (ready(j) - begin(j)) + end(k)
    """
    return np.asarray(_running(np.maximum, ready - (end - each)) + end)


def _running(combine: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Each of `values` [chunks, problems, 1] combined with all before it, in place.

    NumPy's own `accumulate` goes number by number, which is slow for many problems.
    """
    if values[0].size < MANY:
        return np.asarray(combine.accumulate(values, out=values))
    for before, value in pairwise(values):
        combine(before, value, out=value)
    return values
