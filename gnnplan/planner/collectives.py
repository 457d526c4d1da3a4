"""All-reduces by algorithm: which rank sends which neighbour how much of the buffer, in how many steps one after the other.

    ring            every rank hands 1/n of the buffer on, 2 (n-1) times, to the next in an order that goes server by server
    tree            a chain in every server, and two binary trees over servers with half of the buffer each, in which a server that
                    has children in one has none in the other; sums go up, results come down (NCCL since 2.4)
    hierarchical    reduce-scatter in every server, a ring across servers for each rank's share, all-gather in every server

n ranks on S servers; whichever it is, 2 (n-1) buffers are sent in all. Chunks follow each other, so that all links are busy at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np

Algorithm = Literal["ring", "tree", "hierarchical"]


class Phase(NamedTuple):
    """Hops that are alike: from rank to rank [hops], of how many units of the buffer each, in so many messages."""

    source: np.ndarray
    target: np.ndarray
    units: int
    messages: int
    steps: int  # messages that have to wait for each other
    by_card: bool = False  # each rank uses its own card, not all cards of its server


class AllReduce(NamedTuple):
    unit: float  # of the buffer
    phases: tuple[Phase, ...]


def all_reduce(algorithm: Algorithm, servers: Sequence[Sequence[int]]) -> AllReduce:
    """`servers`: of each its ranks, in an order that leaves an island and a switch when it has seen all of it."""
    sizes = {len(ranks) for ranks in servers}
    if algorithm == "tree":
        return _tree(servers)
    if algorithm == "hierarchical" and len(sizes) == 1:  # a share needs a rank on each server; else a ring
        return _hierarchical(np.asarray(servers))
    order = np.concatenate([np.asarray(ranks) for ranks in servers])
    n = order.size
    return AllReduce(2 * (n - 1) / n, (Phase(order, np.roll(order, -1), 1, 2 * (n - 1), 2 * (n - 1)),))


def _tree(servers: Sequence[Sequence[int]]) -> AllReduce:
    count = len(servers)
    first = np.array([ranks[0] for ranks in servers])
    links = np.array([pair for ranks in servers for pair in zip(ranks[1:], ranks[:-1], strict=True)], dtype=np.int64).reshape(-1, 2).T
    edges = np.array([*_binary(count), *_mirrored(count)], dtype=np.int64).reshape(-1, 2).T
    longest, depth = max(map(len, servers)) - 1, max(_depth(_binary(count)), _depth(_mirrored(count)))

    def both(below: np.ndarray, above: np.ndarray, units: int, steps: int) -> Phase:
        return Phase(np.append(below, above), np.append(above, below), units, 1, 2 * steps)

    return AllReduce(0.5, (both(links[0], links[1], 2, longest), both(first[edges[0]], first[edges[1]], 1, depth)))


def _binary(count: int) -> Iterator[tuple[int, int]]:
    """(child, parent) of an in-order binary tree over 0 .. count-1, whose leaves are the odd numbers (NCCL's ncclGetBtree).

    >>> list(_binary(6))
    [(1, 2), (2, 4), (3, 2), (4, 0), (5, 4)]
    """
    for child in range(1, count):
        bit = child & -child
        parent = (child ^ bit) | (bit << 1)
        yield child, parent if parent < count else child ^ bit


def _mirrored(count: int) -> Iterator[tuple[int, int]]:
    """Its partner, in which leaves are inner and inner ones are leaves: mirrored, or of odd counts shifted by one (ncclGetDtree)."""
    for child, parent in _binary(count):
        yield (count - 1 - child, count - 1 - parent) if count % 2 == 0 else ((child + 1) % count, (parent + 1) % count)


def _depth(edges: Iterator[tuple[int, int]]) -> int:
    above = dict(edges)

    def height(node: int) -> int:
        return 1 + height(above[node]) if node in above else 0

    return max(map(height, above), default=0)


def _hierarchical(servers: np.ndarray) -> AllReduce:
    """[servers, ranks]"""
    count, each = servers.shape
    inside = Phase(servers.ravel(), np.roll(servers, -1, 1).ravel(), count * (each - 1), 2 * (each - 1), 2 * (each - 1))
    across = Phase(servers.ravel(), np.roll(servers, -1, 0).ravel(), count - 1, 2 * (count - 1), 2 * (count - 1), True)
    return AllReduce(2 / (count * each), tuple(phase for phase in (inside, across) if phase.units))
