"""A rank's records: spans of its operations, bytes that it sends, and its current activity."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from gnnplan.executor.ranks.activity import Activity
from gnnplan.executor.ranks.device_clock import DeviceClock, HostMark, Mark, now
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span


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
        self._lock = threading.Lock()

    @contextmanager
    def span(self, label: Label, lane: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time of the with block under the schedule's label.

        On CUDA the device's time is recorded (device_clock.py), which `read` adds later. An error
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
                    self._read()
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
            self._read()
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

    def _read(self) -> None:
        """Add the marked spans that have ended."""
        pending = []
        for span, begin, end in self._marked:
            if end.is_reached:
                self.spans.append(span._replace(start=begin.seconds, end=end.seconds))
            else:
                pending.append((span, begin, end))
        self._marked[:] = pending

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
