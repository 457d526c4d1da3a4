"""Programs: the operations of all ranks, step after step; their order; and every rank's tasks.

Every rank does the operations in one order, and each waits for others:

    lane      operations                       waits for, if steps do not overlap
    host      sampling                         the last update; if `ahead`, an earlier one
    copy      load, store, and sampling        the last computation or update, and transfers
              ahead on a GPU                   since then; if `ahead`, sampling, and the update
                                               before the last
    compute   forward, backward, update ..     all of its step since the last computation
    comm      exchanges                        the last computation, and transfers since then
    reduce    all-reduces                      the last computation, and transfers since then
    send      messages                         the last computation, and transfers since then
    receive   messages                         nothing

Operations of one rank and lane run in the order of the program. Only the update waits for
all-reduces that overlap with the backward pass. If a program's `lag` is 1, a computation waits for
the exchange of the previous step (PipeGCN). A program whose steps overlap otherwise has its own
order (`Program.order`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby, islice, product
from typing import Any, Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.model import OpMemory
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.numbers import ByContent, Group, RankMatrix, grouped
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
    Label,
    LocalWork,
    Recv,
    Ring,
    Schedule,
    Send,
    Task,
)
from gnnplan.planner.vocabulary.schedule import Copy as Copy
from gnnplan.planner.vocabulary.schedule import Exchange as Exchange
from gnnplan.planner.vocabulary.schedule import Sampling as Sampling
from gnnplan.planner.vocabulary.schedule import Work as Share
from gnnplan.planner.vocabulary.trace import sampler_lane

PLACED_BY = 4  # number of steps whose traffic decides the placement; later steps are similar


@dataclass(frozen=True, eq=False)
class Message(ByContent):
    """A message from every rank r of the operation to rank r + `distance`."""

    nbytes: np.ndarray  # [chunks, ranks]
    distance: int


@dataclass(frozen=True)
class Receive:
    """The receipt, at every rank r of the operation, of the message from rank r + `distance`."""

    sender: Op  # whose work is the message

    @property
    def message(self) -> Message:
        assert isinstance(self.sender.work, Message)
        return self.sender.work

    @property
    def distance(self) -> int:
        return -self.message.distance


@dataclass(frozen=True)
class AllReduce:
    """One all-reduce in each group of ranks, all at the same time."""

    sizes: tuple[int, ...]  # bytes of each group's all-reduce
    groups: tuple[Group, ...] = ()  # empty: one group of all ranks

    def by_group(self, everyone: Group) -> list[tuple[Group, int]]:
        """Return the groups, each with its bytes."""
        return list(zip(self.groups or (everyone,), self.sizes, strict=True))


Work = Compute | Exchange | Copy | Sampling | Message | Receive | AllReduce
LANES: dict[type[Work], str] = {
    Compute: "compute",
    Exchange: "comm",
    Copy: "copy",
    Sampling: "host",
    Message: "send",
    Receive: "receive",
    AllReduce: "reduce",
}


@dataclass(frozen=True)
class Op:
    """One operation that the ranks of a group do together.

    Three names (`op`) have a meaning: 'halo' is an exchange of rows between their owners, 'loss'
    ends a forward pass (GNNPipe's last stage computes it inside 'forward'), 'update' ends a step.
    All other names are free; `validate` describes some (MOVED in evidence/validate.py). Bytes are
    reported by `op`, seconds by `op`, `direction` and
    `layer`.

    The numbers of a computation are arrays [ranks], or scalars if all ranks do the same. If
    `over_chunks` is not 0, the operation is done once per chunk of the graph. Its arrays then have
    one more axis, [chunks, ranks, ..]; arrays of a computation are flat, [chunks * ranks].
    Consecutive operations with the same `over_chunks` run chunk by chunk. A rank sends no message
    for a chunk without rows, and ranks do not meet for a chunk of which nobody sends anything.
    """

    op: str
    direction: str = ""  # 'f' (forward), 'b' (backward); 'n': lengths of the next messages
    layer: int | None = None
    work: Work = field(kw_only=True)
    overlaps_backward: bool = False  # an all-reduce: only the update waits for it
    # lane for work that begins before its step: on 'host' up to Program.lead steps earlier, on
    # 'copy' one step earlier; '': the work begins in its step, on its usual lane
    ahead: Literal["", "host", "copy"] = ""
    idle: bool = False  # the operation has empty work, and stands for the time that a rank waits
    phase: str = ""  # phase of the step, for a Program.order that mixes phases of several steps
    ranks: Group = ()  # (): all ranks; either all operations of a step name ranks, or none
    over_chunks: Literal[-1, 0, 1] = 0  # 1: for all chunks in order, -1: in reverse, 0: once
    chunk: int | None = None  # chunk of an operation that a Program.order places by itself
    holds: Callable[[], OpMemory] | None = field(default=None, compare=False)  # memory (account.py)

    @property
    def lane(self) -> str:
        return self.ahead or LANES[type(self.work)]

    @property
    def moves(self) -> bool:
        """Whether the ranks send data; a receipt sends none."""
        return isinstance(self.work, (Exchange, Message, AllReduce))

    def label(self, step: int, chunk: int | None = None) -> Label:
        """Return the label; its `peer` is the message's distance, until `at_rank` adds a rank."""
        chunk = self.chunk if chunk is None else chunk
        peer = self.work.distance if isinstance(self.work, (Message, Receive)) else None
        return Label(self.op, step, self.direction, self.layer, chunk, peer)

    @property
    def kind(self) -> Kind:
        """A key that is equal for operations that take equally long and are reported as one."""
        ranks = () if isinstance(self.work, Compute) else self.ranks
        layer = self.layer if self.ahead else None  # sampling is reported layer by layer
        return self.op, ranks, layer, self.over_chunks, self.work


Kind = tuple[str, Group, int | None, int, Work]  # Op.kind


Step = Sequence[Op]  # in order; an exchange stands where a synchronous rank would wait for it


class QueuedOp(NamedTuple):
    """An operation in the queue of every rank."""

    op: Op
    step: int  # the operation's step
    after: tuple[Label, ...]  # operations of the same rank that must end before this one begins
    chunk: int | None = None


# A function that orders the operations of a program's steps, the first so many, which overlap. The
# order depends on the operations' names, not on the amounts of their work.
Order = Callable[["Program", int], Iterator[QueuedOp]]


@dataclass(frozen=True)
class Program:
    """The steps of training.

    A step has a name, such as the number of its batch, and steps with equal names have equal
    operations. `known` returns the names of the steps that are counted; the remaining steps of an
    epoch are assumed to be like them. Epoch e + `period` equals epoch e; if `period` is more than
    1, all steps of a period are known. Operations are created only when `ops` is called.
    """

    known: Callable[[], Iterable[Hashable]]  # names of the first steps
    steps: int  # per epoch
    at: Callable[[int], Hashable]  # step of training, counted over all epochs -> name
    ops: Callable[[Any], Step]  # name -> operations
    # exchanges before step 0, not counted in an epoch
    setup: Callable[[], Iterable[Op]] = lambda: ()
    lag: int = 0  # computation reads the exchanges of so many steps before (PipeGCN: 1)
    lead: int = 0  # operations that are `ahead` may begin so many steps before their own
    samplers: int = 1  # sampler processes of a rank, which take turns at the steps
    chunk_order: Callable[[int], Sequence[int]] = lambda step: ()  # step -> order of the chunks
    order: Order | None = None  # None: step after step (`queue`)
    in_flight: int = 1  # number of steps until the overlap of steps is in its steady state
    period: int = 1  # epochs

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", cache(self.ops))  # each reader asks for all steps

    @classmethod
    def of(cls, step: Step, **others: Any) -> Program:
        """Return a program whose epochs are one step each, always the same."""
        return cls(lambda: [0], 1, lambda t: 0, lambda name: step, **others)

    def step(self, t: int) -> Step:
        """Return the operations of step t of training."""
        return self.ops(self.at(t))

    @property
    def by_loss(self) -> bool:
        """Whether a step ends with its loss, instead of with the last of its operations.

        A program with its own order does the update of a step after operations of later steps, but
        the last updates of a run wait for no later step.
        """
        return self.order is not None

    @property
    def groups(self) -> list[Group]:
        """The groups of ranks that the operations of the first step name."""
        return list(dict.fromkeys(op.ranks for op in self.step(0) if op.ranks))

    @property
    def setup_bytes(self) -> int:
        """Bytes that all ranks send before step 0."""
        exchanges = [op.work for op in self.setup() if isinstance(op.work, Exchange)]
        return sum(int(each.items.sum()) * each.itemsize for each in exchanges)


def traffic(program: Program, ranks: int) -> list[RankMatrix]:
    """Return matrices of the bytes from rank to rank [ranks, ranks], to place the ranks.

    They cover the first PLACED_BY known steps: one matrix for each set of equal halo exchanges, and
    one for all traffic inside groups of ranks. Traffic that itself depends on the placement, such
    as rows from another server's memory, is not counted.
    """
    ops = [op for name in islice(program.known(), PLACED_BY) for op in program.ops(name)]
    halo_exchanges = [op.work for op in ops if op.op == "halo" and not op.ranks]
    counts = Counter(work for work in halo_exchanges if isinstance(work, Exchange))
    matrices = [each.nbytes * count for each, count in counts.items()]
    if any(op.ranks for op in ops):
        in_groups = np.zeros((ranks, ranks))
        for op in ops:
            at, work = np.array(op.ranks), op.work
            if isinstance(work, AllReduce) and op.ranks:
                in_groups[at, np.roll(at, -1)] += 2 * (len(at) - 1) / len(at) * work.sizes[0]
            elif isinstance(work, (Exchange, Message)) and op.ranks:
                pairs = np.ix_(at, at) if isinstance(work, Exchange) else (at, at + work.distance)
                nbytes = work.nbytes.sum(0) if op.over_chunks else work.nbytes
                in_groups[pairs] += np.asarray(nbytes)
        matrices.append(in_groups)
    return matrices


# -- the queue of every rank -----------------------------------------------------------------------


def queue(program: Program, steps: int) -> Iterator[QueuedOp]:
    """Yield the operations of the first `steps` steps, in the order of every rank."""
    if program.order is not None:
        yield from program.order(program, steps)
        return
    for step in range(steps):
        chunks = program.chunk_order(step)
        for ops in ops_by_group(program.step(step)).values():
            yield from _waiting(program, step, _chunk_by_chunk(ops, chunks))


def ops_by_group(step: Step) -> dict[Group, list[Op]]:
    """Return the operations of each group of ranks, in order."""
    return grouped(step, lambda op: op.ranks)


def _chunk_by_chunk(ops: Iterable[Op], chunks: Sequence[int]) -> Iterator[tuple[Op, int | None]]:
    for sign, group in groupby(ops, lambda op: op.over_chunks):
        consecutive = list(group)
        if not sign:
            yield from ((op, None) for op in consecutive)
            continue
        for chunk, op in product(chunks if sign > 0 else reversed(chunks), consecutive):
            if not isinstance(op.work, Exchange) or op.work.items[chunk].any():
                yield op, chunk  # ranks skip the exchange of a chunk of which nobody sends rows


def _waiting(
    program: Program, step: int, ops: Iterable[tuple[Op, int | None]]
) -> Iterator[QueuedOp]:
    """Yield the operations of a step, with the labels of the operations that each waits for."""
    computed: tuple[Label, ...] = ()  # the last computation
    awaited: tuple[Label, ...] = ()  # operations that the next computation waits for
    overlapped: tuple[Label, ...] = ()  # all-reduces that only the update waits for
    sampling = False  # whether an operation of the step is on the host's lane already
    for op, chunk in ops:
        label, updated, after = op.label(step, chunk), Label("update", step - 1), computed + awaited
        if op.idle or isinstance(op.work, Receive):  # the operation is a wait, so it begins at once
            awaited, after = (*awaited, label), ()
        elif op.lane == "compute":
            after, computed, awaited = awaited, (label,), ()
            if op.op == "update":
                after, overlapped = after + overlapped, ()
        elif op.lane == "host":
            lead = program.lead if op.ahead else 0
            after = () if sampling else (updated._replace(step=updated.step - lead),)
            sampling, awaited = True, (label,)
        elif op.lane == "copy":
            previous = (updated._replace(step=step - 2),) if op.ahead else computed
            after, awaited = (previous or (updated,)) + awaited, (label,)
        elif op.overlaps_backward:
            overlapped += (label,)
        elif op.lane != "send":  # the sender does not wait for its message to arrive
            awaited += (label._replace(step=step - program.lag * (op.lane == "comm")),)
        yield QueuedOp(op, step, after, chunk)


# -- tasks -----------------------------------------------------------------------------------------


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Return every rank's tasks of the first `steps` steps of a program."""
    everyone = tuple(range(problem.ranks))
    schedule = Schedule(problem.ranks, steps, by_loss=program.by_loss)
    for op in program.setup():
        shares = _shares(op, op.ranks or everyone, -1, None)
        schedule.setup += [Task(op.label(-1), rank, "comm", work) for rank, work in shares.items()]
    shares_by_kind: dict[object, dict[int, Share]] = {}  # kind of operation -> rank -> share
    arriving: set[tuple[int, Label]] = set()  # receiving rank, label of the receipt
    for op, step, after, chunk in queue(program, steps):
        label, is_received = op.label(step, chunk), isinstance(op.work, Receive)
        key = op.kind, op.ranks, chunk, is_received and step
        if key not in shares_by_kind:
            shares_by_kind[key] = _shares(op, op.ranks or everyone, step, chunk)
        lane = sampler_lane(step, program.samplers) if op.lane == "host" else op.lane
        schedule.tasks += [
            Task(at_rank(label, rank), rank, lane, work, _waits(after, rank, arriving))
            for rank, work in shares_by_kind[key].items()
        ]
        if is_received:
            arriving |= {(rank, at_rank(label, rank)) for rank in shares_by_kind[key]}
    return schedule


def at_rank(label: Label, rank: int) -> Label:
    """Return the label with its `peer`, a distance, replaced by the rank at that distance."""
    return label if label.peer is None else label._replace(peer=rank + label.peer)


def _waits(
    after: tuple[Label, ...], rank: int, arriving: Set[tuple[int, Label]]
) -> tuple[Label, ...]:
    """Return the labels that a rank waits for, without receipts of messages that nobody sends."""
    if all(label.peer is None for label in after):
        return after
    labels = [at_rank(label, rank) for label in after]
    return tuple(label for label in labels if label.peer is None or (rank, label) in arriving)


def _shares(op: Op, group: Group, step: int, chunk: int | None) -> dict[int, Share]:
    """Return the share of each rank of a group; an empty message has no sender or receiver."""
    match op.work:
        case LocalWork() as work:
            count = len(group)
            in_chunk = work if chunk is None else work.of_ranks(chunk * count + np.arange(count))
            return dict(zip(group, in_chunk.each(count), strict=True))
        case Exchange() as work:
            exchange = work if chunk is None else replace(work, items=work.items[chunk])
            return {rank: Collective(exchange, group, i) for i, rank in enumerate(group)}
        case AllReduce() as work:
            return {
                rank: Collective(Ring(size), members, i)
                for members, size in work.by_group(group)
                for i, rank in enumerate(members)
            }
        case Message(nbytes, distance):
            sizes = zip(group, nbytes[chunk].tolist(), strict=True)
            return {rank: Send(rank + distance, size) for rank, size in sizes if size}
        case Receive(sender) as work:
            sizes = zip(group, work.message.nbytes[chunk].tolist(), strict=True)
            sent, distance = sender.label(step, chunk), work.distance
            return {
                rank: Recv(rank + distance, at_rank(sent, rank + distance))
                for rank, size in sizes
                if size
            }
