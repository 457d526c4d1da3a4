"""A rank's current operation, and a note on its failure, in a file that outlives the rank.

When a rank is found dead or silent, the launcher reads from this file what the rank was doing: the
operations of its lanes, or between two operations the one that ended last, and the phase around
them. The rest of the file holds a note about the rank's failure.

The file is mapped into the memory of both, so a write takes a microsecond. The launcher writes the
whole file before the rank starts, so a rank that may open no more files, or whose disk is full, can
still leave its note."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gnnplan.planner.vocabulary.files import cannot_write, make_folder

SIZE = 1 << 16  # size of the file [B]
_PLACE, _NOTE = slice(0, 512), slice(512, SIZE)  # bytes of the operation, and of the note


class Activity:
    """The activity of one rank, in a file; without a path, in this process's memory.

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

    def __init__(self, path: Path | None = None) -> None:
        """Start without an operation. Raises SpecError if the file cannot be written."""
        self._phase, self._ended = "", ""
        self._lanes: dict[str, str] = {}
        self._map: bytearray | mmap.mmap = bytearray(SIZE)
        if path is not None:
            try:
                # not truncated: a full disk would not give its blocks back
                with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                    file.write(self._map)
                    file.flush()
                    self._map = mmap.mmap(file.fileno(), SIZE)
            except OSError as error:
                raise cannot_write(path, error) from error

    def begin(self, lane: str, name: str) -> None:
        """Enter an operation on a lane, or a new phase (lane 'phase')."""
        if lane == "phase":
            self._phase, self._ended = name, ""  # no operation of this phase has ended yet
        else:
            self._lanes[lane] = name
        self._map[_PLACE] = _filling(_PLACE, str(self))

    def end(self, lane: str) -> None:
        """End the lane's operation."""
        self._ended = self._lanes.pop(lane, self._ended)
        self._map[_PLACE] = _filling(_PLACE, str(self))

    def leave(self, note: str) -> None:
        """Leave a note for the launcher, in place of an earlier note."""
        self._map[_NOTE] = _filling(_NOTE, note)

    @property
    def operation(self) -> str:
        """The last operation and phase in the file, in words; empty if there is none."""
        return _words(self._map[_PLACE])

    @property
    def note(self) -> str:
        """The note in the file; empty if there is none."""
        return _words(self._map[_NOTE])

    def __str__(self) -> str:
        operations = " and ".join(self._lanes.values())
        if not operations and self._phase.startswith("epoch"):  # other phases have no operations
            operations = f"what follows {self._ended}" if self._ended else "the beginning"
        return " of ".join(filter(None, (operations, self._phase)))


def read(path: Path) -> str:
    """Return the operation in a file that another process may delete; empty if unknown."""
    try:
        return _words(path.read_bytes()[_PLACE])
    except OSError:
        return ""


def begin(folder: Path, processes: int) -> list[Activity]:
    """Make empty files for processes that are about to start, and map them. Raises SpecError.

    They replace the files of earlier processes, which may still be ending.
    """
    make_folder(folder)
    forget(folder)
    return [Activity(seen(folder, process)) for process in range(processes)]


def seen(folder: Path, process: int) -> Path:
    """Return the path of a process's activity file in the run's folder."""
    return folder / f"activity.rank{process}"


def forget(folder: Path) -> None:
    """Delete the activity files of a run that is over."""
    for path in folder.glob("activity.rank*"):
        os.unlink(path)


def _words(filled: bytes | bytearray) -> str:
    """Decode what `_filling` has encoded."""
    return filled.split(b"\0")[0].decode(errors="replace")


def _filling(part: slice, words: str) -> bytes:
    """Encode words, padded or cut to the length of their part of the file."""
    size = part.stop - part.start
    return words.encode(errors="replace").replace(b"\0", b" ")[:size].ljust(size, b"\0")
