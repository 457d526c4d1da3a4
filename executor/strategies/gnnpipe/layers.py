"""One layer on one chunk, forward and backward; and rows that stay from step to step.

A layer runs in parts here (layers/layer.py): its neighbourhood is gathered from mixed rows, fresh
and historical, and its gradient towards neighbours is added to the slope by hand.

Of all rows that the rank keeps (chunks.py) there are, in each such layer:

    past    historical rows, as the layer before left them
    mixed   what neighbours read: past rows, overwritten by fresh ones as chunks are processed.
            Both are prepared, by norm and dropout.
    slope   the gradient of the mixed rows

Backward visits the chunks in reverse order. So a chunk may add gradient to rows that were
historical to it after the turn of those rows. Such late gradient stays in `slope`: unused, or with
historical_gradients `carried` into the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import aggregate_transposed, backward, gradient_of
from gnnplan.executor.layers.layer import Drop, Layer
from gnnplan.executor.layers.models import Net
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk


@dataclass
class Passage:
    """A chunk's way through the stage."""

    h: Tensor | None  # the next layer's input rows; None: constant features
    x0: Tensor | None = None  # GCNII's initial rows, a leaf
    encoded: Tensor | None = None  # with its graph
    loss: Tensor | None = None  # on the last stage, with its graph
    gradient: Tensor | None = None  # of h, on the way back

    @property
    def carried(self) -> Tensor | None:
        """What goes past all layers, to the next stage."""
        return None if self.x0 is None else self.x0.detach()

    @property
    def carried_gradient(self) -> Tensor | None:
        """Its gradient, for the stage before."""
        if self.x0 is None:
            return None
        return self.x0.grad if self.x0.grad is not None else torch.zeros_like(self.x0)


class Constant(NamedTuple):
    """What layer 1 keeps of a chunk whose inputs are constant."""

    out: Tensor  # with its graph

    def finish(self) -> Constant:
        """This."""
        return self


class Finished(NamedTuple):
    """A layer's output for a chunk, and what its graph begins with."""

    prepared: Tensor  # own and far rows, with their graph from x
    rows: Tensor  # leaf: own prepared rows
    out: Tensor  # with its graph


class Kept(NamedTuple):
    """What a layer keeps of a chunk from forward to backward.

    x and read are leaves. The gradient towards neighbours is found from `read`: the rows read, or
    where gathering is linear the gathered rows. They are kept with checkpoint too, since the rows
    of neighbours change before backward comes to the chunk.
    """

    x: Tensor  # the chunk's inputs, own and then far rows
    read: Tensor
    finish: Callable[[], Finished]  # gives what is kept, or (checkpoint) computes it again


def _gathers_linearly(layer: Layer) -> bool:
    """Whether the gradient of the rows read follows from that of the gathered rows."""
    return layer.linear and not layer.projects_first


class History:
    """The rows of one rank."""

    def __init__(
        self,
        net: Net,
        widths: dict[int, int],
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        carries: bool,
    ) -> None:
        """widths: input width of every layer whose input varies. carries: historical_gradients."""

        def zeros() -> dict[int, Tensor]:
            return {
                layer: torch.zeros(rows, width, dtype=dtype, device=device)
                for layer, width in widths.items()
            }

        self.net, self.layers = net, list(widths)
        self.past, self.mixed, self.slope = zeros(), zeros(), zeros()
        self.carried = zeros() if carries else {}

    def begin_step(self, layer: int, drop_before: Drop, drop: Drop) -> None:
        """Lay out a layer's rows for a step.

        drop_before: dropout of the step before, whose late gradient is carried. drop: of this step.
        """
        net = self.net.layer(layer)
        if self.carried:
            # The late gradient is one of prepared rows. Preparing is dropout or nothing, which are
            # their own transposes.
            self.carried[layer] = net.prepare(self.slope[layer], drop_before).clone()
        self.slope[layer].zero_()
        with torch.no_grad():
            self.mixed[layer].copy_(net.prepare(self.past[layer], drop))

    def remember(self, layers: Iterable[int]) -> None:
        """Make the mixed rows the historical ones."""
        for layer in layers:
            self.past[layer].copy_(self.mixed[layer])

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: past rows, and late gradient if it is carried on.

        The mixed rows are made from the past ones.
        """
        late = self.slope if self.carried else {}
        return {
            f"{name}.{layer}": rows
            for name, by_layer in (("past", self.past), ("slope", late))
            for layer, rows in by_layer.items()
        }

    def forward(
        self,
        layer: int,
        chunk: Chunk,
        passage: Passage,
        far: Tensor | None,
        drop: Drop,
        refresh: bool,
        checkpoint: bool,
    ) -> Kept:
        """A layer on a chunk's input rows; the passage goes on with its output.

        far: the chunk's rows of other members, if there are some. drop: dropout of own and far
        rows. refresh: the input rows become history. checkpoint: forget what can be computed again.
        """
        h, x0 = passage.h, passage.x0
        assert h is not None
        part, relu = self.net.layer(layer).during(drop), self.net.relu_after(layer)
        linear = _gathers_linearly(part)
        x = (h if far is None else torch.cat([h, far])).detach().requires_grad_()

        def finish(prepared: Tensor) -> Finished:
            rows = prepared.detach()[: chunk.size].requires_grad_()
            gathered = read if linear else chunk.gather_sources(part, read)
            return Finished(prepared, rows, part.update(gathered, rows, x[: chunk.size], x0, relu))

        with torch.set_grad_enabled(not checkpoint):
            prepared = part.prepare(x, drop)
            own_and_far = (chunk.rows, slice(0, chunk.size)), (chunk.far, slice(chunk.size, None))
            for places, rows in own_and_far:
                self.mixed[layer][places] = prepared.detach()[rows]
                if refresh:
                    self.past[layer][places] = x.detach()[rows]
            mixed = self.mixed[layer]
            read = (
                chunk.gather(part, mixed) if linear else mixed.index_select(0, chunk.sources)
            ).requires_grad_()
            finished = finish(prepared)
        passage.h = finished.out.detach()
        if checkpoint:
            return Kept(x, read, lambda: finish(part.prepare(x, drop)))
        return Kept(x, read, lambda: finished)

    def backward(
        self, layer: int, chunk: Chunk, kept: Kept | Constant, passage: Passage
    ) -> Tensor | None:
        """The passage's gradient of the layer's output -> that of its input rows.

        Returns the gradient of own and then far rows; None if the inputs are constant.
        """
        finished = kept.finish()
        if layer == self.net.total:
            assert passage.loss is not None
            passage.loss.backward()  # type: ignore[no-untyped-call]
            # their graph would hold the layer's rows while the layers before go backward
            passage.loss = passage.h = None
        if passage.gradient is not None:
            backward([finished.out], [passage.gradient])
        if isinstance(kept, Constant) or isinstance(finished, Constant):
            return None
        part, slope = self.net.layer(layer), self.slope[layer]
        to_read = (
            aggregate_transposed(chunk.blocks[part.edges], gradient_of(kept.read))
            if _gathers_linearly(part)
            else gradient_of(kept.read)
        )
        slope[chunk.rows] += to_read[: chunk.size]
        # not for own rows too: it is several times as slow as the sum of a slice
        slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])
        del to_read  # the largest of all
        if finished.rows.grad is not None:
            slope[chunk.rows] += finished.rows.grad
        backward([finished.prepared], [chunk.of(slope)])
        gradient = kept.x.grad
        if self.carried:
            for places in (chunk.rows, chunk.far):
                slope[places].zero_()  # passed on; what is added from here on is historical
            gradient = gradient_of(kept.x) + chunk.of(self.carried[layer])
        return gradient
