"""The operations of a step that goes layer by layer, and in each layer chunk by chunk (offload).

Every rank has as many chunks; all of them do their first one at the same time, then their second.

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

A forward load brings the rows of h_{l-1} that the chunk's edges read, and the edges; the last layer
also labels. Rows that are in another rank's memory are loaded there, and cross as a halo. A store
takes the chunk's rows of h_l back. A backward load brings the same and the gradient of the chunk's
rows of h_l; the backward pass begins with the forward pass. The gradient of the halo goes home. A
store takes the gradient of the rows read back, where it is added to what other chunks have left
there. When a load begins, nothing of the chunk before is on the device.

A GPU copies beside computation: while a chunk is computed, what the one before has made is stored,
and then the rows of the layer's next chunk are loaded (`beside`).

Which rows a chunk has and reads is counted by planner/ownership/layout.py, as if each chunk were a
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import pairwise, product

import numpy as np

from gnnplan.planner.gnn.footprint import COUNTS_AT_ENDS, block, footprint, loss
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.operations import LONG
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import alike_as, end_of_step, first_alike, moments
from gnnplan.planner.strategies.program.program import (
    Copy,
    Exchange,
    Held,
    Op,
    Program,
    Queued,
    Step,
    Work,
)
from gnnplan.planner.vocabulary.outer import Outer, Pairs
from gnnplan.planner.vocabulary.schedule import Compute, Label
from gnnplan.planner.vocabulary.values import Value

# what is done with a chunk: an operation, and the pass that it is of
FORWARD = ("load f", "halo f", "forward", "store f")
LAST = ("load f", "halo f", "forward", "loss", "backward", "halo b", "store b")
BACKWARD = ("load b", "halo_again b", "backward", "halo b", "store b")
PASSES = ("forward", "backward")
CROSSING = ("halo f", "halo_again b", "halo b")


def order(model: Model, chunks: Sequence[int]) -> Iterator[Label]:
    """The operations of a step over these chunks; moments are of all chunks."""
    last = len(model.layers)
    for layer in range(1, last):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks)
        yield Label("moments", 0, "f", layer + 1)
    yield from _chunk_by_chunk(LAST, last, model, chunks)
    for layer in range(last - 1, 0, -1):
        yield Label("moments", 0, "b", layer + 1)
        yield from _chunk_by_chunk(BACKWARD, layer, model, chunks)


def evaluation(model: Model, chunks: Sequence[int]) -> Iterator[Label]:
    """The operations of an evaluation: every layer goes forward."""
    for layer in range(1, len(model.layers) + 1):
        yield from _chunk_by_chunk(FORWARD, layer, model, chunks)


def _chunk_by_chunk(
    named: Sequence[str], layer: int, model: Model, chunks: Sequence[int]
) -> Iterator[Label]:
    """Of a layer. Constant rows do not cross and have no gradient, but the last are logits."""
    if layer <= model.first_varying:
        of_varying = CROSSING if named is LAST else (*CROSSING, "store b")
        named = [name for name in named if name not in of_varying]
    for chunk, name in product(chunks, named):
        op, _, way = name.partition(" ")
        yield Label(op, 0, way, None if op == "loss" else layer, chunk)


@dataclass(frozen=True, eq=False)
class Counts(Value):
    """What the ranks' chunks of a turn have in a layer; estimates are means."""

    rows: np.ndarray  # [ranks]
    sources: np.ndarray  # rows that edges read, the chunk's own and the halo included [ranks]
    edges: np.ndarray  # without self edges [ranks]
    trained: np.ndarray  # training vertices among the rows [ranks]
    sends: Pairs  # sends[i, j]: rows of the halo of j that i has [ranks, ranks]
    given: np.ndarray  # rows of others' halos that each rank has, and sends [ranks]
    halo: np.ndarray  # rows read that other ranks have [ranks]


@dataclass(frozen=True, eq=False)
class ChunkedStep:
    """A step over the chunks of a layout, each of which is a rank there."""

    problem: Problem
    layout: Layout | EstimatedLayout

    @property
    def model(self) -> Model:
        return self.problem.model

    @property
    def chunks(self) -> range:
        """Those of each rank."""
        return range(self.layout.ranks // self.problem.ranks)

    @property
    def copies_beside(self) -> bool:
        """Whether chunks pass the device while others are computed."""
        return self.problem.cluster.device.kind == "cuda" and len(self.chunks) > 1

    def program(self) -> Program:
        step = [*self.ops(order(self.model, self.chunks)), *end_of_step(self.problem)]
        return Program.of(step, order=beside if self.copies_beside else None)

    def fullest_program(self, evaluates: bool = False) -> Program:
        """The step over one chunk of each kind, which holds as much as the whole step; or what an
        evaluation does of it."""
        does = evaluation if evaluates else order
        return Program.of([*self.ops(does(self.model, self.unlike)), *end_of_step(self.problem)])

    # -- operations ------------------------------------------------------------------------------

    def ops(self, labels: Iterable[Label]) -> Iterator[Op]:
        """Operations with what they move, compute and hold."""
        model, last = self.model, len(self.model.layers)
        like = first_alike(alike_as(model, self.layout, narrow=False)) | {last: last}

        def computed(op: str, layer: int, n: Counts) -> Compute:
            """A backward pass begins with the forward pass, but that of the last layer."""
            sizes = n.rows, n.sources, n.edges
            if op == "loss":
                forward, backward = model.finish(n.rows)
                return forward + backward
            if op == "forward":
                return model.forward(layer, *sizes)
            back = model.backward(layer, *sizes)
            return back if layer == last else model.forward(layer, *sizes) + back

        @cache
        def work_of(op: str, way: str, layer: int, c: int) -> Work | None:
            """None: nothing crosses."""
            n = self.counts(layer, c)
            if op == "load":
                return _copied(self.loaded_bytes(way, layer, c))
            if op == "store":
                return _copied(self.stored_bytes(way, layer, c))
            if not op.startswith("halo"):
                return computed(op, like[layer], n)
            if not n.sends.any():
                return None
            home = (op, way) == ("halo", "b")
            return Exchange(n.sends.T if home else n.sends, self._row_bytes(layer))

        for label in labels:
            op, way, layer, c = label.op, label.way, label.layer or last, label.chunk
            if c is None:
                yield from moments(self.problem, layer, way)
            elif (work := work_of(op, way, layer, self._first_like[c])) is not None:
                holds = partial(self._hold, op, layer, c) if op in PASSES else None
                yield Op(op, way, label.layer, chunk=c, work=work, holds=holds)

    # -- counts, work and bytes ------------------------------------------------------------------

    def counts(self, layer: int, c: int) -> Counts:
        return self._counted[layer - 1][c]

    @cached_property
    def _first_like(self) -> list[int]:
        """Of each chunk the first one that has the same counts in all layers; estimates are alike
        but for a vertex."""
        first = dict[tuple[Counts, ...], int]()
        return [
            first.setdefault(each, c) for c, each in enumerate(zip(*self._counted, strict=True))
        ]

    @property
    def unlike(self) -> list[int]:
        """A chunk of each kind."""
        return sorted(set(self._first_like))

    @cached_property
    def _counted(self) -> list[list[Counts]]:
        """Of every layer, of the chunks of every turn."""
        layers = range(1, len(self.model.layers) + 1)
        turns = {
            kind: self._turns(self.layout.facts(layer))
            for kind, layer in {self.layout.kind(layer): layer for layer in layers}.items()
        }
        return [turns[self.layout.kind(layer)] for layer in layers]

    def _turns(self, facts: LayerFacts) -> list[Counts]:
        """A layer's counts of the chunks of every turn."""
        sends, trained = self._sends(facts), self._trained

        def counted(c: int) -> Counts:
            its = slice(c, None, len(self.chunks))
            each = facts.rows, facts.sources, facts.edges, trained
            rows, sources, edges, seeds = (np.asarray(of_all, dtype=float)[its] for of_all in each)
            here = sends[c]
            return Counts(rows, sources, edges, seeds, here, here.sum(1), here.sum(0))

        return [counted(c) for c in self.chunks]

    def _sends(self, facts: LayerFacts) -> Pairs:
        """Rows that go from each rank to each rank's chunks [chunks, ranks, ranks]."""
        layout, ranks, chunks = self.layout, self.problem.ranks, len(self.chunks)
        if isinstance(layout, EstimatedLayout):
            part = layout.vertices / ranks
            far = layout.leaving(part) / max(layout.leaving(part / chunks), 1e-300)
            halo = facts.halo.sum(0).reshape(ranks, chunks) * min(far, 1.0)
            read = np.round(halo / max(ranks - 1, 1)).astype(np.int64)
            return Outer.of([0] * ranks, True, read.T).T
        by_rank = np.asarray(facts.sends).reshape(ranks, chunks, ranks, chunks).sum(1)
        return np.asarray(~np.eye(ranks, dtype=bool)[:, :, None] * by_rank).transpose(2, 0, 1)

    @property
    def _trained(self) -> list[float]:
        """Training vertices of every rank's chunks."""
        layout = self.layout
        if isinstance(layout, EstimatedLayout):
            return [self.problem.stats.train_vertices / layout.ranks] * layout.ranks
        return [float(layout.graph.train[layout.own(c)].sum()) for c in range(layout.ranks)]

    def _row_bytes(self, layer: int) -> int:
        """Of h_{l-1}."""
        return self.model.layers[layer - 1].h_in * self.model.itemsize

    def loaded_bytes(self, way: str, layer: int, c: int) -> np.ndarray:
        """What the chunks need of their servers' memory before a pass of a layer [ranks] [B].

        That is what they read there, and what others read of it."""
        n = self.counts(layer, c)
        loaded = self.read_bytes(layer, c) + self.edge_bytes(layer, c)
        here = self._exchanged(layer, n.given - n.halo)
        return np.asarray(loaded + here + self._besides(way, layer, c))

    def _besides(self, way: str, layer: int, c: int) -> np.ndarray:
        """The gradient of the chunks' rows for a backward pass, or labels [ranks] [B]."""
        if way == "b":
            layer_out = self.model.layers[layer - 1].h_out * self.model.itemsize
            return np.asarray(self.counts(layer, c).rows * layer_out)
        return self.label_bytes(c) * (layer == len(self.model.layers))

    def stored_bytes(self, way: str, layer: int, c: int) -> np.ndarray:
        """What goes back to the server's memory after a pass of a layer [ranks] [B]."""
        n, model, last = self.counts(layer, c), self.model, len(self.model.layers)
        made = n.rows * model.layers[layer - 1].h_out * model.itemsize
        if way == "f":
            return np.asarray(made)
        stored = made * (layer == last)  # the last layer's rows are logits
        if layer > model.first_varying:
            stored = stored + self.read_bytes(layer, c) + self._exchanged(layer, n.given - n.halo)
        return np.asarray(stored)

    def _exchanged(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Bytes of so many rows that cross before the layer [ranks]."""
        return np.asarray(rows * self._row_bytes(layer) * (layer > self.model.first_varying))

    def read_bytes(self, layer: int, c: int) -> np.ndarray:
        """Rows of h_{l-1} that the layer reads, or of its constant aggregate [ranks] [B]."""
        n, model = self.counts(layer, c), self.model
        rows = n.sources
        if model.aggregate_cached(layer):  # GraphSAGE reads a vertex's own row too
            rows = n.rows * (2 if model.layers[0].reads_own else 1)
        return np.asarray(rows * self._row_bytes(layer))

    def edge_bytes(self, layer: int, c: int) -> np.ndarray:
        """The layer's edges, and the ids of the rows that it reads [ranks] [B]."""
        n, model = self.counts(layer, c), self.model
        if model.aggregate_cached(layer):
            return np.zeros(self.problem.ranks)
        spec = model.layers[layer - 1]
        return np.asarray(block(model, spec, n.rows, n.sources, n.edges)) + COUNTS_AT_ENDS

    def label_bytes(self, c: int) -> np.ndarray:
        """Labels of the chunks' rows, and which of them are trained on [ranks] [B]."""
        n, several = self.counts(len(self.model.layers), c), self.problem.stats.learned != "label"
        label = self.model.classes * self.model.weight_itemsize if several else LONG
        return np.asarray(n.rows * label + LONG * n.trained)

    # -- memory ----------------------------------------------------------------------------------

    def under_way(self, ways: str = "fb") -> np.ndarray:
        """What is on the device beside the chunk that is computed: first what the one before has
        made, then what the next one reads [ranks] [B]."""
        most = np.zeros(self.problem.ranks)
        if self.copies_beside:
            for layer, c, way in product(range(1, len(self.model.layers) + 1), self.unlike, ways):
                for copied in (self.loaded_bytes, self.stored_bytes):
                    most = np.maximum(most, copied(way, layer, c))
        return most

    def _hold(self, op: str, layer: int, c: int) -> Held:
        """Of a pass: nothing of the chunk before is left, and nothing of this one stays."""
        n, is_last = self.counts(layer, c), layer == len(self.model.layers)
        need = footprint(self.model, layer, n.rows, n.sources, n.edges)
        loaded = self.read_bytes(layer, c) + self.edge_bytes(layer, c)
        loaded = loaded + self._besides("b" if op == "backward" and not is_last else "f", layer, c)
        if op == "forward":
            return Held(loaded + need.kept, 0.0)
        if not is_last:
            return Held(loaded + need.backward, 0.0)
        logits, most, gradient = loss(self.model, n.rows, n.trained)
        at_last = np.maximum(need.kept + most, logits + gradient + need.backward)
        return Held(loaded + at_last, 0.0)


def _copied(nbytes: np.ndarray) -> Copy:
    """Whole bytes [ranks]."""
    return Copy(np.round(nbytes).astype(np.int64))


def beside(at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[Queued]:
    """The order of steps whose copies go beside computation, one after the other (`Order`)."""
    computed: tuple[Label, ...] = ()  # what was done last, other than copies
    for step in range(steps):
        loaded: dict[int | None, tuple[Label, ...]] = {}  # by chunk
        stored: tuple[Label, ...] = ()
        for op in _loads_ahead(at(step)):
            label, after = op.label(step), computed
            if op.op == "load":
                loaded[op.chunk] = (label,)
            elif op.op == "store":
                stored = (label,)
            else:  # the step is over when all is stored
                after += loaded.pop(op.chunk, ()) + (stored if op.chunk is None else ())
                computed = (label,)
            yield Queued(op, step, after)


def _loads_ahead(ops: Iterable[Op]) -> Iterator[Op]:
    """Each pass of a layer begins with two loads; at the place of any other stands the next one."""
    loads = pairwise(op for op in ops if op.op == "load")
    following = {op: later for op, later in loads if (op.way, op.layer) == (later.way, later.layer)}
    ahead = set(following.values())
    for op in ops:
        if op not in ahead:
            yield op
        if op in following:
            yield following[op]
