"""Verbs of training: `run` trains with a plan, on this machine or as a rank of torchrun or Slurm;
`tune` tries the few strategies that predictions cannot tell apart; `validate` compares runs, or
published figures, with their predictions."""

from __future__ import annotations

import os
from collections import Counter
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from gnnplan.cli.common import of_function, show, verb
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify


@verb(of_function("tuning.tune"), epochs={"min": 1}, output={"flags": ("-o", "--output")})
def tune(
    plan_file: Path,
    *,
    output: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Run the strategies too close to call, and compare real times.

    The strategies take turns of two seconds each; after some rounds the faster half continues.
    Tuning ends as soon as the order is certain or --share of the training's time is spent. A lossy
    strategy is recommended only if it is faster by more than the noise. The runs also correct the
    cluster's constants. If training is too short for tuning to pay, the plan stays as it is.

    For example: gnnplan tune plan.json --epochs 1000 -o tuned.json && gnnplan run tuned.json

    Args:
        output: File to write the tuned plan to.  [default: the folder --out with .json appended]
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.tuning import tune as tune_by_runs
    from gnnplan.executor.launch.launcher import new_folder
    from gnnplan.planner.vocabulary.files import must_be_writable

    out: Path = options.pop("out") or new_folder("tune")
    output = output or Path(f"{out if out.name else out.absolute()}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    must_be_writable(output)
    tuned = tune_by_runs(load_plan(plan_file), out, **options)
    tuned.write(output)
    if show(tuned, as_json):
        print(f"written to {output}; next: gnnplan run {quote(str(output))}")


@verb(
    of_function("planning.Plan.run", given_only=True),
    out={"flags": ("-o", "--out", "--output")},
    resume={"metavar": "DIR"},
    epochs={"min": 1},
    eval_every={"min": 0},
    timeout_s={"min": 1.0},
    checkpoint_every={"min": 0},
    restarts={"min": 0, "max": 1000},
    tensorboard={"metavar": "DIR"},
)
def run(
    plan_file: Path | None = None,
    *,
    strategy: str | None = None,
    resume: Path | None = None,
    dry_run: bool = False,
    as_json: bool = False,
    **given: Any,
) -> None:
    """Train the model, over NCCL on GPUs or Gloo on CPUs. Starts its own ranks on this machine, or
    is a rank itself if torchrun or Slurm started it.

    First, run compares the plan's needs with this machine: versions, graph, device, ranks, memory,
    disk, open files and more. It prints every difference, and refuses to start if one would stop
    the run.

    To resume an interrupted run: gnnplan run --resume DIR. To resume it on other ranks or with
    another strategy: gnnplan run NEW.json --resume DIR; weights and the optimizer's state are kept.
    Under torchrun, torchrun restarts the ranks (--max-restarts 3), also from the last checkpoint.

    Args:
        plan_file: A plan.json. With --resume, another plan to continue with.  [default: the run's
            own plan]
        strategy: Another strategy of the plan, as `plan` prints it; NEXT is the fastest
            alternative.  [default: the plan's recommendation]
        resume: Resume the run in this folder from its last checkpoint, with its plan and options;
            --epochs may be larger. With a PLAN of the same graph and workload, the run continues on
            that plan's ranks, with its strategy.
        dry_run: Print the plan's needs beside this machine's values, and start nothing; exit code 2
            if the run would be refused.
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.running import Run, rate_of
    from gnnplan.executor.launch.rank_process import follow
    from gnnplan.executor.launch.run_request import Options
    from gnnplan.executor.ranks.rank import leave
    from gnnplan.executor.ranks.rendezvous import started_by_launcher

    out: Path | None = given.pop("out")
    if resume is not None and out is not None:
        raise SpecError(
            "--out is of a new run, and --resume goes on in the folder of one; leave one of"
            " them out"
        )
    if resume is not None and strategy is not None and plan_file is None:
        raise SpecError(
            "--strategy is of a plan, and --resume alone goes on with the strategy of the run; give"
            f" the plan too (gnnplan run PLAN --strategy {quote(strategy)} --resume"
            f" {quote(str(resume))})"
        )
    if resume is not None:
        if plan_file is None and not (resume / "plan.json").exists():
            raise SpecError(f"{resume} holds no run to resume; give the --out of an earlier run")
        out, plan_file = resume, plan_file or resume / "plan.json"
    if plan_file is None:
        raise SpecError("run takes a PLAN (`gnnplan plan -o plan.json` makes one), or --resume DIR")
    if started_by_launcher():
        if dry_run:
            raise SpecError(
                "--dry-run looks at one machine, and torchrun or srun has started this process as a"
                " rank; call it alone, on each server"
            )
        if given.pop("restarts"):
            raise SpecError(
                "ranks that torchrun or srun has started are started anew by it; use torchrun"
                " --max-restarts, not --restarts"
            )
        if given.pop("emulate") is not None:
            raise SpecError(
                "--emulate starts ranks of its own, and torchrun or srun has started this one; use"
                " one of the two"
            )
        if out is None:
            raise SpecError(
                "--out is needed when torchrun or srun starts the ranks, so that all of them write"
                " to one folder"
            )
        code = follow(plan_file, out, Options.of(out, given, resume is not None), strategy)
        if code == 0 and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            show(Run(out), as_json)
        leave(code)
    if given["emulate"] is not None:
        rate_of(given["emulate"])  # report a mistake before the graph is read
    plan = load_plan(plan_file, of_any_version=True)
    if strategy is not None:
        plan = plan.choose(strategy)
    given = {option: value for option, value in given.items() if value is not None}
    if dry_run:
        found = plan.preflight(out, resume=resume is not None, **given)
        show(found, as_json)
        raise typer.Exit(2 if found.stops else 0)
    show(plan.run(out, **given) if resume is None else plan.resume(resume, **given), as_json)


# -- validate --------------------------------------------------------------------------------------


@verb(
    of_function("validation.validate"),
    directories={"metavar": "DIR"},
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
    from gnnplan.api.view import Blocks, TextBlock
    from gnnplan.papers.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.papers.published import evaluate_rows, read
    from gnnplan.planner.vocabulary.text import column, table
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
    blocks: list[TextBlock] = [
        errors,
        *([kinds] if result["kinds"] else []),
        *([f"epochs over those on fewer GPUs: {off}"] if scaling["n"] else []),
        f"the faster of two strategies is named rightly in {winner['right']} of {winner['n']}"
        " comparisons that differ by more than 5 %",
        *(f"- {n} of {paper} skipped: {why}" for (paper, why), n in skipped.most_common()),
    ]
    show(Blocks(blocks, result), as_json)
