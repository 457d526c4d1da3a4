"""The input of a report's pictures: the plan, predicted and simulated again, and its runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.candidate import Candidate, evaluate
from gnnplan.planner.evidence.runs import question_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.schedule import Schedule
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

    document: dict[str, Any]  # the content of plan.json
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


def gather(plan: dict[str, Any] | str | Path, folders: Sequence[str | Path]) -> Facts:
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
                f" give runs of this plan, as `gnnplan run plan.json --out {folder}` makes them"
            )
        runs.append(run)
    return Facts(document, evaluate(problem, plans.chosen(document)), runs)
