"""Bytes that a rank of a pipeline holds, as executor/strategies/gnnpipe/ holds them.

A stage has its own layers only, but for all vertices, and the history of each layer's rows. It is
fullest when the backward pass begins: autograd then keeps what it needs of all chunks.

Sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gnnplan.planner.gnn.footprint import (
    RUNTIME,
    Footprint,
    Moments,
    Prepared,
    Product,
    addition,
    block,
    footprint,
    gathers_linearly,
    kernels,
    loss,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline


def memory(pipe: Pipeline, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step; a stage's members share the rows."""
    assert pipe.stages is not None
    model, b, g = problem.model, problem.model.itemsize, pipe.members(problem)
    kept = np.array(pipe.kept(problem), dtype=float)
    uses = (
        "parameters",
        "optimizer",
        "features",
        "activations",
        "history",
        "pipeline",
        "graph",
        "buffers",
    )
    use: Memory = {name: np.zeros(problem.ranks) for name in uses}
    footprints: dict[object, Footprint] = {}  # layers that are alike share theirs
    for s in range(pipe.stages):
        at = slice(s * g, s * g + g)  # the stage's ranks
        layers = pipe.shape(problem)[1][s]
        use["parameters"][at] = pipe.weights(problem, s) * b
        use["optimizer"][at] = (
            (3 if problem.workload.optimizer == "adam" else 1) * pipe.weights(problem, s) * b
        )
        varying = sum(model.input_width(layer) for layer in layers if layer > model.first_varying)
        # past rows, the mixed rows that are read, and their gradients
        use["history"][at] = (3 + pipe.historical_gradients) * kept * varying * b
        use["features"][at], use["graph"][at] = _constant(pipe, problem, s)
        m = _moments(pipe, problem, s, footprints)
        use["activations"][at], use["buffers"][at] = m.activations, m.buffers
        if s + 1 < pipe.stages:
            # buffers for the gradients that come back
            use["pipeline"][at] = pipe.facts(problem).rows.sum(0) * pipe.boundary(problem, s) * b
    use["runtime"] = np.full(problem.ranks, RUNTIME[problem.cluster.device.kind])
    return use


def _constant(pipe: Pipeline, problem: Problem, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of constant inputs and of edges of a stage's members [g], [g]."""
    model, stages = pipe.shape(problem)
    facts, kept = pipe.facts(problem), np.array(pipe.kept(problem), dtype=float)
    own, edges, sources = (
        numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources)
    )
    kind, spec = problem.workload.model, model.layers[stages[stage].start - 1]
    graph = block(kind, model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum((0, 2)))
    if stage == len(stages) - 1:
        graph = graph + 16 * own  # labels and masks
    if stage:
        return np.zeros(own.size), graph
    features = np.asarray(model.features_held(kept if model.first_varying else own))
    if model.reads_sparse(1):  # each chunk has what it reads
        features = np.asarray(model.features_held(facts.sources, facts.numbers)).sum(0)
        if model.layers[0].reads_own:
            features = features + np.asarray(model.features_sorted(facts.rows)).sum(0)
    elif model.reads_sparse(0):  # each chunk has its rows
        features = features + 4 * len(facts.rows) * model.features
    elif model.first_varying and model.aggregate_cached(1):
        features = features + model.features_held(own)
    elif model.first_varying and model.dropout and model.layers[0].drops:
        features = 2 * features  # dropped anew in every step
    return features, graph


def _moments(
    pipe: Pipeline, problem: Problem, stage: int, footprints: dict[object, Footprint]
) -> Moments:
    """What a stage's members hold in a training step [g]; `footprints` remembers layers."""
    model, stages = pipe.shape(problem)
    facts, b, layers = pipe.facts(problem), model.itemsize, stages[stage]
    # [chunks, g]
    rows, edges, sources, taken = (
        counts.astype(float)
        for counts in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1))
    )
    # [chunks, 1]: whether members exchange rows of the chunk
    meets = np.asarray(facts.sends.any((1, 2), keepdims=True))[:, 0]
    m = Moments(rows.shape[1])
    products = _keep_inputs(pipe, problem, stage, m)
    backward = np.zeros(rows.shape[1])  # the most that a chunk's backward pass needs besides
    for layer in layers:
        spec, sparse = model.layers[layer - 1], model.reads_sparse(layer)
        varies = layer > model.first_varying
        key = (spec, varies, model.relu_after(layer))
        if key not in footprints:
            footprints[key] = footprint(
                problem.workload.model, model, layer, rows, sources, edges, apart=not sparse
            )
        need = footprints[key]
        added = addition(model, layer, rows)  # to the sum of all layers' rows
        products += (*need.products, *added.products)
        backward = np.maximum(backward, _largest_chunk(added.backward))
        linear = gathers_linearly(problem.workload.model, spec) and not spec.projects_first
        read = (rows if linear else sources) * spec.h_in * b
        if not varies:
            held = 0.0 if sparse or model.aggregate_cached(layer) else read.sum(0)
            m.keep(_all_chunks(need.kept), held)
            backward = np.maximum(backward, _largest_chunk(need.backward - need.kept))
            continue
        prepared = Prepared.of(model, spec, rows + taken)
        m.keep(_all_chunks(prepared.rows * meets), read.sum(0))  # own and others' rows together
        if pipe.checkpoint and layer < len(model.layers):
            out = rows * spec.h_out * b
            m.keep(out.sum(0))
            if layer + 1 in layers:  # the next layer has them together with others' rows
                m.free((out * meets).sum(0))
            is_last_stage = layers[-1] == len(model.layers)  # reuses the last layer's space
            again = (need.kept + prepared.saved + prepared.dropped) * (not is_last_stage)
        else:
            m.keep(_all_chunks(need.kept), _all_chunks(prepared.saved + prepared.dropped))
            again = 0.0 * rows
        # gradients of gathered and own rows, then of the rows read
        spread = (2 * rows + sources) * spec.h_in * b
        passed = (2 + 2 * meets) * prepared.rows  # back through the preparation
        for size in (again + need.backward - need.kept, spread, passed):
            backward = np.maximum(backward, _largest_chunk(size))
    if layers[-1] == len(model.layers):
        trained = rows * min(1.0, problem.stats.train_vertices / problem.stats.vertices)
        _, most, gradient = loss(model, rows, trained)
        if model.decoder:  # its gradient comes chunk by chunk
            most = most - gradient
            backward = np.maximum(backward, _largest_chunk(gradient))
        logits = (rows * model.classes * b).sum(0)
        m.keep(_all_chunks(most) - (trained * model.classes * b).sum(0), logits)
        products += [Product(rows, *model.decoder)] if model.decoder else []
    m.at(backward + _largest_chunk(rows * model.jumped * b))
    if problem.cluster.device.kind == "cpu" and b == 4:
        m.buffers = m.buffers + kernels(dict.fromkeys(products), rows.shape[1])
    return m


def _keep_inputs(pipe: Pipeline, problem: Problem, stage: int, m: Moments) -> list[Product]:
    """Keep what a stage's layers read: messages from the stage before, or the encoder's output.

    Returns the encoder's product, if there is one.
    """
    model, b, rows = (
        problem.model.aggregating_first,
        problem.model.itemsize,
        pipe.facts(problem).rows,
    )
    own = rows.astype(float).sum(0)
    if stage:
        # a copy of what goes past all layers; the sum of layers' rows stays in the last stage
        is_last = stage + 1 == pipe.stages
        carried = model.carried * (model.hands_on_initial or is_last)
        m.keep(own * (pipe.boundary(problem, stage - 1) + carried) * b)
        return []
    if not model.encoder:
        return []
    drops = model.dropout > 0 and model.hands_on_initial
    dropped = own * (model.nonzeros or model.features) * b * drops
    m.keep(dropped, own * model.encoder[1] * b)
    if model.nonzeros:
        return []
    epilogue = "bias relu" if model.relu_after(0) else "bias"
    return [Product(rows.astype(float), *model.encoder, False, (epilogue,))]


def _all_chunks(sizes: ArrayLike) -> np.ndarray:
    """[chunks, g] -> the sum over chunks [g]."""
    return np.asarray(np.asarray(sizes).sum(0))


def _largest_chunk(sizes: ArrayLike) -> np.ndarray:
    """[chunks, g] -> the maximum over chunks [g]."""
    return np.asarray(np.asarray(sizes).max(0))
