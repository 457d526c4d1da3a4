"""Helpers of all benchmarks: their command lines, calls of gnnplan, turns, tables and CSV rows."""

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
    """Return the words after the program's name; with --help, print `doc` and exit instead."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        sys.exit()
    return sys.argv[1:]


# -- gnnplan ---------------------------------------------------------------------------------------


def gnnplan(*words: object, **options: object) -> str:
    """Run a command of gnnplan and return its standard output.

    `eval_every=0` becomes --eval-every 0. A list repeats the option, True gives it without a value,
    None leaves it out. Raises CalledProcessError if the command fails, and prints its errors.
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
    """Write the plan of a question to `out`, and return its document."""
    gnnplan("plan", **question, output=out)
    return json.loads(Path(out).read_text())


def train(plan: str | Path, out: str | Path, **options: object) -> list[dict[str, Any]]:
    """Run the plan in the folder `out`, and return its epochs.

    The run evaluates after the last epoch, unless options say otherwise."""
    gnnplan("run", plan, out=out, **{"eval_every": 0, **options})
    return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]


# -- turns -----------------------------------------------------------------------------------------


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Call every side once in each round; return each side's results, by round.

    The speed of machines drifts, so results are compared within rounds."""
    found: dict[str, list[T]] = {name: [] for name in sides}
    for turn in range(rounds):
        for name, once in sides.items():
            print(f"round {turn + 1}/{rounds}: {name}", file=sys.stderr)
            found[name].append(once())
    return found


def ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Return the median of the ratios ours / theirs within rounds."""
    return median(a / b for a, b in zip(ours, theirs, strict=True))


# -- tables ----------------------------------------------------------------------------------------


def line(*cells: object) -> str:
    """Return a row of a Markdown table."""
    return f"| {' | '.join(map(str, cells))} |"


def header(*columns: str, left: int = 1) -> str:
    """Return the first two lines of a Markdown table; `left` columns are text, the rest numbers."""
    return f"{line(*columns)}\n|{'---|' * left}{'--:|' * (len(columns) - left)}"


def rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: Sequence[Mapping[str, object]], mode: str = "w") -> None:
    """Write rows with the same columns to a CSV file; mode 'a' appends them."""
    is_new = mode == "w" or not path.exists()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode, newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
