"""The lanes of a rank: what it does beside its step, in the order in which each was given it.

The lane 'compute' is the step's own thread and stream. What any other lane is, `Lanes.submit` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from gnnplan.executor.layers.kernels import keep_until_used

T = TypeVar("T")


class _Enqueued(Future[T]):
    """A result that a stream is going to have. Who asks for it waits on the device."""

    def __init__(self, result: T, stream: Any, device: torch.device) -> None:
        super().__init__()
        self.set_result(result)
        self._done, self._device = stream.record_event(), device

    def result(self, timeout: float | None = None) -> T:
        value, here = super().result(timeout), _streams(self._device).current_stream(self._device)
        here.wait_event(self._done)
        keep_until_used(here, value)
        return value


def _streams(device: torch.device) -> Any:
    """torch's module for the device: `torch.cuda`, or `torch.cpu` whose streams do nothing."""
    return torch.get_device_module(device)


class Lanes:
    """The lanes of a rank on one device."""

    def __init__(self, device: torch.device, are_streams: bool) -> None:
        self.device = device
        self.are_streams = are_streams  # without threads; so over NCCL
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._failed: dict[str, BaseException] = {}  # lane -> its first error
        self._streams: dict[str, Any] = {}

    @property
    def streams(self) -> Iterable[Any]:
        """The streams of lanes without threads."""
        return self._streams.values()

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
        """Do `work` on the lane's own thread, on CUDA with a stream of its own.

        Nothing follows what failed on a lane: peers would take the next message for the one that
        never came, and Gloo ends a process that receives another length than it expects.
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
        here = torch.cuda.current_stream(self.device)
        before = here.record_event()

        def on_stream() -> T:
            own = torch.cuda.current_stream(self.device)
            own.wait_event(before)
            result = unless_failed()
            own.synchronize()  # also what follows the last span
            keep_until_used(here, result)
            return result

        return self._threads[lane].submit(on_stream)

    def _start(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the threads, after what they have been given."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)


def completed_future(result: T) -> Future[T]:
    """A future that is done, with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future
