"""Element-wise work of other people's code, with which the testbeds' constants were fitted.

DGL and PyG run one operation after the other: rows are copied before and after a product, and what
is summed is weighed, biased and activated apart. A problem of theirs is ours but for these passes
(planner/gnn/passes.py)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from gnnplan.planner.gnn.model import Layer, Model
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.numbers import Number

COPIED = 2  # passes over rows around a product
APPLIED, APPLIED_BACKWARD = 3, 2  # over outputs; the backward pass does both
ACTIVATED, NORMED = 2, 6  # over inputs
MIXED, MIXED_BACKWARD = 3, 7  # over outputs, by GCNII
EXPONENTIALS = 2  # over messages
DROPPED = 6  # over inputs with dropout, backward


class TheirModel(Model):
    """A GNN whose element-wise operations are theirs."""

    own_laid_out = 0  # in COPIED

    def forward_numbers(
        self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool
    ) -> Number:
        spec, sparse = self.layers[layer - 1], self.reads_sparse(layer)
        applied = APPLIED * (spec.weights > 0) + MIXED * self.hands_on_initial
        width = spec.multiplied if narrow or sparse else spec.h_in
        per_source = 0 if self.aggregate_cached(layer) else COPIED * width
        per_source += EXPONENTIALS * (spec.sums > 1) * spec.h_in
        per_source += 0 if narrow else _activated(spec)
        return applied * rows * spec.h_out + per_source * sources

    def backward_numbers(
        self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool
    ) -> Number:
        forward = self.forward_numbers(layer, rows, sources, edges, narrow)
        hashed = self.forward(layer, rows, sources, edges, narrow).hash_ops
        applied = APPLIED_BACKWARD + MIXED_BACKWARD * self.hands_on_initial
        numbers = applied * rows * self.layers[layer - 1].h_out
        return forward + numbers + DROPPED * hashed

    def project_numbers(self, spec: Layer, rows: Number) -> tuple[Number, Number]:
        forward = (COPIED * (spec.h_in + spec.multiplied) + _activated(spec)) * rows
        return forward, forward + DROPPED * self.hashed(spec, rows)

    def encode_numbers(self, rows: Number) -> tuple[Number, Number]:
        assert self.encoder
        h_in, h_out = self.encoder
        forward = COPIED * (h_out if self.nonzeros else h_in + h_out) * rows
        hashed = self.hashed(self.encoder_inputs, rows, self.nonzeros > 0)
        return forward, forward + DROPPED * hashed

    def decode_numbers(self, rows: Number) -> tuple[Number, Number]:
        assert self.decoder and self.decoder_inputs
        spec = self.decoder_inputs
        forward = (COPIED * sum(self.decoder) + _activated(spec)) * rows
        return forward, forward + DROPPED * self.hashed(spec, rows)


def _activated(spec: Layer) -> int:
    """Numbers per row of norm and activation."""
    return (ACTIVATED if spec.norm == "none" else NORMED) * spec.activates * spec.h_in


@dataclass(frozen=True, eq=False)
class TheirProblem(Problem):
    """A problem for other people's code."""

    replays = False

    @cached_property
    def model(self) -> Model:
        ours = super().model
        model = {each.name: getattr(ours, each.name) for each in fields(ours)}
        return TheirModel(**{**model, "in_place": False, "on_gpu": False})
