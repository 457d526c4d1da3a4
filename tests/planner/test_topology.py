"""What is between GPUs: ports against routes in the whole graph, and fabrics by hand."""

import re
from collections import Counter
from itertools import permutations
from typing import Any

import networkx as nx
import numpy as np
import pytest
from any_wiring import between, graph, route, wiring
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed
from gnnplan.planner.cluster.places import attached, describe_port, links
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
LINKS = {"intra_node": Link(bandwidth=1e9), "inter_node": Link(bandwidth=1e8)}
RING = Fabric.model_construct(kind="ring", latency=0.5)
OVERSUBSCRIBED = {"kind": "leaf_spine", "servers_per_leaf": 2, "oversubscription": 4}
LEAVES = Fabric.model_construct(**OVERSUBSCRIBED, latency=0.5)


def cluster(servers: int, gpus: int = 1, **more: Any) -> Cluster:
    """With latencies of seconds, which a file may not have."""
    links = {"intra_node": (1e9, 1.0), "inter_node": (1e8, 2.0)}
    of = {n: Link.model_construct(bandwidth=b, latency=s) for n, (b, s) in links.items()}
    of |= {"device": DEVICE, "all_reduce": "ring"} | more
    return Cluster(servers=servers, gpus_per_server=gpus, **of)


@st.composite
def clusters(draw: st.DrawFn, ranks: int = 12) -> Cluster:
    """Any lists of GPUs, any fabric, with and without peer access."""
    servers = draw(st.integers(1, 7))
    gpus = draw(st.integers(1, max(1, ranks // servers)))
    fabric = {"oversubscription": draw(st.sampled_from([0.5, 1.0, 3.0]))}
    return cluster(servers, gpus, **wiring(draw, gpus), **between(draw, **fabric))


def bytes_by_port(cost: Cost, transfer: Any) -> dict[tuple[str, int], float]:
    links = {"gpu": "intra_node", "island": "island", "switch": "switch", "nic": "inter_node"}

    def link(kind: str) -> Link:
        if kind == "fabric":
            return cost.ports.fabric_link("send", cost.cluster.fabric)
        return cost.cluster.bridge if kind == "bridge" else cost.ports.link("send", links[kind])

    busy = transfer.busy.items()
    return {port: seconds * link(port[0].split("_")[0]).bandwidth for port, seconds in busy}


@given(clusters())
@settings(max_examples=examples(60))
def test_a_message_fills_the_ports_on_its_way(where):
    """networkx walks a shortest way; half way round a ring each of two ways takes half."""
    where = where.model_copy(update={"peer_access": True, "bridge": None})
    cost, whole = Cost(where), graph(where)
    for a, b in permutations(range(where.ranks), 2):
        passed, path = bytes_by_port(cost, cost.send(a, Send(b, 1000))), route(whole, a, b)
        cables = [port for port in path if port[0] == "fabric"]
        inside = {port: nbytes for port, nbytes in passed.items() if port[0] != "fabric"}
        assert inside == pytest.approx(dict.fromkeys(set(path) - {*cables}, 1000))
        between = {port: nbytes for port, nbytes in passed.items() if port[0] == "fabric"}
        assert sum(between.values()) == pytest.approx(1000 * len(cables))
        for port, nbytes in between.items():
            known = (500, 1000) if port in cables else (500,)
            assert any(nbytes == pytest.approx(one) for one in known)


@given(clusters(), st.integers(0, 10**6))
@settings(max_examples=examples(60))
def test_bytes_over_links_are_conserved(where, seed):
    """At every node, and in all: links carry messages' bytes times the links on their way."""
    random, n = np.random.default_rng(seed), where.ranks
    sent = random.integers(0, 1000, (n, n)) * (random.random((n, n)) < 0.6)
    np.fill_diagonal(sent, 0)
    cost = Cost(where)
    passed, by_link = bytes_by_port(cost, cost.exchange(sent)), cost.bytes_by_link(sent)
    of_kind = Counter[str]()
    for (kind, _), nbytes in passed.items():
        of_kind[kind] += nbytes
    inside, across = (by_link.get(link, 0) for link in ("intra_node", "inter_node"))
    for way in ("out", "in"):
        assert of_kind[f"nic_{way}"] == pytest.approx(across)
        assert of_kind[f"island_{way}"] == pytest.approx(by_link.get("island", 0))
        staged = 0 if where.peer_access else across
        assert of_kind[f"gpu_{way}"] == pytest.approx(inside + staged)
    if where.bridge:
        assert of_kind["bridge"] == pytest.approx(2 * inside + 4 * across)
    if where.fabric and where.servers > 1:
        between = nx.DiGraph(links(where.fabric, where.servers))
        at = [attached(where, int(server)) for server in cost.places.server]
        between.add_nodes_from(at)
        edges = enumerate(links(where.fabric, where.servers))
        flow = {edge: passed.get(("fabric", i), 0.0) for i, edge in edges}
        for node in between:
            here = np.array([place == node for place in at])
            leaving, arriving = sent[here][:, ~here].sum(), sent[~here][:, here].sum()
            out, into = (sum(b for edge, b in flow.items() if edge[end] == node) for end in (0, 1))
            assert out - into == pytest.approx(leaving - arriving, abs=1e-6)
        distance = dict(nx.all_pairs_shortest_path_length(between))
        hops = np.array([[distance[a][b] for b in at] for a in at])
        assert sum(flow.values()) == pytest.approx((sent * hops).sum())


def test_a_ring_of_servers():
    """Five servers: 0 to 2 over 1; all to all, each cable has three of ten; a sum goes one way."""
    cost = Cost(cluster(5, fabric=RING))
    assert cost.send(0, Send(2, 10**8)).alone == 2.0 + 2 * 0.5 + 1.0
    everyone = cost.exchange(1e8 * ~np.eye(5, dtype=bool))
    assert everyone.latency == 4 * 2.0 + (1 + 2 + 2 + 1) * 0.5
    assert [everyone.busy["fabric", i] for i in range(10)] == pytest.approx([3.0] * 10)
    assert everyone.alone == pytest.approx(11.0 + 4.0)
    ring = cost.all_reduce(10**8, range(5))
    assert ring.latency == 8 * 2.5
    assert [s for p, s in sorted(ring.busy.items()) if p[0] == "fabric"] == pytest.approx([1.6] * 5)


def test_leaves_share_their_uplinks():
    """Two servers of two cards per leaf, four times oversubscribed: an uplink is as fast as one
    card, all exchange with all."""
    cost = Cost(cluster(4, 2, nics=[[0], [1]], fabric=LEAVES))
    assert not [p for p in cost.send(0, Send(2, 1)).busy if p[0] == "fabric"]  # below one leaf
    busy = {port[0]: seconds for port, seconds in cost.send(0, Send(4, 10**8)).busy.items()}
    assert busy == {"nic_out": 1.0, "fabric": 1.0, "nic_in": 1.0}
    everyone = cost.exchange(1e8 * ~np.eye(8, dtype=bool))
    assert everyone.busy["nic_out", 0] == pytest.approx(6.0)
    # 4 GPUs x 4 of the other leaf
    assert [s for p, s in everyone.busy.items() if p[0] == "fabric"] == pytest.approx([16.0] * 4)
    assert everyone.latency == 1 * 1.0 + 6 * 2.0 + 4 * 2 * 0.5


@given(clusters(), st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_a_leaf_that_is_not_oversubscribed_is_no_bottleneck(where, seed):
    """One big switch, and leaves with as many uplinks as cards: equal but for the latency."""
    random = np.random.default_rng(seed)
    sent = random.integers(0, 1000, (where.ranks,) * 2) * ~np.eye(where.ranks, dtype=bool)
    full = Fabric(kind="leaf_spine", servers_per_leaf=2, oversubscription=1, latency=0)
    plain, leaves = (
        Cost(where.model_copy(update={"fabric": fabric})).exchange(sent) for fabric in (None, full)
    )
    assert leaves.alone == pytest.approx(plain.alone)


@st.composite
def improvements(draw: st.DrawFn, where: Cluster) -> Cluster:
    """One number of the network, better."""
    factor = draw(st.floats(1.0, 50.0))
    links = ("intra_node", "inter_node", "island", "switch", "host", "bridge", "fabric")
    name = draw(st.sampled_from([link for link in links if getattr(where, link)]))
    link = getattr(where, name)
    if name == "fabric":
        faster = {"oversubscription": link.oversubscription / factor}
    else:
        faster = {"bandwidth": link.bandwidth * factor}
    better = draw(st.sampled_from([faster, {"latency": link.latency / factor}]))
    return where.model_copy(update={name: link.model_copy(update=better)})


@given(
    st.data(),
    clusters(),
    st.integers(0, 10**6),
    st.sampled_from([None, "ring", "tree", "hierarchical"]),
    st.booleans(),
)
@settings(max_examples=examples(60))
def test_a_better_network_is_never_slower(data, where, seed, algorithm, curved):
    """No exchange, no all-reduce, and no port, so that no plan is slower that fills several."""
    where = where.model_copy(update={"all_reduce": algorithm})
    if curved:
        curve = where.inter_node.model_copy(update={"efficiency": {1e3: 0.1, 1e6: 0.9}})
        where = where.model_copy(update={"inter_node": curve})
    before, after = Cost(where), Cost(data.draw(improvements(where)))
    n = where.ranks
    sent = np.random.default_rng(seed).integers(0, 10**6, (n, n)) * ~np.eye(n, dtype=bool)
    for now, better in (
        (before.exchange(sent), after.exchange(sent)),
        (before.all_reduce(seed, range(n)), after.all_reduce(seed, range(n))),
    ):
        assert float(better.alone) <= float(now.alone) * (1 + 1e-9)
        assert better.busy.keys() == now.busy.keys()
        assert all(better.busy[port] <= seconds * (1 + 1e-9) for port, seconds in now.busy.items())


def test_hidden_groups_are_found_among_32_gpus():
    """Four shuffled groups of eight that talk, on four leaves: as fast as unshuffled."""
    where = cluster(8, 4, fabric=Fabric(**OVERSUBSCRIBED, latency=1e-6))
    member = np.random.default_rng(3).permutation(32) // 8
    sent = 1e8 * (np.equal.outer(member, member) & ~np.eye(32, dtype=bool))
    unshuffled = sent[np.ix_(np.argsort(member), np.argsort(member))]
    placements = proposed(where, range(32), [sent], ())
    found = min(float(Cost(where, each).exchange(sent).alone) for each in placements)
    ideal, given = (float(Cost(where).exchange(each).alone) for each in (unshuffled, sent))
    assert found == pytest.approx(ideal) and ideal < given / 2


SOURCE = "synthetic:community?vertices=2000&edges=60000&features=40&classes=5&communities=8&mixing=0.6&seed=0"


def problem_of(fabric: Fabric | None) -> Problem:
    data = load(SOURCE)
    intra, inter = (Link(bandwidth=bandwidth, latency=1e-6) for bandwidth in (1e10, 6e9))
    where = cluster(16, 1, fabric=fabric, intra_node=intra, inter_node=inter)
    return Problem(data.stats, data, Workload(model="gcn", layers=8, hidden=256), where)


def test_a_ring_of_servers_gets_another_plan_than_a_fat_tree():
    """Sixteen servers, cables as fast as cards. Halos go from everyone to everyone, and round a
    ring they pass four cables on average; an all-reduce passes one at a time. So exchanging halos
    wins on the fat tree, and recomputing them on the ring."""
    halos, exchanged = parse("graph_parallel"), []
    tree, ring = Fabric(kind="leaf_spine", servers_per_leaf=2), Fabric(kind="ring")
    for fabric, winner in ((tree, "graph_parallel"), (ring, "granndis")):
        problem = problem_of(fabric)
        recomputed = [parse(f"granndis(depth={depth})") for depth in (4, 8)]
        evaluated = [evaluate(problem, strategy) for strategy in (halos, *recomputed)]
        best = min(evaluated, key=lambda candidate: float(candidate.predicted.epoch_s))
        assert best.strategy.family == winner
        played, predicted = play(halos.schedule(problem, 3), problem.cost), evaluated[0].predicted
        assert played.epoch_s(1) == pytest.approx(float(predicted.epoch_s), rel=halos.claim)
        exchanged.append(float(predicted.comm_s))
    assert exchanged[1] > 1.5 * exchanged[0]


@pytest.mark.parametrize(
    ("fabric", "words"),
    [
        (
            Fabric(**OVERSUBSCRIBED, latency=1e-6),
            r"keep (leaf \d -> spine 0|spine 0 -> leaf \d) busy longest .*NIC \d+.*: \d\d % of",
        ),
        (None, r"keep (NIC \d+ -> network 0|network 0 -> NIC \d+) busy longest$"),
    ],
)
def test_a_plan_names_the_tightest_link(fabric, words):
    """An uplink, four times oversubscribed; on one switch a card; in one server a GPU's way out."""
    (sentence,) = tightest(evaluate(problem_of(fabric), parse("graph_parallel")))
    assert re.search(words, sentence), sentence
    slow = Link(bandwidth=1e8)
    lists = {"switches": [[0, 1], [2]], "switch": slow, "peer_access": False, "bridge": slow}
    ports = {("gpu_out", 0): "GPU 2 -> switch 1", ("gpu_in", 1): "switch 0 -> GPU 0"}
    ports |= {("switch_out", 1): "switch 1 -> host 0", ("bridge", 0): "the memory of server 0"}
    where = cluster(1, 3, **lists)
    assert {port: describe_port(where, (2, 0, 1), port) for port in ports} == ports


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (["fabric.kind=leaf_spine"], r"servers_per_leaf belongs to kind leaf_spine, which needs"),
        (["fabric.kind=ring", "fabric.servers_per_leaf=2"], r"kind: ring, servers_per_leaf: 2"),
        (["fabric.kind=torus"], r"must be 'leaf_spine' or 'ring'"),
        (["fabric.kind=ring", "fabric.oversubscription=0"], "greater than 0"),
        (["fabric.kind=ring", "servers=600"], "at most 512 leaves, or servers in its ring"),
        (["bridge.bandwidth=10GB/s"], "give peer_access: false too"),
    ],
)
def test_impossible_fabrics(settings, rule):
    with pytest.raises(SpecError, match=rule):
        apply_overrides(cluster(8, **LINKS), Workload(), settings)


def test_a_fabric_may_be_set():
    told = ["fabric.kind=leaf_spine", "fabric.servers_per_leaf=4", "fabric.oversubscription=3"]
    changed, _ = apply_overrides(cluster(8, **LINKS), Workload(), told)
    assert changed.fabric == Fabric(kind="leaf_spine", servers_per_leaf=4, oversubscription=3)
    curved = changed.model_copy(
        update={"inter_node": Link(bandwidth=1e9, efficiency={"64KiB": 0.3, "4MiB": 0.9})}
    )
    assert Cluster.model_validate_json(curved.model_dump_json()) == curved  # as a plan keeps it
    assert curved.inter_node and curved.inter_node.efficiency == {65536: 0.3, 4194304: 0.9}
