"""GNN layers and models as the executor runs them.

layer.py says what a strategy needs of a layer. Widths and weights are those of
planner/gnn/model.py. In a model with norms a layer hands on raw rows, and its reader applies
norm, ReLU and dropout; so the reader can do it to halo rows and historical rows too. Batch norm's
moments are over the rows of all ranks, so they are an input of the layer, as rows are.

Shapes: R destination rows, S source rows, H_in and H_out values per row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol, cast, overload

import torch
from torch import Tensor, nn

from gnnplan.executor.layers.blocks import weight_dtype_of
from gnnplan.executor.layers.kernels import (
    Block,
    FeatureRows,
    SparseRows,
    aggregate,
    aggregate_beside,
    attend,
    attend_pairs,
    backward,
    gradient_of,
    linear,
    linear_sum,
    softmax_aggregate,
)
from gnnplan.executor.layers.layer import Drop, Layer, keep
from gnnplan.executor.layers.norms import BatchNorm, norm_of
from gnnplan.planner.gnn import layer as gnn
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.workload import Workload


def activated(norm: nn.Module | None, x: Tensor, moments: Tensor | None) -> Tensor:
    """ReLU of the norm of x."""
    if norm is None:
        return x.relu()
    if isinstance(norm, BatchNorm):
        normed: Tensor = norm(x, moments)
        return normed.relu_()
    assert isinstance(norm, nn.LayerNorm)
    weight, bias = norm.weight.to(x.dtype), norm.bias.to(x.dtype)
    return nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps).relu_()


class _SplitLayer(Layer):
    """What the layers below have in common: norm, dropout and residual, around `combine`."""

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__()
        self.projects_first = shape.projects_first
        self.activates = shape.activates
        self.drops = shape.drops
        self.norm = norm_of(shape.norm, shape.h_in)
        self.residual = shape.residual
        if shape.residual and shape.residual.linear:
            self.weight_residual = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
            bias = torch.zeros(shape.h_out)
            self.bias_residual = nn.Parameter(bias) if shape.residual.bias else None

    @overload
    def prepare(self, x: Tensor, drop: Drop, moments: Tensor | None = None) -> Tensor: ...
    @overload
    def prepare(self, x: SparseRows, drop: Drop, moments: Tensor | None = None) -> SparseRows: ...
    def prepare(self, x: FeatureRows, drop: Drop, moments: Tensor | None = None) -> FeatureRows:
        if self.activates:
            assert isinstance(x, Tensor)
            x = activated(self.norm, x, moments)
        return drop(x) if self.drops else x

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        """`update` without a residual, which is what a kind of layer says."""
        raise NotImplementedError

    def update(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        residual = self.residual
        if residual is None:
            return self.combine(gathered, rows, x, x0, relu)
        out = self.combine(gathered, rows, x, x0, relu and residual.after_relu)
        own = rows if residual.of == "prepared" else x
        if residual.linear:
            own = linear(own, self.weight_residual, self.bias_residual)
        assert isinstance(own, Tensor)  # the first layer's is a product, of sparse features too
        out = out + own
        return out.relu_() if relu and not residual.after_relu else out


class GCNLayer(_SplitLayer):
    """A~ x W + b with A~ = (D+1)^-1/2 (A+I) (D+1)^-1/2.

    Kipf and Welling 2017; DGL's GraphConv with norm='both' on A+I.

    K of these layers make SGC (Wu et al. 2019; DGL's SGConv on A+I): A~^K x W + b. The first layer
    alone has W, so the rows of the others are as wide as there are classes. The last alone has b,
    and there is no ReLU between them. The paper has no dropout; here features are dropped.
    """

    edges = "gcn"
    by_columns = ("weight",)

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in)) if shape.matrices else None
        self.bias = nn.Parameter(torch.zeros(shape.h_out)) if shape.bias else None

    def project(self, rows: FeatureRows) -> Tensor:
        assert self.weight is not None
        return linear(rows, self.weight)

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        if self.weight is not None and not self.projects_first:
            return linear(gathered, self.weight, self.bias, relu)
        out = gathered if self.bias is None else gathered + self.bias.to(gathered.dtype)
        return out.relu() if relu else out

    def scatter(self, block: Block, x: FeatureRows, sync: Callable[[Tensor], Tensor]) -> Tensor:
        return self.gathers(x)

    def transform(self, gathered: Tensor, own: FeatureRows) -> Tensor:
        return gathered if self.projects_first else self.project(gathered)

    def apply(self, summed: Tensor, relu: bool) -> Tensor:  # type: ignore[override]
        out = summed if self.bias is None else summed + self.bias.to(summed.dtype)
        return out.relu_() if relu else out


class SAGELayer(_SplitLayer):
    """x W_self + mean(x_neighbours) W_neigh + b (Hamilton et al. 2017; DGL's SAGEConv 'mean')."""

    edges = "mean"
    by_columns = ("weight", "weight_self")

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
        self.weight_self = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
        self.bias = nn.Parameter(torch.zeros(shape.h_out))

    def project(self, rows: FeatureRows) -> Tensor:
        return linear(rows, self.weight)

    def gather_beside(self, block: Block, rows: FeatureRows) -> tuple[Tensor, FeatureRows]:
        if self.projects_first or not isinstance(rows, Tensor):
            return super().gather_beside(block, rows)
        return aggregate_beside(block, rows)

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        if not self.projects_first:
            assert isinstance(rows, Tensor)
            return linear_sum([(rows, self.weight_self), (gathered, self.weight)], self.bias, relu)
        out = linear(rows, self.weight_self, self.bias) + gathered
        return out.relu_() if relu else out

    def scatter(self, block: Block, x: FeatureRows, sync: Callable[[Tensor], Tensor]) -> Tensor:
        return self.gathers(x)

    def transform(self, gathered: Tensor, own: FeatureRows) -> Tensor:
        if away := gathered.shape[0] - own.shape[0]:
            of_own, others = torch.split(gathered, [own.shape[0], away])
            if not self.projects_first:
                others = self.project(others)
            return torch.cat([self.transform(of_own, own), others])
        if not self.projects_first:
            assert isinstance(own, Tensor)
            return linear_sum([(own, self.weight_self), (gathered, self.weight)], None, False)
        return linear(own, self.weight_self) + gathered

    def apply(self, summed: Tensor, relu: bool) -> Tensor:  # type: ignore[override]
        out = summed + self.bias.to(summed.dtype)
        return out.relu_() if relu else out


class GCNIILayer(_SplitLayer):
    """((1-a) A~ x + a x0) ((1-b) I + b W) with b = log(theta / l + 1).

    Chen et al. 2020, Eq. 5; DGL's GCN2Conv. `number` is l, the layer's place in the model from 1.
    """

    edges = "gcn"

    def __init__(self, shape: gnn.Layer, number: int, alpha: float, theta: float) -> None:
        super().__init__(shape)
        self.alpha, self.beta = alpha, math.log(theta / number + 1)
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        assert x0 is not None
        mixed = torch.lerp(gathered, x0, self.alpha)
        out = torch.lerp(mixed, linear(mixed, self.weight), self.beta)
        return out.relu_() if relu else out


class GATLayer(_SplitLayer):
    """Per head the sum of softmax_u(LeakyReLU(a_l z_u + a_r z_v)) z_u, with z = x W; plus b.

    The sum is over neighbours u and the vertex v itself; heads lie side by side. Velickovic et al.
    2018; DGL's GATConv on A+I, without attention dropout.
    """

    edges = "loop"
    linear = False
    by_columns = ("weight",)

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.heads, self.width = shape.heads, shape.h_out // shape.heads
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
        self.bias = nn.Parameter(torch.zeros(shape.h_out))
        # [a_l | a_r] of each head
        self.attention = nn.Parameter(torch.empty(shape.heads, 2 * self.width))

    def project(self, rows: FeatureRows) -> Tensor:
        """[S, H_in] -> [S, H_out + heads]: z and each head's logit a_l z, side by side."""
        z = linear(rows, self.weight)
        return torch.cat([z, self._logits(z, self.attention[:, : self.width])], 1)

    def _logits(self, z: Tensor, vectors: Tensor) -> Tensor:
        return (z.view(-1, self.heads, self.width) * vectors).sum(2)

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        """Rows are [z | a_l z] from `project`, or [z | a_l z | a_r z] from `scatter`."""
        h_out = self.heads * self.width
        widths = [h_out, self.heads, rows.shape[1] - h_out - self.heads]
        z, of_source, of_reader = torch.split(rows, widths, 1)
        if not of_reader.shape[1]:
            of_reader = self._logits(block.own_rows(z), self.attention[:, self.width :])
        return attend(block, z, of_source, block.own_rows(of_reader))

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        return self.apply(gathered, relu)

    def scatter(self, block: Block, x: FeatureRows, sync: Callable[[Tensor], Tensor]) -> Tensor:
        """[z of these columns | a_l z | a_r z], logits of all columns: [S, H_out + 2 heads].

        Destinations alone have an a_r z; in the other rows it is zero.
        """
        z = linear(x, self.weight)
        to_sources, to_readers = self.attention.chunk(2, 1)
        logits = sync(
            torch.cat([self._logits(z, to_sources), self._logits(z[: block.n_dst], to_readers)])
        )
        of_source, of_reader = torch.split(logits, [block.n_src, block.n_dst])
        return torch.cat(
            [z, of_source, nn.functional.pad(of_reader, (0, 0, 0, block.n_src - block.n_dst))], 1
        )

    def transform(self, gathered: Tensor, own: FeatureRows) -> Tensor:
        return gathered

    def apply(self, summed: Tensor, relu: bool) -> Tensor:  # type: ignore[override]
        out = summed + self.bias
        return out.relu_() if relu else out


class GATv2Layer(_SplitLayer):
    """Per head the sum of softmax_u(a LeakyReLU(z_u + r_v)) z_u; plus b.

    z = x W + c of sources, r = x W' + c' of readers. The sum is over neighbours u and the vertex v
    itself; heads lie side by side. Brody et al. 2022; DGL's GATv2Conv on A+I (which has no b) and
    PyG's, without attention dropout.
    """

    edges = "loop"
    linear = False

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(
            torch.empty(2 * shape.h_out, shape.h_in)
        )  # [W | W'] and [c | c']
        self.bias_in = nn.Parameter(torch.zeros(2 * shape.h_out))
        self.attention = nn.Parameter(torch.empty(shape.heads, shape.h_out // shape.heads))
        self.bias = nn.Parameter(torch.zeros(shape.h_out)) if shape.bias else None

    def project(self, rows: FeatureRows) -> Tensor:
        """[S, H_in] -> [z | r] [S, 2 H_out]."""
        return linear(rows, self.weight, self.bias_in)

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        return attend_pairs(block, rows, self.attention)

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        if self.bias is None:
            return gathered.relu() if relu else gathered
        out = gathered + self.bias
        return out.relu_() if relu else out


class GINLayer(_SplitLayer):
    """A perceptron of (x + the sum of neighbours' x): W_out ReLU(W . + b) + b_out.

    Xu et al. 2019 with epsilon 0; GINConv of DGL and PyG with Linear, ReLU, Linear.
    """

    edges = "loop"

    def __init__(self, shape: gnn.Layer) -> None:
        super().__init__(shape)
        self.weight = nn.Parameter(torch.empty(shape.middle, shape.h_in))
        self.bias = nn.Parameter(torch.zeros(shape.middle))
        self.weight_out = nn.Parameter(torch.empty(shape.h_out, shape.middle))
        self.bias_out = nn.Parameter(torch.zeros(shape.h_out))

    def project(self, rows: FeatureRows) -> Tensor:
        return linear(rows, self.weight)

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        if self.projects_first:
            hidden = (gathered + self.bias.to(gathered.dtype)).relu_()
        else:
            hidden = linear(gathered, self.weight, self.bias, relu=True)
        return linear(hidden, self.weight_out, self.bias_out, relu)


class GENLayer(_SplitLayer):
    """(x + aggregated messages of neighbours) W + b, with messages relu(x_u) + 1e-7.

    GENConv of DeeperGCN (Li et al. 2020, Eq. 3-6), aggregated by a softmax of temperature 1 or a
    sum. From layer 2 on, x is norm, ReLU and dropout of the layer's inputs, and the inputs are
    added to the result (Res+).
    """

    edges = "one"
    linear = False

    def __init__(self, shape: gnn.Layer, aggregation: str) -> None:
        super().__init__(shape)
        self.softmax = aggregation == "softmax"
        self.weight = nn.Parameter(torch.empty(shape.h_out, shape.h_in))
        self.bias = nn.Parameter(torch.zeros(shape.h_out))

    def gather(self, block: Block, rows: Tensor) -> Tensor:
        messages = (rows if self.activates else rows.relu()) + 1e-7
        return softmax_aggregate(block, messages) if self.softmax else aggregate(block, messages)

    def combine(
        self, gathered: Tensor, rows: FeatureRows, x: FeatureRows, x0: Tensor | None, relu: bool
    ) -> Tensor:
        assert isinstance(rows, Tensor) and isinstance(x, Tensor)
        out = linear(gathered + rows, self.weight, self.bias)
        return out + x if self.activates else out


class Ends(Protocol):
    """What follows the last layer of a user's module: batch norm, and more."""

    norm: BatchNorm

    def __call__(self, h: Tensor, drop: Drop, moments: Tensor | None) -> Tensor:
        """h_L [R, W] -> logits [R, C]."""


class Net(nn.Module):
    """A model, or the run of its layers `which` (1-based) that a pipeline stage holds.

    The encoder comes with layer 1, the decoder with the last layer. The same seed gives the same
    weights on every rank, whichever layers it holds.
    """

    def __init__(
        self,
        shapes: Model,
        workload: Workload,
        which: range | None = None,
        own: Callable[[int], Layer] | None = None,
    ) -> None:
        """own: makes a layer of the user's; None: they are of our kinds."""
        super().__init__()
        self.total = len(shapes.layers)
        self.which = which or range(1, self.total + 1)
        self.layers = nn.ModuleDict()
        for number in self.which:
            self.layers[str(number)] = (
                own(number) if own else _make_layer(shapes.layers[number - 1], number, workload)
            )
        self.ends: Ends | None = None  # of a user's module
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
        self.initial = shapes.hands_on_initial  # layers read x0, the encoder's output
        self.jump, self.jumped = shapes.jump, shapes.jumped
        self.products = nn.ModuleDict()  # of layers whose rows lie side by side at the end
        if self.jump and self.jump.of == "cat":
            for number in self.which:
                self.products[str(number)] = nn.Linear(
                    shapes.layers[number - 1].h_out, self.jumped, bias=number == self.total
                )
        self.relu = [shapes.relu_after(n) for n in range(self.total + 1)]
        self.to(weight_dtype_of(workload))
        if shapes.nonzeros and 1 in self.which:
            self._store_by_columns()
        if own is None:  # who makes their own layers does so
            self._initialise(workload.seed)

    def _store_by_columns(self) -> None:
        """Lay out by columns the weights that multiply sparse features.

        Their product gathers columns, for which `linear` would otherwise transpose the weight.
        """
        first = self.layers["1"] if self.encoder is None else self.encoder
        for name, parameter in first.named_parameters():
            if name.startswith("weight"):
                parameter.data = parameter.data.t().contiguous().t()

    def _initialise(self, seed: int) -> None:
        """Glorot for matrices, 0 for biases, 1 for the weights of norms.

        Every matrix has a random stream of its own, from (seed, place in the model, name).
        """
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.data.fill_(float(name.endswith("norm.weight")))
                continue
            parts = name.split(".")
            first = {"layers": 0, "products": self.total + 1}
            place = (
                first[parts[0]] + int(parts[1])
                if parts[0] in first
                else {"encoder": 0, "decoder": self.total + 1}[parts[0]]
            )
            generator = torch.Generator().manual_seed(
                (seed * 1_000_003 + place) * 7 + len(parts[-1])
            )
            bound = math.sqrt(6 / sum(parameter.shape))
            draw = torch.rand(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_((2 * draw - 1) * bound)

    def layer(self, number: int) -> Layer:
        """Layer `number`, from 1."""
        return cast(Layer, self.layers[str(number)])

    @property
    def edges(self) -> list[str]:
        """The kind of each layer's edges (Layer.edges); all layers must be here."""
        return [self.layer(number).edges for number in range(1, self.total + 1)]

    def parameters_of(self, layers: range) -> Iterator[nn.Parameter]:
        """Those of a run of layers, with the encoder or decoder at its ends."""
        for name, parameter in self.named_parameters():
            part, number, *_ = name.split(".")
            if not parameter.requires_grad:
                continue
            ends = {"encoder": 1, "decoder": self.total, "norm": self.total}
            if (ends[part] if part in ends else int(number)) in layers:
                yield parameter

    def relu_after(self, number: int) -> bool:
        """Whether layer `number` (0: the encoder) ends in ReLU."""
        return self.relu[number]

    def batch_norm(self, number: int) -> BatchNorm | None:
        """The norm of layer `number` (L + 1: the decoder) if it needs moments."""
        if number > self.total and self.ends is not None:
            return self.ends.norm
        norm = self.norm if number > self.total else getattr(self.layers[str(number)], "norm", None)
        return norm if isinstance(norm, BatchNorm) else None

    def encode(self, x: FeatureRows, drop: Drop = keep) -> Tensor:
        """Features [R, F] -> h_0 [R, H]."""
        assert self.encoder is not None
        return linear(
            drop(x) if self.initial else x,
            self.encoder.weight,
            self.encoder.bias,
            relu=self.relu_after(0),
        )

    def decode(self, h: Tensor, drop: Drop = keep, moments: Tensor | None = None) -> Tensor:
        """h_L [R, H], or the sum of all layers' rows -> logits [R, C]; they are that without a
        decoder."""
        if self.ends is not None:
            return self.ends(h, drop, moments)
        if self.decoder is None:
            return h
        if self.activates_last:
            h = activated(self.norm, h, moments)
        return linear(drop(h) if self.jump is None else h, self.decoder.weight, self.decoder.bias)

    # A model with a `jump` decodes the sum of what all its layers add. It is of a rank's own rows
    # alone, so nothing is exchanged for it, and its gradient is that of what each layer adds.

    def added(self, number: int, h: Tensor, drop: Drop) -> Tensor:
        """h_l [R, H_l] of layer `number` -> what it adds to the sum [R, jumped].

        drop: the dropout before the next layer.
        """
        assert self.jump is not None
        rows = drop(h) if self.jump.drops else h
        if self.jump.of == "sum":
            return rows
        product = cast(nn.Linear, self.products[str(number)])
        return linear(rows, product.weight, product.bias)

    @torch.no_grad()
    def add(self, number: int, h: Tensor, drop: Drop, summed: Tensor) -> None:
        """Add to the sum [R, jumped], in place, what layer `number` adds; keeps nothing."""
        summed += self.added(number, h.detach(), drop)

    def add_backward(self, number: int, h: Tensor, drop: Drop, gradient: Tensor) -> Tensor:
        """The gradient of the sum [R, jumped] -> what it adds to that of h_l [R, H_l]."""
        with torch.enable_grad():
            rows = h.detach().requires_grad_()
            added = self.added(number, rows, drop)
        if added is rows:
            return gradient
        backward([added], [gradient])
        return gradient_of(rows)


def _make_layer(shape: gnn.Layer, number: int, workload: Workload) -> nn.Module:
    """Layer `number` of the workload's model."""
    if workload.model == "gcnii":
        return GCNIILayer(shape, number, workload.alpha, workload.theta)
    if workload.model == "resgcn":
        return GENLayer(shape, workload.aggregation)
    kinds: dict[str, Callable[[gnn.Layer], nn.Module]] = {
        "gcn": GCNLayer,
        "sgc": GCNLayer,
        "sage": SAGELayer,
        "gat": GATLayer,
        "gatv2": GATv2Layer,
        "gin": GINLayer,
    }
    return kinds[workload.model](shape)
