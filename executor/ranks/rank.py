"""One rank: its number and device, process groups, lanes and recorder.

A lane is a queue of work that overlaps the rank's step, and works in order. The lane 'compute' is
the step's own thread and stream. Other lanes are threads or CUDA streams (`Lanes.submit`).
`open_rank` makes a process a rank."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _set_pg_timeout

from gnnplan.executor.layers.kernels import keep_allocator, keep_until_used
from gnnplan.executor.ranks import near
from gnnplan.executor.ranks.machine import MemoryWatch, gpus
from gnnplan.executor.ranks.recorder import Recorder
from gnnplan.executor.ranks.rendezvous import count_of, launcher_env, store_of_all
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.numbers import Group

T = TypeVar("T")
SCRATCH = "GNNPLAN_SCRATCH"  # names the launcher's temporary folder, which also lists samplers
NCCL_LEAST_S = 600.0  # [s] torch's default timeout
READING_LEAST_S = 600.0  # [s] least timeout while ranks read from disks
LOOK_S = 50e-6  # [s] between two queries of a stream that waits for peers
SPEAKS_FIRST_S = 30.0  # [s] torch's timeout beyond the rank's own, whose error says more


@dataclass
class Groups:
    """The process groups of rank `rank` of `world`."""

    rank: int
    world: int
    device: torch.device
    backend: str  # 'nccl' or 'gloo'
    settle: Callable[[], None]  # waits for the device
    timeout_s: float = 30.0  # of a collective or message
    nccl_least_s: float = NCCL_LEAST_S  # least timeout over NCCL
    gloo_least_s: float = 0.0  # least timeout over Gloo
    exchanges: dist.ProcessGroup | None = None  # of all ranks, for exchanges of rows
    _near: dict[dist.ProcessGroup | None, near.Near] = field(default_factory=dict)
    _by_ranks: dict[Group, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def wire_device(self) -> torch.device:
        """The device whose tensors the backend sends: the GPU for NCCL, the host for Gloo."""
        return self.device if self.backend == "nccl" else torch.device("cpu")

    @property
    def patience(self) -> float:
        """The timeout of a message [s].

        It is longer over NCCL, where the host enqueues messages ahead of the step's computation, so
        that messages wait for the computation, too.
        """
        least_s = self.nccl_least_s if self.backend == "nccl" else self.gloo_least_s
        return max(self.timeout_s, least_s)

    @property
    def limit(self) -> timedelta:
        """Torch's timeout of a message."""
        extra_s = SPEAKS_FIRST_S if self.backend == "nccl" else 0.0
        return timedelta(seconds=self.patience + extra_s)

    def of(self, ranks: Group) -> dist.ProcessGroup | None:
        """Return the process group of some ranks; None for all ranks.

        The first call for a group makes it, so all ranks must make these calls in the same order.
        """
        if len(ranks) == self.world:
            return None
        if ranks not in self._by_ranks:
            self._by_ranks[ranks] = dist.new_group(
                list(ranks), backend=self.backend, timeout=self.limit
            )
            if self.rank in ranks:
                self.meet(self._by_ranks[ranks])
        return self._by_ranks[ranks]

    def open_pairs(self, distance: int) -> None:
        """Open groups for messages between ranks r and r + distance. All ranks call this.

        Over NCCL each pair of ranks gets its own communicator. In a communicator of all ranks, a
        receive would wait for an earlier send to another rank.
        """
        if self.backend == "nccl":
            for first in range(self.world - distance):
                self.of((first, first + distance))

    def pair(self, peer: int) -> dist.ProcessGroup | None:
        """Return the group for messages between this rank and the peer (`open_pairs`)."""
        if self.backend == "nccl":
            return self.of((min(self.rank, peer), max(self.rank, peer)))
        return self.exchanges

    def near(self, group: dist.ProcessGroup | None) -> near.Near:
        """Return the other ranks of a group that are on this machine and exchange by memory."""
        return self._near.get(group, near.NOBODY)

    def await_all(self, group: dist.ProcessGroup | None) -> None:
        """Wait for all ranks of the group (a barrier)."""
        if self.world > 1:
            number = torch.zeros(1, device=self.wire_device)
            dist.all_reduce(number, group=group)
            self.settle()  # over NCCL the host has only enqueued the sum

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Let messages wait while ranks read from disks, then wait for all ranks.

        A rank may read a larger part, or from a slower disk, for longer than a message may take.
        """
        self._wait_at_least(READING_LEAST_S)
        yield
        self.await_all(None)
        self._wait_at_least(0.0)  # not after an error, which tells how long it has waited

    def _wait_at_least(self, seconds: float) -> None:
        if self.backend == "nccl" or self.world == 1:
            return
        self.gloo_least_s = seconds
        own = [group for ranks, group in self._by_ranks.items() if self.rank in ranks]
        for group in (None, self.exchanges, *own):
            _set_pg_timeout(self.limit, group)
            for peer in self.near(group).peers.values():
                peer.connection.settimeout(self.patience)

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Connect a new group. All ranks of the group call this.

        Over Gloo it finds the ranks on this machine (near.py). NCCL connects a group in the group's
        first collective, which all its ranks must join. An exchange does not suffice: ranks without
        rows to exchange take no part in it.
        """
        if self.backend == "nccl":
            self.await_all(group)
        elif self.device.type == "cpu":
            self._near[group] = near.connect(self.rank, group, self.patience)


class _Enqueued(Future[T]):
    """A result that a stream will compute. `result` makes the current stream wait, not the host."""

    def __init__(self, result: T, stream: Any, device: torch.device) -> None:
        super().__init__()
        self.set_result(result)
        self._done, self._device = stream.record_event(), device

    def result(self, timeout: float | None = None) -> T:
        value = super().result(timeout)
        stream = _streams(self._device).current_stream(self._device)
        stream.wait_event(self._done)
        keep_until_used(stream, value)
        return value


def _streams(device: torch.device) -> Any:
    """Return torch's module of the device; the streams of `torch.cpu` do nothing."""
    return torch.get_device_module(device)


class Lanes:
    """The lanes of a rank on one device."""

    def __init__(self, device: torch.device, are_streams: bool) -> None:
        self.device = device
        self.are_streams = are_streams  # True over NCCL: lanes are streams, without threads
        self._threads: dict[str, ThreadPoolExecutor] = {}
        self._failed: dict[str, BaseException] = {}  # lane -> its first error
        self._streams: dict[str, Any] = {}

    @property
    def streams(self) -> Iterable[Any]:
        """The streams of lanes that are streams."""
        return self._streams.values()

    def submit(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` on a lane, after the lane's earlier work.

        On CUDA it also runs after the earlier work of the current stream; the stream that asks for
        the result continues after the work.

        Over Gloo the host waits for messages, so a lane is a thread. Over NCCL the host only
        enqueues messages, so a lane is a CUDA stream, and the step's own thread enqueues the work
        of all lanes in this call. So all ranks start the operations of all communicators in program
        order. NCCL requires the same order on all ranks when several communicators are active:
        otherwise two ranks may wait for each other's operation.
        """
        if not self.are_streams:
            return self.in_thread(lane, work)
        device = _streams(self.device)
        if lane not in self._streams:
            self._streams[lane] = device.Stream()
        own = self._streams[lane]
        own.wait_stream(device.current_stream(self.device))
        with device.stream(own):
            return _Enqueued(work(), own, self.device)

    def in_thread(self, lane: str, work: Callable[[], T]) -> Future[T]:
        """Run `work` on the lane's own thread, on CUDA with its own stream.

        After an error the lane runs nothing more: peers would take the next message for the one
        that failed, and Gloo ends a process that receives a message of unexpected length.
        """
        if lane not in self._threads:
            self._threads[lane] = ThreadPoolExecutor(
                1, thread_name_prefix=lane, initializer=self._start
            )

        def unless_failed() -> T:
            if lane in self._failed:
                raise self._failed[lane]
            try:
                return work()
            except BaseException as error:
                self._failed[lane] = error
                raise

        if self.device.type != "cuda":
            return self._threads[lane].submit(unless_failed)
        stream = torch.cuda.current_stream(self.device)
        before = stream.record_event()

        def on_stream() -> T:
            own = torch.cuda.current_stream(self.device)
            own.wait_event(before)
            result = unless_failed()
            own.synchronize()  # also waits for work after the last span
            keep_until_used(stream, result)
            return result

        return self._threads[lane].submit(on_stream)

    def _start(self) -> None:
        torch.set_num_threads(1)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the threads, after their submitted work."""
        for thread in self._threads.values():
            thread.shutdown(wait=True)


def completed_future(result: T) -> Future[T]:
    """Return a completed future with this result."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class Rank:
    """Rank `rank` of `world` on its device."""

    def __init__(
        self,
        rank: int,
        world: int,
        device: torch.device,
        backend: str,
        *,
        timeout_s: float = 30.0,
        traced: int = 60,
        card: str = "",
    ) -> None:
        """backend, timeout_s: see Groups. traced: see Recorder. card: a unique name of the GPU, ""
        without a GPU."""
        self.rank, self.world, self.device, self.card = rank, world, device, card
        self.groups = Groups(rank, world, device, backend, self.settle, timeout_s)
        self.lanes = Lanes(device, backend == "nccl")
        self.recorder = Recorder(rank, device, traced)
        self.watch: MemoryWatch | None = None  # of this rank's peak memory
        self.staleness_errors = False  # measure errors of stale rows and gradients
        self.gradient_errors = False  # measure errors of the weights' gradients

    @property
    def backend(self) -> str:
        return self.groups.backend

    def in_server_memory(self) -> AbstractContextManager[None]:
        """Return a context whose allocations count as the server's memory, not the device's."""
        return nullcontext() if self.watch is None else self.watch.left_out()

    def staged(self, rows: Tensor) -> Tensor:
        """Return the rows contiguous and on the backend's device, ready to be sent."""
        if rows.is_cuda:
            keep_until_used(torch.cuda.current_stream(self.device), rows)
        return rows.to(self.groups.wire_device).contiguous()

    def unstaged(self, rows: Tensor) -> Tensor:
        """Return received rows on the rank's device."""
        return rows.to(self.device)

    def settle(self, all_lanes: bool = False) -> None:
        """Wait for the work of the current stream, and record spans that have ended.

        all_lanes: wait for the lanes' streams, too.
        """
        if self.device.type != "cuda":
            return
        lanes = self.lanes.streams if all_lanes else ()
        for stream in (torch.cuda.current_stream(self.device), *lanes):
            self._await(stream)
        if all_lanes:
            torch.cuda.synchronize(self.device)
        self.recorder.read()

    def _await(self, stream: Any) -> None:
        """Wait for the work of a stream. Raises RuntimeError after the timeout over NCCL.

        An NCCL message from a lost peer never ends. Torch would kill this process without a note on
        the operation, so the rank times out before torch does.
        """
        if self.backend != "nccl" or self.world == 1:
            stream.synchronize()
            return
        started, looks, shown = time.monotonic(), 0, set[str]()
        while not stream.query():
            if (waited := time.monotonic() - started) > looks:  # once a second
                looks, shown = looks + 1, shown | self.recorder.show_device()
            if waited > self.groups.patience:
                raise RuntimeError(f"NCCL timed out after {self.groups.patience:g} s")
            time.sleep(LOOK_S)
        for lane in shown:
            self.recorder.activity.end(lane)

    def anew(self) -> Rank:
        """Return the same rank, groups and lanes with an empty recorder."""
        other = copy(self)
        other.recorder = Recorder(self.rank, self.device, self.recorder.traced)
        other.recorder.activity = self.recorder.activity
        return other

    def close(self) -> None:
        """End the lanes' threads and the process groups."""
        self.lanes.close()
        if dist.is_initialized():
            dist.destroy_process_group()


# -- how a process becomes a rank, and ends --------------------------------------------------------


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even by SIGKILL (Linux)."""
    parent = os.getppid()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # the parent died before the call
        os._exit(75)


def leave(code: int) -> NoReturn:
    """End this process now: Gloo's threads sometimes abort a regular exit."""
    with suppress(OSError, ValueError):  # the readers of both streams may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def wait_in_turn() -> None:
    """Keep this process's threads from preempting running threads (SCHED_BATCH, Linux).

    A waking thread then waits until the running thread blocks or ends its time slice. Otherwise
    Gloo's own thread would preempt a thread that holds a connection's lock, and spin on that lock
    for a time slice (gloo/transport/tcp/pair.cc, handleEvents): with four ranks on two cores an
    exchange of 1 KB took ten times as long.
    """
    with suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def stay_on_own_cores(env: Mapping[str, str]) -> None:
    """Pin this process to its share of the cores that this machine's ranks have in common (Linux).

    The kernel puts ranks that wake each other on one core, and moves them apart only later: short
    steps of two ranks on two cores took a fifth longer. Only torch's agent is known to start all
    ranks with the same cores; other launchers may already give each rank its own cores.
    """
    if "TORCHELASTIC_RUN_ID" not in env or not hasattr(os, "sched_setaffinity"):
        return
    cores, ranks = sorted(os.sched_getaffinity(0)), int(env.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(env.get("LOCAL_RANK", "0"))
    first, end = (len(cores) * turn // ranks for turn in (rank, rank + 1))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[first:end])


def open_rank(
    timeout_s: float = 30.0, problem: Problem | None = None, on_cpu: bool = False
) -> Rank:
    """Open this process's rank and connect it with the other ranks (arguments as in `place_rank`).

    Without a launcher it is rank 0 of 1.
    """
    rank = place_rank(timeout_s, problem, on_cpu)
    if rank.world > 1:
        connect(rank, store_of_all(timeout_s))
    return rank


def place_rank(timeout_s: float, problem: Problem | None = None, on_cpu: bool = False) -> Rank:
    """Make this process's rank, with its device, from the environment of torchrun or Slurm.

    Launchers number the GPUs in use; the problem's placement maps a GPU to a rank. on_cpu: use no
    GPU.
    """
    env = launcher_env()
    number, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    local = int(env.get("LOCAL_RANK", "0"))
    torch.set_num_threads(max(1, count_of("GNNPLAN_THREADS", env.get("GNNPLAN_THREADS", "1"))))
    stay_on_own_cores(env)
    keep_allocator()
    gpu_count = 0 if on_cpu else gpus()
    if problem is not None and problem.placement and size == problem.ranks:
        number = problem.by_gpu[number]
        if gpu_count >= problem.cluster.gpus_per_server:  # this process sees all GPUs of the server
            local = problem.placement[number] % problem.cluster.gpus_per_server
    device = torch.device("cuda", local % gpu_count) if gpu_count else torch.device("cpu")
    if gpu_count:
        torch.cuda.set_device(device)
    card = card_of(device)
    return Rank(number, size, device, backend_of([card]), timeout_s=timeout_s, card=card)


def card_of(device: torch.device) -> str:
    """Return a name of the GPU that is unique across servers; "" for another device."""
    if device.type != "cuda":
        return ""
    properties = torch.cuda.get_device_properties(device)
    return f"{socket.gethostname()} {getattr(properties, 'uuid', device.index)}"


def backend_of(cards: Sequence[str]) -> str:
    """Return NCCL if every rank has its own GPU, else Gloo. cards: GPUs' names (`card_of`) by rank.

    >>> backend_of(["a 0", "a 1"]), backend_of(["a 0", "a 0"]), backend_of(["a 0", ""])
    ('nccl', 'gloo', 'gloo')
    """
    return "nccl" if all(cards) and len(set(cards)) == len(cards) else "gloo"


def connect(rank: Rank, store: Store) -> None:
    """Make the process groups of all ranks: torch's default group, and a group for exchanges.

    The backend is NCCL if every rank has its own GPU. NCCL refuses two ranks on one GPU, so ranks
    that share GPUs use Gloo, through host memory. Rank 0 chooses the backend for all, since a rank
    may see only its own GPU, and ranks may share GPUs on some servers only.
    """
    store.set(f"card {rank.rank}", rank.card)
    if rank.rank == 0:
        cards = [store.get(f"card {other}").decode() for other in range(rank.world)]
        store.set("backend", backend_of(cards))
    rank.groups.backend = store.get("backend").decode()
    rank.lanes.are_streams = rank.backend == "nccl"
    if rank.backend == "gloo":
        wait_in_turn()
    dist.init_process_group(
        rank.backend,
        store=store,
        rank=rank.rank,
        world_size=rank.world,
        timeout=rank.groups.limit,
        device_id=rank.device if rank.backend == "nccl" else None,  # groups then connect at once
    )
    if rank.backend == "gloo":
        rank.groups.meet(None)
    rank.groups.exchanges = dist.new_group(backend=rank.backend, timeout=rank.groups.limit)
    rank.groups.meet(rank.groups.exchanges)
