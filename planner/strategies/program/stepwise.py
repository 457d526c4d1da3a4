"""Strategies whose ranks all do the same operations, step after step."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from gnnplan.planner.cluster.placement import Phase
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Prediction, Strategy
from gnnplan.planner.strategies.program.account import predict
from gnnplan.planner.strategies.program.program import Program, traffic
from gnnplan.planner.strategies.program.schedule import build_schedule
from gnnplan.planner.vocabulary.schedule import Schedule


@dataclass(frozen=True)
class Stepwise(Strategy):
    """A strategy that says what its ranks do as a `Program`; bytes, seconds and tasks follow."""

    @abstractmethod
    def program(self, problem: Problem) -> Program:
        """The operations of its steps."""

    def predict(self, problem: Problem) -> Prediction:
        return predict(problem, self.program(problem))

    def schedule(self, problem: Problem, steps: int) -> Schedule:
        return build_schedule(problem, self.program(problem), steps)

    def traffic(self, problem: Problem) -> list[Phase]:
        return traffic(self.program(problem), problem.ranks)
