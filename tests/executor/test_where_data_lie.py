"""Where rows, lists and parts lie changes nothing: no loss, no weight, no bit."""

from typing import Any

import numpy as np
import pytest
import torch

from gnnplan.planner.graph.load import load
from gnnplan.planner.graph.partition import partition
from gnnplan.planner.ownership.parts import write_parts
from gnnplan.testing.ranks import Case, Result

pytestmark = pytest.mark.timeout(110)

ROW = 12 * 8  # [B] of `rough` in float64
SPREAD = f"features='spread',cache={9 * ROW}"
OWN = {"heads": 2, "layers": 3, "hidden": 8, "dropout": 0.5, "lr": 0.05, "seed": 3}
BATCHES = {**OWN, "mode": "mini", "batch": 6, "dtype": "float64"}
STORES = {**BATCHES, "model": "sage", "fanout": (3, 2, 2)}
LISTS = {**BATCHES, "model": "gcn", "fanout": (3, 2, 2)}
WHOLE = {**BATCHES, "model": "sage", "fanout": "full"}
FULL = {**OWN, "model": "gcn"}
MINI = {**OWN, "model": "sage", "layers": 2, "mode": "mini", "batch": 6, "fanout": (3, 2)}


@pytest.fixture(scope="module")
def sources(graphs, tmp_path_factory):
    """sources('rough', 'parts'): the graph as it is, as a folder whose features stay in their file,
    or as a folder of two parts."""
    made = tmp_path_factory.mktemp("sources")

    def source(name: str, way: str) -> str:
        folder = made / f"{name} {way}"
        if way == "file" or folder.exists():
            return graphs[name] if way == "file" else str(folder)
        if way == "parts":
            graph = load(graphs[name])
            write_parts(graph, partition(graph, 2), "metis", 0, folder)
        else:
            folder.mkdir()
            with np.load(graphs[name]) as arrays:
                for array in arrays:
                    np.save(folder / f"{array}.npy", arrays[array])
        return str(folder)

    return source


_trained: dict[tuple[int, str], Result] = {}


@pytest.fixture
def must_be_same(run_ranks):
    """must_be_same(world, case, plain): they leave the same. A plain one is trained once."""

    def compare(world: int, case: Case, plain: Case) -> None:
        if (world, str(plain)) not in _trained:
            _trained[world, str(plain)] = run_ranks(world, [plain])[0]
        (found,), expected = run_ranks(world, [case]), _trained[world, str(plain)]
        assert found.losses == expected.losses, str(case)
        same = (torch.equal(p, found.weights[name]) for name, p in expected.weights.items())
        assert all(same), str(case)
        assert found.metrics[-1]["test_accuracy"] == expected.metrics[-1]["test_accuracy"]

    return compare


def at_night(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    ("world", "servers", "plain", "knobs", "workload"),
    [  # by day those with most knobs
        at_night(2, 1, "data_parallel()", f"cache={20 * ROW},hot='degree'", STORES),
        at_night(2, 1, "data_parallel()", "cache=100000", STORES),
        (2, 1, "data_parallel()", f"cache={20 * ROW},shared_cache=True,prefetch=1", STORES),
        at_night(4, 2, "data_parallel()", "features='spread'", STORES),
        (4, 2, "data_parallel()", f"{SPREAD},shared_cache=True", STORES),
        (4, 2, "gsplit()", f"{SPREAD},hot='degree'", STORES),
        at_night(4, 2, "gsplit(group='all')", SPREAD, STORES),
        at_night(4, 2, "p3()", f"cache={9 * ROW},prefetch=1", STORES),
        at_night(4, 2, "p3()", "cache=100000", STORES),
        (2, 1, "p3(pipelined=True)", f"cache={9 * ROW}", STORES),
        (3, 1, "data_parallel()", "structure='spread',structure_cache=300,prefetch=1", LISTS),
        at_night(
            *(4, 2, "data_parallel(features='spread')"),
            "structure='spread',structure_cache=300,hot='degree'",
            WHOLE,
        ),
        at_night(2, 1, "gsplit()", "structure='spread'", LISTS),
        at_night(2, 1, "p3()", "structure='spread',structure_cache=300", LISTS),
        (4, 2, "p3(pipelined=True)", "structure='spread'", WHOLE),
    ],
    ids=lambda value: str(value.get("fanout")) if isinstance(value, dict) else str(value),
)
@pytest.mark.parametrize("graph", ["rough", at_night("sparse")])
def test_stores_of_rows_and_lists(
    must_be_same, graphs, world, servers, plain, knobs, workload, graph
):
    directed = "structure" in knobs and workload is LISTS
    strategy = f"{plain[:-1]},{knobs})".replace("(,", "(")
    asked, as_ever = (
        Case(text, graphs[graph], workload, servers, eval_every=2, directed=directed)
        for text in (strategy, plain)
    )
    must_be_same(world, asked, as_ever)


PARTS = [
    *("graph_parallel", "graph_parallel(narrow=True,trim=True)", "graph_parallel(bits='adaptive')"),
    *("pipegcn", "bns(p=0.5)", "granndis(batches=2)", "gnnpipe(chunks=4)", "feature_parallel"),
    *("data_parallel", "data_parallel(cache=960)", "gsplit", "p3"),
]
MAPPED = ["data_parallel(cache=960,shared_cache=True)", "p3(cache=480)", "gsplit", "graph_parallel"]

# those that read most differently
BY_DAY = {("parts", each) for each in ("graph_parallel", "bns(p=0.5)", "granndis(batches=2)")}
BY_DAY |= {("parts", each) for each in ("gnnpipe(chunks=4)", "feature_parallel", "gsplit", "p3")}
BY_DAY |= {("parts", "data_parallel(cache=960)"), ("folder", MAPPED[0]), ("folder", MAPPED[3])}


@pytest.mark.parametrize(
    ("graph", "way", "strategy"),
    [
        row if row[1:] in BY_DAY or row[0] == "sparse" else at_night(*row)
        for row in (
            *(("rough", "parts", strategy) for strategy in PARTS),
            *(("sparse", "parts", strategy) for strategy in ("graph_parallel", "p3")),
            *(("rough", "folder", strategy) for strategy in MAPPED),
        )
    ],
)
def test_parts_and_features_that_stay_in_their_file(must_be_same, sources, graph, way, strategy):
    of_batches = strategy.startswith(("data_parallel", "gsplit", "p3"))
    workload = MINI if of_batches else FULL
    if strategy.startswith("gnnpipe"):
        workload = {**workload, "dropout": 0.0}
    asked, plain = (
        Case(strategy, sources(graph, each), workload, eval_every=2) for each in (way, "file")
    )
    must_be_same(2, asked, plain)
