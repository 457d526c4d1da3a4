"""Fits at most three constants of a testbed to printed figures.

A constant is a factor on what the testbed's preset gives (planner/problem/fitted.py). A Fit names
the rows that its constants are found from. These rows are never scored with those constants:
`leave_one_out` scores each dataset with constants found from the other datasets.

`fit_testbed` minimises the squares of

    log(predicted / printed) / MISS     of every row
    log(factor) / WIDTH                 of every constant

so a time that is predicted twice too long weighs as much as one half too long. The second term is
the prior: before a row is seen, a constant is what its preset says, times or by three. Presets are
datasheets times an efficiency that was stated before any row was looked at, and software reaches
between a third of that and what caches make of it. Where rows are many they decide; what they do
not depend on stays as it was. Rows that the model predicts alike (PipeGCN's smoothed variants) miss
alike, so together they weigh as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.papers import published, their_software
from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import testbed, whole
from gnnplan.papers.question import Row, Skip, Testbeds
from gnnplan.planner.cluster.scaling import fitted as fitted_factors
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.problem import fitted
from gnnplan.planner.problem.fitted import SAME, kept_factors
from gnnplan.planner.vocabulary.errors import GnnplanError

MOST = 3  # constants of a testbed
# error of a figure that a right constant leaves, as a standard deviation of logs
MISS = np.log(1.2)
WIDTH = np.log(3.0)  # of the prior of a constant, likewise


def whose(row: Row) -> str:
    """The testbed whose constants hold for the row."""
    return SAME.get(row["testbed"], row["testbed"])


def scaled(row: Row, factors: Mapping[str, float]) -> Cluster:
    """The row's testbed with these factors on its constants."""
    return fitted.scaled(testbed(row), factors, row["model"])


# -- fitting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The constants of a testbed, and the rows that give them: tables, datasets, metrics."""

    testbed: str
    constants: tuple[str, ...]
    sources: tuple[str, ...]
    datasets: tuple[str, ...]
    metrics: tuple[str, ...]

    def holds(self, row: Row) -> bool:
        """Whether the row gives these constants."""
        return (
            whose(row) == self.testbed
            and row["dataset"] in self.datasets
            and row["metric"] in self.metrics
            and row["source"].startswith(self.sources)
        )


def fit_testbed(rows: Sequence[Row], constants: Sequence[str]) -> dict[str, float]:
    """The factor of each constant; 1 of each where no row can be predicted."""
    assert len(constants) <= MOST
    return fit_factors(rows, constants, lambda factors: partial(scaled, factors=factors))


def fit_factors(
    rows: Sequence[Row],
    constants: Sequence[str],
    testbeds: Callable[[Mapping[str, float]], Testbeds],
) -> dict[str, float]:
    """The factor of each constant, of which `testbeds` makes the rows' testbeds."""
    rows = [row for row in rows if float(row["value"]) > 0 and _is_predicted(row)]
    if not rows:
        return dict.fromkeys(constants, 1.0)
    unfitted = [
        (row["metric"], predict(row, testbeds(dict.fromkeys(constants, 1.0)))) for row in rows
    ]
    alike = Counter(unfitted)
    weights = np.array([1 / np.sqrt(alike[key]) / MISS for key in unfitted])

    def misses(factors: Mapping[str, float]) -> NDArray[np.float64]:
        of = testbeds(factors)
        of_printed = [predict(row, of) / float(row["value"]) for row in rows]
        return np.asarray(weights * np.log(of_printed))

    return fitted_factors(constants, misses, 1 / WIDTH)


def fit_software(rows: Sequence[Row]) -> dict[str, float]:
    """The constants of software (their_software.CONSTANTS) that the rows' epochs imply."""
    prior = their_software.CONSTANTS

    def testbeds(factors: Mapping[str, float]) -> Testbeds:
        constants = {name: prior[name] * factor for name, factor in factors.items()}
        return lambda row: their_software.cluster_of(whole(row), row, constants)

    epochs = [row for row in rows if row["metric"] == "epoch_time_s"]
    found = fit_factors(epochs, tuple(prior), testbeds)
    return {name: prior[name] * factor for name, factor in found.items()}


def _is_predicted(row: Row) -> bool:
    try:
        return predict(row) > 0
    except (Skip, GnnplanError):
        return False


# -- the fits that are kept ------------------------------------------------------------------------

TIMES = ("epoch_time_s", "comm_time_s", "compute_time_s", "throughput_epochs_per_s", "speedup_vs")
# What other people's code and links do that datasheets do not say. GNNPipe's code multiplies
# matrices slowly, and computes GraphSAGE more slowly than other models. PipeGCN sends by Gloo
# through the host, which costs some of the computation beside it. DGL computes slowly on the MI60,
# and DGL 0.5 on P3's P100 yet more so. GraNNDis prints ratios only, so its constants are known up
# to a common factor.
FITS = (
    Fit(
        "gnnpipe_a5000",
        ("gemm", "links", "sage"),
        ("Table 3", "Table 5"),
        ("squirrel", "reddit"),
        TIMES,
    ),
    Fit(
        "pipegcn_2080ti",
        ("device", "links", "tax"),
        ("Table 2", "Table 4", "Table 6"),
        ("reddit", "ogbn-products"),
        (*TIMES, "comm_ratio"),
    ),
    Fit(
        "pipegcn_mi60",
        ("device", "inside", "between"),
        ("Table 5", "Table 8"),
        ("reddit", "ogbn-papers100M"),
        TIMES,
    ),
    Fit(
        "granndis_a6000_pcie",
        ("inside", "between", "launch"),
        ("Table 4", "Sec. 8.2"),
        ("ogbn-arxiv", "ogbn-products", "reddit"),
        (*TIMES, "ext_comm_ratio"),
    ),
    Fit(
        "p3_p100",
        ("between", "host", "device"),
        ("Table 4",),
        ("ogbn-products", "ogbn-papers100M", "facebook-darwini"),
        ("epoch_time_s", "dag_time_s", "copy_time_s", "compute_time_s"),
    ),
    Fit(
        "gsplit_p3_8xlarge",
        ("host", "code", "sampler"),
        ("Table 3",),
        ("orkut", "friendster"),
        ("epoch_time_s", "sample_time_s", "forward_backward_time_s"),
    ),
)


def calibrated(row: Row) -> Cluster:
    """The row's testbed with the constants that are kept."""
    return scaled(row, kept_factors(row["testbed"]))


def gave_a_constant(row: Row) -> bool:
    """Whether a number that predictions start from was made from the row."""
    return published.gave_a_halo(row) or any(fit.holds(row) for fit in FITS)


def left_out(rows: Sequence[Row]) -> Testbeds:
    """Testbeds on which each dataset has constants fitted to the other datasets' rows."""
    found: dict[tuple[str, str], dict[str, float]] = {}  # testbed, dataset -> factors
    for fit in FITS:
        used = [row for row in rows if fit.holds(row)]
        for dataset in {row["dataset"] for row in used}:
            others = [row for row in used if row["dataset"] != dataset]
            found[fit.testbed, dataset] = fit_testbed(others, fit.constants) if others else {}

    def testbeds(row: Row) -> Cluster:
        key = whose(row), row["dataset"]
        return scaled(row, found[key]) if key in found else calibrated(row)

    return testbeds


def leave_one_out(rows: Sequence[Row]) -> dict[str, Any]:
    """`published.evaluate_rows`, each dataset with constants fitted to the other datasets.

    Rows that gave a halo, a spread or a factor on memory count as fitted all the same.
    """
    return published.evaluate_rows(rows, published.gave_a_halo, left_out(rows))
