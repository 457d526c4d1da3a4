"""Bytes that a rank of a pipeline holds, as executor/strategies/gnnpipe/ holds them.

A stage has its own layers only, but for all vertices, and the history of each layer's rows.
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
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.strategies.program.memory import machine_code, on_ranks


def memory(pipe: Pipeline, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step; a stage's members share the rows."""
    stages, g, zero = settled(pipe.stages), pipe.members(problem), np.zeros(problem.ranks)
    model, kept = problem.model, np.array(pipe.kept(problem), dtype=float)
    weights, features, history, pipeline, graph, code = (zero.copy() for _ in range(6))
    for s in range(stages):
        at = slice(s * g, s * g + g)  # the stage's ranks
        layers = pipe.shape(problem)[1][s]
        weights[at] = pipe.weights(problem, s)
        its = [layer for piece in pipe.pieces(problem, s) for layer in piece]
        # many chunks are as large as another
        code[at] = machine_code(problem, (settled(pipe.chunks) + 1) // 2, its)
        varying = sum(model.input_width(layer) for layer in layers if layer > model.first_varying)
        # past rows, the mixed rows that are read, and their gradients
        history[at] = (3 + pipe.historical_gradients) * kept * varying * model.itemsize
        features[at], graph[at] = _constant(pipe, problem, s)
        if s + 1 < stages:  # buffers for the gradients that come back
            pipeline[at] = pipe.facts(problem).rows.sum(0) * pipe.handed_bytes(problem, s)
    return on_ranks(
        problem,
        pipe.built(problem),
        weights=weights,
        groups=pipe.groups(problem),
        code=code,
        features=features,
        history=history,
        pipeline=pipeline,
        graph=graph,
    )


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
    features = np.asarray(model.features_held(kept if model.first_varying else own))
    if model.reads_sparse(1):  # each chunk has what it reads
        features = np.asarray(model.features_held(facts.sources)).sum(0)
        if model.layers[0].reads_own:
            features = features + np.asarray(model.features_sorted(facts.rows)).sum(0)
    elif model.first_varying and model.aggregate_cached(1):
        features = features + model.features_held(own)
    elif model.first_varying and model.dropout and model.layers[0].drops:
        features = 2 * features  # dropped anew in every step
    return features, graph


class Holds:
    """What a stage's operations keep and need besides, all chunks together [members] [B].

    Nothing is freed before backward begins, so that is the fullest moment: what autograd saves of
    all chunks is there, and what the largest chunk's backward pass needs.
    """

    def __init__(self, pipe: Pipeline, problem: Problem, stage: int) -> None:
        self.pipe, self.problem, self.stage = pipe, problem, stage
        self.model, stages = pipe.shape(problem)
        self.layers, self.is_last = stages[stage], stage + 1 == len(stages)

    def receive(self, held: Held) -> None:
        """Messages of the stage before."""
        numbers = self.pipe.boundary(self.problem, self.stage - 1)
        held.keep(self._counts[0].sum(0) * numbers * self.model.itemsize)

    def forward(self, piece: tuple[int, ...], held: Held) -> None:
        for layer in piece:
            if layer == 0:
                held.keep(np.asarray(encoding(self.model, self._counts[0])).sum(0))
                continue
            held.keep(self._inputs(layer).sum(0), self._kept(layer).sum(0))
            if layer == len(self.model.layers):
                rows, stats = self._counts[0], self.problem.stats
                trained = rows * min(1.0, stats.train_vertices / stats.vertices)
                logits = rows * self.model.classes * self.model.itemsize
                kept = decoded(self.model, rows)[0] + loss_itself(self.model, rows, trained)
                held.keep(np.asarray(kept + logits).sum(0))

    def backward(self, piece: tuple[int, ...], held: Held) -> None:
        model, (rows, _, sources, _) = self.model, self._counts
        needs = [0.0 * rows]
        if len(model.layers) in piece:
            needs = [np.asarray(decoded(model, rows)[1])]
        for layer in filter(None, piece):
            saved, besides = self._need(layer)
            # the last stage reuses the last layer's space
            again = self._recomputes(layer) and not self.is_last
            needs.append(besides + saved * again)
            if layer > model.first_varying:
                # gradients of gathered and own rows, then of the rows read
                spread = (2 * rows + sources) * model.layers[layer - 1].h_in
                needs.append(spread * model.itemsize)
        numbers = 0
        if not self.is_last:  # a message that was unpacked, and copies of both its parts
            copies = (self.pipe.bits is not None) + bool(model.carried)
            numbers = self.pipe.boundary(self.problem, self.stage) * copies
        held.at((np.max(needs, axis=0) + rows * numbers * model.itemsize).max(0))

    def _recomputes(self, layer: int) -> bool:
        return self.pipe.checkpoint and self.model.first_varying < layer < len(self.model.layers)

    def _inputs(self, layer: int) -> np.ndarray:
        """Rows that the layer reads, put together for it [chunks, members]."""
        model, (rows, _, sources, taken) = self.model, self._counts
        spec, varies = model.layers[layer - 1], layer > model.first_varying
        linear = spec.gathers_linearly and not spec.projects_first
        read = (rows if linear else sources) * (
            varies or not (model.reads_sparse(layer) or model.aggregate_cached(layer))
        )
        if varies:  # own and others' rows; a checkpoint is the layer's own
            meets = taken.any(1, keepdims=True)
            checkpoint = rows * (self.pipe.checkpoint and layer > self.layers.start)
            read = read + np.where(meets, rows + taken, checkpoint)
        return read * spec.h_in * model.itemsize

    def _kept(self, layer: int) -> np.ndarray:
        """What autograd saves, or the rows that are handed on [chunks, members]."""
        if not self._recomputes(layer):
            return self._need(layer)[0]
        is_end = layer + 1 == self.layers.stop
        return self._counts[0] * self.model.layers[layer - 1].h_out * self.model.itemsize * is_end

    def _need(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """What autograd saves of a layer, and the most that its backward pass needs besides.

        Its inputs are prepared in a segment of their own [chunks, members]."""
        model, (rows, edges, sources, taken) = self.model, self._counts
        apart = not model.reads_sparse(layer)
        need = footprint(model, layer, rows, sources, edges, apart=apart)
        saved = np.asarray(need.kept)
        if layer > model.first_varying:
            saved = saved + prepared(model, model.layers[layer - 1], rows + taken)
        return saved, np.asarray(need.backward - need.kept)

    @property
    def _counts(self) -> tuple[np.ndarray, ...]:
        """Rows, edges, sources, others' rows that are read [chunks, members]."""
        facts = self.pipe.facts(self.problem)
        counts = facts.rows, facts.edges, facts.sources, facts.sends.sum(1)
        return tuple(each.astype(float) for each in counts)
