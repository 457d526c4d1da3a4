"""Predictions of an epoch's bytes, seconds and memory, from the operations of its steps.

The seconds of an epoch have three parts (`Prediction`):

    epoch    the longest path over all lanes and ranks (price.py); where operations overlap, at
             least the seconds for which the busiest port is busy
    compute  computation of the busiest rank
    waiting  for slower ranks, or for chunks: the epoch if only computation took time, minus
             `compute`
    comm     the rest: transfers, loads and sampling that do not overlap with computation

Equal operations, such as those of equal layers or batches, are priced once (price.py).

Peak memory of a rank is what stays during a step, plus the peak of the step's operations. Each
operation knows its bytes (`Op.holds`), and the order of operations tells when they are allocated
and freed. A strategy says what stays: features, edges, caches (`Resident`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

import numpy as np

from gnnplan.planner.cluster.ports import add, busiest
from gnnplan.planner.gnn.model import COMMUNICATOR, RUNTIME, in_turn
from gnnplan.planner.gnn.trace import shapes
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.price import (
    Prices,
    bytes_of,
    distinct_ranks,
    path_of,
    price_of,
)
from gnnplan.planner.strategies.program.program import (
    Exchange,
    Kind,
    Message,
    Op,
    Program,
    ops_by_group,
    queue,
)
from gnnplan.planner.vocabulary.numbers import Group, Number, largest, slowest, total
from gnnplan.planner.vocabulary.schedule import Compute, Label
from gnnplan.planner.vocabulary.units import show_percent


@dataclass(frozen=True)
class Prediction:
    """Bytes and seconds of one epoch in steady state, in closed form.

    Bytes are sums over all ranks; each byte is counted once, where it is sent. Seconds are arrays
    [problems, 1] if the cluster's numbers are. If epochs differ, the numbers are means over a
    period, with bytes rounded, and `epochs_of_period` has the prediction of each epoch.
    """

    epoch_s: Number
    compute_s: Number  # of the busiest rank
    comm_s: Number  # exposed: not overlapped with computation
    bubble_s: Number  # waiting for slower ranks, or for chunks
    bytes: dict[str, int]  # by operation
    bytes_by_link: dict[str, int]  # by intra_node, inter_node, island
    setup_bytes: int  # sent once, before the first epoch
    # operation kind -> seconds of its slowest rank
    by_op: dict[str, Number] = field(default_factory=dict)
    epochs_of_period: tuple[Prediction, ...] = ()  # one per epoch of a period, if epochs differ

    @property
    def period(self) -> int:
        """The number of epochs after which epochs repeat."""
        return max(len(self.epochs_of_period), 1)

    def at(self, epoch: int) -> Prediction:
        """Return the prediction of an epoch, counted from 0."""
        return self.epochs_of_period[epoch % self.period] if self.epochs_of_period else self

    def over(self, epochs: range) -> Prediction:
        """Return the mean of some epochs, of which at most the first period is read."""
        return mean([self.at(epoch) for epoch in epochs[: self.period]])

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes.values())

    @property
    def bottleneck(self) -> str:
        """The largest of computation, communication and waiting, with its share of the epoch."""
        shares = {
            "computation": self.compute_s,
            "communication": self.comm_s,
            "waiting": self.bubble_s,
        }
        largest = max(shares, key=lambda k: float(shares[k]))
        share = float(shares[largest]) / max(float(self.epoch_s), 1e-12)
        return f"{largest} ({show_percent(share)})"


def predict(problem: Problem, program: Program) -> Prediction:
    """Return the prediction of an epoch, which assumes that unknown steps are like known ones."""
    return mean(
        [_epoch(problem, steps, program.setup_bytes) for steps in _epochs(problem, program)]
    )


def epoch_s(problem: Problem, program: Program) -> Number:
    """Return the seconds of `predict` alone [s]."""
    each = [
        steps.epoch_s()[0] * steps.of_epoch / steps.known for steps in _epochs(problem, program)
    ]
    return total(each) / len(each)


def _epochs(problem: Problem, program: Program) -> list[_Account]:
    """Return the known steps of each epoch of a period."""
    known = list(program.known())
    starts = range(0, len(known), len(known) // program.period)
    return [_Account(problem, program, known[at : at + starts.step]) for at in starts]


def _epoch(problem: Problem, steps: _Account, setup_bytes: int) -> Prediction:
    """Return the prediction of an epoch whose known steps are these."""
    epoch, prices = steps.epoch_s()
    computes = [isinstance(op.work, Compute) for op in steps.ops]
    compute_s = np.minimum(steps.slowest_s(prices, computes), epoch)
    rest = epoch - compute_s
    waiting = 0.0 * rest
    if not steps.alike:
        own = [p if is_own else p.times(0.0) for p, is_own in zip(prices, computes, strict=True)]
        without_transfers_s = steps.path.seconds(problem.cost.cores, own)
        waiting = np.minimum(np.maximum(without_transfers_s - compute_s, 0.0), rest)
    p = Prediction(
        epoch,
        compute_s,
        rest - waiting,
        waiting,
        *bytes_of(problem, ((steps.ops[number], times) for number, times in steps.times.items())),
        setup_bytes,
        steps.by_operation(prices),
    )
    return p if steps.of_epoch == steps.known else _in_all([p], steps.of_epoch, steps.known)


def mean(epochs: Sequence[Prediction]) -> Prediction:
    """Return the mean of the epochs of a period; a single epoch is returned unchanged."""
    if len(epochs) == 1:
        return epochs[0]
    sent = [{op: nbytes for op, nbytes in each.bytes.items() if nbytes} for each in epochs]
    each = [replace(epoch, bytes=of_op) for epoch, of_op in zip(epochs, sent, strict=True)]
    return replace(_in_all(each, 1, len(each)), epochs_of_period=tuple(each))


def _in_all(epochs: Sequence[Prediction], times: int, of: int) -> Prediction:
    """Return `times / of` times the sum of these epochs, with bytes rounded."""
    sums = dict[str, Any]()
    for name in ("epoch_s", "compute_s", "comm_s", "bubble_s"):
        sums[name] = sum(getattr(each, name) for each in epochs) * times / of
    for name in ("bytes", "bytes_by_link", "by_op"):
        added = Counter[str]()
        for each in epochs:
            for key, number in getattr(each, name).items():
                added[key] += number
        sums[name] = {key: number * times / of for key, number in added.items()}
        if name != "by_op":
            sums[name] = {key: round(nbytes) for key, nbytes in sums[name].items()}
    return replace(epochs[0], **sums)


class _Account:
    """The kinds of operations of some steps, the count of each, and its price without contention.

    `ops` has one operation of each kind; a kind's number is its place there.
    """

    def __init__(self, problem: Problem, program: Program, known: Sequence[Hashable]) -> None:
        self.cost, self.ops, numbers = problem.cost, list[Op](), dict[Kind, int]()
        self.known, self.of_epoch = len(known), program.steps
        self.times = Counter[int]()
        self.reported = Counter[tuple[Group, Label, int]]()  # (ranks, label, kind's number)
        for name, times in Counter(known).items():
            for op in program.ops(name):
                number = numbers.setdefault(op.kind, len(self.ops))
                if number == len(self.ops):
                    self.ops.append(op)
                self.times[number] += times
                self.reported[*_reported(op), number] += times
        self.lag, self.samplers = program.lag, program.samplers
        self.exchanges = [n for n, op in enumerate(self.ops) if isinstance(op.work, Exchange)]
        self.path = path_of(program, known, numbers)
        self.overlaps = bool(program.lag or program.lead or program.order)  # steps, in time
        self.in_stages = any(op.ranks for op in self.ops)
        representatives = None if self.in_stages else distinct_ranks(problem, self.ops)
        # whether all ranks do the same work on devices of their own, so that none waits for another
        self.alike = representatives is not None and representatives.size == 1
        self.alone = [price_of(problem, op, representatives) for op in self.ops]

    def epoch_s(self) -> tuple[Number, Prices]:
        """Return the seconds of an epoch, and the prices of operations with contention."""
        alone_s = self.path.seconds(self.cost.cores, self.alone)
        if not (self.in_stages or self.overlaps):
            return alone_s, self.alone
        cores = self._busy_cores()
        ports, exchanged = self._busy_ports(*self.times), self._busy_ports(*self.exchanges)
        add(ports, cores)
        least = np.maximum(alone_s, busiest(ports))
        if any(op.ahead for op in self.ops):
            # a GPU that also samples does one operation at a time, and so does a sampler
            computed = [isinstance(op.work, Compute) for op in self.ops]
            sampled = [op.lane == "host" and not op.moves for op in self.ops]
            for which, workers in ((computed, 1), (sampled, self.samplers)):
                least = np.maximum(least, self.slowest_s(self.alone, which) / workers)
        if self.in_stages and (exchanged or cores):
            prices = self._contended()
        elif self.lag and "cores" in exchanged:  # cores copy all the time, also while ranks compute
            idle = max(1.0 - self.cost.cores.load, 0.0)
            taken = np.maximum(busiest({"cores": exchanged["cores"]}) / least - idle, 0.0)
            times = [1.0 if op.moves else 1 / (1 - taken) for op in self.ops]
            prices = [price.times(each) for price, each in zip(self.alone, times, strict=True)]
            computing = [p.times(0.0) if n in self.exchanges else p for n, p in enumerate(prices)]
            return np.maximum(self.path.seconds(self.cost.cores, computing), least), prices
        else:
            return least, self.alone
        epoch = self.path.seconds(self.cost.cores, prices)
        if self.in_stages and cores:  # a core is idle only while its ranks wait for transfers
            moved_s = self.slowest_s(prices, [op.moves for op in self.ops])
            epoch = np.minimum(epoch, busiest(cores) + moved_s)
        return np.maximum(epoch, least), prices

    def slowest_s(self, prices: Prices, which: Sequence[bool]) -> Number:
        """Return the seconds of some kinds of operations on the slowest rank.

        which: for each kind, whether it counts.
        """
        sums = self._seconds_by_group(prices, which)
        return largest(self._done_s(group, seconds) for group, seconds in sums.items())

    def by_operation(self, prices: Prices) -> dict[str, Number]:
        """Return the seconds of each operation on the slowest rank; messages of both directions are
        one operation."""
        sums = defaultdict[str, dict[Group, Number]](dict)
        for (group, label, number), times in self.reported.items():
            price, by_group = prices[number], sums[label.kind]
            each = price.seconds if price.is_transfer else self._done_s(group, price.seconds)
            by_group[group] = by_group.get(group, 0.0) + each * times
        return {kind: largest(by_group.values()) for kind, by_group in sums.items()}

    def _seconds_by_group(self, prices: Prices, which: Sequence[bool]) -> dict[Group, Number]:
        """Return the seconds of some kinds of operations on each group of ranks [.., ranks]."""
        sums = dict[Group, Number]()
        for (group, _, number), times in self.reported.items():
            if which[number]:
                sums[group] = sums.get(group, 0.0) + prices[number].seconds * times
        return sums

    def _done_s(self, group: Group, seconds: Number) -> Number:
        """Return when the slowest rank ends, if ranks compute so long [.., ranks] [s]."""
        return slowest(seconds) if group else self.cost.cores.last_rank_done_s(seconds)

    def _busy_cores(self) -> dict[str, np.ndarray]:
        """Return how long shared cores are busy with work other than transfers [s]."""
        if not self.cost.cores.count:
            return {}
        own = self._seconds_by_group(self.alone, [not op.moves for op in self.ops])
        return self.cost.cores.core_busy_s(
            np.concatenate([np.atleast_1d(s) for s in own.values()], -1)
        )

    def _busy_ports(self, *numbers: int) -> dict[str, np.ndarray]:
        """Return how long operations of these kinds keep ports busy [s]."""
        ports = dict[str, np.ndarray]()
        for number in numbers:
            add(ports, self.alone[number].transfer.ports, self.times[number])
        return ports

    def _contended(self) -> Prices:
        """Return the prices of operations where stages slow each other down.

        Ranks that share cores are assumed to compute all at the same time. A chunk passes stages
        and links in turn: stage n is place 2n, the link after it place 2n + 1 forward and 2n - 1
        backward. While a chunk is at a place, the chunk before or after it is at the next, if there
        is one. A transfer takes longer by the share of a slot, the time of the slowest stage, in
        which transfers of other places use its busiest port. Cores are not among these ports,
        because computation takes most of them.
        """
        slowdown = self.cost.cores.full_load_slowdown
        both = zip(self.ops, self.alone, strict=True)
        prices = [price if op.moves else price.times(slowdown) for op, price in both]
        stages = {ranks: 2 * n for n, ranks in enumerate(sorted({op.ranks for op in self.ops}))}
        for direction in (1, -1):
            places, chunks = defaultdict[int, list[int]](list), 0  # place -> numbers of transfers
            for number, op in enumerate(self.ops):
                if op.over_chunks == direction and isinstance(op.work, (Exchange, Message)):
                    link = direction * isinstance(op.work, Message)
                    places[stages[op.ranks] + link].append(number)
                    chunks = len(op.work.nbytes)
            in_stage = [op.over_chunks == direction and op.lane != "send" for op in self.ops]
            slot = self.slowest_s(self.alone, in_stage)
            in_all = self._busy_ports(*chain(*places.values()))
            for place, numbers in places.items():
                apart = np.array([other - place for other in places if other != place])
                chunk = np.arange(chunks)[:, None] - (apart + (apart > 0)) // 2  # at other places
                present = ((chunk >= 0) & (chunk < chunks)).sum(-1) / max(apart.size, 1)
                busy = self._busy_ports(*numbers)
                ports = busy.keys() - {"cores"}
                shared = {kind: busy[kind] * (in_all[kind] - busy[kind]) for kind in ports}
                delay = present * busiest(shared) / np.maximum(busiest(busy) * slot, 1e-30)
                for number in numbers:
                    prices[number] = self.alone[number].times(1.0 + delay)
        return prices


def _reported(op: Op) -> tuple[Group, Label]:
    """Return the ranks and the label under which an operation's seconds are reported.

    Messages of both directions count to the lower ranks. Layers of chunks are one.
    """
    if isinstance(op.work, Message):
        return tuple(rank + min(op.work.distance, 0) for rank in op.ranks), Label(op.op, 0)
    return op.ranks, op.label(0)._replace(layer=None if op.over_chunks else op.layer, chunk=None)


Memory = dict[str, np.ndarray]  # use -> bytes per rank [ranks]
# uses that set-up and evaluation have, or may take, in place of a step's
OF_A_STEP = ("features", "activations", "halo", "copies", "buffers")


@dataclass(frozen=True)
class Resident:
    """What a rank has besides the tensors of a step's operations.

    data: bytes that stay, by use; they add to those of `peak` of the same use.
    code: bytes of machine code (`machine_code`).
    weights: number of weights of each rank; None: all of the model's weights.
    groups: groups of ranks with a communicator of their own.
    elsewhere: peak bytes of set-up or evaluation, without weights, edges and caches.
    """

    data: Memory
    code: Number
    weights: Number | None = None
    groups: Sequence[Sequence[int]] = ()
    elsewhere: Number = 0.0


def peak(problem: Problem, program: Program, resident: Resident) -> Memory:
    """Return each rank's peak bytes, by use.

    runtime: libraries. communicators: buffers of NCCL.
    """
    zero, model, kind = np.zeros(problem.ranks), problem.model, problem.cluster.device.kind
    weights = model.weights if resident.weights is None else resident.weights
    size = (zero + weights) * model.weight_itemsize
    use: Memory = {"parameters": size, "optimizer": problem.workload.state_per_weight * size}
    use |= {name: use.get(name, zero) + nbytes for name, nbytes in resident.data.items()}
    use["activations"] = fullest(problem, program)
    use["buffers"] = use.get("buffers", zero) + resident.code
    training = sum(use.get(name, zero) for name in OF_A_STEP)
    use["buffers"] = use["buffers"] + np.maximum(resident.elsewhere - training, 0.0)
    use["runtime"] = zero + RUNTIME[kind]
    if kind == "cuda" and problem.ranks > 1:
        # two communicators of all ranks, one for all-reduces and one for exchanges
        use["communicators"] = zero + 2 * COMMUNICATOR
        for group in resident.groups:
            use["communicators"][list(group)] += COMMUNICATOR * (1 < len(group) < problem.ranks)
    return use


def on_fullest_rank(memory: Memory) -> dict[str, float]:
    """Return the bytes, by use, of the rank or server with the most bytes."""
    rank = int(np.argmax(sum(memory.values(), np.zeros(1))))
    return {use: float(each[rank]) for use, each in memory.items()}


def machine_code(
    problem: Problem, pieces: float = 1, layers: Iterable[int] = (), rows: float | None = None
) -> float:
    """Return the bytes of machine code that oneDNN generates, where it does matrix products.

    pieces: number of distinct row counts of a rank's products; oneDNN generates code for each.
    layers: those of the products (0: the encoder); empty: all. rows: rows of the largest piece;
    None: 1.5 times a rank's share of the vertices, divided by `pieces`."""
    model, code = problem.model, problem.cluster.device.code_of(problem.model.itemsize)
    if not code:
        return 0.0
    if rows is None:
        rows = 1.5 * problem.stats.vertices / problem.ranks / pieces
    layers = list(layers) or range(len(model.layers) + 1)
    works = [model.layer_record(layer) for layer in layers if layer]
    if model.encoder and 0 in layers:
        works.append(model.encoder_record)
    if model.decoder and len(model.layers) in layers:
        works.append(model.decoder_record)
    products = [product for each in works for product in each.products]
    return code * shapes(products, model.itemsize, pieces, rows)


def fullest(problem: Problem, program: Program) -> np.ndarray:
    """Return the peak bytes of a program's operations on each rank [ranks]."""
    most = np.zeros(problem.ranks)
    for step in _steps(program):
        for ranks, ops in ops_by_group([op for op in step if op.holds]).items():
            at = list(ranks) or slice(None)
            held = in_turn(op.holds() for op in ops if op.holds)
            most[at] = np.maximum(most[at], held.most)
    return most


def _steps(program: Program) -> Iterator[Iterable[Op]]:
    """Yield sequences of operations, before each of which no operation holds memory.

    A sequence is a step, and equal steps are yielded once. An operation stands for all of its
    chunks. Steps that overlap form one sequence, long enough to reach each set of steps that are
    in flight together; if all steps are equal, a few of them and the end of an epoch suffice.
    """
    known = list(program.known())
    distinct = dict.fromkeys(known)
    if program.order is None:
        yield from map(program.ops, distinct)
        return
    if len(distinct) == 1:
        known = known[: 2 * program.in_flight + 1]
    last = len(known) + program.in_flight - 1
    cycle = replace(program, at=lambda t: known[t % len(known)], steps=len(known))
    yield (each.op for each in takewhile(lambda each: each.step < last, queue(cycle, last + 2)))
