"""The schedule: who does what after what, with how many bytes and flops. It has no times.

The simulator plays it in virtual time. The executor does the same operations for real, and records
spans under the same labels. Tasks of one rank and lane run in the order of the schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.outer import Outer
from gnnplan.planner.vocabulary.values import Value

# Fallback costs where a device has no rate of its own: of a dropout hash, whose words are as long
# whatever the rows' type [B], and of an attention weight (logit, maximum, exponential, sum, weight)
# in element accesses.
HASH_BYTES, EDGE_ACCESSES = 24, 10
# Fields of `Compute` that are numbers, or arrays of them
_COUNTS = (
    "flops",
    "elementwise_bytes",
    "overlapped_bytes",
    "gemm_bytes",
    "tensor_bytes",
    "hash_ops",
    "attention_edges",
    "weight_gradient_flops",
)
# .. and those of which a sum of works has the sums
_ADDED = ("gathers", "random_rows", "launches", *(n for n in _COUNTS if n != "tensor_bytes"))
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
class Compute(Value):
    """Work of one rank, counted by kind; cost.py gives each kind a rate.

    Fields may be arrays of candidates; all that is computed from them then is an array, too.
    """

    flops: Number = 0.0  # dense matrix products, but for weights' gradients [flop]
    gathers: tuple[Gather, ...] = ()
    elementwise_bytes: Number = 0.0  # read and written by element-wise operations [B]
    launches: float = 0.0  # framework operations
    itemsize: int = 4  # [B per number]
    overlapped_bytes: Number = 0.0  # of transfers that overlap the work and slow it [B]
    gemm_bytes: Number = 0.0  # that matrix products read and write [B]
    tensor_bytes: Number = 0.0  # size of the largest tensor that is read or written [B]; 0: any
    hash_ops: Number = 0.0  # numbers that many instructions are spent on: dropout, exponentials
    attention_edges: Number = 0.0  # edges times heads that get an attention weight or gradient
    # Whole rows that are read or written in random order: rows, numbers per row, distinct rows.
    random_rows: tuple[tuple[Number, int, Number], ...] = ()
    scattered: bool = False  # gathers read rows that are in no order, as a mini-batch has them
    # Dense products whose sums run over rows: gradients of weights [flop].
    weight_gradient_flops: Number = 0.0

    def __add__(self, other: Compute) -> Compute:
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        largest = np.maximum(self.tensor_bytes, other.tensor_bytes)
        scattered = self.scattered or other.scattered
        return replace(self, tensor_bytes=largest, scattered=scattered, **sums)

    def at(self, i: int) -> Compute:
        """The i-th candidate of its arrays."""
        return self._with(lambda value: float(value[i] if np.ndim(value) else value))

    def each(self, count: int) -> list[Compute]:
        """Of all candidates; those that are alike are one."""
        several = [np.broadcast_to(number, count) for number in self.numbers() if np.ndim(number)]
        if not several:
            return [self.at(0)] * count
        _, first, number = np.unique(several, axis=1, return_index=True, return_inverse=True)
        unlike = [self.at(i) for i in first.tolist()]
        return [unlike[kind] for kind in number.ravel().tolist()]

    def among(self, ranks: np.ndarray | slice | int) -> Compute:
        """The work of some ranks, or of one, where its arrays are [ranks]."""
        if isinstance(ranks, int):
            return self.at(ranks)
        return self._with(lambda value: value[ranks] if np.ndim(value) else value)

    def numbers(self) -> Iterator[Number]:
        """What may be arrays, field by field."""
        for name in _COUNTS:
            yield getattr(self, name)
        for rows, _, among, into in self.gathers:
            yield from (rows, among, into)
        for rows, _, among in self.random_rows:
            yield from (rows, among)

    def _with(self, pick: Callable[[Any], Number]) -> Compute:
        """The work with other numbers in the place of its own."""
        picked: dict[str, Any] = {name: pick(getattr(self, name)) for name in _COUNTS}
        return replace(
            self,
            gathers=tuple(
                Gather(pick(rows), width, pick(among), pick(into))
                for rows, width, among, into in self.gathers
            ),
            random_rows=tuple(
                (pick(rows), width, pick(among)) for rows, width, among in self.random_rows
            ),
            **picked,
        )


@dataclass(frozen=True, slots=True)
class Load:
    """A copy of rows from the server's memory to the device, or back."""

    nbytes: int
    packed: int = 0  # of these, what the host puts together first


@dataclass(frozen=True, slots=True)
class Host:
    """A sampler's work for one rank: edges of some layers of a batch."""

    what: HostWork
    edges: int
    layers: int = 0
    samplers: int = 1  # of the rank at work


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
class Row:
    """What the i-th rank of a group sends in an exchange that is not written down pair by pair."""

    items: Outer  # of all ranks of the group
    itemsize: int  # [B]
    group: tuple[int, ...]
    i: int
    nbytes: int  # that it sends in all [B]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        sent = (self.items[self.i] * self.itemsize).tolist()
        return ((peer, nbytes) for peer, nbytes in zip(self.group, sent, strict=True) if nbytes)

    @classmethod
    def of_all(cls, items: Outer, itemsize: int, group: tuple[int, ...]) -> list[Row]:
        """Those of all ranks."""
        sent = (items.sum(1) * itemsize).tolist()
        return [cls(items, itemsize, group, i, nbytes) for i, nbytes in enumerate(sent)]


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in an exchange or an all-reduce.

    Every rank of the group has a task with an equal label. In an exchange, `sent` holds what this
    rank sends to each peer. In an all-reduce it holds one entry, for peer -1: all that this rank
    sends by the algorithm's own count.
    """

    op: str  # 'exchange' or 'all_reduce'
    group: tuple[int, ...]
    sent: tuple[tuple[int, int], ...] | Row  # (peer, bytes)
    size: int = 0  # all_reduce: of the buffer [B]

    @property
    def nbytes(self) -> int:
        """All that this rank sends [B]."""
        return self.sent.nbytes if isinstance(self.sent, Row) else sum(n for _, n in self.sent)


Work = Compute | Load | Host | Send | Recv | Collective


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


def all_reduce(
    label: Label, rank: int, group: tuple[int, ...], size: int, after: tuple[Label, ...] = ()
) -> Task:
    """A task in the lane 'reduce': a rank's part in an all-reduce of `size` bytes."""
    return Task(label, rank, "reduce", ring(group.index(rank), group, size), after)


def ring(i: int, group: tuple[int, ...], size: int) -> Collective:
    """The part of the i-th rank in a ring all-reduce of `size` bytes.

    All n ranks of the group send 2 (n-1) `size` bytes in total. Source: nccl-tests, whose bus
    bandwidth has the factor 2 (n-1) / n.
    """
    sent = share(2 * (len(group) - 1) * size, len(group), i)
    return Collective("all_reduce", group, ((-1, sent),), size)
