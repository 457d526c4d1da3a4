"""Bytes that a rank holds under P3, operation by operation, as executor/strategies/p3/ holds them.

    front    columns of all peers' sources, layer 1, partial sums; what autograd saves stays to tail
    body     the sum of own rows, layers 2 .. L and back (layerwise/memory.py), its gradient
    tail     all peers' gradients, layer 1 back

In the pipeline a front is followed by the body of the batch before and by the tail of the batch
before that: three batches in flight.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gnnplan.planner.gnn.footprint import block, footprint
from gnnplan.planner.gnn.products import PIECES
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.minibatch.memory import most, of_sampling, of_structure
from gnnplan.planner.strategies.p3.slices import Slices, all_columns
from gnnplan.planner.strategies.program.memory import machine_code, on_ranks
from gnnplan.planner.strategies.program.program import Held, in_turn, keeps


def memory(p3: Slices, problem: Problem) -> Memory:
    """Bytes per rank by use, at the fullest moment of an epoch.

    In the pipeline each batch in flight, and the batch whose gradients are reduced, has weights and
    gradients of its own.
    """
    versions, supply = 4 if p3.pipelined else 0, p3.supply(problem)
    model, b = problem.model, problem.model.itemsize
    sliced = p3.sliced_weights(problem)
    columns = [each.columns for each in p3.slices(problem)]
    own = model.weights - sliced + np.array([sliced * len(its) / model.features for its in columns])
    copied = {its: _columns_copied(problem, its) for its in set(columns)}
    waiting, elsewhere = 0, 0.0 * own
    if not p3.prefetch:
        elsewhere = most(supply, partial(of_sampling, supply))
    elif problem.cluster.device.kind == "cpu":  # or they wait in a server's memory
        waiting = p3.prefetch
    blocks = most(supply, partial(_blocks, p3, problem))
    use = on_ranks(
        problem,
        p3.built(problem),
        weights=own * (1 + versions),
        groups=(*p3.all_twins(problem), *p3.rails(problem)),
        code=machine_code(problem, PIECES),
        elsewhere=elsewhere,
        features=np.array([copied[its] for its in columns]),
        cache=0.0 * own + supply.store.held(problem),
        graph=of_structure(supply) + blocks * (waiting + p3.in_flight),
    )
    use["parameters"] = use["parameters"] + model.weights * b  # the whole model, for evaluation
    # of each version a gradient alone
    use["optimizer"] = own * b * (problem.workload.beside_a_weight + versions)
    return use


def _columns_copied(problem: Problem, columns: range) -> float:
    """Bytes of a rank's copy of its feature columns.

    Only ranks on a CPU have one, and not where features stay in their file or all columns are the
    rank's anyway.
    """
    x = problem.graph.x if problem.graph else None
    is_all = isinstance(x, np.ndarray) and len(columns) == x.shape[1]
    if problem.cluster.device.kind != "cpu" or isinstance(x, np.memmap) or is_all:
        return 0.0
    return all_columns(problem, columns)


def _blocks(p3: Slices, problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Bytes of a batch's blocks, of which the first is of all peers' rows, with labels and the
    places of peers' rows [ranks]."""
    facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
    counts = [np.array([f.rows, f.sources, f.edges], dtype=float) for f in facts]
    counts[0] = p3.of_peers(problem, *counts[0])
    total = 16.0 * facts[-1].rows + 8 * (counts[0][0] - facts[0].rows)
    for spec, (rows, sources, edges) in zip(problem.model.layers, counts, strict=True):
        total = total + block(problem.model, spec, rows, sources, edges)
    return np.asarray(total)


class Batch:
    """Memory of one batch's operations on all ranks.

    Sizes of layer 1's output [ranks] [B]: `own` block, `all` peers' blocks, `peers` without own.
    """

    def __init__(self, p3: Slices, problem: Problem, batch: MiniBatch) -> None:
        model = problem.model
        facts = {layer: batch.facts(layer) for layer in range(1, len(model.layers) + 1)}
        first = facts[1]
        rows, sources, edges = p3.of_peers(problem, first.rows, first.sources, first.edges)
        sliced = p3.sliced(problem, p3.rail(problem, 0)[-1])  # the widest
        spec = sliced.layers[0]
        self.first = footprint(sliced.without_ends(1), 1, rows, sources, edges)
        layers = problem, model, facts, 0.0 * first.rows, ExchangeOptions(), batch.scored
        self.rest = Holds(*layers)
        width = model.layers[0].h_out * model.itemsize
        self.own, self.all = first.rows * width, rows * width
        self.peers = self.all - self.own
        self.applied = self.own * model.layers[0].bias
        self.pulled = self.own * (len(p3.rail(problem, 0)) - 1)
        # in the pipeline the rank goes on while its messages leave
        self.leaving = self.peers * p3.pipelined
        # rows by column, when the gradient of their product comes; own rows, a cut of those read,
        # have a product of their own
        by_column = sliced.inputs.sorted(sources)
        self.sorted = by_column + sliced.own_sorted(rows)
        self.loaded = sliced.inputs.held(sources) - by_column
        saved = spec.projects_first or spec.matrices > 1
        if spec.counted:
            saved = spec.counted.keeps_inputs
        # what was loaded stays for the tail, not a copy of it
        self.reads_on = model.inputs.multiplied_first or (
            saved and not (model.dropout and spec.drops)
        )

    def load(self) -> Held:
        return keeps(self.loaded)

    def first_forward(self) -> Held:
        freed = 0.0 if self.reads_on else self.loaded
        return Held(self.first.kept + self.peers, self.first.kept - freed)

    def pull_forward(self) -> Held:
        return keeps(self.pulled + self.leaving)

    def forward(self) -> Held:
        layers = map(self.rest.forward, range(2, len(self.rest.facts) + 1))
        return in_turn([keeps(self.own + self.applied), Held(0.0, -self.pulled), *layers])

    def loss(self) -> Held:
        return self.rest.loss()

    def backward(self) -> Held:
        layers = map(self.rest.backward, range(len(self.rest.facts), 1, -1))
        return in_turn([*layers, Held(0.0, -self.applied - self.rest.logits - self.leaving)])

    def pull_backward(self) -> Held:
        """The gradients that come; the own one is in the sum's place."""
        return keeps(self.peers)

    def first_backward(self) -> Held:
        needed = self.all + self.first.backward - self.first.kept + self.sorted
        freed = self.peers + self.own + self.first.kept
        return Held(needed, -freed - (self.loaded if self.reads_on else 0.0))
