"""Ranks that are slower than predicted: jitter on every computation, and stragglers. Seeded.

    rank 0   |forward  |backward |
    rank 1   |forward|backward   |
    epoch    |         |         |    all wait for the slowest rank between two barriers

With jitter 0.2, each computation takes a lognormal factor of mean 1 and standard deviation 0.2.
With a straggler 3=2.0, all that rank 3 computes takes twice as long, its sampler's work included.

Transfers get no factor; they still begin later and overlap others. The same seed draws the same
factors for a schedule, whatever the cluster and the stragglers. Each repetition has own draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from gnnplan.planner.cluster.cost import Cost
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Compute, Sampling, Schedule
from gnnplan.planner.vocabulary.units import number_of
from gnnplan.simulator.player import TaskGraph, play

# Beyond this, nearly all the time is in a few draws.
MOST_JITTER = 10.0


@dataclass(frozen=True)
class Noise:
    """How much longer ranks compute than predicted. Raises SpecError for wrong numbers."""

    jitter: float = 0.0  # standard deviation of a computation's time over its mean
    # Rank -> how many times as long it computes.
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
        """How many times as long each task of the schedule takes; 1 if it is no computation."""
        computes = np.array(
            [isinstance(task.work, (Compute, Sampling)) for task in schedule.tasks], dtype=bool
        )
        out = np.ones(computes.size)
        if self.jitter:
            # Standard deviation of the lognormal's logarithm. Its mean is then -width**2 / 2.
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


def epochs(
    schedule: Schedule,
    cost: Cost,
    steps: int,
    noise: Noise,
    repetitions: int,
    task_graph: TaskGraph | None = None,
) -> np.ndarray:
    """Seconds of all epochs of `steps` steps, in so many repetitions [s] [repetitions * epochs].

    The first epoch of a repetition is left out, if there are more (`Played.epochs_s`).
    """
    task_graph = task_graph or TaskGraph(schedule, cost)
    played = (
        play(schedule, cost, factors=noise.factors(schedule, repetition), task_graph=task_graph)
        for repetition in range(repetitions)
    )
    return np.concatenate([one.epochs_s(steps) for one in played])


def percentiles(seconds: np.ndarray) -> dict[str, float]:
    """{'mean_s', 'p50_s', 'p95_s'} of epochs [s]."""
    p50, p95 = np.percentile(seconds, (50, 95)).tolist()
    return {"mean_s": float(seconds.mean()), "p50_s": p50, "p95_s": p95}


def stragglers(texts: Sequence[str]) -> dict[int, float]:
    """Rank -> how many times as long it computes, from the text of --straggler.

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
