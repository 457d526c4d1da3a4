"""Base classes of strategies that train on mini-batches, and the operations of one mini-batch.

Data parallelism and GSplit sample, load, then compute the layers:

    each rank samples for itself (data parallelism)
    host     |draw|lay|
    copy               |load|
    compute                 |forward 1 .. L|loss|backward L .. 1|            |update|
    reduce                                                       |all_reduce|

    groups that split a batch (GSplit)
    host     |draw L|ids L|draw L-1|ids L-1| .. |lay|
    copy                                             |load|
    comm                                                  |halo 1 (features)|  then graph parallel

    draw     sample a layer's edges
    ids      tell owners how many of their vertices the frontier has reached (8 bytes per peer),
             and then which (8 bytes each)
    push     if layer 1 is split by sources: send its edges to the owners of their sources (4 bytes
             per number)
    lay      lay out edges as blocks
    load     copy rows of features to the device; to a GPU also the blocks
    wait     with `prefetch` k, a batch is loaded during the training of the previous batch, and k
             samplers of the rank prepare the next k batches, one each; the rank's time of waiting

If a GPU samples for itself, `draw` and `lay` are its computation (supply.py), edges stay on
the GPU, and `load` copies features to it and the ids of rows back.

With a feature store (feature_store.py) `load` copies the rows that are in the server's memory and
in no cache. More operations follow:

    compute        |pick|                rows of the GPU's own cache
    copy      |load|
    comm                |ask|fetch|      rows that other ranks provide, asked for by id: how many
                                         (8 bytes per rank), then which (8 bytes each)

With spread adjacency lists (adjacency_store.py) samplers ask each other for neighbours, layer by
layer. layerwise/step.py has the operations of the layers.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar, Literal, Self

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Resident, Strategy
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, check_buckets
from gnnplan.planner.strategies.minibatch.adjacency_store import NEIGHBOUR, Lists
from gnnplan.planner.strategies.minibatch.feature_store import Features
from gnnplan.planner.strategies.minibatch.memory import (
    features_by_server,
    lists_by_server,
    resident,
    sampler_memory,
)
from gnnplan.planner.strategies.minibatch.supply import Supply, sampled_on_device, sized_exchange
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Outer
from gnnplan.planner.vocabulary.schedule import Compute

# -- the operations of one mini-batch --------------------------------------------------------------


# Time to split off a pushed edge for its owner and put it in its place there, with the partial sums
# in theirs, in times to lay out an edge. From 15 runs on six graphs on an AMD EPYC, 2026-11-29.
RELAID = 2
# Time to find a frontier row's owner, and its place among the owner's rows, in times to draw an
# edge. From seven graphs, as above.
OWNED = 0.75


def step(supply: Supply, batch: MiniBatch, options: ExchangeOptions) -> Iterator[Op]:
    """Yield the operations of one step, in order."""
    problem, splits = supply.problem, batch.splits
    layers = range(1, problem.workload.layers + 1)
    facts = [batch.facts(layer) for layer in layers]
    all_edges = np.sum([f.edges for f in facts], axis=0)
    # whether a GPU's sampling is counted as computation; clusters may have a measured rate instead
    is_counted = supply.lays_there and not problem.cluster.device_sampler_rates
    if is_counted:
        # one thread samples a batch and then loads it
        lane: Literal["host", "copy"] = "copy" if supply.prefetch else "host"
        yield from sampled_on_device(problem, batch, lane)
        yield from supply.reading(all_edges, ahead=lane)
    elif not splits:
        yield from supply.drawing(batch, all_edges)
    peers = Outer.of(batch.servers, True, 1)
    for layer in reversed(layers) if splits else ():
        drawn, asks = batch.sampled(layer), batch.asks(layer)
        yield supply.sampled("draw", drawn + OWNED * asks * batch.facts(layer).sources, layer)
        yield from supply.reading(drawn, layer)
        if asks:
            yield from sized_exchange(
                "ids", batch.facts(layer).returned, peers, layer=layer, ahead="host"
            )
    if batch.pushed is not None:
        yield from sized_exchange("push", batch.pushed, peers, ahead="host", itemsize=NEIGHBOUR)
    if not is_counted:
        relaid = 0 if batch.pushed is None else RELAID * batch.sampled(1)
        yield supply.laying([f.edges for f in facts], relaid)
    yield Op("load", work=supply.copied(batch, facts), ahead="copy" if supply.prefetch else "")
    if supply.prefetch:
        # no time if the batch is loaded already
        yield Op("wait", work=Compute(), idle=True)
    yield from supply.gathered(batch)
    if batch.exchanges_rows(1) and problem.model.first_varying == 1:
        halo = layerwise.send_features(problem, batch, facts[0].sends, "halo")
        yield replace(halo, direction="f", layer=1)
    yield from layerwise.step(problem, batch, options, scored=batch.scored)


def program(supply: Supply, options: ExchangeOptions) -> Program:
    """Return the program, with a step for each mini-batch."""
    batches, prefetch = supply.batches, supply.prefetch
    return Program(
        batches.first,
        batches.steps,
        batches.at,
        lambda batch: list(step(supply, batch, options)),
        supply.fill,
        # the batch being loaded, and `prefetch` batches being sampled; a GPU samples and loads one
        lead=min(prefetch, 1) if supply.lays_there else prefetch and prefetch + 1,
        samplers=supply.samplers,
    )


# -- base classes of strategies --------------------------------------------------------------------


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
        return program(self.supply(problem), self.exchange_options)


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
        more = "" if items < ranks else f" --batch {ranks} or more, or"
        raise SpecError(
            f"a batch has {each} for every rank (batch: {w.batch}, ranks: {ranks}); use{more}"
            " fewer ranks"
        )
