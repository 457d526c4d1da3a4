"""Bytes that a rank of a pipeline holds, as executor/strategies/gnnpipe/ holds them.

A stage has its own layers only, but for all vertices, and the history of each layer's rows. Nothing
is freed before backward begins, so that is the fullest moment: what autograd saves of all chunks is
there, and what the largest chunk's backward pass needs.
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
    """Bytes per rank by use, at the fullest moment of a step; a stage's members share the rows."""
    stages = [_of_stage(pipe, problem, stage) for stage in range(settled(pipe.stages))]
    use = {name: np.concatenate([stage[name] for stage in stages]) for name in stages[0]}
    return on_ranks(problem, pipe.built(problem), groups=pipe.groups(problem), **use)


def _of_stage(pipe: Pipeline, problem: Problem, stage: int) -> Memory:
    """What a stage's members tell `on_ranks` [g]."""
    model, stages = pipe.shape(problem)
    kept, rows = np.array(pipe.kept(problem), dtype=float), pipe.facts(problem).rows
    its = [layer for piece in pipe.pieces(problem, stage) for layer in piece]
    varying = [model.input_width(each) for each in stages[stage] if each > model.first_varying]
    features, graph = _constant(pipe, problem, stage)
    activations, buffers = _varying(pipe, problem, stage)
    handed = 0
    if stage + 1 < len(stages):
        handed = pipe.codec.row_bytes(pipe.boundary(problem, stage), model.itemsize)
    return {
        "weights": np.full(kept.size, pipe.weights(problem, stage)),
        # oneDNN makes code for each number of rows, of which chunks have few
        "code": np.array(
            [machine_code(problem, sizes.size, its, sizes[-1]) for sizes in map(np.unique, rows.T)]
        ),
        "features": features,
        # past rows, the mixed rows that are read, and their gradients
        "history": (3 + pipe.historical_gradients) * kept * sum(varying) * model.itemsize,
        # buffers for the gradients that come back
        "pipeline": rows.sum(0) * float(handed),
        "graph": graph,
        "activations": activations,
        "buffers": buffers,
    }


def _constant(pipe: Pipeline, problem: Problem, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of constant inputs and of edges of a stage's members [g], [g]."""
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
    if model.rows(1).multiplied_first:  # each chunk has what it reads
        of_chunks = model.inputs.held(facts.sources) + model.own_sorted(facts.rows)
        features = np.asarray(of_chunks).sum(0)
    elif model.first_varying and model.aggregate_cached(1):
        features = features + model.inputs.held(own)
    elif model.first_varying and model.dropout and model.layers[0].drops:
        features = 2 * features  # dropped anew in every step
    return features, graph


def _varying(pipe: Pipeline, problem: Problem, stage: int) -> tuple[np.ndarray, np.ndarray]:
    """What a stage's members keep of all chunks until backward begins, and the most that a chunk
    then needs besides [g] [B]."""
    model, stages = pipe.shape(problem)
    layers, is_last, b = stages[stage], stage + 1 == len(stages), model.itemsize
    facts = pipe.facts(problem)
    rows, edges, sources, taken = (
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
        read = rows if linear else sources  # put together for the layer
        if varies:
            saved = saved + prepared(model, spec, rows + taken)
            # own and others' rows together; a checkpoint is the layer's own
            checkpoint = rows * (pipe.checkpoint and layer > layers.start)
            read = read + np.where(taken.any(1, keepdims=True), rows + taken, checkpoint)
            # gradients of gathered and own rows, then of the rows read
            needs.append((2 * rows + sources) * spec.h_in * b)
        else:
            read = read * (apart and not model.aggregate_cached(layer))
        again = pipe.checkpoint and varies and layer < len(model.layers)
        handed_on = rows * spec.h_out * b * (layer + 1 == layers.stop)
        kept = kept + read * spec.h_in * b + (handed_on if again else saved)
        # the last stage reuses the last layer's space
        needs.append(need.backward - need.kept + saved * (again and not is_last))
    if is_last:
        stats, logits = problem.stats, rows * model.classes * b
        trained = rows * min(1.0, stats.train_vertices / stats.vertices)
        logits_made, besides, _ = decoded(model, rows)
        kept = kept + logits_made + loss_itself(model, rows, trained) + logits
        needs.append(np.asarray(besides))
        most = np.max(needs, axis=0)
    else:  # a message that was unpacked, and copies of both its parts
        copies = pipe.codec.packs + bool(model.carried)
        most = np.max(needs, axis=0) + rows * pipe.boundary(problem, stage) * copies * b
    return kept.sum(0), most.max(0)
