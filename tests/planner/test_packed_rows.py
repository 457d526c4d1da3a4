"""Rows in few bits: work of packing, what a plan says of them and when."""

from dataclasses import replace

import pytest
from asked import on

from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.decision.explain import explain
from gnnplan.planner.decision.search import search
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import (
    BNS,
    GNNPipe,
    GraNNDis,
    GraphParallel,
    Strategy,
    families,
    parse,
)
from gnnplan.testing.laws import cluster, problem_of

GRAPH = load("synthetic:community?vertices=600&edges=6000&features=12&classes=4&seed=0")
CLUSTER = cluster(4, 1, inter=1e6, intra=1e8, memory=4e9, memory_bandwidth=1e10)


def problem(**workload: object) -> Problem:
    return problem_of(GRAPH, CLUSTER, **{"layers": 3, "hidden": 30, **workload})


def packing(strategy: Strategy, asked: Problem) -> dict[str, float]:
    """Seconds by operation."""
    by_op = strategy.predict(asked).by_op
    return {op: float(seconds) for op, seconds in by_op.items() if "pack" in op}


def test_a_chunk_is_packed_before_it_is_sent_and_unpacked_once_it_came():
    asked = problem()
    pipe = GNNPipe(stages=2, chunks=1, bits=4).settle(asked)
    ops = [f"{op.op}{op.direction}" for op in pipe.program(asked).step(0) if op.ranks == (2, 3)]
    assert ops[1:5] == ["receivef", "unpackf", "halof", "forward"]
    assert ops[-5:] == ["halob", "packb", "pipelineb", "all_reduce", "update"]
    found = packing(pipe, asked)
    assert set(found) == {"pack:f", "pack:b", "unpack:f", "unpack:b"} and min(found.values()) > 0
    for there, pays in ((asked, True), (on(asked, inter_node=Link(bandwidth=1e12)), False)):
        whole, packed = (GNNPipe(2, 4, bits=b).settle(there).predict(there) for b in (None, 4))
        assert (packed.epoch_s < whole.epoch_s) == pays


def test_packing_is_work_of_its_own_around_every_exchange():
    asked, strategy = problem(), GraphParallel(bits=4)
    ops = [f"{op.op}{op.direction}{op.layer}" for op in strategy.program(asked).step(0)]
    assert ops[1:4] == ["packf2", "halof2", "unpackf2"]
    last = "packf3 halof3 unpackf3 forward3 backward3 packb3 halob3 unpackb3"
    assert [op for op in ops if op.endswith("3")] == last.split()
    found = packing(strategy, asked)
    assert len(found) == 8 and min(found.values()) > 0
    whole, packed = (GraphParallel(bits=bits).predict(asked) for bits in (None, 4))
    before, computed = (
        sum(seconds for op, seconds in each.by_op.items() if not op.startswith("halo"))
        for each in (whole, packed)
    )
    assert computed - before == pytest.approx(sum(found.values()), rel=1e-6)
    assert packed.epoch_s < whole.epoch_s


PACKED: list[Strategy] = [GraphParallel(bits=2), GraphParallel(bits="adaptive")]
PACKED += [GraphParallel(staleness=1, bits=4), BNS(p=1, bits=2), GNNPipe(2, 1, bits=2)]
PACKED += [GraNNDis(bits=8)]


@pytest.mark.parametrize("packed", PACKED, ids=str)
def test_it_is_lossy_in_a_way_of_its_own(packed):
    """So nothing that is known of whole rows, or of other bits, is said of it."""
    assert not packed.exact and parse(str(packed)) == packed
    assert packed.approximates_as(replace(packed, checkpoint=True))
    for bits in {None, 2, 4, 8, "adaptive"} - {packed.knobs()["bits"]}:
        assert not packed.approximates_as(replace(packed, bits=bits))


def test_no_search_tries_it_by_itself():
    asked = problem()
    full = [family for family in families() if family.mode == "full"]
    tried = [each for family in full for each in family.candidates(asked)]
    assert tried and all(each.knobs().get("bits") is None for each in tried)


@pytest.mark.parametrize(
    ("strategy", "op"),
    [
        (GraphParallel(bits=2), "halo"),
        (BNS(p=0.5, bits=4), "halo"),
        (GraNNDis(1, bits=8), "halo"),
        (GNNPipe(4, 4, bits=2), "pipeline"),
    ],
    ids=str,
)
def test_a_plan_that_asks_for_it_says_what_it_saves(strategy, op):
    asked = problem(layers=4)
    strategy = strategy.settle(asked)
    lines = "\n".join(explain(search(asked, forced=strategy), []))
    few, whole = strategy.predict(asked), replace(strategy, bits=None).predict(asked)
    assert f"{strategy} sends {few.bytes[op] / 1e3:.2f} kB of rows" in lines
    assert f"{replace(strategy, bits=None)} {whole.bytes[op] / 1e3:.2f} kB" in lines
    plain = "\n".join(explain(search(asked, forced=GraphParallel()), []))
    assert "to pack" not in plain
