"""Every rank's tasks: its share of each operation of a program, in the program's order."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.order import queue
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Group,
    Message,
    Op,
    Program,
    Receipt,
)
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Exchange,
    Label,
    Local,
    Recv,
    Ring,
    Schedule,
    Send,
    Task,
    Work,
)
from gnnplan.planner.vocabulary.trace import sampler_lane


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Every rank's tasks of the first so many steps of a program."""
    everyone = tuple(range(problem.ranks))
    out = Schedule(problem.ranks, steps)
    for op in program.setup():
        group = op.ranks or everyone
        out.setup += [
            Task(op.label(-1), rank, "comm", work)
            for rank, work in zip(group, _shares(op, group, None), strict=True)
        ]
    shares: dict[object, list[Work]] = {}  # ranks', of operations of a kind
    arriving: set[tuple[int, Label]] = set()  # messages that ranks receive
    for op, step, after, chunk in queue(program, steps):
        group, label = op.ranks or everyone, op.label(step, chunk)
        if isinstance(op.work, (Message, Receipt)):
            messages = _messages(op.ranks, op.work, step, chunk)
            out.tasks += [
                Task(at_rank(label, rank), rank, op.lane, work, _waits(after, rank, arriving))
                for rank, work in messages.items()
            ]
            if isinstance(op.work, Receipt):
                arriving |= {(rank, at_rank(label, rank)) for rank in messages}
            continue
        key = op.kind, op.ranks, chunk
        if key not in shares:
            shares[key] = _shares(op, group, chunk)
        lane = sampler_lane(step, program.samplers) if op.lane == "host" else op.lane
        out.tasks += [
            Task(label, rank, lane, work, _waits(after, rank, arriving))
            for rank, work in zip(group, shares[key], strict=True)
        ]
    return out


def at_rank(label: Label, rank: int) -> Label:
    """The label with the rank at the other end of its message."""
    op, step, way, layer, chunk, distance = label  # label._replace takes three times as long
    return label if distance is None else Label(op, step, way, layer, chunk, rank + distance)


def _waits(
    after: tuple[Label, ...], rank: int, arriving: Set[tuple[int, Label]]
) -> tuple[Label, ...]:
    """What a rank waits for: not for messages that nobody sends it."""
    if all(label.peer is None for label in after):
        return after
    seen = [at_rank(label, rank) for label in after]
    return tuple(label for label in seen if label.peer is None or (rank, label) in arriving)


def _messages(
    ranks: Group, work: Message | Receipt, step: int, chunk: int | None
) -> dict[int, Work]:
    """What ranks send, or what they receive, if it has any bytes."""
    message = work if isinstance(work, Message) else work.message
    nbytes = (message.nbytes if chunk is None else message.nbytes[chunk]).tolist()
    out: dict[int, Work] = {}
    for rank, count in zip(ranks, nbytes, strict=True):
        other = rank + work.distance
        if count and isinstance(work, Message):
            out[rank] = Send(other, count)
        elif count and isinstance(work, Receipt):
            out[rank] = Recv(other, at_rank(work.sender.label(step, chunk), other))
    return out


def _shares(op: Op, group: Group, chunk: int | None) -> list[Work]:
    """The share of each rank of a group."""
    count = len(group)
    match op.work:
        case Local() as work:
            here = work if chunk is None else work.among(chunk * count + np.arange(count))
            return list(here.each(count))
        case Exchange() as work:
            sent = work if chunk is None else replace(work, items=work.items[chunk])
            return [Collective(sent, group, i) for i in range(count)]
        case AllReduce() as work:
            of_rank = {
                rank: Collective(Ring(size), members, i)
                for members, size in work.by_group(group)
                for i, rank in enumerate(members)
            }
            return [of_rank[rank] for rank in group]
        case Message() | Receipt():
            raise AssertionError("messages have tasks of their own")
