"""The score: who does what, after what, with how many bytes and flops. Work and order, no time.

The simulator plays it in virtual time; the executor does the same operations for real and records spans under
the same labels. Tasks of one (rank, lane) run in the order written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from gnnplan.planner.specs import HostWork

# Reads and writes that a number on which many instructions are spent is worth where nothing but memory limits a device; and an edge's
# weight: logit, maximum, exponential, sum, weight
WORKED, WEIGHED = 6, 10
LANES = ("host", "copy", "compute", "comm", "send", "receive", "reduce")


class Label(NamedTuple):
    """Names one operation of one rank; prints as 'halo:f:l2:s5' (op, way, layer, chunk, peer, step)."""

    op: str  # forward, backward, halo, pipeline, all_reduce, loss, step, ...; bytes are reported by op
    step: int
    way: str = ""  # 'f' with the forward pass, 'b' with the backward pass
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
        """The label without its place in time: what validation averages over, as 'halo:f:l2'."""
        return str(self).rsplit(":", 1)[0]


class Gather(NamedTuple):
    """Aggregation: `rows` are read, `width` numbers each, of `among` distinct ones, and added up in `into` others."""

    rows: Any
    width: int
    among: Any
    into: Any


@dataclass(frozen=True, slots=True)
class Compute:
    """Work of one rank. Fields may be numpy arrays, then all that is made of them is an array too."""

    flops: float = 0.0  # dense matrix products [flop]
    gathers: tuple[Gather, ...] = ()
    touched: float = 0.0  # element-wise: bytes read and written [B]
    launches: float = 0.0  # framework operations
    itemsize: int = 4  # [B] per number
    beside: float = 0.0  # bytes that move beside it and tax it (overlap) [B]
    streamed: float = 0.0  # that the products read and write [B], while they compute
    tensor: float = 0.0  # the largest that is touched or streamed, one of many [B]; 0: any
    worked: float = 0.0  # what many instructions are spent on: dropout's hash, exponentials [numbers]
    weighed: float = 0.0  # edges times heads whose weight attention makes of a logit, or its gradient
    picked: tuple[tuple[Any, int, Any], ...] = ()  # whole rows read or written one by one: (rows, row width [numbers], of so many)

    def __add__(self, other: Compute) -> Compute:
        return Compute(self.flops + other.flops, self.gathers + other.gathers, self.touched + other.touched, self.launches + other.launches,
                       self.itemsize, self.beside + other.beside, self.streamed + other.streamed,
                       np.maximum(self.tensor, other.tensor), self.worked + other.worked, self.weighed + other.weighed,
                       self.picked + other.picked)  # fmt: skip

    def at(self, i: int) -> Compute:
        """Entry i of its arrays."""
        def pick(value: Any) -> float:
            return float(value[i]) if getattr(value, "ndim", 0) else float(value)

        gathers = tuple(Gather(pick(rows), width, pick(among), pick(into)) for rows, width, among, into in self.gathers)
        picked = tuple((pick(rows), width, pick(among)) for rows, width, among in self.picked)
        return Compute(pick(self.flops), gathers, pick(self.touched), self.launches, self.itemsize, pick(self.beside),
                       pick(self.streamed), pick(self.tensor), pick(self.worked), pick(self.weighed), picked)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """Rows from the server's memory to the device; nothing crosses to another rank."""

    nbytes: int


@dataclass(frozen=True, slots=True)
class Host:
    """A sampler's work for one rank: neighbours to 'draw', or blocks to 'lay' out."""

    what: HostWork
    edges: int


@dataclass(frozen=True, slots=True)
class Send:
    """A message to one peer; `Recv` on the other side ends when it has arrived."""

    peer: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Recv:
    """Waits for the peer's Send whose label it names."""

    peer: int
    of: Label  # the sender's label


@dataclass(frozen=True, slots=True)
class Collective:
    """All ranks of `group` meet; each has a task with an equal label. `sent` is what this rank sends: to one peer each
    (`exchange`, peer -> bytes), or in all by the algorithm's own count (`all_reduce`, under the key -1)."""

    op: str  # 'exchange' | 'all_reduce'
    group: tuple[int, ...]
    sent: tuple[tuple[int, int], ...]  # (peer, bytes)
    size: int = 0  # all_reduce: bytes of the buffer

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.sent)


Work = Compute | Load | Host | Send | Recv | Collective


@dataclass(frozen=True, slots=True)
class Task:
    label: Label
    rank: int
    lane: str
    work: Work
    after: tuple[Label, ...] = ()  # of the same rank, this step or earlier ones (that is what staleness means)


@dataclass(slots=True)
class Schedule:
    """All ranks' tasks of `steps` steps. `setup` is done once before step 0 and is not part of an epoch."""

    ranks: int
    steps: int
    tasks: list[Task] = field(default_factory=list)
    setup: list[Task] = field(default_factory=list)

    def lane(self, rank: int, lane: str) -> Iterator[Task]:
        return (t for t in self.tasks if t.rank == rank and t.lane == lane)

    def bytes_by_op(self, tasks: Iterable[Task] | None = None) -> dict[str, int]:
        """Bytes by operation, each counted once where it is sent [B]."""
        total: dict[str, int] = {}
        for task in self.tasks if tasks is None else tasks:
            if isinstance(task.work, (Send, Collective)):
                total[task.label.op] = total.get(task.label.op, 0) + task.work.nbytes
        return total


def share(total: int, parts: int, index: int) -> int:
    """The index-th of `parts` nearly equal whole shares of `total`; they add up exactly.

    >>> [share(10, 4, i) for i in range(4)]
    [3, 3, 2, 2]
    """
    return total // parts + (index < total % parts)


def all_reduce(label: Label, rank: int, group: tuple[int, ...], size: int, after: tuple[Label, ...] = ()) -> Task:
    """A rank's part in a ring all-reduce."""
    return Task(label, rank, "reduce", ring(rank, group, size), after)


def ring(rank: int, group: tuple[int, ...], size: int) -> Collective:
    """A ring all-reduce of `size` bytes: the group sends 2 (n-1) size in all (nccl-tests' bus factor 2(n-1)/n)."""
    sent = share(2 * (len(group) - 1) * size, len(group), group.index(rank))
    return Collective("all_reduce", group, ((-1, sent),), size)
