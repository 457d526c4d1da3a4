"""A transfer: a latency, and the seconds for which it occupies each port.

A *port* is a part of the cluster that carries bytes at a limited rate (places.py). ports.py has
the ports that a message passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.values import ByContent

# Kind of port -> seconds for which each port of this kind is busy [.., ports] [s]
PortSeconds = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Transfer(ByContent):
    """A latency [s], after which every port is busy for some seconds.

    A port's seconds hold without contention: when no other transfer passes the port.
    """

    latency: Number
    ports: PortSeconds

    @property
    def alone(self) -> Number:
        """Duration without contention: the latency plus the busiest port [s]."""
        return self.latency + busiest(self.ports)

    @property
    def busy(self) -> dict[Port, float]:
        """Port -> busy seconds, without idle ports; for a single cluster [s]."""
        return {
            (kind, number): float(seconds[number])
            for kind, seconds in self.ports.items()
            for number in np.flatnonzero(seconds).tolist()
        }


def busiest(ports: PortSeconds) -> Number:
    """Return the seconds of the busiest port [s]."""
    return largest(busy.max(-1, keepdims=busy.ndim > 1) for busy in ports.values())


def add(ports: dict[str, np.ndarray], more: PortSeconds, times: int = 1) -> None:
    """Add `times` the seconds in `more` to the seconds in `ports`, in place."""
    for kind, seconds in more.items():
        added = seconds if times == 1 else seconds * times
        ports[kind] = ports[kind] + added if kind in ports else added


def seconds_of(loads: Mapping[str, np.ndarray], times: float, bandwidth: Number) -> PortSeconds:
    """Return the seconds for which `times` these loads [B] occupy ports at a bandwidth [B/s].

    For several clusters at once, ports with equal loads are represented by one of them.
    """
    if isinstance(bandwidth, np.ndarray):  # [clusters, 1]
        few = {port: load[:1] if (load == load[0]).all() else load for port, load in loads.items()}
        return {port: (load[:, None] * times / bandwidth.T).T for port, load in few.items()}
    return {port: load * times / bandwidth for port, load in loads.items()}
