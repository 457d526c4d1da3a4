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
    Prepared,
    encoding,
    footprint,
    link_loss,
    loss,
)
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.products import Product
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
    rows. Where rows lag or stay, these have buffers of their own (memory.py). Operations hand on
    the size of the rows that they make, or of these rows' gradient.
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
        need = encoding(self.model, self.encoded)
        held.at(need.forward)
        held.handed_on = self._initial
        held.keep(need.kept)
        held.multiply(*need.products)

    def forward(self, layer: int, held: Held) -> None:
        model, f, need = self.model, self._counts(layer), self._need(layer)
        spec = model.layers[layer - 1]
        varies, halo = layer > model.first_varying, self._halo(layer)
        held.keep(self._copied(layer))
        held.at(self._crossing(layer, "f") * varies)
        held.at(self._unpicked(layer))
        held.at(need.forward, self._applied(layer))
        made = self._made(layer)
        if not self.options.checkpoint:
            held.keep(need.kept, self._applied(layer))
        else:
            held.keep(made)
            if self.options.narrow and model.narrow_at(layer):
                held.keep(Prepared.of(model, spec, f.sources - halo).dropped)
            elif varies and not (layer == 1 and model.hands_on_initial):
                held.free(np.where(halo > 0, held.handed_on, 0.0))  # the copy has these rows
        held.handed_on = made
        held.multiply(*need.products)

    def loss(self, held: Held) -> None:
        model, stats, own = self.model, self.problem.stats, self._own
        if self.scored is None:
            # of the whole graph's rows or of those that are trained on
            trained = own * min(1.0, stats.train_vertices / max(own.sum(), 1.0))
            logits, most, gradient = loss(model, own, trained)
        else:
            sends, negatives = self.scored.sends, self.problem.workload.negatives
            row = model.layers[-1].h_out * model.itemsize
            own = own + sends.sum(0)
            copied = own * row * sends.any()  # own rows beside those of other ranks
            held.at(copied, sends.sum(1) * row)
            logits, most, gradient = link_loss(model, own, self.scored.edges, negatives)
            most = most + copied
        held.at(most)
        held.keep(logits)
        if self.options.checkpoint:
            held.free(held.handed_on)  # h_L
        held.handed_on = gradient
        if model.decoder:
            held.multiply(Product(own, *model.decoder))

    def backward(self, layer: int, held: Held) -> None:
        model, f, need = self.model, self._counts(layer), self._need(layer)
        width, gradient = self._row_bytes(layer), held.handed_on
        if self.options.checkpoint:
            held.at(gradient, need.forward, self._applied(layer))
            held.at(gradient, need.backward, self._applied(layer))
        else:
            held.at(gradient, need.backward - need.kept)
            held.free(need.kept)
            held.at(2 * self._applied(layer))  # gradients of what is applied, after and before
            held.free(self._applied(layer))
        if layer == len(model.layers) and model.hands_on_initial:
            held.keep(self._initial)  # their gradient
        if layer > model.first_varying:
            held.at(gradient, f.sources * width + self._unpicked(layer))
            held.handed_on = f.present * width
            held.at(held.handed_on + self._crossing(layer, "b"))
            if self.options.narrow and model.narrow_at(layer):
                h_in = model.layers[layer - 1].h_in
                held.handed_on = f.local * h_in * model.itemsize
        held.free(self._copied(layer))
        if self.options.checkpoint and layer > 1:
            held.free(self._checkpointed(layer))

    def _checkpointed(self, layer: int) -> Number:
        """Rows of which a layer's own are computed again, unless they are in the copy."""
        model, f = self.model, self._counts(layer)
        if not (self.options.narrow and model.narrow_at(layer)):
            return np.where(self._halo(layer) > 0, 0.0, self._made(layer - 1))
        spec, local = model.layers[layer - 1], f.sources - self._halo(layer)
        return self._made(layer - 1) + Prepared.of(model, spec, local).dropped

    def _made(self, layer: int) -> np.ndarray:
        """The rows that a layer makes."""
        f, spec = self._counts(layer), self.model.layers[layer - 1]
        return np.asarray(f.rows * spec.h_out * self.model.itemsize, dtype=float)

    @property
    def _own(self) -> np.ndarray:
        """Rows of the last layer."""
        return self._counts(len(self.like)).rows

    @property
    def _initial(self) -> Number:
        """The rows that the encoder makes."""
        model = self.model
        return self.encoded * model.encoder[1] * model.itemsize if model.encoder else 0.0

    def _counts(self, layer: int) -> LayerFacts:
        return self.facts[self.like[layer]]

    def _halo(self, layer: int) -> np.ndarray:
        """Rows that come in every step."""
        return self._counts(layer).there * (layer > self.model.first_varying)

    def _row_bytes(self, layer: int) -> int:
        """Of a row that the layer exchanges."""
        model = self.model
        return model.exchanged_width(layer, self.options.narrow) * model.itemsize

    def _crossing(self, layer: int, way: str) -> Number:
        """Rows that leave for peers or gradients that come from them, beside the layer's own."""
        model, f = self.model, self._counts(layer)
        width, b = model.exchanged_width(layer, self.options.narrow), model.itemsize
        policy, bits = self.options.policy, self.options.bits
        leaves, comes = (f.given, f.taken) if way == "f" else (f.taken, f.given)
        # where rows stay, those that come are put among them
        put = comes * width * b * (policy.stays and (way == "f" or bits is None))
        whole = np.asarray(f.given * width * b)
        if bits is None:
            return np.asarray(whole * (not policy.lags) + put)
        packed = (f.given + f.taken) * few_bits.row_bytes(width, b, bits)
        room = few_bits.room(leaves * width, b, self.problem.cluster.device.kind)
        if bits == few_bits.ADAPTIVE:  # the rows of a kind, packed and unpacked, on the way
            room = np.maximum(room + packed, comes * width * b)
        return np.asarray(packed + put + (np.maximum(whole, room) if way == "b" else room))

    def _copied(self, layer: int) -> Number:
        """A copy of the layer's source rows, own and halo together."""
        kept = self.options.checkpoint and self.options.narrow and self.model.narrow_at(layer)
        picked = self._counts(layer).made is not None
        copied = (self._halo(layer) > 0) | kept | picked
        return np.asarray(self._counts(layer).sources * self._row_bytes(layer) * copied)

    def _unpicked(self, layer: int) -> Number:
        """Rows that are there, of which the layer reads some, and those that it adds up."""
        f = self._counts(layer)
        rows = 0.0 if f.made is None else f.present
        return (rows if f.added is None else rows + f.added) * self._row_bytes(layer)

    def _applied(self, layer: int) -> Number:
        """The layer's source rows with their bias, beside the sums that they are made of."""
        f = self._counts(layer)
        if f.added is None or not self.model.layers[layer - 2].bias:
            return 0.0
        return f.sources * self._row_bytes(layer)

    def _need(self, layer: int) -> Footprint:
        model, f = self.model, self._counts(layer)
        if f.away is not None:
            model = model.without_ends(layer)
        counts = f.rows, f.sources, f.edges
        return footprint(model, layer, *counts, narrow=self.options.narrow, local=f.local)
