"""The measurement of this machine, or of several servers, with all ranks active at once.

One process per rank runs the same benchmarks at the same time (microbench.py). fitting.py turns
their samples into a cluster.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from gnnplan.executor.launch.emulation import lab
from gnnplan.executor.launch.failure import name_of
from gnnplan.executor.launch.preflight import must_meet
from gnnplan.executor.measure.fitting import cluster_of
from gnnplan.executor.measure.microbench import Bench
from gnnplan.executor.ranks.activity import Activity, read, seen
from gnnplan.executor.ranks.comm import gather_all
from gnnplan.executor.ranks.machine import cores, free_memory
from gnnplan.executor.ranks.rank import connect, place_rank
from gnnplan.executor.ranks.rendezvous import launcher_env, store_of_all
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.vocabulary.errors import LostRank, SpecError

SECONDS = 0.2  # spent on each number
FOUND = "cluster.json"  # file of the result, in the folder of ranks that we start
STUCK = 60.0  # [s] after which a peer that does not answer counts as lost


def measure(
    ranks: int,
    progress: Callable[[str], None] | None = None,
    servers: int = 1,
    emulated: float = inf,
    seconds: float = SECONDS,
    dtype: str = "float32",
) -> Cluster:
    """Measure `ranks` ranks on each of `servers` servers; takes a minute or two.

    progress: called with a phrase on what is being measured. seconds: spent on each number.
    dtype: 'bfloat16' also measures matrix products and aggregation of bfloat16 rows. Several
    servers are emulated on this machine, with NICs of `emulated` [B/s] (inf: as fast as the
    machine; launch/emulation.py). Ranks use NCCL if each has a CUDA device of its own, and Gloo on
    a machine without CUDA.
    """
    from gnnplan.executor.launch import agent  # its import takes 1 s, and ranks do without it

    if min(ranks, servers) < 1:
        raise SpecError(f"ranks is {ranks} and servers {servers}; measure at least 1")
    if not 0.01 <= seconds <= 60:
        raise SpecError(f"seconds must lie in [0.01, 60] per measurement, not {seconds:g}")
    if emulated < inf and servers == 1:
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
    env = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    places = [rank // ranks for rank in range(ranks * servers)]
    emulation = lab(servers, emulated if servers > 1 else 0.0)
    with emulation as emulated_servers, TemporaryDirectory() as name:
        folder = Path(name)
        words = ["measure", name, str(seconds), dtype, str(ranks)]
        phase = ""

        def listen() -> None:
            nonlocal phase
            if (what := read(seen(folder, 0))) and what != phase:
                phase = what
                notify(what)

        names = [name_of(rank, server) for rank, server in enumerate(places)]
        watched = agent.Watched(folder, names, STUCK, listen, lambda: "Nothing is measured")
        agent.run(words, watched, places, emulated_servers, folder, env)
        return Cluster.model_validate_json((folder / FOUND).read_text())


def check_dtype(dtype: str) -> None:
    """Raise SpecError if rows of this type cannot be measured."""
    if dtype not in ("float32", "bfloat16"):
        raise SpecError(
            f"rows are measured in float32, and in bfloat16 as well if asked (dtype: {dtype}); use"
            " --dtype bfloat16, or leave it out"
        )


def measure_as_rank(
    notify: Callable[[str], None], seconds: float = SECONDS, dtype: str = "float32"
) -> Cluster | None:
    """Be one of the ranks that torchrun or srun started on real servers.

    Returns the measured cluster on rank 0, None on other ranks. Raises SpecError, LostRank.
    """
    check_dtype(dtype)
    env = launcher_env()
    must_meet()
    server = int(env.get("GROUP_RANK", "0"))
    try:
        return _measured(seconds, dtype, notify, one_machine=False, server=server)
    except RuntimeError as error:  # torch's, if peers are gone
        raise LostRank(
            f"rank {env['RANK']} failed while measuring: {type(error).__name__}: {error}"
        ) from error


# -- processes ------------------------------------------------------------------------------------


def _measured(
    seconds: float, dtype: str, notify: Callable[[str], None], one_machine: bool, server: int
) -> Cluster | None:
    """Measure as one rank. Returns the cluster on rank 0, else None. Raises SpecError."""
    memory = free_memory() / int(launcher_env().get("LOCAL_WORLD_SIZE", "1"))
    available = cores()  # before this rank is pinned to a core
    rank = place_rank(STUCK)
    rank.groups.nccl_least_s = 0.0  # measured messages do not wait for a training step
    if rank.device.type == "cuda":  # before this process allocates memory on the GPU
        memory = torch.cuda.mem_get_info()[0]
    # a later run may use the same store of the launcher
    connect(rank, PrefixStore("measure", store_of_all(STUCK)))
    places = gather_all(server, rank.groups.wire_device)
    counts = Counter(places)
    if len(set(counts.values())) > 1:
        ranks = ", ".join(f"{count} on server {at}" for at, count in sorted(counts.items()))
        raise SpecError(
            f"a cluster has equally many ranks on every server, and here are {ranks}; start as"
            " many on each"
        )
    found = Bench(rank, places, one_machine, available, seconds, getattr(torch, dtype)).all(notify)
    dist.barrier()
    if rank.rank:
        return None
    return cluster_of(found, len(counts), counts[0], memory, available, one_machine)


def work(folder: Path, activity: Activity) -> None:
    """Be a rank of `python -m gnnplan.executor measure FOLDER SECONDS DTYPE EACH`.

    EACH: ranks per server. Rank 0 writes the cluster into the folder.
    """
    for stream in (1, 2):  # Gloo prints to both
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    seconds, dtype, each = float(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    rank = int(os.environ["RANK"])

    def notify(what: str) -> None:
        activity.begin("phase", what)

    cluster = _measured(seconds, dtype, notify, one_machine=True, server=rank // each)
    if cluster is not None:
        (folder / FOUND).write_text(cluster.model_dump_json())
