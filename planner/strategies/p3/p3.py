"""P3 (push-pull): layer 1 is computed where the features are, all other layers data parallel.

Feature columns are divided over servers, and the first layer's weight with them. A rank pushes
layer 1's block of edges to its peers, one on each server; each peer computes partial sums on its
own columns and sends them back (pull). So servers exchange rows of H_1 numbers instead of rows of F
features.

    a mini-batch of one rank, its columns on S servers
    host     |draw|push|lay|
    copy                   |load|
    compute                     |F_M|    |F_D|loss|B_D|      |B_M|          |update|
    comm                            |pull|            |pull b|
    reduce                                                       |all_reduce|

    push      send layer 1's block to the rank's peer on every server
    load      each peer loads its columns of all peers' source rows; with a `cache`, it loads the
              rows that its GPU does not cache, and copies the others (`pick`); to a GPU it also
              copies the batch's own blocks and those pushed to it
    F_M       layer 1 forward: partial sums on the peer's columns, for all peers' blocks
    pull      send partial sums to the rank that pushed the block
    F_D, B_D  layers 2 .. L forward and backward, data parallel
    pull b    send the gradient of the sum to all peers
    B_M       layer 1 backward: the gradient of each peer's columns of the weight

    pipelined: three batches in flight, period k
    compute  |F_M k|F_D k-1|B_D k-1|B_M k-2|update k-3|    a pull overlaps with the next phase,
    reduce   |all_reduce k-3 . . . . . . . .|              the all-reduce with all phases

Peers are the ranks at the same position of every server; a server's ranks have the same columns.
With over='rank' all ranks are peers, each with its own columns. With `copies` c, every S/c
consecutive servers (or ranks) have all columns among them, F c/S each. A block is pushed to peers
of the rank's own group; twins, one in each group, have the same columns:

    S = 4, c = 2     server 0 |columns 0 .. F/2|   server 1 |columns F/2 .. F|
                     server 2 |columns 0 .. F/2|   server 3 |columns F/2 .. F|
                     blocks and partial sums are sent inside the pairs (0, 1) and (2, 3); the first
                     weight's gradient is all-reduced between twins (0, 2) and (1, 3)

With c = S every server has all columns, and nothing is pushed or pulled: this is data parallelism.

Exact without `pipelined`: the gradient of one process on the same batch. Pipelined, batch t reads
the weights after max(0, t - 3) updates, forward and backward (w_{t+1} = w_t - lr grad f(w_{t-3}),
the paper's Eq. 3), so four sets of weights are kept. The body of an epoch's last batch is done in
the period of its front, so that its loss counts in its own epoch.

Adjacency lists are independent of columns (minibatch/adjacency_store.py). All samplers have all
lists, or vertex v's list is on server v mod S (over='rank': on rank v mod M), with
`structure_cache` bytes of the hottest other lists on every server:

    host     |ask_edges 3|draw 3|edges 3| .. |ask_edges 1|draw 1|edges 1|push|lay|

An attention weight depends on logits over all columns, so peers first all-reduce heads (f1 + f2)
numbers (`logits`). In the paper's words a layer is partition, scatter, gather, transform, sync,
apply (executor/layers/models.py).

Bytes per batch, for f1 rows and f2 source rows of a rank's layer 1, M ranks and W weights:

    2 (S/c - 1) f1 H_1 b       pulls of each rank, forward and backward
    4 (S/c - 1) (f1 + f2 + e)  pushes of each rank, with e edges, plus headers
    2 (M-1) W' b               all-reduce; W': without the first layer's sliced weights
    2 (c - 1) (slice) b        all-reduce of each slice over its c twins

Data parallelism with features spread over servers fetches (S-1)/S f2 F b instead
(slices.py). Source: P3 (OSDI 2021), Sec. 3.1-3.4; copies: Table 5.

See also slices.py (columns of each rank) in this folder; minibatch/on_batches.py and
program/ for operations; executor/strategies/p3.py.

Memory, operation by operation, of as many batches as are in flight:

    front    columns of all peers' sources, layer 1, partial sums; autograd's tensors stay to tail
    body     sums of own rows, layers 2 .. L and their backward pass (layerwise/memory.py)
    tail     all peers' gradients, backward pass of layer 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from gnnplan.planner.gnn.model import OpMemory, block, footprint, in_turn, keeps
from gnnplan.planner.gnn.trace import PIECES
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.ownership.minibatch import MiniBatch, Scored
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.memory import Holds
from gnnplan.planner.strategies.minibatch.memory import (
    peak_over_batches,
    sampling_peak,
    structure_bytes,
)
from gnnplan.planner.strategies.minibatch.supply import sized_exchange
from gnnplan.planner.strategies.p3.slices import DELAY, HEADER, INT, Slices, all_columns
from gnnplan.planner.strategies.program.memory import Resident, machine_code
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Op,
    Program,
    QueuedOp,
    Step,
)
from gnnplan.planner.vocabulary.numbers import Outer
from gnnplan.planner.vocabulary.schedule import Compute, Label


@dataclass(frozen=True)
class P3(Slices):
    """The strategy: `Slices` with its operations and memory."""

    def step(self, problem: Problem, batch: MiniBatch) -> Step:
        """Return a batch's operations, each with its phase.

        host    sampling, pushes, laying out blocks
        front   load, layer 1 forward, up to the pulled partial sums
        body    layers 2 .. L and the loss, forward and backward, up to the pulled gradients
        tail    layer 1 backward
        reduce  all-reduces
        update
        """
        model, b = problem.model, problem.model.itemsize
        layers = range(1, problem.workload.layers + 1)
        facts = {layer: batch.facts(layer) for layer in layers}
        f1, f2, e1 = facts[1].rows, facts[1].sources, facts[1].edges
        rails, blocks = self.rail_of(problem), self.peer_sums(problem, f1, f2, e1)
        edges_above = [facts[layer].edges for layer in layers if layer > 1]
        has_peers = len(self.rail(problem, 0)) > 1
        sizes = cache(lambda: Batch(self, problem, batch))  # computed only if memory is predicted

        def holds(memory_of: Callable[[Batch], OpMemory]) -> Callable[[], OpMemory]:
            return lambda: memory_of(sizes())

        supply = self.supply(problem)
        host = list(supply.drawing(batch, e1 + sum(edges_above)))
        if has_peers:
            peers, pushed = (Outer.of(rails, True, each) for each in (1, HEADER + f1 + f2 + e1))
            host += sized_exchange("push", pushed, peers, ahead="host", itemsize=INT)
        host.append(supply.laying([blocks[2], *edges_above]))
        if self.prefetch:
            host.append(Op("wait", work=Compute(), idle=True))

        sliced = self.sliced(problem, self.rail(problem, 0)[-1])  # the widest slice
        all_peers = replace(facts[1], rows=blocks[0], sources=blocks[1], edges=blocks[2])
        copied = list((facts | {1: all_peers}).values())
        front = [Op("load", work=supply.copied(batch, copied)), *supply.gathered(batch)]
        front[-1] = replace(front[-1], holds=holds(Batch.load))
        backward = sliced.backward(1, *blocks)
        tail = [Op("backward", layer=1, work=backward, holds=holds(Batch.first_backward))]
        if has_peers and model.layers[0].heads:
            scatter, logits_f, logits_b = self._attention(problem, blocks)
            front += [Op("scatter", "f", 1, work=scatter), logits_f]
            tail += [logits_b, Op("scatter", "b", 1, work=scatter)]
        forward = sliced.forward(1, *blocks)
        front.append(Op("forward", layer=1, work=forward, holds=holds(Batch.first_forward)))
        body = self._body(problem, facts, holds, batch.scored)
        if has_peers:
            sums = Exchange(Outer.of(rails, True, f1), model.layers[0].h_out * b)
            pull, pull_back = replace(sums, items=sums.items.T), sums
            front.append(Op("pull", "f", 1, work=pull, holds=holds(Batch.pull_forward)))
            body.append(Op("pull", "b", 1, work=pull_back, holds=holds(Batch.pull_backward)))
        reduce, update = self._end(problem)
        phases = {
            "host": host,
            "front": front,
            "body": body,
            "tail": tail,
            "reduce": reduce,
            "update": [update],
        }
        return [replace(op, phase=phase) for phase, ops in phases.items() for op in ops]

    def _attention(self, problem: Problem, blocks: np.ndarray) -> tuple[Compute, Op, Op]:
        """Return the projection of source rows, and the all-reduces of logits over peers."""
        first, b = problem.model.layers[0], problem.model.itemsize
        work = Compute(
            elementwise_bytes=4.0 * blocks[1] * first.projected * b, launches=8, itemsize=b
        )
        rails = tuple(self.rails(problem))
        sizes = tuple(
            int(first.heads * (blocks[0, rail[0]] + blocks[1, rail[0]]) * b) for rail in rails
        )
        reduced = AllReduce(sizes, rails)
        return work, Op("logits", "f", 1, work=reduced), Op("logits", "b", 1, work=reduced)

    def _body(
        self,
        problem: Problem,
        facts: Mapping[int, LayerCounts],
        holds: Callable[[Callable[[Batch], OpMemory]], Callable[[], OpMemory]],
        scored: Scored | None,
    ) -> list[Op]:
        """Return the operations on pulled sums: bias and ReLU, layers 2 .. L, and the loss."""
        model = problem.model
        passes = (3.0 + len(self.rail(problem, 0))) * facts[1].rows * model.layers[0].h_out
        forward = backward = Compute(
            elementwise_bytes=passes * model.itemsize, launches=4, itemsize=model.itemsize
        )
        own = facts[max(facts)].rows
        for layer, f in facts.items():
            if layer > 1:
                forward = forward + model.forward(layer, f.rows, f.sources, f.edges)
                backward = backward + model.backward(layer, f.rows, f.sources, f.edges)
        loss_forward, loss_backward = layerwise.finish(problem, own, scored)
        return [
            Op("forward", work=forward, holds=holds(Batch.forward)),
            Op("loss", work=loss_forward + loss_backward, holds=holds(Batch.loss)),
            Op("backward", work=backward, holds=holds(Batch.backward)),
        ]

    def _end(self, problem: Problem) -> tuple[list[Op], Op]:
        """Return the all-reduces of shared weights and of slices with twins, and the update."""
        model, sliced = problem.model, self.sliced_weights(problem)
        shared = model.weights - sliced
        reduce = [Op("all_reduce", work=AllReduce((shared * model.itemsize,)))]
        groups = tuple(self.all_twins(problem))
        if len(groups[0]) > 1:
            column_bytes = sliced // problem.stats.features * model.itemsize
            sizes = tuple(column_bytes * len(self.columns(problem, group[0])) for group in groups)
            reduce.append(Op("all_reduce", layer=1, work=AllReduce(sizes, groups)))
        own = shared + sliced // len(self.rail(problem, 0))
        return reduce, Op("update", work=model.update(own))

    def program(self, problem: Problem) -> Program:
        batches = self.batches(problem)
        program = Program(
            batches.first,
            batches.steps,
            batches.at,
            partial(self.step, problem),
            lead=self.prefetch,
            samplers=self.supply(problem).samplers,
        )
        if self.pipelined:
            program = replace(program, order=Pipelined(self.prefetch), in_flight=DELAY)
        return program

    def resident(self, problem: Problem) -> Resident:
        return resident(self, problem)


# -- period k: |front k|body k-1|tail k-2|update k-3|, and reduce k-3 overlaps with all of them ----


def period(t: int, epoch: int, steps: int | None = None) -> Iterator[tuple[str, int]]:
    """Yield the phases of period t of the pipeline in order, as (phase, batch).

    Phases are those of `P3.step` without 'host', which comes before 'front'. epoch: number of
    batches per epoch. steps: number of batches of the run, whose last batch also ends an epoch;
    None: the run has no end.

    >>> [f"{phase} {batch}" for phase, batch in period(4, epoch=5)]
    ['reduce 1', 'front 4', 'body 3', 'tail 2', 'body 4', 'update 1']
    """

    def exists(batch: int) -> bool:
        return batch >= 0 and (steps is None or batch < steps)

    def ends_epoch(batch: int) -> bool:
        return (batch + 1) % epoch == 0 or batch + 1 == steps

    order = [
        ("reduce", t - DELAY, True),
        ("front", t, True),
        ("body", t - 1, not ends_epoch(t - 1)),
        ("tail", t - 2, True),
        ("body", t, ends_epoch(t)),  # the last batch of an epoch does not wait for period t + 1
        ("update", t - DELAY, True),
    ]
    return ((phase, batch) for phase, batch, due in order if due and exists(batch))


@dataclass(frozen=True)
class Pipelined:
    """The order of the pipeline; samplers may be `prefetch` batches ahead.

    An operation waits for the previous operation of its batch; a load also waits for the rank's
    last computation or load."""

    prefetch: int

    def __call__(self, at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[QueuedOp]:
        ended = list[Label]()  # the last computation or load of each period
        chains: dict[int, tuple[Label, ...]] = {}  # batch -> labels its next operation waits for
        last: tuple[Label, ...] = ()  # the rank's last computation or load

        def queue(batch: int, phase: str) -> Iterator[QueuedOp]:
            nonlocal last
            for op in (op for op in at(batch) if op.phase == phase):
                label, chain = op.label(batch), chains[batch]
                if op.idle:  # the operation is a wait, so it begins at once
                    yield QueuedOp(op, batch, ())
                    chains[batch] = (*chain, label)
                else:
                    yield QueuedOp(op, batch, chain + last if op.lane == "copy" else chain)
                    chains[batch] = (label,)
                if op.lane in ("compute", "copy"):
                    last = (label,)

        for t in range(steps + DELAY):
            for phase, batch in period(t, epoch, steps):
                if phase == "front":
                    start = len(ended) - 1 - self.prefetch  # sampling begins after this period
                    chains[batch] = (ended[start],) if start >= 0 else ()
                    yield from queue(batch, "host")
                yield from queue(batch, phase)
            ended += last  # one label


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
        most = np.maximum(self.first.forward, self.first.left + self.peers)
        return OpMemory(most, self.first.left - freed)

    def pull_forward(self) -> OpMemory:
        return keeps(self.pulled + self.send_buffers)

    def forward(self) -> OpMemory:
        layers = map(self.later_layers.forward, range(2, len(self.later_layers.facts) + 1))
        summed = OpMemory(self.own + self.applied, self.own - self.pulled)
        return in_turn([summed, *layers])

    def loss(self) -> OpMemory:
        return self.later_layers.loss()

    def backward(self) -> OpMemory:
        layers = map(self.later_layers.backward, range(len(self.later_layers.facts), 1, -1))
        # the gradient of layer 1's sums takes the place of its rows
        more = self.later_layers.unsaved(1) - self.later_layers.loss().left - self.send_buffers
        return in_turn([*layers, OpMemory(0.0, more)])

    def pull_backward(self) -> OpMemory:
        """Return the memory of received gradients; the own gradient reuses the sum's memory."""
        return keeps(self.peers)

    def first_backward(self) -> OpMemory:
        needed = self.all + self.first.most - self.first.left + self.sorted
        freed = self.peers + self.own + self.first.left
        return OpMemory(needed, -freed - (self.loaded if self.tail_reads_loaded else 0.0))
