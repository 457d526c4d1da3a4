"""A program: the operations that ranks do together, step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple, Protocol

import numpy as np

from gnnplan.planner.cluster.placement import Phase
from gnnplan.planner.strategies.program.held import Held
from gnnplan.planner.vocabulary.schedule import Compute, HostWork, Label

Group = tuple[int, ...]  # ranks
PLACED_BY = 4  # steps whose exchanges decide where ranks sit; later ones are like these


@dataclass(frozen=True, eq=False)
class Op:
    """One operation that `ranks` do together. In a step either no operation names ranks (all ranks
    do it), or all operations do. Exactly one of these is set:

    work            computation; its fields are arrays [ranks], or numbers that hold for all ranks
    loaded          bytes [ranks] between the server's memory and the device
    host            a sampler's work, edges [ranks], and of how many layers they are
    sent            an exchange: items of `itemsize` bytes [ranks, ranks], from row to column
    handed          a message of each rank to the one `distance` further on: bytes [ranks]
    received        that message of its sender, which is the rank `distance` further on
    size            an all-reduce of that many bytes over the ranks
    groups, sizes   an all-reduce in each group, of that group's size

    With `chunks` it is done for every chunk of the graph, 1: in order, -1: in reverse order. Arrays
    have one more axis then, [chunks, ranks, ..]; those of `work` are flat, [chunks * ranks].
    Operations that follow one another and have the same sign are done chunk by chunk. A chunk
    without rows is not handed on, and one of which nobody sends anything is not exchanged. Where
    the order of chunks is another, each has an operation of its own, named by `chunk`.

    Readers know three names: 'halo' is an exchange of rows between their owners, 'loss' ends a
    forward pass, 'update' ends a step. Any other is free; `validate` has words for some (MOVED in
    evidence/validate.py). Bytes are reported by `op`, seconds by `op`, `way` and
    `layer`. An operation that is `ahead` may be done `prefetch` steps before its own begins. An
    all-reduce is `beside` the backward pass if only later all-reduces and the update wait for it.
    An `idle` operation has empty work: it is how long a rank waits. `phase` is the part of its step
    that it belongs to, for a pipeline that has phases of several steps under way. `holds` plays on
    a rank's memory what all its chunks together keep, free and need besides (memory.py calls it).
    """

    op: str
    way: str = ""
    layer: int | None = None
    work: Compute | None = None
    loaded: np.ndarray | None = None
    host: tuple[HostWork, np.ndarray, int] | None = None
    sent: np.ndarray | None = None
    itemsize: int = 1
    size: int = 0
    groups: tuple[Group, ...] = ()
    sizes: tuple[int, ...] = ()
    beside: bool = False
    ahead: bool = False
    idle: bool = False
    phase: str = ""
    ranks: Group = ()
    handed: np.ndarray | None = None
    received: Op | None = None
    distance: int = 0
    chunks: Literal[-1, 0, 1] = 0
    chunk: int | None = None
    holds: Callable[[Held], None] | None = None

    @property
    def lane(self) -> str:
        if self.work is not None:
            return "compute"
        if self.handed is not None:
            return "send"
        if self.received is not None:
            return "receive"
        if self.ahead or self.host is not None:
            return "host"
        if self.loaded is not None:
            return "copy"
        return "comm" if self.sent is not None else "reduce"

    @property
    def moves(self) -> bool:
        """Whether ranks send each other anything; the receiving end of a message does not."""
        return self.sent is not None or self.lane in ("send", "reduce")

    @property
    def sent_bytes(self) -> np.ndarray:
        """Bytes of an exchange [ranks, ranks]."""
        assert self.sent is not None
        return self.sent if self.itemsize == 1 else self.sent * self.itemsize

    def label(self, step: int, chunk: int | None = None) -> Label:
        """Its name; `peer` is the distance to a message's other end (at_rank makes it a rank)."""
        chunk = self.chunk if chunk is None else chunk
        return Label(self.op, step, self.way, self.layer, chunk, self.distance or None)

    @property
    def identity(self) -> object:
        """Equal for operations that share their work: such operations take equally long."""
        shared = (self.work, self.loaded, self.host, self.sent, self.handed)
        where = () if self.work is not None else self.ranks
        layer = self.layer if self.ahead else None  # each layer is sampled for itself
        numbers = (self.itemsize, self.size, self.groups, self.sizes, self.distance, self.chunks)
        return self.op, where, layer, numbers, *map(id, shared)

    def reductions(self, everyone: Group) -> list[tuple[Group, int]]:
        """The groups of an all-reduce, each with its bytes; `everyone` if it names no ranks."""
        if self.groups:
            return list(zip(self.groups, self.sizes, strict=True))
        return [(self.ranks or everyone, self.size)]


Step = Sequence[Op]  # in order; exchanges stand where a synchronous rank waits for them


class Queued(NamedTuple):
    """An operation at its place in every rank's queue."""

    op: Op
    step: int  # that it belongs to
    after: tuple[Label, ...]  # it begins when these have ended on the same rank
    chunk: int | None = None


class Order(Protocol):
    """How the operations of several steps follow one another."""

    def __call__(self, at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[Queued]:
        """The queue of the first so many steps, `epoch` of them per epoch; `at(t)`: step t."""


@dataclass(frozen=True)
class Program:
    """The steps of training.

    An epoch has `steps` of them; the first ones are `known`, and the others are taken to be like
    these. Epochs need not be alike: epoch e + `period` is like epoch e, and the steps of a whole
    period are known where that is more than 1. `at(t)` is step t of training, counted over all
    epochs. Operations are made when they are asked for: the same objects where steps are alike, for
    an operation is priced once however often it occurs.
    """

    known: Callable[[], Iterable[Step]]
    steps: int
    at: Callable[[int], Step]
    # exchanges before step 0, not counted in an epoch
    setup: Callable[[], Iterable[Op]] = lambda: ()
    late: int = 0  # steps by which computation uses exchanges late (PipeGCN: 1)
    prefetch: int = 0  # steps by which what is `ahead` may be ahead
    chunks: Callable[[int], Sequence[int]] = lambda step: ()  # their order in a step
    order: Order | None = None  # None: step after step (order.py)
    in_flight: int = 1  # steps after which all that overlaps is under way
    period: int = 1  # epochs after which they repeat

    @property
    def setup_bytes(self) -> int:
        """Bytes that all ranks send before step 0."""
        return sum(int(op.sent.sum()) * op.itemsize for op in self.setup() if op.sent is not None)


def traffic(program: Program, ranks: int) -> list[Phase]:
    """Rows that owners send each other in the first PLACED_BY known steps, of which only the
    proportions matter; equal exchanges are counted.

    What ranks send because of where they sit (rows from another server's memory) is not counted:
    it would be other traffic elsewhere.
    """
    ops = [op for step in islice(program.known(), PLACED_BY) for op in step]
    exchanges = [op for op in ops if op.op == "halo" and op.sent is not None and not op.ranks]
    times = Counter((id(op.sent), op.itemsize) for op in exchanges)
    alike = {(id(op.sent), op.itemsize): op for op in exchanges}
    whole = [Phase(op.sent_bytes, times[key]) for key, op in alike.items()]
    return whole + _inside_groups(ops, ranks)


def _inside_groups(ops: Sequence[Op], ranks: int) -> list[Phase]:
    """Transfers of groups of ranks. Those of one kind (as 'halo:f') in all groups are on the way
    together: a phase is all groups' mean chunk, and happens as often as the group that has most of
    that kind does it."""
    kinds: dict[tuple[str, str], list[Op]] = {}
    for op in ops:
        if op.ranks and op.moves:
            kinds.setdefault((op.op, op.way), []).append(op)
    means: dict[int, np.ndarray] = {}  # by id of the bytes: stages share them

    def of_mean_chunk(nbytes: np.ndarray, op: Op) -> np.ndarray:
        if not op.chunks:
            return nbytes
        if id(nbytes) not in means:
            means[id(nbytes)] = nbytes.mean(0)
        return means[id(nbytes)]

    phases = []
    for alike in kinds.values():
        most = max(Counter(op.ranks for op in alike).values())
        sent, chunks = np.zeros((ranks, ranks)), 1
        for op in alike:
            at = np.array(op.ranks)
            if op.sent is not None:
                sent[np.ix_(at, at)] += of_mean_chunk(op.sent_bytes, op) / most
                chunks = len(op.sent) if op.chunks else 1
            elif op.handed is not None:
                sent[at, at + op.distance] += of_mean_chunk(op.handed, op) / most
                chunks = len(op.handed) if op.chunks else 1
            else:
                sent[at, np.roll(at, -1)] += 2 * (len(at) - 1) / len(at) * op.size / most
        phases.append(Phase(sent, chunks * most))
    return phases
