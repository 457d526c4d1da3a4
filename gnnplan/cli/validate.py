"""`gnnplan validate`: compares runs, or printed figures, with their predictions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import Json, app, emit, must_be_playable, table

if TYPE_CHECKING:
    from gnnplan.planner.evidence.runs import Run

SHOWN = 0.02  # of the measured step: smaller operations are shown together, in one row


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
    run = examine(directories[0], cluster)
    assert run.planned
    strategy = run.planned.strategy
    result = {**run.comparison, "strategy": {"name": strategy.name, **strategy.knobs()}}
    if as_json:
        emit(result)
    else:
        show_run(run.strategy, result, run.planned.problem.cluster.device.name)
    if not (result["bytes"]["equal"] and result["order"]["equal"]):
        raise typer.Exit(1)


def examine(directory: Path, cluster: str | None = None) -> Run:
    """Predict and simulate what a run did, and compare.

    `cluster`: a cluster file whose constants take the place of the plan's. Raises SpecError.
    """
    from dataclasses import replace

    from gnnplan.planner.decision.plan import chosen, question, read
    from gnnplan.planner.decision.search import evaluate
    from gnnplan.planner.evidence.runs import Planned, Run, same_shape
    from gnnplan.planner.evidence.validate import compare, read_run
    from gnnplan.planner.problem.inputs import read_cluster
    from gnnplan.planner.vocabulary.trace import read_traces
    from gnnplan.simulator.player import play

    metrics, ranks = read_run(directory)
    traces = read_traces(directory)
    document = read(directory / "plan.json")
    problem = question(document)
    if cluster:
        problem = replace(problem, cluster=same_shape(read_cluster(cluster), problem.cluster))
    candidate = evaluate(problem, chosen(document))
    batches = candidate.strategy.steps(problem)
    steps = min(len(metrics), 5) * batches
    must_be_playable(problem, steps)
    schedule = candidate.strategy.schedule(problem, steps)
    played = play(schedule, problem.cost)
    comparison = compare(
        candidate, schedule, played.spans, played.epoch_s(batches), traces, metrics, ranks
    )
    return Run.of(str(directory), Planned(problem, candidate.strategy), comparison, metrics)


# -- one run ---------------------------------------------------------------------------------------


def show_run(strategy: str, result: dict[str, Any], device: str) -> None:
    """Print the comparison of one run: time, then bytes, memory and order, then the diagnosis."""
    from gnnplan.planner.evidence.validate import show_rows
    from gnnplan.planner.vocabulary.units import show_bytes, show_time

    batches, epochs = result["batches"], result["epochs"]
    unit = "step" if batches == 1 else "epoch"
    if not result["device"]["equal"]:
        ran_on, planned = " and ".join(result["device"]["ran_on"]), result["device"]["planned"]
        print(
            f"note: this run was on {ran_on}, and its plan is for {planned} ({device}); compare"
            " bytes and order, not seconds and memory"
        )
    steps = "" if batches == 1 else f" of {batches} steps"
    print(f"{strategy}, {epochs} epochs{steps}; errors in % of the measured {unit}")
    table(
        "",
        ["", "predicted", "simulated", "measured", "predicted error", "simulated error"],
        [
            time_row(row, result["step"], unit if row is result["step"] else row["operation"])
            for row in [result["step"], *shown_operations(result["step"], result["operations"])]
        ],
    )
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
    of = "tensors" if memory["of"] == "data" else "the process"
    print(
        f"memory of the fullest rank ({of}): predicted {show_bytes(memory['predicted_bytes'])},"
        f" measured peak {show_bytes(memory['measured_bytes'])} ({memory['error']:+.0%})"
    )
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    order = result["order"]["first_difference"] or "as scheduled on every rank and lane"
    print(f"order of operations: {order}")
    print(f"diagnosis: {result['diagnosis']}")


def shown_operations(
    step: dict[str, Any], operations: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Operations above SHOWN of the step by any of their three times; the others as one row."""
    sources = ("predicted_s", "simulated_s", "measured_s")
    least_s = SHOWN * step["measured_s"]
    shown = [row for row in operations if max(row[s] or 0.0 for s in sources) > least_s]
    small = [row for row in operations if row not in shown]
    if small:
        together: dict[str, Any] = {"operation": f"other operations ({len(small)})"}
        for source in sources:
            together[source] = sum(row[source] or 0.0 for row in small)
        shown.append(together)
    return shown


def time_row(row: dict[str, Any], step: dict[str, Any], name: str) -> list[str]:
    """The cells of an operation's row: its times, and its errors as shares of the step."""
    from gnnplan.planner.evidence.validate import share_of_step
    from gnnplan.planner.vocabulary.units import show_time

    times = [row["predicted_s"], row["simulated_s"], row["measured_s"]]
    errors = [share_of_step(row, step, source) for source in ("predicted", "simulated")]
    return [
        name,
        *("-" if seconds is None else show_time(seconds) for seconds in times),
        *("-" if error is None else f"{round(100 * error):+d}%" for error in errors),
    ]


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

    runs = []
    with progress() as notify:
        for directory in directories:
            notify(f"comparing {directory}")
            runs.append(examine(directory, cluster))
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
        f"{count} runs, errors of each operation's seconds",
        [
            "operation",
            "of the step",
            *(f"{source}: {figure}" for source in sources for figure in figures),
        ],
        [
            [name, f"{row['share']:.0%}", *(cell for s in sources for cell in error_cells(row[s]))]
            for name, row in [("step", {**result["step"], "share": 1.0}), *shown]
        ],
    )
    if small := len(by_share) - len(shown):
        print(f"other operations ({small}): {SHOWN:.0%} of the step or less each")
    if memory := result["memory"]:
        print(
            f"memory of the fullest rank: {memory['mean']:.1%} off on average, at most"
            f" {memory['max']:.1%}"
        )
    print(
        f"bytes as predicted in {result['bytes_equal']} of {count} runs, order as scheduled in"
        f" {result['order_equal']}; the same run differs from itself by {result['noise']:.1%}"
    )
    if result["rankings"]:
        show_rankings(result["rankings"], result["ranking"])
    for one in result["doubt"]:
        if one["slower"]:
            print(
                f"{one['constant']}: {one['slower']:.2f} times as long as predicted,"
                f" {abs(one['share']):.1%} of the epochs"
            )
    if report := result.get("refit"):
        factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in report["factors"].items())
        print(
            f"refit on {len(report['fitted'])} runs ({factors}); the other"
            f" {len(report['scored'])} were {report['before']['mean']:.1%} off and are"
            f" {report['after']['mean']:.1%} off; written to {refit}"
        )


def error_cells(errors: dict[str, float] | None) -> list[str]:
    """Mean, 95th percentile and largest error."""
    if errors is None:
        return ["-", "-", "-"]
    return [f"{errors[figure]:.1%}" for figure in ("mean", "p95", "max")]


def show_rankings(rankings: list[dict[str, Any]], together: dict[str, Any]) -> None:
    """Print what each question's choice was, and what it cost."""

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
                f"{one['regret']:.1%}",
            ]
            for one in rankings
        ],
    )
    print(
        f"the choice was right, or within noise, in {together['right']:.0%} of"
        f" {together['questions']} questions; regret {together['regret']:.1%} on average, tau"
        f" {order(together['tau'])}"
    )


# -- printed figures -------------------------------------------------------------------------------


def show_published(path: Path, left_out: bool, as_json: bool) -> None:
    """Predict a file of printed figures; print errors, winners, and why rows are skipped."""
    from collections import Counter

    from gnnplan.planner.evidence.papers.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.planner.evidence.papers.published import evaluate_rows
    from gnnplan.planner.evidence.papers.rows import read
    from gnnplan.planner.vocabulary.progress import progress

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
            [metric, str(of["n"]), *(f"{of[figure]:.1%}" for figure in ("mape", "p95", "max"))]
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
