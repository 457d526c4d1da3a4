"""Boundary node sampling: what is drawn, and on whose device."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import BNS
from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing


def drawn(ids: np.ndarray, p: float, *crossing: int) -> np.ndarray:
    return Sample("vanish", p=p).fresh(ids, Crossing(*crossing))


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


@pytest.mark.parametrize("graph", ["reddit", "ogbn-products", "yelp"])
def test_gpus_cut_their_blocks_themselves(graph):
    """The host sorted all edges in every epoch: a tenth of the halo took longer than all of it."""
    stats = load(graph)
    workload = Workload(model="sage", layers=4, hidden=256)
    asked = Problem(stats, None, workload, read_cluster("pipegcn_2080ti"))
    few, whole = (float(BNS(p=p).predict(asked).epoch_s) for p in (0.1, 1.0))
    assert few < whole
