"""What this machine is, how many more processes it lets this user start, and how much memory a
rank fills, by the allocator's own count.

Pages that a process ever touched would count memory that was freed long ago. On CUDA torch keeps
the peak. On Linux CPUs the count is glibc's: bytes handed out and not freed yet, for tensors and
arrays alike, whichever thread or library asked for them. A watch reads it a thousand times a
second, so it may miss a peak shorter than a millisecond."""

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
    """What the maker calls this GPU, or this machine's processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def gpus() -> int:
    """GPUs that this process sees."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class ProcessRoom(NamedTuple):
    """How many more processes and threads may be started; the kernel counts them together."""

    left: int
    limit: str  # what bounds them, in words
    remedy: str


def process_room() -> ProcessRoom | None:
    """The tightest of the user's limit and of the containers' around this process; None: no limit.

    Linux. The user's does not hold for root.
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
    """The room in each control group around this process that has a limit (pids.max)."""
    groups: list[Path] = []
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "pids"):  # of version 2, or of version 1
                top = system / controllers
                inner = top / path.lstrip("/")
                groups += [one for one in (inner, *inner.parents) if one.is_relative_to(top)]
    remedy = "give the container more processes (docker --pids-limit, Kubernetes' podPidsLimit)"
    for group in groups:
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            most = int((group / "pids.max").read_text())
            used = int((group / "pids.current").read_text())
            yield ProcessRoom(most - used, f"pids.max of {group} is {most:,}", remedy)


def _threads_of_user() -> int:
    """Threads of all processes of this user."""
    threads = 0
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # no process, or one that has just ended
            if entry.name.isdecimal() and entry.stat().st_uid == os.getuid():
                threads += len(os.listdir(entry / "task"))
    return threads


class _Mallinfo2(ctypes.Structure):
    """struct mallinfo2 of malloc.h."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


@cache  # to load the C library anew leaves something behind
def _mallinfo2() -> Callable[[], _Mallinfo2] | None:
    """glibc's mallinfo2; None where the C library has none."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):  # musl, glibc before 2.33, macOS
        return None
    function.restype = _Mallinfo2
    return function


def allocated() -> int | None:
    """Memory that this process has allocated and not freed [B]; None if glibc cannot tell."""
    mallinfo2 = _mallinfo2()
    if mallinfo2 is None:
        return None
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)  # in arenas, and mapped one by one


def resident() -> int:
    """Pages of this process in memory now [B]; its peak where the kernel does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def peak(device: torch.device) -> int:
    """Memory filled at the fullest moment so far [B]: torch's on the GPU, else this process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def free_memory() -> float:
    """Memory that new processes may fill without swapping [B]; else half of all memory."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return float(line.split()[1]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) / 2


class MemoryWatch:
    """Watches the peak of allocated memory from when it is made until `stop`."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()  # reference cycles freed while it watches would lower the peak
        self.device, self._stop, self._reading = device, threading.Event(), threading.Lock()
        self._before = self._peak = allocated() or 0
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
        elif _mallinfo2() is not None:
            self._thread = threading.Thread(target=self._sample, name="memory", daemon=True)
            self._thread.start()

    def _sample(self) -> None:
        # not SCHED_BATCH as a rank's other threads (opening.wait_in_turn): it would miss a peak
        with suppress(OSError, AttributeError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        while not self._stop.wait(INTERVAL):
            with self._reading:
                self._peak = max(self._peak, allocated() or 0)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What the block allocates and keeps is the server's memory, and no rank fills it."""
        with self._reading:
            before = allocated() or 0
            yield
            grown = (allocated() or 0) - before if self._thread else 0
            self._before, self._peak = self._before + grown, self._peak + grown

    def stop(self) -> int | None:
        """Growth from the start to the peak until the first call [B]; None if it is unknown."""
        if self._thread is None and self.device.type != "cuda":
            return None
        if not self._stop.is_set():
            self._stop.set()
            if self._thread is None:
                self._peak = torch.cuda.max_memory_allocated(self.device)
            else:
                self._thread.join()
        return self._peak - self._before
