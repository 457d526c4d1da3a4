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

See also executor/strategies/tensor3d.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple, Self

import numpy as np

from gnnplan.planner.cluster.spec import MOST_PAIRED
from gnnplan.planner.gnn.layer import BIAS, COPY, MASKED, RELU, VECTOR
from gnnplan.planner.gnn.model import MASK, Model, OpMemory, keeps
from gnnplan.planner.gnn.trace import SUM
from gnnplan.planner.graph.sampling import TILES
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Resident, Strategy, settled
from gnnplan.planner.strategies.layerwise.feature_parallel import beside_halos, why_untried
from gnnplan.planner.strategies.layerwise.step import finish
from gnnplan.planner.strategies.program.account import machine_code
from gnnplan.planner.strategies.program.program import AllReduce, Exchange, Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Group, Outer, shares
from gnnplan.planner.vocabulary.schedule import Compute, Gather


@dataclass(frozen=True)
class Tensor3D(Strategy):
    """3D tensor parallelism: every tensor of a layer in tiles, on a grid of ranks.

    x, y, z: ranks along each axis; None: chosen to sum tiles in the least time.
    """

    x: int | None = None
    y: int | None = None
    z: int | None = None

    family = "tensor3d"
    claim = 0.2  # in a simulation, ranks wait for their own groups only
    executor = "gnnplan.executor.strategies.tensor3d"
    examples = (
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
        return beside_halos(problem, fastest, "sums tiles along three axes, which sends")

    def settle(self, problem: Problem) -> Self:
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
        by_time = [replace(self, x=grid.x, y=grid.y, z=grid.z) for grid in suitable]
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
        return Program.of(list(_step(problem, self.grid)))

    def resident(self, problem: Problem) -> Resident:
        model, stats, grid = problem.model, problem.stats, self.grid
        layers = layers_of(problem, grid)
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
    divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
    return [Grid(x, y, ranks // (x * y)) for x in divisors for y in divisors if ranks // x % y == 0]


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
        axes = roles(layer)
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


# -- the operations of a step ----------------------------------------------------------------------

# In each layer the axes have roles, which rotate from layer to layer (`roles`):
#
#     sources   divides the layer's input rows, and its output columns
#     columns   divides the layer's input columns
#     rows      divides the layer's output rows
#
# Ranks along the axis that does not divide a tensor have copies of the tile. Weights have none:
# each rank along `rows` stores a share of the tile, and ranks gather the tile before they use it.
#
#     compute   |aggregate l f|                    |forward l|                |aggregate l+1 f| ..
#     comm                                         before it: gather_weights
#     reduce                  |sum_aggregates l f|           |sum_outputs l|
#
#     compute   |backward l|                                |aggregate l b|
#     comm      before it: gather_weights; |scatter_weights|
#     reduce                              |sum_aggregates l b|            |sum_inputs l|
#
# For the loss, ranks exchange columns of the logits for whole rows, and do the reverse with the
# gradient. The bias is one more row of the weights' first tiles. GraphSAGE aggregates own rows by
# an identity matrix next to A, so its sums are twice as wide.

Axis = Literal["x", "y", "z"]
AXES: tuple[Axis, ...] = ("x", "y", "z")

# -- the grid and its tiles ------------------------------------------------------------------------


class Roles(NamedTuple):
    """The axes of a layer by their roles."""

    sources: Axis
    columns: Axis
    rows: Axis


def roles(layer: int) -> Roles:
    """Return the axes of layer 1, 2, .. by role.

    A layer's `rows` is the next layer's `sources`, and its `sources` the next layer's `columns`.

    >>> roles(1), roles(2).sources, roles(2).columns
    (Roles(sources='x', columns='y', rows='z'), 'z', 'x')
    """
    return (Roles("x", "y", "z"), Roles("z", "x", "y"), Roles("y", "z", "x"))[(layer - 1) % 3]


@dataclass(frozen=True)
class Grid:
    """A grid of x * y * z ranks, numbered along y first and along z last."""

    x: int
    y: int
    z: int

    @property
    def ranks(self) -> int:
        return self.x * self.y * self.z

    def size(self, axis: Axis) -> int:
        """Return the number of ranks along an axis."""
        return {"x": self.x, "y": self.y, "z": self.z}[axis]

    def stride(self, axis: Axis) -> int:
        """Return the difference between the numbers of neighbouring ranks along an axis."""
        return {"y": 1, "x": self.y, "z": self.x * self.y}[axis]

    def places(self, axis: Axis) -> np.ndarray:
        """Return each rank's coordinate along an axis [ranks]."""
        return np.arange(self.ranks) // self.stride(axis) % self.size(axis)

    def groups(self, axis: Axis) -> tuple[Group, ...]:
        """Return the groups of ranks that differ in their coordinate along this axis only.

        >>> Grid(2, 2, 1).groups("x")
        ((0, 2), (1, 3))
        """
        along = np.arange(self.size(axis)) * self.stride(axis)
        first = np.flatnonzero(self.places(axis) == 0)
        return tuple(tuple((rank + along).tolist()) for rank in first)

    def share(self, numbers: int | np.ndarray, axis: Axis) -> np.ndarray:
        """Return each rank's share of numbers that ranks along an axis divide [ranks]."""
        each, rest = np.divmod(numbers, self.size(axis))
        return np.asarray(each + (self.places(axis) < rest))


def orders(vertices: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two orders of the vertices: of the inputs of layers 1, 3, .., and of 2, 4, .. .

    Rows and columns of the adjacency have different orders. So each tile contains an edge with the
    same probability, and self-loops are spread over all tiles.
    """
    first, second = (
        np.random.default_rng((TILES, seed, which)).permutation(vertices) for which in (0, 1)
    )
    return first, second


def edges_of_tiles(problem: Problem, grid: Grid, layer: int) -> np.ndarray:
    """Return the number of edges, with self-loops, in each rank's tile of the adjacency [ranks].

    Edges are counted if the graph is known; otherwise each tile has an equal share.
    """
    stats, axes = problem.stats, roles(layer)
    rows, sources = grid.size(axes.rows), grid.size(axes.sources)
    self_loops = stats.vertices if problem.model.layers[layer - 1].self_edges else 0
    if problem.graph is None:
        return np.full(grid.ranks, (stats.edges + self_loops) / (rows * sources))
    graph, seed = problem.graph, problem.workload.seed

    def count() -> np.ndarray:
        source, reader = np.empty((2, stats.vertices), dtype=np.int64)  # tile of each vertex
        both = orders(stats.vertices, seed)
        for tile, order, parts in (
            (source, both[(layer - 1) % 2], sources),
            (reader, both[layer % 2], rows),
        ):
            tile[order] = np.repeat(np.arange(parts), shares(stats.vertices, parts))
        tiles = np.repeat(reader, graph.degree) * sources + source[graph.indices]
        if self_loops:
            tiles = np.append(tiles, reader * sources + source)
        return np.bincount(tiles, minlength=rows * sources)

    question = ("tiles", rows, sources, layer % 2, self_loops, seed, graph)
    counted = problem.cache.get(question, count)
    return np.asarray(counted[grid.places(axes.rows) * sources + grid.places(axes.sources)])


class Tiles:
    """The tiles of a layer, and their sizes on every rank [ranks]."""

    def __init__(self, problem: Problem, model: Model, grid: Grid, layer: int) -> None:
        self.problem, self.model, self.grid, self.layer = problem, model, grid, layer
        vertices, b = problem.stats.vertices, model.itemsize
        self.spec, self.axes = model.layers[layer - 1], roles(layer)
        self.is_summed = not model.aggregate_cached(layer)  # aggregates in every step, not once
        self.varies = layer > model.first_varying  # inputs have a gradient
        self.drops = model.dropout > 0 and self.spec.drops  # inputs have dropout
        self.relu = model.relu_after(layer - 1)  # inputs have the ReLU of the layer before
        self.rows, self.sources = (
            grid.share(vertices, at) for at in (self.axes.rows, self.axes.sources)
        )
        self.h_in = grid.share(self.spec.h_in, self.axes.columns)  # columns of the inputs
        self.h_out = grid.share(self.spec.h_out, self.axes.sources)  # columns of the outputs
        # columns of the sums: of neighbours, and of own rows if the layer reads own rows
        self.summed = self.h_in * self.spec.matrices
        # numbers in the tile of the weights, and in the share of it that a rank stores; the bias is
        # on the first ranks along `columns`
        has_bias = self.spec.bias & (grid.places(self.axes.columns) == 0)
        self.weights = np.asarray((self.summed + has_bias) * self.h_out)
        self.kept_weights = grid.share(self.weights, self.axes.rows)
        # number of whole rows of logits for the loss
        self.whole_rows = grid.share(self.rows, self.axes.sources)
        # bytes of the tiles
        self.inputs = 1.0 * self.sources * self.h_in * b
        self.sums = 1.0 * self.rows * self.summed * b
        self.outputs = 1.0 * self.rows * self.h_out * b
        # sums of neighbours, before they are copied into one tensor with own rows
        self.neighbours = self.sums / 2 * self.spec.reads_own
        # the mask of ReLU and dropout, one byte per input
        self.mask = self.inputs / b * (self.relu or self.drops) * self.varies

    @property
    def edges(self) -> np.ndarray:
        return edges_of_tiles(self.problem, self.grid, self.layer)

    # -- work ------------------------------------------------------------------------------------

    def _gather(self, among: np.ndarray, into: np.ndarray) -> tuple[Gather]:
        """Return the sum over a tile's edges, which are scaled if ranks differ in columns."""
        width = max(int(self.h_in.max()), 1)
        return (Gather(self.edges * (self.h_in / width), width, among, into),)

    def _product(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the flops of a product, which counts at least VECTOR columns, and its bytes."""
        wide, high = (np.maximum(columns, VECTOR) for columns in (self.summed, self.h_out))
        return np.asarray(2.0 * self.rows * wide * high), self.sums + self.outputs

    def aggregate(self) -> Compute:
        """Return the work of ReLU and dropout on the inputs, and of their aggregation."""
        numbers, b = 1.0 * self.sources * self.h_in, self.model.itemsize
        # ReLU and its mask; sums and own rows into one tensor
        nbytes = (RELU[0] + 1) * self.relu * self.inputs + COPY * self.sums * self.spec.reads_own
        launches, gathers = 4 + (MASK + 3) * self.drops, self._gather(self.sources, self.rows)
        return Compute(0.0, gathers, nbytes, launches, b, hash_ops=numbers * self.drops)

    def forward(self) -> Compute:
        (flops, read), b = self._product(), self.model.itemsize
        several = self.grid.size(self.axes.rows) > 1  # then the weights' tile is gathered
        return Compute(flops, (), 1.0 * COPY * self.weights * several * b, 4, b, gemm_bytes=read)

    def backward(self) -> Compute:
        """Return the work of the gradients of weights and bias, and of the sums if needed."""
        (flops, read), b = self._product(), self.model.itemsize
        nbytes = 1.0 * (BIAS[1] * self.rows + 2 * COPY * self.summed) * self.h_out * b
        gemm_bytes = (1 + self.varies) * read
        return Compute(flops * (1 + self.varies), (), nbytes, 10, b, gemm_bytes=gemm_bytes)

    def aggregate_back(self) -> Compute:
        """Return the work of the inputs' gradient before its all-reduce, of ReLU and dropout."""
        nbytes = MASKED * (self.relu or self.drops) * self.inputs
        nbytes = nbytes + (SUM + COPY) * self.sums / 2 * self.spec.reads_own
        gathers = self._gather(self.rows, self.sources)
        return Compute(0.0, gathers, nbytes, 8, self.model.itemsize)

    # -- memory [ranks] [B], as in executor/strategies/tensor3d.py -------------------------------

    def held_to_aggregate(self) -> OpMemory:
        kept = self.mask + self.sums
        # inputs are freed, except features, which are constant
        most = kept + self.inputs * self.drops + self.neighbours
        return OpMemory(most, kept - self.inputs * self.varies)

    def held_backward(self) -> OpMemory:
        weights = 2.0 * self.weights * self.model.itemsize  # the tile of weights and its gradient
        freed = self.sums * self.is_summed
        return OpMemory(self.outputs + weights + self.sums * self.varies - freed, -freed)

    def held_to_aggregate_back(self) -> OpMemory:
        return OpMemory(self.sums + self.neighbours + self.inputs, -self.mask)


# -- operations ------------------------------------------------------------------------------------


def layers_of(problem: Problem, grid: Grid) -> list[Tiles]:
    """Return the tiles of layers 1 .. L. All layers aggregate before they multiply."""
    model = problem.model.aggregating_first
    return [Tiles(problem, model, grid, layer) for layer in range(1, len(model.layers) + 1)]


def _step(problem: Problem, grid: Grid) -> Iterator[Op]:
    """Yield the operations of one step, in order."""
    b, layers = problem.model.itemsize, layers_of(problem, grid)
    last, ones = layers[-1], np.ones(grid.ranks, dtype=np.int64)

    def along(axis: Axis, op: str, direction: str, layer: int, numbers: np.ndarray) -> Iterator[Op]:
        """Yield all-reduces, along an axis, of tensors with these sizes [ranks], if needed."""
        if grid.size(axis) > 1:
            groups = grid.groups(axis)
            sizes = tuple(int(numbers[group[0]]) * b for group in groups)
            yield Op(op, direction, layer, work=AllReduce(sizes, groups))

    def exchange(
        axis: Axis, op: str, direction: str, layer: int | None, left: np.ndarray, right: np.ndarray
    ) -> Iterator[Op]:
        """Yield an exchange along an axis of left[i] * right[j] numbers from rank i to rank j, if
        needed."""
        if grid.size(axis) > 1:
            # the first rank of each rank's group identifies the group
            first = np.arange(grid.ranks) - grid.places(axis) * grid.stride(axis)
            yield Op(op, direction, layer, work=Exchange(Outer(left, right, first), b))

    for tiles in layers:
        layer, axes, kept = tiles.layer, tiles.axes, tiles.kept_weights
        if tiles.is_summed:
            held = tiles.held_to_aggregate
            yield Op("aggregate", "f", layer, work=tiles.aggregate(), holds=held)
            yield from along(axes.sources, "sum_aggregates", "f", layer, tiles.rows * tiles.summed)
        yield from exchange(axes.rows, "gather_weights", "f", layer, kept, ones)
        yield Op("forward", layer=layer, work=tiles.forward(), holds=partial(keeps, tiles.outputs))
        yield from along(axes.columns, "sum_outputs", "f", layer, tiles.rows * tiles.h_out)
    yield from exchange(last.axes.sources, "to_rows", "f", None, last.h_out, last.whole_rows)
    # logits and their gradients, as tiles and as whole rows, which have as many numbers
    held_by_loss = partial(OpMemory, 4 * last.outputs, 0.0)
    yield Op("loss", work=finish(problem, last.whole_rows, None), holds=held_by_loss)
    yield from exchange(last.axes.sources, "to_columns", "b", None, last.whole_rows, last.h_out)
    for tiles in reversed(layers):
        layer, axes, kept = tiles.layer, tiles.axes, tiles.kept_weights
        yield from exchange(axes.rows, "gather_weights", "b", layer, kept, ones)
        yield Op("backward", layer=layer, work=tiles.backward(), holds=tiles.held_backward)
        yield from exchange(axes.rows, "scatter_weights", "b", layer, ones, kept)
        if tiles.varies:
            yield from along(axes.sources, "sum_aggregates", "b", layer, tiles.rows * tiles.summed)
            held = tiles.held_to_aggregate_back
            yield Op("aggregate", "b", layer, work=tiles.aggregate_back(), holds=held)
            yield from along(axes.rows, "sum_inputs", "b", layer, tiles.sources * tiles.h_in)
    kept = sum((tiles.kept_weights for tiles in layers), np.zeros(grid.ranks))
    yield Op("update", work=problem.model.update(kept))
