"""Predicts printed figures of other people's systems, and computes the errors of the predictions.

A file has one row per figure, with the columns COLUMNS, and is checked when it is read. figures.py
predicts a row. Errors are by metric, errors of epochs by kind and by number of GPUs, and it is
counted how often the faster strategy is predicted. calibrate.py fits constants of the testbeds to
some of the figures."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from operator import itemgetter
from pathlib import Path
from statistics import mean, median

import numpy as np

from gnnplan.papers import full_graph, mini_batch
from gnnplan.papers.figures import predict, question, testbed
from gnnplan.papers.question import Row, Skip, Testbeds, params_of
from gnnplan.planner.decision.candidate import Candidate, range_of
from gnnplan.planner.vocabulary.errors import GnnplanError, SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Json, from_json, read_bytes, suggest
from gnnplan.planner.vocabulary.numbers import grouped
from gnnplan.planner.vocabulary.units import number_of

# -- the file --------------------------------------------------------------------------------------


MAX_CSV = 1 << 26  # [B]
SMALLEST, LARGEST = 1e-20, 1e20  # bounds of a figure that is not 0
LARGEST_PARAM = 10**12  # largest number among a strategy's parameters
# the training and its machine; rows with equal columns compare strategies
JOB = (
    *("paper", "source", "testbed", "dataset", "model", "layers", "hidden"),
    *("num_nodes", "gpus_per_node"),
)
COLUMNS = (
    *JOB,
    *("strategy", "strategy_params", "metric", "baseline", "value", "unit_as_printed", "note"),
)
# Unit as printed -> the kinds of metric that can have it. Values are in SI units, so the unit only
# serves to detect mistakes.
UNITS = {
    **dict.fromkeys(("s", "ms", "min"), "time"),
    **dict.fromkeys(("MB", "GB"), "bytes"),
    **dict.fromkeys(("M", "GPUs", "partitions", "nodes", "epochs"), "count"),
    **dict.fromkeys(("OOM", "runs"), "fact"),
    **{"B": "bytes or count", "%": "share", "x": "ratio", "epochs/s": "rate", "": "any"},
}
# ending of a metric's name -> its kind; other metrics may have any unit
KINDS = {
    "_time_s": "time",
    "_bytes": "bytes",
    "epochs_per_s": "rate",
    "speedup_vs": "ratio",
    "_ratio_vs": "ratio",
    "_pct": "share",
    "_reduction_vs": "ratio",
    "_ratio": "share",
    "_fraction_vs": "share",
    "fits_in_memory": "fact",
    "min_gpus": "count",
    "min_partitions": "count",
}


def read(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a file, each with its line number as 'line'.

    Raises SpecError with file, line and remedy.
    """
    try:
        with io.StringIO(read_bytes(path, MAX_CSV).decode("utf-8-sig"), newline="") as file:
            reader = csv.DictReader(file)
            header = tuple(reader.fieldnames or ())
            if missing := [name for name in COLUMNS if name not in header]:
                raise SpecError(
                    f"{path}:1: missing columns: {', '.join(missing)}; a file of published figures"
                    f" has {', '.join(COLUMNS)}"
                )
            if unknown := [name for name in header if name not in COLUMNS]:
                raise SpecError(
                    f"{path}:1: unknown columns: {', '.join(unknown)}{suggest(unknown[0], COLUMNS)}"
                )
            rows = [
                {**{name: row[name] or "" for name in COLUMNS}, "line": str(reader.line_num)}
                for row in reader
            ]
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError(f"{path}: cannot be read ({error})") from error
    for row in rows:
        where = f"{path}:{row['line']}: "
        _check_value(where, row, _finite_value(where, row))
        _check_counts(where, row)
        _check_params(where, row)
    return rows


def _finite_value(where: str, row: Row) -> float:
    try:
        return number_of(row["value"], float)
    except ValueError:
        raise SpecError(
            f"{where}value {row['value'][:MOST_SHOWN]!r} is not a number; write it in SI (seconds,"
            " bytes, counts), or as a fraction"
        ) from None


def _check_value(where: str, row: Row, value: float) -> None:
    """Raise SpecError if metric, unit and value do not fit together."""
    metric, unit = row["metric"], row["unit_as_printed"]
    kind = next((kind for end, kind in KINDS.items() if metric.endswith(end)), "any")
    if (value and not SMALLEST <= abs(value) <= LARGEST) or (
        metric == "slowdown_fraction_vs" and value <= -1
    ):
        raise SpecError(
            f"{where}value {row['value'][:MOST_SHOWN]!r} of {metric[:MOST_SHOWN]} cannot be; write"
            " it in SI"
        )
    if unit not in UNITS:
        raise SpecError(f"{where}unit {unit!r} is unknown{suggest(unit, UNITS)}")
    if "any" not in (kind, UNITS[unit]) and kind not in UNITS[unit]:
        raise SpecError(
            f"{where}{metric} cannot be printed in {unit!r}, a unit of {UNITS[unit]}; give one of"
            f" {kind}"
        )
    may_be_zero = metric.startswith(("comm_time_s", "reduce_time_s"))
    if value <= 0 and kind in ("time", "ratio", "rate") and not may_be_zero:
        raise SpecError(f"{where}{metric} must be above 0, is {row['value']}")


def _check_counts(where: str, row: Row) -> None:
    """Raise SpecError if a number of layers, columns, servers or GPUs is not a count."""
    for field in ("layers", "hidden", "num_nodes", "gpus_per_node"):
        text = row[field]
        least = 0 if field == "gpus_per_node" else 1
        if text and not (len(text) < 7 and text.isdecimal() and int(text) >= least):
            raise SpecError(
                f"{where}{field} {text[:MOST_SHOWN]!r} is not a whole number above 0 (and"
                " below a million); leave it empty where it is not stated"
            )


def _check_params(where: str, row: Row) -> None:
    """Raise SpecError if the strategy's parameters are not a flat JSON object."""
    remedy = "write it as an object, or leave it empty"
    params = from_json(f"{where}strategy_params", row["strategy_params"] or "{}", remedy)
    if not isinstance(params, dict):
        raise SpecError(f"{where}strategy_params is not a JSON object")
    for name, value in params.items():
        if not all(map(_is_param, value if isinstance(value, list) else [value])):
            raise SpecError(
                f"{where}strategy_params: {name} must be text or a number in [0,"
                f" {LARGEST_PARAM:.0e}], or a list of these, found {str(value)[:MOST_SHOWN]}"
            )


def _is_param(value: object) -> bool:
    if isinstance(value, int | float):  # also a bool
        return 0 <= value <= LARGEST_PARAM
    return value is None or isinstance(value, str)


# -- errors ----------------------------------------------------------------------------------------


DIFFERENT = 0.05  # printed times with a smaller relative difference have no winner


def gave_a_halo(row: Row) -> bool:
    """Return whether a number that predictions use was derived from the row.

    Halos in planner/graph/datasets/ are derived from some rows: Reddit's from GNNPipe Table 4,
    ogbn-products' from PipeGCN Tables 2 and 4 (5 parts), ogbn-papers100M's from PipeGCN Table 5.
    The batch spreads of GSplit's graphs are made from its Table 1, and GNNLab's batch says how many
    vertices are near a seed of ogbn-papers100M; full_graph.py has a factor on memory.
    """
    paper, strategy, metric = row["paper"], row["strategy"], row["metric"]
    source = paper, row["dataset"]
    if full_graph.gave_a_factor(row):
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
) -> Json:
    """Predict all rows. Returns

    "rows": each with "predicted", "error" (relative; for facts and shares the difference) and
    "fitted"; rows of epochs also with "kind" and the 80 % range "low_s" to "high_s";
    "skipped": each with the reason "why";
    "summary": {"n", "mape", "p95", "max"} by metric, over rows that are not `fitted`, and
    {"winner": {"n", "right"}};
    "kinds": {"n", "median", "ranges", "in_range"} by kind, over epochs that are not `fitted`;
    "scaling": {"n", "median"} of these epochs, divided by those on fewer GPUs.
    """
    predicted: list[Json] = []
    skipped: list[Json] = []
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


def _in_doubt(row: Row, figure: float, testbeds: Testbeds) -> Json:
    """Return the kind of the row's epoch, and a plan's 80 % range around `figure`, the prediction
    for the row's software."""
    case = question(row, testbeds=testbeds)
    problem = case.problem
    ours_s = Candidate(case.strategy, case.prediction, problem).drawn_s
    low_s, high_s = range_of(ours_s * figure / case.prediction.epoch_s, figure)
    trained_on = {"full": "full graph", "mini": "mini-batches"}[problem.workload.mode]
    gpus = "one GPU" if problem.ranks == 1 else "several GPUs"
    return {"kind": f"{trained_on}, {gpus}", "low_s": low_s, "high_s": high_s}


def _kinds(epochs: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return, by kind of epoch, the median error and the share inside the 80 % range."""
    return {
        kind: {
            "n": len(of),
            "median": median(abs(row["error"]) for row in of),
            "ranges": len(of),
            "in_range": mean(map(is_inside, of)),
        }
        for kind, of in sorted(grouped(epochs, itemgetter("kind")).items())
    }


def is_inside(epoch: Json) -> bool:
    """Return whether a printed epoch lies inside the 80 % range."""
    return bool(epoch["low_s"] <= float(epoch["value"]) <= epoch["high_s"])


def _scaling(epochs: Sequence[Json]) -> dict[str, float]:
    """Return the median error of epochs divided by the same epoch on the fewest GPUs."""
    sizes, errors = ("num_nodes", "gpus_per_node"), []
    same = [name for name in (*JOB, "strategy", "strategy_params") if name not in sizes]
    for rows in grouped(epochs, itemgetter(*same)).values():
        least, *more = sorted(rows, key=lambda row: [int(row[name]) for name in sizes])
        errors += [abs((1 + row["error"]) / (1 + least["error"]) - 1) for row in more]
    return {"n": len(errors), "median": median(errors) if errors else 0.0}


def _error(row: Row, figure: float) -> float:
    """Return the relative error; for facts (0 or 1), shares and printed zeros the difference."""
    printed, metric = float(row["value"]), row["metric"]
    absolute = metric.startswith("fits_in") or metric.endswith(("_ratio", "_fraction_vs"))
    return figure - printed if absolute or printed == 0 else figure / printed - 1


def _summary(predicted: Sequence[Json]) -> dict[str, dict[str, float]]:
    """Return, by metric, a summary of the errors of rows that are not fitted."""
    summary, scored = {}, (row for row in predicted if not row["fitted"])
    for metric, rows in sorted(grouped(scored, itemgetter("metric")).items()):
        of = [abs(row["error"]) for row in rows]
        p95 = float(np.percentile(of, 95))
        summary[metric] = {"n": len(of), "mape": mean(of), "p95": p95, "max": max(of)}
    return summary


def _winners(predicted: Sequence[Json]) -> dict[str, int]:
    """Count pairs of strategies with different printed times, and correctly predicted winners.

    A pair is two rows with equal columns JOB, or a row that prints a ratio. A strategy with another
    sampler or software counts as another strategy.
    """
    # printed and predicted time of the second strategy, divided by that of the first
    pairs: list[tuple[float, float]] = []
    for row in predicted:
        if row["metric"] == "speedup_vs":
            pairs.append((float(row["value"]), row["predicted"]))
        elif row["metric"] == "slowdown_fraction_vs":
            pairs.append((1 / (1 + float(row["value"])), 1 / (1 + row["predicted"])))
    epochs = (row for row in predicted if row["metric"] == "epoch_time_s")
    for rows in grouped(epochs, itemgetter(*JOB)).values():
        for a, b in combinations(rows, 2):
            if _system(a) != _system(b):
                printed = float(b["value"]) / float(a["value"])
                pairs.append((printed, b["predicted"] / a["predicted"]))
    different = [pair for pair in pairs if max(pair[0], 1 / pair[0]) > 1 + DIFFERENT]
    right = sum((printed - 1) * (figure - 1) > 0 for printed, figure in different)
    return {"n": len(different), "right": right}


def _system(row: Row) -> tuple[str | None, ...]:
    """Return the row's strategy, place of the sampler, and software (None: not stated)."""
    params = params_of(row)
    return row["strategy"], params.get("sampler"), params.get("software")
