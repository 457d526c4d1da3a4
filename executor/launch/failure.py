"""Failures of ranks: the reason, the operation that the rank was in, and the remedy.

If several ranks failed, `blame` finds the rank at fault, as one lost rank stops all others. If
memory ran out, the message shows the plan's prediction and the measured memory.

If torchrun or srun has started the ranks, our launcher does not watch them. A rank whose peers do
not answer then writes its failure into the store where ranks met, and waits a moment for the
failures of others (`roll_call`). Ranks that write nothing are lost, or wait for a lost rank."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from shlex import quote
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from gnnplan.executor.ranks.activity import Activity, seen
from gnnplan.executor.ranks.checkpoint import last_stored
from gnnplan.executor.ranks.machine import allocated, free_memory, process_room, resident
from gnnplan.executor.ranks.rank import Rank, die_with_parent, leave
from gnnplan.planner.vocabulary.errors import GnnplanError, Infeasible, LostRank, SpecError
from gnnplan.planner.vocabulary.files import make_folder, refusal, remedy_of, write_atomically
from gnnplan.planner.vocabulary.units import show_bytes, show_count

FAILED_WITH_OTHERS = 75  # exit code of a rank that stopped because its peers did
PATIENCE = 2.0  # [s] in which living ranks answer
TORCHRUN = "torchrun .. -m gnnplan run"
HEAD_START = 2.0  # [s] by which a rank that failed by itself ends before its peers
OWN_EXIT_CODES = (1, 2, 3)  # exit codes of errors whose message needs no addition
MOST_SAID = 10_000  # characters of a message, which take at most 60 kB as JSON
# Python's RuntimeError if the kernel refuses a thread: too many threads, or no memory for its stack
NO_THREAD = "can't start new thread"
FEW = 32  # with fewer processes left below the limit, the limit is what stopped a rank
# parts of the RuntimeErrors of torch's allocators
OUT_OF_MEMORY = ("can't allocate memory", "std::bad_alloc", "out of memory", NO_THREAD)
# parts of the messages by which torch.distributed reports a lost peer
LOST_PEER = ("onnection", "ocket", "gloo", "imed out", "NCCL", "peer")
TIMED_OUT = ("imed out", "imeout")  # parts of the messages of torch and of the system
FOREIGN_TEXT = 200  # characters of another library's message that are shown
REMEDY = (
    "plan again with more ranks, --set device.memory=.. for what each may fill, or a smaller"
    " workload"
)


@dataclass(frozen=True)
class Failure:
    """The failure of a rank."""

    exit_code: int
    message: str
    activity: str  # the operation that the rank was in
    waited_s: float = 0.0  # [s] that the rank waited for its peers, if known

    @property
    def note(self) -> str:
        """The failure as JSON, for other processes."""
        short = replace(self, message=self.message[:MOST_SAID])
        return json.dumps(asdict(short), ensure_ascii=False)

    @classmethod
    def of(cls, note: str | bytes) -> Failure:
        """Read a failure that another process has noted."""
        return cls(**json.loads(note))

    @property
    def is_consequence(self) -> bool:
        """Whether the rank stopped because its peers did."""
        return self.exit_code == FAILED_WITH_OTHERS


def name_of(rank: int, server: int, host: str = "") -> str:
    """Return a rank's name in messages."""
    return f"rank {rank} (server {server}{host and f', {host}'})"


def error_of(message: str, exit_code: int) -> GnnplanError:
    """Return the error that another process reported by message and exit code."""
    kinds = (SpecError, Infeasible, LostRank)
    return next((kind for kind in kinds if kind.exit_code == exit_code), GnnplanError)(message)


def be_rank(out: Path, work: Callable[[Path, Activity], Failure | None]) -> NoReturn:
    """Run `work` as a rank that our launcher started; `out` holds its question.

    If the rank fails, it leaves a note on how. A rank that failed with others ends a little later.
    """
    die_with_parent()
    activity = Activity(seen(out, int(os.environ["RANK"])))
    try:
        failure = work(out, activity)
    except Exception as error:
        failure = explain(error, str(activity))
    if failure is None:
        leave(0)
    with suppress(MemoryError):
        activity.leave(failure.note)
    if failure.is_consequence:
        time.sleep(HEAD_START)
    leave(failure.exit_code)


def explain(
    error: Exception,
    activity: str,
    traceback_path: Path | None = None,
    rank: Rank | None = None,
    predicted: Mapping[str, float] = MappingProxyType({}),
) -> Failure:
    """Return the failure of a rank by an error.

    The reason is an error of our own, memory that ran out, a refusal of the system, a lost peer, or
    a bug, whose traceback is stored, if there is a place. activity: what the rank is in now; a span
    notes its operation on an error that passes it, as the lane may be busy again by now. predicted:
    memory of the fullest rank by use [B].
    """
    if spans := getattr(error, "__notes__", []):
        activity = spans[0].removeprefix("in ")
    if isinstance(error, GnnplanError):
        return Failure(error.exit_code, str(error), activity)
    reason = str(error).strip().partition("\n")[0][:FOREIGN_TEXT]
    if limit := no_more_processes(error):
        return Failure(SpecError.exit_code, limit, activity)
    if ran_out(error):
        message = f"memory ran out ({reason or type(error).__name__})"
        told = [account(predicted)] if predicted else []
        message = "\n".join([message, *told, found(rank), REMEDY])
        return Failure(LostRank.exit_code, message, activity)
    if (refused := refusal(error)) is not None:
        remedy = remedy_of(refused)
        where_to = f"{refused.filename}: " if refused.filename else ""
        # a library's message says more than the system's: NCCL's has the bytes that it lacks
        message = (refused.strerror if error is refused else None) or reason
        if "/dev/shm" in reason:
            remedy = "give the container more shared memory (--shm-size)"
        # as for an unwritable file of ours (cannot_write): a restart would fail the same way
        return Failure(SpecError.exit_code, f"{where_to}{message}; {remedy}", activity)
    if isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and any(part in str(error) for part in LOST_PEER)
    ):
        message = f"its peers did not answer ({reason})"
        waited_s = rank.groups.patience if rank else 0.0
        return Failure(FAILED_WITH_OTHERS, message, activity, waited_s)
    kept = f" ({_keep_traceback(error, traceback_path)})" if traceback_path else ""
    return Failure(LostRank.exit_code, f"{_describe(error)}{kept}", activity)


def blame(
    failures: Mapping[int, Any],
    records: Sequence[Activity],
    names: Sequence[str],
    timeout_s: float,
    safe: str,
    starved: str = "",
) -> GnnplanError:
    """Return the error of the rank that failed by itself, not of ranks that stopped because of it.

    failures: exitcode and timestamp by process, as torch's elastic agent has them.
    records, names: of every process.
    safe: a sentence on what is on disk.
    starved: added to the message of a killed rank; not empty if the kernel has killed a process
        because memory ran out.
    """
    ranks = list(map(_last_words, records))
    rank = min(failures, key=lambda rank: _guilt(failures[rank]))
    code, last = failures[rank].exitcode, ranks[rank]
    if last.exit_code in OWN_EXIT_CODES:
        where = (
            f". {names[rank]} was in {last.activity}. {safe}" if "epoch" in last.activity else ""
        )
        return error_of(last.message + where, last.exit_code)
    waited = [r for r, last in enumerate(ranks) if any(part in last.message for part in TIMED_OUT)]
    # even the guiltiest only waited, or was ended by the launcher's signal
    is_last = failures[rank].timestamp > min(other.timestamp for other in failures.values())
    if waited and (_guilt(failures[rank])[0] or (code == -signal.SIGKILL and is_last)):
        first, waited_s = waited[0], ranks[waited[0]].waited_s or timeout_s
        silent = [r for r, last in enumerate(ranks) if not last.message]
        if not silent and len(waited) == 1:  # the others saw it end, and were late before
            silent = [r for r in range(len(ranks)) if r != first]
        if silent:
            suspects = " or ".join(f"{names[r]}, in {ranks[r].activity}," for r in silent)
            return LostRank(
                f"{suspects} stopped answering: {names[first]} waited {waited_s:g} s in"
                f" {ranks[first].activity}. {safe}"
            )
        if len(waited) > 1:
            waiting = ", ".join(f"{names[r]} in {ranks[r].activity}" for r in waited)
            return LostRank(
                f"ranks do not reach each other: {waiting} waited {waited_s:g} s. None of them"
                f" died: is a link between them down? {safe}"
            )
    reason = last.message or (
        f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    )
    if code == -signal.SIGABRT and not last.message:
        reason += ", as torch and Gloo do to a rank whose peers are lost"
    if code == -signal.SIGKILL and starved:
        reason += f", as the kernel does to processes when memory runs out. {starved}"
    return LostRank(f"{names[rank]} was lost in {last.activity}: {reason}. {safe}")


def _last_words(record: Activity) -> Failure:
    """Return the failure that a rank has noted; without a message if it has not.

    The note of a rank that raised an error is more precise than its activity file, which may show
    what another lane began afterwards.
    """
    note, operation = record.note, record.operation or "start"
    failure = Failure.of(note) if note else Failure(0, "", operation)
    return failure if failure.activity else replace(failure, activity=operation)


def _guilt(failure: Any) -> tuple[bool, bool, float]:
    """Return a sort key: ranks that failed by themselves first, then by a signal, then early."""
    # Gloo aborts a rank if its peer sends an unexpected message
    with_others = (FAILED_WITH_OTHERS, -signal.SIGTERM, -signal.SIGABRT)
    return failure.exitcode in with_others, failure.exitcode >= 0, failure.timestamp


def roll_call(
    store: Store, rank: int, names: Sequence[str], here: Sequence[int], out: Path, failure: Failure
) -> str:
    """Return what a rank knows of the others after its own failure, and the remedy.

    Writes the failure for other ranks to read. A rank that failed by itself knows the reason, and
    does not wait for answers. store: where ranks met. names: of all ranks. here: the ranks of this
    host, whose checkpoints are on its disk.
    """
    with suppress(ValueError):  # only the main thread may set a handler
        # torchrun ends the other ranks as soon as one ends, and must not before this has reported
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    others = _suspects(PrefixStore("roll call", store), rank, names, failure)
    if failure.exit_code not in (LostRank.exit_code, FAILED_WITH_OTHERS):
        return others  # the message says what to change
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    most = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if count.isdecimal() and most.isdecimal() and int(count) < int(most):
        return f"{others}. torchrun starts all ranks anew (restart {int(count) + 1} of {most})"
    safe = kept(out, here, TORCHRUN)
    if "--resume" in safe:
        return f"{others}. resume: {safe}"
    nothing = "no checkpoint is there to resume from, start anew with another --out"
    return f"{others}. {safe}; {nothing}"


def _suspects(store: Store, rank: int, names: Sequence[str], failure: Failure) -> str:
    """Report a failure, and return a sentence on the ranks that failed by themselves within
    `PATIENCE`, else on the silent ranks; empty if this rank failed by itself."""
    keys = list(map(str, range(len(names))))
    try:
        store.set_timeout(timedelta(seconds=PATIENCE))
        store.set(keys[rank], failure.note)
        if not failure.is_consequence:
            return ""
        with suppress(RuntimeError):  # time-out: some ranks report nothing
            store.wait(keys)
        answers = {
            i: Failure.of(store.get(key)) for i, key in enumerate(keys) if store.check([key])
        }
    except (RuntimeError, ValueError):  # torch reports lost connections as RuntimeErrors
        return failure.is_consequence * (
            ". The store in which the ranks met does not answer: the process that holds it is gone"
            f" (torchrun's on the first server; under srun that of the first rank, {names[0]})"
        )
    for other, theirs in answers.items():
        if not theirs.is_consequence:
            return f". {names[other]} failed in {theirs.activity}: {theirs.message}"
    absent = [name for other, name in enumerate(names) if other not in answers]
    if not absent:
        return ". All ranks are alive and wait for each other: is a link between them down?"
    if len(absent) == 1:
        return f". {absent[0]} was lost or stopped answering"
    listed = ", ".join(absent)
    return f". These do not answer, because they were lost or wait for one that was: {listed}"


def kept(out: Path, ranks: Iterable[int], command: str = "gnnplan run") -> str:
    """Return a sentence on what is on disk, with the command that resumes from it."""
    metrics = out / "metrics.jsonl"
    lines = metrics.read_text().count("\n") if metrics.exists() else 0
    last = last_stored(out, ranks)
    resume = f"`{command} --resume {quote(str(out))}`"
    onwards = f"; go on from epoch {last} with {resume}" if last else ""
    are = "is" if lines == 1 else "are"
    return f"{show_count(lines, 'finished epoch')} {are} in {metrics}{onwards}"


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(part in str(error) for part in OUT_OF_MEMORY)


def no_more_processes(error: BaseException) -> str:
    """Return the exhausted limit of processes and the remedy; "" if the error has another cause."""
    refused = isinstance(error, OSError) and error.errno == errno.EAGAIN  # from fork
    room = process_room() if refused or NO_THREAD in str(error) else None
    if room is None or room.left > FEW:
        return ""
    problem = "Processes and their threads have reached their limit"
    return f"{problem} ({room.limit}): {room.remedy}"


def account(predicted: Mapping[str, float]) -> str:
    """Return a table of the plan's predicted memory of the fullest rank, by use [B]."""
    uses = sorted(((size, use) for use, size in predicted.items() if size), reverse=True)
    width = max((len(use) for _, use in uses), default=0)
    lines = [f"  {use:<{width}}  {show_bytes(size):>10}" for size, use in uses]
    total = show_bytes(sum(predicted.values()))
    return "\n".join([f"the plan predicts for its fullest rank {total}:", *lines])


def found(rank: Rank | None) -> str:
    """Return the memory that this process uses now, in a line."""
    if rank and rank.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(rank.device)
        used = torch.cuda.memory_allocated(rank.device)
        return (
            f"measured: {show_bytes(used)} in this rank's tensors, {show_bytes(free)} of"
            f" {show_bytes(total)} free on {rank.device}"
        )
    data = allocated()
    counted = f"{show_bytes(data)} in this rank's tensors and arrays, " if data is not None else ""
    return (
        f"measured: {counted}{show_bytes(resident())} in its pages, {show_bytes(free_memory())}"
        " free on this machine"
    )


def _describe(error: Exception) -> str:
    """Return an error in a line; if it has no message, with the place that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    if str(error) or not frames:
        return ": ".join(filter(None, (type(error).__name__, str(error))))
    place = f"{frames[-1].name} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return f"{type(error).__name__}, raised without a message in {place}"


def _keep_traceback(error: Exception, path: Path) -> str:
    """Store the traceback of a bug, and return a phrase that says where."""
    try:
        make_folder(path.parent)
        write_atomically(path, "".join(traceback.format_exception(error)), at_once=True)
    except GnnplanError as unwritable:
        return f"its traceback is lost: {unwritable}"
    return f"traceback in {path}"
