"""Printed figures that need no machine: volumes on the real Squirrel graph, and the bubble of a
pipeline.

GNNPipe (arXiv 2308.10087): Table 4, 32 layers of 1000 on two servers of four GPUs, eight METIS
parts; bubble of Sec. 4.6."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from pairwise import at_night

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import GNNPipe, GraphParallel
from gnnplan.planner.vocabulary.schedule import Compute, Schedule
from gnnplan.simulator.player import play
from gnnplan.testing.laws import cluster, problem_of

TESTBED = read_cluster("gnnpipe_a5000")


def squirrel(dataset: Callable[[str], str], model: str, method: str = "metis") -> Problem:
    graph = load(dataset("squirrel"))
    workload = Workload(model=model, layers=32, hidden=1000)
    return Problem(graph.stats, graph, workload, TESTBED, method)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "printed"), [("gcn", 1.38), ("sage", 1.61), ("gcnii", 1.51)])
def test_squirrel_in_a_hybrid(dataset, model, printed):
    """Four stages of two, K = 4M. Within 3 %: print counts the constant features once more."""
    problem = squirrel(dataset, model)
    for chunks in (16, 32):
        predicted = GNNPipe(4, chunks).settle(problem).predict(problem)
        assert predicted.bytes_total / 2**30 == pytest.approx(printed, rel=0.035)
        # nothing else leaves a server
        assert predicted.bytes_by_link["inter_node"] * 3 == predicted.bytes["pipeline"]


@pytest.mark.parametrize("method", ["metis", "metis-volume"])
def test_squirrel_graph_parallel(dataset, method):
    """The all-reduce is the whole difference between GCN and GraphSAGE."""
    gcn, sage = (
        GraphParallel().predict(squirrel(dataset, model, method)).bytes for model in ("gcn", "sage")
    )
    for found, printed in ((gcn, 4.43), (sage, 6.10)):
        assert sum(found.values()) / 2**30 == pytest.approx(printed, rel=0.1)
    assert gcn["halo"] == sage["halo"]
    assert (sage["all_reduce"] - gcn["all_reduce"]) / 2**30 == pytest.approx(6.10 - 4.43, rel=0.05)


def bubble_share(stages: int, chunks: int) -> float:
    """GPipe's bubble, as GNNPipe Sec. 3.2 and 4.6 have it: of equal stages and chunks."""
    return (stages - 1) / (chunks + stages - 1)


def equal_slots(schedule: Schedule, forward: float, backward: float) -> Schedule:
    """The pipeline's order with equal stages and chunks, at 1 flop/s: as the formula has it."""
    seconds = {"forward": Compute(flops=forward), "backward": Compute(flops=backward)}
    seconds |= {"history": Compute(), "update": Compute()}
    tasks = [replace(t, work=seconds.get(t.label.op, t.work)) for t in schedule.tasks]
    return Schedule(schedule.ranks, schedule.steps, tasks)


@pytest.mark.parametrize(("stages", "chunks"), [at_night(8, 32), (3, 5), (2, 1), (5, 3)])
@pytest.mark.parametrize("shuffle", [False, True])
def test_bubble_of_equal_stages_is_the_formula(stages, chunks, shuffle):
    stats = GraphStats("s", "s.yaml", 960, 9600, 16, 16, 960, False, "h", known=False)
    fast = {"gemm": 1e6, "memory_bandwidth": 1e14, "launch": 0.0}
    where = cluster(1, stages, intra=1e14, latency=0.0, **fast)
    problem = problem_of(stats, where, layers=stages)
    strategy = GNNPipe(stages, chunks, shuffle=shuffle).settle(problem)
    schedule = equal_slots(strategy.schedule(problem, 3), 1e6, 2e6)  # 1 s and 2 s
    played = play(schedule, Cost(problem.cluster))
    assert played.epoch_s(1) == pytest.approx((chunks + stages - 1) * (1.0 + 2.0), rel=1e-6)
    assert 1 - chunks * 3.0 / played.epoch_s(1) == pytest.approx(
        bubble_share(stages, chunks), abs=1e-6
    )
    assert f"{bubble_share(8, 32):.1%}" == "17.9%"


def test_unequal_chunks_idle_more_than_the_bound(dataset):
    """Equal stages and chunks idle 17.9 %, printed are 26.5 % on average. METIS makes Squirrel's
    chunks equal in vertices, not in edges (the largest has five times the mean), so the model
    expects yet more: the bound is all that can be held here."""
    problem = squirrel(dataset, "gcn")
    played = play(GNNPipe().settle(problem).schedule(problem, 2), problem.cost)
    computed = [s for s in played.spans if s.lane == "compute" and s.step == 1]
    busy = sum(span.end - span.start for span in computed) / problem.ranks
    assert bubble_share(8, 32) < 1 - busy / played.epoch_s(1) < 0.5
