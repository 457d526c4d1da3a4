"""A recorder of a layer's operations: their work, and the memory in use, forward and backward.

Operations are recorded in order (layer.py). The backward pass visits them from last to first,
as autograd does: it allocates the gradients of an operation's inputs, then frees the gradient of
the operation's output and the tensors that the operation saved.

    forward     out = linear(x)                      allocate out, save x
    backward    gradient of out -> gradient of x     free x, unless another operation saved it

Amounts (of work or memory) are linear in a block's counts, so one record holds for blocks of any
size. A block is the bipartite graph that a layer reads: R rows (destinations), S sources and E
edges, which include self edges if the layer has them. An amount is a sum of counts times factors.
Products of rows with a matrix are recorded too: oneDNN compiles code for each of their shapes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gnnplan.planner.gnn.rows import RowFormat
from gnnplan.planner.vocabulary.numbers import Floats, Number
from gnnplan.planner.vocabulary.schedule import Compute, Gather

# -- products --------------------------------------------------------------------------------------


# Bytes per number -> numbers of a product's operands in a block of rows: the executor's backward
# pass multiplies block by block. Products of 2-byte numbers are so fast that small blocks are slow.
BLOCK = {2: 2_048_000, 4: 512_000, 8: 512_000}
# If row counts vary from step to step, the executor cuts rows into pieces of few sizes, so that
# oneDNN reuses its code: whole blocks, and LEAST rows times powers of two.
LEAST = 128
PIECES = 3.5  # typical number of piece sizes per product (Actor, Photo, CS, Facebook)


def block_rows(h_in: int, h_out: int, itemsize: int) -> int:
    """Return the rows per block in the backward pass of a product [., h_in] -> [., h_out]."""
    return max(1000, BLOCK[itemsize] // (h_in + h_out))


class Product(NamedTuple):
    """A product of rows of h_in numbers with a matrix [h_in, h_out]."""

    h_in: int
    h_out: int
    varies: bool = True  # the rows get a gradient
    # Operations fused into the product ('bias', 'bias relu' or ''); oneDNN compiles code for each.
    after: tuple[str, ...] = ("bias",)


def shapes(
    products: Collection[Product], itemsize: int, pieces: float = 1, rows: float = np.inf
) -> float:
    """Estimate the number of product shapes that oneDNN compiles code for.

    pieces: sizes of pieces per product. rows: rows of a piece. The forward pass multiplies a piece
    at once; the backward pass goes in blocks, and the last block is smaller.

    >>> shapes([Product(64, 32, False)] * 2, 4), shapes([Product(64, 32)], 4, 3, rows=1000)
    (3, 9)
    """
    forward = {(p.h_in, p.h_out, after) for p in products for after in p.after}
    backward = {(p.h_in, p.h_out, of_rows) for p in products for of_rows in (False, p.varies)}
    blocks = sum(rows > block_rows(h_in, h_out, itemsize) for h_in, h_out, _ in backward)
    return pieces * (len(forward) + len(backward)) + blocks


# -- amounts ---------------------------------------------------------------------------------------


Block = Mapping[str, Number]  # name -> count of a block


def block_of(
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    local: Number = 0.0,
    read: Number | None = None,
    away: Number = 0.0,
) -> Block:
    """Return the counts of a block by name.

    local: sources that this rank prepares. read: sources that the gather reads, if other ranks
    prepared some of them; default: all. away: destinations whose own row another rank has."""
    return {
        "rows": rows,
        "sources": sources,
        "edges": edges,
        "local": local,
        "read": sources if read is None else read,
        "own": rows - away,
        "one": 1.0,
    }


def summing(rows: Number, width: int, itemsize: int) -> Number:
    """Return torch's workspace on a GPU for the sum over `rows` rows of `width` numbers [B].

    Thread blocks share the rows. Each block writes its partial sums to the workspace, and the last
    block adds them up. A thread adds at least 16 rows, and at most 256 if there are many rows. The
    formulas are those of setReduceConfig in torch's aten/src/ATen/native/cuda/Reduce.cuh, with the
    threads of an H100. For 20,000 rows of 256 numbers an H200 allocated 41.03 MB.
    """
    vector = next(size for size in (4, 2, 1) if width % size == 0)  # columns per thread
    columns, threads = width // vector, 512 // vector
    across = min(32, 1 << columns.bit_length() - 1)
    each = np.ceil(rows / (threads // across))  # rows per thread if there were a single block
    fill = np.ceil(132 * (2048 // threads) / np.ceil(columns / across))  # blocks that fill the GPU
    blocks = np.maximum(np.minimum(fill, np.ceil(each / 16)), np.ceil(each / 256))
    return np.where(each < 256, 0.0, blocks * width * across * vector * itemsize)


class Term(NamedTuple):
    """A count of a block, a bounded count, or the workspace of a sum over counted rows."""

    name: str  # of a count (`block_of`)
    most: float = np.inf  # upper bound: an operation goes block by block
    summed: int = 0  # numbers per row, if the term is the workspace of their sum [B] (`summing`)
    itemsize: int = 0  # bytes per summed number [B]

    def on(self, block: Block) -> Number:
        """Return the term's value on a block."""
        count = block[self.name]
        if self.summed:
            return summing(count, self.summed, self.itemsize)
        return count if self.most == np.inf else np.minimum(count, self.most)


class Amount:
    """A sum of terms, each times a factor."""

    __array_ufunc__ = None  # makes numpy numbers defer + and * to this class

    def __init__(self, terms: Mapping[Term, float]) -> None:
        self.terms = {term: factor for term, factor in terms.items() if factor}

    @staticmethod
    def of(number: Amount | float) -> Amount:
        return number if isinstance(number, Amount) else Amount({Term("one"): number})

    def __add__(self, other: Amount | float) -> Amount:
        terms = dict(self.terms)
        for term, factor in Amount.of(other).terms.items():
            terms[term] = terms.get(term, 0.0) + factor
        return Amount(terms)

    def __mul__(self, factor: float) -> Amount:
        return Amount({term: factor * own for term, own in self.terms.items()})

    def __sub__(self, other: Amount | float) -> Amount:
        return self + -1.0 * Amount.of(other)

    def __rsub__(self, other: float) -> Amount:
        return Amount.of(other) - self

    __radd__, __rmul__ = __add__, __mul__

    def at_most(self, most: float) -> Amount:
        """Return the amount with every count bounded by `most`."""
        return Amount({term._replace(most=most): factor for term, factor in self.terms.items()})

    def sum_workspace(self, width: int, itemsize: int) -> Amount:
        """Return the workspace for the sum over these rows, of `width` numbers (`summing`) [B]."""
        return Amount({term._replace(summed=width, itemsize=itemsize): 1.0 for term in self.terms})


class Amounts:
    """Several amounts, evaluated on a block in one matrix product.

    >>> Amounts((4 * ROWS + 3, 2 * EDGES)).on(block_of(10.0, 20.0, 100.0))
    array([ 43., 200.])
    """

    def __init__(self, amounts: Sequence[Amount]) -> None:
        self.terms = list(dict.fromkeys(term for amount in amounts for term in amount.terms))
        factors = [[amount.terms.get(term, 0.0) for term in self.terms] for amount in amounts]
        self.factors = np.array(factors).reshape(len(amounts), len(self.terms))

    def on(self, block: Block) -> Floats:
        """Return the value of each amount on a block [amounts, ..]."""
        counts = [term.on(block) for term in self.terms]
        shape = np.broadcast_shapes(*map(np.shape, counts))
        table = np.empty((len(counts), *shape))
        for row, count in zip(table if shape else table[:, None], counts, strict=True):
            row[...] = count
        values: Floats = self.factors @ table.reshape(len(counts), math.prod(shape))
        return values.reshape(len(self.factors), *shape)


NOTHING = Amount({})
ROWS, SOURCES, EDGES, LOCAL, READ, OWN = (
    Amount({Term(name): 1.0}) for name in ("rows", "sources", "edges", "local", "read", "own")
)


# -- the recorder ----------------------------------------------------------------------------------


SUM = 3  # passes over memory by the sum of two tensors: two reads, one write


class Setting(NamedTuple):
    """The context of a layer that its operations depend on; model.Model explains the first ones."""

    itemsize: int  # bytes per number of a row [B]
    weight_itemsize: int
    dropout: bool
    inputs: RowFormat
    resamples: bool
    in_pieces: bool
    in_place: bool
    on_gpu: bool
    relu: bool = False  # the layer ends in ReLU
    varies: bool = True  # the layer's inputs get a gradient
    cached: bool = False  # the layer's aggregate is computed once, before training
    narrow: bool = False  # the layer's rows are projected before the exchange
    # the inputs are prepared in an autograd segment of their own, and a gather that is a weighted
    # sum runs outside autograd (GNNPipe)
    apart: bool = False
    drops_output: bool = False  # the caller keeps the output's autograd node, but not its rows
    # the source rows are the layer's own copy, which is freed unless an operation saves it
    frees_input: bool = False
    own_in_place: bool = False  # own rows are read where they were before the copy
    # the layer completes sums by the layer below: '', by its 'bias', or by bias and 'relu'
    completes: str = ""

    @property
    def unrounded(self) -> int:
        """Bytes of a rounded number while it is summed in the precision of weights [B]; 0 if rows
        are not rounded."""
        return self.weight_itemsize * (self.itemsize < self.weight_itemsize)


@dataclass
class Work:
    """The work of one pass."""

    amounts: dict[str, Amount] = field(default_factory=dict)  # field of Compute -> amount
    gathers: list[Gather] = field(default_factory=list)  # their counts are amounts
    launches: int = 0  # counted launches; `on` gets the other launches from Model
    # whether nearly all gathers read the weight of features of mostly zeros, whose frequent columns
    # are in cache
    reads_columns: bool = False

    def add(self, **amounts: Amount) -> None:
        for name, amount in amounts.items():
            self.amounts[name] = self.amounts.get(name, NOTHING) + amount

    def on(self, block: Block, itemsize: int, launches: int, of_batch: bool) -> Compute:
        """Evaluate the work on a block; nothing may be added afterwards."""
        n = len(self.amounts)
        values = self._all.on(block)
        amounts: dict[str, Any] = dict(zip(self.amounts, values[:n], strict=True))
        counts = iter(values[n:])
        return Compute(
            gathers=tuple(
                Gather(next(counts), gather.width, next(counts), next(counts))
                for gather in self.gathers
            ),
            launches=launches + self.launches,
            itemsize=itemsize,
            scattered=of_batch and not self.reads_columns,
            of_batch=of_batch,
            **amounts,
        )

    @cached_property
    def _all(self) -> Amounts:
        gathered = [amount for g in self.gathers for amount in (g.rows, g.sources, g.destinations)]
        return Amounts((*self.amounts.values(), *gathered))


@dataclass(eq=False)
class TensorAmount:
    """A tensor of `rows` rows of `width` numbers."""

    rows: Amount
    width: float
    varies: bool  # it gets a gradient
    index: int = 0  # bytes of a number's index [B]; 0: dense rows (rows.RowFormat)
    held: Amount = NOTHING  # its memory [B]; nothing, if other code accounts for the memory
    view_of: TensorAmount | None = None
    holders: int = 0  # operations that saved it for the backward pass, and readers of the output


@dataclass(eq=False)
class Gradient:
    """The gradient of a tensor; its memory is freed when it has no holder left."""

    held: Amount  # its memory [B]
    holders: int = 1


class Node(NamedTuple):
    """The backward pass of one recorded operation."""

    outputs: tuple[TensorAmount, ...]
    inputs: tuple[TensorAmount, ...]  # inputs that get a gradient
    saved: tuple[TensorAmount, ...] = ()  # tensors saved for the backward pass
    extra: Amount = NOTHING  # other memory saved for the backward pass [B]
    touched: Amount = NOTHING  # bytes read and written to compute the inputs' gradients [B]
    passes_on: bool = False  # the output's gradient itself becomes the inputs' gradient
    stays: bool = False  # the caller of the earlier segment's backward pass holds the gradient too
    temporaries: tuple[Amount, ...] = ()  # consecutive temporary tensors [B]
    events: tuple[Amount, ...] = ()  # allocations (negative: releases), with the gradients' own [B]


class Trace:
    """A recorder of operations, their work, and the memory in use."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now: Amount = NOTHING  # memory in use [B]
        self.in_use: list[Amount] = []  # memory in use after each allocation [B]
        self.until_end: list[TensorAmount] = []  # what the layer holds until its forward pass ends
        self.forward, self.backward = Work(), Work()
        self.project = Work(), Work()  # work before the exchange of projected rows
        self.products: list[Product] = []
        self.nodes: list[Node] = []

    # -- tensors -------------------------------------------------------------------------------

    def size(self, rows: Amount, width: float) -> Amount:
        """Return the memory of rows of `width` numbers [B]."""
        return rows * width * self.setting.itemsize

    def new(self, rows: Amount, width: float, varies: bool) -> TensorAmount:
        """Return a new tensor, whose memory is counted once it is held."""
        return TensorAmount(rows, width, varies, held=self.size(rows, width))

    def allocate(self, *sizes: Amount) -> None:
        """Add sizes to the memory in use [B]."""
        self.now = sum(sizes, self.now)
        self.in_use.append(self.now)

    def free(self, size: Amount) -> None:
        """Subtract a size from the memory in use [B]."""
        self.now = self.now - size

    def hold(self, value: TensorAmount) -> None:
        """Add a holder to a tensor; the first holder allocates the tensor's memory."""
        value = value.view_of or value
        if not value.holders:
            self.allocate(value.held)
        value.holders += 1

    def release(self, value: TensorAmount | Gradient) -> None:
        """Remove a holder from a tensor; the last one frees the tensor's memory."""
        value.holders -= 1
        if not value.holders:
            self.free(value.held)

    def record(
        self,
        output: TensorAmount,
        inputs: Iterable[TensorAmount],
        saved: tuple[TensorAmount, ...] = (),
        extra: Amount = NOTHING,
        *,
        also: tuple[TensorAmount, ...] = (),
        **node: Any,
    ) -> TensorAmount:
        """Record an operation, unless its output needs no gradient, and return the output.

        Inputs are freed unless they are saved. also: further outputs. node: fields of `Node`."""
        if output.varies:
            varying = tuple(x for x in inputs if x.varies)
            for value in saved:
                self.hold(value)
            self.allocate(extra)
            self.nodes.append(Node((output, *also), varying, saved, extra, **node))
        return output

    def run_backward(self, out: TensorAmount) -> None:
        """Record the backward pass; the memory of the output's gradient is counted elsewhere."""
        gradients = {out: Gradient(NOTHING)}
        for node in reversed(self.nodes):
            arrived = [gradients.pop(value) for value in node.outputs if value in gradients]
            if not arrived:
                continue
            for x, gradient in zip(node.inputs, self._through(node, arrived), strict=True):
                gradients[x] = self._added(x, gradients.get(x), gradient)
        if self.setting.apart:  # the inputs are leaves, so autograd copies their gradients
            for x, gradient in gradients.items():
                self.allocate(self.size(x.rows, x.width) - gradient.held)

    def _through(self, node: Node, arrived: list[Gradient]) -> list[Gradient]:
        """Run an operation backward: from its outputs' gradients to its inputs' gradients."""
        rows = node.inputs[0].rows if node.inputs else NOTHING
        self.works(rows)[1].add(elementwise_bytes=node.touched)
        new = [Gradient(self.size(x.rows, x.width)) for x in node.inputs]
        if node.passes_on:
            new = arrived * len(node.inputs)
            arrived[0].holders += len(node.inputs) + node.stays
        else:
            for event in node.events:
                self.allocate(event)
            self.allocate(*(gradient.held for gradient in new if not node.events))
        for size in node.temporaries:
            self.allocate(size)
            self.free(size)
        for gradient in arrived:
            self.release(gradient)
        for value in node.saved:
            self.release(value.view_of or value)
        self.free(node.extra)
        return new

    def _added(self, x: TensorAmount, old: Gradient | None, new: Gradient) -> Gradient:
        """Accumulate a gradient of x: in place, if the old gradient has no other holder."""
        if old is None:
            return new
        self.passes(0, SUM, x)
        if old.holders == 1 and old.held.terms:
            self.release(new)
            return old
        both = Gradient(self.size(x.rows, x.width))
        self.allocate(both.held)
        self.release(old)
        self.release(new)
        return both

    # -- work ----------------------------------------------------------------------------------

    def works(self, rows: Amount) -> tuple[Work, Work]:
        """Return the forward and backward work to which operations on such rows belong."""
        before_exchange = self.setting.narrow and rows is LOCAL
        return self.project if before_exchange else (self.forward, self.backward)

    def passes(self, forward: float, backward: float, over: TensorAmount) -> None:
        """Add element-wise passes over a tensor to the forward and the backward work."""
        size = self.size(over.rows, over.width)
        for work, times in zip(self.works(over.rows), (forward, backward), strict=True):
            work.add(elementwise_bytes=times * size)
