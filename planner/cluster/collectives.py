"""All-reduces by algorithm: who sends whom how much of the buffer, in how many steps.

    ring            Every rank hands 1/n of the buffer on to the next one, 2 (n-1) times. The order
                    of ranks goes server by server.
    hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
                    and an all-gather in every server.
    tree            The same in servers, and between them two binary trees with half of the buffer
                    each (NCCL since 2.4). Sums go up, results come down. A server that has children
                    in one tree has none in the other, so servers send as much as in a ring, and
                    messages wait for log2 of the servers alone.

With n ranks all of them send 2 (n-1) buffers in total. Chunks of the buffer follow each other, so
all links are busy at once. all_reduce.py finds the ports that these messages pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

Algorithm = Literal["ring", "tree", "hierarchical"]


class ReducePhase(NamedTuple):
    """Hops from rank to rank [hops] that are all alike."""

    source: np.ndarray
    target: np.ndarray
    units: int  # of the buffer, that each hop sends
    messages: int  # in which it sends them
    steps: int  # messages that have to wait for each other
    by_nic: bool = False  # each rank uses its own NIC, not all NICs of its server


class AllReduce(NamedTuple):
    """An all-reduce as phases, one after the other."""

    unit: float  # share of the buffer
    phases: tuple[ReducePhase, ...]


def all_reduce(algorithm: Algorithm, servers: Sequence[Sequence[int]]) -> AllReduce:
    """An all-reduce among the ranks of these servers.

    The ranks of a server come in an order that finishes an island, and a PCIe switch, before it
    goes on to the next. A ring takes the place of others where servers have unequally many ranks.
    """
    assert algorithm in get_args(Algorithm), algorithm
    if algorithm == "ring" or len({len(ranks) for ranks in servers}) > 1:
        order = np.concatenate([np.asarray(ranks) for ranks in servers])
        n = order.size
        phase = ReducePhase(order, np.roll(order, -1), 1, 2 * (n - 1), 2 * (n - 1))
        return AllReduce(2 * (n - 1) / n, (phase,))
    at = np.asarray(servers)
    count, ranks = at.shape
    hops, rounds = 2 * (ranks - 1), 2 * (count - 1)
    inside = ReducePhase(
        at.ravel(), np.roll(at, -1, 1).ravel(), count * (ranks - 1), messages=hops, steps=hops
    )
    across = ReducePhase(
        at.ravel(), np.roll(at, -1, 0).ravel(), count - 1, rounds, rounds, by_nic=True
    )
    if algorithm == "tree":
        first, depth = at[:, 0], (count - 1).bit_length()
        across = ReducePhase(first, np.roll(first, -1), ranks * (count - 1), 2, 2 * depth)
    return AllReduce(2 / at.size, tuple(phase for phase in (inside, across) if phase.units))
