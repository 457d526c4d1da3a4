"""Where memory is too little: how much would do, per device or server, or how many servers.

--set device.memory=12.1GB would fit granndis or --set servers=4 (graph_parallel, estimated)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.spec import MOST_PAIRED, MOST_RANKS
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.minibatch.proposals import fits, fullest
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.units import show_bytes


def must_fit_servers(problem: Problem, strategy: Strategy) -> None:
    """Raises Infeasible where servers' memories cannot hold the strategy's graph data."""
    if fits(problem, strategy):
        return
    room, held = problem.cluster.graph_room, fullest(problem, strategy)
    by_use = ", ".join(f"{use}: {show_bytes(nbytes)}" for use, nbytes in held.items())
    less = next((s for s in strategy.more_spread(problem) if fits(problem, s)), None)
    raise Infeasible(
        f"{strategy} has {show_bytes(sum(held.values()))} of the graph in a server's memory"
        f" ({by_use}) but there is {show_bytes(room)} (host_memory); use"
        f" {f'{less} or ' if less else ''}--set host_memory={_gigabytes(sum(held.values())):g}GB"
    )


def _gigabytes(nbytes: float) -> float:
    """A size for --set [GB], rounded up so that it suffices."""
    return float(np.ceil(nbytes / 1e9 * 1.001 * 100) / 100)


class Need(NamedTuple):
    """The memory that a strategy needs [B]."""

    device: float  # on the fullest rank
    server: float  # for graph data in the fullest server; 0 where that is not limited
    name: str


def needs(problem: Problem, options: Iterable[Strategy]) -> Iterator[Need]:
    """The needs of each option that suits the problem."""
    limited = problem.cluster.graph_room < np.inf
    for option in options:
        with suppress(SpecError):
            strategy = option.settle(problem)
            strategy.check(problem)
            on_server = sum(fullest(problem, strategy).values()) if limited else 0.0
            yield Need(strategy.most_memory(problem), on_server, str(strategy))


def least_needed(problem: Problem, options: Iterable[Strategy]) -> float | None:
    """The least memory of a device [B] in which an option fits; None: none suits.

    Of those that servers have the memory for, if there are any.
    """
    found = list(needs(problem, options))
    there = [need.device for need in found if need.server <= problem.cluster.graph_room]
    return min(there or [need.device for need in found], default=None)


def smallest_change(problem: Problem, options: Callable[[Problem], Sequence[Strategy]]) -> str:
    """How much memory per device or server, or how many servers, would make room for an option.

    Servers are estimated from the graph's statistics.
    """
    words, found = [], list(needs(problem, options(problem)))
    room, server_room = problem.cluster.device.memory, problem.cluster.graph_room
    if larger_gpu := [(need.device, need.name) for need in found if need.server <= server_room]:
        words.append(_enough("device.memory", larger_gpu))
    if larger_server := [
        (need.server, need.name)
        for need in found
        if need.device <= room and need.server > server_room
    ]:
        words.append(_enough("host_memory", larger_server))
    if found and not words:
        need = min(found)
        words.append(
            f"--set device.memory={_gigabytes(need.device):g}GB"
            f" --set host_memory={_gigabytes(need.server):g}GB would fit {need.name}"
        )

    @cache
    def with_servers(servers: int) -> str | None:
        """A strategy that fits on so many servers."""
        inter_node = problem.cluster.inter_node or problem.cluster.intra_node
        cluster = problem.cluster.model_copy(update={"servers": servers, "inter_node": inter_node})
        most = MOST_PAIRED if problem.graph else MOST_RANKS
        if cluster.ranks > min(problem.stats.vertices, most):
            return None
        larger = replace(problem, graph=None, method=method, cluster=cluster, placement=())
        fitting = (
            need.name
            for need in needs(larger, options(larger))
            if need.device <= room and need.server <= server_room
        )
        return next(fitting, None)

    # no real cut of a graph is worse than a random one, so the proposed number suffices
    method = problem.method if problem.graph is None else "random"
    doubled = (problem.cluster.servers << times for times in range(1, 7))
    if many := next(filter(with_servers, doubled), 0):
        between = range(many // 2 + 1, many)
        least = many // 2 + 1 + bisect_left(between, True, key=lambda n: bool(with_servers(n)))
        words.append(f"--set servers={least} ({with_servers(least)}, estimated)")
    if not words and not found:
        return "more memory would not help"
    if not words:
        return "no memory per device and no number of servers up to 64 times as many would fit"
    return f"the smallest change that would fit: {' or '.join(words)}"


def _enough(field: str, sizes: list[tuple[float, str]]) -> str:
    """The least of a memory that suffices for one of (bytes, strategy)."""
    least = _gigabytes(min(sizes)[0])
    name = next(name for size, name in sizes if size <= least * 1e9)
    return f"--set {field}={least:g}GB would fit {name}"
