"""The operations of one training step, layer by layer, on all ranks, and their memory.

    one step   |halo f 1|forward 1| .. |forward L|loss|backward L|halo b L| .. |all_reduce|update|

With a codec, rows are packed before the exchange and unpacked after it (planner/gnn/rows.py):

    .. |pack f 2|halo f 2|unpack f 2|forward 2| ..  |backward 2|pack b 2|halo b 2|unpack b 2| ..

For link prediction, ranks exchange the rows of edges' endpoints before the loss, as if for a layer
L + 1, and return their gradients after the loss; these rows are not packed.

    memory     constant   features, edges, rows that lag or stay: `resident`
               forward    the tensors that autograd saves (with recomputation: a layer's inputs)
                          until the layer's backward pass, and a copy of all source rows while the
                          layer computes
               loss       logits and their gradient
               backward   gradients of rows, and exchange buffers, in addition

An exchange's buffers are counted with the layer. The counts follow
executor/strategies/layerwise.py. planner/gnn/model.py counts the work and the tensors of layers;
planner/ownership/layout.py, the rows of ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gnnplan.planner.gnn.model import (
    LayerMemory,
    Model,
    OpMemory,
    block_bytes,
    keeps,
    layer_memory,
    link_loss_memory,
    loss_memory,
    rowwise_memory,
)
from gnnplan.planner.gnn.rows import PLACES, WHOLE
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerCounts, Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.layerwise.exchange import Bucket, ExchangeOptions, buckets_of
from gnnplan.planner.strategies.program.account import Resident, machine_code
from gnnplan.planner.strategies.program.program import AllReduce, Copy, Exchange, Op
from gnnplan.planner.vocabulary.numbers import Number, RankMatrix
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute

# -- data that stays from step to step -------------------------------------------------------------


def resident(
    problem: Problem,
    layout: AnyLayout,
    options: ExchangeOptions,
    batches: Sequence[AnyLayout] = (),
) -> Resident:
    """Return what ranks have besides a step's tensors, with set-up and evaluation.

    The device has the features of the largest batch, and the edges of all batches. Evaluation needs
    no more memory than a step, except with a single batch: evaluation then is on the whole layout,
    which is larger.
    """
    zero = np.zeros(problem.ranks)
    counts = Counter(batches or (layout,))  # estimated batches are equal
    features, halo, graph = constant_bytes(problem, layout), zero, zero
    for batch, count in counts.items():
        halo = halo + _kept_rows(problem, batch, options)
        graph = graph + blocks_bytes(problem, batch, count)
    aggregate = problem.model.inputs.stored_bytes(layout.facts(1).rows)
    elsewhere = constant_bytes(
        problem, layout, at_setup=True
    ) + aggregate * problem.model.aggregate_cached(1)
    code = machine_code(problem, len(counts) + (len(counts) > 1))
    if batches:
        loaded = np.max([constant_bytes(problem, batch) for batch in counts], axis=0)
        if len(batches) == 1:  # evaluation does not free the batch's rows and edges
            evaluation = _during_evaluation(problem, layout)
            elsewhere = np.maximum(elsewhere, halo + loaded + code + evaluation)
        # a CPU rank's device memory is the server's, which has the features of all batches
        features = loaded + features * problem.on_cpu
    data = {"features": features, "halo": halo, "graph": graph}
    return Resident(data, code=code, elsewhere=elsewhere)


def blocks_bytes(problem: Problem, layout: AnyLayout, count: int = 1) -> np.ndarray:
    """Return the bytes of the blocks, labels and masks of `count` equal layouts [ranks]."""
    model = problem.model
    total, seen = np.zeros(problem.ranks), set()
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        if (kind := layout.kind(layer)) not in seen:  # layers of the same kind share their blocks
            seen.add(kind)
            total = total + block_bytes(model, spec, *f.sizes) + 8 * f.sent_rows
    return np.asarray(count * (total + 16 * f.rows))


def constant_bytes(problem: Problem, layout: AnyLayout, at_setup: bool = False) -> np.ndarray:
    """Return the bytes of constant rows that a rank keeps, or reads at set-up [ranks].

    It keeps layer 1's aggregate if that is cached, else the rows that layer 1 or the encoder reads.
    """
    model, f, rows = problem.model, layout.facts(1), rows_read(problem, layout)
    if not at_setup:
        rows = np.asarray(model.constant_rows(f.rows, rows))
    # a layer that multiplies own rows apart from the rows read has a sorted copy of them
    own = (f.rows < f.sources) * model.own_index_bytes(f.rows)
    return np.asarray(model.inputs.stored_bytes(rows) + own, dtype=float)


def rows_read(problem: Problem, layout: AnyLayout) -> np.ndarray:
    """Return how many constant rows layer 1 or the encoder reads [ranks]."""
    return layout.facts(1).sources if problem.model.first_varying else layout.row_counts(0)


def _kept_rows(problem: Problem, layout: AnyLayout, options: ExchangeOptions) -> np.ndarray:
    """Return the bytes of rows and gradients that are kept from step to step [ranks].

    Each layer keeps the halo rows and the gradients received last. If rows lag, they are kept as
    encoded, with buffers for sending too, and one more buffer for smoothing serves all layers in
    turn. An adaptive codec also keeps the width of each row.
    """
    kept, smoothed = np.zeros((2, problem.ranks))
    model, codec = problem.model, options.codec
    buffers = 2 if options.policy.lags else int(options.policy.keeps_received)
    stored = codec if options.policy.lags else WHOLE
    bits_bytes = 2 * PLACES * codec.adapts
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f, width = layout.facts(layer), model.exchanged_width(layer, options.narrow)
        exchanged = (f.received_rows + f.sent_rows) * stored.row_bytes(width, model.itemsize)
        kept = kept + buffers * exchanged + bits_bytes * (f.received_rows + f.sent_rows)
        smoothed = np.maximum(smoothed, exchanged / 2 * len(codec.averaged))
    return np.asarray(kept + smoothed)


def _during_evaluation(problem: Problem, layout: AnyLayout) -> np.ndarray:
    """Return the peak bytes of an evaluation on the whole layout [ranks]."""
    model, most = problem.model, np.zeros(problem.ranks)
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        need = layer_memory(model, layer, *f.sizes)
        # first own rows, rows to send, and a copy of all rows read; then the copy only
        row = spec.h_in * model.itemsize * (layer > model.first_varying)
        joined, computed = (f.local + f.sent_rows + f.sources) * row, f.sources * row + need.left
        most = np.maximum.reduce([most, joined, np.asarray(computed)])
    return np.asarray(most + constant_bytes(problem, layout) + blocks_bytes(problem, layout))


# -- memory of a step's operations -----------------------------------------------------------------


@dataclass(frozen=True)
class Holds:
    """Memory of a step's operations [ranks] [B].

    A layer's backward pass frees the bytes that its forward pass leaves. Rows that lag or stay are
    counted by `_kept_rows`. Between the passes a layer's output, or a copy of it with received
    rows, stays only if an operation saved it; with recomputation every layer's input stays.
    """

    problem: Problem
    model: Model  # the problem's model, or one with other orders of product and aggregation
    facts: Mapping[int, LayerCounts]  # layer -> counts of rows and edges
    options: ExchangeOptions
    scored: Scored | None = None

    def encode(self, rows: np.ndarray) -> OpMemory:
        """Return the memory of the encoder's forward pass, whose rows GCNII's layers read."""
        return keeps(rowwise_memory(self.model.encoder_record, rows).left)

    def forward(self, layer: int) -> OpMemory:
        return LayerHolds(self, layer).forward()

    def loss(self) -> OpMemory:
        model, stats, rows = self.model, self.problem.stats, self.scored_rows
        # with recomputation, outputs are not among the bytes that the last layer keeps
        more = LayerHolds(self, len(model.layers)).outputs * self.options.checkpoint
        if self.scored is None:
            # rows are those of the whole graph, or only training vertices if trimmed
            trained = rows * min(1.0, stats.train_vertices / max(rows.sum(), 1.0))
            need = loss_memory(model, rows, trained)
        else:
            need = link_loss_memory(model, rows, self.scored.edges, self.problem.workload.negatives)
            # a copy of own and received rows in one tensor
            more = more + rows * self.last_row * self.scored.sends.any()
        return need._replace(most=need.most + more)

    def backward(self, layer: int) -> OpMemory:
        return LayerHolds(self, layer).backward()

    @property
    def scored_rows(self) -> np.ndarray:
        """The rows of h_L that each rank has for the loss, own and received ones [ranks]."""
        own = self.facts[len(self.model.layers)].rows
        return own if self.scored is None else np.asarray(own + self.scored.sends.sum(0))

    @property
    def last_row(self) -> int:
        """The bytes of a row of h_L."""
        return self.model.layers[-1].h_out * self.model.itemsize

    def unsaved(self, layer: int) -> Number:
        """Return the bytes of a layer's output that the next layer frees before the layer's own
        backward pass. That begins with the projection of the output if the next layer is narrow."""
        ends = layer in (0, len(self.model.layers)) or self.options.checkpoint
        if ends or (self.options.narrow and self.model.narrow_at(layer + 1)):
            return 0.0
        of_layer = LayerHolds(self, layer)
        return of_layer.need().left - of_layer.need(drops_output=True).left


class LayerHolds:
    """Memory of one layer of a step."""

    def __init__(self, step: Holds, layer: int) -> None:
        model, narrow, f = step.model, step.options.narrow, step.facts[layer]
        self.step, self.layer, self.model, self.f = step, layer, model, f
        self.checkpoint = step.options.checkpoint
        is_narrow = narrow and model.narrow_at(layer)
        summed = f.computed_rows is not None
        # bytes of a row that is exchanged, and of the rows that the layer computes
        self.row = model.exchanged_width(layer, narrow) * model.itemsize
        self.outputs = f.rows * (model.layers[layer - 1].h_out * model.itemsize)
        # whether rows are received in every step, by any rank
        receives = layer > model.first_varying and bool(f.halo_rows.any())
        # whether the layer has its own copy of source rows, of own rows and the halo
        self.copies = receives or summed or (self.checkpoint and is_narrow)
        # whether a layer that copies rows reads its own rows where they were before
        moves_own = summed or is_narrow or self.checkpoint
        self.own_in_place = model.own_in_place(layer) and not moves_own
        # whether it holds the output of the layer before it until its backward pass
        alone = model.layer_record(layer, narrow).saves_input
        self.keeps_output_below = self.own_in_place if self.copies else alone
        self.reads_alone = is_narrow or not receives

    def forward(self) -> OpMemory:
        f, unsaved = self.f, self.step.unsaved(self.layer - 1)
        left = self._kept - (0.0 if self.keeps_output_below else unsaved)
        # own rows and halo in one tensor, with sums of them if it has any
        rows = f.sources if f.computed_rows is None else f.sources + f.available_rows
        most = np.maximum(self.copies * rows * self.row, self.need().forward)
        return OpMemory(most + self.outputs * self.checkpoint, left)

    def backward(self) -> OpMemory:
        f, step, layers = self.f, self.step, len(self.model.layers)
        # the layer does not hold its own output; logits stay until the step ends
        last = layers - (self.model.decoder is None)
        drops = not self.checkpoint and self.layer <= last
        # gradients of sources while those of the halo are exchanged, or while those of sums become
        # those of the rows that were added up
        rows = f.available_rows + f.sent_rows
        if f.computed_rows is not None:
            rows = np.maximum(rows, f.sources + f.available_rows)
        most = np.maximum(self.need(drops).most, self.copies * rows * self.row)
        # the gradient of the outputs, with halo rows if larger
        gradient = step.scored_rows * step.last_row
        if self.layer < layers:
            above = LayerHolds(step, self.layer + 1)
            gradient = np.maximum(self.outputs, above.f.available_rows * above.row)
        freed = step.unsaved(self.layer)
        # `most` includes saved tensors, which exist already unless they are recomputed
        saved = (self.need().left - freed) * (not self.checkpoint)
        input_freed = step.unsaved(self.layer - 1) if self.keeps_output_below else 0.0
        left = freed - self._kept - input_freed
        if self.layer == layers and self.model.carried:
            # the gradient of GCNII's h_0, to which all layers add, stays until the encoder's pass
            left = left + step.facts[1].local * self.model.carried * self.model.itemsize
        return OpMemory(gradient + most - saved, left)

    @property
    def _kept(self) -> Number:
        """The bytes kept from the forward pass to the backward pass: inputs only if `checkpoint`,
        else the tensors that autograd saves."""
        if not self.checkpoint:
            return self.need().left
        copied = self.copies * self.f.sources * self.row
        if self.layer == 1:
            return copied
        below = LayerHolds(self.step, self.layer - 1)
        return np.asarray(copied + below.outputs * self.reads_alone)

    def need(self, drops_output: bool = False) -> LayerMemory:
        f, frees_input = self.f, self.copies and not self.checkpoint
        return layer_memory(
            self.model if f.remote_own is None else self.model.without_ends(self.layer),
            self.layer,
            *f.sizes,
            narrow=self.step.options.narrow,
            local=f.local,
            drops_output=drops_output,
            frees_input=frees_input,
            own_in_place=frees_input and self.own_in_place,
            completes=f.partial_sums is not None,
        )


# The batches of an epoch, one per step; with several, each is loaded in its step. Empty: every step
# trains on the whole layout.
Batches = Sequence[AnyLayout]
# Framework operations that take as long as a CPU rank's work before and after an exchange, beside
# the exchange: 0.08 ms on a core that launches one in 9.5 us (Squirrel, 32 layers, two ranks). A
# GPU's host runs ahead meanwhile.
EXCHANGING = 8


def step(
    problem: Problem,
    layout: AnyLayout,
    options: ExchangeOptions,
    loads: bool = False,
    scored: Scored | None = None,
    at: int = 0,
) -> Iterator[Op]:
    """Yield the operations of step `at`, in order.

    loads: whether the step begins by loading its batch's constant rows. scored: the edges in the
    loss of link prediction, whose endpoints ranks exchange as for a layer L + 1; None: the loss
    compares labels.

    An exchange stands where a synchronous rank waits for it. Equal layers share their work and
    bytes, so a deep model takes no longer to predict than its distinct layers.
    """
    model, policy, lags = problem.model, options.policy, options.policy.lags
    like = first_alike(alike_as(model, layout, options.narrow))
    around_exchange = EXCHANGING if problem.on_cpu else 0
    facts = {layer: options.facts(problem, layout, layer, at) for layer in {*like.values()}}
    exchanges = dict[tuple[int, str], Exchange]()
    for layer, f in facts.items():
        sends = policy.sends_all or bool(f.halo.any())
        if layer > model.first_varying and layout.exchanges_rows(layer) and sends:
            width = model.exchanged_width(layer, options.narrow)
            row = options.codec.row_bytes(width, model.itemsize)
            back = f.sends if isinstance(layout, EstimatedLayout) else f.sends.T  # symmetric
            exchanges |= {(layer, "f"): Exchange(f.sends, row), (layer, "b"): Exchange(back, row)}

    def work_of(layer: int) -> BothPasses:
        """Return the layer's computation, with the next layer's projection if `narrow`, and with
        the work around its exchanges.

        A lagging exchange overlaps with the computation, and uses some of the memory's bandwidth.
        """
        f, away = facts[layer], facts[layer].remote_own
        counted = model if away is None else model.without_ends(layer)
        work = counted.work(layer, *f.sizes, options.narrow, away=0.0 if away is None else away)
        if options.narrow:
            work = work + model.project(layer + 1, f.rows)
        if options.checkpoint:  # the backward pass recomputes the forward pass
            work = work._replace(backward=work.backward + work.forward)
        if (layer, "f") not in exchanges:
            return work
        # rows of this step are received, or unpacked, in place: no copy
        in_place = not policy.keeps_received and (not lags or options.codec.packs)
        rows = f.local if in_place else f.available_rows
        work = work._replace(forward=work.forward + model.lay_out(layer, rows, options.narrow))
        if f.partial_sums is not None:
            work = work + model.apply(layer - 1, f.sources, f.partial_sums)
        elif f.computed_rows is not None:
            work = work + model.pick(layer, f.sources, f.available_rows)
        sent = exchanges[layer, "f"].nbytes  # backward in the other direction
        overlapped = np.maximum(sent.sum(1), sent.sum(0)) if lags else 0.0
        around = Compute(overlapped_bytes=overlapped, launches=around_exchange)
        return work + BothPasses(around, around)

    def exchange(layer: int, direction: str) -> Iterator[Op]:
        """Yield the exchange of rows before a layer, or of their gradients after it."""
        if (exchanged := exchanges.get((like[layer], direction))) is None:
            return
        f, width = facts[like[layer]], model.exchanged_width(layer, options.narrow)
        sent, received = (
            (f.sent_rows, f.received_rows) if direction == "f" else (f.received_rows, f.sent_rows)
        )
        for pack in options.codec.pack(sent, width, model.itemsize, picked=direction == "f"):
            yield Op("pack", direction, layer, work=pack)
        yield Op("halo", direction, layer, work=exchanged)
        for unpack in options.codec.unpack(received, width, model.itemsize, added=direction == "b"):
            yield Op("unpack", direction, layer, work=unpack)

    works = {layer: work_of(layer) for layer in facts}
    facts_by_layer = {layer: facts[first] for layer, first in like.items()}
    holds = Holds(problem, model, facts_by_layer, options, scored)
    if loads:
        yield Op("load", work=Copy(loaded_bytes(problem, layout)))
    works_by_layer = {layer: works[first] for layer, first in like.items()}
    buckets = buckets_of(problem, options.buckets, options.narrow)
    yield from layer_by_layer(holds, works_by_layer, exchange, layout.row_counts(0), buckets)


def layer_by_layer(
    holds: Holds,
    works: Mapping[int, BothPasses],
    exchange: Callable[[int, str], Iterable[Op]],
    encoded: np.ndarray,
    buckets: Sequence[Bucket] = (),
) -> Iterator[Op]:
    """Yield the operations of a step on loaded rows, in order.

    works: of each layer. exchange: returns what comes before a layer's forward pass ('f'), and
    after its backward pass ('b'). encoded: number of rows that the encoder computes [ranks].
    """
    problem, model, scored = holds.problem, holds.model, holds.scored
    last, complete = len(works), defaultdict[int, list[Op]](list)
    for bucket in buckets:
        size = bucket.weights * model.weight_itemsize
        summed, first = AllReduce((size,)), bucket.layers.start
        op = Op("all_reduce", layer=first, work=summed, overlaps_backward=True)
        complete[bucket.after].append(op)
    encode = model.encode(encoded) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0], holds=partial(holds.encode, encoded))
    for layer in range(1, last + 1):
        yield from moments(problem, layer, "f")
        yield from exchange(layer, "f")
        keeps = partial(holds.forward, layer)
        yield Op("forward", layer=layer, work=works[layer].forward, holds=keeps)
    endpoints = None  # exchange of edges' endpoints
    if scored is not None and scored.exchanges_rows:
        endpoints = Exchange(scored.sends, model.layers[-1].h_out * model.itemsize)
    yield from moments(problem, last + 1, "f")
    if endpoints is not None:
        yield Op("halo", "f", last + 1, work=endpoints)
    yield Op("loss", work=finish(problem, holds.facts[last].rows, scored), holds=holds.loss)
    if endpoints is not None:
        yield Op("halo", "b", last + 1, work=replace(endpoints, items=endpoints.items.T))
    yield from moments(problem, last + 1, "b")
    for layer in range(last, 0, -1):
        frees = partial(holds.backward, layer)
        yield Op("backward", layer=layer, work=works[layer].backward, holds=frees)
        yield from complete[layer]
        yield from exchange(layer, "b")
        yield from moments(problem, layer, "b")
    if encode:
        yield Op("encode", "b", work=encode[1])
        yield from complete[0]
    yield from end_of_step(problem, are_summed=bool(buckets))


def end_of_step(problem: Problem, are_summed: bool = False) -> Iterator[Op]:
    """Yield the operations that end a step: the update, after an all-reduce if needed."""
    model = problem.model
    if problem.ranks > 1 and not are_summed:
        yield Op("all_reduce", work=AllReduce((model.weights * model.weight_itemsize,)))
    yield Op("update", work=model.update(model.weights))


def moments(problem: Problem, layer: int, direction: str) -> Iterator[Op]:
    """Yield batch norm's all-reduce: of moments before the layer, or of their gradient after it.

    Layer L + 1 is the decoder.
    """
    if problem.ranks > 1 and (numbers := problem.model.moments(layer, direction)):
        size = numbers * problem.model.itemsize
        yield Op("moments", direction, layer, work=AllReduce((size,)))


def finish(problem: Problem, own: np.ndarray, scored: Scored | None) -> Compute:
    """Return the work of decoder and loss, forward and backward, on each rank's rows of h_L.

    own: number of own rows; with `scored`, received rows count too.
    """
    both = (
        problem.model.finish(own)
        if scored is None
        else problem.model.finish(
            own + scored.sends.sum(0), scored.edges, problem.workload.negatives
        )
    )
    return both.forward + both.backward


def alike_as(model: Model, layout: AnyLayout, narrow: bool) -> list[object]:
    """Return for every layer a key that is equal for layers with equal work and bytes."""
    following = [*model.layers[1:], None] if narrow else [None] * len(model.layers)
    return [
        (spec, after, layout.kind(layer), layer <= max(model.first_varying, 1))
        for layer, (spec, after) in enumerate(zip(model.layers, following, strict=True), 1)
    ]


def first_alike(kinds: Iterable[object]) -> dict[int, int]:
    """Return a dict: layer (1, 2, ..) -> the first layer of the same kind.

    >>> first_alike("aba")
    {1: 1, 2: 2, 3: 1}
    """
    first: dict[object, int] = {}
    return {layer: first.setdefault(kind, layer) for layer, kind in enumerate(kinds, 1)}


def setup(problem: Problem, layout: AnyLayout) -> Iterator[Op]:
    """Yield exchanges before the first step: features of recomputed rows, halo of features."""
    preloaded = layout.preloaded()
    if preloaded.any():
        yield send_features(problem, layout, preloaded, "preload")
    halo = layout.facts(1).sends
    if problem.model.first_varying == 1 and halo.any():
        yield send_features(problem, layout, halo, "input_halo")


def send_features(problem: Problem, layout: AnyLayout, rows: RankMatrix, op: str) -> Op:
    """Return the exchange of features, for these numbers of rows [ranks, ranks]."""
    if problem.model.inputs.is_dense or not isinstance(layout, Layout):
        return Op(op, work=Exchange(rows, round(float(problem.model.feature_transit_bytes(1.0)))))
    nbytes = np.zeros((problem.ranks, problem.ranks), np.int64)
    for receiver in range(problem.ranks):
        if op == "preload":
            ids = layout.rows(receiver, 0)[layout.own(receiver).size :]
            sender = layout.owner[ids]
        else:
            piece = layout.piece(receiver, 1)
            ids, sender = piece.halo, np.repeat(np.arange(problem.ranks), piece.received)
        nbytes[:, receiver] = np.bincount(
            sender, weights=problem.features_bytes(ids), minlength=problem.ranks
        )
    return Op(op, work=Exchange(nbytes))


def loaded_bytes(problem: Problem, layout: AnyLayout) -> np.ndarray:
    """Return the bytes of constant rows that a batch loads to the device [ranks].

    These are the rows that layer 1 or the encoder reads, or layer 1's aggregate if it is cached.
    """
    model = problem.model
    if isinstance(layout, Layout) and not model.inputs.is_dense:
        local = [layout.rows(rank, 0) for rank in range(problem.ranks)]
        read = (
            [np.append(rows, layout.piece(rank, 1).halo) for rank, rows in enumerate(local)]
            if model.first_varying
            else local
        )
        return np.array([int(problem.features_bytes(rows).sum()) for rows in read])
    rows = model.constant_rows(layout.facts(1).rows, rows_read(problem, layout))
    return np.asarray(np.round(model.feature_transit_bytes(np.round(rows))).astype(np.int64))
