"""The operations of one training step that goes layer by layer, all ranks together.

    one step   |halo f 1|forward 1| .. |forward L|loss|backward L|halo b L| .. |all_reduce|update|

A codec (planner/gnn/codec.py) may pack what crosses before and unpack it after:

    .. |pack f 2|halo f 2|unpack f 2|forward 2| ..  |backward 2|pack b 2|halo b 2|unpack b 2| ..

For link prediction the rows of edges' ends cross before the loss, as before a layer L + 1, and
their gradients after it; they cross as they are.

What is read from operations is in strategies/program/. What layers compute is counted by
planner/gnn/model.py; which rows a rank has, by planner/ownership/layout.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np

from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.buckets import Bucket, buckets_of
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import AllReduce, Copy, Exchange, Op, Program
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import Pairs
from gnnplan.planner.vocabulary.schedule import Compute

# Of an epoch: one is trained on in every step, several are loaded in turn; empty: the whole layout
Batches = Sequence[Layout | EstimatedLayout]


def program(
    problem: Problem,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Batches = (),
    batch_at: Callable[[int], int] = lambda step: 0,
) -> Program:
    """One step over the layout, or one step over each of its batches: step t over `batch_at(t)`."""
    layouts, period = batches or (layout,), options.policy.period  # estimated batches are equal
    ops = {
        (each, t): list(step(problem, each, options, loads=len(batches) > 1, at=t))
        for each in dict.fromkeys(layouts)
        for t in range(period)
    }
    return Program(
        lambda: [(each, t) for t in range(period) for each in layouts],
        len(layouts),
        lambda t: (layouts[batch_at(t)], t % period),
        ops.__getitem__,
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
    """The operations of step `at`, in order.

    With `loads` the step begins by loading the constant rows of its batch. scored: edges that the
    loss is of, whose ends cross as the rows of a layer L + 1; None: the loss is of labels.

    Exchanges stand where a synchronous rank waits for them. Layers that are alike share their work
    and bytes, so that a deep model costs no more to predict than its different
    layers.
    """
    model, layers = problem.model, problem.workload.layers
    policy, lags = options.policy, options.policy.lags
    like = first_alike(alike_as(model, layout, options.narrow))
    facts = {layer: options.facts(problem, layout, layer, at) for layer in {*like.values()}}
    meets = {
        layer: layout.meets(layer) and (policy.whole or bool(f.halo.any()))
        for layer, f in facts.items()
    }

    @cache
    def halo(layer: int, way: str) -> Exchange | None:
        """The layer's exchange; None if it has none."""
        if layer <= model.first_varying or not meets[layer]:
            return None
        f, symmetric = facts[layer], isinstance(layout, EstimatedLayout)
        rows = f.sends if way == "f" or symmetric else f.returned
        width = model.exchanged_width(layer, options.narrow)
        return Exchange(rows, options.codec.row_bytes(width, model.itemsize))

    @cache
    def work(layer: int, way: str, reduced: float = 0.0) -> Compute:
        """The layer's computation.

        A stale exchange and all-reduces, in which a rank sends `reduced` bytes, overlap with it and
        take some bandwidth.
        """
        moved, f, done = halo(layer, way), facts[layer], computation(layer, way)
        done = done + Compute(overlapped_bytes=reduced) if reduced else done
        if moved is None:
            return done
        if way == "f":  # fresh rows have arrived in their place, others were unpacked there
            rows = f.present if policy.stays or (lags and not options.codec.packs) else f.local
            done = done + model.lay_out(layer, rows, options.narrow)
        if f.added is not None:
            done = done + model.apply(layer - 1, f.sources, f.added)[0 if way == "f" else 1]
        elif f.made is not None:
            done = done + model.pick(layer, f.sources, f.present)[0 if way == "f" else 1]
        overlapped: Number = 0.0
        if lags:
            overlapped = np.maximum(moved.nbytes.sum(1), moved.nbytes.sum(0))
        return done + Compute(overlapped_bytes=overlapped)

    def computation(layer: int, way: str) -> Compute:
        """The layer, and the next layer's projection if that is done before its exchange."""
        f, forward_or_backward = facts[layer], 0 if way == "f" else 1
        its, away = (model, 0.0) if f.away is None else (model.without_ends(layer), f.away)
        work = (its.forward, its.backward)[forward_or_backward](
            layer, f.rows, f.sources, f.edges, options.narrow, away=away
        )
        if options.narrow:
            work = work + model.project(layer + 1, f.rows)[forward_or_backward]
        # a checkpoint's backward pass begins with the forward pass
        return work + computation(layer, "f") if options.checkpoint and way == "b" else work

    def exchange(layer: int, way: str) -> Iterator[Op]:
        """Rows before a layer, or their gradients after it."""
        if (moved := halo(like[layer], way)) is None:
            return
        f, width = facts[like[layer]], model.exchanged_width(layer, options.narrow)
        leaves, comes = (f.given, f.taken) if way == "f" else (f.taken, f.given)
        for pack in options.codec.pack(leaves, width, model.itemsize, picked=way == "f"):
            yield Op("pack", way, layer, work=pack)
        yield Op("halo", way, layer, work=moved)
        for unpack in options.codec.unpack(comes, width, model.itemsize, added=way == "b"):
            yield Op("unpack", way, layer, work=unpack)

    complete: dict[int, list[Bucket]] = {}  # by the layer whose backward pass completes them
    for bucket in buckets_of(problem, options.buckets, options.narrow):
        complete.setdefault(bucket.after, []).append(bucket)

    def sums(after: int) -> Iterator[Op]:
        """The all-reduces that begin after a layer's backward pass (0: the encoder's)."""
        for layers, weights, _ in complete.get(after, ()):
            size = weights * model.weight_itemsize
            yield Op(
                "all_reduce", layer=layers.start, work=AllReduce((size,)), overlaps_backward=True
            )

    def reduced(after: int) -> float:
        """Bytes that a rank sends in them."""
        size = sum(bucket.weights for bucket in complete.get(after, ())) * model.weight_itemsize
        return 2 * (problem.ranks - 1) / problem.ranks * size

    encoded = layout.row_counts(0) if model.encoder else np.zeros(problem.ranks)
    of_all = {layer: facts[first] for layer, first in like.items()}
    holds = Holds(problem, model, of_all, encoded, options, scored)

    if loads:
        yield Op("load", work=Copy(loaded_bytes(problem, layout)))
    encode = model.encode(encoded) if model.encoder else None
    if encode:
        yield Op("encode", "f", work=encode[0], holds=holds.encode)
    for layer in range(1, layers + 1):
        yield from moments(problem, layer, "f")
        yield from exchange(layer, "f")
        keeps = partial(holds.forward, layer)
        yield Op("forward", layer=layer, work=work(like[layer], "f"), holds=keeps)
    forward, backward = finish(problem, facts[like[layers]].rows, scored)
    ends = None
    if scored is not None and scored.meets:
        ends = Exchange(scored.sends, model.layers[-1].h_out * model.itemsize)
    yield from moments(problem, layers + 1, "f")
    if ends is not None:
        yield Op("halo", "f", layers + 1, work=ends)
    yield Op("loss", work=forward + backward, holds=holds.loss)
    if ends is not None:
        yield Op("halo", "b", layers + 1, work=replace(ends, items=ends.items.T))
    yield from moments(problem, layers + 1, "b")
    for layer in range(layers, 0, -1):
        frees = partial(holds.backward, layer)
        done = work(like[layer], "b", reduced(layer + 1))
        yield Op("backward", layer=layer, work=done, holds=frees)
        yield from sums(layer)
        yield from exchange(layer, "b")
        yield from moments(problem, layer, "b")
    if encode:
        yield Op("encode", "b", work=encode[1] + Compute(overlapped_bytes=reduced(1)))
        yield from sums(0)
    yield from end_of_step(problem, are_summed=bool(complete))


def end_of_step(problem: Problem, are_summed: bool = False) -> Iterator[Op]:
    """How a step ends, whose gradients are summed already or not."""
    model = problem.model
    if problem.ranks > 1 and not are_summed:
        yield Op("all_reduce", work=AllReduce((model.weights * model.weight_itemsize,)))
    yield Op("update", work=model.update(model.weights))


def moments(problem: Problem, layer: int, way: str) -> Iterator[Op]:
    """Batch norm's all-reduce: moments before the layer, or their gradient after it.

    Layer L + 1 is the decoder.
    """
    if problem.ranks > 1 and (numbers := problem.model.moments(layer, way)):
        size = numbers * problem.model.itemsize
        yield Op("moments", way, layer, work=AllReduce((size,)))


def finish(problem: Problem, own: np.ndarray, scored: Scored | None) -> tuple[Compute, Compute]:
    """Forward and backward work of decoder and loss on each rank's own rows of h_L.

    With `scored` also on the rows that it is sent.
    """
    if scored is None:
        return problem.model.finish(own)
    rows = own + scored.sends.sum(0)
    return problem.model.finish(rows, scored.edges, problem.workload.negatives)


def alike_as(model: Model, layout: Layout | EstimatedLayout, narrow: bool) -> list[object]:
    """Of every layer a key that is equal for layers with equal work and bytes."""
    following = [*model.layers[1:], None] if narrow else [None] * len(model.layers)
    return [
        (spec, after, layout.kind(layer), layer <= max(model.first_varying, 1))
        for layer, (spec, after) in enumerate(zip(model.layers, following, strict=True), 1)
    ]


def first_alike(kinds: Iterable[object]) -> dict[int, int]:
    """For layers 1, 2, .. of these kinds the first one of the same kind.

    >>> first_alike("aba")
    {1: 1, 2: 2, 3: 1}
    """
    first: dict[object, int] = {}
    return {layer: first.setdefault(kind, layer) for layer, kind in enumerate(kinds, 1)}


def setup(problem: Problem, layout: Layout | EstimatedLayout) -> Iterator[Op]:
    """Exchanges before the first step: features of recomputed rows, then constant inputs' halo."""
    preloaded = layout.preloaded()
    if preloaded.any():
        yield send_features(problem, layout, preloaded, "preload")
    halo = layout.facts(1).sends
    if problem.model.first_varying == 1 and halo.any():
        yield send_features(problem, layout, halo, "input_halo")


def send_features(problem: Problem, layout: Layout | EstimatedLayout, rows: Pairs, op: str) -> Op:
    """The exchange of the features of so many `rows` [ranks, ranks]."""
    if problem.model.inputs.alike or not isinstance(layout, Layout):
        return Op(op, work=Exchange(rows, round(float(problem.model.features_moved(1.0)))))
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


def preparation(problem: Problem, layout: Layout | EstimatedLayout) -> dict[str, float]:
    """Seconds before the first step: partitioning, and the exchanges of `setup`."""
    exchanged_s = setup_s(problem, setup(problem, layout))
    return {"partitioning": problem.seconds_of(layout), "features": exchanged_s}


def loaded_bytes(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes [ranks] of the constant rows that a batch needs on the device.

    These are the rows that layer 1 (or the encoder) reads, or layer 1's aggregate where that is
    cached.
    """
    model = problem.model
    if isinstance(layout, Layout) and not model.inputs.alike:
        local = [layout.rows(rank, 0) for rank in range(problem.ranks)]
        read = (
            [np.append(rows, layout.piece(rank, 1).halo) for rank, rows in enumerate(local)]
            if model.first_varying
            else local
        )
        return np.array([int(problem.features_bytes(rows).sum()) for rows in read])
    if model.aggregate_cached(1):
        # GraphSAGE reads a vertex's own row too
        rows = layout.facts(1).rows * (2 if model.layers[0].reads_own else 1)
    else:
        rows = layout.facts(1).sources if model.first_varying else layout.row_counts(0)
    return np.asarray(np.round(model.features_moved(np.round(rows))).astype(np.int64))
