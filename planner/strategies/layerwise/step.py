"""The operations of one training step, layer by layer, on all ranks.

    one step   |halo f 1|forward 1| .. |forward L|loss|backward L|halo b L| .. |all_reduce|update|

With a codec, rows are packed before the exchange and unpacked after it (planner/gnn/rows.py):

    .. |pack f 2|halo f 2|unpack f 2|forward 2| ..  |backward 2|pack b 2|halo b 2|unpack b 2| ..

For link prediction, ranks exchange the rows of edges' endpoints before the loss, as if for a layer
L + 1, and return their gradients after the loss; these rows are not packed.

planner/gnn/model.py counts the work of layers; planner/ownership/layout.py, the rows of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import Bucket, ExchangeOptions, buckets_of
from gnnplan.planner.strategies.layerwise.memory import Holds, rows_read
from gnnplan.planner.strategies.program.program import AllReduce, Copy, Exchange, Op, Program
from gnnplan.planner.vocabulary.numbers import Number, RankMatrix
from gnnplan.planner.vocabulary.schedule import Compute

# The batches of an epoch, one per step; with several, each is loaded in its step. Empty: every step
# trains on the whole layout.
Batches = Sequence[Layout | EstimatedLayout]
# Framework operations that take as long as a CPU rank's work before and after an exchange, beside
# the exchange: 0.08 ms on a core that launches one in 9.5 us (Squirrel, 32 layers, two ranks). A
# GPU's host runs ahead meanwhile.
EXCHANGING = 8


def program(
    problem: Problem,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Batches = (),
    batch_at: Callable[[int], int] = lambda step: 0,
) -> Program:
    """Return the program: a step on the whole layout, or step t on the batch batch_at(t)."""
    layouts, period = batches or (layout,), options.policy.period  # estimated batches are equal
    return Program(
        lambda: [(each, t) for t in range(period) for each in layouts],
        len(layouts),
        lambda t: (layouts[batch_at(t)], t % period),
        lambda name: list(step(problem, name[0], options, loads=len(batches) > 1, at=name[1])),
        lambda: setup(problem, layout),
        int(options.policy.lags),
        period=period,
    )


def step(
    problem: Problem,
    layout: Layout | EstimatedLayout,
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
    model, layers = problem.model, problem.workload.layers
    policy, lags = options.policy, options.policy.lags
    like = first_alike(alike_as(model, layout, options.narrow))
    around_exchange = EXCHANGING if problem.cluster.device.kind == "cpu" else 0
    facts = {layer: options.facts(problem, layout, layer, at) for layer in {*like.values()}}
    exchanging = {
        layer: layout.exchanges_rows(layer) and (policy.sends_all or bool(f.halo.any()))
        for layer, f in facts.items()
    }

    def exchange_of(layer: int, direction: str) -> Exchange | None:
        """Return the layer's exchange, or None."""
        if layer <= model.first_varying or not exchanging[layer]:
            return None
        f, symmetric = facts[layer], isinstance(layout, EstimatedLayout)
        rows = f.sends if direction == "f" or symmetric else f.returned
        width = model.exchanged_width(layer, options.narrow)
        return Exchange(rows, options.codec.row_bytes(width, model.itemsize))

    halos = {(layer, way): exchange_of(layer, way) for layer in facts for way in ("f", "b")}

    def work_of(layer: int, direction: str) -> Compute:
        """Return the layer's computation, with the work around its exchange.

        A lagging exchange overlaps with the computation, and uses some of the memory's bandwidth.
        """
        exchanged, f, total = halos[layer, direction], facts[layer], computation(layer, direction)
        if exchanged is None:
            return total
        if direction == "f":  # rows of this step are received, or unpacked, in place: no copy
            rows = (
                f.available_rows
                if policy.keeps_received or (lags and not options.codec.packs)
                else f.local
            )
            total = total + model.lay_out(layer, rows, options.narrow)
        if f.partial_sums is not None:
            total = (
                total
                + model.apply(layer - 1, f.sources, f.partial_sums)[0 if direction == "f" else 1]
            )
        elif f.computed_rows is not None:
            total = (
                total + model.pick(layer, f.sources, f.available_rows)[0 if direction == "f" else 1]
            )
        overlapped: Number = 0.0
        if lags:
            overlapped = np.maximum(exchanged.nbytes.sum(1), exchanged.nbytes.sum(0))
        return total + Compute(overlapped_bytes=overlapped, launches=around_exchange)

    def computation(layer: int, direction: str) -> Compute:
        """Return the work of the layer, with the next layer's projection if `narrow`."""
        f, forward_or_backward = facts[layer], 0 if direction == "f" else 1
        counted, away = (
            (model, 0.0) if f.remote_own is None else (model.without_ends(layer), f.remote_own)
        )
        work = (counted.forward, counted.backward)[forward_or_backward](
            layer, f.rows, f.sources, f.edges, options.narrow, away=away
        )
        if options.narrow:
            work = work + model.project(layer + 1, f.rows)[forward_or_backward]
        # a checkpointed layer recomputes its forward pass in the backward pass
        return work + computation(layer, "f") if options.checkpoint and direction == "b" else work

    def exchange(layer: int, direction: str) -> Iterator[Op]:
        """Yield the exchange of rows before a layer, or of their gradients after it."""
        if (exchanged := halos[like[layer], direction]) is None:
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

    works = {key: work_of(*key) for key in halos}
    complete: dict[int, list[Bucket]] = {}  # layer whose backward pass completes them -> buckets
    for bucket in buckets_of(problem, options.buckets, options.narrow):
        complete.setdefault(bucket.after, []).append(bucket)

    def sums(after: int) -> Iterator[Op]:
        """Yield the all-reduces that begin after a layer's backward pass (0: the encoder's)."""
        for layers, weights, _ in complete.get(after, ()):
            size = weights * model.weight_itemsize
            yield Op(
                "all_reduce", layer=layers.start, work=AllReduce((size,)), overlaps_backward=True
            )

    def reduced(after: int) -> float:
        """Return the bytes that a rank sends in these all-reduces."""
        size = sum(bucket.weights for bucket in complete.get(after, ())) * model.weight_itemsize
        return 2 * (problem.ranks - 1) / problem.ranks * size

    facts_by_layer = {layer: facts[first] for layer, first in like.items()}
    holds = Holds(problem, model, facts_by_layer, options, scored)

    if loads:
        yield Op("load", work=Copy(loaded_bytes(problem, layout)))
    encoded = layout.row_counts(0)
    encode = model.encode(encoded) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0], holds=partial(holds.encode, encoded))
    for layer in range(1, layers + 1):
        yield from moments(problem, layer, "f")
        yield from exchange(layer, "f")
        keeps = partial(holds.forward, layer)
        yield Op("forward", layer=layer, work=works[like[layer], "f"], holds=keeps)
    forward, backward = finish(problem, facts[like[layers]].rows, scored)
    endpoints = None  # exchange of edges' endpoints
    if scored is not None and scored.exchanges_rows:
        endpoints = Exchange(scored.sends, model.layers[-1].h_out * model.itemsize)
    yield from moments(problem, layers + 1, "f")
    if endpoints is not None:
        yield Op("halo", "f", layers + 1, work=endpoints)
    yield Op("loss", work=forward + backward, holds=holds.loss)
    if endpoints is not None:
        yield Op("halo", "b", layers + 1, work=replace(endpoints, items=endpoints.items.T))
    yield from moments(problem, layers + 1, "b")
    for layer in range(layers, 0, -1):
        frees = partial(holds.backward, layer)
        computed = works[like[layer], "b"]
        if sent := reduced(layer + 1):  # these all-reduces use some of the memory's bandwidth too
            computed = computed + Compute(overlapped_bytes=sent)
        yield Op("backward", layer=layer, work=computed, holds=frees)
        yield from sums(layer)
        yield from exchange(layer, "b")
        yield from moments(problem, layer, "b")
    if encode:
        yield Op("encode", "b", work=encode[1] + Compute(overlapped_bytes=reduced(1)))
        yield from sums(0)
    yield from end_of_step(problem, are_summed=bool(complete))


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


def finish(problem: Problem, own: np.ndarray, scored: Scored | None) -> tuple[Compute, Compute]:
    """Return forward and backward work of decoder and loss on each rank's rows of h_L.

    own: number of own rows; with `scored`, received rows count too.
    """
    if scored is None:
        return problem.model.finish(own)
    rows = own + scored.sends.sum(0)
    return problem.model.finish(rows, scored.edges, problem.workload.negatives)


def alike_as(model: Model, layout: Layout | EstimatedLayout, narrow: bool) -> list[object]:
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


def setup(problem: Problem, layout: Layout | EstimatedLayout) -> Iterator[Op]:
    """Yield exchanges before the first step: features of recomputed rows, halo of features."""
    preloaded = layout.preloaded()
    if preloaded.any():
        yield send_features(problem, layout, preloaded, "preload")
    halo = layout.facts(1).sends
    if problem.model.first_varying == 1 and halo.any():
        yield send_features(problem, layout, halo, "input_halo")


def send_features(
    problem: Problem, layout: Layout | EstimatedLayout, rows: RankMatrix, op: str
) -> Op:
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


def loaded_bytes(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
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
