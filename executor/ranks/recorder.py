"""A rank's records: spans of its operations, bytes that it sends, and its current activity.

Times at which a CUDA device begins and ends work are seconds of the host's clock. Events are put on
the stream and read at the end of an epoch. Nothing waits for the device before, so operations
overlap as they would without records."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch

from gnnplan.executor.ranks.activity import Activity
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span

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


class Recorder:
    """The records of rank `rank`, whose work runs on `device`."""

    def __init__(self, rank: int, device: torch.device, traced: int) -> None:
        self.rank, self.device = rank, device
        self.traced = traced  # spans of steps below this number are kept; bytes of all steps
        self.recording = True  # False during evaluation
        self.spans: list[Span] = []
        self.sent: dict[str, int] = {}  # operation -> bytes sent while recording
        self.counted: set[Label] = set()  # counted by `count_ahead`, not sent yet
        self.activity = Activity()  # errors name it
        self._clock: DeviceClock | None = None
        # spans whose end the device has not reached yet, with marks of begin and end
        self._marked: list[tuple[Span, Mark, Mark]] = []
        self._lock = threading.RLock()  # of the marks: lanes add theirs

    @contextmanager
    def span(self, label: Label, lane: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time of the with block under the schedule's label.

        On CUDA the device's time is recorded (`DeviceClock`), which `read` adds later. An error
        that leaves the block gets a note on the rank's activity.
        """
        name = str(label)
        begin = self._mark() if self.recording and label.step < self.traced else None
        try:
            self.activity.begin(lane, name)
            yield
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                # added here, because the lane may start other work before the error is reported
                error.add_note(f"in {self.activity}")
            raise
        if begin is not None:
            span = Span(name, label.op, self.rank, lane, 0.0, 0.0, nbytes, label.step)
            with self._lock:
                self._marked.append((span, begin, self._mark()))
                if self.device.type != "cuda":
                    self.read()
        self.activity.end(lane)  # after an error the activity stays what it was

    def _mark(self) -> Mark:
        """Mark this moment; on CUDA, the moment when the current stream reaches this point."""
        if self.device.type != "cuda":
            return HostMark(now())
        if self._clock is None:
            self._clock = DeviceClock(self.device)
        return self._clock.mark()

    def read(self) -> None:
        """Add the spans that the device has ended."""
        with self._lock:
            marked, self._marked = self._marked, []
            for span, begin, end in marked:
                if end.is_reached:
                    self.spans.append(span._replace(start=begin.seconds, end=end.seconds))
                else:
                    self._marked.append((span, begin, end))
            if self._clock is not None:
                self._clock.renew()

    def show_device(self) -> set[str]:
        """Set the activity, which the host has set ahead, to the device's; return the lanes."""
        with self._lock:
            running = [
                span for span, begin, end in self._marked if begin.is_reached and not end.is_reached
            ]
        for span in reversed(running):  # a lane's first span is set last, and stays
            self.activity.begin(span.lane, span.label)
        return {span.lane for span in running}

    def count(self, label: Label, nbytes: int) -> int:
        """Count bytes that this rank sends, and return them.

        Call it on the step's own thread: a lane may lag behind.
        """
        if label in self.counted:
            self.counted.remove(label)
        elif self.recording and nbytes:
            self.sent[label.op] = self.sent.get(label.op, 0) + nbytes
        return nbytes

    def count_ahead(self, label: Label, nbytes: int) -> None:
        """Count bytes in the label's step that this rank sends in a later step."""
        if nbytes:
            self.count(label, nbytes)
            self.counted.add(label)

    def sending(self, label: Label, lane: str, nbytes: int) -> AbstractContextManager[None]:
        """Return the `span` of a message, and count its bytes now (`count`)."""
        return self.span(label, lane, self.count(label, nbytes))
