"""Presets of papers' testbeds with the constants that were fitted to their printed figures.

A datasheet does not say how fast other people's code and links are. A preset's file holds datasheet
values; traces/quoted/fitted.csv holds at most three factors on them per testbed, with the tables
that they were fitted to (benchmarks/papers/calibrate.py). A plan takes a preset from here, so that
it knows what print has shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gnnplan.planner.cluster.scaling import multiplied
from gnnplan.planner.cluster.spec import PRESETS, Cluster
from gnnplan.planner.problem.inputs import read_cluster
from gnnplan.planner.vocabulary.files import quoted

_MEMORY = ("device.memory_bandwidth", "device.cache_bandwidth")
_INSIDE = ("island.bandwidth", "intra_node.bandwidth", "host.bandwidth")
_BETWEEN = ("inter_node.bandwidth",)
# Constant -> the fields that its factor multiplies; '/': that it divides. Of launch and tax more is
# slower, of others faster. A constant may also be a model's name: then it is the device's speed for
# that model.
CONSTANTS = {
    "device": ("device.gemm", *_MEMORY),
    "gemm": ("device.gemm",),
    "memory": _MEMORY,
    "launch": ("device.launch",),
    "tax": ("device.overlap_tax",),
    "links": (*_INSIDE, *_BETWEEN),
    "inside": _INSIDE,
    "between": _BETWEEN,
    "host": ("host.bandwidth",),
    "code": ("device.gemm", *_MEMORY, "/device.launch"),  # all that the device does
    "sampler": ("host_rates", "device_rates"),
}
# Testbeds that take another's constants: the same code on other links, or on more servers.
SAME = {"granndis_a6000_nvlink": "granndis_a6000_pcie", "gsplit_p3_16xlarge": "gsplit_p3_8xlarge"}


def kept_factors(testbed: str) -> dict[str, float]:
    """Constant -> factor, as `benchmarks/published.py fit` wrote them; empty where none is kept."""
    return {line["constant"]: float(line["factor"]) for line in _lines(testbed)}


def _lines(testbed: str) -> list[dict[str, str]]:
    return [line for line in quoted("fitted.csv") if line["testbed"] == SAME.get(testbed, testbed)]


def scaled(cluster: Cluster, factors: Mapping[str, float], model: str) -> Cluster:
    """The cluster with these factors on its constants; `model` is the GNN."""
    for constant, factor in factors.items():
        fields = CONSTANTS["device"] if constant == model else CONSTANTS.get(constant, ())
        cluster = multiplied(cluster, dict.fromkeys(fields, factor))
    return cluster


def read_fitted(name: str, model: str) -> tuple[Cluster, str]:
    """A cluster by its preset's name or its file, and a note on what was fitted ('': nothing).

    The factors of a preset's testbed are applied to its numbers, and `provenance` says so. `model`
    is the GNN: one testbed has a factor for GraphSAGE. Files are read as they are.

    Raises SpecError.
    """
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
    told = ", ".join(f"{constant} x {factor:.3g}" for constant, factor in factors.items())
    note = (
        f"{name} has constants {source}: {told};"
        f" --cluster {PRESETS / f'{name}.yaml'} plans with datasheet values"
    )
    return fitted.model_copy(update={"provenance": provenance}), note


def _changed(plain: Cluster, fitted: Cluster) -> Iterator[tuple[str, float]]:
    """Every number that the factors changed, as a dotted field, and by how much."""
    before = plain.model_dump()
    for part, new in fitted.model_dump().items():
        for field, value in new.items() if isinstance(new, dict) else ():
            known = (before[part] or {}).get(field)
            if isinstance(value, float) and isinstance(known, float) and known and value != known:
                yield f"{part}.{field}", value / known
