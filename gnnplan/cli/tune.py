"""`gnnplan tune`: runs the few strategies that predictions cannot tell apart, and plans by them."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from gnnplan.cli.common import show, verb
from gnnplan.cli.options import of_function


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
    from gnnplan.planner.vocabulary.progress import progress

    out: Path = options.pop("out") or new_folder("tune")
    output = output or out.with_name(f"{out.name}.json")
    output.parent.mkdir(parents=True, exist_ok=True)
    must_be_writable(output)
    with progress() as notify:
        tuned = tune_by_runs(load_plan(plan_file), out, **options, notify=notify)
    tuned.write(output)
    if show(tuned, as_json):
        print(f"written to {output}; next: gnnplan run {quote(str(output))}")
