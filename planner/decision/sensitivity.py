"""What would change the choice: other links, other devices, other depths.

The candidates that were found are predicted again with one number of the cluster multiplied, and
the search is repeated at other numbers of layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnplan.planner.cluster import scaling as scaled
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.decision.search import Candidate, SearchResult, search
from gnnplan.planner.vocabulary.errors import GnnplanError
from gnnplan.planner.vocabulary.progress import Notify, silent
from gnnplan.planner.vocabulary.units import show_bytes

FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)  # of a bandwidth or of the device's speed
HALVINGS = 6  # of the interval in which another family takes over
MOST_EDGES = 2_000_000  # larger graphs are not asked about other depths, which need new layouts
MOST_ESTIMATED = 64  # GPUs for which a plan of statistics asks at all; beyond, it takes too long
Scaled = Callable[[Cluster, float], Cluster]


def sentences(found: SearchResult, exact: bool, notify: Notify = silent) -> list[str]:
    """What doubling a number gives, and where another family wins.

    As 'twice the bandwidth between servers: -18 %', 'below 0.31x of it (..) granndis wins', 'at 8
    layers or fewer ..'. Empty for statistics on more than MOST_ESTIMATED GPUs.
    """
    best = found.ranked[0].problem
    cluster = best.cluster
    out: list[str] = []
    if not best.stats.known and cluster.ranks > MOST_ESTIMATED:
        return out
    notify("asking what would change the choice: links and devices")
    if cluster.servers > 1 and cluster.inter_node:
        out += _of(
            found,
            "the bandwidth between servers",
            lambda c, f: scaled.links(c, f, ["inter_node"]),
            cluster.inter_node.bandwidth,
        )
    if cluster.gpus_per_server > 1:
        inside = ["intra_node", *(name for name in ("island", "switch") if getattr(cluster, name))]
        # of several links there is no one bandwidth to name
        bandwidth = None if len(inside) > 1 else cluster.intra_node.bandwidth
        out += _of(
            found,
            "the bandwidth inside servers",
            lambda c, f: scaled.links(c, f, inside),
            bandwidth,
        )
    out += _of(found, "the device's speed", scaled.device, None)
    return out + list(_depths(found, exact, notify))


def _of(found: SearchResult, name: str, faster: Scaled, bandwidth: float | None) -> Iterator[str]:
    """What doubling one number of the cluster gives, and where another family takes over."""
    best = found.ranked[0]
    _, doubled_s = _fastest(found, faster, 2.0)
    change = doubled_s / float(best.predicted.epoch_s) - 1
    yield f"twice {name}: {round(100 * change) + 0:+d} %"
    slower = sorted((factor for factor in FACTORS if factor < 1), reverse=True)
    for factors, word in (
        (slower, "below"),
        ([factor for factor in FACTORS if factor > 1], "above"),
    ):
        turn = _turn(found, faster, factors)
        if turn is not None:
            factor, winner = turn
            value = ""
            if bandwidth:
                value = f" ({show_bytes(factor * bandwidth)}/s, now {show_bytes(bandwidth)}/s)"
            yield f"{word} {factor:.2g}x of {name}{value} {winner.strategy} wins"


def _turn(
    found: SearchResult, faster: Scaled, factors: list[float]
) -> tuple[float, Candidate] | None:
    """The factor nearest to 1 at which another family is the fastest, and its candidate."""
    name = found.ranked[0].strategy.name
    near = 1.0
    for far in factors:
        winner, _ = _fastest(found, faster, far)
        if winner.strategy.name == name:
            near = far
            continue
        for _ in range(HALVINGS):
            middle = (near * far) ** 0.5
            other, _ = _fastest(found, faster, middle)
            if other.strategy.name == name:
                near = middle
            else:
                far, winner = middle, other
        return far, winner
    return None


def _fastest(found: SearchResult, faster: Scaled, factor: float) -> tuple[Candidate, float]:
    """The fastest candidate with the number multiplied, and its epoch [s]."""
    times = [
        float(
            c.strategy.predict(
                replace(c.problem, cluster=faster(c.problem.cluster, factor))
            ).epoch_s
        )
        for c in found.ranked
    ]
    first = min(range(len(times)), key=times.__getitem__)
    return found.ranked[first], times[first]


def _depths(found: SearchResult, exact: bool, notify: Notify) -> Iterator[str]:
    """The nearest smaller and larger number of layers at which another family wins."""
    best = found.ranked[0]
    problem, layers = best.problem, best.problem.workload.layers
    if problem.workload.mode == "mini":
        return  # another depth needs other fanouts, which nobody has given
    nothing_compared = len(found.ranked) + len(found.rejected) == 1
    if nothing_compared or not problem.stats.known or problem.stats.edges > MOST_EDGES:
        return

    on_fewer = any(candidate.problem.ranks < problem.cluster.ranks for candidate in found.ranked)

    def winner(count: int) -> str:
        workload = problem.workload.model_copy(update={"layers": count})
        notify(f"asking what would change the choice: {count} layers")
        asked = replace(problem, workload=workload, seats=(), _layouts={}, _batches={})
        try:
            return search(asked, exact, may_use_fewer=on_fewer).ranked[0].strategy.name
        except GnnplanError:
            return ""

    for far, word in ((layers // 4, "fewer"), (layers * 2, "more")):
        near = layers
        if not far or (name := winner(far)) in ("", best.strategy.name):
            continue
        while abs(near - far) > 1:
            middle = (near + far) // 2
            other = winner(middle)
            if other == best.strategy.name:
                near = middle
            else:
                far, name = middle, other or name
        yield f"at {far} layers or {word} {name} wins"
