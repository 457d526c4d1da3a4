"""Bytes that ranks hold at their fullest moment, from what a program's operations hold.

What stays the same during a step (weights, edges, caches) is no operation's: `Strategy.memory` adds
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import takewhile

import numpy as np

from gnnplan.planner.gnn.products import distinct
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.held import USES, Held
from gnnplan.planner.strategies.program.program import Group, Op, Program


def fullest(problem: Problem, program: Program) -> dict[str, np.ndarray]:
    """Bytes by use at each rank's fullest moment [ranks], with machine code of the products."""
    held: dict[Group, Held] = {}
    for op in _operations(program):
        if op.holds is not None:
            if op.ranks not in held:
                held[op.ranks] = Held(len(op.ranks) or problem.ranks)
            op.holds(held[op.ranks])
    use = {name: np.zeros(problem.ranks) for name in USES}
    for group, each in held.items():
        ranks = group or tuple(range(problem.ranks))
        for name, most in zip(USES, each.most, strict=True):
            use[name][list(ranks)] = most
        itemsize = problem.model.itemsize
        if code := problem.cluster.device.code_of(itemsize):
            varies = problem.workload.mode == "mini"
            use["buffers"][list(ranks)] += code * distinct(
                each.products, len(ranks), itemsize, varies
            )
    return use


def _operations(program: Program) -> Iterator[Op]:
    """The operations of all known steps, in order.

    Steps that are alike hold alike, and every operation stands for all of its chunks. Where steps
    overlap, they go on until all that is under way together has been; of steps that are all alike a
    few are enough, for these and those of an epoch's end to have been under way.
    """
    known = list(program.known())
    different = dict.fromkeys(known)
    if program.order is None:
        for name in different:
            yield from program.ops(name)
        return
    if len(different) == 1:
        known = known[: 2 * program.in_flight + 1]
    last = len(known) + program.in_flight - 1
    queued = program.order(partial(program.again, known), len(known), last + 2)
    yield from (each.op for each in takewhile(lambda each: each.step < last, queued))
