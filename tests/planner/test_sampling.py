"""Sampling: what is drawn are neighbours, uniformly, without repetition, and always the same; so are a
share of the boundary, and pairs for links. Batches over ranks compute each row and edge once per
group."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import test_batchwise as laws
from asked import edges_of
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import at_night, examples
from test_batchwise import problem_of

from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph import sampling
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
from gnnplan.planner.problem.inputs import checked, read_cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import BNS, parse
from gnnplan.planner.strategies.layerwise.bns import Sample
from gnnplan.planner.strategies.layerwise.exchange import Crossing
from gnnplan.planner.vocabulary.errors import SpecError

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
    assert set(turned[of_boundary(turned, p, 7, epoch, layer, 2)]) == set(ids[places])


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
        owners = member if groups.count(0) > 1 else np.zeros_like(member)
        made = MiniBatch(GRAPH, frontiers, groups, owners)
        edges = [int(made.facts(layer).edges.sum()) for layer in (1, 2, 3)]
        counts.append([*edges, sum(made.rows(rank, 0).size for rank in range(made.ranks))])
    split, alone, apart = counts
    assert split == alone and all(np.less_equal(alone, apart))


LARGE = load("synthetic:community?vertices=6000&edges=120000&features=8&classes=4&seed=0")
ONE_WAY = replace(LARGE, stats=replace(LARGE.stats, directed=True))


@pytest.mark.parametrize("graph", [LARGE, ONE_WAY], ids=["undirected", "directed"])
def test_an_edge_is_trained_on_or_held_out(graph):
    left = sampling.hold_out(graph)
    edges = edges_of(left)
    val, test = (set(zip(*part.tolist(), strict=True)) for part in left.held_out)
    assert edges | val | test == edges_of(graph)
    assert len(edges) + len(val) + len(test) == graph.stats.edges
    assert left.stats.edges == len(edges) and left.stats.held_out == len(val) + len(test)
    for part in (val, test):
        assert len(part) / graph.stats.edges == pytest.approx(sampling.HELD_OUT_SHARE, rel=0.1)
        if not graph.stats.directed:
            assert part == {(v, u) for u, v in part}
    assert sampling.hold_out(left) is left
    assert left.stats.hash != graph.stats.hash and sampling.hold_out(graph).stats == left.stats


def test_negatives_are_any_vertices_and_belong_to_their_edge():
    from scipy.stats import chisquare  # here: its import takes a second

    w, other = (Workload(mode="mini", task="link", batch=5000, negatives=3, seed=s) for s in (1, 2))
    edges = sampling.items_of(LARGE, w, epoch=2)
    assert np.array_equal(np.sort(np.concatenate(edges)), np.arange(LARGE.indices.size))
    pairs, half = (sampling.pairs_in(LARGE, w, ids, 2, 0) for ids in (edges[0], edges[0][2500:]))
    assert pairs.tails.shape == (5000, 4)
    assert set(zip(pairs.heads.tolist(), pairs.tails[:, 0].tolist(), strict=True)) <= edges_of(
        LARGE
    )
    assert np.array_equal(half.tails, pairs.tails[2500:])
    assert np.array_equal(half.heads, pairs.heads[2500:])
    assert chisquare(np.bincount(pairs.tails[:, 1:].ravel() // 60, minlength=100)).pvalue > 1e-3
    for of, epoch, number in ((other, 2, 0), (w, 3, 0), (w, 2, 1)):
        tails = sampling.pairs_in(LARGE, of, edges[0], epoch, number).tails
        assert np.mean(tails[:, 1:] == pairs.tails[:, 1:]) < 0.01


def test_evaluation_is_on_the_same_pairs_whatever_the_seed():
    graphs = [problem_of(LARGE, task="link", batch=5000, seed=seed).graph for seed in (0, 1)]
    for part in (0, 1):
        first, second = (sampling.held_out_pairs(graph, part, 2) for graph in graphs)
        assert np.array_equal(first.heads, second.heads)
        assert np.array_equal(first.tails, second.tails)


def test_ends_that_cross_by_hand():
    workload = Workload(mode="mini", task="link", negatives=2)
    pairs = sampling.pairs_in(LARGE, workload, np.arange(0, 60000, 50), 0, 0)
    owner = np.arange(LARGE.stats.vertices) % 3
    wanted = {
        tail
        for head, tails in zip(pairs.heads.tolist(), pairs.tails.tolist(), strict=True)
        for tail in tails
        if owner[head] == 1 and owner[tail] != 1
    }
    found = sampling.fetched([pairs], owner, 1)
    assert set(found.tolist()) == wanted and found.size == len(wanted)
    assert np.all(np.diff(owner[found]) >= 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "gpus", "more"),
    [
        (1, 2, {"model": "resgcn", "batch": 2000, "negatives": 3, "dropout": 0.5}),
        at_night(2, 2, {"model": "sage", "batch": 400}),
        at_night(1, 3, {"model": "gcn", "batch": 300, "layers": 1, "fanout": (4,)}),
    ],
)
def test_laws_of_mini_batches(servers, gpus, more):
    """An epoch's closed form is its simulation, and bytes are those of the schedule."""
    problem = problem_of(laws.GRAPHS[0], servers, gpus, task="link", **more)
    assert {"data_parallel", "gsplit"} <= {s.name for s in laws.variants(problem)}
    laws.test_prediction_is_the_simulation_of_an_epoch.hypothesis.inner_test(problem)


@pytest.mark.parametrize("name", ["data_parallel", "gsplit(splitter='random')"])
@pytest.mark.parametrize("batch", [500, 4000])
def test_statistics_estimate_what_is_drawn(name, batch):
    """Seeds, and rows that cross for scores, of a graph without much spread of degrees."""
    asked = {"task": "link", "batch": batch, "negatives": 2, "layers": 1, "fanout": (3,)}
    drawn = problem_of(LARGE, 1, 2, **asked)
    stats = replace(LARGE.stats, known=False, batch_spread=(0.3, 0.3))
    told = Problem(stats, None, drawn.workload, drawn.cluster)
    assert told.stats.edges == pytest.approx(drawn.stats.edges, rel=0.01)
    counts = []
    for problem in (drawn, told):
        found = parse(name).batches(problem).at(0)
        each = found.facts(1).rows, found.scored.edges, found.scored.sends
        counts.append([count.sum() for count in each])
    assert counts[1] == pytest.approx(counts[0], rel=0.1)


def test_rows_are_as_wide_as_hidden_ones():
    link = Workload(mode="mini", task="link", layers=2, hidden=24)
    assert [layer.h_out for layer in describe(link, 10, 3).layers] == [24, 24]
    assert describe(link, 10, 0).classes == 24


def test_what_cannot_learn_links_says_so():
    with pytest.raises(SpecError, match=r"(?s)--task: .*the full graph is one batch.*mode=mini"):
        checked(Workload, {"task": "link"}, "--")
    problem = problem_of(LARGE, task="link", batch=5000)
    large = problem_of(LARGE, task="link", batch=10**6)
    with pytest.raises(SpecError, match=rf"at most the edges.*use --batch {problem.stats.edges}"):
        parse("p3").check(large)
    node = problem.workload.model_copy(update={"task": "node"})
    with pytest.raises(SpecError, match="lacks those held out for link prediction"):
        replace(problem, workload=node)
