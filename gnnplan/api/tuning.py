"""`tune`: which strategy, by short runs of the few within doubt; the answer is Tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gnnplan.api.planning import Plan
from gnnplan.api.running import rate_of
from gnnplan.planner.decision.objective import Objective
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import Notify, silent, tells
from gnnplan.planner.vocabulary.table import Table, column, table, yes_no
from gnnplan.planner.vocabulary.units import show_count, show_percent, show_time


class Tuned(Plan):
    """A plan by what short runs took; it shows those runs, whose folders are in `out`."""

    def __init__(self, document: dict[str, Any], out: Path) -> None:
        super().__init__(document)
        self.out = out

    def blocks(self) -> list[str | Table]:
        summary, tuned = self.document["summary"], self.document["tuned"]
        lines: list[str | Table] = [f"{name + ':':8}{summary[name]}" for name in ("use", "tuned")]
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
            f"runs are in {self.out}; to compare them: gnnplan validate {self.out}/*",
        ]


@tells
def tune(
    plan: Plan,
    out: str | Path | None = None,
    *,
    share: float = 0.1,
    epochs: int | None = None,
    emulate: str | None = None,
    notify: Notify = silent,
) -> Tuned:
    """Run the few strategies whose predictions are within doubt, and plan by what they took.

    Least comes first: time of an epoch, or the plan's objective, made of measured epochs.

    What is run and what it may cost is said on standard error before the first run. The plan's
    document says under 'tuned' what was measured; where training is too short to be worth it, why
    not.

    Args:
        plan: What to tune.
        out: Folder for the folders of its runs.  [default: a new one, runs/tune-N]
        share: Most that it may cost: a share of the seconds that training takes.
        epochs: Epochs of that training.  [default: the plan's]
        emulate: The plan's servers as network namespaces of this Linux machine, with NICs of this
            rate between them: 400Mbit/s, or unshaped. Needs root.
        notify: Is told what is being done.

    Raises:
        SpecError: An argument is wrong, or the plan cannot be run here.
        LostRank: A rank was lost.
    """
    from gnnplan.executor.launch import launcher as launch
    from gnnplan.executor.launch.tune import asked
    from gnnplan.executor.launch.tune import tune as by_runs

    if launch.started_by_launcher():
        raise SpecError(
            "tune starts ranks of its own, and torchrun or srun has started this one; call it alone"
        )
    servers = None if emulate is None else launch.Emulated(rate_of(emulate))
    folder = launch.new_folder("tune") if out is None else Path(out)
    return Tuned(by_runs(asked(plan.document), folder, share, epochs, servers), folder)


def _measured(strategies: list[dict[str, Any]], objective: Objective) -> Table:
    """The strategies that were run, the recommended one first."""

    def worse(row: dict[str, Any]) -> str:
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


def _refitted(refit: dict[str, Any] | None) -> str:
    """Say which constants were refitted."""
    if refit is None:
        return "too few runs"
    errors = (
        f"epochs of {show_count(len(refit['scored']), 'run')} that were not fitted were"
        f" {show_percent(refit['before']['mean'], 1)} off and would be"
        f" {show_percent(refit['after']['mean'], 1)} off"
    )
    factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in refit["factors"].items())
    return f"{factors}; {errors}" if refit["kept"] else f"constants stay as they were; {errors}"
