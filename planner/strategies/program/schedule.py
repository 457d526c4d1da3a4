"""Schedules: every rank's tasks, its shares of the operations of a program, in order.

Every rank does the operations in one order, and each waits for others:

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

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from itertools import groupby, product

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Group,
    Message,
    Op,
    Program,
    QueuedOp,
    Receive,
    Step,
)
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Exchange,
    Label,
    LocalWork,
    Recv,
    Ring,
    Schedule,
    Send,
    Task,
    Work,
)
from gnnplan.planner.vocabulary.trace import sampler_lane

# -- the queue of every rank -----------------------------------------------------------------------


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


# -- tasks -----------------------------------------------------------------------------------------


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Return every rank's tasks of the first `steps` steps of a program."""
    everyone = tuple(range(problem.ranks))
    schedule = Schedule(problem.ranks, steps, by_loss=program.by_loss)
    for op in program.setup():
        shares = _shares(op, op.ranks or everyone, -1, None)
        schedule.setup += [Task(op.label(-1), rank, "comm", work) for rank, work in shares.items()]
    shares_by_kind: dict[object, dict[int, Work]] = {}  # kind of operation -> rank -> share
    arriving: set[tuple[int, Label]] = set()  # receiving rank, label of the receipt
    for op, step, after, chunk in queue(program, steps):
        label, is_received = op.label(step, chunk), isinstance(op.work, Receive)
        key = op.kind, op.ranks, chunk, is_received and step
        if key not in shares_by_kind:
            shares_by_kind[key] = _shares(op, op.ranks or everyone, step, chunk)
        lane = sampler_lane(step, program.samplers) if op.lane == "host" else op.lane
        schedule.tasks += [
            Task(at_rank(label, rank), rank, lane, work, _waits(after, rank, arriving))
            for rank, work in shares_by_kind[key].items()
        ]
        if is_received:
            arriving |= {(rank, at_rank(label, rank)) for rank in shares_by_kind[key]}
    return schedule


def at_rank(label: Label, rank: int) -> Label:
    """Return the label with its `peer`, a distance, replaced by the rank at that distance."""
    op, step, direction, layer, chunk, distance = label  # label._replace takes three times as long
    return label if distance is None else Label(op, step, direction, layer, chunk, rank + distance)


def _waits(
    after: tuple[Label, ...], rank: int, arriving: Set[tuple[int, Label]]
) -> tuple[Label, ...]:
    """Return the labels that a rank waits for, without receipts of messages that nobody sends."""
    if all(label.peer is None for label in after):
        return after
    labels = [at_rank(label, rank) for label in after]
    return tuple(label for label in labels if label.peer is None or (rank, label) in arriving)


def _shares(op: Op, group: Group, step: int, chunk: int | None) -> dict[int, Work]:
    """Return the share of each rank of a group; an empty message has no sender or receiver."""
    match op.work:
        case LocalWork() as work:
            count = len(group)
            in_chunk = work if chunk is None else work.of_ranks(chunk * count + np.arange(count))
            return dict(zip(group, in_chunk.each(count), strict=True))
        case Exchange() as work:
            exchange = work if chunk is None else replace(work, items=work.items[chunk])
            return {rank: Collective(exchange, group, i) for i, rank in enumerate(group)}
        case AllReduce() as work:
            return {
                rank: Collective(Ring(size), members, i)
                for members, size in work.by_group(group)
                for i, rank in enumerate(members)
            }
        case Message(nbytes, distance):
            sizes = zip(group, nbytes[chunk].tolist(), strict=True)
            return {rank: Send(rank + distance, size) for rank, size in sizes if size}
        case Receive(sender) as work:
            sizes = zip(group, work.message.nbytes[chunk].tolist(), strict=True)
            sent, distance = sender.label(step, chunk), work.distance
            return {
                rank: Recv(rank + distance, at_rank(sent, rank + distance))
                for rank, size in sizes
                if size
            }
