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

See also columns.py (operations), executor/strategies/feature_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.graph.disk_cache import Stopwatch
from gnnplan.planner.graph.partition import locality_order
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Resident, Strategy
from gnnplan.planner.strategies.layerwise import columns
from gnnplan.planner.strategies.layerwise.columns import (
    ByColumns,
    Courses,
    arranged,
    shares,
    why_untried,
)
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel
from gnnplan.planner.strategies.program.memory import machine_code
from gnnplan.planner.strategies.program.program import Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.units import show_bytes

ORDERS = ("coupled", "alternating")


@dataclass(frozen=True)
class FeatureParallel(Strategy):
    """Feature parallelism: aggregation on columns, all else on rows.

    order: 'coupled' (rows before and after every layer) or 'alternating' (outputs may stay in
    columns, with products before or after the aggregation, to send the fewest numbers).
    """

    order: str = "coupled"

    family: ClassVar[str] = "feature_parallel"
    claim: ClassVar[float] = 1e-6
    rounds_rows: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.feature_parallel"
    examples: ClassVar[tuple[Example, ...]] = (
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
        """Return a note that compares bytes with graph parallelism."""
        if fastest is None:
            return []
        ours, halo = fastest.predict(problem).bytes, GraphParallel().predict(problem).bytes
        exchanged = ours.get("to_columns", 0) + ours.get("to_rows", 0)
        return [
            f"{fastest} exchanges rows for columns and back, {show_bytes(exchanged)} per epoch;"
            f" graph_parallel exchanges {show_bytes(halo.get('halo', 0))} of halo rows"
        ]

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        if self.order not in ORDERS:
            raise SpecError(
                f"feature_parallel: order is 'coupled' or 'alternating', not {self.order!r}; use"
                " order='coupled'"
            )
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
        return columns.program(problem, *self.arranged(problem))

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        """Return every rank's tasks, after METIS has ordered the vertices for the ranks."""
        self.partitioned_s(problem)
        return super().schedule(problem, steps)

    def resident(self, problem: Problem) -> Resident:
        """Return what ranks have besides a step's tensors: all edges, and a share of all else."""
        model, stats = problem.model, problem.stats
        own = shares(stats.vertices, problem.ranks)
        read = model.inputs.stored_bytes(own)
        features = model.inputs.stored_bytes(model.constant_rows(own, own)) + model.own_index_bytes(
            own
        )
        edges = block(model, model.layers[0], *(stats.vertices,) * 2, stats.edges)
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
