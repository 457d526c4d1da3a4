"""What the operations of a layer work, and what they hold: a gradient goes back through them.

Operations are noted one after the other (operations.py). Backward goes from the last to the first,
as autograd does: the gradients of what an operation read appear, then the gradient that they were
made of goes, and what was saved.

    forward     out = linear(x)                      out is made, x is saved
    backward    gradient of out -> gradient of x     x goes, unless others have saved it, too

Nothing here knows how large a block is: amounts are linear in its counts (amounts.py)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gnnplan.planner.gnn.amounts import LOCAL, NOTHING, Amount, Amounts, Block
from gnnplan.planner.gnn.products import Product
from gnnplan.planner.gnn.rows import Rows
from gnnplan.planner.vocabulary.schedule import Compute, Gather

SUM = 3  # passes over numbers, of the sum of two tensors


class Setting(NamedTuple):
    """What a layer's operations depend on besides its shape (model.Model)."""

    itemsize: int  # [B] of a number of a row
    weight_itemsize: int
    dropout: bool
    inputs: Rows
    redrawn: bool
    by_pieces: bool
    in_place: bool
    on_gpu: bool
    relu: bool = False  # it ends in ReLU
    varies: bool = True  # its inputs get a gradient
    cached: bool = False  # its aggregate is made before training
    narrow: bool = False  # its rows are projected before the exchange
    # its inputs are prepared in a segment of their own, and a gather that only weighs and adds is
    # done outside autograd (GNNPipe)
    apart: bool = False

    @property
    def unrounded(self) -> int:
        """[B] of a rounded number while it is added up, in the type of weights; 0: rows are not
        rounded."""
        return self.weight_itemsize * (self.itemsize < self.weight_itemsize)


class GatherOf(NamedTuple):
    """An aggregation (schedule.Gather)."""

    rows: Amount
    width: int
    among: Amount
    into: Amount


@dataclass
class Work:
    """Work of one pass."""

    amounts: dict[str, Amount] = field(default_factory=dict)  # by field of Compute
    gathers: list[GatherOf] = field(default_factory=list)
    launches: int = 0  # that were counted; Model counts the others

    def add(self, **amounts: Amount) -> None:
        for name, amount in amounts.items():
            self.amounts[name] = self.amounts.get(name, NOTHING) + amount

    def on(self, block: Block, itemsize: int, launches: int, scattered: bool) -> Compute:
        """The work on a block, once all is added."""
        n = len(self.amounts)
        found = self._told.on(block)
        amounts: dict[str, Any] = dict(zip(self.amounts, found[:n], strict=True))
        widths = [gather.width for gather in self.gathers]
        return Compute(
            gathers=tuple(
                Gather(rows, width, among, into)
                for width, (rows, among, into) in zip(
                    widths, found[n:].reshape(len(widths), 3, *found.shape[1:]), strict=True
                )
            ),
            launches=launches + self.launches,
            itemsize=itemsize,
            scattered=scattered,
            **amounts,
        )

    @cached_property
    def _told(self) -> Amounts:
        gathered = [amount for g in self.gathers for amount in (g.rows, g.among, g.into)]
        return Amounts((*self.amounts.values(), *gathered))


@dataclass(eq=False)
class Value:
    """A tensor: so many rows of so many numbers."""

    rows: Amount
    width: float
    varies: bool  # it gets a gradient
    index: int = 0  # [B] of a number; 0: all numbers are stored (rows.Rows)
    held: Amount = NOTHING  # [B]; nothing: it is held elsewhere
    view_of: Value | None = None
    holders: int = 0  # operations that have saved it for the backward pass, and who reads what ends


@dataclass(eq=False)
class Gradient:
    held: Amount  # [B]
    holders: int = 1


class Node(NamedTuple):
    """How a gradient goes back through an operation."""

    made: tuple[Value, ...]
    to: tuple[Value, ...]  # that get a gradient
    saved: tuple[Value, ...] = ()
    extra: Amount = NOTHING  # [B] that are saved besides
    passed: Amount = NOTHING  # that is read and written for the new gradients [B]
    passes_on: bool = False  # the gradient goes on as it is
    stays: bool = False  # and is held by whoever calls the backward pass of what was before
    temporaries: tuple[Amount, ...] = ()  # beside the new gradients, one after the other [B]
    events: tuple[Amount, ...] = ()  # what comes and goes, the new gradients among it [B]


class Trace:
    """Notes operations, and what they do."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.now: Amount = NOTHING  # [B] that are held
        self.moments: list[Amount] = []  # [B] that ever were
        self.forward, self.back = Work(), Work()
        self.project = Work(), Work()  # before the exchange of projected rows
        self.products: list[Product] = []
        self.nodes: list[Node] = []

    # -- tensors -------------------------------------------------------------------------------

    def size(self, rows: Amount, width: float) -> Amount:
        return rows * width * self.setting.itemsize

    def made(self, rows: Amount, width: float, varies: bool) -> Value:
        """A new tensor."""
        return Value(rows, width, varies, held=self.size(rows, width))

    def take(self, *sizes: Amount) -> None:
        """Allocate so many bytes."""
        self.now = sum(sizes, self.now)
        self.moments.append(self.now)

    def free(self, *sizes: Amount) -> None:
        for size in sizes:
            self.now = self.now - size

    def keep(self, value: Value) -> None:
        """Hold a tensor after the operations that read it."""
        value = value.view_of or value
        if not value.holders:
            self.take(value.held)
        value.holders += 1

    def let_go(self, value: Value | Gradient) -> None:
        """Hold it once less."""
        value.holders -= 1
        if not value.holders:
            self.free(value.held)

    def note(
        self,
        made: Value,
        to: Iterable[Value],
        saved: tuple[Value, ...] = (),
        extra: Amount = NOTHING,
        *,
        also: tuple[Value, ...] = (),
        **node: Any,
    ) -> Value:
        """How the gradient of what an operation made goes back, if it has one (the fields of
        `Node`). What it read goes, unless it is saved. also: what it made besides."""
        if made.varies:
            varying = tuple(x for x in to if x.varies)
            for value in saved:
                self.keep(value)
            self.take(extra)
            self.nodes.append(Node((made, *also), varying, saved, extra, **node))
        return made

    def go_back(self, out: Value) -> None:
        """The backward pass. The gradient of what comes out is held elsewhere."""
        gradients = {out: Gradient(NOTHING)}
        for node in reversed(self.nodes):
            arrived = [gradients.pop(value) for value in node.made if value in gradients]
            if not arrived:
                continue
            for x, gradient in zip(node.to, self._through(node, arrived), strict=True):
                gradients[x] = self._added(x, gradients.get(x), gradient)
        if self.setting.apart:  # what begins here has a copy
            for x, gradient in gradients.items():
                self.take(self.size(x.rows, x.width) - gradient.held)

    def _through(self, node: Node, arrived: list[Gradient]) -> list[Gradient]:
        """The gradients that an operation makes."""
        self.works(node.to[0].rows if node.to else NOTHING)[1].add(elementwise_bytes=node.passed)
        new = [Gradient(self.size(x.rows, x.width)) for x in node.to]
        if node.passes_on:
            new = arrived * len(node.to)
            arrived[0].holders += len(node.to) + node.stays
        else:
            for event in node.events:
                self.take(event)
            self.take(*(gradient.held for gradient in new if not node.events))
        self._touch(*node.temporaries)
        self._end(node, arrived)
        return new

    def _touch(self, *sizes: Amount) -> None:
        """Allocate and free, one after the other."""
        for size in sizes:
            self.take(size)
            self.free(size)

    def _end(self, node: Node, arrived: list[Gradient]) -> None:
        for gradient in arrived:
            self.let_go(gradient)
        for value in node.saved:
            self.let_go(value.view_of or value)
        self.free(node.extra)

    def _added(self, x: Value, old: Gradient | None, new: Gradient) -> Gradient:
        """A second gradient is added to the first, in place where nobody else reads that."""
        if old is None:
            return new
        self.passes(0, SUM, x)
        if old.holders == 1 and old.held.terms:
            self.let_go(new)
            return old
        both = Gradient(self.size(x.rows, x.width))
        self.take(both.held)
        self.let_go(old)
        self.let_go(new)
        return both

    # -- work ----------------------------------------------------------------------------------

    def works(self, rows: Amount) -> tuple[Work, Work]:
        """Forward and backward work on such rows."""
        before_exchange = self.setting.narrow and rows is LOCAL
        return self.project if before_exchange else (self.forward, self.back)

    def passes(self, forward: float, backward: float, over: Value) -> None:
        """Element-wise operations pass over a tensor so often."""
        size = self.size(over.rows, over.width)
        for work, times in zip(self.works(over.rows), (forward, backward), strict=True):
            work.add(elementwise_bytes=times * size)
