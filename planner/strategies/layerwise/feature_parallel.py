"""Feature parallelism: aggregation on some columns of all rows, all else on a rank's own rows.

Every rank has all edges and an equal share of the rows; during the aggregation of a layer it has an
equal share of the columns of all rows. All-to-alls turn rows into columns and back. There are no
parts and no halo; every rank sums over all edges, so the work is balanced for any graph. METIS
orders the vertices so that most rows of a sum are in cache.

    rows     rank 0 |a0 a1 a2 a3|      columns   rank 0 |a0 a1|   rank 1 |a2 a3|
                    |b0 b1 b2 b3|      to_columns ->    |b0 b1|          |b2 b3|
             rank 1 |c0 c1 c2 c3|      <- to_rows       |c0 c1|          |c2 c3|

    coupled, one step
    compute  |forward 1|prepare 2|    |aggregate 2|    |forward 2|loss|backward 2|  ..
    comm                         |to_columns 2|    |to_rows 2|

Bytes per epoch for N vertices, P ranks, w_l numbers per aggregated row of layer l (the smaller of
the layer's input and output widths), b bytes per number, W weights:

    coupled       4 (P-1)/P N b sum_l w_l  +  2 (P-1) W b
    alternating   half of the first term if layers alternate A (X W) and (A X) W

Graph parallelism with narrow=True and a halo of H rows, over all ranks, sends 2 H w b per layer:
coupled sends fewer bytes if H > 2 (P-1)/P N, alternating if H > (P-1)/P N. If layer 1's aggregate
is constant, its rows are exchanged once, at set-up. If dropout changes the aggregate, its rows are
exchanged in every step, though only forward if they are features, which have no gradient; graph
parallelism in that case already has the features of its halo.

`order='alternating'` keeps a layer's outputs in columns if all operations before the next
aggregation are element-wise (bias, ReLU, dropout), and multiplies before or after an aggregation so
that ranks send the fewest numbers. This is possible for GCN and SGC: SGC's layers without a matrix
are aggregated one after the other on columns, which separates propagation from products. GraphSAGE,
GIN and GCNII read own rows or multiply twice in a layer, which needs rows, so for them both orders
are the same.

Exact, to rounding: sums and products are those of one process in another order.

Layers must sum over edges with fixed weights: an attention weight depends on all columns of a row.

Source: NeutronTP (VLDB 2024), which decouples propagation from products (another model, except for
SGC); RDM (IPDPS 2023) for the two orders of a product of three matrices. The bytes of `alternating`
are our derivation.

See also executor/strategies/feature_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.layer import COPY
from gnnplan.planner.gnn.model import Model, OpMemory, block_bytes, keeps
from gnnplan.planner.graph.disk_cache import Stopwatch
from gnnplan.planner.graph.partition import locality_order
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Resident, Rules, Strategy
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel
from gnnplan.planner.strategies.layerwise.step import (
    Holds,
    layer_by_layer,
)
from gnnplan.planner.strategies.program.account import machine_code
from gnnplan.planner.strategies.program.program import Exchange, Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Number, Outer, shares
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute, Gather, Schedule
from gnnplan.planner.vocabulary.units import show_bytes


@dataclass(frozen=True)
class FeatureParallel(Strategy):
    """Feature parallelism: aggregation on columns, all else on rows.

    order: 'coupled' (rows before and after every layer) or 'alternating' (outputs may stay in
    columns, with products before or after the aggregation, to send the fewest numbers).
    """

    order: str = "coupled"

    allowed: ClassVar[Rules] = {
        "order": {
            "coupled": "rows between layers",
            "alternating": "columns where fewer numbers cross",
        }
    }
    family = "feature_parallel"
    claim = 1e-6
    rounds_rows = True
    executor = "gnnplan.executor.strategies.feature_parallel"
    examples = (
        Example("feature_parallel"),
        Example("feature_parallel(order='alternating')", ranks=3),
    )

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        if cls.absent(problem):
            return
        yield cls()
        if _numbers(problem, "alternating") < _numbers(problem, "coupled"):
            yield cls("alternating")

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return why_untried(problem, "columns", unsuited(problem))

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        return beside_halos(problem, fastest, "exchanges rows for columns and back,")

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        if why := unsuited(problem):
            raise SpecError(f"feature_parallel: {why}; use graph_parallel, or another model")
        self.check_vertices(problem)

    def role(self, problem: Problem, rank: int) -> dict[str, int]:
        return {}  # no part

    def arranged(self, problem: Problem) -> tuple[ByColumns, Courses]:
        """Return the model with its orders of product and aggregation, and each layer's course."""
        return arranged(problem.model, self.order == "alternating")

    def partitioned_s(self, problem: Problem) -> float:
        """Return how long METIS took to order the vertices [s]; the order is cached on the disk."""
        with Stopwatch() as watch:
            if problem.graph is not None:
                locality_order(problem.graph, problem.method)
        return watch.seconds

    def program(self, problem: Problem) -> Program:
        model, courses = self.arranged(problem)
        step = list(_step(problem, model, courses))
        return Program.of(step, setup=lambda: setup(problem, courses))

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        """Return every rank's tasks, after METIS has ordered the vertices for the ranks."""
        self.partitioned_s(problem)
        return super().schedule(problem, steps)

    def resident(self, problem: Problem) -> Resident:
        """Return what ranks have besides a step's tensors: all edges, and a share of all else."""
        model, stats = problem.model, problem.stats
        own = shares(stats.vertices, problem.ranks)
        read = model.inputs.stored_bytes(own)
        features = model.inputs.stored_bytes(model.constant_rows(own, own))
        features = features + model.own_index_bytes(own)
        edges = block_bytes(model, model.layers[0], *(stats.vertices,) * 2, stats.edges)
        return Resident(
            {"features": np.asarray(features), "graph": np.asarray(edges + 16 * own)},
            code=machine_code(problem),
            # at set-up: own rows, rows to send, received columns, and their sums
            elsewhere=(4 - 1 / problem.ranks) * read if model.aggregate_cached(1) else read,
        )


def _numbers(problem: Problem, order: str) -> int:
    """Return how many numbers per vertex ranks send in a step."""
    _, courses = FeatureParallel(order).arranged(problem)
    return sum(course.numbers for course in courses if course is not None)


def unsuited(problem: Problem) -> str:
    """Return why the model cannot be aggregated on columns; '' if it can."""
    model, kind = problem.model, problem.workload.model
    for number, spec in enumerate(model.layers, 1):
        if spec.counted:
            return (
                f"layer {number} is your own, and it is unknown which of its operations are its sum"
                " over edges"
            )
        if not spec.gathers_linearly:
            what = f"attention (heads: {spec.heads})" if spec.heads else "messages of its own"
            return (
                "a rank sums a few columns of all rows with weights that all ranks know, and layer"
                f" {number} of {kind} has {what}"
            )
    return ""


# -- the operations of a step ----------------------------------------------------------------------

#     on rows      |prepare l|                              |forward l|
#     exchange               |to_columns l|        |to_rows l|
#     on columns                          |aggregate l|
#
# Backward does the same operations on gradients, in the same order, with way 'b'. gnn/model.py
# counts the work of layers, and step.py their memory.


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


def beside_halos(problem: Problem, fastest: Strategy | None, does: str) -> list[str]:
    """Return a note that compares a strategy's bytes, without all-reduces of gradients and moments,
    with graph parallelism's halo. does: what the strategy does with these bytes."""
    if fastest is None:
        return []
    ours, halo = (s.predict(problem).bytes for s in (fastest, GraphParallel()))
    sent = sum(nbytes for op, nbytes in ours.items() if op not in ("all_reduce", "moments"))
    return [
        f"{fastest} {does} {show_bytes(sent)} per epoch; graph_parallel exchanges"
        f" {show_bytes(halo.get('halo', 0))} of halo rows"
    ]


# -- rows and columns of a rank --------------------------------------------------------------------


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
Choice = tuple[bool, Course | None]  # whether a layer multiplies first, and its course


class ByColumns(Model):
    """A model whose layers are split at their aggregation, which is on columns."""

    def narrow_at(self, layer: int) -> bool:
        return self.layers[layer - 1].projects_first

    def prepare(self, layer: int, rows: Number) -> BothPasses:
        """Return forward and backward work on a layer's input rows, before its aggregation."""
        spec = self.layers[layer - 1]
        if spec.projects_first:
            return self.project(layer, rows)
        played = self.preparation_record(spec, varies=layer > self.first_varying)
        return self._rowwise(played.passes, rows, self.prepare_launches(spec))

    def end(self, layer: int, rows: Number) -> BothPasses:
        """Return forward and backward work after a layer's aggregation."""
        spec = self.layers[layer - 1]
        plain = replace(spec, drops=False, activates=False, norm="none", sums=0)
        # only this layer is changed, because the next layer may do this layer's ReLU
        layers = (*self.layers[: layer - 1], plain, *self.layers[layer:])
        return replace(self, layers=layers).work(layer, rows, rows, 0.0, narrow=True)


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
    least: dict[bool, tuple[int, tuple[Choice, ...]]] = {False: (0, ())}
    for layer in range(1, len(model.layers) + 1):
        best: dict[bool, tuple[int, tuple[Choice, ...]]] = {}
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


def _choices(model: Model, layer: int, in_columns: bool, alternating: bool) -> Iterator[Choice]:
    """Yield the choices for a layer."""
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


def crossing(problem: Problem, width: int, op: str) -> Exchange:
    """Return the exchange of rows of `width` numbers for their columns ('to_columns'), or back."""
    rows, columns = shares(problem.stats.vertices, problem.ranks), shares(width, problem.ranks)
    sent = Outer(rows, columns, np.zeros_like(rows))
    return Exchange(sent if op == "to_columns" else sent.T, problem.model.itemsize)


def setup(problem: Problem, courses: Courses) -> Iterator[Op]:
    """Yield the exchanges before the first step, of features that are aggregated only once."""
    if courses[0] is None and problem.ranks > 1:
        for op in ("to_columns", "to_rows"):
            yield Op(f"input_{op}", work=crossing(problem, problem.model.features, op))


def _step(problem: Problem, model: ByColumns, courses: Courses) -> Iterator[Op]:
    """Yield the operations of one step, in order."""
    ranks, b, stats = problem.ranks, model.itemsize, problem.stats
    own, nothing = shares(stats.vertices, ranks), Outer.of([0] * ranks, True, 0)
    counts = LayerCounts(own, own, np.zeros(ranks), nothing)
    facts = dict.fromkeys(range(1, len(courses) + 1), counts)
    holds = Holds(problem, model, facts, ExchangeOptions(narrow=True))

    def rows_of(in_rows: bool, width: int) -> np.ndarray:
        """Return a rank's own rows; or its columns of all rows, as a number of whole rows of
        `width` [ranks]."""
        return own if in_rows else np.asarray(stats.vertices * shares(width, ranks) / width)

    def copied(width: int, pieces: bool) -> Compute:
        """Return the work to copy rows into pieces for other ranks, or out of received pieces."""
        if not pieces or ranks == 1:
            return Compute(itemsize=b)
        return Compute(elementwise_bytes=1.0 * COPY * own * width * b, itemsize=b)

    def prepare(layer: int, course: Course, direction: str) -> Op:
        rows = rows_of(course.cuts, model.layers[layer - 1].h_in)
        work = model.prepare(layer, rows)["fb".index(direction)]
        kept = partial(held_between, model, layer, own, course.width, direction)
        holding = kept if course.backward else None
        work = work + copied(course.width, course.cuts)
        return Op("prepare", direction, layer, work=work, holds=holding)

    def end(layer: int, course: Course | None) -> BothPasses:
        joins = course is None or course.joins
        work = model.end(layer, rows_of(joins, model.layers[layer - 1].h_out))
        if course is None:
            return work
        piece = copied(course.width, joins)
        return work + BothPasses(piece, piece if course.backward else copied(0, False))

    def sums(layer: int, course: Course, direction: str) -> Iterator[Op]:
        """Yield a layer's aggregation, with the exchanges before and after it."""
        before, after = (course.cuts, course.joins)[:: 1 if direction == "f" else -1]
        edges = stats.edges + stats.vertices * model.layers[layer - 1].self_edges
        columns = shares(course.width, ranks)
        most = int(columns.max())
        read = Gather(edges * columns / most, most, stats.vertices, stats.vertices)
        if before and ranks > 1:
            work = crossing(problem, course.width, "to_columns")
            yield Op("to_columns", direction, layer, work=work)
        summed = Compute(0.0, (read,), launches=1, itemsize=b)
        yield Op("aggregate", direction, layer, work=summed)
        if after and ranks > 1:
            yield Op("to_rows", direction, layer, work=crossing(problem, course.width, "to_rows"))

    def exchange(layer: int, direction: str) -> Iterator[Op]:
        course = courses[layer - 1]
        if course is not None and direction == "f":
            yield prepare(layer, course, "f")
            yield from sums(layer, course, "f")
        elif course is not None and course.backward:
            yield from sums(layer, course, "b")
            yield prepare(layer, course, "b")

    works = {layer: end(layer, course) for layer, course in enumerate(courses, 1)}
    return layer_by_layer(holds, works, exchange, own)


# -- memory ----------------------------------------------------------------------------------------


def held_between(
    model: ByColumns, layer: int, own: np.ndarray, width: int, direction: str
) -> OpMemory:
    """Return what a rank keeps, forward, because a layer is two autograd segments [ranks].

    These are inputs and outputs of the segments before and after the exchange that no product
    saves; step.py counts the layer itself. own: number of rows. width: numbers per aggregated
    row.
    """
    spec = model.layers[layer - 1]
    sums = spec.projects_first or not spec.matrices or model.sends_initial
    dropped = model.dropout > 0 and spec.drops and not spec.projects_first and spec.matrices < 2
    numbers = width * sums + model.rows(layer).numbers * dropped
    kept = 1.0 * own * numbers * model.itemsize
    return keeps(kept) if direction == "f" else OpMemory(0.0, -kept)
