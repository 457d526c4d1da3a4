"""`tune`: choose between strategies of nearly equal predictions by short runs; returns Tuned."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from gnnplan.api.arguments import typed
from gnnplan.api.planning import Plan, load_plan
from gnnplan.api.running import rate_of
from gnnplan.api.view import TextBlock
from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.progress import Notify, reports_progress, silent
from gnnplan.planner.vocabulary.text import Table, column, table, yes_no
from gnnplan.planner.vocabulary.units import show_count, show_percent, show_time


class Tuned(Plan):
    """A plan chosen by short runs; it prints their times. The runs' folders are in `out`."""

    def __init__(self, document: Json, out: Path) -> None:
        super().__init__(document)
        self.out = out

    def blocks(self) -> list[TextBlock]:
        summary, tuned = self.document["summary"], self.document["tuned"]
        lines: list[TextBlock] = [f"{name + ':':8}{summary[name]}" for name in ("use", "tuned")]
        if not tuned["strategies"]:
            return lines
        return [
            *lines,
            _measured(tuned["strategies"], Objective(self.document.get("objective", "time"))),
            *(
                f"- {row['strategy']} was left out: {row['failed']}"
                for row in tuned["strategies"]
                if row["failed"]
            ),
            f"refit:  {_refitted(tuned['refit'])}",
            f"runs are in {self.out}; to compare them: gnnplan validate {quote(str(self.out))}/*",
        ]


@reports_progress
@typed
def tune(
    plan: Plan | str | Path,
    out: str | Path | None = None,
    *,
    share: float = 0.1,
    epochs: int | None = None,
    emulate: str | None = None,
    notify: Notify = silent,
) -> Tuned:
    """Run the few strategies whose predictions are too close to call, and plan by measured times.

    The strategy with the least measured time per epoch, or the least of the plan's objective
    computed from measured epochs, comes first.

    Standard error says before the first run which strategies run and what that may cost. The plan's
    document holds the measurements under 'tuned' or, if training is too short for tuning to pay,
    the reason.

    Args:
        plan: The plan to tune, or its file.
        out: Folder for the folders of the short runs.  [default: a new one, runs/tune-N]
        share: Budget of the short runs, as a share of the training's time.
        epochs: Epochs of that training.  [default: the plan's]
        emulate: Emulate the plan's servers as network namespaces of this Linux machine, with NICs
            of this rate between them: 400Mbit/s, or unshaped (no limit). Needs root.
        notify: Called with progress messages.

    Raises:
        SpecError: An argument is wrong, or the plan cannot run on this machine.
        LostRank: A rank was lost.
    """
    from gnnplan.executor.launch.launcher import new_folder
    from gnnplan.executor.launch.tune import asked
    from gnnplan.executor.launch.tune import tune as by_runs
    from gnnplan.executor.ranks.rendezvous import started_by_launcher

    if started_by_launcher():
        raise SpecError(
            "tune starts ranks of its own, and torchrun or srun has started this one; call it alone"
        )
    folder = new_folder("tune") if out is None else Path(out)
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    return Tuned(by_runs(asked(plan.document), folder, share, epochs, rate_of(emulate)), folder)


def _measured(strategies: list[Json], objective: Objective) -> Table:
    """Return the table of measured strategies, the recommended one first."""

    def worse(row: Json) -> str:
        if row["worse"] is None:
            return "failed" if row["failed"] else "-"
        doubt = "" if row["doubt"] is None else f" ± {show_percent(row['doubt'])}"
        return show_percent(row["worse"], sign=True) + doubt

    return table(
        "measured",
        strategies,
        column("strategy"),
        column("exact", show=yes_no),
        column("predicted", "predicted_s", show_time),
        column("measured", "measured_s", show_time),
        (f"{objective.more} by", worse),
        column("certain", show=yes_no),
        ("epochs", lambda row: f"{row['epochs']} in {row['turns']}"),
        column("cost", "cost_s", show_time),
    )


def _refitted(refit: Json | None) -> str:
    """Return which of the cluster's constants were refitted, in words."""
    if refit is None:
        return "too few runs"
    errors = (
        f"epochs of {show_count(len(refit['scored']), 'run')} that were not fitted were"
        f" {show_percent(refit['before']['mean'], 1)} off and would be"
        f" {show_percent(refit['after']['mean'], 1)} off"
    )
    factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in refit["factors"].items())
    return f"{factors}; {errors}" if refit["kept"] else f"constants stay as they were; {errors}"
