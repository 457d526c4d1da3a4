"""GraNNDis' batches and sampling as planned: how many batches, what they load, what they cost."""

import re
from typing import Any

import pytest
from asked import by_statistics, changed, fullest_bytes, on

from gnnplan.planner.decision.search import search
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis
from gnnplan.planner.vocabulary.errors import Infeasible
from gnnplan.testing import laws

GRAPH = load(
    "synthetic:community?vertices=2000&edges=8000&features=40&classes=5&communities=50&mixing=0.02"
)


def problem_of(
    servers: int = 2, gpus: int = 2, graph: Graph = GRAPH, layers: int = 2, **fields: Any
) -> Problem:
    """Fields are of the workload, and of the cluster or its devices."""
    of_cluster = {name: fields.pop(name) for name in ("memory", "host") if name in fields}
    where = changed(laws.cluster(servers, gpus), **of_cluster)
    return laws.problem_of(graph, where, layers=layers, **fields)


@pytest.mark.parametrize("knobs", [{}, {"max_hop": 1, "fanout": 2}])
def test_the_fewest_batches_that_fit(knobs):
    """As trying 1, 2, 3, ... in turn would find, as long as more batches need less."""
    question = problem_of()
    needs = {b: fullest_bytes(question, GraNNDis(batches=b, **knobs)) for b in range(1, 9)}
    assert all(needs[batches] > needs[batches + 1] for batches in range(1, 5)), needs
    for room in [*(needs[batches] for batches in (1, 2, 5)), 1e12]:
        problem = problem_of(memory=room)
        fewest = next(batches for batches, need in needs.items() if need <= room)
        settled = GraNNDis(batches=None, **knobs).settle(problem)
        assert settled.batches == fewest and settled.exact == (fewest == 1 and not knobs)
        assert settled == settled.settle(problem)
        assert settled == GraNNDis(batches=fewest, **knobs).settle(problem)


def test_many_batches():
    """Memory of more than 31 batches once ended in numpy's ValueError."""
    problem = problem_of()
    few, many = (GraNNDis(batches=n).memory(problem)["activations"] for n in (8, 40))
    assert many.max() < few.max()
    told = by_statistics(problem)  # 80 times the same batch
    one, many = (GraNNDis(batches=n).memory(told) for n in (1, 80))
    assert many["activations"].max() < one["activations"].max()
    assert many["graph"].max() > one["graph"].max()
    assert GraNNDis(batches=80).predict(told).by_op["load"] > 0


def test_search_offers_batches_where_the_whole_does_not_fit():
    room = fullest_bytes(problem_of(), GraNNDis(batches=3))
    found = search(problem_of(memory=room), may_use_fewer=False).ranked
    ours = [c.strategy for c in found if isinstance(c.strategy, GraNNDis)]
    assert 3 in {strategy.batches for strategy in ours if not strategy.sampled}
    assert all(c.memory_bytes <= room for c in found)
    exact = search(problem_of(memory=room * 10), exact=True, may_use_fewer=False).ranked
    assert all(c.strategy.batches == 1 for c in exact if isinstance(c.strategy, GraNNDis))


def test_what_does_not_fit_however_small_the_batches():
    """Libraries are 1.4 GB: no batch is tried. With more room, those that need least are told."""
    assert GraNNDis(batches=None).settle(problem_of(memory=1.3e9)).batches == 1
    problem = problem_of(memory=1.4002e9)
    settled = GraNNDis(batches=None).settle(problem)
    assert fullest_bytes(problem, settled) > 1.4002e9 and fullest_bytes(problem, settled) <= min(
        fullest_bytes(problem, GraNNDis(batches=n)) for n in (1, 2, 4)
    )
    with pytest.raises(Infeasible, match=re.escape(str(settled))):
        search(problem, forced=GraNNDis(batches=None))


def test_batches_take_turns_in_another_order_in_every_epoch():
    problem, strategy = problem_of(), GraNNDis(batches=3)
    turns = [[strategy.turn(problem, 3 * epoch + n) for n in range(3)] for epoch in range(20)]
    assert {tuple(sorted(turn)) for turn in turns} == {(0, 1, 2)}
    assert len(set(map(tuple, turns))) == 6


def test_several_batches_are_launched_kernel_by_kernel():
    """Only the step of the whole graph is a CUDA graph; others were predicted as one launch."""
    problem = on(problem_of(1, 1), launch=1e-3)
    whole, two = (GraNNDis(batches=n).settle(problem).predict(problem) for n in (1, 2))
    assert two.epoch_s > 100 * whole.epoch_s
