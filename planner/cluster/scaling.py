"""Clusters with some numbers multiplied by factors: what-if questions, refits, and doubt.

The sensitivity analysis predicts epochs on such clusters; a refit finds the factors that match
measured epochs (`fitted`). A factor may be a column [n, 1]: then the result stands for n clusters,
whose epochs the closed form predicts in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any
from zlib import crc32

import numpy as np
from scipy.special import ndtri

from gnnplan.planner.cluster.spec import DOUBTED, GEMMS, LINKS, Cluster, LinkName
from gnnplan.planner.vocabulary.numbers import Floats, Number

# Fields that a constant's factor multiplies, if not the field of its name
FIELDS = {
    "device.gemm": tuple(f"device.{name}" for name in (*GEMMS, "product_bandwidth")),
    "device.memory_bandwidth": ("device.memory_bandwidth", "device.hash_rate", "device.edge_rate"),
    "device.gather": (
        "device.gather",
        "device.gather_scattered",
        "device.row_bandwidth",
        "/device.row_latency",
    ),
}
# All fields that a faster device multiplies, or divides ('/', fields in seconds)
DEVICE = (*(field for fields in FIELDS.values() for field in fields), "/device.launch")


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


# -- doubt -----------------------------------------------------------------------------------------

# Uncertainty of a cluster's constants: a range per constant, and clusters drawn from the ranges.
#
# A constant has a range, [low, high] times its value: the true value is below the range in one of
# ten cases, and above it in one of ten. A cluster file may give the range (`ranges`). Otherwise the
# constant's provenance implies it (RANGES): a measured number is more certain than a datasheet's.
#
#     constant                          numbers that its factor multiplies
#     device.gemm                       the rates of products, in every precision
#     device.memory_bandwidth           rates of element-wise work and of the cache
#     device.gather                     measured rates of aggregation
#     device.launch                     the fixed time of a framework operation
#     device.overlap_tax                the delay of computation that overlaps transfers
#     inter_node.bandwidth              the link's bandwidth; a constant for each link
#     inter_node.latency                the link's latency; a constant for each link
#     collectives.exchange.inter_node   bandwidth and latency of an operation measured on the link
#     host_rates                        rates of the samplers
#     device_rates                      rates of GPUs that sample, if given; replaces host_rates
#
# `device.power` has a range too, but no epoch depends on it (decision/objective.py).


DRAWS = 300
TENTH = 1.2816  # standard deviations from the median of a normal to its 10th and 90th percentile

# First of these words in a provenance -> range of the constant. Our own measurements are
# reproducible within a tenth (docs/reference/measured-runs.md). Constants fitted to printed epochs
# change by up to a third when a dataset is left out. Compared with printed epochs, software reached
# 0.36 to 1.13 times the datasheet number times an efficiency on links, and 0.49 to 0.73 times in
# products (traces/quoted/fitted.csv, without links that TCP or a bus of the host limits).
RANGES: dict[str, tuple[float, float]] = {
    "measured": (0.9, 1.1),
    "nccl-tests": (0.9, 1.1),
    "fitted": (0.75, 1.33),
    "datasheet": (0.4, 1.2),
    "printed": (0.4, 1.2),
    "derived": (0.4, 1.2),
    "assumed": (0.5, 2.0),
    "generic default": (0.5, 2.0),
    "--set": (1.0, 1.0),  # a what-if question assumes exactly this number
}
UNSAID = (0.5, 1.33)  # range of a number without provenance


def range_of(cluster: Cluster, constant: str) -> tuple[float, float]:
    """Return the range of a constant, as factors (low, high) on its value."""
    if constant in cluster.ranges:
        return cluster.ranges[constant]
    source = cluster.provenance.get(constant, "")
    if "fitted to" in source:
        return RANGES["fitted"]
    places = {source.index(kind): kind for kind in RANGES if kind in source}
    return RANGES[places[min(places)]] if places else UNSAID


def constants(cluster: Cluster) -> Iterator[str]:
    """Yield the names of the constants that epochs depend on."""
    yield from (f"device.{name}" for name in DOUBTED if getattr(cluster.device, name))
    for name in LINKS:
        if getattr(cluster, name) and (cluster.servers > 1 or name != "inter_node"):
            yield from (f"{name}.bandwidth", f"{name}.latency")
    for operation in cluster.collectives:
        if cluster.servers > 1 or not operation.endswith("inter_node"):
            yield f"collectives.{operation}"
    yield "device_rates" if cluster.device_sampler_rates else "host_rates"


def normals(name: str) -> Floats:
    """Return draws of a standard normal [DRAWS], seeded by `name`.

    Every interval of equal probability has equally many draws (Latin hypercube sampling).
    """
    places = np.random.default_rng(crc32(name.encode())).permutation(DRAWS)
    return np.asarray(ndtri((places + 0.5) / DRAWS))


def factors(cluster: Cluster) -> dict[str, Floats]:
    """Return factors [DRAWS], with median 1, on each constant whose value is not certain."""
    return {
        constant: factors_of(cluster, constant)
        for constant in constants(cluster)
        if range_of(cluster, constant) != (1.0, 1.0)
    }


def factors_of(cluster: Cluster, constant: str) -> Floats:
    """Return factors [DRAWS] on a constant, with median 1.

    They are lognormal below the median and above it, with the widths that the range implies.
    """
    low, high = range_of(cluster, constant)
    z = normals(constant) / TENTH
    return np.asarray(np.where(z < 0, low**-z, high**z))


def drawn(cluster: Cluster) -> Cluster:
    """Return DRAWS clusters as one: every constant is a column [DRAWS, 1]."""
    by_field = dict[str, Floats]()
    for constant, values in factors(cluster).items():
        fields = FIELDS.get(constant, (constant,))
        if constant.startswith("collectives."):
            fields = f"{constant}.bandwidth", f"/{constant}.latency"
        by_field |= dict.fromkeys(fields, values[:, np.newaxis])
    out = multiplied(cluster, by_field)
    tax = np.minimum(out.device.overlap_tax, 1.0)
    return out.model_copy(update={"device": out.device.model_copy(update={"overlap_tax": tax})})
