"""Calls of `gnnplan` in a test's own process, as the fixture `gnnplan` (conftest.py); of programs; and
what calls allocate."""

import json
import shlex
import socket
import subprocess
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gnnplan.cli import app


class Answer(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """Standard output, which is one JSON document and nothing else."""
        return json.loads(self.out)


def spelt(words: Iterable[object]) -> list[str]:
    """The words of a call: text is split as a shell does, a path is one word."""
    split = [shlex.split(word) if isinstance(word, str) else [str(word)] for word in words]
    return [word for some in split for word in some]


def call(*words: object) -> None:
    """call("validate", path, ...), which prints and raises."""
    app(spelt(words), standalone_mode=False)


def planned(path: Path, *words: object) -> Path:
    """The plan that `gnnplan plan` writes there."""
    call("plan", *words, "-o", path)
    return path


def free_port(address: str = "127.0.0.1") -> int:
    """A port of this address that nobody listens on."""
    with socket.create_server((address, 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def ended_well(
    *command: object, within: float = 100, **how: Any
) -> subprocess.CompletedProcess[str]:
    """A program that must end with 0 within so many seconds; how: as for subprocess.run."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=within, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@contextmanager
def allocations() -> Iterator[Callable[[], int]]:
    """`with allocations() as most`: most() is the most that Python held at once in the block [B]."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
