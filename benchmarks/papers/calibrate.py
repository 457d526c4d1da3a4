"""Fits at most three constants of a testbed to printed figures.

A constant is a factor on a number of the testbed's preset (planner/problem/inputs.py). A Fit names
the rows to which its constants are fitted. These rows are never scored with these constants:
`leave_one_out` scores each dataset with constants fitted to the other datasets.

`fit_testbed` minimises the sum of the squares of

    log(predicted / printed) / MISS     for every row
    log(factor) / WIDTH                 for every constant

so predictions that are twice and half the printed time weigh the same. The second term is the
prior: without rows, a constant is the preset's number within a factor of three. Presets are
datasheets times an efficiency that was stated before any row was seen; software reaches a third of
that number, or more than the number thanks to caches. Many rows outweigh the prior, and a constant
that does not affect the rows keeps its preset. Rows with equal predictions (PipeGCN's smoothed
variants) have equal errors, so together they weigh as one row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from gnnplan.papers import published, their_software
from gnnplan.papers.figures import predict, testbed, whole
from gnnplan.papers.question import Row, Skip, Testbeds
from gnnplan.planner.cluster.scaling import fitted as fitted_factors
from gnnplan.planner.cluster.spec import Cluster
from gnnplan.planner.problem import inputs
from gnnplan.planner.problem.inputs import SAME, kept_factors
from gnnplan.planner.vocabulary.errors import GnnplanError
from gnnplan.planner.vocabulary.files import Json
from gnnplan.planner.vocabulary.numbers import Floats

MOST = 3  # most constants of a testbed
# standard deviation of the log error of a figure with the right constants
MISS = np.log(1.2)
WIDTH = np.log(3.0)  # standard deviation of the log of a constant, before rows are seen


def whose(row: Row) -> str:
    """Return the testbed whose constants apply to the row."""
    return SAME.get(row["testbed"], row["testbed"])


def scaled(row: Row, factors: Mapping[str, float]) -> Cluster:
    """Return the row's testbed with these factors on its constants."""
    return inputs.scaled(testbed(row), factors, row["model"])


# -- fitting ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """The constants of a testbed, and the rows to which they are fitted."""

    testbed: str
    constants: tuple[str, ...]
    sources: tuple[str, ...]  # beginnings of the rows' source, such as 'Table 3'
    datasets: tuple[str, ...]
    metrics: tuple[str, ...]

    def holds(self, row: Row) -> bool:
        """Return whether these constants are fitted to the row."""
        return (
            whose(row) == self.testbed
            and row["dataset"] in self.datasets
            and row["metric"] in self.metrics
            and row["source"].startswith(self.sources)
        )


def fit_testbed(rows: Sequence[Row], constants: Sequence[str]) -> dict[str, float]:
    """Return the factor of each constant; 1 for all if no row can be predicted."""
    assert len(constants) <= MOST
    return fit_factors(rows, constants, lambda factors: partial(scaled, factors=factors))


def fit_factors(
    rows: Sequence[Row],
    constants: Sequence[str],
    testbeds: Callable[[Mapping[str, float]], Testbeds],
    together: Callable[[Row], int] = lambda row: 1,
) -> dict[str, float]:
    """Return the factor of each constant; testbeds(factors) gives the rows' clusters.

    together: the number of rows, of which a row is one, that together weigh as one."""
    rows = [row for row in rows if float(row["value"]) > 0 and _is_predicted(row)]
    if not rows:
        return dict.fromkeys(constants, 1.0)
    unfitted = [
        (row["metric"], f"{predict(row, testbeds(dict.fromkeys(constants, 1.0))):.9g}")
        for row in rows
    ]
    alike = Counter(unfitted)  # further digits differ by rounding
    counts = [alike[key] * together(row) for key, row in zip(unfitted, rows, strict=True)]
    weights = 1 / np.sqrt(counts) / MISS

    def misses(factors: Mapping[str, float]) -> Floats:
        of = testbeds(factors)
        of_printed = [predict(row, of) / float(row["value"]) for row in rows]
        return np.asarray(weights * np.log(of_printed))

    return fitted_factors(constants, misses, 1 / WIDTH)


def fit_software(rows: Sequence[Row]) -> dict[str, float]:
    """Return the rates of software (their_software.CONSTANTS), fitted to the rows' epochs.

    Rows of a work miss alike, for its versions and its server are the same, so together they weigh
    as one."""
    prior = their_software.CONSTANTS

    def testbeds(factors: Mapping[str, float]) -> Testbeds:
        constants = {name: prior[name] * factor for name, factor in factors.items()}
        return lambda row: their_software.cluster_of(whole(row), row, constants)

    epochs = [row for row in rows if row["metric"] == "epoch_time_s"]
    of_work = Counter(row["paper"] for row in epochs)
    found = fit_factors(epochs, tuple(prior), testbeds, lambda row: of_work[row["paper"]])
    return {name: prior[name] * factor for name, factor in found.items()}


def _is_predicted(row: Row) -> bool:
    try:
        return predict(row) > 0
    except (Skip, GnnplanError):
        return False


# -- the fits in use -------------------------------------------------------------------------------

TIMES = ("epoch_time_s", "comm_time_s", "compute_time_s", "throughput_epochs_per_s", "speedup_vs")
# Behaviour of other people's code and links that datasheets do not show. GNNPipe's code multiplies
# matrices slowly, and computes GraphSAGE more slowly than other models. PipeGCN sends by Gloo
# through the host, which slows down the computation that it overlaps. DGL computes slowly on the
# MI60, and DGL 0.5 even more slowly on P3's P100. GraNNDis prints ratios only, so its constants are
# known up to a common factor.
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
    """Return the row's testbed with the constants in use."""
    return scaled(row, kept_factors(row["testbed"]))


def gave_a_constant(row: Row) -> bool:
    """Return whether a number that predictions use was derived from the row."""
    return published.gave_a_halo(row) or any(fit.holds(row) for fit in FITS)


def left_out(rows: Sequence[Row]) -> Testbeds:
    """Return testbeds whose constants, for each dataset, are fitted to the other datasets."""
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


def leave_one_out(rows: Sequence[Row]) -> Json:
    """Evaluate the rows, each dataset with constants fitted to the other datasets.

    Returns the result of `published.evaluate_rows`. Rows from which a halo, a spread or a factor on
    memory was derived still count as fitted.
    """
    return published.evaluate_rows(rows, published.gave_a_halo, left_out(rows))
