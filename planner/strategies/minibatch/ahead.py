"""How many samplers a plan proposes for each rank: as many as it waits for, if cores and memory are
there.

With one sampler an epoch takes as long as sampling, loading or the rest, whichever is longest. k
samplers take a k-th of the time, so they need be no more than make something else the longest.
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
    """Samplers of a rank that have a core each, besides its own: a power of two, or 0.

    GPUs that sample do so in line, unless they lay out `there` what a thread may load meanwhile.
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
    """The strategy with as many samplers as pay, where `one` has no more than one."""
    most, settled = most_ahead(problem), one.settle(problem)
    if not one.prefetch or most < 2 or not settled.suits(problem):
        return one
    program = settled.built(problem)
    least = predict(problem, replace(program, samplers=most))
    ops = program.ops(next(iter(program.known())))
    sampling = {op.label(0).kind for op in ops if op.lane == "host"}
    sampling_s = sum(float(least.by_op[kind]) for kind in sampling)
    paying = int(np.ceil(NEARLY * sampling_s / float(least.epoch_s)))
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
