"""Boundary node sampling: what is drawn, its bytes by hand, and what it is refused for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import BNS, GraphParallel
from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing
from gnnplan.testing.laws import cluster, problem_of

GRAPH = load("synthetic:community?vertices=600&edges=6000&features=12&classes=4&seed=0")
CLUSTER = cluster(1, 4, intra=1e8, memory=1e9, memory_bandwidth=1e10)


def drawn(ids: np.ndarray, p: float, *crossing: int) -> np.ndarray:
    return Sample("vanish", p=p).fresh(ids, Crossing(*crossing))


def problem(**workload: object) -> Problem:
    return problem_of(GRAPH, CLUSTER, **{"layers": 3, "hidden": 16, **workload})


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(0, 100), st.integers(0, 9), st.integers(1, 5))
def test_a_sample_is_a_share_of_the_rows_and_the_same_in_any_order(rows, percent, epoch, layer):
    ids = np.random.default_rng(0).permutation(1000)[:rows]
    p = percent / 100
    places = drawn(ids, p, 7, epoch, layer, 2)
    assert places.size == -(-percent * rows // 100) and (np.diff(places) > 0).all()
    turned = ids[::-1]
    again = turned[drawn(turned, p, 7, epoch, layer, 2)]
    assert set(again) == set(ids[places])


def test_every_row_is_drawn_as_often():
    """In 4,000 epochs; each count within five standard deviations of the binomial's."""
    ids, epochs, p = np.arange(40), 4000, 0.3
    times = np.zeros(40)
    for epoch in range(epochs):
        times[drawn(ids, p, 0, epoch, 2, 1)] += 1
    assert np.abs(times - epochs * p).max() < 5 * np.sqrt(epochs * p * (1 - p))
    other = [set(drawn(ids, p, *key)) for key in ((0, 0, 2, 1), (1, 0, 2, 1), (0, 0, 3, 1))]
    assert other[0] != other[1] and other[0] != other[2]


def test_bytes_are_those_of_the_rows_drawn():
    asked, p = problem(), 0.3
    sends = problem().layout().facts(2).sends
    rows = int(np.ceil(p * sends).sum())
    halo = BNS(p=p).predict(asked).bytes["halo"]
    assert halo == 2 * rows * (16 + 16) * 4  # before layers 2 and 3, and back
    assert halo < 0.4 * GraphParallel().predict(asked).bytes["halo"]


def test_the_whole_boundary_is_predicted_as_graph_parallelism():
    for narrow in (False, True):
        ours, plain = BNS(p=1, narrow=narrow), GraphParallel(narrow=narrow)
        assert ours.exact and ours.predict(problem()) == plain.predict(problem())
        of_all, exact = ours.memory(problem()), plain.memory(problem())
        assert all((of_all[use] == exact[use]).all() for use in exact)


def test_fewer_rows_and_edges_are_held_and_computed():
    asked = problem()
    whole = asked.layout()

    def facts(p: float, layer: int) -> LayerCounts:
        return BNS(p=p).exchange_options.facts(asked, whole, layer)

    assert facts(0.2, 1) is whole.facts(1)  # constant features: nothing is exchanged for them
    f, all_of = facts(0.2, 2), whole.facts(2)
    assert (f.sources < all_of.sources).all() and (f.edges < all_of.edges).all()
    within = [
        int((np.asarray(whole.block(rank, 2)[1]) < whole.piece(rank, 2).local).sum())
        for rank in range(4)
    ]
    assert (facts(0, 2).edges == within).all()
    held = [sum(BNS(p=p).memory(problem()).values()).max() for p in (0.1, 0.9)]
    assert held[0] < held[1]


@pytest.mark.parametrize("graph", ["reddit", "ogbn-products", "yelp"])
def test_gpus_cut_their_blocks_themselves(graph):
    """The host sorted all edges in every epoch: a tenth of the halo took longer than all of it."""
    stats = load(graph)
    workload = Workload(model="sage", layers=4, hidden=256)
    asked = Problem(stats, None, workload, read_cluster("pipegcn_2080ti"))
    few, whole = (float(BNS(p=p).predict(asked).epoch_s) for p in (0.1, 1.0))
    assert few < whole
