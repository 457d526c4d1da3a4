"""Strategies that train on mini-batches: what they have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar

from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Strategy
from gnnplan.planner.strategies.layerwise.buckets import check_buckets
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.minibatch import memory as batchwise_memory
from gnnplan.planner.strategies.minibatch import step as batchwise
from gnnplan.planner.strategies.minibatch.host_memory import of_lists, of_rows
from gnnplan.planner.strategies.program.program import Program
from gnnplan.planner.vocabulary.errors import SpecError

MOST_AHEAD = 1024


class OnBatches(Strategy):
    """A rank samples batches, or its share of them, in line, or with `prefetch` samplers ahead."""

    mode: ClassVar[str] = "mini"
    prefetch: int

    def batches(self, problem: Problem) -> Batches:
        """Who samples what: each rank for itself."""
        return problem.minibatches(tuple(range(problem.ranks)))

    @abstractmethod
    def store(self, problem: Problem) -> batchwise.Features | None:
        """Which rows each GPU caches, and who provides the others; None: servers have all."""

    @abstractmethod
    def lists(self, problem: Problem) -> batchwise.Lists | None:
        """Where adjacency lists are; None: with every sampler."""

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        batchwise.check(problem)
        if not 0 <= self.prefetch <= MOST_AHEAD:
            raise SpecError(
                f"{self.family}: prefetch is a number of batches, each made by a process of its"
                f" own, 0 to {MOST_AHEAD}, not {self.prefetch:,}; use 0 or 2"
            )

    def steps(self, problem: Problem) -> int:
        return batchwise.steps(problem)

    def drawn_steps(self, problem: Problem) -> int:
        return self.batches(problem).known

    def preparation(self, problem: Problem) -> dict[str, float]:
        return batchwise.filling(problem, self.store(problem))


class OnRows(OnBatches):
    """A rank loads whole rows of features, and exchanges rows as `exchange_options` say."""

    rounds_rows: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.minibatch"
    # without prefetch: exact; with prefetch: what is ahead shares cores and ports with training
    claim: ClassVar[float] = 0.1
    checkpoint: bool
    features: str

    @property
    @abstractmethod
    def exchange_options(self) -> ExchangeOptions:
        """How layers exchange rows."""

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_buckets(self.name, problem, self.exchange_options.buckets)

    def with_less_memory(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)  # type: ignore[call-arg]

    def memory(self, problem: Problem) -> Memory:
        return batchwise_memory.memory(
            problem,
            self.built(problem),
            self.batches(problem),
            self.prefetch,
            self.store(problem),
            self.lists(problem),
        )

    def host_memory(self, problem: Problem) -> Memory:
        batches, lists = self.batches(problem), self.lists(problem)
        waiting = 0 if batchwise.lays_there(problem, batches.splits, lists) else self.prefetch
        return {
            "features": of_rows(problem, self.store(problem), self.features),
            "lists": of_lists(problem, lists),
            **batchwise_memory.of_samplers(problem, batches, waiting),
        }

    def program(self, problem: Problem) -> Program:
        return batchwise.program(
            problem,
            self.batches(problem),
            self.exchange_options,
            self.prefetch,
            self.store(problem),
            self.lists(problem),
        )
