"""A folder for what samplers leave lying about when they are killed: sockets and shared memory.

Python makes a folder in /tmp for a sampler's sockets, which a killed process leaves there. The
launcher gives samplers one of its own, and removes it. A sampler also notes its process there, for
torch names shared memory by it. A launcher that is killed cannot remove anything; so a link in the
run's folder leads there, and whoever resumes the run does it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gnnplan.executor.ranks.rank import SCRATCH
from gnnplan.planner.vocabulary.files import cannot_write

PREFIX = "gnnplan-"


@contextmanager
def scratch(out: Path) -> Iterator[None]:
    """Give the samplers of processes that are started within a folder. Raises SpecError."""
    link = out / "scratch"
    try:
        _forget(link)
        os.environ[SCRATCH] = tempfile.mkdtemp(prefix=PREFIX)
        link.symlink_to(os.environ[SCRATCH])
    except OSError as error:
        raise cannot_write(link, error) from error
    try:
        yield
    finally:
        _forget(link)
        del os.environ[SCRATCH]


def _forget(link: Path) -> None:
    """Remove the link and the folder to which it leads, if it is one of ours."""
    if link.is_symlink():
        folder = Path(os.readlink(link))
        is_ours = folder.name.startswith(PREFIX) and str(folder.parent) == tempfile.gettempdir()
        if is_ours and folder.is_dir():
            for sampler in filter(str.isdecimal, os.listdir(folder)):
                for left in Path("/dev/shm").glob(f"torch_{sampler}_*"):
                    left.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
        link.unlink()
