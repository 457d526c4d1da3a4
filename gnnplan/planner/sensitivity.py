"""What would change the choice: the found candidates again on other links and devices, and the question at other depths."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from gnnplan.planner import scaled
from gnnplan.planner.errors import GnnplanError
from gnnplan.planner.search import Candidate, Found, search
from gnnplan.planner.specs import Cluster
from gnnplan.planner.units import show_bytes
from gnnplan.progress import Tell, silent

FACTORS = (0.125, 0.25, 0.5, 2.0, 4.0, 8.0)  # of a bandwidth or of the device's speed
MOST_EDGES = 2_000_000  # other depths need other layouts: not of graphs larger than this
Scaled = Callable[[Cluster, float], Cluster]


def sentences(found: Found, exact: bool, tell: Tell = silent) -> list[str]:
    """'twice the bandwidth between servers: -18 %', 'below 0.31x of it (..) granndis wins', 'at 8 layers or fewer ..'."""
    cluster = found.ranked[0].job.cluster
    out: list[str] = []
    tell("asking what would change the choice: links and devices")
    if cluster.servers > 1 and cluster.inter_node:
        out += _of(found, "the bandwidth between servers", lambda c, f: scaled.links(c, f, ["inter_node"]), cluster.inter_node.bandwidth)
    if cluster.gpus_per_server > 1:
        inside = ["intra_node", *(name for name in ("island", "switch") if getattr(cluster, name))]
        link = None if len(inside) > 1 else cluster.intra_node.bandwidth  # several: no one figure to name
        out += _of(found, "the bandwidth inside servers", lambda c, f: scaled.links(c, f, inside), link)
    out += _of(found, "the device's speed", scaled.device, None)
    return out + list(_depths(found, exact, tell))


def _of(found: Found, what: str, faster: Scaled, bandwidth: float | None) -> Iterator[str]:
    """Of one number of the cluster: what doubling it gives, and where another family takes over, each way."""
    best, now = found.ranked[0], float(found.ranked[0].predicted.epoch_s)
    _, twice = _fastest(found, faster, 2.0)
    yield f"twice {what}: {round(100 * (twice / now - 1)) + 0:+d} %"
    for factors, word in ((sorted(f for f in FACTORS if f < 1)[::-1], "below"), (sorted(f for f in FACTORS if f > 1), "above")):
        near = 1.0
        for far in factors:
            winner, _ = _fastest(found, faster, far)
            if winner.strategy.name != best.strategy.name:
                for _ in range(6):
                    middle = (near * far) ** 0.5
                    other, _ = _fastest(found, faster, middle)
                    if other.strategy.name == best.strategy.name:
                        near = middle
                    else:
                        far, winner = middle, other
                at = f" ({show_bytes(far * bandwidth)}/s)" if bandwidth else ""
                yield f"{word} {far:.2g}x of {what}{at} {winner.strategy} wins"
                break
            near = far


def _fastest(found: Found, faster: Scaled, factor: float) -> tuple[Candidate, float]:
    times = [float(c.strategy.predict(replace(c.job, cluster=faster(c.job.cluster, factor))).epoch_s) for c in found.ranked]
    first = min(range(len(times)), key=times.__getitem__)
    return found.ranked[first], times[first]


def _depths(found: Found, exact: bool, tell: Tell) -> Iterator[str]:
    """The nearest smaller and larger number of layers at which another family wins."""
    best = found.ranked[0]
    job, layers = best.job, best.job.workload.layers
    forced = len(found.ranked) + len(found.rejected) == 1  # nothing was compared, so nothing has won
    if job.workload.mode == "mini":  # another depth asks for other fanouts, which nobody has given
        return
    if forced or (job.stats.known and job.stats.edges > MOST_EDGES):
        return

    on_fewer = any(candidate.job.ranks < job.cluster.ranks for candidate in found.ranked)

    def winner(count: int) -> str:
        workload = job.workload.model_copy(update={"layers": count})
        tell(f"asking what would change the choice: {count} layers")
        asked = replace(job, workload=workload, seats=(), _layouts={}, _batches={})
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
