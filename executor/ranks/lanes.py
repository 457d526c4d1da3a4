"""The lanes of a rank: queues of work that overlaps its step; a lane works in order.

The lane 'compute' is the step's own thread and stream. Other lanes are threads or CUDA streams
(`Lanes.submit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from gnnplan.executor.layers.kernels import keep_until_used

T = TypeVar("T")


class _Enqueued(Future[T]):
    """A result that a stream will compute. `result` makes the current stream wait, not the host."""

    def __init__(self, result: T, stream: Any, device: torch.device) -> None:
        super().__init__()
        self.set_result(result)
        self._done, self._device = stream.record_event(), device

    def result(self, timeout: float | None = None) -> T:
        value = super().result(timeout)
        stream = _streams(self._device).current_stream(self._device)
        stream.wait_event(self._done)
        keep_until_used(stream, value)
        return value


def _streams(device: torch.device) -> Any:
    """Return torch's module of the device; the streams of `torch.cpu` do nothing."""
    return torch.get_device_module(device)


class Lanes:
    """The lanes of a rank on one device."""

    def __init__(self, device: torch.device, are_streams: bool) -> None:
        self.device = device
        self.are_streams = are_streams  # True over NCCL: lanes are streams, without threads
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._failed: dict[str, BaseException] = {}  # lane -> its first error
        self._streams: dict[str, Any] = {}

    @property
    def streams(self) -> Iterable[Any]:
        """The streams of lanes that are streams."""
        return self._streams.values()

    def submit(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a lane, after the lane's earlier work.

        On CUDA it also runs after the earlier work of the current stream; the stream that asks for
        the result continues after the work.

        Over Gloo the host waits for messages, so a lane is a thread. Over NCCL the host only
        enqueues messages, so a lane is a CUDA stream, and the step's own thread enqueues the work
        of all lanes in this call. So all ranks start the operations of all communicators in program
        order. NCCL requires the same order on all ranks when several communicators are active:
        otherwise two ranks may wait for each other's operation.
        """
        if not self.are_streams:
            return self.in_thread(lane, work)
        device = _streams(self.device)
        if lane not in self._streams:
            self._streams[lane] = device.Stream()
        own = self._streams[lane]
        own.wait_stream(device.current_stream(self.device))
        with device.stream(own):
            return _Enqueued(work(), own, self.device)

    def in_thread(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the lane's own thread, on CUDA with its own stream.

        After an error the lane runs nothing more: peers would take the next message for the one
        that failed, and Gloo ends a process that receives a message of unexpected length.
        """
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(
                1, thread_name_prefix=lane, initializer=self._start
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
            return self._threads[lane].submit(unless_failed)
        stream = torch.cuda.current_stream(self.device)
        before = stream.record_event()

        def on_stream() -> T:
            own = torch.cuda.current_stream(self.device)
            own.wait_event(before)
            result = unless_failed()
            own.synchronize()  # also waits for work after the last span
            keep_until_used(stream, result)
            return result

        return self._threads[lane].submit(on_stream)

    def _start(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the threads, after their submitted work."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)


def completed_future(result: T) -> Future[T]:
    """Return a completed future with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
