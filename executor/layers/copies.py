"""Rows between the server's memory and a GPU, through page-locked buffers and on their own stream.

Several threads fill one buffer with scattered rows while the other one travels: a GPU's rank has
cores to spare. Only buffers are page-locked, so they bound what of the server's memory is."""

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
MOST_THREADS = 8  # beyond which the server's memory is no faster

# reads or writes rows `start` to `stop` of a buffer, which are the third argument
Work = Callable[[int, int, Tensor], object]


@cache
def staging(device: torch.device) -> Staging:
    """The buffers of this process for a device."""
    return Staging(device)


class Staging:
    """Two buffers between the server's memory and a device. One copy at a time."""

    def __init__(self, device: torch.device, size: int = BUFFER) -> None:
        self.device, self.module = device, torch.get_device_module(device)
        self.stream: Any = self.module.Stream()
        self.buffers = [
            torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)
        ]
        self.copied = [self.module.Event() for _ in self.buffers]
        self.lock = Lock()
        sharing = max(torch.cuda.device_count(), 1)
        self.threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // sharing))
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="copies")

    def load(self, into: Tensor, dtype: torch.dtype, gather: Work) -> None:
        """Fill rows on the device [R, H]; `gather` writes them, as `dtype`, in any order.

        What the current stream is given next finds them there. The host waits for none of the
        device's work but that of these buffers.
        """
        here = self.module.current_stream(self.device)
        with self.lock:
            self.stream.wait_stream(here)  # which may still use the memory that the rows get
            for start, stop, buffer, copied in self._turns(into, dtype):
                copied.synchronize()  # what was in the buffer has left
                self._in_parts(gather, start, stop, buffer)
                with self.module.stream(self.stream):
                    if dtype != into.dtype:  # converted there: here it would take one core
                        buffer = buffer.to(self.device, non_blocking=True)
                    into[start:stop].copy_(buffer, non_blocking=True)
                    copied.record(self.stream)
            here.wait_stream(self.stream)

    def store(self, rows: Tensor, scatter: Work) -> None:
        """Bring rows [R, H] of the device to `scatter`, which reads them in any order.

        Returns when all have been read.
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
        """Pieces of the rows: from where to where, and a buffer's rows of as many numbers."""
        width = rows.shape[1]
        most = max(self.buffers[0].numel() // max(width * dtype.itemsize, 1), 1)
        for turn, start in enumerate(range(0, len(rows), most)):
            stop = min(start + most, len(rows))
            numbers = self.buffers[turn % 2].view(dtype)[: (stop - start) * width]
            yield start, stop, numbers.view(stop - start, width), self.copied[turn % 2]

    def _in_parts(self, work: Work, start: int, stop: int, buffer: Tensor) -> None:
        """Do the work of a piece on all threads."""
        size = -(-(stop - start) // self.threads)
        begins = range(start, stop, size)
        ends = [min(begin + size, stop) for begin in begins]
        parts = [buffer[b - start : e - start] for b, e in zip(begins, ends, strict=True)]
        list(self.pool.map(work, begins, ends, parts))
