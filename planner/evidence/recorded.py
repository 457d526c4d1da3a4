"""The files of a finished run: metrics.jsonl (a line per epoch) and rank*.json (one per rank)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import from_json, must_be_readable, read_bytes, read_json
from gnnplan.planner.vocabulary.progress import say
from gnnplan.planner.vocabulary.trace import LONGEST
from gnnplan.planner.vocabulary.units import show_count, show_percent

MAX_METRICS, MAX_RANK = 1 << 27, 1 << 26  # [B]
WARM_UP = 2  # first epochs, which are not compared: they allocate memory and fill caches
_RANK_FILE = re.compile(r"rank(\d+)\.json")
Count = Annotated[int, Strict(), Field(ge=0)]
Number = Annotated[float, Strict()]
Size = Annotated[Number, Field(ge=0, allow_inf_nan=False)]


class _Part(TypedDict):
    """A part of a run that another plan trained."""

    until: Count  # last epoch of the part
    ranks: Count
    strategy: str


class _Rank(TypedDict, total=False):
    """The fields of a rank*.json that are read; runs of older versions lack the optional ones."""

    bytes: Required[dict[str, Count]]
    setup_bytes: Required[dict[str, Count]]
    peak_rss_bytes: Required[Count]
    peak_bytes: Required[Count | None]
    rows: dict[str, Count]
    before: list[_Part]
    # (|used - exact|, |exact|) per step; older versions add PipeGCN's bound of the first number
    gradient_errors: dict[
        str,
        Annotated[list[tuple[Size, Size] | tuple[Size, Size, Size | None]], Field(min_length=1)],
    ]


class _Epoch(TypedDict):
    """The fields of a line of metrics.jsonl that are read."""

    epoch: Number
    loss: Number
    epoch_s: Annotated[Number, Field(gt=0, lt=LONGEST)]


_RANK, _EPOCH = TypeAdapter(_Rank), TypeAdapter(_Epoch)


def read_run(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read the lines of metrics.jsonl and the rank*.json of a finished run. Raises SpecError."""
    make = f"make one with `gnnplan run plan.json --out {directory}`"
    try:
        path = directory / "metrics.jsonl"
        metrics = epochs_in(path, make)
        files = {
            int(match[1]): path
            for path in directory.iterdir()
            if (match := _RANK_FILE.fullmatch(path.name))
        }
        ranks = [read_json(path, MAX_RANK, make) for _, path in sorted(files.items())]
    except SpecError as error:
        raise SpecError(f"{directory} is not a finished run ({error})") from error
    except OSError as error:
        raise SpecError(f"{directory} is not a finished run ({error.strerror}); {make}") from error
    if not metrics or not ranks:
        missing = "rank*.json" if metrics else "epoch in metrics.jsonl"
        raise SpecError(f"{directory} is not a finished run (no {missing}); {make}")
    for row in metrics:
        if not _is(_EPOCH, row):
            raise SpecError(
                f"{directory}/metrics.jsonl: every line needs numbers epoch, loss and epoch_s"
                f" (above 0), found {str(row)[:100]}; {make}"
            )
    for rank in ranks:
        if not _is(_RANK, rank) or trained_before([rank]) >= len(metrics):
            raise SpecError(
                f"{directory}: a rank*.json needs bytes and setup_bytes by operation,"
                f" peak_rss_bytes and peak_bytes; {make}"
            )
    return metrics, ranks


def warm_epochs(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the seconds of the epochs that are comparable with predictions [s].

    Warm-up epochs are left out. If steps were replayed as a CUDA graph in some epochs, only these
    epochs count, without the first of them, which captures the graph.
    """
    warm = metrics[min(WARM_UP, len(metrics) - 1) :]
    replayed = [row for row in warm if row.get("replayed")][1:]
    return [float(row["epoch_s"]) for row in replayed or warm]


def trained_before(ranks: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of epochs of a run that earlier plans trained."""
    before = ranks[0].get("before", [])
    return int(before[-1]["until"]) if before else 0


def must_be_of_one_plan(directory: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raise SpecError if several plans trained a run."""
    if not trained_before(ranks):
        return
    parts = ", ".join(
        f"{part['strategy']} on {show_count(part['ranks'], 'rank')} until epoch {part['until']}"
        for part in ranks[0]["before"]
    )
    raise SpecError(
        f"{directory} was trained with several plans ({parts}, then that of its plan.json), and a"
        " run is compared with one; train some epochs with that alone (`gnnplan run"
        f" {directory}/plan.json --epochs 10`)"
    )


def epochs_in(path: Path, make: str) -> list[Any]:
    """Parse metrics.jsonl, a line per epoch; a note says if an incomplete last line is left out.

    Raises SpecError."""
    raw = read_bytes(path, MAX_METRICS, make)
    *whole, last = raw.split(b"\n")
    must_be_readable(path, raw, make)
    rows = [from_json(path, line, make) for line in whole]
    if last:
        try:
            rows.append(from_json(path, last, make))
        except SpecError:
            say(f"note: {path}: its last line is cut off; it is read without that")
    return rows


def _is(kind: TypeAdapter[Any], document: object) -> bool:
    try:
        kind.validate_python(document)
    except ValidationError:
        return False
    return True


def gradient_error(ranks: Sequence[dict[str, Any]]) -> dict[str, float] | None:
    """Return the relative error of the last step's gradient.

    None if the run has not measured it (`gnnplan run --gradient-errors`).
    """
    # the errors are equal on all ranks
    for error, size, *_ in ranks[0].get("gradient_errors", {}).get("all", [])[-1:]:
        if size:
            return {"error": error / size}
    return None


def summed(ranks: Iterable[Mapping[str, Any]], field: str) -> Counter[str]:
    """Return the sums over all ranks of a field's counts, by name; empty if no rank has the field.

    bytes, setup_bytes: bytes sent, by operation [B]. rows: feature rows that were read, by the
    place where they were stored, as 'hit' (in the cache), 'peer' and 'host'
    (planner/strategies/minibatch/feature_store.py)."""
    counts = Counter[str]()
    for rank in ranks:
        counts.update(rank.get(field, {}))
    return counts


def show_rows(rows: dict[str, int]) -> str:
    """Format the shares of the rows; places without rows are left out.

    >>> show_rows({"hit": 30, "peer": 0, "host": 70})
    'hit 30 %, host 70 %'
    """
    total = sum(rows.values())
    return ", ".join(
        f"{place} {show_percent(count / total)}" for place, count in rows.items() if count
    )
