"""What is between GPUs: ports against routes in the whole graph, fabrics worked by hand, and
answers that change with them."""

import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from any_wiring import LINKS, graph, route, wiring
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.fabric import links
from gnnplan.planner.cluster.placement import fewer, proposed
from gnnplan.planner.cluster.places import attached, describe_port
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric, Link
from gnnplan.planner.decision.candidate import evaluate
from gnnplan.planner.decision.explain import tightest
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Send
from gnnplan.simulator.player import play

DEVICE = Device(name="toy", memory=1e12, gemm=1e12, memory_bandwidth=1e12)
RING, LEAVES = (
    Fabric(kind="ring", latency=0.5),
    Fabric(kind="leaf_spine", servers_per_leaf=2, oversubscription=4, latency=0.5),
)


def cluster(servers: int, gpus: int = 1, **more: Any) -> Cluster:
    links = {
        "intra_node": Link(bandwidth=1e9, latency=1.0),
        "inter_node": Link(bandwidth=1e8, latency=2.0),
    }
    return Cluster(
        servers=servers,
        gpus_per_server=gpus,
        **{"device": DEVICE, "all_reduce": "ring", **links, **more},
    )


@st.composite
def clusters(draw: st.DrawFn, ranks: int = 12) -> Cluster:
    """Any lists of GPUs, any fabric, with and without peer access."""
    servers = draw(st.integers(1, 7))
    gpus = draw(st.integers(1, max(1, ranks // servers)))
    more = wiring(draw, gpus)
    if draw(st.booleans()):
        more |= {"peer_access": False, "host": draw(LINKS), "bridge": draw(st.none() | LINKS)}
    kind = draw(st.sampled_from([None, "ring", "leaf_spine"]))
    if kind:
        per_leaf = draw(st.integers(1, 3)) if kind == "leaf_spine" else None
        more["fabric"] = Fabric(
            kind=kind,
            servers_per_leaf=per_leaf,
            oversubscription=draw(st.sampled_from([0.5, 1.0, 3.0])),
        )
    return cluster(servers, gpus, **more)


def bytes_by_port(cost: Cost, transfer: Any) -> dict[tuple[str, int], float]:
    links = {"gpu": "intra_node", "island": "island", "switch": "switch", "nic": "inter_node"}

    def bandwidth(kind: str) -> float:
        if kind == "fabric":
            return cost.ports.fabric_link("send", cost.cluster.fabric).bandwidth
        return (
            cost.cluster.bridge.bandwidth
            if kind == "bridge"
            else cost.ports.link("send", links[kind]).bandwidth
        )

    return {
        port: seconds * bandwidth(port[0].split("_")[0]) for port, seconds in transfer.busy.items()
    }


# -- ports are routes ------------------------------------------------------------------------------


@given(clusters())
@settings(deadline=None, max_examples=examples(60))
def test_a_message_fills_the_ports_on_its_way(where):
    """networkx walks from GPU to GPU; of several shortest ways one, so half way round a ring it
    says half of what is so."""
    where = where.model_copy(update={"peer_access": True, "bridge": None})
    cost, whole = Cost(where), graph(where)
    for a in range(where.ranks):
        for b in range(where.ranks):
            if a != b:
                passed, path = (
                    bytes_by_port(cost, cost.send(a, Send(b, 1000))),
                    route(whole, a, b),
                )
                fabric = {port for port in passed if port[0] == "fabric"}
                assert set(path) - {p for p in path if p[0] == "fabric"} == set(passed) - fabric
                assert all(
                    nbytes == pytest.approx(1000 if p not in fabric or p in path else 500, rel=1e-9)
                    or nbytes == pytest.approx(500)
                    for p, nbytes in passed.items()
                )
                assert sum(passed[p] for p in fabric) == pytest.approx(
                    1000 * sum(p[0] == "fabric" for p in path)
                )


@given(clusters(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(60))
def test_bytes_over_links_are_conserved(where, seed):
    """As many bytes come into a server's place in the fabric as its cards send plus what passes on,
    at every node; and in all as many bytes are on links as messages have, times the links on their
    way."""
    random = np.random.default_rng(seed)
    n = where.ranks
    sent = random.integers(0, 1000, (n, n)) * (random.random((n, n)) < 0.6)
    np.fill_diagonal(sent, 0)
    cost = Cost(where)
    passed = bytes_by_port(cost, cost.exchange(sent))
    by_link = cost.bytes_by_link(sent)
    for way in ("out", "in"):
        assert sum(b for p, b in passed.items() if p[0] == f"nic_{way}") == pytest.approx(
            by_link.get("inter_node", 0)
        )
        assert sum(b for p, b in passed.items() if p[0] == f"island_{way}") == pytest.approx(
            by_link.get("island", 0)
        )
        staged = 0 if where.peer_access else by_link.get("inter_node", 0)
        assert sum(b for p, b in passed.items() if p[0] == f"gpu_{way}") == pytest.approx(
            by_link.get("intra_node", 0) + staged
        )
    if where.bridge:
        assert sum(b for p, b in passed.items() if p[0] == "bridge") == pytest.approx(
            2 * by_link.get("intra_node", 0) + 4 * by_link.get("inter_node", 0)
        )
    if where.fabric and where.servers > 1:
        between = nx.DiGraph(links(where.fabric, where.servers))
        between.add_nodes_from(attached(where, s) for s in range(where.servers))
        flow = {
            edge: passed.get(("fabric", i), 0.0)
            for i, edge in enumerate(links(where.fabric, where.servers))
        }
        servers = cost.places.server
        for node in between:
            here = np.array([attached(where, int(s)) == node for s in servers])
            leaving, arriving = sent[here][:, ~here].sum(), sent[~here][:, here].sum()
            out, into = (sum(b for edge, b in flow.items() if edge[end] == node) for end in (0, 1))
            assert out - into == pytest.approx(leaving - arriving, abs=1e-6)
        distance = dict(nx.all_pairs_shortest_path_length(between))
        assert sum(flow.values()) == pytest.approx(
            sum(
                sent[a, b]
                * distance[attached(where, int(servers[a]))][attached(where, int(servers[b]))]
                for a in range(n)
                for b in range(n)
            )
        )


# -- by hand ---------------------------------------------------------------------------------------


def test_a_ring_of_servers():
    """Five servers: from 0 to 2 over 1, from 0 to 3 over 4; of four, half way round goes both ways.
    A cable is as fast as a card."""
    cost = Cost(cluster(5, fabric=RING))
    ports = {edge: i for i, edge in enumerate(links(RING, 5))}

    def passed(where: Cost, a: int, b: int) -> dict[tuple[int, int], float]:
        names = {i: (x[1], y[1]) for i, (x, y) in enumerate(links(RING, where.cluster.servers))}
        return {
            names[p[1]]: s
            for p, s in where.send(a, Send(b, 10**8)).busy.items()
            if p[0] == "fabric"
        }

    assert len(ports) == 10
    assert passed(cost, 0, 1) == {(0, 1): 1.0} and passed(cost, 0, 2) == {(0, 1): 1.0, (1, 2): 1.0}
    assert passed(cost, 0, 3) == {(0, 4): 1.0, (4, 3): 1.0} and passed(
        Cost(cluster(2, fabric=RING)), 0, 1
    ) == {(0, 1): 1.0}
    assert passed(Cost(cluster(4, fabric=RING)), 1, 3) == dict.fromkeys(
        [(1, 2), (2, 3), (1, 0), (0, 3)], 0.5
    )
    assert cost.send(0, Send(2, 10**8)).alone == 2.0 + 2 * 0.5 + 1.0
    everyone = cost.exchange(1e8 * ~np.eye(5, dtype=bool))
    assert everyone.latency == 4 * 2.0 + (1 + 2 + 2 + 1) * 0.5
    assert [everyone.busy["fabric", i] for i in range(10)] == pytest.approx(
        [3.0] * 10
    ) and everyone.alone == pytest.approx(11.0 + 4.0)
    ring = cost.all_reduce(10**8, range(5))
    assert ring.latency == 8 * 2.5
    # one way round
    assert [s for p, s in sorted(ring.busy.items()) if p[0] == "fabric"] == pytest.approx([1.6] * 5)


def test_leaves_share_their_uplinks():
    """Two servers of two cards per leaf, four times oversubscribed: an uplink is as fast as one
    card, all exchange with all."""
    cost = Cost(cluster(4, 2, nics=[[0], [1]], fabric=LEAVES))
    assert not [p for p in cost.send(0, Send(2, 1)).busy if p[0] == "fabric"]  # below one leaf
    assert {p[0]: s for p, s in cost.send(0, Send(4, 10**8)).busy.items()} == {
        "nic_out": 1.0,
        "fabric": 1.0,
        "nic_in": 1.0,
    }
    everyone = cost.exchange(1e8 * ~np.eye(8, dtype=bool))
    assert everyone.busy["nic_out", 0] == pytest.approx(6.0)
    # 4 GPUs x 4 of the other leaf
    assert [s for p, s in everyone.busy.items() if p[0] == "fabric"] == pytest.approx([16.0] * 4)
    assert everyone.latency == 1 * 1.0 + 6 * 2.0 + 4 * 2 * 0.5


@given(clusters(), st.integers(0, 10**6))
@settings(deadline=None, max_examples=examples(40))
def test_a_leaf_that_is_not_oversubscribed_is_no_bottleneck(where, seed):
    """One big switch, and the same servers on leaves with as many uplinks as cards: equal but for
    the latency."""
    random = np.random.default_rng(seed)
    sent = random.integers(0, 1000, (where.ranks,) * 2) * ~np.eye(where.ranks, dtype=bool)
    full = Fabric(kind="leaf_spine", servers_per_leaf=2, oversubscription=1, latency=0)
    plain, leaves = (
        Cost(where.model_copy(update={"fabric": fabric})).exchange(sent) for fabric in (None, full)
    )
    assert leaves.alone == pytest.approx(plain.alone)


# -- better networks -------------------------------------------------------------------------------


@st.composite
def improvements(draw: st.DrawFn, where: Cluster) -> Cluster:
    """One number of the network, better."""
    factor = draw(st.floats(1.0, 50.0))
    names = [
        name
        for name in ("intra_node", "inter_node", "island", "switch", "host", "bridge")
        if getattr(where, name)
    ]
    name = draw(st.sampled_from([*names, *["fabric"] * (where.fabric is not None)]))
    if name == "fabric":
        assert where.fabric
        better: dict[str, Any] = draw(
            st.sampled_from(
                [
                    {"oversubscription": where.fabric.oversubscription / factor},
                    {"latency": where.fabric.latency / factor},
                ]
            )
        )
    else:
        link = getattr(where, name)
        better = draw(
            st.sampled_from(
                [{"bandwidth": link.bandwidth * factor}, {"latency": link.latency / factor}]
            )
        )
    return where.model_copy(update={name: getattr(where, name).model_copy(update=better)})


@given(
    st.data(),
    clusters(),
    st.integers(0, 10**6),
    st.sampled_from([None, "ring", "tree", "hierarchical"]),
    st.booleans(),
)
@settings(deadline=None, max_examples=examples(60))
def test_a_better_network_is_never_slower(data, where, seed, algorithm, curved):
    """No exchange, no all-reduce, and not on any port, so that no plan is slower that fills ports
    with several."""
    more: dict[str, Any] = {"all_reduce": algorithm}
    if curved:
        more["inter_node"] = Link(
            **where.inter_node.model_dump(exclude={"efficiency"}), efficiency={1e3: 0.1, 1e6: 0.9}
        )  # type: ignore
    where = where.model_copy(update=more)
    before, after = Cost(where), Cost(data.draw(improvements(where)))
    n = where.ranks
    sent = np.random.default_rng(seed).integers(0, 10**6, (n, n)) * ~np.eye(n, dtype=bool)
    exchanges, sums = (
        [cost.exchange(sent) for cost in (before, after)],
        [cost.all_reduce(seed, range(n)) for cost in (before, after)],
    )
    for now, better in (exchanges, sums):
        assert float(better.alone) <= float(now.alone) * (1 + 1e-9)
        assert better.busy.keys() == now.busy.keys()
        assert all(better.busy[port] <= seconds * (1 + 1e-9) for port, seconds in now.busy.items())


# -- placement and answers -------------------------------------------------------------------------


def test_neighbours_in_a_ring_are_placed_side_by_side():
    """Six parts, each reads that opposite in the order given: a placement brings them together, and
    on one switch nothing is gained."""
    sent = np.zeros((6, 6))
    for a in range(3):
        sent[a, a + 3] = sent[a + 3, a] = 1e8
    for fabric, gains in ((Fabric(kind="ring", oversubscription=2), True), (None, False)):
        where = cluster(6, fabric=fabric)
        placement = proposed(where, range(6), [sent], ())[-1]
        assert (placement != tuple(range(6))) == gains
        assert {(placement[a] - placement[a + 3]) % 6 in (1, 5) for a in range(3)} == {gains}


def test_hidden_groups_are_found_among_32_gpus():
    """Four groups of eight ranks that talk among themselves, their numbers shuffled, on four leaves
    of two servers: as fast as if nobody had shuffled them."""
    where = cluster(8, 4, fabric=LEAVES.model_copy(update={"latency": 1e-6}))
    member = np.random.default_rng(3).permutation(32) // 8
    sent = 1e8 * (np.equal.outer(member, member) & ~np.eye(32, dtype=bool))
    unshuffled = sent[np.ix_(np.argsort(member), np.argsort(member))]
    placements = proposed(where, range(32), [sent], ())
    found = min(float(Cost(where, each).exchange(sent).alone) for each in placements)
    ideal, given = (float(Cost(where).exchange(each).alone) for each in (unshuffled, sent))
    assert found == pytest.approx(ideal) and ideal < given / 2


def test_one_leaf_is_offered():
    assert fewer(cluster(4, 2, fabric=LEAVES)) == [(0, 1), (0, 1, 2, 3), (0, 2, 4, 6), (0,)]


SOURCE = "synthetic:community?vertices=2000&edges=60000&features=40&classes=5&communities=8&mixing=0.6&seed=0"


def problem_of(fabric: Fabric | None, **more: Any) -> Problem:
    data = load(SOURCE)
    links = {
        "intra_node": Link(bandwidth=1e10, latency=1e-6),
        "inter_node": Link(bandwidth=6e9, latency=1e-6),
    }
    where = cluster(16, 1, **{**links, "fabric": fabric, **more})
    return Problem(data.stats, data, Workload(model="gcn", layers=8, hidden=256), where)


def test_a_ring_of_servers_gets_another_plan_than_a_fat_tree():
    """Sixteen servers, cables as fast as cards. Halos go from everyone to everyone, and round a
    ring they pass four cables on average; an all-reduce passes one at a time. So exchanging halos
    wins on the fat tree, and recomputing them on the ring."""
    tree, ring = (
        problem_of(Fabric(kind="leaf_spine", servers_per_leaf=2)),
        problem_of(Fabric(kind="ring")),
    )
    for problem, winner in ((tree, "graph_parallel"), (ring, "granndis")):
        halos = evaluate(problem, parse("graph_parallel"))
        recomputed = [evaluate(problem, parse(f"granndis(depth={depth})")) for depth in (4, 8)]
        assert (
            min([halos, *recomputed], key=lambda c: float(c.predicted.epoch_s)).strategy.family
            == winner
        )
    strategy = parse("graph_parallel")
    for problem in (tree, ring):
        assert play(strategy.schedule(problem, 3), problem.cost).step_s == pytest.approx(
            float(strategy.predict(problem).epoch_s), rel=strategy.claim
        )
    assert float(strategy.predict(ring).comm_s) > 1.5 * float(strategy.predict(tree).comm_s)


def test_a_plan_names_the_tightest_link():
    """Four times oversubscribed, an uplink; on one switch a card; in one server a GPU's way out, by
    its GPU and not its rank."""
    for fabric, words in (
        (
            LEAVES,
            (
                r"keep (leaf \d -> spine 0|spine 0 -> leaf \d) busy longest \(other links:"
                r" .*NIC \d+.*: \d\d % of this time\)$"
            ),
        ),
        (None, r"keep (NIC \d+ -> network 0|network 0 -> NIC \d+) busy longest$"),
    ):
        problem = problem_of(fabric and fabric.model_copy(update={"latency": 1e-6}))
        (sentence,) = tightest(evaluate(problem, parse("graph_parallel")))
        assert re.search(words, sentence), sentence
    where = cluster(
        1,
        3,
        switches=[[0, 1], [2]],
        switch=Link(bandwidth=1e8),
        peer_access=False,
        bridge=Link(bandwidth=1e8),
    )
    ports = {
        ("gpu_out", 0): "GPU 2 -> switch 1",
        ("gpu_in", 1): "switch 0 -> GPU 0",
        ("switch_out", 1): "switch 1 -> host 0",
        ("bridge", 0): "the memory of server 0",
    }
    assert {port: describe_port(where, (2, 0, 1), port) for port in ports} == ports


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (
            ["fabric.kind=leaf_spine"],
            r"servers_per_leaf belongs to kind leaf_spine, which needs it",
        ),
        (["fabric.kind=ring", "fabric.servers_per_leaf=2"], r"kind: ring, servers_per_leaf: 2"),
        (["fabric.kind=torus"], r"must be 'leaf_spine' or 'ring'"),
        (["fabric.kind=ring", "fabric.oversubscription=0"], "greater than 0"),
        (["fabric.kind=ring", "servers=600"], "at most 512 leaves, or servers in its ring"),
        (["bridge.bandwidth=10GB/s"], "give peer_access: false too"),
    ],
)
def test_impossible_fabrics(settings, rule):
    with pytest.raises(SpecError, match=rule):
        apply_overrides(cluster(8), Workload(), settings)


def test_a_fabric_may_be_set():
    told = ["fabric.kind=leaf_spine", "fabric.servers_per_leaf=4", "fabric.oversubscription=3"]
    changed, _ = apply_overrides(cluster(8), Workload(), told)
    assert changed.fabric == Fabric(kind="leaf_spine", servers_per_leaf=4, oversubscription=3)
    curved = changed.model_copy(
        update={"inter_node": Link(bandwidth=1e9, efficiency={"64KiB": 0.3, "4MiB": 0.9})}
    )
    assert Cluster.model_validate_json(curved.model_dump_json()) == curved  # as a plan keeps it
    assert curved.inter_node and curved.inter_node.efficiency == {65536: 0.3, 4194304: 0.9}
