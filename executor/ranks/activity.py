"""Which operation a rank is in, kept in a file that outlives the rank.

When a rank is found dead or silent, the launcher reads there where it was. The file has a slot of
fixed size per lane, one for the phase around the lanes' operations, and one for the operation that
ended last, for the moments between two operations. It is mapped into memory, so writing a name
takes less than a microsecond."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.trace import LANES

SLOT = 64  # [B]
_SLOTS = ("phase", "ended", *LANES)
_OFFSETS = {name: SLOT * i for i, name in enumerate(_SLOTS)}


class Activity:
    """The activity of one rank; without a path only this process sees it."""

    def __init__(self, path: Path | None = None) -> None:
        """Raises SpecError if the file cannot be written."""
        self._map: bytearray | mmap.mmap = bytearray(SLOT * len(_SLOTS))
        if path is not None:
            try:
                path.write_bytes(bytes(self._map))
                with open(path, "r+b") as file:
                    self._map = mmap.mmap(file.fileno(), 0)
            except OSError as error:
                raise SpecError(
                    f"{path}: cannot be written ({error.strerror or error}); choose another place"
                    " or free it"
                ) from error

    def begin(self, lane: str, name: str) -> None:
        """Enter an operation on a lane, or a new phase (lane 'phase')."""
        if lane == "phase":  # none of its operations has ended yet
            self._map[_OFFSETS["ended"]] = 0
        self._map[_slot(lane)] = name.encode()[:SLOT].ljust(SLOT, b"\0")

    def end(self, lane: str) -> None:
        """Leave the lane's operation."""
        self._map[_slot("ended")] = self._map[_slot(lane)]
        self._map[_OFFSETS[lane]] = 0

    def __str__(self) -> str:
        return _describe(bytes(self._map))


def read(path: Path) -> str:
    """What a rank was in last, in words; empty if nothing is known of it."""
    try:
        return _describe(path.read_bytes())
    except OSError:
        return ""


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


def _slot(name: str) -> slice:
    return slice(_OFFSETS[name], _OFFSETS[name] + SLOT)
