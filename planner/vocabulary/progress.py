"""Lines on standard error that say what a command is doing: one every two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 2.0
Notify = Callable[[str], None]


def silent(what: str) -> None:
    """Say nothing, for callers whom nobody waits for."""


@contextmanager
def progress(every_s: float = EVERY_S) -> Iterator[Notify]:
    """Gives a function that is called with what is being done now.

    Every `every_s` seconds a line says it, with the seconds since the beginning. On a terminal the
    line replaces the one before.
    """
    doing, over, started = "", threading.Event(), time.monotonic()
    on_terminal, shown = sys.stderr.isatty(), False

    def notify(what: str) -> None:
        nonlocal doing
        doing = what

    def report() -> None:
        nonlocal shown
        while not over.wait(every_s):
            if doing:
                line = f"{doing} ... {time.monotonic() - started:.0f} s"
                print(
                    f"\r\x1b[K{line}" if on_terminal else line,
                    end="" if on_terminal else "\n",
                    file=sys.stderr,
                    flush=True,
                )
                shown = True

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield notify
    finally:
        over.set()
        reporter.join()
        if on_terminal and shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
