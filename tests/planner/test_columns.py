"""Feature parallelism: its orders, and where a plan tries it and tensor3d."""

from itertools import product

import pytest
from asked import on

from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import FeatureParallel, Tensor3D
from gnnplan.planner.strategies.layerwise.feature_parallel import arranged
from gnnplan.testing.laws import cluster, problem_of

N, F, H, C, RANKS = 600, 12, 16, 4, 4
ALTERNATING = FeatureParallel("alternating")


def problem(**workload: object) -> Problem:
    sizes = f"vertices={N}&edges=30000&features={F}&classes={C}&seed=0"
    graph = load(f"synthetic:community?{sizes}&mixing=1&skew=100")
    measured = {"memory_bandwidth": 1e10, "gather": {4: {1e4: 1e10}}}
    where = cluster(1, RANKS, intra=1e8, memory=1e9, **measured)
    return problem_of(graph, where, **{"layers": 4, "hidden": H, **workload})


def moved(strategy: FeatureParallel, asked: Problem) -> int:
    found = strategy.predict(asked).bytes
    return found["to_columns"] + found["to_rows"]


def test_own_rows_need_rows():
    for model in ("sage", "gin", "gcnii"):
        asked = problem(model=model)
        assert moved(ALTERNATING, asked) == moved(FeatureParallel(), asked)
        assert list(FeatureParallel.candidates(asked)) == [FeatureParallel()]
    assert list(FeatureParallel.candidates(problem())) == [FeatureParallel(), ALTERNATING]


@pytest.mark.parametrize("family", [FeatureParallel, Tensor3D])
def test_a_plan_tries_it_where_narrow_sums_were_measured(family):
    """By a roofline of wide rows it took GNNPipe's own case, on GPUs that nobody had measured."""
    assert family() in list(family.candidates(problem()))
    unknown = on(problem(), gather={})
    assert list(family.candidates(unknown)) == []
    assert "gnnplan measure" in family.absent(unknown)
    assert family().settle(unknown).predict(unknown).epoch_s > 0  # when asked for
    refused = problem(model="gat")
    assert not list(family.candidates(refused)) and "gat has attention" in family.absent(refused)


@pytest.mark.parametrize("model", ["gcn", "sgc"])
@pytest.mark.parametrize("hidden", [3, 12, 40])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_no_order_moves_fewer_numbers(model, hidden, dropout):
    """Against all ways to leave four layers, by rows or by columns."""
    shapes = describe(Workload(model=model, layers=4, hidden=hidden, dropout=dropout), F, C)
    cached = (shapes.aggregate_cached(1), False, False, False)
    every = []
    for leaves in product((False, True), repeat=3):
        before, total = False, 0
        for spec, by_columns, is_cached in zip(
            shapes.layers, (*leaves, False), cached, strict=True
        ):
            if before and by_columns:  # a product between them needs rows
                total += 10**9 if spec.matrices else 0
            elif before:
                total += 2 * spec.h_in
            elif by_columns:
                total += 10**9 if is_cached else 2 * spec.h_out
            elif not is_cached:
                varies = spec is not shapes.layers[0] or spec.projects_first
                total += spec.gathered * 2 * (1 + varies)
            before = by_columns
        every.append(total)
    courses = arranged(shapes, True)[1]
    assert sum(course.numbers for course in courses if course) == min(every)
