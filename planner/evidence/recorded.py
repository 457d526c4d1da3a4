"""The files of a finished run: the lines of metrics.jsonl and the rank*.json."""

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
WARM_UP = 2  # epochs that are not compared: they allocate and fill caches
_RANK_FILE = re.compile(r"rank(\d+)\.json")
Count = Annotated[int, Strict(), Field(ge=0)]
Number = Annotated[float, Strict()]
Size = Annotated[Number, Field(ge=0, allow_inf_nan=False)]


class _Part(TypedDict):
    """Epochs that ranks of another plan have trained."""

    until: Count
    ranks: Count
    strategy: str


class _Rank(TypedDict, total=False):
    """A rank*.json, as far as it is read; runs of older versions have less."""

    bytes: Required[dict[str, Count]]
    setup_bytes: Required[dict[str, Count]]
    peak_rss_bytes: Required[Count]
    peak_bytes: Required[Count | None]
    rows: dict[str, Count]
    before: list[_Part]
    # |used - exact| and |exact|; runs of older versions have PipeGCN's bound of the first, too
    gradient_errors: dict[
        str,
        Annotated[list[tuple[Size, Size] | tuple[Size, Size, Size | None]], Field(min_length=1)],
    ]


class _Epoch(TypedDict):
    """A line of metrics.jsonl, as far as it is read."""

    epoch: Number
    loss: Number
    epoch_s: Annotated[Number, Field(gt=0, lt=LONGEST)]


_RANK, _EPOCH = TypeAdapter(_Rank), TypeAdapter(_Epoch)


def read_run(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of metrics.jsonl and the rank*.json of a finished run. Raises SpecError."""
    make = f"make one with `gnnplan run plan.json --out {directory}`"
    try:
        path = directory / "metrics.jsonl"
        metrics = _lines(path, make)
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
    """Seconds of the epochs that predictions are of [s]: without those that warm up, and only
    those whose steps a GPU launched as one, if there are any (but the first, which makes that)."""
    warm = metrics[min(WARM_UP, len(metrics) - 1) :]
    replayed = [row for row in warm if row.get("replayed")][1:]
    return [float(row["epoch_s"]) for row in replayed or warm]


def trained_before(ranks: Sequence[Mapping[str, Any]]) -> int:
    """Epochs of a run that ranks of other plans have trained, before those that left `ranks`."""
    before = ranks[0].get("before", [])
    return int(before[-1]["until"]) if before else 0


def must_be_of_one_plan(directory: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Raises SpecError where several plans have trained a run."""
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


def _lines(path: Path, make: str) -> list[Any]:
    """The lines of metrics.jsonl as documents; a last line that is cut off is left out, and said.

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
    """The relative error of the last step's gradient.

    None if the run has not measured it (`gnnplan run --gradient-errors`).
    """
    # all ranks have the same
    for error, size, *_ in ranks[0].get("gradient_errors", {}).get("all", [])[-1:]:
        if size:
            return {"error": error / size}
    return None


def rows_by_class(ranks: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Feature rows that all ranks have read, by where they were: cache, peer, host or elsewhere.

    Empty where the strategy has no feature store (planner/strategies/minibatch/feature_store.py).
    """
    rows = Counter[str]()
    for rank in ranks:
        rows.update(rank.get("rows", {}))
    return dict(rows)


def show_rows(rows: dict[str, int]) -> str:
    """Shares of the rows, in words; places without a row are left out.

    >>> show_rows({"hit": 30, "peer": 0, "host": 70})
    'hit 30 %, host 70 %'
    """
    total = sum(rows.values())
    return ", ".join(
        f"{place} {show_percent(count / total)}" for place, count in rows.items() if count
    )
