"""Times at which a CUDA device begins and ends work, in seconds of the host's clock.

Events are put on the stream and read at the end of an epoch. Nothing waits for the device before,
so operations overlap as they would without records."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch

TRIES = 5
RENEW_S = 1.0  # [s] the clocks drift apart by some 10 us in this time
# perf_counter is monotonic; the offset aligns the traces of several servers
_OFFSET = time.time() - time.perf_counter()


def now() -> float:
    """Return seconds since 1970 [s], monotonic within a process."""
    return time.perf_counter() + _OFFSET


class HostMark(NamedTuple):
    """A moment of the host [s]."""

    seconds: float
    is_reached: bool = True


class DeviceMark(NamedTuple):
    """A point on a stream, and an earlier event whose time on the host's clock is known."""

    event: torch.cuda.Event
    zero: torch.cuda.Event
    zero_s: float

    @property
    def is_reached(self) -> bool:
        """Whether the device has reached the point."""
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    @property
    def seconds(self) -> float:
        """When the device reached the point, on the clock of `now` [s]."""
        return self.zero_s + float(self.zero.elapsed_time(self.event)) / 1e3


Mark = HostMark | DeviceMark


class DeviceClock:
    """Marks of one device, synchronised with the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.set()

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def set(self) -> None:
        """Synchronise the clocks: time an event on the host. The current stream should be empty."""
        tries = []
        for _ in range(TRIES):
            before = now()
            event = self._event()
            event.synchronize()
            after = now()
            tries.append((after - before, event, (after + before) / 2))
        # the host may have been interrupted in longer tries; one value, as lanes read it meanwhile
        self.origin = min(tries, key=lambda each: each[0])[1:]

    def renew(self) -> None:
        """Synchronise the clocks again after RENEW_S: they drift apart."""
        if now() - self.origin[1] > RENEW_S:
            self.set()

    def mark(self) -> DeviceMark:
        """Mark the end of the current stream's work so far."""
        return DeviceMark(self._event(), *self.origin)
