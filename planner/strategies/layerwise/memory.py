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

from gnnplan.planner.gnn.codec import PLACES, WHOLE, workspace
from gnnplan.planner.gnn.footprint import Footprint, block, encoding, footprint, link_loss, loss
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.ownership.minibatch import Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.strategies.program.memory import Memory, machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Program
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
    """Sizes of a step's tensors [ranks] [B], and what each operation does with them.

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

    def encode(self, held: Held) -> None:
        """The encoder's forward pass: its rows stay where layers read them again (GCNII)."""
        held.keep(encoding(self.model, self.encoded))

    def forward(self, layer: int, held: Held) -> None:
        held.keep(self._copied(layer))
        if self.options.checkpoint:
            held.keep(self._made(layer))
            held.free(self._among(layer))
        else:
            held.keep(self._need(layer).kept)

    def loss(self, held: Held) -> None:
        logits, most, _ = self._loss()
        held.at(most)
        held.keep(logits)
        if self.options.checkpoint:
            held.free(self._made(len(self.model.layers)))

    def backward(self, layer: int, held: Held) -> None:
        model, need, gradient = self.model, self._need(layer), self._gradient(layer)
        if self.options.checkpoint:
            held.at(gradient, need.backward)
        else:
            held.at(gradient, need.backward - need.kept)
            held.free(need.kept)
        if layer == len(model.layers) and model.hands_on_initial:
            held.keep(self._made(0))  # their gradient
        if layer > model.first_varying:
            f, width = self.facts[layer], self._row_bytes(layer)
            held.at(gradient, (f.sources + self._unpicked(layer)) * width)
            held.at(f.present * width, self._crossing(layer))
        held.free(self._copied(layer))
        if self.options.checkpoint and layer > 1:
            held.free(self._made(layer - 1) - self._among(layer))

    @property
    def logits(self) -> Number:
        """What the loss keeps until the step ends."""
        return self._loss()[0]

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
        """The gradient of the layer's rows, in the buffer that it came in."""
        model, following = self.model, layer + 1
        if layer == len(model.layers):
            return self._loss()[2]
        f, width = self.facts[following], self._row_bytes(following)
        if self.options.narrow and model.narrow_at(following):
            # a checkpoint's preparation of these rows is there again
            again = 1 + self.options.checkpoint
            return again * f.local * model.layers[layer - 1].h_out * model.itemsize
        return f.present * width

    def _made(self, layer: int) -> np.ndarray:
        """The rows that a layer makes; 0: the encoder's."""
        model = self.model
        if layer == 0:
            return self.encoded * (model.encoder[1] * model.itemsize if model.encoder else 0.0)
        row: float = model.layers[layer - 1].h_out * model.itemsize
        return self.facts[layer].rows * row

    def _among(self, layer: int) -> Number:
        """Rows of the layer before that a checkpoint need not keep: they are in the copy."""
        model = self.model
        narrow = self.options.narrow and model.narrow_at(layer)
        if narrow or (layer == 1 and model.hands_on_initial):
            return 0.0
        return np.where(self._halo(layer) > 0, self._made(layer - 1), 0.0)

    def _halo(self, layer: int) -> np.ndarray:
        """Rows that come in every step."""
        return self.facts[layer].there * (layer > self.model.first_varying)

    def _row_bytes(self, layer: int) -> int:
        """Of a row that the layer exchanges."""
        return self.model.exchanged_width(layer, self.options.narrow) * self.model.itemsize

    def _crossing(self, layer: int) -> Number:
        """Gradients that come from peers, beside the layer's own."""
        f, codec, policy = self.facts[layer], self.options.codec, self.options.policy
        whole: Number = f.given * self._row_bytes(layer)
        if not codec.packs:  # those that come where rows stay are put among them
            return float(1 + policy.stays - policy.lags) * whole
        width, b = self.model.exchanged_width(layer, self.options.narrow), self.model.itemsize
        packed: Number = (f.given + f.taken) * codec.row_bytes(width, b)
        device = self.problem.cluster.device.kind
        return packed + np.maximum(whole, workspace(f.taken * width, b, device))

    def _copied(self, layer: int) -> Number:
        """A copy of the layer's source rows, own and halo together."""
        f = self.facts[layer]
        kept = self.options.checkpoint and self.options.narrow and self.model.narrow_at(layer)
        copied = (self._halo(layer) > 0) | kept | (f.made is not None)
        return f.sources * self._row_bytes(layer) * copied

    def _unpicked(self, layer: int) -> Number:
        """Rows that are there, of which the layer reads some, and those that it adds up."""
        f = self.facts[layer]
        return (0.0 if f.made is None else f.present) + (0.0 if f.added is None else f.added)

    def _need(self, layer: int) -> Footprint:
        model, f = self.model, self.facts[layer]
        if f.away is not None:
            model = model.without_ends(layer)
        counts = f.rows, f.sources, f.edges
        return footprint(model, layer, *counts, narrow=self.options.narrow, local=f.local)
