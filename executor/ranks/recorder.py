"""What a rank records: spans of its operations, bytes that it sends, and what it is in now."""

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
    """The record of rank `rank`, whose work is on `device`."""

    def __init__(self, rank: int, device: torch.device, traced: int) -> None:
        self.rank, self.device = rank, device
        self.traced = traced  # steps whose spans are kept; bytes are counted in all
        self.recording = True  # off while evaluating
        self.spans: list[Span] = []
        self.sent: dict[str, int] = {}  # operation -> bytes sent while recording
        self.counted: set[Label] = set()  # by `count_ahead`, not sent yet
        self.activity = Activity()  # what an error names
        self._clock: DeviceClock | None = None
        # spans whose begin and end the device has still to reach
        self._marked: list[tuple[Span, Mark, Mark]] = []
        self._lock = threading.Lock()

    @contextmanager
    def span(self, label: Label, lane: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time of the with block under the schedule's label.

        On CUDA it is the device's time (device_clock.py), which `settle` reads. An error that
        leaves the block gets a note of what the rank was in.
        """
        name = str(label)
        begin = self._mark() if self.recording and label.step < self.traced else None
        try:
            self.activity.begin(lane, name)
            yield
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                # now: before anybody hears of the error its lane may do other work
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
        """Now; on CUDA, when the current stream comes to this place."""
        if self.device.type != "cuda":
            return HostMark(now())
        if self._clock is None:
            self._clock = DeviceClock(self.device)
        return self._clock.mark()

    def read(self) -> None:
        """Make spans of what the device has done."""
        with self._lock:
            self._read()
            if self._clock is not None:
                self._clock.renew()

    def show_device(self) -> set[str]:
        """Let the activity be what the device is in, for the host is ahead of it -> the lanes."""
        with self._lock:
            under_way = [
                span for span, begin, end in self._marked if begin.is_reached and not end.is_reached
            ]
        for span in reversed(under_way):  # the first of a lane stays
            self.activity.begin(span.lane, span.label)
        return {span.lane for span in under_way}

    def _read(self) -> None:
        """Make spans of what has been marked and is over."""
        under_way = []
        for span, begin, end in self._marked:
            if end.is_reached:
                self.spans.append(span._replace(start=begin.seconds, end=end.seconds))
            else:
                under_way.append((span, begin, end))
        self._marked[:] = under_way

    def count(self, label: Label, nbytes: int) -> int:
        """Count bytes that this rank sends -> the same bytes.

        Call it on the step's own thread: a lane may lag behind.
        """
        if label in self.counted:
            self.counted.remove(label)
        elif self.recording and nbytes:
            self.sent[label.op] = self.sent.get(label.op, 0) + nbytes
        return nbytes

    def count_ahead(self, label: Label, nbytes: int) -> None:
        """Count now what this rank will send in a later step than the label's."""
        if nbytes:
            self.count(label, nbytes)
            self.counted.add(label)

    def sending(self, label: Label, lane: str, nbytes: int) -> AbstractContextManager[None]:
        """The `span` of a message, whose bytes are counted now (`count`)."""
        return self.span(label, lane, self.count(label, nbytes))
