"""A few training steps of one rank, played by the executor, to which micro-benchmarks are held.

Kernels timed one by one, again and again on the same rows, are faster than they are in a training: there they find other rows in the
caches, autograd between them, and memory that has still to be handed out. Two numbers are found from these steps: the price of a framework
operation, and how many times as long as the planner predicts from kernels alone all else takes, over pieces of several sizes and models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import least_squares

from gnnplan.executor.learner import Gradients, Learner
from gnnplan.executor.strategies import open_worker
from gnnplan.executor.worker import Rank, now
from gnnplan.planner import scaled
from gnnplan.planner.graph import Graph, load
from gnnplan.planner.job import Job, with_ranks
from gnnplan.planner.specs import Cluster, Device, Link, Workload
from gnnplan.planner.strategies import GraphParallel

LEAST = 6  # steps of a piece at first, of which the later half count: a process comes to its pace when its memory has been handed out
_ANY = Cluster(servers=1, gpus_per_server=1, device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
               intra_node=Link(bandwidth=1e9))  # fmt: skip


@dataclass(frozen=True)
class Piece:
    """A training of one rank."""

    vertices: int
    edges: int
    workload: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def job(self) -> Job:
        """On any machine."""
        graph = load(f"synthetic:community?vertices={self.vertices}&edges={self.edges}&features=64&classes=8&seed=5")
        assert isinstance(graph, Graph)
        return Job(graph.stats, graph, Workload(**self.workload), _ANY)

    def seconds(self, cluster: Cluster, launch: float) -> float:
        """Of a step, as the cost model has it, at so many seconds of the framework for an operation."""
        device = cluster.device.model_copy(update={"launch": launch})
        there = replace(self.job, cluster=with_ranks(cluster.model_copy(update={"device": device}), 1))  # with what the job has laid out
        return float(GraphParallel().predict(there).epoch_s)


PIECES = (  # from what the framework's own time decides to what fits no cache
    Piece(100, 400, {"model": "gcnii", "layers": 6, "hidden": 16, "dropout": 0.5}),
    Piece(700, 14_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(3_000, 150_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(12_000, 120_000, {"model": "gcn", "layers": 3, "hidden": 128, "dropout": 0.5}),
    Piece(15_000, 500_000, {"model": "sage", "layers": 3, "hidden": 256}),
    Piece(50_000, 400_000, {"model": "sage", "layers": 2, "hidden": 192}),
)
BRIEF = Piece(100, 400, {"model": "gcn", "layers": 1})  # shorter than what a rank has a core for at once


class Rehearsal:
    """A piece's training on this rank."""

    def __init__(self, piece: Piece, device: torch.device, backend: str) -> None:
        job = piece.job
        self.rank = Rank(0, 1, device, backend, traced=0)
        self.worker = open_worker(self.rank, job, GraphParallel())
        self.learner = Learner(self.rank, job.workload, [Gradients(self.worker.net.parameters(), self.worker.reduce_group)])
        self.done = 0

    def play(self, seconds: float) -> float:
        """Go on for so long: seconds of the median step, of the later half."""
        steps: list[float] = []
        end, least = now() + seconds, 2 if self.done else LEAST
        while now() < end or len(steps) < least:
            begin = now()
            self._step()
            steps.append(now() - begin)
        return median(steps[len(steps) // 2 :])

    def worked(self, steps: int, before: Callable[[], object]) -> float:
        """Seconds that a processor works on a step, each after something else that is not counted; the mean."""
        worked = 0.0
        for _ in range(steps):
            before()
            begin = time.thread_time()
            self._step()
            worked += time.thread_time() - begin
        return worked / steps

    def _step(self) -> None:
        self.learner.zero()
        self.worker.step(self.done)
        self.learner.update(self.done)
        if self.rank.device.type == "cuda":
            torch.cuda.synchronize(self.rank.device)
        self.done += 1


def held_to(cluster: Cluster, steps: list[float]) -> tuple[Cluster, str]:
    """The cluster as slow as the pieces' steps were, and in words by how much: least squares of log(predicted / took) in the price of an
    operation and in what all kernels take more."""
    kernels = np.array([piece.seconds(cluster, 0.0) for piece in PIECES])
    launches = np.array([piece.seconds(cluster, 1e-3) for piece in PIECES]) / 1e-3 - kernels / 1e-3

    def predicted(logs: np.ndarray) -> np.ndarray:
        launch, slower = np.exp(logs)
        return launches * launch + kernels * slower

    found = least_squares(lambda logs: np.log(predicted(logs) / steps), np.log([steps[0] / launches[0], 1.0]))
    (launch, slower), off = np.exp(found.x).tolist(), predicted(found.x) / steps - 1
    held = scaled.device(cluster, 1 / slower)
    told = (f"training steps took {slower:.2f} times as long as their kernels, and an operation {1e6 * launch:.1f} us "
            f"({len(steps)} pieces, then predicted within {min(off):+.0%} and {max(off):+.0%})")  # fmt: skip
    return held.model_copy(update={"device": held.device.model_copy(update={"launch": min(launch, 0.1)})}), told
