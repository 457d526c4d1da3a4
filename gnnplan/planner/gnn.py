"""What a GNN is to a plan: widths, weights and the work of a layer. The executor's models have the same shapes.

A layer is a row-wise `prepare` (norm, activation, dropout) and `project`, an aggregation over edges and a row-wise `update`
(executor/models.py). Where its output is narrower than its input it may project first, and attention always does; an
optional row-wise encoder comes before the first layer and a decoder after the last (GCNII, ResGCN+). Layer l reads
h_{l-1} [rows, H_{l-1}] and writes h_l [rows, H_l]; the decoder reads h_L and counts as layer L + 1.
Sparse features are multiplied before anything else, by the encoder or layer 1, which then never aggregates them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from gnnplan.planner.cost import Number
from gnnplan.planner.schedule import WORKED, Compute, Gather
from gnnplan.planner.specs import Workload


@dataclass(frozen=True)
class Layer:
    """One layer: `weights` numbers in its parameters; `matrices` dense products of h_in x h_out (0: it only aggregates)."""

    h_in: int
    h_out: int
    matrices: int
    weights: int
    self_edges: bool  # aggregates over its own row too
    projects_first: bool  # its output is narrower, or it is attention, or it reads sparse rows: multiply, then aggregate
    sums: int = 1  # aggregations over the edges: a softmax of messages is a ratio of two
    heads: int = 0  # of attention; each has a logit per source row, which goes with the projected row
    activates: bool = False  # norm and ReLU are the first thing it does to its inputs, not the last that the layer before did
    norm: str = "none"  # of its inputs, where it activates: 'layer' or 'batch'
    drops: bool = True  # dropout of its inputs
    bias: bool = True  # of GCN's layers, which SGC is made of

    @property
    def projected(self) -> int:
        """Numbers per projected row."""
        return self.h_out + self.heads


@dataclass(frozen=True)
class Model:
    """`first_varying`: index of the first layer input that changes from epoch to epoch (features do not).
    `norm`: 'none', 'layer' or 'batch'. `relu`: between layers."""

    layers: tuple[Layer, ...]
    encoder: tuple[int, int] | None
    decoder: tuple[int, int] | None
    dropout: float
    itemsize: int
    features: int
    classes: int
    hands_on_initial: bool  # GCNII: a pipeline stage hands h_0 on as well
    norm: str = "none"
    activates_last: bool = False  # norm and ReLU before the decoder
    nonzeros: float = 0.0  # numbers in a row of sparse features, on average; 0: they are dense
    redrawn: bool = False  # every step has other edges (mini-batches)
    relu: bool = True

    @property
    def first_varying(self) -> int:
        return 0 if self.encoder else 1

    @property
    def weights(self) -> int:
        """Numbers in all parameters."""
        return self.weights_of(range(1, len(self.layers) + 1))

    def weights_of(self, layers: range) -> int:
        """Numbers in the parameters of a run of layers (1-based), with the encoder or decoder at its ends."""
        total = sum(self.layers[i - 1].weights for i in layers)
        if self.encoder and 1 in layers:
            total += self.encoder[0] * self.encoder[1] + self.encoder[1]
        if self.decoder and len(self.layers) in layers:
            total += self.decoder[0] * self.decoder[1] + self.decoder[1]
            total += 2 * self.decoder[0] if self.activates_last and self.norm != "none" else 0
        return total

    @cached_property
    def aggregating_first(self) -> Model:
        """The same model where no layer multiplies before it aggregates, but attention, which is defined so, and that of sparse rows."""
        return replace(self, layers=tuple(replace(spec, projects_first=spec.heads > 0 or self.reads_sparse(layer))
                                          for layer, spec in enumerate(self.layers, 1)))  # fmt: skip

    def reads_sparse(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) multiplies sparse features."""
        return self.nonzeros > 0 and layer == self.first_varying

    @property
    def prepares_linearly(self) -> bool:
        """Whether nothing but dropout happens to a row between its exchange and its readers."""
        return not (self.activates_last or any(layer.activates for layer in self.layers))

    def relu_after(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) ends in ReLU: not where the next one's inputs are activated by itself."""
        return self.hands_on_initial or (self.relu and 0 < layer < len(self.layers) and not self.layers[layer].activates)

    def moments(self, layer: int) -> int:
        """Numbers that all ranks sum before layer l (L + 1: the decoder): batch norm's two per column, else 0."""
        if layer > len(self.layers):
            return 2 * self.decoder[0] if self.decoder and self.activates_last and self.norm == "batch" else 0
        spec = self.layers[layer - 1]
        return 2 * spec.h_in if spec.norm == "batch" else 0

    def input_width(self, layer: int) -> int:
        """H_{l-1} [numbers per row]."""
        return self.layers[layer - 1].h_in

    def aggregate_cached(self, layer: int) -> bool:
        """Layer 1's aggregate of constant features is computed once, unless its edges are redrawn, dropout comes before it, attention
        weighs it, or they are sparse, which it is not."""
        return layer == 1 and self.encoder is None and not (self.redrawn or self.dropout or self.layers[0].heads or self.nonzeros)

    def features_moved(self, rows: Number) -> Number:
        """Bytes of so many constant rows in transit; sparse ones as a column and a value per number (an average)."""
        return rows * (2 * self.nonzeros or self.features) * self.itemsize

    def features_held(self, rows: Number, numbers: Number | None = None) -> Number:
        """Bytes of so many constant rows; sparse ones with as many `numbers` (an average) by row and by column: value, column, and in
        the transpose row and place."""
        if not self.nonzeros:
            return rows * self.features * self.itemsize
        return (rows * self.nonzeros if numbers is None else numbers) * (self.itemsize + 12) + 4 * (rows + self.features)

    def features_sorted(self, rows: Number) -> Number:
        """Bytes of what it takes to multiply some of the sparse rows alone: where each begins, and their own transpose."""
        return rows * (8 * self.nonzeros + 4) + 4 * self.features

    def exchanged_width(self, layer: int, narrow: bool) -> int:
        """Numbers per halo row before layer l: H_{l-1}, or H_l (and attention's logits) where it projects before the exchange."""
        spec = self.layers[layer - 1]
        return spec.projected if narrow and self.narrow_at(layer) else spec.h_in

    # -- work ------------------------------------------------------------------------------------------------------

    def narrow_at(self, layer: int) -> bool:
        """Whether `narrow` makes layer l multiply before its exchange: not where batch norm waits for all rows first."""
        if not self.first_varying < layer <= len(self.layers):
            return False
        spec = self.layers[layer - 1]
        return spec.projects_first and spec.projected < spec.h_in and spec.norm != "batch"

    @property
    def narrows(self) -> bool:
        """Whether `narrow` makes a difference."""
        return any(self.narrow_at(layer) for layer in range(1, len(self.layers) + 1))

    def forward(self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool = False, read: Number = None) -> Compute:
        """Work of one layer on `rows` destinations with `sources` source rows and `edges` edges (without self edges), which may
        `read` rows that others have prepared. With `narrow` its projection has been done before the exchange (`project`)."""
        spec, b = self.layers[layer - 1], self.itemsize
        cached, sparse = self.aggregate_cached(layer), self.reads_sparse(layer)
        first = spec.projects_first
        narrow = narrow and self.narrow_at(layer)
        products = spec.matrices * rows
        if first:
            products = (0 if narrow else sources) + (spec.matrices - 1) * rows
        product = self.product(spec.h_in, spec.h_out, products, sparse)
        touched = 0 if cached else 2 * sources * (spec.h_out if narrow or sparse else spec.h_in) * b
        touched = touched + (3 if spec.weights else 0) * rows * spec.h_out * b
        if self.hands_on_initial:  # mixed with the initial rows, and with what it was before the product
            touched = touched + 3 * rows * spec.h_out * b
        launches, worked = 6 + 2 * spec.matrices, 0.0
        if not narrow:
            prepared, worked, more = self.prepare(spec, sources, sparse)
            touched, launches = touched + prepared, launches + more
        if spec.sums > 1:  # exponentials of the messages
            touched, worked = touched + 2 * sources * spec.h_in * b, worked + sources * spec.h_in
        launches += 12 * spec.heads
        return product + Compute(0.0, self._gathers(layer, rows, edges, sources if read is None else read, rows), touched, launches, b,
                                 tensor=self._tensor(sources, spec.h_out if sparse or narrow else spec.h_in), worked=worked,
                                 weighed=(edges + rows) * float(spec.heads))  # fmt: skip

    def _gathers(self, layer: int, rows: Number, edges: Number, among: Number, into: Number) -> tuple[Gather, ...]:
        """Of a layer's aggregation."""
        spec = self.layers[layer - 1]
        edges = edges + rows if spec.self_edges else edges
        width = spec.h_out if spec.projects_first else spec.h_in
        return () if self.aggregate_cached(layer) else (Gather(edges, width, among, into),) * spec.sums

    def product(self, h_in: int, h_out: int, rows: Number, sparse: bool = False) -> Compute:
        """Rows times a matrix; sparse rows gather one of its columns per number, which lie together in memory."""
        if sparse:
            return Compute(0.0, (Gather(rows * self.nonzeros, h_out, h_in, rows),), itemsize=self.itemsize)
        return Compute(2.0 * rows * max(h_in, VECTOR) * max(h_out, VECTOR), itemsize=self.itemsize,
                       streamed=rows * (h_in + h_out) * self.itemsize, tensor=self._tensor(rows, max(h_in, h_out)))  # fmt: skip

    def _tensor(self, rows: Number, width: int) -> Number:
        return 1.0 * rows * width * self.itemsize

    def matrix_gradient(self, h_in: int, h_out: int, rows: Number, sparse: bool = False) -> Compute:
        """Of a product's matrix: of sparse rows by their transpose, in whose order the numbers are put (4 B more of each say how). Each
        gathers a row of the gradient: of many more than the matrix has. What comes out is added to what other rows gave."""
        if not sparse:
            return self.product(h_in, h_out, rows)
        numbers = rows * self.nonzeros
        touched = numbers * (2 * self.itemsize + 4) + 3.0 * h_in * h_out * self.itemsize
        return Compute(0.0, (Gather(numbers, h_out, rows, h_in),), touched, 3, self.itemsize)

    def prepare(self, spec: Layer, rows: Number, sparse: bool = False) -> tuple[Number, Number, int]:
        """Bytes touched, numbers hashed and framework operations of norm, activation and dropout on a layer's inputs. A word of dropout's
        hash serves four columns, of sparse rows a single number."""
        touched, hashed, launches = 0.0, 0.0, 0
        if self.dropout and spec.drops:
            hashed, launches = rows * (4 * self.nonzeros if sparse else spec.h_in), MASK + 3
        if spec.activates:
            passes, more = (2, 1) if spec.norm == "none" else (6, 4)
            touched, launches = passes * rows * spec.h_in * self.itemsize, launches + more
        return touched, hashed, launches

    def backward(self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool = False, read: Number = None) -> Compute:
        """Weight gradients, and the gradient of the inputs where they vary; arguments as of `forward`."""
        forward, spec = self.forward(layer, rows, sources, edges, narrow), self.layers[layer - 1]
        constant = layer <= self.first_varying
        aggregated = self._gathers(layer, rows, edges, rows, sources if read is None else read)  # by transposed edges
        gathers = () if constant and not spec.projects_first else aggregated
        if spec.heads:  # weights depend on rows: a product along every edge for theirs, and the rows' own
            gathers = gathers + aggregated
        times, masked = 1 if constant else 2, bool(self.dropout) and spec.drops and not (narrow and self.narrow_at(layer))
        touched = forward.touched + (2 * rows * spec.h_out + WORKED * forward.worked) * self.itemsize  # masks and weights are kept
        if self.hands_on_initial:  # both mixtures part a gradient in two, and two come together in what was mixed and in the initial rows
            touched = touched + 7 * rows * spec.h_out * self.itemsize
        work = Compute(forward.flops * times, gathers, touched, 2 * (forward.launches - MASK * masked), self.itemsize,
                       streamed=forward.streamed * times, tensor=forward.tensor, weighed=forward.weighed)  # fmt: skip
        if not self.reads_sparse(layer):
            return work
        return self.matrix_gradient(spec.h_in, spec.h_out, sources + (spec.matrices - 1) * rows, sparse=True) + work

    def project(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward of a narrow layer's projection, done at the end of the layer before."""
        if not self.narrow_at(layer):
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        spec = self.layers[layer - 1]
        return self.rowwise((spec.h_in, spec.h_out), rows, constant_input=False, before=spec)

    def rowwise(
        self, shape: tuple[int, int] | None, rows: Number, constant_input: bool, before: Layer | None = None
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of the encoder or decoder on `rows`; `before`: the layer whose inputs are prepared for it."""
        if shape is None:
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        sparse = constant_input and self.nonzeros > 0
        product = self.product(*shape, rows, sparse)
        touched = 2 * rows * ((0 if sparse else shape[0]) + shape[1]) * self.itemsize
        first = before or Layer(*shape, 1, 0, False, False, drops=not self.activates_last)
        prepared, hashed, _ = self.prepare(first, rows, sparse)
        forward = Compute(0.0, (), touched + prepared, 6, self.itemsize, worked=hashed)
        backward = Compute(0.0, (), touched + prepared + WORKED * hashed * self.itemsize, 10, self.itemsize)
        again = Compute() if constant_input else product
        return product + forward, self.matrix_gradient(*shape, rows, sparse) + again + backward

    def encode(self, rows: Number) -> tuple[Compute, Compute]:
        return self.rowwise(self.encoder, rows, constant_input=True)

    def finish(self, rows: Number) -> tuple[Compute, Compute]:
        """Decoder and loss on a rank's own rows."""
        before = self.layers[-1] if self.activates_last else None  # the same norm and activation as before the last layer
        forward, backward = self.rowwise(self.decoder, rows, constant_input=False, before=before)
        each = 0.5 if self.classes >= VECTOR else 0.5 * SHORT  # training rows, which are about half of all
        loss = Compute(launches=12, itemsize=self.itemsize, worked=each * rows * max(self.classes, 1))
        return forward + loss, backward + loss

    def update(self, weights: int) -> Compute:
        """Adam reads and writes four arrays of the parameters' size."""
        return Compute(0.0, (), 8.0 * weights * self.itemsize, 20, self.itemsize)


MASK = 5  # operations that hash a dropout mask, which the backward pass finds made
VECTOR = 16  # numbers that a processor takes at once: a product computes as many columns at least, and throws some away
SHORT = 5  # hashed numbers that an exponential of the loss is worth in rows shorter than that, which are taken one by one


def describe(workload: Workload, features: int, classes: int, nonzeros: float = 0.0) -> Model:
    """The shapes of a workload's model on a graph with `features` columns, of which `nonzeros` in a row where they are sparse, and
    `classes` outputs."""
    hidden, count, model, redrawn = workload.hidden, workload.layers, workload.model, workload.mode == "mini"
    norm = workload.norm or ("layer" if model == "resgcn" else "none")
    classes = max(classes, 1)
    ends = workload.dropout, workload.itemsize, features, classes
    if model == "gcnii":
        layer = Layer(hidden, hidden, 1, hidden * hidden, True, False)
        return Model((layer,) * count, (features, hidden), (hidden, classes), *ends, True, nonzeros=nonzeros, redrawn=redrawn)
    if model == "resgcn":
        sums = 2 if workload.aggregation == "softmax" else 1
        first = Layer(hidden, hidden, 1, hidden * hidden + hidden, False, False, sums, drops=False)  # only what it has activated
        layers = [first, *[_activating(first, norm)] * (count - 1)]
        return Model(tuple(layers), (features, hidden), (hidden, classes), *ends, False, norm, True, nonzeros, redrawn)
    cached = workload.dropout == 0 and not redrawn  # layer 1's aggregate is constant: multiply what is cached
    if model == "sgc":
        first = Layer(features, classes, 1, features * classes, True, nonzeros > 0 or (classes < features and not cached), bias=False)
        following = Layer(classes, classes, 0, 0, True, False, drops=False, bias=False)
        layers = [first, *[following] * (count - 1)]
        layers[-1] = replace(layers[-1], weights=layers[-1].weights + classes, bias=True)
        return Model(tuple(layers), None, None, *ends, False, nonzeros=nonzeros, redrawn=redrawn, relu=False)
    widths = [features, *[hidden] * (count - 1), classes]
    layers = []
    for h_in, h_out in pairwise(widths):
        if model == "gat":  # the attention vector has two numbers per output
            heads = workload.heads if len(layers) + 1 < count else 1
            layer = Layer(h_in, h_out, 1, h_in * h_out + 3 * h_out, True, True, heads=heads)
        else:
            matrices = 2 if model == "sage" else 1
            projects_first = h_out < h_in if layers else nonzeros > 0 or (h_out < h_in and not cached)
            layer = Layer(h_in, h_out, matrices, matrices * h_in * h_out + h_out, model == "gcn", projects_first)
        layers.append(_activating(layer, norm) if layers and norm != "none" else layer)
    return Model(tuple(layers), None, None, *ends, False, norm, nonzeros=nonzeros, redrawn=redrawn)


def _activating(layer: Layer, norm: str) -> Layer:
    """The layer where norm (a weight and a bias per column) and activation of its inputs are its own."""
    return replace(layer, activates=True, drops=True, norm=norm, weights=layer.weights + (2 * layer.h_in if norm != "none" else 0))
