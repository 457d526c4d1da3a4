"""This machine's devices, its limits on processes, and the memory that a rank allocates.

Memory is the allocator's own count, because the pages that a process has touched include memory
freed long ago. On CUDA torch keeps the peak. On Linux CPUs the count is glibc's: bytes allocated
and not freed yet, for tensors and arrays alike, by any thread or library. A watch reads it a
thousand times a second, so it may miss a peak shorter than a millisecond."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

INTERVAL = 1e-3  # [s] between two readings


def device_name(device: torch.device) -> str:
    """Return the product name of this GPU, or of this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """Return the number of GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class ProcessRoom(NamedTuple):
    """A limit on processes and threads, which the kernel counts together."""

    left: int  # number that can still be started
    limit: str  # name and value of the limit, in words
    remedy: str


def process_room() -> ProcessRoom | None:
    """Return the tightest limit of the user and of the containers around this process (Linux).

    None: no limit. The user's limit does not apply to root.
    """
    rooms = list(_of_containers())
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if os.getuid() and most != resource.RLIM_INFINITY:
        left = most - _threads_of_user()
        remedy = "allow more processes (ulimit -u, LimitNPROC of a service), or end some"
        rooms.append(ProcessRoom(left, f"ulimit -u is {most:,}", remedy))
    return min(rooms, default=None)


def _of_containers(
    own: Path = Path("/proc/self/cgroup"), system: Path = Path("/sys/fs/cgroup")
) -> Iterator[ProcessRoom]:
    """Yield the limit of each control group around this process that has one (pids.max)."""
    groups: list[Path] = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "pids"):  # cgroups of version 2, or of version 1
                top = system / controllers
                inner = top / path.lstrip("/")
                groups += [path for path in (inner, *inner.parents) if path.is_relative_to(top)]
    remedy = "give the container more processes (docker --pids-limit, Kubernetes' podPidsLimit)"
    for group in groups:
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            most = int((group / "pids.max").read_text())
            used = int((group / "pids.current").read_text())
            yield ProcessRoom(most - used, f"pids.max of {group} is {most:,}", remedy)


def _threads_of_user() -> int:
    """Count the threads of all processes of this user."""
    threads = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # not a process, or a process that has just ended
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                threads += len(os.listdir(entry / "task"))
    return threads


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@cache  # every load of the C library would leak a little memory
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """Return glibc's mallinfo2; None if the C library has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # before glibc 2.33
        return None
    function.restype = _Mallinfo2
    return function


def allocated() -> int | None:
    """Return the memory that this process has allocated and not freed [B]; None if unknown."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)  # in arenas, and in mappings of their own


def resident() -> int:
    """Return this process's resident memory [B]."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak(device: torch.device) -> int:
    """Return the peak memory so far [B]: torch's on the GPU, else this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> float:
    """Return the memory available without swapping [B]."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return float(fields["MemAvailable"].split()[0]) * 1024


class MemoryWatch:
    """A watch on the peak of allocated memory, from its construction until `stop`."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # reference cycles freed while it watches would lower the peak
        self.device, self._stop, self._reading = device, threading.Event(), threading.RLock()
        self._before = self._peak = allocated() or 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif _mallinfo2() is not None:
            self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        # not SCHED_BATCH like a rank's other threads (rank.wait_in_turn), or it misses peaks
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while not self._stop.wait(INTERVAL):
            with self._reading:
                self._peak = max(self._peak, allocated() or 0)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Return a context whose allocations do not count: the server's, or an evaluation's."""
        with self._reading:
            before = (allocated() or 0) - self._before
            yield
            # beyond what contexts inside this one have left out
            grown = (allocated() or 0) - self._before - before if self._thread else 0
            self._before, self._peak = self._before + grown, self._peak + grown

    def peak(self) -> int | None:
        """Return the growth from start to the peak so far [B], None if unknown."""
        if self._thread is None and self.device.type != "cuda":
            return None
        if self._thread is None and not self._stop.is_set():
            self._peak = torch.cuda.max_memory_allocated(self.device)
        return self._peak - self._before

    def stop(self) -> None:
        """Stop; later allocations do not change the peak."""
        self.peak()  # reads a GPU's for the last time
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
