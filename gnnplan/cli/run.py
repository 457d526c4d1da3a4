"""`gnnplan run`: train with a plan, on this machine or as a rank of torchrun or Slurm."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import Json, app, print_json, show

if TYPE_CHECKING:
    from gnnplan.api.running import Run


@app.command()
def run(
    plan_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="PLAN",
            help="A plan.json. With --resume: another plan to go on with; left out, the run's own.",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Another candidate of the plan, as `plan` prints it; NEXT is its fastest"
            " alternative.  [default: the plan's recommendation]"
        ),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs.  [default: the plan's]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for all it leaves; must not hold a run.  [default: a new one in runs/]"
        ),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Evaluate every so many epochs, and at the end; 0: at the end.  [default: 10]",
        ),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=1.0, help="Seconds a rank waits for its peers before it gives up.  [default: 30]"
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(
            min=0, help="Epochs between checkpoints; 0: none; two are kept.  [default: 10]"
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Go on with the run in this folder from its last checkpoint, with its "
            "plan and options; --epochs may ask for more. With a PLAN of the same graph and"
            " workload: on its ranks, with its strategy.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            help="Start all ranks anew from the last checkpoint when one is lost, so many "
            "times at most.",
        ),
    ] = 0,
    emulate: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help="The plan's servers as network namespaces of this Linux machine, "
            "with NICs of this rate between them: 400Mbit/s, or unshaped. Needs root.",
        ),
    ] = None,
    staleness_errors: Annotated[
        bool,
        typer.Option(
            "--staleness-errors",
            help="Measure how far stale rows and gradients are from the "
            "true ones, per layer and epoch, into rank*.json.",
        ),
    ] = False,
    gradient_errors: Annotated[
        bool,
        typer.Option(
            "--gradient-errors",
            help="Measure also how far the weights' gradients are from exact ones, by a second pass"
            " per epoch, and PipeGCN's bound of it (graph_parallel and pipegcn).",
        ),
    ] = False,
    tensorboard: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write loss, accuracies, seconds, bytes and memory of every epoch for TensorBoard"
            " here.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what the plan asks for beside what is here, and start nothing; exit code 2"
            " where the run would be refused.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Train for real: NCCL on GPUs, Gloo elsewhere. Starts its own local ranks, or is one when
    torchrun or Slurm started it.

    First the plan is compared with this machine: versions, the graph, device, ranks, memory, disk,
    open files and more. What differs is said, and what would stop the run ends it, all at once.

    A run that was broken off: gnnplan run --resume DIR. The same run on other ranks or with another
    strategy: gnnplan run NEW.json --resume DIR; weights and the optimizer's state go on. Under
    torchrun restarts are torchrun's (--max-restarts 3), and go on from the last checkpoint too."""
    from gnnplan.api.planning import load_plan
    from gnnplan.api.running import Run, asked_of, preflight, rate_of, train
    from gnnplan.executor.launch import launcher as launch
    from gnnplan.planner.vocabulary.errors import SpecError

    if resume is not None and out is not None:
        raise SpecError(
            "--out is of a new run, and --resume goes on in the folder of one; leave one of"
            " them out"
        )
    if resume is not None and strategy is not None and plan_file is None:
        raise SpecError(
            "--strategy is of a plan, and --resume alone goes on with the strategy of the run; give"
            f" the plan too (gnnplan run PLAN --strategy '{strategy}' --resume {resume})"
        )
    if resume is not None:
        out, plan_file = resume, plan_file or resume / "plan.json"
    if plan_file is None:
        raise SpecError("run takes a PLAN (`gnnplan plan -o plan.json` makes one), or --resume DIR")
    given: dict[str, Any] = {
        "epochs": epochs,
        "eval_every": eval_every,
        "timeout_s": timeout,
        "checkpoint_every": checkpoint_every,
        "staleness_errors": staleness_errors or None,
        "gradient_errors": gradient_errors or None,
        "tensorboard": tensorboard,
    }
    if launch.started_by_launcher():
        if dry_run:
            raise SpecError(
                "--dry-run looks at one machine, and torchrun or srun has started this process as a"
                " rank; call it alone, on each server"
            )
        if restarts:
            raise SpecError(
                "ranks that torchrun or srun has started are started anew by it; use torchrun"
                " --max-restarts, not --restarts"
            )
        if emulate is not None:
            raise SpecError(
                "--emulate starts ranks of its own, and torchrun or srun has started this one; use"
                " one of the two"
            )
        if out is None:
            raise SpecError(
                "--out is needed when torchrun or srun starts the ranks, so that all of them write"
                " to one folder"
            )
        options = launch.Options.of(out, given, resume is not None)
        code = launch.follow(plan_file, out, options, strategy)
        if code == 0 and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            show_run(Run(out), as_json)
        launch.leave(code)
    if emulate is not None:
        rate_of(emulate)  # a typing mistake is told before the graph is read
    plan = load_plan(plan_file, of_any_version=True)
    if strategy is not None:
        plan = plan.choose(strategy)
    given |= {"restarts": restarts, "emulate": emulate}
    asked = asked_of(plan.document, plan.loaded, out, given, resume is not None)
    if dry_run:
        found = preflight(asked)
        if as_json:
            print_json(found.document)
        else:
            show(found)
        raise typer.Exit(2 if found.stops else 0)
    show_run(train(asked), as_json)


def show_run(finished: Run, as_json: bool) -> None:
    """Print what a finished run left behind."""
    if as_json:
        print_json(finished.document)
    else:
        show(finished)
