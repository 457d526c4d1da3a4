"""What a GNN is to a plan: its layers, and the work of each.

layer.py says what a layer does. Attention always projects first, and so does a layer whose inputs
must be multiplied first (rows.py). GCNII and ResGCN+ have a row-wise encoder before the first layer
and a row-wise decoder after the last; the decoder counts as layer L + 1. The executor's models
(executor/layers/models.py) have the same shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partialmethod
from itertools import pairwise
from typing import ClassVar

from gnnplan.planner.gnn.amounts import block_of
from gnnplan.planner.gnn.counted import Counted, between
from gnnplan.planner.gnn.kinds import KINDS, Kind, Layer
from gnnplan.planner.gnn.layer import Played, played, played_rowwise
from gnnplan.planner.gnn.operations import BIAS, COPY, MASKED, MASKED_IN_PASSING, RELU, VECTOR
from gnnplan.planner.gnn.rows import Rows
from gnnplan.planner.gnn.trace import SUM, Setting, Work
from gnnplan.planner.gnn.workload import ModuleLayer, Workload
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

# Framework operations that hash a dropout mask. The backward pass finds the mask made.
MASK = 5
# hash_ops that an exponential of the loss costs in rows shorter than VECTOR, whose numbers are
# taken one by one. In longer rows it costs one.
SHORT = 5


@dataclass(frozen=True)
class Model:
    """A GNN on features and classes of known width. Layers are numbered from 1."""

    layers: tuple[Layer, ...]
    encoder: tuple[int, int] | None
    decoder: tuple[int, int] | None
    dropout: float
    itemsize: int  # [B] of a number of a row
    weight_itemsize: int  # [B] of a weight, and of its gradient
    inputs: Rows  # of features
    classes: int
    hands_on_initial: bool  # GCNII: every layer reads h_0, so a pipeline stage hands it on as well
    norm: str = "none"  # 'none', 'layer' or 'batch'
    activates_last: bool = False  # norm and ReLU before the decoder
    redrawn: bool = False  # every step has other edges (mini-batches)
    # A product is made piece by piece, and the pieces are copied into place. CPU ranks do so where
    # every step has other shapes and oneDNN multiplies.
    by_pieces: bool = False
    # Gradients of products are written where they belong, and a sum of products is added up there,
    # with ReLU after it (cuBLAS, MKL, and oneDNN's of rounded rows). oneDNN's of float32 are made
    # apart, with ReLU inside.
    in_place: bool = False
    # Kernels in Triton and whole products: nothing goes by blocks, dropout keeps no mask, and
    # attention keeps nothing per edge.
    on_gpu: bool = False
    relu: bool = True  # between layers
    # what follows the last layer has its weights in that layer
    ends: bool = False
    is_cut: bool = False  # a user's module: where narrow, rows that no neighbour reads stay

    own_laid_out: ClassVar[int] = COPY  # passes over own rows, to put them beside others

    @property
    def features(self) -> int:
        """Columns of features."""
        return self.inputs.width

    @property
    def carried(self) -> int:
        """Numbers per row that go past all layers: a pipeline stage hands them on."""
        return self.layers[0].h_in * self.hands_on_initial

    @property
    def decoder_inputs(self) -> Layer:
        """The layer whose preparation the decoder's inputs get."""
        assert self.decoder
        if self.activates_last:
            return self.layers[-1]
        return Layer(*self.decoder)

    @property
    def first_varying(self) -> int:
        """Index of the first h_l that changes from epoch to epoch.

        It is 1 where h_0 are constant features, and 0 after an encoder."""
        return 0 if self.encoder else 1

    @property
    def weights(self) -> int:
        """Numbers in all parameters."""
        return self.weights_of(range(1, len(self.layers) + 1))

    def weights_of(self, layers: range) -> int:
        """Numbers in the parameters of a run of layers, with the encoder or decoder at its ends."""
        total = sum(self.layers[layer - 1].weights for layer in layers)
        if self.encoder and 1 in layers:
            total += _linear(*self.encoder)
        if self.decoder and len(self.layers) in layers and not self.ends:
            total += _linear(*self.decoder) + self.decoder_inputs.norm_weights
        return total

    @cached_property
    def aggregating_first(self) -> Model:
        """The same model with every layer aggregating before it multiplies.

        Attention still multiplies first, as do layers that must (`Rows.multiplied_first`), and a
        layer of the user's own stays as it is."""
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

    def rows(self, layer: int) -> Rows:
        """How the rows that the layer (0: the encoder) reads are stored."""
        if layer == self.first_varying:
            return self.inputs
        return Rows.of(self.input_width(layer), self.itemsize)

    @property
    def prepares_linearly(self) -> bool:
        """Whether only dropout happens to a row between its exchange and its aggregation."""
        return not (self.activates_last or any(layer.activates for layer in self.layers))

    def relu_after(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) ends in ReLU.

        It does not where the next layer activates its own inputs."""
        return self.hands_on_initial or (
            self.relu and 0 < layer < len(self.layers) and not self.layers[layer].activates
        )

    def moments(self, layer: int, way: str = "f") -> int:
        """Numbers that all ranks add up before the layer (L + 1: the decoder).

        Batch norm adds up two per column, and in a batch how many rows there are (way 'f'); without
        it there are none. way 'b': their gradient."""
        if layer > len(self.layers):
            normed = self.norm if self.decoder and self.activates_last else "none"
            width = self.decoder[0] if self.decoder else 0
        else:
            normed, width = self.layers[layer - 1].norm, self.layers[layer - 1].h_in
        return 2 * width + (self.redrawn and way == "f") if normed == "batch" else 0

    def input_width(self, layer: int) -> int:
        """H_{l-1} [numbers per row]."""
        return self.layers[layer - 1].h_in

    def aggregate_cached(self, layer: int) -> bool:
        """Whether the layer's aggregate is computed once, before training.

        Only layer 1 aggregates constant features. Its aggregate changes where edges are redrawn,
        dropout comes before it, or attention weighs it. Some features are never aggregated."""
        return (
            layer == 1
            and self.encoder is None
            and not (self.redrawn or self.layers[0].heads or self.inputs.multiplied_first)
            and not self.layers[0].counted
            and not (self.dropout and self.layers[0].drops)
        )

    def features_moved(self, rows: Number) -> Number:
        """Bytes of some rows of features in transit [B], of average ones."""
        return self.inputs.moved(rows)

    def own_sorted(self, rows: Number) -> Number:
        """Bytes to multiply own rows alone too, where layer 1 does so with features [B]."""
        reads_own = self.first_varying > 0 and self.layers[0].reads_own
        return self.inputs.sorted(rows) if reads_own else 0.0 * rows

    def exchanged_width(self, layer: int, narrow: bool) -> int:
        """Numbers per halo row before the layer.

        H_{l-1}; or H_l and attention's logits, where the layer projects before the exchange."""
        spec = self.layers[layer - 1]
        return spec.projected if narrow and self.narrow_at(layer) else spec.h_in

    def narrow_at(self, layer: int) -> bool:
        """Whether the option `narrow` makes the layer project before its exchange.

        Batch norm needs all rows before the projection, so there it does not."""
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
        """Whether `narrow` makes a difference."""
        return any(self.narrow_at(layer) for layer in range(1, len(self.layers) + 1))

    # -- work ----------------------------------------------------------------------------------

    def played(self, layer: int, narrow: bool = False, apart: bool = False) -> Played:
        """What the layer does on any block, by its operations; see Setting."""
        spec = self.layers[layer - 1]
        setting = self._setting(self.rows(layer))._replace(
            relu=self.relu_after(layer),
            varies=layer > self.first_varying,
            cached=self.aggregate_cached(layer),
            narrow=narrow and self.narrow_at(layer),
            apart=apart,
        )
        return played(spec, setting)

    def _setting(self, inputs: Rows) -> Setting:
        return Setting(
            self.itemsize,
            self.weight_itemsize,
            self.dropout > 0,
            inputs,
            self.redrawn,
            self.by_pieces,
            self.in_place,
            self.on_gpu,
        )

    def prepares(self, spec: Layer, varies: bool = True) -> Played:
        """What is done to a layer's input rows alone."""
        setting = self._setting(Rows.of(spec.h_in, self.itemsize))
        return played_rowwise(spec, setting._replace(varies=varies))

    def work(
        self,
        way: int,
        layer: int,
        rows: Number,
        sources: Number,
        edges: Number,
        narrow: bool = False,
        read: Number | None = None,
        away: Number = 0.0,
    ) -> Compute:
        """Work of a layer's pass (0: forward): R `rows`, S `sources`, `edges` without self edges.

        read: the rows that it gathers from, where other ranks prepared some of them; default:
        `sources`. narrow: without the projection, which was done before the exchange
        (`project`). away: destinations whose own row is with another rank, and no source."""
        spec, narrow = self.layers[layer - 1], narrow and self.narrow_at(layer)
        edges = edges + spec.self_edges * (rows - away)
        block = block_of(rows, sources, edges, read=read, away=away)
        work, launches = self.played(layer, narrow).ways[way], self._launches(spec, narrow)[way]
        return work.on(block, self.itemsize, launches, self.redrawn)

    forward, backward = partialmethod(work, 0), partialmethod(work, 1)

    def project(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of a narrow layer's projection, before its exchange."""
        if self.is_cut or not self.narrow_at(layer):
            return self._moved(), self._moved()
        return self._rowwise(self.played(layer, True).project, rows)

    def _rowwise(
        self, ways: tuple[Work, Work], rows: Number, launches: tuple[int, int] | None = None
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of an encoder, a decoder or a projection on `rows`."""
        block = block_of(rows, rows, 0.0, local=rows)
        first, second = launches or ((3, 6) if self.on_gpu else (6, 10))
        return (
            ways[0].on(block, self.itemsize, first, self.redrawn),
            ways[1].on(block, self.itemsize, second, self.redrawn),
        )

    @property
    def encodes(self) -> Played:
        """What the encoder does; GCNII adds the gradients of h_0 and of the initial rows."""
        assert self.encoder
        setting = self._setting(self.inputs)._replace(varies=False)
        h_out, twice = self.encoder[1], self.hands_on_initial
        # whose preparation its inputs get
        spec = Layer(*self.encoder, drops=not self.activates_last)
        return played_rowwise(spec, setting, h_out, self.relu_after(0), twice)

    @property
    def decodes(self) -> Played:
        """What the decoder does."""
        assert self.decoder
        setting = self._setting(Rows.of(self.decoder[0], self.itemsize))
        return played_rowwise(self.decoder_inputs, setting, self.decoder[1])

    def _moved(self, nbytes: Number = 0.0, launches: float = 0.0) -> Compute:
        """Element-wise work on so many bytes [B]."""
        return Compute(elementwise_bytes=nbytes, launches=launches, itemsize=self.itemsize)

    def lay_out(self, layer: int, rows: Number, narrow: bool) -> Compute:
        """Work of putting a rank's own `rows` beside those that others send before the layer."""
        width = self.exchanged_width(layer, narrow)
        return self._moved(1.0 * self.own_laid_out * rows * width * self.itemsize)

    def pick(self, layer: int, rows: Number, present: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of picking the `rows` that a layer reads of those `present`."""
        width = self.exchanged_width(layer, narrow=False) * self.itemsize
        return self._moved(2.0 * rows * width, 1), self._moved((2.0 * rows + present) * width, 2)

    def apply(self, layer: int, rows: Number, partial: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of making h_l: its `rows` are sums of `partial` rows.

        These are picked and added up. Bias and ReLU come then, as `without_ends` has neither."""
        spec, relu = self.layers[layer - 1], self.relu_after(layer)
        forward, backward = (
            bias * spec.bias + of_relu * relu for bias, of_relu in zip(BIAS, RELU, strict=True)
        )
        row_bytes = spec.h_out * self.itemsize
        return (
            self._moved((5.0 * partial + (1 + forward) * rows) * row_bytes, 5),
            self._moved((5.0 * partial + backward * rows) * row_bytes, 5),
        )

    def without_ends(self, layer: int) -> Model:
        """The model whose layer l has no bias and no ReLU: it makes sums, which `apply` adds up."""
        specs = list(self.layers)
        specs[layer - 1] = replace(specs[layer - 1], bias=False)
        return replace(self, relu=False, layers=tuple(specs))

    def encode(self, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of the encoder."""
        if self.encoder is None:
            return self._moved(), self._moved()
        return self._rowwise(self.encodes.ways, rows)

    def finish(
        self, rows: Number, edges: Number | None = None, negatives: int = 0
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of decoder and loss on a rank's own rows.

        edges: of link prediction, each with so many negatives; None: the loss is of labels."""
        forward = backward = self._moved()
        if self.decoder:
            forward, backward = self._rowwise(self.decodes.ways, rows)
        if edges is not None:
            scored, its_gradient = self._score(rows, edges, negatives)
            return forward + scored, backward + its_gradient
        # the loss takes training rows, which are about half of all
        per_logit = 0.5 if self.classes >= VECTOR else 0.5 * SHORT
        loss = Compute(
            launches=6 if self.on_gpu else 12,
            itemsize=self.itemsize,
            hash_ops=per_logit * rows * max(self.classes, 1),
        )
        return forward + loss, backward + loss

    def _score(self, rows: Number, edges: Number, negatives: int) -> tuple[Compute, Compute]:
        """Forward and backward work of edges' dot products, and of their loss."""
        b, width, pairs = self.itemsize, self.classes, edges * (1 + negatives)
        picked = edges + pairs  # rows of heads and of tails
        pick = ((picked, width),)  # its gradient is added to rows in as random an order
        products = 2.0 * pairs * width
        read = picked * width * b
        forward = Compute(
            products, launches=10, itemsize=b, gemm_bytes=read, hash_ops=pairs, random_rows=pick
        )
        backward = Compute(
            2 * products,
            elementwise_bytes=(2 + SUM) * rows * width * b,  # zeros, and a sum
            launches=10,
            itemsize=b,
            gemm_bytes=2 * read,
            random_rows=pick,
        )
        return forward, backward

    def update(self, weights: Number) -> Compute:
        """Adam's step: it reads and writes four arrays of the parameters' size."""
        launches = 3 if self.on_gpu else 20
        return Compute(
            0.0, (), 8.0 * weights * self.weight_itemsize, launches, self.weight_itemsize
        )

    @property
    def masked(self) -> float:
        """Passes over numbers with dropout, of its gradient."""
        return MASKED_IN_PASSING if self.on_gpu else MASKED

    def _launches(self, spec: Layer, narrow: bool) -> tuple[int, int]:
        """Framework operations of a layer's forward and backward pass; on GPUs kernels."""
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

    def prepare_launches(self, spec: Layer) -> tuple[int, int]:
        """The same of norm, activation and dropout."""
        activate = (1 if spec.norm == "none" else 4) * spec.activates
        drops = self.dropout > 0 and spec.drops
        forward, backward = (1, 1) if self.on_gpu else (MASK + 3, 6)
        return activate + forward * drops, 2 * activate + backward * drops


def describe(workload: Workload, features: int, classes: int, stored: float = 0.0) -> Model:
    """The shapes of a workload's model on a graph with so many feature columns and classes.

    stored: numbers of a row of features, on average; 0: all of them. Link
    prediction reads rows of the last layer that are as wide as hidden ones, whatever the classes.

    >>> model = describe(Workload(layers=3, hidden=16), 40, 5)
    >>> [(layer.h_in, layer.h_out) for layer in model.layers]
    [(40, 16), (16, 16), (16, 5)]
    """
    classes = workload.hidden if workload.task == "link" else max(classes, 1)
    module, kind = workload.module, KINDS.get(workload.model, Kind())
    inputs = Rows.of(features, workload.precision.itemsize, stored)
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
        hands_on_initial=kind.reads_initial,
        norm=workload.norm or kind.norm,
        activates_last=kind.activates or ends,
        redrawn=workload.mode == "mini",
        relu=kind.has_relu and (module is None or module.relu),
        ends=ends,
        is_cut=workload.is_cut,
    )


def _linear(h_in: int, h_out: int) -> int:
    """Numbers in the parameters of a Linear."""
    return h_in * h_out + h_out


def layers_of(workload: Workload, inputs: Rows, classes: int) -> Iterator[Layer]:
    """The layers of a workload; a user's module has norms, heads, dropout and biases of its own.

    They project first where that narrows the rows. The first one does not where its aggregate is
    cached (Model.aggregate_cached), and always does where it must (`Rows.multiplied_first`)."""
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
        layer = Layer(h_in, h_out, workload.model, projects_first)
        layer = kind.shaped(layer, workload, place)
        norm = own.norm if own else (workload.norm or kind.norm) if place else "none"
        if norm != "none" or (place and kind.activates):
            layer = replace(layer, activates=True, drops=True, norm=norm)
        if own:
            bias, drops = layer.bias and own.bias, own.drops
            layer = replace(layer, drops=drops, heads=own.heads, middle=own.middle, bias=bias)
        yield layer


def _counted(own: ModuleLayer, counted: Counted, h_in: int) -> Layer:
    """A layer of the user's own, of so many columns of its input."""
    if h_in < own.h_in and own.half:  # P3 cuts its columns
        counted = between(own.half, counted, own.h_in // 2 / own.h_in, h_in / own.h_in)
    return Layer(h_in, own.h_out, "own", counted.projects_first, norm=own.norm, counted=counted)
