"""Checks of a run on real ranks: the order of operations is the schedule's, bytes and memory are as
predicted, and a resumed run equals an uninterrupted run.

The tests take a fixture `played`: a run with its schedule and prediction.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.evidence.runs import summed
from gnnplan.planner.evidence.validate import REPORT, bytes_by_epoch, compare, rank_bytes
from gnnplan.planner.vocabulary.schedule import Collective, Copy, Send
from gnnplan.planner.vocabulary.trace import (
    BELOW,
    LANES,
    place_of,
    read_traces,
    recorded_order,
    transfer_times,
    write_traces,
)
from gnnplan.simulator.player import play
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case, Ranks, Result


class FinishedRun:
    """A run with its schedule and prediction. The run evaluates after every epoch, which must
    change neither order nor bytes."""

    def __init__(self, result: Result) -> None:
        self.result, self.world, self.epochs = result, result.world, result.case.epochs
        problem = result.case.problem(result.world)
        strategy = result.case.settled(problem)
        self.steps, self.candidate = strategy.steps(problem), Candidate.of(problem, strategy)
        self.schedule = strategy.schedule(problem, result.case.epochs * self.steps)
        self.prediction = self.candidate.predicted
        # mini-batches sample other edges in every epoch; the prediction is for the first epoch
        self.resamples = strategy.mode == "mini"
        self.spans, self.ranks = result.spans, [result.rank(rank) for rank in range(self.world)]


def test_order_of_operations(played: FinishedRun) -> None:
    """Check the order per rank and lane, of the set-up and of every step."""
    lanes = {span.lane for span in played.spans}
    assert all(place_of(lane) < BELOW for lane in lanes)
    for rank in range(played.world):
        for lane in lanes.union(LANES):
            labels = recorded_order(played.spans, rank, lane)
            recorded = [label for label in labels if not label.endswith(":s-1")]
            planned = [str(task.label) for task in played.schedule.lane(rank, lane)]
            assert recorded == planned, (rank, lane)
        once = [span.label for span in played.spans if span.rank == rank and span.step < 0]
        assert once == [str(task.label) for task in played.schedule.setup if task.rank == rank]


def test_nothing_starts_before_what_it_waits_for(played: FinishedRun) -> None:
    """On its own rank, by the schedule's arrows; those into earlier steps are what staleness
    means."""
    spans = {(span.rank, span.label): span for span in played.spans}
    arrows = 0
    for task in played.schedule.tasks:
        for before in task.after:
            if before.step >= 0:
                arrows += 1
                first, then = spans[task.rank, str(before)], spans[task.rank, str(task.label)]
                assert first.end <= then.start, (
                    f"{then.label} of rank {task.rank} began before {first.label} had ended"
                )
    assert arrows


def test_bytes_of_every_operation(played: FinishedRun) -> None:
    """Counted = scheduled per rank and operation = predicted in all; spans carry the same."""
    counted: Counter[str] = Counter()
    tasks, bytes_of = played.schedule.tasks, played.schedule.bytes_by_op
    for rank, left in enumerate(played.ranks):
        assert left["bytes"] == +Counter(bytes_of(task for task in tasks if task.rank == rank))
        counted.update(left["bytes"])
    if played.resamples:
        first = bytes_of(task for task in tasks if task.label.step < played.steps)
        assert +Counter(first) == +Counter(played.prediction.bytes)
    else:
        predicted: Counter[str] = Counter()
        for epoch in range(played.epochs):
            predicted.update(played.prediction.at(epoch).bytes)
        assert counted == +predicted
    spans = {(span.rank, span.label): span.nbytes for span in played.spans}
    for task in played.schedule.setup + played.schedule.tasks:
        expected = task.work.nbytes if isinstance(task.work, (Copy, Send, Collective)) else 0
        assert spans[task.rank, str(task.label)] == expected, (task.rank, str(task.label))


def test_set_up_bytes(played: FinishedRun) -> None:
    counted = summed(played.ranks, "setup_bytes")
    assert counted.total() == played.prediction.setup_bytes
    assert counted == +Counter(played.schedule.bytes_by_op(played.schedule.setup))


def test_evaluation_is_not_counted(played: FinishedRun) -> None:
    """Check that metrics.jsonl counts only the bytes of training, not of evaluation."""
    sent = bytes_by_epoch(played.schedule, played.steps)
    of_epoch = [sent[epoch] for epoch in range(played.epochs)]
    assert [row["bytes"] for row in played.result.metrics] == of_epoch
    known = 1 if played.resamples else played.epochs
    assert of_epoch[:known] == [played.prediction.at(e).bytes_total for e in range(known)]
    metric = played.result.case.problem(played.world).metric
    assert all(row[f"val_{metric}"] is not None for row in played.result.metrics)


def test_validate_finds_no_fault(played: FinishedRun) -> None:
    """Check that `compare` finds equal bytes and order, and suggests no bug report."""
    simulated = play(played.schedule, played.candidate.problem.cost)
    epoch_s = simulated.epoch_s(played.steps, played.prediction.period)
    measured = played.spans, played.result.metrics, played.ranks
    found = played.candidate, played.candidate, played.schedule, simulated.spans, epoch_s
    told = compare(*found, *measured)
    assert told["bytes"]["equal"] and told["order"]["equal"], told["diagnosis"]
    assert REPORT not in told["diagnosis"]


def test_a_measured_trace_survives_its_file(played: FinishedRun, tmp_path: Path) -> None:
    write_traces(tmp_path, played.spans, range(played.world), played.world, "measured", "gloo")
    assert read_traces(tmp_path) == played.spans
    assert all(span.start <= span.end for span in played.spans)
    tasks = played.schedule.setup + played.schedule.tasks
    collectives = {
        str(task.label) for task in tasks if isinstance(task.work, Collective) and task.work.nbytes
    }
    assert set(transfer_times(played.spans)) == collectives


def must_resume(run_ranks: Ranks, unbroken: Result) -> None:
    """Check that the run's case, interrupted two epochs before its end and one epoch after its
    checkpoint, resumes bit by bit to the run."""
    case = unbroken.case
    shorter = replace(case, epochs=case.epochs - 2, checkpoint_every=2)
    broken = run_ranks(unbroken.world, shorter)
    # there is something left to learn
    assert not all(torch.equal(broken.weights[name], p) for name, p in unbroken.weights.items())
    onwards = replace(case, checkpoint_every=0, resume=str(broken.out))
    same(run_ranks(unbroken.world, onwards), unbroken)


def same(broken: Result, unbroken: Result) -> None:
    """Check that two runs have equal weights and equal files, but for times and process memory."""
    weights = unbroken.weights
    assert broken.weights.keys() == weights.keys() and all(
        torch.equal(broken.weights[name], p) for name, p in weights.items()
    )
    of_its_own = {"epoch_s": None, "peak_memory_bytes": None}
    timeless = [[row | of_its_own for row in run.metrics] for run in (broken, unbroken)]
    assert timeless[0] == timeless[1]
    for rank in range(unbroken.world):
        one, other = broken.rank(rank), unbroken.rank(rank)
        assert len(one["rss_bytes"]) == one["epochs"] == other["epochs"]
        assert all(
            one[name] == other[name]
            for name in ("bytes", "setup_bytes", "rows", "staleness", "gradient_errors")
        )
        for lane in ("compute", "copy", "comm", "reduce"):
            assert recorded_order(broken.spans, rank, lane) == recorded_order(
                unbroken.spans, rank, lane
            )


def must_fill_as_predicted(world: int, case: Case, fresh_ranks: Ranks) -> None:
    """Compare the fullest rank's memory to 5 %, and every rank's to 8 %. Runs take 30 to 200 MB, so
    that Python's own objects are small in comparison. Buffers that a step keeps for the next step
    exist from the second epoch on. On a busy machine the sampling of memory misses short peaks, so
    every epoch is sampled."""
    case = replace(case, epochs=6)
    result = fresh_ranks(world, case)
    problem = case.problem(world)
    use = case.settled(problem).memory(problem)
    predicted = rank_bytes(use)
    measured = np.array([result.rank(rank)["peak_bytes"] for rank in range(world)])
    assert predicted.max() == pytest.approx(measured.max(), rel=0.05), use
    assert predicted == pytest.approx(measured, rel=0.08), use


def must_have_learnt(
    result: Result, losses: list[float], weights: dict[str, Any], idle: tuple[str, ...] = ()
) -> Result:
    """Check losses and weights to the precision of float64; return the result."""
    assert result.losses == pytest.approx(losses, rel=1e-9), str(result.case)
    assert difference(result.weights, weights, idle) <= 1e-9, str(result.case)
    return result


_references: dict[str, Result] = {}


def one_process(run_ranks: Ranks, case: Case) -> Result:
    """Train the case in one process, once per case; return the result."""
    alone = "data_parallel" if case.workload.get("mode") == "mini" else "graph_parallel"
    case = replace(case, strategy=alone, servers=1)
    key = f"{case}, {case.epochs} epochs"
    if key not in _references:
        _references[key] = run_ranks.alone(case)
    return _references[key]


def must_be_as_one_process(
    result: Result, alone: Result, weights: float, losses: float, idle: tuple[str, ...] = ()
) -> None:
    """Compare final weights, and every epoch's loss and scores, with those of one process;
    weights, losses: relative tolerances."""
    case, workload = str(result.case), result.case.workload
    assert difference(result.weights, alone.weights, idle) <= weights, case
    assert result.losses == pytest.approx(alone.losses, rel=losses), case
    assert len(result.scores) == len(alone.scores)
    both = zip(result.scores, alone.scores, strict=True)
    # errors of a regression are sums of real numbers; all other scores are shares
    rel, most = (1e-9, None) if workload.get("loss") in ("mae", "mse") else (None, 1e-12)
    assert all(a == pytest.approx(b, rel, most) for a, b in both if None not in (a, b))
    # roc_auc of training vertices may have no value: it must then have none in one process either
    unscored = 1 if workload.get("metric") == "roc_auc" and alone.scores[-3] is None else 0
    assert result.scores[-3:].count(None) == unscored, case
    assert None not in result.scores[-2:], case


def must_go_on_from_another_plan(
    run_ranks: Ranks, after: str, world: int, graph: str, workload: dict[str, Any]
) -> None:
    """Check that a strategy recomputes its state between epochs from another plan's weights.
    Without dropout that is the state of an exact step, so the next step is exact too, forward and
    backward. SGD, since Adam turns the rounding of biases before a batch norm into steps."""
    plain = {**workload, "dropout": 0.0, "optimizer": "sgd", "lr": 0.3}
    case = Case("graph_parallel", graph, plain, epochs=4)
    unbroken = run_ranks.alone(replace(case, epochs=5))
    broken = run_ranks(2, replace(case, checkpoint_every=2))
    resumed = run_ranks(world, replace(case, strategy=after, epochs=5, resume=str(broken.out)))
    for name, weight in unbroken.weights.items():
        torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-4, atol=1e-6)
    assert not resumed.rank(0)["staleness"] and resumed.rank(0)["epochs"] == 1
