"""All-reduces by algorithm: who sends whom how much of the buffer, in how many steps.

    ring            Every rank hands 1/n of the buffer on to the next one, 2 (n-1) times. The order
                    of ranks goes server by server.
    tree            A chain in every server, and two binary trees over servers with half of the
                    buffer each. A server that has children in one tree has none in the other. Sums
                    go up, results come down (NCCL since 2.4).
    hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
                    and an all-gather in every server.

With n ranks all of them send 2 (n-1) buffers in total. Chunks of the buffer follow each other, so
all links are busy at once. all_reduce.py finds the ports that these messages pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
    goes on to the next. A hierarchical all-reduce needs equally many ranks on each server. A ring
    takes its place elsewhere.
    """
    assert algorithm in get_args(Algorithm), algorithm
    if algorithm == "tree":
        return _tree(servers)
    if algorithm == "hierarchical" and len({len(ranks) for ranks in servers}) == 1:
        return _hierarchical(np.asarray(servers))
    order = np.concatenate([np.asarray(ranks) for ranks in servers])
    n = order.size
    phase = ReducePhase(order, np.roll(order, -1), 1, 2 * (n - 1), 2 * (n - 1))
    return AllReduce(2 * (n - 1) / n, (phase,))


def _tree(servers: Sequence[Sequence[int]]) -> AllReduce:
    first = np.array([ranks[0] for ranks in servers])
    chains = _columns(pair for ranks in servers for pair in zip(ranks[1:], ranks[:-1], strict=True))
    tree, partner = list(_binary(len(servers))), list(_mirrored(len(servers)))
    edges = _columns([*tree, *partner])
    longest_chain = max(map(len, servers)) - 1
    depth = max(_depth(tree), _depth(partner))

    def up_and_down(
        children: np.ndarray, parents: np.ndarray, units: int, steps: int
    ) -> ReducePhase:
        source, target = np.append(children, parents), np.append(parents, children)
        return ReducePhase(source, target, units, 1, 2 * steps)

    in_servers = up_and_down(chains[0], chains[1], 2, longest_chain)
    across = up_and_down(first[edges[0]], first[edges[1]], 1, depth)
    return AllReduce(0.5, (in_servers, across))


def _columns(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """All first members, and all second ones [2, pairs]."""
    return np.array(list(pairs), dtype=np.int64).reshape(-1, 2).T


def _binary(count: int) -> Iterator[tuple[int, int]]:
    """Edges (child, parent) of an in-order binary tree over 0 .. count-1.

    Its leaves are the odd numbers (NCCL's ncclGetBtree).

    >>> list(_binary(6))
    [(1, 2), (2, 4), (3, 2), (4, 0), (5, 4)]
    """
    for child in range(1, count):
        bit = child & -child
        parent = (child ^ bit) | (bit << 1)
        yield child, parent if parent < count else child ^ bit


def _mirrored(count: int) -> Iterator[tuple[int, int]]:
    """The partner of `_binary`, in which inner nodes are leaves and leaves are inner nodes.

    An even count is mirrored, an odd one shifted by one (NCCL's ncclGetDtree).
    """
    for child, parent in _binary(count):
        if count % 2 == 0:
            yield count - 1 - child, count - 1 - parent
        else:
            yield (child + 1) % count, (parent + 1) % count


def _depth(edges: Iterable[tuple[int, int]]) -> int:
    parents = dict(edges)

    def depth(node: int) -> int:
        return 1 + depth(parents[node]) if node in parents else 0

    return max(map(depth, parents), default=0)


def _hierarchical(servers: np.ndarray) -> AllReduce:
    """`servers` is [servers, ranks]."""
    count, ranks = servers.shape
    source = servers.ravel()
    inside = ReducePhase(
        source,
        np.roll(servers, -1, 1).ravel(),
        units=count * (ranks - 1),
        messages=2 * (ranks - 1),
        steps=2 * (ranks - 1),
    )
    across = ReducePhase(
        source,
        np.roll(servers, -1, 0).ravel(),
        units=count - 1,
        messages=2 * (count - 1),
        steps=2 * (count - 1),
        by_nic=True,
    )
    phases = tuple(phase for phase in (inside, across) if phase.units)
    return AllReduce(2 / (count * ranks), phases)
