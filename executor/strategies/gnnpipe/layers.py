"""One layer on one chunk, forward and backward; and rows that stay from step to step.

A layer runs in parts here (layers/layer.py): its neighbourhood is gathered from mixed rows, fresh
and historical, and its gradient towards neighbours is added to the slope by hand. Forward leaves a
function behind, the way back, which has what the backward pass needs.

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

from collections.abc import Callable

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import aggregate_transposed, backward, gradient_of
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk

# the way back: from what backward begins with, which has a layer's output in its graph, and from
# its gradient to that of the layer's input rows
BackFrom = Callable[[Tensor, Tensor], Tensor]


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

    def remember(self) -> None:
        """Make the mixed rows the historical ones."""
        for layer in self.layers:
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
        inputs: Tensor,
        x0: Tensor | None,
        drop: Drop,
        refresh: bool,
        checkpoint: bool,
    ) -> tuple[Tensor, BackFrom]:
        """A layer on a chunk's input rows, own and far ones -> its output, and the way back.

        drop: dropout of these rows. refresh: they become history. checkpoint: forget what can be
        computed again. The rows that neighbours have cannot, for they change before backward comes
        to the chunk: what is read of them stays (where gathering is linear, only the gathered
        rows).
        """
        part, relu = self.net.layer(layer).during(drop), self.net.relu_after(layer)
        linear = part.linear and not part.projects_first  # then sums tell the gradient of rows
        mixed, x = self.mixed[layer], inputs.detach().requires_grad_()

        def end(prepared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Own and far prepared rows, with their graph; a leaf of the own ones; the output."""
            rows = prepared.detach()[: chunk.size].requires_grad_()
            gathered = read if linear else chunk.gather_sources(part, read)
            return prepared, rows, part.update(gathered, rows, x[: chunk.size], x0, relu)

        with torch.set_grad_enabled(not checkpoint):
            prepared = part.prepare(x, drop)
            own_and_far = (chunk.rows, slice(0, chunk.size)), (chunk.far, slice(chunk.size, None))
            for places, rows in own_and_far:
                mixed[places] = prepared.detach()[rows]
                if refresh:
                    self.past[layer][places] = x.detach()[rows]
            read = mixed.index_select(0, chunk.sources)
            read = (chunk.gather_sources(part, read) if linear else read).requires_grad_()
            *kept, out = end(prepared)
        del prepared
        if checkpoint:
            kept = []

        def back(root: Tensor, gradient: Tensor) -> Tensor:
            """-> the gradient of own and then far input rows."""
            prepared, rows, root = (*kept, root) if kept else end(part.prepare(x, drop))
            backward([root], [gradient])
            to_read = gradient_of(read)
            if linear:
                to_read = aggregate_transposed(chunk.blocks[part.edges], to_read)
            slope = self.slope[layer]
            slope[chunk.rows] += to_read[: chunk.size]
            # not for own rows too: it is several times as slow as the sum of a slice
            slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])
            del to_read  # the largest of all
            if rows.grad is not None:
                slope[chunk.rows] += rows.grad
            backward([prepared], [chunk.of(slope)])
            if not self.carried:
                return gradient_of(x)
            for places in (chunk.rows, chunk.far):
                slope[places].zero_()  # passed on; what is added from here on is historical
            return gradient_of(x) + chunk.of(self.carried[layer])

        return out, back
