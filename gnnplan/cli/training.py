"""Verbs that train: `run` with a plan, here or as a rank of torchrun or Slurm, and `tune` with the
few strategies that predictions cannot tell apart."""

from __future__ import annotations

import os
from pathlib import Path
from shlex import quote
from typing import Any

import typer

from gnnplan.cli.common import of_function, show, verb
from gnnplan.planner.vocabulary.errors import SpecError


@verb(of_function("tuning.tune"), epochs={"min": 1})
def tune(
    plan_file: Path,
    *,
    output: Path | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Run the strategies within doubt, and plan by what they took.

    They take turns of two seconds each, and after some rounds the faster half goes on; it ends as
    soon as the order is certain or --share of the training is spent. A lossy strategy is
    recommended only if it is faster by more than the noise. The runs also correct the cluster's
    constants. Where the training is too short to be worth it, the plan stays as it is.

    For example: gnnplan tune plan.json --epochs 1000 -o tuned.json && gnnplan run tuned.json

    Args:
        output: Write the plan here.  [default: beside --out, .json]
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.tuning import tune as tune_by_runs
    from gnnplan.executor.launch.launcher import new_folder
    from gnnplan.planner.vocabulary.files import must_be_writable

    out: Path = options.pop("out") or new_folder("tune")
    output = output or out.with_name(f"{out.name}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    must_be_writable(output)
    tuned = tune_by_runs(load_plan(plan_file), out, **options)
    tuned.write(output)
    if show(tuned, as_json):
        print(f"written to {output}; next: gnnplan run {quote(str(output))}")


@verb(
    of_function("planning.Plan.run", given_only=True),
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
    """Train for real: NCCL on GPUs, Gloo elsewhere. Starts its own local ranks, or is one when
    torchrun or Slurm started it.

    First the plan is compared with this machine: versions, the graph, device, ranks, memory, disk,
    open files and more. What differs is said, and what would stop the run ends it, all at once.

    A run that was broken off: gnnplan run --resume DIR. The same run on other ranks or with another
    strategy: gnnplan run NEW.json --resume DIR; weights and the optimizer's state go on. Under
    torchrun restarts are torchrun's (--max-restarts 3), and go on from the last checkpoint too.

    Args:
        plan_file: A plan.json. With --resume: another plan to go on with; left out, the run's own.
        strategy: Another candidate of the plan, as `plan` prints it; NEXT is its fastest
            alternative.  [default: the plan's recommendation]
        resume: Go on with the run in this folder from its last checkpoint, with its plan and
            options; --epochs may ask for more. With a PLAN of the same graph and workload: on its
            ranks, with its strategy.
        dry_run: Print what the plan asks for beside what is here, and start nothing; exit code 2
            where the run would be refused.
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.running import Run, asked_of, preflight, rate_of, train
    from gnnplan.executor.launch import launcher as launch

    out: Path | None = given.pop("out")
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
    if launch.started_by_launcher():
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
        options = launch.Options.of(out, given, resume is not None)
        code = launch.follow(plan_file, out, options, strategy)
        if code == 0 and os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
            show(Run(out), as_json)
        launch.leave(code)
    if given["emulate"] is not None:
        rate_of(given["emulate"])  # a typing mistake is told before the graph is read
    plan = load_plan(plan_file, of_any_version=True)
    if strategy is not None:
        plan = plan.choose(strategy)
    asked = asked_of(plan.document, plan.loaded, out, given, resume is not None)
    if dry_run:
        found = preflight(asked)
        show(found, as_json)
        raise typer.Exit(2 if found.stops else 0)
    show(train(asked), as_json)
