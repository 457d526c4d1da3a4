"""Graph data in servers' memories: how many bytes, and what to spread where they do not fit.

    features    all rows, or those at home at the server; P3: the columns of its ranks
    lists       all adjacency lists, or those at home or cached there; offsets and degrees of all

The ranks of a server share one copy. What batches and GPUs hold is not included.

Where everything does not fit everywhere, candidates spread the features, and if that does not
suffice the lists too. What then is left of the memory caches lists of other servers (P3, Sec. 3.4).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.minibatch.adjacency_store import (
    ENTRY,
    NEIGHBOUR,
    EstimatedStructure,
    Structure,
)
from gnnplan.planner.strategies.minibatch.feature_store import EstimatedStore, Store
from gnnplan.planner.strategies.minibatch.step import in_two_digits
from gnnplan.planner.strategies.program.memory import of_fullest

S = TypeVar("S", bound=Strategy)


def of_rows(problem: Problem, store: Store | EstimatedStore | None, features: str) -> np.ndarray:
    """Bytes of the features in each server's memory [servers]; rows may be spread."""
    servers = list(dict.fromkeys(problem.servers))
    if isinstance(store, Store) and store.home is not None:
        rows = [np.flatnonzero(store.home == server) for server in servers]
        return np.array([float(problem.features_bytes(ids).sum()) for ids in rows])
    spread = features == "spread" and problem.graph is None
    share = 1 / len(servers) if spread else 1.0
    return np.full(len(servers), share * features_bytes(problem))


def features_bytes(problem: Problem, columns: range | None = None) -> float:
    """Bytes of all vertices' features, or of some of their columns."""
    if problem.graph is None:
        one = problem.features_bytes(np.zeros(1, np.int64), columns)
        return float(one[0]) * problem.stats.vertices
    return float(problem.features_bytes(np.arange(problem.stats.vertices), columns).sum())


def of_lists(problem: Problem, lists: Structure | EstimatedStructure | None) -> np.ndarray:
    """Bytes of adjacency lists, offsets and degrees in each server's memory [servers]."""
    n, directed, edges = problem.stats.vertices, problem.stats.directed, problem.stats.edges
    held, servers = [], np.array(problem.servers)
    for server in dict.fromkeys(problem.servers):
        ranks = np.flatnonzero(servers == server).tolist()
        if isinstance(lists, Structure):
            held.append(float(lists.edges_at(problem.data, ranks)))
        else:
            held.append(edges * (lists.share_at(ranks) if lists else 1.0))
    return NEIGHBOUR * np.array(held) + ENTRY * (n + 1) + ENTRY * (1 + directed) * n


def fullest(problem: Problem, strategy: Strategy) -> dict[str, float]:
    """Bytes by use in the fullest server's memory."""
    return of_fullest(strategy.settle(problem).host_memory(problem))


def fits(problem: Problem, strategy: Strategy) -> bool:
    room = problem.cluster.graph_room
    return room == np.inf or sum(fullest(problem, strategy).values()) <= room


def fitting(problem: Problem, strategy: S) -> S:
    """The strategy, or the variant that spreads least of those that fit in servers' memories.

    The last variant, which spreads most, if none fits.
    """
    if problem.cluster.graph_room == np.inf or not strategy.settle(problem).suits(problem):
        return strategy
    tried = strategy
    for tried in (strategy, *strategy.more_spread(problem)):
        if fits(problem, tried):
            break
    return tried


def lists_cache(problem: Problem, spread: Strategy) -> int:
    """Bytes of other servers' lists for which each server has room; `spread` caches none."""
    left = problem.cluster.graph_room - sum(fullest(problem, spread).values())
    every_list = NEIGHBOUR * problem.stats.edges + ENTRY * problem.stats.vertices
    cache = int(max(0.0, min(left, every_list)))
    return in_two_digits(cache)
