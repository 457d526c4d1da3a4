"""The question of a printed figure to the model: its row, problem and strategy."""

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
Params = Mapping[str, Any]  # as strategy_params has them
# a system as our strategy: its name, and its knobs
System = tuple[str, Callable[[Params, Problem], dict[str, Any]]]


class Skip(Exception):
    """Why a row is not predicted."""


@dataclass(frozen=True)
class Question:
    """A strategy for a problem, and the row that asks for it."""

    problem: Problem
    strategy: Strategy
    row: Row

    @property
    def prediction(self) -> Prediction:
        """The closed form; computed once for all rows that ask the same."""
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
