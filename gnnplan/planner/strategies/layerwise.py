"""The step that graph parallel and GraNNDis share: layer after layer, all ranks together, over a Layout.

One list of operations per step (`step`) makes the closed form, the bytes and the schedule, so they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np

from gnnplan.planner.cost import Cost, Number, Transfer
from gnnplan.planner.estimate import EstimatedLayout
from gnnplan.planner.gnn import Model
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.places import Port
from gnnplan.planner.schedule import Collective, Compute, Host, Label, Load, Schedule, Task, Work, ring
from gnnplan.planner.specs import HostWork
from gnnplan.planner.strategies.strategy import Prediction

Batches = Sequence[Layout | EstimatedLayout]  # of an epoch; none: one step over the whole layout


@dataclass(frozen=True)
class Op:
    """One operation of all ranks: computation (arrays [ranks]), a load (bytes [ranks]), a sampler's (edges [ranks]), an exchange
    (bytes [ranks, ranks]) or an all-reduce: of `size` bytes by all ranks, or in each of `groups` of its one of
    `sizes`. `ahead`: it may be done before its step (sampling). `idle`: no work, a recorded wait."""

    op: str
    way: str = ""
    layer: int | None = None
    work: Compute | None = None
    loaded: np.ndarray | None = None
    host: tuple[HostWork, np.ndarray] | None = None
    sent: np.ndarray | None = None
    size: int = 0
    groups: tuple[tuple[int, ...], ...] = ()
    sizes: tuple[int, ...] = ()
    ahead: bool = False
    idle: bool = False

    def label(self, step: int) -> Label:
        return Label(self.op, step, self.way, self.layer)


@dataclass(frozen=True)
class Manner:
    """How layers exchange and what they keep: the knobs that graph parallel and GraNNDis share."""

    narrow: bool = False  # multiply before the exchange where that shrinks the rows
    staleness: int = 0  # steps by which halo rows and gradients lag
    smoothing: str = ""  # of stale rows ('f'), gradients ('g') or both
    checkpoint: bool = False  # keep a layer's inputs only and recompute it in the backward pass


def step(job: Job, layout: Layout | EstimatedLayout, how: Manner, batch: bool = False) -> Iterator[Op]:
    """The operations of one step in order; the constant rows of a `batch` are loaded first. Exchanges stand where a synchronous
    rank meets them. Layers that are alike share their work and bytes (the same objects), so that a deep model costs no more to
    predict than its different layers."""
    model, layers = job.model, job.workload.layers
    first: dict[object, int] = {}
    like = {layer: first.setdefault(alike_as(model, layout, layer, how.narrow), layer) for layer in range(1, layers + 1)}
    facts = {layer: layout.facts(layer) for layer in first.values()}
    meets = {layer: layout.meets(layer) for layer in first.values()}

    @cache
    def sent(layer: int, way: str) -> np.ndarray | None:
        """Bytes [ranks, ranks] of the layer's exchange, if it has one."""
        rows = facts[layer].sends
        if layer <= model.first_varying or not meets[layer]:
            return None
        if way == "b" and isinstance(layout, EstimatedLayout):  # as much there as back
            return sent(layer, "f")
        return np.asarray((rows if way == "f" else rows.T) * (model.exchanged_width(layer, how.narrow) * model.itemsize))

    @cache
    def work(layer: int, way: str) -> Compute:
        """Of the layer, and of what an overlapped exchange takes from it."""
        moved = sent(layer, way) if how.staleness else None
        return alone(layer, way) + Compute(beside=0.0 if moved is None else np.maximum(moved.sum(1), moved.sum(0)))

    def alone(layer: int, way: str) -> Compute:
        """Of the layer, and of the next one's projection if that is done here. A backward pass from checkpoints starts with the
        forward's work."""
        f, at = facts[layer], 0 if way == "f" else 1
        total = (model.forward, model.backward)[at](layer, f.rows, f.sources, f.edges, how.narrow)
        if how.narrow:
            total = total + model.project(layer + 1, f.rows)[at]
        return total + alone(layer, "f") if how.checkpoint and way == "b" else total

    def moments(layer: int, way: str) -> Iterator[Op]:
        """Batch norm's moments before the layer (L + 1: the decoder), and their gradient after it, summed over ranks."""
        if job.ranks > 1 and (numbers := model.moments(layer)):
            yield Op("moments", way, layer, size=numbers * model.itemsize)

    if batch:
        yield Op("load", loaded=loaded_bytes(job, layout))
    encode = model.encode(local_rows(layout, 0)) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0])
    for layer in range(1, layers + 1):
        yield from moments(layer, "f")
        if (moved := sent(like[layer], "f")) is not None:
            yield Op("halo", "f", layer, sent=moved)
        yield Op("forward", layer=layer, work=work(like[layer], "f"))
    forward, backward = model.finish(facts[like[layers]].rows)
    yield from moments(layers + 1, "f")
    yield Op("loss", work=forward + backward)
    yield from moments(layers + 1, "b")
    for layer in range(layers, 0, -1):
        yield Op("backward", layer=layer, work=work(like[layer], "b"))
        if (moved := sent(like[layer], "b")) is not None:
            yield Op("halo", "b", layer, sent=moved)
        yield from moments(layer, "b")
    if encode:
        yield Op("encode", "b", work=encode[1])
    if job.ranks > 1:
        yield Op("all_reduce", size=model.weights * model.itemsize)
    yield Op("update", work=model.update(model.weights))


def alike_as(model: Model, layout: Layout | EstimatedLayout, layer: int, narrow: bool) -> object:
    """Equal for layers with equal work and bytes."""
    following = model.layers[layer] if narrow and layer < len(model.layers) else None
    return model.layers[layer - 1], following, layout.kind(layer), layer <= max(model.first_varying, 1)


def setup(job: Job, layout: Layout | EstimatedLayout) -> Iterator[Op]:
    """Exchanges done once: features of recomputed rows, then the halo of constant inputs."""
    preloaded = layout.preloaded()
    if preloaded.any():
        yield Op("preload", sent=_features_sent(job, layout, preloaded, "preload"))
    halo = layout.facts(1).sends
    if job.model.first_varying == 1 and halo.any():
        yield Op("input_halo", sent=_features_sent(job, layout, halo, "input_halo"))


def _features_sent(job: Job, layout: Layout | EstimatedLayout, rows: np.ndarray, op: str) -> np.ndarray:
    """Bytes [ranks, ranks] of so many features' rows."""
    if not job.model.nonzeros:
        return np.asarray(job.model.features_moved(rows))
    if job.graph is None or not isinstance(layout, Layout):
        return np.asarray(np.round(job.model.features_moved(rows)).astype(np.int64))
    sent = np.zeros_like(rows)
    for me in range(job.ranks):
        if op == "preload":
            ids = layout.rows(me, 0)[layout.own(me).size :]
            sender = layout.owner[ids]
        else:
            piece = layout.piece(me, 1)
            ids, sender = piece.halo, np.repeat(np.arange(job.ranks), piece.received)
        sent[:, me] = np.bincount(sender, weights=job.features_bytes(ids), minlength=job.ranks)
    return sent


def preparation(job: Job, layout: Layout | EstimatedLayout) -> dict[str, float]:
    """Seconds of partitioning and laying out, and of the exchanges done once."""
    once = sum(float(job.cost.exchange(op.sent).alone) for op in setup(job, layout) if op.sent is not None)
    return {"partitioning": job.seconds_of(layout), "features": once}


def loaded_bytes(job: Job, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes [ranks] of the constant rows that a batch needs on the device: those that layer 1 (or the encoder) reads, or its
    aggregate where that is cached."""
    model = job.model
    if model.nonzeros and isinstance(layout, Layout):
        local = [layout.rows(me, 0) for me in range(job.ranks)]
        read = [np.append(rows, layout.piece(me, 1).halo) for me, rows in enumerate(local)] if model.first_varying else local
        return np.array([int(job.features_bytes(rows).sum()) for rows in read])
    if model.aggregate_cached(1):
        rows = layout.facts(1).rows * (2 if job.workload.model == "sage" else 1)  # GraphSAGE reads a row beside its neighbours'
    else:
        rows = layout.facts(1).sources if model.first_varying else local_rows(layout, 0)
    return np.asarray(np.round(model.features_moved(np.round(rows))).astype(np.int64))


def local_rows(layout: Layout | EstimatedLayout, h: int) -> np.ndarray:
    """Rows of h_h per rank."""
    if isinstance(layout, Layout):
        return layout.row_counts(h)
    return np.asarray(layout.facts(1).sources - layout.facts(1).taken)


def traffic(job: Job, layout: Layout | EstimatedLayout, how: Manner) -> list[Phase]:
    """Every exchange of a step; those of layers that are alike together."""
    exchanges = [op.sent for op in step(job, layout, how) if op.sent is not None]
    times = Counter(map(id, exchanges))
    return [Phase(sent, times[key]) for key, sent in {id(sent): sent for sent in exchanges}.items()]


# -- the three answers -------------------------------------------------------------------------------------------------


def predict(job: Job, layout: Layout | EstimatedLayout, how: Manner, batches: Batches = ()) -> Prediction:
    """Of an epoch: a step of the layout, or one of each of its batches."""
    turns = {id(batch): list(step(job, batch, how, bool(batches))) for batch in {id(b): b for b in batches or (layout,)}.values()}
    ops = [op for batch in batches or (layout,) for op in turns[id(batch)]]  # estimated batches are all the same one
    return account(job, ops, bool(how.staleness), sum(int(op.sent.sum()) for op in setup(job, layout) if op.sent is not None))


def account(job: Job, ops: Sequence[Op], stale: bool = False, once: int = 0, prefetch: int = 0) -> Prediction:
    """An epoch of these operations; `once`: bytes of the set-up. Synchronous: from one transfer to the next all wait for the slowest
    rank. Stale: layer l's exchange has until layer l of the next step, all layers share one communication lane, and cores with
    computation; this waits for the all-reduce, which shares wires with them. With `prefetch` what may be done ahead is beside everything
    else. Operations that share their work, as layers and batches that are alike do, are priced once and counted."""
    cost = job.cost
    priced: dict[object, _Priced] = {}
    computed, hosted = Counter[object](), Counter[object]()  # work; what is loaded, and done on the host
    exchanged, reduced, early = Counter[object](), Counter[object](), Counter[object]()  # early: exchanges done ahead
    apart, paced, beside = _Spells(), _Spells(), _Spells()  # to the next transfer; to the next all-reduce (computation only); done ahead
    done = Counter[tuple[Label, object]]()
    for op in ops:
        if (what := _identity(op)) not in priced:
            priced[what] = _priced(job, op)
        done[op.label(0), what] += 1
        elsewhere = op.ahead and prefetch > 0
        if op.work is not None:
            computed[what] += 1
            apart.add(what)
            paced.add(what)
        elif op.loaded is not None or op.host is not None:
            if elsewhere:
                beside.add(what)
            else:
                hosted[what] += 1
                apart.add(what)
        elif op.sent is not None and elsewhere:
            early[what] += 1
            beside.end()
        else:
            apart.end()
            if op.sent is None:
                paced.end()
            (reduced if op.sent is None else exchanged)[what] += 1
    seconds = {what: price.seconds for what, price in priced.items()}
    compute, moving, summing = (_total(counted.items(), seconds) for counted in (computed, exchanged, reduced))
    busiest = cost.together(compute)
    if stale:
        ports = cost.filled(compute)  # seconds that each is busy
        for what, times in (exchanged + reduced).items():
            priced[what].transfer.load(ports, times)
        alone = paced.together(cost, seconds)
        computed_s, both_s = _at_once(cost, alone, moving, [(priced[what].transfer, times) for what, times in exchanged.items()])
        epoch = reduce(np.maximum, ports.values(), np.maximum(computed_s + summing, both_s))
        exposed = epoch - alone
    else:
        epoch = apart.together(cost, seconds) + moving + summing
        exposed = moving + summing + (cost.together(compute + _total(hosted.items(), seconds)) - busiest)
    if prefetch:
        longer = np.maximum(beside.together(cost, seconds) + _total(early.items(), seconds), epoch)
        if cost.cores:  # a sampler that is ahead takes them from computation
            ports = _filled(cost, priced, ((what, times) for (_, what), times in done.items()))
            longer = reduce(np.maximum, (busy for (kind, _), busy in ports.items() if kind == "cores"), longer)
        epoch, exposed = longer, exposed + longer - epoch
    waiting = np.maximum(epoch - busiest - exposed, 0.0)
    by_op: dict[str, Any] = {}
    sent: dict[str, int] = {}
    links: dict[str, int] = {}
    longest = {what: each if priced[what].nbytes is not None else cost.together(each) for what, each in seconds.items()}
    for (label, what), times in done.items():
        kind = label.kind
        by_op[kind] = by_op.get(kind, 0.0) + _times(longest[what], times)
        if (nbytes := priced[what].nbytes) is not None:
            sent[label.op] = sent.get(label.op, 0) + times * nbytes
            for where, share in priced[what].by_link.items():
                links[where] = links.get(where, 0) + times * share
    return Prediction(epoch, busiest, exposed, waiting, sent, links, once, by_op)


def _at_once(cost: Cost, computing: Number, moving: Number, exchanges: Iterable[tuple[Transfer, int]]) -> tuple[Number, Number]:
    """Computation that takes so long alone, beside exchanges one after the other (`moving` alone), each so many times, until it has ended
    and until both have [s]. What is left of either when the other has ended goes on alone."""
    beside, done = np.zeros(np.shape(computing)), np.zeros(np.shape(computing))  # exchanges beside computation; what is done of it then
    for transfer, times in exchanges:
        exchanging, working = cost.paces(transfer)
        flowing = (transfer.alone - transfer.latency) / exchanging
        beside = beside + times * (transfer.latency + flowing)
        done = done + times * (transfer.latency + flowing * working)
    ended = np.where(done > computing, computing * beside / np.maximum(done, 1e-30), computing + beside - done)
    return ended, ended + np.maximum(1.0 - ended / np.maximum(beside, 1e-30), 0.0) * moving


class _Priced(NamedTuple):
    """An operation's seconds, by rank where it is no transfer; bytes that it sends (None: it is none)."""

    seconds: Number
    transfer: Transfer = Transfer(0.0, {})
    by_link: Mapping[Any, int] = {}
    nbytes: int | None = None


def _priced(job: Job, op: Op) -> _Priced:
    cost = job.cost
    if op.work is not None:
        return _Priced(cost.compute_s(op.work))
    if op.host is not None:
        return _Priced(cost.host_s(*op.host))
    if op.loaded is not None:
        return _Priced(cost.load_s(op.loaded))
    if op.sent is not None:
        transfer = cost.exchange(op.sent)
        return _Priced(transfer.alone, transfer, cost.bytes_by_link(op.sent), int(op.sent.sum()))
    transfer, by_link, nbytes = _summing(job, op), Counter[Any](), 0
    for group, size in _rings(job, op):
        wire = 2 * (len(group) - 1) * size
        by_link.update(cost.reduced_by_link(wire, group))
        nbytes += wire
    return _Priced(transfer.alone, transfer, by_link, nbytes)


class _Spells:
    """What ranks do between the moments at which all wait for the slowest. Spells of the same operations are counted."""

    def __init__(self) -> None:
        self._now: Counter[object] = Counter()
        self._ended: Counter[tuple[tuple[object, int], ...]] = Counter()

    def add(self, what: object) -> None:
        self._now[what] += 1

    def end(self) -> None:
        if self._now:
            self._ended[tuple(self._now.items())] += 1
            self._now = Counter()

    def together(self, cost: Cost, seconds: Mapping[object, Number]) -> Number:
        """Of all spells, the last one too, how long until all ranks are through [s]."""
        self.end()
        return sum(_times(cost.together(_total(spell, seconds)), times) for spell, times in self._ended.items())


def _total(counted: Iterable[tuple[object, int]], seconds: Mapping[object, Number]) -> Number:
    """Each operation's seconds as often as it is counted."""
    return sum((_times(seconds[what], times) for what, times in counted), 0.0)


def _times(seconds: Number, times: int) -> Number:
    return seconds if times == 1 else seconds * times


def busiest_port(job: Job, ops: Iterable[Op]) -> Number:
    """Seconds that the port is busy with these operations that is so for longest; shared cores are one."""
    using = [op for op in ops if job.cost.cores or op.sent is not None or op.size or op.groups]
    counted, priced = Counter(map(_identity, using)), {what: _priced(job, op) for what, op in {_identity(op): op for op in using}.items()}
    return reduce(np.maximum, _filled(job.cost, priced, counted.items()).values(), 0.0)


def _filled(cost: Cost, priced: Mapping[object, _Priced], counted: Iterable[tuple[object, int]]) -> dict[Port, Number]:
    """Seconds that each port is busy with operations, each as often as it is counted."""
    counted = list(counted)
    ports = cost.filled(_total(((what, times) for what, times in counted if priced[what].nbytes is None),
                               {what: price.seconds for what, price in priced.items()}))  # fmt: skip
    for what, times in counted:
        priced[what].transfer.load(ports, times)
    return ports


def _rings(job: Job, op: Op) -> list[tuple[tuple[int, ...], int]]:
    """Those that sum, and how many bytes."""
    return list(zip(op.groups, op.sizes, strict=True)) if op.groups else [(tuple(range(job.ranks)), op.size)]


def _summing(job: Job, op: Op) -> Transfer:
    """All of an operation's rings at once: ports that they share are busy for all of them."""
    transfers = [job.cost.all_reduce(size, group) for group, size in _rings(job, op)]
    busy: dict[Port, Number] = {}
    for transfer in transfers:
        transfer.load(busy)
    return Transfer(reduce(np.maximum, [transfer.latency for transfer in transfers]), busy)


def schedule(job: Job, layout: Layout | EstimatedLayout, how: Manner, steps: int, batches: Batches = (),
             turn: Callable[[int], int] = lambda step: 0) -> Schedule:  # fmt: skip
    """Every rank's tasks. A stale exchange is waited for one step later; step t takes batch turn(t), when the one before is gone."""
    ops = [list(step(job, batch, how, bool(batches))) for batch in batches or (layout,)]
    return score(job, lambda t: ops[turn(t)], steps, setup(job, layout), how.staleness)


def score(job: Job, turn: Callable[[int], Sequence[Op]], steps: int, once: Iterable[Op] = (), late: int = 0, prefetch: int = 0) -> Schedule:
    """Every rank's tasks of the operations turn(t) of each step t. Exchanges are waited for `late` steps later; what may be done ahead
    starts when the step `prefetch` steps before the last has ended."""
    group = tuple(range(job.ranks))
    out = Schedule(job.ranks, steps)
    for op in once:
        out.setup += [Task(op.label(-1), rank, "comm", part(op, rank, group)) for rank in group]
    made: dict[object, tuple[Op, Work]] = {}  # layers that are alike share their work, and so do steps: the same objects
    for t in range(steps):
        turned = [(op, _identity(op)) for op in turn(t)]
        for rank in group:
            before: Label | None = None  # the last computation of this rank
            waits: tuple[Label, ...] = ()
            sampled: Label | None = None
            for op, identity in turned:
                label, key = op.label(t), (identity, rank)
                if key not in made:
                    made[key] = op, part(op, rank, group)
                work = made[key][1]
                if op.idle:  # begins before what it waits for has ended
                    out.tasks.append(Task(label, rank, "compute", work))
                    waits += (label,)
                elif op.work is not None:
                    out.tasks.append(Task(label, rank, "compute", work, waits))
                    before, waits = label, ()
                elif op.ahead:
                    out.tasks.append(Task(label, rank, "host", work, () if sampled else (Label("update", t - 1 - prefetch),)))
                    sampled, waits = label, (label,)
                elif op.loaded is not None:
                    out.tasks.append(Task(label, rank, "copy", work, (Label("update", t - 1), *waits)))
                    waits = (label,)
                else:
                    lane, lag = ("reduce", 0) if op.sent is None else ("comm", late)
                    out.tasks.append(Task(label, rank, lane, work, ((before,) if before else ()) + waits))
                    waits += (label._replace(step=t - lag),)
    return out


def _identity(op: Op) -> object:
    """Equal for operations with the same work."""
    return op.op, op.size, op.groups, op.sizes, id(op.work), id(op.loaded), id(op.host), id(op.sent)


def part(op: Op, rank: int, group: tuple[int, ...]) -> Work:
    """One rank's share of an operation."""
    if op.work is not None:
        return op.work.at(rank)
    if op.loaded is not None:
        return Load(int(op.loaded[rank]))
    if op.host is not None:
        return Host(op.host[0], int(op.host[1][rank]))
    if op.sent is not None:
        return Collective("exchange", group, tuple((peer, nbytes) for peer, nbytes in enumerate(op.sent[rank].tolist()) if nbytes))
    for peers, size in zip(op.groups, op.sizes, strict=True):
        if rank in peers:
            return ring(rank, peers, size)
    return ring(rank, group, op.size)
