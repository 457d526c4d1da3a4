"""Which rank failed first, and what it was doing.

The launcher sees exit codes; ranks leave notes and their last activity (ranks/activity.py). One
lost rank stops all others, so most failures are consequences.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gnnplan.executor.ranks import activity, checkpoint
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank

TIMED_OUT = ("imed out", "imeout")  # parts of the messages of torch and of the system
FAILED_WITH_OTHERS = 75  # exit code of a rank that stopped because its peers did
OWN_EXIT_CODES = (1, 2, 3)  # of errors whose message says everything
MOST_SAID = 10_000  # letters of a note's message: all of them are at most 60 kB of JSON


@dataclass(frozen=True)
class Failure:
    """How a rank ended before its time, in its own words."""

    exit_code: int
    message: str
    activity: str  # the operation it was in
    rank: int
    server: int | None  # None: it has not read its plan
    waited_s: float = 0.0  # for its peers, if that is known [s]

    @property
    def note(self) -> str:
        """What the launcher reads."""
        short = replace(self, message=self.message[:MOST_SAID])
        return json.dumps(asdict(short), ensure_ascii=False)


def blame(
    failures: Mapping[int, Any],
    out: Path,
    servers: Sequence[int],
    timeout_s: float,
    starved: str = "",
) -> GnnplanError:
    """The error of the rank that failed by itself, not of those that stopped because it did.

    failures: exitcode and timestamp by rank, as torch's elastic agent has them.
    servers: the server of every rank.
    starved: added to the message of a killed rank; given if the kernel has killed a process
        because memory ran out.
    """
    case = _Case(failures, out, servers)
    rank = min(failures, key=case.guilt)
    failure, own_note = failures[rank], case.notes.get(rank, {})
    ended = f"All ranks were stopped; {kept(out, range(len(servers)))}"
    if own_note.get("exit_code") in OWN_EXIT_CODES:
        said = own_note["message"]
        if "epoch" in own_note["activity"]:  # it had begun to train
            said += f". {case.name(rank)} was in {case.last_activity(rank)}. {ended}"
        error = GnnplanError(said)
        error.exit_code = own_note["exit_code"]
        return error
    waited = [
        r for r, said in case.notes.items() if any(part in said["message"] for part in TIMED_OUT)
    ]
    if case.nobody_died(rank):
        silent = [r for r in range(len(servers)) if r not in case.notes]
        if waited and silent:
            first = waited[0]
            suspects = " or ".join(f"{case.name(r)}, in {case.last_activity(r)}," for r in silent)
            return LostRank(
                f"{suspects} stopped answering: {case.name(first)} waited"
                f" {case.notes[first]['waited_s'] or timeout_s:g} s in"
                f" {case.last_activity(first)}. {ended}"
            )
        if len(waited) > 1:
            waiting = ", ".join(f"{case.name(r)} in {case.last_activity(r)}" for r in waited)
            return LostRank(
                f"ranks do not reach each other: {waiting} waited"
                f" {case.notes[waited[0]]['waited_s'] or timeout_s:g} s. None of them"
                f" died: is a link between them down? {ended}"
            )
    code = failure.exitcode
    if code < 0 and not own_note:
        reason = f"killed by {signal.Signals(-code).name}"
    else:
        reason = own_note.get("message", f"exit code {code}")
    if code == -signal.SIGABRT and not own_note:
        reason += ", as torch and Gloo do to a rank whose peers are lost"
    if code == -signal.SIGKILL and starved:
        reason += f", as the kernel does to processes when memory runs out. {starved}"
    return LostRank(f"{case.name(rank)} was lost in {case.last_activity(rank)}: {reason}. {ended}")


class _Case:
    """What is known of all ranks after one of them has failed."""

    def __init__(self, failures: Mapping[int, Any], out: Path, servers: Sequence[int]) -> None:
        self.failures, self.out, self.servers = failures, out, servers
        self.notes: dict[int, dict[str, Any]] = {
            rank: json.loads(said)
            for rank in range(len(servers))
            if (said := activity.read_note(activity.seen(out, rank)))
        }

    def guilt(self, rank: int) -> tuple[bool, bool, float]:
        """Sorts ranks: first those that failed by themselves, by a signal, and early."""
        failure = self.failures[rank]
        code = failure.exitcode
        # Gloo aborts a rank that receives what its peer should not have sent
        with_others = (FAILED_WITH_OTHERS, -signal.SIGTERM, -signal.SIGABRT)
        return code in with_others, code >= 0, failure.timestamp

    def nobody_died(self, rank: int) -> bool:
        """Whether even the guiltiest rank only waited, or was ended by the launcher's signal."""
        failure = self.failures[rank]
        ended_last = failure.timestamp > min(other.timestamp for other in self.failures.values())
        return self.guilt(rank)[0] or (failure.exitcode == -signal.SIGKILL and ended_last)

    def name(self, rank: int) -> str:
        return f"rank {rank} (server {self.servers[rank]})"

    def last_activity(self, rank: int) -> str:
        """The operation that a rank was in.

        The note of a rank that raised an error is more precise than its activity file, which may
        show what another lane began afterwards.
        """
        noted = self.notes.get(rank, {}).get("activity")
        return noted or activity.read(activity.seen(self.out, rank)) or "start"


def kept(out: Path, ranks: Iterable[int], command: str = "gnnplan run") -> str:
    """What is safe on disk, and the command that goes on from it."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().count("\n") if metrics.exists() else 0
    last = checkpoint.last_stored(out, ranks)
    onwards = f"; go on from epoch {last} with `{command} --resume {out}`" if last else ""
    return f"{lines} finished epochs are in {metrics}{onwards}"
