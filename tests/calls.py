"""Calls of `gnnplan` in a test's own process."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from gnnplan.cli import app


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
