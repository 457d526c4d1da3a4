"""Models as torch modules, and built-in layers: the definitions in planner/gnn/kinds.py on tensors.

Widths and weights are those of planner/gnn/model.py. In a model with norms a layer outputs raw
rows, and the next layer applies norm, ReLU and dropout. So the next layer can apply all three to
halo rows and historical rows too. Batch norm's moments are over the rows of all ranks, so the
moments are an input of the layer, as rows are.

Shapes: R destination rows, S source rows, H_in and H_out values per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import (
    Block,
    aggregate,
    aggregate_with_own,
    attend,
    attend_pairs,
    gradient_of,
    linear,
    linear_sum,
    softmax_aggregate,
)
from gnnplan.executor.layers.layer import Drop, Layer, no_dropout
from gnnplan.planner.gnn import kinds
from gnnplan.planner.gnn.kinds import KINDS, UpdateInputs
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload

# -- norms -----------------------------------------------------------------------------------------


class BatchNorm(nn.Module):
    """Batch norm over all vertices of the graph, whichever ranks hold them.

    It equals torch.nn.BatchNorm1d with momentum 0.1. Each rank sums its own rows (`sums`), and an
    all-reduce adds up the ranks' sums. `moments` turns the total into mean and variance [2, H],
    which are an input of `forward`. Ranks all-reduce the gradient of the moments too, and `home`
    returns the gradient that a rank's own rows get through the moments.
    """

    eps, momentum = 1e-5, 0.1
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    @property
    def shift(self) -> Tensor:
        """The running mean [H]; subtracted before rows are summed, so that small numbers keep
        their digits."""
        return self.running_mean

    @torch.no_grad()
    def sums(self, x: Tensor) -> Tensor:
        """Return sum and sum of squares of x - `shift`, from rows x [., H] -> [2, H]."""
        shifted = x - self.shift
        return torch.stack([shifted.sum(0), shifted.square_().sum(0)])

    @torch.no_grad()
    def moments(self, sums: Tensor, count: int) -> Tensor:
        """Return mean and variance [2, H] of `count` rows, and update the running moments."""
        mean, square = sums / count
        variance = (square - mean * mean).clamp_(min=0.0)
        moments = torch.stack([self.shift + mean, variance])
        self.keep(mean, variance, count)
        return moments

    def keep(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Update the running moments by those of `count` rows; mean is relative to `shift`."""
        self.running_mean += self.momentum * mean
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)

    def forward(self, x: Tensor, moments: Tensor | None) -> Tensor:
        """Normalise x [S, H] by the moments; None (evaluation): by the running moments."""
        mean, variance = (self.running_mean, self.running_var) if moments is None else moments
        return torch.addcmul(self.bias, x - mean, self.weight * (variance + self.eps).rsqrt())

    @staticmethod
    @torch.no_grad()
    def home(x: Tensor, moments: Tensor, gradient: Tensor, count: int) -> Tensor:
        """Return the gradient of own rows x [., H], from the moments' gradient [2, H]."""
        to_mean, to_variance = gradient / count
        return torch.addcmul(to_mean, x - moments[0], 2 * to_variance)


@dataclass(frozen=True)
class Moments:
    """Batch norm's moments before a layer in one step; ranks all-reduce their gradient."""

    values: Tensor  # mean and variance [2, H], a leaf of autograd
    count: int  # rows of all ranks

    @classmethod
    def of(cls, norm: BatchNorm, sums: Tensor, count: int) -> Moments:
        """Build the moments from the sums [2, H] over all ranks' `count` rows."""
        return cls(norm.moments(sums, count).requires_grad_(), count)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the moments [2, H], after the layer's backward pass."""
        return gradient_of(self.values)

    def add_gradient(self, rows: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of own rows [., H] the part that flows through the moments."""
        gradient += BatchNorm.home(rows.detach(), self.values, self.gradient, self.count)


class LayerNorm(nn.LayerNorm):
    """Layer norm, whose weights stay float32 if rows are rounded."""

    def forward(self, x: Tensor, moments: Tensor | None = None) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


NORMS: dict[str, type[BatchNorm | LayerNorm]] = {"layer": LayerNorm, "batch": BatchNorm}


def norm_of(name: str, width: int) -> BatchNorm | LayerNorm | None:
    """Return the norm named 'layer' or 'batch'; None for 'none'."""
    return None if name == "none" else NORMS[name](width)


def activated(norm: nn.Module | None, x: Tensor, moments: Tensor | None) -> Tensor:
    """Apply the norm, if there is one, and ReLU to x."""
    if norm is None:
        return x.relu()
    normed: Tensor = norm(x, moments)
    return normed.relu_()


# -- models ----------------------------------------------------------------------------------------


Sync = Callable[[Tensor], Tensor]
NO_EDGES = Block(np.zeros(1, np.int32), np.empty(0, np.int32), 0)
NO_ROWS = torch.empty(0)


class BuiltInLayer(Layer):
    """A built-in layer and its parameters."""

    def __init__(self, spec: kinds.LayerSpec, constants: Mapping[str, float] | None = None) -> None:
        """constants: the kind's constants for this layer (Kind.constants)."""
        super().__init__()
        self.spec, self.kind, self.constants = spec, KINDS[spec.kind], constants or {}
        self.edges, self.linear = self.kind.edges, self.kind.linear
        self.by_columns, self.projects_first = self.kind.by_columns, spec.projects_first
        self.norm = norm_of(spec.norm, spec.h_in)
        for name, shape in spec.parameters.items():
            empty = torch.zeros(shape) if len(shape) == 1 else torch.empty(shape)
            self.register_parameter(name, nn.Parameter(empty))

    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        if self.spec.activates:
            x = activated(self.norm, x, moments)
        return drop(x) if self.spec.drops else x

    def project(self, rows: Tensor) -> Tensor:
        return self.kind.project(_Tensors(self), self.spec, rows)

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        return self.kind.gather(_Tensors(self, block), self.spec, rows)

    def gather_with_own(self, block: Block, rows: Tensor) -> tuple[Tensor, Tensor]:
        if self.kind.projects_own and not self.projects_first:
            return aggregate_with_own(block, rows)
        return super().gather_with_own(block, rows)

    def update(
        self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool
    ) -> Tensor:
        given = UpdateInputs(gathered, rows, x, relu)
        initial = NO_ROWS if x0 is None else x0
        return self.kind.update(_Tensors(self, initial=initial), self.spec, given)

    # -- P3's calls (layer.ColumnLayer) ----------------------------------------------------------

    def scatter(self, block: Block, x: Tensor, sync: Sync) -> Tensor:
        if not self.projects_first:
            return self.gathers(x)
        return self.kind.project(_Tensors(self, block, sync=sync), self.spec, x)

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        ops, away = _Tensors(self, is_partial=True), gathered.shape[0] - own.shape[0]
        if not (away and self.kind.projects_own):
            given = UpdateInputs(gathered, own, own, False)
            return self.kind.update(ops, self.spec, given)
        of_own, others = torch.split(gathered, [own.shape[0], away])
        if not self.projects_first:
            others = self.project(others)
        return torch.cat([self.transform(of_own, own), others])

    def apply(self, summed: Tensor, relu: bool) -> Tensor:  # type: ignore[override]
        out = _Tensors(self).bias(summed)
        return out.relu_() if relu else out


class _Tensors:
    """kinds.Arithmetic on tensors, with a layer's parameters.

    sync: P3's sum of partial results over the columns of all ranks. is_partial: the results are
    partial sums, so no bias is added."""

    def __init__(
        self,
        layer: BuiltInLayer,
        block: Block = NO_EDGES,
        initial: Tensor = NO_ROWS,
        sync: Sync | None = None,
        is_partial: bool = False,
    ) -> None:
        self.layer, self.block, self.initial, self.sync = layer, block, initial, sync
        self.is_partial = is_partial

    def _matrix(self, name: str) -> Tensor:
        return cast(Tensor, self.layer._parameters[name])

    def _bias(self, name: str) -> Tensor | None:
        return None if self.is_partial else self.layer._parameters.get(name)

    def linear(
        self, terms: Sequence[tuple[Tensor, str]], bias: str = "", relu: bool = False
    ) -> Tensor:
        both = [(rows, self._matrix(weight)) for rows, weight in terms]
        if len(both) == 1:
            return linear(*both[0], self._bias(bias), relu)
        return linear_sum(both, self._bias(bias), relu)

    def bias(self, x: Tensor) -> Tensor:
        bias = self._bias("bias")
        return x if bias is None else x + bias.to(x.dtype)

    def relu(self, x: Tensor, in_place: bool = True) -> Tensor:
        return x.relu_() if in_place else x.relu()

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def shift(self, x: Tensor) -> Tensor:
        return x + 1e-7

    def lerp(self, x: Tensor, y: Tensor, by: str) -> Tensor:
        return torch.lerp(x, y, self.layer.constants[by])

    def towards_product(self, x: Tensor, weight: str, by: str) -> Tensor:
        return self.lerp(x, self.linear([(x, weight)]), by)

    def initial_rows(self, width: int) -> Tensor:
        return self.initial

    def aggregate(self, x: Tensor, times: int = 1) -> Tensor:
        return aggregate(self.block, x)

    def softmax_aggregate(self, x: Tensor) -> Tensor:
        return softmax_aggregate(self.block, x)

    def append_logits(self, z: Tensor, heads: int) -> Tensor:
        """Append each head's logit a_l z to rows z [S, H_out] -> [S, H_out + heads].

        Under P3 z has some of the columns, the logits sum over all columns, and rows are
        [z | a_l z | a_r z]. Only destinations have an a_r z; it is 0 in the other rows."""
        attention = self._matrix("attention")
        each = attention.shape[1] // 2
        to_sources, to_readers = attention[:, :each], attention[:, each:]
        if self.sync is None:
            return torch.cat([z, _logits(z, to_sources)], 1)
        own, away = self.block.n_dst, self.block.n_src - self.block.n_dst
        logits = self.sync(torch.cat([_logits(z, to_sources), _logits(z[:own], to_readers)]))
        of_source, of_reader = torch.split(logits, [self.block.n_src, own])
        return torch.cat([z, of_source, nn.functional.pad(of_reader, (0, 0, 0, away))], 1)

    def attend(self, x: Tensor, heads: int) -> Tensor:
        """Attend over edges; rows x have the layout of `append_logits`."""
        h_out, block = self.layer.spec.h_out, self.block
        if x.shape[1] > h_out + heads:
            z, of_source, of_reader = torch.split(x, [h_out, heads, heads], 1)
            of_reader = block.own_rows(of_reader)
        else:
            z, of_source = torch.split(x, [h_out, heads], 1)
            attention = self._matrix("attention")
            of_reader = _logits(block.own_rows(z), attention[:, attention.shape[1] // 2 :])
        return attend(block, z, of_source, of_reader)

    def attend_pairs(self, x: Tensor, heads: int) -> Tensor:
        return attend_pairs(self.block, x, self._matrix("attention"))


def _logits(z: Tensor, vectors: Tensor) -> Tensor:
    """Return logits [., heads] of rows z [., H_out]; vectors [heads, H_out / heads]."""
    return (z.view(-1, *vectors.shape) * vectors).sum(2)


class Net(nn.Module):
    """A model, or the consecutive layers `which` (1-based) of a pipeline stage.

    The encoder belongs to layer 1, the decoder to the last layer. The same seed gives the same
    weights on every rank, whichever layers the rank holds.
    """

    def __init__(
        self,
        model: Model,
        workload: Workload,
        which: range | None = None,
        own: Callable[[int], Layer] | None = None,
    ) -> None:
        """own: builds a layer of a user's module from its number; None: layers are built-in."""
        super().__init__()
        self.total = len(model.layers)
        self.which = which or range(1, self.total + 1)
        self.layers = nn.ModuleDict()
        for number in self.which:
            constants = KINDS[workload.model].constants(workload, number) if own is None else None
            self.layers[str(number)] = (
                own(number) if own else BuiltInLayer(model.layers[number - 1], constants)
            )
        self.encoder = nn.Linear(*model.encoder) if model.encoder and 1 in self.which else None
        self.decoder = (
            nn.Linear(*model.decoder)
            if model.decoder and self.total in self.which and not model.ends
            else None
        )
        self.activates_last = model.activates_last
        self.norm = (
            norm_of(model.norm, self.decoder.in_features)
            if self.decoder and self.activates_last
            else None
        )
        self.initial = model.sends_initial  # layers read x0, the encoder's output
        self.relu_after = model.relu_after  # whether a layer (0: the encoder) ends in ReLU
        self.to(dtype_of(workload.precision.weights))
        if model.inputs.multiplied_first and 1 in self.which:
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
        if number > self.total:
            norm = self.norm or getattr(self.layer(self.total), "norm_after", None)
        else:
            norm = getattr(self.layer(number), "norm", None)
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
        """Map h_L [R, H] to logits [R, C]; without a decoder, by the last layer."""
        if self.decoder is None:
            return self.layer(self.total).finish(h, drop, moments)
        if self.activates_last:
            h = activated(self.norm, h, moments)
        return linear(drop(h), self.decoder.weight, self.decoder.bias)
