"""One layer on one chunk, forward and backward; and the rows cached from step to step.

A layer runs in parts here (layers/layer.py): it gathers its neighbourhood from mixed rows, fresh
and historical, and adds the gradient of neighbours to the slope by hand. The forward pass returns a
backward function, which holds the tensors that the backward pass needs.

For all rows that the rank keeps (chunks.py), each layer with varying input has:

    past    historical input rows
    mixed   the rows that neighbours read: past rows, overwritten by fresh rows as chunks are
            processed. Both are prepared (norm and dropout).
    slope   the gradient of the mixed rows

Backward visits the chunks in reverse order. So a chunk may add gradient to rows that it read as
historical, after the backward pass of these rows' chunk. Such late gradient stays in `slope`. It is
unused, or with historical_gradients `carried` into the next step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnplan.executor.layers.kernels import aggregate_transposed, backward, gradient_of
from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk

# backward function: (root of the layer's autograd graph, the root's gradient) -> gradient of the
# layer's input rows
BackwardFrom = Callable[[Tensor, Tensor], Tensor]


class History:
    """The past and mixed rows of one rank, and their gradients."""

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
        """Prepare a layer's rows for a step.

        drop: dropout of this step. drop_before: of the step before, whose late gradient is carried.
        """
        net = self.net.layer(layer)
        if self.carried:
            # The late gradient is that of prepared rows; this makes it that of input rows. Here
            # `prepare` is dropout or the identity, and each is its own transpose.
            self.carried[layer] = net.prepare(self.slope[layer], drop_before).clone()
        self.slope[layer].zero_()
        with torch.no_grad():
            self.mixed[layer].copy_(net.prepare(self.past[layer], drop))

    def remember(self) -> None:
        """Copy the mixed rows to the past rows."""
        for layer in self.layers:
            self.past[layer].copy_(self.mixed[layer])

    def state(self) -> dict[str, Tensor]:
        """Return a checkpoint's tensors: past rows, and late gradient if it is carried."""
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
    ) -> tuple[Tensor, BackwardFrom]:
        """Run a layer on a chunk's input rows, own rows and halo -> output, backward function.

        drop: dropout of these rows. refresh: copy them to the past rows. checkpoint: recompute in
        the backward pass. The mixed rows cannot be recomputed, as they change before the chunk's
        backward pass: the rows read from them are kept (if gathering is linear, only their sums).
        """
        part, relu = self.net.layer(layer).during(drop), self.net.relu_after(layer)
        linear = part.linear and not part.projects_first  # rows' gradient follows from the sums'
        mixed, x = self.mixed[layer], inputs.detach().requires_grad_()

        def finish(prepared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Return prepared rows with autograd graph, a leaf of own prepared rows, the output."""
            rows = prepared.detach()[: chunk.size].requires_grad_()
            gathered = read if linear else chunk.gather_sources(part, read)
            return prepared, rows, part.update(gathered, rows, x[: chunk.size], x0, relu)

        with torch.set_grad_enabled(not checkpoint):
            prepared = part.prepare(x, drop)
            own_and_halo = (chunk.rows, slice(0, chunk.size)), (chunk.halo, slice(chunk.size, None))
            for places, rows in own_and_halo:
                mixed[places] = prepared.detach()[rows]
                if refresh:
                    self.past[layer][places] = x.detach()[rows]
            read = mixed.index_select(0, chunk.sources)
            read = (chunk.gather_sources(part, read) if linear else read).requires_grad_()
            *saved, out = finish(prepared)
        del prepared
        if checkpoint:
            saved = []

        def back(root: Tensor, gradient: Tensor) -> Tensor:
            """Return the gradient of input rows, own rows and halo."""
            prepared, rows, root = (*saved, root) if saved else finish(part.prepare(x, drop))
            backward([root], [gradient])
            to_read = gradient_of(read)
            if linear:
                to_read = aggregate_transposed(chunk.blocks[part.edges], to_read)
            slope = self.slope[layer]
            slope[chunk.rows] += to_read[: chunk.size]
            # own rows are added by slice above: index_add_ is several times as slow
            slope.index_add_(0, chunk.sources[chunk.size :], to_read[chunk.size :])
            del to_read  # the largest tensor
            if rows.grad is not None:
                slope[chunk.rows] += rows.grad
            backward([prepared], [chunk.select(slope)])
            if not self.carried:
                return gradient_of(x)
            for places in (chunk.rows, chunk.halo):
                slope[places].zero_()  # used up: gradient that is added later is late
            return gradient_of(x) + chunk.select(self.carried[layer])

        return out, back
