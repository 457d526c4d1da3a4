"""Transfers that overlap share ports by max-min fairness (the model of SimGrid).

Without contention, a transfer takes its latency and then `max(busy)` seconds. While it overlaps
with others, it progresses at a rate x in (0, 1]. It then fills the share x * busy[port] / max(busy)
of each of its ports, and no port is filled beyond 1:

    rate x     1 ┤████████▏                 ▕████████     A
             1/2 ┤        ▕█████████████████▏             A and B on one port
                 └────────┴─────────────────┴────────
                          B joins           B ends

The cores of a machine are also a port. An operating system gives every thread an equal share of the
cores, not equal progress: a message that needs a tenth of a core continues at full speed while
computations take turns on the cores.

A change of rates affects only transfers that share ports, directly or through other transfers. All
of these wait for one event, the end of the first of them.

The simulator treats an exchange as one bundle, which fills its ports in fixed proportions. To check
the port bound of cost.py, `ByFlows` makes each message a flow with its own rate. All rates rise
together; when a port is full, the rates of its flows stop rising:

    rate  1/2 ┤            ▄▄▄     A and B share a link of 1/2, B and C a link of 3/4. The first is
          1/4 ┤  ▄▄▄  ▄▄▄  ███     full at rates of 1/4, and C gets the rest of the second.
              └───A────B────C──
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import simpy
from scipy.sparse import csc_array

from gnnplan.planner.cluster.cost import Cost, Transfer
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.vocabulary.numbers import RankMatrix

# `ByFlows` computes new rates at most once in this share of the port bound.
RATES_INTERVAL = 0.005


@dataclass(frozen=True)
class Flows:
    """Messages and the ports that they pass; each flow passes one at least."""

    nbytes: np.ndarray  # [flows]
    passes: csc_array  # [ports, flows] what each byte of a flow puts on a port [B]
    capacity: np.ndarray  # [B/s] [ports]

    @classmethod
    def of(cls, cost: Cost, sent: np.ndarray) -> Flows:
        """Return the messages of an exchange [ranks, ranks], without latencies."""
        source, target = np.nonzero(sent)
        nbytes = np.asarray(sent[source, target], dtype=float)
        passes, capacity = cost.ports.passes("exchange", source, target, nbytes)
        index = {port: i for i, port in enumerate(capacity)}
        columns = [
            (shares, [index[name, i] for i in numbers.tolist()], messages)
            for name, messages, numbers, shares in passes
        ]
        weight, port, flow = (np.concatenate(column) for column in zip(*columns, strict=True))
        weights = csc_array((weight, (port, flow)), (len(capacity), nbytes.size))
        return cls(nbytes, weights, np.array(list(capacity.values())))

    @property
    def bound(self) -> float:
        """The time for which the busiest port is busy, a lower bound of the duration [s]."""
        return float((self.passes @ self.nbytes / self.capacity).max())

    def rates(self) -> np.ndarray:
        """Return the rate of each flow while all flows are active [B/s] [flows]."""
        return max_min_of_flows(self.passes, self.capacity)

    def finish(self, every: float = 0.0) -> np.ndarray:
        """Return when each flow ends, if all start together [s] [flows].

        New rates are computed when a flow ends, but not sooner than `every` seconds after the last
        ones. Until then the bandwidth of a flow that has ended stays unused, so no flow is faster
        than possible.
        """
        left, now, ends = self.nbytes.astype(float), 0.0, np.zeros(self.nbytes.size)
        while (active := np.flatnonzero(left > 0)).size:
            rates = max_min_of_flows(self.passes[:, active], self.capacity)
            lasts = left[active] / rates
            interval = max(float(lasts.min()), every)
            over = lasts <= interval * (1 + 1e-12)
            ends[active[over]] = now + lasts[over]
            left[active] = np.where(over, 0.0, left[active] - rates * interval)
            now += interval
        return ends


class ByFlows(Cost):
    """A cost model in which each message of an exchange has its own rate.

    Ports carry the same bytes as in `Cost`. If the last message of an exchange ends later than the
    port bound, the difference is added to the exchange's latency.
    """

    @classmethod
    def like(cls, cost: Cost) -> ByFlows:
        """Return the cost model of the same cluster and placement."""
        return cls(cost.cluster, cost.placement, cost.spread)

    def exchange(
        self,
        sent: RankMatrix,
        group: Sequence[int] | None = None,
        messages: int = 1,
        itemsize: int = 1,
    ) -> Transfer:
        """See `Cost.exchange`."""
        bundle = super().exchange(sent, group, messages, itemsize)
        if not bundle.busy:
            return bundle
        among_all = np.zeros((len(self.placement),) * 2)
        members = np.arange(len(sent)) if group is None else np.asarray(group)
        among_all[np.ix_(members, members)] = np.asarray(sent) * itemsize
        flows = Flows.of(self, among_all)
        last = float(flows.finish(RATES_INTERVAL * flows.bound).max())
        return replace(bundle, latency=bundle.latency + last - flows.bound)


def max_min_of_flows(passes: csc_array, capacity: np.ndarray) -> np.ndarray:
    """Return max-min fair rates [flows]; passes, capacity: as of `Flows`.

    No port carries more than its capacity, and no rate can grow unless a smaller rate shrinks.

    Each round fills the ports that limit all of their flows more than any other port does; these
    ports fill up whatever the rates of other flows. Their flows keep their rates, and the next
    round shares the remaining capacity.

    >>> passes = [[1, 1, 1], [1, 0, 0]]  # three flows pass a port of 1; the first also one of 1/4
    >>> max_min_of_flows(csc_array(passes), np.array([1.0, 0.25])).tolist()
    [0.25, 0.375, 0.375]
    """
    rates, room = np.zeros(passes.shape[1]), capacity.astype(float)
    flows = np.arange(rates.size)  # whose rates still grow
    while flows.size:
        port, first = passes.indices, passes.indptr[:-1]
        growing = np.bincount(port, passes.data, capacity.size)
        level = np.full(capacity.size, np.inf)  # rate at which a port is full
        np.divide(room, growing, out=level, where=growing > 0)
        lowest = np.minimum.reduceat(level[port], first)
        reached = np.repeat(lowest, np.diff(passes.indptr))
        # number of passes per port whose flows stop sooner, at another port
        held = np.bincount(port, reached < level[port] * (1 - 1e-12), capacity.size)
        stops = np.maximum.reduceat((held == 0)[port], first)
        rates[flows[stops]] = lowest[stops]
        room = np.maximum(room - passes @ (stops * lowest), 0.0)
        flows, passes = flows[~stops], passes[:, ~stops]
    return rates


def max_min(shares: Sequence[Mapping[Port, float]], weights: Sequence[float] = ()) -> list[float]:
    """Return rates x_i in (0, 1] such that sum_i x_i * shares_i[port] <= 1 on every port.

    No rate can grow unless a rate with a smaller x_i / weight_i shrinks. The algorithm is
    progressive filling: all rates grow together until a port is full; the rates of its transfers
    stop growing, and the others continue.

    shares: for each transfer the share of each port that it fills at rate 1, in (0, 1]; the
    largest share of a transfer is 1. weights: 1 unless given.

    >>> a, b = ("nic_out", 0), ("nic_out", 1)
    >>> max_min([{a: 1.0, b: 1.0}, {a: 1.0}, {a: 1.0}, {b: 1.0}])
    [0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.6666666666666667]
    >>> max_min([{a: 1.0}, {a: 1.0}], [1.0, 3.0])
    [0.25, 0.75]
    """
    weights = weights or [1.0] * len(shares)
    rates, lowest = [0.0] * len(shares), 0.0
    growing, room = list(range(len(shares))), {port: 1.0 for share in shares for port in share}
    while growing:
        load = dict.fromkeys((port for i in growing for port in shares[i]), 0.0)
        for i in growing:
            for port, share in shares[i].items():
                load[port] += weights[i] * share
        # the level (rate / weight) at which a port's growing transfers fill it
        full_at = {port: room[port] / wanted for port, wanted in load.items()}
        first = min(full_at, key=full_at.__getitem__)
        lowest = max(lowest, full_at[first])  # rounding must not let a rate sink to 0
        for i in growing:
            if first in shares[i]:
                rates[i] = min(1.0, weights[i] * lowest)
                for port, share in shares[i].items():
                    room[port] -= rates[i] * share
        growing = [i for i in growing if not rates[i]]
    return rates


class Demand(NamedTuple):
    """A transfer in Python floats [s], which are several times faster here than numpy's."""

    latency: float
    busy: Mapping[Port, float]

    @property
    def alone(self) -> float:
        """Seconds without contention."""
        return self.latency + max(self.busy.values(), default=0.0)

    @classmethod
    def of(cls, transfer: Transfer) -> Demand:
        return cls(float(transfer.latency), transfer.busy)


@dataclass(eq=False, slots=True)
class _Flow:
    """A transfer in progress."""

    left: float  # at rate 1, as of `since` [s]
    shares: dict[Port, float]
    weight: float
    done: Callable[[], None]
    rate: float = 0.0
    since: float = 0.0  # [s]
    alarm: int = 0  # number of the last alarm set for it; earlier alarms are ignored

    @classmethod
    def of(cls, demand: Demand, done: Callable[[], None], threads: int, factor: float) -> _Flow:
        left = max(demand.busy.values(), default=0.0)
        shares = {port: each / left for port, each in demand.busy.items() if each > 0.0}
        cores = [share for (kind, _), share in shares.items() if kind == "cores"]
        # equal weights would mean equal progress; threads get equal shares of the cores instead
        weight = threads / len(cores) / max(cores) if cores else 1.0
        return cls(left * factor, shares, weight, done)


class Network:
    """The ports of a cluster, and the transfers in progress."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        # Dicts serve as sets with a fixed order, so that equal runs give equal floats.
        self._users: dict[Port, dict[_Flow, None]] = {}
        self._changed: dict[_Flow, None] = {}  # transfers that need new rates
        self._alarms = 0

    def start(
        self, demand: Demand, done: Callable[[], None], threads: int = 1, factor: float = 1.0
    ) -> None:
        """Start a transfer now, and call `done` when it ends.

        threads: the number of threads that work on it, if it needs cores. factor: of the time for
        which its ports are busy.
        """
        flow = _Flow.of(demand, done, threads, factor)
        if demand.latency > 0.0:
            self.env.timeout(demand.latency).callbacks.append(lambda _: self._join(flow))
        else:
            self._join(flow)

    def _join(self, flow: _Flow) -> None:
        """Occupy the ports, after the latency."""
        alone = True
        for port in flow.shares:
            users = self._users.setdefault(port, {})
            alone = alone and not users
            users[flow] = None
        flow.since = self.env.now
        if alone:
            flow.rate = 1.0
            self._set_alarm([flow])
        else:
            self._change([flow])

    def _change(self, flows: list[_Flow]) -> None:
        """Schedule one computation of new rates for all changes at this instant."""
        if not self._changed:
            self.env.timeout(0.0).callbacks.append(lambda _: self._share())
        self._changed.update(dict.fromkeys(flows))

    def _share(self) -> None:
        """Compute new rates for all transfers that changed, and for connected transfers."""
        changed, self._changed = self._changed, {}
        now = self.env.now
        while changed:
            flows = self._connected(next(iter(changed)))
            rates = max_min([flow.shares for flow in flows], [flow.weight for flow in flows])
            for flow, rate in zip(flows, rates, strict=True):
                changed.pop(flow, None)
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.rate, flow.since = rate, now
            self._set_alarm(flows)

    def _connected(self, flow: _Flow) -> list[_Flow]:
        """Return all transfers that share a port with this one, directly or through others."""
        flows, found, ports = [flow], {flow}, set()
        for member in flows:  # the list grows in the loop
            for port in member.shares:
                if port not in ports:
                    ports.add(port)
                    new = [other for other in self._users[port] if other not in found]
                    found.update(new)
                    flows += new
        return flows

    def _set_alarm(self, flows: list[_Flow]) -> None:
        """Set an alarm for the end of the first of these transfers.

        SimPy cannot cancel an event, so each transfer keeps the number of its last alarm.
        """
        self._alarms = alarm = self._alarms + 1
        ends = [flow.left / flow.rate for flow in flows]
        first = min(ends)
        # decided now, so that at least one transfer ends, however the clock is rounded
        due = [flow for flow, end in zip(flows, ends, strict=True) if end <= first * (1 + 1e-12)]
        for flow in flows:
            flow.alarm = alarm
        self.env.timeout(first).callbacks.append(lambda _: self._ring(alarm, flows, due))

    def _ring(self, alarm: int, flows: list[_Flow], due: list[_Flow]) -> None:
        """End the transfers that are due, unless rates have changed since the alarm was set."""
        if flows[0].alarm != alarm:
            return
        for flow in due:
            for port in flow.shares:
                del self._users[port][flow]
        if len(due) < len(flows):
            ended = set(due)
            self._change([flow for flow in flows if flow not in ended])
        for flow in due:
            flow.done()
