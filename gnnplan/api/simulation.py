"""`Plan.simulate` simulates a plan in virtual time; `Plan.sweep` plans and simulates every
combination of values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gnnplan.api.arguments import Overrides, settings_of, several, text_of, value_of
from gnnplan.api.view import TextBlock, View, of
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.search import Search
from gnnplan.planner.decision.sweep import axes, changes, points, rows, to_csv
from gnnplan.planner.evidence.validate import (
    by_epoch,
    bytes_by_epoch,
    describe_operation,
    per_operation,
    predicted_per_operation,
)
from gnnplan.planner.problem.inputs import read_fitted
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Prediction, Strategy
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.files import Json, make_folder, write_atomically
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.text import Table, cell, column, table
from gnnplan.planner.vocabulary.trace import write_traces
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_dollars, show_time
from gnnplan.simulator.network import ByFlows
from gnnplan.simulator.noise import Noise, epochs, percentiles
from gnnplan.simulator.player import TaskGraph, Timeline
from gnnplan.simulator.replay import MOST_TASKS, must_be_playable


@dataclass(frozen=True)
class Playing:
    """The settings of a simulation, as `Plan.simulate` documents them. Raises SpecError."""

    steps: int = 3
    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"steps": 1, "repetitions": 1, "seed": 0}
        for name, number in least.items():
            if value_of(name, getattr(self, name), int) < number:
                raise SpecError(f"{name} must be {number} or more, not {getattr(self, name)}")
        value_of("jitter", self.jitter, float)
        for rank, times in self.stragglers.items():
            value_of("a straggler's rank", rank, int)
            value_of(f"the time of straggler {rank}", times, float)
        _ = self.noise

    @property
    def noise(self) -> Noise | None:
        """The noise on computations; None if there is no jitter and no straggler."""
        disturbed = self.jitter or self.stragglers
        return Noise(self.jitter, self.stragglers, self.seed) if disturbed else None

    @property
    def times(self) -> int:
        """The number of times that a schedule is simulated."""
        return self.repetitions if self.noise else 1

    def must_be_of(self, ranks: int) -> None:
        """Raise SpecError if a straggler's rank is not below `ranks`."""
        for rank, times in self.stragglers.items():
            if rank >= ranks:
                raise SpecError(
                    f"--straggler {rank}={times:g}: there is no rank {rank} (ranks: {ranks},"
                    f" counted from 0); use rank {ranks - 1} or less"
                )

    def must_be_short(self, tasks: int) -> None:
        """Raise SpecError if a simulation with `tasks` tasks per epoch would take minutes."""
        if tasks > MOST_TASKS:
            raise SpecError(
                f"an epoch has {tasks:,} tasks, and at most {MOST_TASKS:,} are played, so not even"
                " --steps 1; take the plan's prediction, or play a plan with a larger --batch or on"
                " fewer --ranks"
            )
        steps = min(self.steps, MOST_TASKS // tasks)
        times = min(self.times, MOST_TASKS // (tasks * steps))
        if (steps, times) != (self.steps, self.times):
            repeated = f" {self.repetitions:,} times" if self.noise else ""
            less = f"--steps {steps}" + (f" --repetitions {times}" if self.noise else "")
            raise SpecError(
                f"--steps {self.steps:,} of {tasks:,} tasks each{repeated} are more than"
                f" {MOST_TASKS:,} tasks; use {less} or less"
            )

    def schedule(self, candidate: Candidate) -> Schedule:
        """Return the schedule to simulate. Raises SpecError if simulating it would take minutes."""
        problem, strategy = candidate.problem, candidate.strategy
        batches = strategy.steps(problem)
        must_be_playable(problem, batches)
        schedule: Schedule = strategy.schedule(problem, batches)
        self.must_be_short(len(schedule.tasks))
        return strategy.schedule(problem, self.steps * batches) if self.steps > 1 else schedule

    def __call__(self, candidate: Candidate) -> dict[str, float]:
        """Return 'simulated_s', with noise also percentiles; {} if there are too many tasks."""
        try:
            schedule = self.schedule(candidate)
        except SpecError:
            return {}
        batches, cost = candidate.strategy.steps(candidate.problem), candidate.problem.cost
        tasks = TaskGraph(schedule, cost)
        played = tasks.play()
        out = {"simulated_s": played.epoch_s(batches, candidate.predicted.period)}
        if noise := self.noise:
            found = epochs(tasks, batches, noise, self.repetitions)
            out |= percentiles(found)
        return out


class Simulation(View):
    """The result of a simulation: `epoch_s`, and simulated and predicted seconds per operation."""

    def __init__(
        self, candidate: Candidate, playing: Playing, flows: bool, trace: Path | None
    ) -> None:
        steps, noise, repetitions = playing.steps, playing.noise, playing.repetitions
        problem, strategy, prediction = candidate.problem, candidate.strategy, candidate.predicted
        playing.must_be_of(problem.ranks)
        notify(f"writing the schedule of {strategy}")
        batches, schedule = strategy.steps(problem), playing.schedule(candidate)
        if trace:
            if (trace / "metrics.jsonl").exists():
                raise SpecError(
                    f"{trace} holds a run, whose traces would be lost; give another folder"
                )
            make_folder(trace)
        steady, too_little = range(min(1, steps - 1), steps), ""
        try:
            candidate.must_fit()
        except Infeasible as why:
            too_little = str(why)
        period, over = prediction.period, prediction.over(steady)
        notify(f"playing {len(schedule.tasks):,} tasks")
        cost = ByFlows.like(problem.cost) if flows else problem.cost
        tasks = TaskGraph(schedule, cost)
        played = tasks.play()
        traced, disturbed = played, Json()
        if noise:
            notify(f"playing {len(schedule.tasks):,} tasks {repetitions:,} times")
            found = epochs(tasks, batches, noise, repetitions)
            disturbed["noise"] = {
                "jitter": noise.jitter,
                "stragglers": {str(rank): times for rank, times in noise.stragglers.items()},
                "seed": noise.seed,
                "repetitions": repetitions,
                "epochs": len(found),
                **percentiles(found),
            }
            if trace:
                factors = noise.factors(schedule, repetition=0)
                traced = tasks.play(factors=factors)
        if trace:
            ranks = range(schedule.ranks)
            write_traces(trace, traced.spans, ranks, schedule.ranks, "simulated", "simulator")
        last = [task for task in schedule.tasks if task.label.step >= schedule.steps - batches]
        self.document: Json = {
            "strategy": {"name": strategy.name, **strategy.knobs()},
            "ranks": problem.ranks,
            "steps": schedule.steps,
            "tasks": len(schedule.tasks),
            "simulated": {
                "epoch_s": played.epoch_s(batches, period),
                "end_s": played.end_s,
                "critical_path_s": tasks.play(contention=False).end_s,
                "serial_s": tasks.serial_s,
                "bytes": schedule.bytes_by_op(last),
                "operations": per_operation(by_epoch(played.spans, batches), steady, period),
            },
            "predicted": {
                "epoch_s": float(over.epoch_s),
                "bytes": prediction.at(steps - 1).bytes,  # of the last epoch, as the simulated ones
                "operations": predicted_per_operation(over),
            },
            "trace": str(trace) if trace else None,
            "too_little": too_little,
        }
        if period > 1:
            self.document["epochs"] = _epoch_by_epoch(schedule, played, prediction, batches, steady)
        self.document |= disturbed
        cluster, self._steps, self._batches = problem.cluster, steps, batches
        self._period = period
        some = problem.ranks < cluster.ranks
        part = f"{of(problem.ranks, cluster.ranks)} ranks of " if some else ""
        self._title = (
            f"{strategy} on {part}{cluster.name} ({show_count(cluster.servers, 'server')} x"
            f" {cluster.gpus_per_server})"
        )

    @property
    def epoch_s(self) -> float:
        """The simulated time of an epoch [s]."""
        return float(self.document["simulated"]["epoch_s"])

    def blocks(self) -> list[TextBlock]:
        simulated, predicted = self.document["simulated"], self.document["predicted"]
        of_steps = f" of {show_count(self._batches, 'step')}" if self._batches > 1 else ""
        sent = ", ".join(f"{op} {show_bytes(size)}" for op, size in predicted["bytes"].items())
        totals_s = simulated["epoch_s"], predicted["epoch_s"]
        lines: list[TextBlock] = [
            f"{self._title}, {show_count(self._steps, 'epoch')}{of_steps},"
            f" {show_count(self.document['tasks'], 'task')}",
            f"epoch simulated {show_time(totals_s[0])}, predicted {show_time(totals_s[1])};"
            f" {sent or 'nothing sent'}",
        ]
        if each := self.document.get("epochs"):
            lines.append(
                table(
                    f"epochs differ, and repeat after {self._period}",
                    each,
                    column("epoch"),
                    column("simulated", "simulated_s", show_time),
                    column("predicted", "predicted_s", show_time),
                    column("bytes simulated", "simulated_bytes", show_bytes),
                    column("bytes predicted", "predicted_bytes", show_bytes),
                )
            )
        if self.document["too_little"]:
            lines.append(f"it would not run there: {self.document['too_little']}")
        noise = self.document.get("noise")
        if noise:
            lines.append(
                f"with {describe_noise(noise)} P50 {show_time(noise['p50_s'])}, P95"
                f" {show_time(noise['p95_s'])} ({noise['epochs']:,} epochs in"
                f" {noise['repetitions']:,} repetitions)"
            )
        simulated_s, predicted_s = simulated["operations"], predicted["operations"]
        cells = [
            [describe_operation(name), show_time(s), cell(predicted_s.get(name), show_time)]
            for name, s in sorted(simulated_s.items(), key=lambda item: -item[1])
        ]
        parts_s = sum(simulated_s.values()), sum(predicted_s.values())
        rest = [show_time(all_ - some) for all_, some in zip(totals_s, parts_s, strict=True)]
        cells.append(["at the same time (-), waiting (+)", *rest])
        cells.append(["epoch", *map(show_time, totals_s)])
        undisturbed = " undisturbed," if noise else ""
        title = f"per epoch,{undisturbed} each operation on its slowest rank"
        lines.append(Table(title, ["", "simulated", "predicted"], cells))
        if trace := self.document["trace"]:
            which = f" of the first repetition with {describe_noise(noise)}" if noise else ""
            lines.append(f"traces{which} in {trace}; open them at ui.perfetto.dev")
        return lines


def _epoch_by_epoch(
    schedule: Schedule, played: Timeline, prediction: Prediction, batches: int, epochs: range
) -> list[Json]:
    """Return seconds and bytes of each of these epochs, for a strategy whose epochs differ."""
    sent = bytes_by_epoch(schedule, batches)
    return [
        {
            "epoch": epoch + 1,
            "simulated_s": seconds,
            "predicted_s": float(prediction.at(epoch).epoch_s),
            "simulated_bytes": sent[epoch],
            "predicted_bytes": prediction.at(epoch).bytes_total,
        }
        for epoch, seconds in zip(epochs, played.epochs_s(batches), strict=True)
    ]


class Sweep(View):
    """The result of a sweep: `rows`, the recommendation at every combination of values, and
    `changes`, where the recommendation changes."""

    def __init__(
        self,
        base: Problem,
        strategy: Strategy,
        how: Search,
        fields: Mapping[str, Any] | Iterable[str],
        playing: Playing,
        overrides: Overrides,
    ) -> None:
        if isinstance(fields, Mapping):
            fields = [f"{field}={text_of(values)}" for field, values in fields.items()]
        self.axes, self.strategy, self.exact = axes(several(fields)), strategy.name, how.exact
        settings, model = settings_of(overrides), base.workload.model
        asked = points(self.axes, base, settings, lambda name: read_fitted(name, model)[0])
        for _, problem in asked:
            playing.must_be_of(problem.ranks)
        self.rows = rows(asked, strategy, base, playing, how)
        self.changes = changes(self.axes, self.rows)
        self.document = {
            "sweep": self.axes,
            "strategy": self.strategy,
            "exact": self.exact,
            "rows": self.rows,
            "changes": self.changes,
        }

    def to_csv(self, path: str | Path) -> None:
        """Write the rows as CSV."""
        write_atomically(Path(path), to_csv(self.axes, self.rows))

    def blocks(self) -> list[TextBlock]:
        def where(name: str, title: str, show: Callable[[float], str]) -> Any:
            """Return the column `name`, or None if no row has it."""
            return column(title, name, show) if any(name in row for row in self.rows) else None

        found = table(
            f"{', '.join(self.axes)} swept" + (", exact strategies only" if self.exact else ""),
            self.rows,
            *((field, lambda row, field=field: row["at"][field]) for field in self.axes),
            (
                "used" if "ranks" in self.axes else "ranks",
                lambda row: of(row.get("gpus") or row["ranks"], row["ranks"]),
            ),
            ("recommended", lambda row: row["best"] or "nothing fits"),
            column("predicted", "predicted_s", show_time),
            column("simulated", "simulated_s", show_time),
            where("p50_s", "P50", show_time),
            where("p95_s", "P95", show_time),
            column("bytes", "bytes_total", show_bytes),
            where("epoch_dollars", "$/epoch", show_dollars),
            column(f"of {self.strategy}", "plan"),
            column("simulated", "plan_simulated_s", show_time),
        )
        lines = []
        for turn in self.changes:
            others = ", ".join(f"{field}={value}" for field, value in turn["with"].items())
            lines.append(
                f"the recommendation changes from {turn['from']} to {turn['to']} at"
                f" {turn['field']}={turn['value']}{f' (with {others})' if others else ''}"
            )
        return [found, *(lines or ["the recommendation does not change over these values"])]


def describe_noise(noise: Mapping[str, Any]) -> str:
    """Return the noise of a simulation's document in words."""
    words = [f"jitter {noise['jitter']:g}"] if noise["jitter"] else []
    words += [f"rank {rank} {times:g} times as slow" for rank, times in noise["stragglers"].items()]
    return " and ".join(words)
