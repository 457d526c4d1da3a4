"""Bytes that stay with a rank from step to step, where ranks go layer by layer together.

What a step's operations hold besides is in holds.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from gnnplan.planner.gnn import few_bits
from gnnplan.planner.gnn.footprint import block, footprint
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.step import Batches
from gnnplan.planner.strategies.program.memory import Memory, machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Program


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
    zero = np.zeros(problem.ranks)
    times = Counter(batches or (layout,))  # estimated batches are equal
    features, halo, graph = constant(problem, layout), zero, zero
    for batch, count in times.items():
        halo = halo + _kept_rows(problem, batch, options)
        graph = graph + blocks(problem, batch, count)
    made = problem.model.features_held(layout.facts(1).rows)
    elsewhere = read(problem, layout) + made * problem.model.aggregate_cached(1)
    code = machine_code(problem, len(times) + (len(times) > 1))
    if batches:
        loaded = np.max([constant(problem, batch) for batch in times], axis=0)
        if len(batches) == 1:  # the batch's rows and edges, and stale rows, stay meanwhile
            evaluation = _during_evaluation(problem, layout)
            elsewhere = np.maximum(elsewhere, halo + loaded + code + evaluation)
        # on a CPU the device's memory is the server's, which has the features of all batches
        features = loaded + features * (problem.cluster.device.kind == "cpu")
    return on_ranks(
        problem,
        program,
        code=code,
        features=features,
        halo=halo,
        graph=graph,
        elsewhere=elsewhere,
    )


def blocks(problem: Problem, layout: Layout | EstimatedLayout, count: int = 1) -> np.ndarray:
    """Bytes of the blocks of `count` such layouts, labels and masks included [ranks]."""
    model = problem.model
    total, seen = np.zeros(problem.ranks), set()
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        if (alike := layout.kind(layer)) not in seen:  # such layers share their blocks
            seen.add(alike)
            total = total + block(model, spec, f.rows, f.sources, f.edges) + 8 * f.given
    return np.asarray(count * (total + 16 * f.rows))


def constant(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that a rank keeps [ranks].

    They are layer 1's aggregate where that is cached, else the rows that layer 1 reads.
    """
    model, f = problem.model, layout.facts(1)
    if not model.aggregate_cached(1):
        return read(problem, layout)
    # GraphSAGE and residuals read a vertex's own row too
    rows = f.rows * (2 if model.layers[0].reads_own else 1)
    return np.asarray(model.features_held(rows), dtype=float)


def read(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that layer 1 or the encoder reads [ranks]."""
    model, f = problem.model, layout.facts(1)
    rows = f.sources if model.first_varying else layout.row_counts(0)
    held = np.asarray(model.features_held(rows), dtype=float)
    # own rows, a part of the rows read, have a sparse product of their own
    if model.reads_sparse(1) and model.layers[0].reads_own:
        held = held + (f.rows < f.sources) * model.features_sorted(f.rows)
    return held


def _kept_rows(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of rows and gradients that are kept from step to step [ranks].

    Per layer these are the halo's rows and the gradients of rows given, as they came last. Where
    they lag, what leaves has buffers too, and one more serves all layers in turn for what is
    smoothed. Rows in bits of their own have these in both ways.
    """
    stays, smoothed = np.zeros((2, problem.ranks))
    buffers = 2 if options.policy.lags else int(options.policy.stays)
    bits = options.bits if options.policy.lags else None
    assigned = 2 * few_bits.PLACES * (options.bits == few_bits.ADAPTIVE)
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f = layout.facts(layer)
        crossing = (f.taken + f.given) * replace(options, bits=bits).row_bytes(problem.model, layer)
        stays = stays + buffers * crossing + assigned * (f.taken + f.given)
        smoothed = np.maximum(smoothed, crossing / 2 * len(options.smoothing))
    return np.asarray(stays + smoothed)


def _during_evaluation(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of an evaluation on the whole layout, in the layer that needs most [ranks]."""
    model, most = problem.model, np.zeros(problem.ranks)
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        need = footprint(model, layer, f.rows, f.sources, f.edges)
        # own rows, those that leave, and a copy of all that are read
        inputs = (f.local + f.given + f.sources) * (layer > model.first_varying)
        most = np.maximum(most, inputs * spec.h_in * model.itemsize + need.kept)
    return np.asarray(most + constant(problem, layout) + blocks(problem, layout))
