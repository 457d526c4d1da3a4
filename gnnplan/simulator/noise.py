"""Ranks that are never quite as fast as said: jitter on every computation, and stragglers. Seeded.

    rank 0   |forward  |backward |             jitter 0.2: each computation takes a lognormal factor of mean 1 and standard deviation 0.2
    rank 1   |forward|backward   |             a straggler 3=2.0: all that rank 3 computes takes twice as long, its sampler's work too
    epoch    |         |         | slowest     where all wait for all, an epoch takes the sum of each stretch's slowest rank

Transfers are as they were: what shares their links follows from when they begin. The same seed draws the same factors for a
schedule, whatever the cluster or the stragglers; repetition r has draws of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.cost import Cost
from gnnplan.planner.errors import SpecError
from gnnplan.planner.schedule import Compute, Host, Schedule
from gnnplan.simulator.player import Score, play

MOST_JITTER = 10.0  # standard deviation of a computation, of its mean: beyond, nearly all the time is in a few draws


@dataclass(frozen=True)
class Noise:
    """jitter: standard deviation of a computation's time over its mean; stragglers: rank -> how many times as long it computes."""

    jitter: float = 0.0
    stragglers: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= MOST_JITTER:
            raise SpecError(f"--jitter is the standard deviation of a computation over its mean, in [0, {MOST_JITTER:g}], not "
                            f"{self.jitter:g}; use 0.1 for 10 %")  # fmt: skip
        for rank, times in self.stragglers.items():
            if rank < 0 or not 1 <= times <= 1e6:
                raise SpecError(f"--straggler {rank}={times:g}: a rank from 0 on computes 1 to 1e6 times as long; use {max(rank, 0)}=2.0")

    def factors(self, schedule: Schedule, repetition: int) -> list[float]:
        """How many times as long each of the schedule's tasks takes; 1 for all that is no computation."""
        computes = np.array([isinstance(task.work, (Compute, Host)) for task in schedule.tasks], dtype=bool)
        out = np.ones(computes.size)
        if self.jitter:
            width = np.sqrt(np.log1p(self.jitter**2))  # of the normal under the lognormal, so that its mean is 1
            normal = np.random.default_rng((self.seed, repetition)).standard_normal(int(computes.sum()))
            out[computes] = np.exp(width * normal - width**2 / 2)
        slow = np.ones(max([schedule.ranks, *(rank + 1 for rank in self.stragglers)]))
        for rank, times in self.stragglers.items():
            slow[rank] = times
        ranks = np.array([task.rank for task in schedule.tasks], dtype=np.int64)
        return (out * np.where(computes, slow[ranks], 1.0)).tolist()  # type: ignore[no-any-return]


def epochs(schedule: Schedule, cost: Cost, steps: int, noise: Noise, repetitions: int, score: Score | None = None) -> np.ndarray:
    """Seconds of every epoch of `steps` steps (but the first, if there are more) in so many repetitions."""
    score = score or Score(schedule, cost)
    played = (play(schedule, cost, factors=noise.factors(schedule, repetition), score=score) for repetition in range(repetitions))
    return np.concatenate([one.epochs_s(steps) for one in played])


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """{'mean_s', 'p50_s', 'p95_s'} of epochs [s]."""
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return {"mean_s": float(seconds.mean()), "p50_s": p50, "p95_s": p95}


def stragglers(texts: Sequence[str]) -> dict[int, float]:
    """['3=2.0'] -> {3: 2.0}. Raises SpecError."""
    out: dict[int, float] = {}
    for text in texts:
        rank, _, times = text.partition("=")
        try:
            number, factor = int(rank), float(times)
        except ValueError:
            raise SpecError(f"--straggler {text!r}: write a rank and how many times as long it computes, as 3=2.0") from None
        if number in out:
            raise SpecError(f"--straggler: rank {number} is there twice; say once how slow it is")
        out[number] = factor
    return out
