"""Reader of tables of numbers in text: CSV, TSV, or blanks between columns.

Files may be compressed with gzip. They are read block by block."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from gnnplan.planner.graph.graph import LARGEST_WHOLE, MOST_VERTICES, Array, must_fit
from gnnplan.planner.graph.labels import MASKS, mask_of_ids
from gnnplan.planner.graph.npy import must_be_ids, must_not_swell, reading
from gnnplan.planner.graph.parts import LABELS
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file

BLOCK = 1 << 24  # [B] read at a time
# names of the column of row numbers that pandas adds
NUMBERS = ("", "index", "unnamed: 0", "__index_level_0__")
IDS = ("id", "node_id", "vertex_id", "nodeid", "node", "vertex", "nid", "idx")
TARGETS = (*LABELS, "class", "target")
COMMENTS = ("#", "%")
LISTED = "; if a line is a vertex with all its neighbours, write a line per edge"
NUMBER_THEM = (
    "ids that are names become numbers if both columns are numbered together, as by"
    " pandas.factorize(pandas.concat([sources, targets]))"
)
GZIP = b"\x1f\x8b"


def opened(path: str) -> IO[bytes]:
    """Open the file as a stream of bytes, decompressed if it is gzip."""
    must_be_file(path, "give a text file")
    with open(path, "rb") as stream:
        zipped = stream.read(2) == GZIP
    return gzip.open(path) if zipped else open(path, "rb")  # type: ignore[return-value]


def start_of(path: str, most: int = 1 << 16) -> str | None:
    """Return the start of a text; None if it is not text. Raises SpecError for damaged gzip."""
    with reading(path, "text"), opened(path) as stream:
        raw = stream.read(most)
    if b"\0" in raw:
        return None
    with suppress(UnicodeDecodeError):
        return raw.decode("utf-8-sig", "ignore" if len(raw) == most else "strict")
    return None


def lines_of(path: str, skip: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the first line, lines) for blocks of whole lines after the first `skip`."""
    number, unpacked = 1, 0
    with reading(path, "text"), opened(path) as stream:
        stored = os.stat(path).st_size
        while block := stream.read(BLOCK):
            block += (end := stream.readline(BLOCK))
            unpacked += len(block)
            must_not_swell(f"{path}:{number}", unpacked, stored, 1 / 8)  # empty lines take time
            text = block.decode("utf-8-sig" if number == 1 else "utf-8")
            lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
            if len(end) == BLOCK and lines[-1]:
                raise SpecError(
                    f"{path}:{number + len(lines) - 1}: a line has more than {BLOCK:,} characters,"
                    " so this is no list of edges or rows; write a line per edge or row"
                )
            if not lines[-1]:
                lines.pop()
            if kept := lines[skip:]:
                yield number + min(skip, len(lines)), kept
            skip, number = max(0, skip - len(lines)), number + len(lines)


@dataclass(frozen=True)
class Head:
    """The layout of a table, found in the first lines."""

    delimiter: str | None = None  # between columns; None: blanks
    before: int = 0  # count of header and comment lines before the rows
    first: str = ""  # first line of the file
    columns: int = 0
    names: Sequence[str] = ()  # column names, if a header line or a comment gives them
    row: Sequence[str] = ()  # cells of the first row without an empty cell
    named: bool = False  # True: names are from a header line, not from a comment
    unlike: tuple[int, int] | None = None  # first line with more or fewer cells than the first row

    @property
    def comment(self) -> str:
        return "%" if self.first.startswith("%") else "#"

    @property
    def numbers(self) -> list[int]:
        """Columns that hold row numbers."""
        return [i for i, name in enumerate(self.names) if name.lower() in NUMBERS]

    @property
    def no_features(self) -> dict[str, int]:
        """The columns that are no features by their names: 'labels' and MASKS -> column."""
        lower = [name.lower() for name in self.names]
        targets = [name for name in TARGETS if name != "y" or "x" not in lower]  # x, y: a place
        names = {"labels": targets, **{mask: [mask] for mask in MASKS}}
        found = {what: [n for n in words if n in lower] for what, words in names.items()}
        return {what: lower.index(words[0]) for what, words in found.items() if words}

    @property
    def ids(self) -> int | None:
        """The column of vertex ids; None: row i is vertex i."""
        lower = [name.lower() for name in self.names]
        named = [lower.index(name) for name in IDS if name in lower] + self.numbers
        return named[0] if named and self.columns > 1 else None


def tables(
    path: str, dtype: Any, head: Head, columns: tuple[int, ...] | None = None
) -> Iterator[Array]:
    """Yield blocks of rows of numbers [lines, columns]. Raises SpecError, with the line.

    Without `columns`, row i is vertex i, so no line without numbers may stand between rows."""
    gap = 0  # number of the first line without numbers that no row has followed yet
    # if all columns are read, numpy itself reports rows with more or fewer columns
    few = None if columns == tuple(range(head.columns)) else columns
    if few and head.unlike:
        raise SpecError(
            f"{path}:{head.unlike[0]}: a line must have as many columns as the first,"
            f" {head.columns}, has {head.unlike[1]}; mend it{LISTED}"
        )

    def numbers(lines: list[str], comment: str | None) -> Array:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return np.loadtxt(
                lines, dtype, comment, head.delimiter, usecols=few, ndmin=2, quotechar='"'
            )

    for number, lines in lines_of(path, head.before):
        with suppress(ValueError, OverflowError, Warning):
            rows = numbers(lines, None)
            if len(rows) == len(lines) and not gap:
                yield rows
                continue
        # slow path: comments and blank lines are rare, and searching for them takes most time
        is_row = [bool(line.strip()) and not line.startswith(head.comment) for line in lines]
        full = [i for i, full in enumerate(is_row) if full]
        hole = [*is_row, False].index(False)
        if columns is None and full and (gap or hole < full[-1]):
            raise SpecError(
                f"{path}:{gap or number + hole}: every line is a row, whose place counts, and this"
                " one holds no numbers; mend it, with nan for a label that is not there"
            )
        if columns is None and hole < len(lines):
            gap = gap or number + hole
        try:
            if full:
                yield numbers([lines[i] for i in full], head.comment)
        except (ValueError, OverflowError, Warning) as error:
            # loadtxt counts rows from 0 in errors on numbers, from 1 in errors on columns
            found = re.search(r"row (\d+)", str(error))
            row = int(found[1]) - ("convert" not in str(error)) if found else 0
            at = full[min(row, len(full) - 1)]
            rule, remedy = "must be numbers, as many as in the other lines", "mend this line"
            if columns:
                rule = "source and target must be whole numbers that count vertices from 0"
                rule += ", fields of edges numbers" * (len(columns) > 2)
                rule += f", in {head.columns} columns as above" * (few is None)
                remedy += f"; {NUMBER_THEM}" if re.search("[a-zA-Z]", lines[at]) else LISTED
            raise SpecError(
                f"{path}:{number + at}: {rule}, found {ascii(lines[at])[1:-1][:MOST_SHOWN]!r};"
                f" {remedy}"
            ) from error


def head_of(path: str, ends: int | None = None) -> Head:
    """Return the layout of a table; names are in its first line or in a comment above the rows.

    ends: only the first `ends` columns must be numbers (None: all), else the line is a header."""
    start = start_of(path) or ""
    lines = start.splitlines()
    kept = [i for i, line in enumerate(lines) if line.strip() and not line.startswith(COMMENTS)]
    first = "".join(lines[:1])
    if not kept:
        return Head(first=first)
    at = kept[0]
    delimiter = next((mark for mark in (",", ";", "\t") if mark in lines[at]), None)  # else blanks
    fields, *rows = (fields_of(lines[i], delimiter) for i in kept)
    whole = kept[: len(kept) - (start[-1:] not in "\r\n")]  # the last line may be cut off
    unlike = next(
        (
            (i + 1, len(row))
            for i, row in zip(whole[1:], rows, strict=False)
            if len(row) != len(fields) and not {*COMMENTS, '"'} & {*lines[i]}
        ),
        None,
    )
    if not all(map(is_number, fields[:ends])):
        row = next(filter(all, rows), rows[0] if rows else [])
        return Head(delimiter, at + 1, first, len(fields), fields, row, True, unlike)
    row = next(filter(all, [fields, *rows]), fields)
    above = fields_of(lines[at - 1].lstrip("#% "), delimiter) if at else []
    if len(above) == len(fields):
        return Head(delimiter, at, first, len(fields), above, row, unlike=unlike)
    comments = next(i for i, line in enumerate(lines) if not line.startswith(COMMENTS))
    return Head(delimiter, comments, first, len(fields), row=row, unlike=unlike)


def matrix(
    path: str, dtype: Any = np.float64, columns: Sequence[int] | None = None
) -> Iterator[Array]:
    """Yield blocks of rows of a table of numbers, without its header line.

    columns: the columns to yield; default: all."""
    for rows in tables(path, dtype, head_of(path)):
        yield rows if columns is None else rows[:, columns]


def _rows(path: str, columns: Sequence[int] | None = None) -> Array:
    """Return all rows of a table [lines, columns]. Raises SpecError."""
    pieces = list(matrix(path, columns=columns))
    try:
        return np.concatenate(pieces) if pieces else np.empty((0, 1))
    except ValueError as error:
        raise SpecError(f"{path}: lines must have as many numbers as the first") from error


def column(path: str) -> Array:
    """Read a list of ids: one whole number per line, or the column whose name is in IDS."""
    table, head = _rows(path), head_of(path)
    others = [i for i in range(table.shape[1]) if i not in head.numbers]
    if len(others) > 1 and head.ids in others:
        rest = [i for i in others if i != head.ids]
        if np.isin(table[:, rest], (0, 1)).all(0).any():
            raise SpecError(
                f"{path}: its ids stand beside zeros and ones, which may be a mask; keep the column"
                " of the ids that are meant"
            )
        others = [head.ids]
    if len(others) != 1:
        raise SpecError(
            f"{path}: must hold one number per line, or name a column {IDS[0]}, holds"
            f" {len(others)}; keep one column"
        )
    return whole(path, table[:, others[0]])


def whole(path: str, numbers: Array) -> Array:
    """Convert ids to int64. Raises SpecError for numbers that are not whole."""
    with np.errstate(invalid="ignore"):
        whole = numbers.astype(np.int64)
    if (bad := whole != numbers).any():
        raise SpecError(
            f"{path}: ids must be whole numbers, found {numbers[bad][0]}; write whole numbers"
        )
    return whole


def whole_matrix(path: str, vertices: int = 0, columns: Sequence[int] | None = None) -> Array:
    """Read the rows of all vertices [N, F].

    If the table has a column of vertex ids, rows are sorted by it, and vertices without a row get
    NaN. vertices: least N in this case. columns: the columns to read; default: all."""
    head = head_of(path)
    if head.ids is None:
        return _rows(path, columns)
    table = _rows(path)
    ids = whole(path, table[:, head.ids])
    must_be_ids(path, "its ids", ids, MOST_VERTICES)
    vertices = max(vertices, int(ids.max(initial=-1)) + 1)
    mask_of_ids(path, f"its column {head.names[head.ids]}", ids, vertices)
    kept = range(table.shape[1]) if columns is None else columns
    rest = table[:, [i for i in kept if i not in (head.ids, *head.numbers)]]
    must_fit(path, f"rows of {vertices:,} vertices", 8.0 * vertices * rest.shape[1])
    rows = np.full((vertices, rest.shape[1]), np.nan)
    rows[ids] = rest
    return rows


def narrow(numbers: Array) -> Array:
    """Return the numbers as int64 if all are whole, else unchanged."""
    if not (np.abs(numbers) < LARGEST_WHOLE).all():
        return numbers
    whole = numbers.astype(np.int64)
    return whole if (whole == numbers).all() else numbers


def fields_of(line: str, delimiter: str | None) -> list[str]:
    """Split a line into cells, without blanks and quotes around each cell."""
    return [field.strip().strip('"') for field in line.split(delimiter)]


def is_number(text: str) -> bool:
    """Whether a cell's text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True
