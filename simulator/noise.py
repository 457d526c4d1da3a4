"""Noise: random jitter of every computation, and stragglers, ranks that are always slower.

    rank 0   |forward  |backward |
    rank 1   |forward|backward   |
    epoch    |         |         |    all ranks wait for the slowest one between two barriers

With jitter 0.2, the duration of each computation is multiplied by a lognormal factor of mean 1 and
standard deviation 0.2. With a straggler 3=2.0, all computation and sampling of rank 3 takes twice
as long.

Transfers have no factor, but they may begin later and overlap with other transfers. With the same
seed, a schedule gets the same factors on any cluster and with any stragglers. Each repetition has
its own factors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Compute, Sampling, Schedule
from gnnplan.planner.vocabulary.units import number_of
from gnnplan.simulator.player import TaskGraph

# with more jitter, a few computations would take nearly all of the time
MOST_JITTER = 10.0


@dataclass(frozen=True)
class Noise:
    """Factors by which ranks compute longer than predicted. Raises SpecError for wrong numbers."""

    jitter: float = 0.0  # standard deviation of a computation's duration, divided by its mean
    # rank -> factor of the durations of its computations
    stragglers: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise SpecError(
                "--jitter is the standard deviation of a computation over its mean, in [0,"
                f" {MOST_JITTER:g}], not {self.jitter:g}; use 0.1 for 10 %"
            )
        for rank, times in self.stragglers.items():
            if rank < 0 or not 1 <= times <= 1e6:
                raise SpecError(
                    f"--straggler {rank}={times:g}: a rank from 0 on computes 1 to 1e6 times as"
                    f" long; use {max(rank, 0)}=2.0"
                )

    def factors(self, schedule: Schedule, repetition: int) -> list[float]:
        """Return the factor of each task's duration; 1 if the task is no computation."""
        computes = np.array(
            [isinstance(task.work, (Compute, Sampling)) for task in schedule.tasks], dtype=bool
        )
        out = np.ones(computes.size)
        if self.jitter:
            # standard deviation of the logarithm, whose mean is -width**2 / 2 (so factors' mean: 1)
            width = np.sqrt(np.log1p(self.jitter**2))
            normal = np.random.default_rng((self.seed, repetition)).standard_normal(
                int(computes.sum())
            )
            out[computes] = np.exp(width * normal - width**2 / 2)
        slow = np.ones(max([schedule.ranks, *(rank + 1 for rank in self.stragglers)]))
        for rank, times in self.stragglers.items():
            slow[rank] = times
        ranks = np.array([task.rank for task in schedule.tasks], dtype=np.int64)
        factors: list[float] = (out * np.where(computes, slow[ranks], 1.0)).tolist()
        return factors


def epochs(tasks: TaskGraph, steps: int, noise: Noise, repetitions: int) -> np.ndarray:
    """Return the durations of all epochs in all repetitions [s] [repetitions * epochs].

    steps: steps per epoch. The first epoch of a repetition is left out, unless it is the only one
    (`Timeline.epochs_s`).
    """
    played = (
        tasks.play(factors=noise.factors(tasks.schedule, repetition))
        for repetition in range(repetitions)
    )
    return np.concatenate([each.epochs_s(steps) for each in played])


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """Return mean and percentiles of epochs [s]: {'mean_s', 'p50_s', 'p95_s'}."""
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return {"mean_s": float(seconds.mean()), "p50_s": p50, "p95_s": p95}


def stragglers(texts: Sequence[str]) -> dict[int, float]:
    """Return a dict: rank -> factor of its durations, from the texts of --straggler.

    Raises SpecError.

    >>> stragglers(["3=2.0"])
    {3: 2.0}
    """
    out: dict[int, float] = {}
    for text in texts:
        rank, _, times = text.partition("=")
        try:
            number, factor = int(number_of(rank)), number_of(times, float)
        except ValueError:
            raise SpecError(
                f"--straggler {text!r:.80}: write a rank and how many times as long it computes, as"
                " 3=2.0"
            ) from None
        if number in out:
            raise SpecError(f"--straggler: rank {number} is there twice; say once how slow it is")
        out[number] = factor
    return out
