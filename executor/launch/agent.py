"""Local ranks under torch's elastic agent.

The agent starts the ranks, watches them, ends all of them when one is lost, and starts them anew.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from signal import SIGCONT, Signals
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig

from gnnplan.executor.launch.emulation import INTERFACES, PORT, Server
from gnnplan.executor.launch.watchdog import Watchdog
from gnnplan.executor.ranks.meeting import LOOPBACK, loopback_only, store_of_this_machine

GRACE = 5  # [s] that a rank has between SIGTERM and SIGKILL
HANDLED = "TORCHELASTIC_SIGNALS_TO_HANDLE"
# for logs that nobody has asked for torch would make folders in /tmp, and leave them
NO_LOGS = DefaultLogsSpecs(os.devnull)


class _Agent(LocalElasticAgent):
    """An agent with a watchdog, which says whether lost ranks are restarted."""

    def __init__(self, spec: WorkerSpec, watchdog: Watchdog) -> None:
        super().__init__(spec, NO_LOGS, start_method="spawn")
        self.watchdog = watchdog

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.watchdog.begin()
        pids: dict[int, Any] = super()._start_workers(worker_group)
        assert isinstance(self._pcontext, SubprocessContext)
        self._pcontext.close = partial(_close_soon, self._pcontext, self._pcontext.close)  # type: ignore[method-assign]
        self.watchdog.watch([pids[local] for local in sorted(pids)])
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self.watchdog.look()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and self.watchdog.is_over(result.failures, self._remaining_restarts):
            self._remaining_restarts = 0
        return result


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


class _Here(StaticTCPRendezvous):
    """One machine's agent meets nobody; its ranks meet at a store that only the machine reaches.

    torch's own store listens on all interfaces.
    """

    use_agent_store = True

    def __init__(self, offers_store: bool) -> None:
        """offers_store: whether the agent does, or rank 0. Ranks find the secret name of the run
        in their environment."""
        self.store = store_of_this_machine()
        super().__init__(self.store.host, self.store.port, 0, 1, secrets.token_hex(16), timeout=0)
        self.use_agent_store = offers_store

    def next_rendezvous(self) -> RendezvousInfo:
        place = RendezvousStoreInfo(self.store.host, self.store.port)
        return RendezvousInfo(self.store, 0, 1, place)


def run(
    words: Sequence[str],
    watchdog: Watchdog,
    places: Sequence[int],
    servers: Sequence[Server],
    folder: Path,
    env: Mapping[str, str],
    restarts: int = 0,
) -> None:
    """Run a program of ours (executor/__main__.py) in a process per rank, until all are done.

    places: the server of every process. servers: that this machine plays; none: ranks are on it
    alone. folder: for links to servers. env: added to its environment. No process is left behind.
    Raises the watchdog's error.
    """
    usual = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **loopback_only()}
    env = {name: value for name, value in usual.items() if name not in os.environ} | dict(env)
    # -P: a folder named gnnplan in the working directory must not hide the package
    command = [sys.executable, "-P", "-m", "gnnplan.executor", *words]
    address = servers[places[0]].address if servers else ""  # where rank 0 offers the store
    if servers:
        env = {**env, **INTERFACES}
        for process, place in enumerate(places):
            (folder / f"namespace{process}").symlink_to(servers[place].namespace)
        # torch puts each rank's number there
        command = ["nsenter", f"--net={folder}/namespace${{local_rank}}", *command]
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            # every logger has a level of its own; our message says what happened
            logging.getLogger(name).setLevel(logging.CRITICAL)
    # torch's default: a rank stays near its GPU
    numa = LaunchConfig(1, 1, len(places), NO_LOGS).numa_options
    spec = WorkerSpec(
        "rank",
        len(places),
        _Here(offers_store=not address),
        entrypoint="env",
        args=(*(f"{name}={value}" for name, value in env.items()), *command),
        max_restarts=restarts,
        monitor_interval=0.2,
        master_addr=address or None,
        master_port=PORT if address else None,
        local_addr=LOOPBACK,
        numa_options=numa,
    )
    try:
        os.environ[HANDLED] = ""  # the launcher's are not torch's
        result = _Agent(spec, watchdog).run()
    finally:
        os.environ.pop(HANDLED, None)
    if result.is_failed():
        raise watchdog.error
