"""GNNPipe's epoch in closed form: a flow shop of chunks through stages and links.

    stage 0  |c0|c1|c2|          A chunk enters a stage when it has arrived there and the chunk
    link        |c0|c1|c2|       before it has left. It leaves when its own work is done. Links
    stage 1        |c0|c1|c2|    work the same way.

    predict()
      1  _StageCosts    what every stage does once per step, and its links
         _all_passes    every stage's forward and backward pass, if it never had to wait
      2  _flow_shop_s   the epoch, if stages waited for chunks only
      3  _contended     stages' exchanges share ports, and ranks share CPU cores: both take longer
      4  bounds         no epoch is shorter than its busiest port or core is busy
      5  shares         of computation, communication and waiting

For equal chunks step 2 gives (K + stages - 1) slots forward and as many backward (GNNPipe, arXiv
2308.10087, Sec. 3.2). In the hybrid a chunk takes its slowest member's time between one exchange
and the next. The file also divides layers among stages (`layer_seconds`, `balance`).

pipeline.py says which stage does what with a chunk; planner/cluster/cost.py turns it into seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.chunks import ChunkFacts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.arithmetic import largest, total
from gnnplan.planner.strategies.base import Prediction
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Send

ROUNDS = 4  # of the fixed point of epoch and core sharing
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
    computed: Number  # seconds of each member [.., g]
    exchanged: Number  # seconds of halo exchanges
    busy: Mapping[Port, Number]  # seconds of each port, by the exchanges


Passes = Mapping[str, Sequence[_Pass]]  # 'f' and 'b' -> of each stage


class _StageCosts:
    """What each stage does once per step, and how its chunks reach the next stage.

    refresh, update: seconds of the slowest member. all_reduce: of the stage's gradients. link: of
    the mean chunk to the next stage.
    """

    def __init__(self, pipe: Pipeline, problem: Problem) -> None:
        assert pipe.stages is not None
        cost, stages = problem.cost, range(pipe.stages)
        kept, itemsize = max(pipe.kept(problem)), problem.model.itemsize
        weights = [pipe.weights(problem, stage) for stage in stages]
        self.refresh = [cost.compute_s(pipe.refresh_work(problem, s, kept)) for s in stages]
        self.update = [cost.compute_s(problem.model.update(count)) for count in weights]
        self.all_reduce = [
            cost.all_reduce(count * itemsize, pipe.group(problem, stage))
            for stage, count in zip(stages, weights, strict=True)
        ]
        self.link = [_handed_on(pipe, problem, stage) for stage in stages[:-1]]

    @property
    def link_s(self) -> list[Number]:
        return [transfer.alone for transfer in self.link]

    @property
    def after_s(self) -> list[Number]:
        """Seconds from the end of a stage's backward pass to the end of its step."""
        return [
            ring.alone + update for ring, update in zip(self.all_reduce, self.update, strict=True)
        ]


def predict(pipe: Pipeline, problem: Problem) -> Prediction:
    """One epoch of the pipeline in closed form; chunks in METIS' order."""
    assert pipe.chunks is not None
    cost, k = problem.cost, pipe.chunks
    costs, alone = _StageCosts(pipe, problem), _all_passes(pipe, problem)
    uncontended_s = _flow_shop_s(alone, costs)
    computed = _computed(alone, costs)  # seconds of each stage's members
    each_rank = np.concatenate([np.atleast_1d(seconds) for seconds in computed], axis=-1)
    messages = _message_ports(costs, k)
    passes, epoch = _contended(pipe, problem, costs, alone, uncontended_s, each_rank, messages)
    exchanged = [  # of each stage
        f.exchanged + b.exchanged + ring.alone
        for f, b, ring in zip(passes["f"], passes["b"], costs.all_reduce, strict=True)
    ]
    exchanged_s = largest(exchanged)

    ports = cost.core_busy_s(each_rank)
    if cost.full_load_slowdown > 1:  # cores are idle only while someone waits for a transfer
        waits = exchanged_s + 2 * k * largest(costs.link_s)
        epoch = np.maximum(uncontended_s, np.minimum(epoch, largest(ports.values()) + waits))
    for busy in (messages, *(one.busy for way in WAYS for one in passes[way])):
        Transfer(0.0, busy).load(ports)
    epoch = largest(ports.values(), epoch)

    busy_s = np.minimum(largest(map(_slowest_member, computed)) * cost.full_load_slowdown, epoch)
    # The first chunk's way through the pipeline and back is exposed. Later chunks' transfers hide
    # behind computation.
    moving_s = np.minimum(2.0 * total(costs.link_s) + exchanged_s, np.maximum(epoch - busy_s, 0.0))
    nbytes, by_link = pipe.nbytes(problem)
    return Prediction(
        epoch,
        busy_s,
        moving_s,
        np.maximum(epoch - busy_s - moving_s, 0.0),
        nbytes,
        by_link,
        int(pipe.inputs_sent(problem).sum()),
        _by_operation(pipe, problem, costs, passes),
    )


def _computed(passes: Passes, costs: _StageCosts) -> list[Number]:
    """Of each stage, the seconds that its members compute in a step [.., g]."""
    return [
        f.computed + b.computed + refresh + update
        for f, b, refresh, update in zip(
            passes["f"], passes["b"], costs.refresh, costs.update, strict=True
        )
    ]


def _message_ports(costs: _StageCosts, chunks: int) -> dict[Port, Number]:
    """How long ports are busy with messages, which other stages' computation may overlap: chunks
    handed on, forward and backward, and all-reduces at the end of a step [s]."""
    ports: dict[Port, Number] = {}
    for ring in costs.all_reduce:
        ring.load(ports)
    for onward in costs.link:
        onward.load(ports, 2 * chunks)
    return ports


def _flow_shop_s(passes: Passes, costs: _StageCosts, compute_slowdown: Number = 1.0) -> Number:
    """When the last stage has ended its step: all chunks forward, all backward, all-reduce, update.

    stage 0   refresh |c0|c1|c2|                    |c2|c1|c0|after|
    stage 1              |c0|c1|c2|        |c2|c1|c0|after|
    stage 2                 |c0|c1|c2|c2|c1|c0|after|
    """
    link_s, after_s, stages = costs.link_s, costs.after_s, range(len(costs.update))
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
    seconds = [*costs.refresh, *link_s, *(one.exchanged for one in passes["f"])]
    several = any(np.ndim(each) for each in seconds)  # problems at once
    return largest(
        (end if several else end.item()) + after
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
    pipe: Pipeline,
    problem: Problem,
    costs: _StageCosts,
    alone: Passes,
    uncontended_s: Number,
    each_rank: np.ndarray,
    messages: Mapping[Port, Number],
) -> tuple[Passes, Number]:
    """Passes and epoch with contention.

    Exchanges of different stages share ports. Ranks on CPUs share cores: how often a rank finds
    others at work depends on how long the epoch is, so a few rounds look for the epoch that agrees
    with itself (mean value analysis, `Cost.core_sharing_slowdown`).
    """
    cost, passes, epoch = problem.cost, alone, uncontended_s
    exchange_slowdown = _port_sharing(alone, uncontended_s)
    ports_shared = any(np.any(slowdown > 1) for slowdown in exchange_slowdown)
    copying_s = cost.copying_s(messages)
    compute_slowdown: Number = 1.0
    for _ in range(ROUNDS if cost.cores else 1):
        compute_slowdown = cost.core_sharing_slowdown(each_rank, compute_slowdown, epoch, copying_s)
        if ports_shared or np.any(compute_slowdown > 1):
            passes = _all_passes(pipe, problem, exchange_slowdown, compute_slowdown)
            epoch = _flow_shop_s(passes, costs, compute_slowdown)
    return passes, epoch


def _port_sharing(passes: Passes, epoch: Number) -> list[Number]:
    """How many times as long each stage's exchanges take because other stages use its ports.

    Others use a port for a share of the epoch, and leave half of its bandwidth then. CPU cores are
    no such port: computation takes most of them.
    """
    of_stage: list[dict[Port, Number]] = [{} for _ in passes["f"]]
    of_all: dict[Port, Number] = {}
    for way in passes.values():
        for ports, one in zip(of_stage, way, strict=True):
            for port, seconds in one.busy.items():
                if port[0] != "cores":
                    ports[port] = ports.get(port, 0.0) + seconds
                    of_all[port] = of_all.get(port, 0.0) + seconds
    slowdowns: list[Number] = []
    for ports in of_stage:
        shared = largest(seconds * (of_all[port] - seconds) for port, seconds in ports.items())
        slowdowns.append(1.0 + shared / np.maximum(largest(ports.values()) * epoch, 1e-30))
    return slowdowns


def _by_operation(
    pipe: Pipeline, problem: Problem, costs: _StageCosts, passes: Passes
) -> dict[str, Number]:
    """Seconds of each kind of operation, in the stage that takes longest for it."""
    assert pipe.chunks is not None
    full_load = problem.cost.full_load_slowdown
    by_op = {
        "forward": largest(_slowest_member(one.computed) for one in passes["f"]) * full_load,
        "backward": largest(_slowest_member(one.computed) for one in passes["b"]) * full_load,
        "history": largest(costs.refresh) * full_load,
        "update": largest(costs.update) * full_load,
        "pipeline": 2 * pipe.chunks * largest(costs.link_s),
    }
    if pipe.members(problem) > 1:
        by_op |= {f"halo:{way}": total(one.exchanged for one in passes[way]) for way in WAYS}
        by_op["all_reduce"] = largest(ring.alone for ring in costs.all_reduce)
    return by_op


# -- every stage's passes ------------------------------------------------------------------------


def _all_passes(
    pipe: Pipeline,
    problem: Problem,
    exchange_slowdown: Sequence[Number] = (),
    compute_slowdown: Number = 1.0,
) -> Passes:
    """Every stage's forward and backward pass, if it never waits.

    `exchange_slowdown`: of each stage, how many times as long its exchanges take (none: 1).
    """
    assert pipe.stages is not None
    pricing = _PassPricing(pipe, problem, exchange_slowdown, compute_slowdown)
    stages = [pricing.passes(stage) for stage in range(pipe.stages)]
    return {way: [passes[way] for passes in stages] for way in WAYS}


class _ComputeTimes(NamedTuple):
    """A piece's computation: of each chunk on its slowest member [.., chunks], and of each member
    for all chunks [.., g] [s]."""

    chunks: Number
    members: Number


class _PassPricing:
    """Prices stages' passes, and every distinct thing once.

    Pieces that are alike share their computation. Groups that sit alike share the seconds of their
    exchanges. Stages that are alike in both share all their seconds. Ports differ in any case: each
    group has its own.
    """

    def __init__(
        self,
        pipe: Pipeline,
        problem: Problem,
        exchange_slowdown: Sequence[Number],
        compute_slowdown: Number,
    ) -> None:
        self.pipe, self.problem, self.cost = pipe, problem, problem.cost
        self.exchange_slowdown, self.compute_slowdown = exchange_slowdown, compute_slowdown
        self.model, self.facts = problem.model.aggregating_first, pipe.facts(problem)
        # rows [chunks, g, g] that members send each other
        self.sends = {"f": self.facts.sends, "b": self.facts.sends.transpose(0, 2, 1)}
        self._compute_times: dict[object, dict[str, _ComputeTimes]] = {}
        self._exchange_s: dict[object, Number] = {}
        self._passes: dict[object, _Pass] = {}

    def passes(self, stage: int) -> dict[str, _Pass]:
        """The stage's forward and backward pass."""
        pieces = self.pipe.pieces(self.problem, stage)
        kinds = tuple(_kind_of(self.model, piece) for piece in pieces)
        # bytes per row that cross before each piece
        row_bytes = [
            self.pipe.exchanged(self.problem, piece) * self.model.itemsize for piece in pieces
        ]
        for kind, piece in zip(kinds, pieces, strict=True):
            if kind not in self._compute_times:
                self._compute_times[kind] = self._compute(piece)
        return {way: self._pass(stage, way, kinds, row_bytes) for way in WAYS}

    def _pass(
        self, stage: int, way: str, kinds: tuple[object, ...], row_bytes: Sequence[int]
    ) -> _Pass:
        widths = [width for width in row_bytes if width]  # of the exchanges
        placed = self._placed(stage)
        key = (
            way,
            kinds,
            (placed, stage if self.exchange_slowdown else None) if widths else None,
        )
        if key not in self._passes:
            slowdown = self.exchange_slowdown[stage] if self.exchange_slowdown else 1.0
            exchanges = [self._exchange(stage, placed, way, width) * slowdown for width in widths]
            computing = [self._compute_times[kind][way] for kind in kinds]
            self._passes[key] = _Pass(
                _unhindered(
                    total(each.chunks * self.compute_slowdown for each in computing)
                    + total(exchanges),
                    way,
                ),
                total(each.members for each in computing),
                total(map(_sum_of_chunks, exchanges)),
                {},
            )
        shared = self._passes[key]
        return _Pass(
            shared.chunks, shared.computed, shared.exchanged, self._ports(stage, way, widths)
        )

    def _compute(self, piece: tuple[int, ...]) -> dict[str, _ComputeTimes]:
        works = self.pipe.work(self.problem, piece, self.facts)
        return {
            way: _slowest_and_each(self.cost.compute_s(work), self.facts.rows.shape)
            for way, work in zip(WAYS, works, strict=True)
        }

    def _exchange(self, stage: int, placed: object, way: str, width: int) -> Number:
        """Seconds of each chunk's exchange, of so many bytes per row [.., chunks]."""
        if (placed, way, width) not in self._exchange_s:
            group = self.pipe.group(self.problem, stage)
            self._exchange_s[placed, way, width] = _side_by_side(
                [self.cost.exchange(rows * width, group).alone for rows in self.sends[way]]
            )
        return self._exchange_s[placed, way, width]

    def _ports(self, stage: int, way: str, widths: Sequence[int]) -> Mapping[Port, Number]:
        """How long ports are busy with all of a pass' exchanges [s]."""
        if not widths:
            return {}
        sends = self.sends[way]
        return self.cost.exchange(
            sends.sum(0) * sum(widths),
            self.pipe.group(self.problem, stage),
            len(widths) * len(sends),
        ).busy

    def _placed(self, stage: int) -> object:
        """Equal for groups whose members sit alike: in the same servers, islands, .. of theirs."""
        group = list(self.pipe.group(self.problem, stage))
        numbered = [np.unique(place[group], return_inverse=True)[1] for place in self.cost.places]
        return tuple(np.concatenate(numbered).tolist())


def _kind_of(model: Model, piece: tuple[int, ...]) -> object:
    """Equal for pieces with equal work."""
    return (
        piece[0] in (0, 1),
        len(model.layers) in piece,
        len(piece),
        tuple(model.layers[layer - 1] for layer in piece if layer),
    )


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


def _handed_on(pipe: Pipeline, problem: Problem, stage: int) -> Transfer:
    """The mean chunk from a stage to the next, from all members at once.

    An empty sub-chunk is not sent.
    """
    g, rows = pipe.members(problem), pipe.facts(problem).rows
    row_bytes = pipe.boundary(problem, stage) * problem.model.itemsize
    busy: dict[Port, Number] = {}
    latency: Number = 0.0
    for rank, mean_rows, share_sent in zip(
        pipe.group(problem, stage), rows.mean(0), (rows > 0).mean(0), strict=True
    ):
        message = problem.cost.send(rank, Send(rank + g, round(mean_rows * row_bytes)))
        latency = np.maximum(latency, message.latency * share_sent)
        message.load(busy)
    return Transfer(latency, busy)


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


# -- layers to stages ----------------------------------------------------------------------------


def layer_seconds(pipe: Pipeline, problem: Problem) -> list[float]:
    """Seconds of each layer, forward and backward, on the mean sub-chunk, exchanges included.

    They do not depend on the stage that a layer is in.
    """
    model, facts = problem.model.aggregating_first, pipe.facts(problem)
    means = [
        float(counts.sum()) / facts.rows.size
        for counts in (facts.rows, facts.edges, facts.sources, facts.numbers, facts.sends)
    ]
    mean = ChunkFacts(
        *(np.full((1,) * axes, one) for axes, one in zip((2, 2, 2, 2, 3), means, strict=True))
    )
    cost, group, sent = problem.cost, pipe.group(problem, 0), facts.sends.mean(0)

    def seconds_of(layer: int) -> float:
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in pipe.work(problem, piece, mean)]
        computing = sum(float(np.sum(cost.compute_s(work))) for work in works)
        width = pipe.exchanged(problem, (layer,)) * model.itemsize
        exchanging = (
            sum(float(cost.exchange(way * width, group).alone) for way in (sent, sent.T))
            if width and sent.any()
            else 0.0
        )
        return computing * cost.full_load_slowdown + exchanging

    alike: dict[object, float] = {}
    out = []
    for layer in range(1, len(model.layers) + 1):
        kind = _kind_of(model, (layer,))
        if kind not in alike:
            alike[kind] = seconds_of(layer)
        out.append(alike[kind])
    return out


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the slowest stage is as fast as possible.

    Of several such divisions it takes the one nearest to equal shares.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    before, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def latest_fill(limit: float) -> list[int]:
        """Where each stage begins if all stages, from the last on, take up to `limit` seconds."""
        out = [layers]
        for stage in reversed(range(stages)):
            out.append(max(int(np.searchsorted(before, before[out[-1]] - limit)), stage))
        return out[::-1]

    # bisect the smallest limit with which the first stage begins at layer 0
    low, high = max(seconds) * (1 - 1e-9), float(before[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if latest_fill(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = latest_fill(limit), [0]
    for stage in range(1, stages):
        furthest = min(
            int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1,
            layers - (stages - stage),
        )
        even = int(np.searchsorted(before, before[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), furthest))
    return tuple(b - a for a, b in pairwise([*ends, layers]))
