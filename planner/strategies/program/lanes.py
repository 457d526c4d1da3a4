"""Seconds of an epoch whose steps overlap, without contention: the longest path over lanes.

    compute  |F 4|F 3|B 3|B 2|update 1|       Every rank has each lane of order.py. A lane does one
    comm         |pull 4 . |                  operation after the other. An operation begins when
    reduce   |all_reduce 1 . |                its lane is free and what it waits for has ended.

Computation, sampling and loads begin on each rank by itself. A transfer begins when the last of its
ranks is ready, and ends on all of them at once. Ranks that share CPU cores are taken to compute all
the time, each as slowly as all together are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from gnnplan.planner.cluster.cost import Cost, slowest
from gnnplan.planner.strategies.program.price import Price
from gnnplan.planner.strategies.program.program import Kind, Order, Program
from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.schedule import Label


def epoch_s(cost: Cost, program: Program, order: Order, priced: Mapping[Kind, Price]) -> Number:
    """Seconds of the known steps, played over and over: from the last loss of a round to that of
    the next. If an epoch has more steps than are known, its end is left out."""
    known, slowdown = list(program.known()), cost.cores.full_load_slowdown
    takes = {
        kind: (price.seconds * (1.0 if price.is_transfer else slowdown), price.is_transfer)
        for kind, price in priced.items()
    }
    rounds = 1 + -(-program.in_flight // len(known))  # the last one begins with all under way
    steps, epoch = rounds * len(known), len(known)
    if epoch < program.steps:  # no step that counts ends an epoch or the run
        steps, epoch = steps + program.in_flight, program.steps + steps + program.in_flight
    free: dict[str, Number] = {}  # lane -> when [.., ranks]
    ended: dict[Label, Number] = {}  # -> when [.., ranks]
    losses: dict[int, Number] = {}  # step -> when its last loss has ended [.., ranks]
    at = partial(program.again, known)
    for op, step, after, _ in order(at, epoch, steps):
        (seconds, is_transfer), lane = takes[op.kind], op.lane
        ready = largest((ended[label] for label in after), free.get(lane, 0.0))
        end = (slowest(ready) if is_transfer else ready) + seconds
        free[lane] = ended[op.label(step)] = end
        if op.op == "loss":
            losses[step] = end
    last, before = (slowest(losses[count * len(known) - 1]) for count in (rounds, rounds - 1))
    return np.asarray(last) - before
