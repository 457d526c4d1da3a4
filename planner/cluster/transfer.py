"""What a transfer is.

A *port* is a part of the cluster that carries bytes at a limited rate (places.py). ports.py says
which ports a message passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.values import Value

# How long ports are busy, by the name of their kind: arrays by number [.., ports] [s].
PortSeconds = Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Transfer(Value):
    """A latency [s], after which every port is busy for some seconds.

    A port's seconds are those it needs when nothing else passes it.
    """

    latency: Number
    ports: PortSeconds

    @property
    def alone(self) -> Number:
        """Duration without contention: the latency plus the busiest port [s]."""
        return self.latency + busiest(self.ports)

    @property
    def busy(self) -> dict[Port, float]:
        """Seconds of every port that is busy at all, of one cluster."""
        return {
            (kind, number): float(seconds[number])
            for kind, seconds in self.ports.items()
            for number in np.flatnonzero(seconds).tolist()
        }


def busiest(ports: PortSeconds) -> Number:
    """How long the busiest port is busy [s]."""
    return largest(busy.max(-1, keepdims=busy.ndim > 1) for busy in ports.values())


def add(ports: dict[str, np.ndarray], more: PortSeconds, times: int = 1) -> None:
    """Add the seconds that `times` as much as `more` keeps ports busy to those in `ports`."""
    for kind, seconds in more.items():
        longer = seconds if times == 1 else seconds * times
        ports[kind] = ports[kind] + longer if kind in ports else longer


def seconds_of(loads: Mapping[str, np.ndarray], times: float, bandwidth: Number) -> PortSeconds:
    """How long `times` these loads [B] keep ports busy at a bandwidth [B/s].

    Of several clusters, ports that are all alike are one.
    """
    if isinstance(bandwidth, np.ndarray):  # [clusters, 1]
        few = {port: load[:1] if (load == load[0]).all() else load for port, load in loads.items()}
        return {port: (load[:, None] * times / bandwidth.T).T for port, load in few.items()}
    return {port: load * times / bandwidth for port, load in loads.items()}
