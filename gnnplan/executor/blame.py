"""Whose fault it is that ranks ended before their time: from exit codes, the notes that ranks leave, and what each was in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gnnplan.executor import checkpoint, doing
from gnnplan.planner.errors import GnnplanError, LostRank

WAITED = ("imed out", "imeout")  # words of errors that say so, of torch and of the system
FAILED_WITH_OTHERS = 75  # exit code of a rank that stopped because its peers did


@dataclass(frozen=True)
class Failure:
    """How a rank ended before its time, as it says itself."""

    exit_code: int
    message: str
    doing: str  # the operation it was in
    rank: int
    server: int | None  # None: it has not read its plan


def note(out: Path, failure: Failure) -> None:
    """For the launcher, at once: who waited for the disk would be told to end before it has said why. Raises OSError."""
    beside = out / f".error.rank{failure.rank}"
    beside.write_text(json.dumps(asdict(failure)))
    os.replace(beside, out / f"error.rank{failure.rank}.json")


def forget(out: Path) -> None:
    """What ranks of an attempt before have left of themselves."""
    for left in out.glob("error.rank*.json"):
        left.unlink()
    doing.forget(out)


def blame(failures: Mapping[int, Any], out: Path, servers: Sequence[int], timeout_s: float, starved: str = "") -> GnnplanError:
    """The rank that failed by itself, not those that stopped because it did. `failures`: torch's, by rank; servers: of every rank.
    `starved`: what to say of a killed rank if the kernel has killed a process for its memory."""
    notes = {rank: json.loads(path.read_text()) for rank in range(len(servers)) if (path := out / f"error.rank{rank}.json").exists()}

    def guilt(item: tuple[int, Any]) -> tuple[bool, bool, float]:
        code = item[1].exitcode
        return (code == FAILED_WITH_OTHERS or code == -signal.SIGTERM, code >= 0, item[1].timestamp)

    def who(rank: int) -> str:
        return f"rank {rank} (server {servers[rank]})"

    def where(rank: int) -> str:
        """The operation that it was in; what it says itself is older than what it last wrote there, but of a rank that raised the same."""
        return notes.get(rank, {}).get("doing") or doing.read(doing.seen(out, rank)) or "start"

    rank, failure = min(failures.items(), key=guilt)
    said = notes.get(rank, {})
    if said.get("exit_code") in (1, 2, 3):
        error = GnnplanError(said["message"])
        error.exit_code = said["exit_code"]
        return error
    ended = f"All ranks were stopped; {kept(out, range(len(servers)))}"
    waited = [r for r, note in notes.items() if any(word in note["message"] for word in WAITED)]
    ended_last = failure.timestamp > min(other.timestamp for other in failures.values())
    alone = guilt((rank, failure))[0] or (failure.exitcode == -signal.SIGKILL and ended_last)  # died of the launcher's signals, if of any
    if alone and waited and (silent := [r for r in range(len(servers)) if r not in notes]):
        first = waited[0]
        answerless = " or ".join(f"{who(r)}, in {where(r)}," for r in silent)
        return LostRank(f"{answerless} stopped answering: {who(first)} waited {timeout_s:g} s in {where(first)}. {ended}")
    if alone and len(waited) > 1:
        each = ", ".join(f"{who(r)} in {where(r)}" for r in waited)
        return LostRank(f"ranks do not reach each other: {each} waited {timeout_s:g} s. None of them died: is a link between them down? "
                        f"{ended}")  # fmt: skip
    code = failure.exitcode
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else said.get("message", f"exit code {code}")
    if code == -signal.SIGKILL and starved:
        how += f", as the kernel does to processes when memory runs out. {starved}"
    return LostRank(f"{who(rank)} was lost in {where(rank)}: {how}. {ended}")


def kept(out: Path, ranks: Iterable[int]) -> str:
    """What is safe on disk, and how to go on from it."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().count("\n") if metrics.exists() else 0
    last = checkpoint.latest(checkpoint.stored(out, ranks).values())
    onwards = f"; go on from epoch {last} with `gnnplan run --resume {out}`" if last else ""
    return f"{lines} finished epochs are in {metrics}{onwards}"
