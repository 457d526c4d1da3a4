"""Every rank's tasks: its share of each operation of a program, in the program's order."""

from __future__ import annotations

from collections.abc import Set

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.order import queue
from gnnplan.planner.strategies.program.program import Group, Op, Program
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Host,
    Label,
    Load,
    Recv,
    Schedule,
    Send,
    Task,
    Work,
    ring,
)


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Every rank's tasks of the first so many steps of a program."""
    everyone = tuple(range(problem.ranks))
    out = Schedule(problem.ranks, steps)
    for op in program.setup():
        group = op.ranks or everyone
        out.setup += [
            Task(op.label(-1), rank, "comm", _share(op, i, group, None))
            for i, rank in enumerate(group)
        ]
    # ranks' shares, by identity of the operation: layers and steps that are alike share theirs.
    # The operation is kept so that its arrays, whose ids are in the key, stay alive.
    shares: dict[object, tuple[Op, list[Work]]] = {}
    arriving: set[tuple[int, Label]] = set()  # messages that ranks receive
    for op, step, after, chunk in queue(program, steps):
        group, label = op.ranks or everyone, op.label(step, chunk)
        if op.distance:
            messages = _messages(op, step, chunk)
            out.tasks += [
                Task(at_rank(label, rank), rank, op.lane, work, _waits(after, rank, arriving))
                for rank, work in messages.items()
            ]
            if op.received is not None:
                arriving |= {(rank, at_rank(label, rank)) for rank in messages}
            continue
        key = op.identity, op.ranks, chunk
        if key not in shares:
            shares[key] = op, [_share(op, i, group, chunk) for i in range(len(group))]
        out.tasks += [
            Task(label, rank, op.lane, work, _waits(after, rank, arriving))
            for rank, work in zip(group, shares[key][1], strict=True)
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


def _messages(op: Op, step: int, chunk: int | None) -> dict[int, Work]:
    """What ranks send, or what they receive, if it has any bytes."""
    sender = op if op.received is None else op.received
    assert sender.handed is not None
    nbytes = (sender.handed if chunk is None else sender.handed[chunk]).tolist()
    out: dict[int, Work] = {}
    for rank, count in zip(op.ranks, nbytes, strict=True):
        other = rank + op.distance
        if count and op.received is None:
            out[rank] = Send(other, count)
        elif count:
            out[rank] = Recv(other, at_rank(sender.label(step, chunk), other))
    return out


def _share(op: Op, i: int, group: Group, chunk: int | None) -> Work:
    """The share of the i-th rank of a group."""
    if op.work is not None:
        return op.work.at(i if chunk is None else chunk * len(group) + i)
    if op.loaded is not None:
        return Load(int(op.loaded[i]))
    if op.host is not None:
        what, edges, layers = op.host
        return Host(what, int(edges[i]), layers)
    if op.sent is not None:
        items = (op.sent if chunk is None else op.sent[chunk])[i]
        sent = (items * op.itemsize).tolist()
        peers = tuple((peer, nbytes) for peer, nbytes in zip(group, sent, strict=True) if nbytes)
        return Collective("exchange", group, peers)
    rank = group[i]
    members, size = next(each for each in op.reductions(group) if rank in each[0])
    return ring(rank, members, size)
