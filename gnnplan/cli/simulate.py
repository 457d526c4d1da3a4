"""`gnnplan simulate`: a plan in virtual time, with noise, on other clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import MOST_TASKS, Json, Set, app, emit, must_be_playable, table
from gnnplan.cli.plan import of

if TYPE_CHECKING:
    from gnnplan.planner.job import Job


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps to play (epochs, if of several batches); the epoch is their steady state.")] = 3,
    sweep: Annotated[list[str] | None, typer.Option(help="What if: a field and its values, as servers=1,2,4,8 or device=dgx_a100,p3_p100 "
                                                    "(the GPU of a preset or file); several: every combination.")] = None,
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write what --sweep finds here too.")] = None,
    jitter: Annotated[float, typer.Option(help="Lognormal factors on every computation: their standard deviation, mean 1.")] = 0.0,
    straggler: Annotated[list[str] | None, typer.Option(help="3=2.0: rank 3 computes twice as long; may be given again.")] = None,
    repetitions: Annotated[int, typer.Option(min=1, max=100_000, help="How often to play with --jitter or --straggler.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of --jitter.")] = 0,
    flows: Annotated[bool, typer.Option("--flows", help="Each message of an exchange has its own max-min fair share of the links, rather "
                                        "than all of them one (slower to play).")] = False,
    set_: Set = None,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome/Kineto trace per rank here (open it with Perfetto).")] = None,
    as_json: Json = False,
) -> None:
    """Play a plan's schedule in virtual time, perhaps on another cluster, with jitter or stragglers; sweep fields and see where the
    recommendation changes."""
    from gnnplan.planner.errors import SpecError
    from gnnplan.planner.files import apply_overrides, make_folder
    from gnnplan.planner.job import Job
    from gnnplan.planner.plan import chosen, question, read
    from gnnplan.planner.search import seated
    from gnnplan.planner.trace import write_traces
    from gnnplan.planner.units import show_bytes, show_time
    from gnnplan.planner.validate import by_epoch, per_operation, predicted_per_operation
    from gnnplan.progress import progress
    from gnnplan.simulator.flows import ByFlows
    from gnnplan.simulator.noise import Noise, epochs, percentiles, stragglers
    from gnnplan.simulator.player import Score, critical_path, play, serial

    slow = stragglers(straggler or [])
    noise = Noise(jitter, slow, seed) if jitter or slow else None
    document = read(plan_file)
    base = question(document)
    strategy = chosen(document)
    if sweep is not None:
        if trace or flows:
            raise SpecError(f"--{'trace' if trace else 'flows'} is of one simulation, and --sweep plays many; leave one of them out")
        return show_sweep(base, strategy, sweep, set_ or [], steps, noise, repetitions, csv, as_json)
    if csv is not None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    cluster, workload = apply_overrides(base.cluster, base.workload, set_ or [])
    job = base
    if set_:
        kept = (cluster.servers, cluster.gpus_per_server) == (base.cluster.servers, base.cluster.gpus_per_server)
        job = Job(base.stats, base.graph, workload, cluster, base.method, base.seats if kept else ())
    strategy = refit(strategy, job) if job.ranks != base.ranks else strategy.settle(job)
    strategy.check(job)
    if job.cluster != base.cluster:
        job = seated(job, strategy)
    must_be_there(slow, job.ranks)
    batches = strategy.steps(job)
    must_be_playable(job, batches)
    schedule = strategy.schedule(job, batches)
    tasks, plays = len(schedule.tasks), repetitions if noise else 1
    if tasks * steps * plays > MOST_TASKS:
        most = max(1, MOST_TASKS // tasks)
        less = f"--steps {most}" if not noise else f"--steps {min(steps, max(most // 2, 1))} --repetitions {max(most // steps, 1)}"
        times = f" {plays:,} times" if noise else ""
        raise SpecError(f"--steps {steps:,} of {tasks:,} tasks each{times} are more than {MOST_TASKS:,} tasks; use {less} or less")
    if trace:
        make_folder(trace)
    with progress() as tell:
        tell(f"writing {strategy}'s schedule")
        prediction, schedule = strategy.predict(job), schedule if steps == 1 else strategy.schedule(job, steps * batches)
        tell(f"playing {len(schedule.tasks):,} tasks")
        cost = ByFlows.like(job.cost) if flows else job.cost
        score = Score(schedule, cost)
        played = play(schedule, cost, score=score)
        path, alone = critical_path(schedule, cost, score), serial(schedule, cost, score)
        if noise:
            tell(f"playing {len(schedule.tasks):,} tasks {repetitions:,} times")
            noisy = epochs(schedule, cost, batches, noise, repetitions, score)
    last = [task for task in schedule.tasks if task.label.step >= schedule.steps - batches]
    if trace:
        write_traces(trace, played.spans, range(schedule.ranks), schedule.ranks, "simulated", "simulator")
    result = {
        "strategy": {"name": strategy.name, **strategy.knobs()}, "ranks": job.ranks, "steps": schedule.steps, "tasks": len(schedule.tasks),
        "simulated": {"epoch_s": played.epoch_s(batches), "end_s": played.end_s, "critical_path_s": path, "serial_s": alone,
                      "bytes": schedule.bytes_by_op(last),
                      "operations": per_operation(by_epoch(played.spans, batches), range(min(1, steps - 1), steps))},
        "predicted": {"epoch_s": float(prediction.epoch_s), "bytes": prediction.bytes, "operations": predicted_per_operation(prediction)},
        "trace": str(trace) if trace else None,
    }  # fmt: skip
    if noise:
        result["noise"] = {"jitter": noise.jitter, "stragglers": {str(rank): times for rank, times in slow.items()}, "seed": seed,
                           "repetitions": repetitions, "epochs": len(noisy), **percentiles(noisy)}  # fmt: skip
    if as_json:
        return emit(result)
    print(f"{strategy} on {job.cluster.name} ({job.cluster.servers} x {job.cluster.gpus_per_server}), {schedule.steps} steps, "
          f"{len(schedule.tasks):,} tasks")  # fmt: skip
    print(f"epoch simulated {show_time(played.epoch_s(batches))}, predicted {show_time(float(prediction.epoch_s))}; "
          f"{', '.join(f'{k} {show_bytes(v)}' for k, v in prediction.bytes.items()) or 'nothing sent'}")  # fmt: skip
    if noise:
        found = result["noise"]
        print(f"with {told_noise(noise)} P50 {show_time(found['p50_s'])}, P95 {show_time(found['p95_s'])} "
              f"({found['epochs']:,} epochs in {repetitions:,} repetitions)")  # fmt: skip
    told = result["predicted"]["operations"]
    longest = sorted(result["simulated"]["operations"].items(), key=lambda item: -item[1])
    rows = [[name, show_time(seconds), show_time(told[name]) if name in told else "-"] for name, seconds in longest]
    table("seconds per step (slowest rank)", ["operation", "simulated", "predicted"], rows)
    if trace:
        print(f"traces in {trace}; open them at ui.perfetto.dev")


def refit(strategy: Any, job: Job) -> Any:
    """The same family where the number of ranks has changed: its best variant there."""
    from gnnplan.planner.search import search

    found = search(job, may_use_fewer=False)
    same = [c.strategy for c in found.ranked if c.strategy.name == strategy.name]
    if same:
        return same[0]
    from gnnplan.planner.errors import Infeasible

    reasons = [reason for name, reason in found.rejected if name.startswith(strategy.name)]
    raise Infeasible(f"{strategy.name} cannot run there: {reasons[0] if reasons else 'no variant fits'}")


def must_be_there(slow: Mapping[int, float], ranks: int) -> None:
    from gnnplan.planner.errors import SpecError

    for rank in slow:
        if rank >= ranks:
            raise SpecError(f"--straggler {rank}={slow[rank]:g}: there is no rank {rank} (ranks: {ranks}, counted from 0); use rank "
                            f"{ranks - 1} or less")  # fmt: skip


def told_noise(noise: Any) -> str:
    """In words."""
    words = [f"jitter {noise.jitter:g}"] if noise.jitter else []
    return " and ".join([*words, *(f"rank {rank} {times:g} times as slow" for rank, times in noise.stragglers.items())])


def show_sweep(base: Job, strategy: Any, sweep: list[str], settings: list[str], steps: int, noise: Any, repetitions: int, csv: Path | None,
               as_json: bool) -> None:  # fmt: skip
    """A row per combination of values: the recommendation there and the plan's family."""
    from gnnplan.planner.files import must_be_writable, write_atomically
    from gnnplan.planner.sweep import axes, changes, points, rows, to_csv
    from gnnplan.planner.units import show_bytes, show_dollars, show_time
    from gnnplan.progress import progress
    from gnnplan.simulator.noise import epochs, percentiles
    from gnnplan.simulator.player import Score, play

    def playing(candidate: Any) -> dict[str, float]:
        batches = candidate.strategy.steps(candidate.job)
        if batches * candidate.job.ranks > MOST_TASKS:
            return {}
        once = candidate.strategy.schedule(candidate.job, batches)
        if len(once.tasks) * steps * (repetitions if noise else 1) > MOST_TASKS:
            return {}
        schedule = candidate.strategy.schedule(candidate.job, steps * batches)
        score = Score(schedule, candidate.job.cost)
        out = {"simulated_s": play(schedule, candidate.job.cost, score=score).epoch_s(batches)}
        return out | (percentiles(epochs(schedule, candidate.job.cost, batches, noise, repetitions, score)) if noise else {})

    if csv:
        must_be_writable(csv)
    swept = axes(sweep)
    asked = points(swept, base, settings)
    for _, job in asked:
        must_be_there(noise.stragglers if noise else {}, job.ranks)
    with progress() as tell:
        found = rows(asked, strategy.name, playing, tell)
    turns = changes(swept, found)
    if csv:
        write_atomically(csv, to_csv(swept, found))
    if as_json:
        return emit({"sweep": {axis.field: axis.values for axis in swept}, "strategy": strategy.name, "rows": found, "changes": turns})

    def shown(row: dict[str, Any], key: str, show: Callable[[float], str]) -> str:
        return show(row[key]) if key in row else "-"

    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("predicted", "predicted_s", show_time), ("simulated", "simulated_s", show_time),
        *([("P50", "p50_s", show_time), ("P95", "p95_s", show_time)] if noise else []), ("bytes", "bytes_total", show_bytes),
        *([("$/epoch", "epoch_dollars", show_dollars)] if any("epoch_dollars" in row for row in found) else []),
        (f"{strategy.name} simulated", "plan_simulated_s", show_time)]  # fmt: skip
    fields = [axis.field for axis in swept]
    table(f"{', '.join(fields)} swept", [*fields, "ranks", "recommended", *(column for column, _, _ in columns)], [
        [*row["at"].values(), of(row["gpus"], row["ranks"]) if row["best"] else str(row["ranks"]), row["best"] or "nothing fits",
         *(shown(row, key, show) for _, key, show in columns)] for row in found])  # fmt: skip
    for turn in turns:
        others = ", ".join(f"{field}={value}" for field, value in turn["with"].items())
        print(f"the recommendation changes from {turn['from']} to {turn['to']} at {turn['field']}={turn['value']}"
              f"{f' (with {others})' if others else ''}")  # fmt: skip
    if not turns:
        print("the recommendation does not change over these values")
    if csv:
        print(f"written to {csv}")
