"""`gnnplan validate`: compares runs, or printed figures, with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gnnplan.cli.common import Json, app, emit, table

SHOWN = 0.02  # of the measured step: of many runs, smaller operations are counted only
SAME = 0.01  # simulated seconds that differ by less from the predicted ones are not shown


@app.command()
def validate(
    directories: Annotated[
        list[Path] | None, typer.Argument(metavar="[DIR]...", help="Folders of finished runs.")
    ] = None,
    published: Annotated[
        Path | None, typer.Option(help="In their place: a .csv of printed figures to predict.")
    ] = None,
    leave_one_out: Annotated[
        bool,
        typer.Option(
            help="With --published: predict each dataset with constants fitted to the others."
        ),
    ] = False,
    cluster: Annotated[
        str | None, typer.Option(help="Predict with this cluster file's constants, not the plans'.")
    ] = None,
    refit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fit the cluster's constants to some of the runs, score them on the "
            "others, and write the cluster file.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare what was predicted, simulated and measured, and name the part of the prediction to
    doubt. Exit 1 if bytes or order differ.

    Of several runs: errors by operation, how right the ranking of strategies was (Kendall's tau,
    regret) and which constants to doubt. With --published FILE.csv: the figures that others have
    printed, beside what the model predicts of them."""
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import must_be_writable
    from gnnplan.simulator.replay import replay

    if (not directories) == (published is None):
        raise SpecError("validate takes the folders of runs, or --published FILE.csv")
    if leave_one_out and published is None:
        raise SpecError("--leave-one-out goes with --published FILE.csv")
    if published is not None:
        if cluster or refit:
            raise SpecError("--cluster and --refit go with folders of runs")
        return show_published(published, leave_one_out, as_json)
    assert directories is not None
    if refit:
        must_be_writable(refit)
        if len(directories) < 2:
            raise SpecError("--refit needs at least 2 runs: some to fit, the others to score")
    if len(directories) > 1:
        return validate_runs(directories, cluster, refit, as_json)
    run = replay(directories[0], cluster).run
    assert run.planned
    strategy = run.planned.strategy
    result = {**run.comparison, "strategy": {"name": strategy.name, **strategy.knobs()}}
    if as_json:
        emit(result)
    else:
        show_run(run.strategy, result, run.planned.problem.cluster.device.name)
    if not (result["bytes"]["equal"] and result["order"]["equal"]):
        raise typer.Exit(1)


# -- one run ---------------------------------------------------------------------------------------


def show_run(strategy: str, result: dict[str, Any], device: str) -> None:
    """Print the comparison of one run: time, then bytes, memory and order, then the diagnosis."""
    from gnnplan.planner.evidence.validate import show_rows
    from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent, show_time

    batches, epochs = result["batches"], result["epochs"]
    unit = "step" if batches == 1 else "epoch"
    if not result["device"]["equal"]:
        ran_on, planned = " and ".join(result["device"]["ran_on"]), result["device"]["planned"]
        print(
            f"note: this run was on {ran_on}, and its plan is for {planned} ({device}); compare"
            " bytes and order, not seconds and memory"
        )
    steps = "" if batches == 1 else f" of {show_count(batches, 'step')}"
    print(f"{strategy}, {show_count(epochs, 'epoch')}{steps}; seconds per {unit}")
    rows = [{**result["step"], "operation": unit}, *result["operations"]]
    columns = ["", "predicted", "measured", "prediction off", f"share of {unit}"]
    cells = [time_cells(row, result["step"]) for row in rows]
    simulated = [simulated_cell(row) for row in rows]
    if any(simulated):
        columns.append("simulated, where it differs")
        cells = [[*row, cell] for row, cell in zip(cells, simulated, strict=True)]
    table("", columns, cells)
    exposed = result["exposed"]
    print(
        f"communication per {unit}: {show_time(exposed['measured_s'])} exposed (predicted"
        f" {show_time(exposed['predicted_s'])}, simulated {show_time(exposed['simulated_s'])}),"
        f" {show_time(result['hidden_s'])} hidden behind computation"
    )
    if result["sampler_wait_s"]:
        print(f"waiting for the sampler per {unit}: {show_time(result['sampler_wait_s'])}")
    print(f"bytes: {bytes_line(result['bytes'], epochs)}")
    memory = result["memory"]
    if memory["of"] == "data":
        of = "tensors only; `plan` adds the libraries, `run` shows the whole process"
    else:
        of = "the whole process with its libraries"
    print(
        f"memory of the fullest rank: predicted {show_bytes(memory['predicted_bytes'])}, measured"
        f" peak {show_bytes(memory['measured_bytes'])} ({show_percent(memory['error'], sign=True)};"
        f" {of})"
    )
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    order = result["order"]["first_difference"] or "as scheduled on every rank and lane"
    print(f"order of operations: {order}")
    print(f"diagnosis: {result['diagnosis']}")


def time_cells(row: dict[str, Any], step: dict[str, Any]) -> list[str]:
    """The cells of an operation's row: its times, how far they are apart, its share of the step."""
    from gnnplan.planner.evidence.validate import describe_operation, show_error
    from gnnplan.planner.vocabulary.units import show_percent, show_time

    predicted_s, error = row["predicted_s"], row["predicted_error"]
    return [
        describe_operation(row["operation"]),
        "-" if predicted_s is None else show_time(predicted_s),
        show_time(row["measured_s"]),
        "-" if error is None else show_error(error),
        show_percent(row["measured_s"] / step["measured_s"]),
    ]


def simulated_cell(row: dict[str, Any]) -> str:
    """Simulated seconds where they are more than SAME off the predicted ones."""
    from gnnplan.planner.vocabulary.units import show_time

    simulated_s, predicted_s = row["simulated_s"], row["predicted_s"]
    if simulated_s is None or abs(simulated_s - (predicted_s or 0.0)) <= SAME * simulated_s:
        return ""
    return show_time(simulated_s)


def bytes_line(sizes: dict[str, Any], epochs: int) -> str:
    """Counted and predicted bytes, in words."""
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


# -- several runs ----------------------------------------------------------------------------------


def validate_runs(
    directories: list[Path], cluster: str | None, refit: Path | None, as_json: bool
) -> None:
    """Compare several runs, perhaps refit their cluster, and print. Exit 1 as of one run."""
    import yaml

    from gnnplan.planner.evidence.runs import refit_cluster, summarise
    from gnnplan.planner.vocabulary.files import write_atomically
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.simulator.replay import replay

    runs = []
    with progress() as notify:
        for directory in directories:
            notify("comparing runs", str(directory))
            runs.append(replay(directory, cluster).run)
        result = summarise(runs)
        if refit:
            notify("refitting")
            fitted, result["refit"] = refit_cluster(runs)
            write_atomically(refit, yaml.safe_dump(fitted.model_dump(mode="json"), sort_keys=False))
    if as_json:
        emit(result)
    else:
        show_runs(result, refit)
    if result["bytes_equal"] < len(runs) or result["order_equal"] < len(runs):
        raise typer.Exit(1)


def show_runs(result: dict[str, Any], refit: Path | None) -> None:
    """Print the comparison of several runs: time, memory, bytes and order, choices, constants."""
    from gnnplan.planner.vocabulary.units import show_count, show_percent

    count = result["runs"]
    if other := result["other_device"]:
        print(
            f"note: {len(other)} of {count} runs were on another kind of device than their plans"
            f" are for ({other[0]}); compare bytes and order, not seconds and memory"
        )
    sources, figures = ("predicted", "simulated"), ("mean", "p95", "max")
    by_share = sorted(result["operations"].items(), key=lambda item: -item[1]["share"])
    shown = [item for item in by_share if item[1]["share"] > SHOWN]
    table(
        f"{show_count(count, 'run')}, errors of each operation's seconds",
        [
            "operation",
            "of the step",
            *(f"{source}: {figure}" for source in sources for figure in figures),
        ],
        [
            [
                name,
                show_percent(row["share"]),
                *(cell for s in sources for cell in error_cells(row[s])),
            ]
            for name, row in [("step", {**result["step"], "share": 1.0}), *shown]
        ],
    )
    if small := len(by_share) - len(shown):
        print(f"other operations ({small}): {show_percent(SHOWN)} of the step or less each")
    if memory := result["memory"]:
        print(
            f"memory of the fullest rank: {show_percent(memory['mean'], 1)} off on average, at most"
            f" {show_percent(memory['max'], 1)}"
        )
    print(
        f"bytes as predicted in {result['bytes_equal']} of {count} runs, order as scheduled in"
        f" {result['order_equal']}; the same run differs from itself by"
        f" {show_percent(result['noise'], 1)}"
    )
    if result["rankings"]:
        show_rankings(result["rankings"], result["ranking"])
    for one in result["doubt"]:
        if one["slower"]:
            print(
                f"{one['constant']}: {one['slower']:.2f} times as long as predicted,"
                f" {show_percent(abs(one['share']), 1)} of the epochs"
            )
    if report := result.get("refit"):
        factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in report["factors"].items())
        print(
            f"refit on {len(report['fitted'])} runs ({factors}); the other"
            f" {len(report['scored'])} were {show_percent(report['before']['mean'], 1)} off and are"
            f" {show_percent(report['after']['mean'], 1)} off; written to {refit}"
        )


def error_cells(errors: dict[str, float] | None) -> list[str]:
    """Mean, 95th percentile and largest error."""
    from gnnplan.planner.vocabulary.units import show_percent

    if errors is None:
        return ["-", "-", "-"]
    return [show_percent(errors[figure], 1) for figure in ("mean", "p95", "max")]


def show_rankings(rankings: list[dict[str, Any]], together: dict[str, Any]) -> None:
    """Print what each question's choice was, and what it cost."""

    from gnnplan.planner.vocabulary.units import show_count, show_percent

    def order(tau: float | None) -> str:
        return "-" if tau is None else f"{tau:.2f}"

    table(
        "choices",
        ["question", "strategies", "tau", "chosen", "fastest", "regret"],
        [
            [
                one["question"],
                str(one["strategies"]),
                order(one["tau"]),
                one["choice"],
                one["fastest"],
                show_percent(one["regret"], 1),
            ]
            for one in rankings
        ],
    )
    print(
        f"the choice was right, or within noise, in {show_percent(together['right'])} of"
        f" {show_count(together['questions'], 'question')}; regret"
        f" {show_percent(together['regret'], 1)} on average, tau {order(together['tau'])}"
    )


# -- printed figures -------------------------------------------------------------------------------


def show_published(path: Path, left_out: bool, as_json: bool) -> None:
    """Predict a file of printed figures; print errors, winners, and why rows are skipped."""
    from collections import Counter

    from gnnplan.planner.evidence.papers.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.planner.evidence.papers.published import evaluate_rows
    from gnnplan.planner.evidence.papers.rows import read
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.planner.vocabulary.units import show_percent

    rows = read(path)
    with progress() as notify:
        notify(f"predicting {len(rows):,} figures")
        result = (
            leave_one_out(rows) if left_out else evaluate_rows(rows, gave_a_constant, calibrated)
        )
    if as_json:
        return emit(result)
    summary = dict(result["summary"])
    winner = summary.pop("winner")
    table(
        f"{len(result['rows'])} of {len(rows)} figures predicted",
        ["metric", "rows", "mean error", "95 % have at most", "largest"],
        [
            [
                metric,
                str(of["n"]),
                *(show_percent(of[figure], 1) for figure in ("mape", "p95", "max")),
            ]
            for metric, of in summary.items()
        ],
    )
    print(
        f"the faster of two strategies is named rightly in {winner['right']} of {winner['n']}"
        " comparisons that differ by more than 5 %"
    )
    for (paper, why), count in Counter(
        (row["paper"], row["why"]) for row in result["skipped"]
    ).most_common():
        print(f"- {count} of {paper} skipped: {why}")
