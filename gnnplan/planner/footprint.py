"""What a layer's tensors fill while it is trained: executor/models.py and kernels.py, played on a tape of bytes.

    forward    prepare | project | gather | update      kept: what autograd saves, and the output
    backward   update | gather | project | prepare      gradients come, what was saved goes

Every line takes what an operation allocates and frees what is let go; the most ever held is what the layer needs. Sizes [B] may be
arrays over ranks: r_in is R rows of H_in numbers, s_out S rows of H_out numbers (R destinations, S sources, E edges).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.gnn import Layer, Model

RUNTIME = {"cpu": 300e6, "cuda": 800e6}  # [B] libraries and context of a process that has done nothing yet
BLOCK = 512_000  # numbers of a product's operands that its backward pass looks at together (kernels._blocks)
LONG = 8  # [B] of an index that torch wants in 64 bits
BAG = 8  # [B] beside a row that is aggregated: two numbers of embedding_bag's own
KERNEL = 0.6e6  # [B] that oneDNN keeps of the code for a product, for every shape of it (measured; torch 2.13)
LEAST = 128  # rows of a piece for which oneDNN makes code, where rows vary (executor/kernels.py)


class Tape:
    """Bytes held now, and the most that ever were."""

    def __init__(self) -> None:
        self.now: Number = 0.0
        self.most: Number = 0.0

    def take(self, *sizes: Number) -> None:
        for size in sizes:
            self.now = self.now + size
        self.most = np.maximum(self.most, self.now)

    def free(self, *sizes: Number) -> None:
        for size in sizes:
            self.now = self.now - size

    def touch(self, *sizes: Number) -> None:
        """Taken and let go."""
        self.take(*sizes)
        self.free(*sizes)


@dataclass(frozen=True, eq=False)
class Product:
    """n rows of h_in numbers times a matrix, without and then also with a bias; the rows get a gradient if they vary."""

    rows: Number
    h_in: int
    h_out: int
    varies: bool = True
    after: tuple[str, ...] = ("bias",)  # of every such product: what follows it

    @property
    def block(self) -> int:
        """Rows that its backward pass looks at together (kernels._blocks)."""
        return max(1000, BLOCK // (self.h_in + self.h_out))

    def shapes(self, rows: int, vary: bool = False) -> Iterator[tuple[object, ...]]:
        """Of all products of one rank, forward and backward; where rows vary from step to step, by pieces of few sizes
        (kernels._pieces)."""
        if not rows:
            return
        if vary:
            left = (rows % self.block) // LEAST
            for piece in [self.block] * (rows >= self.block) + [LEAST << bit for bit in range(left.bit_length()) if left >> bit & 1]:
                yield from ((piece, self.h_in, self.h_out, after) for after in self.after)
                yield self.h_out, piece, self.h_in, "weight"
                if self.varies:
                    yield piece, self.h_out, self.h_in, ""
            return
        yield from ((rows, self.h_in, self.h_out, after) for after in self.after)
        for block in {min(rows, self.block), rows % self.block or self.block} if rows > self.block else {rows}:
            yield self.h_out, block, self.h_in, "weight"
            if self.varies:
                yield block, self.h_out, self.h_in, ""


def kernels(products: Iterable[Product], ranks: int, vary: bool = False) -> Number:
    """What oneDNN keeps of the code for them on every rank [B]; a product's rows are [ranks] or, one by one, [pieces, ranks]."""
    found: list[set[tuple[object, ...]]] = [set() for _ in range(ranks)]
    for product in products:
        for piece in np.reshape(np.ceil(product.rows), (-1, ranks)):
            for shapes, rows in zip(found, piece, strict=True):
                shapes.update(product.shapes(int(rows), vary))
    return KERNEL * np.array([len(shapes) for shapes in found], dtype=float)


@dataclass(frozen=True)
class Footprint:
    """Of one layer [B], beside its source rows and the gradient of its output."""

    kept: Number  # from its forward to its backward pass, its output included
    forward: Number  # the most in its forward pass
    backward: Number  # the most in its backward pass, which begins with what was kept
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Prepared:
    """What `prepare` makes of a layer's inputs [B]: saved by a norm, after ReLU (which saves it), dropout's mask, rows after dropout."""

    rows: Number  # the inputs themselves
    norm: str
    normed: Number
    active: Number
    mask: Number
    dropped: Number

    @staticmethod
    def of(model: Model, spec: Layer, n: Number) -> Prepared:
        """n rows."""
        return Prepared.on(model, spec, n, spec.h_in)

    @staticmethod
    def on(model: Model, spec: Layer, n: Number, width: float) -> Prepared:
        """n rows of so many numbers: of sparse ones dropout looks at these alone."""
        rows = n * width * model.itemsize
        drops = model.dropout > 0 and spec.drops
        normed = {"none": 0.0 * rows, "layer": 2 * n * model.itemsize, "batch": rows}[spec.norm] * spec.activates
        return Prepared(rows, spec.norm, normed, rows * spec.activates, n * width * drops, rows * drops)

    @property
    def saved(self) -> Number:
        return self.normed + self.active + self.mask

    def forward(self, t: Tape) -> None:
        t.take(self.normed, self.active, self.mask, self.dropped)

    def backward(self, t: Tape) -> None:
        """From the gradient of what was prepared, on the tape, to that of the inputs."""
        if np.any(self.mask):
            t.touch(self.rows)
            t.free(self.mask)
        if np.any(self.active):
            t.touch(self.rows)
            t.free(self.active)
            t.touch({"none": 0, "layer": 1, "batch": 3}[self.norm] * self.rows)
            t.free(self.normed)


def footprint(kind: str, model: Model, layer: int, rows: Number, sources: Number, edges: Number, *,
              narrow: bool = False, local: Number = 0.0, apart: bool = False) -> Footprint:  # fmt: skip
    """A layer of a `kind` of model (Workload.model) on R `rows`, S `sources` and E `edges` (without self edges).

    narrow: its `local` source rows were prepared and projected before the exchange. apart: inputs are prepared in a segment of
    their own, and where gathering only weighs and adds it is done beside autograd (GNNPipe).
    """
    spec, b = model.layers[layer - 1], model.itemsize
    heads, first, varies, relu = spec.heads, spec.projects_first, layer > model.first_varying, model.relu_after(layer)
    narrow = narrow and model.narrow_at(layer)
    edges = edges + rows if spec.self_edges else edges
    r_in, r_out, s_in, s_out = (n * width * b for n in (rows, sources) for width in (spec.h_in, spec.h_out))
    projected = sources * spec.projected * b
    sparse = model.reads_sparse(layer)
    made = Prepared.on(model, spec, 0.0 * rows if apart else local if narrow else sources, model.nonzeros if sparse else spec.h_in)
    gathered = 0.0 * r_in if model.aggregate_cached(layer) or (apart and not (heads or first or kind == "resgcn")) else r_in

    def product(n: Number, through_relu: bool = False, matrices: int = 1) -> Number:
        """What the backward pass of a product holds of a block of its n rows, and of matrices that are turned and added up."""
        block = np.minimum(n, Product(n, spec.h_in, spec.h_out).block) * (max(spec.h_in * varies, spec.h_out) + spec.h_out * through_relu)
        if sparse:  # numbers in the order of columns, and the gradient before it is added
            return (n * model.nonzeros + spec.h_in * spec.h_out) * b
        return (block + (2 * matrices + 1) * spec.h_in * spec.h_out) * b

    def forward(t: Tape) -> None:
        made.forward(t)
        if not varies:
            t.free(made.mask)
        if narrow:
            t.take(local * spec.projected * b)
        if kind == "gat":
            if not narrow:
                t.take(s_out)  # z
                t.touch(s_out)  # times the attention vector
                t.take(projected)  # z beside its logits
            t.take(s_out, 2 * edges * heads * b, r_out)  # z head by head; slope and weight of every edge; the heads' outputs
            t.take(r_out, r_out)  # side by side; plus bias
            t.free(r_out)
        elif kind == "resgcn":
            t.take(0.0 if spec.activates else s_in, s_in)  # ReLU, messages
            if spec.sums > 1:
                t.take(s_in)  # exponentials
                t.touch(s_in)
                t.take(r_in)  # their sums
                t.touch(s_in, r_in)
                t.take(r_in)
            else:
                t.take(r_in)
                t.free(s_in)
            t.take(r_in, r_out)  # plus own rows, product
            t.touch(r_out if spec.activates else 0.0)  # plus inputs
            t.free(0.0 if spec.sums > 1 else r_in)
        elif kind == "gcnii":
            t.take(gathered, r_in, r_out, r_out)  # mixed with initial rows, product, both
            t.free(gathered, r_out)
        elif not spec.matrices:  # what is gathered is the output, but for a bias
            t.take(gathered)
            t.touch(BAG * rows * (not apart))
            t.take(r_out * spec.bias)
            t.free(gathered * spec.bias)
        elif first:
            t.take(0.0 if narrow else s_out, r_out)
            t.free(0.0 if narrow else s_out)
            t.take(r_out * spec.bias, r_out if kind == "sage" or relu else 0.0)
            t.free(r_out * spec.bias, r_out if kind == "sage" or relu else 0.0)
        else:
            t.take(gathered, r_out)
            t.touch(r_out if kind == "sage" else 0.0)
        if not (first or kind == "sage"):  # no product saves the rows read
            t.free(made.dropped)

    def backward(t: Tape) -> None:
        """Own rows are a slice of the rows read; a slice's gradient is as large as the whole."""
        above = r_out if relu else 0.0 * r_out  # the gradient before ReLU
        if kind == "gat":
            t.take(above)
            t.touch((rows * (heads > 1) + sources) * (spec.h_out / heads) * b, edges * (3 * LONG + 2 * b), 2 * rows * LONG)  # of a head
            t.free(2 * edges * heads * b, r_out, above)  # what the heads saved; their rows give way to their gradients
            t.touch(s_out)  # these side by side, or the gradient by readers' logits
            t.free(0.0 if narrow else projected)
            t.take(projected)
            t.free(s_out)
            if not narrow:
                t.touch(s_out, s_out)  # z's by its own logits
                t.free(projected)
                t.take(s_in * varies)
                t.touch(product(sources))
                t.free(made.dropped)
        elif kind == "resgcn":
            t.take(r_in)
            t.touch(product(rows))
            t.free(r_in)  # saved by the product
            t.take((r_in if apart else s_in) * (1 + spec.activates))  # own rows' and the residual's gradient
            if spec.sums > 1:
                t.touch(r_in, 3 * s_in)
                t.free(2 * s_in, 2 * r_in)
            else:
                t.touch(s_in)
            t.free(r_in)
            if not spec.activates:
                t.touch(s_in, s_in)
                t.free(r_in if apart else s_in)
        elif kind == "gcnii":
            t.take(above, 2 * r_in)
            t.free(above)
            t.take(r_in)
            t.touch(product(rows))
            t.free(3 * r_in)
            t.take(2 * r_in)
            t.free(r_in)
            t.touch(r_in)  # initial rows'
            t.free(r_in)
        elif not spec.matrices:  # the output's gradient is that of what was gathered
            t.take(r_in * apart)
        elif first:
            t.take(above)
            if kind == "sage":
                t.take(r_in * varies)
                t.touch(product(rows))
                if not narrow:
                    t.touch(s_in * varies)
                    t.take((s_in - r_in) * varies)
            t.take(s_out)
            t.free(above)
            if not narrow:
                t.take(s_in * varies)
                t.touch(product(sources))
                t.free(s_out, made.dropped, s_in * (varies and kind == "sage"))
        elif varies:
            own = r_in if kind == "sage" else 0.0 * r_in
            t.take(r_in, own)
            t.touch(product(rows, relu, spec.matrices))
            t.free(gathered)
            if kind == "sage":
                t.free(made.dropped)
                if not apart:
                    t.take(s_in)
                    t.free(r_in)
        else:
            t.touch(product(rows, relu, spec.matrices))
        if not apart and varies and not narrow:
            if not (heads or first or kind == "resgcn"):
                t.take(s_in)  # rows read, through the transposed edges
                t.touch(BAG * sources)
                t.free(r_in * (spec.matrices > 0), s_in if kind == "sage" else 0.0)
            made.backward(t)
        elif narrow:
            t.take(made.rows)
            t.touch(product(local))
            t.touch(made.rows if kind == "sage" else 0.0)  # own rows'
            t.free(made.dropped)
            made.backward(t)

    t = Tape()
    forward(t)
    kept, most, t.most = t.now, t.most, t.now
    backward(t)
    ends = "bias relu" if relu else "bias" if spec.bias else ""
    last = {"sage": ("bias", "") if not first else ("bias",), "gcnii": ("",), "resgcn": ("bias",)}.get(kind, (ends,))
    before = [Product(local if narrow else sources, spec.h_in, spec.h_out, varies, ("",))] if first and not sparse else []
    after = [Product(rows, spec.h_in, spec.h_out, varies, last)] if (spec.matrices and not first) or (kind == "sage" and not sparse) else []
    return Footprint(kept, most, t.most, (*before, *after))


def block(kind: str, model: Model, spec: Layer, rows: Number, sources: Number, edges: Number) -> Number:
    """Edges in both directions, where an edge of one stands in the other, and their weights (kernels.Block); ids of the sources [B]."""
    edges = edges + rows if spec.self_edges else edges
    weights = 0 if kind in ("gat", "resgcn") else 2 * model.itemsize
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources


def loss(model: Model, own: Number, trained: Number) -> tuple[Number, Number, Number]:
    """Decoder and loss on a rank's `own` rows, `trained` of which are training vertices [B]: (kept until the step ends, the most, gradient
    of h_L)."""
    b = model.itemsize
    t = Tape()
    logits, chosen = own * model.classes * b, trained * model.classes * b
    if model.decoder is None:
        gradient = logits
        logits = 0.0 * logits  # h_L itself
        made = None
    else:
        spec = model.layers[-1] if model.activates_last else Layer(*model.decoder, 1, 0, False, False)
        made = Prepared.of(model, spec, own)
        made.forward(t)
        gradient = made.rows
    t.take(logits, chosen, chosen)  # logits, those of training vertices, their log-softmax
    t.take(chosen)
    t.free(chosen, chosen)
    t.take(own * model.classes * b)
    t.free(chosen)
    if made is not None:
        t.take(gradient)
        t.free(made.dropped)
        made.backward(t)
    return logits, t.most, gradient


class Moments:
    """A step's fullest moment on every rank, [ranks] [B]: what is kept for the backward pass, and what else is held just then."""

    def __init__(self, ranks: int) -> None:
        self.kept: Number = np.zeros(ranks)
        self.activations: Number = np.zeros(ranks)
        self.buffers: Number = np.zeros(ranks)

    def keep(self, *sizes: Number) -> None:
        for size in sizes:
            self.kept = self.kept + size
        self.at()

    def free(self, *sizes: Number) -> None:
        for size in sizes:
            self.kept = self.kept - size

    def at(self, *beside: Number) -> None:
        """A moment when this much is held beside what is kept."""
        held = sum(beside, np.zeros(np.shape(self.kept)))
        fuller = self.kept + held > self.activations + self.buffers
        self.activations = np.where(fuller, self.kept, self.activations)
        self.buffers = np.where(fuller, held, self.buffers)
