"""Base classes of strategies that train on mini-batches, and the operations of one mini-batch.

Data parallelism and GSplit sample, load, then compute the layers (drawn in data_parallel.py and
gsplit.py):

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

    pick     copy rows of the GPU's own cache
    ask      tell other ranks how many of their rows are needed (8 bytes per rank), and then which
             (8 bytes each)
    fetch    receive these rows

With spread adjacency lists (adjacency_store.py) samplers ask each other for neighbours, layer by
layer. layerwise/step.py has the operations of the layers.

A plan proposes the number of samplers per rank, the size of caches, and the placement of graph
data. With one sampler an epoch takes as long as sampling, loading or training, whichever is
longest. k samplers take a k-th of the time, so a plan proposes the first of 1, 2, 4, .. samplers
with which sampling is no longer the longest, if there are enough cores and memory. If graph data do
not fit in every server's memory, candidates spread the features, and the lists too if necessary.
The memory that remains caches lists of other servers (P3, Sec. 3.4).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeVar

import numpy as np

from gnnplan.planner.cluster.spec import MOST_PAIRED
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.partition import EPOCHS
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Range, Resident, Rules, Strategy
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions, check_buckets, pays
from gnnplan.planner.strategies.minibatch.adjacency_store import Lists, hashed, lists_bytes
from gnnplan.planner.strategies.minibatch.feature_store import (
    HOT,
    Features,
    Slice,
    Store,
    feature_store,
    row_bytes,
)
from gnnplan.planner.strategies.minibatch.supply import (
    Supply,
    all_rows_bytes,
)
from gnnplan.planner.strategies.program.account import predict
from gnnplan.planner.strategies.program.program import Op, Program, Step
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Outer
from gnnplan.planner.vocabulary.schedule import Compute
from gnnplan.planner.vocabulary.text import show_size
from gnnplan.planner.vocabulary.units import show_bytes

# -- base classes of strategies --------------------------------------------------------------------


class OnBatches(Strategy):
    """A strategy on mini-batches, which ranks sample in line or with `prefetch` samplers ahead."""

    mode = "mini"
    pushes = False  # whether ranks send each other sampled edges (P3)
    alone = False  # whether a rank lays out its batches without data of other ranks
    allowed: ClassVar[Rules] = {
        "prefetch": Range("a number of batches, each made by a process of its own", 0, 1024),
        "cache": Range("a number of bytes per GPU", 0),
        "hot": HOT,
        "features": {"everywhere": "every server has all rows", "spread": "a server has some"},
        "structure": {"everywhere": "every sampler has all lists", "spread": "a sampler has some"},
        "structure_cache": Range("a number of bytes per server", 0),
    }
    # knobs (data_parallel.py, gsplit.py); these are the values in a family without the knob
    prefetch: int = 0
    cache: int = 0
    shared_cache: bool = False
    hot: str = "frequency"
    features: str = "everywhere"
    structure: str = "everywhere"
    structure_cache: int = 0
    presample: int = EPOCHS

    def batches(self, problem: Problem) -> Batches:
        """Return the batches; by default each rank samples its own share."""
        return problem.minibatches(tuple(range(problem.ranks)))

    def slices(self, problem: Problem) -> tuple[Slice, ...]:
        """Return the features that each rank reads; (): all columns of its own rows."""
        return ()

    def store(self, problem: Problem) -> Features:
        """Return which rows each GPU caches, and which rank provides the others."""
        knobs = self.cache, self.hot, self.features, self.shared_cache, self.presample
        return feature_store(problem, self.batches(problem), *knobs, self.slices(problem))

    def by_rank(self, problem: Problem) -> bool:
        """Whether spread lists are each at a rank; else each is at a server."""
        return problem.server_count == 1

    def lists(self, problem: Problem) -> Lists | None:
        """Return the places of adjacency lists; None: every sampler has all lists."""
        knobs = self.structure, self.by_rank(problem), self.structure_cache, self.hot
        return hashed(problem, self.batches(problem), *knobs)

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
        if problem.workload.module and problem.workload.module.norms_edges:
            raise SpecError(
                f"{self.name}: a batch norm of edges takes moments of all edges, and each layer of"
                " a batch has edges of its own; use --mode full, or norm rows of vertices instead"
            )
        self._check_places(problem)

    def _check_places(self, problem: Problem) -> None:
        """Raise SpecError if the knobs on the places of features and lists do not fit together."""
        name, room, lists = self.name, int(problem.cluster.device.memory), self.structure_cache
        if self.cache > room:
            raise SpecError(
                f"{name}: the cache is larger than the device's memory (cache:"
                f" {show_bytes(self.cache)}, device.memory: {show_bytes(room)}); use"
                f" cache={show_size(room // 2)!r} or less"
            )
        if self.shared_cache and self.features == "spread" and problem.ranks > MOST_PAIRED:
            raise SpecError(
                f"{name}: where rows come from caches of the same server and from other servers, a"
                f" plan looks at every pair of ranks, of at most {MOST_PAIRED:,} (ranks:"
                f" {problem.ranks:,}); use shared_cache=False, features='everywhere', or fewer"
                " ranks"
            )
        if self.shared_cache and not self.cache:
            raise SpecError(
                f"{name}: shared_cache needs a cache to share (shared_cache: True, cache: 0); use"
                " cache='1GB', or shared_cache=False"
            )
        if self.structure == "spread" and problem.workload.task == "link":
            raise SpecError(
                f"{name}: batches of link prediction are drawn from all edges, and with"
                " structure='spread' a sampler has some; use structure='everywhere'"
            )
        if lists and self.structure == "everywhere":
            raise SpecError(
                f"{name}: every sampler has all adjacency lists, so there are none to cache"
                f" (structure_cache: {lists:,}, structure: everywhere); use structure='spread', or"
                " structure_cache=0"
            )

    def steps(self, problem: Problem) -> int:
        return per_epoch(problem.workload, problem.stats)

    def drawn_steps(self, problem: Problem) -> int:
        return self.batches(problem).known

    def preparation(self, problem: Problem) -> dict[str, float]:
        return self.supply(problem).filling()

    def host_memory(self, problem: Problem) -> Memory:
        return {"features": self.features_on_host(problem)} | self.supply(problem).on_host()

    @abstractmethod
    def step(self, problem: Problem, batch: MiniBatch) -> Step:
        """Return the operations of the step on a batch."""

    def program(self, problem: Problem) -> Program:
        supply, prefetch = self.supply(problem), self.prefetch
        # batches being sampled, and the batch being loaded; a GPU samples and loads one. P3 loads
        # in the batch's own step.
        ahead = min(prefetch, 1) if supply.lays_there else prefetch + (prefetch and not self.pushes)
        batches, step = supply.batches, partial(self.step, problem)
        return Program(
            batches.first,
            batches.steps,
            batches.at,
            step,
            supply.fill,
            lead=ahead,
            samplers=supply.samplers,
        )

    @abstractmethod
    def features_on_host(self, problem: Problem) -> np.ndarray:
        """Return the bytes of features in each server's memory [servers]."""


class OnRows(OnBatches):
    """A strategy on mini-batches whose ranks load whole rows of features."""

    rounds_rows = True
    executor = "gnnplan.executor.strategies.minibatch"
    # without prefetch: exact; with prefetch: sampling and loads contend with training
    claim = 0.1
    checkpoint: bool
    buckets: int

    @property
    def exchange_options(self) -> ExchangeOptions:
        """The options by which layers exchange rows."""
        return ExchangeOptions.of(self)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        check_buckets(self.name, problem, self.buckets)

    def with_less_memory(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)  # type: ignore[call-arg]

    def resident(self, problem: Problem) -> Resident:
        return self.supply(problem).resident()

    def features_on_host(self, problem: Problem) -> np.ndarray:
        servers, store = list(dict.fromkeys(problem.servers)), self.store(problem)
        if isinstance(store, Store) and store.home is not None:
            rows = [np.flatnonzero(store.home == server) for server in servers]
            return np.array([float(problem.features_bytes(ids).sum()) for ids in rows])
        spread = self.features == "spread" and problem.graph is None
        share = 1 / len(servers) if spread else 1.0
        return np.full(len(servers), share * all_rows_bytes(problem, problem.features_bytes))

    def step(self, problem: Problem, batch: MiniBatch) -> Step:
        supply, peers = self.supply(problem), Outer.of(batch.servers, True, 1)
        facts = [batch.facts(layer) for layer in range(1, batch.layers + 1)]
        ops = list(supply.sampling(batch, facts, batch.pushed, peers))
        load = Op("load", work=supply.copied(batch, facts), ahead="copy" if self.prefetch else "")
        ops.append(load)
        if self.prefetch:
            # no time if the batch is loaded already
            ops.append(Op("wait", work=Compute(), idle=True))
        ops += supply.gathered(batch)
        if batch.exchanges_rows(1) and problem.model.first_varying == 1:
            halo = layerwise.send_features(problem, batch, facts[0].sends, "halo")
            ops.append(replace(halo, direction="f", layer=1))
        layers = layerwise.step(problem, batch, self.exchange_options, scored=batch.scored)
        return [*ops, *layers]


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


S = TypeVar("S", bound=OnBatches)
MOST_SAMPLERS = 32  # largest number of samplers per rank that is proposed
SHORTER_BY = 0.98  # the samplers are doubled only if the epoch becomes shorter by this factor
ROUNDED = 10**8  # proposed caches of this size or more are cut to two digits [B]


def variants(problem: Problem, plain: S, **sharing: bool) -> Iterator[S]:
    """Yield the strategy without and with a cache, each with the best number of samplers, and all
    of these with buckets if buckets pay.

    sharing: knobs of one more variant with a cache."""
    proposed = [plain]
    if cache := proposed_cache(problem, plain):
        proposed.append(replace(plain, cache=cache))  # type: ignore[call-arg]
        if sharing:
            proposed.append(replace(plain, cache=cache, **sharing))  # type: ignore[call-arg]
    proposed = [with_enough_samplers(problem, variant) for variant in proposed]
    yield from proposed
    layers = problem.workload.layers
    bucketed = [replace(each, buckets=layers) for each in proposed]  # type: ignore[call-arg]
    if pays(problem, proposed[-1], bucketed[-1]):
        yield from bucketed


def most_samplers(problem: Problem, strategy: OnBatches) -> int:
    """Return the largest number of samplers per rank that have a core each: a power of two, or 0.

    If GPUs sample, they sample in line (0), or one thread may sample and load ahead (1).
    """
    if problem.cluster.sampler == "device":
        return int(strategy.alone and problem.cost.cores_each >= 2)
    cores = int(min(problem.cost.cores_each - 1, MOST_SAMPLERS))
    return 2 ** (cores.bit_length() - 1) if cores > 0 else 0


def with_one_sampler(problem: Problem, in_line: S) -> S:
    """Return the strategy with one sampler per rank, if there is a core and memory for it."""
    ahead = _with_samplers(problem, in_line, 1) if most_samplers(problem, in_line) else None
    return ahead or fitting(problem, in_line)


def with_enough_samplers(problem: Problem, one: S) -> S:
    """Return the strategy with the best number of samplers; `one` has one sampler, or none.

    An epoch is shortest with the most samplers. The best number is the fewest samplers that finish
    sampling within that epoch, or fewer if memory has no room for their batches.
    """
    most, settled = most_samplers(problem, one), one.settle(problem)
    if not one.prefetch or most < 2 or not settled.suits(problem):
        return one
    program = settled.built(problem)
    with_most = predict(problem, replace(program, samplers=most))
    ops = program.ops(next(iter(program.known())))
    sampling = {op.label(0).kind for op in ops if op.lane == "host"}
    sampling_s = sum(float(with_most.by_op[kind]) for kind in sampling)
    needed = int(np.ceil(SHORTER_BY * sampling_s / float(with_most.epoch_s)))
    doublings = min(most.bit_length() - 1, max(needed - 1, 0).bit_length())
    fewer = (_with_samplers(problem, one, 2**power) for power in range(doublings, 0, -1))
    return next(filter(None, fewer), one)


def _with_samplers(problem: Problem, strategy: S, samplers: int) -> S | None:
    """Return the strategy with this number of samplers, and data spread only as far as necessary.

    None if prefetched batches do not fit, on a CPU in the rank's memory, else in the server's.
    """
    several = fitting(problem, replace(strategy, prefetch=samplers))  # type: ignore[call-arg]
    settled = several.settle(problem)
    if not settled.suits(problem):
        return several
    in_ranks = problem.on_cpu
    return (
        several if (settled.fits(problem) if in_ranks else several.fits_servers(problem)) else None
    )


def fitting(problem: Problem, strategy: S) -> S:
    """Return the strategy, or the least spread variant that fits in servers' memories.

    If no variant fits, return the variant that spreads most.
    """
    if problem.cluster.graph_memory == np.inf or not strategy.settle(problem).suits(problem):
        return strategy
    for tried in (strategy, *strategy.more_spread(problem)):
        if tried.fits_servers(problem):
            break
    return tried


def lists_cache(problem: Problem, spread: Strategy) -> int:
    """Return the bytes of other servers' lists for which each server has room.

    spread: the strategy with spread lists and no cache.
    """
    room = problem.cluster.graph_memory - sum(spread.on_fullest_server(problem).values())
    all_lists = lists_bytes(problem.stats.edges, problem.stats.vertices)
    return in_two_digits(int(max(0.0, min(room, all_lists))))


def proposed_cache(problem: Problem, plain: OnBatches) -> int:
    """Return the bytes of cache per GPU to propose for a strategy without a cache, or 0.

    The cache has nine tenths of the free memory, but no more than all rows (in the columns that a
    GPU reads) need. It is 0 on CPUs, where the rows are in the same memory already.
    """
    plain = plain.settle(problem)
    if problem.on_cpu or not plain.suits(problem):
        return 0
    free = problem.cluster.device.memory - plain.most_memory(problem)
    columns = max((each.columns for each in plain.store(problem).slices), key=len)
    all_rows = all_rows_bytes(problem, lambda ids: row_bytes(problem, ids, columns))
    return max(0, min(in_two_digits(int(0.9 * free)), all_rows))


def in_two_digits(nbytes: int) -> int:
    """Return the size cut to two digits, so that plans on any number of GPUs name one strategy."""
    return nbytes - nbytes % 10 ** (len(str(nbytes)) - 2) if nbytes >= ROUNDED else nbytes
