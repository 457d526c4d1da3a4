"""A program: the operations that ranks do together, step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.outer import Pairs
from gnnplan.planner.vocabulary.schedule import Compute, Label
from gnnplan.planner.vocabulary.schedule import Copy as Copy  # work, beside that below
from gnnplan.planner.vocabulary.schedule import Exchange as Exchange
from gnnplan.planner.vocabulary.schedule import Sampling as Sampling
from gnnplan.planner.vocabulary.values import Value

Group = tuple[int, ...]  # ranks
PLACED_BY = 4  # steps whose exchanges decide where ranks sit; later ones are like these


@dataclass(frozen=True, eq=False)
class Message(Value):
    """Every rank hands bytes to the rank `distance` further on."""

    nbytes: np.ndarray  # [ranks]
    distance: int


@dataclass(frozen=True)
class Receipt:
    """Every rank waits for the message of the rank `distance` further on."""

    sender: Op

    @property
    def message(self) -> Message:
        assert isinstance(self.sender.work, Message)
        return self.sender.work

    @property
    def distance(self) -> int:
        return -self.message.distance


@dataclass(frozen=True)
class AllReduce:
    """An all-reduce in each group, of that group's bytes; without groups all ranks are one."""

    sizes: tuple[int, ...]
    groups: tuple[Group, ...] = ()

    def by_group(self, everyone: Group) -> list[tuple[Group, int]]:
        """The groups, each with its bytes."""
        return list(zip(self.groups or (everyone,), self.sizes, strict=True))


class Held(NamedTuple):
    """Bytes that an operation holds, beside what earlier ones have left [ranks]."""

    most: Number  # at its fullest moment
    left: Number  # when it has ended; negative: it frees more than it keeps


def keeps(nbytes: Number) -> Held:
    """What an operation makes, and leaves."""
    return Held(nbytes, nbytes)


def in_turn(operations: Iterable[Held]) -> Held:
    """What operations hold that follow one another.

    >>> in_turn([keeps(3.0), Held(most=4.0, left=-2.0), keeps(1.0)])
    Held(most=np.float64(7.0), left=2.0)
    """
    most: Number = 0.0
    left: Number = 0.0
    for each in operations:
        most, left = largest([left + each.most], most), left + each.left
    return Held(most, left)


Work = Compute | Exchange | Copy | Sampling | Message | Receipt | AllReduce
LANES: dict[type[Work], str] = {
    Compute: "compute",
    Exchange: "comm",
    Copy: "copy",
    Sampling: "host",
    Message: "send",
    Receipt: "receive",
    AllReduce: "reduce",
}


@dataclass(frozen=True)
class Op:
    """One operation that `ranks` do together. In a step either no operation names ranks (all ranks
    do it), or all operations do. The numbers of a computation are arrays [ranks], or hold for all.

    With `chunks` it is done for every chunk of the graph, 1: in order, -1: in reverse order. Arrays
    have one more axis then, [chunks, ranks, ..]; a computation's are flat, [chunks * ranks].
    Operations that follow one another and have the same sign are done chunk by chunk. A chunk
    without rows is not handed on, and one of which nobody sends anything is not exchanged. Where
    the order of chunks is another, each has an operation of its own, named by `chunk`.

    Who reads a program knows three names: 'halo' is an exchange of rows between their owners,
    'loss' ends a forward pass, 'update' ends a step. Any other is free; `validate` has words for
    some (MOVED in evidence/validate.py). Bytes are reported by `op`, seconds by `op`, `way` and
    `layer`. What is `ahead` is done on that lane, on the host up to `lead` steps before its own
    begins, a copy one step before. An all-reduce is `beside` the backward pass if only later
    all-reduces and the update wait for it. An `idle` operation has empty work: it is how long a
    rank waits. `phase` is the part of its step that it belongs to, for a pipeline that has phases
    of several steps under way. `holds` says what memory it needs and leaves, when asked
    (memory.py).
    """

    op: str
    way: str = ""
    layer: int | None = None
    work: Work = field(kw_only=True)
    beside: bool = False
    ahead: Literal["", "host", "copy"] = ""
    idle: bool = False
    phase: str = ""
    ranks: Group = ()
    chunks: Literal[-1, 0, 1] = 0
    chunk: int | None = None
    holds: Callable[[], Held] | None = field(default=None, compare=False)

    @property
    def lane(self) -> str:
        return self.ahead or LANES[type(self.work)]

    @property
    def moves(self) -> bool:
        """Whether ranks send each other anything; the receiving end of a message does not."""
        return isinstance(self.work, (Exchange, Message, AllReduce))

    def label(self, step: int, chunk: int | None = None) -> Label:
        """Its name; `peer` is the distance to a message's other end (at_rank makes it a rank)."""
        chunk = self.chunk if chunk is None else chunk
        peer = self.work.distance if isinstance(self.work, (Message, Receipt)) else None
        return Label(self.op, step, self.way, self.layer, chunk, peer)

    @property
    def kind(self) -> Kind:
        """Equal for operations that take equally long, and are reported as one."""
        where = () if isinstance(self.work, Compute) else self.ranks
        layer = self.layer if self.ahead else None  # each layer is sampled for itself
        return self.op, where, layer, self.chunks, self.work


Kind = tuple[str, Group, int | None, int, Work]  # of an operation


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

    An epoch has `steps` of them. What differs between steps is named, as the batch that a step is
    over: steps of one name are alike. The first ones are `known`, and the others are taken to be
    like these. Epochs need not be alike: epoch e + `period` is like epoch e, and the steps of a
    whole period are known where that is more than 1. `at(t)` names step t of training, counted over
    all epochs. Operations are made when they are asked for.
    """

    known: Callable[[], Iterable[Hashable]]
    steps: int
    at: Callable[[int], Hashable]
    ops: Callable[[Any], Step]
    # exchanges before step 0, not counted in an epoch
    setup: Callable[[], Iterable[Op]] = lambda: ()
    late: int = 0  # steps by which computation uses exchanges late (PipeGCN: 1)
    lead: int = 0  # steps by which what is `ahead` may be ahead
    samplers: int = 1  # of a rank, which take turns: each samples another step
    chunks: Callable[[int], Sequence[int]] = lambda step: ()  # their order in a step
    order: Order | None = None  # None: step after step (order.py)
    in_flight: int = 1  # steps after which all that overlaps is under way
    period: int = 1  # epochs after which they repeat

    @classmethod
    def of(cls, step: Step, **others: Any) -> Program:
        """An epoch is one step, always the same."""
        return cls(lambda: [0], 1, lambda t: 0, lambda name: step, **others)

    def step(self, t: int) -> Step:
        """The operations of step t of training."""
        return self.ops(self.at(t))

    @property
    def overlaps(self) -> bool:
        """Whether several steps are under way at once."""
        return bool(self.late or self.lead or self.order)

    @property
    def by_loss(self) -> bool:
        """Whether a step has ended with its loss; else it has with all of its operations.

        An order of its own puts a step's update behind later steps, and a run's last ones do not
        wait for any.
        """
        return self.order is not None

    @property
    def groups(self) -> list[Group]:
        """The groups of ranks that do operations of the first step."""
        return list(dict.fromkeys(op.ranks for op in self.step(0) if op.ranks))

    @property
    def setup_bytes(self) -> int:
        """Bytes that all ranks send before step 0."""
        exchanges = [op.work for op in self.setup() if isinstance(op.work, Exchange)]
        return sum(int(each.items.sum()) * each.itemsize for each in exchanges)


def traffic(program: Program, ranks: int) -> list[Pairs]:
    """What decides where ranks sit: bytes that they send each other, each [ranks, ranks].

    Of the first PLACED_BY known steps: one matrix for all exchanges of rows that are equal, and
    one for all that groups of ranks send.

    What ranks send because of where they sit (rows from another server's memory) is not counted:
    it would be other traffic elsewhere.
    """
    ops = [op for name in islice(program.known(), PLACED_BY) for op in program.ops(name)]
    halos = [op.work for op in ops if op.op == "halo" and not op.ranks]
    times = Counter(work for work in halos if isinstance(work, Exchange))
    found = [each.nbytes * count for each, count in times.items()]
    if any(op.ranks for op in ops):
        in_groups = np.zeros((ranks, ranks))
        for op in ops:
            at, work = np.array(op.ranks), op.work
            if isinstance(work, AllReduce) and op.ranks:
                in_groups[at, np.roll(at, -1)] += 2 * (len(at) - 1) / len(at) * work.sizes[0]
            elif isinstance(work, (Exchange, Message)) and op.ranks:
                into = np.ix_(at, at) if isinstance(work, Exchange) else (at, at + work.distance)
                in_groups[into] += np.asarray(work.nbytes.sum(0) if op.chunks else work.nbytes)
        found.append(in_groups)
    return found
