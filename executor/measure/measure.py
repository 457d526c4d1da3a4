"""Measures this machine, or several servers, with all ranks active at once.

Processes, one per rank, run the same benchmarks in step (microbench.py). fitting.py turns what they
found into a cluster.
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from secrets import token_hex
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gnnplan.executor.launch import emulation as lab
from gnnplan.executor.launch.preflight import must_meet
from gnnplan.executor.layers.kernels import keep_allocator
from gnnplan.executor.measure.fitting import cluster_of
from gnnplan.executor.measure.microbench import Bench
from gnnplan.executor.ranks.gathered import gather_all
from gnnplan.executor.ranks.machine import cores
from gnnplan.executor.ranks.meeting import (
    hosts_the_store,
    join,
    launcher_env,
    on_this_machine,
    store_of_this_machine,
)
from gnnplan.executor.ranks.memory import free_memory
from gnnplan.executor.ranks.opening import die_with_parent, leave, wait_in_turn
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.errors import LostRank, SpecError

SECONDS = 0.2  # spent on each number
STUCK = 60  # [s] after which a peer that does not answer is lost


def measure(
    ranks: int,
    progress: Callable[[str], None] | None = None,
    servers: int = 1,
    emulated: float | None = None,
    seconds: float = SECONDS,
    dtype: str = "float32",
) -> Cluster:
    """Measure `ranks` ranks on each of `servers` servers; takes a minute or two.

    progress: called with what is being measured. seconds: spent on each number. dtype: 'bfloat16'
    measures products and aggregation of such rows as well. Several servers are
    emulated on this machine, with NICs of `emulated` [B/s] (None: unshaped; launch/emulation.py).
    Ranks use NCCL if each has a CUDA device of its own, and Gloo on a machine without CUDA.
    """
    if min(ranks, servers) < 1:
        raise SpecError(f"ranks is {ranks} and servers {servers}; measure at least 1")
    if emulated is not None and servers == 1:
        raise SpecError(
            "an emulated NIC is between servers, and this is one server; give --servers 2 or more"
        )
    cuda = torch.cuda.is_available()
    if cuda and torch.cuda.device_count() < ranks * servers:
        raise SpecError(
            f"every rank needs a CUDA device (ranks: {ranks * servers}, devices:"
            f" {torch.cuda.device_count()}); use fewer ranks, or CUDA_VISIBLE_DEVICES= to measure"
            " the processor"
        )
    check_dtype(dtype)
    notify = progress or (lambda what: None)
    memory = free_memory() / (ranks * servers)
    playing: AbstractContextManager[list[lab.Server]]
    playing = lab.lab(servers, emulated) if servers > 1 else nullcontext([])
    with playing as played:
        store = store_of_this_machine()
        meeting = on_this_machine(store.port, token_hex(16))
        if played:
            meeting |= {
                **lab.INTERFACES,
                "MASTER_ADDR": played[0].address,
                "MASTER_PORT": str(lab.PORT),
                "TORCHELASTIC_USE_AGENT_STORE": "False",
            }

        def start(command: list[str], **streams: Any) -> list[subprocess.Popen[str]]:
            return [
                subprocess.Popen(
                    played[server].inside(*command) if played else command,
                    env={
                        **os.environ,
                        **meeting,
                        "RANK": str(server * ranks + local),
                        "WORLD_SIZE": str(servers * ranks),
                        "LOCAL_RANK": str(local),
                        "GROUP_RANK": str(server),
                        "OMP_NUM_THREADS": "1",
                        "MKL_NUM_THREADS": "1",
                    },
                    text=True,
                    stdin=subprocess.DEVNULL,
                    **streams,
                )
                for server in range(servers)
                for local in range(ranks)
            ]

        found = _run_ranks(start, seconds, dtype, notify)
    # asked here, a GPU would give this process a context
    memory = found["free_on_gpu"] or memory
    return cluster_of(found, servers, ranks, memory, one_machine=True)


def check_dtype(dtype: str) -> None:
    """Raises SpecError on rows that are not measured."""
    if dtype not in ("float32", "bfloat16"):
        raise SpecError(
            f"rows are measured in float32, and in bfloat16 as well if asked (dtype: {dtype}); use"
            " --dtype bfloat16, or leave it out"
        )


def measure_as_rank(
    notify: Callable[[str], None], seconds: float = SECONDS, dtype: str = "float32"
) -> Cluster | None:
    """Be one of the ranks that torchrun or srun started on real servers.

    Rank 0 returns the cluster that all have measured, the others None. Raises SpecError, LostRank.
    """
    check_dtype(dtype)
    env = launcher_env()
    must_meet()
    memory = free_memory() / int(env.get("LOCAL_WORLD_SIZE", "1"))
    try:
        found = _attempt(seconds, dtype, notify, one_machine=False)
        memory = found["free_on_gpu"] or memory
        counts = Counter(found["places"])
        if len(set(counts.values())) > 1:
            ranks = ", ".join(
                f"{count} on server {server}" for server, count in sorted(counts.items())
            )
            raise SpecError(
                f"a cluster has equally many ranks on every server, and here are {ranks}; start as"
                " many on each"
            )
        cluster = (
            cluster_of(found, len(counts), counts[0], memory, one_machine=False)
            if dist.get_rank() == 0
            else None
        )
        dist.barrier()
    except RuntimeError as error:  # torch's, of peers that are gone
        raise LostRank(
            f"rank {env['RANK']} failed while measuring: {type(error).__name__}: {error}"
        ) from error
    return cluster


# -- processes ------------------------------------------------------------------------------------


def _run_ranks(
    start: Callable[..., list[subprocess.Popen[str]]],
    seconds: float,
    dtype: str,
    notify: Callable[[str], None],
) -> dict[str, Any]:
    """Start the ranks, and return what rank 0 found: the samples of all ranks.

    start: starts a command as every rank. No process outlives this call. Raises LostRank.
    """
    with TemporaryDirectory() as folder:
        # -P: a folder named gnnplan in the working directory must not hide the package
        command = [sys.executable, "-P", "-m", "gnnplan.executor", "measure"]
        command += [folder, str(seconds), dtype]
        started = start(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        lines: SimpleQueue[str] = SimpleQueue()

        def listen() -> None:
            for line in started[0].stdout or ():
                lines.put(line)

        listener = Thread(target=listen, daemon=True)
        listener.start()
        try:
            while True:
                with suppress(Empty):
                    line = lines.get(timeout=0.2)
                    if line.startswith("{"):  # Gloo writes on standard output too
                        message: dict[str, Any] = json.loads(line)
                        if "found" in message:
                            return dict(message["found"])
                        notify(message["activity"])
                    continue
                if any(process.poll() for process in started):
                    time.sleep(0.5)  # by then the rank that failed first has ended as well
                    raise LostRank(_lost(started, Path(folder)))
        finally:
            for process in started:
                process.kill()
                process.wait()
            listener.join()
            for process in started:
                if process.stdout:
                    process.stdout.close()


def _lost(started: Sequence[subprocess.Popen[str]], folder: Path) -> str:
    """Who failed first while measuring, and why."""
    notes = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    if notes:
        return f"{notes[0].name} of {len(started)} failed while measuring: {notes[0].read_text()}"
    rank, code = next(
        (rank, code) for rank, process in enumerate(started) if (code := process.poll())
    )
    return f"rank {rank} of {len(started)} failed while measuring: exit code {code}"


def _attempt(
    seconds: float, dtype: str, notify: Callable[[str], None], one_machine: bool
) -> dict[str, Any]:
    """Measure as one rank, and return what all found."""
    env = launcher_env()
    torch.set_num_threads(1)
    keep_allocator()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(env.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    else:
        wait_in_turn()
    free = torch.cuda.mem_get_info()[0] if cuda else 0  # before this process fills any
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    limit = datetime.timedelta(seconds=STUCK)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        # a launcher's store may be that of a run afterwards
        store=PrefixStore("measure", join(env, limit, hosts_the_store(env))),
        rank=int(env["RANK"]),
        world_size=int(env["WORLD_SIZE"]),
        timeout=limit,
        device_id=device if cuda else None,
    )
    places = gather_all(int(env.get("GROUP_RANK", "0")), device)
    bench = Bench(
        dist.get_rank(),
        places,
        device,
        None if cuda else cores(),
        one_machine,
        seconds,
        getattr(torch, dtype),
    )
    return {"places": places, "free_on_gpu": free, **bench.all(notify)}


def main() -> None:
    """`python -m gnnplan.executor measure FOLDER SECONDS DTYPE`; notes a failure in the folder."""
    folder, seconds, rank = Path(sys.argv[1]), float(sys.argv[2]), int(os.environ["RANK"])
    die_with_parent()

    def notify(what: str) -> None:
        if rank == 0:
            print(json.dumps({"activity": what}), flush=True)

    try:
        found = _attempt(seconds, sys.argv[3], notify, one_machine=True)
        dist.barrier()
        if rank == 0:
            print(json.dumps({"found": found}), flush=True)
    except Exception as error:
        (folder / f"rank {rank}").write_text(f"{type(error).__name__}: {error}")
        leave(LostRank.exit_code)
    leave(0)
