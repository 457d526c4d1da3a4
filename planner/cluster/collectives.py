"""All-reduces by algorithm: who sends whom how much of the buffer, in how many steps.

    ring            Every rank hands 1/n of the buffer on to the next one, 2 (n-1) times. The order
                    of ranks goes server by server.
    tree            A chain in every server, and two binary trees over servers with half of the
                    buffer each (NCCL since 2.4). Sums go up, results come down. A server that has
                    children in one tree has none in the other, so servers send as much as in a
                    ring, and messages wait for log2 of the servers alone.
    hierarchical    A reduce-scatter in every server, a ring across servers for each rank's share,
                    and an all-gather in every server.

With n ranks all of them send 2 (n-1) buffers in total. Chunks of the buffer follow each other, so
all links are busy at once. all_reduce.py finds the ports that these messages pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
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
    first, count = np.array([ranks[0] for ranks in servers]), len(servers)
    chains = [pair for ranks in servers for pair in pairwise(ranks)]
    up, down = np.array(chains, dtype=np.int64).reshape(-1, 2).T
    hops = np.append(up, down), np.append(down, up)
    in_servers = ReducePhase(*hops, count, 1, 2 * (max(map(len, servers)) - 1))
    depth = (count - 1).bit_length()
    across = ReducePhase(first, np.roll(first, -1), 2 * (count - 1), 2, 2 * depth)
    return AllReduce(1 / count, (in_servers, across) if count > 1 else (in_servers,))


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
