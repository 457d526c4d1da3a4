"""`gnnplan trace`: the traces of all ranks, for Perfetto or Holistic Trace Analysis."""

from __future__ import annotations

from pathlib import Path

from gnnplan.cli.common import verb

VIEWERS = ("perfetto", "hta")


@verb(
    name="trace",
    directory={"metavar": "DIR"},
    output={"metavar": "DEST"},
    viewer={"flags": ("--for",), "metavar": "VIEWER"},
)
def view_traces(directory: Path, *, output: Path, viewer: str = "perfetto") -> None:
    """Merge the traces of all ranks, or write them for HTA.

    HTA, Holistic Trace Analysis, reads them as GPU kernels.

    A run on several servers leaves its traces there; copy them into one folder first.

    Args:
        directory: A run's folder, or one that `gnnplan simulate --trace` wrote.
        output: The file; for hta a new folder.
        viewer: perfetto: one file with all ranks, for https://ui.perfetto.dev; hta: a folder for
            Holistic Trace Analysis.
    """
    from gnnplan.planner.graph.arrays import must_be_new
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import must_be_writable, suggest
    from gnnplan.planner.vocabulary.hta import write_for_hta
    from gnnplan.planner.vocabulary.trace import merge_traces

    if viewer not in VIEWERS:
        raise SpecError(f"--for {viewer!r} is unknown{suggest(viewer, VIEWERS)}")
    if viewer == "hta":
        must_be_new(output)
        write_for_hta(directory, output)
        print(f"written to {output}; next: TraceAnalysis(trace_dir={str(output)!r}) in Python")
    else:
        must_be_writable(output)
        merge_traces(directory, output)
        print(f"written to {output}; next: open it at https://ui.perfetto.dev")
