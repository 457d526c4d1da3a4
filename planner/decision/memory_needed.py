"""If nothing fits in memory: the memory per device or server, or the servers, that would suffice.

--set device.memory=12.1GB would fit granndis or --set servers=4 (graph_parallel, estimated)
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from gnnplan.planner.cluster.spec import MOST_PAIRED, MOST_RANKS
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.minibatch.proposals import fits, fullest
from gnnplan.planner.vocabulary.errors import Infeasible, SpecError
from gnnplan.planner.vocabulary.units import show_bytes


def must_fit_servers(problem: Problem, strategy: Strategy) -> None:
    """Raise Infeasible if the strategy's graph data do not fit in the servers' memory."""
    if fits(problem, strategy):
        return
    room, held = problem.cluster.graph_memory, fullest(problem, strategy)
    by_use = ", ".join(f"{use}: {show_bytes(nbytes)}" for use, nbytes in held.items())
    less = next((s for s in strategy.more_spread(problem) if fits(problem, s)), None)
    raise Infeasible(
        f"{strategy} has {show_bytes(sum(held.values()))} of the graph in a server's memory"
        f" ({by_use}) but there is {show_bytes(room)} (host_memory); use"
        f" {f'{less} or ' if less else ''}--set host_memory={_gigabytes(sum(held.values())):g}GB"
    )


def _gigabytes(nbytes: float) -> float:
    """Return a size for --set [GB], rounded up so that it suffices."""
    return float(np.ceil(nbytes / 1e9 * 1.001 * 100) / 100)


class Need(NamedTuple):
    """The memory that a strategy needs [B]."""

    device: float  # on the fullest rank
    server: float  # for graph data in the fullest server; 0 if that memory is not limited
    name: str  # of the strategy


def needs(problem: Problem, options: Iterable[Strategy]) -> Iterator[Need]:
    """Yield the needs of each option that suits the problem."""
    limited = problem.cluster.graph_memory < np.inf
    for option in options:
        with suppress(SpecError):
            strategy = option.settle(problem)
            strategy.check(problem)
            on_server = sum(fullest(problem, strategy).values()) if limited else 0.0
            yield Need(strategy.most_memory(problem), on_server, str(strategy))


def least_needed(problem: Problem, options: Iterable[Strategy]) -> float | None:
    """Return the least memory of a device [B] in which an option fits; None if none suits.

    Options whose graph data fit in the servers' memory take precedence.
    """
    found = list(needs(problem, options))
    on_servers = [need.device for need in found if need.server <= problem.cluster.graph_memory]
    return min(on_servers or [need.device for need in found], default=None)


def smallest_change(problem: Problem, options: Callable[[Problem], Sequence[Strategy]]) -> str:
    """Return the memory per device or server, or the servers, with which an option would fit.

    The number of servers is estimated from the graph's statistics.
    """
    words, found = [], list(needs(problem, options(problem)))
    room, server_room = problem.cluster.device.memory, problem.cluster.graph_memory
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

    def with_servers(servers: int) -> str | None:
        """Return the name of a strategy that fits on this number of servers."""
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

    # no real partition of a graph is worse than a random one, so the proposed number suffices
    method = problem.method if problem.graph is None else "random"
    doubled = (problem.cluster.servers << times for times in range(1, 7))
    if enough := next(filter(with_servers, doubled), 0):
        between = range(enough // 2 + 1, enough)
        least = enough // 2 + 1 + bisect_left(between, True, key=lambda n: bool(with_servers(n)))
        words.append(f"--set servers={least} ({with_servers(least)}, estimated)")
    if not words and not found:
        return "more memory would not help"
    if not words:
        return "no memory per device and no number of servers up to 64 times as many would fit"
    return f"the smallest change that would fit: {' or '.join(words)}"


def _enough(field: str, sizes: list[tuple[float, str]]) -> str:
    """Return the --set of the least size in `sizes`, which are (bytes, strategy)."""
    least = _gigabytes(min(sizes)[0])
    name = next(name for size, name in sizes if size <= least * 1e9)
    return f"--set {field}={least:g}GB would fit {name}"
