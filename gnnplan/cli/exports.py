"""Verbs that write files for other programs: `trace` for trace viewers, `emit` launch files and
partitions for other libraries, `report` an HTML page."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from gnnplan.cli.common import print_json, show, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify, say

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
def view_traces(directory: Path, *, output: Path, viewer: str = "perfetto") -> None:
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
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.vocabulary.files import must_be_writable, one_of
    from gnnplan.planner.vocabulary.trace import merge_traces, write_for_hta

    viewer = one_of("--for", viewer, VIEWERS)
    if viewer == "hta":
        must_be_new(output)
        write_for_hta(directory, output)
        print(f"written to {output}; next: TraceAnalysis(trace_dir={str(output)!r}) in Python")
    else:
        must_be_writable(output)
        merge_traces(directory, output)
        print(f"written to {output}; next: open it at https://ui.perfetto.dev")


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


@verb(runs={"metavar": "[RUN]..."})
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
