"""Data-parallel mini-batches, as DGL and DistDGL train: every rank samples for its own seeds and computes all that they need.

    rank 0   host |draw|lay|  copy |load|  compute |forward 1 .. L|loss|backward L .. 1|  reduce |all_reduce|  compute |update|
    rank 1   host |draw|lay|  copy |load|  compute |forward 1 .. L|loss|backward L .. 1|  reduce |all_reduce|  compute |update|

A batch is global, each rank takes its share of the seeds. Neighbours are drawn by vertex, not by rank (planner/sampling.py), so all
ranks together compute the gradient of one process on the whole batch. What two ranks both need is sampled, loaded and
computed twice: GSplit's Table 1, and what splitting saves.

Its features come from a store (planner/store.py): each server's memory has all of them (`features` everywhere) or those of its part
(spread, as DistDGL); every GPU caches the hottest rows, all GPUs the same, or with `shared_cache` those of a server different ones
which they read from each other (Quiver).

    host |draw|lay|  copy |load|  compute |pick|  comm |ask|fetch|  compute |forward 1 .. L| ...      rows of the server, the cache, others

Its structure may be spread too (planner/structure.py): a vertex's adjacency list is at home on server v mod S, of one server on rank
v mod M, whatever its features are; `structure_cache` bytes of the hottest of others' lists are with every server besides.

    host |ask_edges 3|draw 3|edges 3| .. |ask_edges 1|draw 1|edges 1|lay|       who lacks lists asks, by id, for what is drawn from them

Bytes per batch: 2 (M-1) W b, F b for each row that another rank provides and 8 to ask for it; 8 for each list that a layer's frontier
meets elsewhere, and 4 for each neighbour drawn from it. Loaded per batch: the rows of every rank's
own frontier that no cache has, F b each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gnnplan.planner.errors import SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.store import check_store, feature_store
from gnnplan.planner.strategies import batchwise, batchwise_memory
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy
from gnnplan.planner.structure import check_structure, hashed


@dataclass(frozen=True)
class DataParallel(Strategy):
    """prefetch: batches that a sampler of its own may be ahead; 0: each rank samples when it is time. checkpoint: as in graph parallel.
    cache: bytes of rows that each GPU caches. shared_cache: a server's GPUs cache different ones, and read each other's. hot: which are
    hottest, by 'frequency' (pre-sampled) or 'degree'. features: in every server's memory ('everywhere') or each row in one's ('spread').
    structure: with every sampler ('everywhere'), or each list at one server ('spread'). structure_cache: bytes of others' lists that a
    server has."""

    prefetch: int = 0
    checkpoint: bool = False
    cache: int = 0
    shared_cache: bool = False
    hot: str = "frequency"
    features: str = "everywhere"
    structure: str = "everywhere"
    structure_cache: int = 0

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
        if cache := batchwise.worth_caching(job, cls()):
            yield cls(cache=cache)
            if len(set(job.servers)) < job.ranks:
                yield cls(cache=cache, shared_cache=True)

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        batchwise.check(job)
        if self.prefetch < 0:
            raise SpecError(f"data_parallel: prefetch is a number of batches, 0 or more, not {self.prefetch}; use 0 or 2")
        check_store(self.name, job, self.cache, self.hot, self.features, self.shared_cache)
        check_structure(self.name, job, self.structure, self.structure_cache)

    def steps(self, job: Job) -> int:
        return batchwise.steps(job)

    def batches(self, job: Job) -> Batches:
        return job.minibatches(tuple(range(job.ranks)))

    def store(self, job: Job) -> batchwise.Features | None:
        return feature_store(job, self.batches(job), self.cache, self.hot, self.features, self.shared_cache)

    def lists(self, job: Job) -> batchwise.Lists | None:
        by_rank = len(set(job.servers)) == 1
        return hashed(job, self.batches(job), self.structure, by_rank, self.structure_cache, self.hot)

    def drawn_steps(self, job: Job) -> int:
        return self.batches(job).known

    @property
    def manner(self) -> Manner:
        return Manner(checkpoint=self.checkpoint)

    def thriftier(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)

    def preparation(self, job: Job) -> dict[str, float]:
        return batchwise.filling(job, self.store(job))

    def memory(self, job: Job) -> Memory:
        return batchwise_memory.memory(job, self.batches(job), self.manner, self.prefetch, self.store(job), self.lists(job))

    def predict(self, job: Job) -> Prediction:
        return batchwise.predict(job, self.batches(job), self.manner, self.prefetch, self.store(job), self.lists(job))

    def schedule(self, job: Job, steps: int) -> Schedule:
        return batchwise.schedule(job, self.batches(job), self.manner, steps, self.prefetch, self.store(job), self.lists(job))
