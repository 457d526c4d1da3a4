"""The work and memory of a layer of the user's own, as counted from a run of its operations.

executor/layers/count.py runs the layer on small blocks of several sizes and records torch's
operations. Every count is linear in a block's rows R, sources S and edges E, so four factors
describe it:

    amount = a R + b S + c E + d

E counts the edges that the layer reads, with self edges if the layer asks for them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gnnplan.planner.vocabulary.spec import Spec

Linear = tuple[float, float, float, float]  # factors per row, per source, per edge; constant
NOTHING: Linear = (0.0, 0.0, 0.0, 0.0)


def amount(linear: Linear, rows: Any, sources: Any, edges: Any) -> Any:
    """Evaluate the factors for a block, whose counts are numbers or amounts (amounts.Amount).

    >>> amount((1.0, 2.0, 0.5, 3.0), 10, 20, 100)
    103.0
    """
    per_row, per_source, per_edge, constant = linear
    return per_row * rows + per_source * sources + per_edge * edges + constant


class CountedGather(Spec):
    """An aggregation: it reads source rows and adds them to destination rows (schedule.Gather)."""

    rows: Linear  # rows read, one per edge
    width: int = Field(ge=1)  # numbers per row
    among: Linear  # distinct source rows
    into: Linear  # destination rows


class CountedWork(Spec):
    """The work of one pass of a layer (schedule.Compute)."""

    flops: Linear = NOTHING
    gemm_bytes: Linear = NOTHING
    elementwise_bytes: Linear = NOTHING
    exponentials: Linear = NOTHING  # only in older plans: under half a per cent of a step
    gathers: tuple[CountedGather, ...] = ()
    launches: int = Field(0, ge=0)


class CountedProduct(Spec):
    """A matrix product that oneDNN compiles code for (products.Product)."""

    rows: Linear
    h_in: int = Field(ge=1)
    h_out: int = Field(ge=1)
    after: str  # the fused operations after it, as in products.Product


class Event(Spec):
    """The allocation or release of a tensor."""

    bytes: Linear  # allocated [B]; negative for a release
    of_gather: bool  # happens before the layer's `update`, or in the backward pass of that part


class Structure(Spec):
    """The tensors that a user's module computes once from a block's edges."""

    kept: Linear = NOTHING  # their memory [B]
    most: Linear = NOTHING  # peak memory while they are computed [B]
    work: CountedWork = CountedWork()


class Counted(Spec):
    """A layer of the user's own: the properties that it declares, and its counts."""

    edges: Literal["gcn", "mean", "one", "loop"]  # edges and weights that it asks for (kinds.Kind)
    projects_first: bool  # multiplies rows by its matrix before it aggregates them
    linear: bool  # `gather` is a weighted sum
    gathered: int = Field(ge=0)  # numbers per row that `gather` reads
    weights: int = Field(ge=0)  # numbers in its parameters
    # numbers in its parameters per column of its input, if it has P3's methods; 0: it has not
    by_column: int = Field(0, ge=0)
    keeps_inputs: bool  # autograd saves the prepared rows
    products: tuple[CountedProduct, ...]
    forward: CountedWork
    backward: CountedWork
    # Allocations and releases in order. They include the output, but neither the input's rows, nor
    # the output's gradient, nor the sums of the weights' gradients.
    forward_events: tuple[Event, ...]
    backward_events: tuple[Event, ...]
    structure: Structure = Structure()
    reads_host: bool = False  # the host waits in every step to read a value or a shape of a tensor


def between(part: Counted, whole: Counted, at: float, share: float) -> Counted:
    """Interpolate the counts for a `share` of the layer's input columns.

    part: the counts for the share `at`. whole: the counts for all columns."""
    weight = (share - at) / (1 - at)

    def blend(of_part: Any, of_whole: Any) -> Any:
        if isinstance(of_whole, dict):
            return {name: blend(of_part[name], value) for name, value in of_whole.items()}
        if isinstance(of_whole, tuple):
            return tuple(blend(*pair) for pair in zip(of_part, of_whole, strict=True))
        if isinstance(of_whole, float):
            return of_part + (of_whole - of_part) * weight
        if isinstance(of_whole, int) and not isinstance(of_whole, bool):
            return max(min(of_part, 1), round(of_part + (of_whole - of_part) * weight))
        return of_whole

    return Counted.model_validate(blend(part.model_dump(), whole.model_dump()))
