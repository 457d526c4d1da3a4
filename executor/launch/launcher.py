"""Starts the local ranks of a plan and waits for them.

The command line uses this module only, so it also offers what checks.py, options.py and
rank_process.py define. The ranks themselves run rank_process.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gnnplan.executor.launch.blame import blame
from gnnplan.executor.launch.checks import prepare, started_by_launcher, write_run
from gnnplan.executor.launch.emulation import Emulated
from gnnplan.executor.launch.heartbeat import Heartbeat
from gnnplan.executor.launch.options import Options
from gnnplan.executor.launch.out_of_memory import REMEDY, account, killings
from gnnplan.executor.launch.preflight import Asked, Row, look, must_start, predicted_memory
from gnnplan.executor.launch.rank_process import follow, leave, work
from gnnplan.executor.launch.scratch import scratch
from gnnplan.executor.ranks import activity
from gnnplan.executor.ranks.checkpoint import last_stored
from gnnplan.executor.ranks.meeting import loopback_only
from gnnplan.planner.decision.plan import read
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import forget_unfinished, make_folder
from gnnplan.planner.vocabulary.progress import say

__all__ = [
    "Asked",
    "Emulated",
    "Options",
    "Row",
    "begin",
    "follow",
    "leave",
    "look",
    "must_start",
    "new_folder",
    "prepare",
    "start",
    "started_by_launcher",
    "work",
]

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def new_folder(name: str) -> Path:
    """The first folder runs/NAME-1, runs/NAME-2 .. that does not exist."""
    return next(p for n in range(1, 10_000) if not (p := Path("runs") / f"{name}-{n}").exists())


def begin(
    document: dict[str, Any],
    problem: Problem,
    strategy: Strategy,
    out: Path,
    options: Options,
    emulate: Emulated | None = None,
    last: int = 0,
) -> None:
    """Train with a plan's strategy in a folder that gets all that a run leaves.

    `document` is the plan, `strategy` its choice, settled; this machine can hold its ranks
    (`must_start`). last: the epoch that it goes on from. Raises SpecError, LostRank.
    """
    strategy.schedule(problem, 1)  # makes the partitions, which the ranks then read
    make_folder(out)
    with _alone_in(out):
        write_run(out, document, options, last)
        start(out / "plan.json", out, options, problem, emulate)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """A block in which no other launcher of this machine trains in the folder. Raises SpecError.

    The lock is the system's and ends with this process, however that ends.
    """
    folder = os.open(out, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SpecError(
                f"another run trains in {out}; wait for its end, or give another --out"
            ) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(folder)


@contextmanager
def unwound_by_signals() -> Iterator[Callable[[], None]]:
    """Let signals that end this process unwind it, so that it leaves nothing behind.

    A first signal raises where what is yielded is called, or at the end of the block: raised
    anywhere it may leave a process half started, or a lock that its end waits for. A second one
    raises at once. What its starter had it ignore it ignores: `nohup` goes on when its terminal is
    closed.
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

    if threading.current_thread() is not threading.main_thread():  # the others may not say
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


def start(
    plan: Path, out: Path, options: Options, problem: Problem, emulate: Emulated | None = None
) -> None:
    """Start local ranks, in the order of their GPUs, and wait for them.

    With `emulate` every server is a network namespace (emulation.py). No process is left behind,
    also by signals. Raises LostRank, naming the rank that failed first, when no restart is left.
    """
    from gnnplan.executor.launch import agent
    from gnnplan.executor.launch import emulation as lab

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    ranks, killed_before = problem.by_gpu, killings()
    activity.begin(out, ranks)
    predicted = predicted_memory(read(plan))

    def explain(failures: dict[int, Any]) -> GnnplanError:
        starved = f"{account(predicted)}\n{REMEDY}" if killings() > killed_before else ""
        by_rank = {ranks[process]: failure for process, failure in failures.items()}
        return blame(by_rank, out, problem.servers, options.timeout_s, starved)

    interfaces = {
        name: interface for name, interface in loopback_only().items() if name not in os.environ
    }
    # -P: a folder named gnnplan in the working directory must not hide the package
    program = ["-P", "-m", "gnnplan.executor", "launch"]
    arguments = [*program, str(plan), str(out), json.dumps(asdict(options))]
    try:
        with unwound_by_signals() as unwind, scratch(out):

            def announce_restart(error: GnnplanError, left: int) -> None:
                unwind()  # a signal to all processes has ended the ranks
                last = last_stored(out, ranks)
                where = f"epoch {last}" if last else "the beginning"
                say(
                    f"{error}\nstarting all ranks anew from {where} (restarts left after this one:"
                    f" {left - 1})"
                )
                activity.begin(out, ranks)

            def watch(pids: Sequence[int]) -> Callable[[], None]:
                by_rank = dict(zip(ranks, pids, strict=True))
                servers = dict(enumerate(problem.servers))
                heartbeat = Heartbeat(by_rank, servers, out, options.timeout_s)

                def look() -> None:
                    unwind()
                    heartbeat.look()

                return look

            if emulate is None:
                os.environ |= interfaces
                agent.run(arguments, len(ranks), options.restarts, explain, announce_restart, watch)
            else:
                lab.run(
                    arguments,
                    problem.cluster.servers,
                    [problem.servers[rank] for rank in ranks],
                    emulate.rate,
                    options.restarts,
                    explain,
                    announce_restart,
                    watch,
                )
    finally:
        for name in interfaces:  # this process may go on to servers
            os.environ.pop(name, None)
        activity.forget(out)
        forget_unfinished(out)
