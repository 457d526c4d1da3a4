"""Local ranks under torch's elastic agent.

The agent starts the ranks, watches them, ends all of them when one is lost, and starts them anew.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from signal import SIGCONT, Signals
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import (
    DefaultLogsSpecs,
    PContext,
    SubprocessContext,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)
from torch.distributed.launcher.api import LaunchConfig

from gnnplan.executor.ranks.meeting import LOOPBACK, store_of_this_machine
from gnnplan.planner.vocabulary.errors import GnnplanError, LostRank

GRACE = 5  # [s] that a rank has between SIGTERM and SIGKILL
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# for logs that nobody has asked for torch would make folders in /tmp, and leave them
NO_LOGS = DefaultLogsSpecs(os.devnull)
Blame = Callable[[dict[int, Any]], GnnplanError]  # from torch's failures by process
AnnounceRestart = Callable[[GnnplanError, int], None]  # why, and how many restarts are left
# from the ids of the ranks' processes to what is to be called now and then
Watch = Callable[[Sequence[int]], Callable[[], None]]


class _Agent(LocalElasticAgent):
    """An agent that restarts lost ranks, but not ranks whose input is wrong."""

    def __init__(
        self, spec: WorkerSpec, blame: Blame, announce_restart: AnnounceRestart, watch: Watch
    ) -> None:
        super().__init__(spec, NO_LOGS, start_method="spawn")
        self.blame, self.announce_restart, self.watch = blame, announce_restart, watch
        self.error: GnnplanError | None = None
        self.look: Callable[[], None] = lambda: None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        assert self._pcontext is not None
        pids = self._pcontext.pids()
        self.look = self.watch([pids[local] for local in sorted(pids)])
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.look()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.error = self.blame(result.failures)
            if not isinstance(self.error, LostRank):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self.announce_restart(self.error, self._remaining_restarts)
        return result


class _Here(RendezvousHandler):
    """One machine's agent meets nobody; its ranks meet at a store that only the machine reaches.

    torch's own rendezvous listens on all interfaces."""

    def __init__(self) -> None:
        self.store, self.run = store_of_this_machine(), secrets.token_hex(16)

    def get_backend(self) -> str:
        return "here"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.store.host, self.store.port)
        return RendezvousInfo(self.store, 0, 1, place)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        """Its secret name: ranks find it in their environment."""
        return self.run

    def shutdown(self) -> bool:
        return True


def run(
    arguments: Sequence[str],
    ranks: int,
    restarts: int,
    blame: Blame,
    announce_restart: AnnounceRestart,
    watch: Watch,
) -> None:
    """Run Python with these arguments in a process per rank, until all are done.

    No process is left behind. Raises the error that `blame` makes of the failures.
    """
    for name in [
        name
        for name in logging.root.manager.loggerDict
        if name.startswith("torch.distributed.elastic")
    ]:
        # every logger has a level of its own; our message says what happened
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # torch's default: a rank stays near its GPU
    numa = LaunchConfig(1, 1, ranks, NO_LOGS).numa_options
    meeting = _Here()
    spec = WorkerSpec(
        "rank",
        ranks,
        meeting,
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=restarts,
        monitor_interval=0.2,
        local_addr=LOOPBACK,
        numa_options=numa,
    )
    agent = _Agent(spec, blame, announce_restart, watch)
    try:
        os.environ[HANDLED] = ""  # the launcher's are not torch's
        with _grace(GRACE):
            result = agent.run()
    finally:
        os.environ.pop(HANDLED, None)
        meeting.shutdown()
    if result.is_failed():
        raise agent.error or blame(result.failures)


@contextmanager
def _grace(seconds: int) -> Iterator[None]:
    """Shorten the time between SIGTERM and SIGKILL to `seconds`.

    torch always waits 30 s when a rank has failed, whatever shutdown_timeout says. A stopped
    process receives SIGTERM only when it continues, so it is also sent SIGCONT.
    """
    close = PContext.close

    def close_soon(
        self: SubprocessContext, death_sig: Signals | None = None, timeout: int = 30
    ) -> None:
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.terminate()
                handler.proc.send_signal(SIGCONT)
        close(self, death_sig, min(timeout, seconds))

    PContext.close = close_soon  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        PContext.close = close  # type: ignore[method-assign]
