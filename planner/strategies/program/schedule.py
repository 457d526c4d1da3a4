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
    out = Schedule(problem.ranks, steps, by_loss=program.by_loss)
    for op in program.setup():
        shares = _shares(op, op.ranks or everyone, -1, None)
        out.setup += [Task(op.label(-1), rank, "comm", work) for rank, work in shares.items()]
    known: dict[object, dict[int, Work]] = {}  # ranks' shares, of operations of a kind
    arriving: set[tuple[int, Label]] = set()  # messages that ranks receive
    for op, step, after, chunk in queue(program, steps):
        label, is_received = op.label(step, chunk), isinstance(op.work, Receipt)
        key = op.kind, op.ranks, chunk, is_received and step
        if key not in known:
            known[key] = _shares(op, op.ranks or everyone, step, chunk)
        lane = sampler_lane(step, program.samplers) if op.lane == "host" else op.lane
        out.tasks += [
            Task(at_rank(label, rank), rank, lane, work, _waits(after, rank, arriving))
            for rank, work in known[key].items()
        ]
        if is_received:
            arriving |= {(rank, at_rank(label, rank)) for rank in known[key]}
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


def _shares(op: Op, group: Group, step: int, chunk: int | None) -> dict[int, Work]:
    """The share of each rank of a group; nobody sends or receives an empty message."""
    match op.work:
        case Local() as work:
            count = len(group)
            here = work if chunk is None else work.among(chunk * count + np.arange(count))
            return dict(zip(group, here.each(count), strict=True))
        case Exchange() as work:
            sent = work if chunk is None else replace(work, items=work.items[chunk])
            return {rank: Collective(sent, group, i) for i, rank in enumerate(group)}
        case AllReduce() as work:
            return {
                rank: Collective(Ring(size), members, i)
                for members, size in work.by_group(group)
                for i, rank in enumerate(members)
            }
        case Message(nbytes, distance):
            sizes = zip(group, nbytes[chunk].tolist(), strict=True)
            return {rank: Send(rank + distance, size) for rank, size in sizes if size}
        case Receipt(sender) as work:
            sizes = zip(group, work.message.nbytes[chunk].tolist(), strict=True)
            named, others = sender.label(step, chunk), work.distance
            return {
                rank: Recv(rank + others, at_rank(named, rank + others))
                for rank, size in sizes
                if size
            }
