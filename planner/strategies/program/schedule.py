"""Every rank's tasks, made from the operations of a program's steps.

    lane      operations                       waits for
    host      sampling                         the last update; if `ahead`, an earlier one
    copy      load                             the last update, and what the rank has waited for
    compute   forward, backward, update ..     transfers since the last computation
    comm      exchanges                        the last computation, and transfers since then
    reduce    all-reduces                      the last computation, and transfers since then

Tasks of one rank and lane run in the order written. With `late` 1 a computation waits for the
exchange of the step before instead of this step's (PipeGCN).
"""

from __future__ import annotations

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Group, Op, Program
from gnnplan.planner.vocabulary.schedule import (
    Collective,
    Host,
    Label,
    Load,
    Schedule,
    Task,
    Work,
    ring,
)


def build_schedule(problem: Problem, program: Program, steps: int) -> Schedule:
    """Every rank's tasks of the first so many steps of a program.

    A computation waits for exchanges `late` steps old. Operations that are `ahead` start when the
    step `prefetch` steps before the last has ended.
    """
    everyone = tuple(range(problem.ranks))
    out = Schedule(problem.ranks, steps)
    for op in program.setup:
        out.setup += [
            Task(op.label(-1), rank, "comm", part(op, rank, everyone)) for rank in everyone
        ]
    # ranks' shares, by identity of the operation: layers and steps that are alike share theirs.
    # The operation is kept so that its arrays, whose ids are in the key, stay alive.
    shares: dict[object, tuple[Op, Work]] = {}
    for t in range(steps):
        ops = [(op, op.identity) for op in program.at(t)]
        for rank in everyone:
            tasks = _RankStep(rank, t, program.late, program.prefetch)
            for op, identity in ops:
                if (identity, rank) not in shares:
                    shares[identity, rank] = op, part(op, rank, everyone)
                out.tasks.append(tasks.task(op, shares[identity, rank][1]))
    return out


class _RankStep:
    """One rank's tasks of one step, operation by operation."""

    def __init__(self, rank: int, step: int, late: int, prefetch: int) -> None:
        self.rank, self.step, self.late, self.prefetch = rank, step, late, prefetch
        self.computed: Label | None = None  # the last computation
        self.awaited: tuple[Label, ...] = ()  # what the next computation waits for
        self.sampling = False  # whether sampling has begun

    def task(self, op: Op, work: Work) -> Task:
        label = op.label(self.step)
        if op.idle:  # begins before what it waits for has ended
            self.awaited += (label,)
            return Task(label, self.rank, "compute", work)
        if op.work is not None:
            task = Task(label, self.rank, "compute", work, self.awaited)
            self.computed, self.awaited = label, ()
            return task
        if op.ahead or op.host is not None:
            lead = self.prefetch if op.ahead else 0
            start = () if self.sampling else (Label("update", self.step - 1 - lead),)
            self.sampling, self.awaited = True, (label,)
            return Task(label, self.rank, "host", work, start)
        if op.loaded is not None:
            after = (Label("update", self.step - 1), *self.awaited)
            self.awaited = (label,)
            return Task(label, self.rank, "copy", work, after)
        lane, lag = ("comm", self.late) if op.sent is not None else ("reduce", 0)
        task = Task(
            label, self.rank, lane, work, ((self.computed,) if self.computed else ()) + self.awaited
        )
        self.awaited += (label._replace(step=self.step - lag),)
        return task


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
