"""How far a cluster's constants may be from the truth, and clusters drawn from that.

A constant has a range, [low, high] times its value: in one of ten cases the truth is below it, in
one of ten above. The file of a cluster may say it (`ranges`). Otherwise the constant's provenance
does (RANGES): a number that was measured is known better than one of a datasheet.

    constant                          what it multiplies
    device.gemm                       the rates of products, in every precision
    device.memory_bandwidth           rates of element-wise work and of the cache
    device.gather                     rates of aggregation, where they were measured
    device.launch                     the time of an operation, however small
    device.overlap_tax                what computation loses beside transfers
    inter_node.bandwidth              the link's bandwidth; each link has its own
    inter_node.latency                and its latency
    collectives.exchange.inter_node   bandwidth and latency of what was measured on the link
    host_rates                        rates of the samplers
    device_rates                      in their place, where GPUs that sample have rates of their own

`device.power` has a range too, but no epoch depends on it (decision/objective.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from gnnplan.planner.cluster.scaling import multiplied
from gnnplan.planner.cluster.spec import DOUBTED, GEMMS, LINKS, Cluster

DRAWS = 300
TENTH = 1.2816  # standard deviations from the median of a normal to its 10th and 90th percentile

# What a provenance says first -> the range of such a constant. Our own measurements are reproduced
# within a tenth (docs/reference/measured-runs.md). Constants fitted to print differ by a third when
# a dataset is left out. Where datasheets times an efficiency were held against print, software
# reached from 0.36 to 1.13 of it on links and 0.49 to 0.73 in products (traces/quoted/fitted.csv,
# without links that TCP or a bus of the host limits).
RANGES: dict[str, tuple[float, float]] = {
    "measured": (0.9, 1.1),
    "nccl-tests": (0.9, 1.1),
    "fitted": (0.75, 1.33),
    "datasheet": (0.4, 1.2),
    "printed": (0.4, 1.2),
    "derived": (0.4, 1.2),
    "assumed": (0.5, 2.0),
    "generic default": (0.5, 2.0),
    "--set": (1.0, 1.0),  # a what-if is about this number
}
UNSAID = (0.5, 1.33)  # of a number that does not say where it comes from
# The fields that a constant stands for, if it is not one itself (scaling.multiplied)
FIELDS = {
    "device.gemm": tuple(f"device.{name}" for name in GEMMS),
    "device.memory_bandwidth": ("device.memory_bandwidth", "device.cache_bandwidth"),
    "device.gather": ("device.gather", "device.row_bandwidth", "/device.row_latency"),
}


def range_of(cluster: Cluster, constant: str) -> tuple[float, float]:
    """The range of a constant, as factors on its value."""
    if constant in cluster.ranges:
        return cluster.ranges[constant]
    source = cluster.provenance.get(constant, "")
    if "fitted to" in source:
        return RANGES["fitted"]
    places = {source.index(kind): kind for kind in RANGES if kind in source}
    return RANGES[places[min(places)]] if places else UNSAID


def constants(cluster: Cluster) -> Iterator[str]:
    """The names of the constants that epochs depend on."""
    yield from (f"device.{name}" for name in DOUBTED if getattr(cluster.device, name))
    for name in LINKS:
        if getattr(cluster, name) and (cluster.servers > 1 or name != "inter_node"):
            yield from (f"{name}.bandwidth", f"{name}.latency")
    for operation in cluster.collectives:
        if cluster.servers > 1 or not operation.endswith("inter_node"):
            yield f"collectives.{operation}"
    yield "device_rates" if cluster.rates_there else "host_rates"


def normals(name: str) -> NDArray[np.float64]:
    """Numbers of a standard normal [DRAWS]; the same for the same name, independent for others.

    Equally many lie in every interval of equal probability (Latin hypercube sampling).
    """
    places = np.random.default_rng(crc32(name.encode())).permutation(DRAWS)
    return np.asarray(ndtri((places + 0.5) / DRAWS))


def factors(cluster: Cluster) -> dict[str, NDArray[np.float64]]:
    """Of every constant that may be other than it is said to be: factors [DRAWS], 1 in the median.

    Constants that are certain are left out.
    """
    return {
        constant: factors_of(cluster, constant)
        for constant in constants(cluster)
        if range_of(cluster, constant) != (1.0, 1.0)
    }


def factors_of(cluster: Cluster, constant: str) -> NDArray[np.float64]:
    """Of a constant: factors [DRAWS], 1 in the median.

    They are lognormal below the median and above it, each with the width that its range says.
    """
    low, high = range_of(cluster, constant)
    z = normals(constant) / TENTH
    return np.asarray(np.where(z < 0, low**-z, high**z))


def drawn(cluster: Cluster) -> Cluster:
    """DRAWS clusters at once: every constant is a column [DRAWS, 1]."""
    found = multiplied(
        cluster,
        {
            field: values[:, np.newaxis]
            for constant, values in factors(cluster).items()
            for field in _fields_of(constant)
        },
    )
    tax = np.minimum(found.device.overlap_tax, 1.0)
    return found.model_copy(update={"device": found.device.model_copy(update={"overlap_tax": tax})})


def _fields_of(constant: str) -> tuple[str, ...]:
    """The fields that a constant multiplies, or divides ('/')."""
    if constant.startswith("collectives."):
        return f"{constant}.bandwidth", f"/{constant}.latency"
    return FIELDS.get(constant, (constant,))
