"""The launcher's entry points: start the local ranks of a plan, and wait for them.

The ranks themselves run rank_process.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path

from gnnplan.executor.launch.emulation import lab
from gnnplan.executor.launch.failure import kept, name_of
from gnnplan.executor.launch.run_request import RunRequest, write_run
from gnnplan.executor.ranks import activity
from gnnplan.executor.ranks.rank import SCRATCH
from gnnplan.planner.vocabulary.files import (
    cannot_write,
    folder_lock,
    forget_unfinished,
    make_folder,
)

PREFIX = "gnnplan-"
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def new_folder(name: str) -> Path:
    """Return the first folder runs/NAME-1, runs/NAME-2 .. that does not exist.

    Nor does the plan beside it, runs/NAME-1.json, which may be all that `tune` has written."""
    places = (Path("runs") / f"{name}-{n}" for n in range(1, 10_000))
    return next(p for p in places if not (p.exists() or p.with_name(f"{p.name}.json").exists()))


class TimeIsUp(Exception):
    """The end of a run that took longer than it may."""


@contextmanager
def unwound_by_signals() -> Iterator[Callable[[], None]]:
    """Unwind this process on signals that would end it, so that it leaves nothing behind.

    Yields a function that raises if a signal has arrived; the end of the block raises too. An
    exception at any other point could leave a process half started, or a lock held that the
    clean-up waits for. A second signal raises at once. Signals that the parent made this process
    ignore stay ignored: under `nohup` a run continues when its terminal is closed.
    """
    received: list[int] = []

    def unwind() -> None:
        if signal.SIGINT in received:
            raise KeyboardInterrupt
        if received:
            raise SystemExit(128 + received[0])

    def receive(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            unwind()

    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield unwind
        return
    before = {
        number: handler
        for number in ENDING
        if (handler := signal.getsignal(number)) in (signal.SIG_DFL, signal.default_int_handler)
    }
    for number in before:
        signal.signal(number, receive)
    try:
        yield unwind
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        unwind()


def begin(asked: RunRequest, most_s: float = inf) -> None:
    """Train a plan's strategy with ranks on this machine, in the run's folder `asked.out`.

    Call `must_start` first: it checks that this machine can run the ranks. Emulates the plan's
    servers if asked to (emulation.py). Leaves no process behind, not even after a signal. Raises
    SpecError, LostRank, naming the rank that failed first, if no restart is left, and TimeIsUp
    after `most_s` seconds.
    """
    until, options = time.monotonic() + most_s, asked.options
    out, problem = asked.out, asked.problem
    places = [problem.servers[rank] for rank in problem.by_gpu]
    names = [name_of(*each) for each in zip(problem.by_gpu, places, strict=True)]
    asked.settled.schedule(problem, 1)  # computes the partitions, which ranks then load
    make_folder(out)
    emulated = lab(asked.cluster.servers, asked.emulate)
    with folder_lock(out, "another run trains in", "give another --out"):
        write_run(out, asked.document, options, asked.last)
        from gnnplan.executor.launch import agent  # its import takes 1 s

        try:
            with unwound_by_signals() as unwind, scratch(out) as folder, emulated as servers:

                def go_on() -> None:
                    unwind()
                    if time.monotonic() > until:
                        raise TimeIsUp

                def safe() -> str:
                    return f"All ranks were stopped; {kept(out, problem.by_gpu)}"

                limit_s, predicted = options.timeout_s, asked.predicted
                watched = agent.Watched(out, names, limit_s, go_on, safe, predicted)
                arguments = ["launch", str(out)]
                env = {SCRATCH: str(folder), "TMPDIR": str(folder)}
                agent.run(arguments, watched, places, servers, env, options.restarts)
        finally:
            activity.forget(out)
            forget_unfinished(out)


@contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """Create a folder of temporary files for the length of a `with` block. Raises SpecError.

    Python puts a sampler's sockets there, and torch some files when a sampler is lost; a killed
    process leaves them behind. Each sampler also leaves a file named by its process id, as torch
    names shared memory by this id. A killed launcher cannot remove anything. So the run's folder
    links to the temporary folder, and a resumed run with the same TMPDIR removes it. On a disk
    without symbolic links the folder stays.
    """
    link = out / ".scratch"
    if link.is_symlink():
        earlier = Path(os.readlink(link))
        if earlier.name.startswith(PREFIX) and str(earlier.parent) == tempfile.gettempdir():
            # another process may have the id of a sampler that was killed long ago
            _remove(earlier, lambda sampler: not Path("/proc", sampler).exists())
        link.unlink()
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise cannot_write(tempfile.gettempdir(), error) from error
    with suppress(OSError):
        link.symlink_to(folder)
    try:
        yield folder
    finally:
        _remove(folder, lambda sampler: True)
        link.unlink(missing_ok=True)


def _remove(folder: Path, is_over: Callable[[str], bool]) -> None:
    """Remove a folder, and the shared memory of the samplers that have ended."""
    if folder.is_dir():
        for sampler in filter(is_over, filter(str.isdecimal, os.listdir(folder))):
            for segment in Path("/dev/shm").glob(f"torch_{sampler}_*"):
                segment.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
