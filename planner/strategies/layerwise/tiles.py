"""The operations of a step of 3D tensor parallelism, on a grid of x * y * z ranks.

In each layer the axes have roles, which rotate from layer to layer (`roles`):

    sources   divides the layer's input rows, and its output columns
    columns   divides the layer's input columns
    rows      divides the layer's output rows

A rank has a tile of every tensor. The axes that divide each tensor:

    adjacency A   [rows, sources]
    inputs H      [sources, columns]
    sums A H      [rows, columns]
    weights W     [columns, sources]
    outputs       [rows, sources]

Ranks along the remaining axis have copies of the tile. Weights have no copies: each rank along
`rows` stores a share of the tile, and the ranks gather the tile before they use it.

    compute   |aggregate l f|                    |forward l|                |aggregate l+1 f| ..
    comm                                         before it: gather_weights
    reduce                  |sum_aggregates l f|           |sum_outputs l|

    compute   |backward l|                                |aggregate l b|
    comm      before it: gather_weights; |scatter_weights|
    reduce                              |sum_aggregates l b|            |sum_inputs l|

A layer's outputs are tiled like the next layer's inputs, so no other exchange is needed between
layers. For the loss, ranks exchange columns of the logits for whole rows, and do the reverse with
the gradient. The bias is one more row of the weights' first tiles. GraphSAGE aggregates own rows by
an identity matrix next to A, so its sums are twice as wide.

planner/gnn/model.py counts the work of layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.footprint import OpMemory, keeps
from gnnplan.planner.gnn.model import MASK, Model
from gnnplan.planner.gnn.operations import BIAS, COPY, MASKED, RELU, VECTOR
from gnnplan.planner.gnn.trace import SUM
from gnnplan.planner.graph.sampling import TILES
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.columns import shares
from gnnplan.planner.strategies.layerwise.step import finish
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Group,
    Op,
    Program,
)
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.schedule import Compute, Gather

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
        both = orders(stats.vertices, seed)
        tile_of = [np.empty(stats.vertices, dtype=np.int64) for _ in both]
        for parts, which, tiles in (
            (sources, (layer - 1) % 2, tile_of[0]),
            (rows, layer % 2, tile_of[1]),
        ):
            tiles[both[which]] = np.repeat(np.arange(parts), shares(stats.vertices, parts))
        reader = np.repeat(tile_of[1], np.diff(graph.indptr))
        tiles = reader * sources + tile_of[0][graph.indices]
        if self_loops:
            tiles = np.append(tiles, tile_of[1] * sources + tile_of[0])
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

    @property
    def edges(self) -> np.ndarray:
        return edges_of_tiles(self.problem, self.grid, self.layer)


# -- operations ------------------------------------------------------------------------------------


def program(problem: Problem, grid: Grid) -> Program:
    """Return the program, whose steps are all equal."""
    return Program.of(list(_step(problem, grid)))


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
    ) -> Op:
        """Return an exchange along an axis of left[i] * right[j] numbers from rank i to rank j."""
        # the first rank of each rank's group identifies the group
        first = np.arange(grid.ranks) - grid.places(axis) * grid.stride(axis)
        return Op(op, direction, layer, work=Exchange(Outer(left, right, first), b))

    def gather_weights(tiles: Tiles, direction: str) -> Iterator[Op]:
        if grid.size(tiles.axes.rows) > 1:
            kept = tiles.kept_weights
            yield exchange(tiles.axes.rows, "gather_weights", direction, tiles.layer, kept, ones)

    for tiles in layers:
        layer, axes, holds = tiles.layer, tiles.axes, _Holds(tiles)
        if tiles.is_summed:
            yield Op("aggregate", "f", layer, work=_aggregate(tiles), holds=holds.aggregate)
            yield from along(axes.sources, "sum_aggregates", "f", layer, tiles.rows * tiles.summed)
        yield from gather_weights(tiles, "f")
        yield Op("forward", layer=layer, work=_forward(tiles), holds=holds.forward)
        yield from along(axes.columns, "sum_outputs", "f", layer, tiles.rows * tiles.h_out)
    several = grid.size(last.axes.sources) > 1
    if several:
        yield exchange(last.axes.sources, "to_rows", "f", None, last.h_out, last.whole_rows)
    forward, backward = finish(problem, last.whole_rows, None)
    copied = 2.0 * COPY * last.whole_rows * last.spec.h_out * several * b
    work_of_loss = forward + backward + Compute(elementwise_bytes=copied, itemsize=b)
    yield Op("loss", work=work_of_loss, holds=_Holds(last).loss)
    if several:
        yield exchange(last.axes.sources, "to_columns", "b", None, last.whole_rows, last.h_out)
    for tiles in reversed(layers):
        layer, axes, holds = tiles.layer, tiles.axes, _Holds(tiles)
        yield from gather_weights(tiles, "b")
        yield Op("backward", layer=layer, work=_backward(tiles), holds=holds.backward)
        if grid.size(axes.rows) > 1:
            yield exchange(axes.rows, "scatter_weights", "b", layer, ones, tiles.kept_weights)
        if tiles.varies:
            yield from along(axes.sources, "sum_aggregates", "b", layer, tiles.rows * tiles.summed)
            back = _aggregate_back(tiles)
            yield Op("aggregate", "b", layer, work=back, holds=holds.aggregate_back)
            yield from along(axes.rows, "sum_inputs", "b", layer, tiles.sources * tiles.h_in)
    kept = sum((tiles.kept_weights for tiles in layers), np.zeros(grid.ranks))
    yield Op("update", work=problem.model.update(kept))


def _gather(t: Tiles, among: np.ndarray, into: np.ndarray) -> tuple[Gather]:
    """Return the sum over a tile's edges; if ranks differ in columns, edges are scaled instead."""
    width = max(int(t.h_in.max()), 1)
    return (Gather(t.edges * (t.h_in / width), width, among, into),)


def _aggregate(t: Tiles) -> Compute:
    """Return the work of ReLU and dropout on the inputs, and of their aggregation."""
    numbers, b = 1.0 * t.sources * t.h_in, t.model.itemsize
    nbytes = (RELU[0] + 1) * t.relu * t.inputs  # ReLU and its mask
    nbytes = nbytes + COPY * t.sums * t.spec.reads_own  # sums and own rows into one tensor
    launches, gathers = 4 + (MASK + 3) * t.drops, _gather(t, t.sources, t.rows)
    return Compute(0.0, gathers, nbytes, launches, b, hash_ops=numbers * t.drops)


def _forward(t: Tiles) -> Compute:
    (flops, read), b = _product(t), t.model.itemsize
    gathered = 1.0 * COPY * t.weights * (t.grid.size(t.axes.rows) > 1) * b  # the weights' tile
    return Compute(flops, (), gathered, 4, b, gemm_bytes=read)


def _backward(t: Tiles) -> Compute:
    """Return the work of the gradients of weights and bias, and of the sums if needed."""
    (flops, read), b = _product(t), t.model.itemsize
    nbytes = 1.0 * (BIAS[1] * t.rows + 2 * COPY * t.summed) * t.h_out * b
    gemm_bytes = (1 + t.varies) * read
    return Compute(flops * (1 + t.varies), (), nbytes, 10, b, gemm_bytes=gemm_bytes)


def _aggregate_back(t: Tiles) -> Compute:
    """Return the work of the inputs' gradient, before its all-reduce, and of ReLU and dropout."""
    nbytes = MASKED * (t.relu or t.drops) * t.inputs
    nbytes = nbytes + (SUM + COPY) * t.sums / 2 * t.spec.reads_own
    return Compute(0.0, _gather(t, t.rows, t.sources), nbytes, 8, t.model.itemsize)


def _product(t: Tiles) -> tuple[np.ndarray, np.ndarray]:
    """Return the flops of a product, which counts at least VECTOR columns, and its bytes."""
    wide, high = (np.maximum(columns, VECTOR) for columns in (t.summed, t.h_out))
    return np.asarray(2.0 * t.rows * wide * high), t.sums + t.outputs


# -- memory ----------------------------------------------------------------------------------------


class _Holds:
    """Memory of a layer's operations [ranks] [B], as in executor/strategies/tensor3d.py."""

    def __init__(self, t: Tiles) -> None:
        self.tiles = t
        # sums of neighbours, before they are copied into one tensor with own rows
        self.neighbours = t.sums / 2 * t.spec.reads_own
        # the mask of ReLU and dropout, one byte per input
        self.mask = t.inputs / t.model.itemsize * (t.relu or t.drops) * t.varies

    def aggregate(self) -> OpMemory:
        t = self.tiles
        kept = self.mask + t.sums
        # inputs are freed, except features, which are constant
        return OpMemory(kept + t.inputs * t.drops + self.neighbours, kept - t.inputs * t.varies)

    def forward(self) -> OpMemory:
        return keeps(self.tiles.outputs)

    def backward(self) -> OpMemory:
        t = self.tiles
        weights = 2.0 * t.weights * t.model.itemsize  # the tile of weights and its gradient
        freed = t.sums * t.is_summed
        return OpMemory(t.outputs + weights + t.sums * t.varies - freed, -freed)

    def aggregate_back(self) -> OpMemory:
        return OpMemory(self.tiles.sums + self.neighbours + self.tiles.inputs, -self.mask)

    def loss(self) -> OpMemory:
        """Return the memory of the logits and their gradients, each both as a tile and as whole
        rows, which have as many numbers as the tile."""
        return OpMemory(4 * self.tiles.outputs, 0.0)
