"""Chunks that pass devices train as one process that has the whole graph. What they fill is in
test_memory.py, bytes and order in test_conformance.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pairwise import covered

from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case, Ranks

pytestmark = pytest.mark.timeout(110)

CASES = [  # chunks, model (and more of the workload), graph, directed
    (3, {"model": "gcn"}, "rough", False),
    (5, {"model": "gcn", "dropout": 0.5, "norm": "layer"}, "multi", True),
    (4, {"model": "sage", "dropout": 0.5}, "rough", True),
    (60, {"model": "sage"}, "rough", False),  # of a vertex each; some without edges
    (2, {"model": "sage", "layers": 1, "dropout": 0.5}, "multi", False),
    (4, {"model": "gcn", "norm": "batch", "optimizer": "sgd", "dropout": 0.5}, "rough", False),
    (1, {"model": "gcn", "layers": 2, "dropout": 0.5}, "rough", False),
    (3, {"model": "gat", "heads": 2, "dropout": 0.5}, "islands", False),
    (3, {"model": "gin", "optimizer": "sgd"}, "rough", False),
    (4, {"model": "sgc", "dropout": 0.5}, "islands", False),
]


SEVERAL = [  # ranks, servers, chunks of each, model, graph, directed
    (2, 1, 3, {"model": "gcn", "dropout": 0.5}, "rough", False),
    (3, 1, 2, {"model": "sage"}, "rough", True),
    (2, 2, 1, {"model": "sage", "dropout": 0.5}, "multi", False),
    (
        2,
        1,
        4,
        {"model": "gcn", "norm": "batch", "optimizer": "sgd", "dropout": 0.5},
        "rough",
        False,
    ),
    (2, 1, 3, {"model": "gat", "heads": 2, "dropout": 0.5}, "rough", False),
    (2, 1, 2, {"model": "gin", "optimizer": "sgd"}, "islands", False),  # nothing crosses
    (2, 1, 2, {"model": "sage", "layers": 1, "dropout": 0.5}, "multi", False),
    (4, 2, 15, {"model": "sage", "layers": 4}, "rough", False),
]


EVERY = [*((1, 1, *case) for case in CASES), *SEVERAL]


@pytest.mark.parametrize(
    ("world", "servers", "chunks", "how", "graph", "directed", "trim"),
    covered(
        [
            (*case, trim)
            for case in EVERY
            for trim in ("", ",trim=True")
            if "norm" not in case[3] or not trim
        ],
        # every case, and trimmed or not on all ranks, models and graphs
        lambda row: {
            str(row[:6]),
            *((value, row[6]) for value in (row[:2], row[3]["model"], row[4])),
        },
    ),
    ids=str,
)
def test_chunks_train_as_one_process(
    run_ranks: Ranks,
    graphs: dict[str, str],
    world: int,
    servers: int,
    chunks: int,
    how: dict[str, object],
    graph: str,
    directed: bool,
    trim: str,
) -> None:
    """Weights, losses, and right answers of every epoch, dropout's draws included; with all rows,
    and with those alone that training vertices need."""
    how = {"layers": 3, "hidden": 8, "lr": 0.05, "seed": 3, "dtype": "float64", **how}
    case = Case("graph_parallel", graphs[graph], how, directed=directed, eval_every=1)
    strategy = f"offload(chunks={chunks}{trim})"
    (alone,) = run_ranks(1, [case])
    (chunked,) = run_ranks(world, [replace(case, strategy=strategy, servers=servers)])
    idle = [f"layers.{n}.bias" for n in (1, 2)] if how.get("norm") == "batch" else []
    assert difference(chunked.weights, alone.weights, tuple(idle)) <= 1e-9
    assert chunked.losses == pytest.approx(alone.losses, rel=1e-9)
    assert chunked.scores == pytest.approx(alone.scores)
