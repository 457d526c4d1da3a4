"""Work and memory of a layer on any block, found by recording the layer's operations.

The kernels are in executor/layers/kernels; tests/executor/test_work_counts.py and test_memory.py
compare the operations with torch's own counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from gnnplan.planner.gnn.kinds import (
    KINDS,
    Counted,
    CountedWork,
    Event,
    LayerSpec,
    Linear,
    Shapes,
    UpdateInputs,
    amount,
)
from gnnplan.planner.gnn.rows import INDEX
from gnnplan.planner.gnn.trace import (
    EDGES,
    LOCAL,
    NOTHING,
    OWN,
    READ,
    ROWS,
    SOURCES,
    SUM,
    Amount,
    Amounts,
    Product,
    Setting,
    TensorAmount,
    Trace,
    Work,
    block_rows,
)
from gnnplan.planner.vocabulary.schedule import HASH_BYTES, Gather

# -- work and memory of each operation in torch, forward and backward ------------------------------


# SIMD width [numbers]: a product with fewer columns costs as much as one with this many.
VECTOR = 16
# Numbers in a block of edges, for operations with a row per edge (the executor's GATv2). On a CPU a
# block stays in the core's cache; on a GPU small blocks would mostly cost launches.
EDGE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
LONG = 8  # size of an index that torch requires in int64 [B]
BAG = 8  # bytes that embedding_bag keeps per source row: two numbers [B]
# hash_ops per number of sparse rows in the transpose: to find the number's position there, and to
# write the number there (6 and 2 ns on two busy cores that hash in 1.4, 2026-11-29)
TRANSPOSED, REORDERED = 4, 1

# Passes over memory: how often an operation reads or writes each number, (forward, backward)
Both = tuple[float, float]
ACTIVATE: dict[str, Both] = {"none": (2, 3), "layer": (4, 6), "batch": (6, 15)}  # norm, then ReLU
MOMENTS: Both = (6, 9)  # batch norm's sums over a rank's own inputs, and their gradient
# Passes of dropout's gradient. CPUs read a mask with a byte per number, whose making counts as
# hash_ops; GPUs recompute the mask inside the kernel.
MASKED, MASKED_IN_PASSING = 6.25, 2.0
BIAS: Both = (2, 1)
RELU: Both = (2, 3)
SCALED = 2  # multiplication by a number, or addition of one
COPY = 2  # copy of rows into place, for example of gradients computed block by block
# Bytes that a GPU moves while torch puts a row into a maximum: it compares and swaps, and rows of
# one reader wait for each other. PyG's GraphSAGE with maxima took 1.7 ns per edge and layer more
# than its other work, by itself on an H200 (alone_s in traces/gpu/h200.json; 50 edges per reader).
MAXIMUM = 7500.0


class Attention(NamedTuple):
    """The work of attention over edges, without logits and softmax, (forward, backward)."""

    sums: tuple[int, int]  # sums over edges
    over_z: Both  # passes over the sources' z
    over_rows: Both  # .. over the rows of the sum
    over_edges: Both = (0, 0)  # .. over a row of z per edge


# on CPUs, on GPUs; GATv2's backward pass on GPUs gathers the rows of edges once more
GAT = Attention((1, 2), (2, 12), (5, 14)), Attention((1, 2), (2, 8), (5, 14))
GATV2 = (
    Attention((3, 8), (2, 26), (2, 12), (3, 4)),
    Attention((3, 6), (2, 6), (2, 9), (0, 2)),
)


class Operations(Trace):
    """All operations of layers (kinds.Arithmetic, and more), which record their work and memory."""

    def __init__(self, setting: Setting, parameters: Shapes | None = None) -> None:
        """parameters: name -> shape of the layer's parameters."""
        super().__init__(setting)
        self.parameters = parameters or {}

    # -- on rows ---------------------------------------------------------------------------------

    def activate(self, x: TensorAmount, norm: str) -> TensorAmount:
        """Record norm and ReLU of x."""
        forward, backward = ACTIVATE[norm]
        self.passes(forward, backward * x.varies, x)
        if norm == "none":
            out = self.like(x)
            return self.record(out, (x,), (out,))
        if norm == "batch":
            self.passes(*MOMENTS, TensorAmount(ROWS, x.width, True))
        size = self.size(x.rows, x.width)
        kept = size if norm == "batch" else self.size(x.rows, 2)
        out = self.like(x)
        normed = replace(out, held=NOTHING)
        within = (2 * size,) if norm == "batch" else ()
        # layer norm saves its input, and the moments' gradient of batch norm needs it
        self.record(normed, (x,), (x,), extra=kept, temporaries=within)
        return self.record(out, (normed,), (out,))

    def drop(self, x: TensorAmount) -> TensorAmount:
        """Record dropout: a word of the hash serves four columns of a dense row, or one number of a
        sparse row. A GPU hashes inside the kernel, so only reading and writing rows costs time."""
        setting, numbers = self.setting, x.rows * x.width
        per_number = 4.0 if x.index else 1.0
        if setting.on_gpu:
            per_number *= 2 * setting.itemsize / HASH_BYTES
        self.works(x.rows)[0].add(hash_ops=per_number * numbers)
        self.passes(0, (MASKED_IN_PASSING if setting.on_gpu else MASKED) * x.varies, x)
        mask = NOTHING if setting.on_gpu else numbers
        return self.record(self.like(x), (x,), extra=mask)

    def like(self, x: TensorAmount) -> TensorAmount:
        """Return a new tensor with the shape of x."""
        return replace(self.new(x.rows, x.width, x.varies), index=x.index)

    def linear(
        self, terms: Sequence[tuple[TensorAmount, str]], bias: str = "", relu: bool = False
    ) -> TensorAmount:
        h_out, h_in = self.parameters[terms[0][1]]
        return self.product([x for x, _ in terms], h_in, h_out, bias in self.parameters, relu)

    def product(
        self,
        terms: Sequence[TensorAmount],
        h_in: int,
        h_out: int,
        bias: bool = False,
        relu: bool = False,
    ) -> TensorAmount:
        """Record the product of rows with a matrix [h_in, h_out]; for several terms, their sum."""
        setting, sparse = self.setting, terms[0].index > 0
        relu_inside = relu and len(terms) == 1 and not (sparse or setting.in_place)
        varies = any(x.varies for x in terms)
        out = self.new(terms[-1].rows, h_out, True)
        summed = len(terms) - 1 if not setting.in_place else 0  # products added by extra passes
        for x in terms:
            self._multiply(x, h_in, h_out)
        self.passes(
            BIAS[0] * (bias and sparse)
            + RELU[0] * (relu and not relu_inside)
            + SUM * summed
            + COPY * (setting.in_pieces and not sparse),
            BIAS[1] * bias + RELU[1] * relu,
            out,
        )
        if not sparse:
            if setting.in_pieces:
                piece = terms[-1].rows.at_most(block_rows(h_in, h_out, setting.itemsize))
                self.until_end.append(self.new(piece, h_out, False))
            after = " ".join(["bias"] * bias + ["relu"] * relu_inside)
            self.products.append(Product(h_in, h_out, varies, (after, "")[: len(terms)]))
        temporaries = self._temporaries(terms, h_in, h_out, relu)
        bias_workspace = self.vector_workspace(out) if bias else NOTHING
        saved = (*terms, out) if relu else terms
        return self.record(
            out,
            tuple(terms),
            tuple(saved),
            temporaries=tuple(t + bias_workspace for t in temporaries),
        )

    def _multiply(self, x: TensorAmount, h_in: int, h_out: int) -> None:
        """Add the work of a product of rows x with a matrix [h_in, h_out]."""
        setting, (forward, backward) = self.setting, self.works(x.rows)
        if x.index:
            # A sparse row gathers a column of the matrix per number. The gradient is a product with
            # the transpose, whose order is computed anew for each batch: the numbers are written in
            # that order, and each number gathers a row of the output's gradient.
            numbers, matrix = x.rows * x.width, Amount.of(h_in)
            forward.gathers.append(Gather(numbers, h_out, matrix, x.rows))
            forward.reads_columns = True
            backward.gathers.append(Gather(numbers, h_out, x.rows, matrix))
            backward.add(
                elementwise_bytes=self.size(Amount.of(SUM * h_in), h_out),
                hash_ops=numbers * (REORDERED + TRANSPOSED * setting.resamples),
            )
            backward.launches += 3
            return
        flops = 2.0 * x.rows * max(h_in, VECTOR) * max(h_out, VECTOR)
        nbytes = self.size(x.rows, h_in + h_out)
        forward.add(flops=flops, gemm_bytes=nbytes)
        backward.add(flops=flops * (1 + x.varies), gemm_bytes=nbytes * (1 + x.varies))
        self.passes(0, COPY * (x.varies and not setting.in_place), x)

    def _temporaries(
        self, terms: Sequence[TensorAmount], h_in: int, h_out: int, relu: bool
    ) -> tuple[Amount, ...]:
        """Return temporaries of a product's backward pass [B]: a block of rows, and per term the
        transposed matrix and its summed gradient; unless in place, also the gradient of a block."""
        setting, x = self.setting, terms[-1]
        itemsize, matrix = setting.itemsize, h_in * h_out
        if x.index:  # the numbers in the order of columns, and the gradient before it is added
            in_order = x.rows * x.width * (itemsize + setting.unrounded)
            return matrix * itemsize + in_order, Amount.of(matrix * (itemsize + setting.unrounded))
        width = max(h_in * any(x.varies for x in terms), h_out) * (not setting.in_place)
        block = x.rows if setting.on_gpu else x.rows.at_most(block_rows(h_in, h_out, itemsize))
        per_number = len(terms) * (itemsize + setting.weight_itemsize)
        per_number += itemsize * (not setting.in_place or setting.unrounded > 0)
        return (self.size(block, width + h_out * relu) + matrix * per_number,)

    def vector_workspace(self, x: TensorAmount) -> Amount:
        """Return the workspace for the gradient of a vector added to, or multiplied with, rows."""
        if not self.setting.on_gpu:
            return NOTHING
        return x.rows.sum_workspace(int(x.width), self.setting.weight_itemsize)

    def bias(self, x: TensorAmount) -> TensorAmount:
        """Record the addition of the bias, if the layer has one."""
        if "bias" not in self.parameters:
            return x
        self.passes(*BIAS, x)
        out = self.new(x.rows, x.width, True)
        return self.record(out, (x,), passes_on=True, temporaries=(self.vector_workspace(x),))

    def relu(self, x: TensorAmount, in_place: bool = True) -> TensorAmount:
        forward, backward = RELU
        self.passes(forward, backward * x.varies, x)
        out = replace(x) if in_place else self.like(x)
        return self.record(out, (x,), (out,))

    def completed(self, x: TensorAmount) -> TensorAmount:
        """Record the memory of the bias and ReLU of the layer below (`Setting.completes`)."""
        summed = self.like(x)
        saved = (summed,) * (self.setting.completes == "relu")
        return self.record(summed, (x,), saved, passes_on=not saved)

    def add(self, x: TensorAmount, y: TensorAmount) -> TensorAmount:
        self.passes(SUM, 0, x)
        out = self.new(x.rows, x.width, x.varies or y.varies)
        return self.record(out, (x, y), passes_on=True)

    def shift(self, x: TensorAmount) -> TensorAmount:
        """Record the addition of a number to x."""
        self.passes(SCALED, 0, x)
        return self.record(self.like(x), (x,), passes_on=True)

    def lerp(self, x: TensorAmount, y: TensorAmount, by: str) -> TensorAmount:
        """Record a weighted mean of x and y."""
        self.passes(SUM, SCALED * (x.varies + y.varies), x)
        out = self.new(x.rows, x.width, x.varies or y.varies)
        return self.record(out, (x, y))

    def towards_product(self, x: TensorAmount, weight: str, by: str) -> TensorAmount:
        return self.lerp(x, self.linear([(x, weight)]), by)

    def initial_rows(self, width: int) -> TensorAmount:
        """Return GCNII's initial rows; their gradient is scattered among all rows, and added."""
        own = TensorAmount(ROWS, width, True)
        self.passes(0, SCALED + SUM, own)
        return self.record(own, (), temporaries=(self.size(ROWS, width),))

    def segment(self, x: TensorAmount, rows: Amount) -> TensorAmount:
        """Record the start of a new autograd segment, with `rows` rows: x and received rows.

        The caller holds own rows; projected rows are held if an operation saves them."""
        index = x.index if rows is OWN else 0  # rows that were projected are dense
        out = TensorAmount(rows, x.width, x.varies, index, view_of=x.view_of or x)
        if rows is OWN:
            self.hold(x)
        elif self.setting.frees_input:
            out.held, out.view_of = self.size(rows, x.width), None
        return self.record(out, (x,), passes_on=True, stays=True)

    def first_rows(self, x: TensorAmount) -> TensorAmount:
        """Record a view of the destinations' own rows, the first rows of x.

        Zeros pad their gradient to all rows of x. Before an exchange nearly all prepared rows are
        destinations, and the gradient is passed on without padding."""
        out = TensorAmount(OWN, x.width, x.varies, x.index, view_of=x)
        padded = self.size(x.rows + ROWS, x.width)
        return self.record(out, (x,), touched=padded, passes_on=x.rows is LOCAL)

    # -- along edges -----------------------------------------------------------------------------

    def sums(self, width: int, forward: int, backward: int) -> None:
        """Add the work of `forward` sums over edges, and `backward` sums over transposed edges."""
        self.forward.gathers += [Gather(EDGES, width, READ, ROWS)] * forward
        self.backward.gathers += [Gather(EDGES, width, ROWS, READ)] * backward

    def aggregate(self, x: TensorAmount, times: int = 1) -> TensorAmount:
        """Record a weighted sum over edges; times 0: its work is counted elsewhere."""
        return self.aggregate_with_own(x, times)[0]

    def aggregate_with_own(
        self, x: TensorAmount, times: int = 1
    ) -> tuple[TensorAmount, TensorAmount]:
        """Record `aggregate`, and a view of the own rows, whose gradient is added to the sums'."""
        self.sums(int(x.width), times, times * x.varies)
        out = self.new(ROWS, x.width, x.varies)
        own = TensorAmount(OWN, x.width, x.varies, view_of=x)
        # on CPUs what embedding_bag keeps; and edge weights, copied in the precision of rows
        kept = x.rows * BAG * (not self.setting.on_gpu) + EDGES * self.setting.unrounded
        self.record(out, (x,), also=(own,), temporaries=(kept,))
        return out, own

    def softmax_aggregate(self, x: TensorAmount) -> TensorAmount:
        """Record the mean of messages weighted by their softmax, a ratio of two sums over edges."""
        source_bytes = self.size(x.rows, x.width)
        row_bytes = self.size(ROWS, x.width)
        self.sums(int(x.width), 2, 2)
        self.forward.add(hash_ops=x.rows * x.width)
        self.passes(12, 11, x)
        self.passes(6.5, 6, TensorAmount(ROWS, x.width, True))
        out = self.new(ROWS, x.width, True)
        sums = source_bytes + row_bytes  # exponentials, and their sums
        temporaries = (2 * source_bytes + row_bytes,)
        return self.record(out, (x,), (x, out), sums, temporaries=temporaries)

    def append_logits(self, z: TensorAmount, heads: int) -> TensorAmount:
        """Record GAT's logits: each projected row gets a logit per head beside it."""
        size = self.size(z.rows, z.width)
        out = self.new(z.rows, z.width + heads, True)
        self.passes(5, 7, out)
        return self.record(out, (z,), (z,), temporaries=(size + self.vector_workspace(z),))

    def attend(self, x: TensorAmount, heads: int) -> TensorAmount:
        """Record GAT's sum of z weighted by the softmax of logits; x is [z | logits]."""
        z = TensorAmount(x.rows, int(x.width) - heads, True, view_of=x)
        z_bytes = self.size(z.rows, z.width)
        # The gradients of z and of both logits are concatenated.
        self.record(z, (x,), temporaries=(z_bytes,))
        products, added = self._head_temporaries(z, heads)
        # z's gradient comes after the logits' gradients
        temporaries = products - z_bytes, added
        # weights and the signs of logits
        kept = (self.setting.itemsize + 1) * heads * EDGES
        return self._attended(x, z, z, heads, GAT[self.setting.on_gpu], kept, temporaries)

    def attend_pairs(self, x: TensorAmount, heads: int) -> TensorAmount:
        """Record GATv2's sum of z weighted by a softmax of logits. x is [z | r]; the logit of an
        edge is computed from the sum of the source's z and the destination's r."""
        z = TensorAmount(x.rows, int(x.width) // 2, True)
        edges = EDGES.at_most(max(1, EDGE_NUMBERS["cpu"] // int(z.width)))
        block = self.size(edges, z.width) + edges * INDEX  # rows of edges, and their places
        weights = self.setting.itemsize * heads * EDGES
        # positions of both ends' rows; products of gradients and rows
        by_source, (products, added) = EDGES * INDEX, self._head_temporaries(z, heads)
        temporaries = (
            products,
            weights + EDGES * 3 * INDEX + 3 * block,
            weights + by_source + self.size(z.rows, z.width),
            by_source + added,
        )
        return self._attended(x, x, z, heads, GATV2[self.setting.on_gpu], weights, temporaries)

    def _attended(
        self,
        x: TensorAmount,
        read: TensorAmount,
        z: TensorAmount,
        heads: int,
        work: Attention,
        kept: Amount,
        temporaries: tuple[Amount, ...],
    ) -> TensorAmount:
        """Record the sum of z, weighted by the softmax of logits of `read`, which is x or in it.

        kept, temporaries: those on CPUs; a GPU keeps a number per row and head."""
        out = self.new(ROWS, z.width, True)
        self.sums(int(z.width), *work.sums)
        for pass_work in (self.forward, self.backward):
            pass_work.add(attention_edges=float(heads) * EDGES)
        self.passes(*work.over_z, z)
        self.passes(*work.over_rows, out)
        self.passes(*work.over_edges, TensorAmount(EDGES, z.width, True))
        if self.setting.on_gpu:
            size = self.setting.weight_itemsize * heads
            kept, temporaries = ROWS * size, (out.held + EDGES * size,)
        return self.record(out, (read,), (x, out), kept, temporaries=temporaries)

    def _head_temporaries(self, z: TensorAmount, heads: int) -> list[Amount]:
        """Return consecutive temporaries of one head's backward pass, with the gradients of all
        logits [B]: copies of rows for products along edges; the gradient that is added to z's."""
        itemsize, width = self.setting.itemsize, z.width / heads
        gradient = self.size(ROWS, width) * (heads > 1)
        logits, rows = itemsize * heads * EDGES, self.size(z.rows, width)
        return [
            logits + rows + gradient + EDGES * LONG,
            logits + rows + gradient + EDGES * itemsize,
        ]


# -- layers ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerRecord:
    """A layer's recorded work and memory, which can be evaluated on any block."""

    passes: tuple[Work, Work]  # forward and backward work
    project: tuple[Work, Work]  # forward and backward work before the exchange of projected rows
    # First the memory that is kept from the forward to the backward pass, with the output unless
    # the caller drops it; then, kept memory included, what is in use at times of the pass [B].
    forward: Amounts
    backward: Amounts
    products: tuple[Product, ...]
    saves_input: bool  # whether an operation saves the source rows


@cache
def record_layer(spec: LayerSpec, setting: Setting) -> LayerRecord:
    """Record a layer's operations, forward and backward."""
    ops = Operations(setting, {} if spec.counted else spec.parameters)
    x = _inputs(LOCAL if setting.narrow else SOURCES, setting)
    if setting.frees_input and not setting.narrow:
        x.held = ops.size(x.rows, x.width)
    return _with_backward(ops, _forward(ops, spec, x), x)


def record_rowwise(
    spec: LayerSpec, setting: Setting, h_out: int = 0, relu: bool = False, twice: bool = False
) -> LayerRecord:
    """Record the preparation of a layer's inputs, and a product with a matrix [h_in, h_out].

    h_out 0: no product. twice: the output has two readers, whose gradients are added."""
    ops = Operations(setting)
    x = _inputs(ROWS, setting)
    out = _prepare(ops, spec, x)
    out = ops.product([out], spec.h_in, h_out, spec.bias, relu) if h_out else out
    ops.passes(0, SUM * twice, out)
    return _with_backward(ops, out, x)


def _with_backward(ops: Operations, out: TensorAmount, x: TensorAmount) -> LayerRecord:
    """Record the backward pass from the output `out` to the rows x, and return the whole record."""
    ops.hold(out)
    until_end = dict.fromkeys(each.view_of or each for each in ops.until_end)
    at_end = sum((each.held for each in until_end if not each.holders), ops.now)
    if ops.setting.drops_output:
        ops.release(out)
    kept, saves_input = ops.now, x.holders > 0
    forward = Amounts((kept, kept, at_end, *ops.in_use))
    ops.in_use.clear()
    ops.run_backward(out)
    backward = Amounts((kept, kept, *ops.in_use))
    work = ops.forward, ops.backward
    return LayerRecord(work, ops.project, forward, backward, tuple(ops.products), saves_input)


def _inputs(rows: Amount, setting: Setting) -> TensorAmount:
    return TensorAmount(rows, setting.inputs.numbers, setting.varies, setting.inputs.index)


def _prepare(ops: Operations, spec: LayerSpec, x: TensorAmount) -> TensorAmount:
    rows = ops.activate(x, spec.norm) if spec.activates else x
    return ops.drop(rows) if spec.drops and ops.setting.dropout else rows


def _forward(ops: Operations, spec: LayerSpec, x: TensorAmount) -> TensorAmount:
    setting = ops.setting
    x = ops.completed(x) if setting.completes else x
    prepared = x if setting.apart else _prepare(ops, spec, x)
    ops.until_end += x, prepared
    if spec.counted:
        return _counted(ops, spec, spec.counted, prepared)
    gathered, own = _gather(ops, spec, prepared)
    ops.until_end.append(gathered)
    inputs = TensorAmount(ROWS, x.width, x.varies) if setting.apart else ops.first_rows(x)
    return KINDS[spec.kind].update(ops, spec, UpdateInputs(gathered, own, inputs, setting.relu))


def _gather(
    ops: Operations, spec: LayerSpec, prepared: TensorAmount
) -> tuple[TensorAmount, TensorAmount]:
    """Record the projection (if it comes first) and the gather.

    Returns the aggregate, and the destinations' own prepared rows."""
    setting, kind = ops.setting, KINDS[spec.kind]
    own = TensorAmount(OWN, spec.h_in, setting.varies)
    adds = spec.gathers_linearly and not spec.projects_first
    if adds and (setting.cached or setting.apart):
        return TensorAmount(ROWS, spec.h_in, setting.varies), own
    if kind.projects_own and adds and not setting.own_in_place:
        gathered, own = ops.aggregate_with_own(prepared, spec.sums)
        ops.passes(0, SUM * own.varies, gathered)
        return gathered, own
    rows = prepared
    if spec.projects_first:
        rows = kind.project(ops, spec, rows)
    if setting.narrow:  # the projection is an autograd segment of its own, before the exchange
        own = ops.segment(ops.first_rows(prepared), OWN) if spec.reads_own else own
        rows = ops.segment(rows, SOURCES)
    gathered = kind.gather(ops, spec, rows)
    if setting.own_in_place:
        return gathered, own
    return gathered, own if setting.apart or setting.narrow else ops.first_rows(prepared)


# -- layers of the user's own ----------------------------------------------------------------------


def _amount(linear: Linear, sources: Amount = SOURCES) -> Amount:
    """Return a count of a user's layer as an amount; sources: the count that its S stands for."""
    return Amount.of(amount(linear, ROWS, sources, EDGES))


def _counted(
    ops: Operations, spec: LayerSpec, counted: Counted, prepared: TensorAmount
) -> TensorAmount:
    """Add the counts of a user's layer to the record, and return the layer's output."""
    setting = ops.setting
    outside = setting.apart and counted.linear  # the gather, with its memory, is outside autograd

    def happens(event: Event) -> bool:
        return not ((outside and event.of_gather) or (setting.on_gpu and event.cast))

    _add(ops, ops.forward, counted.forward)
    _add(ops, ops.backward, counted.backward)
    if setting.resamples and not setting.on_gpu:  # else `structure_work` in model.py
        _add(ops, ops.forward, counted.structure.work)
    for event in filter(happens, counted.forward_events):
        ops.allocate(_amount(event.bytes))
    for product in counted.products:
        ops.products.append(Product(product.h_in, product.h_out, setting.varies, (product.after,)))
    keeps = counted.keeps_inputs or counted.projects_first
    return ops.record(
        TensorAmount(ROWS, spec.h_out, True),
        () if outside else (prepared,),
        (prepared,) if keeps else (),
        events=tuple(_amount(each.bytes) for each in filter(happens, counted.backward_events)),
    )


def _add(ops: Operations, work: Work, counted: CountedWork) -> None:
    def on_read(linear: Linear) -> Amount:
        return _amount(linear, READ)

    work.add(
        flops=on_read(counted.flops),
        gemm_bytes=on_read(counted.gemm_bytes),
        elementwise_bytes=on_read(counted.elementwise_bytes),
        hash_ops=on_read(counted.exponentials),
    )
    if ops.setting.on_gpu:
        work.add(elementwise_bytes=MAXIMUM * on_read(counted.maxima))
    work.launches += counted.launches
    work.gathers += [
        Gather(on_read(g.rows), g.width, on_read(g.among), on_read(g.into)) for g in counted.gathers
    ]
