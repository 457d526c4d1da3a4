"""`gnnplan run`: train with a plan, on this machine or as a rank of torchrun or Slurm."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gnnplan.cli.common import Json, app, emit, say


@app.command()
def run(
    plan_file: Annotated[
        Path | None,
        typer.Argument(metavar="PLAN", help="A plan.json; with --resume the run's own."),
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
            "plan and options; --epochs may ask for more.",
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
    as_json: Json = False,
) -> None:
    """Train for real: NCCL on GPUs, Gloo elsewhere. Starts its own local ranks, or is one when
    torchrun or Slurm started it.

    A run that was broken off: gnnplan run --resume DIR. Under torchrun restarts are torchrun's
    (--max-restarts 3), and go on from the last checkpoint too."""
    from gnnplan.executor.launch import launcher as launch
    from gnnplan.planner.graph.arrays import STAND_IN_LABELS
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.units import show_count

    if resume is not None and out is not None:
        raise SpecError(
            "--out is of a new run, and --resume goes on in the folder of one; leave one of"
            " them out"
        )
    if resume is not None:
        out, plan_file = resume, plan_file or resume / "plan.json"
    if plan_file is None:
        raise SpecError("run takes a PLAN (`gnnplan plan -o plan.json` makes one), or --resume DIR")
    options = launch.Options.of(
        out or Path(),
        {
            "epochs": epochs,
            "eval_every": eval_every,
            "timeout_s": timeout,
            "checkpoint_every": checkpoint_every,
            "staleness_errors": staleness_errors or None,
        },
        resume is not None,
    )
    if launch.started_by_launcher():
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
        code = launch.follow(plan_file, out, options)
        if code == 0 and os.environ.get("RANK", "0") == "0":
            show_run(out, as_json)
        launch.leave(code)
    servers = None if emulate is None else launch.Emulated(rate_of(emulate))
    document, problem, strategy = launch.prepare(plan_file)
    if out is None:
        graph = problem.stats.name.split("?")[0].replace(":", "-").replace("/", "-")
        out = launch.new_folder(f"{graph}-{strategy.name}")
    number, last = options.epochs or problem.workload.epochs, 0
    if resume is None:
        launch.must_be_new(out)
    else:
        last = launch.last_of(out, problem, strategy)
        launch.must_go_on(out, last, number)
    launch.must_fit_here(problem)
    onwards = f" after {last}" if last else ""
    say(
        f"training {problem.stats.name} with {strategy} on"
        f" {show_count(problem.ranks, 'rank')}, {show_count(number, 'epoch')}{onwards}, into {out}"
    )
    stand_in = [note for note in problem.stats.notes if note.startswith(STAND_IN_LABELS)]
    for note in stand_in:
        say(f"note: {note}")
    options = replace(options, restarts=restarts)
    launch.begin(document, problem, strategy, out, options, servers)
    show_run(out, as_json)
    for note in stand_in:
        say(f"note: {note}")


def rate_of(text: str) -> float | None:
    """The rate of an emulated NIC [B/s]; None for 'unshaped'.

    Raises SpecError.
    """
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.units import kind, quantity

    if text == "unshaped":
        return None
    if kind(text) != "B/s":
        raise SpecError(
            f"--emulate {text!r} is not a rate such as 400Mbit/s or 50MB/s, nor 'unshaped'"
        )
    return quantity(text)


def show_run(out: Path, as_json: bool) -> None:
    """Print what a finished run left behind."""
    from gnnplan.planner.evidence.validate import show_rows
    from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_time

    result = summary(out)
    if as_json:
        return emit(result)
    scores = "  ".join(
        f"{k} {result[f'{k}_accuracy']:.3f}"
        for k in ("train", "val", "test")
        if result[f"{k}_accuracy"] is not None
    )
    sent = ", ".join(f"{k} {show_bytes(v)}" for k, v in result["bytes"].items()) or "nothing"
    print(
        f"{show_count(result['epochs'], 'epoch')}, loss {result['first_loss']:.4f} ->"
        f" {result['loss']:.4f}  {scores}"
    )
    print(
        f"median epoch {show_time(result['epoch_s'])} (without the first two); sent per epoch:"
        f" {sent}; peak memory {show_bytes(max(result['peak_rss_bytes']))} per process"
    )
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    print(f"in {out}; next: gnnplan validate {out}")


def summary(out: Path) -> dict[str, Any]:
    """What a run left behind, as one JSON document."""
    from statistics import median

    from gnnplan.planner.evidence.validate import read_run, rows_by_class

    metrics, ranks = read_run(out)
    sent: dict[str, int] = {}
    for rank in ranks:
        for op, nbytes in rank["bytes"].items():
            sent[op] = sent.get(op, 0) + nbytes
    last = metrics[-1]
    return {
        "out": str(out),
        "epochs": len(metrics),
        "first_loss": metrics[0]["loss"],
        "loss": last["loss"],
        **{f"{k}_accuracy": last[f"{k}_accuracy"] for k in ("train", "val", "test")},
        "epoch_s": median(m["epoch_s"] for m in metrics[min(2, len(metrics) - 1) :]),
        "backend": ranks[0]["backend"],
        "bytes": {op: nbytes // len(metrics) for op, nbytes in sent.items()},
        "setup_bytes": sum(sum(rank["setup_bytes"].values()) for rank in ranks),
        "peak_rss_bytes": [rank["peak_rss_bytes"] for rank in ranks],
        "peak_bytes": [rank["peak_bytes"] for rank in ranks],
        "rows": rows_by_class(ranks),
    }
