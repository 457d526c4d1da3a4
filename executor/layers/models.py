"""Models as torch modules. Widths and weights are those of planner/gnn/model.py.

Shapes: R destination rows, H_in and H_out values per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.built_in import BuiltInLayer
from gnnplan.executor.layers.kernels import linear
from gnnplan.executor.layers.layer import Drop, Layer, no_dropout
from gnnplan.executor.layers.norms import BatchNorm, activated, norm_of
from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload


class Ends(Protocol):
    """The module after the last layer of a user's model: batch norm, and more."""

    @property
    def norm(self) -> BatchNorm: ...

    def __call__(self, h: Tensor, drop: Drop, moments: Tensor | None) -> Tensor:
        """Return logits [R, C] from h_L [R, W]."""


class Net(nn.Module):
    """A model, or the consecutive layers `which` (1-based) of a pipeline stage.

    The encoder belongs to layer 1, the decoder to the last layer. The same seed gives the same
    weights on every rank, whichever layers the rank holds.
    """

    def __init__(
        self,
        shapes: Model,
        workload: Workload,
        which: range | None = None,
        own: Callable[[int], Layer] | None = None,
    ) -> None:
        """own: builds a layer of a user's module from its number; None: layers are built-in."""
        super().__init__()
        self.total = len(shapes.layers)
        self.which = which or range(1, self.total + 1)
        self.layers = nn.ModuleDict()
        for number in self.which:
            self.layers[str(number)] = own(number) if own else _known(shapes, workload, number)
        self.ends: Ends | None = None  # set for a user's module
        self.encoder = nn.Linear(*shapes.encoder) if shapes.encoder and 1 in self.which else None
        self.decoder = (
            nn.Linear(*shapes.decoder)
            if shapes.decoder and self.total in self.which and not shapes.ends
            else None
        )
        self.activates_last = shapes.activates_last
        self.norm = (
            norm_of(shapes.norm, self.decoder.in_features)
            if self.decoder and self.activates_last
            else None
        )
        self.initial = shapes.sends_initial  # layers read x0, the encoder's output
        self.relu_after = shapes.relu_after  # whether a layer (0: the encoder) ends in ReLU
        self.to(dtype_of(workload.precision.weights))
        if shapes.inputs.multiplied_first and 1 in self.which:
            self._store_by_columns()
        if own is None:  # a user's module initialises its own layers
            self._initialise(workload.seed)

    def _store_by_columns(self) -> None:
        """Store weights that multiply compressed features in column-major order.

        The product with compressed rows gathers columns; `linear` would transpose the weight.
        """
        first = self.layers["1"] if self.encoder is None else self.encoder
        for name, parameter in first.named_parameters():
            if name.startswith("weight"):
                parameter.data = parameter.data.t().contiguous().t()

    def _initialise(self, seed: int) -> None:
        """Draw matrices from Glorot's distribution; set biases to 0 and weights of norms to 1.

        Every matrix has a random stream of its own, from (seed, place in the model, name).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.data.fill_(float(name.endswith("norm.weight")))
                continue
            parts = name.split(".")
            ends = {"encoder": 0, "decoder": self.total + 1}
            place = ends[parts[0]] if parts[0] in ends else int(parts[1])
            generator = torch.Generator().manual_seed(
                (seed * 1_000_003 + place) * 7 + len(parts[-1])
            )
            bound = math.sqrt(6 / sum(parameter.shape))
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_((2 * draw - 1) * bound)

    def layer(self, number: int) -> Layer:
        """Return layer `number`, counted from 1."""
        return cast(Layer, self.layers[str(number)])

    @property
    def edges(self) -> list[str]:
        """The kind of edges of each layer (Layer.edges); this rank must hold all layers."""
        return [self.layer(number).edges for number in range(1, self.total + 1)]

    def parameters_of(self, layers: range) -> Iterator[nn.Parameter]:
        """Yield the trainable parameters of these layers, and of the encoder, decoder and norm."""
        for name, parameter in self.named_parameters():
            part, number, *_ = name.split(".")
            if not parameter.requires_grad:
                continue
            ends = {"encoder": 1, "decoder": self.total, "norm": self.total}
            if (ends[part] if part in ends else int(number)) in layers:
                yield parameter

    def batch_norm(self, number: int) -> BatchNorm | None:
        """Return the batch norm before layer `number` (L + 1: the decoder), None without one."""
        if number > self.total and self.ends is not None:
            return self.ends.norm
        norm = self.norm if number > self.total else getattr(self.layers[str(number)], "norm", None)
        return norm if isinstance(norm, BatchNorm) else None

    def encode(self, x: Tensor, drop: Drop = no_dropout) -> Tensor:
        """Map features [R, F] to h_0 [R, H]; return them unchanged without an encoder."""
        if self.encoder is None:
            return x
        return linear(
            drop(x) if self.initial else x,
            self.encoder.weight,
            self.encoder.bias,
            relu=self.relu_after(0),
        )

    def decode(self, h: Tensor, drop: Drop = no_dropout, moments: Tensor | None = None) -> Tensor:
        """Map h_L [R, H] to logits [R, C]; return h_L unchanged without a decoder."""
        if self.ends is not None:
            return self.ends(h, drop, moments)
        if self.decoder is None:
            return h
        if self.activates_last:
            h = activated(self.norm, h, moments)
        return linear(drop(h), self.decoder.weight, self.decoder.bias)


def _known(shapes: Model, workload: Workload, number: int) -> BuiltInLayer:
    """Return the built-in layer `number` of a model."""
    constants = KINDS[workload.model].constants(workload, number)
    return BuiltInLayer(shapes.layers[number - 1], constants)
