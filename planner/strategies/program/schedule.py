"""Schedules: every rank's tasks, its shares of the operations of a program, in order."""

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
    Receive,
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
