"""Feature parallelism: sums over edges on a few columns of all rows, the rest on a rank's rows.

Every rank holds all edges, an equal share of the vertices' rows, and while a layer is summed an
equal share of the columns of all rows. Two exchanges of all ranks with all ranks turn one into the
other. There are no parts and no halo; every rank sums over all edges, so the work is balanced
whatever the graph. METIS orders the vertices, so that a sum finds its rows in cache.

    rows     rank 0 |a0 a1 a2 a3|      columns   rank 0 |a0 a1|   rank 1 |a2 a3|
                    |b0 b1 b2 b3|      to_columns ->    |b0 b1|          |b2 b3|
             rank 1 |c0 c1 c2 c3|      <- to_rows       |c0 c1|          |c2 c3|

    coupled, one step
    compute  |forward 1|prepare 2|    |aggregate 2|    |forward 2|loss|backward 2|  ..
    comm                         |to_columns 2|    |to_rows 2|

Bytes per epoch for N vertices, P ranks, w_l numbers per row summed in layer l (the narrower of what
goes into its product and what comes out of it), b bytes per number, W weights:

    coupled       4 (P-1)/P N b sum_l w_l  +  2 (P-1) W b
    alternating   half of it where layers alternate A (X W) and (A X) W

A halo of H rows, all ranks together, costs graph parallelism with narrow=True 2 H w b per layer:
coupled sends fewer bytes where H > 2 (P-1)/P N, alternating where H > (P-1)/P N. A layer 1 whose
aggregate never changes crosses once, at set-up. Where dropout changes it, it crosses in every step,
half as much if it sums features, which have no gradient; there graph parallelism has the features
of its halo already.

`order='alternating'` leaves a layer by columns where all that is done before the next sum is done
number by number (bias, ReLU, dropout), and multiplies before or after the sum so that the fewest
numbers cross. GCN and SGC are such: SGC's layers without a matrix are summed one after the other
on columns, which is propagation apart from products. GraphSAGE, GIN and GCNII read own rows or
multiply twice in a layer, which needs rows, so there both orders are the same.

Exact: the gradient of one process, to rounding; sums and products are the same in another order.

Layers must sum over edges with fixed weights: attention weighs an edge by all columns of its rows.

Source: NeutronTP (VLDB 2024), which decouples propagation from products (another model, but for
SGC); RDM (IPDPS 2023) for the two orders of a product of three matrices. The bytes of `alternating`
are our derivation.

See also columns.py (operations), executor/strategies/feature_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Self

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.graph.kept import Stopwatch
from gnnplan.planner.graph.partition import locality_order
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Memory, Strategy
from gnnplan.planner.strategies.layerwise import columns
from gnnplan.planner.strategies.layerwise.columns import (
    ByColumns,
    Courses,
    arranged,
    shares,
    why_untried,
)
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel
from gnnplan.planner.strategies.program.memory import on_ranks
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Schedule
from gnnplan.planner.vocabulary.units import show_bytes

ORDERS = ("coupled", "alternating")


@dataclass(frozen=True)
class FeatureParallel(Strategy):
    """Sums over edges on columns, all else on rows.

    order: 'coupled' (rows before and after every layer) or 'alternating' (layers may be left by
    columns, with products before or after the sum, so that the fewest numbers cross).
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
        """Its bytes beside those of graph parallelism."""
        if fastest is None:
            return []
        ours, halo = fastest.predict(problem).bytes, GraphParallel().predict(problem).bytes
        crossing = ours.get("to_columns", 0) + ours.get("to_rows", 0)
        return [
            f"{fastest} turns rows into columns and back in {show_bytes(crossing)} per epoch;"
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
        """The model in the order in which it is trained, and how rows go through its layers."""
        return arranged(problem.model, self.order == "alternating")

    def preparation(self, problem: Problem) -> dict[str, float]:
        features_s = setup_s(problem, columns.setup(problem, self.arranged(problem)[1]))
        return {"partitioning": _ordered_s(problem), "features": features_s}

    def program(self, problem: Problem) -> Program:
        return columns.program(problem, *self.arranged(problem))

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        """Has METIS order the vertices first, for ranks to find the order."""
        _ordered_s(problem)
        return super().schedule(problem, steps)

    def memory(self, problem: Problem) -> Memory:
        """Bytes per rank by use: all edges, and an equal share of all else."""
        model, stats = problem.model, problem.stats
        own = shares(stats.vertices, problem.ranks)
        read = model.inputs.held(own)
        features, spec = read + model.own_sorted(own), model.layers[0]
        if model.aggregate_cached(1):
            features = model.inputs.held(own * (2 if spec.reads_own else 1))
        edges = block(model, spec, *(stats.vertices,) * 2, stats.edges)
        return on_ranks(
            problem,
            self.built(problem),
            features=features,
            graph=edges + 16 * own,
            # at set-up: rows, those that leave, their columns, and the sums of these
            elsewhere=(4 - 1 / problem.ranks) * read if model.aggregate_cached(1) else read,
        )


def _ordered_s(problem: Problem) -> float:
    """How long it took to order the vertices [s]; the order is kept on the disk."""
    with Stopwatch() as watch:
        if problem.graph is not None:
            locality_order(problem.graph, problem.method)
    return watch.seconds


def _numbers(problem: Problem, order: str) -> int:
    """Numbers per vertex that cross in a step."""
    _, courses = FeatureParallel(order).arranged(problem)
    return sum(course.numbers for course in courses if course is not None)


def unsuited(problem: Problem) -> str:
    """Why the model cannot be summed on columns; '' if it can."""
    model, kind = problem.model, problem.workload.model
    for number, spec in enumerate(model.layers, 1):
        if spec.counted:
            return (
                f"layer {number} is your own, and it cannot be told which of its work is its sum"
                " over edges"
            )
        if not spec.gathers_linearly:
            what = f"attention (heads: {spec.heads})" if spec.heads else "messages of its own"
            return (
                "a rank sums a few columns of all rows with weights that all ranks know, and layer"
                f" {number} of {kind} has {what}"
            )
    return ""
