"""What mini-batches are like: against sets, the strategies' schedules, and training's own draws."""

from dataclasses import replace

import numpy as np
import pytest
from asked import uniform

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.sampling import draw, items_of, key_of
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import DataParallel, GSplit
from gnnplan.planner.strategies.minibatch.feature_store import CLASSES
from gnnplan.planner.strategies.minibatch.profile import probe
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.testing.laws import cluster

GRAPH = load("synthetic:community?vertices=600&edges=6000&features=8&classes=3&seed=0")
TRAIN = int(GRAPH.train.sum())
MINI = Workload(mode="mini", batch=50, fanout=(3, 2), layers=2, hidden=16, model="sage")
CLUSTER = cluster(1, 2, memory=1e10, gemm=1e12, gather={16: {1.0: 1e10}})


def reached(seeds: np.ndarray, number: int) -> tuple[list[set[int]], list[int]]:
    """h_0 .. h_L as sets, and edges per layer: the sampler's draws, put together plainly."""
    rows, edges = [set(seeds.tolist())], []
    for layer, fanout in ((2, 3), (1, 2)):
        ids = np.array(sorted(rows[0]))
        _, places = draw(GRAPH, ids, fanout, key_of(0, 0, number, layer))
        rows.insert(0, rows[0] | set(GRAPH.indices[places].tolist()))
        edges.insert(0, places.size)
    return rows, edges


def test_frontiers_and_overlap_are_what_sets_say():
    found = probe(GRAPH, MINI, [1, 3])
    batches = list(enumerate(items_of(GRAPH, MINI, 0)))
    whole = [reached(seeds, number) for number, seeds in batches]
    assert found["probed"] == found["batches"] == len(batches) == -(-TRAIN // 50)
    assert not found["estimated"]
    for h in range(3):
        sizes = [len(rows[h]) for rows, _ in whole]
        assert found["rows"]["mean"][h] == pytest.approx(np.mean(sizes))
        assert found["rows"]["p95"][h] == pytest.approx(np.percentile(sizes, 95))
    assert found["edges"]["mean"] == pytest.approx(np.mean([edges for _, edges in whole], axis=0))
    parts = [(part, n) for n, seeds in batches for part in np.array_split(seeds, 3)]

    def loaded(batches: list) -> np.ndarray:
        """Rows of features, and edges."""
        return np.sum([[len(rows[0]), sum(edges)] for rows, edges in batches], axis=0)

    assert found["ranks"]["1"]["overlap"] == {"features": 1.0, "edges": 1.0}
    overlap = found["ranks"]["3"]["overlap"]
    features, edges = loaded([reached(*part) for part in parts]) / loaded(whole)
    assert overlap == pytest.approx({"features": features, "edges": edges}) and features > 1.1


@pytest.mark.parametrize("hot", ["frequency", "degree"])
def test_hits_are_those_of_the_strategy_with_such_a_cache(hot):
    problem = Problem(GRAPH.stats, GRAPH, MINI, CLUSTER)
    found = probe(GRAPH, MINI, [2])["ranks"]["2"]["hits"]
    strategy = DataParallel(cache=round(0.1 * 600) * 8 * 4, hot=hot)
    store, batches = strategy.store(problem), strategy.batches(problem)
    loads = [store.loads(problem, batches.at(step)) for step in range(batches.steps)]
    rows = sum(load.rows.sum(0) for load in loads)
    assert found[hot]["0.1"] == pytest.approx(rows[CLASSES.index("hit")] / rows.sum())
    assert list(found[hot].values()) == sorted(found[hot].values())
    assert found["frequency"]["0.1"] > 0.1  # the hottest are hit more often than others


@pytest.mark.parametrize("model", ["sage", "gcnii"])
def test_a_split_sends_what_gsplit_schedules(model):
    workload = MINI.model_copy(update={"model": model})
    problem = Problem(GRAPH.stats, GRAPH, workload, CLUSTER)
    found = probe(GRAPH, workload, [2])
    split = found["ranks"]["2"]["split"]
    sent = np.array(split["bytes"]) * found["batches"]
    planned = GSplit().predict(problem).bytes
    assert sent.sum() == pytest.approx(planned["halo"] + planned["ids"])
    assert sent[0, 0] == sent[1, 1] == 0 and sent[0, 1] > 0 and sent[1, 0] > 0
    batches = GSplit().batches(problem).first()
    shares = [
        sum(batch.crossing(layer).sum() for batch in batches)
        / sum(batch.facts(layer).edges.sum() for batch in batches)
        for layer in (1, 2)
    ]
    assert split["cross_edges"] == pytest.approx(shares)


def test_statistics_only_gives_expectations():
    """Near what a graph without structure shows; who owns or caches what is not known."""
    graph = uniform(4000, 40000)
    stats = replace(graph.stats, hash="", batch_spread=(0.0, 0.0))
    workload = MINI.model_copy(update={"batch": 100, "fanout": (5, 5)})
    real, found = probe(graph, workload, [4]), probe(stats, workload, [4])
    ours, theirs = found["ranks"]["4"], real["ranks"]["4"]
    assert found["estimated"] and ours["hits"] is ours["split"] is None
    assert found["rows"]["mean"] == pytest.approx(real["rows"]["mean"], rel=0.05)
    assert ours["overlap"]["edges"] == pytest.approx(theirs["overlap"]["edges"], rel=0.05)


def test_refusals():
    with pytest.raises(SpecError, match=rf"batch: {TRAIN + 1:,}, .*; use --batch {TRAIN}"):
        probe(GRAPH, MINI.model_copy(update={"batch": TRAIN + 1}), [2])
    with pytest.raises(SpecError, match="batch: 50, ranks: 51"):
        probe(GRAPH, MINI, [2, 51])
    untrained = replace(
        GRAPH, train=np.zeros_like(GRAPH.train), stats=replace(GRAPH.stats, train_vertices=0)
    )
    with pytest.raises(SpecError, match="has none; leave --batch out"):
        probe(untrained, MINI, [2])
