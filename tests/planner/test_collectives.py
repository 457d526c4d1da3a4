"""All-reduces by algorithm: what each sends is carried out, against nccl-tests' factors."""

from itertools import pairwise
from math import ceil, log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.planner.cluster.cost import Cost, all_reduce
from gnnplan.planner.cluster.spec import Cluster, Device, Link

ALGORITHMS = ("ring", "tree", "hierarchical")


def cluster(servers: int, gpus: int, kind: str = "cuda", **more: Any) -> Cluster:
    of = {"device": Device(kind=kind, memory=1e12, gemm=1e12, memory_bandwidth=1e12)}
    of |= {"intra_node": Link(bandwidth=1e11, latency=5e-6)}
    of |= {"inter_node": Link(bandwidth=1e10, latency=2e-5)} | more
    return Cluster(servers=servers, gpus_per_server=gpus, **of)


groups = st.lists(st.integers(1, 5), min_size=1, max_size=9).map(
    lambda sizes: [list(range(a, b)) for a, b in pairwise(np.cumsum([0, *sizes]).tolist())]
)


@given(groups, st.sampled_from(ALGORITHMS))
def test_every_algorithm_sends_the_buffer_2_n_minus_1_times(servers, algorithm):
    """Where all ranks send 2(n-1) buffers, nccl-tests' bus factor 2(n-1)/n is each one's share."""
    n = sum(map(len, servers))
    unit, phases = all_reduce(algorithm, servers)
    if n > 1:
        assert unit * sum(p.units * p.source.size for p in phases) == pytest.approx(2 * (n - 1))
    assert all((phase.source != phase.target).all() or n == 1 for phase in phases)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 16, 31, 100, 128])
def test_no_server_hands_on_both_halves(count):
    """A server with two children in one tree has none in the other: nobody sends or receives more
    than two buffers. The trees are log2 deep (Sanders, Speck, Traeff 2009; NCCL 2.4)."""
    unit, (across,) = all_reduce("tree", [[s] for s in range(count)])
    sent = unit * across.units * np.bincount(across.source, minlength=count)
    assert sent.max() <= 2 and across.steps == 2 * ceil(log2(count))


def test_hierarchical_by_hand():
    """Four servers of two: half of the buffer in and out of every GPU twice, and a quarter's three
    quarters twice by each card."""
    unit, (inside, across) = all_reduce("hierarchical", [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert inside.source.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert inside.target.tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert across.target.tolist() == [2, 3, 4, 5, 6, 7, 0, 1]
    assert (inside.units * unit, inside.steps) == (2 * 1 / 2, 2)
    assert (across.units * unit, across.steps) == (2 * 3 / 4 / 2, 6)
    cost = Cost(cluster(4, 2, nics=[[0], [1]], all_reduce="hierarchical"))
    taken = cost.all_reduce(10**9, range(8))
    assert taken.latency == pytest.approx(2 * 5e-6 + 6 * 2e-5)
    seconds = {"gpu_out": 0.01, "gpu_in": 0.01, "nic_out": 0.075, "nic_in": 0.075}
    found = {kind: s for (kind, number), s in taken.busy.items() if number == 0}
    assert found == pytest.approx(seconds)
    # shares that some servers have no rank for: a ring
    assert len(all_reduce("hierarchical", [[0, 1], [2]]).phases) == 1


def test_a_small_buffer_on_1024_ranks_takes_a_trees_latency():
    """128 servers of 8: 7 hops in a server and 7 between, up and down; a ring has 2,046."""
    kinds: dict[str | None, Any] = {
        name: Cost(cluster(128, 8, all_reduce=name)).all_reduce(1024, range(1024))
        for name in (*ALGORITHMS, None)
    }
    assert float(kinds["tree"].latency) == pytest.approx(2 * 7 * 5e-6 + 2 * 7 * 2e-5)
    assert float(kinds["ring"].latency) == pytest.approx(2046 * 2e-5)
    assert float(kinds[None].alone) == pytest.approx(float(kinds["tree"].alone), rel=1e-6)
    assert kinds[None].alone < kinds["ring"].alone / 100
    # Gloo has no tree
    assert Cost(cluster(128, 8, "cpu")).all_reduce(1024, range(1024)) == kinds["ring"]


@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(1, 10**10),
    st.floats(0, 1e-3),
    st.floats(1e8, 1e12),
)
def test_nccl_takes_the_faster_one(servers, gpus, size, latency, bandwidth):
    """That is the tree. Over two servers its cards send half of what a ring's do."""
    where = cluster(servers, gpus, inter_node=Link(bandwidth=bandwidth, latency=latency))
    ring, tree, chosen = (
        Cost(where.model_copy(update={"all_reduce": name})).all_reduce(size, range(servers * gpus))
        for name in ("ring", "tree", None)
    )
    assert chosen == tree and float(tree.alone) <= float(ring.alone) * (1 + 1e-9)


@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(ALGORITHMS), st.integers(0, 10**9))
def test_bytes_by_link_are_those_on_the_ports(servers, gpus, algorithm, size):
    """Whole bytes that add up to the schedule's, and within a byte what cards and GPUs pass."""
    cost = Cost(cluster(servers, gpus, all_reduce=algorithm))
    n = servers * gpus
    told = cost.all_reduces.bytes_by_link(2 * (n - 1) * size, range(n))
    passed = cost.all_reduce(size, range(n)).busy
    assert sum(told.values()) == 2 * (n - 1) * size
    for port, link, where in (("nic_out", 1e10, "inter_node"), ("gpu_out", 1e11, "intra_node")):
        carried = sum(s * link for p, s in passed.items() if p[0] == port)
        assert carried == pytest.approx(told.get(where, 0), abs=2)
