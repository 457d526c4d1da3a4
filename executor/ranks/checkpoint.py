"""What a rank stores to go on as if it had never stopped.

Each rank writes a file per checkpointed epoch into the run's folder:

    checkpoints/epoch10.rank0.safetensors

It holds tensors by name: weights, the optimizer's state, and what a strategy carries from step to
step. Its header holds, as JSON, which training they belong to and what the rank has counted so far.
Random numbers are functions of (seed, epoch, ...), so there are none to store. There are no
pickles.

A file is whole or absent, and its header has a checksum: a file that a disk or a copy has damaged
counts as absent, and the one before is used. An epoch counts when all ranks have its file, wherever
their disks are. A rank keeps its last two files: it may be one ahead of another rank, but never
two, since each waits for its last file to be on disk before ranks meet to write the next."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gnnplan import __version__
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import make_folder, refusal, remedy_of
from gnnplan.planner.vocabulary.progress import say

KEPT = 2  # checkpoints of each rank
_FILE = re.compile(r"epoch(\d+)\.rank(\d+)\.safetensors")


def fill(targets: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `state` into `targets`, by name; SpecError if types or shapes differ."""
    for name, target in targets.items():
        saved = state.get(name)
        if saved is None or saved.shape != target.shape or saved.dtype != target.dtype:
            there = "nothing" if saved is None else f"{saved.dtype} {list(saved.shape)}"
            raise SpecError(
                f"the checkpoint's {name} is {there}, this training's {target.dtype}"
                f" {list(target.shape)}: it is of another training; start anew with another --out"
            )
        with torch.no_grad():
            target.copy_(saved)


def named(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as `prefix.name`."""
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors named `prefix.name`, as `name`: the inverse of `named`.

    >>> under("net", named("net", {"bias": torch.ones(1)}) | {"past.1": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return {
        name.removeprefix(f"{prefix}."): tensor
        for name, tensor in state.items()
        if name.startswith(f"{prefix}.")
    }


def question(problem: Problem, strategy: Strategy) -> dict[str, Any]:
    """Everything that the weights of a training depend on.

    Two runs that agree in it may go on from each other's checkpoints.
    """
    workload = {
        f"workload.{name}": value
        for name, value in problem.workload.model_dump(mode="json").items()
        if name != "epochs"
    }
    return {
        "gnnplan": __version__,
        "graph": problem.stats.hash,
        "ranks": problem.ranks,
        "servers": list(problem.servers),
        "strategy": str(strategy),
        "partitioner": problem.method,
        **workload,
    }


def must_agree(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises SpecError if the checkpoint's `question` is not ours; names what differs."""
    if different := [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]:
        differences = ", ".join(
            f"{name} {theirs.get(name)!r} there and {ours.get(name)!r} here"
            for name in different[:3]
        )
        raise SpecError(
            f"{path} is of another training ({differences}); resume with the plan and the version"
            " that it was made with, or start anew with another --out"
        )


class Checkpoints:
    """The checkpoints of one rank, one every `every` epochs; 0: none are written."""

    def __init__(self, out: Path, rank: int, every: int, question: Mapping[str, Any]) -> None:
        self.folder = out / "checkpoints"
        self.rank, self.every, self.question = rank, every, dict(question)
        self.first = 0  # the epoch that training goes on from
        self._writing: Future[None] | None = None

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch{epoch}.rank{self.rank}.safetensors"

    def due(self, epoch: int) -> bool:
        """Whether a checkpoint is to be written after this epoch."""
        return bool(self.every) and epoch % self.every == 0

    def epochs(self) -> list[int]:
        """Epochs of this rank's whole files; raises SpecError if one is of another training."""
        return self._whole(lambda damaged: None)

    def found(self) -> list[int]:
        """`epochs`, as training goes on from them: says which files are damaged."""
        return self._whole(lambda damaged: say(f"note: {damaged} is damaged; going on without it"))

    def _whole(self, tell: Callable[[Path], None]) -> list[int]:
        whole = []
        for epoch in self._stored():
            about = header(self._path(epoch))
            if about is None:
                tell(self._path(epoch))
            else:
                must_agree(self._path(epoch), about["question"], self.question)
                whole.append(epoch)
        return whole

    def _stored(self) -> list[int]:
        return stored(self.folder.parent, [self.rank])[self.rank]

    def go_on(self, epoch: int) -> None:
        """Go on from this epoch; 0: from the beginning.

        Later checkpoints are deleted, since their epochs are trained again.
        """
        self.first = epoch
        for later in self._stored():  # damaged ones, too
            if later > epoch:
                self._path(later).unlink()

    def save(
        self,
        rank: Rank,
        epoch: int,
        tensors: Mapping[str, Tensor],
        notes: Mapping[str, Any],
        before: Iterable[int] = (),
    ) -> None:
        """Write the checkpoint of an epoch.

        A lane of its own waits for the disk: to other ranks the wait would look like a lost peer.
        `before`: descriptors of files that must be on disk first.
        """
        self.wait()
        make_folder(self.folder)
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        about = {"question": self.question, "epoch": epoch, "notes": dict(notes)}
        about = json.loads(json.dumps(about))  # as it is read
        about["crc32"] = checksum(about, kept)
        path, written_first = self._path(epoch), tuple(before)
        temporary = self.folder / f".rank{self.rank}.safetensors"
        try:
            save_file(kept, temporary, {"gnnplan": json.dumps(about)})
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from error
        self._writing = rank.in_thread(
            "disk", lambda: self._publish(temporary, path, written_first)
        )

    def _publish(self, temporary: Path, path: Path, before: tuple[int, ...]) -> None:
        """Give the file its name once it is on disk; delete older checkpoints."""
        try:
            for descriptor in before:
                os.fsync(descriptor)
            _sync(temporary, os.O_RDWR)
            os.replace(temporary, path)
            _sync(self.folder, os.O_RDONLY)
        except OSError as error:
            raise _unwritable(path, error) from error
        for epoch in self._stored()[:-KEPT]:
            self._path(epoch).unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until the last file is on disk; raises SpecError if it could not be written."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def load(self, epoch: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """The notes and tensors of an epoch's checkpoint, which `found` has read and checked."""
        with safe_open(self._path(epoch), framework="pt") as file:
            notes: dict[str, Any] = json.loads(file.metadata()["gnnplan"])["notes"]
            return notes, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def header(path: Path) -> dict[str, Any] | None:
    """The header of a file: 'question', 'epoch' and 'notes'; None if it is damaged or foreign.

    Checkpoints of older versions have no checksum: of these, only a cut is noticed.
    """
    with (
        suppress(OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError),
        safe_open(path, framework="pt") as file,
    ):
        about = dict(json.loads(file.metadata()["gnnplan"]))
        if not (isinstance(about["question"], dict) and isinstance(about["notes"], dict)):
            return None
        said = about.pop("crc32", None)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if said is None or said == checksum(about, tensors):
            return about
    return None


def checksum(about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of a checkpoint: of its header, and of its tensors in the order of their names."""
    crc = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        crc = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), crc)
        crc = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy(), crc)
    return crc


def stored(out: Path, ranks: Iterable[int]) -> dict[int, list[int]]:
    """The epochs that each of these ranks has a file of, in order: {rank: epochs}."""
    found: dict[int, list[int]] = {rank: [] for rank in ranks}
    for path in (out / "checkpoints").glob("epoch*"):
        if (match := _FILE.fullmatch(path.name)) and int(match[2]) in found and path.is_file():
            found[int(match[2])].append(int(match[1]))
    return {rank: sorted(epochs) for rank, epochs in found.items()}


def latest(epochs: Iterable[Iterable[int]]) -> int:
    """The last epoch that all ranks have, 0 if there is none.

    >>> latest([[10, 20], [10]]), latest([[10], []])
    (10, 0)
    """
    return max(set.intersection(*map(set, epochs)), default=0)


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
