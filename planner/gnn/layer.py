"""What a layer of a kind does on any block: its work and its memory, from its operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

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
)
from gnnplan.planner.gnn.counted import Counted, CountedWork, Linear, amount
from gnnplan.planner.gnn.kinds import KINDS, Given, Layer
from gnnplan.planner.gnn.operations import Operations
from gnnplan.planner.gnn.products import Product
from gnnplan.planner.gnn.trace import SUM, GatherOf, Setting, Value, Work


@dataclass(frozen=True, eq=False)
class Played:
    """A layer's work and memory on any block, as its operations tell them."""

    ways: tuple[Work, Work]  # forward and backward
    project: tuple[Work, Work]  # before the exchange of projected rows
    # [B] kept from the forward to the backward pass, with the output; then what is held at the
    # fullest moments of the backward pass
    held: Amounts
    products: tuple[Product, ...]


@cache
def played(spec: Layer, setting: Setting) -> Played:
    """A layer's operations, forward and backward."""
    ops = Operations(setting, {} if spec.counted else spec.parameters)
    return _told(ops, _all_of(ops, spec))


def played_rowwise(
    spec: Layer, setting: Setting, h_out: int = 0, relu: bool = False, twice: bool = False
) -> Played:
    """What is done to a layer's inputs, and the product that follows; h_out 0: none does.

    twice: it has two readers, whose gradients are added."""
    ops = Operations(setting)
    out = _prepare(ops, spec, _inputs(ROWS, setting))
    out = ops.product([out], spec.h_in, h_out, spec.bias, relu) if h_out else out
    ops.passes(0, SUM * twice, out)
    return _told(ops, out)


def _told(ops: Operations, out: Value) -> Played:
    ops.keep(out)
    kept = ops.moments[-1]
    ops.moments.clear()
    ops.go_back(out)
    ways = ops.forward, ops.back
    return Played(ways, ops.project, Amounts((kept, kept, *ops.moments)), tuple(ops.products))


def _inputs(rows: Amount, setting: Setting) -> Value:
    return Value(rows, setting.inputs.numbers, setting.varies, setting.inputs.index)


def _prepare(ops: Operations, spec: Layer, x: Value) -> Value:
    rows = ops.activate(x, spec.norm) if spec.activates else x
    return ops.drop(rows) if spec.drops and ops.setting.dropout else rows


def _all_of(ops: Operations, spec: Layer) -> Value:
    setting = ops.setting
    x = _inputs(LOCAL if setting.narrow else SOURCES, setting)
    prepared = x if setting.apart else _prepare(ops, spec, x)
    if spec.counted:
        return _counted(ops, spec, spec.counted, prepared)
    gathered, own = _gather(ops, spec, prepared)
    inputs = Value(ROWS, x.width, x.varies) if setting.apart else ops.first_rows(x)
    return KINDS[spec.kind].update(ops, spec, Given(gathered, own, inputs, setting.relu))


def _gather(ops: Operations, spec: Layer, prepared: Value) -> tuple[Value, Value]:
    """What is gathered, and the destinations' own prepared rows."""
    setting, kind = ops.setting, KINDS[spec.kind]
    own = Value(OWN, spec.h_in, setting.varies)
    adds = spec.gathers_linearly and not spec.projects_first
    if adds and (setting.cached or setting.apart):
        return Value(ROWS, spec.h_in, setting.varies), own
    if kind.projects_own and adds:
        return ops.aggregate_beside(prepared, spec.sums)
    rows = prepared
    if spec.projects_first:
        rows = kind.project(ops, spec, rows)
    if setting.narrow:  # who calls the backward pass of what was before the exchange holds its rows
        own = ops.segment(ops.first_rows(prepared), OWN) if spec.reads_own else own
        rows = ops.segment(rows, SOURCES)
    gathered = kind.gather(ops, spec, rows)
    return gathered, own if setting.apart or setting.narrow else ops.first_rows(prepared)


# -- layers of the user's own ----------------------------------------------------------------------


def _amount(linear: Linear, sources: Amount = SOURCES) -> Amount:
    return Amount.of(amount(linear, ROWS, sources, EDGES))


def _counted(ops: Operations, spec: Layer, counted: Counted, prepared: Value) -> Value:
    """A layer whose operations were counted as it ran."""
    setting = ops.setting
    outside = setting.apart and counted.linear  # what a gather makes is counted there

    _add(ops.forward, counted.forward)
    _add(ops.back, counted.backward)
    if setting.redrawn:
        _add(ops.forward, counted.structure.work)
    for event in counted.forward_events:
        ops.take(NOTHING if outside and event.of_gather else _amount(event.bytes))
    for product in counted.products:
        ops.products.append(Product(product.h_in, product.h_out, setting.varies, (product.after,)))
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
        gemm_bytes=of(counted.gemm_bytes),
        elementwise_bytes=of(counted.elementwise_bytes),
        hash_ops=of(counted.exponentials),
    )
    work.launches += counted.launches
    work.gathers += [
        GatherOf(of(g.rows), g.width, of(g.among), of(g.into)) for g in counted.gathers
    ]
