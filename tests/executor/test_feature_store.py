"""A feature store: rows are the graph's and counted by class, and fill what was predicted."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from counting import counted

from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.minibatch import feature_store as executor_store
from gnnplan.executor.minibatch.feature_store import FeatureStore, map_features, write_features
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.evidence.runs import summed
from gnnplan.planner.graph.load import load
from gnnplan.planner.strategies import DataParallel
from gnnplan.planner.strategies.minibatch.feature_store import CLASSES
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.testing.ranks import Case, small

ROW = 12 * 8  # [B] of `rough` in float64


def case(strategy: str, graph: str, servers: int = 1, model: str = "sage", **more: object) -> Case:
    asked = small(model, layers=3, heads=2, mode="mini", batch=6, fanout=(3, 2, 2))
    return Case(strategy, graph, {**asked, **more}, servers, eval_every=2)


def batch_of(ids: np.ndarray) -> SimpleNamespace:
    """Whose only rank reads these rows."""
    return SimpleNamespace(rows=lambda rank, h: ids)


@pytest.mark.parametrize(
    ("strategy", "classes"),
    [
        (
            f"data_parallel(features='spread',cache={9 * ROW},shared_cache=True,prefetch=1)",
            set(CLASSES),
        ),
        (f"p3(cache={9 * ROW})", {"hit", "host"}),
    ],
)
def test_ranks_leave_rows_by_class(run_ranks, graphs, strategy, classes):
    """Of all steps, as the planner counts them; not of batches that are made ahead of the end."""
    result = run_ranks(4, [case(strategy, graphs["rough"], 2)])[0]
    problem = result.case.problem(4)
    settled = result.case.settled(problem)
    batches, store = settled.batches(problem), settled.store(problem)
    rows = sum(
        store.loads(problem, batches.at(step)).rows
        for step in range(result.case.epochs * batches.steps)
    )
    left = [result.rank(rank)["rows"] for rank in range(4)]
    assert left == [dict(zip(CLASSES, of.tolist(), strict=True)) for of in rows]
    assert {CLASSES[place] for place in np.flatnonzero(rows.sum(0))} == classes
    assert summed((result.rank(rank) for rank in range(4)), "rows") == dict(
        zip(CLASSES, rows.sum(0).tolist(), strict=True)
    )


def test_a_server_has_no_other_servers_rows(graphs):
    problem = case("", graphs["rough"], servers=2).problem(2)
    supply = DataParallel(features="spread").supply(problem)
    planned = supply.store
    store = FeatureStore(Rank(0, 2, torch.device("cpu"), "gloo"), supply)
    assert len(store._host(np.flatnonzero(planned.home == 0)))
    with pytest.raises(AssertionError, match="server 0 has no features of vertices"):
        store._host(np.flatnonzero(planned.home == 1)[:1])


def test_a_file_of_features_takes_the_place_of_a_copy(graphs, tmp_path):
    graph = load(graphs["rough"])
    copy, path = np.array(graph.x), tmp_path / "features" / "x.npy"
    assert not map_features(path, graph)  # there is none yet
    write_features(path, graph)
    assert map_features(path, graph) and isinstance(graph.x, np.memmap)
    assert path.stat().st_mode & 0o777 == 0o600  # other users do not read the user's data
    assert not graph.x.flags.writeable and np.array_equal(graph.x, copy)
    assert np.array_equal(graph.features(np.array([5, 3])), copy[[5, 3]])
    written = path.stat().st_mtime_ns
    write_features(path, graph)
    assert path.stat().st_mtime_ns == written
    assert [p.name for p in path.parent.iterdir()] == ["x.npy"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "shorter": lambda path: os.truncate(path, path.stat().st_size - 100),
    "other shape": lambda path: np.save(path, np.load(path)[:-1]),
    "not an array": lambda path: path.write_text("features"),
}


@pytest.mark.parametrize("damage", [*DAMAGES, "folder closed"])
def test_a_bad_file_of_features_is_not_used(graphs, tmp_path, damage):
    graph = load(graphs["rough"])
    copy, path = np.array(graph.x), tmp_path / "features" / "x.npy"
    write_features(path, graph)
    if damage == "folder closed":  # a file where a folder should be
        write_features(path / "deeper" / "x.npy", graph)
        assert not map_features(path / "deeper" / "x.npy", graph) and np.array_equal(graph.x, copy)
        return
    DAMAGES[damage](path)
    assert not map_features(path, graph)
    write_features(path, graph)
    assert map_features(path, graph) and np.array_equal(graph.x, copy)


def test_ranks_of_a_server_share_large_features(run_ranks):
    """22 MB: one file for both, and training as ever."""
    source = "synthetic:community?vertices=22000&edges=60000&features=256&classes=5&seed=0"
    large = case("data_parallel", source, layers=1, hidden=4, batch=8000, fanout=(2,))
    assert executor_store.LARGE < 22000 * 256 * 4
    shared, alone = run_ranks(2, [large])[0], run_ranks.alone(large)
    assert shared.losses == pytest.approx(alone.losses, rel=1e-9)
    graph = load(source)
    (file,) = cache_dir().glob(f"features/{graph.stats.hash}*")
    assert np.array_equal(np.load(file), graph.x)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_cache_and_what_arrives_fill_what_was_predicted(sparse):
    """As torch counts it: what the cache leaves, and the most while rows are put together."""
    graph = load("synthetic:community?vertices=6000&edges=9000&features=200&classes=5&seed=0")
    if sparse:
        x = sp.random(6000, 200, 0.08, "csr", np.float32, np.random.default_rng(0))
        graph = replace(graph, x=x, stats=replace(graph.stats, nonzeros=x.nnz, hash="sparse"))
    problem = case("", "synthetic:community?vertices=20&edges=20&features=4&classes=2").problem(1)
    asked = problem.workload.model_copy(update={"dtype": "float32"})
    problem = replace(problem, graph=graph, stats=graph.stats, workload=asked)
    supply = DataParallel(cache=400_000, hot="degree").supply(problem)
    planned = supply.store
    store, left, _ = counted(lambda: FeatureStore(Rank(0, 1, torch.device("cpu"), "gloo"), supply))
    # its arrays are numpy's, whom the profiler does not see
    if isinstance(store.cached, SparseRows):
        pattern = store.cached.pattern
        assert (
            pattern.indptr.nbytes + pattern.columns.nbytes + store.cached.stored.nbytes
            == planned.held(problem)[0] + 4
        )
        return
    assert left == planned.held(problem)[0]
    ids = np.random.default_rng(1).permutation(6000)[:4000]
    loads = planned.loads(problem, batch_of(ids))
    arriving = int((loads.host + loads.hits)[0])
    rows, left, most = counted(lambda: store.complete(store.load(store.in_host(ids)[0]), ids, 0))
    assert left == rows.nbytes == arriving  # all of them came from here
    assert most == pytest.approx(rows.nbytes + arriving, rel=0.05)
