"""What a verb is at, told to people who wait: nothing in the first two seconds, then a line whenever two more have passed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EVERY_S = 2.0
Tell = Callable[[str], None]


def silent(what: str) -> None:
    """For callers whom nobody waits for."""


@contextmanager
def progress(every_s: float = EVERY_S) -> Iterator[Tell]:
    """`tell` what is being done now; lines go to standard error, one that renews itself on a terminal."""
    now, over, started = "", threading.Event(), time.monotonic()
    renew, shown = sys.stderr.isatty(), False

    def tell(what: str) -> None:
        nonlocal now
        now = what

    def report() -> None:
        nonlocal shown
        while not over.wait(every_s):
            if now:
                line = f"{now} ... {time.monotonic() - started:.0f} s"
                print(f"\r\x1b[K{line}" if renew else line, end="" if renew else "\n", file=sys.stderr, flush=True)
                shown = True

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield tell
    finally:
        over.set()
        reporter.join()
        if renew and shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
