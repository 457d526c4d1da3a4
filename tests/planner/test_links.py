"""Link prediction: which edges are held out, what a batch is; schedules and batches agree."""

from dataclasses import replace

import numpy as np
import pytest
import test_batchwise as laws
from pairwise import at_night
from test_batchwise import problem_of

from gnnplan.planner.gnn.model import describe
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph import sampling
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.inputs import checked
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import parse
from gnnplan.planner.vocabulary.errors import SpecError

GRAPH = load("synthetic:community?vertices=6000&edges=120000&features=8&classes=4&seed=0")
ONE_WAY = replace(GRAPH, stats=replace(GRAPH.stats, directed=True))


def named(graph: Graph) -> set[tuple[int, int]]:
    """Edges as (source, destination)."""
    into = np.repeat(np.arange(graph.stats.vertices), graph.degree)
    return set(zip(graph.indices.tolist(), into.tolist(), strict=True))


@pytest.mark.parametrize("graph", [GRAPH, ONE_WAY], ids=["undirected", "directed"])
def test_an_edge_is_trained_on_or_held_out(graph):
    left = sampling.hold_out(graph)
    edges = named(left)
    val, test = (set(zip(*part.tolist(), strict=True)) for part in left.held_out)
    assert edges | val | test == named(graph)
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
    edges = sampling.items_of(GRAPH, w, epoch=2)
    assert np.array_equal(np.sort(np.concatenate(edges)), np.arange(GRAPH.indices.size))
    pairs, half = (sampling.pairs_in(GRAPH, w, ids, 2, 0) for ids in (edges[0], edges[0][2500:]))
    assert pairs.tails.shape == (5000, 4)
    assert set(zip(pairs.heads.tolist(), pairs.tails[:, 0].tolist(), strict=True)) <= named(GRAPH)
    assert np.array_equal(half.tails, pairs.tails[2500:])
    assert np.array_equal(half.heads, pairs.heads[2500:])
    counts = np.bincount(pairs.tails[:, 1:].ravel() // 60, minlength=100)
    assert chisquare(counts).pvalue > 1e-3
    for of, epoch, number in ((other, 2, 0), (w, 3, 0), (w, 2, 1)):
        tails = sampling.pairs_in(GRAPH, of, edges[0], epoch, number).tails
        assert np.mean(tails[:, 1:] == pairs.tails[:, 1:]) < 0.01


def test_evaluation_is_on_the_same_pairs_whatever_the_seed():
    graphs = [problem_of(GRAPH, task="link", batch=5000, seed=seed).graph for seed in (0, 1)]
    for part in (0, 1):
        first, second = (sampling.held_out_pairs(graph, part, 2) for graph in graphs)
        assert np.array_equal(first.heads, second.heads)
        assert np.array_equal(first.tails, second.tails)


def test_ends_that_cross_by_hand():
    workload = Workload(mode="mini", task="link", negatives=2)
    pairs = sampling.pairs_in(GRAPH, workload, np.arange(0, 60000, 50), 0, 0)
    owner = np.arange(GRAPH.stats.vertices) % 3
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
    drawn = problem_of(GRAPH, 1, 2, **asked)
    stats = replace(GRAPH.stats, known=False, batch_spread=(0.3, 0.3))
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
    problem = problem_of(GRAPH, task="link", batch=5000)
    large = problem_of(GRAPH, task="link", batch=10**6)
    with pytest.raises(SpecError, match=rf"at most the edges.*use --batch {problem.stats.edges}"):
        parse("p3").check(large)
    node = problem.workload.model_copy(update={"task": "node"})
    with pytest.raises(SpecError, match="lacks those held out for link prediction"):
        replace(problem, workload=node)
