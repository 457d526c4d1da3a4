"""A finished run beside its plan: predicted again, played, and compared.

`replay` reads a run's folder. `must_be_playable` refuses what would take too long to play."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gnnplan.planner.decision.candidate import Candidate, evaluate
from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.evidence.recorded import must_be_of_one_plan, read_run
from gnnplan.planner.evidence.runs import Run, same_shape
from gnnplan.planner.evidence.validate import compare
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.trace import Span, read_traces
from gnnplan.planner.vocabulary.units import show_count
from gnnplan.simulator.player import play

MOST_TASKS = 4_000_000  # of a simulation: beyond, it takes minutes and many GB
MOST_EPOCHS = 5  # of a run that are played, or as many as differ


@dataclass(frozen=True)
class Replay:
    """A run, its comparison, and what it was compared from."""

    run: Run
    candidate: Candidate  # the run's plan, predicted again
    measured: list[Span]
    metrics: list[dict[str, Any]]  # the lines of metrics.jsonl
    ranks: list[dict[str, Any]]  # the rank*.json


def replay(directory: Path, cluster: str | None = None) -> Replay:
    """Predict and simulate what a run did, and compare.

    `cluster`: a cluster file whose constants take the place of the plan's. Raises SpecError.
    """
    metrics, ranks = read_run(directory)
    must_be_of_one_plan(directory, ranks)
    measured = read_traces(directory)
    document = read(directory / "plan.json")
    problem = question(document)
    if len(ranks) != problem.ranks:
        raise SpecError(
            f"{directory} has the files of {len(ranks)} of {problem.ranks} ranks (rank*.json,"
            " trace.rank*.json); bring those of all servers into one folder"
        )
    if cluster:
        problem = replace(problem, cluster=same_shape(read_cluster(cluster), problem.cluster))
    candidate = evaluate(problem, chosen(document))
    batches, period = candidate.strategy.steps(problem), candidate.predicted.period
    steps = min(len(metrics), max(MOST_EPOCHS, period + 1)) * batches
    must_be_playable(problem, steps)
    schedule = candidate.strategy.schedule(problem, steps)
    played = play(schedule, candidate.problem.cost)
    recorded, spans = candidate, played.spans
    if any(row.get("replayed") for row in metrics):
        recorded = candidate.launched_one_by_one()
        spans = play(schedule, recorded.problem.cost).spans
    epoch_s = played.epoch_s(batches, period)
    comparison = compare(candidate, recorded, schedule, spans, epoch_s, measured, metrics, ranks)
    run = Run.of(str(directory), candidate, comparison, metrics)
    return Replay(run, candidate, measured, metrics, ranks)


def must_be_playable(problem: Problem, steps: int) -> None:
    """Raise SpecError where so many steps have too many tasks to simulate.

    Every rank has one task in every step at least, so this is known before a schedule is built.
    """
    if steps * problem.ranks > MOST_TASKS:
        raise SpecError(
            f"{show_count(steps, 'batch')} on {show_count(problem.ranks, 'rank')} are more than"
            f" the {MOST_TASKS:,} tasks that can be played; use a larger"
            " batch (--batch, --set batch=...)"
        )
