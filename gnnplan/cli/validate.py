"""`gnnplan validate`: compare runs, or published figures, with their predictions."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import typer

from gnnplan.cli.common import of_function, show, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify


@verb(
    of_function("validation.validate"),
    directories={"metavar": "[DIR]..."},
    leave_one_out={"flags": ("--leave-one-out/--no-leave-one-out",)},
    refit={"metavar": "FILE"},
)
def validate(
    directories: list[Path] | None = None,
    *,
    published: Path | None = None,
    leave_one_out: bool = False,
    as_json: bool = False,
    **constants: Any,
) -> None:
    """Compare runs with their predictions, and say what to doubt.

    Prints predicted, simulated and measured seconds side by side. Exit code 1 if bytes or order
    differ. For several runs: errors per operation, the accuracy of the ranking of strategies
    (Kendall's tau, regret), and the constants that explain the errors. With --published FILE.csv:
    figures from papers beside their predictions.

    Args:
        directories: Folders of finished runs.
        published: Instead of runs: a .csv of published figures to predict.
        leave_one_out: With --published: predict each dataset with constants fitted to the other
            datasets.
    """
    from gnnplan.api.validation import validate as compare

    if (not directories) == (published is None):
        raise SpecError("validate takes the folders of runs, or --published FILE.csv")
    if leave_one_out and published is None:
        raise SpecError("--leave-one-out goes with --published FILE.csv")
    if published is not None:
        if any(constants.values()):
            raise SpecError("--cluster and --refit go with folders of runs")
        return show_published(published, leave_one_out, as_json)
    runs: Any = directories
    if runs[1:] == [] and not constants["refit"]:
        runs = runs[0]
    found = compare(runs, **constants)
    show(found, as_json)
    if not found.ok:
        raise typer.Exit(1)


def show_published(path: Path, left_out: bool, as_json: bool) -> None:
    """Predict a file of published figures; print errors, winners, and why rows are skipped."""
    from gnnplan.api.view import Blocks
    from gnnplan.papers.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.papers.published import evaluate_rows
    from gnnplan.papers.rows import read
    from gnnplan.planner.vocabulary.table import Table, column, table
    from gnnplan.planner.vocabulary.units import show_percent

    rows = read(path)
    notify(f"predicting {len(rows):,} figures")
    result = leave_one_out(rows) if left_out else evaluate_rows(rows, gave_a_constant, calibrated)
    summary = dict(result["summary"])
    winner = summary.pop("winner")
    percent = partial(show_percent, digits=1)
    errors = table(
        f"{len(result['rows'])} of {len(rows)} figures predicted",
        [{"metric": metric, **errors} for metric, errors in summary.items()],
        column("metric"),
        column("rows", "n"),
        column("mean error", "mape", percent),
        column("95 % have at most", "p95", percent),
        column("largest", "max", percent),
    )
    kinds = table(
        "epochs that gave no constant",
        [{"kind": kind, **told} for kind, told in result["kinds"].items()],
        column("kind"),
        column("rows", "n"),
        column("median error", "median", percent),
        column("in the range for 80 %", "in_range", percent),
    )
    skipped = Counter((row["paper"], row["why"]) for row in result["skipped"])
    scaling = result["scaling"]
    off = f"{percent(scaling['median'])} off in the median of {scaling['n']}"
    blocks: list[str | Table] = [
        errors,
        *([kinds] if result["kinds"] else []),
        *([f"epochs over those on fewer GPUs: {off}"] if scaling["n"] else []),
        f"the faster of two strategies is named rightly in {winner['right']} of {winner['n']}"
        " comparisons that differ by more than 5 %",
        *(f"- {n} of {paper} skipped: {why}" for (paper, why), n in skipped.most_common()),
    ]
    show(Blocks(blocks, result), as_json)
