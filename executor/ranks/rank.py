"""One rank: its place, device, process groups and lanes, and the spans that it records.

A process becomes a rank by `open_rank`. The lane 'compute' is the step's own thread; every other
lane that `submit` is given gets a thread and a CUDA stream of its own."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from gnnplan.executor.layers.kernels import keep_allocator
from gnnplan.executor.ranks.activity import Activity
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.trace import Span

T = TypeVar("T")
# perf_counter is monotonic; the offset aligns the traces of several servers
_CLOCK = time.time() - time.perf_counter()


def now() -> float:
    """Seconds since 1970 [s], monotonic within a process."""
    return time.perf_counter() + _CLOCK


@dataclass
class Rank:
    """Rank `rank` of `world`, with its device, its process groups and what it records."""

    rank: int
    world: int
    device: torch.device
    backend: str  # 'nccl' or 'gloo'
    recording: bool = True  # off while evaluating
    traced: int = 60  # steps whose spans are kept; bytes are counted in all
    staleness_errors: bool = False  # measure how far stale rows and gradients are from true ones
    gradient_errors: bool = False  # measure how far gradients of weights are from exact ones
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # operation -> bytes sent while recording
    activity: Activity = field(default_factory=Activity)  # what an error names
    counted: set[Label] = field(default_factory=set)  # by `count_ahead`, not sent yet
    exchange_group: dist.ProcessGroup | None = None
    timeout_s: float = 30.0  # how long a collective waits for its ranks
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _lanes: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wire_device(self) -> torch.device:
        """Where communication reads and writes: the GPU under NCCL, host memory under Gloo."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def staged(self, rows: Tensor) -> Tensor:
        """The rows on `wire_device`, contiguous."""
        return rows.contiguous() if rows.device == self.wire_device else rows.to(self.wire_device)

    def unstaged(self, rows: Tensor) -> Tensor:
        """The rows on the rank's device."""
        return rows.to(self.device)

    @contextmanager
    def span(self, label: Label, lane: str, nbytes: int = 0) -> Iterator[None]:
        """Record the time of the with block under the schedule's label.

        An error that leaves the block gets a note of what the rank was in.
        """
        name = str(label)
        start = now()
        try:
            self.activity.begin(lane, name)
            yield
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                # now: before anybody hears of the error its lane may do other work
                error.add_note(f"in {self.activity}")
            raise
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.recording and label.step < self.traced:
            with self._lock:
                self.spans.append(
                    Span(name, label.op, self.rank, lane, start, now(), nbytes, label.step)
                )
        self.activity.end(lane)  # after an error the activity stays what it was

    def count(self, label: Label, nbytes: int) -> int:
        """Count bytes that this rank sends -> the same bytes.

        Call it on the step's own thread: a lane may lag behind.
        """
        if label in self.counted:
            self.counted.remove(label)
        elif self.recording and nbytes:
            self.sent[label.op] = self.sent.get(label.op, 0) + nbytes
        return nbytes

    def count_ahead(self, label: Label, nbytes: int) -> None:
        """Count now what this rank will send in a later step than the label's."""
        if nbytes:
            self.count(label, nbytes)
            self.counted.add(label)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; None is the group of all ranks.

        All ranks must first ask for the same groups in the same order.
        """
        if len(ranks) == self.world:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(
                list(ranks), backend=self.backend, timeout=timedelta(seconds=self.timeout_s)
            )
            if self.rank in ranks:
                self.meet(self._groups[ranks])
        return self._groups[ranks]

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """A barrier of the group's ranks."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device=self.wire_device), group=group)

    def meet(self, group: dist.ProcessGroup) -> None:
        """Connect a new group. All of its ranks call this.

        NCCL connects a group in its first call, which all ranks of the group must make. An exchange
        is no such call: ranks that have nothing to move take no part.
        """
        if self.backend == "nccl":
            self.await_all(group)

    def submit(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the lane's own thread and CUDA stream, after what the lane has already.

        On CUDA it waits for what the current stream computes before it.
        """
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(
                1, thread_name_prefix=lane, initializer=self._start_lane
            )
        if self.device.type != "cuda":
            return self._lanes[lane].submit(work)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self.device))

        def on_stream() -> T:
            torch.cuda.current_stream(self.device).wait_event(ready)
            return work()

        return self._lanes[lane].submit(on_stream)

    def _start_lane(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the lanes' threads and the process groups."""
        for lane in self._lanes.values():
            lane.shutdown(wait=True)
        if dist.is_initialized():
            dist.destroy_process_group()


def there(result: T) -> Future[T]:
    """A future that is done, with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def die_with_parent() -> None:
    """Linux: let the kernel kill this process when its parent dies, even by SIGKILL."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died before the call
        os._exit(75)


def wait_in_turn() -> None:
    """Linux: no thread of this process preempts one that computes (SCHED_BATCH).

    A thread that wakes waits until the running one blocks or its time slice is up. Otherwise Gloo's
    own thread would preempt a thread that holds a connection's lock, and spin on that lock until
    its time slice is up (gloo/transport/tcp/pair.cc, handleEvents): with four ranks on two cores an
    exchange of 1 KB took ten times as long.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def attempt() -> str:
    """How often the launcher has restarted its ranks.

    The launcher's store outlives them, with the addresses of ranks that are gone: torch 2.13 keeps
    one store for all attempts and no longer puts the attempt before its keys. So keys need this
    prefix.
    """
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list.

    >>> _first_host("gpu[07-12,20],login1"), _first_host("node3")
    ('gpu07', 'node3')
    """
    head, bracket, rest = nodes.split(",")[0].partition("[")
    return head + re.split("[-,\\]]", rest)[0] if bracket else head


def as_torchrun_has_it() -> MutableMapping[str, str]:
    """The environment, with torchrun's variables set from Slurm's if srun started the ranks.

    Raises SpecError where a number among them is none.
    """
    os.environ |= from_launcher()
    return os.environ


def from_launcher() -> dict[str, str]:
    """torchrun's variables, or the same from Slurm's; empty where neither has started this process.

    Raises SpecError where a number among them is none.
    """
    env = os.environ
    found = {name: env[name] for name in (*_COUNTS, "MASTER_ADDR", "MASTER_PORT") if name in env}
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env:
        names = {
            "RANK": "SLURM_PROCID",
            "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
            "LOCAL_RANK": "SLURM_LOCALID",
        }
        if absent := [name for name in names.values() if name not in env]:
            raise SpecError(
                f"SLURM_STEP_NUM_TASKS is set, but {' and '.join(absent)} not; start ranks with"
                " srun, or unset it"
            )
        job = _count("SLURM_JOB_ID", env.get("SLURM_JOB_ID", "0"))
        of_slurm = {
            "GROUP_RANK": env.get("SLURM_NODEID", "0"),
            "LOCAL_WORLD_SIZE": env.get("SLURM_NTASKS_PER_NODE", env["SLURM_STEP_NUM_TASKS"]),
            "MASTER_ADDR": _first_host(env.get("SLURM_STEP_NODELIST", "localhost")),
            "MASTER_PORT": str(20_000 + job % 10_000),
        }
        found = {**of_slurm, **found, **{name: env[slurm] for name, slurm in names.items()}}
    for name in _COUNTS:
        if name in found:
            _count(name, found[name])
    return found


# what a launcher counts
_COUNTS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "TORCHELASTIC_RESTART_COUNT",
)


def _count(name: str, text: str) -> int:
    """The number in an environment variable. Raises SpecError."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise SpecError(
            f"{name} is {text[:40]!r}; it is a number, as torchrun, srun or you set it: mend or"
            " unset it"
        )
    return int(text)


def open_rank(
    timeout_s: float = 30.0, problem: Problem | None = None, on_cpu: bool = False
) -> Rank:
    """This process's rank, from the environment of torchrun or Slurm; without one, rank 0 of 1.

    Launchers count the GPUs in use; the problem's placement says which rank sits on a GPU.
    The backend is NCCL if every local rank has a GPU of its own. NCCL refuses two ranks on one GPU,
    so those use Gloo, through host memory. on_cpu: use no GPU.
    """
    env = as_torchrun_has_it()
    number, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    local = int(env.get("LOCAL_RANK", "0"))
    per_server = env.get("SLURM_NTASKS_PER_NODE", str(size))
    local_world = _count("SLURM_NTASKS_PER_NODE", env.get("LOCAL_WORLD_SIZE", per_server))
    torch.set_num_threads(max(1, _count("GNNPLAN_THREADS", env.get("GNNPLAN_THREADS", "1"))))
    keep_allocator()
    gpus = torch.cuda.device_count() if not on_cpu and torch.cuda.is_available() else 0
    if problem is not None and problem.placement and size == problem.ranks:
        number = problem.by_gpu[number]
        if gpus >= problem.cluster.gpus_per_server:  # this process sees them all
            local = problem.placement[number] % problem.cluster.gpus_per_server
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    backend = "nccl" if gpus and local_world <= gpus else "gloo"
    if gpus:
        torch.cuda.set_device(device)
    rank = Rank(number, size, device, backend, timeout_s=timeout_s)
    if size > 1:
        if backend == "gloo":
            wait_in_turn()
        _connect(rank)
    return rank


def _connect(rank: Rank) -> None:
    """Make the process groups of all ranks: torch's default group, and one for exchanges."""
    limit = timedelta(seconds=rank.timeout_s)
    # hosted by the launcher's rank 0, which has the address
    store, _, _ = next(rendezvous("env://", timeout=limit))
    store = PrefixStore(f"attempt {attempt()}", store)
    dist.init_process_group(
        rank.backend, store=store, rank=rank.rank, world_size=rank.world, timeout=limit
    )
    rank.exchange_group = dist.new_group(backend=rank.backend, timeout=limit)
    rank.meet(rank.exchange_group)
