"""Tables of text: a column is a title and a function from a row to the text of a cell."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeVar

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
