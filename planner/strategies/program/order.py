"""The order in which every rank does a program's operations, and what each of them waits for.

    lane      operations                       waits for, if steps follow one another
    host      sampling, what is ahead          the last update; if `ahead`, an earlier one
    copy      load                             the last update, and what the rank has waited for
    compute   forward, backward, update ..     transfers since the last computation
    comm      exchanges                        the last computation, and transfers since then
    reduce    all-reduces                      the last computation, and transfers since then

Operations of one rank and lane follow in the order given. With `late` 1 a computation waits for the
exchange of the step before instead of this step's (PipeGCN). A pipeline has an order of its own
(`Program.order`).
"""

from __future__ import annotations

from collections.abc import Iterator

from gnnplan.planner.strategies.program.program import Op, Program, Queued
from gnnplan.planner.vocabulary.schedule import Label


def queue(program: Program, steps: int) -> Iterator[Queued]:
    """The operations of the first so many steps, in every rank's order."""
    if program.order is not None:
        return program.order(program.at, program.steps, steps)
    return _step_after_step(program, steps)


def _step_after_step(program: Program, steps: int) -> Iterator[Queued]:
    for step in range(steps):
        waits = _StepWaits(step, program.late, program.prefetch)
        for op in program.at(step):
            yield Queued(op, step, waits.of(op))


class _StepWaits:
    """What the operations of a step wait for, one after the other."""

    def __init__(self, step: int, late: int, prefetch: int) -> None:
        self.step, self.late, self.prefetch = step, late, prefetch
        self.computed: tuple[Label, ...] = ()  # the last computation
        self.awaited: tuple[Label, ...] = ()  # what the next computation waits for
        self.sampling = False  # whether sampling has begun

    def of(self, op: Op) -> tuple[Label, ...]:
        label, updated = op.label(self.step), Label("update", self.step - 1)
        if op.idle:  # begins before what it waits for has ended
            self.awaited += (label,)
            return ()
        if op.lane == "compute":
            after, self.computed, self.awaited = self.awaited, (label,), ()
        elif op.lane == "host":
            lead = self.prefetch if op.ahead else 0
            after = () if self.sampling else (updated._replace(step=updated.step - lead),)
            self.sampling, self.awaited = True, (label,)
        elif op.lane == "copy":
            after, self.awaited = (updated, *self.awaited), (label,)
        else:
            after = self.computed + self.awaited
            lag = self.late if op.lane == "comm" else 0
            self.awaited += (label._replace(step=label.step - lag),)
        return after
