"""Bytes that a rank holds under P3, operation by operation, as executor/strategies/p3/ holds them.

    sample   drawn edges, pushed blocks, and what laying them out takes; blocks stay to the end
    front    columns of all peers' sources, layer 1, partial sums; what autograd saves stays to tail
             (with a cache, rows from both places are there beside the rows in order)
    body     the sum of own rows, layers 2 .. L and back, its gradient for all peers
    tail     all peers' gradients, layer 1 back

In the pipeline a front is followed by the body of the batch before and by the tail of the batch
before that: three batches in flight. Sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import cast

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.gnn.footprint import Footprint, block, footprint, link_loss, loss
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, before_training
from gnnplan.planner.strategies.minibatch import memory as batchwise_memory
from gnnplan.planner.strategies.p3.slices import INT, Slices
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.strategies.program.memory import fullest
from gnnplan.planner.vocabulary.numbers import Number


def memory(p3: Slices, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of an epoch.

    In the pipeline each batch in flight, and the batch whose gradients are reduced, has weights and
    gradients of its own.
    """
    versions = 4 if p3.pipelined else 0
    model, b, zero = problem.model, problem.model.itemsize, np.zeros(problem.ranks)
    held = fullest(problem, p3.built(problem))
    waits = zero
    if p3.prefetch and problem.cluster.device.kind == "cpu":  # or they are in a server's memory
        different = dict.fromkeys(p3.batches(problem).first())
        waits = p3.prefetch * np.max(
            [Batch(p3, problem, each).blocks for each in different], axis=0
        )
    store = p3.store(problem)
    sampler = batchwise_memory.of_sampler(problem, p3.prefetch)
    sliced = p3.sliced_weights(problem)
    columns = [each.columns for each in p3.slices(problem)]
    own = model.weights - sliced + np.array([sliced * len(its) / model.features for its in columns])
    copied = cache(partial(_columns_copied, problem))
    return {
        # the whole model, for evaluation; the rank's own weights, and their versions
        "parameters": model.weights * b + own * b * (1 + versions),
        # gradients included
        "optimizer": own * b * (problem.workload.beside_a_weight + versions),
        "features": held["features"] + np.array([copied(its) for its in columns]),
        "cache": zero + (store.held(problem) if store else 0),
        "activations": held["activations"],
        "halo": zero,
        "graph": (
            held["graph"]
            + waits
            + sampler
            + batchwise_memory.of_lists(problem, p3.lists(problem), bool(p3.prefetch), store)
            + batchwise_memory.of_order(problem, p3.prefetch)
        ),
        "buffers": held["buffers"],
        **before_training(problem, (*p3.all_twins(problem), *p3.rails(problem))),
    }


def _columns_copied(problem: Problem, columns: range) -> float:
    """Bytes of a rank's copy of its feature columns.

    Only ranks on a CPU have one, and not where features stay in their file or all columns are the
    rank's anyway.
    """
    if problem.graph is None:
        return (
            float(problem.stats.vertices * len(columns) * problem.model.itemsize)
            if problem.cluster.device.kind == "cpu"
            else 0.0
        )
    x = problem.graph.x
    if problem.cluster.device.kind != "cpu" or isinstance(x, np.memmap):
        return 0.0
    if not problem.model.nonzeros:
        stays = isinstance(x, np.ndarray) and len(columns) == x.shape[1]
        return 0.0 if stays else float(x.shape[0] * len(columns) * x.dtype.itemsize)
    features_bytes = int(problem.features_bytes(np.arange(x.shape[0]), columns).sum())
    numbers = features_bytes / problem.model.sparse_itemsize
    rows = cast(sp.csr_matrix, x)
    itemsize = int(rows.data.itemsize + rows.indices.itemsize)
    return numbers * itemsize + float(rows.indptr.nbytes)


@dataclass(frozen=True)
class _Layer:
    """One of layers 2 .. L: what it computes on, and the sizes of its tensors."""

    number: int
    facts: LayerFacts
    need: Footprint


class Batch:
    """One batch on all ranks: what its operations keep, free and need besides.

    Sizes of layer 1's output [ranks] [B]: `own` block, `all` peers' blocks, `peers` without own.
    """

    def __init__(self, p3: Slices, problem: Problem, batch: MiniBatch) -> None:
        model, b = problem.model, problem.model.itemsize
        self.problem, rails = problem, [list(rail) for rail in p3.rails(problem)]
        facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
        merged = replace(
            facts[0],
            rows=_over_peers(facts[0].rows, rails),
            sources=_over_peers(facts[0].sources, rails),
            edges=_over_peers(facts[0].edges, rails),
        )
        sliced = p3.sliced(problem, p3.rail(problem, 0)[-1])  # the widest
        partial = sliced.without_ends(1)
        need = footprint(partial, 1, merged.rows, merged.sources, merged.edges)
        # z, next to logits of all columns, is not saved
        given = merged.sources * sliced.layers[0].projected * b * (model.layers[0].heads > 0)
        self.first = replace(
            need,
            kept=need.kept - given,
            products=tuple(replace(product, after=("",)) for product in need.products),
        )
        self.rest = [
            _Layer(layer, f, footprint(model, layer, f.rows, f.sources, f.edges))
            for layer, f in enumerate(facts[1:], 2)
        ]
        width = model.layers[0].h_out * b
        self.own, self.all = facts[0].rows * width, merged.rows * width
        self.peers = self.all - self.own
        self.applied = self.own * model.layers[0].bias
        self.overlaps = p3.pipelined  # the rank goes on while its messages leave
        loaded = p3.loaded_bytes(problem, batch)
        numbers = loaded / model.sparse_itemsize if model.nonzeros else None
        self.loaded = np.asarray(sliced.features_held(merged.sources, numbers), dtype=float)
        # rows of the server's memory and of the cache, next to where they are put
        self.arriving: Number = 0.0
        if store := p3.store(problem):
            found = store.loads_of(problem, batch)
            both = (found.host > 0) & (found.hits > 0)
            self.arriving = np.where(both, found.host + found.hits, 0.0)
        self.sorted: Number = 0.0  # sparse rows by column, when their gradient comes
        self.sorting: Number = 0.0  # with places in 64 bits
        if numbers is not None:
            self.sorted, self.sorting = 8 * numbers + 4 * sliced.features, 12 * numbers
            self.loaded = self.loaded - self.sorted
            # own rows, a cut of those read, have a product of their own
            if model.layers[0].matrices > 1:
                self.sorted = self.sorted + sliced.features_sorted(merged.rows)
        spec = sliced.layers[0]
        saved = spec.projects_first or spec.matrices > 1
        if spec.counted:
            saved = spec.counted.keeps_inputs
        # what was loaded stays for the tail, not a copy of it
        self.reads_on = bool(model.nonzeros) or (saved and not (model.dropout and spec.drops))
        self.pulled = self.own * (len(rails[0]) - 1)
        own = facts[-1].rows
        self.targets = (
            loss(model, own, own)
            if batch.scored is None
            else link_loss(model, own, batch.scored.edges, problem.workload.negatives)
        )
        laid = [
            (merged, model.layers[0]),
            *[(f, model.layers[layer]) for layer, f in enumerate(facts[1:], 1)],
        ]
        sizes = [block(model, spec, f.rows, f.sources, f.edges) for f, spec in laid]
        # with the places of peers' rows
        self.blocks = np.asarray(
            sum(sizes, 16.0 * facts[-1].rows) + 8 * (merged.rows - facts[0].rows)
        )
        on_cpu = problem.cluster.device.kind == "cpu"  # or in the server's memory
        drawn = 4 * np.sum([f.edges for f in facts], axis=0) + 2 * problem.stats.vertices
        pushed = INT * (merged.edges + merged.sources + merged.rows)
        below, above = (
            batchwise_memory.laying(problem, laid[1:]),
            sum(sizes[1:], np.zeros(problem.ranks)),
        )
        together = above + batchwise_memory.laying(problem, laid[:1]) + INT * merged.edges
        self.sampling = on_cpu * (drawn + pushed + np.maximum(below, together))

    def lay(self, held: Held) -> None:
        held.at(self.sampling)

    def load(self, held: Held) -> None:
        held.keep(self.blocks, use="graph")
        held.keep(self.loaded, use="features")
        held.at(self.arriving)

    def first_forward(self, held: Held) -> None:
        self.compute(self.first, held)
        held.at(self.peers)
        if not self.reads_on:
            held.free(self.loaded, use="features")

    def pull_forward(self, held: Held) -> None:
        # partial sums in the order in which they leave, and those that come
        held.at(self.peers, self.pulled)
        held.keep(self.pulled)
        held.leave(self.peers * self.overlaps)

    def forward(self, held: Held) -> None:
        held.keep(self.own)
        held.free(self.pulled)
        held.keep(self.applied)
        before: Number = 0.0  # h_{l-1}, where nobody saves it
        for layer in self.rest:
            self.compute(layer.need, held)
            held.free(before)
            before = self.passing(layer)

    def loss(self, held: Held) -> None:
        logits, most, _ = self.targets
        held.at(most)
        held.keep(logits)

    def backward(self, held: Held) -> None:
        model, b = self.problem.model, self.problem.model.itemsize
        logits, _, gradient = self.targets
        for layer in reversed(self.rest):
            held.at(gradient, layer.need.backward - layer.need.kept)
            held.free(layer.need.kept - self.passing(layer))
            gradient = layer.facts.sources * model.layers[layer.number - 1].h_in * b
        held.at(gradient, self.own)  # through ReLU
        held.free(self.applied, logits)
        held.leave(0.0)

    def pull_backward(self, held: Held) -> None:
        # the sum's gradient for every peer, and those that come
        held.at(self.own, self.pulled, self.peers)
        held.keep(self.peers)  # and the own one, in the sum's place
        held.leave(self.pulled * self.overlaps)

    def first_backward(self, held: Held) -> None:
        held.keep(self.sorted, use="features")
        held.at(self.all)
        held.at(self.all, self.first.backward - self.first.kept, self.sorting)
        held.free(self.peers, self.own, self.first.kept)
        held.free(self.sorted, use="features")
        if self.reads_on:
            held.free(self.loaded, use="features")
        held.free(self.blocks, use="graph")

    def compute(self, need: Footprint, held: Held) -> None:
        held.at(need.forward)
        held.keep(need.kept)
        held.multiply(*need.products)

    def passing(self, layer: _Layer) -> Number:
        """Bytes of the layer's output, if the next layer only aggregates it; else 0."""
        model = self.problem.model
        followed = layer.number < len(model.layers) and not model.layers[layer.number].matrices
        return layer.facts.rows * model.layers[layer.number - 1].h_out * model.itemsize * followed


def _over_peers(counts: np.ndarray, rails: Sequence[list[int]]) -> np.ndarray:
    """The sum of each rank's and its peers' counts [ranks]."""
    out = np.empty_like(counts)
    for rail in rails:
        out[rail] = counts[rail].sum()
    return out


class Later:
    """What operations of a batch hold; its sizes are computed when memory is asked for."""

    def __init__(self, p3: Slices, problem: Problem, batch: MiniBatch) -> None:
        self._batch = cache(partial(Batch, p3, problem, batch))

    def __call__(self, holds: Callable[[Batch, Held], None]) -> Callable[[Held], None]:
        return lambda held: holds(self._batch(), held)
