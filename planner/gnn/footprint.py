"""Memory that one layer needs while it is trained: activations, gradients and temporaries.

A layer's forward and backward pass are played on a tape of bytes. Each line allocates what an
operation of the executor allocates (executor/layers), or frees what is let go. The most that was
held at any time is what the layer needs.

    forward    prepare | project | gather | update      kept: what autograd saves, and the output
    backward   update  | gather  | project | prepare    gradients appear, what was saved is freed

Each kind of layer is a class with these two passes (`KINDS`). Sizes are in bytes and may be arrays
over ranks: `r_in` is R rows of H_in numbers, `s_out` is S rows of H_out numbers (R destinations,
S sources, E edges). model.py describes what a layer computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gnnplan.planner.gnn.counted import Event, amount
from gnnplan.planner.gnn.model import EDGE_NUMBERS, Layer, Model
from gnnplan.planner.gnn.workload import Residual
from gnnplan.planner.vocabulary.numbers import Number

# [B] of libraries and context in a process that has done nothing yet
RUNTIME = {"cpu": 300e6, "cuda": 800e6}
# [B] of NCCL's own buffers for a communicator, which torch does not count. They grow with its
# channels, of which NVLink has many and PCIe few (github.com/NVIDIA/nccl, issue 986): two A100s
# with NVLink took 544 MB, four 688 MB (issue 964).
COMMUNICATOR = 300e6
# Numbers of a product's operands that its backward pass reads at a time (the executor's products
# work block by block), by their bytes: where they take 2, a product is so fast that small blocks
# cost time.
BLOCK = {2: 2_048_000, 4: 512_000, 8: 512_000}
INDEX = 4  # [B] of an index of ours
LONG = 8  # [B] of an index that torch wants in 64 bits
BAG = 8  # [B] that embedding_bag keeps of each row that it aggregates: two numbers
# Rows of the smallest piece that gets machine code of its own, where row counts vary from step to
# step.
LEAST = 128


def block_rows(h_in: int, h_out: int, itemsize: int) -> int:
    """Rows that the backward pass of a product [., h_in] -> [., h_out] reads at a time."""
    return max(1000, BLOCK[itemsize] // (h_in + h_out))


def summing(rows: Number, width: int, itemsize: int) -> Number:
    """Room that torch takes on a GPU while it adds up rows of so many numbers [B].

    Blocks of threads share the rows, and leave their sums there for the last of them: each thread
    adds at least 16 rows, and at most 256 where rows are plenty. It is setReduceConfig of torch's
    aten/src/ATen/native/cuda/Reduce.cuh, with the threads of an H100. Of 20,000 rows of 256 numbers
    an H200 took 41.03 MB.
    """
    together = next(many for many in (4, 2, 1) if width % many == 0)  # columns of a thread
    columns, threads = width // together, 512 // together
    across = min(32, 1 << columns.bit_length() - 1)
    each = np.ceil(rows / (threads // across))  # rows of a thread, were there one block of them
    fill = np.ceil(132 * (2048 // threads) / np.ceil(columns / across))  # blocks that fill the GPU
    blocks = np.maximum(np.minimum(fill, np.ceil(each / 16)), np.ceil(each / 256))
    return np.where(each < 256, 0.0, blocks * width * across * together * itemsize)


class Tape:
    """Bytes held now, and the most that ever were."""

    def __init__(self) -> None:
        self.now: Number = 0.0
        self.most: Number = 0.0

    def take(self, *sizes: Number) -> None:
        """Allocate."""
        for size in sizes:
            self.now = self.now + size
        self.most = np.maximum(self.most, self.now)

    def free(self, *sizes: Number) -> None:
        for size in sizes:
            self.now = self.now - size

    def touch(self, *sizes: Number) -> None:
        """Allocate together, and free at once."""
        self.take(*sizes)
        self.free(*sizes)


@dataclass(frozen=True, eq=False)
class Product:
    """A product of `rows` rows of h_in numbers with a matrix [h_in, h_out]."""

    rows: Number
    h_in: int
    h_out: int
    varies: bool = True  # the rows get a gradient
    # What follows the product ('bias', 'bias relu', ''). oneDNN makes code for each separately.
    after: tuple[str, ...] = ("bias",)

    def shapes(self, rows: int, itemsize: int, vary: bool = False) -> Iterator[tuple[object, ...]]:
        """Shapes of all products of one rank, forward and backward, of numbers of so many bytes.

        vary: row counts differ from step to step, so the executor cuts rows in pieces of few
        sizes: whole blocks, and powers of two of LEAST rows."""
        if not rows:
            return
        block = block_rows(self.h_in, self.h_out, itemsize)
        if vary:
            left = (rows % block) // LEAST
            powers = [LEAST << bit for bit in range(left.bit_length()) if left >> bit & 1]
            for piece in [block] * (rows >= block) + powers:
                yield from self._forward_shapes(piece)
                yield from self._backward_shapes(piece)
            return
        yield from self._forward_shapes(rows)
        blocks = {rows}
        if rows > block:
            blocks = {block, rows % block or block}
        for piece in blocks:
            yield from self._backward_shapes(piece)

    def _forward_shapes(self, rows: int) -> Iterator[tuple[object, ...]]:
        yield from ((rows, self.h_in, self.h_out, after) for after in self.after)

    def _backward_shapes(self, rows: int) -> Iterator[tuple[object, ...]]:
        yield self.h_out, rows, self.h_in, "weight"
        if self.varies:
            yield rows, self.h_out, self.h_in, ""


def distinct(
    products: Iterable[Product], ranks: int, itemsize: int, vary: bool = False
) -> np.ndarray:
    """How many different shapes the products have, on each rank [ranks].

    A product's rows are [ranks], or [pieces, ranks] where it is done piece by piece."""
    shapes_by_rank: list[set[tuple[object, ...]]] = [set() for _ in range(ranks)]
    for product in products:
        for piece in np.reshape(np.ceil(product.rows), (-1, ranks)):
            for shapes, rows in zip(shapes_by_rank, piece, strict=True):
                shapes.update(product.shapes(int(rows), itemsize, vary))
    return np.array([len(shapes) for shapes in shapes_by_rank])


@dataclass(frozen=True)
class Footprint:
    """Memory of one layer [B], without its source rows and the gradient of its output."""

    kept: Number  # from its forward to its backward pass, with its output
    forward: Number  # the most in its forward pass
    backward: Number  # the most in its backward pass, which begins with what was kept
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Prepared:
    """Sizes of what `prepare` makes of a layer's input rows [B]."""

    rows: Number  # the inputs themselves
    norm: str
    normed: Number  # saved by the norm
    active: Number  # rows after ReLU, which saves them
    mask: Number  # of dropout
    dropped: Number  # rows after dropout

    @staticmethod
    def of(model: Model, spec: Layer, n: Number, width: float | None = None) -> Prepared:
        """Sizes for n rows of `width` numbers (default: H_in; of sparse rows, those stored)."""
        width = spec.h_in if width is None else width
        rows = n * width * model.itemsize
        drops = model.dropout > 0 and spec.drops
        normed = {"none": 0.0 * rows, "layer": 2 * n * model.itemsize, "batch": rows}[spec.norm]
        return Prepared(
            rows,
            spec.norm,
            normed * spec.activates,
            rows * spec.activates,
            n * width * drops * (not model.on_gpu),
            rows * drops,
        )

    @property
    def saved(self) -> Number:
        return self.normed + self.active + self.mask

    def forward(self, tape: Tape) -> None:
        tape.take(self.normed, self.active, self.mask, self.dropped)

    def backward(self, tape: Tape) -> None:
        """From the gradient of the prepared rows, on the tape, to that of the inputs."""
        if np.any(self.dropped):
            tape.touch(self.rows)
            tape.free(self.mask)
        if np.any(self.active):
            tape.touch(self.rows)
            tape.free(self.active)
            tape.touch({"none": 0, "layer": 1, "batch": 3}[self.norm] * self.rows)
            tape.free(self.normed)


class LayerPasses:
    """A layer's forward and backward pass on a tape.

    A subclass is a kind of layer. It plays what the kind does between `prepare` and the output, and
    back; this class plays what all kinds have in common around that."""

    def __init__(
        self,
        model: Model,
        layer: int,
        rows: Number,
        sources: Number,
        edges: Number,
        narrow: bool,
        local: Number,
        apart: bool,
    ) -> None:
        spec, itemsize = model.layers[layer - 1], model.itemsize
        self.spec, self.itemsize, self.apart, self.local = spec, itemsize, apart, local
        self.weight_itemsize, self.in_place = model.weight_itemsize, model.in_place
        self.redrawn = model.redrawn
        self.on_gpu, self.bag = model.on_gpu, BAG * (not model.on_gpu)
        # [B] of a rounded number while it is added up, in the type of weights; 0: rows are not
        # rounded
        self.unrounded = model.weight_itemsize * (model.itemsize < model.weight_itemsize)
        self.rows, self.sources = rows, sources
        self.edges = edges + rows if spec.self_edges else edges
        self.narrow = narrow and model.narrow_at(layer)
        self.varies, relu = layer > model.first_varying, model.relu_after(layer)
        # of what the kind computes; or of its sum with the residual
        self.relu = relu and (spec.residual is None or spec.residual.after_relu)
        self.relu_on_sum = relu and not self.relu
        self.sparse, self.nonzeros = model.reads_sparse(layer), model.nonzeros
        self.r_in, self.r_out = rows * spec.h_in * itemsize, rows * spec.h_out * itemsize
        self.s_in, self.s_out = sources * spec.h_in * itemsize, sources * spec.h_out * itemsize
        self.projected = sources * spec.projected * itemsize
        prepared_rows = 0.0 * rows if apart else local if self.narrow else sources
        width = model.nonzeros if self.sparse else spec.h_in
        self.prepared = Prepared.of(model, spec, prepared_rows, width)
        # the aggregate, unless it is made outside autograd
        outside = apart or model.aggregate_cached(layer)
        self.gathered = 0.0 * self.r_in if outside else self.r_in
        # the gradient before ReLU
        self.before_relu = self.r_out if self.relu else 0.0 * self.r_out

    @property
    def after_product(self) -> tuple[str, ...]:
        """What follows each product of destination rows (Product.after)."""
        return ("bias relu" if self.relu else "bias" if self.spec.bias else "",)

    @property
    def own_matrix(self) -> bool:
        """Whether autograd saves the prepared rows though the layer aggregates first: a second
        matrix multiplies the destinations' own (GraphSAGE)."""
        return self.spec.matrices > 1

    @property
    def products(self) -> tuple[Product, ...]:
        """The products that oneDNN makes code for: of source rows, of destination rows."""
        spec, first = self.spec, self.spec.projects_first
        products = []
        if first and not self.sparse:
            rows = self.local if self.narrow else self.sources
            after = "bias" if spec.pairs else ""
            products.append(Product(rows, spec.h_in, spec.multiplied, self.varies, (after,)))
        if (spec.matrices and not first) or (self.own_matrix and not self.sparse):
            products.append(
                Product(self.rows, spec.h_in, spec.h_out, self.varies, self.after_product)
            )
        return tuple(products)

    def forward(self, tape: Tape) -> None:
        self.prepared.forward(tape)
        if not self.varies:
            tape.free(self.prepared.mask)
        if self.narrow:
            tape.take(self.local * self.spec.projected * self.itemsize)
        self.compute(tape)
        self.add_residual(tape)
        # a product saves the rows that it reads
        if not (self.spec.projects_first or self.own_matrix or self.residual_saves):
            tape.free(self.prepared.dropped)

    @property
    def residual_saves(self) -> bool:
        """Whether the residual's product, and no other, saves the prepared rows."""
        residual = self.spec.residual
        own = residual is not None and residual.linear and residual.of == "prepared"
        return own and not (self.spec.projects_first or self.own_matrix)

    def add_residual(self, tape: Tape) -> None:
        """From what the kind computes to its sum with the residual."""
        residual = self.spec.residual
        if residual:
            product = self.r_out * residual.linear
            tape.touch(self.passing, product, self.r_out)
            tape.take(self.r_out * self.relu)  # ReLU saves what it makes

    @property
    def passing(self) -> Number:
        """The aggregate while the residual is added, where nothing saves it."""
        return 0.0

    def backward(self, tape: Tape) -> None:
        """Own rows are a slice of the rows read; a slice's gradient is as large as the whole.

        GraphSAGE that aggregates first adds it to the aggregate's (`aggregate_beside`)."""
        residual = self.spec.residual
        if residual:
            self.residual_backward(tape, residual.linear)
        own: Number = 0.0
        if residual and self.spec.projects_first:  # nothing but a bias comes after the gather
            own = self.own_backward(tape, residual)
        self.compute_backward(tape)
        if residual and not self.spec.projects_first:
            own = self.own_backward(tape, residual)
        tape.free(self.r_out * self.relu_on_sum)
        if self.narrow:
            tape.take(self.prepared.rows)
            tape.touch(self.projection(self.local))
            tape.touch(self.prepared.rows if self.own_matrix else 0.0)  # own rows' gradient
            tape.free(self.prepared.dropped)
            self.prepared.backward(tape)
        elif self.varies and not self.apart:
            self.scatter_gradient(tape)
            tape.free(own)
            self.prepared.backward(tape)

    @property
    def residual_products(self) -> tuple[Product, ...]:
        """The residual's product, as `products`."""
        spec, residual = self.spec, self.spec.residual
        if not (residual and residual.linear) or self.sparse:
            return ()
        after = ("bias" if residual.bias else "",)
        return (Product(self.rows, spec.h_in, spec.h_out, self.varies, after),)

    def residual_backward(self, tape: Tape, linear: bool) -> None:
        """From the gradient of the sum to those of its terms."""
        tape.take(self.r_out * self.relu_on_sum)
        if linear:
            tape.take(self.r_in * self.varies)
            temporaries = self._temporaries(
                self.rows, self.spec.h_in, self.spec.h_out, False, varies=self.varies
            )
            bias = self.spec.residual is not None and self.spec.residual.bias
            tape.touch(temporaries + self.of_bias * bias)
            tape.free(self.prepared.dropped * self.residual_saves)

    def own_backward(self, tape: Tape, residual: Residual) -> Number:
        """From the gradient of own rows to that of the rows that they are a slice of.

        Returns the bytes of this gradient that are added to the prepared rows' and freed."""
        prepared = residual.of == "prepared"
        whole: Number = 0.0
        if self.varies and not (self.apart or self.narrow):
            whole = self.s_in * (not (self.own_matrix and prepared))
            tape.take(whole)
            tape.free(self.r_in * residual.linear)
        tape.free(self.r_out * self.relu)
        return whole * prepared

    def compute(self, tape: Tape) -> None:
        """From the prepared rows to the output."""
        raise NotImplementedError

    def compute_backward(self, tape: Tape) -> None:
        """From the gradient of the output to that of the aggregate or of the prepared rows."""
        raise NotImplementedError

    def scatter_gradient(self, tape: Tape) -> None:
        """From the aggregate's gradient to that of the rows read, over the transposed edges."""

    @property
    def _totals(self) -> Number:
        """A sum of exponentials per row and head."""
        return self.rows * self.spec.heads * self.weight_itemsize

    @property
    def _logits(self) -> Number:
        return self.edges * self.spec.heads * self.weight_itemsize

    def product(self, n: Number, through_relu: bool = False, matrices: int = 1) -> Number:
        """Temporaries of the backward pass of a product of n rows [B].

        They are a block of the rows, and `matrices` matrices that are transposed and added up; the
        sum over rows that is the gradient of a bias comes after them."""
        bias = self.summing(n, self.spec.multiplied) * self.spec.bias
        return self.projection(n, through_relu, matrices) + bias

    def projection(self, n: Number, through_relu: bool = False, matrices: int = 1) -> Number:
        """`product` before the rows are gathered, where no bias is added but GATv2's."""
        spec = self.spec
        if self.sparse:  # numbers in the order of columns, and the gradient before it is added
            numbers, matrix = n * self.nonzeros, spec.h_in * spec.multiplied
            in_order = numbers * (self.itemsize + self.unrounded)
            return matrix * self.itemsize + np.maximum(in_order, matrix * self.unrounded)
        temporaries = self._temporaries(
            n, spec.h_in, spec.multiplied, through_relu, matrices, self.varies
        )
        return temporaries + self.summing(n, spec.multiplied) * spec.pairs

    def _temporaries(
        self,
        n: Number,
        h_in: int,
        h_out: int,
        through_relu: bool,
        matrices: int = 1,
        varies: bool = True,
    ) -> Number:
        made_apart = max(h_in * varies, h_out) * (not self.in_place)
        read = n if self.on_gpu else np.minimum(n, block_rows(h_in, h_out, self.itemsize))
        block = read * (made_apart + h_out * through_relu)
        # per matrix its transpose and the sum of its gradients; and where it is not added in place,
        # the gradient of a block
        of_matrices = matrices * (self.itemsize + self.weight_itemsize)
        of_matrices += self.itemsize * (not self.in_place or self.unrounded > 0)
        return block * self.itemsize + h_in * h_out * of_matrices

    @property
    def of_bias(self) -> Number:
        """Room for the gradient of a bias of the outputs."""
        return self.summing(self.rows, self.spec.h_out)

    def summing(self, n: Number, width: int) -> Number:
        """Room for the sum of n rows, the gradient of a vector that was added to each or multiplied
        it."""
        return summing(n, width, self.weight_itemsize) * self.on_gpu


class AggregatesFirst(LayerPasses):
    """GCN, GraphSAGE and SGC: aggregate, then multiply."""

    @property
    def after_product(self) -> tuple[str, ...]:
        return ("bias", "") if self.own_matrix else super().after_product

    def compute(self, tape: Tape) -> None:
        tape.take(self.gathered, self.r_out)
        tape.touch(self.r_out if self.own_matrix and not self.in_place else 0.0)

    def compute_backward(self, tape: Tape) -> None:
        temporaries = self.product(self.rows, self.relu, self.spec.matrices)
        if not self.varies:
            tape.touch(temporaries)
            return
        tape.take(self.r_in, self.r_in if self.own_matrix else 0.0 * self.r_in)
        tape.touch(temporaries)
        tape.free(self.gathered)
        if self.own_matrix:
            tape.free(self.prepared.dropped)

    def scatter_gradient(self, tape: Tape) -> None:
        tape.take(self.s_in)
        tape.touch(self.bag * self.sources, self.edges * self.unrounded)
        tape.free(self.r_in * self.spec.matrices)


class AggregatesOnly(AggregatesFirst):
    """A layer of SGC without a matrix: the aggregate is the output, except for a bias."""

    def compute(self, tape: Tape) -> None:
        tape.take(self.gathered)
        tape.touch(self.bag * self.rows * (not self.apart))
        tape.take(self.r_out * self.spec.bias)
        tape.free(self.gathered * self.spec.bias)

    def compute_backward(self, tape: Tape) -> None:
        tape.take(self.r_in * self.apart)  # the output's gradient is that of the aggregate
        tape.touch(self.of_bias * self.spec.bias)


class ProjectsFirst(LayerPasses):
    """GCN, GraphSAGE and SGC: multiply, then aggregate."""

    @property
    def after_product(self) -> tuple[str, ...]:
        return ("bias",) if self.own_matrix else super().after_product

    @property
    def passing(self) -> Number:
        return self.r_out * self.spec.bias

    def compute(self, tape: Tape) -> None:
        projected = 0.0 if self.narrow else self.s_out
        updated = self.r_out if self.own_matrix or self.relu else 0.0
        tape.take(projected, self.r_out)
        tape.free(projected)
        tape.take(self.r_out * self.spec.bias, updated)
        tape.free(self.r_out * self.spec.bias, updated)

    def compute_backward(self, tape: Tape) -> None:
        s_in = self.s_in * self.varies
        tape.take(self.before_relu)
        tape.touch(self.of_bias * self.spec.bias)
        if self.own_matrix:
            tape.take(self.r_in * self.varies)
            tape.touch(self.product(self.rows))
            if not self.narrow:
                tape.touch(s_in)
                tape.take((self.s_in - self.r_in) * self.varies)
        tape.take(self.s_out)
        tape.touch(self.edges * self.unrounded)
        tape.free(self.before_relu)
        if not self.narrow:
            tape.take(s_in)
            tape.touch(self.projection(self.sources))
            tape.free(self.s_out, self.prepared.dropped, s_in * self.own_matrix)


class Attention(LayerPasses):
    """GAT. z are the projected rows; a logit per head and row goes with them."""

    @property
    def passing(self) -> Number:
        return self.r_out

    def compute(self, tape: Tape) -> None:
        if not self.narrow:
            tape.take(self.s_out)  # z
            tape.touch(self.s_out)  # z times the attention vector
            tape.take(self.projected)  # z beside its logits
        if self.on_gpu:
            tape.take(self.r_out, self._totals, self.r_out)  # outputs, and with the bias
            return
        # z head by head; slope and weight of every edge; the heads' outputs
        tape.take(self.s_out, self._edge_weights, self.r_out)
        beside = self.r_out * (self.spec.heads > 1)
        tape.take(beside, self.r_out)  # outputs side by side; with the bias
        tape.free(beside)

    def compute_backward(self, tape: Tape) -> None:
        spec, itemsize = self.spec, self.itemsize
        tape.take(self.before_relu)
        tape.touch(self.of_bias)
        if self.on_gpu:
            tape.take(self.s_out)
            tape.touch(self.r_out, self._logits)
            tape.free(self._totals, self.r_out, self.before_relu)
        else:
            # temporaries of one head
            tape.touch(
                (self.rows * (spec.heads > 1) + self.sources)
                * (spec.h_out / spec.heads)
                * itemsize,
                self.edges * (3 * LONG + 2 * itemsize),
                2 * self.rows * LONG,
            )
            # what the heads saved; gradients take the place of their rows
            tape.free(self._edge_weights, self.r_out, self.before_relu)
        tape.touch(self.s_out)  # gradients side by side, or those by the readers' logits
        tape.free(0.0 if self.narrow else self.projected)
        tape.take(self.projected)
        tape.free(self.s_out)
        if not self.narrow:
            # z's gradient by its own logits, and the vectors'
            tape.touch(self.s_out, self.s_out, self.summing(self.sources, spec.h_out))
            tape.free(self.projected)
            tape.take(self.s_in * self.varies)
            tape.touch(self.projection(self.sources))
            tape.free(self.prepared.dropped)

    @property
    def _edge_weights(self) -> Number:
        return 2 * self.edges * self.spec.heads * self.itemsize


class PairAttention(LayerPasses):
    """GATv2. A projected row is [z for readers' sums | for the reader's own logits]."""

    def compute(self, tape: Tape) -> None:
        if not self.narrow:
            tape.take(self.projected)
        tape.take(self._kept, self.r_out)
        if not self.on_gpu:
            tape.touch(self._one_head, INDEX * self.edges, 2 * self._sums)
        after = self.r_out * (self.spec.bias or self.relu)
        tape.take(after)

    def compute_backward(self, tape: Tape) -> None:
        tape.take(self.before_relu)
        tape.touch(self.of_bias * self.spec.bias)
        tape.take(self.projected)
        if self.on_gpu:
            tape.touch(self.r_out, self._logits)
        else:
            tape.take(self.edges * (LONG + INDEX))  # the order of edges by source, their readers
            # of one head: its rows, and products along edges; then their gradient, sums of rows
            head = self._one_head + self.r_out / self.spec.heads
            tape.touch(head, self.edges * 2 * (LONG + self.itemsize))
            tape.touch(2 * head, self.edges * self.itemsize, 3 * self._sums)
            tape.free(self.edges * (LONG + INDEX))
        after = self.r_out * (self.spec.bias or self.relu)  # else the aggregate is the output
        tape.free(self._kept, after, self.before_relu)
        if not self.narrow:
            tape.free(self.projected)
            tape.take(self.s_in * self.varies)
            tape.touch(self.projection(self.sources))
            tape.free(self.projected, self.prepared.dropped)

    @property
    def _one_head(self) -> Number:
        return self.s_out / self.spec.heads

    @property
    def _kept(self) -> Number:
        """From the forward to the backward pass, besides rows: per edge the weight of each head."""
        return self._totals if self.on_gpu else self.edges * self.spec.heads * self.itemsize

    @property
    def _sums(self) -> Number:
        """Sums of two rows, of as many edges as are taken together."""
        width = self.spec.h_out // self.spec.heads
        return np.minimum(self.edges, max(1, EDGE_NUMBERS["cpu"] // width)) * width * self.itemsize


class Perceptron(LayerPasses):
    """GIN: aggregate and two products, the first of which may come before the aggregate."""

    @property
    def r_middle(self) -> Number:
        return self.rows * self.spec.middle * self.itemsize

    @property
    def after_product(self) -> tuple[str, ...]:
        return ("bias relu",)

    @property
    def products(self) -> tuple[Product, ...]:
        spec = self.spec
        first = [replace(product, h_out=spec.middle) for product in super().products]
        second = Product(
            self.rows, spec.middle, spec.h_out, True, ("bias relu" if self.relu else "bias",)
        )
        return (*first, second)

    @property
    def passing(self) -> Number:
        return self.r_middle * self.spec.projects_first

    def compute(self, tape: Tape) -> None:
        if self.spec.projects_first:
            tape.take(0.0 if self.narrow else self.projected)
            tape.take(self.r_middle)
            tape.free(0.0 if self.narrow else self.projected)
            tape.take(self.r_middle)  # with bias and ReLU
        else:
            tape.take(self.gathered, self.r_middle)
        tape.take(self.r_out)
        tape.free(self.r_middle * self.spec.projects_first)

    def compute_backward(self, tape: Tape) -> None:
        spec = self.spec
        tape.take(self.r_middle)
        second = self._temporaries(self.rows, spec.middle, spec.h_out, self.relu)
        tape.touch(second + self.of_bias)
        if not spec.projects_first:
            first = self.product(self.rows, True)
            tape.take(self.r_in * self.varies)
            tape.touch(first)
            tape.free(self.gathered, 2 * self.r_middle)
            return
        tape.take(self.r_middle)  # before ReLU
        tape.touch(self.summing(self.rows, spec.middle))
        tape.free(2 * self.r_middle)
        tape.take(self.projected)
        tape.free(self.r_middle)
        if not self.narrow:
            tape.take(self.s_in * self.varies)
            tape.touch(self.projection(self.sources))
            tape.free(self.projected, self.prepared.dropped)

    def scatter_gradient(self, tape: Tape) -> None:
        if not self.spec.projects_first:
            tape.take(self.s_in)
            tape.touch(self.bag * self.sources)
            tape.free(self.r_in)


class ResidualBlock(LayerPasses):
    """ResGCN+: messages ReLU(x) summed or by a softmax, plus own rows, a product, plus inputs."""

    after_product = ("bias",)

    def compute(self, tape: Tape) -> None:
        activates, softmax = self.spec.activates, self.spec.sums > 1
        tape.take(0.0 if activates else self.s_in, self.s_in)  # ReLU, messages
        if softmax:
            tape.take(self.s_in)  # exponentials
            tape.touch(self.s_in)
            tape.take(self.r_in)  # their sums
            tape.touch(self.s_in, self.r_in)
            tape.take(self.r_in)
        else:
            tape.take(self.r_in)
            tape.free(self.s_in)
        tape.take(self.r_in, self.r_out)  # plus own rows; product
        tape.touch(self.r_out if activates else 0.0)  # plus inputs
        tape.free(0.0 if softmax else self.r_in)

    def compute_backward(self, tape: Tape) -> None:
        activates, softmax = self.spec.activates, self.spec.sums > 1
        own = self.r_in if self.apart else self.s_in
        tape.take(self.r_in)
        tape.touch(self.product(self.rows))
        tape.free(self.r_in)  # saved by the product
        tape.take(own * (1 + activates))  # gradients of own rows and of the residual
        if softmax:
            tape.touch(self.r_in, 3 * self.s_in)
            tape.free(2 * self.s_in, 2 * self.r_in)
        else:
            tape.touch(self.s_in)
        tape.free(self.r_in)
        if not activates:
            tape.touch(self.s_in, self.s_in)
            tape.free(own)


class Counted(LayerPasses):
    """A layer of the user's own, whose tensors were noted as they came and went."""

    @property
    def products(self) -> tuple[Product, ...]:
        assert self.spec.counted is not None
        return tuple(
            Product(
                amount(product.rows, self.rows, self.sources, self.edges),
                product.h_in,
                product.h_out,
                self.varies,
                (product.after,),
            )
            for product in self.spec.counted.products
        )

    @property
    def own_matrix(self) -> bool:
        return bool(self.spec.counted and self.spec.counted.keeps_inputs)

    def compute(self, tape: Tape) -> None:
        assert self.spec.counted is not None
        if self.redrawn:
            tape.touch(opening(self.on_gpu, self.spec, self.rows, self.sources, self.edges))
        self._play(tape, self.spec.counted.forward_events)

    def compute_backward(self, tape: Tape) -> None:
        assert self.spec.counted is not None
        self._play(tape, self.spec.counted.backward_events)
        tape.free(self.prepared.dropped * self.own_matrix)

    def _play(self, tape: Tape, events: Iterable[Event]) -> None:
        """Where a weighted sum is made outside autograd, its tensors are counted there."""
        assert self.spec.counted is not None
        for event in events:
            if not (self.apart and self.spec.counted.linear and event.of_gather):
                tape.take(amount(event.bytes, self.rows, self.sources, self.edges))


class InitialResidual(AggregatesFirst):
    """GCNII: the aggregate is mixed with initial rows, and with its own product."""

    after_product = ("",)

    def compute(self, tape: Tape) -> None:
        # mixed with initial rows, product, both
        tape.take(self.gathered, self.r_in, self.r_out, self.r_out)
        tape.free(self.gathered, self.r_out)

    def compute_backward(self, tape: Tape) -> None:
        tape.take(self.before_relu, 2 * self.r_in)
        tape.free(self.before_relu)
        tape.take(self.r_in)
        tape.touch(self.product(self.rows))
        tape.free(3 * self.r_in)
        tape.take(2 * self.r_in)
        tape.free(self.r_in)
        tape.touch(self.r_in)  # gradient of the initial rows
        tape.free(self.r_in)


KINDS = {
    "gat": Attention,
    "gatv2": PairAttention,
    "gin": Perceptron,
    "resgcn": ResidualBlock,
    "gcnii": InitialResidual,
    "own": Counted,
}


def gathers_linearly(kind: str, spec: Layer) -> bool:
    """Whether a layer's gathering is a weighted sum of rows."""
    if spec.counted:
        return spec.counted.linear
    return not spec.heads and kind != "resgcn"


def weighs_edges(kind: str, spec: Layer) -> bool:
    """Whether a layer's edges have weights: those of a mean, or GCN's norm."""
    if spec.counted:
        return spec.counted.edges in ("gcn", "mean")
    return kind not in ("gat", "gatv2", "gin", "resgcn")


def _kind_of(kind: str, spec: Layer) -> type[LayerPasses]:
    """The class of a layer: a layer of GCN, GraphSAGE or SGC is one of three."""
    if kind in KINDS:
        return KINDS[kind]
    if not spec.matrices:
        return AggregatesOnly
    return ProjectsFirst if spec.projects_first else AggregatesFirst


def footprint(
    kind: str,
    model: Model,
    layer: int,
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    narrow: bool = False,
    local: Number = 0.0,
    apart: bool = False,
) -> Footprint:
    """Memory of a layer of a `kind` of model (Workload.model).

    It has R `rows`, S `sources` and E `edges` (without self edges).

    narrow: its `local` source rows were prepared and projected before the exchange. apart: inputs
    are prepared in a segment of their own, and a gather that only weighs and adds is done outside
    autograd (GNNPipe)."""
    passes = _kind_of(kind, model.layers[layer - 1])(
        model, layer, rows, sources, edges, narrow, local, apart
    )
    tape = Tape()
    passes.forward(tape)
    kept, forward = tape.now, tape.most
    tape.most = tape.now
    passes.backward(tape)
    products = (*passes.products, *passes.residual_products)
    return Footprint(kept, forward, tape.most, products)


def block(
    kind: str, model: Model, spec: Layer, rows: Number, sources: Number, edges: Number
) -> Number:
    """Memory of a layer's edges [B].

    Edges are kept in both directions, with the place of each in the other direction, and their
    weights; sources are kept by id."""
    edges = edges + rows if spec.self_edges else edges
    weights = 2 * model.itemsize * weighs_edges(kind, spec)
    structure = amount(spec.counted.structure.kept, rows, sources, edges) if spec.counted else 0.0
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources + structure


def opening(on_gpu: bool, spec: Layer, rows: Number, sources: Number, edges: Number) -> Number:
    """The most memory while a user's module makes what it reads of a block's edges [B].

    The host makes it, so that a GPU has only what stays."""
    if spec.counted is None or on_gpu:
        return 0.0
    return amount(spec.counted.structure.most, rows, sources, edges)


def loss(model: Model, own: Number, trained: Number) -> tuple[Number, Number, Number]:
    """Memory of decoder and loss on a rank's `own` rows, of which `trained` are trained on [B].

    Returns (kept until the step ends, the most, the gradient of h_L)."""
    itemsize = model.itemsize
    tape = Tape()
    logits = own * model.classes * itemsize
    chosen = trained * model.classes * model.weight_itemsize  # the loss is not rounded
    if model.decoder is None:
        gradient = logits
        logits = 0.0 * logits  # h_L itself
        prepared = None
    else:
        spec = model.decoder_inputs
        assert spec is not None
        prepared = Prepared.of(model, spec, own)
        prepared.forward(tape)
        gradient = prepared.rows
    tape.take(logits, chosen, chosen)  # logits, those of training vertices, their log-softmax
    tape.take(chosen)
    tape.free(chosen, chosen)
    tape.take(own * model.classes * itemsize)
    tape.free(chosen)
    if prepared is not None:
        tape.take(gradient)
        tape.free(prepared.dropped)
        prepared.backward(tape)
    return logits, tape.most, gradient


def link_loss(
    model: Model, own: Number, edges: Number, negatives: int
) -> tuple[Number, Number, Number]:
    """Memory of decoder and link prediction's loss on a rank's `own` rows [B]; returns as `loss`.

    It is of so many edges, each with its negatives: rows of heads and of tails are picked, and
    multiplied pair by pair."""
    b, width = model.itemsize, model.classes
    rows, heads = own * width * b, edges * width * b
    tails, scores = heads * (1 + negatives), edges * (1 + negatives) * b
    tape = Tape()
    if model.decoder is None:
        kept, gradient, prepared = 0.0 * rows, rows, None  # h_L itself is scored
    else:
        spec = model.decoder_inputs
        assert spec is not None
        kept, prepared = rows, Prepared.of(model, spec, own)
        prepared.forward(tape)
        gradient = prepared.rows
    tape.take(kept, 8 * edges * (2 + negatives), heads, tails, scores, scores, scores)
    tape.take(heads, tails)  # gradients of what was picked
    tape.free(scores, heads, tails)
    tape.take(rows, rows)  # gradients of rows: by their being heads, and tails
    tape.free(heads, tails, rows)
    if prepared is not None:
        tape.take(gradient)
        tape.free(prepared.dropped)
        prepared.backward(tape)
    return kept, tape.most, gradient


@dataclass(frozen=True)
class Addition:
    """Memory of adding a layer's rows to the sum of all layers' [B]."""

    forward: Number  # the most in the forward pass, which keeps nothing
    backward: Number  # the most in the backward pass
    gradient: Number  # what it leaves: the gradient of the rows; 0 where it is that of the sum
    products: tuple[Product, ...]


def addition(model: Model, layer: int, own: Number) -> Addition:
    """Memory of adding a layer's rows, a rank's `own`, to the sum of all layers'."""
    if model.jump is None:
        return Addition(0.0, 0.0, 0.0, ())
    h_out, drops = model.layers[layer - 1].h_out, bool(model.jump.drops and model.dropout)
    rows, added = own * h_out * model.itemsize, own * model.jumped * model.itemsize
    dropped = (rows + own * h_out) * drops  # and their mask
    if model.jump.of == "sum":
        return Addition(dropped, dropped + rows * drops, rows * drops, ())
    after = "bias" if layer == len(model.layers) else ""
    product = Product(own, h_out, model.jumped, True, (after,))
    whole = np.inf if model.on_gpu else block_rows(h_out, model.jumped, model.itemsize)
    read = np.minimum(own, whole)
    block = read * max(h_out, model.jumped) * (not model.in_place)
    temporaries = (block + (3 - model.in_place) * h_out * model.jumped) * model.itemsize
    backward = dropped + added + rows + np.maximum(temporaries, rows * drops)
    return Addition(dropped + added, backward, rows, (product,))
