"""Memory of a pipeline's ranks, as executor/strategies/gnnpipe/ allocates it.

A stage has its own layers only, but for all vertices, and the history of each layer's rows. Nothing
is freed before backward begins, so memory peaks there: at the tensors that autograd saves for all
chunks, plus the workspace of the largest chunk's backward pass.
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.gnn.footprint import (
    block,
    decoded,
    encoding,
    footprint,
    loss_itself,
    prepared,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, settled
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline
from gnnplan.planner.strategies.program.memory import machine_code, on_ranks


def memory(pipe: Pipeline, problem: Problem) -> Memory:
    """Return each rank's peak bytes, by use; a stage's members share its rows."""
    stages = [_stage_memory(pipe, problem, stage) for stage in range(settled(pipe.stages))]
    use = {name: np.concatenate([stage[name] for stage in stages]) for name in stages[0]}
    return on_ranks(problem, pipe.built(problem), groups=pipe.groups(problem), **use)


def _stage_memory(pipe: Pipeline, problem: Problem, stage: int) -> Memory:
    """Return the arguments of `on_ranks` for a stage's members [g]."""
    model, stages = pipe.shape(problem)
    kept, rows = np.array(pipe.kept(problem), dtype=float), pipe.facts(problem).rows
    layers = [layer for piece in pipe.pieces(problem, stage) for layer in piece]
    varying = [model.input_width(each) for each in stages[stage] if each > model.first_varying]
    features, graph = _constant(pipe, problem, stage)
    activations, buffers = _varying(pipe, problem, stage)
    sent = 0  # [B per row]
    if stage + 1 < len(stages):
        sent = pipe.codec.row_bytes(pipe.boundary(problem, stage), model.itemsize)
    return {
        "weights": np.full(kept.size, pipe.weights(problem, stage)),
        # oneDNN generates code for each size of a chunk; there are few different sizes
        "code": np.array(
            [
                machine_code(problem, sizes.size, layers, sizes[-1])
                for sizes in map(np.unique, rows.T)
            ]
        ),
        "features": features,
        # historical rows, the mix of fresh and historical rows that is read, and its gradients
        "history": (3 + pipe.historical_gradients) * kept * sum(varying) * model.itemsize,
        # buffers for the gradients received from the next stage
        "pipeline": rows.sum(0) * float(sent),
        "graph": graph,
        "activations": activations,
        "buffers": buffers,
    }


def _constant(pipe: Pipeline, problem: Problem, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of constant inputs and of edges of a stage's members [g], [g]."""
    model, stages = pipe.shape(problem)
    facts, kept = pipe.facts(problem), np.array(pipe.kept(problem), dtype=float)
    own, edges, sources = (
        numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources)
    )
    spec = model.layers[stages[stage].start - 1]
    graph = block(model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum(2).sum(0))
    if stage == len(stages) - 1:
        graph = graph + 16 * own  # labels and masks
    if stage:
        return np.zeros(own.size), graph
    features = np.asarray(model.inputs.held(kept if model.first_varying else own))
    if model.rows(1).multiplied_first:  # each chunk has a copy of the rows that it reads
        by_chunk = model.inputs.held(facts.sources) + model.own_sorted(facts.rows)
        features = np.asarray(by_chunk).sum(0)
    elif model.first_varying and model.aggregate_cached(1):
        features = features + model.inputs.held(own)
    elif model.first_varying and model.dropout and model.layers[0].drops:
        features = 2 * features  # a copy after this step's dropout
    return features, graph


def _varying(pipe: Pipeline, problem: Problem, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes that a stage's members keep of all chunks until backward begins, and the
    largest workspace of a chunk after that [g], [g]."""
    model, stages = pipe.shape(problem)
    layers, is_last, b = stages[stage], stage + 1 == len(stages), model.itemsize
    facts = pipe.facts(problem)
    rows, edges, sources, received = (
        counts.astype(float)
        for counts in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1))
    )  # [chunks, g]
    kept, needs = 0.0 * rows, [0.0 * rows]
    if stage:  # messages of the stage before
        kept = kept + rows * pipe.boundary(problem, stage - 1) * b
    elif model.encoder:
        kept = kept + encoding(model, rows)
    for layer in layers:
        spec, varies = model.layers[layer - 1], layer > model.first_varying
        apart = not model.rows(layer).multiplied_first
        need = footprint(model, layer, rows, sources, edges, apart=apart)
        saved = np.asarray(need.kept)
        linear = spec.gathers_linearly and not spec.projects_first
        read = rows if linear else sources  # rows gathered for the layer
        if varies:
            saved = saved + prepared(model, spec, rows + received)
            # a copy of own and remote rows, or the layer's inputs saved for recomputation
            checkpoint = rows * (pipe.checkpoint and layer > layers.start)
            read = read + np.where(received.any(1, keepdims=True), rows + received, checkpoint)
            # gradients of gathered rows and own rows, then of the rows read
            needs.append((2 * rows + sources) * spec.h_in * b)
        else:
            read = read * (apart and not model.aggregate_cached(layer))
        recomputed = pipe.checkpoint and varies and layer < len(model.layers)
        boundary = rows * spec.h_out * b * (layer + 1 == layers.stop)
        kept = kept + read * spec.h_in * b + (boundary if recomputed else saved)
        # on the last stage, backward reuses the memory of the last layer's outputs
        needs.append(need.backward - need.kept + saved * (recomputed and not is_last))
    if is_last:
        stats, logits = problem.stats, rows * model.classes * b
        trained = rows * min(1.0, stats.train_vertices / stats.vertices)
        logits_made, besides, _ = decoded(model, rows)
        kept = kept + logits_made + loss_itself(model, rows, trained) + logits
        needs.append(np.asarray(besides))
        most = np.max(needs, axis=0)
    else:  # an unpacked message, and copies of its two parts
        copies = pipe.codec.packs + bool(model.carried)
        most = np.max(needs, axis=0) + rows * pipe.boundary(problem, stage) * copies * b
    return kept.sum(0), most.max(0)
