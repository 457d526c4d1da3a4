"""Seconds and bytes of operations, and seconds of an epoch: the longest path over lanes and ranks.

planner/cluster/cost.py prices the work inside an operation. The path:

    compute  |forward 1|. .|forward 2|loss|backward 2|. . .|backward 1|. . . . . .|update|
    comm               |f 2|                         |b 2|
    reduce                                                            |all_reduce|

An operation begins when its lane is free and the operations that it waits for have ended
(program.py). Each rank begins computation, sampling and loads by itself. A transfer begins when
the last of its ranks is ready, and ends on all of its ranks at the same time, so it synchronises
them. The work between two synchronisations is summed before it is priced, because its duration
depends on the cores that ranks share. Transfers of several lanes that overlap contend for ports;
other operations that overlap do not.

A pipeline of chunks is computed without a loop over chunks:

    stage 0  |c0|c1|c2|          A chunk enters a stage when the chunk has arrived and the chunk
    link        |c0|c1|c2|       before it has left. It leaves when its own work is done. Links
    stage 1        |c0|c1|c2|    work the same way.

For equal chunks this is (K + stages - 1) slots forward and as many backward (GNNPipe, arXiv
2308.10087, Sec. 3.2).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, reduce
from itertools import groupby, permutations
from operator import or_
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.compute import SharedCores
from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.ports import busiest
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Kind,
    Message,
    Op,
    Program,
    Receive,
    Step,
    ops_by_group,
    queue,
)
from gnnplan.planner.vocabulary.numbers import Group, Number, largest, slowest, total
from gnnplan.planner.vocabulary.schedule import Exchange, Label, LocalWork


class Price(NamedTuple):
    """The duration of an operation, over all of its chunks."""

    seconds: Number  # of each rank [.., ranks], or of a transfer as a whole [.., 1]
    transfer: Transfer = Transfer(0.0, {})
    is_transfer: bool = False
    by_chunk: Number = 0.0  # seconds of each chunk on its slowest rank [.., chunks]
    link: Number = 0.0  # seconds of the mean chunk's message on its link

    def times(self, factor: Number) -> Price:
        """Return a price with all durations multiplied, by one factor or by one of each chunk."""
        mean = np.atleast_1d(factor).mean(-1, keepdims=np.ndim(factor) > 1)
        by_chunk, link = self.by_chunk * factor, self.link * mean
        transfer = Transfer(self.transfer.latency * mean, self.transfer.ports)
        return Price(self.seconds * mean, transfer, self.is_transfer, by_chunk, link)


def price_of(problem: Problem, op: Op, ranks: np.ndarray | None = None) -> Price:
    """Return the price of an operation, over all of its chunks, with the seconds of these `ranks`,
    or of all."""
    cost, group = problem.cost, op.ranks
    match op.work:
        case LocalWork() as work:
            if ranks is not None:
                work = work.at(int(ranks[0])) if ranks.size == 1 else work.of_ranks(ranks)
            seconds = cost.seconds(work)
            if not op.over_chunks:
                return Price(np.asfortranarray(seconds) if np.ndim(seconds) > 1 else seconds)
            by_rank = np.reshape(seconds, (*np.shape(seconds)[:-1], -1, len(group)))
            return Price(by_rank.sum(-2), by_chunk=by_rank.max(-1))
        case Exchange() as work if op.over_chunks:
            chunks = [replace(work, items=items) for items in work.items]
            alone = {each: cost.collective(each, group).alone for each in dict.fromkeys(chunks)}
            each_s = np.broadcast_arrays(*(np.atleast_1d(alone[each]) for each in chunks))
            by_chunk = np.concatenate(each_s, axis=-1)
            whole = cost.exchange(work.nbytes.sum(0), group, len(chunks))
            return Price(by_chunk.sum(-1, keepdims=by_chunk.ndim > 1), whole, True, by_chunk)
        case Exchange(items, itemsize):
            transfer = cost.exchange(items, group or None, itemsize=itemsize)
        case AllReduce() as work:
            groups = work.by_group(group or tuple(range(problem.ranks)))
            transfer = cost.all_reduces.transfer(groups)
        case Message(nbytes, distance):
            # The link's seconds are those of the mean chunk; an empty chunk is not sent. Backward
            # begins after the whole forward pass, so a port's seconds of both directions add up.
            lower, count = np.array(group) + min(distance, 0), len(nbytes)
            mean = np.rint(nbytes.mean(0))
            latencies, ports = cost.ports.sends(lower, lower + abs(distance), mean)
            link = slowest(latencies * (nbytes > 0).mean(0)) + busiest(ports)
            busy = {kind: seconds * count for kind, seconds in ports.items()}
            return Price(link * count, Transfer(0.0, busy), True, link=link)
        case Receive():
            return Price(0.0)  # a receipt ends with its message, which has the price
    return Price(transfer.alone, transfer, True)


def distinct_ranks(problem: Problem, ops: Collection[Op]) -> np.ndarray | None:
    """Return one rank of each set of ranks that do the same work in all operations.

    Such ranks are always ready at the same time, so one represents the set. None: ranks share
    cores, and all are needed.
    """
    if problem.cost.cores.count:
        return None
    arrays = [array for op in ops if isinstance(op.work, LocalWork) for array in op.work.arrays]
    by_rank = [array for array in arrays if np.ptp(array)]
    if not by_rank:
        return np.zeros(1, dtype=np.int64)
    return np.unique(np.stack(by_rank), axis=1, return_index=True)[1]


def setup_s(problem: Problem, setup: Iterable[Op]) -> float:
    """Return the seconds of the exchanges before the first step."""
    return sum(float(price_of(problem, op).seconds) for op in setup)


def bytes_of(
    problem: Problem, counted: Iterable[tuple[Op, int]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes sent, by operation and by class of link.

    counted: operations, and how often each occurs.
    """
    cost, by_op, links = problem.cost, Counter[str](), Counter[str]()
    for op, times in counted:
        by_link = Counter[str]()  # bytes of one occurrence, over all chunks
        match op.work:
            case Exchange(items, itemsize):
                sent = items.sum(0) if op.over_chunks else items
                by_link.update(cost.bytes_by_link(sent, op.ranks or None, itemsize))
            case Message(sizes, distance):
                for rank, nbytes in zip(op.ranks, sizes.sum(0).tolist(), strict=True):
                    by_link[cost.link_name(rank, rank + distance)] += nbytes
            case AllReduce() as work:
                for group, size in work.by_group(op.ranks or tuple(range(problem.ranks))):
                    wire = 2 * (len(group) - 1) * size
                    by_link.update(cost.all_reduces.bytes_by_link(wire, group))
            case _:
                continue
        if by_link or not op.over_chunks:  # what sends nothing on chunks is not reported
            by_op[op.op] += times * by_link.total()
        for link, nbytes in by_link.items():
            links[link] += times * nbytes
    return dict(by_op), dict(+links)


FEW = 9  # steps that represent an epoch of equal steps: its begin, its middle and its end
LEAD = 2  # steps; a longer lead of the sampler changes no step's duration
Prices = Sequence[Price]  # of each kind of operation, by the kind's number


def path_of(
    program: Program, known: Sequence[Hashable], numbers: Mapping[Kind, int]
) -> _Stages | _Steps:
    """Return the dependencies of an epoch, whose duration can be computed for several prices.

    known: names of the epoch's known steps. numbers: kind of operation -> its number.
    """
    if any(op.over_chunks for op in program.ops(known[0])):
        return _Stages(program.step(0), numbers)
    return _Steps(program, known, numbers)


# -- steps


class _Begin(NamedTuple):
    """The conditions under which an operation begins; operations are places in the queue."""

    kind: int  # number of the operation's kind
    after: list[int]  # operations that must have ended
    # of a transfer: for each other lane the transfers that may run, in order
    overlapping: list[list[int]]


class _Steps:
    """The known steps, one after the other; a run of equal steps is shortened to a few.

    A step's duration is the time from the end of the previous step to its own end. The first steps
    only bring the overlap to its steady state and are not counted. A step ends with its last
    operation, or with its loss if `Program.by_loss`. In place of k samplers that take turns, one
    sampler is k times as fast.

    begins: when each operation begins. Dependencies that follow from other dependencies are left
    out; mostly one remains. ends: the operations that end each step.
    """

    def __init__(
        self, program: Program, known: Sequence[Hashable], numbers: Mapping[Kind, int]
    ) -> None:
        names, self.weights, self.before = _played(program, known)
        steps, epoch = len(self.weights) + program.lag, len(names)
        if program.order and len(known) < program.steps:  # no counted step ends an epoch or the run
            steps, epoch = steps + program.in_flight, program.steps + steps + program.in_flight
        played = replace(program, at=lambda t: names[t % len(names)], steps=epoch)
        ops = [op for name in dict.fromkeys(known) for op in program.ops(name)]
        self.sampled = {numbers[op.kind] for op in ops if op.lane == "host"}
        self.samplers = program.samplers
        # over: for each operation a bit mask of the operations that have ended when it begins
        self.begins, over = list[_Begin](), list[int]()
        last: dict[Label | str, int] = {}  # label -> place; lane -> place of its last operation
        ends = defaultdict[int, dict[str, int]](dict)  # step -> lane -> its last operation
        # (lane, other lane) -> transfers of the other lane that the lane's next one may overlap
        lanes = dict.fromkeys(op.lane for op in ops if op.moves)
        overlapping = {pair: list[int]() for pair in permutations(lanes, 2)}

        def latest(places: set[int]) -> list[int]:
            """Return the places that no other of these places depends on."""
            if len(places) < 2:
                return [*places]
            before = reduce(or_, (over[place] for place in places), 0)
            return [place for place in places if not before >> place & 1]

        for place, (op, step, after, _) in enumerate(queue(played, steps)):
            awaited = latest({last[name] for name in (*after, op.lane) if name in last})
            over.append(reduce(or_, (over[other] | 1 << other for other in awaited), 0))
            last[op.label(step)] = last[op.lane] = place
            others = list[list[int]]()
            for lane in (each for each in lanes if op.moves and each != op.lane):
                there = [each for each in overlapping[op.lane, lane] if not over[place] >> each & 1]
                others.append(there)
                overlapping[op.lane, lane] = there.copy()
                overlapping[lane, op.lane].append(place)
            self.begins.append(_Begin(numbers[op.kind], awaited, others))
            if op.op == "loss" or not program.by_loss:
                ends[step][op.lane] = place
        self.ends = [latest(set(by_lane.values())) for by_lane in ends.values()]

    def seconds(self, cores: SharedCores, prices: Prices) -> Number:
        """Return the duration of the epoch in steady state, for these prices [s]."""
        if self.samplers > 1:
            share = 1 / self.samplers
            prices = [p.times(share if i in self.sampled else 1.0) for i, p in enumerate(prices)]
        ends = [0.0, *_ends_s(cores, self.begins, self.ends, prices)]
        counted = range(self.before, len(self.weights))
        return total((ends[step + 1] - ends[step]) * self.weights[step] for step in counted)


def _played(program: Program, known: Sequence[Hashable]) -> tuple[list[Hashable], list[int], int]:
    """Return the names of a shortened epoch's steps, their weights, and the number of steps before
    those that count.

    A step's weight is the number of the epoch's steps that it represents.
    """
    if program.order is not None:
        names = list(known if len(set(known)) > 1 else known[:FEW])
        before = -(-program.in_flight // len(names)) * len(names)
        weights = [1] * (before + len(names))
        weights[before + len(names) // 2] += len(known) - len(names)  # in the middle of an epoch
        return names, weights, before
    before = program.lag + min(program.lead, len(known), LEAD)
    names = [known[step % len(known)] for step in range(-before, 0)]
    weights = [1] * before
    for name, run in groupby(known):
        length = len(list(run))
        few = min(length, before + 2)
        names += [name] * few
        weights += [1] * (few - 1) + [length - few + 1]
    return names, weights, before


class _Moment(NamedTuple):
    """The time at which each rank is ready: `synced` plus `delays` plus the seconds of `work`."""

    synced: Number = 0.0  # time of the last synchronisation [.., 1] [s]
    delays: Number = 0.0  # delay of each rank after that time [.., ranks] [s]
    work: tuple[tuple[int, int], ...] = ()  # operations since then: (number of a kind, count)

    def after_one_more(self, kind: int) -> _Moment:
        """Return the moment after one more operation of this kind."""
        work = dict(self.work)
        work[kind] = work.get(kind, 0) + 1
        return self._replace(work=tuple(work.items()))


def _ends_s(
    cores: SharedCores,
    begins: Sequence[_Begin],
    ends: Iterable[Iterable[int]],
    prices: Prices,
) -> list[Number]:
    """Return the time at which each step ends [s].

    Sums are cached, because most work between two synchronisations occurs several times.
    """

    @cache
    def spent(work: tuple[tuple[int, int], ...]) -> tuple[Number, Number]:
        """Return the seconds of each rank, and those until the last rank has done the work."""
        each = total(prices[kind].seconds * times for kind, times in work)
        return each, cores.last_rank_done_s(each)

    def of_all(moment: _Moment) -> Number:
        """Return when the last rank is ready [s]."""
        synced, delays, work = moment
        if np.ndim(delays):
            return synced + cores.last_rank_done_s(delays + spent(work)[0])
        return synced + spent(work)[1]

    def or_later(one: _Moment, other: _Moment) -> _Moment:
        """Return the moment at which each rank has reached both moments."""
        synced = np.maximum(one.synced, other.synced)
        if not any(each.work or np.ndim(each.delays) for each in (one, other)):
            return _Moment(synced)
        ready = (m.delays + spent(m.work)[0] - (synced - m.synced) for m in (one, other))
        return _Moment(synced, np.atleast_1d(np.maximum(*ready)))

    @cache
    def crowding(one: int, others: frozenset[int]) -> dict[int, Number]:
        """Return kind -> by what share it and `one` are delayed; empty if none is."""
        shares = {other: _crowding(prices[one], prices[other]) for other in others}
        return shares if any(np.any(share > 0) for share in shares.values()) else {}

    ended = list[_Moment]()  # place -> end of the operation
    began = dict[int, Number]()  # place -> begin of the transfer [s]
    for place, (kind, after, overlapping) in enumerate(begins):
        price = prices[kind]
        start = reduce(or_later, [ended[other] for other in after] or [_Moment()])
        if not price.is_transfer:
            ended.append(start.after_one_more(kind))
            continue
        began[place] = begin = of_all(start)
        end = begin + price.seconds
        for others in overlapping:
            shares = crowding(kind, frozenset(begins[other].kind for other in others))
            free: Number = 0.0  # time at which the other lane is free
            for other in others if shares else ():
                both = (ended[other].synced > begin) & (began[other] < np.maximum(end, free))
                if not (both.any() if isinstance(both, np.ndarray) else both):
                    continue
                other_price = prices[begins[other].kind]
                delay = np.maximum(free - began[other], 0.0)
                began[other], until = began[other] + delay, ended[other].synced + delay
                ports_from = np.maximum(
                    begin + price.transfer.latency, began[other] + other_price.transfer.latency
                )
                common = np.maximum(np.minimum(until, end) - ports_from, 0.0)
                lost = common * shares[begins[other].kind]
                free, end = until + lost, end + lost
                ended[other] = _Moment(free)
        ended.append(_Moment(end))
    return [largest(of_all(ended[place]) for place in places) for places in ends]


def _crowding(one: Price, other: Price) -> Number:
    """Return by what share of the time in which two transfers overlap both of them are delayed.

    If they need a port for the shares f and g of the time, neither is delayed while f + g <= 1.
    Beyond that both are delayed by f + g - 1: by 1 if each of them alone fills the same wire.
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
    """Stages that chunks pass: all chunks forward, all backward, then the update of each stage.

    stage 0   history |c0|c1|c2|           |c2|c1|c0|update|
    stage 1              |c0|c1|c2|     |c2|c1|c0|update|
    stage 2                 |c0|c1|c2|c2|c1|c0|update|
    """

    def __init__(self, step: Step, numbers: Mapping[Kind, int]) -> None:
        stages = [groupby(ops, lambda op: op.over_chunks) for ops in ops_by_group(step).values()]
        runs = [[[(op, numbers[op.kind]) for op in run] for _, run in stage] for stage in stages]
        # consecutive operations done chunk by chunk, or once; stages in the order of the chunks
        by_place = ((alike, alike[0][0][0].over_chunks) for alike in zip(*runs, strict=True))
        self.runs = [run for alike, sign in by_place for run in alike[:: sign or 1]]

    def seconds(self, cores: SharedCores, prices: Prices) -> Number:
        """Return the duration of the epoch, for these prices [s]."""
        ended: dict[Group, Number] = {}  # stage -> end of its last operation [s]
        arrived: dict[Op, Number] = {}  # message -> arrival of each chunk [s]
        for run in self.runs:
            first, priced = run[0][0], [(op, prices[number]) for op, number in run]
            ranks, start = first.ranks, ended.get(first.ranks, 0.0)
            if first.over_chunks:
                ended[ranks] = _pass(priced, start, arrived)
            else:
                ended[ranks] = start + total(slowest(price.seconds) for _, price in priced)
        last = np.asarray(largest(ended.values()))
        return last.item() if last.size == 1 else last


def _pass(run: Sequence[tuple[Op, Price]], start: Number, arrived: dict[Op, Number]) -> Number:
    """Return when a stage that is free from `start` on has processed all chunks [s].

    Writes the arrival times of the stage's messages into `arrived`.
    """
    receipts = (op.work for op, _ in run if isinstance(op.work, Receive))
    ready = largest((arrived[receipt.sender] for receipt in receipts), start)
    by_chunk = np.atleast_2d(total(price.by_chunk for _, price in run))[:, :: run[0][0].over_chunks]
    each = np.ascontiguousarray(by_chunk.T)[..., None]  # [chunks, problems, 1]
    ends = _through(ready, each, np.add.accumulate(each))
    for op, price in run:
        if isinstance(op.work, Message):  # a link takes as long for each chunk
            number = np.arange(1, len(ends) + 1)[:, None, None]
            arrived[op] = _through(ends, price.link, number * price.link)
    done: Number = ends[-1]
    return done


def _through(ready: Number, each: Number, end: np.ndarray) -> np.ndarray:
    """Return when each chunk leaves a stage or a link [chunks, problems, 1] [s].

    ready: when each chunk arrives; each: the work on each chunk; end: when the work on each chunk
    ends if no chunk is waited for. If chunk j arrives after begin(j) = end(j) - each(j), it delays
    itself and all later chunks by the difference:

        ends(k) = max_{j <= k} (ready(j) - begin(j)) + end(k)
    """
    return np.asarray(np.maximum.accumulate(ready - (end - each)) + end)
