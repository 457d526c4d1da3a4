"""A cluster with some of its numbers multiplied: what sensitivity asks about, and what a refit finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnnplan.planner.specs import Cluster, Link, Placement

DEVICE = ("gemm", "memory_bandwidth", "cache_bandwidth", "hash_rate", "edge_rate", "row_bandwidth")  # rates that are one number


def links(cluster: Cluster, factor: float, names: Sequence[str]) -> Cluster:
    """These links `factor` times as fast, as `--set` would make them: what was measured on them keeps its software."""
    told: dict[str, Link] = {name: getattr(cluster, name) for name in names}
    faster = {name: link.model_copy(update={"bandwidth": link.bandwidth * factor}) for name, link in told.items()}
    return cluster.model_copy(update=faster).carried(cluster)


def device(cluster: Cluster, factor: float) -> Cluster:
    """All that the device computes `factor` times as fast."""
    own = cluster.device
    plain = {name: rate * factor for name in DEVICE if (rate := getattr(own, name)) is not None}
    by_size = {"memory_rates": _times(own.memory_rates, factor), "gather": {width: _times(of, factor) for width, of in own.gather.items()}}
    each = {"launch": own.launch / factor, "row_latency": own.row_latency / factor}
    return cluster.model_copy(update={"device": own.model_copy(update={**plain, **by_size, **each})})


def _times(rates: Mapping[float, float], factor: float) -> dict[float, float]:
    return {size: rate * factor for size, rate in rates.items()}


def messages(cluster: Cluster, factor: float, where: Placement) -> Cluster:
    """The link there and all that was measured on it `factor` times as fast, latency too."""
    def faster(link: Link) -> Link:
        return link.model_copy(update={"bandwidth": link.bandwidth * factor, "latency": link.latency / factor})

    measured = {key: faster(link) if key.endswith(where) else link for key, link in cluster.collectives.items()}
    return cluster.model_copy(update={"collectives": measured, where: faster(getattr(cluster, where))})
