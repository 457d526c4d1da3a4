"""Work and memory of a layer on any block, found by recording the layer's operations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from gnnplan.planner.gnn.counted import Counted, CountedWork, Linear, amount
from gnnplan.planner.gnn.kinds import KINDS, LayerSpec, UpdateInputs
from gnnplan.planner.gnn.operations import Operations
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
    GatherAmounts,
    Product,
    Setting,
    TensorAmount,
    Work,
)


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
        return ops.aggregate_with_own(prepared, spec.sums)
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

    _add(ops.forward, counted.forward)
    _add(ops.backward, counted.backward)
    if setting.resamples:
        _add(ops.forward, counted.structure.work)
    for event in counted.forward_events:
        ops.allocate(NOTHING if outside and event.of_gather else _amount(event.bytes))
    for product in counted.products:
        ops.products.append(Product(product.h_in, product.h_out, setting.varies, (product.after,)))
    keeps = counted.keeps_inputs or counted.projects_first
    events = (event for event in counted.backward_events if not (outside and event.of_gather))
    return ops.record(
        TensorAmount(ROWS, spec.h_out, True),
        () if outside else (prepared,),
        (prepared,) if keeps else (),
        events=tuple(_amount(event.bytes) for event in events),
    )


def _add(work: Work, counted: CountedWork) -> None:
    def on_read(linear: Linear) -> Amount:
        return _amount(linear, READ)

    work.add(
        flops=on_read(counted.flops),
        gemm_bytes=on_read(counted.gemm_bytes),
        elementwise_bytes=on_read(counted.elementwise_bytes),
        hash_ops=on_read(counted.exponentials),
    )
    work.launches += counted.launches
    work.gathers += [
        GatherAmounts(on_read(g.rows), g.width, on_read(g.among), on_read(g.into))
        for g in counted.gathers
    ]
