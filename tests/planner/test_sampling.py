"""Sampling: what is drawn are neighbours, uniformly, without repetition, and always the same; so is a
share of the boundary. Batches over ranks compute each row and edge once per group."""

from itertools import combinations

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import (
    draw,
    frontier,
    items_of,
    key_of,
    mix,
    sample_without_replacement,
)
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import BNS
from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing

GRAPH = load("synthetic:community?vertices=300&edges=5000&features=4&classes=3&seed=0")


def test_the_hash_is_splitmix64():
    """Its published first words for seed 1234567 (the test vector of the reference code)."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = np.array([1234567], np.uint64) + golden * np.arange(1, 4, dtype=np.uint64)
    assert mix(state).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.data())
def test_draws_are_different_neighbours(data):
    ids = st.lists(st.integers(0, 299), min_size=1, max_size=60, unique=True)
    vertices = np.array(data.draw(ids))
    fanout = data.draw(st.sampled_from([1, 2, 5, 17, 1000, ALL]))
    indptr, places = draw(GRAPH, vertices, fanout, key_of(0, 0, 0, 1))
    columns = GRAPH.indices[places]
    for i, v in enumerate(vertices):
        own = columns[indptr[i] : indptr[i + 1]]
        everyone = GRAPH.indices[GRAPH.indptr[v] : GRAPH.indptr[v + 1]]
        asked = everyone.size if fanout == ALL else min(fanout, everyone.size)
        assert len(set(own)) == own.size == asked
        assert set(own) <= set(everyone)


@given(st.data())
def test_a_vertex_draws_the_same_beside_whichever_others(data):
    """What lets ranks share a batch's sampling, and anybody check it."""
    ids = st.lists(st.integers(0, 299), min_size=2, max_size=40, unique=True)
    vertices = np.array(data.draw(ids))
    fanout = data.draw(st.sampled_from([1, 3, 8]))
    key = key_of(*data.draw(st.tuples(*[st.integers(0, 9)] * 4)))
    indptr, places = draw(GRAPH, vertices, fanout, key)
    for i in data.draw(st.permutations(range(vertices.size)))[:5]:
        alone = draw(GRAPH, vertices[i : i + 1], fanout, key)[1]
        assert alone.tolist() == places[indptr[i] : indptr[i + 1]].tolist()


def test_seed_epoch_batch_and_layer_each_change_the_draws():
    vertices = np.arange(300)
    keys = ((0, 0, 0, 1), (1, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1), (0, 0, 0, 2))
    drawn = [draw(GRAPH, vertices, 3, key_of(*key))[1].tolist() for key in keys]
    assert all(a != b for a, b in combinations(drawn, 2))


@pytest.mark.parametrize(("degree", "k"), [(5, 2), (6, 3), (7, 6)])
def test_every_set_is_as_likely(degree, k):
    """All sets of k below the degree, over 200 draws of each expected; chi-square at 0.1 %."""
    from scipy.stats import chisquare  # here: its import takes a second

    sets = {one: i for i, one in enumerate(combinations(range(degree), k))}
    keys = mix(
        (np.arange(200 * len(sets), dtype=np.uint64) + key_of(0, 0, 0, 1))
        * np.uint64(0x9E3779B97F4A7C15)
    )
    taken = np.sort(sample_without_replacement(keys, np.full(keys.size, degree), k), axis=0).T
    counts = np.bincount([sets[tuple(row)] for row in taken.tolist()], minlength=len(sets))
    assert chisquare(counts).pvalue > 1e-3


def test_batches_hold_every_training_vertex_once_an_epoch():
    w = Workload(mode="mini", batch=32)
    first, second = (items_of(GRAPH, w, epoch) for epoch in (0, 1))
    for epoch in (first, second):
        assert sorted(np.concatenate(epoch).tolist()) == np.flatnonzero(GRAPH.train).tolist()
    assert [one.size for one in first[:-1]] == [32] * (len(first) - 1)
    assert 1 <= first[-1].size <= 32
    assert first[0].tolist() != second[0].tolist()


@settings(max_examples=examples(50))
@given(
    seeds=st.lists(st.integers(0, 299), min_size=1, max_size=30, unique=True),
    fanouts=st.lists(st.sampled_from([1, 3, 10, ALL]), min_size=1, max_size=3),
)
def test_a_frontier_has_what_each_layer_reads(seeds, fanouts):
    found = frontier(GRAPH, np.array(seeds), tuple(fanouts), 0, 0, 0)
    layers = len(fanouts)
    assert found.nodes[layers].tolist() == seeds
    for layer in range(1, layers + 1):
        rows, sources = found.nodes[layer], found.nodes[layer - 1]
        indptr, places = found.edges[layer - 1]
        assert sources[: rows.size].tolist() == rows.tolist()
        assert len(set(sources.tolist())) == sources.size
        assert set(sources.tolist()) == set(rows.tolist()) | set(GRAPH.indices[places].tolist())
        expected = draw(GRAPH, rows, fanouts[layers - layer], key_of(0, 0, 0, layer))
        assert (indptr.tolist(), places.tolist()) == (expected[0].tolist(), expected[1].tolist())


def of_boundary(ids: np.ndarray, p: float, *crossing: int) -> np.ndarray:
    return Sample("vanish", p=p).fresh(ids, Crossing(*crossing))


@given(st.integers(0, 200), st.integers(0, 100), st.integers(0, 9), st.integers(1, 5))
def test_a_sample_is_a_share_of_the_rows_and_the_same_in_any_order(rows, percent, epoch, layer):
    ids = np.random.default_rng(0).permutation(1000)[:rows]
    p = percent / 100
    places = of_boundary(ids, p, 7, epoch, layer, 2)
    assert places.size == -(-percent * rows // 100) and (np.diff(places) > 0).all()
    turned = ids[::-1]
    again = turned[of_boundary(turned, p, 7, epoch, layer, 2)]
    assert set(again) == set(ids[places])


def test_every_row_is_drawn_as_often():
    """In 4,000 epochs; each count within five standard deviations of the binomial's."""
    ids, epochs, p = np.arange(40), 4000, 0.3
    times = np.zeros(40)
    for epoch in range(epochs):
        times[of_boundary(ids, p, 0, epoch, 2, 1)] += 1
    assert np.abs(times - epochs * p).max() < 5 * np.sqrt(epochs * p * (1 - p))
    other = [set(of_boundary(ids, p, *key)) for key in ((0, 0, 2, 1), (1, 0, 2, 1), (0, 0, 3, 1))]
    assert other[0] != other[1] and other[0] != other[2]


@pytest.mark.parametrize("graph", ["reddit", "ogbn-products", "yelp"])
def test_gpus_cut_their_blocks_themselves(graph):
    """The host sorted all edges in every epoch: a tenth of the halo took longer than all of it."""
    stats = load(graph)
    workload = Workload(model="sage", layers=4, hidden=256)
    asked = Problem(stats, None, workload, read_cluster("pipegcn_2080ti"))
    few, whole = (float(BNS(p=p).predict(asked).epoch_s) for p in (0.1, 1.0))
    assert few < whole


@settings(max_examples=examples(30))
@given(seeds=st.integers(1, 200), ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_splitting_computes_each_row_once_and_data_parallel_never_fewer(seeds, ranks, seed):
    """GSplit Table 1: beyond the mini-batch there is what ranks of data parallelism share."""
    chosen = np.random.default_rng(seed).permutation(300)[: max(seeds, ranks)]
    member, counts = np.random.default_rng(seed + 1).integers(0, ranks, 300), []
    for groups in ((0,) * ranks, (0,), tuple(range(ranks))):
        shares = np.array_split(chosen, len(set(groups)))
        frontiers = [frontier(GRAPH, share, (5, 3, 2), seed, 0, 0) for share in shares]
        owners = member if groups.count(0) > 1 else None
        made = MiniBatch(GRAPH, frontiers, groups, owners, first_varying=1)
        edges = [int(made.facts(layer).edges.sum()) for layer in (1, 2, 3)]
        counts.append([*edges, sum(made.rows(rank, 0).size for rank in range(made.ranks))])
    split, alone, apart = counts
    assert split == alone and all(np.less_equal(alone, apart))
