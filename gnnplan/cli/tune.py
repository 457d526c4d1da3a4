"""`gnnplan tune`: runs the few strategies that predictions cannot tell apart, and plans by them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gnnplan.cli.common import Json, app, print_json, say, table


@app.command()
def tune(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    share: Annotated[
        float,
        typer.Option(help="Most that it may cost: a share of the seconds that training takes."),
    ] = 0.1,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of that training.  [default: the plan's]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the folders of its runs.  [default: a new one, runs/tune-N]"),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Write the plan here.  [default: beside --out, .json]"),
    ] = None,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="The plan's servers as network namespaces of this Linux machine,"
            " with NICs of this rate between them: 400Mbit/s, or unshaped. Needs root.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the few strategies whose predictions are within doubt, and plan by what they took.

    Each trains for a few epochs, again and again, the faster ones longer; it ends as soon as the
    order is certain or --share of the training is spent. A lossy strategy is
    recommended only if it is faster by more than the noise. The runs also correct the cluster's
    constants. Where the training is too short to be worth it, the plan stays as it is.

    For example: gnnplan tune plan.json --epochs 1000 -o tuned.json && gnnplan run tuned.json"""
    from gnnplan.api.running import rate_of
    from gnnplan.executor.launch import launcher as launch
    from gnnplan.executor.launch.tune import asked, prospect
    from gnnplan.executor.launch.tune import tune as tune_by_runs
    from gnnplan.planner.decision import plan as plans
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.planner.vocabulary.progress import progress

    if launch.started_by_launcher():
        raise SpecError(
            "tune starts ranks of its own, and torchrun or srun has started this one; call it alone"
        )
    out = out or launch.new_folder("tune")
    output = output or out.with_name(f"{out.name}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    must_be_writable(output)
    servers = None if emulate is None else launch.Emulated(rate_of(emulate))
    document = plans.read(plan_file)
    with progress() as notify:
        problem, found = asked(document, notify)
    say(str(prospect(problem, found, share, epochs)))
    with progress() as notify:
        document = tune_by_runs(
            problem, found, out, share, epochs, servers, plans.is_exact(document), notify
        )
    plans.write(output, document)
    if as_json:
        return print_json(document)
    show_tuned(document, out, output)


def show_tuned(document: dict[str, Any], out: Path, output: Path) -> None:
    """Print the answer, what was measured, what was refitted, and where it all is."""
    for label in ("use", "tuned"):
        print(f"{label + ':':8}{document['summary'][label]}")
    tuned = document["tuned"]
    if tuned["strategies"]:
        show_measured(tuned)
        print(f"refit:  {refit_line(tuned['refit'])}")
        print(f"runs are in {out}; to compare them: gnnplan validate {out}/*")
    print(f"written to {output}; next: gnnplan run {output}")


def show_measured(tuned: dict[str, Any]) -> None:
    """The table of the strategies that were run, the recommended one first."""
    from gnnplan.planner.vocabulary.units import show_percent, show_time

    def slower(row: dict[str, Any]) -> str:
        if row["slower"] is None:
            return "failed" if row["failed"] else "-"
        doubt = "" if row["doubt"] is None else f" ± {show_percent(row['doubt'])}"
        return show_percent(row["slower"], sign=True) + doubt

    table(
        "measured",
        ["strategy", "exact", "predicted", "measured", "slower by", "certain", "epochs", "cost"],
        [
            [
                row["strategy"],
                "yes" if row["exact"] else "no",
                show_time(row["predicted_s"]),
                "-" if row["measured_s"] is None else show_time(row["measured_s"]),
                slower(row),
                "-" if row["certain"] is None else "yes" if row["certain"] else "no",
                f"{row['epochs']} in {row['runs']}",
                show_time(row["cost_s"]),
            ]
            for row in tuned["strategies"]
        ],
    )
    for row in tuned["strategies"]:
        if row["failed"]:
            print(f"- {row['strategy']} was left out: {row['failed']}")


def refit_line(refit: dict[str, Any] | None) -> str:
    """What was refitted, in words."""
    from gnnplan.planner.vocabulary.units import show_count, show_percent

    if refit is None:
        return "too few runs"
    errors = (
        f"epochs of {show_count(len(refit['scored']), 'run')} that were not fitted were"
        f" {show_percent(refit['before']['mean'], 1)} off and would be"
        f" {show_percent(refit['after']['mean'], 1)} off"
    )
    factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in refit["factors"].items())
    return f"{factors}; {errors}" if refit["kept"] else f"constants stay as they were; {errors}"
