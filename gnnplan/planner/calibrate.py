"""At most three constants of a testbed, fitted to printed figures: what a datasheet does not say of other people's code and links.

A constant is a factor on what the preset file gives (CONSTANTS); a Fit names the rows that it is found from, and they are never scored with
it: what is scored on them is left out, dataset by dataset (`leave_one_out`). Least squares of

    log(predicted / printed) / MISS     of every row: a time twice too long and one half as long weigh alike
    log(factor) / WIDTH                 of every constant: before rows are seen it is what the preset says, times or by three

so that rows decide where they are many, and what they do not tell stays as it was. Presets are the centre since they are datasheets times
an efficiency stated before any row was looked at; software reaches between a third of that and what caches make of it. Rows that the model
predicts alike (PipeGCN's smoothed variants) miss alike: together they weigh as one.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from gnnplan.planner import published
from gnnplan.planner.cost import HOST_RATE
from gnnplan.planner.errors import GnnplanError
from gnnplan.planner.published import Row, Skip
from gnnplan.planner.specs import Cluster

MOST = 3  # constants of a testbed
MISS = np.log(1.2)  # what a right constant leaves of a figure
WIDTH = np.log(3.0)  # of what is believed of a constant before rows are seen


def _device(cluster: Cluster, *fields: str, factor: float) -> Cluster:
    told = {field: value * factor for field in fields if (value := getattr(cluster.device, field)) is not None}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=told)})


def _links(cluster: Cluster, *names: str, factor: float) -> Cluster:
    links = {name: link.model_copy(update={"bandwidth": link.bandwidth * factor}) for name in names if (link := getattr(cluster, name))}
    return cluster.model_copy(update=links)


CONSTANTS: dict[str, Callable[..., Cluster]] = {
    "device": lambda cluster, factor: _device(cluster, "gemm", "memory_bandwidth", "cache_bandwidth", factor=factor),
    "gemm": lambda cluster, factor: _device(cluster, "gemm", factor=factor),
    "memory": lambda cluster, factor: _device(cluster, "memory_bandwidth", "cache_bandwidth", factor=factor),
    "launch": lambda cluster, factor: _device(cluster, "launch", factor=factor),
    "tax": lambda cluster, factor: _device(cluster, "overlap_tax", factor=factor),
    "links": lambda cluster, factor: _links(cluster, "island", "intra_node", "inter_node", "host", factor=factor),
    "inside": lambda cluster, factor: _links(cluster, "island", "intra_node", "host", factor=factor),
    "between": lambda cluster, factor: _links(cluster, "inter_node", factor=factor),
    "host": lambda cluster, factor: _links(cluster, "host", factor=factor),
    "code": lambda cluster, factor: CONSTANTS["launch"](CONSTANTS["device"](cluster, factor=factor), factor=1 / factor),
    "sampler": lambda cluster, factor: cluster.model_copy(
        update={"host_rates": {work: cluster.host_rates.get(work, HOST_RATE) * factor for work in ("draw", "lay")}}),
}  # fmt: skip


SAME = {"granndis_a6000_nvlink": "granndis_a6000_pcie", "gsplit_p3_16xlarge": "gsplit_p3_8xlarge"}  # other links or GPUs, the same code


def whose(row: Row) -> str:
    """The testbed whose constants are the row's."""
    return SAME.get(row["testbed"], row["testbed"])


@dataclass(frozen=True)
class Fit:
    """Rows of these tables, datasets and metrics of a testbed gave these constants."""

    testbed: str
    constants: tuple[str, ...]
    sources: tuple[str, ...]
    datasets: tuple[str, ...]
    metrics: tuple[str, ...]

    def holds(self, row: Row) -> bool:
        same = whose(row) == self.testbed and row["dataset"] in self.datasets
        return same and row["metric"] in self.metrics and any(row["source"].startswith(source) for source in self.sources)


def scaled(row: Row, factors: Mapping[str, float]) -> Cluster:
    """The row's testbed with these constants."""
    cluster = published.testbed(row)
    for name, factor in factors.items():
        if name in CONSTANTS:
            cluster = CONSTANTS[name](cluster, factor=factor)
        elif row["model"] == name:
            cluster = CONSTANTS["device"](cluster, factor=factor)
    return cluster


def fit(rows: Sequence[Row], constants: Sequence[str]) -> dict[str, float]:
    """The factor of each constant; 1 of all without rows that can be predicted."""
    assert len(constants) <= MOST
    told = [row for row in rows if float(row["value"]) > 0 and _speaks(row)]
    if not told:
        return dict.fromkeys(constants, 1.0)
    alike = Counter(what := [(row["metric"], published.predict(row)) for row in told])
    weights = np.array([1 / np.sqrt(alike[each]) / MISS for each in what])

    def errors(logs: np.ndarray) -> np.ndarray:
        factors = dict(zip(constants, np.exp(logs).tolist(), strict=True))
        misses = [np.log(published.predict(row, partial(scaled, factors=factors)) / float(row["value"])) for row in told]
        return np.append(weights * misses, logs / WIDTH)

    found = least_squares(errors, np.zeros(len(constants)), diff_step=1e-3)
    return dict(zip(constants, np.exp(found.x).tolist(), strict=True))


def _speaks(row: Row) -> bool:
    try:
        return published.predict(row) > 0
    except (Skip, GnnplanError):
        return False


# -- the fits that are kept ------------------------------------------------------------------------------------------------------

TIMES = ("epoch_time_s", "comm_time_s", "compute_time_s", "throughput_epochs_per_s", "speedup_vs")
# What other people's code and links do that datasheets do not say. GNNPipe's code multiplies slowly and pays more for GraphSAGE; PipeGCN
# sends by Gloo through the host, whose work beside computation costs some of it; DGL computes slowly on the MI60, and DGL 0.5 on P3's P100
# yet more so. Where print has ratios alone (GraNNDis) constants are known up to a common factor.
FITS = (
    Fit("gnnpipe_a5000", ("gemm", "links", "sage"), ("Table 3", "Table 5"), ("squirrel", "reddit"), TIMES),
    Fit("pipegcn_2080ti", ("device", "links", "tax"), ("Table 2", "Table 4", "Table 6"), ("reddit", "ogbn-products"),
        (*TIMES, "comm_ratio")),
    Fit("pipegcn_mi60", ("device", "inside", "between"), ("Table 5", "Table 8"), ("reddit", "ogbn-papers100M"), TIMES),
    Fit("granndis_a6000_pcie", ("inside", "between", "launch"), ("Table 4", "Sec. 8.2"), ("ogbn-arxiv", "ogbn-products", "reddit"),
        (*TIMES, "ext_comm_ratio")),
    Fit("p3_p100", ("between", "host", "device"), ("Table 4",), ("ogbn-products", "ogbn-papers100M", "facebook-darwini"),
        ("epoch_time_s", "dag_time_s", "copy_time_s", "compute_time_s")),
    Fit("gsplit_p3_8xlarge", ("host", "code", "sampler"), ("Table 3",), ("orkut", "friendster"),
        ("epoch_time_s", "sample_time_s", "forward_backward_time_s")),
)  # fmt: skip
FITTED = Path(__file__).resolve().parent.parent / "traces" / "fitted.csv"


@cache
def found() -> dict[str, dict[str, float]]:
    """Testbed -> constant -> factor, as `benchmarks/published.py fit` left them."""
    factors: dict[str, dict[str, float]] = {}
    with open(FITTED, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            factors.setdefault(line["testbed"], {})[line["constant"]] = float(line["factor"])
    return factors


def calibrated(row: Row) -> Cluster:
    """The row's testbed with the constants that are kept."""
    return scaled(row, found().get(whose(row), {}))


def gave_a_constant(row: Row) -> bool:
    return published.gave_a_halo(row) or any(fit.holds(row) for fit in FITS)


def leave_one_out(rows: Sequence[Row]) -> dict[str, Any]:
    """`published.score`, where what gave constants is scored with those of the other datasets; what gave a halo is not."""
    left: dict[tuple[str, str], dict[str, float]] = {}
    for each in FITS:
        used = [row for row in rows if each.holds(row)]
        for dataset in {row["dataset"] for row in used}:
            others = [row for row in used if row["dataset"] != dataset]
            left[each.testbed, dataset] = fit(others, each.constants) if others else {}

    def testbeds(row: Row) -> Cluster:
        return scaled(row, left[key]) if (key := (whose(row), row["dataset"])) in left else calibrated(row)

    return published.score(rows, published.gave_a_halo, testbeds)
