"""Memory of one layer during training: activations, gradients and temporaries.

It follows from the layer's operations (layer.py). Sizes are in bytes and may be arrays over ranks.
A block has R rows, S sources and E edges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from gnnplan.planner.gnn.counted import amount
from gnnplan.planner.gnn.kinds import LayerSpec
from gnnplan.planner.gnn.layer import LayerRecord
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.operations import LONG
from gnnplan.planner.gnn.trace import block_of
from gnnplan.planner.vocabulary.numbers import Number, largest

# memory of libraries and CUDA context in an idle process [B]
RUNTIME = {"cpu": 300e6, "cuda": 800e6}
# NCCL's own buffers for a communicator, which torch does not count [B]. They grow with the number
# of channels, which is large on NVLink and small on PCIe (github.com/NVIDIA/nccl, issue 986): two
# A100s with NVLink took 544 MB, four 688 MB (issue 964).
COMMUNICATOR = 300e6
COUNTS_AT_ENDS = 8  # the last entries of a block's two arrays of offsets (CSR and transpose) [B]


class OpMemory(NamedTuple):
    """The memory of an operation, on top of the memory before it [B].

    Of a decoder or a loss: as LayerMemory's `most` and `left`."""

    most: Number  # peak
    left: Number  # still allocated afterwards; negative: it frees more than it allocates


class LayerMemory(NamedTuple):
    """The memory of a layer, without source rows and the gradient of the output [B]."""

    forward: Number  # peak of the forward pass
    most: Number  # peak of the backward pass, with what the forward pass keeps
    left: Number  # what the forward pass keeps for the backward pass, with the output


def keeps(nbytes: Number) -> OpMemory:
    """Return the memory of an operation that allocates so many bytes and frees nothing."""
    return OpMemory(nbytes, nbytes)


def in_turn(operations: Iterable[OpMemory]) -> OpMemory:
    """Return the memory of operations that run one after the other, taken as one operation.

    >>> in_turn([keeps(3.0), OpMemory(most=4.0, left=-2.0), keeps(1.0)])
    OpMemory(most=np.float64(7.0), left=2.0)
    """
    most: Number = 0.0
    left: Number = 0.0
    for each in operations:
        most, left = largest([left + each.most], most), left + each.left
    return OpMemory(most, left)


def rowwise(record: LayerRecord, rows: Number) -> OpMemory:
    """Return the memory of an encoder, a decoder or a layer's preparation on `rows` rows."""
    held = record.backward.on(block_of(rows, rows, 0.0))
    return OpMemory(held[1:].max(0), held[0])


def footprint(
    model: Model,
    layer: int,
    rows: Number,
    sources: Number,
    edges: Number,
    *,
    narrow: bool = False,
    local: Number = 0.0,
    **setting: bool,
) -> LayerMemory:
    """Return the memory of a layer of R `rows`, S `sources` and E `edges` (without self edges).

    narrow: the `local` source rows were prepared and projected before the exchange. setting: more
    options of Model.layer_record."""
    edges = edges + rows * model.layers[layer - 1].self_edges
    counts = block_of(rows, sources, edges, local=local)
    record = model.layer_record(layer, narrow, **setting)
    forward, backward = record.forward.on(counts), record.backward.on(counts)
    return LayerMemory(forward[1:].max(0), backward[1:].max(0), forward[0])


def block(model: Model, spec: LayerSpec, rows: Number, sources: Number, edges: Number) -> Number:
    """Return the memory of a layer's edges [B].

    A block has its edges as CSR and transposed, with each edge's position in the other form, the
    edge weights, and the ids of the sources."""
    edges = edges + rows if spec.self_edges else edges
    weights = 2 * model.itemsize * spec.weighs_edges
    structure = amount(spec.counted.structure.kept, rows, sources, edges) if spec.counted else 0.0
    return edges * (12 + weights) + 4 * (rows + sources) + LONG * sources + structure


def decoded(model: Model, own: Number) -> OpMemory:
    """Return the memory of decoding `own` rows of h_L; without a decoder they are the output."""
    if model.decoder is None:
        return keeps(0.0 * own)
    return rowwise(model.decoder_record, own)


def loss_itself(model: Model, own: Number, trained: Number) -> Number:
    """Return the peak memory of the loss on the logits, without the memory of the decoder [B]."""
    chosen = trained * model.classes * model.weight_itemsize  # logits of training vertices
    # training vertices' logits, log-softmax and its gradient; then the gradient of all logits
    return np.maximum(3 * chosen, chosen + own * model.classes * model.itemsize)


def loss(model: Model, own: Number, trained: Number) -> OpMemory:
    """Return the memory of decoder and loss on `own` rows, with `trained` training vertices.

    The logits stay until the step ends; without a decoder they are h_L itself."""
    need, logits = decoded(model, own), own * model.classes * model.itemsize
    most = np.maximum(need.left + loss_itself(model, own, trained), need.most + logits)
    return OpMemory(most, logits * (model.decoder is not None))


def link_loss(model: Model, own: Number, edges: Number, negatives: int) -> OpMemory:
    """Return the memory of decoder and link prediction's loss on `own` rows, as `loss` does.

    The loss gathers the rows of heads and tails of `edges` edges, each with `negatives` negatives,
    and multiplies them pair by pair."""
    row = model.classes * model.itemsize
    rows, gathered = own * row, edges * row * (2 + negatives)  # heads and tails
    scores = edges * (1 + negatives) * model.itemsize
    need, positions = decoded(model, own), 8 * edges * (2 + negatives)
    # gradients of the gathered rows; then the rows' gradients, once as heads and once as tails
    backward = 2 * scores + np.maximum(gathered + rows, need.most - need.left) + rows
    most = need.left + positions + np.maximum(2 * gathered + 3 * scores, backward)
    return OpMemory(most, rows * (model.decoder is not None))
