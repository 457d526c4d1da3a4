"""The operations that layers do, and what torch does for each, in both passes.

The kernels are in executor/layers/kernels; tests/executor/test_work_counts.py and test_memory.py
hold what stands here against torch's own count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gnnplan.planner.gnn.amounts import EDGES, LOCAL, NOTHING, OWN, READ, ROWS, Amount
from gnnplan.planner.gnn.kinds import Shapes
from gnnplan.planner.gnn.products import Product, block_rows
from gnnplan.planner.gnn.trace import SUM, GatherOf, Setting, Trace, Value
from gnnplan.planner.vocabulary.schedule import HASH_BYTES

# Numbers that a processor multiplies at once. A product of fewer columns costs as much as one of
# this many.
VECTOR = 16
# Numbers that an operation makes of edges together, where it makes a row for each (the executor's
# GATv2). On a core they stay in its cache; a GPU would do little else but begin operations.
EDGE_NUMBERS = {"cpu": 1 << 18, "cuda": 1 << 24}
INDEX = 4  # [B] of an index of ours
LONG = 8  # [B] of an index that torch wants in int64
BAG = 8  # [B] that embedding_bag keeps of each row that it aggregates: two numbers
# hash_ops that a number of sparse rows costs in their transpose: to find its place there, and to
# put it there.
TRANSPOSED, REORDERED = 2, 1

# How often an operation reads or writes a number, in the forward and in the backward pass
Both = tuple[float, float]
ACTIVATE: dict[str, Both] = {"none": (2, 3), "layer": (4, 6), "batch": (6, 15)}  # by the norm
MOMENTS: Both = (6, 9)  # of a rank's own inputs: batch norm's sums, and their gradient
# Of dropout's gradient: on CPUs by a mask, which has a byte per number and is made by hash_ops;
# GPUs make it again in passing.
MASKED, MASKED_IN_PASSING = 6.25, 2.0
BIAS: Both = (2, 1)
RELU: Both = (2, 3)
SCALED = 2  # times a number, or plus one
PAIRS_GATHERED = 2.0  # of GATv2's rows, once more in its backward pass on GPUs
COPY = 2  # of rows into place: a product's gradients are made block by block


class Operations(Trace):
    """The operations, each with its work and its memory (kinds.Arithmetic, and more)."""

    def __init__(self, setting: Setting, parameters: Shapes | None = None) -> None:
        """parameters: shapes of a layer's, by name."""
        super().__init__(setting)
        self.parameters = parameters or {}

    # -- on rows ---------------------------------------------------------------------------------

    def activate(self, x: Value, norm: str) -> Value:
        """ReLU of the norm of x."""
        forward, backward = ACTIVATE[norm]
        self.passes(forward, backward * x.varies, x)
        if norm == "none":
            out = self.like(x)
            return self.note(out, (x,), (out,))
        if norm == "batch":
            self.passes(*MOMENTS, Value(ROWS, x.width, True))
        size = self.size(x.rows, x.width)
        kept = size if norm == "batch" else self.size(x.rows, 2)
        out = self.like(x)
        normed = replace(out, held=NOTHING)
        within = (2 * size,) if norm == "batch" else ()
        self.note(normed, (x,), extra=kept, temporaries=within)
        return self.note(out, (normed,), (out,))

    def drop(self, x: Value) -> Value:
        """Dropout. A word of the hash serves four columns of a dense row, and one number of a
        sparse row. A GPU hashes in passing: what counts there is to read rows and to write them."""
        setting, numbers = self.setting, x.rows * x.width
        each = 4.0 if x.index else 1.0
        if setting.on_gpu:
            each *= 2 * setting.itemsize / HASH_BYTES
        self.works(x.rows)[0].add(hash_ops=each * numbers)
        self.passes(0, (MASKED_IN_PASSING if setting.on_gpu else MASKED) * x.varies, x)
        mask = NOTHING if setting.on_gpu else numbers
        return self.note(self.like(x), (x,), extra=mask)

    def like(self, x: Value) -> Value:
        """A new tensor as x."""
        return replace(self.made(x.rows, x.width, x.varies), index=x.index)

    def linear(
        self, terms: Sequence[tuple[Value, str]], bias: str = "", relu: bool = False
    ) -> Value:
        h_out, h_in = self.parameters[terms[0][1]]
        return self.product([x for x, _ in terms], h_in, h_out, bias in self.parameters, relu)

    def product(
        self, terms: Sequence[Value], h_in: int, h_out: int, bias: bool = False, relu: bool = False
    ) -> Value:
        """Rows of h_in numbers times a matrix [h_in, h_out]; of several, the sum of products."""
        setting, sparse = self.setting, terms[0].index > 0
        relu_inside = relu and len(terms) == 1 and not (sparse or setting.in_place)
        varies = any(x.varies for x in terms)
        out = self.made(terms[-1].rows, h_out, True)
        summed = len(terms) - 1 if not setting.in_place else 0  # products that are added apart
        for x in terms:
            self._multiply(x, h_in, h_out)
        self.passes(
            BIAS[0] * (bias and sparse)
            + RELU[0] * (relu and not relu_inside)
            + SUM * summed
            + COPY * (setting.by_pieces and not sparse),
            BIAS[1] * bias + RELU[1] * relu,
            out,
        )
        if not sparse:
            after = " ".join(["bias"] * bias + ["relu"] * relu_inside)
            self.products.append(Product(h_in, h_out, varies, (after, "")[: len(terms)]))
        temporaries = self._temporaries(terms, h_in, h_out, relu)
        of_bias = self.of_vector(out) if bias else NOTHING
        saved = (*terms, out) if relu else terms
        return self.note(
            out,
            tuple(terms),
            tuple(saved),
            temporaries=tuple(t + of_bias for t in temporaries),
        )

    def _multiply(self, x: Value, h_in: int, h_out: int) -> None:
        setting, (forward, backward) = self.setting, self.works(x.rows)
        if x.index:
            # A row gathers a column of the matrix per number. The gradient is a product with the
            # transpose, whose order is found anew if the rows are another batch's: the numbers are
            # put in its order, and each gathers a row of the output's gradient.
            numbers, matrix = x.rows * x.width, Amount.of(h_in)
            forward.gathers.append(GatherOf(numbers, h_out, matrix, x.rows))
            backward.gathers.append(GatherOf(numbers, h_out, x.rows, matrix))
            backward.add(
                elementwise_bytes=self.size(Amount.of(SUM * h_in), h_out),
                hash_ops=numbers * (REORDERED + TRANSPOSED * setting.redrawn),
            )
            backward.launches += 3
            return
        flops = 2.0 * x.rows * max(h_in, VECTOR) * max(h_out, VECTOR)
        nbytes = self.size(x.rows, h_in + h_out)
        forward.add(flops=flops, gemm_bytes=nbytes)
        backward.add(flops=flops * (1 + x.varies), gemm_bytes=nbytes * (1 + x.varies))
        self.passes(0, COPY * (x.varies and not setting.in_place), x)

    def _temporaries(
        self, terms: Sequence[Value], h_in: int, h_out: int, relu: bool
    ) -> tuple[Amount, ...]:
        """Of the backward pass [B]: a block of the rows, and per term the matrix transposed and the
        sum of its gradients; where it is not added in place, the gradient of a block."""
        setting, x = self.setting, terms[-1]
        itemsize, matrix = setting.itemsize, h_in * h_out
        if x.index:  # numbers in the order of columns, and the gradient before it is added
            in_order = x.rows * x.width * (itemsize + setting.unrounded)
            return matrix * itemsize + in_order, Amount.of(matrix * (itemsize + setting.unrounded))
        made_apart = max(h_in * any(x.varies for x in terms), h_out) * (not setting.in_place)
        read = x.rows if setting.on_gpu else x.rows.at_most(block_rows(h_in, h_out, itemsize))
        of_matrices = len(terms) * (itemsize + setting.weight_itemsize)
        of_matrices += itemsize * (not setting.in_place or setting.unrounded > 0)
        return (self.size(read, made_apart + h_out * relu) + matrix * of_matrices,)

    def of_vector(self, x: Value) -> Amount:
        """Room for the gradient of a vector that was added to each row or multiplied it."""
        if not self.setting.on_gpu:
            return NOTHING
        return x.rows.room_of_sum(int(x.width), self.setting.weight_itemsize)

    def bias(self, x: Value) -> Value:
        """x plus a vector, if the layer has one."""
        if "bias" not in self.parameters:
            return x
        self.passes(*BIAS, x)
        out = self.made(x.rows, x.width, True)
        return self.note(out, (x,), passes_on=True, temporaries=(self.of_vector(x),))

    def relu(self, x: Value, in_place: bool = True) -> Value:
        forward, backward = RELU
        self.passes(forward, backward * x.varies, x)
        out = replace(x) if in_place else self.like(x)
        return self.note(out, (x,), (out,))

    def add(self, x: Value, y: Value) -> Value:
        self.passes(SUM, 0, x)
        out = self.made(x.rows, x.width, x.varies or y.varies)
        return self.note(out, (x, y), passes_on=True)

    def shift(self, x: Value) -> Value:
        """x plus a number."""
        self.passes(SCALED, 0, x)
        return self.note(self.like(x), (x,), passes_on=True)

    def lerp(self, x: Value, y: Value, by: str) -> Value:
        """A weighted mean of both."""
        self.passes(SUM, SCALED * (x.varies + y.varies), x)
        out = self.made(x.rows, x.width, x.varies or y.varies)
        return self.note(out, (x, y))

    def towards_product(self, x: Value, weight: str, by: str) -> Value:
        return self.lerp(x, self.linear([(x, weight)]), by)

    def initial_rows(self, width: int) -> Value:
        """GCNII: the encoder's rows. Their gradient is put among those of others, and added."""
        own = Value(ROWS, width, True)
        self.passes(0, SCALED + SUM, own)
        return self.note(own, (), temporaries=(self.size(ROWS, width),))

    def segment(self, x: Value, rows: Amount) -> Value:
        """x where another segment of the layer begins, of so many rows with those of others."""
        self.keep(x)
        out = Value(rows, x.width, x.varies)
        return self.note(out, (x,), passes_on=True, stays=True)

    def first_rows(self, x: Value) -> Value:
        """The destinations' own rows. Their gradient is put among zeros; but those that are
        prepared before an exchange are mostly all of them, and then it goes on as it is."""
        out = Value(OWN, x.width, x.varies, x.index, view_of=x)
        passed = self.size(x.rows + ROWS, x.width)
        return self.note(out, (x,), passed=passed, passes_on=x.rows is LOCAL)

    # -- along edges -----------------------------------------------------------------------------

    def sums(self, width: int, forward: int, backward: int) -> None:
        """So many sums over edges, and over the transposed edges."""
        self.forward.gathers += [GatherOf(EDGES, width, READ, ROWS)] * forward
        self.back.gathers += [GatherOf(EDGES, width, ROWS, READ)] * backward

    def aggregate(self, x: Value, times: int = 1) -> Value:
        """Weighted sums of rows; times: 0, where they are counted elsewhere."""
        self.sums(int(x.width), times, times * x.varies)
        out = self.made(ROWS, x.width, x.varies)
        return self.note(out, (x,), temporaries=(self._bag(x.rows) + self._rounded,))

    def aggregate_beside(self, x: Value, times: int = 1) -> tuple[Value, Value]:
        """`aggregate`, and the destinations' own rows, whose gradient is added to the sums'."""
        self.sums(int(x.width), times, times * x.varies)
        out, own = self.made(ROWS, x.width, x.varies), Value(OWN, x.width, x.varies, view_of=x)
        self.passes(0, SUM * x.varies, out)
        self.note(out, (x,), also=(own,), temporaries=(self._bag(x.rows) + self._rounded,))
        return out, own

    def _bag(self, rows: Amount) -> Amount:
        return rows * BAG * (not self.setting.on_gpu)

    @property
    def _rounded(self) -> Amount:
        """Weights of edges in the type of rows."""
        return EDGES * self.setting.unrounded

    def softmax_aggregate(self, x: Value) -> Value:
        """Means of messages, weighted by their softmax: a ratio of two sums."""
        of_x = self.size(x.rows, x.width)
        of_rows = self.size(ROWS, x.width)
        self.sums(int(x.width), 2, 2)
        self.forward.add(hash_ops=x.rows * x.width)
        self.passes(12, 11, x)
        self.passes(6.5, 6, Value(ROWS, x.width, True))
        out = self.made(ROWS, x.width, True)
        of_sums = of_x + of_rows  # exponentials, and their sums
        return self.note(out, (x,), (x, out), of_sums, temporaries=(2 * of_x + of_rows,))

    def beside_logits(self, z: Value, heads: int) -> Value:
        """GAT: projected rows with a logit per head."""
        size = self.size(z.rows, z.width)
        out = self.made(z.rows, z.width + heads, True)
        self.passes(5, 7, out)
        return self.note(out, (z,), (z,), temporaries=(size + self.of_vector(z),))

    def attend(self, x: Value, heads: int) -> Value:
        """GAT: sums of z by a softmax of logits; x has z and logits side by side."""
        setting, h_out, itemsize = self.setting, int(x.width) - heads, self.setting.itemsize
        self.sums(h_out, 1, 2)
        self._weigh(heads)
        z, sums = Value(x.rows, h_out, True, view_of=x), Value(ROWS, h_out, True)
        self.passes(2, 8 if setting.on_gpu else 12, z)
        self.passes(5, 13, sums)
        of_z, of_edges = self.size(x.rows, h_out), EDGES * heads
        self.note(z, (x,), temporaries=(of_z,))  # the gradients of both logits beside z's
        out = self.made(ROWS, h_out, True)
        if setting.on_gpu:
            kept = ROWS * heads * setting.weight_itemsize
            temporaries = [out.held + of_edges * setting.weight_itemsize]
        else:  # logits and weights
            kept = 2 * itemsize * of_edges
            products, added = self._attended(z, heads)
            # z's gradient comes after those of logits, which are then sorted by source
            temporaries = [products - of_z, added, kept + EDGES * LONG]
        return self.note(out, (z,), (x, out), kept, temporaries=tuple(temporaries))

    def attend_pairs(self, x: Value, heads: int) -> Value:
        """GATv2: sums of z by a softmax of logits of sums of two rows; x has z for readers' sums,
        and what the reader's own logits are made of, side by side."""
        setting, h_out, itemsize = self.setting, int(x.width) // 2, self.setting.itemsize
        z, sums, pairs = (Value(rows, h_out, True) for rows in (x.rows, ROWS, EDGES))
        self._weigh(heads)
        self.sums(h_out, 3, 6 if setting.on_gpu else 8)
        self.passes(2, 6 if setting.on_gpu else 26, z)
        self.passes(2, 9 if setting.on_gpu else 12, sums)
        forward, backward = (0, PAIRS_GATHERED) if setting.on_gpu else (3, 4)
        self.passes(forward, backward, pairs)
        out, of_edges = self.made(ROWS, h_out, True), EDGES * heads
        if setting.on_gpu:
            kept = ROWS * heads * setting.weight_itemsize
            temporaries = [out.held + of_edges * setting.weight_itemsize]
        else:
            kept = itemsize * of_edges
            some = self.size(EDGES.at_most(max(1, EDGE_NUMBERS["cpu"] // h_out)), h_out)
            # places of both rows; products of gradients and rows
            temporaries = [
                2 * itemsize * of_edges + EDGES * 3 * INDEX + 3 * some,
                itemsize * of_edges + self.size(x.rows, h_out),
                *(itemsize * of_edges + each for each in self._attended(z, heads)),
            ]
        return self.note(out, (x,), (x, out), kept, temporaries=tuple(temporaries))

    def _attended(self, z: Value, heads: int) -> list[Amount]:
        """Of one head: its rows, gradients and products along edges; then what is added to z."""
        itemsize, width = self.setting.itemsize, z.width / heads
        of_gradient = self.size(ROWS, width) * (heads > 1)
        products = self.size(z.rows + ROWS, width) + of_gradient + EDGES * (LONG + itemsize)
        added = self.size(z.rows, width) + of_gradient + EDGES * (LONG + itemsize)
        return [products + itemsize * heads * EDGES, added + itemsize * heads * EDGES]

    def _weigh(self, heads: int) -> None:
        for work in (self.forward, self.back):
            work.add(attention_edges=float(heads) * EDGES)
