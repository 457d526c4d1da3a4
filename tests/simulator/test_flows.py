"""Single flows against shares by hand, max-min fairness, the network's bundles, and queues."""

from typing import Any

import numpy as np
import pytest
import simpy
from examples import NIGHT
from hypothesis import given
from hypothesis import strategies as st
from pairwise import at_night

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric, Link
from gnnplan.simulator.network import ByFlows, Demand, Flows, Network

DEVICE = Device(memory=1e12, gemm=1e12, memory_bandwidth=1e12)


def flows(
    paths: list[dict[int, float]], capacity: list[float], nbytes: list[float] | None = None
) -> Flows:
    """Each flow's ports with their weights."""
    passes = [(i, port, weight) for i, path in enumerate(paths) for port, weight in path.items()]
    flow, port, weight = (np.array(column) for column in zip(*passes, strict=True))
    return Flows(
        np.array(nbytes or [1.0] * len(paths)), flow, port, weight.astype(float), np.array(capacity)
    )


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
    rates = asked.rates()
    filled = np.bincount(asked.port, asked.weight * rates[asked.flow], asked.capacity.size)
    assert (filled <= asked.capacity * (1 + 1e-9)).all()
    for i in range(rates.size):
        assert any(
            filled[p] >= asked.capacity[p] * (1 - 1e-9)
            and rates[i] >= rates[asked.flow[asked.port == p]].max() * (1 - 1e-9)
            for p in asked.port[asked.flow == i]
        )


@given(questions(), st.floats(0, 1))
def test_all_bytes_pass_and_nothing_is_faster_than_its_ports(asked, every):
    """While in use, a port can carry what flows send through it."""
    ends, alone = asked.finish(every), np.zeros(asked.nbytes.size)
    busy = asked.weight * asked.nbytes[asked.flow] / asked.capacity[asked.port]
    np.maximum.at(alone, asked.flow, busy)
    assert (ends >= alone * (1 - 1e-9)).all()
    for port in np.unique(asked.port):
        mine = asked.port == port
        assert busy[mine].sum() <= ends[asked.flow[mine]].max() + 1e-9
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


LOAD, CUSTOMERS, BATCHES = 0.6, 6000, 20


def arrivals(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Poisson, and sizes of mean 1 of three kinds."""
    random = np.random.default_rng(11)
    sizes = {"exponential": random.exponential(1, CUSTOMERS), "equal": np.ones(CUSTOMERS)}
    sizes["few large"] = random.exponential(1, CUSTOMERS)
    sizes["few large"] *= np.where(random.random(CUSTOMERS) < 0.2, 3.0, 0.5)
    return np.cumsum(random.exponential(1 / LOAD, CUSTOMERS)), sizes[kind]


@pytest.mark.slow
# of exponential ones a queue that serves first who comes first has the same mean
@pytest.mark.parametrize("kind", ["equal", at_night("few large"), at_night("exponential")])
def test_one_link_is_a_queue_that_shares_its_processor(kind):
    """M/G/1-PS: mean time in the system S / (1 - rho) = 2.5, whatever the sizes' distribution
    (Kleinrock 1967); first come, first served would give 1.75 with equal sizes and 4 with few large
    ones. Batch means, 99 % of Student's t, of the network's bundles."""
    starts, sizes = arrivals(kind)
    means = (by_network(starts, sizes) - starts)[CUSTOMERS // 10 :].reshape(BATCHES, -1).mean(1)
    half = 2.861 * means.std(ddof=1) / np.sqrt(BATCHES)
    assert abs(means.mean() - 1 / (1 - LOAD)) <= half < 0.75


def by_network(starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    env = simpy.Environment()
    network, ends = Network(env), np.zeros(len(sizes))

    def ended(i: int) -> None:
        ends[i] = env.now

    def arrive(i: int) -> None:
        network.start(Demand(0.0, {("nic_out", 0): float(sizes[i])}), lambda: ended(i))

    for i, start in enumerate(starts.tolist()):
        env.timeout(start).callbacks.append(lambda _, i=i: arrive(i))
    env.run()
    return ends
