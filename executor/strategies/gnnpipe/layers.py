"""One layer on one chunk, forward and backward.

A layer runs in parts here (layers/models.py): its neighbourhood is gathered from mixed rows, fresh
and historical (history.py), and its gradient towards neighbours is added to the slope by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import aggregate_transposed, backward, gradient_of
from gnnplan.executor.layers.layer import Drop, Layer
from gnnplan.executor.layers.models import Net
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk
from gnnplan.executor.strategies.gnnpipe.history import History
from gnnplan.planner.vocabulary.errors import SpecError

PARTS = ("prepare", "gather", "update", "edges", "linear", "projects_first")


@dataclass
class Passage:
    """A chunk's way through the stage."""

    h: Tensor | None  # the next layer's input rows; None: constant features
    x0: Tensor | None = None  # GCNII's initial rows, a leaf
    encoded: Tensor | None = None  # with its graph
    loss: Tensor | None = None  # on the last stage, with its graph
    gradient: Tensor | None = None  # of h, on the way back
    summed: Tensor | None = None  # of all layers' rows so far, if the model adds them up
    to_sum: Tensor | None = None  # its gradient

    @property
    def carried(self) -> Tensor | None:
        """What goes past all layers, to the next stage."""
        return self.summed if self.x0 is None else self.x0.detach()

    @property
    def carried_gradient(self) -> Tensor | None:
        """Its gradient, for the stage before."""
        if self.x0 is None:
            return self.to_sum
        return self.x0.grad if self.x0.grad is not None else torch.zeros_like(self.x0)


@dataclass
class Kept:
    """What a layer keeps of a chunk from forward to backward.

    x, read and rows are leaves. The gradient towards neighbours is found from `read`: the rows
    read, or where gathering is linear the gathered rows. `x` and `read` are kept with checkpoint
    too, since the rows of neighbours change before backward comes to the chunk.
    """

    x: Tensor | None = None  # the chunk's inputs, own and then far rows
    read: Tensor | None = None
    prepared: Tensor | None = None  # own and far rows, with their graph from x
    rows: Tensor | None = None  # own prepared rows
    out: Tensor | None = None  # with its graph
    again: Callable[[], None] | None = None  # checkpoint: computes prepared, rows and out


def must_run_in_parts(net: Net, layers: Iterable[int]) -> None:
    """Raise SpecError if a layer lacks what GNNPipe calls, as a user's own layer may."""
    for number in layers:
        layer = net.layer(number)
        kind = type(layer)
        missing = [name for name in PARTS if not _has(layer, name)]
        if getattr(layer, "projects_first", False) and not _has(layer, "project"):
            missing.append("project")
        if hasattr(layer, "combine") and not _has(layer, "combine"):  # the base class's update
            missing.append("combine")
        if missing:
            raise SpecError(
                f"gnnpipe: layer {number} of {net.total} ({kind.__name__}) has no"
                f" {', '.join(missing)}: GNNPipe runs a layer in parts, because a chunk reads fresh"
                f" and historical rows ({', '.join(PARTS)}, and project where it projects first;"
                " executor/layers/models.py); add them, or use data_parallel or gsplit, which run"
                " any layer"
            )


def _has(layer: Layer, name: str) -> bool:
    """Whether a layer has an attribute, and if it is a method one that does something."""
    value = getattr(layer, name, None)
    code = getattr(value, "__code__", None)
    # the base class of layers declares methods that only raise this
    return value is not None and (code is None or code.co_names != ("NotImplementedError",))


def _gathers_linearly(layer: Layer) -> bool:
    """Whether the gradient of the rows read follows from that of the gathered rows."""
    return layer.linear and not layer.projects_first


def forward(
    net: Net,
    layer: int,
    chunk: Chunk,
    history: History,
    passage: Passage,
    far: Tensor | None,
    drop: Drop,
    refresh: bool,
    checkpoint: bool,
) -> Kept:
    """A layer on a chunk's input rows; the passage goes on with its output.

    far: the chunk's rows of other members, if there are some. drop: dropout of own and far rows.
    refresh: the input rows become history. checkpoint: forget what can be computed again.
    """
    h, x0 = passage.h, passage.x0
    assert h is not None
    part, relu, linear = (
        net.layer(layer).during(drop),
        net.relu_after(layer),
        _gathers_linearly(net.layer(layer)),
    )
    x = (h if far is None else torch.cat([h, far])).detach().requires_grad_()

    def finish(prepared: Tensor, read: Tensor) -> None:
        kept.prepared = prepared
        kept.rows = prepared.detach()[: chunk.size].requires_grad_()
        gathered = read if linear else chunk.gather_sources(part, read)
        kept.out = part.update(gathered, kept.rows, x[: chunk.size], x0, relu)

    with torch.set_grad_enabled(not checkpoint):
        prepared = part.prepare(x, drop)
        own_and_far = (chunk.rows, slice(0, chunk.size)), (chunk.far, slice(chunk.size, None))
        for places, rows in own_and_far:
            history.mixed[layer][places] = prepared.detach()[rows]
            if refresh:
                history.past[layer][places] = x.detach()[rows]
        mixed = history.mixed[layer]
        read = (
            chunk.gather(part, mixed) if linear else mixed.index_select(0, chunk.sources)
        ).requires_grad_()
        kept = Kept(x, read)
        finish(prepared, read)
    assert kept.out is not None
    passage.h = kept.out.detach()
    if checkpoint:
        kept.prepared = kept.rows = kept.out = None
        kept.again = lambda: finish(part.prepare(x, drop), read)
    return kept


def layer_backward(
    net: Net, layer: int, chunk: Chunk, history: History, kept: Kept, passage: Passage, drop: Drop
) -> Tensor | None:
    """The passage's gradient of the layer's output -> that of its input rows.

    drop: dropout of the chunk's own rows before the next layer. Returns the gradient of own and
    then far rows; None if the inputs are constant.
    """
    if kept.again:
        kept.again()
        kept.again = None  # it refers to `kept`: a reference cycle would outlive the step
    if layer == net.total:
        assert passage.loss is not None
        passage.loss.backward()  # type: ignore[no-untyped-call]
        # their graph would hold the layer's rows while the layers before go backward
        passage.loss = passage.h = None
        if passage.summed is not None:
            passage.to_sum, passage.summed = passage.summed.grad, None
    if passage.to_sum is not None:
        assert kept.out is not None
        by_sum = net.add_backward(layer, kept.out, drop, passage.to_sum)
        passage.gradient = by_sum if passage.gradient is None else passage.gradient.add_(by_sum)
        del by_sum
    if passage.gradient is not None:
        assert kept.out is not None
        backward([kept.out], [passage.gradient])
    if kept.x is None or kept.read is None or kept.rows is None:
        return None
    assert kept.prepared is not None
    part, slope = net.layer(layer), history.slope[layer]
    to_read = (
        aggregate_transposed(chunk.blocks[part.edges], gradient_of(kept.read))
        if _gathers_linearly(part)
        else gradient_of(kept.read)
    )
    slope[chunk.rows] += to_read[: chunk.size]
    # not for own rows too: it is several times as slow as the sum of a slice
    slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])
    del to_read  # the largest of all
    if kept.rows.grad is not None:
        slope[chunk.rows] += kept.rows.grad
    backward([kept.prepared], [chunk.of(slope)])
    gradient = kept.x.grad
    if history.carried:
        for places in (chunk.rows, chunk.far):
            slope[places].zero_()  # passed on; what is added from here on is historical
        gradient = gradient_of(kept.x) + chunk.of(history.carried[layer])
    return gradient
