"""Memory of a pipeline's ranks, as executor/strategies/gnnpipe/ allocates it.

A stage has its own layers only, but for all vertices, and the history of each layer's rows. Nothing
is freed before backward begins, so memory peaks there: at the tensors that autograd saves for all
chunks, plus the workspace of the largest chunk's backward pass.
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.gnn.footprint import (
    OpMemory,
    block,
    decoded,
    footprint,
    keeps,
    loss_itself,
    rowwise,
)
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, Resident, settled
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline
from gnnplan.planner.strategies.program.memory import machine_code

# -- data that stays from step to step -------------------------------------------------------------


def resident(pipe: Pipeline, problem: Problem) -> Resident:
    """Return what ranks have besides a step's tensors; a stage's members share its rows."""
    stages = range(settled(pipe.stages))
    data = [_data(pipe, problem, stage) for stage in stages]
    weights = [pipe.weights(problem, stage) for stage in stages]
    return Resident(
        {use: np.concatenate([each[use] for each in data]) for use in data[0]},
        weights=np.repeat(weights, pipe.members(problem)),
        groups=pipe.groups(problem),
        code=np.concatenate([_code(pipe, problem, stage) for stage in stages]),
    )


def _code(pipe: Pipeline, problem: Problem, stage: int) -> list[float]:
    """Return the bytes of machine code of a stage's members [g].

    oneDNN generates code for each size of a chunk; there are few different sizes."""
    layers = [layer for piece in pipe.pieces(problem, stage) for layer in piece]
    sizes_of_members = map(np.unique, pipe.facts(problem).rows.T)
    return [machine_code(problem, sizes.size, layers, sizes[-1]) for sizes in sizes_of_members]


def _data(pipe: Pipeline, problem: Problem, stage: int) -> Memory:
    """Return the bytes of constant inputs, history, receive buffers and edges of a stage [g]."""
    model, stages = pipe.shape(problem)
    facts, kept = pipe.facts(problem), np.array(pipe.kept(problem), dtype=float)
    own, edges, sources = (
        numbers.astype(float).sum(0) for numbers in (facts.rows, facts.edges, facts.sources)
    )
    varying = [model.input_width(each) for each in stages[stage] if each > model.first_varying]
    features, spec = np.zeros(own.size), model.layers[stages[stage].start - 1]
    graph = block(model, spec, own, sources, edges) + 8 * (kept + facts.sends.sum(2).sum(0))
    received = 0  # bytes per row
    if stage == len(stages) - 1:
        graph = graph + 16 * own  # labels and masks
    else:
        received = pipe.codec.row_bytes(pipe.boundary(problem, stage), model.itemsize)
    if stage == 0:
        features = np.asarray(model.inputs.stored_bytes(kept if model.first_varying else own))
        if model.rows(1).multiplied_first:  # each chunk has a copy of the rows that it reads
            by_chunk = model.inputs.stored_bytes(facts.sources) + model.own_index_bytes(facts.rows)
            features = np.asarray(by_chunk).sum(0)
        elif model.first_varying and model.aggregate_cached(1):
            features = features + model.inputs.stored_bytes(own)
        elif model.first_varying and model.dropout and model.layers[0].drops:
            features = 2 * features  # a copy after this step's dropout
    return {
        "features": features,
        # historical rows, the mix of fresh and historical rows that is read, and its gradients
        "history": (3 + pipe.historical_gradients) * kept * sum(varying) * model.itemsize,
        # buffers for the gradients received from the next stage
        "pipeline": own * received,
        "graph": np.asarray(graph),
    }


# -- memory of a step's operations -----------------------------------------------------------------


def held(
    pipe: Pipeline, problem: Problem, stage: int, piece: tuple[int, ...], is_back: bool
) -> OpMemory:
    """Return the memory of a piece on all chunks [g]: what it keeps until backward begins; or, in
    the backward pass, the largest workspace of a chunk, from which on chunks free what they kept.
    """
    each = [_of_chunks(pipe, problem, stage, layer) for layer in piece]
    if is_back:
        return OpMemory(np.max([np.asarray(layer.most) for layer in each], axis=(0, 1)), 0.0)
    return keeps(np.sum([np.asarray(layer.left) for layer in each], axis=(0, 1)))


def _of_chunks(pipe: Pipeline, problem: Problem, stage: int, layer: int) -> OpMemory:
    """Return what a layer (0: the encoder) keeps of each chunk until backward begins (`left`), and
    its workspace in the chunk's backward pass (`most`) [chunks, g]."""
    model, stages = pipe.shape(problem)
    layers, is_last, b = stages[stage], stage + 1 == len(stages), model.itemsize
    facts = pipe.facts(problem)
    rows, edges, sources, received = (
        counts.astype(float)
        for counts in (facts.rows, facts.edges, facts.sources, facts.sends.sum(1))
    )  # [chunks, g]
    if layer == 0:
        return OpMemory(0.0 * rows, rowwise(model.encoder_record, rows).left)
    spec, varies = model.layers[layer - 1], layer > model.first_varying
    apart = not model.rows(layer).multiplied_first
    need = footprint(model, layer, rows, sources, edges, apart=apart)
    saved, workspace, gradients = need.left, need.most - need.left, 0.0 * rows
    # rows gathered for the layer
    read = rows if spec.gathers_linearly and not spec.projects_first else sources
    if varies:
        saved = saved + rowwise(model.preparation_record(spec), rows + received).left
        # a copy of own and remote rows, or the layer's inputs saved for recomputation
        checkpoint = rows * (pipe.checkpoint and layer > layers.start)
        read = read + np.where(received.any(1, keepdims=True), rows + received, checkpoint)
        # gradients of gathered rows and own rows, then of the rows read
        gradients = (2 * rows + sources) * spec.h_in * b
    else:
        read = read * (apart and not model.aggregate_cached(layer))
    kept = saved
    if pipe.checkpoint and varies and layer < len(model.layers):
        kept = rows * spec.h_out * b * (layer + 1 == layers.stop)
        # on the last stage, backward reuses the memory of the last layer's outputs
        workspace = workspace + saved * (not is_last)
    kept, workspace = kept + read * spec.h_in * b, np.maximum(workspace, gradients)
    if layer == layers.start and stage:  # messages of the stage before
        kept = kept + rows * pipe.boundary(problem, stage - 1) * b
    if layer == len(model.layers):
        stats, logits = problem.stats, rows * model.classes * b
        trained = rows * min(1.0, stats.train_vertices / stats.vertices)
        scored = decoded(model, rows)
        kept = kept + scored.left + loss_itself(model, rows, trained) + logits
        workspace = np.maximum(workspace, scored.most - scored.left)
    if not is_last:  # an unpacked message, and copies of its two parts
        copies = pipe.codec.packs + bool(model.carried)
        workspace = workspace + rows * pipe.boundary(problem, stage) * copies * b
    return OpMemory(workspace, kept)
