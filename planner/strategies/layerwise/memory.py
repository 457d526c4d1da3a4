"""Bytes that ranks hold that go layer by layer together.

    stays      features, edges, rows that lag or stay: `memory`
    forward    a layer's inputs and what autograd saves stay, until its backward pass frees them
    loss       logits and their gradient
    backward   gradients of rows, and exchange buffers, come on top

A layer's exchange is counted with the layer. It follows executor/strategies/graph_parallel.py;
sizes of a layer's tensors come from planner/gnn/footprint.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gnnplan.planner.gnn.codec import PLACES, WHOLE
from gnnplan.planner.gnn.footprint import Footprint, block, encoding, footprint, link_loss, loss
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.program.memory import Memory, machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Held, Program, keeps
from gnnplan.planner.vocabulary.numbers import Number

# -- what stays from step to step ------------------------------------------------------------------


def memory(
    problem: Problem,
    program: Program,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    batches: Sequence[Layout | EstimatedLayout] = (),
) -> Memory:
    """Bytes per rank by use, at the fullest moment of a step, of the set-up or of an evaluation.

    The largest batch fills the device. Edges of all batches stay there. Evaluation takes the memory
    of a step or less, but for a single batch, after which it is on the whole layout.
    """
    zero = np.zeros(problem.ranks)
    times = Counter(batches or (layout,))  # estimated batches are equal
    features, halo, graph = constant(problem, layout), zero, zero
    for batch, count in times.items():
        halo = halo + _kept_rows(problem, batch, options)
        graph = graph + blocks(problem, batch, count)
    made = problem.model.inputs.held(layout.facts(1).rows)
    elsewhere = read(problem, layout) + made * problem.model.aggregate_cached(1)
    code = machine_code(problem, len(times) + (len(times) > 1))
    if batches:
        loaded = np.max([constant(problem, batch) for batch in times], axis=0)
        if len(batches) == 1:  # the batch's rows and edges, and stale rows, stay meanwhile
            evaluation = _during_evaluation(problem, layout)
            elsewhere = np.maximum(elsewhere, halo + loaded + code + evaluation)
        # on a CPU the device's memory is the server's, which has the features of all batches
        features = loaded + features * (problem.cluster.device.kind == "cpu")
    return on_ranks(
        problem,
        program,
        code=code,
        features=features,
        halo=halo,
        graph=graph,
        elsewhere=elsewhere,
    )


def blocks(problem: Problem, layout: Layout | EstimatedLayout, count: int = 1) -> np.ndarray:
    """Bytes of the blocks of `count` such layouts, labels and masks included [ranks]."""
    model = problem.model
    total, seen = np.zeros(problem.ranks), set()
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        if (alike := layout.kind(layer)) not in seen:  # such layers share their blocks
            seen.add(alike)
            total = total + block(model, spec, f.rows, f.sources, f.edges) + 8 * f.given
    return np.asarray(count * (total + 16 * f.rows))


def constant(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that a rank keeps [ranks].

    They are layer 1's aggregate where that is cached, else the rows that layer 1 reads.
    """
    model, f = problem.model, layout.facts(1)
    if not model.aggregate_cached(1):
        return read(problem, layout)
    # GraphSAGE and residuals read a vertex's own row too
    rows = f.rows * (2 if model.layers[0].reads_own else 1)
    return np.asarray(model.inputs.held(rows), dtype=float)


def read(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of the constant rows that layer 1 or the encoder reads [ranks]."""
    model, f = problem.model, layout.facts(1)
    rows = f.sources if model.first_varying else layout.row_counts(0)
    # own rows, a part of the rows read, have a product of their own
    own = (f.rows < f.sources) * model.own_sorted(f.rows)
    return np.asarray(model.inputs.held(rows) + own, dtype=float)


def _kept_rows(
    problem: Problem, layout: Layout | EstimatedLayout, options: ExchangeOptions
) -> np.ndarray:
    """Bytes of rows and gradients that are kept from step to step [ranks].

    Per layer these are the halo's rows and the gradients of rows given, as they came last. Where
    they lag they are kept as they cross, what leaves has buffers too, and one more serves all
    layers in turn for what is smoothed. A codec that adapts carries something about each row.
    """
    stays, smoothed = np.zeros((2, problem.ranks))
    model, codec = problem.model, options.codec
    buffers = 2 if options.policy.lags else int(options.policy.stays)
    written = codec if options.policy.lags else WHOLE
    assigned = 2 * PLACES * codec.adapts
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        f, width = layout.facts(layer), model.exchanged_width(layer, options.narrow)
        crossing = (f.taken + f.given) * written.row_bytes(width, model.itemsize)
        stays = stays + buffers * crossing + assigned * (f.taken + f.given)
        smoothed = np.maximum(smoothed, crossing / 2 * len(codec.averaged))
    return np.asarray(stays + smoothed)


def _during_evaluation(problem: Problem, layout: Layout | EstimatedLayout) -> np.ndarray:
    """Bytes of an evaluation on the whole layout, in the layer that needs most [ranks]."""
    model, most = problem.model, np.zeros(problem.ranks)
    for layer, spec in enumerate(model.layers, 1):
        f = layout.facts(layer)
        need = footprint(model, layer, f.rows, f.sources, f.edges)
        # own rows, those that leave, and a copy of all that are read
        inputs = (f.local + f.given + f.sources) * (layer > model.first_varying)
        most = np.maximum(most, inputs * spec.h_in * model.itemsize + need.kept)
    return np.asarray(most + constant(problem, layout) + blocks(problem, layout))


# -- what a step's operations hold -----------------------------------------------------------------


@dataclass(frozen=True)
class Holds:
    """Memory of a step's operations [ranks] [B]: what a layer's forward pass leaves, its backward
    pass frees.

    `model` is the problem's, or the same with other orders of product and aggregation. `facts` has
    the counts of each layer. The encoder makes `encoded` rows. Where rows lag or stay, these have
    buffers of their own (`_kept_rows`).
    """

    problem: Problem
    model: Model
    facts: Mapping[int, LayerFacts]
    encoded: np.ndarray
    options: ExchangeOptions
    scored: Scored | None = None

    def encode(self) -> Held:
        """The encoder's forward pass: its rows stay where layers read them again (GCNII)."""
        return keeps(encoding(self.model, self.encoded))

    def forward(self, layer: int) -> Held:
        made = self._made(layer) * self.options.checkpoint
        return Held(self._kept(layer) + made, self._kept(layer))

    def loss(self) -> Held:
        logits, most, _ = self._loss()
        return Held(most + self._made(len(self.model.layers)) * self.options.checkpoint, logits)

    def backward(self, layer: int) -> Held:
        need = self._need(layer)
        back = self._gradient(layer) + np.maximum(need.backward, self._picked(layer))
        # a checkpoint's begins with the forward pass
        there = 0.0 if self.options.checkpoint else need.kept
        return Held(back - there, -self._kept(layer))

    @property
    def logits(self) -> Number:
        """What the loss keeps until the step ends."""
        return self._loss()[0]

    def _kept(self, layer: int) -> Number:
        """From a layer's forward to its backward pass: inputs alone, or what autograd saves."""
        f, model, checkpoint = self.facts[layer], self.model, self.options.checkpoint
        halo = f.there * (layer > model.first_varying) > 0  # rows come in every step
        narrow = self.options.narrow and model.narrow_at(layer)
        # source rows, own and halo together
        copied = halo | (checkpoint and narrow) | (f.made is not None)
        kept = f.sources * self._row_bytes(layer) * copied
        if not checkpoint:
            return kept + self._need(layer).kept
        return kept + (self._made(layer - 1) * (narrow | ~halo) if layer > 1 else 0.0)

    def _loss(self) -> tuple[Number, Number, Number]:
        """What is kept of it, the most that it needs, and the gradient that it leaves."""
        model, stats = self.model, self.problem.stats
        own = self.facts[len(model.layers)].rows
        if self.scored is None:
            # of the whole graph's rows or of those that are trained on
            return loss(model, own, own * min(1.0, stats.train_vertices / max(own.sum(), 1.0)))
        sends, negatives = self.scored.sends, self.problem.workload.negatives
        own = own + sends.sum(0)
        # own rows beside those of other ranks
        copied = own * model.layers[-1].h_out * model.itemsize * sends.any()
        logits, most, gradient = link_loss(model, own, self.scored.edges, negatives)
        return logits, most + copied, gradient

    def _gradient(self, layer: int) -> Number:
        """The gradient of the layer's rows, and of others' beside them if these are as wide."""
        if layer == len(self.model.layers):
            return self._loss()[2]
        present = self.facts[layer + 1].present * self._row_bytes(layer + 1)
        return np.asarray(np.maximum(self._made(layer), present))

    def _made(self, layer: int) -> np.ndarray:
        """The rows that a layer makes."""
        row: float = self.model.layers[layer - 1].h_out * self.model.itemsize
        return self.facts[layer].rows * row

    def _row_bytes(self, layer: int) -> int:
        """Of a row that the layer exchanges."""
        return self.model.exchanged_width(layer, self.options.narrow) * self.model.itemsize

    def _picked(self, layer: int) -> Number:
        """Gradients where a layer reads some of the rows that are there: of those that it reads, of
        all, and of the sums that they are parts of."""
        f = self.facts[layer]
        if f.made is None:
            return 0.0
        added = 0.0 if f.added is None else f.added
        return np.asarray((f.sources + f.present + added) * self._row_bytes(layer))

    def _need(self, layer: int) -> Footprint:
        model, f = self.model, self.facts[layer]
        if f.away is not None:
            model = model.without_ends(layer)
        counts = f.rows, f.sources, f.edges
        return footprint(model, layer, *counts, narrow=self.options.narrow, local=f.local)
