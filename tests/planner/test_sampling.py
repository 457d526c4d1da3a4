"""Sampling: what is drawn are neighbours, uniformly, without repetition, and always the same."""

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
