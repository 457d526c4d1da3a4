"""The question behind a printed figure: its row, its strategy, and a problem for others' code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.gnn.kinds import LayerSpec
from gnnplan.planner.gnn.layer import LayerRecord
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.trace import LOCAL, NOTHING, ROWS, SOURCES, Amount, Work
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.strategies.program.account import Prediction

T = TypeVar("T")
Row = Mapping[str, str]  # column -> text, in the columns of published.py
Testbeds = Callable[[Row], Cluster]  # a row -> its whole testbed
Params = Mapping[str, Any]  # the content of the column strategy_params
# a system as gnnplan's strategy: its name, and a function that returns its knobs
System = tuple[str, Callable[[Params, Problem], dict[str, Any]]]


def params_of(row: Row) -> Params:
    """Return the content of the row's strategy_params."""
    params: Params = json.loads(row["strategy_params"] or "{}")
    return params


class Skip(Exception):
    """The reason why a row is not predicted."""


@dataclass(frozen=True)
class Question:
    """A strategy for a problem, and the row that names both."""

    problem: Problem
    strategy: Strategy
    row: Row

    @property
    def prediction(self) -> Prediction:
        """The closed form's prediction, computed once for all rows with the same question."""
        problem = self.problem
        key = (
            type(problem),
            problem.stats.hash,
            problem.workload,
            problem.model,
            problem.cluster.model_dump_json(),
            problem.method,
            self.strategy,
        )
        if key not in _predictions:
            _predictions[key] = self.strategy.predict(problem)
        return _predictions[key]


_predictions: dict[object, Prediction] = {}


# -- element-wise work of other people's code ------------------------------------------------------

# Element-wise work of other people's code; the testbeds' constants were fitted with it.
#
# DGL and PyG run operations one by one: rows are copied before and after a product, and sums are
# multiplied, biased and activated in separate passes. `TheirProblem` has these passes in addition
# to gnnplan's (planner/gnn/layer.py).


# passes over memory
COPIED = 2  # over rows around a product
APPLIED, APPLIED_BACKWARD = 3, 2  # over outputs; the backward pass has the sum of both
ACTIVATED = 2  # over inputs
# With a norm. Torch 1.8's own kernels of batch norm, for more than 131,070 rows (cuDNN has fewer),
# go through a column at a time: a GPU moves 32 bytes for each number, eight times as much.
NORMED = {"layer": 6, "batch": 2 + 8 * 4}
MIXED, MIXED_BACKWARD = 3, 7  # over outputs, by GCNII
DROPPED = 6  # over inputs with dropout, in the backward pass


class TheirModel(Model):
    """A GNN with the element-wise operations of other people's code."""

    own_copy_passes = 0  # COPIED includes these passes

    def layer_record(self, layer: int, narrow: bool = False, **how: bool) -> LayerRecord:
        ours, spec = super().layer_record(layer, narrow, **how), self.layers[layer - 1]
        narrow = narrow and self.narrow_at(layer)
        applied = APPLIED * (spec.weights > 0) + MIXED * self.sends_initial
        width = spec.multiplied if narrow or self.rows(layer).multiplied_first else spec.h_in
        per_source = 0 if self.aggregate_cached(layer) else COPIED * width
        per_source += 0 if narrow else _activated(spec)
        again = APPLIED_BACKWARD + MIXED_BACKWARD * self.sends_initial
        projected = (COPIED * (spec.h_in + spec.multiplied) + _activated(spec)) * LOCAL
        return replace(
            ours,
            passes=self._theirs(
                ours.passes,
                applied * spec.h_out * ROWS + per_source * SOURCES,
                again * spec.h_out * ROWS,
            ),
            project=self._theirs(ours.project, projected),
        )

    @property
    def encoder_record(self) -> LayerRecord:
        assert self.encoder
        ours, (h_in, h_out) = super().encoder_record, self.encoder
        copied = COPIED * (h_out + h_in * (not self.inputs.multiplied_first)) * ROWS
        return replace(ours, passes=self._theirs(ours.passes, copied))

    @property
    def decoder_record(self) -> LayerRecord:
        assert self.decoder
        ours = super().decoder_record
        copied = (COPIED * sum(self.decoder) + _activated(self.decoder_inputs)) * ROWS
        return replace(ours, passes=self._theirs(ours.passes, copied))

    def _theirs(
        self, ways: tuple[Work, Work], numbers: Amount, again: Amount = NOTHING
    ) -> tuple[Work, Work]:
        """Return the work with element-wise passes over `numbers`; `again`: more in backward."""
        dropped = DROPPED * ways[0].amounts.get("hash_ops", NOTHING)
        return self._with(ways[0], numbers), self._with(ways[1], numbers + again + dropped)

    def _with(self, work: Work, numbers: Amount) -> Work:
        return replace(work, amounts=work.amounts | {"elementwise_bytes": self.itemsize * numbers})


def _activated(spec: LayerSpec) -> int:
    """Return the numbers per row that norm and activation read or write."""
    return NORMED.get(spec.norm, ACTIVATED) * spec.activates * spec.h_in


@dataclass(frozen=True, eq=False)
class TheirProblem(Problem):
    """A problem for other people's code.

    aggregates_first: whether layers always aggregate before they multiply.
    """

    aggregates_first: bool = False
    uses_cuda_graph = False

    def _described(self) -> Model:
        ours = super()._described()
        ours = ours.aggregating_first if self.aggregates_first else ours
        return made(TheirModel, ours, in_place=False, on_gpu=False)


def made(kind: type[T], like: Any, **changes: Any) -> T:
    """Return the dataclass `kind` with the fields of an object of a base class, some changed."""
    values = {each.name: getattr(like, each.name) for each in fields(like) if each.init}
    return kind(**values | changes)
