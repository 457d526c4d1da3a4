"""Text: edge lists (CSV, TSV, blanks between columns), MatrixMarket, and columns of numbers.

Files may be compressed with gzip. They are read a block at a time, never whole."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from collections.abc import Iterator
from typing import IO, Any

import numpy as np

from gnnplan.planner.graph.arrays import must_not_swell
from gnnplan.planner.graph.formats.parts import Parts, must_be_count, reading
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file

BLOCK = 1 << 24  # [B]
SOURCES = ("src", "source", "from", "src_id", "source_id", "from_id", "u", "head")
TARGETS = ("dst", "target", "to", "dst_id", "target_id", "to_id", "v", "tail", "destination")
COMMENTS = ("#", "%")
GZIP = b"\x1f\x8b"


def opened(path: str) -> IO[bytes]:
    """The file as a stream of its text, unzipped."""
    must_be_file(path, "give a text file")
    with open(path, "rb") as stream:
        zipped = stream.read(2) == GZIP
    return gzip.open(path) if zipped else open(path, "rb")  # type: ignore[return-value]


def start_of(path: str, most: int = 1 << 16) -> str | None:
    """The first lines of a text; None if it is not text. Raises SpecError for damaged gzip."""
    with reading(path, "text"), opened(path) as stream:
        raw = stream.read(most)
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8-sig", "ignore" if len(raw) == most else "strict")
    except UnicodeDecodeError:
        return None


def lines_of(path: str, skip: int = 0) -> Iterator[tuple[int, list[str]]]:
    """Whole lines after the first `skip`, some at a time, with the number of the first one."""
    number, rest, unpacked = 1, b"", 0
    with reading(path, "text"), opened(path) as stream:
        stored = os.stat(path).st_size
        while True:
            block = stream.read(BLOCK)
            unpacked += len(block)
            must_not_swell(f"{path}:{number}", unpacked, stored, 1 / 8)  # empty lines take time
            text = rest + block
            cut = text.rfind(b"\n") + 1 if block else len(text)
            if block and not cut and len(text) >= BLOCK:
                raise SpecError(
                    f"{path}:{number}: a line has more than {BLOCK:,} characters, so this is no"
                    " list of edges or rows; write a line per edge or row"
                )
            text, rest = text[:cut], text[cut:]
            lines = text.decode("utf-8-sig" if number == 1 else "utf-8").split("\n")
            if lines and not lines[-1]:
                lines.pop()
            if kept := lines[skip:]:
                yield number + min(skip, len(lines)), kept
            skip, number = max(0, skip - len(lines)), number + len(lines)
            if not block:
                return


def tables(
    path: str,
    dtype: Any,
    delimiter: str | None,
    columns: tuple[int, ...] | None = None,
    skip: int = 0,
    comment: str = "#",
) -> Iterator[Array]:
    """Rows of numbers, some at a time: [lines, columns]. Raises SpecError, with the line."""
    for number, lines in lines_of(path, skip):
        try:
            yield _numbers(lines, dtype, delimiter, columns, None)
            continue
        except (ValueError, OverflowError, Warning):
            # comments and blank lines are rare, and to look for them takes most of the time
            kept = [line for line in lines if line.strip() and not line.startswith(comment)]
        if not kept:
            continue
        try:
            yield _numbers(kept, dtype, delimiter, columns, comment)
        except (ValueError, OverflowError, Warning) as error:
            # loadtxt counts rows from 0 where a number is wrong, from 1 where a column is
            found = re.search(r"row (\d+)", str(error))
            row = int(found[1]) - ("convert" not in str(error)) if found else 0
            wrong = kept[min(row, len(kept) - 1)]
            at = number + lines.index(wrong)
            rule = (
                "source and target must be whole numbers that count vertices from 0"
                if columns
                else "must be numbers, as many as in the other lines"
            )
            raise SpecError(
                f"{path}:{at}: {rule}, found {ascii(wrong)[1:-1][:MOST_SHOWN]!r}; mend this line"
            ) from error


def _numbers(
    lines: list[str],
    dtype: Any,
    delimiter: str | None,
    columns: tuple[int, ...] | None,
    comment: str | None,
) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return np.loadtxt(
            lines, dtype, delimiter=delimiter, comments=comment, usecols=columns, ndmin=2
        )


def matrix(path: str, dtype: Any = np.float64) -> Iterator[Array]:
    """The rows of a table of numbers without names, or with a line of names that is left out."""
    head = next((line for line in (start_of(path) or "").splitlines() if line.strip()), "")
    delimiter = delimiter_of(head)
    named = bool(head) and not all(map(_is_number, _fields(head, delimiter)))
    return tables(path, dtype, delimiter, None, 1 if named else 0)


def column(path: str) -> Array:
    """Whole numbers, one per line, as ids are written."""
    pieces = [table for table in matrix(path, np.int64)]
    ids = np.concatenate(pieces) if pieces else np.empty((0, 1), np.int64)
    if ids.shape[1] != 1:
        raise SpecError(f"{path}: must hold one number per line, holds {ids.shape[1]}")
    return ids[:, 0]


def whole_matrix(path: str) -> Array:
    """All rows [N, F]."""
    pieces = list(matrix(path))
    try:
        return np.concatenate(pieces) if pieces else np.empty((0, 1))
    except ValueError as error:
        raise SpecError(f"{path}: lines must have as many numbers as the first") from error


# -- edge lists ------------------------------------------------------------------------------------


def delimiter_of(line: str) -> str | None:
    """What stands between columns: a comma, a semicolon, a tab; None: blanks."""
    return next((mark for mark in (",", ";", "\t") if mark in line), None)


def _fields(line: str, delimiter: str | None) -> list[str]:
    return [field.strip().strip('"') for field in line.split(delimiter)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def is_edge_list(start: str) -> bool:
    """Whether a text begins like an edge list: two whole numbers, after a line of names at most."""
    lines = [
        line for line in start.splitlines()[:64] if line.strip() and not line.startswith(COMMENTS)
    ]
    for line in lines[:2]:
        fields = _fields(line, delimiter_of(line))
        if len(fields) < 2:
            return False
        if len([text for text in fields if re.fullmatch(r"-?\d+", text)]) >= 2:
            return True
    # names in the first line: an edge list all the same, whose ids are then refused with the line
    return (
        bool(lines)
        and set(map(str.lower, _fields(lines[0], delimiter_of(lines[0])))) & {*SOURCES} != set()
    )


def columns_of(names: list[str]) -> tuple[int, int]:
    """The columns of source and target by their names; else the first two."""
    lower = [name.lower() for name in names]
    src = next((lower.index(name) for name in SOURCES if name in lower), None)
    dst = next((lower.index(name) for name in TARGETS if name in lower), None)
    return (0, 1) if src is None or dst is None else (src, dst)


def edge_list(path: str) -> Parts:
    """An edge per line; a first line may name the columns, others than two are left out."""
    lines = (start_of(path) or "").splitlines()
    before, head = next(
        (
            (i, line)
            for i, line in enumerate(lines)
            if line.strip() and not line.startswith(COMMENTS)
        ),
        (0, ""),
    )
    delimiter = delimiter_of(head)
    fields = _fields(head, delimiter)
    columns, named = (0, 1), not all(map(_is_number, fields[:2]))
    if named:
        columns = columns_of(fields)
    notes = []
    if len(fields) > 2:
        taken = (fields[columns[0]], fields[columns[1]]) if named else ("the first", "the second")
        names = ascii(" and ".join(name[:MOST_SHOWN] for name in taken))[1:-1]
        notes.append(f"of {len(fields)} columns {names} are taken")
    comment = "%" if lines and lines[0].startswith("%") else "#"
    rows = tables(path, np.int64, delimiter, columns, before + named, comment)
    return Parts(path, ((table[:, 0], table[:, 1]) for table in rows), notes=notes)


# -- MatrixMarket ----------------------------------------------------------------------------------


def matrix_market(path: str) -> Parts:
    """A square matrix in coordinates: entry i, j is the edge i -> j."""
    # scipy's mminfo ends the process over some streams, and mmread allocates what headers claim
    head, sizes, words = 0, "", (start_of(path) or "").partition("\n")[0].lower().split()
    for number, lines in lines_of(path):
        for i, line in enumerate(lines):
            if line.strip() and not line.startswith("%"):
                head, sizes = number + i, line
                break
        if head:
            break
    counts = sizes.split()
    if len(words) < 5 or len(counts) < 2 or not all(re.fullmatch(r"\d{1,18}", n) for n in counts):
        raise SpecError(
            f"{path}:{head or 1}: not MatrixMarket: a line '%%MatrixMarket matrix coordinate"
            " pattern general' and one of rows, columns and entries are required; write it with"
            " scipy.io.mmwrite"
        )
    layout, symmetry = words[2], words[4]
    rows, columns, entries = (int(number) for number in [*counts, "0"][:3])
    if layout != "coordinate":
        raise SpecError(f"{path}:1: a graph is a matrix in coordinates, this one is {layout}")
    if rows != columns:
        raise SpecError(
            f"{path}: a graph's matrix is square, this one is {rows:,} x {columns:,}; write N x N"
        )
    vertices = must_be_count(path, "rows", rows)

    def edges() -> Iterator[tuple[Array, Array]]:
        count = 0
        for table in tables(path, np.int64, None, (0, 1), head, "%"):
            src, dst = table[:, 0] - 1, table[:, 1] - 1  # ids count from 1
            count += len(src)
            yield src, dst
            if symmetry != "general":  # one triangle is written
                apart = src != dst
                yield dst[apart], src[apart]
        if count != entries:
            raise SpecError(
                f"{path}: its header says {entries:,} entries, but {count:,} are there; the file is"
                " cut off or damaged"
            )

    return Parts(path, edges(), vertices)
