"""Whether any rank still does anything, seen from the launcher.

Ranks notice a peer that is silent. They cannot notice that all of them are: stopped by a signal or
a debugger, or waiting for each other in a way that no time-out bounds.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gnnplan.executor.launch.blame import Failure
from gnnplan.executor.ranks import activity

HEAD_START = 5.0  # [s] beyond their own time-out, in which ranks speak for themselves
BUSY = 0.5  # [s] of a core, from which on a rank computes
SEEN = 1.0  # [s] at most that pass between two looks; a launcher that was stopped has not looked


@dataclass
class Heartbeat:
    """Looks at the ranks of one attempt: at the operation that each is in, and at its core time.

    pids: of each rank's process. servers: of each rank. limit_s: for how long none may do
    anything [s]. Where a system does not tell core times, all ranks count as busy.
    """

    pids: Mapping[int, int]
    servers: Mapping[int, int]
    out: Path
    limit_s: float
    _looked: float = field(default_factory=time.monotonic)
    _silent_s: float = 0.0
    _activities: tuple[str, ...] = ()
    _cores_s: float = 0.0

    def look(self) -> None:
        """End all ranks, with a note of each, once they have been silent for too long."""
        now = time.monotonic()
        self._silent_s += min(now - self._looked, SEEN)
        self._looked = now
        activities = tuple(activity.read(activity.seen(self.out, rank)) for rank in self.pids)
        cores_s = sum(map(_core_s, self.pids.values()))
        if activities != self._activities or abs(cores_s - self._cores_s) > BUSY:
            self._activities, self._cores_s, self._silent_s = activities, cores_s, 0.0
        elif self._silent_s > self.limit_s + HEAD_START and all(map(_is_amid, activities)):
            self._end(activities)

    def _end(self, activities: tuple[str, ...]) -> None:
        said = (
            f"no rank has done anything for {self._silent_s:.0f} s; were they stopped? One that"
            " works longer at an operation needs a longer --timeout"
        )
        for (rank, pid), where in zip(self.pids.items(), activities, strict=True):
            with suppress(OSError):  # a folder that is gone must not keep them alive
                failure = Failure(4, said, where, rank, self.servers[rank])
                activity.leave(activity.seen(self.out, rank), failure.note)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _is_amid(activity: str) -> bool:
    """Whether a rank is amid an epoch. At other times it may rightly wait: for a disk, a compiler
    that it has started, or its turn."""
    return " of epoch " in activity and not activity.startswith("the checkpoint")


def _core_s(pid: int) -> float:
    """Seconds for which a process and its threads have kept cores busy [s]; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0 if Path("/proc/self/stat").exists() else time.monotonic()
    # after the name, which may hold blanks
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
