"""Short trainings of one rank, which correct the times of single kernels.

A kernel that is timed alone, on the same rows, is faster than in a training. In a training the
caches hold other rows, autograd runs between the kernels, and memory is still being allocated.
Steps of a few trainings (pieces) give two numbers: the cost of a framework operation, and how much
longer reads of memory take than in kernels alone. A training on mini-batches gives the rates of
the sampler, and how much longer kernels take on rows that are new in each step.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import mean, median
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.ranks.recorder import now
from gnnplan.executor.strategies import open_worker
from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.cost import FAR, NEAR
from gnnplan.planner.cluster.spec import Cluster, Device, Link
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.load import load
from gnnplan.planner.problem.problem import Problem, with_ranks
from gnnplan.planner.strategies import DataParallel, GraphParallel
from gnnplan.planner.strategies.program.account import Prediction
from gnnplan.planner.vocabulary.units import show_percent

# Fewest steps of a piece's first round; the later half counts, as a process is slower until it has
# allocated its memory.
LEAST = 6
_PLACEHOLDER = Cluster(
    servers=1,
    gpus_per_server=1,
    device=Device(kind="cpu", memory=64e9, gemm=1e11, memory_bandwidth=1e10),
    intra_node=Link(bandwidth=1e9),
)


class _WithoutCudaGraphs(Problem):
    """A problem without CUDA graphs: every kernel has a launch, whose cost rehearsals measure."""

    uses_cuda_graph = False


@dataclass(frozen=True)
class Piece:
    """A short training of one rank."""

    vertices: int
    edges: int
    workload: dict[str, Any] = field(default_factory=dict)
    random: bool = False  # whether edges join random vertices, which a second suffices to draw

    @cached_property
    def problem(self) -> Problem:
        """The piece's problem; its cluster has no influence."""
        sizes = f"vertices={self.vertices}&edges={self.edges}"
        graph = (
            _random(self.vertices, self.edges)
            if self.random
            else load(f"synthetic:community?{sizes}&features=64&classes=8&seed=5")
        )
        assert isinstance(graph, Graph)
        return _WithoutCudaGraphs(graph.stats, graph, Workload(**self.workload), _PLACEHOLDER)

    @property
    def strategy(self) -> GraphParallel | DataParallel:
        return DataParallel() if self.workload.get("mode") == "mini" else GraphParallel()

    def seconds(self, cluster: Cluster) -> float:
        """Predict the seconds of an epoch."""
        return float(self._predicted(cluster).epoch_s)

    def _predicted(self, cluster: Cluster) -> Prediction:
        # the copy shares the layouts that the problem has computed
        return self.strategy.predict(replace(self.problem, cluster=with_ranks(cluster, 1)))

    @property
    def batch_edges(self) -> float:
        """The edges of a mini-batch, on average."""
        batches = DataParallel().supply(self.problem).batches.first()
        layers = range(1, self.problem.workload.layers + 1)
        each = [sum(float(batch.facts(layer).edges[0]) for layer in layers) for batch in batches]
        return mean(each)

    def layers_s(self, cluster: Cluster) -> float:
        """Predict the seconds of a step's layers, forward and backward."""
        of_epoch = self._predicted(cluster).by_op
        seconds = sum(float(of_epoch[op]) for op in of_epoch if op.split(":")[0] in LAYERS)
        return seconds / DataParallel().supply(self.problem).batches.steps


def _random(vertices: int, edges: int) -> Graph:
    """Return a graph whose vertices have equally many random in-neighbours, one feature each."""
    few = Piece(100, 400).problem.data
    train = np.arange(vertices) % 64 == 0
    sized = replace(few.stats, vertices=vertices, edges=edges, features=1)
    stats = replace(sized, hash=f"random {vertices} {edges}")
    return replace(
        few,
        stats=replace(stats, train_vertices=int(train.sum())),
        indptr=np.arange(vertices + 1) * (edges // vertices),
        indices=np.random.default_rng(0).integers(0, vertices, edges, dtype=np.int32),
        x=np.zeros((vertices, 1), np.float32),
        y=np.zeros(vertices, np.int64),
        train=train,
        val=np.zeros_like(train),
        test=np.zeros_like(train),
    )


# sizes range from steps that framework overhead dominates to rows that exceed every cache
PIECES = (
    Piece(100, 400, {"model": "gcnii", "layers": 6, "hidden": 16, "dropout": 0.5}),
    Piece(700, 14_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(3_000, 150_000, {"model": "gcnii", "layers": 6, "hidden": 64, "dropout": 0.5}),
    Piece(12_000, 120_000, {"model": "gcn", "layers": 3, "hidden": 128, "dropout": 0.5}),
    Piece(15_000, 500_000, {"model": "sage", "layers": 3, "hidden": 256}),
    Piece(50_000, 400_000, {"model": "sage", "layers": 2, "hidden": 192}),
)
# A rank's share of batches. A row has 5 or 6 edges, as in batches of most graphs: with more,
# samplers would seem quicker per edge.
BATCHES = Piece(
    NEAR,
    1_000_000,
    {"mode": "mini", "model": "sage", "layers": 3, "hidden": 128}
    | {"fanout": (10, 10, 5), "batch": 1024},
)
# The same on lists that no cache holds, with rows so few that none is near another.
FAR_BATCHES = Piece(FAR, 16 * FAR, BATCHES.workload | {"hidden": 8, "batch": 128}, random=True)
LAYERS = ("forward", "backward")
LEAST_LAUNCH, MOST_LAUNCH = 1e-9, 0.1  # of a framework operation [s]
MOST_SLOWDOWN = 10.0  # of reads of memory in training steps
# Fields that `in_steps` corrects. Caches change neither arithmetic, also of a hash or of an edge's
# weight, nor reads at random places, nor the rows that a sum writes.
READS = ("device.memory_bandwidth", "device.product_bandwidth", "device.gather")


class Rehearsal:
    """The training of a piece on the device of one of the measuring ranks."""

    traced = 0  # steps whose spans are kept

    def __init__(self, piece: Piece, me: Rank) -> None:
        self.rank = Rank(0, 1, me.device, me.backend, traced=self.traced)
        self.worker = open_worker(self.rank, piece.problem, piece.strategy)
        self.learner = self.worker.open_learner()
        self.done = 0

    def play(self, seconds: float) -> float:
        """Train for `seconds`; return the median duration of the later half of the steps [s]."""
        steps: list[float] = []
        end, least = now() + seconds, 2 if self.done else LEAST
        while now() < end or len(steps) < least:
            begin = now()
            self._step()
            steps.append(now() - begin)
        return median(steps[len(steps) // 2 :])

    def _step(self) -> None:
        self.learner.zero()
        self.worker.step(self.done)
        self.learner.update(self.done)
        self.rank.settle()
        self.done += 1


class BatchRehearsal(Rehearsal):
    """The training of BATCHES, or of FAR_BATCHES, on this rank; a GPU only receives the batches."""

    traced = sys.maxsize

    def of_each(self, seconds: float) -> dict[str, float]:
        """Train for `seconds`; return the median seconds of drawing a batch, laying it out and
        computing its layers."""
        first = self.done
        self.play(seconds)
        spans, self.rank.recorder.spans = self.rank.recorder.spans, []
        settled = range((first + self.done) // 2, self.done)

        def seconds_of(*ops: str) -> float:
            each = dict.fromkeys(settled, 0.0)
            for span in spans:
                if span.op in ops and span.step in each:
                    each[span.step] += span.seconds
            return median(each.values())

        return {
            "draw": seconds_of("draw"),
            "lay": seconds_of("lay"),
            "layers": seconds_of(*LAYERS),
        }

    def _step(self) -> None:
        if self.rank.device.type == "cpu":
            return super()._step()
        worker: Any = self.worker  # OnBatches
        worker.arriving.next(self.done)
        self.done += 1


def in_steps(cluster: Cluster, launch: float, slowdown: float) -> Cluster:
    """Return a cluster, measured by its kernels, as training steps find it.

    launch: cost of a framework operation [s]. slowdown: factor by which reads of memory are slower;
    less than 1 if caches hold what one operation has left for the next. An aggregation alone finds
    its rows there, too.
    """
    factors = dict.fromkeys(READS, 1 / slowdown) | {"device.gather": 1 / max(slowdown, 1.0)}
    device = scaled.multiplied(cluster, factors).device.model_copy(update={"launch": launch})
    return cluster.model_copy(update={"device": device})


def held_to(cluster: Cluster, steps: list[float]) -> tuple[Cluster, str]:
    """Correct a cluster by the durations of the pieces' steps [s]; also return a sentence on it.

    This is a least-squares fit of log(predicted / measured). The unknowns are the cost of a
    framework operation, and the factor by which reads of memory are slower. On GPUs the factor is 1
    or more: no `batch_slowdown` corrects their mini-batches.
    """

    def errors(logs: np.ndarray) -> np.ndarray:
        found = in_steps(cluster, *np.exp(logs).tolist())
        return np.log(
            [piece.seconds(found) / step for piece, step in zip(PIECES, steps, strict=True)]
        )

    least = 1.0 if cluster.device.kind == "cuda" else 1 / MOST_SLOWDOWN
    bounds = np.log([(LEAST_LAUNCH, least), (MOST_LAUNCH, MOST_SLOWDOWN)])
    found = least_squares(errors, (np.log(1e-5), 0.1), bounds=bounds)
    (launch, slowdown), off = np.exp(found.x).tolist(), np.expm1(found.fun)
    return in_steps(cluster, launch, slowdown), (
        f"in training steps, reads of memory took {slowdown:.2f} times as long as in kernels alone,"
        f" and an operation {1e6 * launch:.1f} us ({len(steps)} pieces, then predicted"
        f" within {show_percent(min(off), sign=True)} and {show_percent(max(off), sign=True)})"
    )
