"""Lines for people, on standard error: notes, and what takes longer than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import ParamSpec, Protocol, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")
EVERY_S = 2.0
_CLEAR = "\r\x1b[K"  # of a terminal's line


class Notify(Protocol):
    """Is told the phase that a command is in, and what it looks at there."""

    def __call__(self, phase: str, detail: str = "", /) -> None: ...


def silent(phase: str, detail: str = "", /) -> None:
    """Say nothing, for callers whom nobody waits for."""


_listeners: list[Notify] = [silent]  # the last one is told


def notify(phase: str, detail: str = "", /) -> None:
    """Say what is being done now, to whoever listens: `progress`, or a caller's `notify`.

    An empty phase ends the one before."""
    _listeners[-1](phase, detail)


def tells(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function of the API that tells its argument `notify` what is being done."""

    @wraps(function)
    def telling(*args: P.args, **options: P.kwargs) -> T:
        with _told(cast(Notify, options.get("notify", _listeners[-1]))):
            return function(*args, **options)

    return telling


@contextmanager
def _told(listener: Notify) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def say(line: str, end: str = "\n") -> None:
    """Print a line, in place of one that tells progress.

    In one write: lines of several ranks do not mix. A standard error that is full or gone stops
    nobody: `gnnplan run .. 2>&1 | head`.
    """
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{_CLEAR if sys.stderr.isatty() else ''}{line}{end}")
        sys.stderr.flush()


@contextmanager
def inner_phase(phase: str) -> Iterator[None]:
    """A part of the phase that takes long by itself; it is told and timed apart.

    It is told at once: a library that keeps the interpreter to itself lets nobody tell it later."""
    listener = _listeners[-1]
    if not isinstance(listener, _Phase):
        yield
        return
    outer, start = (listener.name, listener.detail), time.monotonic()
    began, listener.name = listener.began, ""  # the outer phase goes on behind
    listener(phase)
    listener.tell()
    try:
        yield
    finally:
        listener.end()
        listener.name, listener.detail = outer
        listener.began = began + time.monotonic() - start


class _Phase:
    """What is being done now, and since when; a terminal's line says it until `over`."""

    def __init__(self, every_s: float) -> None:
        self.every_s, self.on_terminal = every_s, sys.stderr.isatty()
        self.name, self.detail, self.began = "", "", time.monotonic()
        self.over, self.reporter = (
            threading.Event(),
            threading.Thread(target=self.report, daemon=True),
        )

    def __call__(self, phase: str, detail: str = "", /) -> None:
        if phase != self.name:
            self.end()
            self.name, self.began = phase, time.monotonic()
        self.detail = detail
        if phase and self.on_terminal and self.reporter.ident is None:
            self.reporter.start()

    def report(self) -> None:
        while not self.over.wait(self.every_s):
            self.tell()

    def end(self) -> None:
        seconds = time.monotonic() - self.began
        if self.name and seconds >= self.every_s:
            say("" if self.on_terminal else f"{self.name}: {seconds:.0f} s\n", end="")

    def tell(self) -> None:
        """Replace the terminal's line."""
        if self.on_terminal and self.name:
            doing = f"{self.name}: {self.detail}" if self.detail else self.name
            say(f"{doing} ... {time.monotonic() - self.began:.0f} s", end="")


@contextmanager
def progress(every_s: float = EVERY_S) -> Iterator[Notify]:
    """Tells people what is being done, and gives a function that is called with it.

    On a terminal one line says it, with the seconds of the phase, and is replaced every `every_s`
    seconds. Elsewhere every phase of `every_s` seconds or more is one line when it ends.
    """
    phase = _Phase(every_s)
    try:
        with _told(phase):
            yield phase
    finally:
        phase.over.set()
        if phase.reporter.ident is not None:
            phase.reporter.join()
        phase.end()
