"""Features that stay in their file: only rows that are asked for are read."""

import sys

import numpy as np
import torch
from calls import allocations
from recursions import Recursion

from gnnplan.executor.layers.blocks import features, take_rows
from gnnplan.executor.ranks.machine import resident
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case

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
    results = run_ranks(2, exact + rounded[-2:])
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


if __name__ == "__main__":
    _tell(sys.argv[1])
