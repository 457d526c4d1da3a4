"""The operations of a step of feature parallelism, which aggregates on columns of all rows.

A rank has an equal share of the rows, and during aggregation an equal share of the columns of all
rows. A layer prepares its rows, exchanges rows for columns, aggregates over all edges, exchanges
columns for rows, and does the rest on rows:

    on rows      |prepare l|                              |forward l|
    exchange               |to_columns l|        |to_rows l|
    on columns                          |aggregate l|

Backward does the same operations on gradients, in the same order, with way 'b'. A product needs
whole rows; dropout, bias and ReLU do not. So a layer's outputs may stay in columns for the next
layer, without an exchange between the two (`arranged`).

planner/gnn/model.py counts the work of layers, and memory.py their memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from gnnplan.planner.gnn.footprint import OpMemory, keeps
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.operations import COPY
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.layerwise.step import end_of_step, finish, first_alike, moments
from gnnplan.planner.strategies.program.program import Exchange, Op, Program
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.schedule import Compute, Gather


def why_untried(problem: Problem, shared: str, unsuited: str) -> str:
    """Return why a search does not try a strategy that aggregates a few columns; '' if it does.

    A search tries it if the device's rate for narrow rows was measured. A roofline is true for wide
    rows only: for a few columns, the index and weight of each edge take most of the bandwidth.

    shared: what ranks divide. unsuited: why the model cannot be aggregated so; '' if it can.
    """
    if problem.ranks == 1:
        return f"one rank: {shared} are divided over several ranks"
    unknown = "this device's rate for sums of few columns is not known; run `gnnplan measure` on it"
    return unsuited or ("" if problem.cluster.device.gather else unknown)


# -- rows and columns of a rank --------------------------------------------------------------------


def shares(total: int, ranks: int) -> np.ndarray:
    """Return how many of `total` rows or columns each rank has [ranks].

    >>> shares(10, 4)
    array([3, 3, 2, 2])
    """
    each, rest = divmod(total, ranks)
    return each + (np.arange(ranks) < rest)


def spans(total: int, ranks: int) -> list[slice]:
    """Return which of `total` rows or columns each rank has; rank 0 has the first ones.

    >>> spans(10, 4)[1]
    slice(3, 6, None)
    """
    ends = np.cumsum(shares(total, ranks)).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


# -- layers on rows and on columns -----------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """The exchanges of a layer that aggregates on columns."""

    width: int  # numbers per aggregated row
    cuts: bool = True  # inputs are in rows, and are exchanged for columns before the aggregation
    joins: bool = True  # sums are exchanged for rows after the aggregation
    backward: bool = True  # the gradient of the sums is needed

    @property
    def numbers(self) -> int:
        """The numbers per vertex that ranks send in a step, forward and backward."""
        return self.width * (self.cuts + self.joins) * (1 + self.backward)


Courses = tuple[Course | None, ...]  # of layers 1 .. L; None: aggregated once, at set-up


class ByColumns(Model):
    """A model whose layers are split at their aggregation, which is on columns."""

    def narrow_at(self, layer: int) -> bool:
        return self.layers[layer - 1].projects_first

    def prepare(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Return forward and backward work on a layer's input rows, before its aggregation."""
        spec = self.layers[layer - 1]
        if spec.projects_first:
            return self.project(layer, rows)
        played = self.preparation_record(spec, varies=layer > self.first_varying)
        return self._rowwise(played.passes, rows, self.prepare_launches(spec))

    def end(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Return forward and backward work after a layer's aggregation."""
        spec = self.layers[layer - 1]
        plain = replace(spec, drops=False, activates=False, norm="none", sums=0)
        # only this layer is changed, because the next layer may do this layer's ReLU
        layers = (*self.layers[: layer - 1], plain, *self.layers[layer:])
        model = replace(self, layers=layers)
        return (
            model.forward(layer, rows, rows, 0.0, narrow=True),
            model.backward(layer, rows, rows, 0.0, narrow=True),
        )


def arranged(model: Model, alternating: bool) -> tuple[ByColumns, Courses]:
    """Return the model with its orders of product and aggregation, and the course of every layer.

    Coupled: every layer reads rows and writes rows, in the model's own order. Alternating: the
    choice for all layers by which ranks send the fewest numbers.

        h_{l-1} in rows     X W  ->  to_columns  ->  A (X W)         h_l in columns   product first
        h_l in columns      A X  ->  to_rows     ->  (A X) W         h_{l+1} in rows  sum first
        a layer of SGC without W: A X                                columns before and after

    A layer's outputs stay in columns only if its operations after the aggregation, and those of the
    next layer before it, are element-wise.
    """
    # whether outputs are in columns -> the fewest numbers, and the choice for the layers so far
    least: dict[bool, tuple[int, tuple[tuple[bool, Course | None], ...]]] = {False: (0, ())}
    for layer in range(1, len(model.layers) + 1):
        best: dict[bool, tuple[int, tuple[tuple[bool, Course | None], ...]]] = {}
        for in_columns, (numbers, path) in least.items():
            for first, course in _choices(model, layer, in_columns, alternating):
                cost = numbers + (course.numbers if course else 0)
                stays = course is not None and not course.joins
                if stays not in best or cost < best[stays][0]:
                    best[stays] = cost, (*path, (first, course))
        least = best
    path = least[False][1]
    layers = tuple(
        replace(spec, projects_first=first)
        for spec, (first, _) in zip(model.layers, path, strict=True)
    )
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    return ByColumns(**(values | {"layers": layers})), tuple(course for _, course in path)


def _choices(
    model: Model, layer: int, in_columns: bool, alternating: bool
) -> Iterator[tuple[bool, Course | None]]:
    """Yield the choices for a layer: whether it multiplies first, and its course."""
    spec = model.layers[layer - 1]
    varies = layer > model.first_varying
    if in_columns:
        yield False, Course(spec.h_in, cuts=False)
        if not spec.matrices and _stays(model, layer):
            yield False, Course(spec.h_in, cuts=False, joins=False)
    elif model.aggregate_cached(layer):
        yield spec.projects_first, None
    else:
        yield spec.projects_first, Course(spec.gathered, backward=varies or spec.projects_first)
        if alternating and _stays(model, layer):
            yield spec.matrices > 0, Course(spec.h_out, joins=False)


def _stays(model: Model, layer: int) -> bool:
    """Return whether a layer's outputs may stay in columns for the next layer: whether both layers
    have only element-wise operations besides products and sums."""
    both = model.layers[layer - 1 : layer + 1]
    return len(both) == 2 and all(
        spec.kind in ("gcn", "sgc") and not (spec.activates or spec.heads) for spec in both
    )


# -- operations ------------------------------------------------------------------------------------


def program(problem: Problem, model: ByColumns, courses: Courses) -> Program:
    """Return the program, whose steps are all equal."""
    step = list(_step(problem, model, courses))
    return Program.of(step, setup=lambda: setup(problem, courses))


def crossing(problem: Problem, width: int, op: str) -> Outer:
    """Return the numbers sent from rank to rank for rows of `width` numbers [ranks, ranks]."""
    rows, columns = shares(problem.stats.vertices, problem.ranks), shares(width, problem.ranks)
    sent = Outer(rows, columns, np.zeros_like(rows))
    return sent if op == "to_columns" else sent.T


def setup(problem: Problem, courses: Courses) -> Iterator[Op]:
    """Yield the exchanges before the first step, of features that are aggregated only once."""
    if courses[0] is None and problem.ranks > 1:
        for op in ("to_columns", "to_rows"):
            sent = crossing(problem, problem.model.features, op)
            yield Op(f"input_{op}", work=Exchange(sent, problem.model.itemsize))


def _step(problem: Problem, model: ByColumns, courses: Courses) -> Iterator[Op]:
    """Yield the operations of one step, in order. Equal layers share their work and bytes."""
    ranks, layers, b = problem.ranks, len(courses), model.itemsize
    own = shares(problem.stats.vertices, ranks)
    several = ranks > 1
    like = first_alike(
        (spec, course, model.relu_after(layer), layer <= model.first_varying)
        for layer, (spec, course) in enumerate(zip(model.layers, courses, strict=True), 1)
    )
    nothing = Outer.of([0] * ranks, True, 0)
    facts = dict.fromkeys(like, LayerCounts(own, own, np.zeros(ranks), nothing))
    holds = Holds(problem, model, facts, ExchangeOptions(narrow=True))

    def of_columns(width: int) -> np.ndarray:
        """Return a rank's columns of all rows as a number of whole rows of `width` [ranks]."""
        return np.asarray(problem.stats.vertices * shares(width, ranks) / width)

    def copied(width: int, pieces: bool) -> Compute:
        """Return the work to copy rows into pieces for other ranks, or out of received pieces."""
        if not (pieces and several):
            return Compute(itemsize=b)
        return Compute(elementwise_bytes=1.0 * COPY * own * width * b, itemsize=b)

    def prepare(layer: int, course: Course) -> tuple[Compute, Compute]:
        rows = own if course.cuts else of_columns(model.layers[layer - 1].h_in)
        forward, backward = model.prepare(layer, rows)
        piece = copied(course.width, course.cuts)
        return forward + piece, backward + piece

    def end(layer: int) -> tuple[Compute, Compute]:
        course = courses[layer - 1]
        joins = course is None or course.joins
        rows = own if joins else of_columns(model.layers[layer - 1].h_out)
        forward, backward = model.end(layer, rows)
        if course is None:
            return forward, backward
        piece = copied(course.width, joins)
        return forward + piece, backward + piece if course.backward else backward

    def summed(layer: int, course: Course) -> Compute:
        stats = problem.stats
        edges = stats.edges + stats.vertices * model.layers[layer - 1].self_edges
        columns = shares(course.width, ranks)
        most = int(columns.max())
        read = Gather(edges * columns / most, most, stats.vertices, stats.vertices)
        return Compute(0.0, (read,), launches=1, itemsize=b)

    def sums(layer: int, course: Course, direction: str) -> Iterator[Op]:
        """Yield a layer's aggregation, with the exchanges before and after it."""
        before, after = (
            (course.cuts, course.joins) if direction == "f" else (course.joins, course.cuts)
        )
        if before and several:
            numbers = crossing(problem, course.width, "to_columns")
            yield Op("to_columns", direction, layer, work=Exchange(numbers, b))
        yield Op("aggregate", direction, layer, work=summed(like[layer], course))
        if after and several:
            numbers = crossing(problem, course.width, "to_rows")
            yield Op("to_rows", direction, layer, work=Exchange(numbers, b))

    def kept(layer: int, width: int) -> OpMemory:
        return keeps(between(model, layer, own, width))

    def freed(layer: int, width: int) -> OpMemory:
        return OpMemory(0.0, -between(model, layer, own, width))

    encode = model.encode(own) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0], holds=partial(holds.encode, own))
    for layer in range(1, layers + 1):
        yield from moments(problem, layer, "f")
        if (course := courses[layer - 1]) is not None:
            holding = partial(kept, layer, course.width) if course.backward else None
            yield Op("prepare", "f", layer, work=prepare(like[layer], course)[0], holds=holding)
            yield from sums(layer, course, "f")
        yield Op(
            "forward", layer=layer, work=end(like[layer])[0], holds=partial(holds.forward, layer)
        )
    yield from moments(problem, layers + 1, "f")
    forward, backward = finish(problem, own, None)
    yield Op("loss", work=forward + backward, holds=holds.loss)
    yield from moments(problem, layers + 1, "b")
    for layer in range(layers, 0, -1):
        course, frees = courses[layer - 1], partial(holds.backward, layer)
        yield Op("backward", layer=layer, work=end(like[layer])[1], holds=frees)
        if course is not None and course.backward:
            yield from sums(layer, course, "b")
            freeing = partial(freed, layer, course.width)
            yield Op("prepare", "b", layer, work=prepare(like[layer], course)[1], holds=freeing)
            yield from moments(problem, layer, "b")
    if encode:
        yield Op("encode", "b", work=encode[1])
    yield from end_of_step(problem)


# -- memory ----------------------------------------------------------------------------------------


def between(model: ByColumns, layer: int, own: np.ndarray, width: int) -> Number:
    """Return the bytes that a rank keeps because a layer is two autograd segments [ranks].

    These are inputs and outputs of the segments before and after the exchange that no product
    saves; memory.py counts the layer itself. own: number of rows. width: numbers per aggregated
    row.
    """
    spec = model.layers[layer - 1]
    sums = spec.projects_first or not spec.matrices or model.sends_initial
    dropped = model.dropout > 0 and spec.drops and not spec.projects_first and spec.matrices < 2
    return 1.0 * own * (width * sums + model.rows(layer).numbers * dropped) * model.itemsize
