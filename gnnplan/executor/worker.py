"""One rank: its place, device, process groups, lanes and the spans it records."""

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

from gnnplan.executor.doing import Doing
from gnnplan.executor.kernels import keep_allocator
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Label
from gnnplan.planner.trace import Span

T = TypeVar("T")
_CLOCK = time.time() - time.perf_counter()  # perf_counter is monotonic; the offset lines several servers' traces up


def now() -> float:
    """Seconds since the epoch, monotonic within a process."""
    return time.perf_counter() + _CLOCK


@dataclass
class Rank:
    """`rank` of `world`; communication goes through `wire_device` (the GPU under NCCL, host memory under Gloo)."""

    rank: int
    world: int
    device: torch.device
    backend: str
    recording: bool = True  # off while evaluating
    traced: int = 60  # steps whose spans are kept; bytes are counted in all
    staleness_errors: bool = False  # measure what stale rows and gradients are away from the true ones
    spans: list[Span] = field(default_factory=list)
    sent: dict[str, int] = field(default_factory=dict)  # operation -> bytes this rank sent while recording
    doing: Doing = field(default_factory=Doing)  # what an error names
    counted: set[Label] = field(default_factory=set)  # ahead of their sending
    exchange_group: dist.ProcessGroup | None = None
    timeout_s: float = 30.0  # for which a collective waits for its ranks
    _groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _lanes: dict[str, ThreadPoolExecutor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def wire_device(self) -> torch.device:
        return self.device if self.backend == "nccl" else torch.device("cpu")

    def staged(self, rows: Tensor) -> Tensor:
        """On the device that communicates."""
        return rows.contiguous() if rows.device == self.wire_device else rows.to(self.wire_device)

    def unstaged(self, rows: Tensor) -> Tensor:
        return rows.to(self.device)

    @contextmanager
    def span(self, label: Label, lane: str, nbytes: int = 0) -> Iterator[None]:
        """Record what happens inside under the schedule's label."""
        name = str(label)
        start = now()
        try:
            self.doing.begin(lane, name)
            yield
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                error.add_note(f"in {self.doing}")  # its lane may go on to other work before anybody hears of it
            raise
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        if self.recording and label.step < self.traced:
            with self._lock:
                self.spans.append(Span(name, label.op, self.rank, lane, start, now(), nbytes, label.step))
        self.doing.end(lane)  # not where it raises: that is where it was

    def count(self, label: Label, nbytes: int) -> int:
        """Note bytes that this rank sends; on the step's own thread, since a lane may lag behind."""
        if label in self.counted:
            self.counted.remove(label)
        elif self.recording and nbytes:
            self.sent[label.op] = self.sent.get(label.op, 0) + nbytes
        return nbytes

    def count_ahead(self, label: Label, nbytes: int) -> None:
        """Of what this rank will send in a later step than its label's: now."""
        if nbytes:
            self.count(label, nbytes)
            self.counted.add(label)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """The process group of some ranks; None: the one of all. All ranks must first ask for the same groups in the same order."""
        if len(ranks) == self.world:
            return None
        if ranks not in self._groups:
            self._groups[ranks] = dist.new_group(list(ranks), backend=self.backend, timeout=timedelta(seconds=self.timeout_s))
            if self.rank in ranks:
                self.meet(self._groups[ranks])
        return self._groups[ranks]

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """Wait until all of a group's ranks have come here."""
        if self.world > 1:
            dist.all_reduce(torch.zeros(1, device=self.wire_device), group=group)

    def meet(self, group: dist.ProcessGroup) -> None:
        """NCCL connects a group in its first call, which all of its ranks must make: an exchange does without those that have nothing
        to move."""
        if self.backend == "nccl":
            self.await_all(group)

    def submit(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Do it in order on the lane's own thread (and CUDA stream), beside the computation."""
        if lane not in self._lanes:
            self._lanes[lane] = ThreadPoolExecutor(1, thread_name_prefix=lane, initializer=self._start_lane)
        if self.device.type != "cuda":
            return self._lanes[lane].submit(work)
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self.device))  # the rows to move are computed on this stream

        def on_stream() -> T:
            torch.cuda.current_stream(self.device).wait_event(ready)
            return work()

        return self._lanes[lane].submit(on_stream)

    def _start_lane(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown(wait=True)
        if dist.is_initialized():
            dist.destroy_process_group()


def there(result: T) -> Future[T]:
    """A future of what is here already."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def die_with_parent() -> None:
    """Linux: a process that is killed outright takes those that it started with it."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it died in between
        os._exit(75)


def wait_in_turn() -> None:
    """Linux: no thread of this process, when it wakes, takes a core from one that computes; it waits until that one waits or its time is
    up. Gloo's own thread would else displace one that holds a connection's lock, and try for that lock without sleeping until its time is
    up (gloo/transport/tcp/pair.cc, handleEvents): with four ranks on two cores an exchange of 1 KB took ten times as long."""
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def attempt() -> str:
    """How often the launcher has started its ranks anew. Its store outlives them, with the addresses of those that are gone (torch 2.13
    keeps one for all attempts, and no longer puts the attempt before its keys)."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def _first_host(nodes: str) -> str:
    """The first host of a Slurm node list, as 'gpu[07-12,20],login1' -> 'gpu07'.

    >>> _first_host("gpu[07-12,20],login1"), _first_host("node3")
    ('gpu07', 'node3')
    """
    head, bracket, rest = nodes.split(",")[0].partition("[")
    return head + re.split("[-,\\]]", rest)[0] if bracket else head


def as_torchrun_has_it() -> MutableMapping[str, str]:
    """The environment, in which srun's names for a rank are torchrun's too."""
    env = os.environ
    if "RANK" not in env and "SLURM_STEP_NUM_TASKS" in env:
        env |= {"RANK": env["SLURM_PROCID"], "WORLD_SIZE": env["SLURM_STEP_NUM_TASKS"], "LOCAL_RANK": env["SLURM_LOCALID"]}
        env.setdefault("GROUP_RANK", env.get("SLURM_NODEID", "0"))
        env.setdefault("LOCAL_WORLD_SIZE", env.get("SLURM_NTASKS_PER_NODE", env["WORLD_SIZE"]))
        env.setdefault("MASTER_ADDR", _first_host(env.get("SLURM_STEP_NODELIST", "localhost")))
        env.setdefault("MASTER_PORT", str(20_000 + int(env.get("SLURM_JOB_ID", "0")) % 10_000))
    return env


def open_rank(timeout_s: float = 30.0, job: Job | None = None) -> Rank:
    """This process's rank from the launcher's environment (torchrun or Slurm), or the only rank without one. Launchers count the GPUs
    in use; which rank of a job sits there is for its seats to say.

    NCCL when every local rank has a GPU of its own; it refuses two ranks on one GPU, which go over Gloo with host staging.
    """
    env = as_torchrun_has_it()
    rank, size, local = (int(env.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")))
    local_world = int(env.get("LOCAL_WORLD_SIZE", env.get("SLURM_NTASKS_PER_NODE", str(size))))
    torch.set_num_threads(max(1, int(env.get("GNNPLAN_THREADS", "1"))))
    keep_allocator()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    placed = rank
    if job is not None and job.seats and size == job.ranks:
        placed = job.by_gpu[rank]
        if gpus >= job.cluster.gpus_per_server:  # this process sees them all
            local = job.seats[placed] % job.cluster.gpus_per_server
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    backend = "nccl" if gpus and local_world <= gpus else "gloo"
    if gpus:
        torch.cuda.set_device(device)
    me = Rank(placed, size, device, backend, timeout_s=timeout_s)
    if size > 1:
        if backend == "gloo":
            wait_in_turn()
        limit = timedelta(seconds=timeout_s)
        store, _, _ = next(dist.rendezvous("env://", timeout=limit))  # hosted by the launcher's rank 0: it has the address
        store = dist.PrefixStore(f"attempt {attempt()}", store)
        dist.init_process_group(backend, store=store, rank=placed, world_size=size, timeout=limit)
        me.exchange_group = dist.new_group(backend=backend, timeout=timedelta(seconds=timeout_s))
        me.meet(me.exchange_group)
    return me
