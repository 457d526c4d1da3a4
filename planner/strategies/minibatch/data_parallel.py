"""Data-parallel mini-batches, as DGL and DistDGL train.

A batch is global; each rank takes its share of the seeds, samples their neighbourhoods, loads the
features and computes all layers. Gradients are all-reduced once per batch.

    rank 0 (all ranks do the same)
    host     |draw|lay|
    copy               |load|
    compute                 |forward 1 .. L|loss|backward L .. 1|            |update|
    reduce                                                       |all_reduce|

Rows that two ranks both need are sampled, loaded and computed twice (GSplit, Table 1).

A feature store provides features (feature_store.py). Each server's memory has all rows (features=
'everywhere') or the rows of its part ('spread', as DistDGL). Every GPU caches the hottest rows. All
GPUs cache the same rows; with `shared_cache` the GPUs of a server cache different rows, and read
them from each other (Quiver).

    host     |draw|lay|
    copy               |load|                        rows of the server's memory
    compute                  |pick|                  rows of the own cache
    comm                           |ask|fetch|       rows that other ranks provide

Adjacency lists may also be spread (adjacency_store.py), independently of features. A sampler asks
other ranks to draw from lists that it does not have.

Link prediction (graph/sampling.py): a rank takes its share of the edges. It samples around all
endpoints and negatives of these edges, so that ranks exchange no further rows.

Exact: neighbours are drawn by vertex, not by rank (planner/graph/sampling.py), so all ranks
together compute the gradient of one process on the whole batch.

Bytes per batch, for M ranks, W weights and numbers of b bytes:

    2 (M-1) W b        all-reduce
    F b + 8            for each row that another rank provides: its features, its id
    8, and 4           for the id of each list that a layer's frontier needs from another rank, and
                       for each neighbour drawn from the list

Loaded per batch: F b for each row of a rank's own frontier that no cache has. Sources: DistDGL
(IA3 2020) for spread features; Quiver (arXiv 2305.10863) for shared caches.

See also layerwise/step.py for the layers; executor/strategies/minibatch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Bytes, Example, Strategy
from gnnplan.planner.strategies.minibatch.on_batches import (
    OnRows,
    lists_cache,
    variants,
    with_one_sampler,
)


@dataclass(frozen=True)
class DataParallel(OnRows):
    """Data parallelism on mini-batches.

    prefetch: number of batches prepared ahead, each by its own sampler process, besides the batch
        that a thread loads; 0: each rank samples and loads in line. If GPUs sample, the thread
        samples the next batch too.
    checkpoint: keep a layer's inputs only, and recompute the layer in the backward pass.
    cache: bytes of rows that each GPU caches.
    shared_cache: a server's GPUs cache different rows, and read each other's caches.
    hot: the measure of hot rows, 'frequency' (counted by pre-sampling) or 'degree'.
    features: rows are in every server's memory ('everywhere'), or each in one server's ('spread').
    structure: lists are with every sampler ('everywhere'), or each at one server ('spread').
    structure_cache: bytes of other servers' lists that each server caches.
    buckets: as in graph parallelism.
    """

    prefetch: int = 0
    checkpoint: bool = False
    cache: Bytes = 0
    shared_cache: bool = False
    hot: str = "frequency"
    features: str = "everywhere"
    structure: str = "everywhere"
    structure_cache: Bytes = 0
    buckets: int = 1

    family = "data_parallel"
    alone = True
    examples = (Example("data_parallel"),)

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        shared = {"shared_cache": True} if problem.server_count < problem.ranks else {}
        yield from variants(problem, with_one_sampler(problem, cls()), **shared)

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        if problem.server_count > 1:
            if self.features == "everywhere":
                yield replace(self, features="spread")
            spread = replace(self, features="spread", structure="spread", structure_cache=0)
            yield replace(spread, structure_cache=lists_cache(problem, spread))
