"""Lines on standard error for the user: notes, and progress of phases longer than two seconds."""

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
_CLEAR = "\r\x1b[K"  # erases the terminal's current line


class Notify(Protocol):
    """A callback that receives the current phase of a command, and the item being processed."""

    def __call__(self, phase: str, detail: str = "", /) -> None: ...


def silent(phase: str, detail: str = "", /) -> None:
    """Ignore progress; for callers without a waiting user."""


_listeners: list[Notify] = [silent]  # a stack: only the last listener is called


def notify(phase: str, detail: str = "", /) -> None:
    """Report the current phase to the active listener: `progress`, or a caller's `notify`.

    An empty phase ends the previous phase."""
    _listeners[-1](phase, detail)


def reports_progress(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the API: its argument `notify` receives the progress of the call."""

    @wraps(function)
    def reporting(*args: P.args, **options: P.kwargs) -> T:
        with _listening(cast(Notify, options.get("notify", _listeners[-1]))):
            return function(*args, **options)

    return reporting


@contextmanager
def _listening(listener: Notify) -> Iterator[None]:
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.pop()


def say(line: str, end: str = "\n") -> None:
    """Print a line on standard error, in place of the line that shows progress.

    One write prints the whole line, so that lines of several ranks do not mix. A full or closed
    standard error is ignored: `gnnplan run .. 2>&1 | head` goes on.
    """
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{_CLEAR if sys.stderr.isatty() else ''}{line}{end}")
        sys.stderr.flush()


@contextmanager
def inner_phase(phase: str) -> Iterator[None]:
    """Report a long part of the current phase separately, and time it separately.

    The line is printed at once, because a library that holds Python's global lock keeps the
    reporting thread from printing it later."""
    listener = _listeners[-1]
    if not isinstance(listener, _Phase):
        yield
        return
    outer, start = (listener.name, listener.detail), time.monotonic()
    began, listener.name = listener.began, ""  # without its name, the outer phase does not end
    listener(phase)
    listener.show()
    try:
        yield
    finally:
        listener.end()
        listener.name, listener.detail = outer
        listener.began = began + time.monotonic() - start


class _Phase:
    """The current phase and its start; a thread shows it on a terminal's line until `over`."""

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
            self.show()

    def end(self) -> None:
        seconds = time.monotonic() - self.began
        if self.name and seconds >= self.every_s:
            say("" if self.on_terminal else f"{self.name}: {seconds:.0f} s\n", end="")

    def show(self) -> None:
        """Replace the terminal's line by the current phase and its seconds so far."""
        if self.on_terminal and self.name:
            doing = f"{self.name}: {self.detail}" if self.detail else self.name
            say(f"{doing} ... {time.monotonic() - self.began:.0f} s", end="")


@contextmanager
def progress(every_s: float = EVERY_S) -> Iterator[Notify]:
    """Show the progress of a block to the user, and yield the callback that receives the phases.

    On a terminal, one line has the phase and its seconds so far, and is replaced every `every_s`
    seconds. Elsewhere, a phase of `every_s` seconds or more gets one line when it ends.
    """
    phase = _Phase(every_s)
    try:
        with _listening(phase):
            yield phase
    finally:
        phase.over.set()
        if phase.reporter.ident is not None:
            phase.reporter.join()
        phase.end()
