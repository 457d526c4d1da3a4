"""`gnnplan report`: a plan and its runs as a page of pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gnnplan.cli.common import Json, PlanFile, print_json, verb


@verb()
def report(
    plan_file: PlanFile,
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of finished runs of this plan."),
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", help="Write the page here.")] = Path(
        "report.html"
    ),
    as_json: Json = False,
) -> None:
    """Draw a plan and its runs as one page that opens offline.

    What epochs are made of, who does what when, memory, traffic, and where another strategy wins;
    of runs also the errors of the prediction, losses and accuracies. Needs plotly: pip install
    'gnnplan[report]'.
    """
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.report import report as write

    with progress() as notify:
        written = write(plan_file, runs or [], output, notify)
    if as_json:
        print_json({"report": str(written), "bytes": written.stat().st_size})
    else:
        print(f"written to {written}; open it with a browser")
