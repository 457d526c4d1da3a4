"""Results as lines and tables, printed as text or shown as HTML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from html import escape
from io import StringIO
from typing import IO

from gnnplan.planner.vocabulary.text import Table

TextBlock = str | Table  # a line of text, or a table
WIDTH = 1000  # characters per line without a terminal: wide enough that no name is broken


class View(ABC):
    """A result that prints itself, shows at a Python prompt and renders in a notebook."""

    @abstractmethod
    def blocks(self) -> Sequence[TextBlock]:
        """Return lines and tables in the order to print them."""

    def print(self, file: IO[str] | None = None, width: int | None = WIDTH) -> None:
        """Print to `file`, by default standard output; width None is the terminal's."""
        for block in self.blocks():
            if isinstance(block, Table):
                _print_table(block, file, width)
            else:
                print(block, file=file)

    def __str__(self) -> str:
        text = StringIO()
        self.print(text)
        return text.getvalue().rstrip("\n")

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return "\n".join(
            block.html() if isinstance(block, Table) else f"<div>{escape(block)}</div>"
            for block in self.blocks()
        )


class Blocks(View):
    """Lines and tables, with the JSON document that they show."""

    def __init__(self, blocks: Sequence[TextBlock], document: object = None) -> None:
        self._blocks, self.document = blocks, document

    def blocks(self) -> Sequence[TextBlock]:
        return self._blocks


def _print_table(table: Table, file: IO[str] | None, width: int | None) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    view = RichTable(title=table.title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(table.columns):
        view.add_column(column, justify="left" if i < table.left else "right", overflow="fold")
    for row in table.rows:
        view.add_row(*row)
    Console(file=file, width=width, soft_wrap=False).print(view)


def of(used: int, ranks: int) -> str:
    """Return how many of the cluster's GPUs are used, in words.

    >>> of(4, 8), of(8, 8)
    ('4 of 8', '8')
    """
    return f"{used} of {ranks}" if used < ranks else str(ranks)
