"""Every rank's tasks: its share of each operation of a program, in the program's order."""

from __future__ import annotations

from collections.abc import Set

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.order import queue
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Copy,
    Exchange,
    Group,
    Message,
    Op,
    Program,
    Receipt,
    Sampling,
)
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Compute,
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
from gnnplan.planner.vocabulary.trace import sampler_lane


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
            shares[key] = [_share(op, i, group, chunk) for i in range(len(group))]
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


def _share(op: Op, i: int, group: Group, chunk: int | None) -> Work:
    """The share of the i-th rank of a group."""
    match op.work:
        case Compute() as work:
            return work.at(i if chunk is None else chunk * len(group) + i)
        case Copy(nbytes, packed):
            return Load(int(nbytes[i]), 0 if packed is None else int(packed[i]))
        case Sampling(what, edges, layers, samplers):
            return Host(what, int(edges[i]), layers, samplers)
        case Exchange(items, itemsize):
            sent = ((items if chunk is None else items[chunk])[i] * itemsize).tolist()
            peers = tuple(
                (peer, nbytes) for peer, nbytes in zip(group, sent, strict=True) if nbytes
            )
            return Collective("exchange", group, peers)
        case AllReduce() as work:
            rank, everyone = group[i], op.ranks or group
            members, size = next(each for each in work.by_group(everyone) if rank in each[0])
            return ring(rank, members, size)
        case Message() | Receipt():
            raise AssertionError("messages have tasks of their own")
