"""Norms of a layer's inputs. Batch norm's moments are of the rows of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.kernels import gradient_of


class BatchNorm(nn.Module):
    """Batch norm over all vertices of the graph, whichever ranks hold them.

    Equals torch.nn.BatchNorm1d with momentum 0.1. Each rank sums its own rows (`sums`), an
    all-reduce makes these the sums of the graph, and `moments` [2, H] are their mean and variance.
    The moments are an input of `forward`. Their gradient, all-reduced too, goes back to each rank's
    own rows by `home`.
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
        """What is taken off rows before they are summed, so that small numbers keep their digits:
        the running mean [H]."""
        return self.running_mean

    @torch.no_grad()
    def sums(self, x: Tensor) -> Tensor:
        """Sum and sum of squares of rows x [., H] minus `shift` -> [2, H]."""
        shifted = x - self.shift
        return torch.stack([shifted.sum(0), shifted.square_().sum(0)])

    @torch.no_grad()
    def moments(self, sums: Tensor, count: int) -> Tensor:
        """Mean and variance [2, H] of `count` rows from their sums; updates the running ones."""
        mean, square = sums / count
        variance = (square - mean * mean).clamp_(min=0.0)
        moments = torch.stack([self.shift + mean, variance])
        self.keep(mean, variance * (count / max(count - 1, 1)))
        return moments

    def keep(self, mean: Tensor, variance: Tensor) -> None:
        """Update the running moments; mean: beyond `shift`."""
        self.running_mean += self.momentum * mean
        self.running_var.lerp_(variance, self.momentum)

    def forward(self, x: Tensor, moments: Tensor | None) -> Tensor:
        """x [S, H] normalised by the moments; None (evaluation): by the running ones."""
        mean, variance = (self.running_mean, self.running_var) if moments is None else moments
        return torch.addcmul(self.bias, x - mean, self.weight * (variance + self.eps).rsqrt())

    @staticmethod
    @torch.no_grad()
    def home(x: Tensor, moments: Tensor, gradient: Tensor, count: int) -> Tensor:
        """The gradient of own rows x [., H] through the moments, whose own is [2, H]."""
        to_mean, to_variance = gradient / count
        return torch.addcmul(to_mean, x - moments[0], 2 * to_variance)


@dataclass(frozen=True)
class Moments:
    """Batch norm's moments before a layer in one step, whose gradient ranks sum, too."""

    values: Tensor  # leaf [2, H]
    count: int  # rows of all ranks

    @classmethod
    def of(cls, norm: BatchNorm, sums: Tensor, count: int) -> Moments:
        """From the sums [2, H] of all ranks' `count` rows."""
        return cls(norm.moments(sums, count).requires_grad_(), count)

    @property
    def gradient(self) -> Tensor:
        """[2, H], after the layer's backward."""
        return gradient_of(self.values)

    def add_home(self, rows: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of a rank's rows [., H] what they get through the moments."""
        gradient += BatchNorm.home(rows.detach(), self.values, self.gradient, self.count)


class LayerNorm(nn.LayerNorm):
    """Layer norm, whose weights are float32 where rows are rounded."""

    def forward(self, x: Tensor, moments: Tensor | None = None) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


NORMS: dict[str, type[BatchNorm | LayerNorm]] = {"layer": LayerNorm, "batch": BatchNorm}


def norm_of(name: str, width: int) -> BatchNorm | LayerNorm | None:
    """The norm by its name: 'none', 'layer' or 'batch'."""
    return None if name == "none" else NORMS[name](width)


def activated(norm: nn.Module | None, x: Tensor, moments: Tensor | None) -> Tensor:
    """ReLU of the norm of x."""
    if norm is None:
        return x.relu()
    normed: Tensor = norm(x, moments)
    return normed.relu_()
