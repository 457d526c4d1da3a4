"""The kinds of layers (GCN, GraphSAGE, GAT, ..), each described once for planner and executor.

A layer first prepares its input rows (norm, activation, dropout). Then it multiplies rows by its
matrix and aggregates rows over the edges, in the cheaper order of the two.

    h_{l-1} [S, H_{l-1}]   prepare | project | gather | update    h_l [R, H_l]     projects_first
                           prepare | gather  | update                              otherwise

R rows are written (destinations) and S rows are read (sources, which include the destinations).

A kind is written in terms of the operations in `Arithmetic`. The planner applies them to amounts of
rows (layer.py), which gives work and memory; the executor applies them to tensors
(executor/layers/models.py), which computes the layer. A new kind needs a class here and its name
in `Fields.model`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from pydantic import Field

from gnnplan.planner.gnn.fields import Fields
from gnnplan.planner.vocabulary.spec import Spec

# -- layers of the user's own, as counted ----------------------------------------------------------

# The work and memory of a layer of the user's own, as counted from a run of its operations.
#
# executor/layers/count.py runs the layer on small blocks of several sizes and records torch's
# operations. Every count is linear in a block's rows R, sources S and edges E, so four factors
# describe it:
#
#     amount = a R + b S + c E + d
#
# E counts the edges that the layer reads, with self edges if the layer asks for them.


Linear = tuple[float, float, float, float]  # factors per row, per source, per edge; constant
NOTHING: Linear = (0.0, 0.0, 0.0, 0.0)


def amount(linear: Linear, rows: Any, sources: Any, edges: Any) -> Any:
    """Evaluate the factors for a block, whose counts are numbers or amounts (amounts.Amount).

    >>> amount((1.0, 2.0, 0.5, 3.0), 10, 20, 100)
    103.0
    """
    per_row, per_source, per_edge, constant = linear
    return per_row * rows + per_source * sources + per_edge * edges + constant


class CountedGather(Spec):
    """An aggregation: it reads source rows and adds them to destination rows (schedule.Gather)."""

    rows: Linear  # rows read, one per edge
    width: int = Field(ge=1)  # numbers per row
    among: Linear  # distinct source rows
    into: Linear  # destination rows


class CountedWork(Spec):
    """The work of one pass of a layer (schedule.Compute)."""

    flops: Linear = NOTHING
    gemm_bytes: Linear = NOTHING
    elementwise_bytes: Linear = NOTHING
    exponentials: Linear = NOTHING  # only in older plans: under half a per cent of a step
    gathers: tuple[CountedGather, ...] = ()
    maxima: Linear = NOTHING  # rows that are put into maxima by index; also counted in the others
    launches: int = Field(0, ge=0)


class CountedProduct(Spec):
    """A matrix product that oneDNN compiles code for (products.Product)."""

    rows: Linear
    h_in: int = Field(ge=1)
    h_out: int = Field(ge=1)
    after: str  # the fused operations after it, as in products.Product


class Event(Spec):
    """The allocation or release of a tensor."""

    bytes: Linear  # allocated [B]; negative for a release
    of_gather: bool  # happens before the layer's `update`, or in the backward pass of that part
    cast: bool = False  # of the copy of an operand of another type, which only CPUs make


class Structure(Spec):
    """The tensors that a user's module computes once from a block's edges."""

    kept: Linear = NOTHING  # their memory [B]
    most: Linear = NOTHING  # peak memory while they are computed [B]
    work: CountedWork = CountedWork()


class Counted(Spec):
    """A layer of the user's own: the properties that it declares, and its counts."""

    edges: Literal["gcn", "mean", "one", "loop"]  # edges and weights that it asks for (kinds.Kind)
    projects_first: bool  # multiplies rows by its matrix before it aggregates them
    linear: bool  # `gather` is a weighted sum
    gathered: int = Field(ge=0)  # numbers per row that `gather` reads
    weights: int = Field(ge=0)  # numbers in its parameters
    # numbers in its parameters per column of its input, if it has P3's methods; 0: it has not
    by_column: int = Field(0, ge=0)
    keeps_inputs: bool  # autograd saves the prepared rows
    products: tuple[CountedProduct, ...]
    forward: CountedWork
    backward: CountedWork
    # Allocations and releases in order. They include the output, but neither the input's rows, nor
    # the output's gradient, nor the sums of the weights' gradients.
    forward_events: tuple[Event, ...]
    backward_events: tuple[Event, ...]
    structure: Structure = Structure()
    reads_host: bool = False  # the host waits in every step to read a value or a shape of a tensor


def between(part: Counted, whole: Counted, at: float, share: float) -> Counted:
    """Interpolate the counts for a `share` of the layer's input columns.

    part: the counts for the share `at`. whole: the counts for all columns."""
    weight = (share - at) / (1 - at)

    def blend(of_part: Any, of_whole: Any) -> Any:
        if isinstance(of_whole, dict):
            return {name: blend(of_part[name], value) for name, value in of_whole.items()}
        if isinstance(of_whole, tuple):
            return tuple(blend(*pair) for pair in zip(of_part, of_whole, strict=True))
        if isinstance(of_whole, float):
            return of_part + (of_whole - of_part) * weight
        if isinstance(of_whole, int) and not isinstance(of_whole, bool):
            return max(min(of_part, 1), round(of_part + (of_whole - of_part) * weight))
        return of_whole

    return Counted.model_validate(blend(part.model_dump(), whole.model_dump()))


# -- kinds -----------------------------------------------------------------------------------------


V = TypeVar("V")  # rows: an amount (planner) or a tensor (executor)
Shapes = dict[str, tuple[int, ...]]  # name of a parameter -> shape


@dataclass(frozen=True)
class LayerSpec:
    """The shape of one layer, its kind, and its options."""

    h_in: int
    h_out: int
    kind: str = "gcn"  # key of KINDS; 'own': a layer of the user's own, with `counted`
    # The layer multiplies before it aggregates, because its output is narrower, because it uses
    # attention, or because its input rows can only be multiplied (rows.py).
    projects_first: bool = False
    matrices: int = 1  # products with a matrix [h_in, h_out]; 0: the layer only aggregates
    sums: int = 1  # sums over the edges; a softmax aggregation is a ratio of two sums
    heads: int = 0  # attention heads; each adds a logit to a projected row
    # Norm and ReLU come first in this layer, applied to its inputs. Otherwise they come last in the
    # previous layer.
    activates: bool = False
    norm: str = "none"  # norm of the inputs if `activates`: 'layer' or 'batch'
    drops: bool = True  # dropout of the inputs
    bias: bool = True
    middle: int = 0  # GIN: numbers per row between its two products; 0: the layer has one product
    counted: Counted | None = None  # counts of a layer of the user's own

    @property
    def parameters(self) -> Shapes:
        """The shapes of the layer's parameters by name, without the parameters of its norm."""
        return KINDS[self.kind].parameters(self)

    @property
    def weights(self) -> int:
        """The count of numbers in all parameters of the layer."""
        if self.counted:
            return self.counted.weights
        return sum(map(math.prod, self.parameters.values())) + self.norm_weights

    @property
    def norm_weights(self) -> int:
        """The count of numbers in the parameters of the layer's norm."""
        return 2 * self.h_in * (self.activates and self.norm != "none")

    @property
    def edges(self) -> str:
        """The edges and edge weights that the layer asks for (`Kind.edges`)."""
        return self.counted.edges if self.counted else KINDS[self.kind].edges

    @property
    def self_edges(self) -> bool:
        """Whether a destination also aggregates its own row."""
        return self.edges in ("gcn", "loop")

    @property
    def weighs_edges(self) -> bool:
        """Whether the edges have weights: those of a mean, or of GCN's symmetric norm."""
        return self.edges in ("gcn", "mean")

    @property
    def gathers_linearly(self) -> bool:
        """Whether the layer's aggregation is a weighted sum of rows."""
        return self.counted.linear if self.counted else KINDS[self.kind].linear

    @property
    def reads_own(self) -> bool:
        """Whether the layer reads the destinations' own rows besides the aggregate."""
        return self.matrices > 1 or self.counted is not None

    @property
    def multiplied(self) -> int:
        """Numbers per row after the product with the first matrix."""
        return KINDS[self.kind].parameters(self).get("weight", (self.h_out,))[0]

    @property
    def projected(self) -> int:
        """Numbers per projected row."""
        if self.counted:
            return self.counted.gathered
        return self.multiplied + self.heads * KINDS[self.kind].sends_logits

    @property
    def gathered(self) -> int:
        """Numbers per row that the layer sums over the edges."""
        if self.counted:
            return self.counted.gathered
        return (self.middle or self.h_out) if self.projects_first else self.h_in


class Arithmetic(Protocol[V]):
    """The operations that a layer may apply to rows.

    Strings name parameters of the layer, of which the bias may be absent, or constants."""

    # sum over terms of rows times matrix, plus the bias; then ReLU if asked for
    def linear(self, terms: Sequence[tuple[V, str]], bias: str = "", relu: bool = False) -> V: ...
    def bias(self, x: V) -> V: ...  # x + the layer's bias
    def relu(self, x: V, in_place: bool = True) -> V: ...
    def add(self, x: V, y: V) -> V: ...
    def shift(self, x: V) -> V: ...  # x + 1e-7
    def lerp(self, x: V, y: V, by: str) -> V: ...  # x + c (y - x), c: a constant of the kind
    def towards_product(self, x: V, weight: str, by: str) -> V: ...  # x + c (x W - x)
    def initial_rows(self, width: int) -> V: ...  # the encoder's output for the destinations
    # over edges
    def aggregate(self, x: V, times: int = 1) -> V: ...  # weighted sums
    def softmax_aggregate(self, x: V) -> V: ...  # means weighted by the softmax of the rows
    def append_logits(self, z: V, heads: int) -> V: ...  # GAT: [z | a logit per head]
    def attend(self, x: V, heads: int) -> V: ...  # GAT: sums of z weighted by softmax of logits
    def attend_pairs(self, x: V, heads: int) -> V: ...  # GATv2: a logit reads both ends' rows


class UpdateInputs(NamedTuple, Generic[V]):
    """The inputs of a layer's `update`."""

    gathered: V  # the aggregate
    own: V  # the destinations' own prepared rows
    inputs: V  # the destinations' rows before preparation
    relu: bool  # whether the layer ends in ReLU


class Kind:
    """A kind of layer; this base class has the defaults."""

    # edges and weights of a block: 'gcn' (symmetric norm, self edges), 'mean' (1 / degree), 'one'
    # (1), or 'loop' (1, self edges)
    edges: ClassVar[str] = "gcn"
    # kernels on a GPU, forward and backward, without dropout and norm
    # (tests/executor/test_launches.py)
    launches: ClassVar[tuple[int, int]] = (6, 6)
    # The equivalent convolutions of PyTorch Geometric and DGL: a class, then its parameters as
    # "theirs=ours:view" (executor/modules/convert.py). A convolution may lack some of them.
    pyg: ClassVar[str] = ""
    dgl: ClassVar[str] = ""

    linear: ClassVar[bool] = True  # the aggregation is a weighted sum
    attends: ClassVar[bool] = False  # the layer uses attention
    sends_logits: ClassVar[bool] = False  # a projected row is followed by a logit per head
    projects_own: ClassVar[bool] = False  # a product also reads the destinations' own rows
    # names of parameters [., h_in] that P3 splits by columns among ranks
    by_columns: ClassVar[tuple[str, ...]] = ()
    # reason, in words, why `by_columns` is empty
    lacks_columns: ClassVar[str] = "reads an encoder's output"
    rounds_rows: ClassVar[bool] = True  # rows may be rounded (--dtype)
    # properties of a model of such layers:
    encodes: ClassVar[bool] = False  # an encoder before the first layer, a decoder after the last
    reads_initial: ClassVar[bool] = False  # every layer reads the encoder's output
    activates: ClassVar[bool] = False  # layers apply ReLU to their inputs, with or without a norm
    norm: ClassVar[str] = "none"  # default norm
    instead: ClassVar[str] = ""  # kind to use with a norm, if this kind is defined without one
    has_relu: ClassVar[bool] = True  # ReLU between layers

    def width(self, fields: Fields, classes: int) -> int:
        """Return the numbers per row between layers."""
        return fields.hidden

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        """Adapt the layer at a position of the model, counted from 0, to the kind."""
        return layer

    def constants(self, fields: Fields, number: int) -> dict[str, float]:
        """Return the constants of layer `number`, counted from 1, by name."""
        return {}

    def parameters(self, spec: LayerSpec) -> Shapes:
        """Return the shapes of the layer's parameters by name, in order."""
        return {"weight": (spec.h_out, spec.h_in)} | _biased(spec)

    def project(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        """Multiply rows by the layer's matrix, before the gather."""
        return ops.linear([(rows, "weight")])

    def gather(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        """Aggregate the source rows of each destination's edges into one row."""
        return ops.aggregate(rows, spec.sums)

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        """Compute the layer's output from the aggregate."""
        raise NotImplementedError


def _biased(spec: LayerSpec) -> Shapes:
    return {"bias": (spec.h_out,)} if spec.bias else {}


class GCN(Kind):
    """A~ x W + b with A~ = (D+1)^-1/2 (A+I) (D+1)^-1/2.

    Kipf and Welling 2017; DGL's GraphConv with norm='both' on A+I."""

    pyg = "GCNConv lin.weight=weight bias=bias"
    dgl = "GraphConv weight=weight:transposed bias=bias"
    by_columns = ("weight",)

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        if spec.matrices and not spec.projects_first:
            return ops.linear([(given.gathered, "weight")], "bias", given.relu)
        out = ops.bias(given.gathered)
        return ops.relu(out, in_place=False) if given.relu else out


class SGC(GCN):
    """K layers are A~^K x W + b (Wu et al. 2019; DGL's SGConv on A+I).

    Only the first layer has W, so rows of later layers have a number per class. Only the last layer
    has b. There is no ReLU between layers. The paper has no dropout; here features get dropout."""

    pyg = "SGConv lin.weight=weight lin.bias=bias"
    dgl = "SGConv fc.weight=weight fc.bias=bias"
    instead = "gcn for a model"
    has_relu = False

    def width(self, fields: Fields, classes: int) -> int:
        return classes

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        begins, ends = place == 0, place == fields.layers - 1
        return replace(layer, matrices=int(begins), drops=begins, bias=ends)

    def parameters(self, spec: LayerSpec) -> Shapes:
        return super().parameters(spec) if spec.matrices else _biased(spec)


class SAGE(Kind):
    """x W_self + mean(x_neighbours) W_neigh + b (Hamilton et al. 2017; DGL's SAGEConv 'mean')."""

    edges = "mean"
    launches = (8, 8)
    pyg = "SAGEConv lin_l.weight=weight lin_l.bias=bias lin_r.weight=weight_self"
    dgl = "SAGEConv fc_neigh.weight=weight fc_self.weight=weight_self fc_self.bias=bias"
    projects_own = True
    by_columns = ("weight", "weight_self")

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        return replace(layer, matrices=2)

    def parameters(self, spec: LayerSpec) -> Shapes:
        matrix = spec.h_out, spec.h_in
        return {"weight": matrix, "weight_self": matrix} | _biased(spec)

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        own = given.own, "weight_self"
        if not spec.projects_first:
            return ops.linear([own, (given.gathered, "weight")], "bias", given.relu)
        out = ops.add(given.gathered, ops.linear([own], "bias"))
        return ops.relu(out) if given.relu else out


class GCNII(Kind):
    """((1-a) A~ x + a x0) ((1-b) I + b W) with b = log(theta / l + 1).

    Chen et al. 2020, Eq. 5; DGL's GCN2Conv. l is the layer's place in the model from 1."""

    launches = (10, 12)
    pyg = dgl = "GCN2Conv weight1=weight:transposed"
    encodes = reads_initial = True
    instead = "resgcn for a deep model"

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        return replace(layer, bias=False)

    def constants(self, fields: Fields, number: int) -> dict[str, float]:
        return {"alpha": fields.alpha, "beta": math.log(fields.theta / number + 1)}

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        mixed = ops.lerp(given.gathered, ops.initial_rows(spec.h_in), "alpha")
        out = ops.towards_product(mixed, "weight", "beta")
        return ops.relu(out) if given.relu else out


class GAT(Kind):
    """Per head the sum of softmax_u(LeakyReLU(a_l z_u + a_r z_v)) z_u, with z = x W; plus b.

    The sum is over neighbours u and the vertex v itself; the heads' outputs are concatenated.
    Velickovic et al. 2018; DGL's GATConv on A+I, without attention dropout."""

    edges = "loop"
    launches = (15, 21)
    pyg = "GATConv lin.weight=weight att_src=attention:left att_dst=attention:right bias=bias"
    dgl = "GATConv fc.weight=weight attn_l=attention:left attn_r=attention:right bias=bias"
    linear, attends, sends_logits, rounds_rows = False, True, True, False
    by_columns: ClassVar[tuple[str, ...]] = ("weight",)

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        return replace(layer, heads=1 if place == fields.layers - 1 else fields.heads)

    def parameters(self, spec: LayerSpec) -> Shapes:
        """Return the shapes of weight, bias and attention, which has [a_l | a_r] for each head."""
        attention = spec.heads, 2 * (spec.h_out // spec.heads)
        return super().parameters(spec) | {"attention": attention}

    def project(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        return ops.append_logits(super().project(ops, spec, rows), spec.heads)

    def gather(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        return ops.attend(rows, spec.heads)

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        out = ops.bias(given.gathered)
        return ops.relu(out, in_place=spec.bias) if given.relu else out


class GATv2(GAT):
    """Per head the sum of softmax_u(a LeakyReLU(z_u + r_v)) z_u; plus b.

    z = x W + c for sources, r = x W' + c' for destinations. The sum is over neighbours u and the
    vertex v itself; the heads' outputs are concatenated. Brody et al. 2022; DGL's GATv2Conv on A+I
    (which has no b) and PyG's, without attention dropout."""

    launches = (8, 15)
    pyg = (
        "GATv2Conv lin_l.weight=weight:upper lin_l.bias=bias_in:upper lin_r.weight=weight:lower"
        " lin_r.bias=bias_in:lower att=attention:heads bias=bias"
    )
    dgl = (
        "GATv2Conv fc_src.weight=weight:upper fc_src.bias=bias_in:upper fc_dst.weight=weight:lower"
        " fc_dst.bias=bias_in:lower attn=attention:heads"
    )
    sends_logits = False
    by_columns = ()
    lacks_columns = "has logits of whole rows"

    def parameters(self, spec: LayerSpec) -> Shapes:
        """Return the shapes of weight [W | W'], bias_in [c | c'], attention and bias."""
        both = 2 * spec.h_out
        attention = spec.heads, spec.h_out // spec.heads
        shapes: Shapes = {"weight": (both, spec.h_in), "bias_in": (both,), "attention": attention}
        return shapes | _biased(spec)

    def project(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        """Return [z | r]."""
        return ops.linear([(rows, "weight")], "bias_in")

    def gather(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        return ops.attend_pairs(rows, spec.heads)


class GIN(Kind):
    """A perceptron W_out ReLU(W . + b) + b_out of (x + the sum of neighbours' x).

    Xu et al. 2019 with epsilon 0; GINConv of DGL and PyG with Linear, ReLU, Linear."""

    edges = "loop"
    launches = (10, 11)
    pyg = "GINConv nn.0.weight=weight nn.0.bias=bias nn.2.weight=weight_out nn.2.bias=bias_out"
    dgl = (
        "GINConv apply_func.0.weight=weight apply_func.0.bias=bias"
        " apply_func.2.weight=weight_out apply_func.2.bias=bias_out"
    )
    lacks_columns = "has a second product after the sum"

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        return replace(layer, middle=fields.hidden)

    def parameters(self, spec: LayerSpec) -> Shapes:
        return {
            "weight": (spec.middle, spec.h_in),
            "bias": (spec.middle,),
            "weight_out": (spec.h_out, spec.middle),
            "bias_out": (spec.h_out,),
        }

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        if spec.projects_first:
            hidden = ops.relu(ops.bias(given.gathered))
        else:
            hidden = ops.linear([(given.gathered, "weight")], "bias", relu=True)
        return ops.linear([(hidden, "weight_out")], "bias_out", given.relu)


class ResGCN(Kind):
    """(x + aggregated messages of neighbours) W + b, with messages relu(x_u) + 1e-7.

    GENConv of DeeperGCN (Li et al. 2020, Eq. 3-6), aggregated by a softmax of temperature 1 or a
    sum. From layer 2 on, x is the layer's input after norm, ReLU and dropout, and the input is
    added to the result (Res+)."""

    edges = "one"
    launches = (9, 8)
    linear, rounds_rows = False, False
    encodes = activates = True
    norm = "layer"

    def shaped(self, layer: LayerSpec, fields: Fields, place: int) -> LayerSpec:
        return replace(layer, sums=2 if fields.aggregation == "softmax" else 1, drops=False)

    def gather(self, ops: Arithmetic[V], spec: LayerSpec, rows: V) -> V:
        messages = ops.shift(rows if spec.activates else ops.relu(rows, in_place=False))
        if spec.sums > 1:
            return ops.softmax_aggregate(messages)
        return ops.aggregate(messages, spec.sums)

    def update(self, ops: Arithmetic[V], spec: LayerSpec, given: UpdateInputs[V]) -> V:
        out = ops.linear([(ops.add(given.gathered, given.own), "weight")], "bias")
        return ops.add(out, given.inputs) if spec.activates else out


# Workload.model -> kind, in the order in which messages list the kinds
KINDS: dict[str, Kind] = {
    "gcn": GCN(),
    "sage": SAGE(),
    "gcnii": GCNII(),
    "gat": GAT(),
    "resgcn": ResGCN(),
    "sgc": SGC(),
    "gin": GIN(),
    "gatv2": GATv2(),
}
