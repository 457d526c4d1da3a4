"""What benchmarks share: how they are called, how they call gnnplan, and how they keep rows."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path


def words(doc: str | None) -> list[str]:
    """The words after the program's name; with --help its documentation is printed instead."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(doc)
        sys.exit()
    return sys.argv[1:]


def gnnplan(*arguments: str) -> str:
    """What a command of gnnplan prints.

    Where it fails, its errors are printed, and CalledProcessError is raised.
    """
    command = [sys.executable, "-m", "gnnplan", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
    ended.check_returncode()
    return ended.stdout


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write a table; all rows have the same columns."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
