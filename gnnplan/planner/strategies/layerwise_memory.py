"""What a rank fills where layers come one after the other, all ranks together, over a Layout: moment by moment of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.estimate import EstimatedLayout
from gnnplan.planner.footprint import RUNTIME, Footprint, Moments, Prepared, Product, block, footprint, kernels, loss
from gnnplan.planner.job import Job
from gnnplan.planner.layout import LayerFacts, Layout
from gnnplan.planner.strategies.layerwise import Batches, Manner, alike_as, loaded_bytes, local_rows, setup
from gnnplan.planner.strategies.strategy import Memory


def memory(job: Job, layout: Layout | EstimatedLayout, how: Manner, batches: Batches = ()) -> Memory:
    """Bytes per rank by use at the fullest moment of a step or of the set-up; the largest batch fills the device, edges of all stay
    there."""
    model, b, kind = job.model, job.model.itemsize, job.workload.model
    zero = np.zeros(job.ranks)
    times = Counter(map(id, batches or (layout,)))  # estimated batches are all the same one
    different = {id(each): each for each in batches or (layout,)}.values()
    steps = [moments(job, each, how) for each in different]
    activations, buffers = fullest([m for m, _ in steps], job.ranks)
    if job.cluster.device.kind == "cpu" and b == 4:
        buffers = buffers + kernels([product for _, products in steps for product in products], job.ranks)
    features = _constant(job, layout)
    use: Memory = {
        "parameters": zero + model.weights * b,
        "optimizer": zero + (3 if job.workload.optimizer == "adam" else 1) * model.weights * b,
        "features": features, "activations": activations, "halo": zero, "graph": zero, "buffers": buffers,
        "runtime": zero + RUNTIME[job.cluster.device.kind],
    }  # fmt: skip
    if batches:
        loaded = np.max([_constant(job, each) for each in different], axis=0)
        use["features"] = loaded + (features if job.cluster.device.kind == "cpu" else 0.0)  # the server's memory is the device's
    for each in different:
        seen, count = set(), times[id(each)]
        for layer in range(1, job.workload.layers + 1):
            if (alike := each.kind(layer)) not in seen:
                seen.add(alike)
                f = each.facts(layer)
                structure = block(kind, model, model.layers[layer - 1], f.rows, f.sources, f.edges) + 8 * f.given
                use["graph"] = use["graph"] + count * structure
        use["halo"] = use["halo"] + _late(job, each, how)
        use["graph"] = use["graph"] + count * 16 * f.rows  # labels and masks
    training = sum((use[name] for name in ("features", "activations", "halo", "buffers")), zero)
    use["buffers"] = use["buffers"] + np.maximum(_arriving(job, layout) - training, 0.0)
    return use


def _late(job: Job, layout: Layout | EstimatedLayout, how: Manner) -> np.ndarray:
    """Buffers of stale exchanges [B], which stay: per layer rows that leave and come, and gradients that leave and come; for all layers in
    turn what is to be smoothed."""
    kept, comes = np.zeros((2, job.ranks))
    for layer in range(job.model.first_varying + 1, job.workload.layers + 1) if how.staleness else ():
        f, width = layout.facts(layer), job.model.exchanged_width(layer, how.narrow) * job.model.itemsize
        kept = kept + 2 * (f.taken + f.given) * width
        comes = np.maximum(comes, np.maximum(f.taken * ("f" in how.smoothing), f.given * ("g" in how.smoothing)) * width)
    return np.asarray(kept + comes)


def fullest(steps: Sequence[Moments], ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Activations and buffers of that step at which each rank holds most of both together [ranks]."""
    both = np.array([(m.activations + np.zeros(ranks), m.buffers + np.zeros(ranks)) for m in steps])  # [steps, 2, ranks]
    activations, buffers = both[both.sum(1).argmax(0), :, np.arange(ranks)].T
    return activations, buffers


def _constant(job: Job, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Constant rows [B] that a rank keeps: layer 1's aggregate where that is cached, else what it reads."""
    model, f = job.model, layout.facts(1)
    if not model.aggregate_cached(1):
        return _read(job, layout)
    own = 2 if job.workload.model == "sage" else 1  # GraphSAGE reads a row beside its neighbours'
    return np.asarray(model.features_held(f.rows * own), dtype=float)


def _read(job: Job, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Constant rows [B] that layer 1 or the encoder reads."""
    model, f = job.model, layout.facts(1)
    rows = f.sources if model.first_varying else local_rows(layout, 0)
    held = np.asarray(model.features_held(rows, loaded_bytes(job, layout) / (2 * model.itemsize) if model.nonzeros else None), dtype=float)
    if model.reads_sparse(1) and job.workload.model == "sage":  # own rows, a cut of those read, have a product of their own
        held = held + (f.rows < f.sources) * model.features_sorted(f.rows)
    return held


def _arriving(job: Job, layout: Layout | EstimatedLayout) -> np.ndarray:
    """The most [B] that a rank holds while constant rows arrive and layer 1's aggregate is made of them."""
    passing = [op.sent.sum(0) + op.sent.sum(1) for op in setup(job, layout) if op.sent is not None]
    held = _read(job, layout)
    most = np.asarray(held + np.max([np.zeros(job.ranks), *passing], axis=0))
    return np.maximum(most, held + _constant(job, layout)) if job.model.aggregate_cached(1) else most


def moments(job: Job, layout: Layout | EstimatedLayout, how: Manner) -> tuple[Moments, list[Product]]:
    """A training step as executor/strategies/graph_parallel.py does it, and its products. Layers that are alike share their numbers."""
    model, b, kind, layers = job.model, job.model.itemsize, job.workload.model, range(1, job.workload.layers + 1)
    alike: dict[object, tuple[LayerFacts, Footprint]] = {}

    def of(layer: int) -> tuple[LayerFacts, Footprint]:
        key = alike_as(model, layout, layer, how.narrow), model.relu_after(layer)
        if key not in alike:
            f = layout.facts(layer)
            alike[key] = f, footprint(kind, model, layer, f.rows, f.sources, f.edges, narrow=how.narrow, local=f.sources - f.taken)
        return alike[key]

    m = Moments(job.ranks)
    initial: Number = 0.0  # rows that GCNII's layers all read
    if model.encoder:
        local = local_rows(layout, 0)
        dropped = local * (model.nonzeros or model.features) * b * (model.dropout > 0 and model.hands_on_initial)
        m.at(dropped, dropped / b)
        initial = local * model.encoder[1] * b
        m.keep(dropped, initial)
    copies: dict[int, Number] = {}  # of a layer's source rows, own and halo side by side
    before: Number = initial  # h_{l-1}
    for layer in layers:
        f, need = of(layer)
        varies, narrow = layer > model.first_varying, how.narrow and model.narrow_at(layer)
        width, halo = model.exchanged_width(layer, how.narrow) * b, f.taken * varies
        copies[layer] = f.sources * width * ((halo > 0) | (narrow and how.checkpoint))
        m.keep(copies[layer])
        m.at(f.given * varies * width * (not how.staleness))
        m.at(need.forward)
        out = f.rows * model.layers[layer - 1].h_out * b
        if how.checkpoint:
            m.keep(out)
            if narrow:
                m.keep(Prepared.of(model, model.layers[layer - 1], f.sources - halo).dropped)
            elif varies and not (layer == 1 and model.hands_on_initial):
                m.free(before * (halo > 0))  # the copy has them
        else:
            m.keep(need.kept)
        before = out
    own = of(layers[-1])[0].rows
    logits, most, gradient = loss(model, own, own * min(1.0, job.stats.train_vertices / job.stats.vertices))
    m.at(most)
    m.keep(logits)
    m.free(before * how.checkpoint)  # h_L
    for layer in reversed(layers):
        f, need = of(layer)
        spec = model.layers[layer - 1]
        if how.checkpoint:
            m.at(gradient, need.forward)
            m.at(gradient, need.backward)
        else:
            m.at(gradient, need.backward - need.kept)
            m.free(need.kept)
        if layer == layers[-1] and model.hands_on_initial:
            m.keep(initial)  # their gradient
        if layer > model.first_varying:
            width = model.exchanged_width(layer, how.narrow) * b
            m.at((f.sources + f.given * (not how.staleness)) * width)
            gradient = (f.sources - f.taken) * spec.h_in * b if how.narrow and model.narrow_at(layer) else f.sources * width
        m.free(copies[layer])
    products = [product for _, need in alike.values() for product in need.products]
    if model.encoder and not model.nonzeros:
        products.append(Product(local_rows(layout, 0), *model.encoder, False, ("bias relu",) if model.relu_after(0) else ("bias",)))
    if model.decoder:
        products.append(Product(own, *model.decoder))
    return m, products
