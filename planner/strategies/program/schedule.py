"""Every rank's tasks: its share of each operation of a program, in the program's order."""

from __future__ import annotations

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.order import queue
from gnnplan.planner.strategies.program.program import Group, Op, Program
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Host,
    Load,
    Schedule,
    Task,
    Work,
    ring,
)


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Every rank's tasks of the first so many steps of a program."""
    everyone = tuple(range(problem.ranks))
    out = Schedule(problem.ranks, steps)
    for op in program.setup:
        out.setup += [
            Task(op.label(-1), rank, "comm", part(op, rank, everyone)) for rank in everyone
        ]
    # ranks' shares, by identity of the operation: layers and steps that are alike share theirs.
    # The operation is kept so that its arrays, whose ids are in the key, stay alive.
    shares: dict[object, tuple[Op, list[Work]]] = {}
    for op, step, after in queue(program, steps):
        label = op.label(step)
        if op.identity not in shares:
            shares[op.identity] = op, [part(op, rank, everyone) for rank in everyone]
        out.tasks += [
            Task(label, rank, op.lane, work, after)
            for rank, work in enumerate(shares[op.identity][1])
        ]
    return out


def part(op: Op, rank: int, everyone: Group) -> Work:
    """One rank's share of an operation."""
    if op.work is not None:
        return op.work.at(rank)
    if op.loaded is not None:
        return Load(int(op.loaded[rank]))
    if op.host is not None:
        return Host(op.host[0], int(op.host[1][rank]))
    if op.sent is not None:
        return Collective(
            "exchange",
            everyone,
            tuple((peer, nbytes) for peer, nbytes in enumerate(op.sent[rank].tolist()) if nbytes),
        )
    for group, size in zip(op.groups, op.sizes, strict=True):
        if rank in group:
            return ring(rank, group, size)
    return ring(rank, everyone, op.size)
