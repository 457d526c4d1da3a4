"""`gnnplan report`: a plan and its runs as a page of pictures."""

from __future__ import annotations

from pathlib import Path

from gnnplan.cli.common import show, verb


@verb(runs={"metavar": "[RUN]..."})
def report(
    plan_file: Path,
    runs: list[Path] | None = None,
    *,
    output: Path = Path("report.html"),
    as_json: bool = False,
) -> None:
    """Draw a plan and its runs as one page that opens offline.

    What epochs are made of, who does what when, memory and traffic; of runs also the errors of the
    prediction, losses and accuracies. Needs plotly: pip install 'gnnplan[report]'.

    Args:
        runs: Folders of finished runs of this plan.
        output: Write the page here.
    """
    from gnnplan.api.view import Blocks
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.report import report as write

    with progress() as notify:
        written = write(plan_file, runs or [], output, notify)
    document = {"report": str(written), "bytes": written.stat().st_size}
    show(Blocks([f"written to {written}; open it with a browser"], document), as_json)
