"""Ranks on a CPU share its cores: by hand, against the closed form, and with messages that have to be copied."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.cost import Cost
from gnnplan.planner.graph import load
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Compute, Label, Schedule, Send, Task
from gnnplan.planner.specs import Cluster, Device, Link, Workload
from gnnplan.planner.strategies import parse
from gnnplan.simulator.player import play

GRAPH = "synthetic:community?vertices=600&edges=6000&features=16&classes=4&seed=0"


def machine(ranks: int, cores: int | None, servers: int = 1, work: float = 0.0, one_machine: bool = False, kind: str = "cpu") -> Cluster:
    """A second of flops per flop; messages at 1 MB/s, of which a byte takes so many seconds of a core."""
    link = Link(bandwidth=1e6, latency=0.0, work=work)
    device = Device(kind=kind, memory=1e9, gemm=1e6, memory_bandwidth=1e8, launch=1e-5)
    return Cluster(servers=servers, gpus_per_server=ranks // servers, device=device, intra_node=link, inter_node=link, cores=cores,
                   one_machine=one_machine)  # fmt: skip


def ends(cluster: Cluster, seconds: list[float]) -> list[float]:
    """When each of these computations ends, rank r's being the r-th."""
    tasks = [Task(Label("forward", 0), rank, "compute", Compute(flops=each * 1e6)) for rank, each in enumerate(seconds)]
    return [end for _, end in play(Schedule(len(seconds), 1, tasks), Cost.of(cluster)).times]


@pytest.mark.parametrize(("cluster", "seconds", "expected"), [
    (machine(3, 2), [1, 2, 3], [1.5, 2.5, 3.5]),  # two thirds of a core each, then a core each
    (machine(4, 1), [1, 1, 1, 1], [4, 4, 4, 4]),
    (machine(2, 4), [1, 2], [1, 2]),
    (machine(3, None), [1, 2, 3], [1, 2, 3]),
    (machine(4, 1, servers=2), [1, 1, 2, 2], [2, 2, 4, 4]),  # a core per server
    (machine(4, 1, servers=2, one_machine=True), [1, 1, 2, 2], [4, 4, 6, 6]),  # one for both
    (machine(3, 1, kind="cuda"), [1, 2, 3], [1, 2, 3]),  # a GPU is nobody else's
])  # fmt: skip
def test_by_hand(cluster: Cluster, seconds: list[float], expected: list[float]):
    assert ends(cluster, seconds) == pytest.approx(expected)
    assert float(Cost.of(cluster).together(np.array(seconds, dtype=float))) == pytest.approx(max(expected))


@settings(deadline=None)
@given(seconds=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8), cores=st.integers(1, 5))
def test_closed_form_is_the_simulation_and_lies_between_its_bounds(seconds: list[float], cores: int):
    cluster = machine(len(seconds), cores)
    last = float(Cost.of(cluster).together(np.array(seconds)))
    assert max(ends(cluster, seconds)) == pytest.approx(last)
    assert max(*seconds, sum(seconds) / cores) * (1 - 1e-9) <= last <= sum(seconds) * (1 + 1e-9) + 1e-12


def test_copies_take_a_core_from_computation():
    """One core, a message of 1 MB that needs it for half a second per end, beside a second's work of the receiver."""
    tasks = [Task(Label("send", 0), 0, "comm", Send(1, 1_000_000)), Task(Label("forward", 0), 1, "compute", Compute(flops=1e6))]
    sent, computed = play(Schedule(2, 1, tasks), Cost.of(machine(2, 1, work=1e-6))).times
    assert (sent[1], computed[1]) == (2.0, 2.0)  # the core is wanted for two seconds by two
    sent, computed = play(Schedule(2, 1, tasks), Cost.of(machine(2, 2, work=1e-6))).times
    assert (sent[1], computed[1]) == (1.0, 1.0)
    apart = Cost.of(machine(2, 1, servers=2, work=1e-6)).send(0, Send(1, 1_000_000))
    assert {port: seconds for port, seconds in apart.busy.items() if port[0] == "cores"} == {("cores", 0): 0.5, ("cores", 1): 0.5}


@pytest.mark.parametrize("strategy", ["graph_parallel", "granndis(depth=1)", "pipegcn"])
def test_prediction_is_the_simulation_where_ranks_share_cores(strategy: str):
    graph = load(GRAPH)
    job = Job(graph.stats, graph, Workload(hidden=16), machine(4, 2, servers=2, work=4e-7, one_machine=True), "metis")
    chosen = parse(strategy).settle(job)
    steps = 4
    predicted, played = float(chosen.predict(job).epoch_s), play(chosen.schedule(job, steps), job.cost).step_s
    assert played == pytest.approx(predicted, rel=type(chosen).claim if strategy == "pipegcn" else 1e-9)
