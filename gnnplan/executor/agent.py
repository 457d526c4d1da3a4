"""Local ranks under torch's elastic agent, which starts them, watches them, ends all when one is lost, and starts them anew."""

from __future__ import annotations

import logging
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch.distributed.elastic.rendezvous.registry as rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, PContext, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from gnnplan.planner.errors import GnnplanError, LostRank

GRACE = 5  # [s] that a rank has to end when it is told to
Blame = Callable[[dict[int, object]], GnnplanError]


class _Agent(LocalElasticAgent):
    """Knows whose fault a failure is, and starts anew only what may go better next time."""

    def __init__(self, spec: WorkerSpec, blame: Blame, again: Callable[[GnnplanError, int], None]) -> None:
        super().__init__(spec, DefaultLogsSpecs(), start_method="spawn")
        self.blame, self.again = blame, again
        self.error: GnnplanError | None = None

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.is_failed():
            self.error = self.blame(result.failures)
            if not isinstance(self.error, LostRank):
                self._remaining_restarts = 0
            elif self._remaining_restarts:
                self.again(self.error, self._remaining_restarts)
        return result


def run(arguments: Sequence[str], ranks: int, restarts: int, blame: Blame, again: Callable[[GnnplanError, int], None]) -> None:
    """So many processes of Python with these arguments, until they are done; none is left behind. `blame` says what a failure was by
    torch's failures of each; `again` hears of it and how many restarts are left, before one. Raises what `blame` has found."""
    for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each has a level of its own; what happened is ours to say
    numa = LaunchConfig(1, 1, ranks).numa_options  # torch's choice: a GPU's rank stays near it
    meeting = rendezvous.get_rendezvous_handler(
        RendezvousParameters("c10d", "127.0.0.1:0", uuid.uuid4().hex, 1, 1, local_addr="127.0.0.1", timeout=900))
    spec = WorkerSpec("rank", ranks, meeting, entrypoint=sys.executable, args=tuple(arguments), max_restarts=restarts, monitor_interval=0.2,
                      local_addr="127.0.0.1", numa_options=numa)  # fmt: skip
    agent = _Agent(spec, blame, again)
    try:
        with _patience(GRACE):
            result = agent.run()
    except SignalException as error:
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None
    finally:
        meeting.shutdown()
    if result.is_failed():
        raise agent.error or blame(result.failures)


@contextmanager
def _patience(seconds: int) -> Iterator[None]:
    """Between SIGTERM and SIGKILL; torch always waits 30 s when a rank has failed, whatever shutdown_timeout says. One that is stopped
    hears SIGTERM only when it goes on."""
    close = PContext.close

    def end(self: SubprocessContext, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        for handler in self.subprocess_handlers.values():
            if handler.proc.poll() is None:
                handler.proc.terminate()
                handler.proc.send_signal(signal.SIGCONT)
        close(self, death_sig, min(timeout, seconds))

    PContext.close = end
    try:
        yield
    finally:
        PContext.close = close
