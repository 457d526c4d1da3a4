"""3D tensor parallelism: each tensor of a layer, and the adjacency, is tiled by two axes of a grid.

Ranks form a grid x * y * z. Each rank has a tile of the adjacency, of the rows and of the weights;
the two axes that tile a tensor change from layer to layer. A layer's outputs are tiled like the
next layer's inputs, so ranks only sum tiles, along one axis at a time. No rank has all edges or all
rows, and there are no parts, no halo and no METIS. Rows and columns of the adjacency are in two
random orders, so all tiles have about equally many edges.

    A [rows, sources]   H [sources, columns]   A H [rows, columns]   W [columns, sources]

    compute  |aggregate 2 f|                  |forward 2|             |aggregate 3 f|  ..
    reduce                 |sum_aggregates 2 f|         |sum_outputs 2|

Bytes per rank and layer l > 1, with S, C and R ranks along the axes of sources, columns and rows,
N vertices, widths D and D', w weights with the bias (D D' + D' of GCN), b bytes per number:

    forward    b (2 (S-1)/S N D m/(R C) + 2 (C-1)/C N D'/(R S) + (R-1)/R w/(S C))
    backward   b (2 (S-1)/S N D m/(R C) + 2 (R-1)/R N D/(S C)  + 2 (R-1)/R w/(S C))

m is 1 for GCN and 2 for GraphSAGE, which also sums own rows. Layer 1 needs no gradient of its
inputs, so its backward pass has only the last term; if its sums are computed once, its forward pass
has no first term either. For the loss, ranks along the last layer's S turn columns of the logits
into rows and back: 2 b (S-1)/S N D'/(R S). Axes rotate: S, C, R are x, y, z in layers 1, 4, ..;
z, x, y in 2, 5, ..; y, z, x in 3, 6, .. .

Exact, to rounding: sums are those of one process in another order.

Models are GCN and GraphSAGE. An attention weight depends on all columns of a row, a norm reads
numbers of several ranks, and other layers have several products in sequence, whose tiles would have
to rotate inside a layer.

Source: Plexus (SC 2025), and its cost of a grid (`performance/comm_model.py`), which includes
training of features and therefore more terms in layer 1; CAGNET (SC 2020) for tiles of the
adjacency. The terms of bias, GraphSAGE and logits are our derivation.

See also tiles.py (operations), executor/strategies/tensor3d.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.cluster.spec import MOST_PAIRED
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Resident, Strategy, settled
from gnnplan.planner.strategies.layerwise import tiles
from gnnplan.planner.strategies.layerwise.columns import why_untried
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel
from gnnplan.planner.strategies.layerwise.tiles import AXES, Axis, Grid
from gnnplan.planner.strategies.program.memory import machine_code
from gnnplan.planner.strategies.program.program import Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes


@dataclass(frozen=True)
class Tensor3D(Strategy):
    """3D tensor parallelism: every tensor of a layer in tiles, on a grid of ranks.

    x, y, z: ranks along each axis; None: chosen to sum tiles in the least time.
    """

    x: int | None = None
    y: int | None = None
    z: int | None = None

    family: ClassVar[str] = "tensor3d"
    claim: ClassVar[float] = 0.2  # in a simulation, ranks wait for their own groups only
    executor: ClassVar[str] = "gnnplan.executor.strategies.tensor3d"
    examples: ClassVar[tuple[Example, ...]] = (
        Example("tensor3d(x=2,y=1,z=1)"),
        Example("tensor3d(x=1,y=1,z=2)"),
    )

    @property
    def hands_over(self) -> bool:
        return False  # ranks store shares of tiles of the weights, which no other plan reads

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        if not cls.absent(problem):
            yield cls()

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return why_untried(problem, "tiles", unsuited(problem))

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Return a note that compares bytes with graph parallelism."""
        if fastest is None:
            return []
        ours, halo = fastest.predict(problem).bytes_total, GraphParallel().predict(problem).bytes
        return [
            f"{fastest} sums tiles along three axes, which sends {show_bytes(ours)} per epoch;"
            f" graph_parallel exchanges {show_bytes(halo.get('halo', 0))} of halo rows"
        ]

    def settle(self, problem: Problem) -> Strategy:
        """Return the strategy on the grid that sums tiles fastest.

        Candidates are the grids with the given axes that fit, or all of these grids if none fits.
        """
        if None not in (self.x, self.y, self.z) or unsuited(problem):
            return self
        fixed = [axis for axis in AXES if getattr(self, axis) is not None]
        suitable = [
            grid
            for grid in grids(problem.ranks)
            if all(getattr(self, axis) == grid.size(axis) for axis in fixed)
        ]
        if not suitable:
            return self
        suitable.sort(key=lambda grid: summing_s(problem, grid))
        by_time = [Tensor3D(grid.x, grid.y, grid.z) for grid in suitable]
        estimate = replace(problem, graph=None)  # tiles are balanced, so edges need no counting
        return next((each for each in by_time if each.fits(estimate)), by_time[0])

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        if why := unsuited(problem):
            raise SpecError(f"tensor3d: {why}; use graph_parallel, or another model")
        sizes = {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}
        if len(sizes) < 3 or min(sizes.values()) < 1 or self.grid.ranks != problem.ranks:
            shown = ", ".join(f"{axis}: {size}" for axis, size in sizes.items())
            raise SpecError(
                f"tensor3d needs x * y * z = {problem.ranks} ranks, each at least 1 ({shown});"
                " leave the axes out to have them chosen, or use"
                f" {Tensor3D().settle(problem)}"
            )
        if problem.ranks > MOST_PAIRED:
            raise SpecError(
                "tensor3d: its sums are priced line by line of the grid, of at most"
                f" {MOST_PAIRED:,} ranks (ranks: {problem.ranks:,}); use graph_parallel, or fewer"
            )
        self.check_vertices(problem)

    @property
    def grid(self) -> Grid:
        return Grid(settled(self.x), settled(self.y), settled(self.z))

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        return {axis: int(self.grid.places(axis)[rank]) for axis in AXES}

    def program(self, problem: Problem) -> Program:
        return tiles.program(problem, self.grid)

    def resident(self, problem: Problem) -> Resident:
        model, stats, grid = problem.model, problem.stats, self.grid
        layers = tiles.layers_of(problem, grid)
        zero, b, first = np.zeros(problem.ranks), model.itemsize, layers[0]
        features = first.inputs if first.is_summed else first.sums
        distinct = {(each.layer - 1) % 6: each for each in layers if each.is_summed}
        edges = [
            each.edges * (12 + 2.0 * b) + 8.0 * (each.rows + each.sources)
            for each in distinct.values()
        ]
        return Resident(
            {"features": features, "graph": sum(edges, 8.0 * layers[-1].rows)},
            code=machine_code(problem),
            weights=sum((each.kept_weights for each in layers), zero),
            groups=[group for axis in AXES for group in grid.groups(axis)],
            # at set-up: all columns of the features, and the tile computed from them
            elsewhere=features + first.sources * stats.features * b,
        )


def grids(ranks: int) -> list[Grid]:
    """Return all grids of this number of ranks.

    >>> len(grids(8)), len(grids(1024)), grids(2)[0]
    (10, 66, Grid(x=1, y=1, z=2))
    """
    return [
        Grid(x, y, ranks // (x * y))
        for x in range(1, ranks + 1)
        if ranks % x == 0
        for y in range(1, ranks // x + 1)
        if (ranks // x) % y == 0
    ]


def summing_s(problem: Problem, grid: Grid) -> float:
    """Return an estimate of a step's transfers on a grid [s], to compare grids.

    Groups along an axis use the links inside a server if they fit into the server. Otherwise they
    share the link between servers with parallel groups. Source: Plexus, Sec. 4 (the model that
    takes placement into account).
    """
    cluster, b, vertices = problem.cluster, problem.model.itemsize, problem.stats.vertices
    model = problem.model.aggregating_first

    def seconds(axis: Axis, numbers: float, passes: int) -> float:
        """Return the time to gather tensors (passes: 1) or to sum them (2) along an axis."""
        size, stride = grid.size(axis), grid.stride(axis)
        link, groups = cluster.island or cluster.intra_node, 1
        if size * stride > cluster.gpus_per_server and cluster.inter_node is not None:
            link, groups = cluster.inter_node, min(stride, cluster.gpus_per_server)
        nbytes = passes * (size - 1) / size * numbers * b * groups
        return float(nbytes / link.bandwidth + passes * (size - 1) * link.latency)

    total = 0.0
    for layer, spec in enumerate(model.layers, 1):
        axes = tiles.roles(layer)
        s, c, r = (grid.size(axis) for axis in axes)
        sums, outputs = vertices * spec.h_in * spec.matrices / (r * c), vertices * spec.h_out
        total += seconds(axes.sources, sums, 2) * (not model.aggregate_cached(layer))
        total += seconds(axes.columns, outputs / (r * s), 2)
        total += 3 * seconds(axes.rows, spec.weights / (s * c), 1)
        if layer > model.first_varying:
            total += seconds(axes.sources, sums, 2)
            total += seconds(axes.rows, vertices * spec.h_in / (s * c), 2)
    return total + 2 * seconds(axes.sources, outputs / (r * s), 1)


def unsuited(problem: Problem) -> str:
    """Return why the model cannot be tiled; '' if it can."""
    model, kind = problem.model, problem.workload.model
    if kind not in ("gcn", "sage"):
        what = "attention" if model.layers[0].heads else "layers of another kind"
        return f"its tiles are those of gcn and sage, and {problem.workload.called} has {what}"
    if why := model.inputs.why_unsummed:
        return why
    for number, spec in enumerate(model.layers, 1):
        if spec.activates:
            return f"layer {number} has a norm ({spec.norm}), of numbers that lie on several ranks"
    return ""
