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
from itertools import groupby, product

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
            yield from _waiting(program, step, _chunk_by_chunk(ops, chunks))


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
        for chunk, op in product(chunks if way > 0 else reversed(chunks), alike):
            if not isinstance(op.work, Exchange) or op.work.items[chunk].any():
                yield op, chunk  # nobody meets for a chunk of which nobody sends anything


def _waiting(program: Program, step: int, ops: Iterable[tuple[Op, int | None]]) -> Iterator[Queued]:
    """The operations of a step, with what each waits for."""
    computed: tuple[Label, ...] = ()  # the last computation
    awaited: tuple[Label, ...] = ()  # what the next computation waits for
    beside: tuple[Label, ...] = ()  # what the update waits for besides
    hosted = False  # whether the host has begun with the step
    for op, chunk in ops:
        label, updated, after = op.label(step, chunk), Label("update", step - 1), computed + awaited
        if op.idle or isinstance(op.work, Receipt):  # it is the wait, and begins at once
            awaited, after = (*awaited, label), ()
        elif op.lane == "compute":
            after, computed, awaited = awaited, (label,), ()
            if op.op == "update":
                after, beside = after + beside, ()
        elif op.lane == "host":
            lead = program.lead if op.ahead else 0
            after = () if hosted else (updated._replace(step=updated.step - lead),)
            hosted, awaited = True, (label,)
        elif op.lane == "copy":
            begun = (updated._replace(step=step - 2),) if op.ahead else computed
            after, awaited = (begun or (updated,)) + awaited, (label,)
        elif op.beside:
            beside += (label,)
        elif op.lane != "send":  # nobody here waits for that
            awaited += (label._replace(step=step - program.late * (op.lane == "comm")),)
        yield Queued(op, step, after, chunk)
