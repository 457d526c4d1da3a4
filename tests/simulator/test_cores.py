"""Ranks on a CPU share its cores: by hand, against the closed form, and with copied messages."""

import re
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from asked import changed, epochs_s
from hypothesis import given
from hypothesis import strategies as st
from nightly import covered, pairs

from gnnplan.planner.cluster import compute
from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.explain import tightest
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.schedule import Compute, Label, Schedule, Send, Task
from gnnplan.simulator.network import Flows
from gnnplan.simulator.player import play
from gnnplan.testing.laws import sums

GRAPH = "synthetic:community?vertices=600&edges=6000&features=16&classes=4&seed=0"

MINI = {"mode": "mini", "batch": 60, "fanout": (4, 4), "layers": 2, "hidden": 16}


@pytest.fixture(autouse=True)
def equally_fast(monkeypatch):
    """Ranks that take turns compute as fast as alone, so that sums by hand are plain."""
    monkeypatch.setattr(compute, "TURNS", 1.0)


def machine(
    ranks: int,
    cores: int | None,
    servers: int = 1,
    core_s_per_byte: float = 0.0,
    one_machine: bool = False,
    kind: str = "cpu",
) -> Cluster:
    """A second per million flops; messages at 1 MB/s, a byte of which takes seconds of a core."""
    link = Link(bandwidth=1e6, latency=0.0, core_s_per_byte=core_s_per_byte)
    device = Device(kind=kind, memory=1e9, gemm=1e6, memory_bandwidth=1e8, launch=1e-5)
    of = {"device": device, "intra_node": link, "inter_node": link, "one_machine": one_machine}
    return Cluster(servers=servers, gpus_per_server=ranks // servers, cores=cores, **of)


def problem_on(cluster: Cluster, **workload: Any) -> Problem:
    graph = load(GRAPH)
    return Problem(graph.stats, graph, Workload(**workload), cluster, "metis")


def ends(cluster: Cluster, seconds: list[float]) -> list[float]:
    """When each of these computations ends, rank r's being the r-th."""
    tasks = [
        Task(Label("forward", 0), rank, "compute", Compute(flops=each * 1e6))
        for rank, each in enumerate(seconds)
    ]
    return [end for _, end in play(Schedule(len(seconds), 1, tasks), Cost(cluster)).times]


@pytest.mark.parametrize(
    ("cluster", "seconds", "expected"),
    [
        (machine(3, 2), [1, 2, 3], [1.5, 2.5, 3.5]),  # two thirds of a core each, then a core each
        (machine(4, 1), [1, 1, 1, 1], [4, 4, 4, 4]),
        (machine(2, 4), [1, 2], [1, 2]),
        (machine(3, None), [1, 2, 3], [1, 2, 3]),
        (machine(4, 1, servers=2), [1, 1, 2, 2], [2, 2, 4, 4]),  # a core per server
        (machine(4, 1, servers=2, one_machine=True), [1, 1, 2, 2], [4, 4, 6, 6]),  # one for both
        (machine(3, 1, kind="cuda"), [1, 2, 3], [1, 2, 3]),  # a GPU is nobody else's
    ],
)
def test_by_hand(cluster, seconds, expected):
    assert ends(cluster, seconds) == pytest.approx(expected)
    last = Cost(cluster).cores.last_rank_done_s(np.array(seconds, dtype=float))
    assert float(last) == pytest.approx(max(expected))


@given(
    seconds=st.lists(st.floats(0.0, 10.0), min_size=1, max_size=8),
    cores=st.integers(1, 5),
    turns=st.sampled_from([1.0, 1.3]),
)
def test_closed_form_is_the_simulation_and_lies_between_its_bounds(seconds, cores, turns):
    cluster = machine(len(seconds), cores)
    with patch.object(compute, "TURNS", turns):
        last = float(Cost(cluster).cores.last_rank_done_s(np.array(seconds)))
        assert max(ends(cluster, seconds)) == pytest.approx(last)
    assert max(*seconds, sum(seconds) / cores) * (1 - 1e-9) <= last
    assert last <= turns * sum(seconds) * (1 + 1e-9) + 1e-12
    if len(seconds) > cores:
        assert last >= turns * sum(seconds) / cores * (1 - 1e-9)


def test_copies_take_a_core_from_computation():
    """1 MB needs the one core for half a second per end, beside a second's work."""
    tasks = [
        Task(Label("send", 0), 0, "comm", Send(1, 1_000_000)),
        Task(Label("forward", 0), 1, "compute", Compute(flops=1e6)),
    ]
    sent, computed = play(Schedule(2, 1, tasks), Cost(machine(2, 1, core_s_per_byte=1e-6))).times
    # the core is wanted for two seconds, by three threads: two of them the message's
    assert (sent[1], computed[1]) == (1.5, 2.0)
    sent, computed = play(Schedule(2, 1, tasks), Cost(machine(2, 2, core_s_per_byte=1e-6))).times
    assert (sent[1], computed[1]) == (1.0, 1.0)
    apart = Cost(machine(2, 1, servers=2, core_s_per_byte=1e-6)).send(0, Send(1, 1_000_000))
    on_cores = {port: seconds for port, seconds in apart.busy.items() if port[0] == "cores"}
    assert on_cores == {("cores", 0): 0.5, ("cores", 1): 0.5}


def test_a_message_that_asks_little_of_a_core_is_not_slowed_by_who_computes_there():
    """Threads share a core, not progress: PipeGCN behind a slow card was simulated too long."""
    tasks = [
        Task(Label("send", 0), 0, "comm", Send(1, 1_000_000)),
        *(Task(Label("forward", 0), rank, "compute", Compute(flops=1e6)) for rank in range(3)),
    ]
    played = play(Schedule(3, 1, tasks), Cost(machine(3, 1, core_s_per_byte=2e-7)))
    sent, *computed = (end for _, end in played.times)
    # a fifth of the core for two threads; of the others each would have a third of what is left
    assert sent == pytest.approx(1.0)
    assert computed == pytest.approx([3.2] * 3)


@pytest.mark.parametrize("strategy", ["graph_parallel", "granndis(depth=1)", "pipegcn"])
def test_prediction_is_the_simulation_where_ranks_share_cores(strategy):
    where = machine(4, 2, servers=2, core_s_per_byte=4e-7, one_machine=True)
    predicted, played = epochs_s(problem_on(where, hidden=16), strategy, 4)
    close = type(parse(strategy)).claim if strategy == "pipegcn" else 1e-9
    assert played == pytest.approx(predicted, rel=close)


@pytest.mark.parametrize(
    ("core_s_per_byte", "ranks", "servers", "speed"),
    covered(
        [
            (taken, *where, speed)
            for taken in (2e-8, 2e-7)
            for where in ((2, 1), (4, 1), (4, 2))
            for speed in (1e6, 1e7, 1e8)
        ],
        lambda row: pairs({"taken": row[0], "where": row[1:3], "speed": row[3]}),
    ),
)
def test_stale_exchanges_share_cores_with_computation(core_s_per_byte, ranks, servers, speed):
    """Neither goes on at full speed while the other does. The closed form only knows that the cores
    must do both, and is up to 15 % shorter where messages keep them busy."""
    cluster = machine(ranks, 2, servers=servers, core_s_per_byte=core_s_per_byte, one_machine=True)
    cluster = changed(cluster, gemm=speed)
    predicted, played = epochs_s(problem_on(cluster, hidden=16, layers=6), "pipegcn", 6)
    assert 0.85 * played <= predicted <= 1.06 * played


@pytest.mark.parametrize(
    ("strategy", "workload", "cores"),
    covered(
        [
            (strategy, workload, cores)
            for strategy, workload in (
                ("gnnpipe(stages=4,chunks=16)", {"layers": 4, "hidden": 16}),
                ("gnnpipe(stages=2,chunks=8)", {"layers": 4, "hidden": 16}),
                ("data_parallel(prefetch=2)", MINI),
                ("gsplit(prefetch=2)", MINI),
                ("p3(prefetch=2)", MINI),
                ("p3(pipelined=True)", MINI),
                ("p3(pipelined=True,prefetch=2)", MINI),
            )
            for cores in (1, 2)
        ],
        # every strategy, and every family on either number of cores
        lambda row: {row[0], (row[0].partition("(")[0], row[2])},
    ),
)
def test_what_is_done_at_once_shares_cores_in_predictions_too(strategy, workload, cores):
    """Waiting stages leave their share (it was half too slow); samplers and copies take theirs."""
    fast = Link(bandwidth=1e7, latency=1e-6, core_s_per_byte=1e-7)
    rates = {"draw": 3e4, "lay": 3e4}
    cluster = changed(machine(4, cores), intra_node=fast, host_rates=rates)
    problem = problem_on(cluster, **workload)
    predicted, played = epochs_s(problem, strategy, 4)
    assert predicted == pytest.approx(played, rel=0.06)
    assert sums(parse(strategy).settle(problem).predict(problem)) == pytest.approx(predicted)


@pytest.mark.parametrize(
    ("stages", "work", "within"),
    [(2, 0.0, 0.01), (2, 1e-5, 0.15), (2, 2e-5, 0.15), (4, 0.0, 0.01), (4, 1e-5, 0.15)],
)
def test_a_pipelines_messages_take_cores_from_its_stages(stages, work, within):
    """What is handed on is copied beside the next chunk, as far as the cores can do both."""
    link = Link(bandwidth=1e6, latency=1e-6, core_s_per_byte=work)
    cluster = machine(stages, stages, servers=2, one_machine=True)
    cluster = changed(cluster, intra_node=link, inter_node=link)
    problem = problem_on(cluster, layers=4, hidden=16)
    predicted, played = epochs_s(problem, f"gnnpipe(stages={stages},chunks=16)", 3)
    assert predicted == pytest.approx(played, rel=within)


@pytest.mark.parametrize(("chunks", "bandwidth"), [(2, 1e6), (4, 1e6), (16, 1e5)])
def test_a_core_of_a_pipeline_idles_only_while_its_link_is_busy(chunks, bandwidth):
    """Two stages on one core, one link: no epoch is longer than both of these are busy, and such an
    epoch is predicted, as if both stages computed all the time. An epoch that forgets the link is
    shorter than its simulation."""
    cluster = machine(2, 1, servers=2, one_machine=True)
    cluster = changed(cluster, inter_node=Link(bandwidth=bandwidth, latency=1e-6), gemm=1e7)
    problem = problem_on(cluster, layers=4, hidden=16)
    predicted, played = epochs_s(problem, f"gnnpipe(stages=2,chunks={chunks})", 3)
    assert played <= predicted <= 1.2 * played


@pytest.mark.parametrize(
    ("one_machine", "said"),
    [(True, "the cores of the machine busy longest"), (False, r"the cores of server \d")],
)
def test_a_plan_names_cores_that_messages_keep_busy(one_machine, said):
    link = Link(bandwidth=1e9, latency=1e-6, core_s_per_byte=3e-9)
    cluster = machine(4, 1, servers=2, one_machine=one_machine)
    cluster = changed(cluster, intra_node=link, inter_node=link)
    problem = problem_on(cluster, hidden=16)
    [line] = tightest(evaluate(problem, parse("graph_parallel")))
    assert re.search(said, line)


def test_messages_that_nobody_copies_do_not_wait_for_cores():
    """Two of one server, two between: these are copied, by a core that they fill."""
    link = Link(bandwidth=1e6, latency=0.0, core_s_per_byte=1e-5)
    cluster = changed(machine(4, 1, servers=2, one_machine=True), inter_node=link)
    sent = np.zeros((4, 4))
    sent[0, 1] = sent[2, 3] = sent[0, 2] = sent[1, 3] = 1e6
    assert Flows.of(Cost(cluster), sent).finish().tolist() == pytest.approx([1.0, 20.0, 20.0, 1.0])
