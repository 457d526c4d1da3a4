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


@contextmanager
def seconds(most: float, what: str) -> Iterator[None]:
    """Have the block end with Unfit after so many seconds. Threads other than the main one, which
    gets no signal, take as long as they take."""

    def ends(number: int, frame: FrameType | None) -> None:
        raise Unfit(
            f"{what} takes more than {most:.0f} s; leave out what waits, asks or loads there"
        )

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ends)
    signal.setitimer(signal.ITIMER_REAL, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def limit_memory(more: float) -> None:
    """Have allocations fail, from now on, that make the process so many bytes larger than it is."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(more)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
