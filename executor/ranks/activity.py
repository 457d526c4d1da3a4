"""Which operation a rank is in, and how it failed, in a file that outlives the rank.

When a rank is found dead or silent, the launcher reads there where it was. The file has a slot of
fixed size per lane, one for the phase around the lanes' operations, one for the operation that
ended last, for the moments between two operations, and room for a note about the rank's failure.

It is mapped into memory, so writing a name takes less than a microsecond. The launcher writes the
whole file before the rank starts. So a rank that may open no more files, or whose disk is full, can
still say so."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from gnnplan.planner.vocabulary.files import cannot_write, make_folder
from gnnplan.planner.vocabulary.trace import LANES

SLOT = 64  # [B]
SIZE = 1 << 16  # of the file [B]
_SLOTS = ("phase", "ended", *LANES)
_OFFSETS = {name: SLOT * i for i, name in enumerate(_SLOTS)}
_NOTE = slice(SLOT * len(_SLOTS), SIZE)


class Activity:
    """The activity of one rank; without a path only this process sees it."""

    def __init__(self, path: Path | None = None) -> None:
        """An empty one. Raises SpecError if the file cannot be written."""
        self._map: bytearray | mmap.mmap = bytearray(SIZE)
        if path is not None:
            try:
                # not truncated: the blocks that it has stay its own where the disk is full
                with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                    file.write(self._map)
                    file.flush()
                    self._map = mmap.mmap(file.fileno(), SIZE)
            except OSError as error:
                raise cannot_write(path, error) from error

    def begin(self, lane: str, name: str) -> None:
        """Enter an operation on a lane, or a new phase (lane 'phase')."""
        if lane == "phase":  # none of its operations has ended yet
            self._map[_OFFSETS["ended"]] = 0
        self._map[_slot(lane)] = name.encode()[:SLOT].ljust(SLOT, b"\0")

    def end(self, lane: str) -> None:
        """Leave the lane's operation."""
        self._map[_slot("ended")] = self._map[_slot(lane)]
        self._map[_OFFSETS[lane]] = 0

    def leave(self, note: str) -> None:
        """Leave a note for the launcher, in place of an earlier one."""
        self._map[_NOTE] = _padded(note)

    def __str__(self) -> str:
        return _describe(bytes(self._map))


def read(path: Path) -> str:
    """What a rank was in last, in words; empty if nothing is known of it."""
    try:
        return _describe(path.read_bytes())
    except OSError:
        return ""


def leave(path: Path, note: str) -> None:
    """Leave a note in the place of a rank that cannot do so itself. Raises OSError."""
    with open(path, "r+b") as file:
        file.seek(_NOTE.start)
        file.write(_padded(note))


def read_note(path: Path) -> str:
    """The note that a rank has left; empty if there is none."""
    try:
        return path.read_bytes()[_NOTE].split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def begin(folder: Path, ranks: Iterable[int]) -> None:
    """Make empty files for ranks that are about to start, in place of those of ranks that may still
    be ending. Raises SpecError."""
    make_folder(folder)
    forget(folder)
    for rank in ranks:
        Activity(seen(folder, rank))


def seen(folder: Path, rank: int) -> Path:
    """The activity file of a rank, in its run's folder."""
    return folder / f"activity.rank{rank}"


def forget(folder: Path) -> None:
    """Delete the activity files of a run that is over."""
    for path in folder.glob("activity.rank*"):
        os.unlink(path)


def _describe(raw: bytes) -> str:
    """
    >>> activity = Activity()
    >>> activity.begin("phase", "epoch 3")
    >>> activity.begin("compute", "forward:l2:s2")
    >>> activity.begin("comm", "halo:f:l1:s2")
    >>> activity.end("compute")
    >>> str(activity)
    'halo:f:l1:s2 of epoch 3'
    >>> activity.end("comm")
    >>> str(activity)
    'what follows halo:f:l1:s2 of epoch 3'
    >>> activity.begin("phase", "epoch 4")
    >>> str(activity)
    'the beginning of epoch 4'
    """
    names = {name: raw[_slot(name)].split(b"\0")[0].decode(errors="replace") for name in _SLOTS}
    phase, ended = names.pop("phase"), names.pop("ended")
    operations = " and ".join(filter(None, names.values()))
    if not operations and phase.startswith("epoch"):  # other phases have no operations
        operations = f"what follows {ended}" if ended else "the beginning"
    return " of ".join(filter(None, (operations, phase)))


def _padded(note: str) -> bytes:
    """A note as long as its room."""
    raw = note.encode(errors="replace").replace(b"\0", b" ")
    return raw[: _NOTE.stop - _NOTE.start].ljust(_NOTE.stop - _NOTE.start, b"\0")


def _slot(name: str) -> slice:
    return slice(_OFFSETS[name], _OFFSETS[name] + SLOT)
