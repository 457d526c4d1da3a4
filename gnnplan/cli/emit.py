"""`gnnplan emit`: a plan for other people's programs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from gnnplan.cli.common import print_json, verb
from gnnplan.planner.vocabulary.progress import say

# launch files, and what starts them; and libraries, whose folders of parts are written
FILES = {"torchrun": "bash", "slurm": "sbatch", "kubernetes": "kubectl create -f"}
FOLDERS = ("distdgl", "pyg")


@verb(name="emit", target={"flags": ("--for",), "metavar": "TARGET"}, output={"metavar": "DEST"})
def emit_plan(
    plan_file: Path,
    *,
    target: str,
    output: Path | None = None,
    image: str | None = None,
    as_json: bool = False,
) -> None:
    """Write launch files of a plan, or its parts for DistDGL or PyG.

    Launch files are for torchrun, Slurm or Kubernetes; each says at its top what it assumes. Parts
    are written by the libraries' own code, and hold features, labels and masks.

    Args:
        target: torchrun (a bash script), slurm (an sbatch script), kubernetes (an Indexed Job); or
            the graph in a part per rank: distdgl, pyg.
        output: The file, or for distdgl and pyg the folder, which must not be there yet.  [default:
            a launch file goes to standard output]
        image: With --for kubernetes: the container's image.  [default: gnnplan:VERSION]
    """
    from gnnplan.planner.decision import plan as plans
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import must_be_writable, suggest, write_atomically

    if target not in (*FILES, *FOLDERS):
        raise SpecError(f"--for {target!r} is unknown{suggest(target, (*FILES, *FOLDERS))}")
    if image is not None and target != "kubernetes":
        raise SpecError("--image goes with --for kubernetes")
    document = plans.read(plan_file)
    if target in FOLDERS:
        note = write_partition(document, target, output)
    else:
        if output:
            must_be_writable(output)
        text, note = launch_file(plan_file, document, target, image), None
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


def launch_file(plan: Path, document: dict[str, object], target: str, image: str | None) -> str:
    """The text of a launch file. Raises SpecError."""
    from gnnplan.executor.emit.launch import Launch, kubernetes, slurm, torchrun

    launch = Launch.of(plan, document)
    if target == "kubernetes":
        return kubernetes(launch, document, image)
    return slurm(launch) if target == "slurm" else torchrun(launch)


def write_partition(document: dict[str, object], target: str, folder: Path | None) -> str | None:
    """Write the graph's parts, and return what to note of them. Raises SpecError."""
    from gnnplan.executor.emit import partitions
    from gnnplan.planner.decision.plan import chosen, question
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.progress import progress

    if folder is None:
        raise SpecError(f"--for {target} writes a folder; name it with -o")
    must_be_new(folder)
    with progress() as notify:
        notify("reading the plan's graph")
        problem = question(document)
        strategy = chosen(document).settle(problem)
        notify(f"writing {problem.ranks} parts")
        write = partitions.pyg if target == "pyg" else partitions.distdgl
        return write(problem, strategy, folder)
