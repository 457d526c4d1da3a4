"""What a layer of the user's own does, as counted from its operations.

executor/layers/count.py runs the layer on small blocks of several sizes and notes what torch does.
Every number is linear in a block's rows R, sources S and edges E, so it is kept as four factors:

    amount = a R + b S + c E + d

The edges are those that the layer reads: self edges are among them where it asks for them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gnnplan.planner.vocabulary.spec import Spec

Linear = tuple[float, float, float, float]  # per row, per source, per edge, and besides
NOTHING: Linear = (0.0, 0.0, 0.0, 0.0)


def amount(linear: Linear, rows: Any, sources: Any, edges: Any) -> Any:
    """The number for a block, whose counts are numbers, or amounts.

    >>> amount((1.0, 2.0, 0.5, 3.0), 10, 20, 100)
    103.0
    """
    per_row, per_source, per_edge, besides = linear
    return per_row * rows + per_source * sources + per_edge * edges + besides


class CountedGather(Spec):
    """An aggregation: rows of `width` numbers are read and added up in other rows."""

    rows: Linear  # that are read
    width: int = Field(ge=1)
    among: Linear  # distinct rows that it reads from
    into: Linear  # rows that it makes


class CountedWork(Spec):
    """Work of one pass of a layer (schedule.Compute)."""

    flops: Linear = NOTHING
    gemm_bytes: Linear = NOTHING
    elementwise_bytes: Linear = NOTHING
    exponentials: Linear = NOTHING  # in plans from before: under half a per cent of a step
    gathers: tuple[CountedGather, ...] = ()
    launches: int = Field(0, ge=0)


class CountedProduct(Spec):
    """A product that oneDNN makes code for (footprint.Product)."""

    rows: Linear
    h_in: int = Field(ge=1)
    h_out: int = Field(ge=1)
    after: str


class Event(Spec):
    """A tensor that comes or goes."""

    bytes: Linear  # negative where it goes
    of_gather: bool  # made before the layer's `update`, or by the backward pass of what is before


class Structure(Spec):
    """What a user's module makes of a block's edges, once."""

    kept: Linear = NOTHING  # [B]
    most: Linear = NOTHING  # [B] while it is made
    work: CountedWork = CountedWork()


class Counted(Spec):
    """A layer of the user's own: what it says of itself, and what was counted."""

    edges: Literal["gcn", "mean", "one", "loop"]
    projects_first: bool
    linear: bool  # `gather` is a weighted sum
    gathered: int = Field(ge=0)  # numbers per row that `gather` reads
    weights: int = Field(ge=0)  # numbers in its parameters
    # numbers of them per column of its input, where it has P3's calls; 0: it has not
    by_column: int = Field(0, ge=0)
    keeps_inputs: bool  # autograd saves the prepared rows
    products: tuple[CountedProduct, ...]
    forward: CountedWork
    backward: CountedWork
    # Tensors that come and go, in their order. The output is one of them; the input's rows, the
    # output's gradient and the sums of the weights' gradients are not.
    forward_events: tuple[Event, ...]
    backward_events: tuple[Event, ...]
    structure: Structure = Structure()
    reads_host: bool = False  # a step waits until the host has read a value of it, or a shape


def between(part: Counted, whole: Counted, at: float, share: float) -> Counted:
    """The layer for a `share` of its input's columns, from that for the share `at`, and for all."""
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
