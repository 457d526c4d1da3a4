"""`validate`: compare predicted, simulated and measured times of one run or of several."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, overload

from gnnplan.api.arguments import AnyPath, several, typed
from gnnplan.api.view import TextBlock, View
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.evidence import runs as evidence
from gnnplan.planner.evidence.runs import show_rows
from gnnplan.planner.evidence.validate import describe_operation, show_error
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json, must_be_writable, write_atomically
from gnnplan.planner.vocabulary.progress import Notify, notify, reports_progress, silent
from gnnplan.planner.vocabulary.text import Table, cell, column, table
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent, show_time
from gnnplan.simulator.replay import replay

SHOWN = 0.02  # share of the measured step; smaller operations are summed up or only counted
KINDS = {
    "computation": "computation",
    "inside": "messages inside servers",
    "between": "messages between servers",
}
SAME = 0.01  # simulated seconds within this share of the predicted seconds are not shown


@overload
def validate(
    runs: AnyPath,
    *,
    cluster: str | Path | Cluster | None = None,
    notify: Notify = silent,
) -> Validation: ...


@overload
def validate(
    runs: Iterable[Any],
    *,
    cluster: str | Path | Cluster | None = None,
    refit: str | Path | None = None,
    notify: Notify = silent,
) -> Validations: ...


@reports_progress
@typed
def validate(
    runs: AnyPath | Iterable[Any],
    *,
    cluster: str | Path | Cluster | None = None,
    refit: str | Path | None = None,
    notify: Notify = silent,
) -> Validation | Validations:
    """Compare predicted, simulated and measured times, bytes, memory and order.

    Args:
        runs: A finished run or its folder; or several, for errors per operation, the accuracy of
            the ranking of strategies, and the constants that explain the errors.
        cluster: Cluster or its file to predict with, instead of the plans' clusters.
        refit: File for a cluster with refitted constants: they are fitted to some of the runs and
            scored on the others.
        notify: Called with progress messages.

    Raises:
        SpecError: A folder holds no finished run, or an argument is wrong.
    """
    if isinstance(runs, str | os.PathLike) and not refit:
        return Validation(Path(runs), cluster)
    return Validations([Path(run) for run in several(runs)], cluster, refit)


class Validation(View):
    """The comparison of one run with its prediction; `ok`: bytes and order are as predicted."""

    def __init__(self, folder: Path, cluster: str | Path | Cluster | None = None) -> None:
        run = replay(folder, cluster).run
        named = {"name": run.planned.strategy.name, **run.planned.strategy.knobs()}
        self.strategy, self.device = run.strategy, run.planned.problem.cluster.device.name
        self.document: Json = {**run.comparison, "strategy": named}

    @property
    def ok(self) -> bool:
        return bool(self.document["bytes"]["equal"] and self.document["order"]["equal"])

    @property
    def error(self) -> float:
        """The relative error of the predicted epoch: 0.1 means 10 % too long."""
        step = self.document["step"]
        return float(step["predicted_s"] / step["measured_s"] - 1)

    def blocks(self) -> list[TextBlock]:
        """Return lines on time, then bytes, memory and order, then the diagnosis."""
        result, lines = self.document, list[TextBlock]()
        batches, epochs = result["batches"], result["epochs"]
        unit = "step" if batches == 1 else "epoch"
        if not result["device"]["equal"]:
            ran_on, planned = " and ".join(result["device"]["ran_on"]), result["device"]["planned"]
            lines.append(
                f"note: this run was on {ran_on}, and its plan is for {planned} ({self.device});"
                " compare bytes and order, not seconds and memory"
            )
        steps = "" if batches == 1 else f" of {show_count(batches, 'step')}"
        lines.append(f"{self.strategy}, {show_count(epochs, 'epoch')}{steps}; seconds per {unit}")
        lines.append(times(result, unit))
        if result["replayed"]:
            lines.append(
                "operations are of epochs that launched them one by one, to be recorded; other"
                " epochs launched a step at once"
            )
        exposed = result["exposed"]
        lines.append(
            f"communication per {unit}: {show_time(exposed['measured_s'])} exposed (predicted"
            f" {show_time(exposed['predicted_s'])}, simulated {show_time(exposed['simulated_s'])}),"
            f" {show_time(result['hidden_s'])} hidden behind computation"
        )
        if result["sampler_wait_s"]:
            lines.append(
                f"waiting for the sampler per {unit}: {show_time(result['sampler_wait_s'])}"
            )
        lines.append(f"bytes: {_bytes_line(result['bytes'], epochs)}")
        memory, of = result["memory"], "the whole process with its libraries"
        if memory["of"] == "data":
            of = "tensors only; `plan` adds the libraries, `run` shows the whole process"
        lines.append(
            f"memory of the fullest rank: predicted {show_bytes(memory['predicted_bytes'])},"
            f" measured peak {show_bytes(memory['measured_bytes'])}"
            f" ({show_percent(memory['error'], sign=True)}; {of})"
        )
        if result["rows"]:
            lines.append(f"rows of features: {show_rows(result['rows'])}")
        order = result["order"]["first_difference"] or "as scheduled on every rank and lane"
        lines.append(f"order of operations: {order}")
        lines.append(f"diagnosis: {result['diagnosis']}")
        return lines


def times(result: Json, unit: str) -> Table:
    """Return the table of the step's and its operations' seconds; operations that take at most a
    share SHOWN of the step are added up."""
    step = result["step"]
    rows, small = [{**step, "operation": unit}], list[Json]()
    for row in result["operations"]:
        (rows if row["measured_s"] > SHOWN * step["measured_s"] else small).append(row)
    rows += [_added_up(small)] if small else []
    differs = any(simulated_cell(row) for row in rows)

    def share(row: Json) -> str:
        return show_percent(row["measured_s"] / step["measured_s"])

    return table(
        "",
        rows,
        column("", "operation", describe_operation),
        column("predicted", "predicted_s", show_time),
        column("measured", "measured_s", show_time),
        column("prediction off", "predicted_error", show_error),
        None if result["replayed"] else (f"share of {unit}", share),
        ("simulated, where it differs", simulated_cell) if differs else None,
    )


def _added_up(rows: list[Json]) -> Json:
    """Return one row with the sums of several operations; of a single operation, its row."""
    if len(rows) == 1:
        return rows[0]
    sums = {
        way: sum(row[way] for row in rows if row[way] is not None)
        for way in ("predicted_s", "simulated_s", "measured_s")
    }
    error = sums["predicted_s"] / sums["measured_s"] - 1 if sums["measured_s"] else None
    return {**sums, "predicted_error": error, "operation": f"{len(rows)} small ones"}


def simulated_cell(row: Json) -> str:
    """Return the simulated seconds in words; '' if they are within SAME of the predicted ones."""
    simulated_s, predicted_s = row["simulated_s"], row["predicted_s"]
    if simulated_s is None or abs(simulated_s - (predicted_s or 0.0)) <= SAME * simulated_s:
        return ""
    return show_time(simulated_s)


def _bytes_line(sizes: Json, epochs: int) -> str:
    """Return counted and predicted bytes in words."""
    counted, predicted = sum(sizes["counted"].values()), sum(sizes["predicted"].values())
    verdict = "equal" if sizes["equal"] else "DIFFERENT"
    if sizes["epochs"] < epochs:
        verdict += (
            f" in the {sizes['epochs']} epochs whose batches are known; the prediction is of the"
            " first"
        )
    return (
        f"counted {counted:,}, predicted {predicted:,}; set-up {sizes['setup_counted']:,} and"
        f" {sizes['setup_predicted']:,}: {verdict}"
    )


class Validations(View):
    """The comparison of several runs with their predictions; `ok`: bytes and order of all runs are
    as predicted."""

    def __init__(
        self,
        folders: Sequence[Path],
        cluster: str | Path | Cluster | None = None,
        refit: str | Path | None = None,
    ) -> None:
        self.refit = Path(refit) if refit else None
        if self.refit:
            must_be_writable(self.refit)
        if not folders:
            raise SpecError("no run is given; give the folder of a finished run, or several")
        places = Counter(folder.resolve() for folder in folders)
        if twice := next((place for place, count in places.items() if count > 1), None):
            raise SpecError(f"{twice} is given twice, and would count as two runs; leave one out")
        runs = []
        for folder in folders:
            notify("comparing runs", str(folder))
            runs.append(replay(folder, cluster).run)
        self.document = evidence.summarise(runs)
        if self.refit:
            notify("refitting")
            fitted, self.document["refit"] = evidence.refit_cluster(runs)
            write_atomically(self.refit, fitted.to_yaml())

    @property
    def ok(self) -> bool:
        count = self.document["runs"]
        return bool(self.document["bytes_equal"] == self.document["order_equal"] == count)

    def refitted(self) -> Cluster:
        """Return the cluster that `refit` wrote.

        Raises SpecError if `refit` was not given.
        """
        if self.refit is None:
            raise SpecError("no constants were fitted; give validate(runs, refit=FILE)")
        return read_cluster(str(self.refit))

    def blocks(self) -> list[TextBlock]:
        """Return lines on time, memory, bytes and order, choices and constants."""
        result, lines = self.document, list[TextBlock]()
        count = result["runs"]
        if other := result["other_device"]:
            lines.append(
                f"note: {len(other)} of {count} runs were on another kind of device than their"
                f" plans are for ({other[0]}); compare bytes and order, not seconds and memory"
            )
        step = {**result["step"], "operation": "step", "share": 1.0}
        by_share = [{**of, "operation": name} for name, of in result["operations"].items()]
        by_share = sorted(by_share, key=lambda row: -row["share"])
        shown = [row for row in by_share if row["share"] > SHOWN]
        title = f"{show_count(count, 'run')}, errors of each operation's seconds"
        lines.append(_errors(title, [step, *shown]))
        if small := len(by_share) - len(shown):
            lines.append(
                f"other operations ({small}): {show_percent(SHOWN)} of the step or less each"
            )
        if memory := result["memory"]:
            lines.append(
                f"memory of the fullest rank: {show_percent(memory['mean'], 1)} off on average, at"
                f" most {show_percent(memory['max'], 1)}"
            )
        lines.append(
            f"bytes as predicted in {result['bytes_equal']} of {count} runs, order as scheduled in"
            f" {result['order_equal']}; epochs of equal runs vary by"
            f" {show_percent(result['noise'], 1)}"
        )
        if result["rankings"]:
            lines += _rankings(result["rankings"], result["ranking"])
        lines += [
            f"{KINDS[one['constant']]}: {one['slower']:.2f} times as long as predicted,"
            f" {show_percent(abs(one['share']), 1)} of the epochs"
            for one in result["doubt"]
            if one["slower"]
        ]
        if report := result.get("refit"):
            factors = ", ".join(f"{name} x {by:.2f}" for name, by in report["factors"].items())
            fitted, scored = (show_count(len(report[name]), "run") for name in ("fitted", "scored"))
            before, after = (show_percent(report[w]["mean"], 1) for w in ("before", "after"))
            lines.append(
                f"refit on {fitted} ({factors}); scored on {scored}: {before} off before,"
                f" {after} off now; written to {self.refit}"
            )
        return lines


def _errors(title: str, rows: list[Json]) -> Table:
    """Return the table of the errors of the step's and the operations' seconds."""

    def error(source: str, figure: str) -> Any:
        return column(f"{source}: {figure}", source, lambda of: show_percent(of[figure], 1))

    sources, figures = ("predicted", "simulated"), ("mean", "p95", "max")
    columns = [error(source, figure) for source in sources for figure in figures]
    share = column("of the step", "share", show_percent)
    return table(title, rows, column("operation"), share, *columns)


def _rankings(rankings: list[Json], together: Json) -> list[TextBlock]:
    """Return the choice of each question and its regret, as a table and a sentence."""
    shown = table(
        "choices",
        rankings,
        column("question"),
        column("strategies"),
        column("tau", show="{:.2f}".format),
        column("chosen", "choice"),
        column("fastest"),
        column("regret", show=lambda regret: show_percent(regret, 1)),
    )
    return [
        shown,
        f"the choice was right, or within noise, in {show_percent(together['right'])} of"
        f" {show_count(together['questions'], 'question')}; regret"
        f" {show_percent(together['regret'], 1)} on average, tau"
        f" {cell(together['tau'], '{:.2f}'.format)}",
    ]
