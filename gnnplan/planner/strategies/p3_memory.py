"""What a rank fills under P3, moment by moment of an epoch as executor/strategies/p3.py goes through it.

    sample   drawn edges, pushed blocks, what laying them out takes        a batch's blocks stay to its end
    front    its columns of all peers' sources, layer 1, partial sums       what autograd saves stays to its tail
    body     own rows' sum, layers 2 .. L and back, its gradient for all peers
    tail     all peers' gradients, layer 1 back

In the pipeline a front is followed by the body of the batch before and the tail of that before it: three batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.footprint import RUNTIME, Footprint, Product, block, footprint, kernels, loss
from gnnplan.planner.job import Job
from gnnplan.planner.layout import LayerFacts
from gnnplan.planner.minibatch import MiniBatch
from gnnplan.planner.strategies import batchwise, batchwise_memory
from gnnplan.planner.strategies.strategy import Memory

if TYPE_CHECKING:
    from gnnplan.planner.strategies.p3 import P3

USES = ("features", "activations", "graph", "buffers")
INT = 4  # [B] of a pushed number


def memory(p3: P3, job: Job) -> Memory:
    """Bytes per rank by use. In the pipeline each batch under way, and the one that is summed, has weights and gradients of its own."""
    flights, versions = (3, 4) if p3.pipelined else (1, 0)
    batches, model, b, zero = p3.batches(job), job.model, job.model.itemsize, np.zeros(job.ranks)
    different = {id(batch): _Batch(p3, job, batch) for batch in {id(batch): batch for batch in batches.first()}.values()}
    known = [different[id(batch)] for batch in batches.first()]  # estimated ones are alike
    m = _Held(job.ranks)
    under_way: list[_Batch] = []
    for t, new in enumerate(known + known[: flights - 1]):
        waiting = under_way[-1:] if t % len(known) else []
        if not p3.prefetch:  # a sampler of its own has its own memory
            m.at(new.sampling)
        new.front(m)
        for each in [*waiting, new] if flights == 1 or (t + 1) % len(known) == 0 else waiting:
            each.body(m)
        under_way.append(new)
        if len(under_way) == flights:
            under_way.pop(0).tail(m)
    buffers = m.most["buffers"]
    if job.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels([product for each in known for product in each.products], job.ranks, vary=True)
    waits = np.max([each.blocks for each in known], axis=0) * p3.prefetch
    sampler = 0 if p3.prefetch else batchwise_memory.of_sampler(job)
    sliced = p3.sliced_weights(job)
    own = model.weights - sliced + np.array([sliced * len(p3.columns(job, rank)) / model.features for rank in range(job.ranks)])
    return {
        "parameters": model.weights * b + own * b * (1 + versions),  # the whole model's, for evaluation; the rank's own
        "optimizer": own * b * ((3 if job.workload.optimizer == "adam" else 1) + versions),  # gradients with it
        "features": m.most["features"] + np.array([_columns_copied(p3, job, rank) for rank in range(job.ranks)]),
        "cache": zero, "activations": m.most["activations"], "halo": zero,
        "graph": m.most["graph"] + waits + sampler + batchwise_memory.of_lists(job, p3.lists(job), p3.prefetch),
        "buffers": buffers, "runtime": zero + RUNTIME[job.cluster.device.kind],
    }  # fmt: skip


def _columns_copied(p3: P3, job: Job, rank: int) -> float:
    """Of the features, on a CPU: in the rank's own memory, but where they stay in their file, or are all there anyhow."""
    mine = p3.columns(job, rank)
    if job.graph is None:
        return float(job.stats.vertices * len(mine) * job.model.itemsize) if job.cluster.device.kind == "cpu" else 0.0
    x = job.graph.x
    if job.cluster.device.kind != "cpu" or isinstance(x, np.memmap):
        return 0.0
    if isinstance(x, np.ndarray):
        return 0.0 if len(mine) == x.shape[1] else float(x.shape[0] * len(mine) * x.itemsize)
    numbers = int(job.features_bytes(np.arange(x.shape[0]), mine).sum()) / (2 * job.model.itemsize)
    itemsize = int(x.data.itemsize + x.indices.itemsize)
    return numbers * itemsize + float(x.indptr.nbytes)


class _Held:
    """What is kept now by use, and at the fullest moment so far, [ranks] [B]; what is not kept then are buffers."""

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
        """The last that was sent may not have left while others go on; what was sent before it has, for the lane takes turns."""
        self.free("buffers", self.leaving)
        self.leaving = size
        self.keep("buffers", size)

    def at(self, *beside: Number) -> None:
        """A moment when this much is held beside what is kept."""
        held = {**self.now, "buffers": sum(beside, self.now["buffers"])}
        fuller = sum(held.values()) > sum(self.most.values())
        self.most = {use: np.where(fuller, held[use], self.most[use]) for use in USES}


@dataclass(frozen=True)
class _Layer:
    number: int
    facts: LayerFacts
    need: Footprint


class _Batch:
    """One batch on all ranks. Rows [B] of layer 1's output: `own`, `all` of peers' and own blocks, `theirs`."""

    def __init__(self, p3: P3, job: Job, batch: MiniBatch) -> None:
        model, kind, b = job.model, job.workload.model, job.model.itemsize
        self.job, ranks = job, range(job.ranks)
        rails = [list(p3.rail(job, rank)) for rank in ranks]
        facts = [batch.facts(layer) for layer in range(1, job.workload.layers + 1)]
        merged = replace(facts[0], **{what: np.array([getattr(facts[0], what)[rail].sum() for rail in rails])
                                      for what in ("rows", "sources", "edges")})  # fmt: skip
        sliced = p3.sliced(job, p3.rail(job, 0)[-1])  # the widest
        first = replace(sliced, relu=False, layers=(replace(sliced.layers[0], bias=False), *sliced.layers[1:]))  # partial sums
        need = footprint(kind, first, 1, merged.rows, merged.sources, merged.edges)
        given = merged.sources * sliced.layers[0].projected * b * (kind == "gat")  # z beside logits of all columns, which nobody saves
        need = replace(need, kept=need.kept - given)
        self.first = _Layer(1, merged, replace(need, products=tuple(replace(product, after=("",)) for product in need.products)))
        self.rest = [_Layer(layer, f, footprint(kind, model, layer, f.rows, f.sources, f.edges)) for layer, f in enumerate(facts[1:], 2)]
        width = model.layers[0].h_out * b
        self.own, self.all = facts[0].rows * width, merged.rows * width
        self.theirs = self.all - self.own
        self.others = p3.pipelined  # go on while what this one sent still leaves
        loaded = np.array([batchwise.row_bytes_read(job, batch, rails[rank], p3.columns(job, rank)) for rank in ranks])
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
        self.reads_on = bool(model.nonzeros) or (saved and not model.dropout)  # what was loaded stays for the tail, not a copy of it
        self.pulled = self.own * (len(rails[0]) - 1)
        self.targets = loss(model, facts[-1].rows, facts[-1].rows)
        laid = [(merged, model.layers[0]), *[(f, model.layers[layer]) for layer, f in enumerate(facts[1:], 1)]]
        sizes = [block(kind, model, spec, f.rows, f.sources, f.edges) for f, spec in laid]
        self.blocks = np.asarray(sum(sizes, 16.0 * facts[-1].rows) + 8 * (merged.rows - facts[0].rows))  # and where peers' rows are
        drawn = 4 * np.sum([f.edges for f in facts], axis=0) + 2 * job.stats.vertices
        pushed = INT * (merged.edges + merged.sources + merged.rows)
        below, above = batchwise_memory.laying(job, laid[1:]), sum(sizes[1:], np.zeros(job.ranks))
        together = above + batchwise_memory.laying(job, laid[:1]) + INT * merged.edges
        self.sampling = drawn + pushed + np.maximum(below, together)

    @property
    def products(self) -> list[Product]:
        return [product for layer in (self.first, *self.rest) for product in layer.need.products]

    def front(self, m: _Held) -> None:
        m.keep("graph", self.blocks)
        m.keep("features", self.loaded)
        m.at(self.first.need.forward)
        m.keep("activations", self.first.need.kept)
        m.at(self.theirs)
        if not self.reads_on:
            m.free("features", self.loaded)
        m.at(self.theirs, self.pulled)  # partial sums in the order in which they leave, and those that come
        m.keep("activations", self.pulled)
        m.leave(self.theirs * self.others)

    def body(self, m: _Held) -> None:
        model, b = self.job.model, self.job.model.itemsize
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
        m.at(self.own, self.pulled, self.theirs)  # the sum's gradient for every peer, and those that come
        m.keep("activations", self.theirs)  # and the own one, in the sum's place
        m.leave(self.pulled * self.others)

    def passing(self, layer: _Layer) -> Number:
        """Its output, if the next layer only aggregates it."""
        model = self.job.model
        followed = layer.number < len(model.layers) and not model.layers[layer.number].matrices
        return layer.facts.rows * model.layers[layer.number - 1].h_out * model.itemsize * followed

    def tail(self, m: _Held) -> None:
        m.keep("features", self.sorted)
        m.at(self.all)
        m.at(self.all, self.first.need.backward - self.first.need.kept, self.sorting)
        m.free("activations", self.theirs, self.own, self.first.need.kept)
        m.free("features", self.sorted)
        if self.reads_on:
            m.free("features", self.loaded)
        m.free("graph", self.blocks)
