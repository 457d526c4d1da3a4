"""How a process becomes a rank, and how it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from gnnplan.executor.layers.kernels import keep_allocator
from gnnplan.executor.ranks.machine import gpus
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.rendezvous import count_of, launcher_env, store_of_all
from gnnplan.planner.problem.problem import Problem

SCRATCH = "GNNPLAN_SCRATCH"  # names the launcher's temporary folder, which also lists samplers


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
    rank.communicate_over(store.get("backend").decode())
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
    rank.groups.exchanges = dist.new_group(backend=rank.backend, timeout=rank.groups.limit)
    rank.groups.meet(rank.groups.exchanges)
