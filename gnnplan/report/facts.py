"""The input of a report's pictures, and what all pictures share: class, colours, units, sizes.

The input is the plan, predicted and simulated again, and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.candidate import Candidate, evaluate
from gnnplan.planner.evidence.runs import question_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.text import Table
from gnnplan.planner.vocabulary.trace import Span
from gnnplan.planner.vocabulary.units import show_count
from gnnplan.simulator.player import play
from gnnplan.simulator.replay import Replay, must_be_playable, replay

MOST_TASKS = 400_000  # most tasks to simulate, which takes some seconds


class Absent(Exception):
    """The reason why a picture of this plan cannot be drawn, which the page shows."""


@dataclass(frozen=True)
class Facts:
    """A plan, and runs of the same graph, workload, cluster and partitioner."""

    document: Json  # the content of plan.json
    candidate: Candidate  # the plan's choice, predicted again
    runs: list[Replay]

    @property
    def problem(self) -> Problem:
        return self.candidate.problem

    @property
    def same(self) -> list[Replay]:
        """The runs of the plan's own strategy."""
        return [one for one in self.runs if one.run.strategy == str(self.candidate.strategy)]

    @property
    def batches(self) -> int:
        """The number of steps per epoch."""
        return self.candidate.strategy.steps(self.problem)

    @property
    def epoch(self) -> Schedule:
        """The schedule of one epoch. Raises Absent if it has too many tasks."""
        return self._schedule(self.batches)

    @property
    def simulated(self) -> list[Span]:
        """The spans of a few steps; the last step is in the steady state. Raises Absent."""
        schedule = self._schedule(3 if self.batches == 1 else min(self.batches, 6))
        notify("playing the schedule")
        return play(schedule, self.problem.cost).spans

    def _schedule(self, steps: int) -> Schedule:
        try:
            must_be_playable(self.problem, steps)
        except SpecError as error:
            raise Absent(str(error)) from error
        schedule = self.candidate.strategy.schedule(self.problem, steps)
        if len(schedule.tasks) > MOST_TASKS:
            raise Absent(
                f"{show_count(steps, 'step')} have {len(schedule.tasks):,} tasks, more than"
                f" {MOST_TASKS:,}"
            )
        return schedule


def gather(plan: Json | str | Path, folders: Sequence[str | Path]) -> Facts:
    """Read a plan and finished runs.

    Raises SpecError if the plan or a run cannot be read, or if a run is of another graph, workload,
    cluster or partitioner.
    """
    notify("reading the plan")
    document = plan if isinstance(plan, dict) else plans.read(plan)
    problem = plans.question(document)
    for field in ("alternatives", "summary"):
        if field not in document:
            raise SpecError(f"the plan has no {field}; make it again with `gnnplan plan`")
    runs = []
    for folder in folders:
        notify("comparing runs", str(folder))
        run = replay(Path(folder))
        if question_of(run.run.planned.problem) != question_of(problem):
            raise SpecError(
                f"{folder} is a run of another question (graph, workload, cluster or partitioner);"
                " give runs of this plan, as `gnnplan run plan.json --out"
                f" {quote(str(folder))}` makes them"
            )
        runs.append(run)
    return Facts(document, evaluate(problem, plans.chosen(document)), runs)


# -- pictures --------------------------------------------------------------------------------------


COMPUTATION, COMMUNICATION, WAITING = "#4c78a8", "#f58518", "#9d9d9d"
MEASURED = "#e45756"
# plotly's T10: readable on white and on black
COLOURS = (
    *("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#72b7b2"),
    *("#e45756", "#eeca3b", "#9d755d", "#ff9da6", "#bab0ac"),
)
TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
MOST_READ = 3  # rows of the table in the text for screen readers


@dataclass(frozen=True)
class Picture:
    """A figure with a caption, and the figure's numbers as a table."""

    key: str  # id of the figure's element in the page
    see: str  # caption: sentences that say what the figure shows
    figure: Any  # plotly's
    numbers: Table
    title: str = ""

    @property
    def alt(self) -> str:
        """The text for screen readers: the first numbers, and where to find all numbers."""
        read = "; ".join(
            ", ".join(map(" ".join, zip(self.numbers.columns, row, strict=True)))
            for row in self.numbers.rows[:MOST_READ]
        )
        return f"{self.title}: {read}. All numbers are in the table below."


def figure(traces: Any, height: int, **layout: Any) -> Any:
    """Return a figure as wide as the page, without zoom, from plotly traces or a plotly figure.

    The figure has no template: page.html sets the light or the dark template.
    """
    import plotly.graph_objects as go  # absent unless the extra [report] is installed

    out = go.Figure(traces)
    out.update_layout(
        template=None,
        height=height,
        autosize=True,
        margin={"l": 8, "r": 8, "t": 36, "b": 8},
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal"},
        font_size=12,
        dragmode=False,
    )
    out.update_xaxes(automargin=True, fixedrange=True)
    out.update_yaxes(automargin=True, fixedrange=True)
    return out.update_layout(**layout)


def unit_of(most: float, units: Sequence[tuple[float, str]]) -> tuple[str, float]:
    """Return the unit for numbers up to `most`, and the factor from seconds or bytes to that unit.

    >>> unit_of(0.3, TIMES), unit_of(3e9, SIZES)
    (('ms', 1000.0), ('GB', 1e-09))
    """
    size, unit = next((pair for pair in units if most >= pair[0]), units[-1])
    return unit, 1 / size
