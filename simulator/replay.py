"""Comparison of a finished run with a new prediction and simulation of its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.plan import chosen, question, read
from gnnplan.planner.evidence.runs import Run, must_be_of_one_plan, read_run, same_shape
from gnnplan.planner.evidence.validate import compare
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.trace import Span, read_traces
from gnnplan.planner.vocabulary.units import show_count
from gnnplan.simulator.player import play

MOST_TASKS = 4_000_000  # limit of a simulation; more tasks take minutes and many GB
MOST_EPOCHS = 5  # number of a run's epochs that are simulated, if no more of them differ


@dataclass(frozen=True)
class Replay:
    """A finished run, compared with the prediction of its plan."""

    run: Run  # with the comparison
    measured: list[Span]
    metrics: list[Json]  # the lines of metrics.jsonl


def replay(directory: Path, cluster: str | Path | Cluster | None = None) -> Replay:
    """Predict and simulate the plan in a run's folder, and compare with the run.

    cluster: a cluster, or its file, whose constants replace those of the plan. Raises SpecError.
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
        other = cluster if isinstance(cluster, Cluster) else read_cluster(str(cluster))
        problem = replace(problem, cluster=same_shape(other, problem.cluster))
    candidate = evaluate(problem, chosen(document))
    batches, period = candidate.strategy.steps(problem), candidate.predicted.period
    steps = min(len(metrics), max(MOST_EPOCHS, period + 1)) * batches
    must_be_playable(problem, steps)
    schedule = candidate.strategy.schedule(problem, steps)
    played = play(schedule, candidate.problem.cost)
    recorded, spans = candidate, played.spans
    if any(row.get("replayed") for row in metrics):
        recorded = candidate.without_cuda_graphs()
        spans = play(schedule, recorded.problem.cost).spans
    epoch_s = played.epoch_s(batches, period)
    comparison = compare(candidate, recorded, schedule, spans, epoch_s, measured, metrics, ranks)
    run = Run.of(str(directory), candidate, comparison, metrics)
    return Replay(run, measured, metrics)


def must_be_playable(problem: Problem, steps: int) -> None:
    """Raise SpecError if `steps` steps have too many tasks to simulate.

    Every rank has at least one task per step, so the check needs no schedule.
    """
    if steps * problem.ranks > MOST_TASKS:
        raise SpecError(
            f"{show_count(steps, 'batch')} on {show_count(problem.ranks, 'rank')} are more than"
            f" the {MOST_TASKS:,} tasks that can be played; use a larger"
            " batch (--batch, --set batch=...)"
        )
