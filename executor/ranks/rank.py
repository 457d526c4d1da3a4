"""One rank: its place, device, process groups and lanes, and the spans that it records.

A process becomes a rank by `opening.open_rank`. The lane 'compute' is the step's own thread and
stream. What any other lane is, `Rank.submit` says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gnnplan.executor.ranks.activity import Activity
from gnnplan.executor.ranks.device_clock import DeviceClock, HostMark, Mark, now
from gnnplan.executor.ranks.memory import MemoryWatch
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span

T = TypeVar("T")
NCCL_LEAST_S = 600.0  # [s] as torch has it
SPEAKS_FIRST_S = 30.0  # [s] by which torch is more patient than a rank that can say where it is
LOOK_S = 50e-6  # [s] between two looks at a device that waits for peers


class _Enqueued(Future[T]):
    """A result that a stream is going to have. Who asks for it waits on the device."""

    def __init__(self, result: T, stream: Any, device: torch.device) -> None:
        super().__init__()
        self.set_result(result)
        self._done, self._device = stream.record_event(), device

    def result(self, timeout: float | None = None) -> T:
        value, here = super().result(timeout), _streams(self._device).current_stream(self._device)
        here.wait_event(self._done)
        _used_on(here, value)
        return value


def _streams(device: torch.device) -> Any:
    """torch's module for the device: `torch.cuda`, or `torch.cpu` whose streams do nothing."""
    return torch.get_device_module(device)


def _used_on(stream: Any, value: object) -> None:
    """Keep memory from being handed out again before this stream has used it."""
    if isinstance(value, Tensor) and value.is_cuda:
        value.record_stream(stream)


@dataclass
class Rank:
    """Rank `rank` of `world`, with its device, its process groups and what it records."""

    rank: int
    world: int
    device: torch.device
    backend: str  # 'nccl' or 'gloo'
    recording: bool = True  # off while evaluating
    traced: int = 60  # steps whose spans are kept; bytes are counted in all
    staleness_errors: bool = False  # measure how far stale rows and gradients are from true ones
    gradient_errors: bool = False  # measure how far gradients of weights are from exact ones
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # operation -> bytes sent while recording
    activity: Activity = field(default_factory=Activity)  # what an error names
    counted: set[Label] = field(default_factory=set)  # by `count_ahead`, not sent yet
    exchange_group: dist.ProcessGroup | None = None
    timeout_s: float = 30.0  # how long a collective waits for its ranks
    nccl_least_s: float = NCCL_LEAST_S  # and at least so long over NCCL
    streams: bool = False  # lanes are streams without threads; so over NCCL
    card: str = ""  # the GPU, as no other is called; "" without one
    watch: MemoryWatch | None = None  # of the memory that it fills
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _lanes: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    _failed: dict[str, BaseException] = field(default_factory=dict)  # lane -> its first error
    _streams: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _clock: DeviceClock | None = None
    # spans whose begin and end the device has still to reach
    _marked: list[tuple[Span, Mark, Mark]] = field(default_factory=list)

    def in_server_memory(self) -> AbstractContextManager[None]:
        """A block; what it allocates and keeps is the server's memory and not the device's."""
        return nullcontext() if self.watch is None else self.watch.left_out()

    @property
    def wire_device(self) -> torch.device:
        """Where communication reads and writes: the GPU under NCCL, host memory under Gloo."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def staged(self, rows: Tensor) -> Tensor:
        """The rows on `wire_device`, contiguous."""
        if rows.is_cuda:
            _used_on(torch.cuda.current_stream(self.device), rows)
        return rows.to(self.wire_device).contiguous()

    def unstaged(self, rows: Tensor) -> Tensor:
        """The rows on the rank's device."""
        return rows.to(self.device)

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

    def settle(self, all_lanes: bool = False) -> None:
        """Wait until the device has done what the current stream was given.

        Spans that are over are then in `spans`. all_lanes: wait for those of lanes as well.
        """
        if self.device.type != "cuda":
            return
        lanes = self._streams.values() if all_lanes else ()
        for stream in (torch.cuda.current_stream(self.device), *lanes):
            self._await(stream)
        if all_lanes:
            torch.cuda.synchronize(self.device)
        with self._lock:
            self._read()
            if self._clock is not None:
                self._clock.renew()

    def _await(self, stream: Any) -> None:
        """Wait until the device has done what a stream was given.

        NCCL's messages wait there, and of a peer that is lost it may never hear. Torch then ends
        this process, which says nothing. So the rank is less patient. Raises RuntimeError.
        """
        if self.backend != "nccl" or self.world == 1:
            stream.synchronize()
            return
        begun, looks, shown = time.monotonic(), 0, set[str]()
        while not stream.query():
            if (waited := time.monotonic() - begun) > looks:  # a second each
                looks, shown = looks + 1, shown | self._show_device()
            if waited > self.patience:
                raise RuntimeError(f"NCCL timed out after {self.patience:g} s")
            time.sleep(LOOK_S)
        for lane in shown:
            self.activity.end(lane)

    def _show_device(self) -> set[str]:
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

    @property
    def patience(self) -> float:
        """How long a message may take [s].

        Over NCCL a host enqueues a step's messages ahead of it, so they wait for its computation.
        """
        return max(self.timeout_s, self.nccl_least_s if self.backend == "nccl" else 0.0)

    @property
    def limit(self) -> timedelta:
        """How long torch lets a message take."""
        later_s = SPEAKS_FIRST_S if self.backend == "nccl" else 0.0
        return timedelta(seconds=self.patience + later_s)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; None is the group of all ranks.

        All ranks must first ask for the same groups in the same order.
        """
        if len(ranks) == self.world:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), backend=self.backend, timeout=self.limit
            )
            if self.rank in ranks:
                self.meet(self._groups[ranks])
        return self._groups[ranks]

    def open_pairs(self, distance: int) -> None:
        """Let ranks send messages to the one `distance` further on, and back. All ranks call this.

        Over NCCL two ranks get a communicator. In one of all ranks, a message that is received
        would wait for the one that is sent before it, to another rank.
        """
        if self.backend == "nccl":
            for first in range(self.world - distance):
                self.group((first, first + distance))

    def pair(self, peer: int) -> dist.ProcessGroup | None:
        """The group in which messages between this rank and the peer go (`open_pairs`)."""
        if self.backend == "nccl":
            return self.group((min(self.rank, peer), max(self.rank, peer)))
        return self.exchange_group

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """A barrier of the group's ranks."""
        if self.world > 1:
            number = torch.zeros(1, device=self.wire_device)
            dist.all_reduce(number, group=group)
            self.settle()  # over NCCL the host has only enqueued the sum

    def meet(self, group: dist.ProcessGroup) -> None:
        """Connect a new group. All of its ranks call this.

        NCCL connects a group in its first call, which all ranks of the group must make. An exchange
        is no such call: ranks that have nothing to move take no part.
        """
        if self.backend == "nccl":
            self.await_all(group)

    def submit(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Do `work` on a lane, after what the lane has already.

        On CUDA also after what the current stream was given before; whoever asks for the result
        goes on after the work.

        Over Gloo a host waits for its messages, so a lane is a thread. Over NCCL a host only
        enqueues them, so a lane is a CUDA stream, and the step's own thread enqueues what all lanes
        do, here and now. So all ranks begin the operations of all communicators in one order, that
        of their program. NCCL asks for that where several communicators are under way: otherwise
        each of two ranks may wait for the other's operation behind its own.
        """
        if not self.streams:
            return self.in_thread(lane, work)
        device = _streams(self.device)
        if lane not in self._streams:
            self._streams[lane] = device.Stream()
        own = self._streams[lane]
        own.wait_stream(device.current_stream(self.device))
        with device.stream(own):
            return _Enqueued(work(), own, self.device)

    def in_thread(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Do `work` on the lane's own thread, on CUDA with a stream of its own.

        Nothing follows what failed on a lane: peers would take the next message for the one that
        never came, and Gloo ends a process that receives another length than it expects.
        """
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(
                1, thread_name_prefix=lane, initializer=self._start_lane
            )

        def unless_failed() -> T:
            if lane in self._failed:
                raise self._failed[lane]
            try:
                return work()
            except BaseException as error:
                self._failed[lane] = error
                raise

        if self.device.type != "cuda":
            return self._lanes[lane].submit(unless_failed)
        here = torch.cuda.current_stream(self.device)
        before = here.record_event()

        def on_stream() -> T:
            own = torch.cuda.current_stream(self.device)
            own.wait_event(before)
            result = unless_failed()
            own.synchronize()  # also what follows the last span
            _used_on(here, result)
            return result

        return self._lanes[lane].submit(on_stream)

    def _start_lane(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the lanes' threads and the process groups."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True)
        if dist.is_initialized():
            dist.destroy_process_group()


def there(result: T) -> Future[T]:
    """A future that is done, with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
