"""Single messages that share links by max-min fairness, to check the port bound of cost.py.

The simulator treats an exchange as one bundle, which fills its ports in fixed proportions
(network.py). Here each message is a flow with its own rate. All rates rise together; when a port is
full, the rates of its flows stop rising:

    rate  1/2 ┤            ▄▄▄     A and B share a link of 1/2, B and C a link of 3/4. The first is
          1/4 ┤  ▄▄▄  ▄▄▄  ███     full at rates of 1/4, and C gets the rest of the second.
              └───A────B────C──
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.cluster.cost import Cost, Transfer
from gnnplan.planner.vocabulary.numbers import RankMatrix

# `ByFlows` computes new rates at most once in this share of the port bound.
RATES_INTERVAL = 0.005


@dataclass(frozen=True)
class Flows:
    """Messages and the ports that they pass.

    Pass i means that flow `flow[i]` puts `weight[i]` times its bytes on port `port[i]`. Passes are
    sorted by flow, and every flow has at least one.
    """

    nbytes: np.ndarray  # [flows]
    flow: np.ndarray  # [passes]
    port: np.ndarray  # [passes]
    weight: np.ndarray  # [passes]
    capacity: np.ndarray  # [B/s] [ports]

    @classmethod
    def of(cls, cost: Cost, sent: np.ndarray) -> Flows:
        """Return the messages of an exchange [ranks, ranks], without latencies."""
        source, target = np.nonzero(sent)
        nbytes = np.asarray(sent[source, target], dtype=float)
        passes, capacity = cost.ports.passes("exchange", source, target, nbytes)
        index = {port: i for i, port in enumerate(capacity)}
        columns = [
            (messages, np.array([index[name, i] for i in numbers.tolist()], dtype=np.int64), shares)
            for name, messages, numbers, shares in passes
        ]
        flow, port, weight = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(flow, kind="stable")
        return cls(
            nbytes,
            flow[order],
            port[order],
            weight[order],
            np.array(list(capacity.values())),
        )

    @property
    def bound(self) -> float:
        """The time for which the busiest port is busy, a lower bound of the duration [s]."""
        load = np.bincount(self.port, self.weight * self.nbytes[self.flow], self.capacity.size)
        return float((load / self.capacity).max())

    def rates(self) -> np.ndarray:
        """Return the rate of each flow while all flows are active [B/s] [flows]."""
        return max_min(self.flow, self.port, self.weight, self.nbytes.size, self.capacity)

    def finish(self, every: float = 0.0) -> np.ndarray:
        """Return when each flow ends, if all start together [s] [flows].

        New rates are computed when a flow ends, but not sooner than `every` seconds after the last
        ones. Until then the bandwidth of a flow that has ended stays unused, so no flow is faster
        than possible.
        """
        left, now, ends = self.nbytes.astype(float), 0.0, np.zeros(self.nbytes.size)
        alive = left > 0
        while alive.any():
            active, passes = np.flatnonzero(alive), alive[self.flow]
            number = (np.cumsum(alive) - 1)[self.flow[passes]]
            columns = self.port[passes], self.weight[passes]
            rates = max_min(number, *columns, active.size, self.capacity)
            lasts = left[active] / rates
            interval = max(float(lasts.min()), every)
            over = lasts <= interval * (1 + 1e-12)
            ends[active[over]] = now + lasts[over]
            left[active] -= rates * interval
            alive[active[over]], now = False, now + interval
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


def max_min(
    flow: np.ndarray, port: np.ndarray, weight: np.ndarray, flows: int, capacity: np.ndarray
) -> np.ndarray:
    """Return max-min fair rates [flows].

    No port carries more than its capacity, and no rate can grow unless a smaller rate shrinks.
    `flow`, `port` and `weight` are passes as in `Flows`, sorted by flow.

    Each round fills the ports that limit all of their flows more than any other port does; these
    ports fill up whatever the rates of other flows. Their flows keep their rates, and the next
    round shares the remaining capacity.

    >>> a, b = 0, 1  # three flows pass port a, of 1; the first also passes port b, of 1/2
    >>> flow, port = np.array([0, 0, 1, 2]), np.array([a, b, a, b])
    >>> max_min(flow, port, np.ones(4), 3, np.array([1.0, 0.5])).tolist()
    [0.25, 0.75, 0.25]
    """
    rates, room = np.zeros(flows), capacity.astype(float)
    while flow.size:
        growing = np.bincount(port, weight, capacity.size)
        level = np.full(capacity.size, np.inf)  # rate at which a port is full
        np.divide(room, growing, out=level, where=growing > 0)
        first = np.flatnonzero(np.diff(flow, prepend=-1))
        level_here = level[port]
        lowest = np.minimum.reduceat(level_here, first)
        passes = np.diff(first, append=flow.size)  # number of passes of each flow
        reached = np.repeat(lowest, passes)
        # number of passes per port whose flows stop sooner, at another port
        held = np.bincount(port, reached < level_here * (1 - 1e-12), capacity.size)
        stops = np.maximum.reduceat(((held == 0) & (growing > 0))[port], first)
        rates[flow[first[stops]]] = lowest[stops]
        done = np.repeat(stops, passes)
        used = np.bincount(port[done], weight[done] * reached[done], capacity.size)
        room = np.maximum(room - used, 0.0)
        flow, port, weight = flow[~done], port[~done], weight[~done]
    return rates
