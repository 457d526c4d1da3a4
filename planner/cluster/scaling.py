"""A cluster with some of its numbers multiplied.

Sensitivity asks what such clusters would change; a refit finds the factors that records imply.
A factor may be a column [n, 1]: n clusters at once, which closed forms price together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gnnplan.planner.cluster.spec import Cluster, Link, LinkName
from gnnplan.planner.vocabulary.numbers import Number

# The device's rates that are one number.
DEVICE = (
    "gemm",
    "weight_gradient",
    "gemm_bfloat16",
    "gemm_tf32",
    "memory_bandwidth",
    "cache_bandwidth",
    "hash_rate",
    "edge_rate",
    "row_bandwidth",
)


def links(cluster: Cluster, factor: Number, names: Sequence[str]) -> Cluster:
    """The cluster with the bandwidth of these links multiplied.

    As with `--set`, operations that were measured on the links keep what software took of them.
    """
    faster: dict[str, Link] = {}
    for name in names:
        link: Link = getattr(cluster, name)
        faster[name] = link.model_copy(update={"bandwidth": link.bandwidth * factor})
    return cluster.model_copy(update=faster).carried(cluster)


def device(cluster: Cluster, factor: Number) -> Cluster:
    """The cluster with a device that computes everything `factor` times as fast."""
    old = cluster.device
    plain = {name: rate * factor for name in DEVICE if (rate := getattr(old, name)) is not None}
    by_size = {
        "memory_rates": _times(old.memory_rates, factor),
        "gather": {width: _times(rates, factor) for width, rates in old.gather.items()},
    }
    latencies = {"launch": old.launch / factor, "row_latency": old.row_latency / factor}
    new = old.model_copy(update={**plain, **by_size, **latencies})
    return cluster.model_copy(update={"device": new})


def _times(rates: Mapping[float, float], factor: Number) -> dict[float, Number]:
    return {size: rate * factor for size, rate in rates.items()}


def messages(cluster: Cluster, factor: Number, where: LinkName) -> Cluster:
    """The cluster with the link there, and all that was measured on it, multiplied; latency too."""

    def faster(link: Link) -> Link:
        return link.model_copy(
            update={"bandwidth": link.bandwidth * factor, "latency": link.latency / factor}
        )

    measured = {
        key: faster(link) if key.endswith(where) else link
        for key, link in cluster.collectives.items()
    }
    return cluster.model_copy(
        update={"collectives": measured, where: faster(getattr(cluster, where))}
    )
