"""Lines for people, on standard error: notes, and what takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

EVERY_S = 2.0
_CLEAR = "\r\x1b[K"  # of a terminal's line


class Notify(Protocol):
    """Is told the phase that a command is in, and what it looks at there."""

    def __call__(self, phase: str, detail: str = "", /) -> None: ...


def silent(phase: str, detail: str = "", /) -> None:
    """Say nothing, for callers whom nobody waits for."""


def say(line: str, end: str = "\n") -> None:
    """Print a line, in place of one that tells progress.

    In one write: lines of several ranks do not mix. A standard error that is full or gone stops
    nobody: `gnnplan run .. 2>&1 | head`.
    """
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{_CLEAR if sys.stderr.isatty() else ''}{line}{end}")
        sys.stderr.flush()


def inner_phase(phase: str) -> AbstractContextManager[None]:
    """A context for a part of the phase that takes long by itself; it is told and timed apart.

    It is told at once: a library that keeps the interpreter to itself lets nobody tell it later."""
    return _inner[-1](phase) if _inner else nullcontext()


_inner: list[Callable[[str], AbstractContextManager[None]]] = []  # of `progress`, while it runs


@contextmanager
def progress(every_s: float = EVERY_S) -> Iterator[Notify]:
    """Gives a function that is called with what is being done now.

    On a terminal one line says it, with the seconds of the phase, and is replaced every `every_s`
    seconds. Elsewhere every phase of `every_s` seconds or more is one line when it ends.
    """
    on_terminal, over = sys.stderr.isatty(), threading.Event()
    phase, detail, began = "", "", time.monotonic()

    def notify(now: str, about: str = "", /) -> None:
        nonlocal phase, detail, began
        if now != phase:
            end()
            phase, began = now, time.monotonic()
        detail = about

    def end() -> None:
        seconds = time.monotonic() - began
        if phase and seconds >= every_s:
            say("" if on_terminal else f"{phase}: {seconds:.0f} s\n", end="")

    @contextmanager
    def apart(inner: str) -> Iterator[None]:
        nonlocal phase, detail, began
        outer, start = (phase, detail, began), time.monotonic()
        phase, detail, began = inner, "", start
        if on_terminal:
            tell()
        try:
            yield
        finally:
            end()
            phase, detail, began = outer
            began += time.monotonic() - start

    def tell() -> None:
        doing = f"{phase}: {detail}" if detail else phase
        say(f"{doing} ... {time.monotonic() - began:.0f} s", end="")

    def report() -> None:
        while not over.wait(every_s):
            if phase:
                tell()

    reporter = threading.Thread(target=report, daemon=True)
    _inner.append(apart)
    if on_terminal:
        reporter.start()
    try:
        yield notify
    finally:
        _inner.remove(apart)
        over.set()
        if on_terminal:
            reporter.join()
        end()
