"""Local ranks under torch's elastic agent.

The agent starts the ranks, watches them, ends all of them when one is lost, and restarts them.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import SIGCONT, Signals
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from gnnplan.executor.launch.emulation import INTERFACES, PORT, Server
from gnnplan.executor.launch.failure import REMEDY, Failure, account, blame
from gnnplan.executor.ranks import activity
from gnnplan.executor.ranks.checkpoint import last_stored
from gnnplan.executor.ranks.rendezvous import LOOPBACK, loopback_only, store_of_this_machine
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank
from gnnplan.planner.vocabulary.progress import say

HEAD_START = 5.0  # [s] after the time-out in which ranks can report a silent peer themselves
BUSY = 0.5  # [s] of core time between two looks that count as activity
SEEN = 1.0  # [s] of silence counted per look at most: a launcher may itself have been stopped
GRACE = 5  # [s] between SIGTERM and SIGKILL for a rank
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# torch would create folders in /tmp for unused logs, and leave them there
NO_LOGS = DefaultLogsSpecs(os.devnull)


@dataclass(frozen=True)
class Watched:
    """The ranks of a run on this machine, as the agent watches them; `out` is the run's folder.

    names: of every process, for messages. limit_s: seconds that all ranks may be silent.
    unwind: called now and then; raises to end the run. safe: returns a sentence on what is on disk.
    predicted: memory of the fullest rank by use [B].
    """

    out: Path
    names: Sequence[str]
    limit_s: float
    unwind: Callable[[], None]
    safe: Callable[[], str]
    predicted: Mapping[str, float] = field(default_factory=dict)


class _Agent(LocalElasticAgent):
    """An agent that detects that all ranks hang, and reports which rank failed first.

    It sees exit codes and core times; ranks write their last activity and a note
    (ranks/activity.py). A rank notices one silent peer, but not that all ranks are silent: stopped
    by a signal or a debugger, or in a deadlock without a time-out.
    """

    error = GnnplanError()  # the reason why the run ended

    def __init__(self, spec: WorkerSpec, watched: Watched) -> None:
        super().__init__(spec, NO_LOGS, start_method="spawn")
        self.watched, self._killed_before = watched, _oom_kills()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._records = activity.begin(self.watched.out, len(self.watched.names))
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        self._pcontext.close = partial(_close_soon, self._pcontext, self._pcontext.close)  # type: ignore[method-assign]
        self._pids = [pids[local] for local in sorted(pids)]
        self._looked, self._silent_s = time.monotonic(), 0.0
        self._operations, self._cores_s = [""], 0.0
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._look()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self._is_over(result.failures):
            self._remaining_restarts = 0
        return result

    def _look(self) -> None:
        """End ranks, with a note of each, once all have been silent for too long: those that are
        stopped, else all."""
        self.watched.unwind()
        now = time.monotonic()
        self._silent_s += min(now - self._looked, SEEN)
        self._looked = now
        operations = [record.operation for record in self._records]
        each_s, stopped = zip(*map(_seen, self._pids), strict=True)
        cores_s = sum(each_s)
        if operations != self._operations or abs(cores_s - self._cores_s) > BUSY:
            self._operations, self._cores_s, self._silent_s = operations, cores_s, 0.0
        elif self._silent_s > self.watched.limit_s + HEAD_START:
            message = f"no rank has done anything for {self._silent_s:.0f} s; "
            lost = [rank for rank, is_stopped in enumerate(stopped) if is_stopped]
            if lost:
                message += "this one is stopped, by a signal or a debugger"
            elif all(
                # outside an epoch a rank may rightly wait for a disk or a compiler
                " of epoch " in operation and not operation.startswith("the checkpoint")
                for operation in operations
            ):
                lost = list(range(len(stopped)))
                message += "one that works longer at an operation needs a longer --timeout"
            for rank in lost:
                note = Failure(LostRank.exit_code, message, operations[rank]).note
                self._records[rank].leave(note)
                with suppress(ProcessLookupError):
                    os.kill(self._pids[rank], signal.SIGKILL)

    def _is_over(self, failures: Mapping[int, Any]) -> bool:
        """Whether the run ends with these failures of processes; else all ranks restart.

        A run whose input is wrong does not restart.
        """
        starved = _oom_kills() > self._killed_before
        self.error = blame(
            failures,
            self._records,
            self.watched.names,
            self.watched.limit_s,
            self.watched.safe(),
            f"{account(self.watched.predicted)}\n{REMEDY}" if starved else "",
        )
        if not (self._remaining_restarts and isinstance(self.error, LostRank)):
            return True
        self.watched.unwind()  # raises if a signal to the process group has ended the ranks
        last = last_stored(self.watched.out, range(len(self.watched.names)))
        start = f"epoch {last}" if last else "the beginning"
        say(
            f"{self.error}\nstarting all ranks anew from {start} (restarts left after this one:"
            f" {self._remaining_restarts - 1})"
        )
        return False


def _seen(pid: int) -> tuple[float, bool]:
    """Return the core time of a process and its threads [s], and whether a signal or a debugger has
    stopped it; nothing is seen of it after its end."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0, False
    # fields after the name, which may contain blanks
    state, *fields = text.rpartition(")")[2].split()
    ticks = sum(map(int, fields[10:12]))  # in user and in system mode
    return ticks / os.sysconf("SC_CLK_TCK"), state in "tT"


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory since the machine started.

    0 if the kernel does not count them.
    """
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _close_soon(
    context: SubprocessContext,
    close: Callable[[Signals | None, int], None],
    death_sig: Signals | None = None,
    timeout: int = 30,
) -> None:
    """Shorten the time between SIGTERM and SIGKILL to `GRACE`.

    torch always waits 30 s when a rank has failed, whatever shutdown_timeout says. A stopped
    process receives SIGTERM only when it continues, so it is also sent SIGCONT.
    """
    for handler in context.subprocess_handlers.values():
        if handler.proc.poll() is None:
            handler.proc.terminate()
            handler.proc.send_signal(SIGCONT)
    close(death_sig, min(timeout, GRACE))


class _LocalRendezvous(StaticTCPRendezvous):
    """The rendezvous of one machine: its ranks meet at a store that only this machine reaches.

    torch's own store would listen on all interfaces.
    """

    use_agent_store = True

    def __init__(self, offers_store: bool) -> None:
        """offers_store: the agent hosts the store; else rank 0 does. Ranks get the run's secret
        name by their environment."""
        self.store = store_of_this_machine()
        super().__init__(self.store.host, self.store.port, 0, 1, secrets.token_hex(16), timeout=0)
        self.use_agent_store = offers_store

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.store.host, self.store.port)
        return RendezvousInfo(self.store, 0, 1, place)


def run(
    arguments: Sequence[str],
    watched: Watched,
    places: Sequence[int],
    servers: Sequence[Server],
    env: Mapping[str, str],
    restarts: int = 0,
) -> None:
    """Run a program of executor/__main__.py in one process per rank, until all have ended.

    arguments: its command line. places: the server of every process. servers: the emulated servers,
    if any. env: added to the environment. Leaves no process behind. Raises the error of the rank
    that failed first.
    """
    defaults = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **loopback_only()}
    env = {name: value for name, value in defaults.items() if name not in os.environ} | dict(env)
    # -P: a folder named gnnplan in the working directory must not hide the package
    command = [sys.executable, "-P", "-m", "gnnplan.executor", *arguments]
    address = servers[places[0]].address if servers else ""  # rank 0 hosts the store
    if servers:
        env |= INTERFACES | {f"NET{n}": servers[place].namespace for n, place in enumerate(places)}
        # torch replaces ${local_rank} by the rank's number
        command = ["sh", "-c", 'exec nsenter --net="$NET${local_rank}" "$@"', "sh", *command]
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            # these loggers do not inherit a level; our own message reports the failure
            logging.getLogger(name).setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        "rank",
        len(places),
        _LocalRendezvous(offers_store=not address),
        entrypoint="env",
        args=(*(f"{name}={value}" for name, value in env.items()), *command),
        max_restarts=restarts,
        monitor_interval=0.2,
        master_addr=address or None,
        master_port=PORT if address else None,
        local_addr=LOOPBACK,
    )
    try:
        os.environ[HANDLED] = ""  # the launcher handles signals, torch does not
        agent = _Agent(spec, watched)
        result = agent.run()
    finally:
        os.environ.pop(HANDLED, None)
    if result.is_failed():
        raise agent.error
