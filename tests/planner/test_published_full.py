"""What other people's full-graph code does differently, on graphs counted by hand and real ones."""

import numpy as np
import pytest

from gnnplan.papers.full_graph import InOrder, among, trained_on
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.estimated_layout import Mixing, mixing_of
from gnnplan.planner.ownership.layout import Expansion


@pytest.mark.parametrize("name", ["flickr", "ogbn-arxiv"])
def test_training_vertices_and_the_edges_among_them(dataset, name):
    """Those of a real graph are no others than those not to train on."""
    graph = load(dataset(name))
    ends = graph.degree[graph.train].sum() / graph.stats.edges
    assert among(graph.stats) == pytest.approx(ends, rel=0.15)
    read = np.repeat(graph.train, graph.degree)
    inside = int((read & graph.train[graph.indices]).sum())
    assert graph.stats.edges * ends**2 == pytest.approx(inside, rel=0.2)


def test_who_trains_on_training_vertices_only():
    whole, products, papers = map(load, ("reddit", "ogbn-products", "ogbn-papers100M"))
    reddit = trained_on(whole, "pipegcn")
    assert (reddit.vertices, reddit.train_vertices) == (153_431, 153_431)
    assert reddit.edges == pytest.approx(114_615_892 * 0.6586**2, rel=1e-3)
    # cut as well as the whole
    assert mixing_of(reddit).at(8) == pytest.approx(mixing_of(whole).at(8), rel=1e-3)
    assert trained_on(products, "pipegcn") is products
    popular = trained_on(products, "granndis")
    assert popular.vertices == 196_657
    assert popular.edges / popular.vertices < products.edges / products.vertices
    assert popular.edges / products.edges > 2 * 0.0803**2  # they have more neighbours than others
    assert trained_on(papers, "pipegcn") is papers is trained_on(papers, "granndis")


def in_order(vertices: int, degree: int, drawn: float, sampled: bool = True) -> InOrder:
    """On four servers of two."""
    expansion = Expansion(1, 15, 0) if sampled else None
    layers = (0, 0, 1, 1, 2, 2, 3, 3), 4, 0, 4, expansion, Mixing(), vertices / 4
    halves = Mixing(((2, 0.05),))
    return InOrder(vertices, vertices * degree, *layers, metis=halves, drawn=drawn)


@pytest.mark.parametrize(("degree", "drawn"), [(6, 15), (30, 4), (60, 15)])
def test_what_a_server_has_of_a_graph_shared_in_order(degree, drawn):
    """Against a random graph, sampled: rows of a server, and edges among them."""
    n, rng = 20_000, np.random.default_rng(0)
    neighbours = rng.integers(0, n, (n, degree))
    home = np.arange(n // 4)
    has = np.zeros(n, bool)
    has[home] = True
    has[neighbours[home, : min(drawn, degree)]] = True  # any so many are as good as drawn
    layout = in_order(n, degree, drawn)
    assert layout.region(2) == pytest.approx(has.sum(), rel=0.02)
    facts = layout.facts(2)
    assert facts.rows.sum() / 4 == pytest.approx(has.sum(), rel=0.02)
    inside = has[neighbours[has]].sum()
    # the drawn are inside for certain, which is left out
    assert facts.edges.sum() / 4 == pytest.approx(inside, rel=0.15)
