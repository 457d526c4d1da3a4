"""The frame of all benchmarks: how they are called, how they call gnnplan, turns, tables, rows."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT / "traces"
DATASETS = Path(os.environ.get("GNNPLAN_DATASETS", ROOT.parent / "shared" / "datasets"))


def words(doc: str | None) -> list[str]:
    """The words after the program's name; with --help its documentation is printed instead."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        sys.exit()
    return sys.argv[1:]


# -- gnnplan ---------------------------------------------------------------------------------------


def gnnplan(*words: object, **options: object) -> str:
    """Return what a command of gnnplan prints.

    `eval_every=0` is --eval-every 0; of a list each is given, True is given alone, None is not.

    Where it fails, its errors are printed, and CalledProcessError is raised.
    """
    command = [sys.executable, "-m", "gnnplan", *map(str, words)]
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            command.append(flag)
        elif value is not None:
            for each in value if isinstance(value, list) else [value]:
                command += [flag, str(each)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
    ended.check_returncode()
    return ended.stdout


def plan(out: str | Path, **question: object) -> dict[str, Any]:
    """The plan of a question, which is left in `out`."""
    gnnplan("plan", **question, output=out)
    return json.loads(Path(out).read_text())


def train(plan: str | Path, out: str | Path, **options: object) -> list[dict[str, Any]]:
    """The epochs of a run of the plan in `out`, which is evaluated at its end unless options say
    otherwise."""
    gnnplan("run", plan, out=out, **{"eval_every": 0, **options})
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


# -- turns -----------------------------------------------------------------------------------------


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Return what each side gives in every round: machines drift, so all of them are in each."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, once in sides.items():
            print(f"round {turn + 1}/{rounds}: {name}", file=sys.stderr)
            found[name].append(once())
    return found


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """The median of the ratios within rounds."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


# -- tables ----------------------------------------------------------------------------------------


def line(*cells: object) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*columns: str, left: int = 1) -> str:
    """The first two lines of a table, whose columns but some at the left are numbers."""
    return f"{line(*columns)}\n|{'---|' * left}{'--:|' * (len(columns) - left)}"


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file; none where it is not there yet."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, object]], mode: str = "w") -> None:
    """Write rows, or with mode 'a' add them; all have the same columns."""
    is_new = mode == "w" or not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
