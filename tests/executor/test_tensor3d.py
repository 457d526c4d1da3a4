"""tensor3d trains as one process does, whatever the grid; its ranks put the model together."""

from __future__ import annotations

import pytest

from gnnplan.testing.plain import difference
from gnnplan.testing.ranks import Case, Ranks

pytestmark = [pytest.mark.timeout(110), pytest.mark.processes]

HOW = {"layers": 4, "hidden": 8, "lr": 0.05, "seed": 3, "dtype": "float64"}
# every axis alone; more ranks than classes (4) or labels (5) along an axis; three ranks on an axis
CASES = [
    ("2x1x1", "gcn", 0.0, "rough", False),
    ("1x2x1", "sage", 0.5, "multi", False),
    ("1x1x2", "gcn", 0.5, "rough", True),
    ("1x3x1", "gcn", 0.0, "islands", False),
    ("3x1x1", "sage", 0.0, "rough", True),
    ("2x2x1", "gcn", 0.5, "multi", False),
    ("1x2x2", "sage", 0.5, "rough", False),
    ("2x1x2", "gcn", 0.0, "rough", False),
    pytest.param("2x2x2", "gcn", 0.0, "rough", False, marks=pytest.mark.nightly),
    ("2x2x2", "sage", 0.5, "rough", False),
    pytest.param("1x8x1", "sage", 0.5, "multi", True, marks=pytest.mark.nightly),
    pytest.param("8x1x1", "gcn", 0.0, "multi", False, marks=pytest.mark.nightly),
]


def strategy(grid: str) -> tuple[str, int]:
    x, y, z = map(int, grid.split("x"))
    return f"tensor3d(x={x},y={y},z={z})", x * y * z


@pytest.mark.parametrize(("grid", "model", "dropout", "graph", "directed"), CASES)
def test_it_trains_as_one_process_does(
    run_ranks: Ranks,
    graphs: dict[str, str],
    grid: str,
    model: str,
    dropout: float,
    graph: str,
    directed: bool,
) -> None:
    text, world = strategy(grid)
    how = {"model": model, "dropout": dropout, **HOW}
    case = Case(text, graphs[graph], how, directed=directed, eval_every=2)
    (result,) = run_ranks(world, [case])
    alone = run_ranks.alone(
        Case("graph_parallel", graphs[graph], how, directed=directed, eval_every=2)
    )
    assert result.losses == pytest.approx(alone.losses, rel=1e-9)
    assert difference(result.weights, alone.weights) <= 1e-9
    assert result.scores == pytest.approx(alone.scores, abs=1e-12)


def test_an_axis_may_have_more_ranks_than_columns(run_ranks: Ranks, graphs: dict[str, str]) -> None:
    """A tile of GraphSAGE without columns ended the run when its weights were written."""
    how = {**HOW, "model": "sage", "hidden": 2}
    case = Case("tensor3d(x=1,y=3,z=1)", graphs["rough"], how)
    (result,) = run_ranks(3, [case])
    alone = run_ranks.alone(Case("graph_parallel", graphs["rough"], how))
    assert difference(result.weights, alone.weights) <= 1e-9
