"""Predicts printed figures of other people's systems, and computes the errors of the predictions.

    rows.py       reads and checks a file of figures
    interpret.py  row -> question: graph, GNN, testbed, strategy
    figures.py    question -> figure
    published.py  all rows: errors by metric, errors of epochs by kind and by number of GPUs, and
                  how often the faster strategy is predicted

calibrate.py fits constants of the testbeds to some of the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any

import numpy as np

from gnnplan.papers import mini_batch, their_memory
from gnnplan.papers.figures import predict
from gnnplan.papers.interpret import question, testbed
from gnnplan.papers.question import Row, Skip, Testbeds
from gnnplan.papers.rows import COLUMNS, JOB
from gnnplan.planner.decision.candidate import Candidate, range_of
from gnnplan.planner.vocabulary.errors import GnnplanError

DIFFERENT = 0.05  # printed times with a smaller relative difference have no winner


def gave_a_halo(row: Row) -> bool:
    """Return whether a number that predictions use was derived from the row.

    Halos in planner/graph/datasets/ are derived from some rows: Reddit's from GNNPipe Table 4,
    ogbn-products' from PipeGCN Tables 2 and 4 (5 parts), ogbn-papers100M's from PipeGCN Table 5.
    The batch spreads of GSplit's graphs are made from its Table 1, and GNNLab's batch says how many
    vertices are near a seed of ogbn-papers100M; their_memory.py has a factor on memory.
    """
    paper, strategy, metric = row["paper"], row["strategy"], row["metric"]
    source = paper, row["dataset"]
    if their_memory.gave_a_factor(row):
        return True
    if paper in ("gsplit", "gnnlab"):
        return metric.startswith(mini_batch.SAMPLED)
    if source == ("gnnpipe", "reddit"):
        return (strategy, metric) == ("graph_parallel", "comm_volume_bytes")
    if source == ("pipegcn", "ogbn-products"):
        is_five_parts = (strategy, row["gpus_per_node"]) == ("graph_parallel", "5")
        return is_five_parts and metric in ("comm_ratio", "throughput_epochs_per_s")
    times = ("epoch_time", "comm_time")
    return source == ("pipegcn", "ogbn-papers100M") and metric.startswith(times)


def evaluate_rows(
    rows: Iterable[Row], fitted: Callable[[Row], bool] = gave_a_halo, testbeds: Testbeds = testbed
) -> dict[str, Any]:
    """Predict all rows. Returns

    "rows": each with "predicted", "error" (relative; for facts and shares the difference) and
    "fitted"; rows of epochs also with "kind" and the 80 % range "low_s" to "high_s";
    "skipped": each with the reason "why";
    "summary": {"n", "mape", "p95", "max"} by metric, over rows that are not `fitted`, and
    {"winner": {"n", "right"}};
    "kinds": {"n", "median", "ranges", "in_range"} by kind, over epochs that are not `fitted`;
    "scaling": {"n", "median"} of these epochs, divided by those on fewer GPUs.
    """
    predicted: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for row in rows:
        plain = {name: row[name] for name in COLUMNS}
        try:
            figure = predict(row, testbeds)
        except (Skip, GnnplanError) as error:
            skipped.append({**plain, "why": str(error)})
            continue
        result = {"predicted": figure, "error": _error(row, figure), "fitted": fitted(row)}
        epoch = _in_doubt(row, figure, testbeds) if row["metric"] == "epoch_time_s" else {}
        predicted.append({**plain, **result, **epoch})
    epochs = [row for row in predicted if "kind" in row and not row["fitted"]]
    return {
        "rows": predicted,
        "skipped": skipped,
        "summary": {**_summary(predicted), "winner": _winners(predicted)},
        "kinds": _kinds(epochs),
        "scaling": _scaling(epochs),
    }


def _in_doubt(row: Row, figure: float, testbeds: Testbeds) -> dict[str, Any]:
    """Return the kind of the row's epoch, and a plan's 80 % range around `figure`, the prediction
    for the row's software."""
    case = question(row, testbeds=testbeds)
    problem = case.problem
    ours_s = Candidate(case.strategy, case.prediction, problem).drawn_s
    low_s, high_s = range_of(ours_s * figure / case.prediction.epoch_s, figure)
    trained_on = {"full": "full graph", "mini": "mini-batches"}[problem.workload.mode]
    gpus = "one GPU" if problem.ranks == 1 else "several GPUs"
    return {"kind": f"{trained_on}, {gpus}", "low_s": low_s, "high_s": high_s}


def _kinds(epochs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by kind of epoch, the median error and the share inside the 80 % range."""
    kinds = {}
    for kind in sorted({row["kind"] for row in epochs}):
        of = [row for row in epochs if row["kind"] == kind]
        kinds[kind] = {
            "n": len(of),
            "median": median(abs(row["error"]) for row in of),
            "ranges": len(of),
            "in_range": mean(map(is_inside, of)),
        }
    return kinds


def is_inside(epoch: dict[str, Any]) -> bool:
    """Return whether a printed epoch lies inside the 80 % range."""
    return bool(epoch["low_s"] <= float(epoch["value"]) <= epoch["high_s"])


def _scaling(epochs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the median error of epochs divided by the same epoch on the fewest GPUs."""
    series: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    sizes = ("num_nodes", "gpus_per_node")
    for row in epochs:
        key = tuple(
            row[name] for name in (*JOB, "strategy", "strategy_params") if name not in sizes
        )
        series.setdefault(key, []).append(row)
    errors = []
    for rows in series.values():
        least, *more = sorted(rows, key=lambda row: [int(row[name]) for name in sizes])
        errors += [abs((1 + row["error"]) / (1 + least["error"]) - 1) for row in more]
    return {"n": len(errors), "median": median(errors) if errors else 0.0}


def _error(row: Row, figure: float) -> float:
    """Return the relative error; for facts (0 or 1), shares and printed zeros the difference."""
    printed, metric = float(row["value"]), row["metric"]
    absolute = metric.startswith("fits_in") or metric.endswith(("_ratio", "_fraction_vs"))
    return figure - printed if absolute or printed == 0 else figure / printed - 1


def _summary(predicted: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Return, by metric, a summary of the errors of rows that are not fitted."""
    errors: dict[str, list[float]] = {}
    for row in predicted:
        if not row["fitted"]:
            errors.setdefault(row["metric"], []).append(abs(row["error"]))
    return {
        metric: {
            "n": len(of),
            "mape": mean(of),
            "p95": float(np.percentile(of, 95)),
            "max": max(of),
        }
        for metric, of in sorted(errors.items())
    }


def _winners(predicted: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count pairs of strategies with different printed times, and correctly predicted winners.

    A pair is two rows with equal columns JOB, or a row that prints a ratio. A strategy with another
    sampler or software counts as another strategy.
    """
    # printed and predicted time of the second strategy, divided by that of the first
    pairs: list[tuple[float, float]] = []
    by_job: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in predicted:
        if row["metric"] == "epoch_time_s":
            by_job.setdefault(tuple(row[name] for name in JOB), []).append(row)
        elif row["metric"] == "speedup_vs":
            pairs.append((float(row["value"]), row["predicted"]))
        elif row["metric"] == "slowdown_fraction_vs":
            pairs.append((1 / (1 + float(row["value"])), 1 / (1 + row["predicted"])))
    for rows in by_job.values():
        for a, b in combinations(rows, 2):
            if _system(a) != _system(b):
                printed = float(b["value"]) / float(a["value"])
                pairs.append((printed, b["predicted"] / a["predicted"]))
    different = [pair for pair in pairs if max(pair[0], 1 / pair[0]) > 1 + DIFFERENT]
    right = sum((printed - 1) * (figure - 1) > 0 for printed, figure in different)
    return {"n": len(different), "right": right}


def _system(row: Row) -> tuple[str | None, ...]:
    """Return the row's strategy, place of the sampler, and software (None: not stated)."""
    params = json.loads(row["strategy_params"] or "{}")
    return row["strategy"], params.get("sampler"), params.get("software")
