"""Every rank's tasks, made from the operations of its steps (step.py).

    lane      operations                       waits for
    host      sampling (`ahead`)               the update `prefetch` steps before the last
    copy      load                             the last update, and what the rank has waited for
    compute   forward, backward, update ..     transfers since the last computation
    comm      exchanges                        the last computation, and transfers since then
    reduce    all-reduces                      the last computation, and transfers since then

Tasks of one rank and lane run in the order written. With `late` 1 a computation waits for the
exchange of the step before instead of this step's (PipeGCN).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import (
    Batches,
    ExchangeOptions,
    Group,
    Op,
    setup,
    step,
)
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


def schedule_layers(
    problem: Problem,
    layout: Layout | EstimatedLayout,
    options: ExchangeOptions,
    steps: int,
    batches: Batches = (),
    batch_at: Callable[[int], int] = lambda step: 0,
) -> Schedule:
    """The schedule of so many steps over a layout, or over its batches: step t takes batch
    `batch_at(t)`."""
    ops = [list(step(problem, batch, options, bool(batches))) for batch in batches or (layout,)]
    return build_schedule(
        problem, lambda t: ops[batch_at(t)], steps, setup(problem, layout), options.staleness
    )


def build_schedule(
    problem: Problem,
    ops_of: Callable[[int], Sequence[Op]],
    steps: int,
    setup_ops: Iterable[Op] = (),
    late: int = 0,
    prefetch: int = 0,
) -> Schedule:
    """Every rank's tasks of the operations `ops_of(t)` of each step t.

    A computation waits for exchanges `late` steps old. Operations that are `ahead` start when the
    step `prefetch` steps before the last has ended.
    """
    everyone = tuple(range(problem.ranks))
    out = Schedule(problem.ranks, steps)
    for op in setup_ops:
        out.setup += [
            Task(op.label(-1), rank, "comm", part(op, rank, everyone)) for rank in everyone
        ]
    # ranks' shares, by identity of the operation: layers and steps that are alike share theirs.
    # The operation is kept so that its arrays, whose ids are in the key, stay alive.
    shares: dict[object, tuple[Op, Work]] = {}
    for t in range(steps):
        ops = [(op, op.identity) for op in ops_of(t)]
        for rank in everyone:
            tasks = _RankStep(rank, t, late, prefetch)
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
        if op.ahead:
            start = () if self.sampling else (Label("update", self.step - 1 - self.prefetch),)
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
