"""What is between GPUs: ports against routes in the whole graph, and fabrics by hand; a number per
sender and one per receiver tell what the whole matrix tells."""

import re
from collections import Counter
from itertools import permutations, product
from typing import Any

import networkx as nx
import numpy as np
import pytest
from calls import allocations
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import at_night, covered, examples

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.placement import proposed
from gnnplan.planner.cluster.places import Node, Places, Port, attached, describe_port, links
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric, Link
from gnnplan.planner.decision.candidate import evaluate, placed
from gnnplan.planner.decision.explain import tightest
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import apply_overrides, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Outer
from gnnplan.planner.vocabulary.schedule import Send
from gnnplan.simulator.network import ByFlows
from gnnplan.simulator.player import play

ANY_LINKS = st.builds(
    Link,
    bandwidth=st.sampled_from([1e7, 1e8, 7e8, 1e9, 1e10]),
    latency=st.sampled_from([0.0, 1e-6, 1e-3]),
)


def wiring(draw: st.DrawFn, gpus: int) -> dict[str, Any]:
    """Any links, and with them any lists of so many GPUs: the fields of a Cluster."""

    def parts() -> list[list[int]]:
        of = draw(st.lists(st.integers(0, 2), min_size=gpus, max_size=gpus))
        return [[g for g in range(gpus) if of[g] == i] for i in sorted(set(of))]

    more: dict[str, Any] = {"intra_node": draw(ANY_LINKS), "inter_node": draw(ANY_LINKS)}
    for lists, of in (("islands", "island"), ("switches", "switch"), ("nics", None)):
        if draw(st.booleans()):
            more[lists] = parts()
            if of:
                more[of] = draw(ANY_LINKS)
    return more


def between(draw: st.DrawFn, **fabric: Any) -> dict[str, Any]:
    """With and without peer access, and any fabric."""
    more: dict[str, Any] = {}
    if draw(st.booleans()):
        more |= {
            "peer_access": False,
            "host": draw(ANY_LINKS),
            "bridge": draw(st.none() | ANY_LINKS),
        }
    if kind := draw(st.sampled_from([None, "ring", "leaf_spine"])):
        per_leaf = draw(st.integers(1, 3)) if kind == "leaf_spine" else None
        more["fabric"] = Fabric(kind=kind, servers_per_leaf=per_leaf, **fabric)
    return more


def graph(cluster: Cluster) -> nx.DiGraph:
    """('gpu', g), ('island', i), ('switch', k), ('host', s), ('nic', c) and the fabric's nodes; every
    edge has the `port` that it keeps busy, or None."""
    out, at = nx.DiGraph(), Places.of(cluster, range(cluster.ranks))

    def both(below: Node, above: Node, kind: str | None, number: int) -> None:
        """Two edges, whose ports are (kind + '_out', number) up and (kind + '_in', number) down."""
        for start, end, way in ((below, above, "out"), (above, below, "in")):
            out.add_edge(start, end, port=(f"{kind}_{way}", number) if kind else None)

    for g, (server, island, switch, nic) in enumerate(
        zip(*(numbers.tolist() for numbers in at[:4]), strict=True)
    ):
        gpu = ("gpu", g)
        both(gpu, ("island", island), "island" if cluster.islands else None, g)
        both(gpu, ("switch", switch), "gpu", g)
        both(gpu, ("nic", nic), "switch" if at.uplinked[g] else None, switch)
        both(("switch", switch), ("host", server), "switch" if cluster.switches else None, switch)
        if cluster.servers > 1:
            both(("nic", nic), attached(cluster, server), "nic", nic)
    if cluster.servers > 1 and cluster.fabric:
        for number, (a, b) in enumerate(links(cluster.fabric, cluster.servers)):
            out.add_edge(a, b, port=("fabric", number))
    return out


def route(whole: nx.DiGraph, a: int, b: int) -> list[Port]:
    """The ports on a shortest way from GPU a to GPU b that passes no other GPU."""

    def length(start: tuple[str, int], end: tuple[str, int], _: Any) -> int:
        """A route prefers NVLink to PCIe, and never turns round at a NIC."""
        kinds = {start[0], end[0]}
        return 9 if "nic" in kinds else 2 if "switch" in kinds else 1

    others = [node for node in whole if node[0] == "gpu" and node[1] not in (a, b)]
    passed = nx.restricted_view(whole, others, [])
    path = nx.shortest_path(passed, ("gpu", a), ("gpu", b), weight=length)
    return [port for hop in nx.utils.pairwise(path) if (port := whole.edges[hop]["port"])]


DEVICE = Device(name="toy", memory=1e12, gemm=1e12, memory_bandwidth=1e12)
LINKS = {"intra_node": Link(bandwidth=1e9), "inter_node": Link(bandwidth=1e8)}
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
    cost = Cost(cluster(5, fabric=Fabric.model_construct(kind="ring", latency=0.5)))
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


@st.composite
def matrices(draw: st.DrawFn, ranks: int) -> Outer:
    """Any groups and numbers; with chunks on one side, or without."""
    each = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
    left, right = np.array(draw(each)), np.array(draw(each))
    if draw(st.booleans()):
        left = np.stack([left, draw(st.integers(0, 2)) * left + 1])
    out = Outer(left, right, np.array(draw(each)), draw(st.booleans()))
    return out.T if draw(st.booleans()) else out


@given(st.integers(1, 6).flatmap(matrices))
def test_it_is_the_array_that_it_stands_for(outer):
    dense, n = np.asarray(outer), outer.shape[-1]
    assert outer.shape == dense.shape and outer.any() == dense.any()
    assert outer.sum() == dense.sum() and (3 * outer).sum() == 3 * dense.sum()
    for ours, expected in (
        (np.ceil(0.3 * outer), np.ceil(0.3 * dense)),
        (np.arange(n) * outer, np.arange(n) * dense),
        *((outer.sum(axis), dense.sum(axis)) for axis in range(dense.ndim)),
        (outer.T, dense.swapaxes(-1, -2)),
        ([np.asarray(each) for each in outer], dense),
    ):
        np.testing.assert_array_equal(np.asarray(ours), expected)
    if dense.ndim == 3:
        np.testing.assert_allclose(np.asarray(outer.mean(0)), dense.mean(0))
        return
    apart = dense[~np.eye(n, dtype=bool)]
    assert outer.is_even == (n < 2 or (apart == apart[0]).all())
    alike = [np.where(np.outer(k.senders, k.receivers), k.value, 0) for k in outer.equal_pairs]
    pairs = np.asarray(Outer.of(outer.groups, outer.same, 1))
    np.testing.assert_array_equal(pairs * sum(alike, np.zeros((n, n))), dense)


@st.composite
def wired(draw: st.DrawFn) -> Cluster:
    """Any lists of GPUs, any fabric, with and without peer access; or ranks that share cores."""
    gpus, servers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    more, far = wiring(draw, gpus), between(draw, latency=1e-3)
    kind = draw(st.sampled_from(["cuda", "cpu"]))
    if kind == "cpu":
        link = {"core_s_per_byte": draw(st.sampled_from([0.0, 1e-9]))}
        links = ("intra_node", "inter_node")
        more = {name: draw(ANY_LINKS).model_copy(update=link) for name in links}
        more |= {"cores": draw(st.integers(1, 3)), "one_machine": draw(st.booleans())}
        far = {"fabric": far.get("fabric")}
    if draw(st.booleans()):
        curve = {"efficiency": {10.0: 0.1, 1e4: 1.0}}
        more["intra_node"] = more["intra_node"].model_copy(update=curve)
    device = Device(kind=kind, memory=1e9, gemm=1e9, memory_bandwidth=1e9)
    return Cluster(servers=servers, gpus_per_server=gpus, device=device, **more, **far)


@settings(max_examples=examples(200))
@given(wired(), st.data())
def test_ports_are_as_busy_as_by_every_message(cluster, data):
    placement = data.draw(st.permutations(range(cluster.ranks)))
    cost = Cost(cluster, tuple(placement))
    group = None
    if data.draw(st.booleans()):
        group = sorted(data.draw(st.sets(st.integers(0, cluster.ranks - 1), min_size=1)))
    outer = data.draw(matrices(cluster.ranks if group is None else len(group)))
    outer = outer if outer.ndim == 2 else outer.sum(0)
    told, whole = (cost.exchange(sent, group, 2, 8) for sent in (outer, np.asarray(outer)))
    assert told.alone == pytest.approx(whole.alone, rel=1e-12)
    assert told.busy == pytest.approx(whole.busy, rel=1e-12)
    links = [cost.bytes_by_link(sent, group, 8) for sent in (outer, np.asarray(outer))]
    assert links[0] == links[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("oversubscription", "whole_servers"), covered([*product((None, 2.0), (False, True))], set)
)
def test_links_of_8192_gpus_are_shared_as_by_flows(oversubscription, whole_servers):
    """Samples of 64 ranks: every message with a rate of its own takes 5 % longer at most."""
    rng, gpus = np.random.default_rng(0), 8
    fabric = Fabric(kind="leaf_spine", servers_per_leaf=16, oversubscription=oversubscription or 1)
    fields = {"servers": 1024, "fabric": fabric if oversubscription else None}
    cost = Cost(read_cluster("dgx_h100").model_copy(update=fields))
    sample = np.sort(rng.choice(cost.cluster.ranks, 64, replace=False))
    if whole_servers:
        sample = np.add.outer(sample[::gpus] // gpus * gpus, np.arange(gpus)).ravel()
    for senders in (np.ones(64, np.int64), rng.integers(1, 4, 64)):
        sent = Outer(100_000 * senders, np.ones_like(senders), np.zeros_like(senders))
        told = cost.exchange(sent, sample.tolist()).alone
        flowing = ByFlows.like(cost).exchange(sent, sample.tolist()).alone
        assert told <= flowing * (1 + 1e-9) and flowing < 1.05 * told


AT_NIGHT = ("bns", "feature_parallel", "granndis", "gnnpipe(stages=2)", "gsplit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        *("pipegcn", "data_parallel(cache=1000000,features='spread')"),
        *(at_night(text) for text in AT_NIGHT),
    ],
)
def test_no_pair_of_8192_gpus_is_written_down(text):
    """One matrix of all pairs would take 512 MB."""
    strategy = parse(text)
    batches = {"mode": "mini", "batch": 16_384, "fanout": (10, 5)}
    workload = Workload(layers=2, **(batches if strategy.mode == "mini" else {}))
    cluster = read_cluster("dgx_h100").model_copy(update={"servers": 1024})
    problem = Problem(load("ogbn-papers100M"), None, workload, cluster)
    with allocations() as most:
        there = placed(problem, strategy)
        settled = strategy.settle(there)
        assert float(settled.predict(there).epoch_s) > 0
        assert sum(settled.memory(there).values()).shape == (8192,)
        assert most() < 400e6


def test_a_graph_that_is_cut_has_fewer_ranks():
    graph = load("synthetic:community?vertices=3000&edges=9000")
    cluster = read_cluster("dgx_h100").model_copy(update={"servers": 256})
    with pytest.raises(SpecError, match=r"ranks, for at most 1,024 ranks \(ranks: 2,048\)"):
        Problem(graph.stats, graph, Workload(), cluster)
