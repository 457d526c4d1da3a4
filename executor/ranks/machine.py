"""What this machine is, and how many more processes it lets this user start."""

from __future__ import annotations

import os
import platform
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch


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
