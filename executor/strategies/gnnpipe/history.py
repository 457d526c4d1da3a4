"""Rows that stay from step to step, for every layer of a stage whose input varies.

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

from collections.abc import Iterable

import torch
from torch import Tensor

from gnnplan.executor.layers.layer import Drop
from gnnplan.executor.layers.models import Net


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
