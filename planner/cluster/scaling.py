"""A cluster with some of its numbers multiplied.

Sensitivity asks what such clusters would change; a refit finds the factors that records imply
(`fitted`).
A factor may be a column [n, 1]: n clusters at once, which closed forms price together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from gnnplan.planner.cluster.spec import GEMMS, Cluster, LinkName
from gnnplan.planner.vocabulary.numbers import Number

# All that a device's speed is in; '/': seconds
DEVICE = (
    *(f"device.{name}" for name in GEMMS),
    "device.memory_bandwidth",
    "device.cache_bandwidth",
    "device.gather",
    "device.row_bandwidth",
    "/device.row_latency",
    "/device.launch",
)


def multiplied(cluster: Cluster, factors: Mapping[str, Number]) -> Cluster:
    """The cluster with numbers multiplied by the names of their fields, as 'host.bandwidth'.

    What begins with '/' is divided. A name may lead to numbers by size; absent numbers stay absent.
    """
    found: Any = cluster
    for name, factor in factors.items():
        times = 1 / factor if name.startswith("/") else factor
        found = _times(found, name.removeprefix("/"), times)
    out: Cluster = found
    return out


def _times(value: Any, name: str, factor: Number) -> Any:
    if value is None:
        return None
    if isinstance(value, Mapping):
        if not name:
            return {size: _times(number, "", factor) for size, number in value.items()}
        # keys of collectives contain a dot
        key, _, rest = (name, "", "") if name in value else name.rpartition(".")
        return {**value, key: _times(value[key], rest, factor)}
    if not name:
        return value * factor
    field, _, rest = name.partition(".")
    return value.model_copy(update={field: _times(getattr(value, field), rest, factor)})


def links(cluster: Cluster, factor: Number, names: Sequence[str]) -> Cluster:
    """The cluster with the bandwidth of these links multiplied.

    As with `--set`, operations that were measured on the links keep what software took of them.
    """
    faster = multiplied(cluster, dict.fromkeys([f"{name}.bandwidth" for name in names], factor))
    return faster.carried(cluster)


def device(cluster: Cluster, factor: Number) -> Cluster:
    """The cluster with a device that computes everything `factor` times as fast."""
    return multiplied(cluster, dict.fromkeys(DEVICE, factor))


def messages(cluster: Cluster, factor: Number, where: LinkName) -> Cluster:
    """The cluster with the link there, and all that was measured on it, multiplied; latency too."""
    measured = [f"collectives.{key}" for key in cluster.collectives if key.endswith(where)]
    names = [
        name for link in (where, *measured) for name in (f"{link}.bandwidth", f"/{link}.latency")
    ]
    return multiplied(cluster, dict.fromkeys(names, factor))


def fitted(
    names: Sequence[str],
    misses: Callable[[dict[str, float]], Sequence[float] | np.ndarray],
    prior: float,
    largest: float = inf,
) -> dict[str, float]:
    """The factors, none above `largest`, for which misses and prior x log(factor) are least.

    misses: of factors by name, logarithms of predicted over true. A factor that they do not depend
    on stays 1.
    """
    from scipy.optimize import least_squares  # here: it takes long, and few refit

    def factors(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.append(misses(factors(logs)), prior * logs)

    bounds = -np.log(largest), np.log(largest)
    return factors(least_squares(residuals, np.zeros(len(names)), bounds=bounds, diff_step=1e-3).x)
