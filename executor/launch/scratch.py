"""A folder for what ranks and samplers leave lying about when they are killed.

Python makes temporary files for a sampler's sockets, and torch makes some when a sampler is lost; a
killed process leaves them where they are. The launcher gives its processes a folder of their own
for temporary files, and removes it. A sampler also notes its process there, for torch names shared
memory by it. A launcher that is killed cannot remove anything; so a link in the run's folder leads
there, and whoever resumes the run with the same TMPDIR does it. On a disk without links the folder
stays."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gnnplan.planner.vocabulary.files import cannot_write

PREFIX = "gnnplan-"


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A folder of temporary files for the length of a `with` block. Raises SpecError."""
    link = out / ".scratch"
    if link.is_symlink():
        earlier = Path(os.readlink(link))
        if earlier.name.startswith(PREFIX) and str(earlier.parent) == tempfile.gettempdir():
            # by now another process may have the number of one that was killed long ago
            _remove(earlier, lambda sampler: not Path("/proc", sampler).exists())
        link.unlink()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise cannot_write(tempfile.gettempdir(), error) from error
    with suppress(OSError):
        link.symlink_to(folder)
    try:
        yield folder
    finally:
        _remove(folder, lambda sampler: True)
        link.unlink(missing_ok=True)


def _remove(folder: Path, is_over: Callable[[str], bool]) -> None:
    """Remove a folder, and the shared memory of those of its samplers that are over."""
    if folder.is_dir():
        for sampler in filter(is_over, filter(str.isdecimal, os.listdir(folder))):
            for left in Path("/dev/shm").glob(f"torch_{sampler}_*"):
                left.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
