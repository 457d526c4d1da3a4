"""P3, push-pull: layer 1 goes to where the features are. Feature columns are cut over servers, the first weight with them.

    a mini-batch of one rank, its columns on S servers
    host     |draw|push|lay|                                      push: layer 1's block goes to the rank's peer on every server
    copy                   |load|                                 each loads its columns of all peers' sources
    compute                      |forward 1|                      F_M: partial sums on its columns, for all peers' blocks
    comm                                   |pull|                 partials go to whose block it is
    compute                                     |forward|loss|backward|               F_D, B_D: layers 2 .. L, data parallel
    comm                                                              |pull b|        the sum's gradient goes to all peers
    compute                                                                  |backward 1|         B_M: each its columns' weights
    reduce                                                                              |all_reduce|
    compute                                                                                        |update|

    pipelined: three batches in flight, period k
    compute  |F_M k|F_D k-1|B_D k-1|B_M k-2|update k-3|       pulls of a period have the next one's computation to hide behind,
    reduce   |all_reduce k-3 . . . . . . . .|                 the all-reduce its own

Peers are the ranks at the same place of every server, and a server's ranks have the same columns; with over='rank' all ranks are peers,
each with columns of its own. With `copies` c, S/c servers (ranks) one after the other have all columns among them, F c/S each; a block
goes to peers of its own group, and twins of all groups have the same columns:

    S = 4, c = 2     server 0 |columns 0 .. F/2|   server 1 |columns F/2 .. F|      blocks and partials cross inside a pair,
                     server 2 |columns 0 .. F/2|   server 3 |columns F/2 .. F|      the first weight's gradient between 0 and 2, 1 and 3

c = S is data parallelism that has all features everywhere: layer 1 is computed where its block is, nothing is pushed or pulled.

Not pipelined: the gradient of one process on the same batch. Pipelined: batch t reads the weights after max(0, t - 3) updates, forward
and backward (w_{t+1} = w_t - lr grad f(w_{t-3}), the paper's Eq. 3), so four sets of weights are kept; an epoch's last batch is taken
through at once, so that its loss counts where it belongs.

The structure is where it is whatever the columns are (planner/structure.py): with every sampler, or, spread, vertex v's adjacency list on
server v mod S (over='rank': on rank v mod M), and `structure_cache` bytes of the hottest of others' lists with every server.

    host     |ask_edges 3|draw 3|edges 3| .. |ask_edges 1|draw 1|edges 1|push|lay|

Attention's logits need all columns before any weight of an edge is known: heads (f1 + f2) numbers are summed over peers first.
The layer in P3's words (executor/models.py): partition, scatter, gather, transform, sync, apply.

Bytes per batch: 2 (S/c - 1) f1 H_1 b for each rank's f1 rows of layer 1's output, what is pushed, 2 (M-1) W' b, W' without the first
layer's columns; of these 2 (T-1) times each slice's, which T twins have. Data parallel with features spread over servers fetches
(S-1)/S f2 F b instead: formulas.p3_break_even.
Paper: P3 (OSDI 2021) Sec. 3.1-3.4; copies: Table 5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from gnnplan.planner.cost import Number, slowest
from gnnplan.planner.errors import SpecError
from gnnplan.planner.gnn import Model, describe
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, MiniBatch
from gnnplan.planner.schedule import Compute, Label, Schedule, Task
from gnnplan.planner.strategies import batchwise, layerwise, p3_memory
from gnnplan.planner.strategies.layerwise import Op
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy
from gnnplan.planner.structure import check_structure, hashed

OVER = ("server", "rank")
MODELS = ("gcn", "sage", "gat", "sgc")  # whose first layer is a sum over feature columns, but for attention's softmax
UNEVEN = 0.03  # by which a closed form is above its simulation: groups that sum apart (logits, twins' slices) wait for nobody else
DELAY = 3  # updates by which a pipelined batch's weights lag
FOLLOWING = {"front": "body", "body": "tail", "tail": "end"}  # phases of a batch
HEADER = 3  # numbers before a pushed block: sources, destinations, edges
INT = 4  # [B] of a pushed number


def columns(features: int, slices: int, i: int) -> range:
    """Which columns the i-th has.

    >>> [columns(10, 3, i) for i in range(3)]
    [range(0, 3), range(3, 6), range(6, 10)]
    """
    return range(features * i // slices, features * (i + 1) // slices)


@dataclass(frozen=True)
class P3(Strategy):
    """over: what has columns of its own, each 'server' or each 'rank'; None: servers where there are several. pipelined: three batches in
    flight, on weights three updates old. prefetch: as in data parallel. structure, structure_cache: too, of what has its own columns.
    copies: how often all columns are there."""

    over: str | None = None
    pipelined: bool = False
    prefetch: int = 0
    structure: str = "everywhere"
    structure_cache: int = 0
    copies: int = 1

    family: ClassVar[str] = "p3"
    mode: ClassVar[str] = "mini"
    claim: ClassVar[float] = 0.35  # pipelined: ranks wait for the slowest, and other epochs draw other batches; without: see UNEVEN

    @property
    def exact(self) -> bool:
        return not self.pipelined

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, P3) and self.pipelined == other.pipelined

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        if job.ranks > 1 and job.workload.model in MODELS:
            yield cls(pipelined=True)
            yield cls()

    @classmethod
    def absent(cls, job: Job) -> str:
        if job.ranks == 1:
            return "one rank: there is nobody to cut the columns with"
        return _no_partial_form(job.workload.model)

    def settle(self, job: Job) -> P3:
        return self if self.over else replace(self, over="server" if len(set(job.servers)) > 1 else "rank")

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        batchwise.check(job)
        if self.over not in OVER:
            raise SpecError(f"p3: over is 'server' (its ranks share its columns) or 'rank' (each has its own), not {self.over!r}")
        if self.prefetch < 0:
            raise SpecError(f"p3: prefetch is a number of batches, 0 or more, not {self.prefetch}; use 0 or 2")
        if job.workload.model not in MODELS:
            raise SpecError(f"p3: {_no_partial_form(job.workload.model)}")
        check_structure(self.name, job, self.structure, self.structure_cache)
        lines = _lines(job.servers, self.over)
        seats = len(lines[0])
        if any(len(line) != seats for line in lines):
            raise SpecError("p3: a rank has a peer on every server, so servers have equally many ranks; use over='rank', or as many GPUs "
                            "of each server")  # fmt: skip
        if seats == 1:
            raise SpecError(f"p3 cuts columns over several (servers: {len(set(job.servers))}, ranks: {job.ranks}, over: {self.over}); use "
                            f"{'data_parallel' if job.ranks == 1 else 'over=' + repr('rank')}")  # fmt: skip
        if self.copies < 1 or seats % self.copies:
            fit = [c for c in range(1, seats + 1) if seats % c == 0]
            raise SpecError(f"p3: each copy of the columns is over equally many {self.over}s (copies: {self.copies}, {self.over}s: {seats})"
                            f"; use one of {', '.join(map(str, fit))}")  # fmt: skip
        if job.stats.features < (slices := seats // self.copies):
            raise SpecError(f"p3 needs a feature column for each slice (features: {job.stats.features}, slices: {slices}); "
                            f"use fewer {self.over}s, or more copies")  # fmt: skip

    # -- who has what ----------------------------------------------------------------------------------------------

    def rails(self, job: Job) -> list[tuple[int, ...]]:
        """Groups of peers, each with one rank of every slice, slices in order. Neighbours: ranks fill servers in order, so that with
        over='rank' and a copy per server partials stay inside it; between servers the network is flat."""
        return list(_rails(job.servers, self.over, self.copies))

    def rail(self, job: Job, rank: int) -> tuple[int, ...]:
        return _rail_of(job.servers, self.over, self.copies)[rank]

    def twins(self, job: Job, rank: int) -> tuple[int, ...]:
        """Ranks with the same columns."""
        place = self.rail(job, rank).index(rank)
        return tuple(sorted(rail[place] for rail in self.rails(job)))

    def columns(self, job: Job, rank: int) -> range:
        rail = self.rail(job, rank)
        return columns(job.stats.features, len(rail), rail.index(rank))

    def sliced(self, job: Job, rank: int) -> Model:
        """The model as a rank has it: its first layer reads its columns only."""
        share = len(self.columns(job, rank))
        return describe(job.workload, share, job.stats.classes, job.model.nonzeros * share / job.stats.features)

    def batches(self, job: Job) -> Batches:
        return job.minibatches(tuple(range(job.ranks)))

    def lists(self, job: Job) -> batchwise.Lists | None:
        return hashed(job, self.batches(job), self.structure, self.over == "rank", self.structure_cache)

    def steps(self, job: Job) -> int:
        return batchwise.steps(job)

    def drawn_steps(self, job: Job) -> int:
        return self.batches(job).known

    # -- one batch -------------------------------------------------------------------------------------------------

    def phases(self, job: Job, batch: MiniBatch) -> dict[str, list[Op]]:
        """A batch's operations: 'host', 'front' (to the pulled partials), 'body' (to their gradients), 'tail', 'end'."""
        ranks, model, b = range(job.ranks), job.model, job.model.itemsize
        layers = range(1, job.workload.layers + 1)
        facts = {layer: batch.facts(layer) for layer in layers}
        f1, f2, e1 = facts[1].rows, facts[1].sources, facts[1].edges
        width, first = model.layers[0].h_out, model.layers[0]
        pushed, pulled = np.zeros((2, job.ranks, job.ranks), dtype=np.int64)
        mine = np.zeros((3, job.ranks))  # rows, sources and edges of all blocks that a rank computes on
        loaded = np.zeros(job.ranks, dtype=np.int64)
        for rank in ranks:
            rail = np.array(self.rail(job, rank))
            mine[:, rank] = f1[rail].sum(), f2[rail].sum(), e1[rail].sum()
            loaded[rank] = batchwise.row_bytes_read(job, batch, rail.tolist(), self.columns(job, rank))
            others = rail[rail != rank]
            pushed[rank, others] = INT * (HEADER + f2[rank] + f1[rank] + e1[rank]) + batchwise.ID
            pulled[rank, others] = f1[others] * width * b
        below = sum(facts[layer].edges for layer in layers if layer > 1)
        front: list[Op] = [Op("load", loaded=loaded)]
        forward, backward = self._first(job, mine)
        tail = [Op("backward", layer=1, work=backward)]
        meets = len(self.rail(job, 0)) > 1
        if first.heads and meets:
            rows = Compute(touched=4.0 * mine[1] * first.projected * b, launches=8, itemsize=b)
            sizes = tuple(int(first.heads * (mine[0, rail[0]] + mine[1, rail[0]]) * b) for rail in self.rails(job))
            groups = tuple(self.rails(job))
            front += [Op("scatter", "f", 1, work=rows), Op("logits", "f", 1, groups=groups, sizes=sizes)]
            tail += [Op("logits", "b", 1, groups=groups, sizes=sizes), Op("scatter", "b", 1, work=rows)]
        front += [Op("forward", layer=1, work=forward), *[Op("pull", "f", 1, sent=pulled)] * meets]
        loss_f, loss_b = model.finish(facts[layers[-1]].rows)
        passes: Number = (3.0 + len(self.rail(job, 0))) * f1 * width
        apply = Compute(touched=passes * b, launches=4, itemsize=b)
        rest = [(model.forward(layer, f.rows, f.sources, f.edges), model.backward(layer, f.rows, f.sources, f.edges))
                for layer, f in facts.items() if layer > 1]  # fmt: skip
        body = [Op("forward", work=sum((f for f, _ in rest), apply)), Op("loss", work=loss_f + loss_b),
                Op("backward", work=sum((back for _, back in rest), apply)), *[Op("pull", "b", 1, sent=pulled.T)] * meets]  # fmt: skip
        shared = model.weights - self.sliced_weights(job)
        end = [Op("all_reduce", size=shared * b)]
        if len(self.twins(job, 0)) > 1:
            groups = tuple(dict.fromkeys(self.twins(job, rank) for rank in ranks))
            per_column = self.sliced_weights(job) // job.stats.features
            sizes = tuple(per_column * len(self.columns(job, group[0])) * b for group in groups)
            end.append(Op("all_reduce", layer=1, groups=groups, sizes=sizes))
        end.append(Op("update", work=model.update(shared + self.sliced_weights(job) // len(self.rail(job, 0)))))
        host = [*batchwise.drawing(job, batch, e1 + below, self.lists(job)), *[Op("push", sent=pushed, ahead=True)] * meets,
                Op("lay", host=("lay", below + mine[2]), ahead=True)]  # fmt: skip
        if self.prefetch:
            host.append(Op("wait", work=Compute(), idle=True))
        return {"host": host, "front": front, "body": body, "tail": tail, "end": end}

    def _first(self, job: Job, mine: np.ndarray) -> tuple[Compute, Compute]:
        """Layer 1 on a rank's columns, of all its peers' blocks."""
        model = self.sliced(job, self.rail(job, 0)[-1])  # the widest
        return model.forward(1, *mine), model.backward(1, *mine)

    def sliced_weights(self, job: Job) -> int:
        """Numbers of the first layer that are cut with the columns."""
        first = job.model.layers[0]
        return first.matrices * first.h_in * first.h_out

    # -- the four answers ------------------------------------------------------------------------------------------

    def predict(self, job: Job) -> Prediction:
        batches = self.batches(job)
        first = batches.first()
        different = {id(batch): self.phases(job, batch) for batch in {id(batch): batch for batch in first}.values()}
        known = [different[id(batch)] for batch in first]  # estimated ones are alike
        p = layerwise.account(job, [op for phases in known for ops in phases.values() for op in ops], prefetch=self.prefetch)
        if self.pipelined:
            p = self._overlapped(job, p, known)
        return p if len(known) == batches.steps else batchwise.scaled(p, batches.steps / len(known))

    def _overlapped(self, job: Job, p: Prediction, known: Sequence[dict[str, list[Op]]]) -> Prediction:
        """The longer of what a rank does itself, period by period, and what passes a port. A pull starts when the one before is over,
        and so does an all-reduce; ranks wait for the slowest in every phase, or, where nothing is pulled, in all-reduces alone."""
        accounts = {key: {name: layerwise.account(job, ops) for name, ops in phases.items()}
                    for key, phases in {id(phases): phases for phases in known}.items()}  # fmt: skip
        each = [accounts[id(phases)] for phases in known]
        alone = len(self.rail(job, 0)) == 1 and self.lists(job) is None
        count = len(each)
        steps = count * (1 + -(-DELAY // count))  # in the last epoch every period has an update
        now: Number = 0.0
        pulls: Number = 0.0  # when the comm lane is free
        sums: Number = 0.0  # and the reduce lane
        here: dict[tuple[str, int], Number] = {}  # when what a batch's phase waits for is there
        ends: list[Number] = []

        def run(t: int, phase: str) -> None:
            nonlocal now, pulls, sums
            took = each[t % count][phase]
            moved, summed = (sum(seconds for kind, seconds in took.by_op.items() if kind.startswith(op)) for op in ("pull", "logits"))
            spent = _own_seconds(job, known[t % count][phase]) if alone else took.epoch_s - moved - summed
            now = np.maximum(now, here.get((phase, t), 0.0)) + spent
            if any(kind.startswith("logits") for kind in took.by_op):
                now = sums = np.maximum(now, sums) + summed
            if phase != "tail":
                pulls = np.maximum(now, pulls) + moved
            here[FOLLOWING[phase], t] = now if phase == "tail" else pulls

        for t in range(steps):
            for phase, batch in period(t, count):
                if phase == "reduce":
                    reduced = sum(s for kind, s in each[batch % count]["end"].by_op.items() if "all_reduce" in kind)
                    sums = np.maximum(slowest(now), sums) + reduced
                    here["update", batch] = sums
                elif phase == "update":
                    now = np.maximum(now, here["update", batch]) + each[batch % count]["end"].by_op["update"]
                else:
                    if phase == "front" and not self.prefetch:
                        now = now + (_own_seconds(job, known[t % count]["host"]) if alone else each[t % count]["host"].epoch_s)
                    run(batch, phase)
            if t % count == count - 1:
                ends.append(slowest(now))
        epoch = ends[-1] - ends[-2]
        if self.prefetch:
            epoch = np.maximum(epoch, sum(phases["host"].epoch_s for phases in each))
        port = layerwise.busiest_port(job, [op for phases in known for ops in phases.values() for op in ops])
        epoch = np.maximum(np.maximum(epoch, port), p.compute_s)
        return replace(p, epoch_s=epoch, comm_s=epoch - p.compute_s, bubble_s=0.0 * epoch)

    def schedule(self, job: Job, steps: int) -> Schedule:
        batches, made = self.batches(job), dict[int, dict[str, list[Op]]]()

        def phases(t: int) -> dict[str, list[Op]]:
            batch = batches.at(t)
            if id(batch) not in made:
                made[id(batch)] = self.phases(job, batch)
            return made[id(batch)]

        if not self.pipelined:
            return layerwise.score(job, lambda t: [op for ops in phases(t).values() for op in ops], steps, prefetch=self.prefetch)
        out = Schedule(job.ranks, steps)
        for rank in range(job.ranks):
            out.tasks += _Period(job, rank, self.prefetch).tasks(steps, self.steps(job), phases)
        return out

    def memory(self, job: Job) -> Memory:
        return p3_memory.memory(self, job)

    def preparation(self, job: Job) -> dict[str, float]:
        return {}

    def tied(self, job: Job) -> tuple[int, ...]:
        return job.servers if self.over == "server" else ()


def period(t: int, epoch: int, steps: int | None = None) -> Iterator[tuple[str, int]]:
    """What a rank does in period t of the pipeline, one after the other: phases of batches, and a batch's all-reduce and update. An epoch
    has so many batches, the run `steps`, whose last ends an epoch too (None: it goes on).

    >>> [f"{phase} {batch}" for phase, batch in period(4, epoch=5)]
    ['reduce 1', 'front 4', 'body 3', 'tail 2', 'body 4', 'update 1']
    """
    def is_there(batch: int) -> bool:
        return batch >= 0 and (steps is None or batch < steps)

    def ends(batch: int) -> bool:
        return (batch + 1) % epoch == 0 or batch + 1 == steps

    order = [("reduce", t - DELAY, True), ("front", t, True), ("body", t - 1, not ends(t - 1)), ("tail", t - 2, True), ("body", t, ends(t)),
             ("update", t - DELAY, True)]  # fmt: skip
    return ((phase, batch) for phase, batch, now in order if now and is_there(batch))


def _own_seconds(job: Job, ops: Sequence[Op]) -> Number:
    """Of what each rank does itself [ranks]."""
    seconds: Number = np.zeros(job.ranks)
    for op in ops:
        if op.work is not None:
            seconds = seconds + job.cost.compute_s(op.work) * job.cost.crowd
        elif op.loaded is not None:
            seconds = seconds + job.cost.load_s(op.loaded) * job.cost.crowd
        elif op.host is not None:
            seconds = seconds + job.cost.host_s(*op.host) * job.cost.crowd
    return seconds


class _Period:
    """One rank's tasks of a pipelined run, period by period."""

    def __init__(self, job: Job, rank: int, prefetch: int) -> None:
        self.rank, self.group, self.prefetch = rank, tuple(range(job.ranks)), prefetch
        self.done: list[Task] = []
        self.last: tuple[Label, ...] = ()  # the rank's own last operation
        self.ends: list[Label] = []  # of each period
        self.waits: dict[tuple[str, int], tuple[Label, ...]] = {}  # what a batch's phase waits for

    def tasks(self, steps: int, epoch: int, phases: Callable[[int], dict[str, list[Op]]]) -> list[Task]:
        for t in range(steps + DELAY):
            for phase, batch in period(t, epoch, steps):
                ops = phases(batch)
                if phase == "front":
                    self._host(batch, ops["host"])
                if phase == "reduce":
                    self._reduce(batch, ops["end"])
                elif phase == "update":
                    op = ops["end"][-1]
                    self._add(op.label(batch), "compute", layerwise.part(op, self.rank, self.group), self.waits["end", batch])
                else:
                    self._run(batch, phase, ops[phase])
            if self.last:
                self.ends.append(self.last[-1])
        return self.done

    def _add(self, label: Label, lane: str, work: object, after: tuple[Label, ...]) -> None:
        self.done.append(Task(label, self.rank, lane, work, after))  # type: ignore[arg-type]
        if lane in ("compute", "copy"):
            self.last = (label,)

    def _host(self, t: int, ops: Sequence[Op]) -> None:
        """Sampling: in line after the period before, ahead after an earlier one."""
        start = len(self.ends) - 1 - self.prefetch
        after: tuple[Label, ...] = (self.ends[start],) if start >= 0 else ()
        for op in ops:
            label = op.label(t)
            if op.idle:
                self._add(label, "compute", op.work, ())
                after += (label,)
                continue
            self.done.append(Task(label, self.rank, "host", layerwise.part(op, self.rank, self.group), after))
            after = (label,)
        self.waits["front", t] = after

    def _run(self, t: int, phase: str, ops: Sequence[Op]) -> None:
        waits, following = self.waits.get((phase, t), ()), FOLLOWING[phase]
        for op in ops:
            label, work = op.label(t), layerwise.part(op, self.rank, self.group)
            if op.work is not None:
                self._add(label, "compute", work, waits)
                waits = (label,)
            elif op.loaded is not None:
                self._add(label, "copy", work, waits + self.last)
                waits = (label,)
            else:
                lane = "comm" if op.sent is not None else "reduce"
                self.done.append(Task(label, self.rank, lane, work, waits))
                waits = (label,)
        self.waits[following, t] = waits

    def _reduce(self, t: int, ops: Sequence[Op]) -> None:
        waits = self.waits["end", t]
        for op in ops[:-1]:
            label = op.label(t)
            self.done.append(Task(label, self.rank, "reduce", layerwise.part(op, self.rank, self.group), waits))
            waits = (label,)
        self.waits["end", t] = waits


def _no_partial_form(model: str) -> str:
    return (f"layer 1 must be a sum over feature columns, and that of {model} reads an encoder's output: it has no scatter, transform and "
            f"apply of its own; use one of {', '.join(MODELS)}, or data_parallel or gsplit, which run any layer")  # fmt: skip


def _lines(servers: tuple[int, ...], over: str) -> list[tuple[int, ...]]:
    """The ranks at the same place of every server, or all."""
    if over == "rank":
        return [tuple(range(len(servers)))]
    seen: dict[int, list[int]] = {}
    for rank, server in enumerate(servers):
        seen.setdefault(server, []).append(rank)
    most = max(map(len, seen.values()))
    return [tuple(sorted(ranks[place] for ranks in seen.values() if place < len(ranks))) for place in range(most)]


@lru_cache(maxsize=64)
def _rails(servers: tuple[int, ...], over: str, copies: int) -> tuple[tuple[int, ...], ...]:
    lines = _lines(servers, over)
    slices = len(lines[0]) // copies
    return tuple(line[start : start + slices] for line in lines for start in range(0, len(line), slices))


@lru_cache(maxsize=64)
def _rail_of(servers: tuple[int, ...], over: str, copies: int) -> dict[int, tuple[int, ...]]:
    return {rank: rail for rail in _rails(servers, over, copies) for rank in rail}
