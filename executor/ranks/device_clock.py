"""When a CUDA device begins and ends a rank's work, in seconds of the host's clock.

An event is put on the stream and read when the epoch is over: nobody waits for the device in
between, so what is recorded overlaps as it would without a record."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

TRIES = 5
RENEW_S = 1.0  # [s] in which the clocks drift apart by some 10 us
# perf_counter is monotonic; the offset aligns the traces of several servers
_OFFSET = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 [s], monotonic within a process."""
    return time.perf_counter() + _OFFSET


class HostMark(NamedTuple):
    """A moment of the host [s]."""

    seconds: float
    is_reached: bool = True


class DeviceMark(NamedTuple):
    """A place on a stream, and a moment that both clocks know, shortly before it."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    zero_s: float

    @property
    def is_reached(self) -> bool:
        """Whether the device has come to it."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """When the device came to it, as `now` tells [s]."""
        return self.zero_s + float(self.zero.elapsed_time(self.event)) / 1e3


Mark = HostMark | DeviceMark


class DeviceClock:
    """Makes marks on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.set()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def set(self) -> None:
        """Find a moment that both clocks know. The current stream should be empty."""
        tries = []
        for _ in range(TRIES):
            before = now()
            event = self._event()
            event.synchronize()
            after = now()
            tries.append((after - before, event, (after + before) / 2))
        # the host may have been interrupted in others; one value, for lanes read it meanwhile
        self.origin = min(tries, key=lambda each: each[0])[1:]

    def renew(self) -> None:
        """`set` it if that was long ago: the two clocks drift apart."""
        if now() - self.origin[1] > RENEW_S:
            self.set()

    def mark(self) -> DeviceMark:
        """Mark the end of what the current stream has been given."""
        return DeviceMark(self._event(), *self.origin)
