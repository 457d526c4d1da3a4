"""What a rank is in at this moment, in a file that outlives it: whoever finds a rank dead or silent reads there where it was.

A slot of fixed size per lane, since lanes have operations of their own, one for the phase around them, and one for the operation that
ended last in it: between two operations that says where. Mapped: to write a word there costs less than a microsecond.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from gnnplan.planner.errors import SpecError
from gnnplan.planner.trace import LANE_ORDER

SLOT = 64  # [B]
_SLOTS = ("phase", "ended", *LANE_ORDER)
_PLACE = {name: SLOT * i for i, name in enumerate(_SLOTS)}


class Doing:
    """Of one rank. Without a path only this process sees it."""

    def __init__(self, path: Path | None = None) -> None:
        self._map: bytearray | mmap.mmap = bytearray(SLOT * len(_SLOTS))
        if path is not None:
            try:
                path.write_bytes(bytes(self._map))
                with open(path, "r+b") as file:
                    self._map = mmap.mmap(file.fileno(), 0)
            except OSError as error:
                raise SpecError(f"{path}: cannot be written ({error.strerror or error}); choose another place or free it") from error

    def begin(self, lane: str, what: str) -> None:
        """An operation on a lane, or a phase, in which none has ended yet."""
        if lane == "phase":
            self._map[_PLACE["ended"]] = 0
        self._map[_at(lane)] = what.encode()[:SLOT].ljust(SLOT, b"\0")

    def end(self, lane: str) -> None:
        self._map[_at("ended")] = self._map[_at(lane)]
        self._map[_PLACE[lane]] = 0

    def __str__(self) -> str:
        return _told(bytes(self._map))


def read(path: Path) -> str:
    """What a rank was in last, in words; empty if nothing is known of it."""
    try:
        return _told(path.read_bytes())
    except OSError:
        return ""


def seen(folder: Path, rank: int) -> Path:
    """Where a rank of a run says what it is in."""
    return folder / f"doing.rank{rank}"


def _told(raw: bytes) -> str:
    """
    >>> at = Doing()
    >>> at.begin("phase", "epoch 3"), at.begin("compute", "forward:l2:s2"), at.begin("comm", "halo:f:l1:s2"), at.end("compute")
    (None, None, None, None)
    >>> str(at), at.end("comm"), str(at), at.begin("phase", "epoch 4"), str(at)
    ('halo:f:l1:s2 of epoch 3', None, 'what follows halo:f:l1:s2 of epoch 3', None, 'the beginning of epoch 4')
    """
    said = {name: raw[_at(name)].split(b"\0")[0].decode(errors="replace") for name in _SLOTS}
    phase, ended = said.pop("phase"), said.pop("ended")
    operations = " and ".join(filter(None, said.values()))
    if not operations and phase.startswith("epoch"):  # made of operations, unlike other phases
        operations = f"what follows {ended}" if ended else "the beginning"
    return " of ".join(filter(None, (operations, phase)))


def _at(name: str) -> slice:
    return slice(_PLACE[name], _PLACE[name] + SLOT)


def forget(folder: Path) -> None:
    """Of a run that is over."""
    for path in folder.glob("doing.rank*"):
        os.unlink(path)
