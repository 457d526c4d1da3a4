"""`gnnplan simulate`: simulate a plan in virtual time, with noise, or on other clusters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnnplan.cli.common import of_function, show, verb
from gnnplan.planner.vocabulary.errors import SpecError


@verb(
    of_function("planning.Plan.simulate"),
    csv={"metavar": "FILE"},
    steps={"min": 1},
    repetitions={"min": 1, "max": 100_000},
    seed={"min": 0},
)
def simulate(
    plan_file: Path,
    *,
    straggler: list[str] | None = None,
    sweep: list[str] | None = None,
    csv: Path | None = None,
    set_: list[str] | None = None,
    as_json: bool = False,
    **playing: Any,
) -> None:
    """Simulate a plan in virtual time, also on another cluster.

    --jitter and --straggler add noise. --sweep plans and simulates for several values of a field,
    and says where the recommendation changes.

    Args:
        straggler: 3=2.0: rank 3 computes twice as long; may be given again.
        sweep: A field and the values to try, as servers=1,2,4,8, ranks=1,2,4 or
            device=dgx_a100,p3_p100 (the GPU of a preset or file). Given again, every combination is
            tried.
        csv: File to write the rows of --sweep to.
    """
    from gnnplan.api.planning import load_plan
    from gnnplan.api.simulation import Simulation, Sweep
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.simulator.noise import stragglers

    slow = stragglers(straggler or [])
    plan = load_plan(plan_file)
    if csv is not None and sweep is None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    alone = "trace" if playing["trace"] else "flows"
    if sweep is not None and playing[alone]:
        raise SpecError(
            f"--{alone} is of one simulation, and --sweep plays many; leave one of them out"
        )
    if csv:
        must_be_writable(csv)
    playing |= {"overrides": set_ or [], "stragglers": slow}
    found: Simulation | Sweep
    if sweep is None:
        found = plan.simulate(**playing)
    else:
        del playing["flows"], playing["trace"]
        found = plan.sweep(sweep, **playing)
    if csv and isinstance(found, Sweep):
        found.to_csv(csv)
    if show(found, as_json) and csv:
        print(f"written to {csv}")
