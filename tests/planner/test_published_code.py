"""Printed figures of other people's code: what it does differently on full graphs, and the memory that
it takes (counted by hand, and the printed facts)."""

from functools import partial

import numpy as np
import pytest
from printed_rows import row

from gnnplan.papers import figures, full_graph
from gnnplan.papers.calibrate import scaled
from gnnplan.papers.figures import predict, question
from gnnplan.planner.cluster.spec import HOST_RATE
from gnnplan.planner.graph.load import load
from gnnplan.planner.ownership.estimated import Mixing, mixing_of
from gnnplan.planner.ownership.layout import Expansion


@pytest.mark.parametrize("name", ["flickr", "ogbn-arxiv"])
def test_training_vertices_and_the_edges_among_them(dataset, name):
    """Those of a real graph are no others than those not to train on."""
    graph = load(dataset(name))
    ends = graph.degree[graph.train].sum() / graph.stats.edges
    assert full_graph.among(graph.stats) == pytest.approx(ends, rel=0.15)
    read = np.repeat(graph.train, graph.degree)
    inside = int((read & graph.train[graph.indices]).sum())
    assert graph.stats.edges * ends**2 == pytest.approx(inside, rel=0.2)


def test_who_trains_on_training_vertices_only():
    whole, products, papers = map(load, ("reddit", "ogbn-products", "ogbn-papers100M"))
    reddit = full_graph.trained_on(whole, "pipegcn")
    assert (reddit.vertices, reddit.train_vertices) == (153_431, 153_431)
    assert reddit.edges == pytest.approx(114_615_892 * 0.6586**2, rel=1e-3)
    # cut as well as the whole
    assert mixing_of(reddit).at(8) == pytest.approx(mixing_of(whole).at(8), rel=1e-3)
    assert full_graph.trained_on(products, "pipegcn") is products
    popular = full_graph.trained_on(products, "granndis")
    assert popular.vertices == 196_657
    assert popular.edges / popular.vertices < products.edges / products.vertices
    assert popular.edges / products.edges > 2 * 0.0803**2  # they have more neighbours than others
    assert full_graph.trained_on(papers, "pipegcn") is papers
    assert full_graph.trained_on(papers, "granndis") is papers


def in_order(vertices: int, degree: int, drawn: float, sampled: bool = True) -> full_graph.InOrder:
    """On four servers of two."""
    expansion = Expansion(1, 15, 0) if sampled else None
    layers = (0, 0, 1, 1, 2, 2, 3, 3), 4, 0, 4, expansion, Mixing(), vertices / 4
    halves = Mixing(((2, 0.05),))
    return full_graph.InOrder(vertices, vertices * degree, *layers, metis=halves, drawn=drawn)


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


ASKED = {"metric": "fits_in_memory", "strategy_params": ""}
PIPEGCN = row("pipegcn pipegcn_2080ti ogbn-products sage 3x128 1x5 graph_parallel", **ASKED)
GRANNDIS = row("granndis granndis_a6000_pcie reddit resgcn+ 112x256 4x4 graph_parallel", **ASKED)


def test_pipegcns_tensors_by_hand():
    """Three layers on products in five parts: features, their mean, two of 128 and 47 classes."""
    facts, mask = question(PIPEGCN).problem.layout().facts(2), 0.25
    n, s, e = (float(each[0]) for each in (facts.rows, facts.sources, facts.edges))
    # own and mean; dropout's output and mask of both
    features = 2 * n * 100 + 2 * n * 100 * (1 + mask)
    one = 2 * n * 128  # the input of norm, the output of ReLU
    # all rows, dropout of them, mean, what came in and its gradients
    two = s * 128 * (1 + 1 + mask) + n * 128 + 2 * (s - n) * 128
    numbers = features + 2 * (one + two) + 4 * n * 47 + max(3 * s * 128, 3 * n * 100)
    assert full_graph.needed(question(PIPEGCN)) == pytest.approx(24 * e + 4 * numbers, rel=1e-6)
    assert full_graph.EDGE == 3 * 2 * 4


def test_granndis_takes_as_many_batches_as_it_needs():
    """Sec. 5 and 8.7: 112 layers on eight 2080 Ti fit in five batches, not in one."""
    small = {**GRANNDIS, "testbed": "granndis_2080ti_1gbe", "num_nodes": "2", "hidden": "64"}
    params = (f'{{"updates_per_epoch": {count}}}' for count in (1, 5))
    one, five = (question(small | {"strategy": "granndis", "strategy_params": p}) for p in params)
    assert not full_graph.fits(one, any_batches=False) and full_graph.fits(one, any_batches=True)
    assert full_graph.fits(five, any_batches=False)
    preloaded = {**small, "strategy": "granndis"}
    assert predict(small) == 0.0 and predict(preloaded) == 1.0
    assert full_graph.gave_a_factor(preloaded)
    assert not full_graph.gave_a_factor(small) and not full_graph.gave_a_factor(GRANNDIS)
    assert full_graph.UNCOUNTED["granndis_2080ti_1gbe"] > 1


P3 = row(
    "p3 p3_p100 ogbn-products sage 2x32 4x4 p3_push_pull",
    strategy_params={"batch": 1000, "fanout": [25, 10], "partitioner": "hash"},
)
SPLIT = row(
    "gsplit gsplit_p3_8xlarge orkut sage 3x256 1x4 gsplit",
    source="Table 3",
    strategy_params={"batch": 1024, "fanout": 15},
)


def test_constants_of_code_host_and_sampler():
    row = {**SPLIT, "metric": "epoch_time_s", "strategy": "dgl_data_parallel"}
    plain, slower = figures.testbed(row), scaled(row, {"host": 0.5, "code": 0.5, "sampler": 0.5})
    assert plain.device.launch > 0 and slower.device.launch == 2 * plain.device.launch
    assert slower.host.bandwidth == plain.host.bandwidth / 2
    assert slower.device.gemm == plain.device.gemm / 2
    assert slower.host_rates == {work: rate / 2 for work, rate in plain.host_rates.items()}
    assert scaled(P3, {"sampler": 0.5}).host_rates == {"draw": HOST_RATE / 2, "lay": HOST_RATE / 2}
    for factor in ("host", "code", "sampler"):
        assert predict(row, partial(scaled, factors={factor: 0.5})) > predict(row)
