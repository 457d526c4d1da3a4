"""What an operation takes: seconds and bytes. planner/cluster/cost.py prices work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.arithmetic import largest
from gnnplan.planner.strategies.program.program import Op
from gnnplan.planner.vocabulary.numbers import Number

Identity = object  # of an operation (Op.identity)


class Price(NamedTuple):
    """What an operation takes. Work: seconds of each rank [.., ranks]. A transfer: of all of it."""

    seconds: Number
    transfer: Transfer = Transfer(0.0, {})
    by_link: Mapping[Any, int] = {}
    nbytes: int = 0
    is_transfer: bool = False


def price_of(problem: Problem, op: Op) -> Price:
    cost = problem.cost
    if op.work is not None:
        return Price(cost.compute_s(op.work))
    if op.host is not None:
        return Price(cost.host_s(*op.host))
    if op.loaded is not None:
        return Price(cost.load_s(op.loaded))
    if op.sent is not None:
        transfer = cost.exchange(op.sent)
        return Price(
            transfer.alone, transfer, cost.bytes_by_link(op.sent), int(op.sent.sum()), True
        )
    transfer, by_link, nbytes = _all_reduce(problem, op), Counter[Any](), 0
    for group, size in op.reductions(problem.ranks):
        wire = 2 * (len(group) - 1) * size
        by_link.update(cost.reduced_by_link(wire, group))
        nbytes += wire
    return Price(transfer.alone, transfer, by_link, nbytes, True)


def _all_reduce(problem: Problem, op: Op) -> Transfer:
    """All groups' all-reduces at the same time; ports that they share are busy for all of them."""
    transfers = [
        problem.cost.all_reduce(size, group) for group, size in op.reductions(problem.ranks)
    ]
    busy: dict[Port, Number] = {}
    for transfer in transfers:
        transfer.load(busy)
    return Transfer(largest(transfer.latency for transfer in transfers), busy)
