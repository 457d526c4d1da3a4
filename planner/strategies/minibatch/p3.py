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

    4 servers x 2 ranks, copies 2     columns 0 .. F/2      columns F/2 .. F
                                      server 0: ranks 0, 1  server 1: ranks 2, 3
                                      server 2: ranks 4, 5  server 3: ranks 6, 7
                                      rails (0, 2), (1, 3), (4, 6), (5, 7)
                                      twins (0, 1, 4, 5), (2, 3, 6, 7)

A rail is a group of peers that have all columns among them: blocks and partial sums are sent inside
a rail. The first weight's gradient is all-reduced between twins.

With c = S every server has all columns, and nothing is pushed or pulled: this is data parallelism.

Exact without `pipelined`: the gradient of one process on the same batch. Pipelined, batch t reads
the weights after max(0, t - 3) updates, forward and backward (w_{t+1} = w_t - lr grad f(w_{t-3}),
the paper's Eq. 3), so four sets of weights are kept. The body of an epoch's last batch is done in
the period of its front, so that its loss counts in its own epoch.

Adjacency lists are independent of columns (adjacency_store.py). All samplers have all lists, or
vertex v's list is on server v mod S (over='rank': on rank v mod M), with `structure_cache` bytes of
the hottest other lists on every server.

An attention weight depends on logits over all columns, so peers first all-reduce heads (f1 + f2)
numbers (`logits`). In the paper's words a layer is partition, scatter, gather, transform, sync,
apply (executor/layers/models.py).

Bytes per batch, for f1 rows and f2 source rows of a rank's layer 1, M ranks and W weights:

    2 (S/c - 1) f1 H_1 b       pulls of each rank, forward and backward
    4 (S/c - 1) (f1 + f2 + e)  pushes of each rank, with e edges, plus headers
    2 (M-1) W' b               all-reduce; W': without the first layer's sliced weights
    2 (c - 1) (slice) b        all-reduce of each slice over its c twins

Data parallelism with features spread over servers fetches (S-1)/S f2 F b instead. Source: P3 (OSDI
2021), Sec. 3.1-3.4; copies: Table 5.

See also ../program for operations; executor/strategies/p3.py.

Memory, operation by operation, of as many batches as are in flight:

    front    columns of all peers' sources, layer 1, partial sums; autograd's tensors stay to tail
    body     sums of own rows, layers 2 .. L and their backward pass (layerwise/step.py)
    tail     all peers' gradients, backward pass of layer 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import zip_longest
from operator import add
from typing import ClassVar, Self

import numpy as np

from gnnplan.planner.gnn.kinds import KINDS
from gnnplan.planner.gnn.model import (
    LayerMemory,
    Model,
    OpMemory,
    block_bytes,
    in_turn,
    keeps,
    layer_memory,
    layers_of,
)
from gnnplan.planner.gnn.trace import PIECES
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Bytes, Example, Rules, Strategy
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.layerwise.step import Holds, finish
from gnnplan.planner.strategies.minibatch.feature_store import Slice
from gnnplan.planner.strategies.minibatch.on_batches import (
    OnBatches,
    lists_cache,
    proposed_cache,
    with_enough_samplers,
    with_one_sampler,
)
from gnnplan.planner.strategies.minibatch.supply import all_rows_bytes
from gnnplan.planner.strategies.program.account import Resident, machine_code
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Op,
    Program,
    QueuedOp,
    Step,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Group, Number, Outer, PerRank, grouped, sums
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute, Label
from gnnplan.planner.vocabulary.units import show_bytes

# models whose first layer is a sum over feature columns (except for attention's softmax)
MODELS = [name for name, kind in KINDS.items() if kind.by_columns]
HIDDEN = (16, 32, 64, 128, 256, 512)  # widths as in P3's Fig. 15
DELAY = 3  # number of updates by which a pipelined batch's weights lag
HEADER = 3  # numbers before a pushed block: the numbers of sources, destinations and edges


def columns(features: int, slices: int, i: int) -> range:
    """Return the columns of slice i, if `features` columns are divided into `slices` slices.

    >>> [columns(10, 3, i) for i in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(features * i // slices, features * (i + 1) // slices)


@dataclass(frozen=True)
class P3(OnBatches):
    """P3.

    over: divide columns over each 'server' or each 'rank'; None: servers if there are several.
    pipelined: three batches in flight, on weights three updates old.
    prefetch: as in data parallelism, but loads stay in their step.
    structure, structure_cache: as in data parallelism; a list is at a server, or at a rank.
    copies: number of copies of all columns.
    cache: bytes of the hottest rows, in its columns, that each GPU caches.
    """

    over: str | None = None
    pipelined: bool = False
    prefetch: int = 0
    structure: str = "everywhere"
    structure_cache: Bytes = 0
    copies: int = 1
    cache: Bytes = 0

    allowed: ClassVar[Rules] = {
        **OnBatches.allowed,
        "over": {"server": "its ranks share its columns", "rank": "each has its own"},
    }
    family = "p3"
    pushes = True
    executor = "gnnplan.executor.strategies.p3"
    examples = (Example("p3"),)
    claim = 0.10  # pipelined: transfers of several batches contend

    @property
    def exact(self) -> bool:
        return not self.pipelined

    @property
    def in_flight(self) -> int:
        """The number of batches between their load and the end of their backward pass."""
        return DELAY if self.pipelined else 1

    @property
    def carries(self) -> str:
        return "batches under way" if self.pipelined else ""

    @property
    def hands_over(self) -> bool:
        return not self.pipelined  # the gradients of batches in flight would be lost

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, P3) and self.pipelined == other.pipelined

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator[Strategy]:
        """Yield variants with one copy, and with more if host memory may have room.

        Each copy is divided over equally many servers. As many copies as servers are not proposed,
        since P3 would be data parallelism."""
        if problem.ranks > 1 and not _why_whole(problem):
            servers = problem.server_count
            most = servers if problem.cluster.graph_memory < np.inf else 2
            copies = [c for c in range(1, max(most, 2)) if servers % c == 0]
            variants = (cls(copies=c, pipelined=p) for c in copies for p in (True, False))
            for plain in dict.fromkeys(with_one_sampler(problem, variant) for variant in variants):
                cache = proposed_cache(problem, plain)
                for cached in [plain, replace(plain, cache=cache)] if cache else [plain]:
                    ahead = with_enough_samplers(problem, cached)
                    # if more samplers need fewer copies, that is another variant of this loop
                    yield ahead if ahead.copies == cached.copies else cached

    @classmethod
    def absent(cls, problem: Problem) -> str:
        if problem.ranks == 1:
            return "one rank: columns are divided over several ranks"
        return _why_whole(problem)

    @classmethod
    def explain(cls, problem: Problem, fastest: Self | None) -> list[str]:
        """Return a note on the width up to which P3 sends fewer bytes than fetching features does.

        It is computed from the mean batch, as in P3's Fig. 15, and does not affect the plan. Empty
        on one rank, and if only statistics are known."""
        servers = problem.server_count
        slices = servers if servers > 1 else problem.ranks
        if slices == 1 or not isinstance(problem.graph, Graph):
            return []
        batches = problem.minibatches(tuple(range(problem.ranks))).first()
        rows, inputs = np.mean(
            [(batch.facts(1).rows.sum(), batch.facts(1).sources.sum()) for batch in batches], axis=0
        ).tolist()
        itemsize = problem.model.itemsize
        # numbers per row that is sent
        width = max(1, round(float(problem.model.feature_transit_bytes(1.0)) / itemsize))
        even = inputs * width / (2 * slices * rows)
        fetched = (1 - 1 / slices) * inputs * width * itemsize
        sent = {hidden: 2 * (slices - 1) * rows * hidden * itemsize for hidden in HIDDEN}
        table = ", ".join(f"{hidden}: {show_bytes(nbytes)}" for hidden, nbytes in sent.items())
        # the option that sets the width of layer 1's rows
        name = "hidden" if problem.model.layers[0].h_out == problem.workload.hidden else "classes"
        return [
            f"P3 stops paying at {name} {even:.0f} (feature rows of {width} numbers;"
            f" {rows:,.0f} rows of layer 1, {inputs:,.0f} inputs a batch, columns on {slices}):"
            f" by {name}, partial sums take {table} per batch; features spread so would fetch"
            f" {show_bytes(fetched)}"
        ]

    def settle(self, problem: Problem) -> Self:
        over = "server" if problem.server_count > 1 else "rank"
        return self if self.over else replace(self, over=over)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        if why := _why_whole(problem):
            raise SpecError(f"p3: {why}")
        lines = _lines(problem.servers, self.over)
        holders = len(lines[0])
        if any(len(line) != holders for line in lines):
            raise SpecError(
                "p3: a rank has a peer on every server, so servers have equally many ranks; use"
                " over='rank', or as many GPUs of each server"
            )
        if holders == 1:
            raise SpecError(
                f"p3 divides columns over several {self.over}s (servers:"
                f" {problem.server_count}, ranks: {problem.ranks}, over: {self.over}); use"
                f" {'data_parallel' if problem.ranks == 1 else 'over=' + repr('rank')}"
            )
        if self.copies < 1 or holders % self.copies:
            fit = [c for c in range(1, holders + 1) if holders % c == 0]
            raise SpecError(
                f"p3: each copy of the columns is over equally many {self.over}s (copies:"
                f" {self.copies}, {self.over}s: {holders}); use one of {', '.join(map(str, fit))}"
            )
        if problem.stats.features < (slices := holders // self.copies):
            raise SpecError(
                "p3 needs a feature column for each slice (features:"
                f" {problem.stats.features}, slices: {slices}); use fewer {self.over}s, or more"
                " copies"
            )

    # -- columns, peers and twins --------------------------------------------------------------

    def slices(self, problem: Problem) -> tuple[Slice, ...]:
        """Return the rail of each rank, and its feature columns [ranks].

        A rail has one rank per slice, in the order of slices. Peers are neighbours. Ranks fill
        servers in order, so with over='rank' and one copy per server, peers are in one server.
        """
        lines, by_rank = _lines(problem.servers, self.over), dict[int, Slice]()
        count = len(lines[0]) // self.copies
        for line in lines:
            for place, rank in enumerate(line):
                i = place % count
                rail = line[place - i : place - i + count]
                by_rank[rank] = Slice(rail, columns(problem.stats.features, count, i))
        return tuple(by_rank[rank] for rank in range(len(by_rank)))

    def rails(self, problem: Problem) -> tuple[Group, ...]:
        """Return the groups of peers."""
        return tuple(dict.fromkeys(each.ranks for each in self.slices(problem)))

    def twins(self, problem: Problem) -> tuple[Group, ...]:
        """Return the groups of ranks with the same columns, in the order of their first ranks."""
        slices = self.slices(problem)
        same = grouped(range(len(slices)), lambda rank: slices[rank].columns)
        return tuple(map(tuple, same.values()))

    def features_on_host(self, problem: Problem) -> np.ndarray:
        columns_at: dict[int, set[range]] = {}
        for server, of_rank in zip(problem.servers, self.slices(problem), strict=True):
            columns_at.setdefault(server, set()).add(of_rank.columns)
        sizes = {each: all_columns(problem, each) for each in set().union(*columns_at.values())}
        return np.array([sum(sizes[c] for c in each) for each in columns_at.values()])

    def more_spread(self, problem: Problem) -> Iterator[Self]:
        """Yield variants with less graph data per server: lists are spread first, then fewer
        copies of the columns."""
        if problem.server_count > 1:
            for copies in range(self.copies, 0, -1):
                if self.copies % copies == 0:
                    fewer = replace(self, copies=copies)
                    if fewer != self:
                        yield fewer
                    spread = replace(fewer, structure="spread", structure_cache=0)
                    yield replace(spread, structure_cache=lists_cache(problem, spread))

    def by_rank(self, problem: Problem) -> bool:
        return self.over == "rank"

    def sliced_weights(self, problem: Problem) -> int:
        """Return how many of the first layer's weights are divided with the columns."""
        first = problem.model.layers[0]
        if first.counted:
            return first.counted.by_column * first.h_in
        return first.matrices * first.h_in * first.h_out

    def tied(self, problem: Problem) -> PerRank:
        return problem.servers if self.over == "server" else ()

    # -- operations and memory -----------------------------------------------------------------

    def step(self, problem: Problem, batch: MiniBatch) -> Step:
        return BatchOps(self, problem, batch).ops()

    def program(self, problem: Problem) -> Program:
        program = super().program(problem)
        if self.pipelined:
            program = replace(program, order=pipelined, in_flight=DELAY)
        return program

    def resident(self, problem: Problem) -> Resident:
        """Return what ranks have besides a step's tensors.

        In the pipeline each batch in flight, and the batch whose gradients are all-reduced, has its
        own copy of weights and gradients.
        """
        versions, supply = 4 if self.pipelined else 0, self.supply(problem)
        model, b = problem.model, problem.model.itemsize
        sliced = self.sliced_weights(problem)
        columns = [each.columns for each in self.slices(problem)]
        own_sliced = np.array([sliced * len(each) / model.features for each in columns])
        own = model.weights - sliced + own_sliced
        copied = {each: _columns_copied(problem, each) for each in set(columns)}
        waiting = self.prefetch * problem.on_cpu  # with GPUs batches wait in the server's memory
        blocks = supply.peak(lambda batch: BatchOps(self, problem, batch).blocks())
        return Resident(
            {
                # a version has a gradient, but no optimizer state; evaluation has the whole model
                "parameters": (own * versions + model.weights) * b,
                "optimizer": own * versions * b,
                "features": np.array([copied[each] for each in columns]),
                "cache": 0.0 * own + supply.store.held(problem),
                "graph": blocks * (waiting + self.in_flight),
                "lists": supply.lists_held(),
            },
            weights=own,
            groups=[*self.twins(problem), *self.rails(problem)],
            code=machine_code(problem, PIECES),
        )


def all_columns(problem: Problem, columns: range) -> int:
    """Return the bytes of these columns of all vertices' features."""
    return all_rows_bytes(problem, lambda ids: problem.features_bytes(ids, columns))


def _why_whole(problem: Problem) -> str:
    """Return why layer 1 is no sum over feature columns; '' if it is."""
    workload = problem.workload
    model, module, others = workload.model, workload.module, "data_parallel or gsplit"
    if workload.norm == "batch":
        why = (
            "between batches under way no rank has batch norm's moments (norm: batch); use"
            f" norm=layer, or {others}"
        )
    elif model in MODELS or (module and module.layers[0].half):
        return ""
    elif workload.is_cut:
        why = (
            f"{workload.called} is run as it is written, on whole rows; use {others}, which run any"
            " layer"
        )
    elif module and model == "own":
        why = (
            f"{module.name} does not say how its is; give it by_columns, scatter, transform and"
            f" apply (docs/how-to/bring-your-model.md), or use {others}, which run any layer"
        )
    else:
        why = (
            f"that of {model} {KINDS[model].lacks_columns}: it has no scatter, transform and apply"
            f" of its own; use one of {', '.join(MODELS)}, or {others}, which run any layer"
        )
    return f"layer 1 must be a sum over feature columns, and {why}"


def _lines(servers: PerRank, over: str | None) -> list[Group]:
    """Return groups of possible peers: ranks at the same position of every server, or all."""
    if over == "rank":
        return [tuple(range(len(servers)))]
    by_server = grouped(range(len(servers)), servers.__getitem__)
    lines = zip_longest(*by_server.values())  # None where a server has fewer ranks
    return [tuple(sorted(rank for rank in line if rank is not None)) for line in lines]


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


def pipelined(program: Program, steps: int) -> Iterator[QueuedOp]:
    """Yield the queue of the pipeline (an `Order`).

    An operation waits for the previous operation of its batch; a load also waits for the rank's
    last computation or load."""
    ended = list[Label]()  # the last computation or load of each period
    chains: dict[int, tuple[Label, ...]] = {}  # batch -> labels that its next operation waits for
    last: tuple[Label, ...] = ()  # the rank's last computation or load

    def queue(batch: int, phase: str) -> Iterator[QueuedOp]:
        nonlocal last
        for op in (op for op in program.step(batch) if op.phase == phase):
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
        for phase, batch in period(t, program.steps, steps):
            if phase == "front":
                start = len(ended) - 1 - program.lead  # sampling begins after this period
                chains[batch] = (ended[start],) if start >= 0 else ()
                yield from queue(batch, "host")
            yield from queue(batch, phase)
        ended += last  # one label


def _columns_copied(problem: Problem, columns: range) -> float:
    """Return the bytes of a rank's copy of its feature columns.

    Only ranks on a CPU have a copy, unless features stay in their file or the rank has all columns.
    """
    x = problem.graph.x if problem.graph else None
    is_all = isinstance(x, np.ndarray) and len(columns) == x.shape[1]
    if not problem.on_cpu or isinstance(x, np.memmap) or is_all:
        return 0.0
    return all_columns(problem, columns)


def sliced(problem: Problem, columns: range) -> Model:
    """Return the model of a rank, whose first layer reads these columns only."""
    inputs = problem.model.inputs.of_columns(len(columns))
    layers = tuple(layers_of(problem.workload, inputs, problem.model.classes))
    return replace(problem.model, layers=layers, inputs=inputs)


class BatchOps:
    """The operations of one batch on all ranks, and their memory [ranks] [B]."""

    def __init__(self, p3: P3, problem: Problem, batch: MiniBatch) -> None:
        model, slices = problem.model, p3.slices(problem)
        self.p3, self.problem, self.batch, self.model = p3, problem, batch, model
        self.rails = np.array([each.ranks[0] for each in slices])  # a number of each rank's rail
        self.peers = len(slices[0].ranks) - 1  # peers of a rank
        self.sliced = sliced(problem, slices[slices[0].ranks[-1]].columns)  # the widest slice
        own = {layer: batch.facts(layer) for layer in range(1, len(model.layers) + 1)}
        first, width = own[1], model.layers[0].h_out * model.itemsize
        # rows, sources and edges of layer 1 over each rank's rail [3, ranks]
        of_rank = np.array(first.sizes, dtype=float)
        self.of_rail = rows, sources, edges = sums(self.rails, of_rank)
        # counts of each layer; of layer 1, over each rank's rail
        self.facts = own | {1: replace(first, rows=rows, sources=sources, edges=edges)}
        self.first = first  # counts of layer 1 of each rank's own block
        # layer 1's output: of the rank's own block, and of its peers' blocks
        self.own, self.others = first.rows * width, (rows - first.rows) * width
        # send buffers: in the pipeline the rank continues before its messages are sent
        self.send_buffers = self.others * p3.pipelined
        self.last = own[len(own)]  # counts of layer L
        self.later_layers = Holds(problem, model, own, ExchangeOptions(), batch.scored)

    def ops(self) -> list[Op]:
        """Return the operations, each with its phase.

        host    sampling, pushes, laying out blocks
        front   load, layer 1 forward, up to the pulled partial sums
        body    layers 2 .. L and the loss, forward and backward, up to the pulled gradients
        tail    layer 1 backward
        reduce  all-reduces
        update
        """
        model, supply, b = self.model, self.p3.supply(self.problem), self.model.itemsize
        first, own, of_rail = model.layers[0], self.first, self.of_rail
        facts, peers = list(self.facts.values()), Outer.of(self.rails, True, 1)
        numbers = HEADER + own.rows + own.sources + own.edges
        pushed = Outer.of(self.rails, True, numbers) if self.peers else None
        host = list(supply.sampling(self.batch, facts, pushed, peers))
        if self.p3.prefetch:
            host.append(Op("wait", work=Compute(), idle=True))
        front = [Op("load", work=supply.copied(self.batch, facts)), *supply.gathered(self.batch)]
        front[-1] = replace(front[-1], holds=lambda: keeps(self.loaded))
        of_first = self.sliced.work(1, *of_rail)
        tail = [Op("backward", layer=1, work=of_first.backward, holds=self.first_backward)]
        if self.peers and first.heads:
            # projection of source rows, and all-reduces of logits over peers
            projected, groups = 4.0 * of_rail[1] * first.projected * b, self.p3.rails(self.problem)
            scatter = Compute(elementwise_bytes=projected, launches=8, itemsize=b)
            sizes = (
                first.heads * (of_rail[0, rail[0]] + of_rail[1, rail[0]]) * b for rail in groups
            )
            logits = AllReduce(tuple(map(int, sizes)), groups)
            front += [Op("scatter", "f", 1, work=scatter), Op("logits", "f", 1, work=logits)]
            tail += [Op("logits", "b", 1, work=logits), Op("scatter", "b", 1, work=scatter)]
        front.append(Op("forward", layer=1, work=of_first.forward, holds=self.first_forward))
        body = self._body()
        if self.peers:
            summed = Exchange(Outer.of(self.rails, True, own.rows), first.h_out * b)
            pulled, arrives = replace(summed, items=summed.items.T), self.own * self.peers
            holds = partial(keeps, arrives + self.send_buffers)
            front.append(Op("pull", "f", 1, work=pulled, holds=holds))
            # received gradients; the own gradient reuses the sum's memory
            body.append(Op("pull", "b", 1, work=summed, holds=partial(keeps, self.others)))
        reduce, update = self._end()
        phases = {"host": host, "front": front, "body": body, "tail": tail, "reduce": reduce}
        every = {**phases, "update": [update]}.items()
        return [replace(op, phase=phase) for phase, ops in every for op in ops]

    def _body(self) -> list[Op]:
        """Return the operations on pulled sums: bias and ReLU, layers 2 .. L, and the loss."""
        model, facts = self.model, self.facts
        passes = (4.0 + self.peers) * self.first.rows * model.layers[0].h_out
        applied = Compute(
            elementwise_bytes=passes * model.itemsize, launches=4, itemsize=model.itemsize
        )
        layers = (model.work(layer, *f.sizes) for layer, f in facts.items() if layer > 1)
        forward, backward = reduce(add, layers, BothPasses(applied, applied))
        loss = finish(self.problem, self.last.rows, self.batch.scored)
        return [
            Op("forward", work=forward, holds=self.forward),
            Op("loss", work=loss, holds=self.later_layers.loss),
            Op("backward", work=backward, holds=self.backward),
        ]

    def _end(self) -> tuple[list[Op], Op]:
        """Return the all-reduces of shared weights and of slices with twins, and the update."""
        model, problem = self.model, self.problem
        divided, groups = self.p3.sliced_weights(problem), self.p3.twins(problem)
        shared = model.weights - divided
        reduce = [Op("all_reduce", work=AllReduce((shared * model.itemsize,)))]
        if len(groups[0]) > 1:
            column_bytes = divided // model.features * model.itemsize
            slices = self.p3.slices(problem)
            sizes = tuple(column_bytes * len(slices[group[0]].columns) for group in groups)
            reduce.append(Op("all_reduce", layer=1, work=AllReduce(sizes, groups)))
        own = shared + divided // (1 + self.peers)
        return reduce, Op("update", work=model.update(own))

    def blocks(self) -> np.ndarray:
        """Return the bytes of blocks, labels and positions of peers' rows [ranks].

        Layer 1's block has the rows of all peers."""
        positions, model = 8 * (self.facts[1].rows - self.first.rows), self.model
        total = 16.0 * self.last.rows + positions
        for spec, f in zip(model.layers, self.facts.values(), strict=True):
            total = total + block_bytes(model, spec, *f.sizes)
        return np.asarray(total)

    # -- memory --------------------------------------------------------------------------------

    @property
    def of_first(self) -> LayerMemory:
        """The memory of layer 1, without what follows the sum."""
        return layer_memory(self.sliced.without_ends(1), 1, *self.of_rail)

    @property
    def loaded(self) -> Number:
        """The bytes of loaded rows; without the copy sorted by column of a compressed input."""
        inputs, sources = self.sliced.inputs, self.of_rail[1]
        return inputs.stored_bytes(sources) - inputs.product_index_bytes(sources)

    @property
    def read_again(self) -> Number:
        """The bytes of loaded rows that the tail reads; 0 if it reads a copy after dropout."""
        spec = self.sliced.layers[0]
        saved = spec.projects_first or spec.matrices > 1  # autograd saves the inputs
        if spec.counted:
            saved = spec.counted.keeps_inputs
        dropped = self.model.dropout and spec.drops
        reads = self.model.inputs.multiplied_first or (saved and not dropped)
        return self.loaded if reads else 0.0

    def first_forward(self) -> OpMemory:
        first = self.of_first
        most = np.maximum(first.forward, first.left + self.others)
        return OpMemory(most, first.left - (self.loaded - self.read_again))

    def forward(self) -> OpMemory:
        layers = map(self.later_layers.forward, range(2, len(self.facts) + 1))
        applied = self.own * self.model.layers[0].bias
        summed = OpMemory(self.own + applied, self.own - self.own * self.peers)
        return in_turn([summed, *layers])

    def backward(self) -> OpMemory:
        layers = map(self.later_layers.backward, range(len(self.facts), 1, -1))
        # the gradient of layer 1's sums takes the place of its rows
        more = self.later_layers.unsaved(1) - self.later_layers.loss().left - self.send_buffers
        return in_turn([*layers, OpMemory(0.0, more)])

    def first_backward(self) -> OpMemory:
        first, (rows, sources, _) = self.of_first, self.of_rail
        # a compressed input has a copy sorted by column for the gradient of its product; own rows,
        # a part of the rows read, have a product and a copy of their own
        by_column = self.sliced.inputs.product_index_bytes(sources)
        by_column = by_column + self.sliced.own_index_bytes(rows)
        needed = self.own + self.others + first.most - first.left + by_column
        freed = self.others + self.own + first.left
        return OpMemory(needed, -freed - self.read_again)
