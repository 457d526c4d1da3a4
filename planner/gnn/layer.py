"""What a layer does, operation by operation. Its work and its memory follow (operations.py).

A layer first prepares its input rows (norm, activation, dropout). Then it does two things, in the
order that costs less: it multiplies rows by its matrix, and it aggregates rows over the edges.

    h_{l-1} [S, H_{l-1}]   prepare | project | gather | update    h_l [R, H_l]     projects_first
                           prepare | gather  | update                              otherwise

R rows are written (destinations) and S rows are read (sources, which include the destinations).
The executor's layers do the same (executor/layers/models.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from gnnplan.planner.gnn.amounts import (
    EDGES,
    LOCAL,
    NOTHING,
    OWN,
    READ,
    ROWS,
    SOURCES,
    Amount,
    Amounts,
    peaks,
)
from gnnplan.planner.gnn.counted import Counted, CountedWork, Linear, amount
from gnnplan.planner.gnn.operations import Operations
from gnnplan.planner.gnn.products import Product
from gnnplan.planner.gnn.trace import SUM, GatherOf, Setting, Value, Work
from gnnplan.planner.gnn.workload import Residual


@dataclass(frozen=True)
class Layer:
    """The shape of one layer, and what it does to its inputs."""

    h_in: int
    h_out: int
    kind: str = "gcn"  # what it does (KINDS); 'own': a layer of the user's, which was counted
    # multiplies, then aggregates: its output is narrower, or it is attention, or it reads sparse
    # features
    projects_first: bool = False
    matrices: int = 1  # products with a matrix [h_in, h_out]; 0: the layer only aggregates
    sums: int = 1  # aggregations over the edges; a softmax of messages is a ratio of two
    heads: int = 0  # of attention; each adds a logit to a projected row
    # Norm and ReLU are the first thing that the layer does to its inputs. Otherwise they are the
    # last thing that the layer before does.
    activates: bool = False
    norm: str = "none"  # of its inputs, if it activates them: 'layer' or 'batch'
    drops: bool = True  # dropout of its inputs
    bias: bool = True
    middle: int = 0  # GIN: numbers per row between its two products; 0: there is one
    residual: Residual | None = None
    counted: Counted | None = None

    @property
    def weights(self) -> int:
        """Numbers in its parameters."""
        return self.counted.weights if self.counted else played(self, PLAIN).weights

    @property
    def edges(self) -> str:
        """Those that it asks for (executor/layers/layer.py)."""
        return self.counted.edges if self.counted else KINDS[self.kind].edges

    @property
    def self_edges(self) -> bool:
        """Whether it aggregates over its own row too."""
        return self.edges in ("gcn", "loop")

    @property
    def weighs_edges(self) -> bool:
        """Whether its edges have weights: those of a mean, or GCN's norm."""
        return self.edges in ("gcn", "mean")

    @property
    def gathers_linearly(self) -> bool:
        """Whether its gathering is a weighted sum of rows."""
        return self.counted.linear if self.counted else KINDS[self.kind].linear

    @property
    def reads_own(self) -> bool:
        """Whether it reads the rows of its destinations besides what it aggregates."""
        return self.matrices > 1 or self.residual is not None or self.counted is not None

    @property
    def multiplied(self) -> int:
        """Numbers per row after the first matrix."""
        # GATv2: a logit is of a sum of two rows, so a row has parts for readers and for sources
        return 2 * self.h_out if self.kind == "gatv2" else self.middle or self.h_out

    @property
    def projected(self) -> int:
        """Numbers per projected row."""
        if self.counted:
            return self.counted.gathered
        return self.multiplied + self.heads * (self.kind == "gat")

    @property
    def gathered(self) -> int:
        """Numbers per row that is summed over the edges."""
        if self.counted:
            return self.counted.gathered
        return (self.middle or self.h_out) if self.projects_first else self.h_in


# -- what the kinds do -----------------------------------------------------------------------------


class Given(NamedTuple):
    """What a kind of layer is given for its `update`."""

    gathered: Value
    own: Value  # the destinations' own prepared rows
    inputs: Value  # their inputs
    relu: bool


def _gcn(ops: Operations, spec: Layer, given: Given) -> Value:
    """GCN; a layer of SGC may have no matrix."""
    if spec.matrices and not spec.projects_first:
        return ops.linear([given.gathered], spec.h_in, spec.h_out, spec.bias, given.relu)
    out = ops.bias(given.gathered) if spec.bias else given.gathered
    return ops.relu(out, in_place=False) if given.relu else out


def _sage(ops: Operations, spec: Layer, given: Given) -> Value:
    shape = spec.h_in, spec.h_out
    if not spec.projects_first:
        return ops.linear([given.own, given.gathered], *shape, spec.bias, given.relu)
    out = ops.add(given.gathered, ops.linear([given.own], *shape, spec.bias))
    return ops.relu(out) if given.relu else out


def _gin(ops: Operations, spec: Layer, given: Given) -> Value:
    if spec.projects_first:
        hidden = ops.relu(ops.bias(given.gathered))
    else:
        hidden = ops.linear([given.gathered], spec.h_in, spec.middle, True, True)
    return ops.linear([hidden], spec.middle, spec.h_out, spec.bias, given.relu)


def _gcnii(ops: Operations, spec: Layer, given: Given) -> Value:
    """The aggregate is mixed with initial rows, and with its own product."""
    mixed = ops.lerp(given.gathered, ops.initial_rows(spec.h_in))
    mixed.lives_on = True
    out = ops.lerp(mixed, ops.linear([mixed], spec.h_in, spec.h_out))
    ops.done(mixed)
    return ops.relu(out) if given.relu else out


def _attention(ops: Operations, spec: Layer, given: Given) -> Value:
    out = ops.bias(given.gathered) if spec.bias else given.gathered
    return ops.relu(out, in_place=spec.bias) if given.relu else out


def _gen(ops: Operations, spec: Layer, given: Given) -> Value:
    """ResGCN+: the aggregate plus own rows, a product, plus inputs."""
    rows = ops.add(given.gathered, given.own)
    out = ops.linear([rows], spec.h_in, spec.h_out, spec.bias)
    return ops.add(out, given.inputs) if spec.activates else out


class Kind(NamedTuple):
    """A kind of layer."""

    update: Callable[[Operations, Layer, Given], Value]  # what it does after it gathered
    edges: str
    # Kernels on a GPU, without those of dropout and norm (tests/executor/test_launches.py).
    launches: tuple[int, int]
    linear: bool = True  # its gathering is a weighted sum


KINDS = {
    "gcn": Kind(_gcn, "gcn", (6, 6)),
    "sage": Kind(_sage, "mean", (8, 8)),
    "gin": Kind(_gin, "loop", (10, 11)),
    "gcnii": Kind(_gcnii, "gcn", (10, 12)),
    "gat": Kind(_attention, "loop", (15, 21), linear=False),
    "gatv2": Kind(_attention, "loop", (8, 15), linear=False),
    "gen": Kind(_gen, "one", (9, 8), linear=False),
}


# -- from the operations to what is told of them ---------------------------------------------------


@dataclass(frozen=True, eq=False)
class Played:
    """What is told of a layer on any block."""

    ways: tuple[Work, Work]  # forward and backward
    project: tuple[Work, Work]  # before the exchange of projected rows
    # [B] kept from the forward to the backward pass, with the output; then what is held at the
    # fullest moments of the forward pass, so many, and of the backward pass
    held: Amounts
    moments: int
    products: tuple[Product, ...]
    weights: int  # numbers in its parameters


PLAIN = Setting(4, 4, False, 0.0, False, False, False, False)  # as parameters depend on none


@cache
def played(spec: Layer, setting: Setting) -> Played:
    """A layer's operations, forward and backward."""
    ops = Operations(setting)
    return _told(ops, _all_of(ops, spec))


@cache
def played_rowwise(
    spec: Layer, setting: Setting, h_out: int = 0, relu: bool = False, twice: bool = False
) -> Played:
    """What is done to a layer's inputs, and the product that follows; h_out 0: none does.

    twice: it has two readers, whose gradients are added."""
    ops = Operations(setting)
    out = _prepare(ops, spec, _inputs(ROWS, spec, setting))
    out = ops.linear([out], spec.h_in, h_out, spec.bias, relu) if h_out else out
    ops.passes(0, SUM * twice, out)
    return _told(ops, out)


def _told(ops: Operations, out: Value) -> Played:
    tape = ops.tape
    kept, forward = Amount.of(tape.now), peaks(tape.held)
    tape.held = [tape.now]
    ops.go_back(out)
    held = Amounts((kept, *forward, *peaks(tape.held)))
    ways = ops.forward, ops.back
    return Played(ways, ops.project, held, len(forward), tuple(ops.products), ops.weights)


def _inputs(rows: Amount, spec: Layer, setting: Setting) -> Value:
    sparse = setting.nonzeros > 0
    return Value(rows, setting.nonzeros or spec.h_in, setting.varies, sparse, lives_on=True)


def _prepare(ops: Operations, spec: Layer, x: Value) -> Value:
    rows = ops.activate(x, spec.norm) if spec.activates else x
    return ops.drop(rows) if spec.drops and ops.setting.dropout else rows


def _all_of(ops: Operations, spec: Layer) -> Value:
    setting, residual = ops.setting, spec.residual
    x = _inputs(LOCAL if setting.narrow else SOURCES, spec, setting)
    prepared = x if setting.apart else _prepare(ops, spec, x)
    prepared.lives_on = True
    if spec.counted:
        out = _counted(ops, spec, spec.counted, prepared)
        if prepared is not x:
            ops.done(prepared)
        return out
    ops.notes_tensor(SOURCES, spec.multiplied if setting.narrow or x.sparse else spec.h_in)
    gathered, own = _gather(ops, spec, prepared)
    gathered.lives_on = True
    inputs = Value(ROWS, x.width, x.varies) if setting.apart else ops.first_rows(x)
    after = residual is None or residual.after_relu
    out = KINDS[spec.kind].update(ops, spec, Given(gathered, own, inputs, setting.relu and after))
    if residual:
        mine = own if residual.of == "prepared" else inputs
        if residual.linear:
            mine = ops.linear([mine], spec.h_in, spec.h_out, residual.bias)
        out = ops.add(out, mine)
        out = ops.relu(out) if setting.relu and not after else out
    # who calls the backward pass of what was before the exchange holds own rows
    held = {out, x, prepared} if setting.narrow and spec.reads_own else {out, x}
    for value in {gathered, prepared} - held:
        ops.done(value)
    return out


def _gather(ops: Operations, spec: Layer, prepared: Value) -> tuple[Value, Value]:
    """What is gathered, and the destinations' own prepared rows."""
    setting = ops.setting
    own = Value(OWN, spec.h_in, setting.varies)
    adds = spec.gathers_linearly and not spec.projects_first
    if adds and (setting.cached or setting.apart):
        return Value(ROWS, spec.h_in, setting.varies), own
    if spec.kind == "sage" and adds:
        return ops.aggregate_beside(prepared, spec.sums)
    rows = prepared
    if spec.projects_first:
        rows = ops.linear([rows], spec.h_in, spec.multiplied, bias=spec.kind == "gatv2")
        rows = ops.beside_logits(rows, spec.heads) if spec.kind == "gat" else rows
    if setting.narrow:
        rows.lives_on = True
        own = ops.segment(ops.first_rows(prepared), OWN)
        rows = ops.segment(rows, SOURCES)
    gathered = _sum(ops, spec, rows)
    return gathered, own if setting.apart or setting.narrow else ops.first_rows(prepared)


def _sum(ops: Operations, spec: Layer, rows: Value) -> Value:
    if spec.kind == "gat":
        return ops.attend(rows, spec.heads)
    if spec.kind == "gatv2":
        return ops.attend_pairs(rows, spec.heads)
    if spec.kind == "gen":
        return _messages(ops, spec, rows)
    return ops.aggregate(rows, spec.sums)


def _messages(ops: Operations, spec: Layer, rows: Value) -> Value:
    """ResGCN+: messages ReLU(x) summed, or weighted by a softmax."""
    messages = ops.shift(rows if spec.activates else ops.relu(rows, in_place=False))
    return ops.softmax_aggregate(messages) if spec.sums > 1 else ops.aggregate(messages, spec.sums)


# -- layers of the user's own ----------------------------------------------------------------------


def _amount(linear: Linear, sources: Amount = SOURCES) -> Amount:
    return Amount.of(amount(linear, ROWS, sources, EDGES))


def _counted(ops: Operations, spec: Layer, counted: Counted, prepared: Value) -> Value:
    """A layer whose operations were counted as it ran."""
    tape, setting = ops.tape, ops.setting
    outside = setting.apart and counted.linear  # what a gather makes is counted there

    _add(ops.forward, counted.forward)
    _add(ops.back, counted.backward)
    if setting.redrawn:
        _add(ops.forward, counted.structure.work)
        tape.touch(_amount(counted.structure.most) * (not setting.on_gpu))  # the host makes it
    for event in counted.forward_events:
        tape.take(NOTHING if outside and event.of_gather else _amount(event.bytes))
    for product in counted.products:
        ops.products.append(
            Product(
                _amount(product.rows), product.h_in, product.h_out, setting.varies, (product.after,)
            )
        )
    keeps = counted.keeps_inputs or counted.projects_first
    back = (event for event in counted.backward_events if not (outside and event.of_gather))
    return ops.note(
        Value(ROWS, spec.h_out, True),
        () if outside else (prepared,),
        (prepared,) if keeps else (),
        events=tuple(_amount(event.bytes) for event in back),
    )


def _add(work: Work, counted: CountedWork) -> None:
    def of(linear: Linear) -> Amount:
        return _amount(linear, READ)

    work.add(
        flops=of(counted.flops),
        weight_gradient_flops=of(counted.weight_gradient_flops),
        gemm_bytes=of(counted.gemm_bytes),
        elementwise_bytes=of(counted.elementwise_bytes),
        hash_ops=of(counted.exponentials),
    )
    work.launches += counted.launches
    work.tensors.append(of(counted.tensor_bytes))
    work.gathers += [
        GatherOf(of(g.rows), g.width, of(g.among), of(g.into)) for g in counted.gathers
    ]
