"""Clusters with some numbers multiplied by factors.

The sensitivity analysis predicts epochs on such clusters; a refit finds the factors that match
measured epochs (`fitted`). A factor may be a column [n, 1]: then the result stands for n clusters,
whose epochs the closed form predicts in one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Any

import numpy as np

from gnnplan.planner.cluster.spec import GEMMS, Cluster, LinkName
from gnnplan.planner.vocabulary.numbers import Number

# All fields that a faster device multiplies, or divides ('/', fields in seconds)
DEVICE = (
    *(f"device.{name}" for name in GEMMS),
    "device.memory_bandwidth",
    "device.hash_rate",
    "device.edge_rate",
    "device.gather",
    "device.gather_scattered",
    "device.row_bandwidth",
    "/device.row_latency",
    "/device.launch",
)


def multiplied(cluster: Cluster, factors: Mapping[str, Number]) -> Cluster:
    """Return the cluster with fields multiplied; `factors` is keyed by field, as 'host.bandwidth'.

    A field after '/' is divided. A field may hold a mapping of numbers; absent fields stay absent.
    """
    out: Any = cluster
    for name, factor in factors.items():
        times = 1 / factor if name.startswith("/") else factor
        out = _times(out, name.removeprefix("/"), times)
    result: Cluster = out
    return result


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
    """Return the cluster with the bandwidth of these links multiplied.

    As with `--set`, the software time of operations measured on the links stays as it is.
    """
    faster = multiplied(cluster, dict.fromkeys([f"{name}.bandwidth" for name in names], factor))
    return faster.carried(cluster)


def device(cluster: Cluster, factor: Number) -> Cluster:
    """Return the cluster with a device that computes everything `factor` times as fast."""
    return multiplied(cluster, dict.fromkeys(DEVICE, factor))


def messages(cluster: Cluster, factor: Number, where: LinkName) -> Cluster:
    """Return the cluster with the link `where`, and all operations measured on it, `factor` times
    as fast, in bandwidth and in latency."""
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
    """Return the factors that minimise the squares of misses and of prior x log(factor).

    misses: maps factors to log(predicted / true) of each observation. A factor on which no miss
    depends stays 1. largest: bound on factors and on their reciprocals.
    """
    from scipy.optimize import least_squares  # here: it takes long, and few refit

    def factors(logs: np.ndarray) -> dict[str, float]:
        return dict(zip(names, np.exp(logs).tolist(), strict=True))

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.append(misses(factors(logs)), prior * logs)

    bounds = -np.log(largest), np.log(largest)
    return factors(least_squares(residuals, np.zeros(len(names)), bounds=bounds, diff_step=1e-3).x)
