"""The schedule: who does what after what, with how many bytes and flops. It has no times.

The simulator plays it in virtual time. The executor does the same operations for real, and records
spans under the same labels. Tasks of one rank and lane run in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import Pairs
from gnnplan.planner.vocabulary.values import Value

# Fallback costs where a device has no rate of its own: of a dropout hash, whose words are as long
# whatever the rows' type [B], and of an attention weight (logit, maximum, exponential, sum, weight)
# in element accesses.
HASH_BYTES, EDGE_ACCESSES = 24, 10
# Fields of `Compute` of which a sum of works has the sums
_ADDED = (
    "flops",
    "gathers",
    "elementwise_bytes",
    "launches",
    "overlapped_bytes",
    "gemm_bytes",
    "hash_ops",
    "attention_edges",
    "random_rows",
)
HostWork = Literal["draw", "lay"]  # a sampler draws neighbours, and lays out blocks


class Label(NamedTuple):
    """The name of one operation of one rank.

    >>> str(Label("halo", 5, "f", layer=2)), str(Label("pipeline", 0, chunk=3, peer=1))
    ('halo:f:l2:s5', 'pipeline:c3:p1:s0')
    """

    # forward, backward, halo, pipeline, all_reduce, loss, step, ... Bytes are reported by op.
    op: str
    step: int
    # 'f' with the forward pass, 'b' with the backward pass; 'n' says how many numbers follow
    way: str = ""
    layer: int | None = None
    chunk: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        parts = [self.op] + ([self.way] if self.way else [])
        for letter, value in (("l", self.layer), ("c", self.chunk), ("p", self.peer)):
            if value is not None:
                parts.append(f"{letter}{value}")
        return ":".join([*parts, f"s{self.step}"])

    @property
    def kind(self) -> str:
        """The label without its step, as 'halo:f:l2'; validation averages over steps."""
        return str(self).rsplit(":", 1)[0]


class Gather(NamedTuple):
    """An aggregation: it reads rows and adds them up in other rows."""

    rows: Number  # that are read
    width: int  # numbers per row
    among: Number  # distinct rows that it reads from
    into: Number  # rows that it makes


@dataclass(frozen=True, eq=False)
class Local(Value):
    """Work that ranks do by themselves: of one rank, or of several where numbers are arrays."""

    @property
    def arrays(self) -> list[np.ndarray]:
        """Its numbers that differ between ranks [ranks]."""
        return list(_arrays(tuple(getattr(self, field.name) for field in fields(self))))

    def among(self, ranks: np.ndarray | slice) -> Self:
        """The work of some ranks."""
        return self._with(lambda array: array[ranks])

    def at(self, rank: int) -> Self:
        """The work of one rank, whose numbers are Python's: faster than arrays of one."""
        return self._with(lambda array: array[rank].item())

    def each(self, count: int) -> list[Self]:
        """Of all ranks; those that are alike are one."""
        several = [np.broadcast_to(array, count) for array in self.arrays]
        if not several:
            return [self] * count
        _, first, number = np.unique(several, axis=1, return_index=True, return_inverse=True)
        unlike = [self.at(rank) for rank in first.tolist()]
        return [unlike[kind] for kind in number.ravel().tolist()]

    def _with(self, pick: Callable[[np.ndarray], Any]) -> Self:
        """The work with other numbers in the place of its arrays."""
        picked = {field.name: _picked(getattr(self, field.name), pick) for field in fields(self)}
        return replace(self, **picked)


def _arrays(value: object) -> Iterator[np.ndarray]:
    if isinstance(value, tuple):
        for each in value:
            yield from _arrays(each)
    elif isinstance(value, np.ndarray) and value.ndim:
        yield value


def _picked(value: Any, pick: Callable[[np.ndarray], Any]) -> Any:
    if isinstance(value, tuple):  # or a named one
        return tuple.__new__(type(value), (_picked(each, pick) for each in value))
    return pick(value) if isinstance(value, np.ndarray) and value.ndim else value


@dataclass(frozen=True, eq=False)
class Compute(Local):
    """Computation, counted by kind; cost.py gives each kind a rate."""

    flops: Number = 0.0  # dense matrix products [flop]
    gathers: tuple[Gather, ...] = ()
    elementwise_bytes: Number = 0.0  # read and written by element-wise operations [B]
    launches: float = 0.0  # framework operations
    itemsize: int = 4  # [B per number]
    overlapped_bytes: Number = 0.0  # of transfers that overlap the work and slow it [B]
    gemm_bytes: Number = 0.0  # that matrix products read and write [B]
    hash_ops: Number = 0.0  # numbers that many instructions are spent on: dropout, exponentials
    attention_edges: Number = 0.0  # edges times heads that get an attention weight or gradient
    # Whole rows that are read or written in random order: rows, numbers per row.
    random_rows: tuple[tuple[Number, int], ...] = ()
    scattered: bool = False  # gathers read rows that are in no order, as a mini-batch has them

    def __add__(self, other: Compute) -> Compute:
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return replace(self, scattered=self.scattered or other.scattered, **sums)


@dataclass(frozen=True, eq=False)
class Copy(Local):
    """A copy between a server's memory and the device."""

    nbytes: Any  # a number, or an array [ranks]
    packed: Any = 0  # of these, what the host puts together first


@dataclass(frozen=True, eq=False)
class Sampling(Local):
    """A sampler's work on edges of a batch."""

    what: HostWork
    edges: Any  # a number, or an array [ranks]
    samplers: int = 1  # of each rank at work


@dataclass(frozen=True, eq=False)
class Exchange(Value):
    """Every rank of a group sends items to every other one."""

    items: Pairs  # from row to column [ranks, ranks]
    itemsize: int = 1  # [B]

    @property
    def nbytes(self) -> Pairs:
        return self.items if self.itemsize == 1 else self.items * self.itemsize

    @cached_property
    def sent(self) -> list[int]:
        """All that each rank sends [B] [ranks]."""
        sent: list[int] = (self.items.sum(1) * self.itemsize).tolist()
        return sent


class Ring(NamedTuple):
    """An all-reduce in a group.

    All n ranks send 2 (n-1) `size` bytes in total. Source: nccl-tests, whose bus bandwidth has the
    factor 2 (n-1) / n.
    """

    size: int  # of the buffer [B]


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one peer, whose `Recv` ends when it has arrived."""

    peer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Waits for a message of a peer."""

    peer: int
    of: Label  # of the peer's Send


@dataclass(frozen=True, slots=True)
class Collective:
    """The part of a group's i-th rank in an exchange or an all-reduce.

    Every rank of the group has a task with an equal label.
    """

    work: Exchange | Ring
    group: tuple[int, ...]
    i: int

    @property
    def nbytes(self) -> int:
        """All that this rank sends [B]."""
        if isinstance(self.work, Exchange):
            return self.work.sent[self.i]
        return share(2 * (len(self.group) - 1) * self.work.size, len(self.group), self.i)

    @property
    def to_peers(self) -> list[tuple[int, int]]:
        """Peers, and what they are sent in an exchange [B]; nothing of an all-reduce."""
        if not isinstance(self.work, Exchange):
            return []
        sent = (self.work.items[self.i] * self.work.itemsize).tolist()
        return [(peer, nbytes) for peer, nbytes in zip(self.group, sent, strict=True) if nbytes]


Work = Local | Send | Recv | Collective


@dataclass(frozen=True, slots=True)
class Task:
    """One rank's work in one of its lanes, and the tasks that must end before it starts."""

    label: Label
    rank: int
    lane: str
    work: Work
    # Tasks of the same rank, in this step or in earlier ones (which is how staleness is expressed).
    after: tuple[Label, ...] = ()


@dataclass(slots=True)
class Schedule:
    """All ranks' tasks of some steps."""

    ranks: int
    steps: int
    tasks: list[Task] = field(default_factory=list)
    setup: list[Task] = field(default_factory=list)  # done once before step 0; no part of an epoch
    by_loss: bool = False  # a step has ended with its loss; else with all of its tasks

    def lane(self, rank: int, lane: str) -> Iterator[Task]:
        """Tasks of one rank and lane, in their order."""
        return (task for task in self.tasks if task.rank == rank and task.lane == lane)

    def bytes_by_op(self, tasks: Iterable[Task] | None = None) -> dict[str, int]:
        """Bytes by operation, of all tasks or of these; each is counted where it is sent [B]."""
        total: dict[str, int] = {}
        for task in self.tasks if tasks is None else tasks:
            if isinstance(task.work, (Send, Collective)):
                total[task.label.op] = total.get(task.label.op, 0) + task.work.nbytes
        return total


def share(total: int, parts: int, index: int) -> int:
    """The index-th of `parts` nearly equal whole shares of `total`, which add up to it.

    >>> [share(10, 4, i) for i in range(4)]
    [3, 3, 2, 2]
    """
    return total // parts + (index < total % parts)
