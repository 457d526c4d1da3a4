"""Gradients that are added up in buckets, beside the backward pass."""

from typing import Any

import pytest
from asked import epochs_s

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import (
    DataParallel,
    GraNNDis,
    GraphParallel,
    GSplit,
    Strategy,
)
from gnnplan.planner.strategies.layerwise.exchange import buckets_of
from gnnplan.testing.drawing import draw
from gnnplan.testing.laws import GRAPHS, cluster, problem_of


def problem(model: str = "gcn", layers: int = 3, where: Any = None, **workload: Any) -> Problem:
    return problem_of(GRAPHS[0], where or cluster(), model=model, layers=layers, **workload)


@pytest.mark.parametrize(
    ("model", "count", "narrow", "layers", "after"),
    [
        # 40 -> 64 -> 64 -> 5: 2624, 4160 and 325 weights
        ("gcn", 1, False, [], []),
        ("gcn", 2, False, [(3, 2), (1,)], [2, 1]),
        ("gcn", 3, False, [(3,), (2,), (1,)], [3, 2, 1]),
        ("gcn", 3, True, [(3,), (2,), (1,)], [2, 2, 1]),  # layer 3 projects with layer 2
        # an encoder, whose gradient is the last one
        ("gcnii", 2, False, [(3, 2), (1,)], [2, 0]),
        ("sgc", 3, False, [(3,), (1,)], [3, 1]),  # layer 2 has no weights
    ],
)
def test_layers_of_buckets(model, count, narrow, layers, after):
    asked = problem(model)
    buckets = buckets_of(asked, count, narrow)
    assert [tuple(reversed(bucket.layers)) for bucket in buckets] == layers
    assert [bucket.after for bucket in buckets] == after
    assert sum(bucket.weights for bucket in buckets) == (asked.model.weights if layers else 0)


def test_a_deep_model_has_equal_buckets_and_one_rank_none():
    asked = problem("resgcn", 20)
    sizes = [bucket.weights for bucket in buckets_of(asked, 4, narrow=False)]
    assert len(sizes) == 4 and max(sizes) <= 1.3 * min(sizes)
    assert buckets_of(problem(where=cluster(1, 1)), 3, narrow=False) == []


def test_an_all_reduce_begins_after_its_backward_pass_and_the_update_waits_for_all():
    asked, strategy = problem(), GraphParallel(buckets=3)
    schedule = strategy.schedule(asked, 1)
    after = {str(task.label): list(map(str, task.after)) for task in schedule.tasks}
    assert after["all_reduce:l3:s0"] == ["backward:l3:s0"]
    assert after["all_reduce:l2:s0"] == ["backward:l2:s0"]
    assert after["backward:l1:s0"] == ["halo:b:l2:s0"]  # for no all-reduce
    assert after["update:s0"] == [f"all_reduce:l{layer}:s0" for layer in (3, 2, 1)]
    assert "|all_reduce 3|" in draw(schedule).splitlines()[-1]
    # batch norm's moments go behind what is under way, on the same lane
    normed = strategy.schedule(problem("sage", norm="batch"), 1)
    assert [str(task.label) for task in normed.lane(0, "reduce")][-5:] == [
        *("all_reduce:l3:s0", "moments:b:l3:s0", "all_reduce:l2:s0", "moments:b:l2:s0"),
        "all_reduce:l1:s0",
    ]


@pytest.mark.parametrize("buckets", [1, 3])
@pytest.mark.parametrize(
    ("servers", "gpus", "inter", "latency", "model", "hidden"),
    [
        (4, 1, 1.25e9, 5e-5, "gcn", 256),
        (4, 1, 1.25e9, 5e-5, "sage", 64),
        (2, 2, 1.25e8, 5e-5, "sage", 64),
        (2, 2, 1.25e8, 0.0, "gin", 256),
    ],
)
def test_stale_exchanges_and_the_sum_share_ports(
    buckets, servers, gpus, inter, latency, model, hidden
):
    """They did so in the simulator only: small steps of PipeGCN were up to 20 % slower there."""
    where = cluster(servers, gpus, inter=inter, latency=latency, launch=1e-5)
    asked = problem(model, 3, where, hidden=hidden)
    predicted, played = epochs_s(asked, f"pipegcn(buckets={buckets})", 4)
    assert predicted == pytest.approx(played, rel=0.02)


def test_candidates_have_buckets_only_where_they_save_time():
    def counts(asked: Problem, family: type[Strategy]) -> set[int]:
        return {strategy.knobs()["buckets"] for strategy in family.candidates(asked)}

    large, small = {"hidden": 256, "where": cluster(4, 1, inter=2e9)}, {"hidden": 4}
    where = large["where"].model_copy(update={"host_call": 0.0})  # else the host decides
    mini = {"mode": "mini", "batch": 80, "fanout": (3, 3, 3), "where": where}
    for family in (GraphParallel, GraNNDis):
        assert counts(problem(**large), family) == {1, 3}
        assert counts(problem(where=cluster(inter=1e11, latency=1e-9), **small), family) == {1}
    for family in (DataParallel, GSplit):
        assert counts(problem(**large | mini), family) == {1, 3}
    assert counts(problem(where=cluster(1, 1), hidden=256), GraphParallel) == {1}
