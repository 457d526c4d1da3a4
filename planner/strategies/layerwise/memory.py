"""Bytes that a rank holds where ranks go layer by layer together.

The fullest moment of the fullest batch decides (holds.py); here is what stays from step to step.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from gnnplan.planner.gnn import few_bits
from gnnplan.planner.gnn.footprint import block, footprint, opening
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, before_training
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.step import Batches, loaded_bytes, local_rows
from gnnplan.planner.strategies.program.memory import fullest
from gnnplan.planner.strategies.program.program import Exchange, Program


def memory(
    problem: Problem,
    program: Program,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Batches = (),
) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step, of the set-up or of an evaluation.

    The largest batch fills the device. Edges of all batches stay there. Evaluation takes the memory
    of a step or less, but for a single batch, after which it is on the whole layout.
    """
    model, b = problem.model, problem.model.weight_itemsize
    zero = np.zeros(problem.ranks)
    times = Counter(batches or (layout,))  # estimated batches are equal
    held = fullest(problem, program)
    features = _constant(problem, layout)
    use: Memory = {
        "parameters": zero + model.weights * b,
        "optimizer": zero + problem.workload.beside_a_weight * model.weights * b,
        "features": features,
        "activations": held["activations"],
        "halo": zero,
        "graph": zero,
        "buffers": held["buffers"],
        **before_training(problem),
    }
    if batches:
        loaded = np.max([_constant(problem, batch) for batch in times], axis=0)
        # on a CPU the device's memory is the server's, which has the features of all batches
        use["features"] = loaded + (features if problem.cluster.device.kind == "cpu" else 0.0)
    for batch, count in times.items():
        use["halo"] = use["halo"] + _kept_rows(problem, batch, options)
        use["halo"] = use["halo"] + _assigned_bits(problem, batch, options)
        use["graph"] = use["graph"] + blocks(problem, batch, count)
    training = sum((use[name] for name in ("features", "activations", "halo", "buffers")), zero)
    most = _during_setup(problem, program, layout, options)
    if len(batches) == 1:
        # the batch's rows and edges, and stale rows, stay meanwhile
        staying = use["halo"] + loaded
        most = np.maximum(most, staying + _during_evaluation(problem, layout, options))
    use["buffers"] = use["buffers"] + np.maximum(most - training, 0.0)
    return use


def blocks(problem: Problem, layout: Layout | EstimatedLayout, count: int = 1) -> np.ndarray:
    """Bytes of the blocks of `count` such layouts, labels and masks included [ranks]."""
    model = problem.model
    total, seen = np.zeros(problem.ranks), set()
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        if (alike := layout.kind(layer)) not in seen:  # such layers share their blocks
            seen.add(alike)
            structure = block(model, spec, f.rows, f.sources, f.edges) + 8 * f.given
            if f.made is not None:  # places of what is picked, and what it is added to
                structure = structure + 8 * (f.sources if f.added is None else 2 * f.added)
            total = total + count * structure
    return np.asarray(total + count * 16 * f.rows)


def _kept_rows(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of rows and gradients that are kept from step to step [ranks].

    Per layer these are the halo's rows and the gradients of rows given, as they came last. Where
    they lag, what leaves has buffers too, and one more serves all layers in turn for what is
    smoothed.
    """
    stays, smoothed = np.zeros((2, problem.ranks))
    if not (options.policy.lags or options.policy.stays):
        return stays
    buffers, bits = (2, options.bits) if options.policy.lags else (1, None)
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f = layout.facts(layer)
        width = replace(options, bits=bits).row_bytes(problem.model, layer)
        stays = stays + buffers * (f.taken + f.given) * width
        rows, gradients = "f" in options.smoothing, "g" in options.smoothing
        smoothed = np.maximum(smoothed, np.maximum(f.taken * rows, f.given * gradients) * width)
    return np.asarray(stays + smoothed)


def _assigned_bits(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of adaptive bits: of rows that leave and come, and of their gradients [ranks]."""
    stays = np.zeros(problem.ranks)
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f = layout.facts(layer)
        stays = stays + 2 * (f.taken + f.given) * few_bits.PLACES
    return stays * (options.bits == few_bits.ADAPTIVE)


def _constant(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that a rank keeps [ranks].

    They are layer 1's aggregate where that is cached, else the rows that layer 1 reads.
    """
    model, f = problem.model, layout.facts(1)
    if not model.aggregate_cached(1):
        return _read(problem, layout)
    # GraphSAGE reads a vertex's own row too
    rows = f.rows * (2 if model.layers[0].reads_own else 1)
    return np.asarray(model.features_held(rows), dtype=float)


def _read(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that layer 1 or the encoder reads [ranks]."""
    model, f = problem.model, layout.facts(1)
    rows = f.sources if model.first_varying else local_rows(layout, 0)
    numbers = loaded_bytes(problem, layout) / model.sparse_itemsize if model.nonzeros else None
    held = np.asarray(model.features_held(rows, numbers), dtype=float)
    # own rows, a part of the rows read, have a sparse product of their own
    if model.reads_sparse(1) and model.layers[0].reads_own:
        held = held + (f.rows < f.sources) * model.features_sorted(f.rows)
    return held


def _during_evaluation(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of an evaluation on the whole layout, in the layer that needs most [ranks]."""
    model, most = problem.model, np.zeros(problem.ranks)
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        halo = f.there * (layer > model.first_varying)
        need = footprint(
            model,
            layer,
            *(f.rows, f.sources, f.edges),
            narrow=options.narrow,
            local=f.local,
        )
        copied = (halo > 0) * f.sources * model.exchanged_width(layer, options.narrow)
        inputs = f.local * spec.h_in * (layer > model.first_varying)
        if model.encoder and layer > 1:  # what the encoder makes stays until the end
            inputs = inputs + local_rows(layout, 0) * model.encoder[1]
        most = np.maximum(most, (inputs + copied) * model.itemsize + need.forward)
    return np.asarray(most + _constant(problem, layout) + blocks(problem, layout))


def _during_setup(
    problem: Problem,
    program: Program,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
) -> np.ndarray:
    """The most bytes held while constant rows arrive and layer 1's aggregate is made [ranks]."""
    passing = []
    for op in program.setup():
        if isinstance(op.work, Exchange):
            # a dense halo comes to where it stays
            stays = op.op == "input_halo" and not problem.model.nonzeros
            passing.append(op.work.nbytes.sum(1) + (0 if stays else op.work.nbytes.sum(0)))
    held = _read(problem, layout)
    for layer, spec in enumerate(problem.model.layers, 1):
        f = options.facts(problem, layout, layer)
        passing.append(
            np.zeros(problem.ranks)
            + opening(problem.model.on_gpu, spec, f.rows, f.sources, f.edges)
        )
    most = np.asarray(held + np.max(passing, axis=0))
    if problem.model.aggregate_cached(1):
        # rows of its own are read again when the others have gone
        kept, rows = _constant(problem, layout), layout.facts(1).rows
        made = np.asarray(problem.model.features_held(rows), dtype=float)
        beside = np.where(rows > layout.row_counts(problem.workload.layers), kept, made)
        most = np.maximum(most, np.maximum(held + beside, kept))
    return np.asarray(most)
