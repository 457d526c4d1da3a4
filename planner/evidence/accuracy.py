"""The validation accuracy of runs over epochs, the evidence for a target accuracy
(decision/objective.py)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from gnnplan.planner.decision import plan as plans
from gnnplan.planner.decision.objective import Epochs, Objective, Target, Training
from gnnplan.planner.evidence.recorded import epochs_in
from gnnplan.planner.gnn.workload import FALLING, Workload, scores_of
from gnnplan.planner.vocabulary.errors import SpecError

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
