"""A few training steps of one rank, played by the executor, to which micro-benchmarks are held.

Kernels timed one by one, again and again on the same rows, are faster than they are in a training: there they find other rows in the
caches, autograd between them, and memory that has still to be handed out. How many times as long as the planner predicts from kernels
alone these steps take is one number, the mean over pieces of several sizes and models, and the device is that much slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

import torch

from gnnplan.executor.learner import Gradients, Learner
from gnnplan.executor.strategies import open_worker
from gnnplan.executor.worker import Rank, now
from gnnplan.planner import scaled
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import Job, with_ranks
from gnnplan.planner.schedule import Compute
from gnnplan.planner.specs import Cluster, Device, Link, Workload
from gnnplan.planner.strategies import GraphParallel

LEAST = 6  # steps of a piece at once, of which the later half count: a process comes to its pace when its memory has been handed out
_ANY = Cluster(servers=1, gpus_per_server=1, device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
               intra_node=Link(bandwidth=1e9))  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A training of one rank."""

    vertices: int
    edges: int
    workload: dict[str, Any] = field(default_factory=dict)

    def job(self, cluster: Cluster = _ANY) -> Job:
        graph = load(f"synthetic:community?vertices={self.vertices}&edges={self.edges}&features=64&classes=8&seed=5")
        assert isinstance(graph, Graph)
        return Job(graph.stats, graph, Workload(**self.workload), with_ranks(cluster, 1))

    def launches(self) -> float:
        """Operations of a step, as the cost model counts them: each is worth what is left of a step without rows to speak of."""
        works = (task.work for task in GraphParallel().schedule(self.job(), 1).tasks)
        return sum(work.launches for work in works if isinstance(work, Compute))


SMALL = Piece(100, 400, {"model": "gcnii", "layers": 6, "hidden": 16, "dropout": 0.5})
PIECES = (  # from what the framework's own time decides to what fits no cache
    Piece(700, 14_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(3_000, 150_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(12_000, 120_000, {"model": "gcn", "layers": 3, "hidden": 128, "dropout": 0.5}),
    Piece(15_000, 500_000, {"model": "sage", "layers": 3, "hidden": 256}),
    Piece(50_000, 400_000, {"model": "sage", "layers": 2, "hidden": 192}),
)


class Rehearsal:
    """A piece's training on this rank."""

    def __init__(self, piece: Piece, device: torch.device, backend: str) -> None:
        job = piece.job()
        self.rank = Rank(0, 1, device, backend, traced=0)
        self.worker = open_worker(self.rank, job, GraphParallel())
        self.learner = Learner(self.rank, job.workload, [Gradients(self.worker.net.parameters(), self.worker.reduce_group)])
        self.done = 0

    def play(self, seconds: float) -> float:
        """Go on for so long: seconds of the median step, of the later half."""
        steps: list[float] = []
        end = now() + seconds
        while now() < end or len(steps) < LEAST:
            begin = now()
            self.learner.zero()
            self.worker.step(self.done)
            self.learner.update(self.done)
            if self.rank.device.type == "cuda":
                torch.cuda.synchronize(self.rank.device)
            steps.append(now() - begin)
            self.done += 1
        return median(steps[len(steps) // 2 :])


def held_to(cluster: Cluster, steps: list[float]) -> tuple[Cluster, str]:
    """The cluster with its device as slow as the pieces' steps were, and in words by how much."""
    slower = [took / float(GraphParallel().predict(piece.job(cluster)).epoch_s) for piece, took in zip(PIECES, steps, strict=True)]
    usual = geometric_mean(slower)
    return scaled.device(cluster, 1 / usual), (f"training steps took {usual:.2f} times as long as their kernels ({len(slower)} pieces, "
                                               f"{min(slower):.2f} to {max(slower):.2f})")  # fmt: skip
