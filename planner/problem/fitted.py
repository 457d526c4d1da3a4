"""Presets of papers' testbeds with the constants that were fitted to their printed figures.

A datasheet does not state the speed of other people's code and links. A preset's file has datasheet
values; traces/quoted/fitted.csv has at most three factors on these values per testbed, and names
the tables that the factors were fitted to (benchmarks/papers/calibrate.py). A plan reads a preset
through this module, so that it uses the factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gnnplan.planner.cluster.scaling import multiplied
from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.problem.inputs import cluster_name, read_cluster
from gnnplan.planner.vocabulary.files import quoted

_INSIDE = ("island.bandwidth", "intra_node.bandwidth", "host.bandwidth")
_BETWEEN = ("inter_node.bandwidth",)
# Constant -> the fields that its factor multiplies, or divides if marked '/'. A larger factor on
# launch and tax means slower, on the other constants faster. A constant may also be the name of a
# GNN: its factor is the device's speed for that GNN.
CONSTANTS = {
    "device": ("device.gemm", "device.memory_bandwidth"),
    "gemm": ("device.gemm",),
    "launch": ("device.launch",),
    "tax": ("device.overlap_tax",),
    "links": (*_INSIDE, *_BETWEEN),
    "inside": _INSIDE,
    "between": _BETWEEN,
    "host": ("host.bandwidth",),
    # all work of the device
    "code": ("device.gemm", "device.memory_bandwidth", "/device.launch"),
    "sampler": ("host_rates", "device_rates"),
}
# Testbed -> the testbed whose factors it uses: the same code on other links or on more servers.
SAME = {"granndis_a6000_nvlink": "granndis_a6000_pcie", "gsplit_p3_16xlarge": "gsplit_p3_8xlarge"}


def kept_factors(testbed: str) -> dict[str, float]:
    """Return constant -> factor as written by `benchmarks/published.py fit`; empty if unfitted."""
    return {line["constant"]: float(line["factor"]) for line in _lines(testbed)}


def _lines(testbed: str) -> list[dict[str, str]]:
    return [line for line in quoted("fitted.csv") if line["testbed"] == SAME.get(testbed, testbed)]


def scaled(cluster: Cluster, factors: Mapping[str, float], model: str) -> Cluster:
    """Apply the factors to the cluster's constants; model: the GNN's name in Workload.model."""
    for constant, factor in factors.items():
        fields = CONSTANTS["device"] if constant == model else CONSTANTS.get(constant, ())
        cluster = multiplied(cluster, dict.fromkeys(fields, factor))
    return cluster


def read_fitted(name: str, model: str) -> tuple[Cluster, str]:
    """Read a cluster by its preset's name or its file; the note names fitted factors ('': none).

    A preset gets the factors of its testbed, which its field `provenance` records; a file gets
    none. model: the GNN's name, because one testbed has a factor for GraphSAGE alone.

    Raises SpecError.
    """
    name = cluster_name(name)
    plain = read_cluster(name)
    factors = {
        constant: factor
        for constant, factor in kept_factors(name).items()
        if constant in CONSTANTS or constant == model
    }
    if not factors:
        return plain, ""
    line = _lines(name)[0]
    source = f"fitted to {line['rows']} printed figures ({line['sources']})"
    fitted, provenance = scaled(plain, factors, model), dict(plain.provenance)
    for field, ratio in _changed(plain, fitted):
        before = f"{provenance[field]}, " if field in provenance else ""
        provenance[field] = f"{before}x {ratio:.3g} {source}"
    applied = ", ".join(f"{constant} x {factor:.3g}" for constant, factor in factors.items())
    note = (
        f"{name} has constants {source}: {applied};"
        f" --cluster {PRESETS / f'{name}.yaml'} plans with datasheet values"
    )
    return fitted.model_copy(update={"provenance": provenance}), note


def _changed(plain: Cluster, fitted: Cluster) -> Iterator[tuple[str, float]]:
    """Yield the dotted field and the ratio (fitted / plain) of every changed number."""
    before = plain.model_dump()
    for part, new in fitted.model_dump().items():
        for field, value in new.items() if isinstance(new, dict) else ():
            old = (before[part] or {}).get(field)
            if isinstance(value, float) and isinstance(old, float) and old and value != old:
                yield f"{part}.{field}", value / old
