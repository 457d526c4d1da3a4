"""The question behind a printed figure: its row, problem and strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Strategy
from gnnplan.planner.strategies.program.account import Prediction

Row = Mapping[str, str]  # column -> text, in the columns of rows.py
Testbeds = Callable[[Row], Cluster]  # a row -> its whole testbed
Params = Mapping[str, Any]  # the content of the column strategy_params
# a system as gnnplan's strategy: its name, and a function that returns its knobs
System = tuple[str, Callable[[Params, Problem], dict[str, Any]]]


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
