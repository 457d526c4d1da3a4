"""Bytes that a rank holds under P3, moment by moment, as executor/strategies/p3/ holds them.

    sample   drawn edges, pushed blocks, and what laying them out takes; blocks stay to the end
    front    columns of all peers' sources, layer 1, partial sums; what autograd saves stays to tail
    body     the sum of own rows, layers 2 .. L and back, its gradient for all peers
    tail     all peers' gradients, layer 1 back

In the pipeline a front is followed by the body of the batch before and by the tail of the batch
before that: three batches in flight. Sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.gnn.footprint import (
    RUNTIME,
    Footprint,
    Product,
    block,
    footprint,
    kernels,
    loss,
)
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.minibatch import memory as batchwise_memory
from gnnplan.planner.strategies.minibatch import step as batchwise
from gnnplan.planner.strategies.p3.periods import period
from gnnplan.planner.strategies.p3.slices import DELAY, Slices
from gnnplan.planner.vocabulary.numbers import Number

PHASES = ("front", "body", "tail")
USES = ("features", "activations", "graph", "buffers")
INT = 4  # [B] of a pushed number


def memory(p3: Slices, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of an epoch.

    In the pipeline each batch in flight, and the batch whose gradients are reduced, has weights and
    gradients of its own.
    """
    versions = 4 if p3.pipelined else 0
    batches, model, b, zero = (
        p3.batches(problem),
        problem.model,
        problem.model.itemsize,
        np.zeros(problem.ranks),
    )
    different = {
        id(batch): _Batch(p3, problem, batch)
        for batch in {id(batch): batch for batch in batches.first()}.values()
    }
    # estimated batches are one object, many times
    known = [different[id(batch)] for batch in batches.first()]
    m, epoch = _Held(problem.ranks), len(known)
    for t in range(epoch + DELAY):  # goes on into the next epoch: what is under way is held there
        order = period(t, epoch) if p3.pipelined else ((phase, t) for phase in PHASES)
        for phase, batch in order:
            each = known[batch % epoch]
            if phase == "front":
                if not p3.prefetch:  # a sampler of its own has its own memory
                    m.at(each.sampling)
                each.front(m)
            elif phase == "body":
                each.body(m)
            elif phase == "tail":
                each.tail(m)
    buffers = m.most["buffers"]
    if problem.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels(
            [product for each in known for product in each.products], problem.ranks, vary=True
        )
    waits = np.max([each.blocks for each in known], axis=0) * p3.prefetch
    sampler = 0 if p3.prefetch else batchwise_memory.of_sampler(problem)
    sliced = p3.sliced_weights(problem)
    own = (
        model.weights
        - sliced
        + np.array(
            [
                sliced * len(p3.columns(problem, rank)) / model.features
                for rank in range(problem.ranks)
            ]
        )
    )
    return {
        # the whole model, for evaluation; the rank's own weights, and their versions
        "parameters": model.weights * b + own * b * (1 + versions),
        # gradients included
        "optimizer": own * b * ((3 if problem.workload.optimizer == "adam" else 1) + versions),
        "features": (
            m.most["features"]
            + np.array([_columns_copied(p3, problem, rank) for rank in range(problem.ranks)])
        ),
        "cache": zero,
        "activations": m.most["activations"],
        "halo": zero,
        "graph": (
            m.most["graph"]
            + waits
            + sampler
            + batchwise_memory.of_lists(problem, p3.lists(problem), p3.prefetch)
        ),
        "buffers": buffers,
        "runtime": zero + RUNTIME[problem.cluster.device.kind],
    }


def _columns_copied(p3: Slices, problem: Problem, rank: int) -> float:
    """Bytes of the rank's copy of its feature columns.

    Only ranks on a CPU have one, and not where features stay in their file or all columns are the
    rank's anyway.
    """
    columns = p3.columns(problem, rank)
    if problem.graph is None:
        return (
            float(problem.stats.vertices * len(columns) * problem.model.itemsize)
            if problem.cluster.device.kind == "cpu"
            else 0.0
        )
    x = problem.graph.x
    if problem.cluster.device.kind != "cpu" or isinstance(x, np.memmap):
        return 0.0
    if isinstance(x, np.ndarray):
        return 0.0 if len(columns) == x.shape[1] else float(x.shape[0] * len(columns) * x.itemsize)
    numbers = int(problem.features_bytes(np.arange(x.shape[0]), columns).sum()) / (
        2 * problem.model.itemsize
    )
    itemsize = int(x.data.itemsize + x.indices.itemsize)
    return numbers * itemsize + float(x.indptr.nbytes)


class _Held:
    """Bytes kept now, by use [ranks], and those of the fullest moment so far.

    What is held at a moment without being kept counts as buffers.
    """

    def __init__(self, ranks: int) -> None:
        self.now: dict[str, Number] = {use: np.zeros(ranks) for use in USES}
        self.most = dict(self.now)
        self.leaving: Number = 0.0

    def keep(self, use: str, *sizes: Number) -> None:
        for size in sizes:
            self.now[use] = self.now[use] + size
        self.at()

    def free(self, use: str, *sizes: Number) -> None:
        for size in sizes:
            self.now[use] = self.now[use] - size

    def leave(self, size: Number) -> None:
        """Something is sent while the rank goes on: its buffer stays until the next is sent.

        What was sent before it has left, because the lane sends one thing after the other.
        """
        self.free("buffers", self.leaving)
        self.leaving = size
        self.keep("buffers", size)

    def at(self, *held_too: Number) -> None:
        """A moment at which this much is held besides what is kept."""
        held = {**self.now, "buffers": sum(held_too, self.now["buffers"])}
        fuller = sum(held.values()) > sum(self.most.values())
        self.most = {use: np.where(fuller, held[use], self.most[use]) for use in USES}


@dataclass(frozen=True)
class _Layer:
    """One layer of a batch: what it computes on, and the sizes of its tensors."""

    number: int
    facts: LayerFacts
    need: Footprint


class _Batch:
    """One batch on all ranks: what each of its phases keeps and frees.

    Sizes of layer 1's output [ranks] [B]: `own` block, `all` peers' blocks, `peers` without own.
    """

    def __init__(self, p3: Slices, problem: Problem, batch: MiniBatch) -> None:
        model, kind, b = problem.model, problem.workload.model, problem.model.itemsize
        self.problem, ranks = problem, range(problem.ranks)
        rails = [list(p3.rail(problem, rank)) for rank in ranks]
        facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
        merged = replace(
            facts[0],
            **{
                name: np.array([getattr(facts[0], name)[rail].sum() for rail in rails])
                for name in ("rows", "sources", "edges")
            },
        )
        sliced = p3.sliced(problem, p3.rail(problem, 0)[-1])  # the widest
        # partial sums
        first = replace(
            sliced, relu=False, layers=(replace(sliced.layers[0], bias=False), *sliced.layers[1:])
        )
        need = footprint(kind, first, 1, merged.rows, merged.sources, merged.edges)
        # z, next to logits of all columns, is not saved
        given = merged.sources * sliced.layers[0].projected * b * (kind == "gat")
        need = replace(need, kept=need.kept - given)
        self.first = _Layer(
            1,
            merged,
            replace(
                need, products=tuple(replace(product, after=("",)) for product in need.products)
            ),
        )
        self.rest = [
            _Layer(layer, f, footprint(kind, model, layer, f.rows, f.sources, f.edges))
            for layer, f in enumerate(facts[1:], 2)
        ]
        width = model.layers[0].h_out * b
        self.own, self.all = facts[0].rows * width, merged.rows * width
        self.peers = self.all - self.own
        self.overlaps = p3.pipelined  # the rank goes on while its messages leave
        loaded = np.array(
            [
                batchwise.row_bytes_read(problem, batch, rails[rank], p3.columns(problem, rank))
                for rank in ranks
            ]
        )
        numbers = loaded / (2 * b) if model.nonzeros else None
        self.loaded = np.asarray(sliced.features_held(merged.sources, numbers), dtype=float)
        self.sorted: Number = 0.0  # sparse rows by column, when their gradient comes
        self.sorting: Number = 0.0  # with places in 64 bits
        if numbers is not None:
            self.sorted, self.sorting = 8 * numbers + 4 * sliced.features, 12 * numbers
            self.loaded = self.loaded - self.sorted
            if kind == "sage":  # own rows, a cut of those read, have a product of their own
                self.sorted = self.sorted + sliced.features_sorted(merged.rows)
        spec = sliced.layers[0]
        saved = spec.projects_first or kind == "sage"
        if spec.counted:
            saved = spec.counted.keeps_inputs
        # what was loaded stays for the tail, not a copy of it
        self.reads_on = bool(model.nonzeros) or (saved and not (model.dropout and spec.drops))
        self.pulled = self.own * (len(rails[0]) - 1)
        self.targets = loss(model, facts[-1].rows, facts[-1].rows)
        laid = [
            (merged, model.layers[0]),
            *[(f, model.layers[layer]) for layer, f in enumerate(facts[1:], 1)],
        ]
        sizes = [block(kind, model, spec, f.rows, f.sources, f.edges) for f, spec in laid]
        # with the places of peers' rows
        self.blocks = np.asarray(
            sum(sizes, 16.0 * facts[-1].rows) + 8 * (merged.rows - facts[0].rows)
        )
        drawn = 4 * np.sum([f.edges for f in facts], axis=0) + 2 * problem.stats.vertices
        pushed = INT * (merged.edges + merged.sources + merged.rows)
        below, above = (
            batchwise_memory.laying(problem, laid[1:]),
            sum(sizes[1:], np.zeros(problem.ranks)),
        )
        together = above + batchwise_memory.laying(problem, laid[:1]) + INT * merged.edges
        self.sampling = drawn + pushed + np.maximum(below, together)

    @property
    def products(self) -> list[Product]:
        return [product for layer in (self.first, *self.rest) for product in layer.need.products]

    def front(self, m: _Held) -> None:
        m.keep("graph", self.blocks)
        m.keep("features", self.loaded)
        m.at(self.first.need.forward)
        m.keep("activations", self.first.need.kept)
        m.at(self.peers)
        if not self.reads_on:
            m.free("features", self.loaded)
        # partial sums in the order in which they leave, and those that come
        m.at(self.peers, self.pulled)
        m.keep("activations", self.pulled)
        m.leave(self.peers * self.overlaps)

    def body(self, m: _Held) -> None:
        model, b = self.problem.model, self.problem.model.itemsize
        spec = model.layers[0]
        m.keep("activations", self.own)
        m.free("activations", self.pulled)
        applied = self.own * spec.bias
        m.keep("activations", applied)
        before: Number = 0.0  # h_{l-1}, where nobody saves it
        for layer in self.rest:
            m.at(layer.need.forward)
            m.keep("activations", layer.need.kept)
            m.free("activations", before)
            before = self.passing(layer)
        logits, most, gradient = self.targets
        m.at(most)
        m.keep("activations", logits)
        for layer in reversed(self.rest):
            m.at(gradient, layer.need.backward - layer.need.kept)
            m.free("activations", layer.need.kept - self.passing(layer))
            gradient = layer.facts.sources * model.layers[layer.number - 1].h_in * b
        m.at(gradient, self.own)  # through ReLU
        m.free("activations", applied, logits)
        m.leave(0.0)
        # the sum's gradient for every peer, and those that come
        m.at(self.own, self.pulled, self.peers)
        m.keep("activations", self.peers)  # and the own one, in the sum's place
        m.leave(self.pulled * self.overlaps)

    def passing(self, layer: _Layer) -> Number:
        """Bytes of the layer's output, if the next layer only aggregates it; else 0."""
        model = self.problem.model
        followed = layer.number < len(model.layers) and not model.layers[layer.number].matrices
        return layer.facts.rows * model.layers[layer.number - 1].h_out * model.itemsize * followed

    def tail(self, m: _Held) -> None:
        m.keep("features", self.sorted)
        m.at(self.all)
        m.at(self.all, self.first.need.backward - self.first.need.kept, self.sorting)
        m.free("activations", self.peers, self.own, self.first.need.kept)
        m.free("features", self.sorted)
        if self.reads_on:
            m.free("features", self.loaded)
        m.free("graph", self.blocks)
