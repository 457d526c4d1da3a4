"""GNN layers and models as the executor runs them. A user's own layer runs everywhere if it has these four methods.

A layer is split where ranks may have to talk: `prepare` and `project` (row-wise; before the exchange if that narrows the
rows), `gather` over a Block's edges, `update` (row-wise, on destinations). Widths and weights are those of planner/gnn.py.
With a norm the layer before hands on raw rows, and norm, ReLU and dropout are the first thing that the reader does to them, so
that it can do it to halo and historical rows too. Batch norm's moments, of the rows of all ranks, are an input like the rows.
Shapes: R destination rows, S source rows, H_in, H_out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from gnnplan.executor.kernels import Block, Rows, SparseRows, aggregate, attend, linear, linear_sum, softmax_aggregate
from gnnplan.planner import gnn
from gnnplan.planner.gnn import Model
from gnnplan.planner.specs import Workload

Drop = Callable[[Rows], Rows]  # dropout of rows [S, H_in]: one mask per vertex, on whichever rank


class Layer(Protocol):
    """What a strategy needs of a layer. `edges` names those of its Block: 'gcn' (symmetric norm, self edges), 'mean', 'one' (weight 1)
    or 'loop' (weight 1, self edges)."""

    edges: str
    projects_first: bool
    linear: bool  # gather only weighs and adds: its gradient needs no rows

    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        """Row-wise [S, H_in] -> [S, H_in]: what comes before anything is read from neighbours. moments [2, H_in]: see BatchNorm."""

    def project(self, rows: Tensor) -> Tensor:
        """Row-wise, prepared [S, H_in] -> [S, width]; called only where projects_first."""

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Prepared, perhaps projected rows [S, width] -> [R, width]."""

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        """Row-wise: gathered [R, width], the destinations' prepared rows and inputs x [R, H_in], initial rows x0 -> [R, H_out]."""

    def __call__(
        self, block: Block, x: Tensor, drop: Drop = ..., x0: Tensor | None = None, relu: bool = False, moments: Tensor | None = None
    ) -> Tensor: ...


class ColumnLayer(Protocol):
    """P3's calls: a layer whose sums distribute over the columns of its input, made for those that a rank has (H_in is how many).

    partition   planner/strategies/p3.py: who has which columns
    scatter     what each source row sends along its edges
    gather      summed over a block's edges, as in Layer
    transform   made a partial sum of the output
    sync        executor/strategies/p3.py: partial sums of all columns added up, for `apply`; inside scatter on everybody, for those
                whose edges need to know more than a sum (attention)
    apply       what follows, on the whole sum (the paper's word, and not torch's Module.apply, which nothing here calls)
    """

    def scatter(self, block: Block, x: Tensor | SparseRows, sync: Callable[[Tensor], Tensor]) -> Tensor:
        """Rows x [S, H_in] -> [S, width]."""

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """[S, width] -> [R, width]."""

    def transform(self, gathered: Tensor, own: Tensor | SparseRows) -> Tensor:
        """[R, width] and the destinations' rows [R, H_in] -> partial sums [R, H_out]."""

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        """[R, H_out] -> h_1."""


CALLS = ("scatter", "gather", "transform", "apply")


def keep(x: Rows) -> Rows:
    """The Drop that drops nothing."""
    return x


class BatchNorm(nn.Module):
    """Batch norm over all vertices of the graph, whoever holds them (torch.nn.BatchNorm1d, momentum 0.1).

    Each rank adds up its own rows (`sums`), an all-reduce makes the sums of the graph, `moments` [2, H] are their mean and variance:
    an input of `forward`, whose gradient, added up over ranks, goes home to each rank's own rows by `home`.
    """

    eps, momentum = 1e-5, 0.1

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    @torch.no_grad()
    def sums(self, x: Tensor) -> Tensor:
        """Sum and sum of squares of rows x [., H], less the running mean: small numbers keep their digits -> [2, H]."""
        shifted = x - self.running_mean
        return torch.stack([shifted.sum(0), shifted.square_().sum(0)])

    @torch.no_grad()
    def moments(self, sums: Tensor, count: int) -> Tensor:
        """Mean and variance of `count` rows from their sums; the running ones take a step towards them."""
        shift, square = sums / count
        variance = (square - shift * shift).clamp_(min=0.0)
        moments = torch.stack([self.running_mean + shift, variance])
        self.running_mean += self.momentum * shift
        self.running_var.lerp_(variance * (count / max(count - 1, 1)), self.momentum)
        return moments

    def forward(self, x: Tensor, moments: Tensor | None) -> Tensor:
        """x [S, H] normalised by the moments, without (evaluation) by the running ones."""
        mean, variance = (self.running_mean, self.running_var) if moments is None else moments
        return torch.addcmul(self.bias, x - mean, self.weight * (variance + self.eps).rsqrt())

    @staticmethod
    @torch.no_grad()
    def home(x: Tensor, moments: Tensor, gradient: Tensor, count: int) -> Tensor:
        """The share of own rows x [., H] in the moments' gradient [2, H]."""
        to_mean, to_variance = gradient / count
        return torch.addcmul(to_mean, x - moments[0], 2 * to_variance)


def norm_of(name: str, width: int) -> nn.Module | None:
    return {"none": lambda _: None, "layer": nn.LayerNorm, "batch": BatchNorm}[name](width)


def activated(norm: nn.Module | None, x: Tensor, moments: Tensor | None) -> Tensor:
    """Norm and ReLU."""
    if norm is not None:
        x = norm(x, moments) if isinstance(norm, BatchNorm) else norm(x)
        return x.relu_()
    return x.relu()


class _Split(nn.Module):
    projects_first: bool
    linear = True

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__()
        self.projects_first, self.activates, self.drops = shape.projects_first, shape.activates, shape.drops
        self.norm = norm_of(shape.norm, shape.h_in)

    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor:
        rows = activated(self.norm, x, moments) if self.activates else x
        return drop(rows) if self.drops else rows

    def project(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        return aggregate(block, rows)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        raise NotImplementedError

    def forward(
        self, block: Block, x: Tensor, drop: Drop = keep, x0: Tensor | None = None, relu: bool = False, moments: Tensor | None = None
    ) -> Tensor:
        """x [S, H_in] -> [R, H_out]; the first R sources are the destinations."""
        rows = self.prepare(x, drop, moments)
        gathered = self.gather(block, self.project(rows) if self.projects_first else rows)
        return self.update(gathered, rows[: block.n_dst], x[: block.n_dst], x0, relu)


class GCNLayer(_Split):
    """A~ x W + b with A~ = (D+1)^-1/2 (A+I) (D+1)^-1/2 (Kipf and Welling 2017; DGL GraphConv norm='both' on A+I).

    K of them are SGC (Wu et al. 2019; DGL SGConv on A+I): A~^K x W + b. The first alone has W, so that the others' rows are as wide
    as there are classes, the last alone b, and nothing is between them. Its paper has no dropout; here features are dropped.
    """

    edges = "gcn"

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in)) if shape.matrices else None
        self.bias = nn.Parameter(torch.zeros(shape.h_out)) if shape.bias else None

    def project(self, rows: Tensor) -> Tensor:
        assert self.weight is not None
        return linear(rows, self.weight)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        if self.weight is not None and not self.projects_first:
            return linear(gathered, self.weight, self.bias, relu)
        out = gathered if self.bias is None else gathered + self.bias
        return out.relu() if relu else out

    def scatter(self, block: Block, x: Tensor, sync: Callable[[Tensor], Tensor]) -> Tensor:
        return self.project(x) if self.projects_first else x

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        return gathered if self.projects_first else self.project(gathered)

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        out = summed if self.bias is None else summed + self.bias
        return out.relu_() if relu else out


class SAGELayer(_Split):
    """x W_self + mean(x_neighbours) W_neigh + b (Hamilton et al. 2017; DGL SAGEConv 'mean')."""

    edges = "mean"

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
        self.weight_self, self.bias = nn.Parameter(torch.empty(shape.h_out, shape.h_in)), nn.Parameter(torch.zeros(shape.h_out))

    def project(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        if not self.projects_first:
            return linear_sum([(rows, self.weight_self), (gathered, self.weight)], self.bias, relu)
        out = linear(rows, self.weight_self, self.bias) + gathered
        return out.relu_() if relu else out

    def scatter(self, block: Block, x: Tensor, sync: Callable[[Tensor], Tensor]) -> Tensor:
        return self.project(x) if self.projects_first else x

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        if not self.projects_first:
            return linear_sum([(own, self.weight_self), (gathered, self.weight)], None, False)
        return linear(own, self.weight_self) + gathered

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        out = summed + self.bias
        return out.relu_() if relu else out


class GCNIILayer(_Split):
    """((1-a) A~ x + a x0) ((1-b) I + b W), b = log(theta / l + 1) (Chen et al. 2020, Eq. 5; DGL GCN2Conv)."""

    edges = "gcn"

    def __init__(self, shape: gnn.Layer, number: int, alpha: float, theta: float) -> None:
        super().__init__(shape)
        self.alpha, self.beta = alpha, math.log(theta / number + 1)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        assert x0 is not None
        mixed = torch.lerp(gathered, x0, self.alpha)
        out = torch.lerp(mixed, linear(mixed, self.weight), self.beta)
        return out.relu_() if relu else out


class GATLayer(_Split):
    """Per head: sum over neighbours and itself of softmax_u(LeakyReLU(a_l z_u + a_r z_v)) z_u, z = x W; heads side by side, plus b
    (Velickovic et al. 2018; DGL GATConv on A+I, without attention dropout)."""

    edges = "loop"
    linear = False

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.heads, self.width = shape.heads, shape.h_out // shape.heads
        self.weight, self.bias = nn.Parameter(torch.empty(shape.h_out, shape.h_in)), nn.Parameter(torch.zeros(shape.h_out))
        self.attention = nn.Parameter(torch.empty(shape.heads, 2 * self.width))  # [a_l | a_r] of each head

    def project(self, rows: Tensor) -> Tensor:
        """[S, H_in] -> [S, H_out + heads]: z and each head's logit a_l z, so that both cross together."""
        z = linear(rows, self.weight)
        return torch.cat([z, self._logits(z, self.attention[:, : self.width])], 1)

    def _logits(self, z: Tensor, vectors: Tensor) -> Tensor:
        return (z.view(-1, self.heads, self.width) * vectors).sum(2)

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        z, of_source, of_reader = rows.split([self.heads * self.width, self.heads, rows.shape[1] - self.heads * (self.width + 1)], 1)
        if not of_reader.shape[1]:  # given where z is of some columns only
            of_reader = self._logits(z[: block.n_dst], self.attention[:, self.width :])
        of_reader = of_reader[: block.n_dst]
        return torch.cat([attend(block, head, of_source[:, i], of_reader[:, i]) for i, head in enumerate(z.split(self.width, 1))], 1)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        return self.apply(gathered, relu)

    def scatter(self, block: Block, x: Tensor, sync: Callable[[Tensor], Tensor]) -> Tensor:
        """z of these columns beside logits of all: [S, H_out + 2 heads], the readers' for the first rows."""
        z = linear(x, self.weight)
        to_sources, to_readers = self.attention.chunk(2, 1)
        logits = sync(torch.cat([self._logits(z, to_sources), self._logits(z[: block.n_dst], to_readers)]))
        of_source, of_reader = logits.split([block.n_src, block.n_dst])
        return torch.cat([z, of_source, nn.functional.pad(of_reader, (0, 0, 0, block.n_src - block.n_dst))], 1)

    def transform(self, gathered: Tensor, own: Tensor) -> Tensor:
        return gathered

    def apply(self, summed: Tensor, relu: bool) -> Tensor:
        out = summed + self.bias
        return out.relu_() if relu else out


class GENLayer(_Split):
    """(aggregated messages relu(x_u) + 1e-7 of neighbours, plus x) W + b: GENConv of DeeperGCN (Li et al. 2020, Eq. 3-6) with a softmax
    (temperature 1) or a sum. From layer 2 on x is norm, ReLU and dropout of the layer's inputs, which are added at the end (Res+)."""

    edges = "one"
    linear = False

    def __init__(self, shape: gnn.Layer, aggregation: str) -> None:
        super().__init__(shape)
        self.softmax = aggregation == "softmax"
        self.weight, self.bias = nn.Parameter(torch.empty(shape.h_out, shape.h_in)), nn.Parameter(torch.zeros(shape.h_out))

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        messages = (rows if self.activates else rows.relu()) + 1e-7
        return softmax_aggregate(block, messages) if self.softmax else aggregate(block, messages)

    def update(self, gathered: Tensor, rows: Tensor, x: Tensor, x0: Tensor | None, relu: bool) -> Tensor:
        out = linear(gathered + rows, self.weight, self.bias)
        return out + x if self.activates else out


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
                layer: nn.Module = GCNIILayer(shape, number, workload.alpha, workload.theta)
            elif workload.model == "resgcn":
                layer = GENLayer(shape, workload.aggregation)
            else:
                layer = {"gcn": GCNLayer, "sgc": GCNLayer, "sage": SAGELayer, "gat": GATLayer}[workload.model](shape)
            self.layers[str(number)] = layer
        self.encoder = nn.Linear(*shapes.encoder) if shapes.encoder and 1 in self.which else None
        self.decoder = nn.Linear(*shapes.decoder) if shapes.decoder and self.total in self.which else None
        self.activates_last = shapes.activates_last
        self.norm = norm_of(shapes.norm, self.decoder.in_features) if self.decoder and self.activates_last else None
        self.initial = shapes.hands_on_initial  # layers read the encoder's output x0; it and they end in ReLU
        self.relu = [shapes.relu_after(n) for n in range(self.total + 1)]
        self.to(torch.float64 if workload.dtype == "float64" else torch.float32)
        if shapes.nonzeros and 1 in self.which:
            self._turn()
        self._initialise(workload.seed)

    def _turn(self) -> None:
        """What multiplies sparse features lies column by column in memory: they gather columns, which `linear` would have to turn else."""
        first = self.layer(1) if self.encoder is None else self.encoder
        for name, parameter in first.named_parameters():  # type: ignore[attr-defined]
            if name.startswith("weight"):
                parameter.data = parameter.data.t().contiguous().t()

    def _initialise(self, seed: int) -> None:
        """Glorot for matrices, zero for biases, one for norms' weights; every matrix from its own stream (seed, place in the model,
        name)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.data.fill_(float(name.endswith("norm.weight")))
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
        """Whether layer `number` (0: the encoder) ends in ReLU."""
        return self.relu[number]

    def batch_norm(self, number: int) -> BatchNorm | None:
        """What needs moments before the layer (L + 1: the decoder)."""
        norm = self.norm if number > self.total else self.layer(number).norm  # type: ignore[attr-defined]
        return norm if isinstance(norm, BatchNorm) else None

    def encode(self, x: Tensor | SparseRows, drop: Drop = keep) -> Tensor:
        assert self.encoder is not None
        return linear(drop(x) if self.initial else x, self.encoder.weight, self.encoder.bias, relu=self.relu_after(0))

    def decode(self, h: Tensor, drop: Drop = keep, moments: Tensor | None = None) -> Tensor:
        if self.decoder is None:
            return h
        if self.activates_last:
            h = activated(self.norm, h, moments)
        return linear(drop(h), self.decoder.weight, self.decoder.bias)
