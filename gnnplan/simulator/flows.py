"""Single flows that share links by max-min fairness: what cost.py's port bound leaves out, and what it is compared with.

The network plays an exchange as one bundle that fills its ports in fixed proportions (network.py); here each message has a rate of its
own. A level rises on all ports alike; a port is full when its flows have taken all of it, and its flows stop there:

    rate  1/2 ┤            ▄▄▄         A and B share a link of 1/2, B and C one of 3/4: the first is full at 1/4,
          1/4 ┤  ▄▄▄  ▄▄▄  ███         and C takes what B leaves of the second
              └───A────B────C──
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from gnnplan.planner.cost import Cost, Transfer
from gnnplan.planner.places import Port

PATIENCE = 0.005  # share of the port bound after which rates are found anew


@dataclass(frozen=True)
class Flows:
    """Flow flow[i] passes port[i] with weight[i] of its bytes; passes are sorted by flow, and every flow has one."""

    nbytes: np.ndarray  # [flows]
    flow: np.ndarray  # [passes]
    port: np.ndarray  # [passes]
    weight: np.ndarray  # [passes]
    capacity: np.ndarray  # [ports], bytes per second
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1))  # [flows], or one time for all [s]
    names: tuple[Port, ...] = ()

    @classmethod
    def of(cls, cost: Cost, sent: np.ndarray) -> Flows:
        """The messages of an exchange [ranks, ranks], latencies left out."""
        source, target = np.nonzero(sent)
        nbytes = np.asarray(sent[source, target], dtype=float)
        passes, capacity = cost.passes("exchange", source, target, nbytes)
        numbers = {port: i for i, port in enumerate(capacity)}
        columns = [(messages, np.array([numbers[name, i] for i in ends.tolist()], dtype=np.int64), weight)
                   for name, messages, ends, weight in passes]  # fmt: skip
        flow, port, weight = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(flow, kind="stable")
        return cls(nbytes, flow[order], port[order], weight[order], np.array(list(capacity.values())), names=tuple(capacity))

    @property
    def bound(self) -> float:
        """When all start together: the seconds of the busiest port, which no schedule can beat [s]."""
        return float((np.bincount(self.port, self.weight * self.nbytes[self.flow], self.capacity.size) / self.capacity).max())

    def rates(self) -> np.ndarray:
        """When all are under way [flows, B/s]."""
        return max_min(self.flow, self.port, self.weight, self.nbytes.size, self.capacity)

    def finish(self, every: float = 0.0) -> np.ndarray:
        """When each ends [flows, s]. Rates are found anew when a flow starts or ends, but not sooner than `every` seconds after the last
        end that was waited for: what a flow leaves behind in between lies idle, so nothing is faster than it can be. A flow's ports are
        full at its rate or above, so flows slower than all that have ended keep theirs."""
        starts = np.broadcast_to(self.starts, self.nbytes.shape)
        left, ends = self.nbytes.astype(float), starts.astype(float)
        waiting = np.argsort(starts, kind="stable")
        waiting = waiting[left[waiting] > 0]
        alive = np.zeros(left.size, dtype=bool)
        rates = np.zeros(left.size)
        now = ended = 0.0  # ended: the lowest rate of those that have, 0 where others have started since
        while waiting.size or alive.any():
            if not alive.any():
                now = max(now, float(starts[waiting[0]]))
            come = int(np.searchsorted(starts[waiting], now, side="right"))
            if come:
                alive[waiting[:come]], waiting, ended = True, waiting[come:], 0.0
            going = np.flatnonzero(alive)
            faster = alive & (rates >= ended * (1 - 1e-9))
            mine, slower = faster[self.flow], (alive & ~faster)[self.flow]
            taken = np.bincount(self.port[slower], self.weight[slower] * rates[self.flow[slower]], self.capacity.size)
            numbered = np.cumsum(faster) - 1
            rates[faster] = max_min(numbered[self.flow[mine]], self.port[mine], self.weight[mine], int(faster.sum()), self.capacity - taken)
            last = left[going] / rates[going]
            until = max(float(last.min()), every)
            if waiting.size:
                until = min(until, float(starts[waiting[0]]) - now)
            over = last <= until * (1 + 1e-12)
            ends[going[over]] = now + last[over]
            left[going] -= rates[going] * until
            alive[going[over]] = False
            ended = float(rates[going[over]].min(initial=np.inf))
            now = float(starts[waiting[0]]) if waiting.size and until == starts[waiting[0]] - now else now + until
        return ends


@dataclass(frozen=True)
class ByFlows(Cost):
    """A cost whose exchanges wait for the last of their messages, each with a rate of its own. Ports carry the same bytes: what this takes
    longer than the busiest one is spent as latency."""

    @classmethod
    def like(cls, cost: Cost) -> ByFlows:
        return cls(**{field.name: getattr(cost, field.name) for field in fields(cost)})

    def exchange(self, sent: np.ndarray, group: Sequence[int] | None = None, messages: int = 1) -> Transfer:
        bundle = super().exchange(sent, group, messages)
        if not bundle.busy:
            return bundle
        whole = np.zeros((len(self.seats),) * 2)
        members = np.arange(len(sent)) if group is None else np.asarray(group)
        whole[np.ix_(members, members)] = sent
        flows = Flows.of(self, whole)
        return bundle._replace(latency=bundle.latency + float(flows.finish(PATIENCE * flows.bound).max()) - flows.bound)


def max_min(flow: np.ndarray, port: np.ndarray, weight: np.ndarray, flows: int, capacity: np.ndarray) -> np.ndarray:
    """Rates such that no port carries more than it can and none can grow but at the cost of a smaller one [flows]. Ports that hold
    all of their flows lower than any other port does are full at once, whatever happens elsewhere; then what they leave of the others
    is shared. Passes sorted by flow.

    >>> a, b = 0, 1  # three on a port of 1, the first on one of 1/2 too
    >>> max_min(np.array([0, 0, 1, 2]), np.array([a, b, a, b]), np.ones(4), 3, np.array([1.0, 0.5])).tolist()
    [0.25, 0.75, 0.25]
    """
    rates, room = np.zeros(flows), capacity.astype(float)
    while flow.size:
        growing = np.bincount(port, weight, capacity.size)
        level = np.full(capacity.size, np.inf)
        np.divide(room, growing, out=level, where=growing > 0)
        first = np.flatnonzero(np.diff(flow, prepend=-1))
        here = level[port]
        lowest = np.minimum.reduceat(here, first)
        passes = np.diff(first, append=flow.size)
        reached = np.repeat(lowest, passes)
        held = np.bincount(port, reached < here * (1 - 1e-12), capacity.size)  # flows that stop sooner, at other ports
        stops = np.maximum.reduceat(((held == 0) & (growing > 0))[port], first)
        rates[flow[first[stops]]] = lowest[stops]
        gone = np.repeat(stops, passes)
        room = np.maximum(room - np.bincount(port[gone], weight[gone] * reached[gone], capacity.size), 0.0)
        flow, port, weight = flow[~gone], port[~gone], weight[~gone]
    return rates
