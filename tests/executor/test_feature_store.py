"""A feature store: rows are the graph's and counted by class, and fill what was predicted. Of features
that stay in their file only rows that are asked for are read. Copies beside computation: buffers
are filled again when what was in them has left, and offload's chunks come and go in the order of
the plan; streams are a fake that is as late as it may be (what a GPU makes of them: test_gpu.py)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from asked import on
from calls import allocations
from counting import counted
from recursions import Recursion
from torch import Tensor

from gnnplan.executor.layers.blocks import features, take_rows
from gnnplan.executor.layers.copies import Staging
from gnnplan.executor.layers.kernels import SparseRows
from gnnplan.executor.minibatch import feature_store as executor_store
from gnnplan.executor.minibatch.feature_store import FeatureStore, map_features, write_features
from gnnplan.executor.ranks.machine import resident
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.evidence.runs import summed
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.strategies import DataParallel
from gnnplan.planner.strategies.minibatch.feature_store import SOURCES
from gnnplan.planner.vocabulary.files import cache_dir
from gnnplan.planner.vocabulary.trace import recorded_order
from gnnplan.testing.plain import difference
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
            set(SOURCES),
        ),
        (f"p3(cache={9 * ROW})", {"hit", "host"}),
    ],
)
def test_ranks_leave_rows_by_class(run_ranks, graphs, strategy, classes):
    """Of all steps, as the planner counts them; not of batches that are made ahead of the end."""
    result = run_ranks(4, case(strategy, graphs["rough"], 2))
    problem = result.case.problem(4)
    settled = result.case.settled(problem)
    batches, store = settled.batches(problem), settled.store(problem)
    rows = sum(
        store.loads(problem, batches.at(step)).rows
        for step in range(result.case.epochs * batches.steps)
    )
    left = [result.rank(rank)["rows"] for rank in range(4)]
    assert left == [dict(zip(SOURCES, of.tolist(), strict=True)) for of in rows]
    assert {SOURCES[place] for place in np.flatnonzero(rows.sum(0))} == classes
    assert summed((result.rank(rank) for rank in range(4)), "rows") == dict(
        zip(SOURCES, rows.sum(0).tolist(), strict=True)
    )


def test_a_server_has_no_other_servers_rows(graphs):
    supply = DataParallel(features="spread").supply(case("", graphs["rough"], servers=2).problem(2))
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
    shared, alone = run_ranks(2, large), run_ranks.alone(large)
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


VERTICES, WIDTH = 4_000, 4_096  # 64 MiB of features


def test_features_in_float64_are_trained_on_as_they_are(run_ranks, graphs, tmp_path):
    """They were rounded to float32, weights 3e-8 off. In float32 the file's numbers are rounded."""
    (tmp_path / "folder").mkdir()
    with np.load(graphs["rough"]) as read:
        arrays = dict(read)
    arrays["x"] = arrays["x"] + np.random.default_rng(0).normal(0, 1e-8, arrays["x"].shape)
    np.savez(tmp_path / "graph.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    workload = {"model": "sage", "layers": 2, "hidden": 8, "lr": 0.05, "seed": 3, "dropout": 0.0}
    mini = {"mode": "mini", "fanout": "full", "batch": int(arrays["train_mask"].sum())}
    asked = [("graph_parallel", "graph.npz", {}), ("feature_parallel", "folder", {})]
    asked += [("data_parallel(cache=960)", "folder", mini), ("p3", "graph.npz", mini)]
    asked += [("p3(cache=480)", "folder", mini)]
    exact, rounded = (
        [
            Case(strategy, str(tmp_path / graph), {**workload, **more, "dtype": dtype}, epochs=5)
            for strategy, graph, more in asked
        ]
        for dtype in ("float64", "float32")
    )
    plain = Recursion(exact[0])
    plain.losses(exact[0].epochs)
    results = [run_ranks(2, each) for each in exact + rounded[-2:]]
    for result in results[: len(exact)]:
        assert difference(result.weights, plain.state) < 1e-12, str(result.case)
    assert results[-2].losses == results[-1].losses


def test_only_rows_that_are_asked_for_are_read(tmp_path, fork_server):
    """By resident memory: neither the first load, which looks at all, nor the second keeps them."""
    random = np.random.default_rng(0)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (VERTICES, WIDTH))
    for row in x:
        row[:] = random.standard_normal(WIDTH, dtype=np.float32)
    for name, array in (
        ("src", random.integers(0, VERTICES, 9_000)),
        ("dst", random.integers(0, VERTICES, 9_000)),
        ("y", random.integers(0, 4, VERTICES)),
    ):
        np.save(tmp_path / f"{name}.npy", array)
    nbytes = x.nbytes
    del x
    program = [__file__, str(tmp_path)], {"GNNPLAN_CACHE": str(tmp_path / "cache")}
    (told,) = fork_server.run([program], tmp_path)
    first, second, rows = map(int, told.stdout.split())
    assert max(first, second, rows) < nbytes / 2
    assert rows >= 8 * WIDTH * 4


def test_columns_of_some_rows_are_read_alone(tmp_path):
    """Of a mapped file numpy read and kept P3's columns of all rows, for every batch."""
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float32, (5_000, 64))
    x[:] = np.arange(5_000)[:, None]
    out = np.empty((8, 32), np.float32)
    with allocations() as most:
        take_rows(x[:, :32], np.arange(8) * 600, out)
        assert most() < x.nbytes / 50
    assert np.array_equal(out, x[np.arange(8) * 600, :32])


def _tell(folder: str) -> None:
    """Bytes that two loads and 8 rows leave resident, in a process whose other pages are known."""
    small = load("synthetic:community?vertices=60&edges=400&features=4&classes=3&seed=0")
    features(small, np.arange(8), Workload(), torch.device("cpu"))
    grown, graphs = [resident()], []
    for _ in range(2):
        graphs.append(load(folder))
        grown.append(resident())
    graph = graphs[-1]
    assert isinstance(graph, Graph) and isinstance(graph.x, np.memmap)
    assert not graph.x.flags.writeable
    out = features(graph, np.arange(0, VERTICES, VERTICES // 8), Workload(), torch.device("cpu"))
    grown.append(resident())
    assert out.shape == (8, WIDTH)
    print(*np.diff(grown))


CPU = torch.device("cpu")


class Late:
    """torch.cuda's streams, whose work is done when somebody waits for it, and no earlier."""

    def __init__(self) -> None:
        self.own = self.here = self.Stream()

    class Stream:
        def __init__(self) -> None:
            self.work: list[Callable[[], None]] = []

        def run(self, to: int) -> None:
            for place in range(to):
                work, self.work[place] = self.work[place], lambda: None
                work()

        def wait_stream(self, other: Late.Stream) -> None:
            to = len(other.work)
            self.work.append(lambda: other.run(to))

    class Event:
        stream: Late.Stream | None = None

        def record(self, stream: Late.Stream) -> None:
            self.stream, self.place = stream, len(stream.work)

        def synchronize(self) -> None:
            if self.stream:
                self.stream.run(self.place)

    def current_stream(self, device: torch.device) -> Late.Stream:
        return self.here

    @contextmanager
    def stream(self, stream: Late.Stream) -> Iterator[None]:
        before, self.here = self.here, stream
        yield
        self.here = before


@pytest.fixture
def late(monkeypatch):
    """Copies that need not wait are late."""
    module, copy = Late(), Tensor.copy_

    def copy_(into: Tensor, rows: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking and module.here is not module.own:
            module.here.work.append(lambda: copy(into, rows))
            return into
        return copy(into, rows)

    monkeypatch.setattr(Tensor, "copy_", copy_)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.mark.parametrize("rows", [0, 1, 5, 64, 203])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_scattered_rows_come_and_go_through_two_buffers(late, rows, dtype):
    """13 rows to a buffer, which three threads fill; those of features are converted there."""
    staging = Staging(CPU, size=13 * 7 * 8)
    staging.threads = 3
    kept = torch.arange(300 * 7).view(300, 7).to(dtype)
    places = torch.randperm(300, generator=torch.Generator().manual_seed(rows))[:rows]
    for of_host in {dtype, torch.float32}:
        into = torch.zeros(rows, 7, dtype=dtype)

        def gather(start: int, stop: int, buffer: Tensor) -> None:
            buffer[:] = kept[places[start:stop]]

        staging.load(into, of_host, gather)
        assert not into[-1:].any(), "the host waited"
        late.own.run(len(late.own.work))
        assert into.equal(kept[places].to(of_host).to(dtype))

    def scatter(start: int, stop: int, buffer: Tensor) -> None:
        kept[places[start:stop]] = buffer

    expected = kept.index_copy(0, places, -into)
    late.own.work.append(into.neg_)  # it is computed by then
    staging.store(into, scatter)
    assert kept.equal(expected)


def test_a_rank_gathers_rows_on_all_of_its_cores(monkeypatch):
    """A launcher gives each rank its own cores, which were divided by the number of GPUs again."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {4, 5, 6, 7})
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert Staging(CPU, size=8).threads == 4


@pytest.mark.parametrize("model", ["sage", "gcn", "sgc"])
def test_chunks_whose_copies_go_beside_computation(model):
    """The same numbers, and the order that is planned for GPUs."""
    graph = "synthetic:community?vertices=600&edges=3000&features=24&classes=5"
    case = Case("offload(chunks=4)", graph, dict(model=model, layers=3, hidden=8, dropout=0.5))
    if model == "sgc":  # its first aggregate is constant
        case = replace(case, workload={**case.workload, "dropout": 0.0})
    problem = case.problem(1)
    found: list[Any] = []
    for beside in (False, True):
        rank = Rank(0, 1, CPU, "gloo")
        worker: Any = open_worker(rank, problem, case.settled(problem))
        worker.overlaps_copies = beside
        losses = [worker.step(step)[0] for step in range(2)]
        rank.recorder.recording = False
        logits = worker.evaluate(1).clone()
        found.append([*losses, logits, *(p.grad for p in worker.net.parameters())])
        order = recorded_order(rank.recorder.spans, 0, "copy")
        rank.close()
        kind = "cuda" if beside else "cpu"
        planned = on(problem, kind=kind)
        schedule = case.settled(planned).schedule(planned, 2)
        assert order == [str(task.label) for task in schedule.lane(0, "copy")]
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


if __name__ == "__main__":
    _tell(sys.argv[1])
