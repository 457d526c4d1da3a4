"""Verbs that write files: `trace` for trace viewers, `emit` launch files and partitions for other
libraries, `report` an HTML page, `measure` a cluster file of this machine, of emulated or of real
servers."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from gnnplan.cli.common import of_function, print_json, show, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify, say

if TYPE_CHECKING:
    from gnnplan.planner.cluster.spec import Cluster

VIEWERS = ("perfetto", "hta")
# kind of launch file -> the command that starts it; FOLDERS: libraries to write partitions for
FILES = {"torchrun": "bash", "slurm": "sbatch", "kubernetes": "kubectl create -f"}
FOLDERS = ("distdgl", "pyg")


@verb(
    name="trace",
    directory={"metavar": "DIR"},
    output={"metavar": "DEST"},
    viewer={"flags": ("--for",), "metavar": "VIEWER"},
)
def view_traces(
    directory: Path, *, output: Path, viewer: str = "perfetto", as_json: bool = False
) -> None:
    """Merge the traces of all ranks, or write them for HTA.

    HTA, Holistic Trace Analysis, reads them as GPU kernels.

    A run on several servers leaves each rank's trace on its server; copy them into one folder
    first.

    Args:
        directory: A run's folder, or a folder that `gnnplan simulate --trace` wrote.
        output: File to write; for hta a new folder.
        viewer: perfetto: one file with all ranks, for https://ui.perfetto.dev; hta: a folder for
            Holistic Trace Analysis.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.vocabulary.files import must_be_writable, one_of
    from gnnplan.planner.vocabulary.trace import merge_traces, write_for_hta

    viewer = one_of("--for", viewer, VIEWERS)
    if viewer == "hta":
        must_be_new(output)
        write_for_hta(directory, output)
        onwards = f"TraceAnalysis(trace_dir={str(output)!r}) in Python"
    else:
        must_be_writable(output)
        merge_traces(directory, output)
        onwards = "open it at https://ui.perfetto.dev"
    document = {"for": viewer, "written": str(output)}
    show(Blocks([f"written to {output}; next: {onwards}"], document), as_json)


@verb(name="emit", target={"flags": ("--for",), "metavar": "TARGET"}, output={"metavar": "DEST"})
def emit_plan(
    plan_file: Path,
    *,
    target: str,
    output: Path | None = None,
    image: str | None = None,
    as_json: bool = False,
) -> None:
    """Write a plan's launch file, or its parts for DistDGL or PyG.

    Launch files are for torchrun, Slurm or Kubernetes; each lists its assumptions at the top. The
    libraries' own code writes the parts, with features, labels and masks.

    Args:
        target: A launch file: torchrun (a bash script), slurm (an sbatch script) or kubernetes (an
            Indexed Job); or the graph with one part per rank: distdgl, pyg.
        output: File to write, or for distdgl and pyg a new folder.  [default: a launch file goes to
            standard output]
        image: With --for kubernetes: the container's image.  [default: gnnplan:VERSION]
    """
    from gnnplan.executor.emit.launch import Launch, kubernetes, slurm, torchrun
    from gnnplan.planner.decision import plan as plans
    from gnnplan.planner.vocabulary.files import must_be_writable, one_of, write_atomically

    target = one_of("--for", target, (*FILES, *FOLDERS))
    if image is not None and target != "kubernetes":
        raise SpecError("--image goes with --for kubernetes")
    document = plans.read(plan_file)
    if target in FOLDERS:
        note = write_partition(document, target, output)
    else:
        if output:
            must_be_writable(output)
        launch, note = Launch.of(plan_file, document), None
        if target == "kubernetes":
            text = kubernetes(launch, document, image)
        else:
            text = slurm(launch) if target == "slurm" else torchrun(launch)
        if output is None and not as_json:
            return print(text, end="")
        if output:
            write_atomically(output, text)
    if as_json:
        found = {"for": target, "written": None if output is None else str(output), "note": note}
        return print_json(found if target in FOLDERS else {**found, "text": text})
    if note:
        say(f"note: {note}")
    onwards = f"; next: {FILES[target]} {quote(str(output))}" if target in FILES else ""
    print(f"written to {output}{onwards}")


def write_partition(document: dict[str, object], target: str, folder: Path | None) -> str | None:
    """Write the graph's parts, and return a note for the user, if any. Raises SpecError."""
    from gnnplan.executor.emit import partitions
    from gnnplan.planner.decision.plan import chosen, question
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.vocabulary.units import show_count

    if folder is None:
        raise SpecError(f"--for {target} writes a folder; name it with -o")
    must_be_new(folder)
    notify("reading the plan's graph")
    problem = question(document)
    strategy = chosen(document).settle(problem)
    notify(f"writing {show_count(problem.ranks, 'part')}")
    write = partitions.pyg if target == "pyg" else partitions.distdgl
    note = write(problem, strategy, folder)
    notify("")
    return note


@verb(runs={"metavar": "RUN"})
def report(
    plan_file: Path,
    runs: list[Path] | None = None,
    *,
    output: Path = Path("report.html"),
    as_json: bool = False,
) -> None:
    """Draw a plan and its runs as one page that opens offline.

    The page shows the parts of an epoch, a timeline of each rank, memory and traffic; with runs
    also the errors of the prediction, losses and accuracies. Needs plotly: pip install
    'gnnplan[report]'.

    Args:
        runs: Folders of finished runs of this plan.
        output: File to write the page to.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.report import report as write

    written = write(plan_file, runs or [], output)
    document = {"report": str(written), "bytes": written.stat().st_size}
    show(Blocks([f"written to {written}; open it with a browser"], document), as_json)


# -- measure ---------------------------------------------------------------------------------------


@verb(
    of_function("running.measure"),
    ranks={"min": 1, "max": 1024},
    servers={"min": 1, "max": 200},
    seconds={"min": 0.01, "max": 60},
    nccl_tests={"metavar": "FILE"},
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
    from gnnplan.api import running as api
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
    if "device.gemm" in found.ranges and not (nccl_tests or topology or cluster):
        say(
            "note: this machine's speed changed from round to round (provenance of device.gemm);"
            " plans count with wider ranges. Measure again while nothing else runs"
        )
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
