"""A recorder of a layer's operations: their work, and the memory in use, forward and backward.

Operations are recorded in order (operations.py). The backward pass visits them from last to first,
as autograd does: it allocates the gradients of an operation's inputs, then frees the gradient of
the operation's output and the tensors that the operation saved.

    forward     out = linear(x)                      allocate out, save x
    backward    gradient of out -> gradient of x     free x, unless another operation saved it

Amounts are linear in a block's counts (amounts.py), so one record holds for blocks of any size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gnnplan.planner.gnn.amounts import LOCAL, NOTHING, Amount, Amounts, Block
from gnnplan.planner.gnn.products import Product
from gnnplan.planner.gnn.rows import RowFormat
from gnnplan.planner.vocabulary.schedule import Compute, Gather

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
    own_apart: bool = False  # own rows are read where they were before the copy
    # the layer completes sums by the layer below: '', by its 'bias', or by bias and 'relu'
    completes: str = ""

    @property
    def unrounded(self) -> int:
        """Bytes of a rounded number while it is summed in the precision of weights [B]; 0 if rows
        are not rounded."""
        return self.weight_itemsize * (self.itemsize < self.weight_itemsize)


class GatherAmounts(NamedTuple):
    """An aggregation in amounts (schedule.Gather)."""

    rows: Amount
    width: int
    sources: Amount
    destinations: Amount


@dataclass
class Work:
    """The work of one pass."""

    amounts: dict[str, Amount] = field(default_factory=dict)  # field of Compute -> amount
    gathers: list[GatherAmounts] = field(default_factory=list)
    launches: int = 0  # counted launches; `on` gets the other launches from Model
    # whether nearly all gathers read the weight of sparse features, whose frequent columns are in
    # cache
    reads_columns: bool = False

    def add(self, **amounts: Amount) -> None:
        for name, amount in amounts.items():
            self.amounts[name] = self.amounts.get(name, NOTHING) + amount

    def on(self, block: Block, itemsize: int, launches: int, of_batch: bool) -> Compute:
        """Evaluate the work on a block; nothing may be added afterwards."""
        n = len(self.amounts)
        values = self._all.on(block)
        amounts: dict[str, Any] = dict(zip(self.amounts, values[:n], strict=True))
        widths = [gather.width for gather in self.gathers]
        return Compute(
            gathers=tuple(
                Gather(rows, width, among, into)
                for width, (rows, among, into) in zip(
                    widths, values[n:].reshape(len(widths), 3, *values.shape[1:]), strict=True
                )
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

    def free(self, *sizes: Amount) -> None:
        """Subtract sizes from the memory in use [B]."""
        for size in sizes:
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
        self._touch(*node.temporaries)
        self._end(node, arrived)
        return new

    def _touch(self, *sizes: Amount) -> None:
        """Allocate and free temporary tensors one after the other [B]."""
        for size in sizes:
            self.allocate(size)
            self.free(size)

    def _end(self, node: Node, arrived: list[Gradient]) -> None:
        for gradient in arrived:
            self.release(gradient)
        for value in node.saved:
            self.release(value.view_of or value)
        self.free(node.extra)

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
