"""An epoch of chunks that pass stages, in closed form: a flow shop of stages and links.

    stage 0  |c0|c1|c2|          A chunk enters a stage when it has arrived there and the chunk
    link        |c0|c1|c2|       before it has left. It leaves when its own work is done. Links
    stage 1        |c0|c1|c2|    work the same way.

    predict()
      1  _StageCosts    what every stage does once per step, and its links
         _Pricing       every stage's forward and backward pass, if it never had to wait
      2  _flow_shop_s   the epoch, if stages waited for chunks only
      3  _contended     stages' exchanges share ports, and ranks share CPU cores: both take longer
      4  bounds         no epoch is shorter than its busiest port or core is busy
      5  shares         of computation, communication and waiting

For equal chunks step 2 gives (K + stages - 1) slots forward and as many backward (GNNPipe, arXiv
2308.10087, Sec. 3.2). In the hybrid a chunk takes its slowest member's time between one exchange
and the next. Ranks that do operations together (`Op.ranks`) are a stage; stages follow in the order
of the program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Cost, Transfer
from gnnplan.planner.cluster.transfer import PortSeconds, add, busiest
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.order import by_ranks
from gnnplan.planner.strategies.program.prediction import Prediction
from gnnplan.planner.strategies.program.price import bytes_of
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Group,
    Message,
    Op,
    Program,
)
from gnnplan.planner.vocabulary.numbers import Number, largest, total
from gnnplan.planner.vocabulary.schedule import Compute
from gnnplan.planner.vocabulary.values import Content

MANY = 200  # problems, from which on it is faster to go through the chunks one by one
WAYS = ("f", "b")  # forward, backward


class _ChunkTimes(NamedTuple):
    """When each chunk begins and ends in a stage that never waits [chunks, problems, 1] [s]."""

    begin: np.ndarray
    end: np.ndarray


@dataclass(frozen=True)
class _Pass:
    """A stage's forward or backward pass over all chunks, if it never waits.

    Stages that are alike have the same arrays.
    """

    chunks: _ChunkTimes  # exchanges included; in the order in which chunks come
    computed: Mapping[str, Number]  # by operation, seconds of each member, alone [.., g]
    exchanged: Number  # seconds of halo exchanges
    ports: PortSeconds  # by the exchanges


Passes = Mapping[str, Sequence[_Pass]]  # 'f' and 'b' -> of each stage


class _StageCosts:
    """What each stage does once per step, and how its chunks reach the next stage.

    refresh, update: seconds of the slowest member before its chunks come, and after all of them.
    all_reduce: of the stage's gradients. link: of the mean chunk to the next stage.
    """

    def __init__(self, problem: Problem, stages: Sequence[Sequence[Op]]) -> None:
        def slowest_s(ops: Iterable[Op]) -> Number:
            works = (op.work for op in ops if isinstance(op.work, Compute))
            seconds = map(problem.cost.compute_s, works)
            return total(_slowest_member(np.atleast_1d(each)) for each in seconds)

        self.refresh: list[Number] = []
        self.update: list[Number] = []
        self.all_reduce: list[Transfer] = []
        for ops in stages:
            before = list(takewhile(lambda op: not op.chunks, ops))
            after = [op for op in ops[len(before) :] if not op.chunks]
            self.refresh.append(slowest_s(before))
            self.update.append(slowest_s(after))
            reduced = [
                problem.cost.all_reduce(op.work.sizes[0], op.ranks)
                for op in after
                if isinstance(op.work, AllReduce)
            ]
            self.all_reduce.append(reduced[0] if reduced else Transfer(0.0, {}))
        self.link = [
            _handed_on(problem, op.ranks, op.work)
            for ops in stages
            for op in ops
            if isinstance(op.work, Message) and op.chunks > 0
        ]

    @property
    def link_s(self) -> list[Number]:
        return [transfer.alone for transfer in self.link]

    def after_s(self, compute_slowdown: Number) -> list[Number]:
        """Seconds from the end of a stage's backward pass to the end of its step."""
        return [
            ring.alone + update * compute_slowdown
            for ring, update in zip(self.all_reduce, self.update, strict=True)
        ]


def predict(problem: Problem, program: Program) -> Prediction:
    """One epoch of the pipeline; chunks in the order in which their arrays have them."""
    assert program.steps == 1
    cost, k, step = problem.cost, len(program.chunks(0)), program.step(0)
    stages = list(by_ranks(step).values())
    ops = {op.kind: op for op in step}
    counted = Counter(op.kind for op in step)
    costs, pricing = _StageCosts(problem, stages), _Pricing(problem, stages, k)
    alone = pricing.passes()
    uncontended_s = _flow_shop_s(alone, costs)
    computed = _computed(alone, costs)  # seconds of each stage's members
    each_rank = np.concatenate([np.atleast_1d(seconds) for seconds in computed], axis=-1)
    messages = _message_ports(costs, k)
    passes, epoch = _contended(cost, pricing, costs, alone, uncontended_s)
    exchanged = [  # of each stage
        f.exchanged + b.exchanged + ring.alone
        for f, b, ring in zip(passes["f"], passes["b"], costs.all_reduce, strict=True)
    ]
    exchanged_s = largest(exchanged)

    ports = cost.cores.core_busy_s(each_rank)
    if cost.cores.full_load_slowdown > 1:  # cores are idle only while someone waits for a transfer
        waits = exchanged_s + 2 * k * largest(costs.link_s)
        epoch = np.maximum(uncontended_s, np.minimum(epoch, busiest(ports) + waits))
    for more in (messages, *(one.ports for way in WAYS for one in passes[way])):
        add(ports, more)
    epoch = np.maximum(busiest(ports), epoch)

    busy_s = np.minimum(
        largest(map(_slowest_member, computed)) * cost.cores.full_load_slowdown, epoch
    )
    # The first chunk's way through the pipeline and back is exposed. Later chunks' transfers hide
    # behind computation.
    moving_s = np.minimum(2.0 * total(costs.link_s) + exchanged_s, np.maximum(epoch - busy_s, 0.0))
    return Prediction(
        epoch,
        busy_s,
        moving_s,
        np.maximum(epoch - busy_s - moving_s, 0.0),
        *bytes_of(problem, [(ops[kind], times) for kind, times in counted.items()]),
        program.setup_bytes,
        _by_operation(cost, costs, passes, k),
    )


def _computed(passes: Passes, costs: _StageCosts) -> list[Number]:
    """Of each stage, the seconds that its members compute in a step [.., g]."""
    return [
        total([*f.computed.values(), *b.computed.values()]) + refresh + update
        for f, b, refresh, update in zip(
            passes["f"], passes["b"], costs.refresh, costs.update, strict=True
        )
    ]


def _message_ports(costs: _StageCosts, chunks: int) -> PortSeconds:
    """How long ports are busy with messages, which other stages' computation may overlap: chunks
    handed on, forward and backward, and all-reduces at the end of a step [s]."""
    ports: dict[str, np.ndarray] = {}
    for ring in costs.all_reduce:
        add(ports, ring.ports)
    for onward in costs.link:
        add(ports, onward.ports, 2 * chunks)
    return ports


def _flow_shop_s(passes: Passes, costs: _StageCosts, compute_slowdown: Number = 1.0) -> Number:
    """When the last stage has ended its step: all chunks forward, all backward, all-reduce, update.

    stage 0   refresh |c0|c1|c2|                    |c2|c1|c0|after|
    stage 1              |c0|c1|c2|        |c2|c1|c0|after|
    stage 2                 |c0|c1|c2|c2|c1|c0|after|
    """
    link_s, after_s = costs.link_s, costs.after_s(compute_slowdown)
    stages = range(len(costs.update))
    ready: Number = 0.0  # when each chunk reaches the stage
    forward_end: list[np.ndarray] = []
    for stage in stages:
        ready, end = _through_stage(
            ready,
            passes["f"][stage].chunks,
            costs.refresh[stage] * compute_slowdown,
            link_s[stage] if stage + 1 < len(stages) else None,
        )
        forward_end.append(end)
    ready = 0.0
    backward_end: list[np.ndarray] = []  # of the last stage first
    for stage in reversed(stages):
        ready, end = _through_stage(
            ready,
            passes["b"][stage].chunks,
            forward_end[stage],
            link_s[stage - 1] if stage else None,
        )
        backward_end.append(end)
    return largest(
        (end.item() if end.size == 1 else end) + after
        for end, after in zip(reversed(backward_end), after_s, strict=True)
    )


def _through_stage(
    ready: Number, chunks: _ChunkTimes, start: Number, link: Number | None
) -> tuple[Number, np.ndarray]:
    """Chunks in order through one stage, which is free from `start` on, and over its link.

    Returns when each chunk reaches the next stage [chunks, problems, 1], and when the stage is done
    [problems, 1]. A stage that never waits ends chunk k at end(k). Chunk j delays it and all chunks
    after it by how much later than begin(j) it can begin:

        ends(k) = max_{j <= k} (max(ready(j), start) - begin(j)) + end(k)
    """
    delays = np.maximum(ready, start) - chunks.begin
    ends = _running(np.maximum, delays) + chunks.end
    if link is not None:  # the same, with link seconds for each chunk
        sent = np.arange(1, len(ends) + 1)[:, None, None] * link
        ready = _running(np.maximum, ends - (sent - link)) + sent
    return ready, ends[-1]


def _contended(
    cost: Cost, pricing: _Pricing, costs: _StageCosts, alone: Passes, uncontended_s: Number
) -> tuple[Passes, Number]:
    """Passes and epoch with contention.

    Exchanges of different stages share ports. Ranks that share CPU cores are taken to compute all
    at once.
    """
    exchange_slowdown = _port_sharing(alone, uncontended_s)
    ports_shared = any(np.any(slowdown > 1) for slowdown in exchange_slowdown)
    if not ports_shared and cost.cores.full_load_slowdown == 1:
        return alone, uncontended_s
    passes = pricing.passes(exchange_slowdown, cost.cores.full_load_slowdown)
    return passes, _flow_shop_s(passes, costs, cost.cores.full_load_slowdown)


def _port_sharing(passes: Passes, epoch: Number) -> list[Number]:
    """How many times as long each stage's exchanges take because other stages use its ports.

    Others use a port for a share of the epoch, and leave half of its bandwidth then. CPU cores are
    no such port: computation takes most of them.
    """
    of_stage: list[dict[str, np.ndarray]] = [{} for _ in passes["f"]]
    of_all: dict[str, np.ndarray] = {}
    for way in passes.values():
        for ports, one in zip(of_stage, way, strict=True):
            links = {kind: seconds for kind, seconds in one.ports.items() if kind != "cores"}
            add(ports, links)
            add(of_all, links)
    slowdowns: list[Number] = []
    for ports in of_stage:
        shared = {kind: seconds * (of_all[kind] - seconds) for kind, seconds in ports.items()}
        slowdowns.append(1.0 + busiest(shared) / np.maximum(busiest(ports) * epoch, 1e-30))
    return slowdowns


def _by_operation(cost: Cost, costs: _StageCosts, passes: Passes, chunks: int) -> dict[str, Number]:
    """Seconds of each kind of operation, in the stage that takes longest for it."""
    full_load = cost.cores.full_load_slowdown
    computed: dict[str, list[Number]] = {}
    for way in WAYS:
        for one in passes[way]:
            for op, seconds in one.computed.items():
                computed.setdefault(op, []).append(_slowest_member(seconds) * full_load)
    by_op = {
        **{op: largest(seconds) for op, seconds in computed.items()},
        "history": largest(costs.refresh) * full_load,
        "update": largest(costs.update) * full_load,
        "pipeline": 2 * chunks * largest(costs.link_s),
    }
    if any(ring.ports for ring in costs.all_reduce):
        by_op |= {f"halo:{way}": largest(one.exchanged for one in passes[way]) for way in WAYS}
        by_op["all_reduce"] = largest(ring.alone for ring in costs.all_reduce)
    return by_op


# -- every stage's passes ------------------------------------------------------------------------


class _ComputeTimes(NamedTuple):
    """Computation of all chunks: of each on its slowest member [.., chunks], and of each member for
    all chunks [.., g] [s]."""

    chunks: Number
    members: Number


class _Pricing:
    """Prices stages' passes, and every distinct thing once.

    Stages that are alike share the work of their operations. Groups that sit alike share the
    seconds of their exchanges. Stages that are alike in both share all their seconds. Ports differ
    in any case: each group has its own.
    """

    def __init__(self, problem: Problem, stages: Sequence[Sequence[Op]], chunks: int) -> None:
        self.cost, self.chunks, self.stages = problem.cost, chunks, stages
        self.groups = [ops[0].ranks for ops in stages]
        self.placed = [_placed(self.cost, group) for group in self.groups]
        self._compute_times: dict[Compute, _ComputeTimes] = {}
        self._exchange_s: dict[tuple[object, Exchange], Number] = {}
        self._port_s: dict[tuple[Group, Exchange], PortSeconds] = {}

    def passes(
        self, exchange_slowdown: Sequence[Number] = (), compute_slowdown: Number = 1.0
    ) -> Passes:
        """Every stage's forward and backward pass, if it never waits.

        `exchange_slowdown`: of each stage, how many times as long its exchanges take (none: 1).
        """
        alike: dict[object, _Pass] = {}
        out: dict[str, list[_Pass]] = {way: [] for way in WAYS}
        for stage, ops in enumerate(self.stages):
            for way, sign in zip(WAYS, (1, -1), strict=True):
                passing = [(_name(op), op.work) for op in ops if op.chunks == sign]
                works = [(name, work) for name, work in passing if isinstance(work, Compute)]
                sent = [work for _, work in passing if isinstance(work, Exchange)]
                slowed = stage if exchange_slowdown else None
                met = (self.placed[stage], slowed) if sent else ()
                key = way, met, *(work for _, work in works), *sent
                if key not in alike:
                    computing = [(name, self._compute(work)) for name, work in works]
                    slowdown = exchange_slowdown[stage] if exchange_slowdown else 1.0
                    exchanging = [self._exchange(stage, each) * slowdown for each in sent]
                    alike[key] = _Pass(
                        _unhindered(
                            total(each.chunks * compute_slowdown for _, each in computing)
                            + total(exchanging),
                            way,
                        ),
                        {
                            name: total(each.members for op, each in computing if op == name)
                            for name, _ in computing
                        },
                        total(map(_sum_of_chunks, exchanging)),
                        {},
                    )
                out[way].append(replace(alike[key], ports=self._ports(stage, sent)))
        return out

    def _compute(self, work: Compute) -> _ComputeTimes:
        if work not in self._compute_times:
            members = len(self.groups[0])
            seconds = self.cost.compute_s(work)
            self._compute_times[work] = _slowest_and_each(seconds, (self.chunks, members))
        return self._compute_times[work]

    def _exchange(self, stage: int, sent: Exchange) -> Number:
        """Seconds of each chunk's exchange [.., chunks]."""
        key = self.placed[stage], sent
        if key not in self._exchange_s:
            chunks, group = list(map(Content, sent.nbytes)), self.groups[stage]
            alone = {each: self.cost.exchange(each.array, group).alone for each in set(chunks)}
            self._exchange_s[key] = _side_by_side([alone[each] for each in chunks])
        return self._exchange_s[key]

    def _ports(self, stage: int, exchanges: Sequence[Exchange]) -> PortSeconds:
        """How long ports are busy with all of a pass' exchanges [s]."""
        group, ports = self.groups[stage], dict[str, np.ndarray]()
        for sent in exchanges:
            key = group, sent
            if key not in self._port_s:
                whole = self.cost.exchange(sent.nbytes.sum(0), group, self.chunks)
                self._port_s[key] = whole.ports
            add(ports, self._port_s[key])
        return ports


def _name(op: Op) -> str:
    """By which seconds are reported; chunks' layers are not apart."""
    return f"{op.op}:{op.way}" if op.way else op.op


def _placed(cost: Cost, group: Group) -> object:
    """Equal for groups whose members sit alike: in the same servers, islands, .. of theirs."""
    numbered = [np.unique(place[list(group)], return_inverse=True)[1] for place in cost.places]
    return tuple(np.concatenate(numbered).tolist())


def _unhindered(seconds: Number, way: str) -> _ChunkTimes:
    """Begin and end of chunks [.., chunks] one after the other, the last one first if backward."""
    in_order = np.atleast_2d(seconds)
    if way == "b":
        in_order = in_order[..., ::-1]
    each = np.ascontiguousarray(in_order.T)[..., None]
    end = _running(np.add, each.copy())
    return _ChunkTimes(end - each, end)


def _slowest_and_each(seconds: Number, shape: tuple[int, ...]) -> _ComputeTimes:
    """From the seconds of sub-chunks [.., chunks * g]; `shape` is (chunks, g)."""
    if shape[1] == 1:
        return _ComputeTimes(seconds, _sum_of_chunks(seconds))
    by_member = np.reshape(seconds, (*np.shape(seconds)[:-1], *shape))
    return _ComputeTimes(by_member.max(-1), by_member.sum(-2))


def _handed_on(problem: Problem, group: Group, message: Message) -> Transfer:
    """The mean chunk from a stage to the next, from all members at once.

    An empty sub-chunk is not sent.
    """
    ranks, nbytes = np.array(group), np.rint(message.nbytes.mean(0))
    latencies, ports = problem.cost.sends(ranks, ranks + message.distance, nbytes)
    return Transfer(_slowest_member(latencies * (message.nbytes > 0).mean(0)), ports)


def _side_by_side(values: Sequence[Number]) -> Number:
    """Numbers, or arrays [problems, 1], as one array [chunks] or [problems, chunks]."""
    if any(np.ndim(value) for value in values):
        return np.concatenate(np.broadcast_arrays(*values), axis=-1)
    return np.array(values)


def _running(combine: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Each of `values` [chunks, problems, 1] combined with all before it, in place.

    NumPy's own `accumulate` goes number by number, which is slow for many problems.
    """
    if values[0].size < MANY:
        return np.asarray(combine.accumulate(values, out=values))
    for before, value in pairwise(values):
        combine(before, value, out=value)
    return values


def _sum_of_chunks(seconds: Number) -> Number:
    """[.., chunks] -> [.., 1], or a number for one problem."""
    out: Number = np.sum(seconds, axis=-1, keepdims=np.ndim(seconds) > 1)
    return out


def _slowest_member(seconds: Number) -> Number:
    """[.., g] -> [.., 1], or a number for one problem."""
    out: Number = np.max(seconds, axis=-1, keepdims=np.ndim(seconds) > 1)
    return out
