"""GNN layers and models as the executor runs them. A user's own layer runs everywhere if it has these four methods.

A layer is split where ranks may have to talk: `prepare` and `project` (row-wise; before the exchange if that narrows the
rows), `gather` over a Block's edges, `update` (row-wise, on destinations). Widths and weights are those of planner/gnn.py.
Shapes: R destination rows, S source rows, H_in, H_out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnplan.executor.kernels import Block, aggregate, linear, linear_sum
from gnnplan.planner.gnn import Model
from gnnplan.planner.specs import Workload

Drop = Callable[[Tensor], Tensor]  # dropout of rows [S, H_in]: one mask per vertex, on whichever rank


class Layer(Protocol):
    """What a strategy needs of a layer. `edges` names the weights of its Block: 'gcn' (symmetric norm, self edges) or 'mean'."""

    edges: str
    projects_first: bool
    linear: bool  # gather only weighs and adds: its gradient needs no rows

    def prepare(self, x: Tensor, drop: Drop) -> Tensor:
        """Row-wise [S, H_in] -> [S, H_in]: what comes before anything is read from neighbours."""

    def project(self, rows: Tensor) -> Tensor:
        """Row-wise, prepared [S, H_in] -> [S, width]; called only where projects_first."""

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Prepared, perhaps projected rows [S, width] -> [R, width]."""

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        """Row-wise: gathered [R, width], the destinations' prepared rows and inputs x [R, H_in], initial rows x0 -> [R, H_out]."""

    def __call__(self, block: Block, x: Tensor, drop: Drop = ..., x0: Tensor | None = None, relu: bool = False) -> Tensor: ...


def keep(x: Tensor) -> Tensor:
    """The Drop that drops nothing."""
    return x


class _Split(nn.Module):
    projects_first: bool
    linear = True

    def prepare(self, x: Tensor, drop: Drop) -> Tensor:
        return drop(x)

    def project(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        return aggregate(block, rows)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        raise NotImplementedError

    def forward(self, block: Block, x: Tensor, drop: Drop = keep, x0: Tensor | None = None, relu: bool = False) -> Tensor:
        """x [S, H_in] -> [R, H_out]; the first R sources are the destinations."""
        rows = self.prepare(x, drop)
        gathered = self.gather(block, self.project(rows) if self.projects_first else rows)
        return self.update(gathered, rows[: block.n_dst], x[: block.n_dst], x0, relu)


class GCNLayer(_Split):
    """A~ x W + b with A~ = (D+1)^-1/2 (A+I) (D+1)^-1/2 (Kipf and Welling 2017; DGL GraphConv norm='both' on A+I)."""

    edges = "gcn"

    def __init__(self, h_in: int, h_out: int, projects_first: bool = False) -> None:
        super().__init__()
        self.projects_first = projects_first
        self.weight, self.bias = nn.Parameter(torch.empty(h_out, h_in)), nn.Parameter(torch.zeros(h_out))

    def project(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        if not self.projects_first:
            return linear(gathered, self.weight, self.bias, relu)
        out = gathered + self.bias
        return out.relu() if relu else out


class SAGELayer(_Split):
    """x W_self + mean(x_neighbours) W_neigh + b (Hamilton et al. 2017; DGL SAGEConv 'mean')."""

    edges = "mean"

    def __init__(self, h_in: int, h_out: int, projects_first: bool = False) -> None:
        super().__init__()
        self.projects_first = projects_first
        self.weight = nn.Parameter(torch.empty(h_out, h_in))
        self.weight_self, self.bias = nn.Parameter(torch.empty(h_out, h_in)), nn.Parameter(torch.zeros(h_out))

    def project(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        if not self.projects_first:
            return linear_sum([(rows, self.weight_self), (gathered, self.weight)], self.bias, relu)
        out = linear(rows, self.weight_self, self.bias) + gathered
        return out.relu_() if relu else out


class GCNIILayer(_Split):
    """((1-a) A~ x + a x0) ((1-b) I + b W), b = log(theta / l + 1) (Chen et al. 2020, Eq. 5; DGL GCN2Conv)."""

    edges = "gcn"
    projects_first = False

    def __init__(self, hidden: int, layer: int, alpha: float, theta: float) -> None:
        super().__init__()
        self.alpha, self.beta = alpha, math.log(theta / layer + 1)
        self.weight = nn.Parameter(torch.empty(hidden, hidden))

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        assert x0 is not None
        mixed = torch.lerp(gathered, x0, self.alpha)
        out = torch.lerp(mixed, linear(mixed, self.weight), self.beta)
        return out.relu_() if relu else out


class Net(nn.Module):
    """The layers `which` of a model (1-based; a pipeline stage holds a run of them), with the encoder before layer 1 and the
    decoder after the last. The same seed gives the same weights to every rank, whichever layers it holds."""

    def __init__(self, shapes: Model, workload: Workload, which: range | None = None) -> None:
        super().__init__()
        self.total = len(shapes.layers)
        self.which = which or range(1, self.total + 1)
        self.layers = nn.ModuleDict()
        for number in self.which:
            shape = shapes.layers[number - 1]
            if workload.model == "gcnii":
                layer: nn.Module = GCNIILayer(shape.h_in, number, workload.alpha, workload.theta)
            else:
                layer = {"gcn": GCNLayer, "sage": SAGELayer}[workload.model](shape.h_in, shape.h_out, shape.projects_first)
            self.layers[str(number)] = layer
        self.encoder = nn.Linear(*shapes.encoder) if shapes.encoder and 1 in self.which else None
        self.decoder = nn.Linear(*shapes.decoder) if shapes.decoder and self.total in self.which else None
        self.residual = shapes.encoder is not None  # hidden layers all end in ReLU, and x0 is the encoder's output
        self.to(torch.float64 if workload.dtype == "float64" else torch.float32)
        self._initialise(workload.seed)

    def _initialise(self, seed: int) -> None:
        """Glorot for matrices, zero for biases; every parameter from its own stream (seed, place in the model, name)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                nn.init.zeros_(parameter)
                continue
            parts = name.split(".")
            place = int(parts[1]) if parts[0] == "layers" else {"encoder": 0, "decoder": self.total + 1}[parts[0]]
            generator = torch.Generator().manual_seed((seed * 1_000_003 + place) * 7 + len(parts[-1]))
            bound = math.sqrt(6 / sum(parameter.shape))
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_((2 * draw - 1) * bound)

    def layer(self, number: int) -> Layer:
        return self.layers[str(number)]  # type: ignore[return-value]

    def relu_after(self, number: int) -> bool:
        return self.residual or number < self.total

    def encode(self, x: Tensor) -> Tensor:
        assert self.encoder is not None
        return linear(x, self.encoder.weight, self.encoder.bias, relu=True)

    def decode(self, h: Tensor, drop: Drop = keep) -> Tensor:
        return h if self.decoder is None else linear(drop(h), self.decoder.weight, self.decoder.bias)
