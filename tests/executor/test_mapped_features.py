"""Features that stay in their file: a folder of .npy trains to the same bit as the .npz, reading
only the rows that it needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.ranks.machine import resident
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.testing.plain import difference, train_plainly
from gnnplan.testing.ranks import Case, Ranks

pytestmark = pytest.mark.timeout(110)

VERTICES, WIDTH = 4_000, 4_096  # 64 MiB of features


@pytest.fixture(scope="module")
def folder(graphs: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """`rough` as a folder."""
    path = tmp_path_factory.mktemp("mapped")
    with np.load(graphs["rough"]) as arrays:
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)
    return str(path)


@pytest.mark.parametrize(
    "strategies",
    [
        ("data_parallel", "data_parallel(cache=960,shared_cache=True)", "p3(cache=480)"),
        ("gsplit", "graph_parallel"),
    ],
    ids=str,
)
def test_mapped_features_train_to_the_same_bit(
    run_ranks: Ranks, graphs: dict[str, str], folder: str, strategies: tuple[str, ...]
) -> None:
    cases = []
    for strategy in strategies:
        workload: dict[str, object] = {
            "model": "sage",
            "layers": 2,
            "hidden": 8,
            "dropout": 0.5,
            "lr": 0.05,
            "seed": 3,
        }
        if strategy != "graph_parallel":
            workload |= {"mode": "mini", "batch": 6, "fanout": (3, 2)}
        cases += [
            Case(strategy, graph, workload, eval_every=2) for graph in (graphs["rough"], folder)
        ]
    results = run_ranks(2, cases)
    for read, mapped in zip(results[::2], results[1::2], strict=True):
        assert mapped.losses == read.losses, str(mapped.case)
        assert all(torch.equal(p, read.weights[name]) for name, p in mapped.weights.items()), str(
            mapped.case
        )
        assert mapped.metrics[-1]["test_accuracy"] == read.metrics[-1]["test_accuracy"]


def test_features_in_float64_are_trained_on_as_they_are(
    run_ranks: Ranks, graphs: dict[str, str], tmp_path: Path
) -> None:
    """They were rounded to float32 first, and weights were 3e-8 off. In float32 the numbers of the
    file, mapped or not, are rounded."""
    (tmp_path / "folder").mkdir()
    with np.load(graphs["rough"]) as read:
        arrays = dict(read)
    arrays["x"] = arrays["x"] + np.random.default_rng(0).normal(0, 1e-8, arrays["x"].shape)
    np.savez(tmp_path / "graph.npz", **arrays)
    for name, array in arrays.items():
        np.save(tmp_path / "folder" / f"{name}.npy", array)
    workload = {"model": "sage", "layers": 2, "hidden": 8, "lr": 0.05, "seed": 3, "dropout": 0.0}
    mini = {"mode": "mini", "fanout": "full", "batch": int(arrays["train_mask"].sum())}
    asked = [
        ("graph_parallel", "graph.npz", {}),
        ("feature_parallel", "folder", {}),
        ("data_parallel(cache=960)", "folder", mini),
        ("p3", "graph.npz", mini),
        ("p3(cache=480)", "folder", mini),
    ]
    exact, rounded = (
        [
            Case(strategy, str(tmp_path / graph), {**workload, **more, "dtype": dtype}, epochs=5)
            for strategy, graph, more in asked
        ]
        for dtype in ("float64", "float32")
    )
    _, weights = train_plainly(exact[0])
    results = run_ranks(2, exact + rounded[-2:])
    for result in results[: len(exact)]:
        assert difference(result.weights, weights) < 1e-12, str(result.case)
    assert results[-2].losses == results[-1].losses


@pytest.mark.processes
def test_only_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    """By what the process has resident: neither the first load, which looks at every number, nor
    the second keeps the features."""
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
    words = subprocess.run(
        [sys.executable, __file__, str(tmp_path)],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=os.environ | {"GNNPLAN_CACHE": str(tmp_path / "cache")},
    ).stdout
    first, second, rows = (int(word) for word in words.split())
    assert max(first, second, rows) < nbytes / 2
    assert rows >= 8 * WIDTH * 4


def _tell(folder: str) -> None:
    """Bytes that two loads and 8 rows, far apart, leave resident: a process of its own, whose other
    pages are known."""
    small = load("synthetic:community?vertices=60&edges=400&features=4&classes=3&seed=0")
    assert isinstance(small, Graph)
    features(small, np.arange(8), Workload(), torch.device("cpu"))
    grown, graphs = [resident()], []
    for _ in range(2):
        graphs.append(load(folder))
        grown.append(resident())
    graph = graphs[-1]
    assert (
        isinstance(graph, Graph) and isinstance(graph.x, np.memmap) and not graph.x.flags.writeable
    )
    out = features(graph, np.arange(0, VERTICES, VERTICES // 8), Workload(), torch.device("cpu"))
    grown.append(resident())
    assert out.shape == (8, WIDTH)
    print(*np.diff(grown))


if __name__ == "__main__":
    _tell(sys.argv[1])
