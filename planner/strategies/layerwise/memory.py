"""Memory of ranks that train layer by layer.

    constant   features, edges, rows that lag or stay: `resident`
    forward    the tensors that autograd saves (with recomputation: a layer's inputs) until the
               layer's backward pass, and a copy of all source rows while the layer computes
    loss       logits and their gradient
    backward   gradients of rows, and exchange buffers, in addition

An exchange's buffers are counted with the layer. The counts follow
executor/strategies/layerwise.py; planner/gnn/model.py has the sizes of a layer's tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.gnn.model import (
    LayerMemory,
    Model,
    OpMemory,
    block,
    footprint,
    keeps,
    link_loss,
    loss,
    rowwise,
)
from gnnplan.planner.gnn.rows import PLACES, WHOLE
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerCounts, Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.program.memory import Resident, machine_code
from gnnplan.planner.vocabulary.numbers import Number, largest

# -- data that stays from step to step -------------------------------------------------------------


def resident(
    problem: Problem,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Sequence[Layout | EstimatedLayout] = (),
) -> Resident:
    """Return what ranks have besides a step's tensors, with set-up and evaluation.

    The device has the features of the largest batch, and the edges of all batches. Evaluation needs
    no more memory than a step, except with a single batch: evaluation then is on the whole layout,
    which is larger.
    """
    zero = np.zeros(problem.ranks)
    counts = Counter(batches or (layout,))  # estimated batches are equal
    features, halo, graph = constant(problem, layout), zero, zero
    for batch, count in counts.items():
        halo = halo + _kept_rows(problem, batch, options)
        graph = graph + blocks(problem, batch, count)
    aggregate = problem.model.inputs.stored_bytes(layout.facts(1).rows)
    elsewhere = constant(
        problem, layout, at_setup=True
    ) + aggregate * problem.model.aggregate_cached(1)
    code = machine_code(problem, len(counts) + (len(counts) > 1))
    if batches:
        loaded = np.max([constant(problem, batch) for batch in counts], axis=0)
        if len(batches) == 1:  # evaluation does not free the batch's rows and edges
            evaluation = _during_evaluation(problem, layout)
            elsewhere = np.maximum(elsewhere, halo + loaded + code + evaluation)
        # a CPU rank's device memory is the server's, which has the features of all batches
        features = loaded + features * (problem.cluster.device.kind == "cpu")
    data = {"features": features, "halo": halo, "graph": graph}
    return Resident(data, code=code, elsewhere=elsewhere)


def blocks(problem: Problem, layout: Layout | EstimatedLayout, count: int = 1) -> np.ndarray:
    """Return the bytes of the blocks, labels and masks of `count` equal layouts [ranks]."""
    model = problem.model
    total, seen = np.zeros(problem.ranks), set()
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        if (kind := layout.kind(layer)) not in seen:  # layers of the same kind share their blocks
            seen.add(kind)
            total = total + block(model, spec, f.rows, f.sources, f.edges) + 8 * f.sent_rows
    return np.asarray(count * (total + 16 * f.rows))


def constant(
    problem: Problem, layout: Layout | EstimatedLayout, at_setup: bool = False
) -> np.ndarray:
    """Return the bytes of constant rows that a rank keeps, or reads at set-up [ranks].

    It keeps layer 1's aggregate if that is cached, else the rows that layer 1 or the encoder reads.
    """
    model, f, rows = problem.model, layout.facts(1), rows_read(problem, layout)
    if not at_setup:
        rows = np.asarray(model.constant_rows(f.rows, rows))
    # a layer that multiplies own rows apart from the rows read has a sorted copy of them
    own = (f.rows < f.sources) * model.own_index_bytes(f.rows)
    return np.asarray(model.inputs.stored_bytes(rows) + own, dtype=float)


def rows_read(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Return how many constant rows layer 1 or the encoder reads [ranks]."""
    return layout.facts(1).sources if problem.model.first_varying else layout.row_counts(0)


def _kept_rows(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Return the bytes of rows and gradients that are kept from step to step [ranks].

    Each layer keeps the halo rows and the gradients received last. If rows lag, they are kept as
    encoded, with buffers for sending too, and one more buffer for smoothing serves all layers in
    turn. An adaptive codec also keeps the width of each row.
    """
    kept, smoothed = np.zeros((2, problem.ranks))
    model, codec = problem.model, options.codec
    buffers = 2 if options.policy.lags else int(options.policy.keeps_received)
    stored = codec if options.policy.lags else WHOLE
    bits_bytes = 2 * PLACES * codec.adapts
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f, width = layout.facts(layer), model.exchanged_width(layer, options.narrow)
        exchanged = (f.received_rows + f.sent_rows) * stored.row_bytes(width, model.itemsize)
        kept = kept + buffers * exchanged + bits_bytes * (f.received_rows + f.sent_rows)
        smoothed = np.maximum(smoothed, exchanged / 2 * len(codec.averaged))
    return np.asarray(kept + smoothed)


def _during_evaluation(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Return the peak bytes of an evaluation on the whole layout [ranks]."""
    model, most = problem.model, np.zeros(problem.ranks)
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        need = footprint(model, layer, f.rows, f.sources, f.edges)
        # first own rows, rows to send, and a copy of all rows read; then the copy only
        row = spec.h_in * model.itemsize * (layer > model.first_varying)
        joined, computed = (f.local + f.sent_rows + f.sources) * row, f.sources * row + need.left
        most = np.maximum.reduce([most, joined, np.asarray(computed)])
    return np.asarray(most + constant(problem, layout) + blocks(problem, layout))


# -- memory of a step's operations -----------------------------------------------------------------


@dataclass(frozen=True)
class Holds:
    """Memory of a step's operations [ranks] [B].

    A layer's backward pass frees the bytes that its forward pass leaves. Rows that lag or stay are
    counted by `_kept_rows`. Between the passes a layer's output, or a copy of it with received
    rows, stays only if an operation saved it; with recomputation every layer's input stays.
    """

    problem: Problem
    model: Model  # the problem's model, or one with other orders of product and aggregation
    facts: Mapping[int, LayerCounts]  # layer -> counts of rows and edges
    options: ExchangeOptions
    scored: Scored | None = None

    def encode(self, rows: np.ndarray) -> OpMemory:
        """Return the memory of the encoder's forward pass, whose rows GCNII's layers read."""
        return keeps(rowwise(self.model.encoder_record, rows).left)

    def forward(self, layer: int) -> OpMemory:
        outputs = self._outputs(layer) * self.options.checkpoint
        freed = self.unsaved(layer - 1) * ~self._keeps_output_below(layer)
        left = np.asarray(self._kept(layer) - freed)
        peak = largest([self._joined(layer), self._need(layer).forward])
        return OpMemory(peak + outputs, left)

    def loss(self) -> OpMemory:
        model, stats, rows = self.model, self.problem.stats, self._scored_rows
        # with recomputation, outputs are not among the bytes that the last layer keeps
        more = self._outputs(len(model.layers)) * self.options.checkpoint
        if self.scored is None:
            # rows are those of the whole graph, or only training vertices if trimmed
            trained = rows * min(1.0, stats.train_vertices / max(rows.sum(), 1.0))
            need = loss(model, rows, trained)
        else:
            need = link_loss(model, rows, self.scored.edges, self.problem.workload.negatives)
            # a copy of own and received rows in one tensor
            more = more + rows * self._last_row * self.scored.sends.any()
        return need._replace(most=need.most + more)

    def backward(self, layer: int) -> OpMemory:
        most = self._need(layer, self._drops(layer)).most
        peak = self._gradient(layer) + np.maximum(most, self._gradients_of_sources(layer))
        # `most` includes saved tensors, which exist already unless they are recomputed
        freed = self.unsaved(layer)
        saved = (self._need(layer).left - freed) * (not self.options.checkpoint)
        input_freed = np.where(self._keeps_output_below(layer), self.unsaved(layer - 1), 0.0)
        return OpMemory(peak - saved, freed - self._kept(layer) - input_freed)

    def _kept(self, layer: int) -> Number:
        """Return the bytes kept from a layer's forward pass to its backward pass: inputs only if
        `checkpoint`, else the tensors that autograd saves."""
        if not self.options.checkpoint:
            return self._need(layer).left
        copied = np.asarray(
            self._copies(layer) * self.facts[layer].sources * self._row_bytes(layer)
        )
        alone = ~self._has_halo(layer) | self._is_narrow(layer)
        return copied + (self._outputs(layer - 1) * alone if layer > 1 else 0.0)

    def _has_halo(self, layer: int) -> NDArray[np.bool_]:
        """Whether rows are received in every step [ranks]."""
        return np.asarray(self.facts[layer].halo_rows * (layer > self.model.first_varying) > 0)

    def _is_narrow(self, layer: int) -> bool:
        return self.options.narrow and self.model.narrow_at(layer)

    def _copies(self, layer: int) -> NDArray[np.bool_]:
        """Whether a layer has its own copy of source rows, of own rows and the halo [ranks]."""
        recomputed = self.options.checkpoint and self._is_narrow(layer)
        summed = self.facts[layer].computed_rows is not None
        return np.asarray(self._has_halo(layer) | recomputed | summed)

    def _joined(self, layer: int) -> Number:
        """Return the bytes of own rows and halo in one tensor, with sums of them if it has any."""
        f = self.facts[layer]
        rows = f.sources if f.computed_rows is None else f.sources + f.available_rows
        return np.asarray(self._copies(layer) * rows * self._row_bytes(layer))

    def _keeps_output_below(self, layer: int) -> NDArray[np.bool_]:
        """Whether a layer holds the output of the layer before it until its backward pass."""
        alone = self.model.layer_record(layer, self.options.narrow).saves_input
        return np.where(self._copies(layer), self._own_in_place(layer), alone)

    def _own_in_place(self, layer: int) -> bool:
        """Whether a layer that copies rows reads its own rows where they were before."""
        summed, narrow = self.facts[layer].computed_rows is not None, self._is_narrow(layer)
        return self.model.own_in_place(layer) and not (summed or narrow or self.options.checkpoint)

    def _drops(self, layer: int) -> bool:
        """Whether a layer does not hold its own output; logits stay until the step ends."""
        last = len(self.model.layers) - (self.model.decoder is None)
        return not self.options.checkpoint and 0 < layer <= last

    def unsaved(self, layer: int) -> Number:
        """Return the bytes of a layer's output that the next layer frees before the layer's own
        backward pass. That begins with the projection of the output if the next layer is narrow."""
        is_last = layer == len(self.model.layers)
        if not self._drops(layer) or is_last or self._is_narrow(layer + 1):
            return 0.0
        return self._need(layer).left - self._need(layer, drops_output=True).left

    @property
    def _scored_rows(self) -> np.ndarray:
        """The rows of h_L that each rank has for the loss, own and received ones [ranks]."""
        own = self.facts[len(self.model.layers)].rows
        return own if self.scored is None else np.asarray(own + self.scored.sends.sum(0))

    @property
    def _last_row(self) -> int:
        """The bytes of a row of h_L."""
        return self.model.layers[-1].h_out * self.model.itemsize

    def _gradient(self, layer: int) -> Number:
        """Return the bytes of the gradient of the layer's outputs, with halo rows if larger."""
        if layer == len(self.model.layers):
            return np.asarray(self._scored_rows * self._last_row)
        present = self.facts[layer + 1].available_rows * self._row_bytes(layer + 1)
        return np.asarray(np.maximum(self._outputs(layer), present))

    def _outputs(self, layer: int) -> np.ndarray:
        """Return the bytes of the rows that a layer computes."""
        row: float = self.model.layers[layer - 1].h_out * self.model.itemsize
        return self.facts[layer].rows * row

    def _row_bytes(self, layer: int) -> int:
        """Return the bytes of a row that the layer exchanges."""
        return self.model.exchanged_width(layer, self.options.narrow) * self.model.itemsize

    def _gradients_of_sources(self, layer: int) -> Number:
        """Return the bytes of gradients while those of the halo are exchanged, or while those of
        sums become those of the rows that were added up."""
        f = self.facts[layer]
        rows = f.available_rows + f.sent_rows
        if f.computed_rows is not None:
            rows = np.maximum(rows, f.sources + f.available_rows)
        return np.asarray(self._copies(layer) * rows * self._row_bytes(layer))

    def _need(self, layer: int, drops_output: bool = False) -> LayerMemory:
        model, f = self.model, self.facts[layer]
        if f.remote_own is not None:
            model = model.without_ends(layer)

        def need(frees_input: bool) -> LayerMemory:
            return footprint(
                model,
                layer,
                f.rows,
                f.sources,
                f.edges,
                narrow=self.options.narrow,
                local=f.local,
                drops_output=drops_output,
                frees_input=frees_input,
                own_in_place=frees_input and self._own_in_place(layer),
                completes=f.partial_sums is not None,
            )

        copies = self._copies(layer) & (not self.options.checkpoint)
        if copies.all() or not copies.any():
            return need(bool(copies.all()))
        both = zip(need(True), need(False), strict=True)
        return LayerMemory(*(np.where(copies, of_copy, of_rows) for of_copy, of_rows in both))
