"""GraNNDis' batches and sampling as planned: how many batches, what they load, what they cost."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision.search import search
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GraNNDis, parse
from gnnplan.planner.vocabulary.errors import Infeasible
from gnnplan.planner.vocabulary.schedule import Copy
from gnnplan.simulator.player import play

GRAPH = load(
    "synthetic:community?vertices=2000&edges=8000&features=40&classes=5&communities=50&mixing=0.02"
)


def problem_of(
    servers: int = 2,
    gpus: int = 2,
    memory: float = 1e12,
    host: Link | None = None,
    graph: Graph = GRAPH,
    **workload: Any,
) -> Problem:
    device = Device(memory=memory, gemm=1e11, memory_bandwidth=1e11)
    link = Link(bandwidth=1e9, latency=1e-6)
    where = Cluster(
        servers=servers,
        gpus_per_server=gpus,
        device=device,
        intra_node=Link(bandwidth=1e10),
        inter_node=link,
        host=host,
    )
    return Problem(
        graph.stats,
        graph,
        Workload(**{"model": "gcn", "layers": 2, "hidden": 64, **workload}),
        where,
    )


def needed(problem: Problem, strategy: GraNNDis) -> float:
    return float(sum(strategy.settle(problem).memory(problem).values(), np.zeros(1)).max())


@pytest.mark.parametrize("knobs", [{}, {"max_hop": 1, "fanout": 2}])
def test_the_fewest_batches_that_fit(knobs):
    """As trying 1, 2, 3, ... in turn would find, as long as more batches need less."""
    question = problem_of()
    needs = {
        batches: needed(question, GraNNDis(batches=batches, **knobs)) for batches in range(1, 9)
    }
    assert all(needs[batches] > needs[batches + 1] for batches in range(1, 5)), needs
    for room in [*(needs[batches] for batches in range(1, 6)), 1e12]:
        problem = problem_of(memory=room)
        fewest = next(batches for batches, need in needs.items() if need <= room)
        settled = GraNNDis(batches=None, **knobs).settle(problem)
        assert settled.batches == fewest and settled.exact == (fewest == 1 and not knobs)
        assert (
            GraNNDis(batches=fewest, **knobs).settle(problem) == settled == settled.settle(problem)
        )


def test_many_batches():
    """Memory of more than 31 batches once ended in numpy's ValueError, which a large graph on small
    GPUs met in `plan`."""
    problem = problem_of()
    few, many = (GraNNDis(batches=n).memory(problem) for n in (20, 80))
    assert many["activations"].max() < few["activations"].max()
    # 80 times the same batch
    told = replace(problem, graph=None, stats=replace(problem.stats, known=False))
    one, many = (GraNNDis(batches=n).memory(told) for n in (1, 80))
    assert (
        many["activations"].max() < one["activations"].max()
        and many["graph"].max() > one["graph"].max()
    )
    assert GraNNDis(batches=80).predict(told).by_op["load"] > 0


def test_search_offers_batches_where_the_whole_does_not_fit():
    question = problem_of()
    room = needed(question, GraNNDis(batches=3))
    found = search(problem_of(memory=room), may_use_fewer=False)
    batches = {
        c.strategy.batches
        for c in found.ranked
        if isinstance(c.strategy, GraNNDis) and not c.strategy.sampled
    }
    assert 3 in batches
    assert all(c.memory_bytes <= room for c in found.ranked)
    exact = search(problem_of(memory=room * 10), exact=True, may_use_fewer=False)
    assert all(c.strategy.batches == 1 for c in exact.ranked if isinstance(c.strategy, GraNNDis))


def test_what_does_not_fit_however_small_the_batches():
    """Libraries alone are 1.4 GB with NCCL's buffers, so batches are not even tried; a little more
    room, and the ones that need least are told."""
    assert GraNNDis(batches=None).settle(problem_of(memory=1.3e9)).batches == 1
    problem = problem_of(memory=1.4002e9)
    settled = GraNNDis(batches=None).settle(problem)
    assert needed(problem, settled) > 1.4002e9 and needed(problem, settled) <= min(
        needed(problem, GraNNDis(batches=n)) for n in (1, 2, 4)
    )
    with pytest.raises(Infeasible, match=re.escape(str(settled))):
        search(problem, forced=GraNNDis(batches=None))


@pytest.mark.parametrize(
    ("model", "dropout"), [("gcn", 0.0), ("sage", 0.0), ("sage", 0.5), ("gcnii", 0.0)]
)
def test_loads_are_the_constant_rows_of_the_batch(model, dropout):
    """On every rank what layer 1 (the encoder) reads of features, or the aggregate where it is
    cached."""
    problem = problem_of(model=model, dropout=dropout)
    strategy = GraNNDis(batches=3)
    layouts, schedule = strategy.layouts(problem), strategy.schedule(problem, 6)
    assert sorted(strategy.turn(problem, step) for step in range(3)) == [0, 1, 2]
    orders = {
        tuple(strategy.turn(problem, 3 * epoch + step) for step in range(3)) for epoch in range(20)
    }
    assert len(orders) == 6  # another order in every epoch
    for task in schedule.tasks:
        if isinstance(task.work, Copy):
            batch = layouts[strategy.turn(problem, task.label.step)]
            rows = batch.rows(task.rank, 0).size
            if model != "gcnii":
                rows = (
                    rows + batch.piece(task.rank, 1).halo.size
                    if dropout
                    else batch.rows(task.rank, 1).size * (1 + (model == "sage"))
                )
            assert task.work.nbytes == rows * 40 * 4 and task.lane == "copy"
    assert sum(isinstance(task.work, Copy) for task in schedule.tasks) == 6 * 4
    assert not any(isinstance(task.work, Copy) for task in GraNNDis().schedule(problem, 2).tasks)


def test_a_load_takes_the_host_link():
    strategy = GraNNDis(batches=2)
    problem = problem_of(1, 1, host=Link(bandwidth=1e6, latency=0.5)).launching(strategy.replays)
    loads = [
        task.work.nbytes
        for task in strategy.schedule(problem, 2).tasks
        if isinstance(task.work, Copy)
    ]
    p, fast = (
        strategy.predict(problem),
        strategy.predict(problem_of(1, 1, host=Link(bandwidth=1e12, latency=0.0))),
    )
    expected = 2 * 0.5 + sum(loads) / 1e6
    assert p.by_op["load"] == pytest.approx(expected) == p.comm_s
    assert p.epoch_s - fast.epoch_s == pytest.approx(expected, rel=1e-4)
    assert play(strategy.schedule(problem, 6), problem.cost).epoch_s(2) == pytest.approx(
        float(p.epoch_s)
    )
    without = problem_of(1, 1)
    assert strategy.predict(without).by_op["load"] == pytest.approx(
        2 * without.cluster.intra_node.latency + sum(loads) / 1e10
    )


def test_several_batches_are_launched_kernel_by_kernel():
    """On one GPU only the step of the whole graph becomes a CUDA graph; the executor runs others
    kernel by kernel, and their epochs were predicted as if they were launched at once."""
    problem = problem_of(1, 1)
    device = problem.cluster.device.model_copy(update={"launch": 1e-3})
    problem = replace(problem, cluster=problem.cluster.model_copy(update={"device": device}))
    whole, two = (GraNNDis(batches=batches).settle(problem) for batches in (1, 2))
    assert two.predict(problem).epoch_s > 100 * whole.predict(problem).epoch_s


def test_sampling_computes_and_preloads_less_than_full_preload():
    dense = load("synthetic:community?vertices=2000&edges=40000&features=40&classes=5&mixing=0.3")
    problem = problem_of(4, 1, graph=dense, layers=4)
    full, wide, narrow = (
        parse(text).settle(problem)
        for text in ("granndis", "granndis(max_hop=1,fanout=4)", "granndis(max_hop=1,fanout=1)")
    )
    costs = [
        (float(p.compute_s), p.setup_bytes)
        for p in (s.predict(problem) for s in (narrow, wide, full))
    ]
    assert costs == sorted(costs) and len(set(costs)) == 3
    other = replace(problem, workload=problem.workload.model_copy(update={"seed": 1}))
    # another seed draws other rows
    assert wide.predict(other).setup_bytes != wide.predict(problem).setup_bytes
    again = replace(problem)
    assert wide.predict(again).setup_bytes == wide.predict(problem).setup_bytes
