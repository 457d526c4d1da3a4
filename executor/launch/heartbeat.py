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

from gnnplan.executor.launch.blame import Failure, note
from gnnplan.executor.ranks import activity

HEAD_START = 5.0  # [s] beyond their own time-out, in which ranks speak for themselves
BUSY = 0.5  # [s] of a core, from which on a rank computes
DISK = "D"  # state of a process that waits for a disk
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
        seen = [_seen(pid) for pid in self.pids.values()]
        cores_s = sum(seconds for _, seconds in seen)
        is_busy = cores_s - self._cores_s > BUSY or any(state == DISK for state, _ in seen)
        if is_busy or activities != self._activities:
            self._activities, self._cores_s, self._silent_s = activities, cores_s, 0.0
        elif self._silent_s > self.limit_s + HEAD_START and not any(map(_waits, activities)):
            self._end(activities)

    def _end(self, activities: tuple[str, ...]) -> None:
        said = (
            f"no rank has done anything for {self._silent_s:.0f} s; were they stopped? One that"
            " works longer at an operation needs a longer --timeout"
        )
        for (rank, pid), where in zip(self.pids.items(), activities, strict=True):
            with suppress(OSError):  # a full disk must not keep them alive
                note(self.out, Failure(4, said, where or "start", rank, self.servers[rank]))
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _waits(activity: str) -> bool:
    return activity.startswith("waiting for its turn")


def _seen(pid: int) -> tuple[str, float]:
    """A process's state, and for how long it and its threads have kept cores busy [s]."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", time.monotonic()
    # after the name, which may hold blanks
    state, *numbers = text.rpartition(")")[2].split()
    user, system = map(int, numbers[10:12])
    return state, (user + system) / os.sysconf("SC_CLK_TCK")
