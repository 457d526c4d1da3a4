"""Prices of operations, in seconds and bytes; planner/cluster/cost.py prices the work inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.cost import Transfer
from gnnplan.planner.cluster.ports import busiest
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Message,
    Op,
    Receive,
)
from gnnplan.planner.vocabulary.numbers import Number, slowest
from gnnplan.planner.vocabulary.schedule import Exchange, LocalWork


class Price(NamedTuple):
    """The duration of an operation, over all of its chunks."""

    seconds: Number  # of each rank [.., ranks], or of a transfer as a whole [.., 1]
    transfer: Transfer = Transfer(0.0, {})
    is_transfer: bool = False
    by_chunk: Number = 0.0  # seconds of each chunk on its slowest rank [.., chunks]
    link: Number = 0.0  # seconds of the mean chunk's message on its link

    def times(self, factor: Number) -> Price:
        """Return a price with all durations multiplied, by one factor or by one of each chunk."""
        mean = np.atleast_1d(factor).mean(-1, keepdims=np.ndim(factor) > 1)
        by_chunk, link = self.by_chunk * factor, self.link * mean
        transfer = Transfer(self.transfer.latency * mean, self.transfer.ports)
        return Price(self.seconds * mean, transfer, self.is_transfer, by_chunk, link)


def price_of(problem: Problem, op: Op, ranks: np.ndarray | None = None) -> Price:
    """Return the price of an operation, with the seconds of these `ranks`, or of all."""
    if op.chunks:
        return _price_of_chunks(problem, op)
    cost = problem.cost
    match op.work:
        case LocalWork() as work:
            seconds = cost.seconds(work if ranks is None else _among(work, ranks))
            return Price(np.asfortranarray(seconds) if np.ndim(seconds) > 1 else seconds)
        case Exchange(items, itemsize):
            transfer = cost.exchange(items, op.ranks or None, itemsize=itemsize)
        case AllReduce():
            groups = op.work.by_group(op.ranks or tuple(range(problem.ranks)))
            transfer = cost.all_reduces.transfer(groups)
        case Message() | Receive():
            raise AssertionError("only operations with chunks send messages")
    return Price(transfer.alone, transfer, True)


def _among(work: LocalWork, ranks: np.ndarray) -> LocalWork:
    """Return the work of these ranks."""
    return work.at(int(ranks[0])) if ranks.size == 1 else work.of_ranks(ranks)


def _price_of_chunks(problem: Problem, op: Op) -> Price:
    """Return the price of an operation that `op.ranks` do for every chunk."""
    cost, group = problem.cost, op.ranks
    match op.work:
        case LocalWork() as work:
            seconds = cost.seconds(work)
            by_rank = np.reshape(seconds, (*np.shape(seconds)[:-1], -1, len(group)))
            return Price(by_rank.sum(-2), by_chunk=by_rank.max(-1))
        case Exchange() as work:
            chunks = [replace(work, items=items) for items in work.items]
            alone = {each: cost.collective(each, group).alone for each in dict.fromkeys(chunks)}
            each_s = np.broadcast_arrays(*(np.atleast_1d(alone[each]) for each in chunks))
            by_chunk = np.concatenate(each_s, axis=-1)
            whole = cost.exchange(work.nbytes.sum(0), group, len(chunks))
            return Price(by_chunk.sum(-1, keepdims=by_chunk.ndim > 1), whole, True, by_chunk)
        case Message(nbytes, distance):
            # The link's seconds are those of the mean chunk; an empty chunk is not sent. Backward
            # begins after the whole forward pass, so a port's seconds of both directions add up.
            lower, count = np.array(group) + min(distance, 0), len(nbytes)
            mean = np.rint(nbytes.mean(0))
            latencies, ports = cost.ports.sends(lower, lower + abs(distance), mean)
            link = slowest(latencies * (nbytes > 0).mean(0)) + busiest(ports)
            busy = {kind: seconds * count for kind, seconds in ports.items()}
            return Price(link * count, Transfer(0.0, busy), True, link=link)
        case _:
            return Price(0.0)  # a receipt ends with its message, which has the price


def distinct_ranks(problem: Problem, ops: Collection[Op]) -> np.ndarray | None:
    """Return one rank of each set of ranks that do the same work in all operations.

    Such ranks are always ready at the same time, so one represents the set. None: ranks share
    cores, and all are needed.
    """
    if problem.cost.cores.count:
        return None
    arrays = [array for op in ops if isinstance(op.work, LocalWork) for array in op.work.arrays]
    by_rank = [array for array in arrays if np.ptp(array)]
    if not by_rank:
        return np.zeros(1, dtype=np.int64)
    return np.unique(np.stack(by_rank), axis=1, return_index=True)[1]


def setup_s(problem: Problem, setup: Iterable[Op]) -> float:
    """Return the seconds of the exchanges before the first step."""
    return sum(float(price_of(problem, op).seconds) for op in setup)


def bytes_of(
    problem: Problem, counted: Iterable[tuple[Op, int]]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes sent, by operation and by class of link.

    counted: operations, and how often each occurs.
    """
    cost, by_op, links = problem.cost, Counter[str](), Counter[str]()
    for op, times in counted:
        by_link = Counter[str]()  # bytes of one occurrence, over all chunks
        match op.work:
            case Exchange(items, itemsize):
                sent = items.sum(0) if op.chunks else items
                by_link.update(cost.bytes_by_link(sent, op.ranks or None, itemsize))
            case Message(sizes, distance):
                for rank, nbytes in zip(op.ranks, sizes.sum(0).tolist(), strict=True):
                    by_link[cost.link_name(rank, rank + distance)] += nbytes
            case AllReduce() as work:
                for group, size in work.by_group(op.ranks or tuple(range(problem.ranks))):
                    wire = 2 * (len(group) - 1) * size
                    by_link.update(cost.all_reduces.bytes_by_link(wire, group))
            case _:
                continue
        if by_link or not op.chunks:  # an operation on chunks that sends nothing is not reported
            by_op[op.op] += times * by_link.total()
        for link, nbytes in by_link.items():
            links[link] += times * nbytes
    return dict(by_op), dict(+links)
