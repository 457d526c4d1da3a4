"""What an operation takes: seconds and bytes. planner/cluster/cost.py prices work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.spec import LinkName
from gnnplan.planner.cluster.transfer import add
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Copy,
    Exchange,
    Message,
    Op,
    Receipt,
    Sampling,
)
from gnnplan.planner.vocabulary.numbers import Number, largest
from gnnplan.planner.vocabulary.schedule import Compute

# Of each known step: its operations, each with the number of its kind
Steps = Mapping[Hashable, Sequence[tuple[int, Op]]]


class Price(NamedTuple):
    """What an operation takes: seconds of each rank [.., ranks], or of a transfer as a whole."""

    seconds: Number
    transfer: Transfer = Transfer(0.0, {})
    is_transfer: bool = False


def price_of(problem: Problem, op: Op, ranks: np.ndarray | None = None) -> Price:
    """Of an operation that is done once; seconds of these `ranks`, or of all."""
    cost, among = problem.cost, slice(None) if ranks is None else ranks
    match op.work:
        case Compute() as work:
            return Price(cost.compute_s(work if ranks is None else work.among(ranks)))
        case Sampling(what, edges, layers):
            return Price(cost.host_s(what, edges[among], layers))
        case Copy(nbytes):
            return Price(cost.load_s(nbytes[among]))
        case Exchange(items, itemsize):
            transfer = cost.exchange(items, op.ranks or None, itemsize=itemsize)
        case AllReduce():
            transfer = _all_reduce(problem, op, op.work)
        case Message() | Receipt():
            raise AssertionError("messages are priced by flowshop.py")
    return Price(transfer.alone, transfer, True)


def unlike_ranks(problem: Problem, ops: Collection[Op]) -> np.ndarray | None:
    """One rank of each kind, where ranks that do the same work in all operations are of a kind.

    Ranks of a kind are always ready at the same time, so one stands for all. None: all ranks, for
    they share cores.
    """
    if problem.cost.cores.count:
        return None
    works, numbers = [op.work for op in ops], list[Number]()
    numbers += [number for work in works if isinstance(work, Compute) for number in work.numbers()]
    numbers += [work.edges for work in works if isinstance(work, Sampling)]
    numbers += [work.nbytes for work in works if isinstance(work, Copy)]
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
    match op.work:
        case Exchange(items, itemsize):
            sent = items.sum(0) if op.chunks else items
            by_link.update(cost.bytes_by_link(sent, op.ranks or None, itemsize))
        case Message(handed, distance):
            for rank, nbytes in zip(op.ranks, handed.sum(0).tolist(), strict=True):
                by_link[cost.link_name(rank, rank + distance)] += nbytes
        case AllReduce():
            for group, size in op.work.by_group(op.ranks or tuple(range(problem.ranks))):
                by_link.update(cost.all_reduces.bytes_by_link(2 * (len(group) - 1) * size, group))
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


def _all_reduce(problem: Problem, op: Op, work: AllReduce) -> Transfer:
    """All groups' all-reduces at the same time; ports that they share are busy for all of them."""
    groups = work.by_group(op.ranks or tuple(range(problem.ranks)))
    transfers = [problem.cost.all_reduce(size, group) for group, size in groups]
    ports: dict[str, np.ndarray] = {}
    for transfer in transfers:
        add(ports, transfer.ports)
    return Transfer(largest(transfer.latency for transfer in transfers), ports)
