"""The speeds of links and devices, and the numbers of layers, that would change the choice.

The candidates of a search are predicted again with one number of the cluster multiplied, and
compared by the plan's objective. If an exact strategy is recommended, only exact strategies are
compared. For other numbers of layers the search is repeated, if all reasons are requested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.cluster import doubt as scaled
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.candidate import Candidate
from gnnplan.planner.decision.objective import with_fields
from gnnplan.planner.decision.search import SearchResult, recommend
from gnnplan.planner.vocabulary.errors import GnnplanError
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.progress import notify
from gnnplan.planner.vocabulary.units import show_bytes, show_count, show_percent

REACH = 8  # factors on a bandwidth or the device's speed are between 1 / REACH and REACH
STEPS = 96  # factors from 1 to REACH, 2.2 % apart
ABOVE = np.geomspace(1, REACH, STEPS + 1)[1:]
FACTORS = [2.0, 1.0, *1 / ABOVE, *ABOVE]
MOST_EDGES = 2_000_000  # most edges of a graph for other depths, which need new layouts
MOST_ESTIMATED = 64  # most GPUs if only statistics of the graph are known; more take too long
Scaled = Callable[[Cluster, Number], Cluster]
Best = tuple[list[Candidate], NDArray[np.float64]]  # the best rival at each factor, and its value


def sentences(found: SearchResult) -> list[str]:
    """Return the change by doubling each number of the cluster, and where another family wins.

    As 'twice the bandwidth between servers: -18 %', 'below 0.31x of it (..) granndis wins'. Empty
    for statistics on more than MOST_ESTIMATED GPUs, and if runs chose another strategy than
    predictions would.
    """
    best = found.best.problem
    cluster = best.cluster
    if _runs_disagree(found) or (not best.stats.known and cluster.ranks > MOST_ESTIMATED):
        return []
    notify("asking what would change the choice", "links and devices")
    asked = list[tuple[str, Scaled, float | None]]()
    if cluster.servers > 1 and cluster.inter_node:
        bandwidth = cluster.inter_node.bandwidth
        asked.append(("the bandwidth between servers", _links("inter_node"), bandwidth))
    if cluster.gpus_per_server > 1:
        inside = [name for name in ("island", "switch") if getattr(cluster, name)]
        # with several kinds of links there is no single bandwidth to name
        only = None if inside else cluster.intra_node.bandwidth
        asked.append(("the bandwidth inside servers", _links("intra_node", *inside), only))
    asked.append(("the device's speed", scaled.device, None))
    names, scales, bandwidths = zip(*asked, strict=True)
    answers = zip(names, bandwidths, best_at(found, scales, FACTORS), strict=True)
    return [sentence for answer in answers for sentence in _sentences_of(found, *answer)]


def _links(*names: str) -> Scaled:
    return lambda cluster, by: scaled.links(cluster, by, names)


def _sentences_of(
    found: SearchResult, name: str, bandwidth: float | None, at_factors: Best
) -> Iterator[str]:
    """Yield the change by doubling one number, and the factors at which another family wins.

    at_factors: the best at each of FACTORS.
    """
    winners, values = at_factors
    change = values[0] / found.best.value - 1
    yield f"twice {name}: {show_percent(change, sign=True)}"
    _, fastest, *others = winners
    for word, factors, best in (
        ("below", 1 / ABOVE, others[:STEPS]),
        ("above", ABOVE, others[STEPS:]),
    ):
        turns = zip(factors.tolist(), best, strict=True)
        turn = next((t for t in turns if t[1].strategy.name != fastest.strategy.name), None)
        if turn is not None:
            factor, winner = turn
            value = ""
            if bandwidth:
                value = f" ({show_bytes(factor * bandwidth)}/s, now {show_bytes(bandwidth)}/s)"
            yield f"{word} {factor:.2g}x of {name}{value} {winner.strategy} wins"


def best_at(found: SearchResult, scales: Sequence[Scaled], factors: Sequence[float]) -> list[Best]:
    """Return, for each number of the cluster, the best rivals if it is multiplied by each factor.

    If the recommended strategy is exact, its rivals are exact. Each rival is predicted once, for
    all numbers and factors.
    """
    columns = np.ones((len(scales), len(scales), len(factors)))
    columns[range(len(scales)), range(len(scales))] = factors

    def all_values(c: Candidate) -> NDArray[np.float64]:
        cluster = c.problem.cluster
        for scale, column in zip(scales, columns, strict=True):
            cluster = scale(cluster, column.reshape(-1, 1))
        epoch_s = c.strategy.epoch_s(replace(c.problem, cluster=cluster))
        values = np.ravel(c.objective.value(c.problem, c.strategy, epoch_s))
        return np.broadcast_to(values, columns[0].size).reshape(columns[0].shape)

    values = np.stack([all_values(c) for c in found.rivals], axis=1)  # [scales, rivals, factors]
    return [([found.rivals[i] for i in each.argmin(axis=0)], each.min(axis=0)) for each in values]


def _runs_disagree(found: SearchResult) -> bool:
    """Whether runs chose another strategy than predictions would."""
    return bool(found.measured) and found.measured is not recommend(found.ranked)


def of_depths(found: SearchResult) -> Iterator[str]:
    """Yield the nearest of a half, a quarter and twice the layers at which another family wins.

    As 'at 8 layers granndis wins'. Each number of layers takes a search, so a plan includes these
    sentences only if all reasons are requested. Empty if runs chose another strategy than
    predictions would.
    """
    best = found.best
    problem, layers = best.problem, best.problem.workload.layers
    if (
        _runs_disagree(found)
        or problem.workload.mode == "mini"  # another depth needs other fanouts, which are unknown
        or problem.workload.module  # a user's module has its own depth
        or found.objective.target  # no run shows how many epochs another depth needs
        or found.forced
        or not problem.stats.known
        or problem.stats.edges > MOST_EDGES
    ):
        return

    def winner(count: int) -> str:
        notify("asking what would change the choice", show_count(count, "layer"))
        try:
            return found.how(with_fields(found.problem, layers=count)).best.strategy.name
        except GnnplanError:
            return ""

    for counts in ((layers // 2, layers // 4), (layers * 2,)):
        winners = ((count, winner(count)) for count in counts if count)
        others = ((count, name) for count, name in winners if name not in ("", best.strategy.name))
        for count, name in islice(others, 1):
            yield f"at {show_count(count, 'layer')} {name} wins"
