"""Limits on what a user's code may take while a model is read."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from gnnplan.executor.modules.record import Unfit

FORWARD_SECONDS = 60.0  # on a graph of few vertices
FORWARD_BYTES = 4e9  # on such a graph, beside parameters
MAKING_SECONDS = 600.0  # a file that is executed may import much, or load weights


class NoEnd(Unfit):
    """The user's code does not come back."""


@contextmanager
def seconds(most: float, what: str) -> Iterator[None]:
    """Have the block end with NoEnd after so many seconds. Threads other than the main one, which
    gets no signal, take as long as they take."""

    def ends(number: int, frame: FrameType | None) -> None:
        raise NoEnd(
            f"{what} takes more than {most:.0f} s; leave out what waits, asks or loads there"
        )

    left = signal.getitimer(signal.ITIMER_REAL)[0]
    if threading.current_thread() is not threading.main_thread() or 0 < left < most:
        yield
        return
    before = signal.signal(signal.SIGALRM, ends)
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, left)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def memory(most: float) -> Iterator[None]:
    """Have allocations fail that make the process so many bytes larger than it is: the block ends
    with NoEnd then."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + int(most)
    if resource.RLIM_INFINITY != soft <= limit:
        yield
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise
        words = f"it allocates more than {most / 1e9:.0f} GB; make there what rows need alone"
        raise NoEnd(words).with_traceback(error.__traceback__) from error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
