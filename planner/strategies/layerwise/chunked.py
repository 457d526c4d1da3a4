"""The operations of a step of offload: layer by layer, and in each layer chunk by chunk.

All ranks have equally many chunks, and process their first chunks at the same time, then their
second ones.

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
in the last layer also labels. Rows of other ranks are loaded by their owners, and sent as a halo.
A forward store copies the chunk's rows of h_l to the server. A backward load copies the same as the
forward load, and the gradient of the chunk's rows of h_l; the backward pass recomputes the forward
pass. Gradients of the halo are returned to their owners. A backward store adds the gradients of the
rows read to the gradients that other chunks have stored. When a load begins, the device has nothing
of the chunk before.

On a GPU copies overlap with computation: during the computation of a chunk, the results of the
chunk before are stored, and then the layer's next chunk is loaded (`overlapped_order`).

planner/ownership/layout.py counts the rows that a chunk has and reads, as if each chunk were a
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product

import numpy as np

from gnnplan.planner.gnn.layer import LONG
from gnnplan.planner.gnn.model import COUNTS_AT_ENDS, Model, OpMemory, block, footprint, loss
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerCounts, Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import alike_as, end_of_step, first_alike, moments
from gnnplan.planner.strategies.program.program import (
    Copy,
    Exchange,
    Op,
    Program,
    QueuedOp,
    Step,
    Work,
)
from gnnplan.planner.vocabulary.numbers import ByContent, Outer, RankMatrix
from gnnplan.planner.vocabulary.schedule import Compute, Label

# operations on a chunk, each with its way ('f' or 'b') if the name does not tell it
FORWARD = ("load f", "halo f", "forward", "store f")
LAST = ("load f", "halo f", "forward", "loss", "backward", "halo b", "store b")
BACKWARD = ("load b", "halo_again b", "backward", "halo b", "store b")
PASSES = ("forward", "backward")
CROSSING = ("halo f", "halo_again b", "halo b")


def order(model: Model, chunks: Sequence[int]) -> Iterator[Label]:
    """Yield the labels of a step over these chunks; moments are of all chunks."""
    last = len(model.layers)
    for layer in range(1, last):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks)
        yield Label("moments", 0, "f", layer + 1)
    yield from _chunk_by_chunk(LAST, last, model, chunks)
    for layer in range(last - 1, 0, -1):
        yield Label("moments", 0, "b", layer + 1)
        yield from _chunk_by_chunk(BACKWARD, layer, model, chunks)


def evaluation(model: Model, chunks: Sequence[int]) -> Iterator[Label]:
    """Yield the labels of an evaluation, which does the forward pass of every layer."""
    for layer in range(1, len(model.layers) + 1):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks)


def _chunk_by_chunk(
    names: Sequence[str], layer: int, model: Model, chunks: Sequence[int]
) -> Iterator[Label]:
    """Yield the labels of a layer. Constant rows are not exchanged and have no gradient; the last
    layer stores logits even then."""
    if layer <= model.first_varying:
        omitted = CROSSING if names is LAST else (*CROSSING, "store b")
        names = [name for name in names if name not in omitted]
    for chunk, name in product(chunks, names):
        op, _, direction = name.partition(" ")
        yield Label(op, 0, direction, None if op == "loss" else layer, chunk)


@dataclass(frozen=True, eq=False)
class Counts(ByContent):
    """Counts of a layer for one chunk of every rank; estimates are means."""

    rows: np.ndarray  # [ranks]
    sources: np.ndarray  # rows that edges read, own rows and halo [ranks]
    edges: np.ndarray  # without self edges [ranks]
    trained: np.ndarray  # training vertices among the rows [ranks]
    sends: RankMatrix  # sends[i, j]: rows of rank i in the halo of j's chunk [ranks, ranks]
    given: np.ndarray  # rows that each rank sends [ranks]
    halo: np.ndarray  # rows that each rank receives [ranks]


@dataclass(frozen=True, eq=False)
class ChunkedStep:
    """A step over the chunks of a layout, in which each chunk counts as a rank."""

    problem: Problem
    layout: Layout | EstimatedLayout
    all_counts: list[list[Counts]]  # of every layer and chunk
    # for each chunk the first chunk with the same counts in all layers; estimated chunks differ by
    # a vertex at most, so few are distinct
    first_like: list[int]

    @classmethod
    def of(cls, problem: Problem, layout: Layout | EstimatedLayout) -> ChunkedStep:
        """Make the step, and count the rows and edges of all chunks."""
        kinds = [layout.kind(layer) for layer in range(1, len(problem.model.layers) + 1)]
        by_kind = {
            kind: _counts_by_chunk(problem, layout, layout.facts(layer))
            for kind, layer in {kind: layer for layer, kind in enumerate(kinds, 1)}.items()
        }
        counts, first = [by_kind[kind] for kind in kinds], dict[tuple[Counts, ...], int]()
        alike = [first.setdefault(each, c) for c, each in enumerate(zip(*counts, strict=True))]
        return cls(problem, layout, counts, alike)

    @property
    def model(self) -> Model:
        return self.problem.model

    @property
    def chunks(self) -> range:
        """The numbers of each rank's chunks."""
        return range(self.layout.ranks // self.problem.ranks)

    @property
    def overlaps_copies(self) -> bool:
        """Whether copies of a chunk overlap with the computation of another chunk."""
        return self.problem.cluster.device.kind == "cuda" and len(self.chunks) > 1

    def program(self) -> Program:
        step = [*self.ops(order(self.model, self.chunks)), *end_of_step(self.problem)]
        return Program.of(step, order=overlapped_order if self.overlaps_copies else None)

    def fullest_program(self, evaluates: bool = False) -> Program:
        """Return a step, or an evaluation, over one chunk of each kind; its peak memory is that of
        all chunks."""
        labels = evaluation if evaluates else order
        return Program.of(
            [*self.ops(labels(self.model, self.distinct_chunks)), *end_of_step(self.problem)]
        )

    # -- operations ------------------------------------------------------------------------------

    def ops(self, labels: Iterable[Label]) -> Iterator[Op]:
        """Yield the operations of these labels, with their work and memory."""
        model, last = self.model, len(self.model.layers)
        like = first_alike(alike_as(model, self.layout, narrow=False)) | {last: last}

        def computed(op: str, layer: int, n: Counts) -> Compute:
            """Return the computation; backward recomputes forward, except in the last layer."""
            sizes = n.rows, n.sources, n.edges
            if op == "loss":
                forward, backward = model.finish(n.rows)
                return forward + backward
            if op == "forward":
                return model.forward(layer, *sizes)
            back = model.backward(layer, *sizes)
            return back if layer == last else model.forward(layer, *sizes) + back

        @cache
        def work_of(op: str, direction: str, layer: int, c: int) -> Work | None:
            """Return the work of an operation on chunk c, or None for an empty exchange."""
            n = self.counts(layer, c)
            if op == "load":
                return _copy(self.loaded_bytes(direction, layer, c))
            if op == "store":
                return _copy(self.stored_bytes(direction, layer, c))
            if not op.startswith("halo"):
                return computed(op, like[layer], n)
            if not n.sends.any():
                return None
            returns = (op, direction) == ("halo", "b")  # gradients, to the owners
            return Exchange(n.sends.T if returns else n.sends, self._row_bytes(layer))

        for label in labels:
            op, direction, layer, c = label.op, label.direction, label.layer or last, label.chunk
            if c is None:
                yield from moments(self.problem, layer, direction)
            elif (work := work_of(op, direction, layer, self.first_like[c])) is not None:
                holds = partial(self._hold, op, layer, c) if op in PASSES else None
                yield Op(op, direction, label.layer, chunk=c, work=work, holds=holds)

    # -- counts, work and bytes ------------------------------------------------------------------

    def counts(self, layer: int, c: int) -> Counts:
        return self.all_counts[layer - 1][c]

    @property
    def distinct_chunks(self) -> list[int]:
        """One chunk of each set of chunks with equal counts."""
        return sorted(set(self.first_like))

    def _row_bytes(self, layer: int) -> int:
        """Return the bytes of a row of h_{l-1}."""
        return self.model.layers[layer - 1].h_in * self.model.itemsize

    def loaded_bytes(self, direction: str, layer: int, c: int) -> np.ndarray:
        """Return the bytes that ranks load for a layer of chunk c [ranks].

        A rank also loads the rows that it sends, but not the halo rows that it receives."""
        n = self.counts(layer, c)
        loaded = self.read_bytes(layer, c) + self.edge_bytes(layer, c)
        sent = self._exchanged(layer, n.given - n.halo)
        return np.asarray(loaded + sent + self._gradient_or_labels(direction, layer, c))

    def _gradient_or_labels(self, direction: str, layer: int, c: int) -> np.ndarray:
        """Return the bytes of the outputs' gradient (backward), or of labels, if any [ranks]."""
        if direction == "b":
            return self.output_bytes(layer, c)
        return self.label_bytes(c) * (layer == len(self.model.layers))

    def output_bytes(self, layer: int, c: int) -> np.ndarray:
        """Return the bytes of the rows that the layer computes, or of their gradient [ranks]."""
        row = self.model.layers[layer - 1].h_out * self.model.itemsize
        return np.asarray(self.counts(layer, c).rows * row)

    def stored_bytes(self, direction: str, layer: int, c: int) -> np.ndarray:
        """Return the bytes that ranks store after a layer of chunk c [ranks]."""
        n, model, last = self.counts(layer, c), self.model, len(self.model.layers)
        outputs = self.output_bytes(layer, c)
        if direction == "f":
            return outputs
        stored = outputs * (layer == last)  # the last layer's outputs are logits
        if layer > model.first_varying:
            stored = stored + self.read_bytes(layer, c) + self._exchanged(layer, n.given - n.halo)
        return np.asarray(stored)

    def _exchanged(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Return the bytes of these numbers of rows, if the layer exchanges rows [ranks]."""
        return np.asarray(rows * self._row_bytes(layer) * (layer > self.model.first_varying))

    def read_bytes(self, layer: int, c: int) -> np.ndarray:
        """Return the bytes of the rows that the layer reads, or of its cached aggregate [ranks]."""
        n = self.counts(layer, c)
        rows = n.sources
        if layer == 1:
            rows = np.asarray(self.model.constant_rows(n.rows, rows))
        return np.asarray(rows * self._row_bytes(layer))

    def edge_bytes(self, layer: int, c: int) -> np.ndarray:
        """Return the bytes of the layer's edges, and of the ids of the rows it reads [ranks]."""
        n, model = self.counts(layer, c), self.model
        if model.aggregate_cached(layer):
            return np.zeros(self.problem.ranks)
        spec = model.layers[layer - 1]
        return np.asarray(block(model, spec, n.rows, n.sources, n.edges)) + COUNTS_AT_ENDS

    def label_bytes(self, c: int) -> np.ndarray:
        """Return the bytes of labels, and of the ids of training vertices [ranks]."""
        n, several = self.counts(len(self.model.layers), c), self.problem.stats.learned != "label"
        label = self.model.classes * self.model.weight_itemsize if several else LONG
        return np.asarray(n.rows * label + LONG * n.trained)

    # -- memory ----------------------------------------------------------------------------------

    def copy_buffers(self, ways: str = "fb") -> np.ndarray:
        """Return the peak bytes of copies during computation: the results of the chunk before,
        then the rows of the next chunk [ranks]."""
        peak = np.zeros(self.problem.ranks)
        if self.overlaps_copies:
            for layer, c, direction in product(
                range(1, len(self.model.layers) + 1), self.distinct_chunks, ways
            ):
                for nbytes in (self.loaded_bytes, self.stored_bytes):
                    peak = np.maximum(peak, nbytes(direction, layer, c))
        return peak

    def _hold(self, op: str, layer: int, c: int) -> OpMemory:
        """Return the memory of a pass, which leaves nothing on the device for the next chunk."""
        n, is_last = self.counts(layer, c), layer == len(self.model.layers)
        need = footprint(self.model, layer, n.rows, n.sources, n.edges)
        loaded = self.read_bytes(layer, c) + self.edge_bytes(layer, c)
        direction = "b" if op == "backward" and not is_last else "f"
        loaded = loaded + self._gradient_or_labels(direction, layer, c)
        if op == "forward":
            return OpMemory(loaded + need.left, 0.0)
        if not is_last:
            return OpMemory(loaded + need.most, 0.0)
        scored, gradient = loss(self.model, n.rows, n.trained), self.output_bytes(layer, c)
        peak = np.maximum(need.left + scored.most, scored.left + gradient + need.most)
        return OpMemory(loaded + peak, 0.0)


def _counts_by_chunk(
    problem: Problem, layout: Layout | EstimatedLayout, facts: LayerCounts
) -> list[Counts]:
    """Return a layer's counts for every chunk."""
    chunks, all_sends = layout.ranks // problem.ranks, _sends(problem, layout, facts)
    if isinstance(layout, EstimatedLayout):
        trained = np.full(layout.ranks, problem.stats.train_vertices / layout.ranks)
    else:
        own = map(layout.own, range(layout.ranks))
        trained = np.array([float(layout.graph.train[rows].sum()) for rows in own])

    def counts_of(c: int) -> Counts:
        chunk, sends = slice(c, None, chunks), all_sends[c]  # chunk c of every rank
        each = facts.rows, facts.sources, facts.edges, trained
        rows, sources, edges, seeds = (np.asarray(n, dtype=float)[chunk] for n in each)
        return Counts(rows, sources, edges, seeds, sends, sends.sum(1), sends.sum(0))

    return [counts_of(c) for c in range(chunks)]


def _sends(problem: Problem, layout: Layout | EstimatedLayout, facts: LayerCounts) -> RankMatrix:
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


def _copy(nbytes: np.ndarray) -> Copy:
    """Return a copy of this many bytes, rounded [ranks]."""
    return Copy(np.round(nbytes).astype(np.int64))


def overlapped_order(at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[QueuedOp]:
    """Yield the queue of steps whose copies overlap with computation (an `Order`)."""
    computed: tuple[Label, ...] = ()  # the last operation other than copies
    for step in range(steps):
        loaded: dict[int | None, tuple[Label, ...]] = {}  # chunk -> its load
        stored: tuple[Label, ...] = ()
        for op in _loads_ahead(at(step)):
            label, after = op.label(step), computed
            if op.op == "load":
                loaded[op.chunk] = (label,)
            elif op.op == "store":
                stored = (label,)
            else:  # operations of all chunks, such as the update, wait for the last store
                after += loaded.pop(op.chunk, ()) + (stored if op.chunk is None else ())
                computed = (label,)
            yield QueuedOp(op, step, after)


def _loads_ahead(ops: Iterable[Op]) -> Iterator[Op]:
    """Yield the operations with each load moved to the place of the previous load in its pass of a
    layer; the first load stays, so a pass begins with two loads."""
    loads = pairwise(op for op in ops if op.op == "load")
    following = {
        op: later
        for op, later in loads
        if (op.direction, op.layer) == (later.direction, later.layer)
    }
    ahead = set(following.values())
    for op in ops:
        if op not in ahead:
            yield op
        if op in following:
            yield following[op]
