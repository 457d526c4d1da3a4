"""Base class of strategies whose ranks own parts of the graph and exchange halo rows.

These strategies differ in their `exchange_options` only; all other methods of `Strategy` are
computed from the options. A strategy of another package derives from `OnParts` as graph_parallel
and bns do; its executor is executor/strategies/graph_parallel.py, which reads the same options.

If rows that are not sent vanish, a rank builds new blocks in every step, without the edges of these
rows (`lay`), and keeps the full blocks for evaluation. The weights of edges from received rows grow
in proportion, which is correct only if a layer is a weighted sum over its edges.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from gnnplan.planner.gnn.model import block
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Resident, Strategy
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, check_buckets
from gnnplan.planner.strategies.layerwise.memory import resident
from gnnplan.planner.strategies.layerwise.step import Batches
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Compute

# To select a layer's edges (executor/layers/kernels/block.py, Block.among): number of kernels, and
# bytes read and written per edge. Row, position and weight of an edge are gathered, in both
# directions.
LAUNCHES, LAID = 30, 230.0


class OnParts(Strategy):
    """A strategy whose ranks own parts of the graph and exchange halo rows."""

    rounds_rows: ClassVar[bool] = True
    adapts: ClassVar[bool] = False  # whether the executor supports the adaptive codec (gnn/rows.py)

    @property
    @abstractmethod
    def exchange_options(self) -> ExchangeOptions:
        """The options by which layers exchange rows."""

    @property
    def exact(self) -> bool:
        options = self.exchange_options
        return options.policy.sends_all and not options.policy.lags and not options.codec.packs

    @property
    def uses_cuda_graph(self) -> bool:
        return True

    @property
    def carries(self) -> str:
        policy, carried = self.exchange_options.policy, list[str]()
        if policy.lags:
            carried.append("halo rows and gradients of the step before")
        if policy.keeps_received:
            carried.append("halo rows and gradients as last received")
        if self.codec.carries:
            carried.append(self.codec.carries)
        return " and ".join(carried)

    def approximates_as(self, other: Strategy) -> bool:
        def lossy(options: ExchangeOptions) -> ExchangeOptions:
            return replace(options, narrow=False, checkpoint=False, buckets=1)

        mine = lossy(self.exchange_options)
        return isinstance(other, type(self)) and mine == lossy(other.exchange_options)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield nothing: the effect on accuracy is unknown, so only users choose the strategy."""
        return iter(())

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return ""

    def with_less_memory(self) -> Strategy | None:
        if "checkpoint" not in self.knobs() or self.exchange_options.checkpoint:
            return None
        return replace(self, checkpoint=True)  # type: ignore[call-arg]  # a knob, as checked above

    def check(self, problem: Problem) -> None:
        options = self.exchange_options
        self.check_mode(problem)
        if options.policy.vanishes:
            _check_sums(self.family, problem)
        check_buckets(self.name, problem, options.buckets)
        options.codec.check(self.name, problem.workload.precision, self.adapts)
        self.check_vertices(problem)

    def layout(self, problem: Problem) -> Layout | EstimatedLayout:
        return problem.layout()

    def layouts(self, problem: Problem) -> Batches:
        """Return the layouts of an epoch's batches, or of trimmed rows; (): the whole layout."""
        return ()

    def turn(self, problem: Problem, step: int) -> int:
        """Return the number of the batch that a step trains on."""
        return 0

    def partitioned_s(self, problem: Problem) -> float:
        return problem.seconds_of(self.layout(problem))

    def resident(self, problem: Problem) -> Resident:
        options = self.exchange_options
        stays = resident(problem, self.layout(problem), options, self.layouts(problem))
        if options.policy.vanishes:
            stays.data["graph"] += _cut_blocks(problem, options)
        return stays

    def program(self, problem: Problem) -> Program:
        rows, options, batches = self.layout(problem), self.exchange_options, self.layouts(problem)
        program = layerwise.program(problem, rows, options, batches, partial(self.turn, problem))
        return _with_laying(problem, program) if options.policy.vanishes else program


# -- rows that vanish ------------------------------------------------------------------------------


def _check_sums(family: str, problem: Problem) -> None:
    """Raise SpecError if a layer does more with its edges than to sum over them."""
    for number, layer in enumerate(problem.model.layers, 1):
        softmax = layer.heads or layer.sums > 1
        if softmax or (layer.counted and not layer.counted.linear):
            raise SpecError(
                f"{family}: a sample stands for all edges only in a weighted sum over them, and"
                f" layer {number} of {problem.workload.called} has"
                f" {'a softmax' if softmax else 'none'}; use graph_parallel or pipegcn, or another"
                " model"
            )


def _with_laying(problem: Problem, program: Program) -> Program:
    """Return the program with `lay` at the begin of each step, if any layer exchanges rows."""
    layers = list(_exchanging_layers(problem))
    if not layers:
        return program
    edges = sum((problem.layout().facts(layer).edges for layer in layers), np.zeros(problem.ranks))
    lay = Op("lay", work=Compute(elementwise_bytes=LAID * edges, launches=LAUNCHES * len(layers)))
    return replace(program, ops=lambda name: [lay, *program.ops(name)])


def _cut_blocks(problem: Problem, options: ExchangeOptions) -> np.ndarray:
    """Return the bytes of a step's blocks, which exist besides the full blocks [ranks]."""
    model, total = problem.model, np.zeros(problem.ranks)
    for layer in _exchanging_layers(problem):
        f, spec = options.facts(problem, problem.layout(), layer), model.layers[layer - 1]
        # sampled edges have weights, even if the layer's own edges have none
        weights = 2 * model.itemsize * f.edges * (not spec.weighs_edges)
        total = total + block(model, spec, f.rows, f.sources, f.edges) + weights
    return total


def _exchanging_layers(problem: Problem) -> Iterator[int]:
    """Yield the layers before which ranks exchange rows in every step."""
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        if problem.layout().exchanges_rows(layer):
            yield layer
