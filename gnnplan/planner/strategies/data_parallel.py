"""Data-parallel mini-batches, as DGL and DistDGL train: every rank samples for its own seeds and computes all that they need.

    rank 0   host |draw|lay|  copy |load|  compute |forward 1 .. L|loss|backward L .. 1|  reduce |all_reduce|  compute |update|
    rank 1   host |draw|lay|  copy |load|  compute |forward 1 .. L|loss|backward L .. 1|  reduce |all_reduce|  compute |update|

A batch is global, each rank takes its share of the seeds. Neighbours are drawn by vertex, not by rank (planner/sampling.py), so all
ranks together compute the gradient of one process on the whole batch. What two ranks both need is sampled, loaded and
computed twice: GSplit's Table 1, and what splitting saves.

Bytes per batch: 2 (M-1) W b. Loaded per batch: the rows of every rank's own frontier, F b each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from gnnplan.planner.errors import SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.strategies import batchwise, batchwise_memory
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy


@dataclass(frozen=True)
class DataParallel(Strategy):
    """prefetch: batches that a sampler of its own may be ahead; 0: each rank samples when it is time. checkpoint: as in graph parallel."""

    prefetch: int = 0
    checkpoint: bool = False

    family: ClassVar[str] = "data_parallel"
    mode: ClassVar[str] = "mini"
    claim: ClassVar[float] = 0.1  # with prefetch the longer of two chains, batch by batch; without: exact

    @property
    def exact(self) -> bool:
        return True

    def approximates_as(self, other: Strategy) -> bool:
        return False

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        yield cls()

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        batchwise.check(job)
        if self.prefetch < 0:
            raise SpecError(f"data_parallel: prefetch is a number of batches, 0 or more, not {self.prefetch}; use 0 or 2")

    def steps(self, job: Job) -> int:
        return batchwise.steps(job)

    def batches(self, job: Job) -> Batches:
        return job.minibatches(tuple(range(job.ranks)))

    def drawn_steps(self, job: Job) -> int:
        return self.batches(job).known

    @property
    def manner(self) -> Manner:
        return Manner(checkpoint=self.checkpoint)

    def thriftier(self) -> Strategy | None:
        return None if self.checkpoint else DataParallel(self.prefetch, checkpoint=True)

    def preparation(self, job: Job) -> dict[str, float]:
        return {}

    def memory(self, job: Job) -> Memory:
        return batchwise_memory.memory(job, self.batches(job), self.manner, self.prefetch)

    def predict(self, job: Job) -> Prediction:
        return batchwise.predict(job, self.batches(job), self.manner, self.prefetch)

    def schedule(self, job: Job, steps: int) -> Schedule:
        return batchwise.schedule(job, self.batches(job), self.manner, steps, self.prefetch)
