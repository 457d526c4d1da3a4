"""tensor3d: its bytes by its paper's formula, what it degenerates to, its grids, and what is refused."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from asked import fullest_bytes, on
from pairwise import at_night

from gnnplan.planner.cluster.spec import Link
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Tensor3D
from gnnplan.planner.strategies.layerwise import tensor3d
from gnnplan.planner.strategies.program.program import AllReduce, Exchange
from gnnplan.testing.laws import cluster, problem_of

N, F, H, C = 576, 24, 48, 72  # shares are equal on the grids below
LAYERS, B = 4, 4
WIDTHS = (F, H, H, H, C)
GRIDS = [
    *((2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (4, 1, 1)),
    *((2, 2, 2), (1, 1, 8), (3, 2, 1), (1, 3, 4), (2, 3, 2), (4, 2, 3)),
]


def problem(
    grid: tuple[int, ...] = (2, 2, 1), text: str = "edges=6000", **workload: object
) -> Problem:
    graph = load(f"synthetic:community?vertices={N}&{text}&features={F}&classes={C}&seed=0")
    measured = {"memory_bandwidth": 1e10, "gather": {4: {1e4: 1e10}}}
    where = cluster(1, prod(grid), intra=1e8, latency=0, memory=1e9, **measured)
    return problem_of(graph, where, **{"layers": LAYERS, "hidden": H, **workload})


def by_layer(strategy: object, asked: Problem) -> dict[int | None, int]:
    """Bytes that all ranks send for each layer in a step."""
    out: dict[int | None, int] = {}
    for op in strategy.program(asked).step(0):  # type: ignore[attr-defined]
        moved = 0
        if isinstance(op.work, Exchange):
            moved = int(op.work.nbytes.sum())
        elif isinstance(op.work, AllReduce):
            groups = op.work.by_group(tuple(range(asked.ranks)))
            moved = sum(2 * (len(group) - 1) * size for group, size in groups)
        out[op.layer] = out.get(op.layer, 0) + moved
    return out


def published(layer: int, grid: tuple[int, ...], matrices: int, d: int, d_out: int) -> float:
    """Numbers per rank in layer l > 1: Plexus's `comm_model.py` term by term, here with the bias."""
    size = dict(zip("xyz", grid, strict=True))
    x, y, z = (size[axis] for axis in ("xyz", "zxy", "yzx")[(layer - 1) % 3])
    weights = matrices * d * d_out + d_out
    aggregated = 2 * (x - 1) / x * N * d * matrices / (y * z)
    output = 2 * (y - 1) / y * N * d_out / (x * z)
    gathered = (z - 1) / z * weights / (x * y)
    inputs = 2 * (z - 1) / z * N * d / (x * y)
    return (aggregated + output + gathered) + (aggregated + 2 * gathered + inputs)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("model", "matrices"), [("gcn", 1), ("sage", 2)])
def test_bytes_are_the_papers_formula(grid, model, matrices):
    asked = problem(grid, model=model)
    strategy, ranks = Tensor3D(*grid), prod(grid)
    found = by_layer(strategy, asked)
    for layer in range(2, LAYERS + 1):
        d, d_out = WIDTHS[layer - 1 : layer + 1]
        assert found[layer] == round(published(layer, grid, matrices, d, d_out) * ranks * B)
    x, y, z = grid
    # layer 1: sums are made once, and features have no gradient
    weights = matrices * F * H + H
    first = 2 * (y - 1) / y * N * H / (x * z) + 3 * (z - 1) / z * weights / (x * y)
    assert found[1] == round(first * ranks * B)
    dropped = by_layer(strategy, problem(grid, model=model, dropout=0.5))
    sums = 2 * (x - 1) / x * N * F * matrices / (y * z)
    assert dropped[1] == round((first + sums) * ranks * B)
    assert [found[layer] for layer in (2, 3, 4)] == [dropped[layer] for layer in (2, 3, 4)]
    # layer 4 has the roles of layer 1: x shares its classes
    assert found[None] == 2 * (x - 1) * N // (z * x) * C // x * ranks * B
    assert sum(found.values()) == strategy.predict(asked).bytes_total


def test_two_orders_balance_what_one_order_does_not():
    """In one order edges to itself are on the diagonal, and the tiles there are much fuller."""
    asked = problem((4, 1, 4), "edges=600&mixing=1")
    tiles = tensor3d.edges_of_tiles(asked, tensor3d.Grid(4, 1, 4), 1)
    assert tiles.sum() == asked.stats.edges + N
    fullest = tiles.max() / tiles.mean()
    order = tensor3d.orders(N, 0)[0]
    part = np.empty(N, dtype=int)
    part[order] = np.arange(N) * 4 // N
    reader = np.repeat(np.arange(N), np.diff(asked.graph.indptr))
    both = np.append(part[reader] * 4 + part[asked.graph.indices], part * 5)
    counted = np.bincount(both)
    assert fullest < 1.25 < 1.8 < counted.max() / counted.mean()


@pytest.mark.parametrize("layer", [1, 2])
def test_tiles_by_statistics_are_the_mean_of_counted_ones(layer):
    asked, grid = problem((2, 2, 2)), tensor3d.Grid(2, 2, 2)
    both = asked, replace(asked, graph=None)
    counted, expected = (tensor3d.edges_of_tiles(p, grid, layer) for p in both)
    assert expected == pytest.approx(np.full(8, counted.mean()))


@pytest.mark.parametrize("ranks", [2, 4, 6, 8, at_night(12)])
def test_the_grid_that_is_chosen_sends_fewest_bytes_where_all_links_are_alike(ranks):
    """Without latency, on one server, the time to sum is bytes per rank over bandwidth."""
    asked = problem((ranks,), dropout=0.5)
    found = tensor3d.grids(ranks)
    assert len(set(found)) == len(found)
    sent = {grid: Tensor3D(grid.x, grid.y, grid.z).predict(asked).bytes_total for grid in found}
    for grid in found:
        # three layers of three and a layer of one: shares are equal, but for weights of few numbers
        assert tensor3d.summing_s(asked, grid) * 1e8 * ranks == pytest.approx(sent[grid], rel=0.02)
    assert sent[Tensor3D().settle(asked).grid] <= min(sent.values()) * 1.02
    fixed = Tensor3D(x=2).settle(asked)
    assert fixed.x == 2 and fixed.grid.ranks == ranks


def test_a_grid_that_fits_is_chosen_before_a_faster_one_that_does_not():
    """The fastest was chosen whatever it held, and a plan that fits was not found."""
    asked = problem((8,), dropout=0.5)
    held = {
        grid: fullest_bytes(asked, Tensor3D(grid.x, grid.y, grid.z)) for grid in tensor3d.grids(8)
    }
    by_time = sorted(held, key=lambda grid: tensor3d.summing_s(asked, grid))
    needs = list(held.values())
    assert held[by_time[0]] > min(needs)
    for room in (max(needs), np.mean(needs), min(needs), 0.0):
        fit = [grid for grid in by_time if held[grid] <= room]
        assert Tensor3D().settle(on(asked, memory=room)).grid == (fit or by_time)[0]


def test_an_axis_between_servers_is_short_where_their_link_is_slow():
    """8 ranks on 2 servers: the axis that crosses has 2 ranks."""
    links = {"intra_node": Link(bandwidth=1e11), "inter_node": Link(bandwidth=1e8)}
    apart = on(problem((8,)), servers=2, gpus_per_server=4, **links)
    chosen = Tensor3D().settle(apart)
    assert min(size for size in (chosen.x, chosen.y, chosen.z) if size != 1) == 2
