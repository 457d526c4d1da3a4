"""Proposals of a plan: the number of samplers per rank, the size of caches, and the placement of
graph data.

With one sampler an epoch takes as long as sampling, loading or training, whichever is longest. k
samplers take a k-th of the time, so a plan proposes the first of 1, 2, 4, .. samplers with which
sampling is no longer the longest, if there are enough cores and memory.

If graph data do not fit in every server's memory, candidates spread the features, and the lists too
if necessary. The memory that remains caches lists of other servers (P3, Sec. 3.4).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.layerwise.exchange import pays
from gnnplan.planner.strategies.minibatch.adjacency_store import ENTRY, NEIGHBOUR
from gnnplan.planner.strategies.minibatch.feature_store import row_bytes
from gnnplan.planner.strategies.minibatch.memory import all_rows_bytes
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.strategies.program.account import predict
from gnnplan.planner.strategies.program.memory import on_fullest_rank

S = TypeVar("S", bound=OnBatches)
MOST = 32  # largest number of samplers per rank that is proposed
NEARLY = 0.98  # the samplers are doubled only if the epoch becomes shorter by this factor
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


def most_samplers(problem: Problem, lays_there: bool = False) -> int:
    """Return the largest number of samplers per rank that have a core each: a power of two, or 0.

    lays_there: whether a GPU that samples also lays out its batches. If so, one thread may sample
    and load ahead (1); otherwise GPUs sample in line (0).
    """
    if problem.cluster.sampler == "device":
        return int(lays_there and problem.cost.cores_each >= 2)
    cores = int(min(problem.cost.cores_each - 1, MOST))
    return 2 ** (cores.bit_length() - 1) if cores > 0 else 0


def with_one_sampler(problem: Problem, in_line: S, lays_there: bool = False) -> S:
    """Return the strategy with one sampler per rank, if there is a core and memory for it.

    lays_there: whether a GPU that samples also lays out its batches.
    """
    ahead = _with_samplers(problem, in_line, 1) if most_samplers(problem, lays_there) else None
    return ahead or fitting(problem, in_line)


def with_enough_samplers(problem: Problem, one: S) -> S:
    """Return the strategy with the best number of samplers; `one` has one sampler, or none.

    An epoch is shortest with the most samplers. The best number is the fewest samplers that finish
    sampling within that epoch, or fewer if memory has no room for their batches.
    """
    most, settled = most_samplers(problem), one.settle(problem)
    if not one.prefetch or most < 2 or not settled.suits(problem):
        return one
    program = settled.built(problem)
    with_most = predict(problem, replace(program, samplers=most))
    ops = program.ops(next(iter(program.known())))
    sampling = {op.label(0).kind for op in ops if op.lane == "host"}
    sampling_s = sum(float(with_most.by_op[kind]) for kind in sampling)
    needed = int(np.ceil(NEARLY * sampling_s / float(with_most.epoch_s)))
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
    in_ranks = problem.cluster.device.kind == "cpu"
    return several if (settled.fits(problem) if in_ranks else fits(problem, several)) else None


def fullest(problem: Problem, strategy: Strategy) -> dict[str, float]:
    """Return the bytes in the fullest server's memory, by use."""
    return on_fullest_rank(strategy.settle(problem).host_memory(problem))


def fits(problem: Problem, strategy: Strategy) -> bool:
    room = problem.cluster.graph_memory
    return room == np.inf or sum(fullest(problem, strategy).values()) <= room


def fitting(problem: Problem, strategy: S) -> S:
    """Return the strategy, or the least spread variant that fits in servers' memories.

    If no variant fits, return the variant that spreads most.
    """
    if problem.cluster.graph_memory == np.inf or not strategy.settle(problem).suits(problem):
        return strategy
    tried = strategy
    for tried in (strategy, *strategy.more_spread(problem)):
        if fits(problem, tried):
            break
    return tried


def lists_cache(problem: Problem, spread: Strategy) -> int:
    """Return the bytes of other servers' lists for which each server has room.

    spread: the strategy with spread lists and no cache.
    """
    room = problem.cluster.graph_memory - sum(fullest(problem, spread).values())
    all_lists = NEIGHBOUR * problem.stats.edges + ENTRY * problem.stats.vertices
    cache = int(max(0.0, min(room, all_lists)))
    return in_two_digits(cache)


def proposed_cache(problem: Problem, plain: OnBatches) -> int:
    """Return the bytes of cache per GPU to propose for a strategy without a cache, or 0.

    The cache has nine tenths of the free memory, but no more than all rows (in the columns that a
    GPU reads) need. It is 0 on CPUs, where the rows are in the same memory already.
    """
    plain = plain.settle(problem)
    if problem.cluster.device.kind == "cpu" or not plain.suits(problem):
        return 0
    free = problem.cluster.device.memory - plain.most_memory(problem)
    columns = max((each.columns for each in plain.store(problem).slices), key=len)
    all_rows = all_rows_bytes(problem, lambda ids: row_bytes(problem, ids, columns))
    return max(0, min(in_two_digits(int(0.9 * free)), all_rows))


def in_two_digits(nbytes: int) -> int:
    """Return the size cut to two digits, so that plans on any number of GPUs name one strategy."""
    return nbytes - nbytes % 10 ** (len(str(nbytes)) - 2) if nbytes >= ROUNDED else nbytes
