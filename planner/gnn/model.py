"""What a GNN is to a plan: the widths, parameters and work of each layer.

A layer first prepares its input rows (norm, activation, dropout). Then it does two things, in the
order that costs less: it multiplies rows by its matrix, and it aggregates rows over the edges.

    h_{l-1} [S, H_{l-1}]   prepare | project | gather | update    h_l [R, H_l]     projects_first
                           prepare | gather  | update                              otherwise

R rows are written (destinations) and S rows are read (sources, which include the destinations).
Attention always projects first, and so does a layer that reads sparse features. GCNII and ResGCN+
have a row-wise encoder before the first layer and a row-wise decoder after the last; the decoder
counts as layer L + 1. The executor's models (executor/layers/models.py) have the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from gnnplan.planner.gnn import passes
from gnnplan.planner.gnn.counted import Counted, between
from gnnplan.planner.gnn.passes import Kind
from gnnplan.planner.gnn.workload import Jump, Module, Residual, Workload
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import HASH_BYTES, Compute, Gather

# Framework operations that hash a dropout mask. The backward pass finds the mask made.
MASK = 5
# Numbers that a processor multiplies at once. A product of fewer columns costs as much as one of
# this many.
VECTOR = 16
# Numbers that an operation makes of edges together, where it makes a row for each (the executor's
# GATv2). On a core they stay in its cache; a GPU would do little else but begin operations.
EDGE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
# hash_ops that an exponential of the loss costs in rows shorter than VECTOR, whose numbers are
# taken one by one. In longer rows it costs one.
SHORT = 5
# hash_ops that a number of sparse rows costs in their transpose: to find its place there, and to
# put it there.
TRANSPOSED, REORDERED = 2, 1
COLUMN = 4  # [B] of the column of a number of a sparse row, at least


@dataclass(frozen=True)
class Layer:
    """The shape of one layer, and what it does to its inputs."""

    h_in: int
    h_out: int
    matrices: int  # products with a matrix [h_in, h_out]; 0: the layer only aggregates
    weights: int  # numbers in its parameters
    self_edges: bool  # aggregates over its own row too
    # multiplies, then aggregates: its output is narrower, or it is attention, or it reads sparse
    # features
    projects_first: bool
    sums: int = 1  # aggregations over the edges; a softmax of messages is a ratio of two
    heads: int = 0  # of attention; each adds a logit to a projected row
    # Norm and ReLU are the first thing that the layer does to its inputs. Otherwise they are the
    # last thing that the layer before does.
    activates: bool = False
    norm: str = "none"  # of its inputs, if it activates them: 'layer' or 'batch'
    drops: bool = True  # dropout of its inputs
    bias: bool = True
    middle: int = 0  # GIN: numbers per row between its two products; 0: there is one
    # GATv2: a logit is of a sum of two rows, so a projected row has a part for readers and one for
    # sources
    pairs: bool = False
    residual: Residual | None = None
    kind: Kind = passes.GCN  # its element-wise work
    counted: Counted | None = None  # a layer of the user's own, whose work is not in formulas

    @property
    def reads_own(self) -> bool:
        """Whether it reads the rows of its destinations besides what it aggregates."""
        return self.matrices > 1 or self.residual is not None or self.counted is not None

    @property
    def put_among(self) -> int:
        """How often the gradient of own rows is put among that of the sources.

        A residual of prepared rows shares that with the kind's own reading of them. GraphSAGE that
        aggregates first adds it where the aggregate's gradient has been made."""
        own = self.kind.own - (self.matrices > 1 and not self.projects_first)
        if self.residual is None or (self.kind.own and self.residual.of == "prepared"):
            return own
        return own + 1

    @property
    def multiplied(self) -> int:
        """Numbers per row after the first matrix."""
        return 2 * self.h_out if self.pairs else self.middle or self.h_out

    @property
    def projected(self) -> int:
        """Numbers per projected row."""
        return self.multiplied + (0 if self.pairs else self.heads)

    @property
    def gathered(self) -> int:
        """Numbers per row that is summed over the edges."""
        if self.counted:
            return self.counted.gathered
        return (self.middle or self.h_out) if self.projects_first else self.h_in


@dataclass(frozen=True)
class Model:
    """A GNN on features and classes of known width. Layers are numbered from 1."""

    layers: tuple[Layer, ...]
    encoder: tuple[int, int] | None
    decoder: tuple[int, int] | None
    dropout: float
    itemsize: int  # [B] of a number of a row
    weight_itemsize: int  # [B] of a weight, and of its gradient
    features: int
    classes: int
    hands_on_initial: bool  # GCNII: every layer reads h_0, so a pipeline stage hands it on as well
    norm: str = "none"  # 'none', 'layer' or 'batch'
    activates_last: bool = False  # norm and ReLU before the decoder
    nonzeros: float = 0.0  # numbers in a row of sparse features, on average; 0: they are dense
    redrawn: bool = False  # every step has other edges (mini-batches)
    # A product is made piece by piece, and the pieces are copied into place. CPU ranks do so where
    # every step has other shapes and oneDNN multiplies.
    by_pieces: bool = False
    # Gradients of products are written where they belong, and a sum of products is added up there,
    # with ReLU after it (cuBLAS, MKL, and oneDNN's of bfloat16). oneDNN's of float32 are made
    # apart, with ReLU inside.
    in_place: bool = False
    # Kernels in Triton and whole products: nothing goes by blocks, dropout keeps no mask, and
    # attention keeps nothing per edge.
    on_gpu: bool = False
    relu: bool = True  # between layers
    # All layers' rows, or products of them, are added up; the sum is what is decoded.
    jump: Jump | None = None
    # what follows the last layer has its weights in that layer
    ends: bool = False

    own_laid_out: ClassVar[int] = passes.COPY  # passes over own rows, to put them beside others

    @property
    def jumped(self) -> int:
        """Numbers per row of the sum of all layers' rows; 0: nothing is summed."""
        if self.jump is None:
            return 0
        return self.classes if self.jump.of == "cat" else self.layers[-1].h_out

    @property
    def carried(self) -> int:
        """Numbers per row that go past all layers: a pipeline stage hands them on."""
        return self.layers[0].h_in if self.hands_on_initial else self.jumped

    @property
    def encoder_inputs(self) -> Layer:
        """A layer whose preparation the encoder's inputs get."""
        assert self.encoder
        return Layer(*self.encoder, 1, 0, False, False, drops=not self.activates_last)

    @property
    def decoder_inputs(self) -> Layer | None:
        """The layer whose preparation the decoder's inputs get; None: there is no decoder."""
        if self.decoder is None:
            return None
        if self.activates_last:
            return self.layers[-1]
        return Layer(*self.decoder, 1, 0, False, False, drops=self.jump is None)

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
            total += self.encoder[0] * self.encoder[1] + self.encoder[1]
        if self.decoder and len(self.layers) in layers and not self.ends:
            total += self.decoder[0] * self.decoder[1] + self.decoder[1]
            total += 2 * self.decoder[0] if self.activates_last and self.norm != "none" else 0
        if self.jump and self.jump.of == "cat":  # a matrix per layer, and one bias
            total += sum(self.layers[layer - 1].h_out for layer in layers) * self.classes
            total += self.classes * (len(self.layers) in layers)
        return total

    @cached_property
    def aggregating_first(self) -> Model:
        """The same model with every layer aggregating before it multiplies.

        Attention and the layer of sparse features still multiply first, and a layer of the user's
        own stays as it is."""
        return replace(
            self,
            layers=tuple(
                spec
                if spec.counted
                else replace(spec, projects_first=spec.heads > 0 or self.reads_sparse(layer))
                for layer, spec in enumerate(self.layers, 1)
            ),
        )

    def reads_sparse(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) multiplies sparse features."""
        return self.nonzeros > 0 and layer == self.first_varying

    @property
    def prepares_linearly(self) -> bool:
        """Whether only dropout happens to a row between its exchange and its aggregation."""
        return not (self.activates_last or any(layer.activates for layer in self.layers))

    def relu_after(self, layer: int) -> bool:
        """Whether the layer (0: the encoder) ends in ReLU.

        It does not where the next layer activates its own inputs."""
        if self.jump and layer == len(self.layers):
            return self.jump.relu
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
        dropout comes before it, or attention weighs it. Sparse features are never aggregated."""
        return (
            layer == 1
            and self.encoder is None
            and not (self.redrawn or self.layers[0].heads or self.nonzeros)
            and not self.layers[0].counted
            and not (self.dropout and self.layers[0].drops)
        )

    @property
    def sparse_itemsize(self) -> int:
        """Bytes of a number of a sparse row in transit [B]: a value and its column.

        The column is as wide as the value, and has 32 bits at least."""
        return self.itemsize + max(self.itemsize, COLUMN)

    def features_moved(self, rows: Number) -> Number:
        """Bytes of some rows of features in transit [B]; sparse ones have the average count of
        numbers."""
        return rows * (self.nonzeros * self.sparse_itemsize or self.features * self.itemsize)

    def features_held(self, rows: Number, numbers: Number | None = None) -> Number:
        """Bytes of some rows of features in memory [B].

        Sparse ones, with `numbers` in all (default: the average), are kept by row and by column:
        value, column, and in the transpose row and place."""
        if not self.nonzeros:
            return rows * self.features * self.itemsize
        return (rows * self.nonzeros if numbers is None else numbers) * (self.itemsize + 12) + 4 * (
            rows + self.features
        )

    def features_sorted(self, rows: Number) -> Number:
        """Bytes needed to multiply some of the sparse rows alone [B].

        They hold where each row begins, and the transpose of these rows."""
        return rows * (8 * self.nonzeros + 4) + 4 * self.features

    def exchanged_width(self, layer: int, narrow: bool) -> int:
        """Numbers per halo row before the layer.

        H_{l-1}; or H_l and attention's logits, where the layer projects before the exchange."""
        spec = self.layers[layer - 1]
        return spec.projected if narrow and self.narrow_at(layer) else spec.h_in

    def narrow_at(self, layer: int) -> bool:
        """Whether the option `narrow` makes the layer project before its exchange.

        Batch norm needs all rows before the projection, so there it does not; nor where the layer
        adds its inputs, of which a narrow layer has the prepared ones alone."""
        if not self.first_varying < layer <= len(self.layers):
            return False
        spec = self.layers[layer - 1]
        adds_inputs = spec.residual is not None and spec.residual.of == "inputs"
        return (
            spec.projects_first
            and spec.projected < spec.h_in
            and spec.norm != "batch"
            and not adds_inputs
            and not spec.counted
        )

    @property
    def narrows(self) -> bool:
        """Whether `narrow` makes a difference."""
        return any(self.narrow_at(layer) for layer in range(1, len(self.layers) + 1))

    # -- work ----------------------------------------------------------------------------------

    def forward(
        self,
        layer: int,
        rows: Number,
        sources: Number,
        edges: Number,
        narrow: bool = False,
        read: Number | None = None,
        away: Number = 0.0,
    ) -> Compute:
        """Work of a layer's forward pass: R `rows`, S `sources`, and `edges` without self edges.

        read: the rows that it gathers from, where other ranks prepared some of them; default:
        `sources`. narrow: without the projection, which was done before the exchange
        (`project`). away: destinations whose own row is with another rank, and no source."""
        spec, itemsize = self.layers[layer - 1], self.itemsize
        if spec.counted:
            return self._counted(spec, rows, sources, edges, read)[0]
        sparse = self.reads_sparse(layer)
        narrow = narrow and self.narrow_at(layer)
        edges = edges - spec.self_edges * away
        multiplied = spec.matrices * rows
        if spec.projects_first:
            multiplied = (0 if narrow else sources) + (spec.matrices - 1) * rows
        multiplied = multiplied - (spec.matrices > 1) * away
        product = self._product(spec.h_in, spec.multiplied, multiplied, sparse)
        if spec.middle:
            product = product + self._product(spec.middle, spec.h_out, rows)
        if spec.residual and spec.residual.linear:
            product = product + self._product(spec.h_in, spec.h_out, rows, sparse)
        hash_ops = 0.0 if narrow else self.hashed(spec, sources, sparse)
        if spec.sums > 1:  # exponentials of the messages
            hash_ops = hash_ops + sources * spec.h_in
        source_width = spec.multiplied if narrow or sparse else spec.h_in
        return product + Compute(
            0.0,
            self._gathers(layer, rows, edges, sources if read is None else read, rows),
            self.forward_numbers(layer, rows, sources, edges, narrow) * itemsize,
            self._launches(spec, narrow)[0],
            itemsize,
            tensor_bytes=self._tensor_bytes(sources, source_width),
            hash_ops=hash_ops,
            attention_edges=(edges + rows) * float(spec.heads),
            scattered=self.redrawn,
        )

    def backward(
        self,
        layer: int,
        rows: Number,
        sources: Number,
        edges: Number,
        narrow: bool = False,
        read: Number | None = None,
        away: Number = 0.0,
    ) -> Compute:
        """Work of a layer's backward pass; arguments as of `forward`.

        It makes the gradient of the weights, and that of the inputs where they vary."""
        forward = self.forward(layer, rows, sources, edges, narrow, away=away)
        spec = self.layers[layer - 1]
        if spec.counted:
            return self._counted(spec, rows, sources, edges, read)[1]
        constant = layer <= self.first_varying
        edges = edges - spec.self_edges * away
        # over the transposed edges
        aggregated = self._gathers(layer, rows, edges, rows, sources if read is None else read)
        gathers = () if constant and not spec.projects_first else aggregated
        # Attention's weights depend on rows: a product along every edge for the weights' gradient,
        # and the rows' own gradient.
        if spec.heads:
            gathers = gathers + aggregated
        # the inputs of GIN's second product vary in any case
        second = self._product(spec.middle, spec.h_out, rows) if spec.middle else Compute()
        to_inputs = second if constant else forward  # products that make gradients of inputs
        narrow = narrow and self.narrow_at(layer)
        work = Compute(
            to_inputs.flops,
            gathers,
            self.backward_numbers(layer, rows, sources, edges, narrow) * self.itemsize,
            self._launches(spec, narrow)[1],
            self.itemsize,
            gemm_bytes=forward.gemm_bytes + to_inputs.gemm_bytes,
            tensor_bytes=forward.tensor_bytes,
            attention_edges=forward.attention_edges,
            scattered=self.redrawn,
            weight_gradient_flops=forward.flops,
        )
        if not self.reads_sparse(layer):
            return work
        multiplied = sources + (spec.matrices - 1) * (rows - away)
        work = self._matrix_gradient(spec.h_in, spec.multiplied, multiplied, sparse=True) + work
        if spec.residual and spec.residual.linear:
            work = self._matrix_gradient(spec.h_in, spec.h_out, rows, sparse=True) + work
        return work

    def _counted(
        self, spec: Layer, rows: Number, sources: Number, edges: Number, read: Number | None
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of a layer of the user's own, with dropout of its inputs."""
        assert spec.counted is not None
        block = rows, sources if read is None else read, edges + rows * spec.self_edges
        hashed = self.hashed(spec, sources)
        forward = spec.counted.forward.on(*block, self.itemsize) + Compute(
            launches=self.prepare_launches(spec)[0], hash_ops=hashed
        )
        if self.redrawn:
            forward = forward + spec.counted.structure.work.on(*block, self.itemsize)
        backward = spec.counted.backward.on(*block, self.itemsize) + Compute(
            elementwise_bytes=self.masked * hashed * self.itemsize
        )
        return forward, backward

    def project(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of a narrow layer's projection, before its exchange."""
        if not self.narrow_at(layer):
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        spec = self.layers[layer - 1]
        return self._rowwise(
            (spec.h_in, spec.multiplied), rows, spec, self.project_numbers(spec, rows)
        )

    def lay_out(self, layer: int, rows: Number, narrow: bool) -> Compute:
        """Work of putting a rank's own `rows` beside those that others send before the layer."""
        width = self.exchanged_width(layer, narrow)
        copied = 1.0 * self.own_laid_out * rows * width * self.itemsize
        return Compute(elementwise_bytes=copied, itemsize=self.itemsize)

    def pick(self, layer: int, rows: Number, present: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of picking the `rows` that a layer reads of those `present`."""
        width = self.exchanged_width(layer, narrow=False) * self.itemsize
        forward = Compute(elementwise_bytes=2.0 * rows * width, launches=1, itemsize=self.itemsize)
        moved = (2.0 * rows + present) * width
        return forward, Compute(elementwise_bytes=moved, launches=2, itemsize=self.itemsize)

    def apply(self, layer: int, rows: Number, partial: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of making h_l: its `rows` are sums of `partial` rows.

        These are picked and added up. Bias and ReLU come then, as `without_ends` has neither."""
        spec, relu = self.layers[layer - 1], self.relu_after(layer)
        forward, backward = (
            bias * spec.bias + of_relu * relu
            for bias, of_relu in zip(passes.BIAS, passes.RELU, strict=True)
        )
        row_bytes = spec.h_out * self.itemsize
        return (
            Compute(
                elementwise_bytes=(5.0 * partial + (1 + forward) * rows) * row_bytes,
                launches=5,
                itemsize=self.itemsize,
            ),
            Compute(
                elementwise_bytes=(5.0 * partial + backward * rows) * row_bytes,
                launches=5,
                itemsize=self.itemsize,
            ),
        )

    def without_ends(self, layer: int) -> Model:
        """The model whose layer l has no bias and no ReLU: it makes sums, which `apply` adds up."""
        specs = list(self.layers)
        specs[layer - 1] = replace(specs[layer - 1], bias=False)
        return replace(self, relu=False, layers=tuple(specs))

    def add_up(self, layer: int, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of adding a layer's `rows`, a rank's own, to the sum of all
        layers'.

        The backward pass does it once more, to keep nothing."""
        nothing = Compute(itemsize=self.itemsize)
        if self.jump is None:
            return nothing, nothing
        h_out, drops = self.layers[layer - 1].h_out, bool(self.jump.drops and self.dropout)
        multiplies = self.jump.of == "cat"
        product = gradient = nothing
        if multiplies:
            product = self._product(h_out, self.jumped, rows)
            gradient = self._matrix_gradient(h_out, self.jumped, rows)
        dropped = Compute(
            elementwise_bytes=2.0 * rows * h_out * drops * self.itemsize,
            launches=self.drop_launches[0] * drops,
            itemsize=self.itemsize,
            hash_ops=1.0 * rows * h_out * drops,
        )
        added = Compute(elementwise_bytes=3.0 * rows * self.jumped * self.itemsize, launches=2)
        # a product's gradient is written block by block
        passes = 3.0 + 2 * multiplies + 2 * drops
        passed = Compute(elementwise_bytes=passes * rows * h_out * self.itemsize, launches=3)
        again = product + dropped
        return again + added, again + product + gradient + passed

    def encode(self, rows: Number) -> tuple[Compute, Compute]:
        """Forward and backward work of the encoder."""
        if self.encoder is None:
            return Compute(itemsize=self.itemsize), Compute(itemsize=self.itemsize)
        return self._rowwise(
            self.encoder, rows, self.encoder_inputs, self.encode_numbers(rows), constant=True
        )

    def finish(
        self, rows: Number, edges: Number | None = None, negatives: int = 0
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of decoder and loss on a rank's own rows.

        edges: of link prediction, each with so many negatives; None: the loss is of labels."""
        forward = backward = Compute(itemsize=self.itemsize)
        if self.decoder and self.decoder_inputs:
            forward, backward = self._rowwise(
                self.decoder, rows, self.decoder_inputs, self.decode_numbers(rows)
            )
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
        pick = ((picked, width, rows),)  # its gradient is added to rows in as random an order
        products = 2.0 * pairs * width
        read = picked * width * b
        forward = Compute(
            products,
            launches=10,
            itemsize=b,
            gemm_bytes=read,
            hash_ops=pairs,
            random_rows=pick,
        )
        zeros_and_sum = (2 + passes.SUM) * rows * width * b
        backward = Compute(
            2 * products,
            elementwise_bytes=zeros_and_sum,
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

    def _gathers(
        self, layer: int, rows: Number, edges: Number, among: Number, into: Number
    ) -> tuple[Gather, ...]:
        """The layer's aggregations over its edges."""
        if self.aggregate_cached(layer):
            return ()
        spec = self.layers[layer - 1]
        edges = edges + rows if spec.self_edges else edges
        gather = Gather(edges, spec.gathered, among, into)
        # GATv2 reads the rows of both ends once more for its logits
        return (gather,) * (3 if spec.pairs else spec.sums)

    def _product(self, h_in: int, h_out: int, rows: Number, sparse: bool = False) -> Compute:
        """Rows times a matrix [h_in, h_out].

        A sparse row gathers a column of the matrix per number; columns are contiguous in memory."""
        if sparse:
            return Compute(
                0.0, (Gather(rows * self.nonzeros, h_out, h_in, rows),), itemsize=self.itemsize
            )
        return Compute(
            2.0 * rows * max(h_in, VECTOR) * max(h_out, VECTOR),
            itemsize=self.itemsize,
            gemm_bytes=rows * (h_in + h_out) * self.itemsize,
            tensor_bytes=self._tensor_bytes(rows, max(h_in, h_out)),
        )

    def _tensor_bytes(self, rows: Number, width: int) -> Number:
        return 1.0 * rows * width * self.itemsize

    def _matrix_gradient(
        self, h_in: int, h_out: int, rows: Number, sparse: bool = False
    ) -> Compute:
        """The gradient of a product's matrix.

        Of sparse rows it is a product with their transpose, whose order is found anew if the rows
        are another batch's. The numbers are put in its order. Each number then gathers a row of the
        output's gradient, and the result is added to that of other rows."""
        if not sparse:
            product = self._product(h_in, h_out, rows)
            return replace(product, flops=0.0, weight_gradient_flops=product.flops)
        numbers = rows * self.nonzeros
        return Compute(
            0.0,
            (Gather(numbers, h_out, rows, h_in),),
            3.0 * h_in * h_out * self.itemsize,
            3,
            self.itemsize,
            hash_ops=numbers * (REORDERED + TRANSPOSED * self.redrawn),
        )

    def hashed(self, spec: Layer, rows: Number, sparse: bool = False) -> Number:
        """Numbers that are hashed for dropout of the layer's input rows.

        A word of the hash serves four columns of a dense row, and one number of a sparse row. A GPU
        hashes in passing: what counts there is to read the rows and to write them."""
        if not (self.dropout and spec.drops):
            return 0.0
        numbers = rows * (4 * self.nonzeros if sparse else spec.h_in)
        return numbers * (2 * self.itemsize / HASH_BYTES if self.on_gpu else 1.0)

    @property
    def masked(self) -> float:
        """Passes over numbers with dropout, of its gradient."""
        return passes.MASKED_IN_PASSING if self.on_gpu else passes.MASKED

    def _launches(self, spec: Layer, narrow: bool) -> tuple[int, int]:
        """Framework operations of a layer's forward and backward pass; on GPUs kernels."""
        forward = 6 + 2 * spec.matrices + 12 * spec.heads
        ways = (forward, 2 * forward)
        if self.on_gpu:
            ways = spec.kind.launches if spec.matrices else (2, 1)
        residual = 3 * bool(spec.residual)
        before = (0, 0) if narrow else self.prepare_launches(spec)
        again = residual * (1 if self.on_gpu else 2)
        return ways[0] + residual + before[0], ways[1] + again + before[1]

    def prepare_launches(self, spec: Layer) -> tuple[int, int]:
        """The same of norm, activation and dropout."""
        activate = (1 if spec.norm == "none" else 4) * spec.activates
        forward, backward = self.drop_launches if self.dropout and spec.drops else (0, 0)
        return activate + forward, 2 * activate + backward

    @property
    def drop_launches(self) -> tuple[int, int]:
        """The same of dropout."""
        return (1, 1) if self.on_gpu else (MASK + 3, 6)

    def _rowwise(
        self,
        shape: tuple[int, int],
        rows: Number,
        inputs: Layer,
        passed: tuple[Number, Number],
        constant: bool = False,
    ) -> tuple[Compute, Compute]:
        """Forward and backward work of an encoder, a decoder or a projection on `rows`.

        inputs: the layer whose preparation comes before the product. passed: numbers that
        element-wise operations read and write. constant: the inputs get no gradient."""
        sparse = constant and self.nonzeros > 0
        product = self._product(*shape, rows, sparse)
        forward, backward = (
            Compute(0.0, (), numbers * self.itemsize, launches, self.itemsize)
            for numbers, launches in zip(passed, (3, 6) if self.on_gpu else (6, 10), strict=True)
        )
        hashing = Compute(hash_ops=self.hashed(inputs, rows, sparse), itemsize=self.itemsize)
        input_gradient = Compute() if constant else product
        weight_gradient = self._matrix_gradient(*shape, rows, sparse)
        return product + forward + hashing, weight_gradient + input_gradient + backward

    # -- numbers that element-wise operations read and write (passes.py) ------------------------

    def forward_numbers(
        self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool
    ) -> Number:
        """Of a layer's forward pass; arguments as of `forward`."""
        spec = self.layers[layer - 1]
        numbers = _over(self._passed(spec.kind)[0], spec, rows, sources, edges)
        numbers = numbers + self._ends(layer)[0] * rows * spec.h_out
        if spec.middle and spec.projects_first:
            numbers = numbers + (passes.BIAS[0] + passes.RELU[0]) * rows * spec.middle
        elif spec.middle and self.in_place:
            numbers = numbers + passes.RELU[0] * rows * spec.middle
        if self.in_place and spec.matrices > 1 and not spec.projects_first:
            numbers = numbers - passes.SUM * rows * spec.h_out  # of both products
        numbers = numbers + passes.COPY * self._copied(layer, rows, 0.0 if narrow else sources)
        if narrow:
            return numbers
        if spec.norm == "batch":
            numbers = numbers + passes.MOMENTS[0] * rows * spec.h_in
        return numbers + self._before_gather(spec, True)[0] * sources

    def _passed(self, kind: passes.Kind) -> tuple[passes.Passes, passes.Passes]:
        """Passes of a kind's own; GPUs make sums of two rows where they gather rows."""
        forward, backward = kind.forward, kind.backward
        if not (self.on_gpu and forward.pairs):
            return forward, backward
        return forward._replace(pairs=0.0), backward._replace(pairs=passes.PAIRS_GATHERED)

    @property
    def _gradient_copied(self) -> int:
        """Passes over the gradient of a product's input, to put it into place."""
        return 0 if self.in_place else passes.COPY

    def _copied(self, layer: int, rows: Number, sources: Number) -> Number:
        """Results of products that are copied into place, in the forward pass of a layer."""
        spec = self.layers[layer - 1]
        if not self.by_pieces or self.reads_sparse(layer):
            return 0.0
        of_sources = spec.multiplied * (spec.projects_first and spec.matrices > 0)
        of_rows = spec.h_out * bool(spec.residual and spec.residual.linear)
        if spec.middle:
            of_rows += spec.h_out + spec.middle * (not spec.projects_first)
        elif spec.matrices > spec.projects_first:
            of_rows += spec.h_out
        return of_sources * sources + of_rows * rows

    def backward_numbers(
        self, layer: int, rows: Number, sources: Number, edges: Number, narrow: bool
    ) -> Number:
        """Of a layer's backward pass; arguments as of `forward`."""
        spec, varies = self.layers[layer - 1], layer > self.first_varying
        numbers = _over(self._passed(spec.kind)[1], spec, rows, sources, edges)
        numbers = numbers + self._ends(layer)[1] * rows * spec.h_out
        if spec.middle:
            per_number = passes.RELU[1] + passes.BIAS[1] + self._gradient_copied
            numbers = numbers + per_number * rows * spec.middle
        among, residual = spec.put_among, spec.residual
        if varies:
            products = spec.matrices - (spec.matrices > 0 and spec.projects_first)
            own = self._gradient_copied * (products + bool(residual and residual.linear))
            own += passes.SUM * (spec.kind.own + bool(residual) - among)
            numbers = numbers + own * rows * spec.h_in
        if narrow:
            return numbers
        if varies:
            of_own, of_sources = passes.AMONG
            numbers = numbers + among * (of_own * rows + of_sources * sources) * spec.h_in
        if spec.norm == "batch":
            numbers = numbers + passes.MOMENTS[1] * rows * spec.h_in
        return numbers + self._before_gather(spec, varies)[1] * sources

    def project_numbers(self, spec: Layer, rows: Number) -> tuple[Number, Number]:
        """Of a narrow layer's preparation and projection of a rank's own rows."""
        forward, backward = self._before_gather(spec, True)
        forward += passes.COPY * self.by_pieces * spec.multiplied
        return forward * rows, (backward + spec.put_among * sum(passes.AMONG) * spec.h_in) * rows

    def encode_numbers(self, rows: Number) -> tuple[Number, Number]:
        """Of the encoder."""
        assert self.encoder
        relu, numbers = self.relu_after(0), rows * self.encoder[1]
        apart = self.nonzeros > 0  # the product of dense features has bias and ReLU in it
        copied = passes.COPY * self.by_pieces * (not apart)
        both_gradients = passes.SUM * self.hands_on_initial  # of h_0 and of the initial rows
        return (
            (passes.BIAS[0] * apart + passes.RELU[0] * relu * (apart or self.in_place) + copied)
            * numbers,
            (passes.BIAS[1] + passes.RELU[1] * relu + both_gradients) * numbers,
        )

    def decode_numbers(self, rows: Number) -> tuple[Number, Number]:
        """Of the decoder, with what is done to its inputs."""
        assert self.decoder and self.decoder_inputs
        forward, backward = self._prepares(self.decoder_inputs)
        if self.decoder_inputs.norm == "batch":
            forward, backward = forward + passes.MOMENTS[0], backward + passes.MOMENTS[1]
        h_in, h_out = self.decoder
        backward += self._gradient_copied
        copied = passes.COPY * self.by_pieces * h_out
        return (forward * h_in + copied) * rows, (backward * h_in + passes.BIAS[1] * h_out) * rows

    def _before_gather(self, spec: Layer, varies: bool) -> tuple[float, float]:
        """Per source row: norm, activation, dropout and projection."""
        forward, backward = self._prepares(spec)
        backward += self._gradient_copied * spec.projects_first
        of_projected = spec.kind.project
        return (
            forward * spec.h_in + of_projected[0] * spec.projected,
            backward * spec.h_in * varies + of_projected[1] * spec.projected,
        )

    def _prepares(self, spec: Layer) -> passes.Both:
        """Per number of the inputs: norm, activation and dropout."""
        forward, backward = passes.ACTIVATE[spec.norm] if spec.activates else (0, 0)
        return forward, backward + self.masked * bool(self.dropout and spec.drops)

    def _ends(self, layer: int) -> passes.Both:
        """Per number of the outputs: bias, ReLU and residual."""
        spec, relu = self.layers[layer - 1], self.relu_after(layer)
        kind, residual = spec.kind, spec.residual
        multiplied = kind.multiplies_last or (spec.matrices > 0 and not spec.projects_first)
        fuses = kind.fuses and not self.in_place
        inside = multiplied and fuses and not (residual and not residual.after_relu)
        biases = spec.bias + bool(residual and residual.linear and residual.bias)
        return (
            passes.BIAS[0] * (spec.bias and not multiplied)
            + passes.RELU[0] * (relu and not inside)
            + passes.SUM * bool(residual),
            passes.BIAS[1] * biases + passes.RELU[1] * relu,
        )


def _over(over: passes.Passes, spec: Layer, rows: Number, sources: Number, edges: Number) -> Number:
    """Numbers of a layer's tensors, each as often as it is passed."""
    return (
        rows * over.outputs * spec.h_out
        + sources * (over.inputs * spec.h_in + over.projected * spec.h_out)
        + (edges + rows) * over.pairs * spec.h_out
    )


def describe(workload: Workload, features: int, classes: int, nonzeros: float = 0.0) -> Model:
    """The shapes of a workload's model on a graph with so many feature columns and classes.

    nonzeros: numbers in a row of sparse features, on average; 0: the features are dense. Link
    prediction reads rows of the last layer that are as wide as hidden ones, whatever the classes.

    >>> model = describe(Workload(layers=3, hidden=16), 40, 5)
    >>> [(layer.h_in, layer.h_out) for layer in model.layers]
    [(40, 16), (16, 16), (16, 5)]
    """
    classes = workload.hidden if workload.task == "link" else max(classes, 1)
    architecture, module = ARCHITECTURES[workload.model], workload.module
    layers = _as_in_module(architecture.layers(workload, features, classes, nonzeros > 0), module)
    jump = module.jump if module else None
    decoder = (workload.hidden, classes) if architecture.encodes else None
    ends = module is not None and module.ends
    if (jump and jump.of == "sum" and jump.linear) or ends:
        decoder = (layers[-1].h_out, classes)
    return Model(
        layers=layers,
        encoder=(features, workload.hidden) if architecture.encodes else None,
        decoder=decoder,
        dropout=workload.dropout,
        itemsize=workload.itemsize,
        weight_itemsize=workload.weight_itemsize,
        features=features,
        classes=classes,
        hands_on_initial=architecture.hands_on_initial,
        norm=_norm_of(workload),
        activates_last=architecture.activates_last or ends,
        nonzeros=nonzeros,
        redrawn=workload.mode == "mini",
        relu=architecture.relu and (module is None or module.relu),
        jump=jump,
        ends=ends,
    )


def _norm_of(workload: Workload) -> str:
    return workload.norm or ("layer" if workload.model == "resgcn" else "none")


def _gcn_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Kipf and Welling 2017: a matrix W and a bias per layer."""

    def layer(h_in: int, h_out: int, projects_first: bool) -> Layer:
        return Layer(h_in, h_out, 1, h_in * h_out + h_out, True, projects_first)

    return _convolutions(layer, workload, features, classes, sparse)


def _sage_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Hamilton et al. 2017: a matrix for neighbours, a matrix for the own row, and a bias."""

    def layer(h_in: int, h_out: int, projects_first: bool) -> Layer:
        weights = 2 * h_in * h_out + h_out
        return Layer(h_in, h_out, 2, weights, False, projects_first, kind=passes.SAGE)

    return _convolutions(layer, workload, features, classes, sparse)


def _convolutions(
    convolution: Callable[[int, int, bool], Layer],
    workload: Workload,
    features: int,
    classes: int,
    sparse: bool,
) -> Sequence[Layer]:
    """Layers that project first where that narrows the rows (h_in, h_out, projects_first).

    The first one does not where its aggregate is cached, and always does on sparse features."""
    layers: list[Layer] = []
    for h_in, h_out in _widths(workload, features, classes):
        projects_first = h_out < h_in
        if not layers:
            projects_first = sparse or (projects_first and not _caches_aggregate(workload))
        layers.append(convolution(h_in, h_out, projects_first))
    return _normalised(layers, workload)


def _own_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Layers of the user's own."""
    assert workload.module is not None
    layers = []
    for own, (h_in, h_out) in zip(
        workload.module.layers, _widths(workload, features, classes), strict=True
    ):
        counted = own.counted
        if h_in < own.h_in and own.half and counted:  # P3 cuts its columns
            counted = between(own.half, counted, own.h_in // 2 / own.h_in, h_in / own.h_in)
        assert counted is not None
        self_edges = counted.edges in ("gcn", "loop")
        layers.append(
            Layer(
                h_in,
                h_out,
                1,
                counted.weights,
                self_edges,
                counted.projects_first,
                norm=own.norm,
                counted=counted,
            )
        )
    return layers


def _gat_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Velickovic et al. 2018: W, an attention vector of two numbers per output, and a bias.

    The last layer has one head."""
    layers = [
        Layer(
            h_in,
            h_out,
            1,
            h_in * h_out + 3 * h_out,
            True,
            True,
            heads=workload.heads,
            kind=passes.GAT,
        )
        for h_in, h_out in _widths(workload, features, classes)
    ]
    layers[-1] = replace(layers[-1], heads=1)
    return _normalised(layers, workload)


def _gatv2_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Brody et al. 2022: W and a bias for sources, W and a bias for readers, an attention vector of
    a number per output, and a bias.

    The last layer has one head."""
    layers = [
        Layer(
            h_in,
            h_out,
            1,
            2 * (h_in * h_out + h_out) + 2 * h_out,
            True,
            True,
            heads=workload.heads,
            pairs=True,
            kind=passes.GATV2,
        )
        for h_in, h_out in _widths(workload, features, classes)
    ]
    layers[-1] = replace(layers[-1], heads=1)
    return _normalised(layers, workload)


def _gin_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Xu et al. 2019: a perceptron of two matrices and two biases, hidden rows between them."""
    own = iter(workload.module.layers if workload.module else ())

    def layer(h_in: int, h_out: int, projects_first: bool) -> Layer:
        middle = next(own).middle if workload.module else workload.hidden
        weights = h_in * middle + middle + middle * h_out + h_out
        return Layer(h_in, h_out, 1, weights, True, projects_first, middle=middle, kind=passes.GIN)

    return _convolutions(layer, workload, features, classes, sparse)


def _sgc_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Wu et al. 2019: the first layer has the matrix, the last one the bias; all aggregate."""
    first = Layer(
        features,
        classes,
        1,
        features * classes,
        True,
        sparse or (classes < features and not _caches_aggregate(workload)),
        bias=False,
    )
    following = Layer(classes, classes, 0, 0, True, False, drops=False, bias=False)
    layers = [first, *[following] * (workload.layers - 1)]
    layers[-1] = replace(layers[-1], weights=layers[-1].weights + classes, bias=True)
    return layers


def _gcnii_layers(workload: Workload, features: int, classes: int, sparse: bool) -> Sequence[Layer]:
    """Chen et al. 2020: a matrix per layer, and no bias."""
    hidden = workload.hidden
    layer = Layer(hidden, hidden, 1, hidden * hidden, True, False, bias=False, kind=passes.GCNII)
    return [layer] * workload.layers


def _resgcn_layers(
    workload: Workload, features: int, classes: int, sparse: bool
) -> Sequence[Layer]:
    """Li et al. 2020 (DeeperGCN, Res+): from layer 2 on a layer activates and drops its inputs."""
    hidden, kinds, sums = workload.hidden, (passes.GEN_FIRST, passes.GEN), 1
    if workload.aggregation == "softmax":
        kinds, sums = (passes.with_softmax(kinds[0]), passes.with_softmax(kinds[1])), 2
    weights = hidden * hidden + hidden
    first = Layer(hidden, hidden, 1, weights, False, False, sums, drops=False, kind=kinds[0])
    following = replace(_activating(first, _norm_of(workload)), kind=kinds[1])
    return [first, *[following] * (workload.layers - 1)]


def _widths(workload: Workload, features: int, classes: int) -> list[tuple[int, int]]:
    """(H_in, H_out) of each layer of a model without encoder and decoder."""
    if workload.module:
        return list(pairwise([features, *(layer.h_out for layer in workload.module.layers)]))
    return list(pairwise([features, *[workload.hidden] * (workload.layers - 1), classes]))


def _caches_aggregate(workload: Workload) -> bool:
    """Whether layer 1 multiplies an aggregate that is computed once (Model.aggregate_cached)."""
    drops = workload.module is None or workload.module.layers[0].drops
    return not (workload.dropout and drops) and workload.mode != "mini"


def _normalised(layers: Sequence[Layer], workload: Workload) -> Sequence[Layer]:
    """The layers with the workload's norm, if any, before all but the first."""
    norm = _norm_of(workload)
    if norm == "none" or workload.module:  # a module has norms of its own
        return layers
    return [layers[0], *(_activating(layer, norm) for layer in layers[1:])]


def _as_in_module(layers: Sequence[Layer], module: Module | None) -> tuple[Layer, ...]:
    """The layers with a user's module's own norms, heads, dropout and biases."""
    if module is None or module.cut:  # whose layers are counted with all that they do
        return tuple(layers)
    out = []
    for layer, own in zip(layers, module.layers, strict=True):
        changed = layer if own.norm == "none" else _activating(layer, own.norm)
        more = -layer.h_out if layer.bias and not own.bias else 0
        if own.residual and own.residual.linear:
            more += (layer.h_in + own.residual.bias) * layer.h_out
        out.append(
            replace(
                changed,
                drops=own.drops,
                heads=own.heads,
                bias=layer.bias and own.bias,
                weights=changed.weights + more,
                residual=own.residual,
            )
        )
    return tuple(out)


def _activating(layer: Layer, norm: str) -> Layer:
    """The layer with norm and activation of its inputs; a norm has two weights per column."""
    return replace(
        layer,
        activates=True,
        drops=True,
        norm=norm,
        weights=layer.weights + (2 * layer.h_in if norm != "none" else 0),
    )


@dataclass(frozen=True)
class Architecture:
    """A kind of model: its layers, and what surrounds them."""

    layers: Callable[[Workload, int, int, bool], Sequence[Layer]]  # features, classes, sparse
    encodes: bool = False  # an encoder before the first layer, a decoder after the last
    hands_on_initial: bool = False
    activates_last: bool = False
    relu: bool = True


ARCHITECTURES = {
    "gcn": Architecture(_gcn_layers),
    "sage": Architecture(_sage_layers),
    "gat": Architecture(_gat_layers),
    "gatv2": Architecture(_gatv2_layers),
    "gin": Architecture(_gin_layers),
    "own": Architecture(_own_layers),
    "sgc": Architecture(_sgc_layers, relu=False),
    "gcnii": Architecture(_gcnii_layers, encodes=True, hands_on_initial=True),
    "resgcn": Architecture(_resgcn_layers, encodes=True, activates_last=True),
}
