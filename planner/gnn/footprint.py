"""Memory of one layer during training: activations, gradients and temporaries.

It follows from the layer's operations (layer.py). Sizes are in bytes and may be arrays over ranks.
A block has R rows, S sources and E edges."""

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

# memory of libraries and CUDA context in an idle process [B]
RUNTIME = {"cpu": 300e6, "cuda": 800e6}
# NCCL's own buffers for a communicator, which torch does not count [B]. They grow with the number
# of channels, which is large on NVLink and small on PCIe (github.com/NVIDIA/nccl, issue 986): two
# A100s with NVLink took 544 MB, four 688 MB (issue 964).
COMMUNICATOR = 300e6
COUNTS_AT_ENDS = 8  # the last entries of a block's two arrays of offsets (CSR and transpose) [B]


@dataclass(frozen=True)
class Footprint:
    """The memory of one layer [B], without its source rows and the gradient of its output."""

    kept: Number  # kept from the forward to the backward pass, with the output
    backward: Number  # peak of the backward pass, `kept` included

    @staticmethod
    def of(record: Played, counts: Block) -> Footprint:
        """Evaluate a layer's recorded memory on a block."""
        held = record.held.on(counts)
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
    """Return the memory of a layer of R `rows`, S `sources` and E `edges` (without self edges).

    narrow: the `local` source rows were prepared and projected before the exchange. apart: inputs
    are prepared in an autograd segment of their own, and a gather that is a weighted sum runs
    outside autograd (GNNPipe)."""
    edges = edges + rows * model.layers[layer - 1].self_edges
    counts = block_of(rows, sources, edges, local=local)
    return Footprint.of(model.played(layer, narrow, apart), counts)


def encoding(model: Model, rows: Number) -> Number:
    """Return the memory that the encoder keeps for the backward pass of `rows` rows [B]."""
    return Footprint.of(model.encodes, block_of(rows, rows, 0.0)).kept


def prepared(model: Model, spec: Layer, rows: Number) -> Number:
    """Return the memory that preparing `rows` inputs keeps (norm, ReLU and dropout) [B]."""
    return Footprint.of(model.prepares(spec), block_of(rows, rows, 0.0)).kept


def block(model: Model, spec: Layer, rows: Number, sources: Number, edges: Number) -> Number:
    """Return the memory of a layer's edges [B].

    A block has its edges as CSR and transposed, with each edge's position in the other form, the
    edge weights, and the ids of the sources."""
    edges = edges + rows if spec.self_edges else edges
    weights = 2 * model.itemsize * spec.weighs_edges
    structure = amount(spec.counted.structure.kept, rows, sources, edges) if spec.counted else 0.0
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources + structure


def decoded(model: Model, own: Number) -> tuple[Number, Number, Number]:
    """Return the memory of decoding `own` rows [B]: what is kept for the backward pass, with the
    output; the backward pass's further peak memory; the gradient of h_L."""
    if model.decoder is None:  # the output is h_L itself
        return 0.0 * own, 0.0 * own, own * model.classes * model.itemsize
    need = Footprint.of(model.decodes, block_of(own, own, 0.0))
    return need.kept, need.backward - need.kept, own * model.decoder[0] * model.itemsize


def loss_itself(model: Model, own: Number, trained: Number) -> Number:
    """Return the peak memory of the loss on the logits, without the memory of the decoder [B]."""
    chosen = trained * model.classes * model.weight_itemsize  # logits of training vertices
    # training vertices' logits, log-softmax and its gradient; then the gradient of all logits
    return np.maximum(3 * chosen, chosen + own * model.classes * model.itemsize)


def loss(model: Model, own: Number, trained: Number) -> tuple[Number, Number, Number]:
    """Return the memory of decoder and loss on `own` rows, with `trained` training vertices [B].

    Returns (kept until the step ends, peak, the gradient of h_L)."""
    kept, back, gradient = decoded(model, own)
    logits = own * model.classes * model.itemsize
    most = kept + np.maximum(loss_itself(model, own, trained), logits + back)
    return logits * (model.decoder is not None), most, gradient


def link_loss(
    model: Model, own: Number, edges: Number, negatives: int
) -> tuple[Number, Number, Number]:
    """Return the memory of decoder and link prediction's loss on `own` rows, as `loss` does [B].

    The loss gathers the rows of heads and tails of `edges` edges, each with `negatives` negatives,
    and multiplies them pair by pair."""
    row = model.classes * model.itemsize
    rows, gathered = own * row, edges * row * (2 + negatives)  # heads and tails
    scores = edges * (1 + negatives) * model.itemsize
    kept, back, gradient = decoded(model, own)
    positions = 8 * edges * (2 + negatives)
    # gradients of the gathered rows; then the rows' gradients, once as heads and once as tails
    backward = 2 * scores + np.maximum(gathered + rows, back) + rows
    most = np.maximum(2 * gathered + 3 * scores, backward)
    return rows * (model.decoder is not None), kept + positions + most, gradient
