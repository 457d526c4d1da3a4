"""delayed(r): every halo row is refreshed in each r-th epoch (DistGNN's cd-r).

    r = 2      epoch 0    epoch 1    epoch 2
    vertex 4   fresh      stays      fresh
    vertex 7   zero       fresh      stays

In epoch t the rows of the vertices with id % r == t % r cross before every layer, and so do their
gradients after it. Readers keep the other rows, and owners the other gradients, as they came last;
before that they are zero. r = 1 is graph parallelism to the bit.

Source: Md et al., DistGNN (SC 2021), Sec. 5.2; there partial sums of split vertices cross.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies import Crossing, Example, OnParts, Policy
from gnnplan.planner.vocabulary.errors import SpecError


@dataclass(frozen=True)
class EveryPeriod(Policy):
    """A vertex's row is fresh once in a period; in other steps it stays as it came last."""

    def fresh(self, ids: np.ndarray, crossing: Crossing) -> np.ndarray:
        return np.flatnonzero(ids % self.period == crossing.step % self.period)


@dataclass(frozen=True)
class Delayed(OnParts):
    """r: epochs after which a halo row is refreshed; the others are as in graph parallelism."""

    r: int = 2
    checkpoint: bool = False
    buckets: int = 1
    bits: int | str | None = None

    family: ClassVar[str] = "delayed"
    executor: ClassVar[str] = "gnnplan.executor.strategies.graph_parallel"
    examples: ClassVar[tuple[Example, ...]] = (
        Example("delayed"),
        Example("delayed(r=3,checkpoint=True)", ranks=3),
        Example("delayed(bits=4,buckets=2)"),
    )
    claim: ClassVar[float] = 1e-6

    @property
    def policy(self) -> Policy:
        return EveryPeriod("stay", self.r) if self.r > 1 else Policy()

    def check(self, problem: Problem) -> None:
        if self.r < 1:
            raise SpecError(f"delayed: r is at least 1 (graph parallelism), not {self.r}; use r=2")
        super().check(problem)
