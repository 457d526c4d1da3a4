"""Text that users read or write: tables, and strategies with their knobs."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, TypeVar

from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import kind, quantity

Row = TypeVar("Row")


@dataclass(frozen=True)
class Table:
    """A table of text; the first columns are aligned to the left, the others to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: int = 1  # columns that are aligned to the left

    def html(self) -> str:
        """Return the table as HTML."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in self.rows
        )
        title = f"<caption>{escape(self.title)}</caption>" if self.title else ""
        return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def table(
    title: str,
    rows: Sequence[Row],
    *columns: tuple[str, Callable[[Row], str]] | None,
    left: int = 1,
) -> Table:
    """Make a table with a line per row; a column is a title and a function from a row to text.

    A column that is None is left out.

    >>> table("", [{"share": 0.5}, {}], column("of all", "share", "{:.1f}".format)).rows
    [['0.5'], ['-']]
    """
    shown = [one for one in columns if one]
    cells = [[show(row) for _, show in shown] for row in rows]
    return Table(title, [name for name, _ in shown], cells, left)


def column(
    title: str, name: str = "", show: Callable[[Any], str] = str
) -> tuple[str, Callable[[Mapping[str, Any]], str]]:
    """Make a column of the rows' values under a key, by default the title; '-' if missing."""
    return title, lambda row: cell(row.get(name or title), show)


def cell(value: Any, show: Callable[[Any], str]) -> str:
    """Return show(value), or '-' if the value is None."""
    return "-" if value is None else show(value)


def yes_no(answer: object) -> str:
    """Return 'yes' or 'no'."""
    return "yes" if answer else "no"


# -- strategies and knobs --------------------------------------------------------------------------


LONG = 4  # lists with more numbers are written in runs: '4x8' for eight fours
MOST_NUMBERS = 100_000  # numbers that a list in runs may expand to


def show_knob(value: Any, annotation: str) -> Any:
    """Return a knob's value in the form in which a user writes it."""
    if annotation == "Bytes":
        return show_size(value)
    return show_list(value) if isinstance(value, tuple) else value


def show_list(numbers: tuple[int, ...]) -> tuple[int, ...] | str:
    """Return a list of more than LONG numbers as runs, '<number>x<times>', which `read_list` reads.

    >>> show_list((4,) * 8), show_list((1, 3, 3, 3, 2)), show_list((4, 4))
    ('4x8', '1,3x3,2', (4, 4))
    """
    if len(numbers) <= LONG:
        return numbers
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return ",".join(f"{number}x{times}" if times > 1 else f"{number}" for number, times in runs)


def read_list(text: str) -> tuple[int, ...] | None:
    """Parse a list such as '1,3x2'; return None for any other text.

    >>> read_list("4x8"), read_list("1,3x2"), read_list("1;2"), read_list("1x9999999999")
    ((4, 4, 4, 4, 4, 4, 4, 4), (1, 3, 3), None, None)
    """
    runs = [re.fullmatch(r"([0-9]{1,9})(?:x([0-9]{1,5}))?", run) for run in text.split(",")]
    pairs = [(int(run[1]), int(run[2] or 1)) for run in runs if run]
    if len(pairs) < len(runs) or sum(times for _, times in pairs) > MOST_NUMBERS:
        return None
    return tuple(number for number, times in pairs for _ in range(times))


def show_size(nbytes: int) -> str | int:
    """Return a size [B] of 1 MB or more as text with a unit, if `read_size` restores every digit.

    >>> show_size(56_862_000_000), show_size(1_000_000_001), show_size(20_000)
    ('56.862GB', '1.000000001GB', 20000)
    """
    for unit, digits in (("TB", 12), ("GB", 9), ("MB", 6)):
        if nbytes >= 10**digits:
            whole, rest = divmod(nbytes, 10**digits)
            text = f"{whole}.{rest:0{digits}d}".rstrip("0").rstrip(".") + unit
            return text if read_size(text) == nbytes else nbytes
    return nbytes


def read_size(text: object) -> int | None:
    """Return the whole bytes of a size such as '2.5GB' or 20000; None for anything else.

    >>> read_size("56.862GB"), read_size("1GiB"), read_size(20_000), read_size("1GB/s")
    (56862000000, 1073741824, 20000, None)
    """
    if type(text) is int:
        return text
    try:
        return round(quantity(text)) if kind(text) == "B" else None
    except (ValueError, OverflowError):  # '1.2.3GB', '1e999GB'
        return None


def parse_call(text: str) -> tuple[str, dict[str, Any]]:
    """Parse 'gnnpipe(stages=4)' into the strategy's family and knobs: 'gnnpipe', {'stages': 4}.

    Values are Python literals. Raises SpecError for any other text.

    >>> parse_call("gnnpipe(stages=4, shuffle=False)")
    ('gnnpipe', {'stages': 4, 'shuffle': False})
    >>> parse_call("granndis")
    ('granndis', {})
    """
    family = re.match(r"\s*[\w-]*", text)[0]  # type: ignore[index]
    written = family.strip().replace("-", "_") + text[len(family) :].rstrip()
    try:
        node = ast.parse(written, mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
            knobs = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
            if len(knobs) == len(node.keywords):  # neither ** nor the same knob twice
                return node.func.id, knobs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass  # RecursionError and MemoryError: parentheses nested too deeply
    raise SpecError(
        f"--strategy {text!r:.200} is not a family with knobs; write it as"
        " 'gnnpipe(stages=4,chunks=16)', with texts in quotes: data_parallel(cache='1GB')"
    )
