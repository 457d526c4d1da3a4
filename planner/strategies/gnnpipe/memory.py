"""Bytes that a rank of a pipeline holds, as executor/strategies/gnnpipe/ holds them.

A stage has its own layers only, but for all vertices, and the history of each layer's rows.

Sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from gnnplan.planner.gnn import few_bits
from gnnplan.planner.gnn.footprint import (
    Prepared,
    block,
    decoded,
    encoding,
    footprint,
    loss_itself,
)
from gnnplan.planner.gnn.products import Product
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, before_training, settled
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.strategies.program.memory import fullest
from gnnplan.planner.vocabulary.numbers import Number, largest


def memory(pipe: Pipeline, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step; a stage's members share the rows."""
    stages = settled(pipe.stages)
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
    held = fullest(problem, pipe.built(problem))
    use["activations"], use["buffers"] = held["activations"], held["buffers"]
    for s in range(stages):
        at = slice(s * g, s * g + g)  # the stage's ranks
        layers = pipe.shape(problem)[1][s]
        weights = pipe.weights(problem, s) * model.weight_itemsize
        use["parameters"][at] = weights
        use["optimizer"][at] = problem.workload.beside_a_weight * weights
        varying = sum(model.input_width(layer) for layer in layers if layer > model.first_varying)
        # past rows, the mixed rows that are read, and their gradients
        use["history"][at] = (3 + pipe.historical_gradients) * kept * varying * b
        use["features"][at], use["graph"][at] = _constant(pipe, problem, s)
        if s + 1 < stages:
            # buffers for the gradients that come back
            use["pipeline"][at] = pipe.facts(problem).rows.sum(0) * pipe.handed_bytes(problem, s)
    return use | before_training(problem, pipe.groups(problem))


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


class Holds:
    """What a stage's operations keep and need besides, all chunks together [members] [B].

    Nothing is freed before backward begins, so that is the fullest moment: the forward pass keeps
    what autograd needs of all chunks, and hands on the most that a chunk's backward pass needs.
    """

    def __init__(self, pipe: Pipeline, problem: Problem, stage: int) -> None:
        self.pipe, self.problem, self.stage = pipe, problem, stage
        self.model, stages = pipe.shape(problem)
        self.layers, self.is_last = stages[stage], stage + 1 == len(stages)

    def receive(self, held: Held) -> None:
        """Messages of the stage before."""
        numbers = self.pipe.boundary(self.problem, self.stage - 1)
        held.keep(self._counts[0].sum(0) * numbers * self.model.itemsize)

    def pack(self, below: int, held: Held) -> None:
        """What packing a chunk needs for the way across the boundary that ends stage `below`."""
        pipe, problem, rows = self.pipe, self.problem, self._counts[0]
        numbers, device = rows * pipe.boundary(problem, below), problem.cluster.device.kind
        room = few_bits.room(numbers, self.model.itemsize, device)
        held.at(_largest_chunk(room + rows * pipe.handed_bytes(problem, below)))

    def forward(self, piece: tuple[int, ...], held: Held) -> None:
        for layer in piece:
            if layer:
                self._layer(layer, held)
            else:
                self._encode(held)
        if len(self.model.layers) in piece:
            self._loss(held)

    def backward(self, held: Held) -> None:
        numbers = 0
        if not self.is_last:  # a message that was unpacked, and copies of both its parts
            copies = (self.pipe.bits is not None) + bool(self.model.carried)
            numbers = self.pipe.boundary(self.problem, self.stage) * copies
        besides = _largest_chunk(self._counts[0] * numbers * self.model.itemsize)
        held.at(held.handed_on + besides)

    def _encode(self, held: Held) -> None:
        need = encoding(self.model, self._counts[0])
        held.keep(_all_chunks(need.kept))
        held.multiply(*need.products)

    def _layer(self, layer: int, held: Held) -> None:
        model, (rows, edges, sources, taken, meets) = self.model, self._counts
        spec, b, apart = model.layers[layer - 1], model.itemsize, not model.reads_sparse(layer)
        varies = layer > model.first_varying
        need = footprint(model, layer, rows, sources, edges, apart=apart)
        held.multiply(*need.products)
        linear = spec.gathers_linearly and not spec.projects_first
        read = (rows if linear else sources) * spec.h_in * b
        if not varies:
            made_anew = apart and not model.aggregate_cached(layer)
            held.keep(_all_chunks(need.kept), read.sum(0) * made_anew)
            self._hand_on(held, need.backward - need.kept)
            return
        prepared = Prepared.of(model, spec, rows + taken)
        held.keep(_all_chunks(prepared.rows * meets), read.sum(0))  # own and others' rows together
        if self.pipe.checkpoint and layer < len(model.layers):
            out = rows * spec.h_out * b
            held.keep(out.sum(0))
            if layer + 1 in self.layers:  # the next layer has them together with others' rows
                held.free((out * meets).sum(0))
            # the last stage reuses the last layer's space
            again = (need.kept + prepared.saved + prepared.dropped) * (not self.is_last)
        else:
            held.keep(_all_chunks(need.kept), _all_chunks(prepared.saved + prepared.dropped))
            again = 0.0 * rows
        # gradients of gathered and own rows, then of the rows read
        spread = (2 * rows + sources) * spec.h_in * b
        passed = (2 + 2 * meets) * prepared.rows  # back through the preparation
        self._hand_on(held, again + need.backward - need.kept, spread, passed)

    def _loss(self, held: Held) -> None:
        model, rows, stats = self.model, self._counts[0], self.problem.stats
        trained = rows * min(1.0, stats.train_vertices / stats.vertices)
        kept, back, _ = decoded(model, rows)
        most = kept + loss_itself(model, rows, trained).most
        if model.decoder:
            self._hand_on(held, back)  # chunk by chunk
            held.multiply(Product(rows, *model.decoder))
        chosen = trained * model.classes * model.weight_itemsize
        logits = rows * model.classes * model.itemsize
        held.keep(_all_chunks(most) - chosen.sum(0), logits.sum(0))

    def _hand_on(self, held: Held, *sizes: Number) -> None:
        held.handed_on = largest(map(_largest_chunk, sizes), held.handed_on)

    @property
    def _counts(self) -> tuple[np.ndarray, ...]:
        """Rows, edges, sources, others' rows that are read [chunks, members]; and whether members
        exchange rows of a chunk [chunks, 1]."""
        facts = self.pipe.facts(self.problem)
        counts = facts.rows, facts.edges, facts.sources, facts.sends.sum(1)
        meets = facts.sends.sum(1).any(1, keepdims=True)
        return *(each.astype(float) for each in counts), meets


def _all_chunks(sizes: ArrayLike) -> np.ndarray:
    """[chunks, g] -> the sum over chunks [g]."""
    return np.asarray(np.asarray(sizes).sum(0))


def _largest_chunk(sizes: ArrayLike) -> np.ndarray:
    """[chunks, g] -> the maximum over chunks [g]."""
    return np.asarray(np.asarray(sizes).max(0))
