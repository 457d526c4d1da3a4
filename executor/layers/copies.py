"""Copies of rows between the server's memory and a GPU: page-locked buffers, a stream of their own.

Several threads gather scattered rows into one buffer while the other buffer is copied: a GPU's rank
has idle cores. Only the two buffers are page-locked, so page-locked memory is bounded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

BUFFER = 16 << 20  # [B] of each of the two buffers
MOST_THREADS = 8  # more threads do not read the server's memory faster

# reads or writes rows `start` to `stop`, whose piece of the buffer is the third argument
Work = Callable[[int, int, Tensor], object]


@cache
def staging(device: torch.device) -> Staging:
    """Return this process's buffers for a device."""
    return Staging(device)


class Staging:
    """Two buffers for copies between the server's memory and a device, one copy at a time."""

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.stream: Any = self.module.Stream()
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self.copied = [self.module.Event() for _ in self.buffers]
        self.lock = Lock()
        self.threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="copies")

    def load(self, into: Tensor, dtype: torch.dtype, gather: Work) -> None:
        """Fill rows [R, H] on the device; `gather` writes them into buffers, as `dtype`.

        Work that is launched on the current stream afterwards sees the rows. The host waits for the
        buffers only, not for other work of the device. `gather` is called for pieces in any order.
        """
        here = self.module.current_stream(self.device)
        with self.lock:
            self.stream.wait_stream(here)  # its kernels may still use the memory of `into`
            for start, stop, buffer, copied in self._turns(into, dtype):
                copied.synchronize()  # the previous copy from this buffer has ended
                self._in_parts(gather, start, stop, buffer)
                with self.module.stream(self.stream):
                    if dtype != into.dtype:  # convert on the device: the host would use one core
                        buffer = buffer.to(self.device, non_blocking=True)
                    into[start:stop].copy_(buffer, non_blocking=True)
                    copied.record(self.stream)
            here.wait_stream(self.stream)

    def store(self, rows: Tensor, scatter: Work) -> None:
        """Copy rows [R, H] from the device to buffers, which `scatter` reads, in any order.

        Return when `scatter` has read all rows.
        """
        with self.lock:
            self.stream.wait_stream(self.module.current_stream(self.device))
            under_way: tuple[int, int, Tensor, Any] | None = None
            for start, stop, buffer, copied in self._turns(rows, rows.dtype):
                with self.module.stream(self.stream):
                    buffer.copy_(rows[start:stop], non_blocking=True)
                    copied.record(self.stream)
                if under_way:
                    self._scatter(scatter, *under_way)
                under_way = start, stop, buffer, copied
            if under_way:
                self._scatter(scatter, *under_way)

    def _scatter(self, scatter: Work, start: int, stop: int, buffer: Tensor, copied: Any) -> None:
        copied.synchronize()
        self._in_parts(scatter, start, stop, buffer)

    def _turns(self, rows: Tensor, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor, Any]]:
        """Yield pieces of the rows: start, stop, a buffer's view [stop - start, H], its event."""
        width = rows.shape[1]
        most = max(self.buffers[0].numel() // max(width * dtype.itemsize, 1), 1)
        for turn, start in enumerate(range(0, len(rows), most)):
            stop = min(start + most, len(rows))
            numbers = self.buffers[turn % 2].view(dtype)[: (stop - start) * width]
            yield start, stop, numbers.view(stop - start, width), self.copied[turn % 2]

    def _in_parts(self, work: Work, start: int, stop: int, buffer: Tensor) -> None:
        """Share the work on a piece among all threads."""
        size = -(-(stop - start) // self.threads)
        begins = range(start, stop, size)
        ends = [min(begin + size, stop) for begin in begins]
        parts = [buffer[b - start : e - start] for b, e in zip(begins, ends, strict=True)]
        list(self.pool.map(work, begins, ends, parts))
