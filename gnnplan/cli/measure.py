"""`gnnplan measure`: write a cluster file of this machine, of emulated or of real servers."""

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
    """Measure the constants that plans need, with all ranks active.

    Micro-benchmarks measure the machine; the cluster file gives the provenance of each constant.

    They run on this machine, on servers emulated on it (--servers 2 --emulate 400Mbit/s; needs
    root) or, under torchrun or srun, on real servers. Or read measurements of other tools: gnnplan
    measure --cluster dgx_a100 --topology topo.txt --nccl-tests all_reduce.json -o mine.yaml

    Args:
        output: Cluster file to write. A measurement of one server is also kept as preset 'local'.
        nccl_tests: Measure nothing; read a file that nccl-tests wrote with -J (all_reduce_perf,
            alltoall_perf, sendrecv_perf), run on one server or on one GPU of each server.
        topology: Measure nothing; read the output of `nvidia-smi topo -m`.
        cluster: The cluster file or preset whose links --nccl-tests and --topology replace.
    """
    from gnnplan.api import measuring as api
    from gnnplan.api.running import rate_of
    from gnnplan.executor.measure import measure as measuring
    from gnnplan.executor.ranks.rank import leave
    from gnnplan.executor.ranks.rendezvous import started_by_launcher
    from gnnplan.planner.vocabulary.files import cache_dir, must_be_writable

    if output:
        must_be_writable(output)
    rate, seconds, dtype = rate_of(how["emulate"]), how["seconds"], how["dtype"]
    if nccl_tests or topology or cluster:
        found = _read(cluster, nccl_tests or [], topology)
    elif started_by_launcher():
        first = os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "0"
        measured = measuring.measure_as_rank(say if first else lambda what: None, seconds, dtype)
        if measured is None:  # only rank 0 has the result
            leave(0)
        found = measured
    else:
        found = measuring.measure(how["ranks"], say, how["servers"], rate, seconds, dtype)
    here = found.servers == 1 and not cluster  # --cluster may describe another machine
    api.keep(found, output, local=here)
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        print(found.to_yaml(), end="")
    kept = [f"kept as preset 'local' in {cache_dir() / api.KEPT}"] * here + [
        f"written to {output}"
    ] * bool(output)
    say(" and ".join(kept) or "kept nowhere; -o FILE writes it")
    if started_by_launcher():
        leave(0)


def _read(cluster: str | None, tests: list[Path], wiring: Path | None) -> Cluster:
    """Return the cluster with the measurements of nccl-tests and the topology of nvidia-smi.

    Raises SpecError.
    """
    from gnnplan.planner.cluster.readings import read
    from gnnplan.planner.problem.inputs import read_cluster, with_fields

    if not cluster or not (tests or wiring):
        raise SpecError(
            "--nccl-tests and --topology are read into --cluster, which says how fast a GPU"
            " computes: give it and one of them"
        )
    base = read_cluster(cluster.partition("?")[0])
    return read(with_fields(base, cluster), tests, wiring)
