"""What the operations of a step that goes layer by layer keep, free and need besides.

    forward    a layer's inputs and what autograd saves stay, until its backward pass frees them
    loss       logits and their gradient
    backward   gradients of rows, and exchange buffers, come on top

A layer's exchange is counted with the layer. It follows executor/strategies/graph_parallel.py;
sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.gnn import few_bits
from gnnplan.planner.gnn.footprint import (
    Footprint,
    encoding,
    footprint,
    link_loss,
    loss,
)
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.vocabulary.numbers import Number


@dataclass(frozen=True)
class Holds:
    """Sizes of a step's tensors [ranks] [B], and what each operation does with them.

    `model` is the problem's, or the same with other orders of product and aggregation. `like` has
    for each layer the first with the same counts, which `facts` has. The encoder makes `encoded`
    rows. Where rows lag or stay, these have buffers of their own (memory.py).
    """

    problem: Problem
    model: Model
    facts: Mapping[int, LayerFacts]
    like: Mapping[int, int]
    encoded: np.ndarray
    options: ExchangeOptions
    scored: Scored | None = None

    def encode(self, held: Held) -> None:
        """The encoder's forward pass: its rows stay where layers read them again (GCNII)."""
        held.keep(encoding(self.model, self.encoded))

    def forward(self, layer: int, held: Held) -> None:
        held.keep(self._copied(layer))
        if self.options.checkpoint:
            held.keep(self._made(layer))
            held.free(self._among(layer))
        else:
            held.keep(self._need(layer).kept)

    def loss(self, held: Held) -> None:
        logits, most, _ = self._loss()
        held.at(most)
        held.keep(logits)
        if self.options.checkpoint:
            held.free(self._made(len(self.like)))

    def backward(self, layer: int, held: Held) -> None:
        model, need, gradient = self.model, self._need(layer), self._gradient(layer)
        if self.options.checkpoint:
            held.at(gradient, need.backward)
        else:
            held.at(gradient, need.backward - need.kept)
            held.free(need.kept)
        if layer == len(model.layers) and model.hands_on_initial:
            held.keep(self._made(0))  # their gradient
        if layer > model.first_varying:
            f, width = self._counts(layer), self._row_bytes(layer)
            held.at(gradient, (f.sources + self._unpicked(layer)) * width)
            held.at(f.present * width, self._crossing(layer))
        held.free(self._copied(layer))
        if self.options.checkpoint and layer > 1:
            held.free(self._made(layer - 1) - self._among(layer))

    @property
    def logits(self) -> Number:
        """What the loss keeps until the step ends."""
        return self._loss()[0]

    def _loss(self) -> tuple[Number, Number, Number]:
        """What is kept of it, the most that it needs, and the gradient that it leaves."""
        model, stats, own = self.model, self.problem.stats, self._own
        if self.scored is None:
            # of the whole graph's rows or of those that are trained on
            return loss(model, own, own * min(1.0, stats.train_vertices / max(own.sum(), 1.0)))
        sends, negatives = self.scored.sends, self.problem.workload.negatives
        own = own + sends.sum(0)
        # own rows beside those of other ranks
        copied = own * model.layers[-1].h_out * model.itemsize * sends.any()
        logits, most, gradient = link_loss(model, own, self.scored.edges, negatives)
        return logits, most + copied, gradient

    def _gradient(self, layer: int) -> Number:
        """The gradient of the layer's rows, in the buffer that it came in."""
        model, following = self.model, layer + 1
        if layer == len(model.layers):
            return self._loss()[2]
        f, width = self._counts(following), self._row_bytes(following)
        if self.options.narrow and model.narrow_at(following):
            # a checkpoint's preparation of these rows is there again
            again = 1 + self.options.checkpoint
            return again * f.local * model.layers[layer - 1].h_out * model.itemsize
        return f.present * width

    def _made(self, layer: int) -> np.ndarray:
        """The rows that a layer makes; 0: the encoder's."""
        model = self.model
        if layer == 0:
            return self.encoded * (model.encoder[1] * model.itemsize if model.encoder else 0.0)
        row: float = model.layers[layer - 1].h_out * model.itemsize
        return self._counts(layer).rows * row

    def _among(self, layer: int) -> Number:
        """Rows of the layer before that a checkpoint need not keep: they are in the copy."""
        model = self.model
        narrow = self.options.narrow and model.narrow_at(layer)
        if narrow or (layer == 1 and model.hands_on_initial):
            return 0.0
        return np.where(self._halo(layer) > 0, self._made(layer - 1), 0.0)

    @property
    def _own(self) -> np.ndarray:
        """Rows of the last layer."""
        return self._counts(len(self.like)).rows

    def _counts(self, layer: int) -> LayerFacts:
        return self.facts[self.like[layer]]

    def _halo(self, layer: int) -> np.ndarray:
        """Rows that come in every step."""
        return self._counts(layer).there * (layer > self.model.first_varying)

    def _row_bytes(self, layer: int) -> int:
        """Of a row that the layer exchanges."""
        return self.model.exchanged_width(layer, self.options.narrow) * self.model.itemsize

    def _crossing(self, layer: int) -> Number:
        """Gradients that come from peers, beside the layer's own."""
        f, bits, policy = self._counts(layer), self.options.bits, self.options.policy
        whole: Number = f.given * self._row_bytes(layer)
        if bits is None:  # those that come where rows stay are put among them
            return float(1 + policy.stays - policy.lags) * whole
        width, b = self.model.exchanged_width(layer, self.options.narrow), self.model.itemsize
        packed: Number = (f.given + f.taken) * few_bits.row_bytes(width, b, bits)
        return packed + np.maximum(
            whole, few_bits.room(f.taken * width, b, self.problem.cluster.device.kind)
        )

    def _copied(self, layer: int) -> Number:
        """A copy of the layer's source rows, own and halo together."""
        f = self._counts(layer)
        kept = self.options.checkpoint and self.options.narrow and self.model.narrow_at(layer)
        copied = (self._halo(layer) > 0) | kept | (f.made is not None)
        return f.sources * self._row_bytes(layer) * copied

    def _unpicked(self, layer: int) -> Number:
        """Rows that are there, of which the layer reads some, and those that it adds up."""
        f = self._counts(layer)
        return (0.0 if f.made is None else f.present) + (0.0 if f.added is None else f.added)

    def _need(self, layer: int) -> Footprint:
        model, f = self.model, self._counts(layer)
        if f.away is not None:
            model = model.without_ends(layer)
        counts = f.rows, f.sources, f.edges
        return footprint(model, layer, *counts, narrow=self.options.narrow, local=f.local)
