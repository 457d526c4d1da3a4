"""`gnnplan validate`: runs, and printed figures, beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import Json, app, emit, must_be_playable, table

if TYPE_CHECKING:
    from gnnplan.planner.runs import Run


@app.command()
def validate(
    directories: Annotated[list[Path] | None, typer.Argument(metavar="[DIR]...", help="Folders of finished runs.")] = None,
    published: Annotated[Path | None, typer.Option(help="In their place: a .csv of printed figures to predict.")] = None,
    leave_one_out: Annotated[bool, typer.Option(help="Of --published: find constants anew without each dataset in turn.")] = False,
    cluster: Annotated[str | None, typer.Option(help="Predict with this cluster file's constants, not the plans'.")] = None,
    refit: Annotated[Path | None, typer.Option(metavar="FILE", help="Fit the cluster's constants to some of the runs, score them on the "
                                               "others, and write the cluster file.")] = None,
    as_json: Json = False,
) -> None:
    """Predicted, simulated and measured side by side, and which layer of knowledge is wrong. Exit 1 if bytes or order differ.

    Of several runs: errors by operation, how right the ranking of strategies was (Kendall's tau, regret) and which constants to doubt.
    With --published FILE.csv: the figures that others have printed, as far as the model speaks of them, beside its own.
    """
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import must_be_writable

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
        return show_runs(directories, cluster, refit, as_json)
    run = examine(directories[0], cluster)
    assert run.planned
    strategy = run.planned.strategy
    result = {**run.told, "strategy": {"name": strategy.name, **strategy.knobs()}}
    if as_json:
        emit(result)
    else:
        show_examined(run.strategy, result)
    if not (result["bytes"]["equal"] and result["order"]["equal"]):
        raise typer.Exit(1)


def examine(directory: Path, cluster: str | None = None) -> Run:
    """A run beside its prediction and simulation, perhaps with another cluster's constants. Raises SpecError."""
    from dataclasses import replace

    from gnnplan.planner.files import read_cluster
    from gnnplan.planner.plan import chosen, question, read
    from gnnplan.planner.runs import Planned, Run, same_shape
    from gnnplan.planner.search import weigh
    from gnnplan.planner.trace import read_traces
    from gnnplan.planner.validate import compare, read_run
    from gnnplan.simulator.player import play

    metrics, ranks = read_run(directory)
    traces = read_traces(directory)
    document = read(directory / "plan.json")
    job = question(document)
    if cluster:
        job = replace(job, cluster=same_shape(read_cluster(cluster), job.cluster))
    candidate = weigh(job, chosen(document))
    batches = candidate.strategy.steps(job)
    must_be_playable(job, min(len(metrics), 5) * batches)
    schedule = candidate.strategy.schedule(job, min(len(metrics), 5) * batches)
    played = play(schedule, job.cost)
    told = compare(candidate.predicted, candidate.memory, played.spans, played.epoch_s(batches), schedule, traces, metrics, ranks,
                   batches, candidate.strategy.drawn_steps(job))  # fmt: skip
    return Run.of(str(directory), Planned(job, candidate.strategy), told, metrics)


def show_examined(strategy: str, result: dict[str, Any]) -> None:
    """One run for people."""
    from gnnplan.planner.units import show_bytes, show_time
    from gnnplan.planner.validate import show_rows

    def seconds(value: float | None) -> str:
        return "-" if value is None else show_time(value)

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:+.0%}"

    epochs = result["epochs"]
    columns = ["operation", "predicted", "simulated", "measured", "predicted error", "simulated error"]
    table(f"{strategy}, {epochs} epochs", columns, [
        [r["operation"], seconds(r["predicted_s"]), seconds(r["simulated_s"]), seconds(r["measured_s"]), percent(r["predicted_error"]),
         percent(r["simulated_error"])] for r in [result["step"], result["exposed"], *result["operations"]]])  # fmt: skip
    sizes = result["bytes"]
    verdict = "equal" if sizes["equal"] else "DIFFERENT"
    if sizes["epochs"] < epochs:
        verdict = f"{verdict} in the {sizes['epochs']} epochs whose batches are known; the prediction is of the first"
    print(f"bytes: counted {sum(sizes['counted'].values()):,}, predicted {sum(sizes['predicted'].values()):,}; "
          f"set-up {sizes['setup_counted']:,} and {sizes['setup_predicted']:,}: {verdict}")  # fmt: skip
    print(f"communication hidden behind computation: {seconds(result['hidden_s'])} per step")
    print(f"order of operations: {result['order']['first_difference'] or 'as scheduled on every rank and lane'}")
    memory = result["memory"]
    whose = "rank" if memory["of"] == "data" else "process"
    print(f"memory of the fullest {whose}: predicted {show_bytes(memory['predicted_bytes'])}, "
          f"measured peak {show_bytes(memory['measured_bytes'])} ({memory['error']:+.0%})")  # fmt: skip
    if result["rows"]:
        print(f"rows of features: {show_rows(result['rows'])}")
    print(f"wrong: {result['wrong']}")


def show_runs(directories: list[Path], cluster: str | None, refitted: Path | None, as_json: bool) -> None:
    """Several runs together."""
    import yaml

    from gnnplan.planner.files import write_atomically
    from gnnplan.planner.runs import refit, summarise
    from gnnplan.progress import progress

    runs = []
    with progress() as tell:
        for directory in directories:
            tell(f"comparing {directory}")
            runs.append(examine(directory, cluster))
        result = summarise(runs)
        if refitted:
            tell("refitting")
            found, result["refit"] = refit(runs)
            write_atomically(refitted, yaml.safe_dump(found.model_dump(mode="json"), sort_keys=False))
    if as_json:
        emit(result)
    else:
        def order(tau: float | None) -> str:
            return "-" if tau is None else f"{tau:.2f}"

        def told(of: dict[str, float] | None) -> list[str]:
            return ["-", "-", "-"] if of is None else [f"{of[what]:.1%}" for what in ("mean", "p95", "max")]

        rows = {"step": {**result["step"], "share": 1.0}, **dict(sorted(result["operations"].items(), key=lambda item: -item[1]["share"]))}
        columns = ["operation", "of the step", *(f"{way}: {what}" for way in ("predicted", "simulated") for what in ("mean", "p95", "max"))]
        table(f"{len(runs)} runs, errors", columns, [
            [name, f"{row['share']:.0%}", *told(row["predicted"]), *told(row["simulated"])] for name, row in rows.items()])  # fmt: skip
        if memory := result["memory"]:
            print(f"memory of the fullest rank: {memory['mean']:.1%} off on average, at most {memory['max']:.1%}")
        print(f"bytes as predicted in {result['bytes_equal']} of {len(runs)} runs, order as scheduled in {result['order_equal']}; a run's "
              f"median epoch comes out again within {result['noise']:.1%}")  # fmt: skip
        if result["rankings"]:
            table("choices", ["question", "strategies", "tau", "chosen", "fastest", "regret"], [
                [one["question"], str(one["strategies"]), order(one["tau"]), one["choice"], one["fastest"], f"{one['regret']:.1%}"]
                for one in result["rankings"]])  # fmt: skip
            ranked = result["ranking"]
            print(f"the choice was right, or within noise, in {ranked['right']:.0%} of {ranked['questions']} questions; regret "
                  f"{ranked['regret']:.1%} on average, tau {order(ranked['tau'])}")  # fmt: skip
        for one in result["doubt"]:
            if one["slower"]:
                print(f"{one['constant']}: {one['slower']:.2f} times as long as predicted, {abs(one['share']):.1%} of the epochs")
        if fitted := result.get("refit"):
            factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in fitted["factors"].items())
            print(f"refit on {len(fitted['fitted'])} runs ({factors}); the other {len(fitted['scored'])} were "
                  f"{fitted['before']['mean']:.1%} off and are {fitted['after']['mean']:.1%} off; written to {refitted}")  # fmt: skip
    if result["bytes_equal"] < len(runs) or result["order_equal"] < len(runs):
        raise typer.Exit(1)


def show_published(path: Path, left_out: bool, as_json: bool) -> None:
    """Errors by metric, winners, and why rows are skipped."""
    from collections import Counter

    from gnnplan.planner.calibrate import calibrated, gave_a_constant, leave_one_out
    from gnnplan.planner.published import read, score
    from gnnplan.progress import progress

    rows = read(path)
    with progress() as tell:
        tell(f"predicting {len(rows):,} figures")
        result = leave_one_out(rows) if left_out else score(rows, gave_a_constant, calibrated)
    if as_json:
        return emit(result)
    summary = dict(result["summary"])
    winner = summary.pop("winner")
    table(f"{len(result['rows'])} of {len(rows)} figures predicted", ["metric", "rows", "mean error", "95 % have at most", "largest"], [
        [metric, str(of["n"]), *(f"{of[what]:.1%}" for what in ("mape", "p95", "max"))] for metric, of in summary.items()])  # fmt: skip
    print(f"the faster of two strategies is named rightly in {winner['right']} of {winner['n']} comparisons that differ by more than 5 %")
    for (paper, why), count in Counter((row["paper"], row["why"]) for row in result["skipped"]).most_common():
        print(f"- {count} of {paper} skipped: {why}")
