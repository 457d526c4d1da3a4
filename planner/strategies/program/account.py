"""What is predicted of an epoch: bytes, and seconds, from the operations of its steps.

    epoch    the longest path over all lanes and ranks (path.py), and where operations overlap no
             less than its busiest port is busy
    compute  of the busiest rank
    waiting  for slower ranks, or for chunks: what the epoch would take more than that if nothing
             but computation took time
    comm     the rest: transfers, loads and sampling that nothing hides

An operation is priced once (price.py), however often it occurs: layers and batches that are alike
share their work.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gnnplan.planner.cluster.transfer import add, busiest
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.path import Prices, path_of
from gnnplan.planner.strategies.program.price import bytes_of, price_of, unlike_ranks
from gnnplan.planner.strategies.program.program import (
    Exchange,
    Group,
    Kind,
    Message,
    Op,
    Program,
    Receipt,
)
from gnnplan.planner.vocabulary.numbers import Number, largest, slowest
from gnnplan.planner.vocabulary.schedule import Compute, Label
from gnnplan.planner.vocabulary.units import show_percent


@dataclass(frozen=True)
class Prediction:
    """One epoch in steady state, without contention between operations that overlap.

    Bytes are sums over all ranks; each byte is counted once, where it is sent. Seconds are arrays
    [problems, 1] where the cluster's numbers are. Where epochs differ it is their mean, in whole
    bytes, and has each of a period.
    """

    epoch_s: Number
    compute_s: Number  # of the busiest rank
    comm_s: Number  # exposed: not hidden behind computation
    bubble_s: Number  # waiting for slower ranks, or for chunks (account.py)
    bytes: dict[str, int]  # by operation
    bytes_by_link: dict[str, int]  # by intra_node, inter_node, island
    setup_bytes: int
    # operation kind -> seconds of its slowest rank
    by_op: dict[str, Number] = field(default_factory=dict)
    of_period: tuple[Prediction, ...] = ()  # its epochs, if they differ

    @property
    def period(self) -> int:
        """Epochs after which they repeat."""
        return max(len(self.of_period), 1)

    def at(self, epoch: int) -> Prediction:
        """That of an epoch, counted from 0."""
        return self.of_period[epoch % self.period] if self.of_period else self

    def over(self, epochs: range) -> Prediction:
        """The mean of some epochs: of no more than a period."""
        return mean([self.at(epoch) for epoch in epochs[: self.period]])

    @property
    def bytes_total(self) -> int:
        return sum(self.bytes.values())

    @property
    def bottleneck(self) -> str:
        """The largest share of the epoch, in words."""
        shares = {
            "computation": self.compute_s,
            "communication": self.comm_s,
            "waiting": self.bubble_s,
        }
        largest = max(shares, key=lambda k: float(shares[k]))
        share = float(shares[largest]) / max(float(self.epoch_s), 1e-12)
        return f"{largest} ({show_percent(share)})"


def predict(problem: Problem, program: Program) -> Prediction:
    """One epoch: the mean of its known steps, times the steps that it has; each of a period."""
    known = list(program.known())
    starts = range(0, len(known), len(known) // program.period)
    return mean([_epoch(problem, program, known[at : at + starts.step]) for at in starts])


def _epoch(problem: Problem, program: Program, known: Sequence[Hashable]) -> Prediction:
    """The epoch of these known steps."""
    steps = _Account(problem, program, known)
    epoch, prices = steps.epoch_s()
    computes = [isinstance(op.work, Compute) for op in steps.ops]
    computing_s = steps.path.seconds(
        problem.cost.cores,
        [price if own else price.times(0.0) for price, own in zip(prices, computes, strict=True)],
    )
    compute_s = np.minimum(steps.slowest_s(prices, computes), epoch)
    rest = epoch - compute_s
    waiting = np.minimum(np.maximum(computing_s - compute_s, 0.0), rest)
    p = Prediction(
        epoch,
        compute_s,
        rest - waiting,
        waiting,
        *bytes_of(problem, ((steps.ops[number], times) for number, times in steps.times.items())),
        program.setup_bytes,
        steps.by_operation(prices),
    )
    return p if len(known) == program.steps else _in_all([p], program.steps, len(known))


def mean(epochs: Sequence[Prediction]) -> Prediction:
    """The mean of the epochs of a period; of one, itself."""
    if len(epochs) == 1:
        return epochs[0]
    sent = [{op: nbytes for op, nbytes in each.bytes.items() if nbytes} for each in epochs]
    each = [replace(epoch, bytes=of_op) for epoch, of_op in zip(epochs, sent, strict=True)]
    return replace(_in_all(each, 1, len(each)), of_period=tuple(each))


def _in_all(epochs: Sequence[Prediction], times: int, of: int) -> Prediction:
    """`times / of` as much as these epochs take together, in whole bytes."""
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
    """Steps of a program: their kinds of operations by number, how often each occurs, and what it
    takes alone."""

    def __init__(self, problem: Problem, program: Program, known: Sequence[Hashable]) -> None:
        self.cost, self.ops, numbers = problem.cost, list[Op](), dict[Kind, int]()
        self.times = Counter[int]()
        self.reported = Counter[tuple[Group, Label, int]]()
        for name, times in Counter(known).items():
            for op in program.ops(name):
                number = numbers.setdefault(op.kind, len(self.ops))
                if number == len(self.ops):
                    self.ops.append(op)
                self.times[number] += times
                self.reported[*_reported(op), number] += times
        self.path, self.overlap = path_of(program, known, numbers), program.overlaps
        self.in_stages = any(op.ranks for op in self.ops)
        unlike = None if self.in_stages else unlike_ranks(problem, self.ops)
        self.alone = [price_of(problem, op, unlike) for op in self.ops]

    def epoch_s(self) -> tuple[Number, Prices]:
        """Seconds of an epoch, and what operations take while others are under way."""
        alone_s = self.path.seconds(self.cost.cores, self.alone)
        if not (self.in_stages or self.overlap):
            return alone_s, self.alone
        cores = self._busy_cores()
        ports = dict(cores)
        for number, times in self.times.items():
            add(ports, self.alone[number].transfer.ports, times)
        least = np.maximum(alone_s, busiest(ports))
        computes = [isinstance(op.work, Compute) for op in self.ops]
        if any(op.ahead for op, own in zip(self.ops, computes, strict=True) if own):
            least = np.maximum(least, self.slowest_s(self.alone, computes))  # on one device
        meet = any(isinstance(op.work, Exchange) for op in self.ops)
        if not (self.in_stages and (meet or cores)):  # stages do not hold each other up
            return least, self.alone
        prices = self._contended(alone_s)
        epoch = self.path.seconds(self.cost.cores, prices)
        if cores:  # they are idle only while someone waits for a transfer
            moved_s = self.slowest_s(prices, [op.moves for op in self.ops])
            epoch = np.minimum(epoch, busiest(cores) + moved_s)
        return np.maximum(epoch, least), prices

    def slowest_s(self, prices: Prices, which: Sequence[bool]) -> Number:
        """Seconds of some kinds of operations on the rank that does them longest."""
        sums = self._by_group(prices, which)
        return largest(self._done_s(group, seconds) for group, seconds in sums.items())

    def by_operation(self, prices: Prices) -> dict[str, Number]:
        """Seconds of each operation on the rank that does it longest; of messages both ways."""
        sums = defaultdict[str, dict[Group, Number]](dict)
        for (group, label, number), times in self.reported.items():
            price, of = prices[number], sums[label.kind]
            each = price.seconds if price.is_transfer else self._done_s(group, price.seconds)
            of[group] = of.get(group, 0.0) + each * times
        return {kind: largest(of.values()) for kind, of in sums.items()}

    def _by_group(self, prices: Prices, which: Sequence[bool]) -> dict[Group, Number]:
        """Seconds of some kinds of operations."""
        sums = dict[Group, Number]()
        for (group, _, number), times in self.reported.items():
            if which[number]:
                sums[group] = sums.get(group, 0.0) + prices[number].seconds * times
        return sums

    def _done_s(self, group: Group, seconds: Number) -> Number:
        """When the slowest rank has done what takes each so long [.., ranks] [s]."""
        return slowest(seconds) if group else self.cost.cores.all_done_s(seconds)

    def _busy_cores(self) -> dict[str, np.ndarray]:
        """How long shared cores are busy with what ranks do themselves [s]."""
        if not self.cost.cores.count:
            return {}
        own = self._by_group(self.alone, [not op.moves for op in self.ops])
        return self.cost.cores.core_busy_s(
            np.concatenate([np.atleast_1d(s) for s in own.values()], -1)
        )

    def _contended(self, epoch: Number) -> Prices:
        """What operations take where stages hold each other up.

        Ranks that share cores are taken to compute all at once. A stage's exchanges take longer
        because others use its ports: for a share of the epoch, and leave half of the bandwidth
        then. Cores are no such port: computation takes most of them.
        """
        of_stage, of_all = defaultdict[Group, dict[str, np.ndarray]](dict), dict[str, np.ndarray]()
        for number, op in enumerate(self.ops):
            if isinstance(op.work, Exchange):
                busy = dict(self.alone[number].transfer.ports)
                busy.pop("cores", None)
                add(of_stage[op.ranks], busy, self.times[number])
                add(of_all, busy, self.times[number])

        def longer(op: Op) -> Number:
            if not isinstance(op.work, Exchange):
                return 1.0 if op.moves else self.cost.cores.full_load_slowdown
            ports = of_stage[op.ranks]
            shared = {kind: busy * (of_all[kind] - busy) for kind, busy in ports.items()}
            return 1.0 + busiest(shared) / np.maximum(busiest(ports) * epoch, 1e-30)

        return [price.times(longer(op)) for op, price in zip(self.ops, self.alone, strict=True)]


def _reported(op: Op) -> tuple[Group, Label]:
    """Whose seconds are added up, by what name: messages of both ways are those of the lower ranks,
    and chunks' layers are not apart."""
    if isinstance(op.work, Message):
        return tuple(rank + min(op.work.distance, 0) for rank in op.ranks), Label(op.op, 0)
    peer = op.work.distance if isinstance(op.work, Receipt) else None
    return op.ranks, Label(op.op, 0, op.way, None if op.chunks else op.layer, None, peer)
