"""Base classes of strategies that train on mini-batches."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.minibatch import Batches
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Resident, Strategy
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, check_buckets
from gnnplan.planner.strategies.minibatch import step as batchwise
from gnnplan.planner.strategies.minibatch.adjacency_store import Lists
from gnnplan.planner.strategies.minibatch.feature_store import Features
from gnnplan.planner.strategies.minibatch.memory import (
    features_by_server,
    lists_by_server,
    resident,
    sampler_memory,
)
from gnnplan.planner.strategies.minibatch.supply import Supply
from gnnplan.planner.strategies.program.program import Program
from gnnplan.planner.vocabulary.errors import SpecError

MOST_AHEAD = 1024


class OnBatches(Strategy):
    """A strategy on mini-batches, which ranks sample in line or with `prefetch` samplers ahead."""

    mode: ClassVar[str] = "mini"
    pushes: ClassVar[bool] = False  # whether ranks send each other sampled edges (P3)
    prefetch: int

    def batches(self, problem: Problem) -> Batches:
        """Return the batches; by default each rank samples its own share."""
        return problem.minibatches(tuple(range(problem.ranks)))

    def settle(self, problem: Problem) -> Self:
        return self

    @abstractmethod
    def store(self, problem: Problem) -> Features:
        """Return which rows each GPU caches, and which rank provides the others."""

    @abstractmethod
    def lists(self, problem: Problem) -> Lists | None:
        """Return the places of adjacency lists; None: every sampler has all lists."""

    def supply(self, problem: Problem) -> Supply:
        """Return the supply of batches, from a cache that keeps the last one."""

        def make() -> Supply:
            stored = self.store(problem), self.lists(problem)
            return Supply(problem, self.batches(problem), self.prefetch, *stored, self.pushes)

        return problem.cache.get_recent("supply", (self, problem), make, most=1)

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        without = "use another graph" if problem.workload.task == "link" else "use --mode full"
        check_batches(problem.workload, problem.stats, problem.ranks, without)
        if not 0 <= self.prefetch <= MOST_AHEAD:
            raise SpecError(
                f"{self.family}: prefetch is a number of batches, each made by a process of its"
                f" own, 0 to {MOST_AHEAD}, not {self.prefetch:,}; use 0 or 2"
            )

    def steps(self, problem: Problem) -> int:
        return per_epoch(problem.workload, problem.stats)

    def drawn_steps(self, problem: Problem) -> int:
        return self.batches(problem).known

    def preparation(self, problem: Problem) -> dict[str, float]:
        return self.supply(problem).filling()

    def host_memory(self, problem: Problem) -> Memory:
        supply = self.supply(problem)
        lists = lists_by_server(problem, supply.lists)
        return {"features": self.features_on_host(problem), "lists": lists} | sampler_memory(supply)

    @abstractmethod
    def features_on_host(self, problem: Problem) -> np.ndarray:
        """Return the bytes of features in each server's memory [servers]."""


class OnRows(OnBatches):
    """A strategy on mini-batches whose ranks load whole rows of features."""

    rounds_rows: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.minibatch"
    # without prefetch: exact; with prefetch: sampling and loads contend with training
    claim: ClassVar[float] = 0.1
    checkpoint: bool
    features: str

    @property
    @abstractmethod
    def exchange_options(self) -> ExchangeOptions:
        """The options by which layers exchange rows."""

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_buckets(self.name, problem, self.exchange_options.buckets)

    def with_less_memory(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)  # type: ignore[call-arg]

    def resident(self, problem: Problem) -> Resident:
        return resident(self.supply(problem))

    def features_on_host(self, problem: Problem) -> np.ndarray:
        return features_by_server(problem, self.store(problem), self.features)

    def program(self, problem: Problem) -> Program:
        return batchwise.program(self.supply(problem), self.exchange_options)


def check_batches(w: Workload, stats: GraphStats, ranks: int, without: str) -> None:
    """Raise SpecError if the graph has no batches of this size for this number of ranks.

    without: the remedy if the graph has no training vertices.
    """
    items = count_items(w, stats)
    each, name = ("an edge", "edges") if w.task == "link" else ("a seed", "training vertices")
    if not items:
        raise SpecError(f"mini-batches are drawn from {name}, and {stats.name} has none; {without}")
    if w.batch > items:
        raise SpecError(
            f"a batch is at most the {name} (batch: {w.batch:,}, {name}: {items:,}); use --batch"
            f" {items}"
        )
    if w.batch < ranks:
        raise SpecError(
            f"a batch has {each} for every rank (batch: {w.batch}, ranks: {ranks}); use --batch"
            f" {ranks} or more, or fewer ranks"
        )
