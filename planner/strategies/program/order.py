"""The order in which every rank does a program's operations, and what each of them waits for.

    lane      operations                       waits for, if steps follow one another
    host      sampling                         the last update; if `ahead`, an earlier one
    copy      load, store, and what a GPU      the last computation or update, and awaited
              samples ahead                    transfers; if `ahead`, sampling, and the update
                                               before the last
    compute   forward, backward, update ..     all of its step since the last computation
    comm      exchanges                        the last computation, and transfers since then
    reduce    all-reduces                      the last computation, and transfers since then
    send      messages                         the last computation, and transfers since then
    receive   messages                         nothing

Operations of one rank and lane follow in the order given. Only the update waits for all-reduces
that are `beside` the backward pass. With `late` 1 a computation waits for the exchange of the step
before instead of this step's (PipeGCN). Where several steps are under way at once, a program has an
order of its own (`Program.order`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from gnnplan.planner.strategies.program.program import (
    Exchange,
    Group,
    Op,
    Program,
    Queued,
    Receipt,
    Step,
)
from gnnplan.planner.vocabulary.schedule import Label


def queue(program: Program, steps: int) -> Iterator[Queued]:
    """The operations of the first so many steps, in every rank's order."""
    if program.order is not None:
        return program.order(program.step, program.steps, steps)
    return _step_after_step(program, steps)


def _step_after_step(program: Program, steps: int) -> Iterator[Queued]:
    for step in range(steps):
        chunks = program.chunks(step)
        for ops in by_ranks(program.step(step)).values():
            waits = _StepWaits(step, program.late, program.lead)
            for op, chunk in _chunk_by_chunk(ops, chunks):
                yield Queued(op, step, waits.of(op, chunk), chunk)


def by_ranks(step: Step) -> dict[Group, list[Op]]:
    """The operations of each group of ranks, in order."""
    groups: dict[Group, list[Op]] = {}
    for op in step:
        groups.setdefault(op.ranks, []).append(op)
    return groups


def _chunk_by_chunk(ops: Iterable[Op], chunks: Sequence[int]) -> Iterator[tuple[Op, int | None]]:
    for way, run in groupby(ops, lambda op: op.chunks):
        alike = list(run)
        if not way:
            yield from ((op, None) for op in alike)
            continue
        for chunk in chunks if way > 0 else reversed(chunks):
            yield from ((op, chunk) for op in alike if not _empty(op, chunk))


def _empty(op: Op, chunk: int) -> bool:
    """Whether nobody sends anything of the chunk."""
    return isinstance(op.work, Exchange) and not op.work.items[chunk].any()


class _StepWaits:
    """What the operations of a step wait for, one after the other."""

    def __init__(self, step: int, late: int, lead: int) -> None:
        self.step, self.late, self.lead = step, late, lead
        self.computed: tuple[Label, ...] = ()  # the last computation
        self.awaited: tuple[Label, ...] = ()  # what the next computation waits for
        self.beside: tuple[Label, ...] = ()  # what the update waits for besides
        self.hosted = False  # whether the host has begun with the step

    def of(self, op: Op, chunk: int | None) -> tuple[Label, ...]:
        label, updated = op.label(self.step, chunk), Label("update", self.step - 1)
        if op.idle or isinstance(op.work, Receipt):  # it is the wait, and begins at once
            self.awaited += (label,)
            return ()
        if op.lane == "compute":
            after, self.computed, self.awaited = self.awaited, (label,), ()
            if op.op == "update":
                after, self.beside = after + self.beside, ()
        elif op.lane == "host":
            lead = self.lead if op.ahead else 0
            after = () if self.hosted else (updated._replace(step=updated.step - lead),)
            self.hosted, self.awaited = True, (label,)
        elif op.lane == "copy":
            begun = (updated._replace(step=self.step - 2),) if op.ahead else self.computed
            after, self.awaited = (begun or (updated,)) + self.awaited, (label,)
        else:
            after = self.computed + self.awaited
            lag = self.late if op.lane == "comm" else 0
            if op.beside:
                self.beside += (label,)
            elif op.lane != "send":  # nobody here waits for that
                self.awaited += (label._replace(step=label.step - lag),)
        return after
