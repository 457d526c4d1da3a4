"""How many samplers a plan proposes for each rank: as many as it waits for, if cores and memory are
there.

With one sampler an epoch takes as long as sampling, loading or the rest, whichever is longest. k
samplers take a k-th of the time, so a plan proposes the first of 1, 2, 4, .. with which something
else takes longest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.host_memory import fits, fitting
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.strategies.program.account import predict

S = TypeVar("S", bound=OnBatches)
MOST = 32  # samplers of a rank that are proposed
NEARLY = 0.98  # an epoch that is so much shorter is worth twice the samplers


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
