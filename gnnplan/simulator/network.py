"""Transfers that overlap share ports by max-min fairness (the model of SimGrid).

Alone, a transfer takes its latency and then `max(busy)` seconds. Beside others it progresses at a rate x in (0, 1] of
that; it then fills x * busy[port] / max(busy) of each of its ports, and no port is filled beyond 1:

    rate x     1 ┤████████▏                 ▕████████     A
             1/2 ┤        ▕█████████████████▏             A and B on one port
                 └────────┴─────────────────┴────────
                          B joins           B ends

A machine's cores are a port too, and an operating system gives every thread that wants them equally much of *them*: a message that keeps
a tenth of a core busy goes on at full speed beside computations that take turns.

Only transfers that share ports, directly or through others, feel a change. They wait for one event: the end of the
first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import simpy

from gnnplan.planner.cost import Transfer
from gnnplan.planner.places import Port


def max_min(shares: Sequence[Mapping[Port, float]], weights: Sequence[float] = ()) -> list[float]:
    """Rates x_i in (0, 1] such that sum_i x_i * shares_i[port] <= 1 on every port and none can grow but at the cost of
    one with a smaller x_i / weight_i. Progressive filling: all grow in step until a port is full, its transfers stop, the others go on.
    Shares are in (0, 1]; each transfer's largest is 1, and so is every weight that is not told.

    >>> a, b = ("nic_out", 0), ("nic_out", 1)
    >>> max_min([{a: 1.0, b: 1.0}, {a: 1.0}, {a: 1.0}, {b: 1.0}])  # a port for three, then what is left of the other
    [0.3333333333333333, 0.3333333333333333, 0.3333333333333333, 0.6666666666666667]
    >>> max_min([{a: 1.0}, {a: 1.0}], [1.0, 3.0])
    [0.25, 0.75]
    """
    weights = weights or [1.0] * len(shares)
    users: dict[Port, list[int]] = {}
    for i, share in enumerate(shares):
        for port in share:
            users.setdefault(port, []).append(i)
    rates = [0.0] * len(shares)  # 0: still growing
    full_at: dict[Port, float] = {}  # the level (rate / weight) at which a port's growing transfers fill it
    touched = set(users)
    lowest = 0.0
    while True:
        for port in touched:
            growing = used = 0.0
            for i in users[port]:  # summed afresh: differences would leave residues that pass for room
                if rates[i]:
                    used += rates[i] * shares[i][port]
                else:
                    growing += weights[i] * shares[i][port]
            if growing:
                full_at[port] = (1.0 - used) / growing
            else:
                full_at.pop(port, None)
        if not full_at:
            return rates
        first = min(full_at, key=full_at.__getitem__)
        lowest = max(lowest, full_at[first])  # rounding must not let a rate sink to 0
        touched = set()
        for i in users[first]:
            if not rates[i]:
                rates[i] = min(1.0, weights[i] * lowest)
                touched.update(shares[i])


class _Flow:
    """A transfer under way."""

    __slots__ = ("alarm", "done", "left", "rate", "shares", "since", "weight")

    def __init__(self, transfer: Transfer, done: Callable[[], None], threads: int) -> None:
        self.left = max(transfer.busy.values(), default=0.0)  # [s] at rate 1, as of `since`
        self.shares = {port: seconds / self.left for port, seconds in transfer.busy.items() if seconds > 0.0}
        cores = [share for (kind, _), share in self.shares.items() if kind == "cores"]
        self.weight = threads / len(cores) / max(cores) if cores else 1.0  # each thread gets equally much of them
        self.rate = 0.0
        self.since = 0.0  # [s]
        self.alarm = 0  # number of the one alarm that is valid for it
        self.done = done


class Network:
    """`start` a transfer; `done` is called at the time it has ended."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self._users: dict[Port, dict[_Flow, None]] = {}  # dicts as sets in a fixed order: equal runs, equal floats
        self._changed: dict[_Flow, None] = {}  # transfers whose rate must be found again
        self._alarms = 0

    def start(self, transfer: Transfer, done: Callable[[], None], threads: int = 1) -> None:
        """`threads` work on it, where it takes cores."""
        flow = _Flow(transfer, done, threads)
        if transfer.latency > 0.0:
            self.env.timeout(transfer.latency).callbacks.append(lambda _: self._join(flow))
        else:
            self._join(flow)

    def _join(self, flow: _Flow) -> None:
        """The latency is over: take the ports."""
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
        """Find the rates anew, but once for all that happens at this instant."""
        if not self._changed:
            self.env.timeout(0.0).callbacks.append(lambda _: self._share())
        self._changed.update(dict.fromkeys(flows))

    def _share(self) -> None:
        changed, self._changed = self._changed, {}
        now = self.env.now
        while changed:
            flows = self._connected(next(iter(changed)))
            for flow, rate in zip(flows, max_min([f.shares for f in flows], [f.weight for f in flows]), strict=True):
                changed.pop(flow, None)
                flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
                flow.rate, flow.since = rate, now
            self._set_alarm(flows)

    def _connected(self, flow: _Flow) -> list[_Flow]:
        """All that share a port with it, or with one that does, and so on."""
        flows, found, ports = [flow], {flow}, set()
        for near in flows:  # grows on the way
            for port in near.shares:
                if port not in ports:
                    ports.add(port)
                    new = [other for other in self._users[port] if other not in found]
                    found.update(new)
                    flows += new
        return flows

    def _set_alarm(self, flows: list[_Flow]) -> None:
        """Wake at the end of the first. SimPy cannot take an event back, so flows know the number of their last alarm."""
        self._alarms = alarm = self._alarms + 1
        ends = [flow.left / flow.rate for flow in flows]
        first = min(ends)
        # Who ends is settled now: at least one does at each alarm, whatever the clock rounds to.
        due = [flow for flow, end in zip(flows, ends, strict=True) if end <= first * (1 + 1e-12)]
        for flow in flows:
            flow.alarm = alarm
        self.env.timeout(first).callbacks.append(lambda _: self._ring(alarm, flows, due))

    def _ring(self, alarm: int, flows: list[_Flow], due: list[_Flow]) -> None:
        if flows[0].alarm != alarm:  # rates have changed since
            return
        for flow in due:
            for port in flow.shares:
                del self._users[port][flow]
        if len(due) < len(flows):
            ended = set(due)
            self._change([flow for flow in flows if flow not in ended])
        for flow in due:
            flow.done()
