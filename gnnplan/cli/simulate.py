"""`gnnplan simulate`: play a plan in virtual time, with noise, or on other clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gnnplan.cli.common import Json, Set, app, print_json, show


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Epochs to play (a full graph: a step each); the last ones are the steady state.",
        ),
    ] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="What if: a field and its values, as servers=1,2,4,8 or device=dgx_a100,p3_p100 "
            "(the GPU of a preset or file); several: every combination."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write what --sweep finds here too."),
    ] = None,
    jitter: Annotated[
        float,
        typer.Option(
            help="Lognormal factors on every computation: their standard deviation, mean 1."
        ),
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="3=2.0: rank 3 computes twice as long; may be given again."),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(min=1, max=100_000, help="How often to play with --jitter or --straggler."),
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of --jitter.")] = 0,
    flows: Annotated[
        bool,
        typer.Option(
            "--flows",
            help="Each message of an exchange has its own max-min fair share of the links, rather "
            "than all of them one (slower to play).",
        ),
    ] = False,
    set_: Set = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome/Kineto trace per rank here (open it with Perfetto); with --jitter "
            "or --straggler of the first disturbed repetition."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a plan in virtual time: what if the cluster were another?

    Perhaps with jitter or stragglers. --sweep varies fields, and says where the recommendation
    changes."""
    from gnnplan.api.planning import load_plan
    from gnnplan.api.simulation import Simulation, Sweep
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.simulator.noise import stragglers

    slow = stragglers(straggler or [])
    plan = load_plan(plan_file)
    if csv is not None and sweep is None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    if sweep is not None and (trace or flows):
        raise SpecError(
            f"--{'trace' if trace else 'flows'} is of one simulation, and --sweep plays many;"
            " leave one of them out"
        )
    if csv:
        must_be_writable(csv)
    playing: dict[str, Any] = {
        "steps": steps,
        "overrides": set_ or [],
        "jitter": jitter,
        "stragglers": slow,
        "repetitions": repetitions,
        "seed": seed,
    }
    with progress() as notify:
        found: Simulation | Sweep
        if sweep is None:
            found = plan.simulate(**playing, flows=flows, trace=trace, notify=notify)
        else:
            found = plan.sweep(sweep, **playing, notify=notify)
    if csv and isinstance(found, Sweep):
        found.to_csv(csv)
    if as_json:
        return print_json(found.document)
    show(found)
    if csv:
        print(f"written to {csv}")
