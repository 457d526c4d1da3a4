"""Norms of a layer's inputs. Batch norm takes its moments over the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import gradient_of


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
        self.keep(mean, variance * (count / max(count - 1, 1)))
        return moments

    def keep(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running moments; mean is relative to `shift`."""
        self.running_mean += self.momentum * mean
        self.running_var.lerp_(variance, self.momentum)

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
