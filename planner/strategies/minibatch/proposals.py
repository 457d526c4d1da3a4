"""What a plan proposes: how many samplers for each rank, how much is cached, and what is spread.

With one sampler an epoch takes as long as sampling, loading or the rest, whichever is longest. k
samplers take a k-th of the time, so a plan proposes the first of 1, 2, 4, .. with which something
else takes longest, where cores and memory are there.

Where graph data do not fit in every server's memory, candidates spread the features, and if that
does not suffice the lists too. What then is left of the memory caches lists of other servers (P3,
Sec. 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.layerwise.buckets import pays
from gnnplan.planner.strategies.minibatch.adjacency_store import ENTRY, NEIGHBOUR
from gnnplan.planner.strategies.minibatch.feature_store import row_bytes
from gnnplan.planner.strategies.minibatch.memory import of_all_rows
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.strategies.program.account import predict
from gnnplan.planner.strategies.program.memory import of_fullest

S = TypeVar("S", bound=OnBatches)
MOST = 32  # samplers of a rank that are proposed
NEARLY = 0.98  # an epoch that is so much shorter is worth twice the samplers
ROUNDED = 10**8  # [B] a proposed cache of this size or more has two digits


def variants(problem: Problem, plain: S, **sharing: bool) -> Iterator[S]:
    """The strategy, and with caches, each with as many samplers as pay; with buckets if they do.

    sharing: knobs of one more variant that caches."""
    found = [plain]
    if cache := worth_caching(problem, plain):
        found.append(replace(plain, cache=cache))  # type: ignore[call-arg]
        if sharing:
            found.append(replace(plain, cache=cache, **sharing))  # type: ignore[call-arg]
    found = [enough_ahead(problem, variant) for variant in found]
    yield from found
    bucketed = [replace(each, buckets=problem.workload.layers) for each in found]  # type: ignore[call-arg]
    if pays(problem, found[-1], bucketed[-1]):
        yield from bucketed


def most_ahead(problem: Problem, there: bool = False) -> int:
    """The most samplers of a rank that have a core each, besides its own: a power of two, or 0.

    there: GPUs that sample lay out batches, too, beside which a thread may load (1). Otherwise GPUs
    sample in line (0).
    """
    if problem.cluster.sampler == "device":
        return int(there and problem.cost.cores_each >= 2)
    cores = int(min(problem.cost.cores_each - 1, MOST))
    return 2 ** (cores.bit_length() - 1) if cores > 0 else 0


def one_ahead(problem: Problem, in_line: S, there: bool = False) -> S:
    """The strategy with one sampler beside each rank, if it has a core and its batch has room.

    there: a GPU that samples lays out its batches, too.
    """
    ahead = _with(problem, in_line, 1) if most_ahead(problem, there) else None
    return ahead or fitting(problem, in_line)


def enough_ahead(problem: Problem, one: S) -> S:
    """The strategy with as many samplers as pay; `one` has one, or samples in line.

    An epoch is shortest with the most samplers. The fewest whose share of the sampling fits in that
    time pay; fewer, where their batches have no room.
    """
    most, settled = most_ahead(problem), one.settle(problem)
    if not one.prefetch or most < 2 or not settled.suits(problem):
        return one
    program = settled.built(problem)
    with_most = predict(problem, replace(program, samplers=most))
    ops = program.ops(next(iter(program.known())))
    sampling = {op.label(0).kind for op in ops if op.lane == "host"}
    sampling_s = sum(float(with_most.by_op[kind]) for kind in sampling)
    paying = int(np.ceil(NEARLY * sampling_s / float(with_most.epoch_s)))
    doublings = min(most.bit_length() - 1, max(paying - 1, 0).bit_length())
    fewer = (_with(problem, one, 2**power) for power in range(doublings, 0, -1))
    return next(filter(None, fewer), one)


def _with(problem: Problem, strategy: S, samplers: int) -> S | None:
    """With so many samplers per rank, spread no more than servers' memories ask.

    None if batches that wait have no room, which on a CPU is a rank's, else a server's.
    """
    several = fitting(problem, replace(strategy, prefetch=samplers))  # type: ignore[call-arg]
    settled = several.settle(problem)
    if not settled.suits(problem):
        return several
    in_ranks = problem.cluster.device.kind == "cpu"
    return several if (settled.fits(problem) if in_ranks else fits(problem, several)) else None


def fullest(problem: Problem, strategy: Strategy) -> dict[str, float]:
    """Bytes by use in the fullest server's memory."""
    return of_fullest(strategy.settle(problem).host_memory(problem))


def fits(problem: Problem, strategy: Strategy) -> bool:
    room = problem.cluster.graph_room
    return room == np.inf or sum(fullest(problem, strategy).values()) <= room


def fitting(problem: Problem, strategy: S) -> S:
    """The strategy, or the variant that spreads least of those that fit in servers' memories.

    The last variant, which spreads most, if none fits.
    """
    if problem.cluster.graph_room == np.inf or not strategy.settle(problem).suits(problem):
        return strategy
    tried = strategy
    for tried in (strategy, *strategy.more_spread(problem)):
        if fits(problem, tried):
            break
    return tried


def lists_cache(problem: Problem, spread: Strategy) -> int:
    """Bytes of other servers' lists for which each server has room; `spread` caches none."""
    left = problem.cluster.graph_room - sum(fullest(problem, spread).values())
    every_list = NEIGHBOUR * problem.stats.edges + ENTRY * problem.stats.vertices
    cache = int(max(0.0, min(left, every_list)))
    return in_two_digits(cache)


def worth_caching(problem: Problem, plain: OnBatches) -> int:
    """Bytes of the cache to propose to a strategy that has none, per GPU; 0 where it cannot be.

    It is nine tenths of the memory that the strategy leaves, but no more than all rows need, or the
    columns of them that a GPU reads. It is 0 on CPUs, where the cache would be in the memory that
    it spares.
    """
    plain = plain.settle(problem)
    if problem.cluster.device.kind == "cpu" or not plain.suits(problem):
        return 0
    left = problem.cluster.device.memory - plain.most_memory(problem)
    columns = max((each.columns for each in plain.store(problem).slices), key=len)
    all_rows = of_all_rows(problem, lambda ids: row_bytes(problem, ids, columns))
    return max(0, min(in_two_digits(int(0.9 * left)), all_rows))


def in_two_digits(nbytes: int) -> int:
    """The size of a proposed cache, cut so that plans on any number of GPUs name one strategy."""
    return nbytes - nbytes % 10 ** (len(str(nbytes)) - 2) if nbytes >= ROUNDED else nbytes
