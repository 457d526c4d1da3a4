"""Checkpoints, from which a training resumes as if it had never stopped.

Each rank writes a file per checkpointed epoch into the run's folder:

    checkpoints/epoch10.rank0.safetensors

The file holds tensors by name: weights, the optimizer's state, and the tensors that a strategy
carries from step to step. The file's header holds, as JSON, the training that it belongs to and
what the rank has counted so far. Random numbers are functions of (seed, epoch, ...), so no
generator's state is stored. There are no pickles.

Another plan of the same training, with other ranks or another strategy, can resume from these
files, too. For it the header also lists the tensors of the whole model (learner.py), and the
new ranks read the files of all earlier ranks.

A file is complete or absent, and its header has a checksum: a file that a disk or a copy has
damaged counts as absent, and the file before it is used. An epoch counts if all ranks have its
file, wherever the files are. A rank keeps its last two files: it may be one checkpoint ahead of
another rank, but never two, since each waits until its last file is on disk before ranks
synchronise to write the next."""

from __future__ import annotations

import hashlib
import json
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gnnplan import __version__
from gnnplan.executor.ranks.learner import apart, side_by_side
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy, parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, make_folder, refusal, remedy_of, whole_lines
from gnnplan.planner.vocabulary.units import show_count

KEPT = 2  # checkpoints that each rank keeps
# fields of `question` in which a plan may differ from the plan whose checkpoint it resumes
OF_A_PLAN = ("ranks", "servers", "strategy", "partitioner")
DAMAGE = (
    *(OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError),
    RuntimeError,  # torch raises it for a file that has just been deleted
)
_FILE = re.compile(r"epoch(\d+)\.rank(\d+)\.safetensors")


def question(problem: Problem, strategy: Strategy) -> Json:
    """Return everything on which the weights of a training depend.

    Runs with equal questions resume from each other's checkpoints, all state included. Runs whose
    questions differ in OF_A_PLAN only resume from weights and the optimizer's state.
    """
    workload = {
        f"workload.{name}": value
        for name, value in problem.workload.model_dump(mode="json").items()
        if name != "epochs" or problem.workload.ends_on_time
    }
    return {
        "gnnplan": __version__,
        "graph": problem.stats.hash,
        "ranks": problem.ranks,
        "servers": list(problem.servers),
        "strategy": str(strategy),
        "partitioner": problem.partitioner,
        **workload,
    }


def must_suit(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise SpecError if the checkpoint is of another training, and name what differs, or if it is
    of another plan and either strategy cannot hand over weights.

    theirs, ours: `question` of the checkpoint and of this run.
    """
    if different := [
        name
        for name in {**ours, **theirs}
        if name not in OF_A_PLAN and ours.get(name) != theirs.get(name)
    ]:
        differences = ", ".join(
            f"{name} {theirs.get(name)!r} there and {ours.get(name)!r} here"
            for name in different[:3]
        )
        raise SpecError(
            f"{path} is of another training ({differences}); resume with a plan of the same graph,"
            " workload and version (its strategy and ranks may differ), or start anew with another"
            " --out"
        )
    for training in (theirs, ours) if theirs != ours else ():
        if not (strategy := parse(training["strategy"])).hands_over:
            carried = f" (its {strategy.carries} would be lost)" if strategy.carries else ""
            raise SpecError(
                f"{path} is of {plan_of(theirs)}, and this plan of {plan_of(ours)}: {strategy}"
                f" neither hands over weights nor takes them over{carried}; resume with the plan"
                " that it was made with, or start anew with another --out"
            )


def plan_of(question: Mapping[str, Any]) -> str:
    """Return the strategy and ranks of a training, in words.

    >>> plan_of({"strategy": "granndis(depth=1)", "ranks": 4})
    'granndis(depth=1) on 4 ranks'
    """
    return f"{question['strategy']} on {show_count(question['ranks'], 'rank')}"


def fingerprint(value: Any) -> str:
    """Return a short hash of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


class Checkpoints:
    """The checkpoints of one rank, written every `every` epochs (0: never)."""

    def __init__(self, out: Path, rank: int, every: int, question: Mapping[str, Any]) -> None:
        self.folder = out / "checkpoints"
        self.rank, self.every, self.question = rank, every, dict(question)
        self.first = 0  # the number of epochs that the checkpoint to resume from has trained
        # the `question` of the plan that wrote this checkpoint; None: this plan
        self.before: Json | None = None
        self._writing: Future[None] | None = None

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint is to be written after this epoch."""
        return bool(self.every) and epoch % self.every == 0

    def go_on(self, epoch: int, before: Json | None = None) -> None:
        """Set the epoch to resume from (0: the beginning), and delete later checkpoints.

        before: the `question` of another plan that wrote the checkpoint of this epoch.
        """
        self.first, self.before = epoch, before
        self._keep(range(epoch + 1))

    def _keep(self, epochs: range) -> None:
        """Delete this rank's files of other epochs, damaged ones too, and its share of the files of
        ranks that only an earlier plan had."""
        for epoch, ranks in stored(self.folder).items():
            for rank in ranks:
                if epoch not in epochs and rank % self.question["ranks"] == self.rank:
                    file_of(self.folder, epoch, rank).unlink(missing_ok=True)

    def save(
        self,
        rank: Rank,
        epoch: int,
        tensors: Mapping[str, Tensor],
        notes: Mapping[str, Any],
        before: Iterable[int],
        whole: Mapping[str, int],
    ) -> None:
        """Write the checkpoint of an epoch.

        The lane 'disk' waits for the disk: other ranks would take a waiting step for a lost peer.
        before: descriptors of files that must be on disk first. whole: the first columns of tensors
        of the whole model (`ModelPart`).
        """
        self.wait()
        make_folder(self.folder)
        on_host = apart(tensors)
        about = {"question": self.question, "epoch": epoch, "notes": notes, "whole": whole}
        about = json.loads(json.dumps(about))  # as a reader will see it, for the checksum
        about["crc32"] = checksum(about, on_host)
        path, synced_first = file_of(self.folder, epoch, self.rank), tuple(before)
        temporary = self.folder / f".rank{self.rank}.safetensors"
        try:
            save_file(on_host, temporary, {"gnnplan": json.dumps(about)})
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from error

        def publish() -> None:
            """Rename the temporary file once it is on disk, and delete older checkpoints."""
            try:
                for descriptor in synced_first:
                    os.fsync(descriptor)
                _sync(temporary, os.O_RDWR)
                os.replace(temporary, path)
                _sync(self.folder, os.O_RDONLY)
            except OSError as error:
                raise _unwritable(path, error) from error
            own = sorted(each for each, ranks in stored(self.folder).items() if self.rank in ranks)
            self._keep(range(own[-KEPT:][0], epoch + 1))

        self._writing = rank.lanes.in_thread("disk", publish)

    def wait(self) -> None:
        """Wait until the last file is on disk. Raises SpecError if it could not be written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def load(self) -> tuple[Json, dict[str, Tensor]]:
        """Read notes and tensors of the checkpoint to resume from."""
        with safe_open(file_of(self.folder, self.first, self.rank), framework="pt") as file:
            notes: Json = json.loads(file.metadata()["gnnplan"])["notes"]
            return notes, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118

    def load_whole(self, ranks: int) -> tuple[Json, dict[str, Tensor]]:
        """Read the checkpoint of the earlier plan, which had `ranks` ranks.

        Returns its rank 0's notes, and weights and optimizer state by names in the whole model
        (learner.py).
        """
        parts, notes = dict[str, dict[int, Tensor]](), list[Json]()
        for rank in range(ranks):
            with safe_open(file_of(self.folder, self.first, rank), framework="pt") as file:
                about = json.loads(file.metadata()["gnnplan"])
                notes.append(about["notes"])
                for name, column in about["whole"].items():
                    if column not in parts.setdefault(name, {}):
                        parts[name][column] = file.get_tensor(name)
        return notes[0], {name: side_by_side(each) for name, each in parts.items()}


def resumable(
    out: Path,
    ranks: Collection[int],
    ours: Mapping[str, Any],
    tell: Callable[[str], None] = lambda note: None,
) -> dict[int, Json]:
    """Return the epochs from which `ranks` can resume -> the `question` of the plan that wrote it.

    Each rank needs its own file of this plan, or the files of all ranks of another plan. ours:
    `question` of this plan. tell: called with a note per damaged file of `ranks`. Rank 0 leaves out
    checkpoints of later epochs than its metrics.jsonl has, unless none is left then. Raises
    SpecError if a file is of another training, or of a strategy that cannot hand over to this
    plan's.
    """
    found, folder, damaged = dict[int, Json](), out / "checkpoints", dict[Path, str]()

    def question_of(epoch: int, rank: int) -> Json | None:
        path = file_of(folder, epoch, rank)
        if about := header(path):
            must_suit(path, about["question"], ours)
            return dict(about["question"])
        if rank in ranks and path.is_file():
            damaged[path] = f"note: {path} is damaged; going on without it"
        return None

    for epoch in sorted(stored(folder)):
        if all(question_of(epoch, rank) == ours for rank in ranks):
            found[epoch] = dict(ours)
        elif (
            (theirs := question_of(epoch, 0))
            and theirs != ours
            and all(question_of(epoch, rank) == theirs for rank in range(1, theirs["ranks"]))
        ):
            found[epoch] = theirs
    for note in damaged.values():
        tell(note)
    metrics, last = out / "metrics.jsonl", max(found, default=0)
    kept = whole_lines(metrics, last)[0] if 0 in ranks else last
    if kept < last and (earlier := {epoch: found[epoch] for epoch in found if epoch <= kept}):
        tell(f"note: {metrics} has {kept} epochs; going on without the checkpoint of epoch {last}")
        return earlier
    return found


def file_of(folder: Path, epoch: int, rank: int) -> Path:
    """Return the path of a rank's checkpoint in the folder of checkpoints."""
    return folder / f"epoch{epoch}.rank{rank}.safetensors"


def header(path: Path, checked: bool = True) -> Json | None:
    """Read the header of a file: 'question', 'epoch' and 'notes'; None if damaged or foreign.

    checked: also read the tensors and compare their checksum. Checkpoints of older versions have no
    checksum: only a truncated file is noticed.
    """
    with suppress(*DAMAGE), safe_open(path, framework="pt") as file:
        about = dict(json.loads(file.metadata()["gnnplan"]))
        if not (isinstance(about["question"], dict) and isinstance(about["notes"], dict)):
            return None
        crc_read = about.pop("crc32", None)
        tensors = {name: file.get_tensor(name) for name in file.keys() if checked}  # noqa: SIM118
        if not checked or crc_read is None or crc_read == checksum(about, tensors):
            return about
    return None


def checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """Return the CRC-32 of a checkpoint's header and tensors, in the order of their names."""
    crc = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def stored(folder: Path) -> dict[int, set[int]]:
    """Return epoch -> ranks of the files in the folder of checkpoints."""
    found: dict[int, set[int]] = {}
    for path in folder.glob("epoch*"):
        if (match := _FILE.fullmatch(path.name)) and path.is_file():
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return found


def must_have_epochs(metrics: Path, first: int) -> int:
    """Return the bytes of the metrics' first `first` lines, the epochs before the checkpoint.

    Raises SpecError if there are fewer lines.
    """
    kept, size = whole_lines(metrics, first)
    if kept < first:
        raise SpecError(
            f"{metrics} has {kept} epochs, but the checkpoint is of epoch {first}; put it back, or"
            " start anew with another --out"
        )
    return size


def last_stored(out: Path, ranks: Iterable[int]) -> int:
    """Return the last epoch of which these ranks, or all ranks of an earlier plan, have files.

    0: none. It is for messages: checksums are not compared.
    """
    folder, needed = out / "checkpoints", set(ranks)
    for epoch, owners in sorted(stored(folder).items(), reverse=True):
        about = header(file_of(folder, epoch, 0), checked=False)
        if needed <= owners or (about and owners.issuperset(range(about["question"]["ranks"]))):
            return epoch
    return 0


def _sync(path: Path, flags: int) -> None:
    """Wait until a file, or a folder's list of files, is on disk."""
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: Exception) -> SpecError:
    refused = refusal(error)
    reason = getattr(refused or error, "strerror", None) or error
    remedy = remedy_of(refused) if refused else "free the disk"
    return SpecError(
        f"{path}: the checkpoint cannot be written ({reason}); {remedy}, or train with"
        " --checkpoint-every 0"
    )
