"""Offload (HongTu): GPUs train a graph that does not fit in their memory, chunk by chunk.

A server's memory has the features, and every layer's rows and gradients of the server's ranks. Each
rank's part of the graph is divided into chunks. Layer by layer and chunk by chunk, a device loads
the rows that a chunk's edges read, computes the chunk's rows of the layer, and stores them in the
server's memory. The backward pass does the same from the last layer to the first: it loads the
same rows and the gradient of the layer's outputs, recomputes the layer, and adds the gradient of
the rows read to the gradients in the server's memory. The last layer does forward and backward of a
chunk together.

    one rank, 2 layers, 2 chunks
    copy     |load|      |store|load|      |store|load|                    |store|..
    compute       |f 1 c0|          |f 1 c1|          |f 2 c0|loss|b 2 c0|

On GPUs copies overlap with computation, except the first load and the last store of a layer's pass:

    copy     |load c0|load c1|store c0|load c2|store c1|..
    compute          |f 1 c0 .|f 1 c1 . . . . |f 1 c2|

All ranks process their first chunk at the same time, then their second. A row that another rank
owns is loaded by its owner and sent as a halo row, once for every chunk that reads it, and once
more in the backward pass; its gradient is returned to the owner. Features are read from the own
server's memory.

So a device has one layer of one chunk in memory, and on GPUs a second chunk that is being copied.
The number of chunks is the least power of two that fits by estimates; if the counted partition does
not fit, it is up to sixteen times as large. More chunks read more rows of each other.

Exact, since no row is missing and none is stale.

Bytes per epoch, for chunks with R rows, S rows read and E edges of e bytes, H_l numbers of b bytes,
of which D rows are in another rank's memory:

    loads    sum over chunks [ sum_{l=1..L} (S H_{l-1} b + E e) + sum_{l=1..L-1} (S H_{l-1} b + E e
             + R H_l b) ], and labels
    stores   sum over chunks [ sum_{l=1..L} R H_l b + sum_{l=2..L} S H_{l-1} b ]
    halos    sum over chunks [ 3 sum_{l=2..L-1} D H_{l-1} b + 2 D H_{L-1} b ]

If layer 1's aggregate is constant, it is computed once, and R rows of it are loaded instead of S.
Source: Wang et al., HongTu (SIGMOD 2023), Sec. 4 and Alg. 1; there, unlike here, rows that the next
chunk also reads stay on the device, and a row that chunks of several GPUs read is loaded once. See
also chunked.py (operations, bytes and memory) and executor/strategies/offload.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example, Memory, Resident, Strategy, settled
from gnnplan.planner.strategies.layerwise.chunked import ChunkedStep
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel, check_trim
from gnnplan.planner.strategies.program.memory import fullest, machine_code, peak
from gnnplan.planner.strategies.program.program import Copy, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time

MOST_CHUNKS = 1024  # a limit, because a plan counts the rows that each chunk reads of each other
TRIES = 5  # how many numbers of chunks are partitioned and counted, if estimates are too low


@dataclass(frozen=True)
class Offload(Strategy):
    """Full-graph training with vertex data in servers' memories.

    chunks: number of chunks of each rank's part; None: as few as fit.
    trim: leave out rows that no training vertex needs, as in graph parallelism.
    """

    chunks: int | None = None
    trim: bool = False

    family: ClassVar[str] = "offload"
    claim: ClassVar[float] = 1e-6
    rounds_rows: ClassVar[bool] = True
    executor: ClassVar[str] = "gnnplan.executor.strategies.offload"
    examples: ClassVar[tuple[Example, ...]] = (
        Example("offload(chunks=3)", ranks=1),
        Example("offload(chunks=2)"),
        Example("offload(chunks=2,trim=True)"),
    )

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield a variant only if graph parallelism does not fit; if it fits, it is faster."""
        if not cls.refused(problem) and not _fits_without(problem):
            yield cls(trim=problem.needs_few_rows)

    def with_less_memory(self) -> Strategy | None:
        """Return the variant without `trim`, which has no separate edges for evaluation."""
        return replace(self, chunks=None, trim=False) if self.trim else None

    @classmethod
    def absent(cls, problem: Problem) -> str:
        return "" if _fits_without(problem) else cls.refused(problem)

    @classmethod
    def refused(cls, problem: Problem) -> str:
        """Return why this model cannot be trained chunk by chunk, with a remedy; '' if it can."""
        model, name = problem.model, problem.workload.model
        if model.encoder:
            return (
                f"it does not keep the encoder's rows in the server's memory (model: {name}); use a"
                " model without encoder, whose layers read the previous layer only"
            )
        if model.ends:
            return (
                "it computes the last layer chunk by chunk, and a batch norm after it needs all"
                " rows at once; leave that norm out"
            )
        return model.inputs.why_unsummed

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        placed = problem if fastest else problem.placed(tuple(problem.cost.placement[:1]))
        variant = fastest or next((s.settle(placed) for s in cls.candidates(placed)), None)
        if variant is None:
            return []
        assert isinstance(variant, Offload)
        loaded, stored = variant.moved(placed)
        predicted = variant.predict(placed)
        host_bytes = float(sum(variant.host_memory(placed).values(), np.zeros(1)).max())
        copied_s = sum(
            float(seconds)
            for op, seconds in predicted.by_op.items()
            if op.split(":")[0] in ("load", "store")
        )
        whole = sum(_least(placed).memory(placed).values(), np.zeros(1))
        return [
            f"{variant} keeps {show_bytes(host_bytes)} in a server's memory, because the graph"
            f" would take {show_bytes(float(whole.max()))} on a device; per epoch"
            f" {show_bytes(loaded)} are loaded and {show_bytes(stored)} stored, which takes"
            f" {show_time(copied_s)} of {show_time(float(predicted.epoch_s))}"
            f" ({show_percent(copied_s / float(predicted.epoch_s))})"
        ]

    def settle(self, problem: Problem) -> Offload:
        """Return the strategy with the fewest chunks that fit."""
        if self.chunks is not None or self.refused(problem):
            return self
        return problem.cache.get(
            (self, *_key(problem), problem.cluster.host_memory),
            lambda: replace(self, chunks=self._fewest_chunks(problem)),
        )

    def _fewest_chunks(self, problem: Problem) -> int:
        """Return the least power of two of chunks that fits by estimates, or needs least memory."""
        estimate = replace(problem, graph=None)
        powers = [1 << bit for bit in range(_most_chunks(problem).bit_length())]
        variants = [replace(self, chunks=chunks) for chunks in powers]
        first = next((bit for bit, each in enumerate(variants) if each.fits(estimate)), None)
        if first is None:
            return settled(min(variants, key=lambda each: each.most_memory(estimate)).chunks)
        tries = variants[first : first + TRIES]
        return settled(next((each for each in tries if each.fits(problem)), tries[-1]).chunks)

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        self.check_vertices(problem)
        if why := self.refused(problem):
            raise SpecError(f"offload: {why}")
        if self.trim:
            check_trim(problem, self.family)
        most = _most_chunks(problem)
        if self.chunks is not None and not 1 <= self.chunks <= most:
            raise SpecError(
                f"offload: a rank's chunks lie in [1, {most}], in all at most one per vertex and"
                f" {MOST_CHUNKS} (chunks: {self.chunks}, ranks: {problem.ranks}); use"
                f" chunks={min(max(self.chunks, 1), most)}, or leave it out"
            )

    def preparation(self, problem: Problem) -> dict[str, float]:
        step = self._step(problem)
        rows = sum((step.counts(1, c).sources for c in step.chunks), np.zeros(1))
        nbytes = float(rows.max()) * problem.model.features * problem.model.itemsize
        features_s = float(problem.cost.load_s(nbytes))
        return {
            "partitioning": problem.seconds_of(step.layout),
            "features": features_s * problem.model.aggregate_cached(1),
        }

    def program(self, problem: Problem) -> Program:
        return self._step(problem).program()

    def _step(self, problem: Problem, evaluates: bool = False) -> ChunkedStep:
        """Return the step on the rows of training, or on all rows for evaluation."""
        layout = problem.chunked(settled(self.chunks))
        trims = self.trim and not evaluates
        return problem.cache.get_recent(
            "step of chunks",
            (self, evaluates, problem),
            lambda: ChunkedStep.of(problem, problem.trimmed(layout) if trims else layout),
            most=2,
        )

    def moved(self, problem: Problem) -> tuple[int, int]:
        """Return the bytes that all ranks load to devices in an epoch, and the bytes stored."""
        moved = Counter[str]()
        for op in self.built(problem).step(0):
            if isinstance(op.work, Copy):
                moved[op.op] += int(op.work.nbytes.sum())
        return moved["load"], moved["store"]

    def memory(self, problem: Problem) -> Memory:
        program = self._step(problem).fullest_program()
        return peak(problem, program, self.resident(problem))

    def resident(self, problem: Problem) -> Resident:
        """Return what devices have besides the tensors of a chunk, with evaluation.

        A CPU rank's device memory is the server's. Graph data that exceeds the rank's share of the
        cluster's `host_memory` counts as device memory.
        """
        step, elsewhere = self._step(problem), np.zeros(problem.ranks)
        data, code = {"copies": step.copy_buffers()}, machine_code(problem, len(step.chunks))
        if self.trim:
            whole = self._step(problem, evaluates=True)
            in_turn = fullest(problem, whole.fullest_program(evaluates=True))
            elsewhere = in_turn + whole.copy_buffers("f") + code
        if problem.cluster.device.kind == "cpu":
            servers = _server_of(problem)
            ranks_of_server = np.bincount(servers)[servers]  # [ranks]
            features = _features_on_host(problem)
            graph_data = sum(self._on_host(problem).values(), features / ranks_of_server)
            room = (problem.cluster.host_memory or 0.0) / ranks_of_server
            data["host"] = np.maximum(graph_data - room, 0.0)
        return Resident(data, code=code, elsewhere=elsewhere)

    def host_memory(self, problem: Problem) -> Memory:
        """Return bytes of features, rows, gradients and edges in servers' memories [servers]."""
        servers, by_rank = _server_of(problem), self._on_host(problem)
        use = {name: np.bincount(servers, nbytes) for name, nbytes in by_rank.items()}
        return {"features": np.full(servers.max() + 1, _features_on_host(problem))} | use

    def _on_host(self, problem: Problem) -> Memory:
        """Return each rank's bytes in its server's memory, by use, without features [ranks]."""
        training = _of_ranks_on_host(problem, self._step(problem))
        if not self.trim:
            return training
        evaluation = _of_ranks_on_host(problem, self._step(problem, evaluates=True), trains=False)
        return {use: nbytes + evaluation[use] for use, nbytes in training.items()}


def _server_of(problem: Problem) -> np.ndarray:
    """Return the server of each rank [ranks], numbered without servers that have no ranks."""
    return np.asarray(np.unique(problem.servers, return_inverse=True)[1])


def _features_on_host(problem: Problem) -> float:
    """Return the bytes of all vertices' features, which a server's ranks share."""
    return float(problem.stats.vertices * problem.model.features * problem.model.itemsize)


def _of_ranks_on_host(problem: Problem, step: ChunkedStep, trains: bool = True) -> Memory:
    """Return each rank's bytes of rows and of edges in its server's memory [ranks].

    Rows: h_1 .. h_{L-1}, two buffers for their gradients if the step trains, logits, and layer 1's
    aggregate if it is constant."""
    model, last, zero = problem.model, len(problem.model.layers), np.zeros(problem.ranks)
    n = [sum((step.counts(h, c).rows for c in step.chunks), zero) for h in range(1, last + 1)]
    hidden = [rows * layer.h_out for rows, layer in zip(n, model.layers[:-1], strict=False)]
    widest = np.max(hidden, axis=0) if hidden else zero
    numbers = sum(hidden, zero) + widest * min(len(hidden), 2) * trains + n[-1] * model.classes
    numbers = numbers + n[0] * model.features * model.aggregate_cached(1)
    kinds = {step.layout.kind(layer): layer for layer in range(1, last + 1)}
    edges = sum(step.edge_bytes(layer, c) for layer in kinds.values() for c in step.chunks)
    labels = sum(step.label_bytes(c) for c in step.chunks)
    return {"rows": numbers * model.itemsize, "edges": np.asarray(edges + labels)}


def _least(problem: Problem) -> GraphParallel:
    """Return the variant of graph parallelism that needs least memory."""
    return GraphParallel(checkpoint=True, trim=problem.needs_few_rows)


def _fits_without(problem: Problem) -> bool:
    """Return whether graph parallelism fits on all GPUs with least memory, or cannot be used."""
    everyone = problem.placed(tuple(range(problem.cluster.ranks)))
    least = _least(everyone)
    return problem.cache.get(
        ("fits without offload", *_key(everyone)),
        lambda: not least.suits(everyone) or least.fits(everyone),
    )


def _key(problem: Problem) -> tuple[Hashable, ...]:
    """Return a key of all properties of a problem that decide whether a strategy fits."""
    device = problem.cluster.device
    room = device.memory, device.kind, device.code_of(problem.model.itemsize)
    ranks = problem.graph, problem.stats, problem.workload, problem.method, problem.servers
    return *ranks, *room


def _most_chunks(problem: Problem) -> int:
    """Return the largest number of chunks per rank."""
    return max(min(MOST_CHUNKS, problem.stats.vertices) // problem.ranks, 1)
