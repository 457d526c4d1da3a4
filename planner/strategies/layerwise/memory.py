"""Bytes that a rank holds where ranks go layer by layer together, moment by moment of a step.

    forward    a layer's inputs and what autograd saves stay, until its backward pass frees them
    loss       logits and their gradient
    backward   gradients of rows, and exchange buffers, come on top

The fullest moment of the fullest batch decides. It follows executor/strategies/graph_parallel.py;
sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gnnplan.planner.gnn.footprint import (
    RUNTIME,
    Footprint,
    Moments,
    Prepared,
    Product,
    addition,
    block,
    footprint,
    kernels,
    loss,
)
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.layerwise.step import (
    Batches,
    ExchangeOptions,
    alike_as,
    loaded_bytes,
    local_rows,
    setup,
)
from gnnplan.planner.vocabulary.numbers import Number


def memory(
    problem: Problem,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Batches = (),
) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step or of the set-up.

    The largest batch fills the device. Edges of all batches stay there.
    """
    model, b, kind = problem.model, problem.model.itemsize, problem.workload.model
    zero = np.zeros(problem.ranks)
    # estimated batches are one object, many times
    times = Counter(map(id, batches or (layout,)))
    different = {id(batch): batch for batch in batches or (layout,)}.values()
    steps = [moments(problem, batch, options) for batch in different]
    activations, buffers = fullest([m for m, _ in steps], problem.ranks)
    if problem.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels(
            [product for _, products in steps for product in products], problem.ranks
        )
    features = _constant(problem, layout)
    use: Memory = {
        "parameters": zero + model.weights * b,
        "optimizer": zero + (3 if problem.workload.optimizer == "adam" else 1) * model.weights * b,
        "features": features,
        "activations": activations,
        "halo": zero,
        "graph": zero,
        "buffers": buffers,
        "runtime": zero + RUNTIME[problem.cluster.device.kind],
    }
    if batches:
        loaded = np.max([_constant(problem, batch) for batch in different], axis=0)
        # on a CPU the device's memory is the server's, which has the features of all batches
        use["features"] = loaded + (features if problem.cluster.device.kind == "cpu" else 0.0)
    for batch in different:
        seen, count = set(), times[id(batch)]
        for layer in range(1, problem.workload.layers + 1):
            if (alike := batch.kind(layer)) not in seen:  # such layers share their blocks
                seen.add(alike)
                f = batch.facts(layer)
                structure = (
                    block(kind, model, model.layers[layer - 1], f.rows, f.sources, f.edges)
                    + 8 * f.given
                )
                use["graph"] = use["graph"] + count * structure
        use["halo"] = use["halo"] + _stale_buffers(problem, batch, options)
        use["graph"] = use["graph"] + count * 16 * f.rows  # labels and masks
    training = sum((use[name] for name in ("features", "activations", "halo", "buffers")), zero)
    use["buffers"] = use["buffers"] + np.maximum(_during_setup(problem, layout) - training, 0.0)
    return use


def _stale_buffers(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of the buffers of stale exchanges, which stay from step to step [ranks].

    Per layer there are rows that leave and come, and gradients that leave and come. One more buffer
    serves all layers in turn for what is smoothed.
    """
    stays, smoothed = np.zeros((2, problem.ranks))
    if not options.staleness:
        return stays
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f = layout.facts(layer)
        width = problem.model.exchanged_width(layer, options.narrow) * problem.model.itemsize
        stays = stays + 2 * (f.taken + f.given) * width
        rows, gradients = "f" in options.smoothing, "g" in options.smoothing
        smoothed = np.maximum(smoothed, np.maximum(f.taken * rows, f.given * gradients) * width)
    return np.asarray(stays + smoothed)


def fullest(steps: Sequence[Moments], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations and buffers of each rank's fullest step, [ranks] and [ranks]."""
    # [steps, 2, ranks]
    both = np.array([(m.activations + np.zeros(ranks), m.buffers + np.zeros(ranks)) for m in steps])
    activations, buffers = both[both.sum(1).argmax(0), :, np.arange(ranks)].T
    return activations, buffers


def _constant(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that a rank keeps [ranks].

    They are layer 1's aggregate where that is cached, else the rows that layer 1 reads.
    """
    model, f = problem.model, layout.facts(1)
    if not model.aggregate_cached(1):
        return _read(problem, layout)
    # GraphSAGE and residuals read a vertex's own row too
    rows = f.rows * (2 if model.layers[0].reads_own else 1)
    return np.asarray(model.features_held(rows), dtype=float)


def _read(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that layer 1 or the encoder reads [ranks]."""
    model, f = problem.model, layout.facts(1)
    rows = f.sources if model.first_varying else local_rows(layout, 0)
    numbers = loaded_bytes(problem, layout) / (2 * model.itemsize) if model.nonzeros else None
    held = np.asarray(model.features_held(rows, numbers), dtype=float)
    # own rows, a part of the rows read, have a sparse product of their own
    if model.reads_sparse(1) and model.layers[0].reads_own:
        held = held + (f.rows < f.sources) * model.features_sorted(f.rows)
    return held


def _during_setup(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """The most bytes held while constant rows arrive and layer 1's aggregate is made [ranks]."""
    passing = [
        op.sent.sum(0) + op.sent.sum(1) for op in setup(problem, layout) if op.sent is not None
    ]
    held = _read(problem, layout)
    most = np.asarray(held + np.max([np.zeros(problem.ranks), *passing], axis=0))
    if problem.model.aggregate_cached(1):
        most = np.asarray(np.maximum(most, held + _constant(problem, layout)))
    return most


def moments(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> tuple[Moments, list[Product]]:
    """What a training step holds, and its matrix products; layers that are alike share numbers."""
    model, b = problem.model, problem.model.itemsize
    layers = range(1, problem.workload.layers + 1)
    alike: dict[object, tuple[LayerFacts, Footprint]] = {}

    def of(layer: int) -> tuple[LayerFacts, Footprint]:
        key = alike_as(model, layout, layer, options.narrow), model.relu_after(layer)
        if key not in alike:
            f = layout.facts(layer)
            need = footprint(
                problem.workload.model,
                model,
                layer,
                f.rows,
                f.sources,
                f.edges,
                narrow=options.narrow,
                local=f.sources - f.taken,
            )
            alike[key] = f, need
        return alike[key]

    m = Moments(problem.ranks)
    own = of(layers[-1])[0].rows
    additions = [addition(model, layer, own) for layer in layers]  # to the sum of all layers' rows
    summed = own * model.jumped * b
    m.keep(summed)
    initial: Number = 0.0  # rows that GCNII's layers all read
    if model.encoder:
        local = local_rows(layout, 0)
        dropped = (
            local
            * (model.nonzeros or model.features)
            * b
            * (model.dropout > 0 and model.hands_on_initial)
        )
        m.at(dropped, dropped / b)
        initial = local * model.encoder[1] * b
        m.keep(dropped, initial)
    copies: dict[int, Number] = {}  # of a layer's source rows, own and halo together
    before: Number = initial  # h_{l-1}
    for layer in layers:
        f, need = of(layer)
        varies, narrow = layer > model.first_varying, options.narrow and model.narrow_at(layer)
        width, halo = model.exchanged_width(layer, options.narrow) * b, f.taken * varies
        copies[layer] = f.sources * width * ((halo > 0) | (narrow and options.checkpoint))
        m.keep(copies[layer])
        m.at(f.given * varies * width * (not options.staleness))
        m.at(need.forward)
        out = f.rows * model.layers[layer - 1].h_out * b
        if options.checkpoint:
            m.keep(out)
            if narrow:
                m.keep(Prepared.of(model, model.layers[layer - 1], f.sources - halo).dropped)
            elif varies and not (layer == 1 and model.hands_on_initial):
                m.free(np.where(halo > 0, before, 0.0))  # the copy has these rows
        else:
            m.keep(need.kept)
        m.at(additions[layer - 1].forward)
        before = np.asarray(out, dtype=np.float64)
    logits, most, gradient = loss(
        model, own, own * min(1.0, problem.stats.train_vertices / problem.stats.vertices)
    )
    m.at(most)
    m.keep(logits)
    if options.checkpoint:
        m.free(before)  # h_L
    if model.jump:
        m.free(summed * (model.decoder is not None))  # else the logits
        m.keep(gradient)  # for all layers
        gradient = 0.0 * gradient
    for layer in reversed(layers):
        f, need = of(layer)
        spec = model.layers[layer - 1]
        added = additions[layer - 1]
        m.at(gradient, added.backward)
        gradient = np.maximum(gradient, added.gradient)
        if options.checkpoint:
            m.at(gradient, need.forward)
            m.at(gradient, need.backward)
        else:
            m.at(gradient, need.backward - need.kept)
            m.free(need.kept)
        if layer == layers[-1] and model.hands_on_initial:
            m.keep(initial)  # their gradient
        if layer > model.first_varying:
            width = model.exchanged_width(layer, options.narrow) * b
            m.at((f.sources + f.given * (not options.staleness)) * width)
            gradient = (
                (f.sources - f.taken) * spec.h_in * b
                if options.narrow and model.narrow_at(layer)
                else f.sources * width
            )
        m.free(copies[layer])
    products = [product for _, need in alike.values() for product in need.products]
    if model.encoder and not model.nonzeros:
        products.append(
            Product(
                local_rows(layout, 0),
                *model.encoder,
                False,
                ("bias relu",) if model.relu_after(0) else ("bias",),
            )
        )
    if model.decoder:
        products.append(Product(own, *model.decoder))
    products += [product for added in additions for product in added.products]
    return m, products
