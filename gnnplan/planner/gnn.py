"""What a GNN is to a plan: widths, weights and the work of a layer. The executor's models have the same shapes.

A layer is a row-wise `project`, an aggregation over edges and a row-wise `update` (executor/models.py). Where its
output is narrower than its input it may project first; an optional row-wise encoder comes before the first layer and
a decoder after the last (GCNII). Layer l reads h_{l-1} [rows, H_{l-1}] and writes h_l [rows, H_l].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from gnnplan.planner.cost import Number
from gnnplan.planner.schedule import Compute
from gnnplan.planner.specs import Workload


@dataclass(frozen=True)
class Layer:
    """One layer: `weights` numbers in its parameters; `matrices` dense products of h_in x h_out."""

    h_in: int
    h_out: int
    matrices: int
    weights: int
    self_edges: bool  # aggregates over its own row too
    projects_first: bool  # its output is narrower: multiply, then aggregate


@dataclass(frozen=True)
class Model:
    """`first_varying`: index of the first layer input that changes from epoch to epoch (features do not)."""

    layers: tuple[Layer, ...]
    encoder: tuple[int, int] | None
    decoder: tuple[int, int] | None
    dropout: float
    itemsize: int
    features: int
    classes: int
    hands_on_initial: bool  # GCNII: a pipeline stage hands h_0 on as well

    @property
    def first_varying(self) -> int:
        return 0 if self.encoder else 1

    @property
    def weights(self) -> int:
        """Numbers in all parameters."""
        return sum(layer.weights for layer in self.layers) + sum(a * b + b for a, b in filter(None, (self.encoder, self.decoder)))

    def weights_of(self, layers: range) -> int:
        """Numbers in the parameters of a run of layers (1-based), with the encoder or decoder at its ends."""
        total = sum(self.layers[i - 1].weights for i in layers)
        if self.encoder and 1 in layers:
            total += self.encoder[0] * self.encoder[1] + self.encoder[1]
        if self.decoder and len(self.layers) in layers:
            total += self.decoder[0] * self.decoder[1] + self.decoder[1]
        return total

    @cached_property
    def aggregating_first(self) -> Model:
        """The same model where no layer multiplies before it aggregates."""
        return replace(self, layers=tuple(replace(layer, projects_first=False) for layer in self.layers))

    def input_width(self, layer: int) -> int:
        """H_{l-1} [numbers per row]."""
        return self.layers[layer - 1].h_in

    def aggregate_cached(self, layer: int) -> bool:
        """Layer 1's aggregate of constant features is computed once, unless dropout comes before it."""
        return layer == 1 and self.encoder is None and self.dropout == 0

    def exchanged_width(self, layer: int, narrow: bool) -> int:
        """Numbers per halo row before layer l: H_{l-1}, or H_l where it projects before the exchange."""
        spec = self.layers[layer - 1]
        return spec.h_out if narrow and self.narrow_at(layer) else spec.h_in

    # -- work ------------------------------------------------------------------------------------------------------

    def narrow_at(self, layer: int) -> bool:
        """Whether `narrow` makes layer l multiply before its exchange."""
        return 0 < layer <= len(self.layers) and layer > self.first_varying and self.layers[layer - 1].projects_first

    def forward(self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool = False) -> Compute:
        """Work of one layer on `rows` destinations with `sources` source rows and `edges` edges (without self edges).
        With `narrow` its projection has been done before the exchange (`project`)."""
        spec, b = self.layers[layer - 1], self.itemsize
        edges = edges + rows if spec.self_edges else edges
        cached = self.aggregate_cached(layer)
        first = spec.projects_first
        narrow = narrow and self.narrow_at(layer)
        products = spec.matrices * rows
        if first:
            products = (0 if narrow else sources) + (spec.matrices - 1) * rows
        touched = 3 * rows * spec.h_out * b + (0 if cached else 2 * sources * (spec.h_out if narrow else spec.h_in) * b)
        dropped = bool(self.dropout) and not narrow
        if dropped:
            touched = touched + 6 * sources * spec.h_in * b
        gathers = () if cached else ((edges, spec.h_out if first else spec.h_in),)
        return Compute(2.0 * products * spec.h_in * spec.h_out, gathers, touched, 6 + 2 * spec.matrices + (8 if dropped else 0), b)

    def backward(self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool = False) -> Compute:
        """Weight gradients, and the gradient of the inputs where they vary."""
        forward, spec = self.forward(layer, rows, sources, edges, narrow), self.layers[layer - 1]
        constant = layer <= self.first_varying
        return Compute(forward.flops * (1 if constant else 2), () if constant else forward.gathers,
                       forward.touched + 2 * rows * spec.h_out * self.itemsize, 2 * forward.launches, self.itemsize)  # fmt: skip

    def project(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward of a narrow layer's projection, done at the end of the layer before."""
        if not self.narrow_at(layer):
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        spec = self.layers[layer - 1]
        return self.rowwise((spec.h_in, spec.h_out), rows, constant_input=False)

    def rowwise(self, shape: tuple[int, int] | None, rows: Number, constant_input: bool) -> tuple[Compute, Compute]:
        """Forward and backward work of the encoder or decoder on `rows`."""
        if shape is None:
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        flops, touched = 2.0 * rows * shape[0] * shape[1], 2 * rows * (shape[0] + shape[1]) * self.itemsize
        if self.dropout:
            touched = touched + 6 * rows * shape[0] * self.itemsize
        return (Compute(flops, (), touched, 6, self.itemsize),
                Compute(flops * (1 if constant_input else 2), (), touched, 10, self.itemsize))  # fmt: skip

    def encode(self, rows: Number) -> tuple[Compute, Compute]:
        return self.rowwise(self.encoder, rows, constant_input=True)

    def finish(self, rows: Number) -> tuple[Compute, Compute]:
        """Decoder and loss on a rank's own rows."""
        forward, backward = self.rowwise(self.decoder, rows, constant_input=False)
        loss = Compute(0.0, (), 6 * rows * max(self.classes, 1) * self.itemsize, 12, self.itemsize)
        return forward + loss, backward + loss

    def update(self, weights: int) -> Compute:
        """Adam reads and writes four arrays of the parameters' size."""
        return Compute(0.0, (), 8.0 * weights * self.itemsize, 20, self.itemsize)


def describe(workload: Workload, features: int, classes: int) -> Model:
    """The shapes of a workload's model on a graph with `features` columns and `classes` outputs."""
    hidden, count = workload.hidden, workload.layers
    classes = max(classes, 1)
    if workload.model == "gcnii":
        layer = Layer(hidden, hidden, 1, hidden * hidden, True, False)
        return Model((layer,) * count, (features, hidden), (hidden, classes), workload.dropout, workload.itemsize, features, classes, True)
    widths = [features, *[hidden] * (count - 1), classes]
    layers: list[Layer] = []
    for h_in, h_out in pairwise(widths):
        matrices = 2 if workload.model == "sage" else 1
        cached = not layers and workload.dropout == 0  # layer 1's aggregate is constant: multiply what is cached
        projects_first = h_out < h_in and not cached
        layers.append(Layer(h_in, h_out, matrices, matrices * h_in * h_out + h_out, workload.model == "gcn", projects_first))
    return Model(tuple(layers), None, None, workload.dropout, workload.itemsize, features, classes, False)
