"""What a transfer is, and how messages use the ports of one kind.

A *port* is a part of the cluster that carries bytes at a limited rate (places.py). ports.py says
which ports a message passes. Where many ports are busy equally long, their seconds are one object,
so that a maximum over all ports looks at it once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.vocabulary.numbers import Number, largest


class Transfer(NamedTuple):
    """A latency [s], after which every port is busy for some seconds.

    A port's seconds are those it needs when nothing else passes it.
    """

    latency: Number
    busy: Mapping[Port, Number]

    @property
    def alone(self) -> Number:
        """Duration without contention: the latency plus the busiest port [s]."""
        return self.latency + largest(self.busy.values())

    def load(self, ports: dict[Port, Number], times: int = 1) -> None:
        """Add the seconds that `times` such transfers keep each port busy to `ports` [s]."""
        products = {id(seconds): seconds * times for seconds in self.busy.values()}
        _add(ports, {port: products[id(seconds)] for port, seconds in self.busy.items()})


class Passes(NamedTuple):
    """Which messages pass which ports of one name. All arrays are [passes]; `shares` may be [1]."""

    port: str
    messages: np.ndarray  # index of the message
    numbers: np.ndarray  # number of the port
    shares: np.ndarray  # bytes on the port per byte of the message


class PortUse(NamedTuple):
    """How messages use the ports of one kind."""

    kind: str
    link: Link
    hops: np.ndarray  # links of this kind that each message passes [messages]
    passes: Callable[[], list[Passes]]
    # A faster way to the same as `passes`: bytes of each message -> port -> bytes by number.
    bytes_by_port: Callable[[np.ndarray], dict[str, np.ndarray]] | None = None

    def loads(self, nbytes: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes of each message [messages] -> port -> bytes by the port's number."""
        if self.bytes_by_port:
            return self.bytes_by_port(nbytes)
        return {
            port: np.bincount(numbers, nbytes[messages] * shares)
            for port, messages, numbers, shares in self.passes()
        }


def add_seconds(
    busy: dict[Port, Number], loads: Mapping[str, np.ndarray], times: float, bandwidth: float
) -> None:
    """Add the seconds that `times` these loads [B] take at a bandwidth [B/s] to `busy`."""
    for port, load in loads.items():
        by_number = load.tolist()
        seconds_of = {nbytes: nbytes * times / bandwidth for nbytes in set(by_number)}
        _add(
            busy,
            {
                (port, number): seconds_of[nbytes]
                for number, nbytes in enumerate(by_number)
                if nbytes
            },
        )


def _add(busy: dict[Port, Number], seconds: Mapping[Port, Number]) -> None:
    """Add seconds to those of the same ports in `busy`; one object where both are one."""
    if busy.keys().isdisjoint(seconds):
        busy.update(seconds)
        return
    sums: dict[tuple[int, int], tuple[Number, Number]] = {}  # with a part, which keeps its id
    for port, more in seconds.items():
        before = busy.get(port, 0.0)
        key = id(before), id(more)
        if key not in sums:
            sums[key] = before, before + more
        busy[port] = sums[key][1]
