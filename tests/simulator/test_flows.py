"""The network: its shares by hand and max-min fair, single flows, bundles and ends. And ranks on a
CPU share its cores: by hand, against the closed form, and with copied messages."""

import random
import re
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import simpy
from asked import changed, epochs_s
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHT, covered, pairs
from scipy.sparse import csc_array

from gnnplan.planner.cluster import compute
from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric, Link
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.explain import tightest
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load as load_graph
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.schedule import Compute, Label, Schedule, Send, Task
from gnnplan.simulator.network import ByFlows, Demand, Flows, Network, max_min
from gnnplan.simulator.player import play
from gnnplan.testing.laws import sums

DEVICE = Device(memory=1e12, gemm=1e12, memory_bandwidth=1e12)


def flows(
    paths: list[dict[int, float]], capacity: list[float], nbytes: list[float] | None = None
) -> Flows:
    """Each flow's ports with their weights."""
    passes = [[path.get(port, 0.0) for path in paths] for port in range(len(capacity))]
    return Flows(np.array(nbytes or [1.0] * len(paths)), csc_array(passes), np.array(capacity))


def test_three_flows_over_two_links():
    """A and B share 1, B and C share 2: B gets half of the first, C what B leaves of the second."""
    three = flows([{0: 1}, {0: 1, 1: 1}, {1: 1}], [1.0, 2.0], nbytes=[1.0, 2.0, 3.0])
    assert three.rates().tolist() == [0.5, 0.5, 1.5]
    # at 2 A and C have ended, and B goes on alone: 1 of its 2 bytes is left, at rate 1
    assert three.finish().tolist() == [2.0, 3.0, 2.0]


def test_what_is_left_lies_idle_until_rates_are_found_anew():
    """Ends at 2 and 3; looked at every 2.5 s, the second goes on at half speed to 2.5."""
    two = flows([{0: 1}, {0: 1}], [1.0], [1.0, 2.0])
    assert two.finish().tolist() == [2.0, 3.0] and two.finish(every=2.5).tolist() == [2.0, 3.25]


@st.composite
def questions(draw: st.DrawFn, most: int = 6, ports: int = 4) -> Flows:
    """Sixteenths, so that ties happen."""
    part = st.integers(1, 16).map(lambda k: k / 16)
    path = st.dictionaries(st.integers(0, ports - 1), part, min_size=1)
    paths = draw(st.lists(path, min_size=1, max_size=most))
    capacity, nbytes = (
        draw(st.lists(part, min_size=size, max_size=size)) for size in (ports, len(paths))
    )
    return flows(paths, capacity, nbytes)


@given(questions(most=30, ports=6))
def test_every_flow_has_a_full_port_where_nobody_is_faster(asked):
    """Which is what max-min fair means (Bertsekas and Gallager, Data Networks, 6.5.2)."""
    rates, passes = asked.rates(), asked.passes.toarray() > 0
    filled = asked.passes @ rates
    assert (filled <= asked.capacity * (1 + 1e-9)).all()
    for i in range(rates.size):
        assert any(
            filled[p] >= asked.capacity[p] * (1 - 1e-9)
            and rates[i] >= rates[passes[p]].max() * (1 - 1e-9)
            for p in np.flatnonzero(passes[:, i])
        )


@given(questions(), st.floats(0, 1))
def test_all_bytes_pass_and_nothing_is_faster_than_its_ports(asked, every):
    """While in use, a port can carry what flows send through it."""
    ends = asked.finish(every)
    busy = asked.passes.toarray() * asked.nbytes / asked.capacity[:, None]  # [ports, flows]
    assert (ends >= busy.max(0) * (1 - 1e-9)).all()
    for mine in busy[busy.any(1)]:
        assert mine.sum() <= ends[mine > 0].max() + 1e-9
    assert asked.bound <= ends.max() * (1 + 1e-9)


def cost_of(servers: int, gpus: int, fabric: Fabric | None = None, **more: Any) -> Cost:
    of = {"intra_node": Link(bandwidth=5e10, latency=0.0), "fabric": fabric, "device": DEVICE}
    of |= {"inter_node": Link(bandwidth=1e10, latency=0.0)} | more
    return Cost(Cluster(servers=servers, gpus_per_server=gpus, **of))


def irregular(ranks: int, seed: int = 0) -> np.ndarray:
    sent = np.random.default_rng(seed).lognormal(0, 1, (ranks, ranks)) * 1e6
    return sent * ~np.eye(ranks, dtype=bool)


PLACES = {
    "one switch": cost_of(12, 1),
    "servers": cost_of(4, 3),
    "two cards": cost_of(3, 4, nics=[[0, 1], [2, 3]]),
    "leaves": cost_of(12, 1, Fabric(kind="leaf_spine", servers_per_leaf=3, oversubscription=3)),
    "ring": cost_of(12, 1, Fabric(kind="ring")),
    "staged": cost_of(2, 6, peer_access=False, bridge=Link(bandwidth=8e10)),
    "small messages": cost_of(
        4, 3, inter_node=Link(bandwidth=1e10, latency=0.0, efficiency={"100kB": 0.2, "10MB": 1.0})
    ),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_port_bound_is_an_exchange_alone_and_close_to_max_min(name):
    """cost.py's answer, made of the same ports. Messages with rates of their own are never faster;
    mostly within 2 % of it, and up to 14 % slower (a ring) where a few of them wait for one link
    while they could fill another."""
    ratios = []
    for seed in range(6 if NIGHT else 3):
        sent = irregular(12, seed)
        exchange, alone = Flows.of(PLACES[name], sent), PLACES[name].exchange(sent)
        assert exchange.bound == pytest.approx(float(alone.alone - alone.latency))
        ratios.append(exchange.finish().max() / exchange.bound)
    assert min(ratios) >= 1 - 1e-9 and np.median(ratios) <= 1.02 and max(ratios) <= 1.15


@pytest.mark.parametrize("name", PLACES)
def test_an_exchange_by_flows_has_the_same_bytes_on_its_ports_and_waits_for_the_last(name):
    """On one switch next to nothing is gained; all seeds together, a ring of servers takes longer.
    Of some ranks as of all."""
    cost, longer = PLACES[name], []
    single = ByFlows.like(cost)
    for seed in range(6 if NIGHT else 3):
        sent = irregular(12, seed)
        bundle, flows = cost.exchange(sent), single.exchange(sent)
        assert flows.busy == bundle.busy
        longer.append(flows.alone / bundle.alone)
        last = Flows.of(cost, sent).finish().max()
        assert last * (1 - 1e-9) <= flows.alone - bundle.latency <= last * 1.02
    assert min(longer) >= 1 - 1e-9 and (max(longer) > 1.1 if name == "ring" else max(longer) < 1.12)
    some = irregular(5)
    whole = np.zeros((12, 12))
    whole[np.ix_([1, 4, 6, 7, 11], [1, 4, 6, 7, 11])] = some
    assert single.exchange(some, (1, 4, 6, 7, 11)) == single.exchange(whole)
    assert single.exchange(np.zeros((12, 12))).alone == 0.0


A, B, C, D = (("nic_out", i) for i in range(4))


def ends(*starts: tuple[float, Demand], threads: tuple[int, ...] = ()) -> list[float]:
    """When transfers that start at these times, by so many threads each (one), end [s]."""
    env = simpy.Environment()
    network = Network(env)
    over = [float("nan")] * len(starts)

    def done(i):
        assert over[i] != over[i], "a transfer ends once"
        over[i] = env.now

    for i, (start, transfer) in enumerate(starts):
        env.timeout(start).callbacks.append(
            lambda _, i=i, transfer=transfer: network.start(
                transfer, lambda: done(i), threads[i] if threads else 1
            )
        )
    env.run()
    assert not any(network._users.values())
    return over


def load(*, after: float = 0.0, latency: float = 0.0, **seconds: float) -> tuple[float, Demand]:
    """A transfer that starts after so long, and is busy at ports for so long."""
    return after, Demand(latency, {globals()[port]: took for port, took in seconds.items()})


def test_without_bytes_a_transfer_takes_its_latency():
    assert ends(load(after=1.0, latency=0.5), load(after=1.0, A=0.0)) == [1.5, 1.0]


def test_three_over_two_ports():
    """A is full at 1/2; of B the second then fills 1/4, and the third gets 3/4."""
    assert max_min([{A: 1.0}, {A: 1.0, B: 0.5}, {B: 1.0}]) == pytest.approx([1 / 2, 1 / 2, 3 / 4])


def test_threads_have_equally_much_of_a_core_but_not_of_a_wire():
    """Three of four threads are the first's; on a wire it is one of two, whoever takes part."""
    for port, expected in ((("cores", 0), [4.0, 6.0]), (A, [6.0, 6.0])):
        both = [(0, Demand(0, {port: 3.0}))] * 2
        assert ends(*both, threads=(3, 1)) == expected


@st.composite
def demands(draw, flows: int = 5, ports: int = 4) -> list[dict]:
    """Seconds per port; sixteenths, so that ties happen."""
    seconds = st.integers(1, 16).map(lambda k: k / 16)
    busy = st.dictionaries(st.sampled_from([A, B, C, D][:ports]), seconds, min_size=1)
    return draw(st.lists(busy, min_size=1, max_size=flows))


def scaled(busy: dict) -> dict:
    return {port: s / max(busy.values()) for port, s in busy.items()}


@given(demands(flows=20), st.lists(st.integers(1, 64).map(lambda k: k / 16), min_size=20))
def test_everyone_has_a_bottleneck(busy, weights):
    """No port is overfull, and everyone is among the fastest, by weight, on some full port."""
    shares = [scaled(b) for b in busy]
    rates = max_min(shares, weights[: len(shares)])
    users = {p: [i for i, s in enumerate(shares) if p in s] for p in (A, B, C, D)}
    filled = {p: sum(rates[i] * shares[i][p] for i in users[p]) for p in users}
    assert max(filled.values()) <= 1 + 1e-12
    for i, share in enumerate(shares):
        level = rates[i] / weights[i]
        assert any(
            filled[p] > 1 - 1e-9 and level >= max(rates[j] / weights[j] for j in users[p]) - 1e-9
            for p in share
        )


def by_plain_loop(starts: list[tuple[float, Demand]]) -> list[float]:
    """All rates anew at every event."""
    wait = {i: start + transfer.latency for i, (start, transfer) in enumerate(starts)}
    left: dict[int, float] = {}
    over, now = [0.0] * len(starts), 0.0
    while wait or left:
        for i in [i for i in wait if wait[i] <= now]:
            del wait[i]
            left[i] = max(starts[i][1].busy.values(), default=0.0)
        for i in [i for i in left if left[i] <= 1e-9]:
            del left[i]
            over[i] = now
        going = list(left)
        rates = dict(zip(going, max_min([scaled(starts[i][1].busy) for i in going]), strict=True))
        after = min(
            [left[i] / rates[i] for i in going] + [at - now for at in wait.values()], default=0.0
        )
        for i in going:
            left[i] -= rates[i] * after
        now += after
    return over


@st.composite
def starting(draw) -> list[tuple[float, Demand]]:
    times = st.integers(0, 8).map(lambda k: k / 4)
    return [(draw(times), Demand(draw(times), busy)) for busy in draw(demands(flows=10))]


@given(starting())
def test_the_network_equals_a_plain_loop(starts):
    assert ends(*starts) == pytest.approx(by_plain_loop(starts), abs=1e-7)


def test_a_thousand_odd_numbers_late_in_time_all_end():
    """Times near 1e6 s swallow the last bits of short transfers: nothing may hang or be lost."""
    random.seed(0)
    starts = []
    for _ in range(300):
        latency, late = random.choice([0.0, 1e-7 / 3]), 1e6 + random.random() * 1e-3
        starts.append((late, Demand(latency, {p: 10 ** random.uniform(-15, -3) for p in (A, B)})))
        far = {C: 10 ** random.uniform(-12, 3), D: 10 ** random.uniform(-300, -200)}
        starts.append((0.0, Demand(1 / 3, far)))
    assert all(end >= start for end, (start, _) in zip(ends(*starts), starts, strict=True))


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
    graph = load_graph(GRAPH)
    return Problem(graph.stats, graph, Workload(**workload), cluster, "metis")


def all_ends(cluster: Cluster, seconds: list[float]) -> list[float]:
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
    assert all_ends(cluster, seconds) == pytest.approx(expected)
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
        assert max(all_ends(cluster, seconds)) == pytest.approx(last)
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
    cluster = changed(machine(4, cores), intra_node=fast, host_rates={"draw": 3e4, "lay": 3e4})
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
    [line] = tightest(evaluate(problem_on(cluster, hidden=16), parse("graph_parallel")))
    assert re.search(said, line)


def test_messages_that_nobody_copies_do_not_wait_for_cores():
    """Two of one server, two between: these are copied, by a core that they fill."""
    link = Link(bandwidth=1e6, latency=0.0, core_s_per_byte=1e-5)
    cluster = changed(machine(4, 1, servers=2, one_machine=True), inter_node=link)
    sent = np.zeros((4, 4))
    sent[0, 1] = sent[2, 3] = sent[0, 2] = sent[1, 3] = 1e6
    assert Flows.of(Cost(cluster), sent).finish().tolist() == pytest.approx([1.0, 20.0, 20.0, 1.0])
