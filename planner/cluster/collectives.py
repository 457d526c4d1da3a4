"""Algorithms of an all-reduce: which rank sends how much of the buffer to which, in how many steps.

    ring            Every rank sends 1/n of the buffer to the next rank, 2 (n-1) times. The ranks of
                    a server follow each other.
    hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
                    and an all-gather in every server.
    tree            As hierarchical inside servers; between servers two binary trees, each with half
                    of the buffer (NCCL since 2.4). Sums go up a tree, results come down. An inner
                    node of one tree is a leaf of the other, so servers send as much as in a ring,
                    but only log2(servers) messages wait for each other.

All n ranks together send 2 (n-1) buffers. Chunks of the buffer are pipelined, so all links are busy
at once. all_reduce.py finds the ports that these messages pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

Algorithm = Literal["ring", "tree", "hierarchical"]


class ReducePhase(NamedTuple):
    """Equal hops, each from rank `source[i]` to rank `target[i]`."""

    source: np.ndarray  # [hops]
    target: np.ndarray  # [hops]
    units: int  # units of the buffer (`AllReduce.unit`) that each hop sends
    messages: int  # messages in which a hop sends these units
    steps: int  # messages that wait for each other
    by_nic: bool = False  # each rank uses its own NIC, instead of all NICs of its server


class AllReduce(NamedTuple):
    """An all-reduce as phases, one after the other."""

    unit: float  # a unit, as a share of the buffer
    phases: tuple[ReducePhase, ...]


def all_reduce(algorithm: Algorithm, servers: Sequence[Sequence[int]]) -> AllReduce:
    """Return the phases of an all-reduce among the ranks of these servers.

    A server's ranks are in an order in which those of an island, and of a PCIe switch, follow each
    other. If servers have different numbers of ranks, the algorithm is a ring.
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
