"""Memory of P3's ranks, operation by operation, as executor/strategies/p3.py allocates it.

    front    columns of all peers' sources, layer 1, partial sums; autograd's tensors stay to tail
    body     sums of own rows, layers 2 .. L and their backward pass (layerwise/memory.py)
    tail     all peers' gradients, backward pass of layer 1

In the pipeline the front of batch k is followed by the body of batch k - 1 and the tail of batch
k - 2: three batches are in flight.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from gnnplan.planner.gnn.footprint import OpMemory, block, footprint, in_turn, keeps
from gnnplan.planner.gnn.products import PIECES
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.minibatch.memory import (
    peak_over_batches,
    sampling_peak,
    structure_bytes,
)
from gnnplan.planner.strategies.p3.slices import Slices, all_columns
from gnnplan.planner.strategies.program.memory import Resident, machine_code


def resident(p3: Slices, problem: Problem) -> Resident:
    """Return what ranks have besides a step's tensors.

    In the pipeline each batch in flight, and the batch whose gradients are all-reduced, has its own
    copy of weights and gradients.
    """
    versions, supply = 4 if p3.pipelined else 0, p3.supply(problem)
    model, b = problem.model, problem.model.itemsize
    sliced = p3.sliced_weights(problem)
    columns = [each.columns for each in p3.slices(problem)]
    own_sliced = np.array([sliced * len(each) / model.features for each in columns])
    own = model.weights - sliced + own_sliced
    copied = {each: _columns_copied(problem, each) for each in set(columns)}
    waiting, elsewhere = 0, 0.0 * own
    if not p3.prefetch:
        elsewhere = peak_over_batches(supply, partial(sampling_peak, supply))
    elif problem.cluster.device.kind == "cpu":  # with GPUs batches wait in the server's memory
        waiting = p3.prefetch
    blocks = peak_over_batches(supply, partial(_blocks, p3, problem))
    return Resident(
        {
            # a version has a gradient, but no optimizer state; evaluation has the whole model
            "parameters": (own * versions + model.weights) * b,
            "optimizer": own * versions * b,
            "features": np.array([copied[each] for each in columns]),
            "cache": 0.0 * own + supply.store.held(problem),
            "graph": structure_bytes(supply) + blocks * (waiting + p3.in_flight),
        },
        weights=own,
        groups=[*p3.all_twins(problem), *p3.rails(problem)],
        code=machine_code(problem, PIECES),
        elsewhere=elsewhere,
    )


def _columns_copied(problem: Problem, columns: range) -> float:
    """Return the bytes of a rank's copy of its feature columns.

    Only ranks on a CPU have a copy, unless features stay in their file or the rank has all columns.
    """
    x = problem.graph.x if problem.graph else None
    is_all = isinstance(x, np.ndarray) and len(columns) == x.shape[1]
    if problem.cluster.device.kind != "cpu" or isinstance(x, np.memmap) or is_all:
        return 0.0
    return all_columns(problem, columns)


def _blocks(p3: Slices, problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Return the bytes of a batch's blocks, labels and positions of peers' rows [ranks].

    Layer 1's block has the rows of all peers."""
    facts = [batch.facts(layer) for layer in range(1, problem.workload.layers + 1)]
    counts = [np.array([f.rows, f.sources, f.edges], dtype=float) for f in facts]
    counts[0] = p3.peer_sums(problem, *counts[0])
    total = 16.0 * facts[-1].rows + 8 * (counts[0][0] - facts[0].rows)
    for spec, (rows, sources, edges) in zip(problem.model.layers, counts, strict=True):
        total = total + block(problem.model, spec, rows, sources, edges)
    return np.asarray(total)


class Batch:
    """Memory of one batch's operations on all ranks [ranks] [B].

    Layer 1's output: of the `own` block, of `all` peers' blocks, and of `peers` without the own.
    """

    def __init__(self, p3: Slices, problem: Problem, batch: MiniBatch) -> None:
        model = problem.model
        facts = {layer: batch.facts(layer) for layer in range(1, len(model.layers) + 1)}
        first = facts[1]
        rows, sources, edges = p3.peer_sums(problem, first.rows, first.sources, first.edges)
        sliced = p3.sliced(problem, p3.rail(problem, 0)[-1])  # the widest
        spec = sliced.layers[0]
        self.first = footprint(sliced.without_ends(1), 1, rows, sources, edges)
        self.later_layers = Holds(problem, model, facts, ExchangeOptions(), batch.scored)
        width = model.layers[0].h_out * model.itemsize
        self.own, self.all = first.rows * width, rows * width
        self.peers = self.all - self.own
        self.applied = self.own * model.layers[0].bias
        self.pulled = self.own * (len(p3.rail(problem, 0)) - 1)
        # send buffers: in the pipeline the rank continues before its messages are sent
        self.send_buffers = self.peers * p3.pipelined
        # a compressed input has a copy sorted by column for the gradient of its product; own rows,
        # a part of the rows read, have a product and a copy of their own
        by_column = sliced.inputs.product_index_bytes(sources)
        self.sorted = by_column + sliced.own_index_bytes(rows)
        self.loaded = sliced.inputs.stored_bytes(sources) - by_column
        saved = spec.projects_first or spec.matrices > 1  # autograd saves the inputs
        if spec.counted:
            saved = spec.counted.keeps_inputs
        # whether the tail reads the loaded rows themselves, instead of a copy after dropout
        self.tail_reads_loaded = model.inputs.multiplied_first or (
            saved and not (model.dropout and spec.drops)
        )

    def load(self) -> OpMemory:
        return keeps(self.loaded)

    def first_forward(self) -> OpMemory:
        freed = 0.0 if self.tail_reads_loaded else self.loaded
        return OpMemory(self.first.left + self.peers, self.first.left - freed)

    def pull_forward(self) -> OpMemory:
        return keeps(self.pulled + self.send_buffers)

    def forward(self) -> OpMemory:
        layers = map(self.later_layers.forward, range(2, len(self.later_layers.facts) + 1))
        return in_turn([keeps(self.own + self.applied), OpMemory(0.0, -self.pulled), *layers])

    def loss(self) -> OpMemory:
        return self.later_layers.loss()

    def backward(self) -> OpMemory:
        layers = map(self.later_layers.backward, range(len(self.later_layers.facts), 1, -1))
        return in_turn(
            [
                *layers,
                OpMemory(0.0, -self.applied - self.later_layers.loss().left - self.send_buffers),
            ]
        )

    def pull_backward(self) -> OpMemory:
        """Return the memory of received gradients; the own gradient reuses the sum's memory."""
        return keeps(self.peers)

    def first_backward(self) -> OpMemory:
        needed = self.all + self.first.most - self.first.left + self.sorted
        freed = self.peers + self.own + self.first.left
        return OpMemory(needed, -freed - (self.loaded if self.tail_reads_loaded else 0.0))
