"""Splitting functions: what pre-sampling counts, and that weights do what the paper says."""

from dataclasses import replace

import numpy as np
import pytest

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import BEFORE, SPLITTERS, owners, presample, split
from gnnplan.planner.graph.sampling import frontier, items_of
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.vocabulary.errors import SpecError

SMALL = load("synthetic:community?vertices=60&edges=400&features=4&classes=3&seed=0")
GRAPH = load("synthetic:community?vertices=6000&edges=60000&features=4&classes=3&seed=0")


def with_few_targets(graph: Graph, share: float) -> Graph:
    train = np.zeros(graph.stats.vertices, dtype=bool)
    train[np.random.default_rng(0).permutation(train.size)[: round(share * train.size)]] = True
    return replace(graph, train=train)


def batches_as(batch: int, fanout: tuple[int, ...] | str, seed: int = 0) -> Workload:
    layers = 1 if fanout == "full" else len(fanout)
    return Workload(mode="mini", layers=layers, batch=batch, fanout=fanout, seed=seed)


def test_presampling_counts_frontiers_and_draws():
    """Against a plain count over the same batches."""
    fanouts = (3, 2)
    workload = batches_as(8, fanouts, 5)
    found = presample(SMALL, workload, epochs=2)
    vertices, edges = np.zeros(60, int), np.zeros(SMALL.indices.size, int)
    for epoch in (BEFORE, BEFORE + 1):
        for number, seeds in enumerate(items_of(SMALL, workload, epoch)):
            one = frontier(SMALL, seeds, fanouts, 5, epoch, number)
            for nodes in one.nodes:
                for v in nodes.tolist():
                    vertices[v] += 1
            for _, places in one.edges:
                for place in places.tolist():
                    edges[place] += 1
    assert np.array_equal(found.vertices, vertices) and np.array_equal(found.edges, edges)


def test_without_sampling_every_edge_near_a_seed_counts():
    found = presample(SMALL, batches_as(1000, "full"), epochs=3)
    into_train = SMALL.train[np.repeat(np.arange(60), SMALL.degree)]
    assert found.edges.tolist() == (3 * into_train).tolist()


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_every_vertex_has_an_owner_and_every_owner_some(splitter, parts):
    with pytest.raises(SpecError, match="splitter 'nodes' is unknown; did you mean node"):
        split(GRAPH, parts, "nodes", 0)
    owner = split(GRAPH, parts, splitter, 0, presample(GRAPH, batches_as(512, (5, 5)), epochs=1))
    assert owner.shape == (6000,)
    assert np.bincount(owner, minlength=parts).min() > 0
    assert owner.max() == parts - 1


def measured(
    graph: Graph, owner: np.ndarray, batch: int, fanouts: tuple[int, ...]
) -> tuple[float, float]:
    """Share of edges that cross, and a rank's most edges over the mean, in the first epoch."""
    cross = edges = 0
    worst = []
    for number, seeds in enumerate(items_of(graph, batches_as(batch, fanouts), 0)):
        made = MiniBatch(graph, [frontier(graph, seeds, fanouts, 0, 0, number)], (0,) * 4, owner)
        layers = range(1, len(fanouts) + 1)
        each = np.sum([made.facts(layer).edges for layer in layers], axis=0)
        cross += sum(int(made.crossing(layer).sum()) for layer in layers)
        edges += int(each.sum())
        worst.append(each.max() / each.mean())
    return cross / edges, float(np.mean(worst))


def test_weights_pay_where_batches_touch_little():
    """GSplit Fig. 5: cross edges gsplit < node < random, the load of gsplit at or below edge's."""
    graph, fanouts = with_few_targets(GRAPH, 0.02), (3,)
    frequency = presample(graph, batches_as(32, fanouts))
    found = {s: measured(graph, split(graph, 4, s, 0, frequency), 32, fanouts) for s in SPLITTERS}
    crossing, load = ({splitter: pair[i] for splitter, pair in found.items()} for i in (0, 1))
    assert crossing["gsplit"] < 0.95 * crossing["node"] < crossing["random"], found
    assert crossing["random"] == pytest.approx(0.75, abs=0.03), found
    assert load["gsplit"] <= load["edge"], found


@pytest.mark.parametrize("imbalance", [0.001, 0.03, 0.3])
def test_no_owner_has_more_than_the_imbalance_allows(imbalance):
    """GSplit Eq. 2, and METIS uses what it is allowed. A vertex cannot be cut: so a bit more."""
    frequency = presample(GRAPH, batches_as(512, (5, 5)), epochs=1)
    for parts in (2, 4):
        owner = split(GRAPH, parts, "gsplit", 0, frequency, imbalance)
        load = np.bincount(owner, frequency.vertices, parts)
        excess = load.max() / load.mean() - 1
        assert excess <= imbalance + frequency.vertices.max() / load.mean()
        assert excess > imbalance / 2


def test_owners_of_another_imbalance_are_other_owners():
    """Owners are cached on disk: what they depend on is in the key. Random owners do not depend."""
    workload = Workload(mode="mini", layers=2, batch=512, fanout=(5, 5))

    def found(splitter: str, imbalance: float) -> list[int]:
        return owners(GRAPH, 4, splitter, workload, 1, imbalance).tolist()

    assert found("gsplit", 0.3) != found("gsplit", 0.03)
    assert found("gsplit", 0.3) == found("gsplit", 0.3)
    assert found("random", 0.3) == found("random", 0.03)
