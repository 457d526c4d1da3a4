"""A number per sender and one per receiver tell what the whole matrix tells, also of ports."""

from itertools import product

import numpy as np
import pytest
from any_wiring import LINKS, between, wiring
from calls import allocations
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import at_night, covered

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.cluster.spec import Cluster, Device, Fabric
from gnnplan.planner.decision.candidate import placed
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Outer
from gnnplan.simulator.network import ByFlows


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
def clusters(draw: st.DrawFn) -> Cluster:
    """Any lists of GPUs, any fabric, with and without peer access; or ranks that share cores."""
    gpus, servers = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    more, far = wiring(draw, gpus), between(draw, latency=1e-3)
    kind = draw(st.sampled_from(["cuda", "cpu"]))
    if kind == "cpu":
        link = {"core_s_per_byte": draw(st.sampled_from([0.0, 1e-9]))}
        links = ("intra_node", "inter_node")
        more = {name: draw(LINKS).model_copy(update=link) for name in links}
        more |= {"cores": draw(st.integers(1, 3)), "one_machine": draw(st.booleans())}
        far = {"fabric": far.get("fabric")}
    if draw(st.booleans()):
        curve = {"efficiency": {10.0: 0.1, 1e4: 1.0}}
        more["intra_node"] = more["intra_node"].model_copy(update=curve)
    device = Device(kind=kind, memory=1e9, gemm=1e9, memory_bandwidth=1e9)
    return Cluster(servers=servers, gpus_per_server=gpus, device=device, **more, **far)


@settings(max_examples=examples(200))
@given(clusters(), st.data())
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
