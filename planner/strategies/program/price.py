"""What an operation takes: seconds and bytes. planner/cluster/cost.py prices work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.places import Port
from gnnplan.planner.cluster.spec import LinkName
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.arithmetic import largest
from gnnplan.planner.strategies.program.program import Op
from gnnplan.planner.vocabulary.numbers import Number

Identity = object  # of an operation (Op.identity)


class Price(NamedTuple):
    """What an operation takes: seconds of each rank [.., ranks], or of a transfer as a whole."""

    seconds: Number
    transfer: Transfer = Transfer(0.0, {})
    is_transfer: bool = False


def price_of(problem: Problem, op: Op, ranks: np.ndarray | None = None) -> Price:
    """Of an operation that is done once; seconds of these `ranks`, or of all."""
    cost, among = problem.cost, slice(None) if ranks is None else ranks
    if op.work is not None:
        return Price(cost.compute_s(op.work if ranks is None else op.work.among(ranks)))
    if op.host is not None:
        work, edges, layers = op.host
        return Price(cost.host_s(work, edges[among], layers))
    if op.loaded is not None:
        return Price(cost.load_s(op.loaded[among]))
    assert op.handed is None and op.received is None and not op.chunks
    transfer = (
        cost.exchange(op.sent, op.ranks or None, itemsize=op.itemsize)
        if op.sent is not None
        else _all_reduce(problem, op)
    )
    return Price(transfer.alone, transfer, True)


def unlike_ranks(problem: Problem, ops: Collection[Op]) -> np.ndarray | None:
    """One rank of each kind, where ranks that do the same work in all operations are of a kind.

    Ranks of a kind are always ready at the same time, so one stands for all. None: all ranks, for
    they share cores.
    """
    if problem.cost.cores:
        return None
    numbers = [number for op in ops if op.work is not None for number in op.work.numbers()]
    numbers += [op.host[1] for op in ops if op.host is not None]
    numbers += [op.loaded for op in ops if op.loaded is not None]
    by_rank = [each for each in numbers if np.ndim(each) and np.ptp(each)]
    if not by_rank:
        return np.zeros(1, dtype=np.int64)
    return np.unique(np.stack(by_rank), axis=1, return_index=True)[1]


def setup_s(problem: Problem, setup: Iterable[Op]) -> float:
    """Seconds of the exchanges before the first step."""
    return sum(float(price_of(problem, op).seconds) for op in setup)


def moved(problem: Problem, op: Op) -> dict[LinkName, int]:
    """Bytes that a transfer moves over each class of link, all chunks together."""
    cost, by_link = problem.cost, Counter[LinkName]()
    if op.sent is not None:
        by_link.update(
            cost.bytes_by_link(
                op.sent.sum(0) if op.chunks else op.sent, op.ranks or None, op.itemsize
            )
        )
    elif op.handed is not None:
        for rank, nbytes in zip(op.ranks, op.handed.sum(0).tolist(), strict=True):
            by_link[cost.link_name(rank, rank + op.distance)] += nbytes
    else:
        for group, size in op.reductions(tuple(range(problem.ranks))):
            by_link.update(cost.reduced_by_link(2 * (len(group) - 1) * size, group))
    return dict(by_link)


def bytes_of(
    problem: Problem, counted: Iterable[tuple[Op, int]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that operations move, each so many times, by operation and by class of link."""
    by_op, links = Counter[str](), Counter[str]()
    for op, times in counted:
        if not op.moves:
            continue
        by_link = moved(problem, op)
        if by_link or not op.chunks:  # no chunk is exchanged of which nobody sends anything
            by_op[op.op] += times * sum(by_link.values())
        for link, nbytes in by_link.items():
            links[link] += times * nbytes
    return dict(by_op), dict(+links)


def _all_reduce(problem: Problem, op: Op) -> Transfer:
    """All groups' all-reduces at the same time; ports that they share are busy for all of them."""
    groups = op.reductions(tuple(range(problem.ranks)))
    transfers = [problem.cost.all_reduce(size, group) for group, size in groups]
    if len(transfers) == 1:
        return transfers[0]
    busy: dict[Port, Number] = {}
    for transfer in transfers:
        transfer.load(busy)
    return Transfer(largest(transfer.latency for transfer in transfers), busy)
