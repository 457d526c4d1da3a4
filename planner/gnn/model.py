"""The planner's view of a GNN: its layers, and the work of each layer.

kinds.py describes layers, and layer.py finds their work and memory. Attention always projects
first, and so does a layer whose inputs must be multiplied first (rows.py). GCNII and ResGCN+ have a
row-wise encoder before the first layer and a row-wise decoder after the last; the decoder counts as
layer L + 1. The executor's models (executor/layers/models.py) have the same shapes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np

from gnnplan.planner.gnn.kinds import KINDS, Counted, Kind, LayerSpec, amount, between
from gnnplan.planner.gnn.layer import (
    BIAS,
    COPY,
    LONG,
    RELU,
    VECTOR,
    LayerRecord,
    record_layer,
    record_rowwise,
)
from gnnplan.planner.gnn.rows import RowFormat
from gnnplan.planner.gnn.trace import SUM, Block, Setting, Work, block_of
from gnnplan.planner.gnn.workload import ModuleLayer, Workload
from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute

# framework operations that compute a dropout mask; the backward pass reuses the mask
MASK = 5
# hash_ops per exponential of the loss in rows shorter than VECTOR, which torch does not vectorize;
# in longer rows an exponential costs one
SHORT = 5


@dataclass(frozen=True)
class Model:
    """A GNN on features and classes of known width. Layers are numbered from 1."""

    layers: tuple[LayerSpec, ...]
    encoder: tuple[int, int] | None
    decoder: tuple[int, int] | None
    dropout: float
    itemsize: int  # bytes per number of a row [B]
    weight_itemsize: int  # bytes per weight, and per number of a weight's gradient [B]
    inputs: RowFormat  # storage format of features
    classes: int
    sends_initial: bool  # GCNII: every layer reads h_0, so pipeline stages send h_0 too
    norm: str = "none"  # 'none', 'layer' or 'batch'
    activates_last: bool = False  # norm and ReLU before the decoder
    resamples: bool = False  # every step has other edges (mini-batches)
    # Products are computed piece by piece, and pieces are copied into place. CPU ranks do so if
    # shapes vary from step to step or from chunk to chunk, and oneDNN multiplies.
    in_pieces: bool = False
    # Products write gradients into their final buffers, and a sum of products accumulates there,
    # with ReLU as a separate operation (cuBLAS, MKL, and oneDNN for rounded rows). oneDNN for
    # float32 writes temporary buffers instead, and fuses ReLU.
    in_place: bool = False
    # Triton kernels and whole products: nothing goes block by block, dropout keeps no mask, and
    # attention keeps nothing per edge.
    on_gpu: bool = False
    relu: bool = True  # ReLU between layers
    # a user's module: the last layer's weights include those of the operations that follow it
    ends: bool = False
    # a user's module that runs as written, in pieces; `narrow` sends only rows that layers gather
    is_cut: bool = False

    own_copy_passes: ClassVar[int] = COPY  # passes that copy own rows into one buffer with the halo

    @property
    def features(self) -> int:
        """The number of feature columns."""
        return self.inputs.width

    @property
    def carried(self) -> int:
        """Numbers per row of h_0, if a pipeline stage sends it past its layers (GCNII); else 0."""
        return self.layers[0].h_in * self.sends_initial

    @property
    def decoder_inputs(self) -> LayerSpec:
        """A layer with the preparation (norm, ReLU, dropout) of the decoder's inputs."""
        assert self.decoder
        if self.activates_last:
            return self.layers[-1]
        return LayerSpec(*self.decoder)

    @property
    def first_varying(self) -> int:
        """The first l for which h_l changes from epoch to epoch.

        It is 1 if h_0 are the constant features, and 0 if an encoder computes h_0."""
        return 0 if self.encoder else 1

    @property
    def weights(self) -> int:
        """The count of numbers in all parameters."""
        return self.weights_of(range(1, len(self.layers) + 1))

    def weights_of(self, layers: range) -> int:
        """Return the count of numbers in the parameters of consecutive layers.

        The first layer includes the encoder, the last layer the decoder."""
        total = sum(self.layers[layer - 1].weights for layer in layers)
        if self.encoder and 1 in layers:
            total += _linear(*self.encoder)
        if self.decoder and len(self.layers) in layers and not self.ends:
            total += _linear(*self.decoder) + self.decoder_inputs.norm_weights
        return total

    @cached_property
    def aggregating_first(self) -> Model:
        """The same model, in which layers aggregate before they multiply.

        Exceptions are attention, layers that must multiply first (`RowFormat.multiplied_first`),
        and layers of the user's own."""
        return replace(
            self,
            layers=tuple(
                spec
                if spec.counted
                else replace(
                    spec, projects_first=spec.heads > 0 or self.rows(layer).multiplied_first
                )
                for layer, spec in enumerate(self.layers, 1)
            ),
        )

    def rows(self, layer: int) -> RowFormat:
        """Return the storage format of the rows that the layer (0: the encoder) reads."""
        if layer == self.first_varying:
            return self.inputs
        return RowFormat.of(self.input_width(layer), self.itemsize)

    @property
    def prepares_linearly(self) -> bool:
        """Whether dropout is the only operation on a row between exchange and aggregation."""
        return not (self.activates_last or any(layer.activates for layer in self.layers))

    def relu_after(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) ends in ReLU.

        It does not if the next layer activates its own inputs."""
        return self.sends_initial or (
            self.relu and 0 < layer < len(self.layers) and not self.layers[layer].activates
        )

    def moments(self, layer: int, direction: str = "f") -> int:
        """Return the count of numbers in batch norm's all-reduce before the layer (L + 1: decoder).

        The all-reduce has two sums per column, and in a mini-batch also the number of rows.
        direction: 'f' (forward), 'b' (the sums' gradients). Without batch norm the count is 0."""
        if layer > len(self.layers):
            normed = self.norm if self.decoder and self.activates_last else "none"
            width = self.decoder[0] if self.decoder else 0
        else:
            normed, width = self.layers[layer - 1].norm, self.layers[layer - 1].h_in
        return 2 * width + (self.resamples and direction == "f") if normed == "batch" else 0

    def input_width(self, layer: int) -> int:
        """Return H_{l-1} [numbers per row]."""
        return self.layers[layer - 1].h_in

    def aggregate_cached(self, layer: int) -> bool:
        """Whether the layer's aggregate is computed once, before training.

        Only layer 1 aggregates constant features. Its aggregate changes if edges are redrawn, if
        dropout precedes it, or if attention weighs it. Sparse features are never aggregated."""
        return (
            layer == 1
            and self.encoder is None
            and not (self.resamples or self.layers[0].heads or self.inputs.multiplied_first)
            and not self.layers[0].counted
            and not (self.dropout and self.layers[0].drops)
        )

    def constant_rows(self, rows: Number, sources: Number) -> Number:
        """Return how many constant rows a step reads, if layer 1 (or the encoder) reads `sources`.

        If layer 1's aggregate is cached, these are `rows` of it, and own rows if the layer reads
        them too (GraphSAGE, residuals)."""
        if not self.aggregate_cached(1):
            return sources
        return rows * (2 if self.layers[0].reads_own else 1)

    def feature_transit_bytes(self, rows: Number) -> Number:
        """Return the bytes of average rows of features in transit [B]."""
        return rows * (self.inputs.numbers * self.inputs.transit_bytes_per_number)

    def own_index_bytes(self, rows: Number) -> Number:
        """Return the bytes of indices for layer 1's product of own rows of features [B]."""
        reads_own = self.first_varying > 0 and self.layers[0].reads_own
        return self.inputs.product_index_bytes(rows) if reads_own else 0.0 * rows

    def exchanged_width(self, layer: int, narrow: bool) -> int:
        """Return the numbers per halo row that ranks exchange before the layer.

        It is H_{l-1}; or H_l and attention's logits, if the layer projects before the exchange."""
        spec = self.layers[layer - 1]
        return spec.projected if narrow and self.narrow_at(layer) else spec.h_in

    def narrow_at(self, layer: int) -> bool:
        """Whether the knob `narrow` makes the layer project before its exchange.

        With batch norm it does not, because the norm needs all rows before the projection."""
        if not self.first_varying < layer <= len(self.layers):
            return False
        spec = self.layers[layer - 1]
        return (
            spec.projects_first
            and spec.projected < spec.h_in
            and spec.norm != "batch"
            and (self.is_cut or not spec.counted)
        )

    @property
    def narrows(self) -> bool:
        """Whether the knob `narrow` changes any layer."""
        return any(self.narrow_at(layer) for layer in range(1, len(self.layers) + 1))

    # -- work ----------------------------------------------------------------------------------

    def own_in_place(self, layer: int) -> bool:
        """Whether a layer, if it copies own and received rows into one tensor, multiplies the own
        rows where they were: they are not prepared."""
        spec = self.layers[layer - 1]
        prepares = spec.activates or (spec.drops and self.dropout > 0)
        projects_own = spec.counted is None and KINDS[spec.kind].projects_own
        return projects_own and not (spec.projects_first or prepares)

    def layer_record(
        self, layer: int, narrow: bool = False, *, completes: bool = False, **setting: Any
    ) -> LayerRecord:
        """Return the layer's recorded work and memory.

        completes: the layer completes the sums of the layer below. setting: more of trace.Setting.
        """
        end = ""
        if completes:
            end = "relu" if self.relu_after(layer - 1) else "bias" * self.layers[layer - 2].bias
        of_layer = self._setting(self.rows(layer))._replace(
            relu=self.relu_after(layer),
            varies=layer > self.first_varying,
            cached=self.aggregate_cached(layer),
            narrow=narrow and self.narrow_at(layer),
            completes=end,
            **setting,
        )
        return record_layer(self.layers[layer - 1], of_layer)

    def _setting(self, inputs: RowFormat) -> Setting:
        return Setting(
            self.itemsize,
            self.weight_itemsize,
            self.dropout > 0,
            inputs,
            self.resamples,
            self.in_pieces,
            self.in_place,
            self.on_gpu,
        )

    def preparation_record(self, spec: LayerSpec, varies: bool = True) -> LayerRecord:
        """Return the recorded work and memory of preparing a layer's input rows."""
        setting = self._setting(RowFormat.of(spec.h_in, self.itemsize))
        return record_rowwise(spec, setting._replace(varies=varies))

    def work(
        self,
        layer: int,
        rows: Number,
        sources: Number,
        edges: Number,
        narrow: bool = False,
        read: Number | None = None,
        away: Number = 0.0,
    ) -> BothPasses:
        """Return the work of a layer.

        rows: R. sources: S. edges: E without self edges. narrow: without the projection, which
        `project` has. read: source rows that the gather reads, if other ranks prepared some of
        them; default: `sources`. away: destinations whose own row another rank has."""
        spec, narrow = self.layers[layer - 1], narrow and self.narrow_at(layer)
        edges = edges + spec.self_edges * (rows - away)
        block = block_of(rows, sources, edges, read=read, away=away)
        return self._on(
            block, self.layer_record(layer, narrow).passes, self._launches(spec, narrow)
        )

    def _on(self, block: Block, ways: tuple[Work, Work], launches: tuple[int, int]) -> BothPasses:
        """Evaluate forward and backward work on a block."""
        both = zip(ways, launches, strict=True)
        return BothPasses(*(w.on(block, self.itemsize, count, self.resamples) for w, count in both))

    def project(self, layer: int, rows: Number) -> BothPasses:
        """Return the forward and backward work of a narrow layer's projection, before exchange."""
        if self.is_cut or not self.narrow_at(layer):
            return BothPasses(self._moved(), self._moved())
        return self._rowwise(self.layer_record(layer, True).project, rows)

    def _rowwise(
        self, ways: tuple[Work, Work], rows: Number, launches: tuple[int, int] | None = None
    ) -> BothPasses:
        """Evaluate row-wise forward and backward work (encoder, decoder, projection) on `rows`."""
        block = block_of(rows, rows, 0.0, local=rows)
        return self._on(block, ways, launches or ((3, 6) if self.on_gpu else (6, 10)))

    @property
    def encoder_record(self) -> LayerRecord:
        """The encoder's recorded work and memory; GCNII's h_0 has two gradients, which it adds."""
        assert self.encoder
        setting = self._setting(self.inputs)._replace(varies=False)
        h_out, twice = self.encoder[1], self.sends_initial
        # a layer with the preparation of the encoder's inputs
        spec = LayerSpec(*self.encoder, drops=not self.activates_last)
        return record_rowwise(spec, setting, h_out, self.relu_after(0), twice)

    @property
    def decoder_record(self) -> LayerRecord:
        """The decoder's recorded work and memory."""
        assert self.decoder
        setting = self._setting(RowFormat.of(self.decoder[0], self.itemsize))
        return record_rowwise(self.decoder_inputs, setting, self.decoder[1])

    def _moved(self, nbytes: Number = 0.0, launches: float = 0.0) -> Compute:
        """Return element-wise work on `nbytes` [B]."""
        return Compute(elementwise_bytes=nbytes, launches=launches, itemsize=self.itemsize)

    def lay_out(self, layer: int, rows: Number, narrow: bool) -> Compute:
        """Return the work of copying a rank's own `rows` into one buffer with the halo rows."""
        width = self.exchanged_width(layer, narrow)
        return self._moved(1.0 * self.own_copy_passes * rows * width * self.itemsize)

    def pick(self, layer: int, rows: Number, present: Number) -> BothPasses:
        """Return the forward and backward work of gathering a layer's `rows` of those `present`."""
        width = self.exchanged_width(layer, narrow=False) * self.itemsize
        back = (1.0 * rows + present) * width
        return BothPasses(self._moved(2.0 * rows * width, 1), self._moved(back, 1))

    def apply(self, layer: int, rows: Number, partial: Number) -> BothPasses:
        """Return the forward and backward work of computing `rows` of h_l from partial sums.

        The `partial` rows are gathered and added up; then follow the bias and ReLU, which a layer
        of `without_ends` lacks."""
        spec, relu = self.layers[layer - 1], self.relu_after(layer)
        forward, backward = (
            bias * spec.bias + of_relu * relu for bias, of_relu in zip(BIAS, RELU, strict=True)
        )
        row_bytes = spec.h_out * self.itemsize
        return BothPasses(
            self._moved((1.0 * partial + (1 + forward) * rows) * row_bytes, 3),
            self._moved((2.0 * partial + backward * rows) * row_bytes, 3),
        )

    def without_ends(self, layer: int) -> Model:
        """Return the model with layer l without bias and ReLU: its partial sums go to `apply`."""
        specs = list(self.layers)
        specs[layer - 1] = replace(specs[layer - 1], bias=False)
        return replace(self, relu=False, layers=tuple(specs))

    def encode(self, rows: Number) -> BothPasses:
        """Return the forward and backward work of the encoder."""
        return self._rowwise(self.encoder_record.passes, rows)

    def finish(self, rows: Number, edges: Number | None = None, negatives: int = 0) -> BothPasses:
        """Return the forward and backward work of decoder and loss on a rank's own rows.

        edges: for link prediction, positive edges with `negatives` negatives each; None: the loss
        compares labels."""
        decoding = BothPasses(self._moved(), self._moved())
        if self.decoder:
            decoding = self._rowwise(self.decoder_record.passes, rows)
        if edges is not None:
            return decoding + self._score(rows, edges, negatives)
        # The loss reads training rows only, about half of all rows.
        per_logit = 0.5 if self.classes >= VECTOR else 0.5 * SHORT
        loss = Compute(
            launches=6 if self.on_gpu else 12,
            itemsize=self.itemsize,
            hash_ops=per_logit * rows * max(self.classes, 1),
        )
        return decoding + BothPasses(loss, loss)

    def _score(self, rows: Number, edges: Number, negatives: int) -> BothPasses:
        """Return the forward and backward work of pairs' dot products and of their loss."""
        b, width, pairs = self.itemsize, self.classes, edges * (1 + negatives)
        gathered = edges + pairs  # rows of heads and of tails
        random = ((gathered, width),)  # gathered forward; their gradients are scattered backward
        products = 2.0 * pairs * width
        read = gathered * width * b
        forward = Compute(
            products, launches=10, itemsize=b, gemm_bytes=read, hash_ops=pairs, random_rows=random
        )
        backward = Compute(
            2 * products,
            elementwise_bytes=(2 + SUM) * rows * width * b,  # zeros, and a sum
            launches=10,
            itemsize=b,
            gemm_bytes=2 * read,
            random_rows=random,
        )
        return BothPasses(forward, backward)

    def update(self, weights: Number) -> Compute:
        """Return the work of Adam's step: it reads and writes four arrays of the weights' size."""
        launches = 3 if self.on_gpu else 20
        return Compute(
            0.0, (), 8.0 * weights * self.weight_itemsize, launches, self.weight_itemsize
        )

    def _launches(self, spec: LayerSpec, narrow: bool) -> tuple[int, int]:
        """Return the framework operations (GPU: kernels) of a layer's forward and backward pass."""
        forward = 6 + 2 * spec.matrices + 12 * spec.heads
        ways = (forward, 2 * forward)
        if spec.counted:
            ways = (0, 0)
        elif self.on_gpu:
            ways = KINDS[spec.kind].launches if spec.matrices else (2, 1)
            if spec.sums > 1:
                ways = ways[0] + 6, ways[1] + 2
        before = (0, 0) if narrow else self.prepare_launches(spec)
        return ways[0] + before[0], ways[1] + before[1]

    def prepare_launches(self, spec: LayerSpec) -> tuple[int, int]:
        """Return the framework operations of norm, activation and dropout, as `_launches` does."""
        activate = (1 if spec.norm == "none" else 4) * spec.activates
        drops = self.dropout > 0 and spec.drops
        forward, backward = (1, 1) if self.on_gpu else (MASK + 3, 6)
        return activate + forward * drops, 2 * activate + backward * drops


def describe(workload: Workload, features: int, classes: int, stored: float = 0.0) -> Model:
    """Make a workload's model for a graph with this number of feature columns and classes.

    stored: numbers stored per row of compressed features, on average; 0: dense features. In link
    prediction the last layer is as wide as hidden layers, whatever the number of classes.

    >>> model = describe(Workload(layers=3, hidden=16), 40, 5)
    >>> [(layer.h_in, layer.h_out) for layer in model.layers]
    [(40, 16), (16, 16), (16, 5)]
    """
    classes = workload.hidden if workload.task == "link" else max(classes, 1)
    module, kind = workload.module, KINDS.get(workload.model, Kind())
    inputs = RowFormat.of(features, workload.precision.itemsize, stored)
    layers = tuple(layers_of(workload, inputs, classes))
    decoder = (workload.hidden, classes) if kind.encodes else None
    ends = module is not None and module.ends
    if ends:
        decoder = (layers[-1].h_out, classes)
    return Model(
        layers=layers,
        encoder=(features, workload.hidden) if kind.encodes else None,
        decoder=decoder,
        dropout=workload.dropout,
        itemsize=workload.precision.itemsize,
        weight_itemsize=workload.precision.weights.itemsize,
        inputs=inputs,
        classes=classes,
        sends_initial=kind.reads_initial,
        norm=workload.norm or kind.norm,
        activates_last=kind.activates or ends,
        resamples=workload.mode == "mini",
        relu=kind.has_relu and (module is None or module.relu),
        ends=ends,
        is_cut=workload.is_cut,
    )


def _linear(h_in: int, h_out: int) -> int:
    """Return the count of numbers in the parameters of torch's Linear."""
    return h_in * h_out + h_out


def layers_of(workload: Workload, inputs: RowFormat, classes: int) -> Iterator[LayerSpec]:
    """Yield the layers of a workload; a user's module sets norms, heads, dropout and biases itself.

    Layers project first if that narrows the rows. Layer 1 does not if its aggregate is cached
    (Model.aggregate_cached), and always does if it must (`RowFormat.multiplied_first`)."""
    kind, module = KINDS.get(workload.model, Kind()), workload.module
    first, last = (workload.hidden,) * 2 if kind.encodes else (inputs.width, classes)
    outs = [kind.width(workload, classes)] * (workload.layers - 1) + [last]
    if module:
        outs = [layer.h_out for layer in module.layers]
    for place, (h_in, h_out) in enumerate(pairwise([first, *outs])):
        own = module.layers[place] if module else None
        if own and own.counted:
            yield _counted(own, own.counted, h_in)
            continue
        reads_features = place == 0 and not kind.encodes
        drops = workload.dropout and (own is None or own.drops)
        caches = reads_features and not drops and workload.mode != "mini"
        narrows = h_out < h_in and not caches
        projects_first = kind.attends or narrows or (reads_features and inputs.multiplied_first)
        layer = LayerSpec(h_in, h_out, workload.model, projects_first)
        layer = kind.shaped(layer, workload, place)
        norm = own.norm if own else (workload.norm or kind.norm) if place else "none"
        if norm != "none" or (place and kind.activates):
            layer = replace(layer, activates=True, drops=True, norm=norm)
        if own:
            bias, drops = layer.bias and own.bias, own.drops
            layer = replace(layer, drops=drops, heads=own.heads, middle=own.middle, bias=bias)
        yield layer


def _counted(own: ModuleLayer, counted: Counted, h_in: int) -> LayerSpec:
    """Return a layer of the user's own, restricted to `h_in` columns of its input."""
    if h_in < own.h_in and own.half:  # P3 splits the columns among ranks
        counted = between(own.half, counted, own.h_in // 2 / own.h_in, h_in / own.h_in)
    return LayerSpec(h_in, own.h_out, "own", counted.projects_first, norm=own.norm, counted=counted)


# -- memory of one layer during training -----------------------------------------------------------

# It follows from the layer's operations (layer.py). Sizes are in bytes and may be arrays over
# ranks. A block has R rows, S sources and E edges.


# memory of libraries and CUDA context in an idle process [B]
RUNTIME = {"cpu": 300e6, "cuda": 800e6}
# NCCL's own buffers for a communicator, which torch does not count [B]. They grow with the number
# of channels, which is large on NVLink and small on PCIe (github.com/NVIDIA/nccl, issue 986): two
# A100s with NVLink took 544 MB, four 688 MB (issue 964).
COMMUNICATOR = 300e6
COUNTS_AT_ENDS = 8  # the last entries of a block's two arrays of offsets (CSR and transpose) [B]


class OpMemory(NamedTuple):
    """The memory of an operation, on top of the memory before it [B].

    Of a decoder or a loss: as LayerMemory's `most` and `left`."""

    most: Number  # peak
    left: Number  # still allocated afterwards; negative: it frees more than it allocates


class LayerMemory(NamedTuple):
    """The memory of a layer, without source rows and the gradient of the output [B]."""

    forward: Number  # peak of the forward pass
    most: Number  # peak of the backward pass, with what the forward pass keeps
    left: Number  # what the forward pass keeps for the backward pass, with the output


def keeps(nbytes: Number) -> OpMemory:
    """Return the memory of an operation that allocates so many bytes and frees nothing."""
    return OpMemory(nbytes, nbytes)


def in_turn(operations: Iterable[OpMemory]) -> OpMemory:
    """Return the memory of operations that run one after the other, taken as one operation.

    >>> in_turn([keeps(3.0), OpMemory(most=4.0, left=-2.0), keeps(1.0)])
    OpMemory(most=np.float64(7.0), left=2.0)
    """
    most: Number = 0.0
    left: Number = 0.0
    for each in operations:
        most, left = largest([left + each.most], most), left + each.left
    return OpMemory(most, left)


def rowwise_memory(record: LayerRecord, rows: Number) -> OpMemory:
    """Return the memory of an encoder, a decoder or a layer's preparation on `rows` rows."""
    held = record.backward.on(block_of(rows, rows, 0.0))
    return OpMemory(held[1:].max(0), held[0])


def layer_memory(
    model: Model,
    layer: int,
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    narrow: bool = False,
    local: Number = 0.0,
    **setting: bool,
) -> LayerMemory:
    """Return the memory of a layer of R `rows`, S `sources` and E `edges` (without self edges).

    narrow: the `local` source rows were prepared and projected before the exchange. setting: more
    options of Model.layer_record."""
    edges = edges + rows * model.layers[layer - 1].self_edges
    counts = block_of(rows, sources, edges, local=local)
    record = model.layer_record(layer, narrow, **setting)
    forward, backward = record.forward.on(counts), record.backward.on(counts)
    return LayerMemory(forward[1:].max(0), backward[1:].max(0), forward[0])


def block_bytes(
    model: Model, spec: LayerSpec, rows: Number, sources: Number, edges: Number
) -> Number:
    """Return the memory of a layer's edges [B].

    A block has its edges as CSR and transposed, with each edge's position in the other form, the
    edge weights, and the ids of the sources."""
    edges = edges + rows if spec.self_edges else edges
    weights = 2 * model.itemsize * spec.weighs_edges
    structure = amount(spec.counted.structure.kept, rows, sources, edges) if spec.counted else 0.0
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources + structure


def structure_work(
    model: Model, spec: LayerSpec, rows: Number, sources: Number, edges: Number
) -> tuple[Number, int]:
    """Return the work of a GPU's host on the edges of a block that a user's module reads.

    The host makes tensors of edges, as self-loops or degrees, where a block comes to the GPU.
    Returns the number of packed bytes that take as long [B], and calls of the framework."""
    if spec.counted is None or not model.on_gpu:
        return 0.0, 0
    work = spec.counted.structure.work
    return amount(work.elementwise_bytes, rows, sources, edges) / 2, work.launches


def decoder_memory(model: Model, own: Number) -> OpMemory:
    """Return the memory of decoding `own` rows of h_L; without a decoder they are the output."""
    if model.decoder is None:
        return keeps(0.0 * own)
    return rowwise_memory(model.decoder_record, own)


def loss_bytes(model: Model, own: Number, trained: Number) -> Number:
    """Return the peak memory of the loss on the logits, without the memory of the decoder [B]."""
    chosen = trained * model.classes * model.weight_itemsize  # logits of training vertices
    # training vertices' logits, log-softmax and its gradient; then the gradient of all logits
    return np.maximum(3 * chosen, chosen + own * model.classes * model.itemsize)


def loss_memory(model: Model, own: Number, trained: Number) -> OpMemory:
    """Return the memory of decoder and loss on `own` rows, with `trained` training vertices.

    The logits stay until the step ends; without a decoder they are h_L itself."""
    need, logits = decoder_memory(model, own), own * model.classes * model.itemsize
    most = np.maximum(need.left + loss_bytes(model, own, trained), need.most + logits)
    return OpMemory(most, logits * (model.decoder is not None))


def link_loss_memory(model: Model, own: Number, edges: Number, negatives: int) -> OpMemory:
    """Return the memory of decoder and link prediction's loss on `own` rows, as `loss_memory` does.

    The loss gathers the rows of heads and tails of `edges` edges, each with `negatives` negatives,
    and multiplies them pair by pair."""
    row = model.classes * model.itemsize
    rows, gathered = own * row, edges * row * (2 + negatives)  # heads and tails
    scores = edges * (1 + negatives) * model.itemsize
    need, positions = decoder_memory(model, own), 8 * edges * (2 + negatives)
    # gradients of the gathered rows; then the rows' gradients, once as heads and once as tails
    backward = 2 * scores + np.maximum(gathered + rows, need.most - need.left) + rows
    most = need.left + positions + np.maximum(2 * gathered + 3 * scores, backward)
    return OpMemory(most, rows * (model.decoder is not None))
