"""The operations of a step whose sums over edges are done on columns of all vertices' rows.

A rank has an equal share of the rows, and of a tensor of all rows an equal share of the columns. A
layer is prepared by rows, cut into columns, summed over all edges, joined to rows, and ended there:

    by rows      |prepare l|                              |forward l|
    crossing               |to_columns l|        |to_rows l|
    by columns                          |aggregate l|

Backward the same operations have way 'b', in the same order, on gradients. A product needs whole
rows; dropout, bias and ReLU do not. So a layer may be left by columns, where the next one takes
them as they are (`arranged`), and then neither is joined nor cut there.

What is read from operations is in strategies/program/. Numbers of layers are those of
planner/gnn/model.py, bytes held those of memory.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.operations import COPY
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.layerwise.step import end_of_step, finish, first_alike, moments
from gnnplan.planner.strategies.program.program import Exchange, Held, Op, Program, keeps
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.schedule import Compute, Gather


def why_untried(problem: Problem, shared: str, unsuited: str) -> str:
    """Why a plan does not try a strategy whose ranks sum a few columns each; '' if it does.

    It does where the rate of narrow sums was measured: of wide rows a roofline is true, of a few
    columns it promises too much, for each edge has its index and weight to read too.

    shared: what ranks share. unsuited: why the model cannot be summed so, '' if it can.
    """
    if problem.ranks == 1:
        return f"one rank has no other to share {shared} with"
    unknown = "how fast this device sums a few columns is not known; run `gnnplan measure` on it"
    return unsuited or ("" if problem.cluster.device.gather else unknown)


# -- who has what ----------------------------------------------------------------------------------


def shares(total: int, ranks: int) -> np.ndarray:
    """How many of so many rows or columns each rank has [ranks].

    >>> shares(10, 4)
    array([3, 3, 2, 2])
    """
    each, rest = divmod(total, ranks)
    return each + (np.arange(ranks) < rest)


def spans(total: int, ranks: int) -> list[slice]:
    """Which of so many rows or columns each rank has: the first ones are those of rank 0.

    >>> spans(10, 4)[1]
    slice(3, 6, None)
    """
    ends = np.cumsum(shares(total, ranks)).tolist()
    return [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


# -- how rows go through the layers ----------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """A layer that is summed on columns.

    width: numbers per row that is summed. cuts: its inputs lie by rows, so they are cut into
    columns; otherwise they lie by columns. joins: what it makes lies by rows. backward: whether
    its sum has a gradient that somebody needs.
    """

    width: int
    cuts: bool = True
    joins: bool = True
    backward: bool = True

    @property
    def numbers(self) -> int:
        """Numbers per vertex that cross in a step, both passes."""
        return self.width * (self.cuts + self.joins) * (1 + self.backward)


Courses = tuple[Course | None, ...]  # of layers 1 .. L; None: its aggregate is made at set-up


class ByColumns(Model):
    """A model whose layers end their row-wise part before rows are cut into columns."""

    def narrow_at(self, layer: int) -> bool:
        return self.layers[layer - 1].projects_first

    def prepare(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of what is done to a layer's input rows before its sum."""
        spec = self.layers[layer - 1]
        if spec.projects_first:
            return self.project(layer, rows)
        told = self.prepares(spec, varies=layer > self.first_varying)
        return self._rowwise(told.ways, rows, self.prepare_launches(spec))

    def end(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of what is done to a layer's sums."""
        spec = self.layers[layer - 1]
        plain = replace(spec, drops=False, activates=False, norm="none", sums=0)
        # ReLU after a layer is the next layer's where that activates: only this one is changed
        layers = (*self.layers[: layer - 1], plain, *self.layers[layer:])
        model = replace(self, layers=layers)
        return (
            model.forward(layer, rows, rows, 0.0, narrow=True),
            model.backward(layer, rows, rows, 0.0, narrow=True),
        )


def arranged(model: Model, alternating: bool) -> tuple[ByColumns, Courses]:
    """The model with its orders of product and sum, and the course of every layer.

    Coupled: every layer takes rows and gives rows, in the model's own order. Alternating: of all
    ways to go through the layers one by which fewest numbers cross.

        h_{l-1} by rows     X W  ->  to_columns  ->  A (X W)         h_l by columns   product first
        h_l by columns      A X  ->  to_rows     ->  (A X) W         h_{l+1} by rows  sum first
        a layer of SGC without W: A X                                by columns all along

    A layer is left by columns only where what it does to its sums, and what the next one does to
    its inputs, is done column by column.
    """
    least: dict[bool, tuple[int, tuple[tuple[bool, Course | None], ...]]] = {False: (0, ())}
    for layer in range(1, len(model.layers) + 1):
        ways: dict[bool, tuple[int, tuple[tuple[bool, Course | None], ...]]] = {}
        for by_columns, (numbers, path) in least.items():
            for first, course in _ways(model, layer, by_columns, alternating):
                cost = numbers + (course.numbers if course else 0)
                leaves = course is not None and not course.joins
                if leaves not in ways or cost < ways[leaves][0]:
                    ways[leaves] = cost, (*path, (first, course))
        least = ways
    path = least[False][1]
    layers = tuple(
        replace(spec, projects_first=first)
        for spec, (first, _) in zip(model.layers, path, strict=True)
    )
    values = {field.name: getattr(model, field.name) for field in fields(model)}
    return ByColumns(**(values | {"layers": layers})), tuple(course for _, course in path)


def _ways(
    model: Model, layer: int, by_columns: bool, alternating: bool
) -> Iterator[tuple[bool, Course | None]]:
    """How a layer may go: whether it multiplies first, and its course."""
    spec = model.layers[layer - 1]
    varies = layer > model.first_varying
    if by_columns:
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
    """Whether a layer's rows may stay by columns for the next layer: whether all that both do
    besides their products and sums is done number by number."""
    both = model.layers[layer - 1 : layer + 1]
    return len(both) == 2 and all(
        spec.kind in ("gcn", "sgc") and not (spec.activates or spec.heads) for spec in both
    )


# -- operations ------------------------------------------------------------------------------------


def program(problem: Problem, model: ByColumns, courses: Courses) -> Program:
    """One step, which all steps are like."""
    step = list(_step(problem, model, courses))
    return Program.of(step, setup=lambda: setup(problem, courses))


def crossing(problem: Problem, width: int, op: str) -> Outer:
    """Numbers that go from i to j as rows of `width` numbers are cut or joined [ranks, ranks]."""
    rows, columns = shares(problem.stats.vertices, problem.ranks), shares(width, problem.ranks)
    sent = Outer(rows, columns, np.zeros_like(rows))
    return sent if op == "to_columns" else sent.T


def setup(problem: Problem, courses: Courses) -> Iterator[Op]:
    """Exchanges before the first step: of the features, where their sums are made once."""
    if courses[0] is None and problem.ranks > 1:
        for op in ("to_columns", "to_rows"):
            sent = crossing(problem, problem.model.features, op)
            yield Op(f"input_{op}", work=Exchange(sent, problem.model.itemsize))


def _step(problem: Problem, model: ByColumns, courses: Courses) -> Iterator[Op]:
    """The operations of one step, in order. Layers that are alike share their work and bytes."""
    ranks, layers, b = problem.ranks, len(courses), model.itemsize
    own = shares(problem.stats.vertices, ranks)
    several = ranks > 1
    like = first_alike(
        (spec, course, model.relu_after(layer), layer <= model.first_varying)
        for layer, (spec, course) in enumerate(zip(model.layers, courses, strict=True), 1)
    )
    nothing = Outer.of([0] * ranks, True, 0)
    facts = dict.fromkeys(like, LayerFacts(own, own, np.zeros(ranks), nothing))
    encoded = own if model.encoder else np.zeros(ranks)
    holds = Holds(problem, model, facts, encoded, ExchangeOptions(narrow=True))

    def of_columns(width: int) -> np.ndarray:
        """Rows of `width` numbers that have as many numbers as a rank's columns of all rows."""
        return np.asarray(problem.stats.vertices * shares(width, ranks) / width)

    def copied(width: int, pieces: bool) -> Compute:
        """The work of putting rows into pieces for peers, or together from theirs."""
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

    def sums(layer: int, course: Course, way: str) -> Iterator[Op]:
        """What a layer does on columns, and how it gets there and back."""
        there, back = (course.cuts, course.joins) if way == "f" else (course.joins, course.cuts)
        if there and several:
            numbers = crossing(problem, course.width, "to_columns")
            yield Op("to_columns", way, layer, work=Exchange(numbers, b))
        yield Op("aggregate", way, layer, work=summed(like[layer], course))
        if back and several:
            numbers = crossing(problem, course.width, "to_rows")
            yield Op("to_rows", way, layer, work=Exchange(numbers, b))

    def kept(layer: int, width: int) -> Held:
        return keeps(between(model, layer, own, width))

    def freed(layer: int, width: int) -> Held:
        return Held(0.0, -between(model, layer, own, width))

    encode = model.encode(encoded) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0], holds=holds.encode)
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


# -- bytes held ------------------------------------------------------------------------------------


def between(model: ByColumns, layer: int, own: np.ndarray, width: int) -> Number:
    """Bytes that a rank keeps because a layer is two segments with an exchange between [ranks].

    They are beside those of the layer itself (memory.py): leaves and roots of the two segments,
    which no product saves in any case. own: rows. width: numbers per row that is summed.
    """
    spec = model.layers[layer - 1]
    sums = spec.projects_first or not spec.matrices or model.hands_on_initial
    dropped = model.dropout > 0 and spec.drops and not spec.projects_first and spec.matrices < 2
    return 1.0 * own * (width * sums + model.rows(layer).numbers * dropped) * model.itemsize
