"""The files of a finished run: metrics.jsonl (a line per epoch) and rank*.json (one per rank)."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Required

from pydantic import Field, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic reads typing's from Python 3.12 on

from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.objective import Epochs, Objective, Target, Training
from gnnplan.planner.gnn.workload import FALLING, Workload, scores_of
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


# -- accuracies ------------------------------------------------------------------------------------

# The validation accuracy over epochs is the evidence for a target accuracy (decision/objective.py).

MAKE = "make one with `gnnplan run plan.json --out runs/one`"
PLAN, METRICS = "plan.json", "metrics.jsonl"  # files in a run's folder
_EARLIER_PLAN = re.compile(r"plan\.until(\d+)\.json")  # a plan that trained the run until an epoch


def objective_of(document: dict[str, Any]) -> Objective:
    """Return the objective of a plan; the runs that are its evidence are read again.

    Raises SpecError if a run is missing, and Mismatch if another version made a run's plan.
    """
    of, accuracy = document.get("objective", "time"), document.get("target_accuracy")
    if "epochs" in document:
        return Objective(of, stated={m: Epochs(**of_m) for m, of_m in document["epochs"].items()})
    if accuracy is None:
        return Objective(of)
    return Objective(of, Target(accuracy, trainings(document["evidence"])))


def trainings(paths: Iterable[str | os.PathLike[str]]) -> list[Training]:
    """Read the runs, finished or not, that evaluated an accuracy.

    paths: folders of runs, or folders that contain folders of runs. Raises SpecError if a folder
    has no run, or a run cannot be read, and Mismatch if another version made a run's plan.
    """
    folders = [folder for path in paths for folder in _runs(Path(path))]
    read = [_training(folder) for folder in dict.fromkeys(folders)]
    return [training for training in read if training.accuracies]


def _runs(path: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the runs' folders in it."""
    if _is_run(path):
        return [path]
    found = sorted(folder for folder in path.iterdir() if _is_run(folder)) if path.is_dir() else []
    if not found:
        raise SpecError(
            f"--evidence {path}: neither a run's folder (with {PLAN} and {METRICS}) nor a folder"
            f" that holds one; {MAKE}"
        )
    return found


def _is_run(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (PLAN, METRICS))


def _training(folder: Path) -> Training:
    """Read a run's folder; only the epochs that its first plan trained count."""
    path, (plan, epochs) = folder / METRICS, _first_plan(folder)
    document = plans.read(plan)
    workload = Workload.model_validate(document["workload"])
    return Training(
        str(folder),
        document["graph"]["hash"],
        workload,
        plans.chosen(document),
        len(plans.placement(document)),
        tuple(_accuracies(path, epochs_in(path, MAKE)[:epochs])),
    )


def _first_plan(folder: Path) -> tuple[Path, int | None]:
    """Return a run's first plan, and the epochs that it trained; None: all epochs."""
    earlier = [
        (int(match[1]), path)
        for path in folder.iterdir()
        if (match := _EARLIER_PLAN.fullmatch(path.name))
    ]
    until, plan = min(earlier, default=(None, folder / PLAN))
    return plan, until


def _accuracies(path: Path, rows: list[Any]) -> Iterator[tuple[int, float]]:
    """Yield (epoch, validation score) of the epochs that were evaluated. Raises SpecError."""
    last = 0
    for row in rows:
        epoch = row.get("epoch") if isinstance(row, dict) else None
        if type(epoch) is not int or epoch <= last:
            raise SpecError(
                f"{path}: every line needs an epoch that counts up from 1, found {str(row)[:100]};"
                f" {MAKE}"
            )
        last = epoch
        for name in scores_of(row):
            if name.startswith("val_") and isinstance(accuracy := row[name], float):
                if name.removeprefix("val_") in FALLING:
                    raise SpecError(
                        f"{path}: {name} falls in training, and --target-accuracy is what a score"
                        " rises to; leave this run out"
                    )
                yield epoch, accuracy
