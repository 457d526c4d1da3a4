"""Offload (HongTu): GPUs train a graph that does not fit in their memory, chunk by chunk.

A server's memory has the features, and every layer's rows and gradients of the server's ranks. Each
rank's part of the graph is divided into equally many chunks. Ranks process their first chunks at
the same time, then their second ones, layer by layer:

    layers 1 .. L - 1, all chunks of each
    copy     |load f l c|                         |store f l c|
    comm                 |halo f l c|
    compute                          |forward l c|

    the last layer, all chunks
    copy     |load f L c|                                                       |store b L c|
    comm                 |halo f L c|                              |halo b L c|
    compute                          |forward L c|loss c|backward L c|

    layers L - 1 .. 1, all chunks of each
    copy     |load b l c|                                           |store b l c|
    comm                 |halo_again b l c|              |halo b l c|
    compute                                |backward l c|

A forward load copies the rows of h_{l-1} that the chunk's edges read, and the edges, to the device;
in the last layer also labels. A row that another rank owns is loaded by its owner and sent as a
halo row, once for every chunk that reads it; features are read from the own server's memory. A
forward store copies the chunk's rows of h_l to the server. A backward load copies the same as the
forward load, and the gradient of the chunk's rows of h_l; the backward pass recomputes the forward
pass. Gradients of the halo are returned to their owners. A backward store adds the gradients of the
rows read to the gradients that other chunks have stored. When a load begins, the device has nothing
of the chunk before.

On GPUs copies overlap with computation, except the first load and the last store of a layer's pass
(`overlapped_order`):

    copy     |load c0|load c1|store c0|load c2|store c1|..
    compute          |f 1 c0 .|f 1 c1 . . . . |f 1 c2|

So a device has one layer of one chunk in memory, and on GPUs a second chunk that is being copied.
The number of chunks is the least power of two that fits by estimates, doubled while that shortens
an epoch, since more copies overlap; if the counted partition does not fit, it is up to sixteen
times as large. More chunks read more rows of each other.

Exact, since no row is missing and none is stale.

Bytes per epoch, for chunks with R rows, S rows read and E edges of e bytes, H_l numbers of b bytes,
of which D rows are in another rank's memory:

    loads    sum over chunks [ sum_{l=1..L} (S H_{l-1} b + E e) + sum_{l=1..L-1} (S H_{l-1} b + E e
             + R H_l b) ], and labels
    stores   sum over chunks [ sum_{l=1..L} R H_l b + sum_{l=2..L} S H_{l-1} b ]
    halos    sum over chunks [ 3 sum_{l=2..L-1} D H_{l-1} b + 2 D H_{L-1} b ]

If layer 1's aggregate is constant, it is computed once, and R rows of it are loaded instead of S.
planner/ownership/layout.py counts the rows that a chunk has and reads, as if each chunk were a
rank. Source: Wang et al., HongTu (SIGMOD 2023), Sec. 4 and Alg. 1; there, unlike here, rows that
the next chunk also reads stay on the device, and a row that chunks of several GPUs read is loaded
once. See also executor/strategies/offload.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from typing import Self

import numpy as np

from gnnplan.planner.gnn.layer import LONG
from gnnplan.planner.gnn.model import (
    COUNTS_AT_ENDS,
    Model,
    OpMemory,
    block_bytes,
    layer_memory,
    loss_memory,
    structure_work,
)
from gnnplan.planner.gnn.trace import PIECES
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.base import Example, Memory, Resident, Strategy, settled
from gnnplan.planner.strategies.layerwise.graph_parallel import GraphParallel, check_trim
from gnnplan.planner.strategies.layerwise.step import end_of_step, finish, first_alike, moments
from gnnplan.planner.strategies.program.account import fullest, machine_code, peak
from gnnplan.planner.strategies.program.program import (
    Copy,
    Exchange,
    Op,
    Program,
    QueuedOp,
    Work,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import ByContent, Outer, RankMatrix, numbered
from gnnplan.planner.vocabulary.schedule import Label
from gnnplan.planner.vocabulary.units import show_bytes, show_percent, show_time

# operations on a chunk, each with its way ('f' or 'b') if the name does not tell it
FORWARD = ("load f", "halo f", "forward", "store f")
LAST = ("load f", "halo f", "forward", "loss", "backward", "halo b", "store b")
BACKWARD = ("load b", "halo_again b", "backward", "halo b", "store b")
PASSES = ("forward", "backward")
CROSSING = ("halo f", "halo_again b", "halo b")


def order(model: Model, chunks: Sequence[int], ahead: bool = False) -> Iterator[Label]:
    """Yield the labels of a step over these chunks; moments are of all chunks.

    ahead: each load is in the place of the load before it, so a pass begins with two loads."""
    last = len(model.layers)
    for layer in range(1, last):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks, ahead)
        yield Label("moments", 0, "f", layer + 1)
    yield from _chunk_by_chunk(LAST, last, model, chunks, ahead)
    for layer in range(last - 1, 0, -1):
        yield Label("moments", 0, "b", layer + 1)
        yield from _chunk_by_chunk(BACKWARD, layer, model, chunks, ahead)


def evaluation(model: Model, chunks: Sequence[int]) -> Iterator[Label]:
    """Yield the labels of an evaluation, which does the forward pass of every layer."""
    for layer in range(1, len(model.layers) + 1):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks)


def _chunk_by_chunk(
    names: Sequence[str], layer: int, model: Model, chunks: Sequence[int], ahead: bool = False
) -> Iterator[Label]:
    """Yield the labels of a layer. Constant rows are not exchanged and have no gradient; the last
    layer stores logits even then."""
    if layer <= model.first_varying:
        omitted = CROSSING if names is LAST else (*CROSSING, "store b")
        names = [name for name in names if name not in omitted]
    load, *others = names
    for place, chunk in enumerate(chunks):
        loads = product((load,), chunks[place + (ahead and place > 0) : place + 1 + ahead])
        for name, at in (*loads, *product(others, (chunk,))):
            op, _, direction = name.partition(" ")
            yield Label(op, 0, direction, None if op == "loss" else layer, at)


@dataclass(frozen=True, eq=False)
class Counts(ByContent):
    """Counts of a layer for one chunk of every rank; estimates are means."""

    rows: np.ndarray  # [ranks]
    sources: np.ndarray  # rows that edges read, own rows and halo [ranks]
    edges: np.ndarray  # without self edges [ranks]
    trained: np.ndarray  # training vertices among the rows [ranks]
    sends: RankMatrix  # sends[i, j]: rows of rank i in the halo of j's chunk [ranks, ranks]


class ChunkLayer:
    """A layer on one chunk of every rank: bytes on the device [ranks] [B], work and memory."""

    def __init__(self, problem: Problem, model: Model, layer: int, n: Counts) -> None:
        spec = model.layers[layer - 1]
        self.problem, self.model, self.layer, self.n = problem, model, layer, n
        self.sizes = n.rows, n.sources, n.edges
        self.row, self.is_last = spec.h_in * model.itemsize, layer == len(model.layers)
        self.varies = layer > model.first_varying  # else the layer exchanges no rows
        # the rows that the layer reads, or its cached aggregate
        read = model.constant_rows(n.rows, n.sources) if layer == 1 else n.sources
        self.read = np.asarray(read * self.row)
        # the rows that each rank sends, minus those that it receives
        surplus = n.sends.sum(1) - n.sends.sum(0)
        self.surplus = np.asarray(surplus * self.row * self.varies)
        # the rows that the layer computes, or their gradient
        self.outputs = np.asarray(n.rows * (spec.h_out * model.itemsize))
        # the edges, and the ids of the rows that they read
        self.edges = np.zeros(problem.ranks)
        if not model.aggregate_cached(layer):
            edges = block_bytes(model, spec, *self.sizes)
            self.edges = np.asarray(edges) + COUNTS_AT_ENDS
        # labels, and the ids of training vertices
        several = problem.stats.learned != "label"
        label = model.classes * model.weight_itemsize if several else LONG
        self.labels = (n.rows * label + LONG * n.trained) * self.is_last

    def loaded(self, direction: str) -> np.ndarray:
        """Return the bytes that ranks load for the layer.

        A rank also loads the rows that it sends, but not the halo rows that it receives."""
        target = self.outputs if direction == "b" else self.labels
        return np.asarray(self.read + self.edges + self.surplus + target)

    def stored(self, direction: str) -> np.ndarray:
        """Return the bytes that ranks store after the layer."""
        if direction == "f":
            return self.outputs
        logits = self.outputs * self.is_last
        return logits + self.read + self.surplus if self.varies else logits

    def work(self, op: str, direction: str) -> Work | None:
        """Return the work of an operation, or None for an empty exchange."""
        n = self.n
        match op:
            case "load":
                nbytes = np.round(self.loaded(direction)).astype(np.int64)
                spec = self.model.layers[self.layer - 1]
                return Copy(nbytes, *structure_work(self.model, spec, *self.sizes))
            case "store":
                return Copy(np.round(self.stored(direction)).astype(np.int64))
            case "loss":
                return finish(self.problem, n.rows, None)
            case "forward" | "backward":
                forward, backward = self.model.work(self.layer, *self.sizes)
                if op == "forward":
                    return forward
                return backward if self.is_last else forward + backward  # recomputes forward
        if not n.sends.any():
            return None
        returns = (op, direction) == ("halo", "b")  # gradients, to the owners
        return Exchange(n.sends.T if returns else n.sends, self.row)

    def held(self, op: str) -> OpMemory:
        """Return the memory of a pass, which leaves nothing on the device for the next chunk."""
        n, returns = self.n, op == "backward" and not self.is_last
        need = layer_memory(self.model, self.layer, *self.sizes)
        loaded = self.read + self.edges + (self.outputs if returns else self.labels)
        if op == "forward":
            return OpMemory(loaded + need.left, 0.0)
        if returns:
            return OpMemory(loaded + need.most, 0.0)
        scored = loss_memory(self.model, n.rows, n.trained)
        peak = np.maximum(need.left + scored.most, scored.left + self.outputs + need.most)
        return OpMemory(loaded + peak, 0.0)


class ChunkedStep:
    """A step, or an evaluation, over the chunks of a layout, in which each chunk counts as a rank.

    parts: for each chunk of a rank, its layers 1 .. L; chunks with equal counts share them, since
    estimated chunks differ by a vertex at most. distinct: the layers of each kind of chunk.
    """

    def __init__(self, problem: Problem, layout: AnyLayout, trains: bool = True) -> None:
        self.problem, self.layout, self.trains = problem, layout, trains
        # chunks differ in size, for each of which oneDNN would compile code
        in_pieces = problem.cluster.device.code_of(problem.model.itemsize) > 0
        self.model = model = replace(problem.model, in_pieces=in_pieces)
        like = first_alike(map(layout.kind, range(1, len(model.layers) + 1)))
        counts = {layer: _counts_by_chunk(problem, layout, layer) for layer in {*like.values()}}
        parts = dict[tuple[Counts, ...], list[ChunkLayer]]()
        self.parts = list[list[ChunkLayer]]()
        for each in zip(*(counts[layer] for layer in like.values()), strict=True):
            if each not in parts:
                parts[each] = [
                    ChunkLayer(problem, model, layer, n) for layer, n in enumerate(each, 1)
                ]
            self.parts.append(parts[each])
        self.distinct = list(parts.values())
        # whether copies of a chunk overlap with the computation of another chunk
        self.overlaps_copies = problem.cluster.device.kind == "cuda" and len(self.parts) > 1

    def program(self) -> Program:
        ahead = self.overlaps_copies
        ops = self._ops(order(self.model, range(len(self.parts)), ahead), self.parts)
        step = [*ops, *end_of_step(self.problem)]
        return Program.of(step, order=overlapped_order if ahead else None)

    def fullest_program(self) -> Program:
        """Return the step over one chunk of each kind; its peak memory is that of all chunks."""
        labels = (order if self.trains else evaluation)(self.model, range(len(self.distinct)))
        return Program.of(list(self._ops(labels, self.distinct)))

    def _ops(self, labels: Iterable[Label], parts: list[list[ChunkLayer]]) -> Iterator[Op]:
        """Yield the operations of these labels, with their work and memory."""
        works: dict[tuple[ChunkLayer, str, str], Work | None] = {}
        for op, _, direction, layer, c, _ in labels:
            if c is None:
                yield from moments(self.problem, layer or 0, direction)
                continue
            part = parts[c][(layer or 0) - 1]
            if (each := (part, op, direction)) not in works:
                works[each] = part.work(op, direction)
            if (work := works[each]) is not None:
                holds = partial(part.held, op) if op in PASSES else None
                yield Op(op, direction, layer, chunk=c, work=work, holds=holds)

    def copy_buffers(self) -> np.ndarray:
        """Return the peak bytes of copies during computation: the results of the chunk before,
        then the rows of the next chunk [ranks]."""
        peak, ways = np.zeros(self.problem.ranks), "fb" if self.trains else "f"
        for part, direction in product(chain(*self.distinct), ways if self.overlaps_copies else ""):
            peak = np.maximum.reduce([peak, part.loaded(direction), part.stored(direction)])
        return peak

    def on_host(self) -> Memory:
        """Return each rank's bytes of rows and of edges in its server's memory [ranks].

        Rows: h_1 .. h_{L-1}, two buffers for their gradients if the step trains, logits, and layer
        1's aggregate if it is constant."""
        model, zero = self.model, np.zeros(self.problem.ranks)
        layers = list(zip(*self.parts, strict=True))  # all chunks of each
        n = [sum((part.n.rows for part in of_layer), zero) for of_layer in layers]
        hidden = [rows * layer.h_out for rows, layer in zip(n, model.layers[:-1], strict=False)]
        widest = np.max(hidden, axis=0) if hidden else zero
        buffers = min(len(hidden), 2) * self.trains
        numbers = sum(hidden, zero) + widest * buffers + n[-1] * model.classes
        numbers = numbers + n[0] * model.features * model.aggregate_cached(1)
        kinds = {self.layout.kind(layer): parts for layer, parts in enumerate(layers, 1)}
        edges = sum(part.edges for parts in kinds.values() for part in parts)
        labels = sum(part.labels for part in layers[-1])
        return {"rows": numbers * model.itemsize, "edges": np.asarray(edges + labels)}


def _counts_by_chunk(problem: Problem, layout: AnyLayout, layer: int) -> list[Counts]:
    """Return a layer's counts for every chunk."""
    facts = layout.facts(layer)
    if isinstance(layout, EstimatedLayout):
        trained = np.full(layout.ranks, problem.stats.train_vertices / layout.ranks)
    else:
        own = map(layout.own, range(layout.ranks))
        trained = np.array([float(layout.graph.train[rows].sum()) for rows in own])
    each = np.array([facts.rows, facts.sources, facts.edges, trained], dtype=float)
    by_chunk = each.reshape(4, problem.ranks, -1).transpose(2, 0, 1)  # [chunks, counts, ranks]
    sends = _sends(problem, layout, facts)
    return [
        Counts(rows, sources, edges, seeds, sent)
        for (rows, sources, edges, seeds), sent in zip(by_chunk, sends, strict=True)
    ]


def _sends(problem: Problem, layout: AnyLayout, facts: LayerCounts) -> RankMatrix:
    """Return the rows sent from each rank to each rank's chunks [chunks, ranks, ranks]."""
    ranks, chunks = problem.ranks, layout.ranks // problem.ranks
    if isinstance(layout, EstimatedLayout):
        part = layout.vertices / ranks
        far = layout.leaving(part) / max(layout.leaving(part / chunks), 1e-300)
        halo = facts.halo.sum(0).reshape(ranks, chunks) * min(far, 1.0)
        read = np.round(halo / max(ranks - 1, 1)).astype(np.int64)
        return Outer.of([0] * ranks, True, read.T).T
    by_rank = np.asarray(facts.sends).reshape(ranks, chunks, ranks, chunks).sum(1)
    return np.asarray(~np.eye(ranks, dtype=bool)[:, :, None] * by_rank).transpose(2, 0, 1)


def overlapped_order(program: Program, steps: int) -> Iterator[QueuedOp]:
    """Yield the queue of steps whose copies overlap with computation (an `Order`)."""
    computed: tuple[Label, ...] = ()  # the last operation other than copies
    for step in range(steps):
        loaded: dict[int | None, tuple[Label, ...]] = {}  # chunk -> its load
        stored: tuple[Label, ...] = ()
        for op in program.step(step):
            label, after = op.label(step), computed
            if op.op == "load":
                loaded[op.chunk] = (label,)
            elif op.op == "store":
                stored = (label,)
            else:  # operations of all chunks, such as the update, wait for the last store
                after += loaded.pop(op.chunk, ()) + (stored if op.chunk is None else ())
                computed = (label,)
            yield QueuedOp(op, step, after)


MOST_CHUNKS = 1024  # a limit, because a plan counts the rows that each chunk reads of each other
TRIES = 5  # how many numbers of chunks are partitioned and counted, if estimates are too low
# Chunks are doubled while an epoch takes at most this share of the time. On GPUs copies overlap
# with the computation of other chunks, but more chunks read more rows of each other, and how many
# more is an estimate.
PAYS = 0.98


@dataclass(frozen=True)
class Offload(Strategy):
    """Full-graph training with vertex data in servers' memories.

    chunks: number of chunks of each rank's part; None: as few as fit, or more if that is faster.
    trim: leave out rows that no training vertex needs, as in graph parallelism.
    """

    chunks: int | None = None
    trim: bool = False

    family = "offload"
    claim = 1e-6
    rounds_rows = True
    executor = "gnnplan.executor.strategies.offload"
    examples = (
        Example("offload(chunks=3)", ranks=1),
        Example("offload(chunks=2)"),
        Example("offload(chunks=2,trim=True)"),
    )

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield a variant only if graph parallelism does not fit; if it fits, it is faster."""
        if not cls.refused(problem) and not _fits_without(problem):
            yield cls(trim=problem.needs_few_rows).settle(problem)

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
        host_bytes = sum(variant.on_fullest_server(placed).values())
        copied_s = sum(
            float(seconds)
            for op, seconds in predicted.by_op.items()
            if op.split(":")[0] in ("load", "store")
        )
        return [
            f"{variant} keeps {show_bytes(host_bytes)} in a server's memory, because the graph"
            f" would take {show_bytes(_least(placed).most_memory(placed))} on a device; per epoch"
            f" {show_bytes(loaded)} are loaded and {show_bytes(stored)} stored, which takes"
            f" {show_time(copied_s)} of {show_time(float(predicted.epoch_s))}"
            f" ({show_percent(copied_s / float(predicted.epoch_s))})"
        ]

    def settle(self, problem: Problem) -> Self:
        """Return the strategy with the least power of two of chunks that fits by estimates, doubled
        while that pays; or the power that needs least memory."""
        if self.chunks is not None or self.refused(problem):
            return self

        def choose() -> int:
            def needed(chunks: int, on: Problem) -> float:
                return replace(self, chunks=chunks).most_memory(on)

            def epoch_s(chunks: int) -> float:
                return float(replace(self, chunks=chunks).epoch_s(estimate))

            room, estimate = problem.cluster.device.memory, replace(problem, graph=None)
            powers = [1 << bit for bit in range(_most_chunks(problem).bit_length())]
            fit = (chunks for chunks in powers if needed(chunks, estimate) <= room)
            if (chosen := next(fit, None)) is None:
                return min(powers, key=lambda chunks: needed(chunks, estimate))
            least_s = epoch_s(chosen)
            for more in fit:
                fits_servers = replace(self, chunks=more).fits_servers(estimate)
                if not fits_servers or (seconds := epoch_s(more)) > PAYS * least_s:
                    break
                chosen, least_s = more, seconds
            tries = [chunks for chunks in powers if chunks >= chosen][:TRIES]
            return next((chunks for chunks in tries if needed(chunks, problem) <= room), tries[-1])

        # everything that decides how much fits, and how long an epoch takes
        question = problem.graph, problem.stats, problem.workload, problem.method, problem.placement
        key = "chunks", self, *question, problem.cluster.model_dump_json()
        return replace(self, chunks=problem.cache.get(key, choose))

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
        rows = sum((first.n.sources for first, *_ in step.parts), np.zeros(1))
        nbytes = float(rows.max()) * problem.model.features * problem.model.itemsize
        features_s = float(problem.cost.load_s(nbytes))
        return {
            "partitioning": problem.cache.seconds_of(step.layout),
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
            lambda: ChunkedStep(
                problem, problem.trimmed(layout) if trims else layout, not evaluates
            ),
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
        data, code = {"copies": step.copy_buffers()}, machine_code(problem, PIECES)
        if self.trim:
            whole = self._step(problem, evaluates=True)
            elsewhere = fullest(problem, whole.fullest_program()) + whole.copy_buffers() + code
        if problem.on_cpu:
            servers = np.array(numbered(problem.servers))
            ranks_of_server = np.bincount(servers)[servers]  # [ranks]
            features = _features_on_host(problem)
            graph_data = sum(self._on_host(problem).values(), features / ranks_of_server)
            room = (problem.cluster.host_memory or 0.0) / ranks_of_server
            data["host"] = np.maximum(graph_data - room, 0.0)
        return Resident(data, code=code, elsewhere=elsewhere)

    def host_memory(self, problem: Problem) -> Memory:
        """Return bytes of features, rows, gradients and edges in servers' memories [servers]."""
        servers, by_rank = np.array(numbered(problem.servers)), self._on_host(problem)
        use = {name: np.bincount(servers, nbytes) for name, nbytes in by_rank.items()}
        return {"features": np.full(servers.max() + 1, _features_on_host(problem))} | use

    def _on_host(self, problem: Problem) -> Memory:
        """Return each rank's bytes in its server's memory, by use, without features [ranks]."""
        training = self._step(problem).on_host()
        if not self.trim:
            return training
        evaluation = self._step(problem, evaluates=True).on_host()
        return {use: nbytes + evaluation[use] for use, nbytes in training.items()}


def _features_on_host(problem: Problem) -> float:
    """Return the bytes of all vertices' features, which a server's ranks share."""
    return float(problem.stats.vertices * problem.model.features * problem.model.itemsize)


def _least(problem: Problem) -> GraphParallel:
    """Return the variant of graph parallelism that needs least memory."""
    return GraphParallel(checkpoint=True, trim=problem.needs_few_rows)


def _fits_without(problem: Problem) -> bool:
    """Return whether graph parallelism fits on all GPUs with least memory, or cannot be used."""
    everyone = problem.placed(tuple(range(problem.cluster.ranks)))
    least, device = _least(everyone), problem.cluster.device
    room = device.memory, device.kind, device.code_of(problem.model.itemsize)
    question = problem.graph, problem.stats, problem.workload, problem.method, everyone.servers
    return problem.cache.get(
        ("fits without offload", *question, *room),
        lambda: not least.suits(everyone) or least.fits(everyone),
    )


def _most_chunks(problem: Problem) -> int:
    """Return the largest number of chunks per rank."""
    return max(min(MOST_CHUNKS, problem.stats.vertices) // problem.ranks, 1)
