"""The order in which every rank does a program's operations, and the dependencies of each.

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

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, product

from gnnplan.planner.strategies.program.program import (
    Exchange,
    Group,
    Op,
    Program,
    QueuedOp,
    Receive,
    Step,
)
from gnnplan.planner.vocabulary.schedule import Label


def queue(program: Program, steps: int) -> Iterator[QueuedOp]:
    """Yield the operations of the first `steps` steps, in the order of every rank."""
    if program.order is not None:
        return program.order(program.step, program.steps, steps)
    return _step_after_step(program, steps)


def _step_after_step(program: Program, steps: int) -> Iterator[QueuedOp]:
    for step in range(steps):
        chunks = program.chunks(step)
        for ops in by_group(program.step(step)).values():
            yield from _waiting(program, step, _chunk_by_chunk(ops, chunks))


def by_group(step: Step) -> dict[Group, list[Op]]:
    """Return the operations of each group of ranks, in order."""
    groups: dict[Group, list[Op]] = {}
    for op in step:
        groups.setdefault(op.ranks, []).append(op)
    return groups


def _chunk_by_chunk(ops: Iterable[Op], chunks: Sequence[int]) -> Iterator[tuple[Op, int | None]]:
    for sign, group in groupby(ops, lambda op: op.chunks):
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
