"""The schedule: the tasks of all ranks and lanes, with their dependencies, bytes and flops.

A schedule has no times. The simulator plays it in virtual time. The executor runs the same
operations in torch, and records spans under the same labels. Tasks of one rank and lane run in the
order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from gnnplan.planner.vocabulary.numbers import ByContent, Group, Number, RankMatrix

# Fallback costs for a device without a measured rate: a dropout hash in bytes (its words have one
# length for all precisions of rows) [B], and an attention weight in element accesses (logit,
# maximum, exponential, sum, weight).
HASH_BYTES, EDGE_ACCESSES = 24, 10
# fields of `Compute` that `+` adds up
_ADDED = (
    "flops",
    "gathers",
    "elementwise_bytes",
    "launches",
    "calls",
    "overlapped_bytes",
    "gemm_bytes",
    "hash_ops",
    "attention_edges",
    "random_rows",
)
_EITHER = ("scattered", "of_batch")  # that hold for a sum if they do for a part
HostWork = Literal["draw", "lay"]  # a sampler draws neighbours ('draw'), and builds blocks ('lay')


class Label(NamedTuple):
    """The name of one operation of one rank.

    >>> str(Label("halo", 5, "f", layer=2)), str(Label("pipeline", 0, chunk=3, peer=1))
    ('halo:f:l2:s5', 'pipeline:c3:p1:s0')
    """

    # forward, backward, halo, pipeline, all_reduce, loss, step, ... Reports sum bytes by op.
    op: str
    step: int
    # 'f': forward pass, 'b': backward pass, 'n': a message with the sizes of the next messages
    direction: str = ""
    layer: int | None = None
    chunk: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        parts = [self.op] + ([self.direction] if self.direction else [])
        for letter, value in (("l", self.layer), ("c", self.chunk), ("p", self.peer)):
            if value is not None:
                parts.append(f"{letter}{value}")
        return ":".join([*parts, f"s{self.step}"])

    @property
    def kind(self) -> str:
        """The label without its step, as 'halo:f:l2', by which validation averages over steps."""
        return str(self).rsplit(":", 1)[0]


class Gather(NamedTuple):
    """An aggregation: for every edge it reads a source row, and adds it to a destination row."""

    rows: Any  # rows read, one per edge
    width: int  # numbers per row
    sources: Any  # distinct source rows
    destinations: Any  # destination rows


@dataclass(frozen=True, eq=False)
class LocalWork(ByContent):
    """Work without communication, of one rank, or of several if fields are arrays [ranks]."""

    @property
    def arrays(self) -> list[np.ndarray]:
        """All arrays [ranks] in the fields: the numbers that differ between ranks."""
        return list(_arrays(tuple(getattr(self, field.name) for field in fields(self))))

    def of_ranks(self, ranks: np.ndarray | slice) -> Self:
        """Return the work of some ranks, with arrays of these ranks."""
        return self._with(lambda array: array[ranks])

    def at(self, rank: int) -> Self:
        """Return the work of one rank as Python numbers, which are faster than arrays of one."""
        return self._with(lambda array: array[rank].item())

    def each(self, count: int) -> list[Self]:
        """Return the work of each of `count` ranks; ranks with equal work share one object."""
        several = [np.broadcast_to(array, count) for array in self.arrays]
        if not several:
            return [self] * count
        _, first, number = np.unique(several, axis=1, return_index=True, return_inverse=True)
        unlike = [self.at(rank) for rank in first.tolist()]
        return [unlike[kind] for kind in number.ravel().tolist()]

    def _with(self, pick: Callable[[np.ndarray], Any]) -> Self:
        """Return the work with every array replaced by pick(array)."""
        values = {field.name: _replaced(getattr(self, field.name), pick) for field in fields(self)}
        return replace(self, **values)


def _arrays(value: object) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for each in value:
            yield from _arrays(each)
    elif isinstance(value, np.ndarray) and value.ndim:
        yield value


def _replaced(value: Any, pick: Callable[[np.ndarray], Any]) -> Any:
    """Replace the arrays in a field's value, also in nested tuples, by pick(array)."""
    if isinstance(value, tuple):  # `tuple.__new__` also makes a NamedTuple from an iterator
        return tuple.__new__(type(value), (_replaced(each, pick) for each in value))
    return pick(value) if isinstance(value, np.ndarray) and value.ndim else value


@dataclass(frozen=True, eq=False)
class Compute(LocalWork):
    """Computation: an amount per kind of work, to which cluster/cost.py assigns rates."""

    flops: Number = 0.0  # dense matrix products [flop]
    gathers: tuple[Gather, ...] = ()
    elementwise_bytes: Number = 0.0  # read and written by element-wise operations [B]
    launches: float = 0.0  # framework operations (kernel launches)
    itemsize: int = 4  # [B per number]
    overlapped_bytes: Number = 0.0  # bytes of transfers that overlap this work and slow it down [B]
    gemm_bytes: Number = 0.0  # read and written by matrix products [B]
    hash_ops: Number = 0.0  # numbers that take many instructions each: dropout, exponentials
    attention_edges: Number = 0.0  # attention weights or their gradients: edges times heads
    # whole rows read or written in random order, as pairs: number of rows, numbers per row
    random_rows: tuple[tuple[Number, int], ...] = ()
    scattered: bool = False  # gathers read rows in random order
    of_batch: bool = False  # on a mini-batch's rows, which are new in each step
    # framework operations outside autograd, which is most of an operation on a GPU's host
    calls: float = 0.0

    def __add__(self, other: Compute) -> Compute:
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        either = {name: getattr(self, name) or getattr(other, name) for name in _EITHER}
        return replace(self, **either, **sums)


class BothPasses(NamedTuple):
    """The work of a forward pass, and of its backward pass."""

    forward: Compute
    backward: Compute

    def __add__(self, other: BothPasses) -> BothPasses:  # type: ignore[override]
        return BothPasses(self.forward + other.forward, self.backward + other.backward)


@dataclass(frozen=True, eq=False)
class Copy(LocalWork):
    """A copy between a server's memory and the device."""

    nbytes: Any  # a number, or an array [ranks] [B]
    packed: Any = 0  # bytes that the host first gathers into one buffer, or as long works on [B]
    calls: int = 0  # calls of the framework besides the copy
    search: Any = 0.0  # edges that a sampler draws in the time in which the host finds the rows
    vertices: int = 0  # among which it finds them
    scattered: bool = False  # reads rows at random places


@dataclass(frozen=True, eq=False)
class Sampling(LocalWork):
    """A sampler's work on edges of a batch."""

    what: HostWork
    edges: Any  # a number, or an array [ranks]
    samplers: int = 1  # samplers of each rank that work at the same time
    layers: int = 0  # layers of the batch that the edges are of
    vertices: int = 0  # of the graph


@dataclass(frozen=True, eq=False)
class Exchange(ByContent):
    """An all-to-all: every rank of a group sends items to every other rank of the group."""

    items: RankMatrix  # items from rank (row) to rank (column) [ranks, ranks]
    itemsize: int = 1  # bytes per item [B]

    @property
    def nbytes(self) -> RankMatrix:
        return self.items if self.itemsize == 1 else self.items * self.itemsize

    @cached_property
    def sent(self) -> list[int]:
        """The bytes that each rank sends to all others [B] [ranks]."""
        sent: list[int] = (self.items.sum(1) * self.itemsize).tolist()
        return sent


class Ring(NamedTuple):
    """A ring all-reduce in a group.

    Its n ranks send 2 (n-1) `size` bytes in total. Source: nccl-tests, whose bus bandwidth has the
    factor 2 (n-1) / n.
    """

    size: int  # size of the buffer [B]


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one peer; the peer's `Recv` ends when the message has arrived."""

    peer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recv:
    """The receive of a message from one peer."""

    peer: int
    of: Label  # label of the peer's Send


@dataclass(frozen=True, slots=True)
class Collective:
    """The part of a group's i-th rank in an exchange or an all-reduce.

    Every rank of the group has a task with the same label.
    """

    work: Exchange | Ring
    group: Group
    i: int

    @property
    def nbytes(self) -> int:
        """The bytes that this rank sends in total [B]."""
        if isinstance(self.work, Exchange):
            return self.work.sent[self.i]
        return share(2 * (len(self.group) - 1) * self.work.size, len(self.group), self.i)

    @property
    def to_peers(self) -> list[tuple[int, int]]:
        """The bytes that this rank sends to each peer in an exchange [B]; empty for all-reduces."""
        if not isinstance(self.work, Exchange):
            return []
        sent = (self.work.items[self.i] * self.work.itemsize).tolist()
        return [(peer, nbytes) for peer, nbytes in zip(self.group, sent, strict=True) if nbytes]


Work = LocalWork | Send | Recv | Collective


@dataclass(frozen=True, slots=True)
class Task:
    """Work of one rank in one lane, and the tasks that must end before it starts."""

    label: Label
    rank: int
    lane: str
    work: Work
    # Labels of tasks of the same rank. Stale strategies wait for tasks of earlier steps.
    after: tuple[Label, ...] = ()


@dataclass(slots=True)
class Schedule:
    """The tasks of all ranks in a number of steps."""

    ranks: int
    steps: int
    tasks: list[Task] = field(default_factory=list)
    setup: list[Task] = field(default_factory=list)  # run once before step 0, outside any epoch
    by_loss: bool = False  # a step ends with its task `loss`; else with the last of its tasks

    def lane(self, rank: int, lane: str) -> Iterator[Task]:
        """Return the tasks of one rank and lane, in order."""
        return (task for task in self.tasks if task.rank == rank and task.lane == lane)

    def bytes_by_op(self, tasks: Iterable[Task] | None = None) -> dict[str, int]:
        """Return the bytes sent by operation, of all tasks or of `tasks` [B]."""
        total: dict[str, int] = {}
        for task in self.tasks if tasks is None else tasks:
            if isinstance(task.work, (Send, Collective)):
                total[task.label.op] = total.get(task.label.op, 0) + task.work.nbytes
        return total


def share(total: int, parts: int, index: int) -> int:
    """Return the index-th of `parts` nearly equal integers that add up to `total`.

    >>> [share(10, 4, i) for i in range(4)]
    [3, 3, 2, 2]
    """
    return total // parts + (index < total % parts)
