"""`gnnplan measure`: a cluster file of this machine, of servers emulated on it, or of real ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnnplan.cli.common import of_function, print_json, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import say

if TYPE_CHECKING:
    from gnnplan.planner.cluster.spec import Cluster


@verb(
    of_function("measuring.measure"),
    ranks={"min": 1, "max": 1024},
    servers={"min": 1, "max": 200},
    seconds={"min": 0.01, "max": 60},
)
def measure(
    *,
    output: Path | None = None,
    nccl_tests: list[Path] | None = None,
    topology: Path | None = None,
    cluster: str | None = None,
    as_json: bool = False,
    **how: Any,
) -> None:
    """Measure what plans need of this machine, with all ranks active.

    Micro-benchmarks give the numbers, each with its provenance.

    Of this machine, of servers emulated on it (--servers 2 --emulate 400Mbit/s; needs root), or,
    started by torchrun or srun, of real ones. Or read: gnnplan measure --cluster dgx_a100
    --topology topo.txt --nccl-tests all_reduce.json -o mine.yaml

    Args:
        output: Where the cluster file goes; also kept as preset 'local'.
        nccl_tests: Measure nothing: read what nccl-tests wrote with -J (all_reduce_perf,
            alltoall_perf, sendrecv_perf), on one server or a GPU of each.
        topology: Measure nothing: read what `nvidia-smi topo -m` printed.
        cluster: The cluster file or preset that both of these are read into.
    """
    from gnnplan.api import measuring as api
    from gnnplan.api.running import rate_of
    from gnnplan.executor.launch import launcher as launch
    from gnnplan.executor.measure import measure as measuring
    from gnnplan.planner.vocabulary.files import cache_dir, must_be_writable

    if output:
        must_be_writable(output)
    rate, seconds, dtype = rate_of(how["emulate"]), how["seconds"], how["dtype"]
    if nccl_tests or topology or cluster:
        found = _read(cluster, nccl_tests or [], topology)
    elif launch.started_by_launcher():
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"
        measured = measuring.measure_as_rank(say if first else lambda what: None, seconds, dtype)
        if measured is None:  # only rank 0 has the result
            launch.leave(0)
        found = measured
    else:
        found = measuring.measure(how["ranks"], say, how["servers"], rate, seconds, dtype)
    here = found.servers == 1 and not cluster  # files that are read describe another machine
    api.keep(found, output, local=here)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(found.to_yaml(), end="")
    kept = [f"kept as preset 'local' in {cache_dir() / api.KEPT}"] * here + [
        f"written to {output}"
    ] * bool(output)
    say(" and ".join(kept) or "kept nowhere; -o FILE writes it")
    if launch.started_by_launcher():
        launch.leave(0)


def _read(cluster: str | None, tests: list[Path], wiring: Path | None) -> Cluster:
    """The cluster with what nccl-tests and nvidia-smi have measured.

    Raises SpecError.
    """
    from gnnplan.planner.cluster.readings import read
    from gnnplan.planner.problem.inputs import read_cluster

    if not cluster or not (tests or wiring):
        raise SpecError(
            "--nccl-tests and --topology are read into --cluster, which says how fast a GPU"
            " computes: give it and one of them"
        )
    return read(read_cluster(cluster), tests, wiring)
