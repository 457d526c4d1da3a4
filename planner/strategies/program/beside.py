"""How long ranks wait for all-reduces that run beside what ranks do one after the other.

    ranks     |backward 3|halo|backward 2  |backward 1|. . .|update|
    reduce               |all_r. 3|        |all_r. 2     |a. 1|
                         meets the halo                wait

What is under way has a backlog: the seconds that it would take alone. Whatever ranks do meanwhile
takes off as many seconds of it. Both use ports. Of a port that they want for the shares f and g of
the time each gets what it wants while f + g <= 1. Beyond that both take longer, by f + g - 1 of the
time that they have in common: two transfers over one wire by all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.transfer import PortSeconds, busiest
from gnnplan.planner.strategies.program.price import Price, Steps
from gnnplan.planner.strategies.program.program import Exchange, Op
from gnnplan.planner.vocabulary.numbers import Number, total


def waited_s(
    cost: Cost,
    known: Iterable[Hashable],
    steps: Steps,
    priced: Sequence[Price],
    exchanges_wait: bool,
    ahead: bool,
) -> Number:
    """Seconds that an epoch takes longer than without its all-reduces `beside` computation [s].

    `known`: the names of its `steps`. `exchanges_wait`: ranks wait for exchanges; with staleness
    they do not. `ahead`: what can be done in steps before does not hold ranks up.
    """
    ranks, waits = _Ranks(cost, priced), list[Number]()
    # an update waits for all that is under way: what goes from step to step is a segment
    played: dict[object, tuple[list[Number], Counter[int]]] = {}
    for name in known:
        begun = name, tuple(ranks.segment.items())
        if begun not in played:
            ranks.waits = []
            for number, op in steps[name]:
                if not (ahead and op.ahead):
                    ranks.go_on(number, op, exchanges_wait)
            played[begun] = ranks.waits, ranks.segment
        waited, segment = played[begun]
        waits += waited
        ranks.segment = segment.copy()
    return total(waits)


class _Ranks:
    """All ranks together, on their way through an epoch."""

    def __init__(self, cost: Cost, priced: Sequence[Price]) -> None:
        self.cost, self.priced = cost, priced
        self.waits: list[Number] = []  # what they waited, one after the other
        self.under_way = False
        self.backlog: Number = 0.0
        self.shares: PortSeconds = {}  # of its time, for which what is under way uses each port
        self._end_segment()

    def go_on(self, number: int, op: Op, exchanges_wait: bool) -> None:
        """To the end of an operation."""
        if op.beside:
            self.begin(number)
        elif op.lane == "reduce":  # after those under way
            self.wait()
        elif not isinstance(op.work, Exchange):
            if op.op == "update":
                self.wait()
            self.compute(number)
        elif exchanges_wait:
            self.exchange(number)

    def _end_segment(self) -> None:
        self.segment = Counter[int]()  # what ranks do between barriers
        self.seconds: Number = 0.0  # of it, each rank alone, up to `reached`
        self.reached: Number = 0.0  # when all were done with that

    def compute(self, number: int) -> None:
        self.segment[number] += 1

    def begin(self, number: int) -> None:
        """An all-reduce, once all ranks are there."""
        self._meet_segment()
        price = self.priced[number]
        self.under_way, self.backlog = True, self.backlog + price.seconds
        ports = price.transfer.ports
        self.shares = {
            kind: np.asarray(_ratio(busy, price.seconds)) for kind, busy in ports.items()
        }

    def exchange(self, number: int) -> None:
        """All wait for it."""
        self._barrier()
        price = self.priced[number]
        self._meet(price.seconds, price.transfer.ports)

    def wait(self) -> None:
        """All wait for what is under way."""
        self._barrier()
        self.waits.append(self.backlog)
        self.under_way, self.backlog = False, 0.0

    def _barrier(self) -> None:
        if self.under_way:
            self._meet_segment()
        self._end_segment()

    def _meet_segment(self) -> None:
        """Up to where the segment is now."""
        seconds = total(
            self.priced[number].seconds * count for number, count in self.segment.items()
        )
        reached = self.cost.cores.all_done_s(seconds)
        self._meet(reached - self.reached, self.cost.cores.core_busy_s(seconds - self.seconds))
        self.seconds, self.reached = seconds, reached

    def _meet(self, seconds: Number, ports: PortSeconds) -> None:
        """Ranks do what takes so long, and uses ports for so long, alone."""
        if not self.under_way:
            return
        crowded = busiest(
            {
                kind: np.where(share > 0, _ratio(ports[kind], seconds) + share - 1, 0.0)
                for kind, share in self.shares.items()
                if kind in ports
            }
        )
        in_common = np.minimum(seconds, self.backlog)
        self.waits.append(in_common * crowded)
        self.backlog = self.backlog - in_common


def _ratio(part: Number, whole: Number) -> Number:
    return part / np.maximum(whole, 1e-30)
