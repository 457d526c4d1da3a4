"""The operations of a step that goes layer by layer, and in each layer chunk by chunk (offload).

    copy     |load f l c|             |store f l c|   layers 1 .. L - 1, all chunks of each
    compute             |forward l c|

    copy     |load f L c|                              |store b L c|   the last layer, all chunks
    compute             |forward L c|loss c|backward L c|

    copy     |load b l c|              |store b l c|   layers L - 1 .. 1, all chunks of each
    compute             |backward l c|

A forward load brings the rows of h_{l-1} that the chunk's edges read, and the edges; the last layer
also labels. A store takes the chunk's rows of h_l back. A backward load brings the same and the
gradient of the chunk's rows of h_l; the backward pass begins with the forward pass. A store takes
the gradient of the rows read back, where it is added to what other chunks have left there. Between
its loads nothing of a chunk is on the device.

Which rows a chunk reads is counted by planner/ownership/layout.py, as if each chunk were a rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np

from gnnplan.planner.gnn.footprint import LONG, Footprint, block, footprint, loss
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import alike_as
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.schedule import Compute

COUNTS_AT_ENDS = 8  # [B] by which the offsets of a block's edges are more than its rows, both ways


@dataclass(frozen=True)
class Counts:
    """What a chunk has in a layer; of a graph known by statistics: on average."""

    rows: float
    sources: float  # rows that its edges read, its own included
    edges: float  # without self edges
    trained: float  # training vertices among its rows


@dataclass(frozen=True, eq=False)
class ChunkedStep:
    """A step over the chunks of a layout, each of which is a rank there."""

    problem: Problem
    layout: Layout | EstimatedLayout
    _works: dict[tuple[str, int, Counts], Compute] = field(default_factory=dict)
    _losses: dict[float, Compute] = field(default_factory=dict)
    _copies: dict[int, np.ndarray] = field(default_factory=dict)
    _needs: dict[tuple[int, Counts], Footprint] = field(default_factory=dict)

    @property
    def model(self) -> Model:
        return self.problem.model

    @property
    def chunks(self) -> range:
        return range(self.layout.ranks)

    def program(self) -> Program:
        step = list(self.ops(self.chunks))
        return Program(lambda: [step], 1, lambda t: step)

    def fullest_program(self) -> Program:
        """The step over one chunk of each kind, which holds as much as the whole step."""
        layers = range(1, len(self.model.layers) + 1)
        kinds = {tuple(self.counts(layer, c) for layer in layers): c for c in self.chunks}
        step = list(self.ops(sorted(kinds.values())))
        return Program(lambda: [step], 1, lambda t: step)

    # -- operations ------------------------------------------------------------------------------

    def ops(self, chunks: Sequence[int]) -> Iterator[Op]:
        """The operations of a step over these chunks, in order."""
        last = len(self.model.layers)
        like = self._like()
        for layer in range(1, last):
            for c in chunks:
                yield self._load("f", layer, c)
                yield self._compute("forward", layer, c, like[layer])
                yield self._store("f", layer, c)
        for c in chunks:
            yield self._load("f", last, c)
            yield self._compute("forward", last, c, last)
            yield self._loss(c)
            yield self._compute("backward", last, c, last)
            yield self._store("b", last, c)
        for layer in range(last - 1, 0, -1):
            for c in chunks:
                yield self._load("b", layer, c)
                yield self._compute("backward", layer, c, like[layer])
                if layer > self.model.first_varying:
                    yield self._store("b", layer, c)
        yield Op("update", work=self.model.update(self.model.weights), holds=Held.let_go)

    def _like(self) -> dict[int, int]:
        """For each layer but the last, the first one with the same work and bytes."""
        first: dict[object, int] = {}
        return {
            layer: first.setdefault(alike_as(self.model, self.layout, layer, False), layer)
            for layer in range(1, len(self.model.layers))
        }

    def _load(self, way: str, layer: int, c: int) -> Op:
        loaded = self._copied(self.loaded_bytes(way, layer, c))
        holds = partial(self._held, way, layer, c)
        return Op("load", way, layer, chunk=c, loaded=loaded, holds=holds)

    def _store(self, way: str, layer: int, c: int) -> Op:
        stored = self._copied(self.stored_bytes(way, layer, c))
        return Op("store", way, layer, chunk=c, loaded=stored)

    def _copied(self, nbytes: float) -> np.ndarray:
        """Whole bytes; equal ones are one object, whose copy is priced once."""
        return self._copies.setdefault(round(nbytes), np.array([round(nbytes)]))

    def _compute(self, op: str, layer: int, c: int, like: int) -> Op:
        """A layer's forward or backward pass on a chunk."""
        work = self._work(op, like, self.counts(layer, c))
        passes = self._forward if op == "forward" else self._backward
        return Op(op, layer=layer, chunk=c, work=work, holds=partial(passes, layer, c))

    def _loss(self, c: int) -> Op:
        return Op(
            "loss",
            chunk=c,
            work=self._loss_work(self.counts(len(self.model.layers), c).rows),
            holds=partial(self._hold_loss, c),
        )

    # -- counts, work and bytes ------------------------------------------------------------------

    def counts(self, layer: int, c: int) -> Counts:
        return self._counted[layer - 1][c]

    @cached_property
    def _counted(self) -> list[list[Counts]]:
        """Of every layer, of every chunk."""
        facts = [self.layout.facts(layer) for layer in range(1, len(self.model.layers) + 1)]
        return [
            [
                Counts(*map(float, of_chunk))
                for of_chunk in zip(f.rows, f.sources, f.edges, self._trained, strict=True)
            ]
            for f in facts
        ]

    @cached_property
    def _trained(self) -> list[float]:
        """Training vertices of each chunk."""
        layout = self.layout
        if isinstance(layout, EstimatedLayout):
            return [self.problem.stats.train_vertices / layout.ranks] * layout.ranks
        return [float(layout.graph.train[layout.own(c)].sum()) for c in self.chunks]

    def _work(self, op: str, layer: int, n: Counts) -> Compute:
        """Of a layer's pass; chunks that are alike have the same object.

        But for the last layer's, a backward pass begins with the forward pass.
        """
        if (op, layer, n) not in self._works:
            model, sizes = self.model, (_one(n.rows), _one(n.sources), _one(n.edges))
            work = (model.forward if op == "forward" else model.backward)(layer, *sizes)
            if op == "backward" and layer < len(model.layers):
                work = model.forward(layer, *sizes) + work
            self._works[op, layer, n] = work
        return self._works[op, layer, n]

    def _loss_work(self, rows: float) -> Compute:
        """Forward and backward."""
        if rows not in self._losses:
            forward, backward = self.model.finish(_one(rows))
            self._losses[rows] = forward + backward
        return self._losses[rows]

    def loaded_bytes(self, way: str, layer: int, c: int) -> float:
        """What the chunk needs of the server's memory before a pass of a layer [B]."""
        n, model, last = self.counts(layer, c), self.model, len(self.model.layers)
        loaded = self.read_bytes(layer, c) + self.edge_bytes(layer, c)
        if way == "b":
            loaded += n.rows * model.layers[layer - 1].h_out * model.itemsize
        elif layer == last:
            loaded += self.label_bytes(c)
        return loaded

    def stored_bytes(self, way: str, layer: int, c: int) -> float:
        """What goes back to the server's memory after a pass of a layer [B]."""
        n, model, last = self.counts(layer, c), self.model, len(self.model.layers)
        made = n.rows * model.layers[layer - 1].h_out * model.itemsize
        if way == "f":
            return made
        read = self.read_bytes(layer, c) * (layer > model.first_varying)
        return read + made * (layer == last)  # the last layer's rows are logits

    def read_bytes(self, layer: int, c: int) -> float:
        """Rows of h_{l-1} that the layer reads, or of its constant aggregate [B]."""
        n, model = self.counts(layer, c), self.model
        rows = n.sources
        if model.aggregate_cached(layer):  # GraphSAGE and residuals read a vertex's own row too
            rows = n.rows * (2 if model.layers[0].reads_own else 1)
        return rows * model.layers[layer - 1].h_in * model.itemsize

    def edge_bytes(self, layer: int, c: int) -> float:
        """The layer's edges, and the ids of the rows that it reads [B]."""
        n, model = self.counts(layer, c), self.model
        if model.aggregate_cached(layer):
            return 0.0
        spec, kind = model.layers[layer - 1], self.problem.workload.model
        return float(block(kind, model, spec, n.rows, n.sources, n.edges)) + COUNTS_AT_ENDS

    def label_bytes(self, c: int) -> float:
        """Labels of the chunk's rows, and which of them are trained on [B]."""
        n, several = self.counts(len(self.model.layers), c), self.problem.stats.multilabel
        label = self.model.classes * self.model.weight_itemsize if several else LONG
        return n.rows * label + LONG * n.trained

    # -- memory ----------------------------------------------------------------------------------

    def _held(self, way: str, layer: int, c: int, held: Held) -> None:
        """Of a load: nothing of the chunk before is left."""
        held.let_go()
        read, edges = self.read_bytes(layer, c), self.edge_bytes(layer, c)
        others = self.loaded_bytes(way, layer, c) - read - edges
        held.keep(read, use="features" if layer <= self.model.first_varying else "activations")
        held.keep(edges, use="graph")
        held.keep(others)

    def _forward(self, layer: int, c: int, held: Held) -> None:
        need = self._need(layer, c)
        held.at(need.forward)
        if layer == len(self.model.layers):  # its backward pass follows
            held.keep(need.kept)
        held.multiply(*need.products)

    def _hold_loss(self, c: int, held: Held) -> None:
        n = self.counts(len(self.model.layers), c)
        logits, most, gradient = loss(self.model, _one(n.rows), _one(n.trained))
        held.at(most)
        held.keep(logits)
        held.handed_on = gradient

    def _backward(self, layer: int, c: int, held: Held) -> None:
        need = self._need(layer, c)
        if layer == len(self.model.layers):
            held.at(held.handed_on, need.backward - need.kept)
        else:
            held.at(need.forward)
            if self.model.moments(layer + 1):  # the gradient that its rows get through them
                made = self.counts(layer, c).rows * self.model.layers[layer - 1].h_out
                held.at(need.kept, 2 * made * self.model.itemsize)
            held.at(need.backward)
        held.multiply(*need.products)

    def _need(self, layer: int, c: int) -> Footprint:
        n, kind = self.counts(layer, c), self.problem.workload.model
        if (layer, n) not in self._needs:
            sizes = _one(n.rows), _one(n.sources), _one(n.edges)
            self._needs[layer, n] = footprint(kind, self.model, layer, *sizes)
        return self._needs[layer, n]


def _one(number: float) -> np.ndarray:
    """A number of the only rank [ranks]."""
    return np.array([number])
