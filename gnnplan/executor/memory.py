"""How much memory a rank really fills: the allocator's own count, not the pages that a process ever touched.

On CUDA torch keeps the peak. On Linux CPUs the count is glibc's: bytes handed out and not yet freed, tensors and arrays
alike, whatever thread or library asked for them. It is read a thousand times a second while a watch runs, so a peak that
lasts less than a millisecond may be missed.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

INTERVAL = 1e-3  # [s]


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]  # fmt: skip


@cache
def _mallinfo() -> ctypes._NamedFuncPointer | None:
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # musl, glibc before 2.33, macOS
        return None
    function.restype = _Mallinfo2
    return function


def allocated() -> int | None:
    """Bytes that this process has asked for and not freed [B]; None where the allocator does not tell."""
    function = _mallinfo()
    if function is None:
        return None
    info = function()
    return info.uordblks + info.hblkhd


def resident() -> int:
    """This process's pages in memory now [B]; where the kernel does not say, the most there ever were."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> float:
    """Memory that new processes may fill without swapping [B]."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


class MemoryWatch:
    """Peak growth of allocated bytes since it began [B]."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # or circles that end while it watches would be taken off the peak
        self.device, self._stop = device, threading.Event()
        self._before = self._peak = allocated() or 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif _mallinfo() is not None:
            self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        with suppress(OSError, AttributeError):  # ranks' threads wait for their turn (worker.py); by then a peak is over
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while not self._stop.wait(INTERVAL):
            self._peak = max(self._peak, allocated() or 0)

    def stop(self) -> int | None:
        """The peak growth until it was first called [B]; None where it cannot be known."""
        if self._thread is None and self.device.type != "cuda":
            return None
        if not self._stop.is_set():
            self._stop.set()
            if self._thread is None:
                self._peak = torch.cuda.max_memory_allocated(self.device)
            else:
                self._thread.join()
        return self._peak - self._before
