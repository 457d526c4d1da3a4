"""A program: the operations that all ranks do together, step after step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from gnnplan.planner.cluster.placement import Phase
from gnnplan.planner.vocabulary.schedule import Compute, HostWork, Label

Group = tuple[int, ...]  # ranks
PLACED_BY = 4  # steps whose exchanges decide where ranks sit; later ones are like these


@dataclass(frozen=True)
class Op:
    """One operation that all ranks do together. Exactly one of the following is set:

    work            computation; its fields are arrays [ranks]
    loaded          bytes [ranks] from the server's memory to the device
    host            a sampler's work, and edges [ranks]
    sent            an exchange: bytes [ranks, ranks], from row to column
    size            an all-reduce of that many bytes over all ranks
    groups, sizes   an all-reduce in each group, of that group's size

    Three names of operations mean something to readers: 'halo' is an exchange of rows between their
    owners, 'update' ends a step, and bytes and seconds are reported by `op` and `way`. An operation
    that is `ahead` may be done `prefetch` steps before its own begins. An `idle` operation has no
    work: it records how long a rank waits. `phase` is the part of its step that it belongs to, for
    a pipeline that has phases of several steps under way.
    """

    op: str
    way: str = ""
    layer: int | None = None
    work: Compute | None = None
    loaded: np.ndarray | None = None
    host: tuple[HostWork, np.ndarray] | None = None
    sent: np.ndarray | None = None
    size: int = 0
    groups: tuple[Group, ...] = ()
    sizes: tuple[int, ...] = ()
    ahead: bool = False
    idle: bool = False
    phase: str = ""

    @property
    def lane(self) -> str:
        if self.work is not None:
            return "compute"
        if self.ahead or self.host is not None:
            return "host"
        if self.loaded is not None:
            return "copy"
        return "comm" if self.sent is not None else "reduce"

    def label(self, step: int) -> Label:
        return Label(self.op, step, self.way, self.layer)

    @property
    def identity(self) -> object:
        """Equal for operations that share their work: such operations take equally long."""
        shared = (self.work, self.loaded, self.host, self.sent)
        return self.op, self.size, self.groups, self.sizes, *map(id, shared)

    def reductions(self, ranks: int) -> list[tuple[Group, int]]:
        """The groups of an all-reduce, each with its bytes."""
        if self.groups:
            return list(zip(self.groups, self.sizes, strict=True))
        return [(tuple(range(ranks)), self.size)]


Step = Sequence[Op]  # in order; exchanges stand where a synchronous rank waits for them


class Queued(NamedTuple):
    """An operation at its place in every rank's queue."""

    op: Op
    step: int  # that it belongs to
    after: tuple[Label, ...]  # it begins when these have ended on the same rank


class Order(Protocol):
    """How the operations of several steps follow one another."""

    def __call__(self, at: Callable[[int], Step], epoch: int, steps: int) -> Iterator[Queued]:
        """The queue of the first so many steps, `epoch` of them per epoch; `at(t)`: step t."""


@dataclass(frozen=True)
class Program:
    """The steps of training.

    An epoch has `steps` of them; the first ones are `known`, and the others are taken to be like
    these. `at(t)` is step t of training, counted over all epochs: the same objects where steps are
    alike, for an operation is priced once however often it occurs.
    """

    known: Sequence[Step]
    steps: int
    at: Callable[[int], Step]
    setup: Step = ()  # exchanges before step 0, not counted in an epoch
    late: int = 0  # steps by which computation uses exchanges late (PipeGCN: 1)
    prefetch: int = 0  # steps by which what is `ahead` may be ahead
    order: Order | None = None  # None: step after step (order.py)
    in_flight: int = 1  # steps that are under way at once, if they have an order of their own

    @property
    def setup_bytes(self) -> int:
        """Bytes that all ranks send before step 0."""
        return sum(int(op.sent.sum()) for op in self.setup if op.sent is not None)


def traffic(program: Program) -> list[Phase]:
    """Rows that owners send each other in a step; equal exchanges are counted.

    What ranks send because of where they sit (rows from another server's memory) is not counted:
    it would be other traffic elsewhere.
    """
    exchanges = [
        op.sent
        for step in program.known[:PLACED_BY]
        for op in step
        if op.op == "halo" and op.sent is not None
    ]
    times = Counter(map(id, exchanges))
    return [Phase(sent, times[key]) for key, sent in {id(sent): sent for sent in exchanges}.items()]
