"""What a rank needs to go on as if it had never stopped: a file per rank and checkpointed epoch, in the run's folder.

    checkpoints/epoch10.rank0.safetensors

holds tensors by name (weights, the optimizer's, what a strategy carries from step to step) and, as JSON in its header, what they are of
and what the rank has counted so far. Random numbers are functions of (seed, epoch, ...): there are none to keep. No pickles.

A file is whole or absent, and an epoch counts when all ranks have its file, wherever their disks are. A rank keeps its last two: it may
be one ahead of another, and never two, since each waits for its last file to be on the disk before ranks meet to write the next.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gnnplan import __version__
from gnnplan.executor.worker import Rank
from gnnplan.planner.errors import SpecError
from gnnplan.planner.files import make_folder
from gnnplan.planner.job import Job
from gnnplan.planner.strategies import Strategy

KEPT = 2
_FILE = re.compile(r"epoch(\d+)\.rank(\d+)\.safetensors")


class Resumable:
    """A strategy's part of a rank that carries nothing but weights from step to step."""

    net: nn.Module

    def state(self) -> dict[str, Tensor]:
        """What training goes on from after a step, itself and no copy, by name. Whoever asks has called `drain`."""
        return dict(self.net.state_dict())

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what another process's `state` was."""
        fill(self.state(), state)


def fill(mine: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Numbers of the same names into tensors that stay where they are. Raises SpecError where shapes differ."""
    for name, tensor in mine.items():
        if name not in state or state[name].shape != tensor.shape or state[name].dtype != tensor.dtype:
            there = f"{state[name].dtype} {list(state[name].shape)}" if name in state else "nothing"
            raise SpecError(f"the checkpoint's {name} is {there}, this training's {tensor.dtype} {list(tensor.shape)}: it is of another "
                            "training; start anew with another --out")  # fmt: skip
        with torch.no_grad():
            tensor.copy_(state[name])


def named(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in state.items()}


def under(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `named` made of them, undone.

    >>> under("net", named("net", {"bias": torch.ones(1)}) | {"past.1": torch.ones(1)})
    {'bias': tensor([1.])}
    """
    return {name.removeprefix(f"{prefix}."): tensor for name, tensor in state.items() if name.startswith(f"{prefix}.")}


def question(job: Job, strategy: Strategy) -> dict[str, Any]:
    """What decides over every weight of a training: two runs that agree in it may go on from each other's checkpoints."""
    workload = {f"workload.{name}": value for name, value in job.workload.model_dump(mode="json").items() if name != "epochs"}
    return {"gnnplan": __version__, "graph": job.stats.hash, "ranks": job.ranks, "servers": list(job.servers), "strategy": str(strategy),
            "partitioner": job.method, **workload}  # fmt: skip


def must_agree(path: Path, theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises SpecError naming what differs."""
    if different := [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]:
        what = ", ".join(f"{name} {theirs.get(name)!r} there and {mine.get(name)!r} here" for name in different[:3])
        raise SpecError(f"{path} is of another training ({what}); resume with the plan and the version that it was made with, or start "
                        "anew with another --out")  # fmt: skip


class Checkpoints:
    """Those of one rank. `every`: epochs from one to the next; 0: none are written."""

    def __init__(self, out: Path, rank: int, every: int, question: Mapping[str, Any]) -> None:
        self.folder, self.rank, self.every, self.question = out / "checkpoints", rank, every, dict(question)
        self.first = 0  # epochs that training goes on from
        self._leaving: Future[None] | None = None

    def _path(self, epoch: int) -> Path:
        return self.folder / f"epoch{epoch}.rank{self.rank}.safetensors"

    def due(self, epoch: int) -> bool:
        return bool(self.every) and epoch % self.every == 0

    def epochs(self) -> list[int]:
        """Those that this rank has whole. Raises SpecError where they are of another training."""
        found = []
        for epoch in stored(self.folder.parent, [self.rank])[self.rank]:
            about = header(self._path(epoch))
            if about is not None:
                must_agree(self._path(epoch), about["question"], self.question)
                found.append(epoch)
        return found

    def go_on(self, epoch: int) -> None:
        """From this one, or 0: from the beginning. Later ones are forgotten: their epochs are trained again."""
        self.first = epoch
        for later in self.epochs():
            if later > epoch:
                self._path(later).unlink()

    def save(self, rank: Rank, epoch: int, tensors: Mapping[str, Tensor], notes: Mapping[str, Any], before: Iterable[int] = ()) -> None:
        """Write it; on its own lane wait for the disk, since that would look like a lost peer to others. `before`: files (descriptors)
        that must be on the disk first."""
        self.wait()
        make_folder(self.folder)
        about = {"question": self.question, "epoch": epoch, "notes": dict(notes)}
        path, waiting = self._path(epoch), tuple(before)
        temporary = self.folder / f".rank{self.rank}.safetensors"
        try:
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, temporary,
                      {"gnnplan": json.dumps(about)})  # fmt: skip
        except (OSError, SafetensorError) as error:
            raise _unwritable(path, error) from error
        self._leaving = rank.submit("disk", lambda: self._leave(temporary, path, waiting))

    def _leave(self, temporary: Path, path: Path, before: tuple[int, ...]) -> None:
        try:
            for descriptor in before:
                os.fsync(descriptor)
            for place, flags in ((temporary, os.O_RDWR), (self.folder, os.O_RDONLY)):
                descriptor = os.open(place, flags)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if place == temporary:
                    os.replace(temporary, path)
        except OSError as error:
            raise _unwritable(path, error) from error
        for epoch in stored(self.folder.parent, [self.rank])[self.rank][:-KEPT]:
            self._path(epoch).unlink(missing_ok=True)

    def wait(self) -> None:
        """Until the last one is on the disk. Raises SpecError where it could not be written."""
        if self._leaving is not None:
            self._leaving.result()
            self._leaving = None

    def load(self, epoch: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Its notes and tensors."""
        about = header(self._path(epoch))
        assert about is not None
        with safe_open(self._path(epoch), framework="pt") as file:
            return about["notes"], {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def header(path: Path) -> dict[str, Any] | None:
    """What a checkpoint says of itself; None of a torn or foreign file."""
    with suppress(OSError, SafetensorError, ValueError, TypeError, KeyError, RecursionError), safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["gnnplan"])
        if isinstance(about["question"], dict) and isinstance(about["notes"], dict):
            return dict(about)
    return None


def stored(out: Path, ranks: Iterable[int]) -> dict[int, list[int]]:
    """Rank -> epochs that it has a file of, the first one first."""
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


def _unwritable(path: Path, error: Exception) -> SpecError:
    why = getattr(error, "strerror", None) or error
    return SpecError(f"{path}: the checkpoint cannot be written ({why}); free the disk, or train with --checkpoint-every 0")
