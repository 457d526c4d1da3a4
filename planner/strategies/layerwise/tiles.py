"""The operations of a step whose ranks form a grid x * y * z, each with a tile of every tensor.

In each layer the axes have roles, which move on by one from layer to layer (`roles`):

    sources   shares the layer's input rows among ranks, and its output columns
    columns   shares its input columns
    rows      shares its output rows

A rank has a tile of every tensor, shared by these axes:

    adjacency A   [rows, sources]
    inputs H      [sources, columns]
    sums A H      [rows, columns]
    weights W     [columns, sources]
    outputs       [rows, sources]

Ranks along the third axis have copies of a tile. Weights have no copies: ranks along `rows` share
out a tile, and put it together before they use it.

    compute   |aggregate l f|                    |forward l|                |aggregate l+1 f| ..
    comm                                         before it: gather_weights
    reduce                  |sum_aggregates l f|           |sum_outputs l|

    compute   |backward l|                                |aggregate l b|
    comm      before it: gather_weights; |scatter_weights|
    reduce                              |sum_aggregates l b|            |sum_inputs l|

The outputs lie where the next layer has its inputs, so nothing else moves; for the loss ranks turn
columns of the logits into whole rows, and those of their gradient back. The bias is one more row of
the weights' first tiles. GraphSAGE's own rows are summed with the identity beside A, so its sums
are twice as wide.

What is read from operations is in strategies/program/. Numbers of layers are those of
planner/gnn/model.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

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
    Held,
    Op,
    Program,
    keeps,
)
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.schedule import Compute, Gather

Axis = Literal["x", "y", "z"]
AXES: tuple[Axis, ...] = ("x", "y", "z")

# -- who has what ----------------------------------------------------------------------------------


class Roles(NamedTuple):
    """The axes of a layer by what they share."""

    sources: Axis
    columns: Axis
    rows: Axis


def roles(layer: int) -> Roles:
    """Of layer 1, 2, ..: its rows are the next one's sources, its sources the next one's columns.

    >>> roles(1), roles(2).sources, roles(2).columns
    (Roles(sources='x', columns='y', rows='z'), 'z', 'x')
    """
    return (Roles("x", "y", "z"), Roles("z", "x", "y"), Roles("y", "z", "x"))[(layer - 1) % 3]


@dataclass(frozen=True)
class Grid:
    """x * y * z ranks; y counts fastest and z slowest."""

    x: int
    y: int
    z: int

    @property
    def ranks(self) -> int:
        return self.x * self.y * self.z

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return {"x": self.x, "y": self.y, "z": self.z}[axis]

    def stride(self, axis: Axis) -> int:
        """How many ranks there are from one to the next along an axis."""
        return {"y": 1, "x": self.y, "z": self.x * self.y}[axis]

    def places(self, axis: Axis) -> np.ndarray:
        """Where each rank is along an axis [ranks]."""
        return np.arange(self.ranks) // self.stride(axis) % self.size(axis)

    def groups(self, axis: Axis) -> tuple[Group, ...]:
        """The ranks that differ along this axis alone.

        >>> Grid(2, 2, 1).groups("x")
        ((0, 2), (1, 3))
        """
        along = np.arange(self.size(axis)) * self.stride(axis)
        first = np.flatnonzero(self.places(axis) == 0)
        return tuple(tuple((rank + along).tolist()) for rank in first)

    def share(self, numbers: int | np.ndarray, axis: Axis) -> np.ndarray:
        """How many each rank has of these, which ranks along an axis share [ranks]."""
        each, rest = np.divmod(numbers, self.size(axis))
        return np.asarray(each + (self.places(axis) < rest))


def orders(vertices: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two orders of the vertices: of the inputs of layers 1, 3, .., and of 2, 4, .. .

    Rows and columns of a tile are in different orders. So an edge is in any tile with the same
    chance, and the edges of vertices to themselves are in no tiles in particular.
    """
    first, second = (
        np.random.default_rng((TILES, seed, which)).permutation(vertices) for which in (0, 1)
    )
    return first, second


def edges_of_tiles(problem: Problem, grid: Grid, layer: int) -> np.ndarray:
    """Edges in each rank's tile of the adjacency, with those of vertices to themselves [ranks].

    Counted where the graph is known; otherwise an equal share.
    """
    stats, axes = problem.stats, roles(layer)
    rows, sources = grid.size(axes.rows), grid.size(axes.sources)
    to_self = stats.vertices if problem.model.layers[layer - 1].self_edges else 0
    if problem.graph is None:
        return np.full(grid.ranks, (stats.edges + to_self) / (rows * sources))
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
        if to_self:
            tiles = np.append(tiles, tile_of[1] * sources + tile_of[0])
        return np.bincount(tiles, minlength=rows * sources)

    asked = ("tiles", rows, sources, layer % 2, to_self, seed, graph)
    counted = problem.known.answer(asked, count)
    return np.asarray(counted[grid.places(axes.rows) * sources + grid.places(axes.sources)])


class Tiles:
    """A layer's tiles, and their sizes on every rank [ranks]."""

    def __init__(self, problem: Problem, model: Model, grid: Grid, layer: int) -> None:
        self.problem, self.model, self.grid, self.layer = problem, model, grid, layer
        vertices, b = problem.stats.vertices, model.itemsize
        self.spec, self.axes = model.layers[layer - 1], roles(layer)
        self.is_summed = not model.aggregate_cached(layer)  # in every step; else sums are made once
        self.varies = layer > model.first_varying  # its inputs have a gradient
        self.drops = model.dropout > 0 and self.spec.drops  # its inputs
        self.relu = model.relu_after(layer - 1)  # is still to be done to its inputs
        self.rows, self.sources = (
            grid.share(vertices, at) for at in (self.axes.rows, self.axes.sources)
        )
        self.h_in = grid.share(self.spec.h_in, self.axes.columns)  # columns of the inputs
        self.h_out = grid.share(self.spec.h_out, self.axes.sources)  # columns of the outputs
        # columns of the sums: of neighbours, and of own rows where the layer reads them
        self.summed = self.h_in * self.spec.matrices
        # numbers of the weights, with the bias on the first ranks along `columns`; those kept
        has_bias = self.spec.bias & (grid.places(self.axes.columns) == 0)
        self.weights = np.asarray((self.summed + has_bias) * self.h_out)
        self.kept_weights = grid.share(self.weights, self.axes.rows)
        # rows of the outputs, where ranks turn their columns into whole rows
        self.whole_rows = grid.share(self.rows, self.axes.sources)
        # tensors [B]
        self.inputs = 1.0 * self.sources * self.h_in * b
        self.sums = 1.0 * self.rows * self.summed * b
        self.outputs = 1.0 * self.rows * self.h_out * b

    @property
    def edges(self) -> np.ndarray:
        return edges_of_tiles(self.problem, self.grid, self.layer)


# -- operations ------------------------------------------------------------------------------------


def program(problem: Problem, grid: Grid) -> Program:
    """One step, which all steps are like."""
    return Program.of(list(_step(problem, grid)))


def layers_of(problem: Problem, grid: Grid) -> list[Tiles]:
    """The tiles of layers 1 .. L. All sum before they multiply."""
    model = problem.model.aggregating_first
    return [Tiles(problem, model, grid, layer) for layer in range(1, len(model.layers) + 1)]


def _step(problem: Problem, grid: Grid) -> Iterator[Op]:
    """The operations of one step, in order."""
    b, layers = problem.model.itemsize, layers_of(problem, grid)
    last, ones = layers[-1], np.ones(grid.ranks, dtype=np.int64)

    def along(axis: Axis, op: str, way: str, layer: int, numbers: np.ndarray) -> Iterator[Op]:
        """All-reduces of tensors of so many numbers [ranks] along an axis."""
        if grid.size(axis) > 1:
            groups = grid.groups(axis)
            sizes = tuple(int(numbers[group[0]]) * b for group in groups)
            yield Op(op, way, layer, work=AllReduce(sizes, groups))

    def exchange(
        axis: Axis, op: str, way: str, layer: int | None, left: np.ndarray, right: np.ndarray
    ) -> Op:
        """From each rank as many numbers as the product of both [ranks], along an axis."""
        first = np.arange(grid.ranks) - grid.places(axis) * grid.stride(axis)  # of its line
        return Op(op, way, layer, work=Exchange(Outer(left, right, first), b))

    def gather_weights(tiles: Tiles, way: str) -> Iterator[Op]:
        if grid.size(tiles.axes.rows) > 1:
            kept = tiles.kept_weights
            yield exchange(tiles.axes.rows, "gather_weights", way, tiles.layer, kept, ones)

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
    """A sum over the tile's edges; ranks with fewer columns read as much less."""
    most = max(int(t.h_in.max()), 1)
    return (Gather(t.edges * (t.h_in / most), most, among, into),)


def _aggregate(t: Tiles) -> Compute:
    """ReLU and dropout of the inputs, and their sums."""
    numbers, b = 1.0 * t.sources * t.h_in, t.model.itemsize
    passed = (RELU[0] + 1) * t.relu * t.inputs  # ReLU, and which numbers it leaves
    passed = passed + COPY * t.sums * t.spec.reads_own  # both sums beside each other
    launches, gathers = 4 + (MASK + 3) * t.drops, _gather(t, t.sources, t.rows)
    return Compute(0.0, gathers, passed, launches, b, hash_ops=numbers * t.drops)


def _forward(t: Tiles) -> Compute:
    (flops, read), b = _product(t), t.model.itemsize
    put_together = 1.0 * COPY * t.weights * (t.grid.size(t.axes.rows) > 1) * b
    return Compute(flops, (), put_together, 4, b, gemm_bytes=read)


def _backward(t: Tiles) -> Compute:
    """The gradients of weights and bias, and of the sums where they have one."""
    (flops, read), b = _product(t), t.model.itemsize
    passed = 1.0 * (BIAS[1] * t.rows + 2 * COPY * t.summed) * t.h_out * b
    both = (1 + t.varies) * read
    return Compute(flops * (1 + t.varies), (), passed, 10, b, gemm_bytes=both)


def _aggregate_back(t: Tiles) -> Compute:
    """The gradient of the inputs, before it is summed; dropout's and ReLU's come after that."""
    passed = MASKED * (t.relu or t.drops) * t.inputs
    passed = passed + (SUM + COPY) * t.sums / 2 * t.spec.reads_own
    return Compute(0.0, _gather(t, t.rows, t.sources), passed, 8, t.model.itemsize)


def _product(t: Tiles) -> tuple[np.ndarray, np.ndarray]:
    """Flops of a product, in which few columns count as VECTOR, and bytes read and written."""
    wide, high = (np.maximum(columns, VECTOR) for columns in (t.summed, t.h_out))
    return np.asarray(2.0 * t.rows * wide * high), t.sums + t.outputs


# -- bytes held ------------------------------------------------------------------------------------


class _Holds:
    """Memory of a layer's operations [ranks] [B], as executor/strategies/tensor3d.py takes it."""

    def __init__(self, t: Tiles) -> None:
        self.tiles = t
        # sums of neighbours alone, where they are put beside own rows
        self.neighbours = t.sums / 2 * t.spec.reads_own
        # a byte for each input that ReLU or dropout may have set to zero
        self.mask = t.inputs / t.model.itemsize * (t.relu or t.drops) * t.varies

    def aggregate(self) -> Held:
        t = self.tiles
        kept = self.mask + t.sums
        # features are no operation's
        return Held(kept + t.inputs * t.drops + self.neighbours, kept - t.inputs * t.varies)

    def forward(self) -> Held:
        return keeps(self.tiles.outputs)

    def backward(self) -> Held:
        t = self.tiles
        of_tile = 2.0 * t.weights * t.model.itemsize  # and a gradient
        freed = t.sums * t.is_summed
        return Held(t.outputs + of_tile + t.sums * t.varies - freed, -freed)

    def aggregate_back(self) -> Held:
        return Held(self.tiles.sums + self.neighbours + self.tiles.inputs, -self.mask)

    def loss(self) -> Held:
        """Logits of all classes of some rows, which are as many as a tile's, and their gradients:
        both ways to lie."""
        return Held(4 * self.tiles.outputs, 0.0)
