"""Memory that one layer needs while it is trained: activations, gradients and temporaries.

It follows from the layer's operations (layer.py). Sizes are in bytes and may be arrays over ranks;
R are a block's rows, S its sources, E its edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gnnplan.planner.gnn.amounts import Block, block_of
from gnnplan.planner.gnn.counted import amount
from gnnplan.planner.gnn.kinds import Layer
from gnnplan.planner.gnn.layer import Played
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.operations import LONG
from gnnplan.planner.vocabulary.numbers import Number

# [B] of libraries and context in a process that has done nothing yet
RUNTIME = {"cpu": 300e6, "cuda": 800e6}
# [B] of NCCL's own buffers for a communicator, which torch does not count. They grow with its
# channels, of which NVLink has many and PCIe few (github.com/NVIDIA/nccl, issue 986): two A100s
# with NVLink took 544 MB, four 688 MB (issue 964).
COMMUNICATOR = 300e6
COUNTS_AT_ENDS = 8  # [B] by which the offsets of a block's edges are more than its rows, both ways


@dataclass(frozen=True)
class Footprint:
    """Memory of one layer [B], without its source rows and the gradient of its output."""

    kept: Number  # from its forward to its backward pass, with its output
    backward: Number  # the most in its backward pass, which begins with what was kept

    @staticmethod
    def of(told: Played, counts: Block) -> Footprint:
        held = told.held.on(counts)
        return Footprint(held[0], held[1:].max(0))


def footprint(
    model: Model,
    layer: int,
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    narrow: bool = False,
    local: Number = 0.0,
    apart: bool = False,
) -> Footprint:
    """Memory of a layer of R `rows`, S `sources` and E `edges` (without self edges).

    narrow: its `local` source rows were prepared and projected before the exchange. apart: inputs
    are prepared in a segment of their own, and a gather that only weighs and adds is done outside
    autograd (GNNPipe)."""
    edges = edges + rows * model.layers[layer - 1].self_edges
    counts = block_of(rows, sources, edges, local=local)
    return Footprint.of(model.played(layer, narrow, apart), counts)


def encoding(model: Model, rows: Number) -> Number:
    """What the encoder keeps of so many rows [B]."""
    return Footprint.of(model.encodes, block_of(rows, rows, 0.0)).kept


def prepared(model: Model, spec: Layer, rows: Number) -> Number:
    """What preparing so many of a layer's input rows keeps (norm, ReLU and dropout) [B]."""
    return Footprint.of(model.prepares(spec), block_of(rows, rows, 0.0)).kept


def block(model: Model, spec: Layer, rows: Number, sources: Number, edges: Number) -> Number:
    """Memory of a layer's edges [B].

    Edges are kept in both directions, with the place of each in the other direction, and their
    weights; sources are kept by id."""
    edges = edges + rows if spec.self_edges else edges
    weights = 2 * model.itemsize * spec.weighs_edges
    structure = amount(spec.counted.structure.kept, rows, sources, edges) if spec.counted else 0.0
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources + structure


def decoded(model: Model, own: Number) -> tuple[Number, Number, Number]:
    """What decoding `own` rows keeps with its output, what its backward pass needs beside that, and
    the gradient that this leaves [B]."""
    if model.decoder is None:  # h_L itself
        return 0.0 * own, 0.0 * own, own * model.classes * model.itemsize
    need = Footprint.of(model.decodes, block_of(own, own, 0.0))
    return need.kept, need.backward - need.kept, own * model.decoder[0] * model.itemsize


def loss_itself(model: Model, own: Number, trained: Number) -> Number:
    """The most that is held of logits until their gradient is there, beside what decoding keeps."""
    chosen = trained * model.classes * model.weight_itemsize  # which is not rounded
    # logits of training vertices, their log-softmax, its gradient; then the gradient of logits
    return np.maximum(3 * chosen, chosen + own * model.classes * model.itemsize)


def loss(model: Model, own: Number, trained: Number) -> tuple[Number, Number, Number]:
    """Memory of decoder and loss on a rank's `own` rows, of which `trained` are trained on [B].

    Returns (kept until the step ends, the most, the gradient of h_L)."""
    kept, back, gradient = decoded(model, own)
    logits = own * model.classes * model.itemsize
    most = kept + np.maximum(loss_itself(model, own, trained), logits + back)
    return logits * (model.decoder is not None), most, gradient


def link_loss(
    model: Model, own: Number, edges: Number, negatives: int
) -> tuple[Number, Number, Number]:
    """Memory of decoder and link prediction's loss on a rank's `own` rows [B]; returns as `loss`.

    It is of so many edges, each with its negatives: rows of heads and of tails are picked, and
    multiplied pair by pair."""
    row = model.classes * model.itemsize
    rows, picked = own * row, edges * row * (2 + negatives)  # heads and tails
    scores = edges * (1 + negatives) * model.itemsize
    kept, back, gradient = decoded(model, own)
    places = 8 * edges * (2 + negatives)
    # gradients of what was picked; then those of rows, by their being heads, and tails
    most = np.maximum(2 * picked + 3 * scores, 2 * scores + np.maximum(picked + rows, back) + rows)
    return rows * (model.decoder is not None), kept + places + most, gradient
