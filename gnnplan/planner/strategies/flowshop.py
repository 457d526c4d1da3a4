"""A pipeline as a flow shop: how long chunks take through its stages, and which layers make the stages alike.

    stage 0  |c0|c1|c2|              a chunk enters a stage when it has arrived there, the stage's last chunk has left,
    link       |c0|c1|c2|            and leaves when its own work is done; links work the same way
    stage 1       |c0|c1|c2|
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from gnnplan.planner.chunks import ChunkFacts
from gnnplan.planner.cost import Number, Transfer
from gnnplan.planner.job import Job
from gnnplan.planner.places import Port
from gnnplan.planner.schedule import Send
from gnnplan.planner.strategies.strategy import Prediction

if TYPE_CHECKING:
    from gnnplan.planner.strategies.gnnpipe import GNNPipe

ROUNDS = 4  # until ranks that share cores slow each other down as much as they meet
MANY = 200  # jobs, from which on it is faster to go through the chunks one by one
Both = tuple[Number, Number]  # seconds of each chunk's slowest member [.., K], and of each member [.., g]
Alone = tuple[np.ndarray, np.ndarray]  # begin and end of each chunk in a stage that never waits [K, jobs, 1] [s]


@dataclass(frozen=True)
class _Way:
    """A stage's forward or backward over all chunks; stages that are alike have the same arrays."""

    alone: Alone  # exchanges included; chunks in the order in which they come
    members: Number  # computation of each member [.., g]
    exchanged: Number  # exchanges
    busy: Mapping[Port, Number]  # by them


def predict(pipe: GNNPipe, job: Job) -> Prediction:
    """A flow shop: chunk k leaves a stage or link when it has arrived, its predecessor has left and its own work is
    done; in the hybrid that is the slowest member's between one exchange and the next. For equal chunks this is
    (K + stages - 1) slots forward and as many backward. Chunks in METIS' order. Ranks that share cores meet others at work there, at
    random; what passes a port, these cores among them, bounds an epoch from below."""
    assert pipe.stages is not None and pipe.chunks is not None
    cost, k, b, ranks = job.cost, pipe.chunks, job.model.itemsize, range(pipe.stages)
    kept = max(pipe.kept(job))
    refresh = [cost.compute_s(pipe.refresh_work(job, s, kept)) for s in ranks]
    update = [cost.compute_s(job.model.update(pipe.weights(job, s))) for s in ranks]
    reduced = [cost.all_reduce(pipe.weights(job, s) * b, pipe.group(job, s)) for s in ranks]
    sent = [_handed_on(pipe, job, s) for s in ranks[:-1]]
    links = [transfer.alone for transfer in sent]  # seconds of the mean chunk to the next stage
    after = [ring.alone + last for ring, last in zip(reduced, update, strict=True)]
    ways = _ways(pipe, job)
    epoch = alone = _last(ways, refresh, links, after)
    slower = _beside_others(ways, epoch)
    own = [ways["f"][s].members + ways["b"][s].members + refresh[s] + update[s] for s in ranks]  # of each member [.., g]
    computed = np.concatenate([np.atleast_1d(seconds) for seconds in own], axis=-1)
    crowd: Number = 1.0
    messages: dict[Port, Number] = {}  # what keeps ports busy beside computation
    for transfer, times in [*((ring, 1) for ring in reduced), *((onward, 2 * k) for onward in sent)]:
        transfer.load(messages, times)
    copied = cost.copied(messages)
    for _ in range(ROUNDS if cost.cores else 1):
        crowd = cost.met(computed, crowd, epoch, copied)
        if np.any(crowd > 1) or any(np.any(factor > 1) for factor in slower):
            ways = _ways(pipe, job, slower, crowd)
            epoch = _last(ways, [seconds * crowd for seconds in refresh], links, after)
    exchanged = {way: [w.exchanged for w in ways[way]] for way in ways}
    met = reduce(np.maximum, [f + b + ring.alone for f, b, ring in zip(*exchanged.values(), reduced, strict=True)])
    ports = cost.filled(computed)  # seconds that each is busy
    if cost.crowd > 1:  # cores are idle only while someone waits
        waits = met + 2 * k * reduce(np.maximum, links, 0.0)
        epoch = np.maximum(alone, np.minimum(epoch, reduce(np.maximum, ports.values()) + waits))
    for busy in (messages, *(way.busy for way in ways["f"] + ways["b"])):
        Transfer(0.0, busy).load(ports)
    epoch = reduce(np.maximum, ports.values(), epoch)
    busy_s = np.minimum(reduce(np.maximum, map(_largest, own)) * cost.crowd, epoch)
    # the first chunk's way through the pipeline, twice; the rest hides behind computation, and so may some of this
    moving = np.minimum(2.0 * sum(links) + met, np.maximum(epoch - busy_s, 0.0))
    by_op = {op: reduce(np.maximum, [_largest(w.members) for w in ways[way]]) * cost.crowd
             for op, way in (("forward", "f"), ("backward", "b"))}  # fmt: skip
    by_op |= {op: reduce(np.maximum, of_each) * cost.crowd for op, of_each in (("history", refresh), ("update", update))}
    by_op["pipeline"] = 2 * k * reduce(np.maximum, links, 0.0)
    if pipe.members(job) > 1:
        by_op |= {f"halo:{way}": sum(seconds) for way, seconds in exchanged.items()}
        by_op["all_reduce"] = reduce(np.maximum, [transfer.alone for transfer in reduced])
    nbytes, by_link = pipe.nbytes(job)
    once = int(pipe.inputs_sent(job).sum())
    return Prediction(epoch, busy_s, moving, np.maximum(epoch - busy_s - moving, 0.0), nbytes, by_link, once, by_op)


def _last(ways: Mapping[str, list[_Way]], refresh: list[Number], links: list[Number], after: list[Number]) -> Number:
    """When the last stage has all chunks behind it, forward and backward, and what comes after them [s]."""
    stages = range(len(after))
    ready: Number = 0.0  # when each chunk reaches the stage
    ends: list[np.ndarray] = []
    for stage in stages:
        ready, end = _through(ready, ways["f"][stage].alone, refresh[stage], links[stage] if stage + 1 < len(after) else None)
        ends.append(end)
    ready = 0.0
    for stage in reversed(stages):
        ready, ends[stage] = _through(ready, ways["b"][stage].alone, ends[stage], links[stage - 1] if stage else None)
    several = any(map(np.ndim, [*refresh, *links, *(way.exchanged for way in ways["f"])]))  # clusters, else a number
    return reduce(np.maximum, [(end if several else end.item()) + more for end, more in zip(ends, after, strict=True)])


def _beside_others(ways: Mapping[str, list[_Way]], epoch: Number) -> list[Number]:
    """How many times as long each stage's exchanges take because other stages' pass the same ports: those are there for a share of the
    epoch, and a port's bandwidth is then halved. Shared cores are no such port: computation takes most of them (`Cost.filled`)."""
    stages: list[dict[Port, Number]] = [{} for _ in ways["f"]]
    everyone: dict[Port, Number] = {}
    for of_stages in ways.values():
        for mine, way in zip(stages, of_stages, strict=True):
            for port, seconds in way.busy.items():
                if port[0] != "cores":
                    mine[port], everyone[port] = mine.get(port, 0.0) + seconds, everyone.get(port, 0.0) + seconds
    out: list[Number] = []
    for mine in stages:
        met = reduce(np.maximum, [seconds * (everyone[port] - seconds) for port, seconds in mine.items()], 0.0)
        out.append(1.0 + met / np.maximum(reduce(np.maximum, mine.values(), 0.0) * epoch, 1e-30))
    return out


def _ways(pipe: GNNPipe, job: Job, slower: Sequence[Number] = (), crowd: Number = 1.0) -> dict[str, list[_Way]]:
    """Every stage forward ('f') and backward ('b'), were it never to wait. Pieces that are alike share their work, and groups that sit
    alike the seconds of their exchanges, stages that are alike in both all their seconds; but each group fills ports of its own.
    `slower`: of each stage, how many times as long its exchanges take; `crowd`: and computation."""
    assert pipe.stages is not None
    model, facts, cost = job.model.aggregating_first, pipe.facts(job), job.cost
    sends = {"f": facts.sends, "b": facts.sends.transpose(0, 2, 1)}
    computed: dict[object, tuple[Both, Both]] = {}
    moved: dict[object, Number] = {}
    known: dict[object, tuple[Alone, Number, Number]] = {}
    out: dict[str, list[_Way]] = {"f": [], "b": []}
    for stage in range(pipe.stages):
        group, pieces = pipe.group(job, stage), pipe.pieces(job, stage)
        at = [np.unique(place[list(group)], return_inverse=True)[1] for place in cost.places]
        alike = tuple(np.concatenate(at).tolist())
        crossing = [pipe.exchanged(job, piece) * model.itemsize for piece in pieces]
        kinds = [(piece[0] in (0, 1), len(model.layers) in piece, len(piece), tuple(model.layers[layer - 1] for layer in piece if layer))
                 for piece in pieces]  # fmt: skip
        for kind, piece in zip(kinds, pieces, strict=True):
            if kind not in computed:
                each_way = [cost.compute_s(work) for work in pipe.work(job, piece, facts)]
                forward, backward = (_slowest_and_each(seconds, facts.rows.shape) for seconds in each_way)
                computed[kind] = forward, backward
        for number, way in enumerate("fb"):
            width, times = sum(crossing), sum(map(bool, crossing))
            through = cost.exchange(sends[way].sum(0) * width, group, times * len(sends[way])) if width else Transfer(0.0, {})
            key = (way, tuple(kinds), (alike, stage if slower else None) if width else None)
            if key not in known:
                seconds = []
                for each in filter(None, crossing):
                    if (alike, way, each) not in moved:
                        moved[alike, way, each] = _columns([cost.exchange(rows * each, group).alone for rows in sends[way]])
                    seconds.append(moved[alike, way, each] * (slower[stage] if slower else 1.0))
                both = [computed[kind][number] for kind in kinds]
                chunks: Number = sum([slowest * crowd for slowest, _ in both] + seconds)
                known[key] = _alone(chunks, way), sum(each for _, each in both), sum(map(_sum, seconds))
            out[way].append(_Way(*known[key], through.busy))
    return out


def _slowest_and_each(seconds: Number, shape: tuple[int, ...]) -> Both:
    """From sub-chunks [.., K g]: of each chunk its slowest member's [.., K], and each member's of all chunks [.., g]."""
    if shape[1] == 1:
        return seconds, _sum(seconds)
    seconds = np.reshape(seconds, (*np.shape(seconds)[:-1], *shape))
    return seconds.max(-1), seconds.sum(-2)


def _columns(values: list[Number]) -> Number:
    """Numbers, or arrays [jobs, 1], side by side."""
    return np.concatenate(np.broadcast_arrays(*values), axis=-1) if any(map(np.ndim, values)) else np.array(values)


def _handed_on(pipe: GNNPipe, job: Job, stage: int) -> Transfer:
    """The mean chunk from a stage to the next, member to member at once; an empty sub-chunk is not sent."""
    g, row, rows = pipe.members(job), pipe.boundary(job, stage) * job.model.itemsize, pipe.facts(job).rows
    busy: dict[Port, Number] = {}
    latency: Number = 0.0
    for rank, mean, sent in zip(pipe.group(job, stage), rows.mean(0), (rows > 0).mean(0), strict=True):
        one = job.cost.send(rank, Send(rank + g, round(mean * row)))
        latency = np.maximum(latency, one.latency * sent)
        one.load(busy)
    return Transfer(latency, busy)


def layer_seconds(pipe: GNNPipe, job: Job) -> list[float]:
    """Forward and backward of each layer on the mean sub-chunk, its exchanges included (alike in all stages) [s]."""
    model, facts = job.model.aggregating_first, pipe.facts(job)
    sums = [float(a.sum()) / facts.rows.size for a in (facts.rows, facts.edges, facts.sources, facts.numbers, facts.sends)]
    mean = ChunkFacts(*(np.full((1,) * axes, one) for axes, one in zip((2, 2, 2, 2, 3), sums, strict=True)))
    group, sent = pipe.group(job, 0), facts.sends.mean(0)
    alike: dict[object, float] = {}
    out = []
    for layer in range(1, len(model.layers) + 1):
        key = (layer == 1, layer == len(model.layers), model.layers[layer - 1])
        if key not in alike:
            pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
            works = [work for piece in pieces for work in pipe.work(job, piece, mean)]
            width = pipe.exchanged(job, (layer,)) * model.itemsize
            moving = [job.cost.exchange(way * width, group).alone for way in (sent, sent.T)] if width and sent.any() else []
            alike[key] = float(sum(np.sum(job.cost.compute_s(work)) * job.cost.crowd for work in works) + sum(moving))
        out.append(alike[key])
    return out


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, such that the slowest stage is as fast as can be; beyond that, near even shares.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    total, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def starts(limit: float) -> list[int]:
        """Where each stage begins if all stages, from the last on, are as long as the limit allows."""
        out = [layers]
        for stage in reversed(range(stages)):
            out.append(max(int(np.searchsorted(total, total[out[-1]] - limit)), stage))
        return out[::-1]

    low, high = max(seconds) * (1 - 1e-9), float(total[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if starts(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = starts(limit), [0]
    for stage in range(1, stages):
        reach = min(int(np.searchsorted(total, total[ends[-1]] + limit, side="right")) - 1, layers - (stages - stage))
        even = int(np.searchsorted(total, total[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), reach))
    return tuple(b - a for a, b in pairwise([*ends, layers]))


def _alone(seconds: Number, way: str) -> Alone:
    """Of chunks [.., K], the last one first where they go backward."""
    first = np.ascontiguousarray(np.atleast_2d(seconds if way == "f" else seconds[..., ::-1]).T)[..., None]
    end = _running(np.add, first.copy())
    return end - first, end


def _through(ready: Number, alone: Alone, start: Number, link: Number | None) -> tuple[Number, np.ndarray]:
    """Chunks in order through one stage, free from `start` on, and its link: arrival at the next [K, jobs, 1], end of the stage [jobs, 1].

    Chunk k ends after the largest delay of a chunk j <= k.
    """
    begin, end = alone
    ends = _running(np.maximum, np.maximum(ready, start) - begin) + end
    if link is not None:
        sent = np.arange(1, len(end) + 1)[:, None, None] * link
        ready = _running(np.maximum, ends - (sent - link)) + sent
    return ready, ends[-1]


def _running(combine: np.ufunc, values: np.ndarray) -> np.ndarray:
    """Each of `values` [K, jobs, 1] combined with all before it, in place. NumPy's own way goes number by number."""
    if values[0].size < MANY:
        return np.asarray(combine.accumulate(values, out=values))
    for before, value in pairwise(values):
        combine(before, value, out=value)
    return values


def _sum(values: Number) -> Number:
    return values.sum(-1, keepdims=values.ndim > 1)


def _largest(values: Number) -> Number:
    return values.max(-1, keepdims=values.ndim > 1)
