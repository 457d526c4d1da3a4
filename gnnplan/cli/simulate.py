"""`gnnplan simulate`: play a plan in virtual time, with noise, or on other clusters.

`simulate` plays one plan; `show_sweep` plans and plays every combination of swept values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gnnplan.cli.common import Json, Set, app, emit, table
from gnnplan.cli.plan import of

if TYPE_CHECKING:
    from gnnplan.planner.decision.search import Candidate
    from gnnplan.planner.problem.problem import Problem
    from gnnplan.planner.strategies import Strategy
    from gnnplan.planner.vocabulary.schedule import Schedule
    from gnnplan.simulator.noise import Noise


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json.")],
    steps: Annotated[
        int,
        typer.Option(
            min=1,
            help="Epochs to play (a full graph: a step each); the last ones are the steady state.",
        ),
    ] = 3,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="What if: a field and its values, as servers=1,2,4,8 or device=dgx_a100,p3_p100 "
            "(the GPU of a preset or file); several: every combination."
        ),
    ] = None,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write what --sweep finds here too."),
    ] = None,
    jitter: Annotated[
        float,
        typer.Option(
            help="Lognormal factors on every computation: their standard deviation, mean 1."
        ),
    ] = 0.0,
    straggler: Annotated[
        list[str] | None,
        typer.Option(help="3=2.0: rank 3 computes twice as long; may be given again."),
    ] = None,
    repetitions: Annotated[
        int,
        typer.Option(min=1, max=100_000, help="How often to play with --jitter or --straggler."),
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of --jitter.")] = 0,
    flows: Annotated[
        bool,
        typer.Option(
            "--flows",
            help="Each message of an exchange has its own max-min fair share of the links, rather "
            "than all of them one (slower to play).",
        ),
    ] = False,
    set_: Set = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a Chrome/Kineto trace per rank here (open it with Perfetto); with --jitter "
            "or --straggler of the first disturbed repetition."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Play a plan's schedule in virtual time, perhaps on another cluster, with jitter or
    stragglers; sweep fields and see where the recommendation changes."""
    from gnnplan.planner.decision.plan import chosen, is_exact, question, read
    from gnnplan.planner.evidence.validate import (
        by_epoch,
        describe_operation,
        per_operation,
        predicted_per_operation,
    )
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.planner.vocabulary.files import make_folder
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.planner.vocabulary.trace import write_traces
    from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_time
    from gnnplan.simulator.flows import ByFlows
    from gnnplan.simulator.noise import Noise, epochs, percentiles, stragglers
    from gnnplan.simulator.player import TaskGraph, critical_path, play, serial
    from gnnplan.simulator.replay import must_be_playable

    slow = stragglers(straggler or [])
    noise = Noise(jitter, slow, seed) if jitter or slow else None
    document = read(plan_file)
    base, strategy, exact = question(document), chosen(document), is_exact(document)
    if sweep is not None:
        if trace or flows:
            raise SpecError(
                f"--{'trace' if trace else 'flows'} is of one simulation, and --sweep plays many;"
                " leave one of them out"
            )
        playing = Playing(steps, noise, repetitions)
        return show_sweep(base, strategy, exact, sweep, set_ or [], playing, csv, as_json)
    if csv is not None:
        raise SpecError("--csv writes what a sweep finds; give it one, as --sweep servers=1,2,4")
    problem, strategy = moved(base, strategy, set_ or [], exact)
    must_be_there(slow, problem.ranks)
    batches = strategy.steps(problem)
    must_be_playable(problem, batches)
    schedule = strategy.schedule(problem, batches)
    must_be_few(len(schedule.tasks), steps, repetitions if noise else None)
    if trace:
        make_folder(trace)
    with progress() as notify:
        notify(f"writing the schedule of {strategy}")
        prediction = strategy.predict(problem)
        if steps > 1:
            schedule = strategy.schedule(problem, steps * batches)
        notify(f"playing {len(schedule.tasks):,} tasks")
        cost = ByFlows.like(problem.cost) if flows else problem.cost
        task_graph = TaskGraph(schedule, cost)
        played = play(schedule, cost, task_graph=task_graph)
        critical_path_s = critical_path(schedule, cost, task_graph)
        serial_s = serial(schedule, cost, task_graph)
        traced = played
        if noise:
            notify(f"playing {len(schedule.tasks):,} tasks {repetitions:,} times")
            disturbed = epochs(schedule, cost, batches, noise, repetitions, task_graph)
            if trace:
                factors = noise.factors(schedule, repetition=0)
                traced = play(schedule, cost, factors=factors, task_graph=task_graph)
    if trace:
        write_traces(
            trace, traced.spans, range(schedule.ranks), schedule.ranks, "simulated", "simulator"
        )
    last_epoch = [task for task in schedule.tasks if task.label.step >= schedule.steps - batches]
    simulated_s = per_operation(by_epoch(played.spans, batches), range(min(1, steps - 1), steps))
    predicted_s = predicted_per_operation(prediction)
    result: dict[str, Any] = {
        "strategy": {"name": strategy.name, **strategy.knobs()},
        "ranks": problem.ranks,
        "steps": schedule.steps,
        "tasks": len(schedule.tasks),
        "simulated": {
            "epoch_s": played.epoch_s(batches),
            "end_s": played.end_s,
            "critical_path_s": critical_path_s,
            "serial_s": serial_s,
            "bytes": schedule.bytes_by_op(last_epoch),
            "operations": simulated_s,
        },
        "predicted": {
            "epoch_s": float(prediction.epoch_s),
            "bytes": prediction.bytes,
            "operations": predicted_s,
        },
        "trace": str(trace) if trace else None,
    }
    if noise:
        result["noise"] = {
            "jitter": noise.jitter,
            "stragglers": {str(rank): times for rank, times in slow.items()},
            "seed": seed,
            "repetitions": repetitions,
            "epochs": len(disturbed),
            **percentiles(disturbed),
        }
    if as_json:
        return emit(result)
    cluster = problem.cluster
    print(
        f"{strategy} on {cluster.name} ({show_count(cluster.servers, 'server')} x"
        f" {cluster.gpus_per_server}), {show_count(steps, 'epoch')}"
        + (f" of {show_count(batches, 'step')}" if batches > 1 else "")
        + f", {show_count(len(schedule.tasks), 'task')}"
    )
    sent = ", ".join(f"{op} {show_bytes(nbytes)}" for op, nbytes in prediction.bytes.items())
    print(
        f"epoch simulated {show_time(played.epoch_s(batches))}, predicted"
        f" {show_time(float(prediction.epoch_s))}; {sent or 'nothing sent'}"
    )
    if noise:
        of_epochs = percentiles(disturbed)
        print(
            f"with {describe_noise(noise)} P50 {show_time(of_epochs['p50_s'])}, P95"
            f" {show_time(of_epochs['p95_s'])} ({len(disturbed):,} epochs in {repetitions:,}"
            " repetitions)"
        )
    rows = [
        [
            describe_operation(name),
            show_time(seconds),
            show_time(predicted_s[name]) if name in predicted_s else "-",
        ]
        for name, seconds in sorted(simulated_s.items(), key=lambda item: -item[1])
    ]
    totals_s = played.epoch_s(batches), float(prediction.epoch_s)
    parts_s = sum(simulated_s.values()), sum(predicted_s.values())
    rows.append(
        [
            "at the same time (-), waiting (+)",
            *(show_time(total - parts) for total, parts in zip(totals_s, parts_s, strict=True)),
        ]
    )
    rows.append(["epoch", *map(show_time, totals_s)])
    table("per epoch, each operation on its slowest rank", ["", "simulated", "predicted"], rows)
    if trace:
        which = f" of the first repetition with {describe_noise(noise)}" if noise else ""
        print(f"traces{which} in {trace}; open them at ui.perfetto.dev")


def moved(
    base: Problem, strategy: Strategy, settings: list[str], exact: bool
) -> tuple[Problem, Strategy]:
    """The plan's problem with --set applied, and its strategy there.

    Ranks keep their GPUs while servers and GPUs per server stay, and are seated anew if another
    field of the cluster changes. On another number of ranks the best variant of the strategy's
    family is taken.
    """
    from gnnplan.planner.decision.search import seated
    from gnnplan.planner.problem.inputs import apply_overrides
    from gnnplan.planner.problem.problem import Problem

    problem = base
    if settings:
        before = base.cluster
        cluster, workload = apply_overrides(before, base.workload, settings)
        same_shape = (cluster.servers, cluster.gpus_per_server) == (
            before.servers,
            before.gpus_per_server,
        )
        seats = base.seats if same_shape else ()
        problem = Problem(base.stats, base.graph, workload, cluster, base.method, seats)
    if problem.ranks != base.ranks:
        strategy = best_of_family(strategy, problem, exact)
    else:
        strategy = strategy.settle(problem)
    strategy.check(problem)
    if problem.cluster != base.cluster:
        problem = seated(problem, strategy)
    return problem, strategy


def best_of_family(strategy: Strategy, problem: Problem, exact: bool) -> Strategy:
    """The fastest variant of the strategy's family for this problem.

    Raises Infeasible where none fits.
    """
    from gnnplan.planner.decision.search import search
    from gnnplan.planner.vocabulary.errors import Infeasible

    found = search(problem, exact, may_use_fewer=False)
    for candidate in found.ranked:
        if candidate.strategy.name == strategy.name:
            return candidate.strategy
    reasons = [reason for name, reason in found.rejected if name.startswith(strategy.name)]
    raise Infeasible(
        f"{strategy.name} cannot run there: {reasons[0] if reasons else 'no variant fits'}"
    )


def must_be_few(tasks: int, steps: int, repetitions: int | None) -> None:
    """Raise SpecError where so many tasks would take minutes to play; None: played once."""
    from gnnplan.planner.vocabulary.errors import SpecError
    from gnnplan.simulator.replay import MOST_TASKS

    if tasks * steps * (repetitions or 1) <= MOST_TASKS:
        return
    most = max(1, MOST_TASKS // tasks)
    if repetitions is None:
        times, less = "", f"--steps {most}"
    else:
        times = f" {repetitions:,} times"
        fewer_steps, fewer_times = min(steps, max(most // 2, 1)), max(most // steps, 1)
        less = f"--steps {fewer_steps} --repetitions {fewer_times}"
    raise SpecError(
        f"--steps {steps:,} of {tasks:,} tasks each{times} are more than {MOST_TASKS:,} tasks;"
        f" use {less} or less"
    )


def must_be_there(slow: Mapping[int, float], ranks: int) -> None:
    """Raise SpecError where a straggler is none of the ranks."""
    from gnnplan.planner.vocabulary.errors import SpecError

    for rank in slow:
        if rank >= ranks:
            raise SpecError(
                f"--straggler {rank}={slow[rank]:g}: there is no rank {rank} (ranks: {ranks},"
                f" counted from 0); use rank {ranks - 1} or less"
            )


def describe_noise(noise: Noise) -> str:
    """The noise in words."""
    words = [f"jitter {noise.jitter:g}"] if noise.jitter else []
    words += [f"rank {rank} {times:g} times as slow" for rank, times in noise.stragglers.items()]
    return " and ".join(words)


@dataclass(frozen=True)
class Playing:
    """How each recommendation of a sweep is played."""

    steps: int
    noise: Noise | None
    repetitions: int

    def __call__(self, candidate: Candidate) -> dict[str, float]:
        """'simulated_s', and percentiles with noise; empty where there are too many tasks."""
        from gnnplan.simulator.noise import epochs, percentiles
        from gnnplan.simulator.player import TaskGraph, play
        from gnnplan.simulator.replay import MOST_TASKS

        problem, strategy = candidate.problem, candidate.strategy
        batches = strategy.steps(problem)
        if batches * problem.ranks > MOST_TASKS:
            return {}
        once: Schedule = strategy.schedule(problem, batches)
        if len(once.tasks) * self.steps * (self.repetitions if self.noise else 1) > MOST_TASKS:
            return {}
        schedule = strategy.schedule(problem, self.steps * batches)
        task_graph = TaskGraph(schedule, problem.cost)
        played = play(schedule, problem.cost, task_graph=task_graph)
        out = {"simulated_s": played.epoch_s(batches)}
        if self.noise:
            out |= percentiles(
                epochs(schedule, problem.cost, batches, self.noise, self.repetitions, task_graph)
            )
        return out


def show_sweep(
    base: Problem,
    strategy: Strategy,
    exact: bool,
    sweep: list[str],
    settings: list[str],
    playing: Playing,
    csv: Path | None,
    as_json: bool,
) -> None:
    """A row per combination of values: the recommendation there and the plan's family."""
    from gnnplan.planner.decision.sweep import axes, changes, points, rows, to_csv
    from gnnplan.planner.evidence.papers.presets import read_fitted
    from gnnplan.planner.vocabulary.files import must_be_writable, write_atomically
    from gnnplan.planner.vocabulary.progress import progress
    from gnnplan.planner.vocabulary.units import show_bytes, show_dollars, show_time

    noise, model = playing.noise, base.workload.model
    if csv:
        must_be_writable(csv)
    swept = axes(sweep)
    asked = points(swept, base, settings, lambda name: read_fitted(name, model)[0])
    for _, problem in asked:
        must_be_there(noise.stragglers if noise else {}, problem.ranks)
    with progress() as notify:
        found = rows(asked, strategy.name, playing, exact, notify)
    turns = changes(swept, found)
    if csv:
        write_atomically(csv, to_csv(swept, found))
    if as_json:
        return emit(
            {
                "sweep": {axis.field: axis.values for axis in swept},
                "strategy": strategy.name,
                "exact": exact,
                "rows": found,
                "changes": turns,
            }
        )

    def shown(row: dict[str, Any], key: str, show: Callable[[float], str]) -> str:
        return show(row[key]) if key in row else "-"

    columns: list[tuple[str, str, Callable[[float], str]]] = [
        ("predicted", "predicted_s", show_time),
        ("simulated", "simulated_s", show_time),
    ]
    if noise:
        columns += [("P50", "p50_s", show_time), ("P95", "p95_s", show_time)]
    columns.append(("bytes", "bytes_total", show_bytes))
    if any("epoch_dollars" in row for row in found):
        columns.append(("$/epoch", "epoch_dollars", show_dollars))
    columns.append((f"{strategy.name} simulated", "plan_simulated_s", show_time))
    fields = [axis.field for axis in swept]
    table(
        f"{', '.join(fields)} swept" + (", exact strategies only" if exact else ""),
        [*fields, "ranks", "recommended", *(column for column, _, _ in columns)],
        [
            [
                *row["at"].values(),
                of(row["gpus"], row["ranks"]) if row["best"] else str(row["ranks"]),
                row["best"] or "nothing fits",
                *(shown(row, key, show) for _, key, show in columns),
            ]
            for row in found
        ],
    )
    for turn in turns:
        others = ", ".join(f"{field}={value}" for field, value in turn["with"].items())
        print(
            f"the recommendation changes from {turn['from']} to {turn['to']} at"
            f" {turn['field']}={turn['value']}{f' (with {others})' if others else ''}"
        )
    if not turns:
        print("the recommendation does not change over these values")
    if csv:
        print(f"written to {csv}")
