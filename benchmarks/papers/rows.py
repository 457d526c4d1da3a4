"""Reads and checks a file of printed figures: one row is one figure, with the columns COLUMNS.

interpret.py converts a row into a question, and figures.py predicts its figure.
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np

from gnnplan.papers.question import Row
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, from_json, read_bytes, suggest

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
        value = float(row["value"])
    except ValueError:
        raise SpecError(
            f"{where}value {row['value'][:MOST_SHOWN]!r} is not a number; write it in SI (seconds,"
            " bytes, counts), or as a fraction"
        ) from None
    if not np.isfinite(value):
        raise SpecError(f"{where}value {row['value']!r} is not finite")
    return value


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
