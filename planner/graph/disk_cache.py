"""The cache on disk for results that take long to compute, shared by all commands.

Arrays with a number per vertex, such as partitions, are in the cache's folder `partitions`, or in
the folder that $GNNPLAN_PARTITIONS names, for example one beside the graph that all servers can
read. With GNNPLAN_PARTITIONS=none they are computed every time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import time
import zipfile
from collections.abc import Callable
from hashlib import blake2b
from itertools import compress
from pathlib import Path
from typing import ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import cache_dir, write_atomically

T = TypeVar("T")
VERSION = 5  # raise it when the same key should give another result
MOST_BYTES = 8 << 30  # [B] of the folder; the least recently read files are deleted first


class Stopwatch:
    """A context manager that measures seconds [s] as if nothing came from the cache.

    A cached result counts the seconds that its first computation took."""

    _running: ClassVar[list[Stopwatch]] = []

    def __enter__(self) -> Stopwatch:
        self.seconds, self._start = 0.0, time.perf_counter()
        self._running.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.remove(self)
        self.seconds += time.perf_counter() - self._start

    @classmethod
    def saved(cls, seconds: float) -> None:
        """Add the seconds that the cache saved to all running watches."""
        for watch in cls._running:
            watch.seconds += seconds


def state_of(path: Path) -> str:
    """Return a key that identifies a file and changes when the file is written."""
    file = path.stat()
    return f"{path.resolve()} {file.st_dev} {file.st_ino} {file.st_size} {file.st_mtime_ns}"


def remembered(kind: str, key: str, compute: Callable[[], T]) -> tuple[T, bool]:
    """Return the result of `compute` (a JSON value) from disk or computed, and whether from disk.

    kind: a folder of the cache."""
    path = cache_dir() / kind / f"{blake2b(key.encode(), digest_size=16).hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError):  # absent or damaged: compute it again
        kept = json.loads(path.read_text())
        if isinstance(kept, dict) and kept.get("key") == key:
            return kept["found"], True
    found = compute()
    with contextlib.suppress(SpecError):  # an unwritable or full cache costs only time
        text = json.dumps({"key": key, "found": found})
        write_atomically(path, text, parents=True, at_once=True)
    return found, False


def cached(
    key: str, vertices: int, below: int, compute: Callable[[], NDArray[np.int32]]
) -> NDArray[np.int32]:
    """Return the numbers [vertices] in [0, below) of `compute`, from disk or computed.

    The seconds of the computation are stored with them. A file is complete or absent; the .npz
    checksum reveals a damaged file, which is computed again."""
    if (named := os.environ.get("GNNPLAN_PARTITIONS")) == "none":
        return compute()
    there = Path(named) if named else cache_dir() / "partitions"
    path = there / f"{blake2b(f'{VERSION} {key}'.encode(), digest_size=16).hexdigest()}.npz"
    # absent or damaged: compute it again
    unread = OSError, ValueError, TypeError, EOFError, KeyError, zipfile.BadZipFile
    with contextlib.suppress(*unread):
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            found, seconds = np.asarray(file["found"]), float(file["seconds"])
        whole = found.shape == (vertices,) and found.dtype == np.int32
        if whole and found.min() >= 0 and found.max() < below:
            os.utime(path)
            Stopwatch.saved(seconds)
            return found
    start = time.perf_counter()
    found, buffer = compute(), io.BytesIO()
    np.savez(buffer, found=found, seconds=time.perf_counter() - start)
    with contextlib.suppress(SpecError, OSError):  # an unwritable or full disk costs only time
        write_atomically(path, buffer.getbuffer(), parents=True, at_once=True)
        newest_first = sorted(there.glob("*.npz"), key=lambda file: -file.stat().st_mtime_ns)
        total = np.cumsum([file.stat().st_size for file in newest_first])
        for file in compress(newest_first[1:], total[1:] > MOST_BYTES):
            file.unlink(missing_ok=True)
    return found
