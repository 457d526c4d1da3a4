"""The launcher's eye on its ranks: whether any of them still does anything, and which failed first.

The launcher sees exit codes and core times; ranks leave their last activity and a note
(ranks/activity.py). One lost rank stops all others, so most failures are consequences. Ranks notice
a peer that is silent, but not that all of them are: stopped by a signal or a debugger, or waiting
for each other in a way that no time-out bounds.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gnnplan.executor.launch.failure import (
    FAILED_WITH_OTHERS,
    OWN_EXIT_CODES,
    REMEDY,
    Failure,
    account,
    error_of,
)
from gnnplan.executor.ranks import activity
from gnnplan.executor.ranks.checkpoint import last_stored
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank
from gnnplan.planner.vocabulary.progress import say

HEAD_START = 5.0  # [s] beyond their own time-out, in which ranks speak for themselves
BUSY = 0.5  # [s] of a core, from which on a rank computes
SEEN = 1.0  # [s] at most that pass between two looks; a launcher that was stopped has not looked


class Watchdog:
    """Watches the ranks of a run on this machine, attempt by attempt; error: why it is over.

    names: of every process, as messages have them. limit_s: for how long none may do anything [s].
    unwind: called now and then; it raises where the run is to end. safe: says what is on disk.
    predicted: memory of the fullest rank by use [B].
    """

    error = GnnplanError()

    def __init__(
        self,
        out: Path,
        names: Sequence[str],
        limit_s: float,
        unwind: Callable[[], None],
        safe: Callable[[], str],
        predicted: Mapping[str, float],
    ) -> None:
        self.out, self.names, self.limit_s = out, names, limit_s
        self.unwind, self.safe, self.predicted = unwind, safe, predicted
        self.killed_before = _killings()

    def begin(self) -> None:
        """Ranks are about to start. Raises SpecError."""
        activity.begin(self.out, len(self.names))

    def watch(self, pids: Sequence[int]) -> None:
        """These are the ranks' processes."""
        self.pids = pids
        self._looked, self._silent_s = time.monotonic(), 0.0
        self._activities, self._cores_s = [""], 0.0

    def look(self) -> None:
        """End all ranks, with a note of each, once they have been silent for too long.

        Where a system does not tell core times, all ranks count as busy.
        """
        self.unwind()
        now = time.monotonic()
        self._silent_s += min(now - self._looked, SEEN)
        self._looked = now
        paths = [activity.seen(self.out, process) for process in range(len(self.pids))]
        activities = [activity.read(path) for path in paths]
        cores_s = sum(map(_core_s, self.pids))
        if activities != self._activities or abs(cores_s - self._cores_s) > BUSY:
            self._activities, self._cores_s, self._silent_s = activities, cores_s, 0.0
        elif self._silent_s > self.limit_s + HEAD_START and all(map(_is_amid, activities)):
            said = (
                f"no rank has done anything for {self._silent_s:.0f} s; were they stopped? One that"
                " works longer at an operation needs a longer --timeout"
            )
            for path, pid, where in zip(paths, self.pids, activities, strict=True):
                with suppress(OSError):  # a folder that is gone must not keep them alive
                    activity.leave(path, Failure(LostRank.exit_code, said, where).note)
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def is_over(self, failures: Mapping[int, Any], restarts_left: int) -> bool:
        """Whether the run ends with these failures of processes; any other is started anew.

        Ranks whose input is wrong are not.
        """
        starved = _killings() > self.killed_before
        self.error = blame(
            failures,
            self.out,
            self.names,
            self.limit_s,
            self.safe(),
            f"{account(self.predicted)}\n{REMEDY}" if starved else "",
        )
        if not (restarts_left and isinstance(self.error, LostRank)):
            return True
        self.unwind()  # a signal to all processes has ended the ranks
        last = last_stored(self.out, range(len(self.names)))
        where = f"epoch {last}" if last else "the beginning"
        say(
            f"{self.error}\nstarting all ranks anew from {where} (restarts left after this one:"
            f" {restarts_left - 1})"
        )
        return False


def blame(
    failures: Mapping[int, Any],
    out: Path,
    names: Sequence[str],
    timeout_s: float,
    safe: str,
    starved: str = "",
) -> GnnplanError:
    """The error of the rank that failed by itself, not of those that stopped because it did.

    failures: exitcode and timestamp by process, as torch's elastic agent has them.
    names: of every process.
    safe: what is on disk.
    starved: added to the message of a killed rank; given if the kernel has killed a process
        because memory ran out.
    """
    notes = {
        process: Failure(**json.loads(said))
        for process in range(len(names))
        if (said := activity.read_note(activity.seen(out, process)))
    }

    def place(process: int) -> str:
        """The operation that a rank was in.

        The note of a rank that raised an error is more precise than its activity file, which may
        show what another lane began afterwards.
        """
        noted = notes[process].activity if process in notes else ""
        return noted or activity.read(activity.seen(out, process)) or "start"

    rank = min(failures, key=lambda rank: _guilt(failures[rank]))
    code, note = failures[rank].exitcode, notes.get(rank)
    if note and note.exit_code in OWN_EXIT_CODES:
        began = f". {names[rank]} was in {place(rank)}. {safe}" if "epoch" in note.activity else ""
        return error_of(note.message + began, note.exit_code)
    waited = [r for r, note in notes.items() if note.timed_out]
    if waited and _only_waited(failures, rank):
        waited_s = notes[waited[0]].waited_s or timeout_s
        if silent := [r for r in range(len(names)) if r not in notes]:
            suspects = " or ".join(f"{names[r]}, in {place(r)}," for r in silent)
            return LostRank(
                f"{suspects} stopped answering: {names[waited[0]]} waited {waited_s:g} s in"
                f" {place(waited[0])}. {safe}"
            )
        if len(waited) > 1:
            waiting = ", ".join(f"{names[r]} in {place(r)}" for r in waited)
            return LostRank(
                f"ranks do not reach each other: {waiting} waited {waited_s:g} s. None of them"
                f" died: is a link between them down? {safe}"
            )
    if note:
        reason = note.message
    elif code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGABRT:
            reason += ", as torch and Gloo do to a rank whose peers are lost"
    else:
        reason = f"exit code {code}"
    if code == -signal.SIGKILL and starved:
        reason += f", as the kernel does to processes when memory runs out. {starved}"
    return LostRank(f"{names[rank]} was lost in {place(rank)}: {reason}. {safe}")


def _guilt(failure: Any) -> tuple[bool, bool, float]:
    """Sorts ranks: first those that failed by themselves, by a signal, and early."""
    # Gloo aborts a rank that receives what its peer should not have sent
    with_others = (FAILED_WITH_OTHERS, -signal.SIGTERM, -signal.SIGABRT)
    return failure.exitcode in with_others, failure.exitcode >= 0, failure.timestamp


def _only_waited(failures: Mapping[int, Any], guiltiest: int) -> bool:
    """Whether even the guiltiest rank only waited, or was ended by the launcher's signal."""
    failure = failures[guiltiest]
    ended_last = failure.timestamp > min(other.timestamp for other in failures.values())
    return _guilt(failure)[0] or (failure.exitcode == -signal.SIGKILL and ended_last)


def kept(out: Path, ranks: Iterable[int], command: str = "gnnplan run") -> str:
    """What is safe on disk, and the command that goes on from it."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().count("\n") if metrics.exists() else 0
    last = last_stored(out, ranks)
    onwards = f"; go on from epoch {last} with `{command} --resume {out}`" if last else ""
    return f"{lines} finished epochs are in {metrics}{onwards}"


def _is_amid(where: str) -> bool:
    """Whether a rank is amid an epoch. At other times it may rightly wait: for a disk, a compiler
    that it has started, or its turn."""
    return " of epoch " in where and not where.startswith("the checkpoint")


def _core_s(pid: int) -> float:
    """Seconds for which a process and its threads have kept cores busy [s]; 0 once it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0 if Path("/proc/self/stat").exists() else time.monotonic()
    # after the name, which may hold blanks
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _killings() -> int:
    """Processes that the kernel has killed for memory since this machine started.

    0 where the kernel does not count them.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
