"""Readers of tables of numbers, and of edge lists: text, Parquet, and matrices.

Text is CSV, TSV, or blanks between columns, and may be compressed with gzip. Entry i, j of a matrix
is the edge i -> j, in MatrixMarket files and SciPy's sparse matrices (files and objects). All
formats but SciPy's are read some rows at a time."""

from __future__ import annotations

import gzip
import os
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import length_hint
from typing import IO, Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.data import MASKS, NAME, mask_of_ids
from gnnplan.planner.graph.graph import LARGEST_WHOLE, MOST_VERTICES, Array, must_fit
from gnnplan.planner.graph.npy import arrays_in, must_be_count, must_be_ids, must_not_swell, reading
from gnnplan.planner.graph.parts import LABELS, Blocks, Parts, library
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, must_be_file

BLOCK = 1 << 24  # [B] read at a time
# names of the column of row numbers that pandas adds
NUMBERS = ("", "index", "unnamed: 0", "__index_level_0__")
IDS = ("id", "node_id", "vertex_id", "nodeid", "node", "vertex", "nid", "idx")
LABEL_NAMES = (*LABELS, "class", "target")
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
            text = "\n" + text.replace("\r\n", "\n").replace("\r", "\n")
            # numpy skips empty lines, but none with blanks
            lines = re.sub(r"\n[ \t]+(?=\n)", "\n", text)[1:].split("\n")
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
        targets = [name for name in LABEL_NAMES if name != "y" or "x" not in lower]  # x, y: a place
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
    gap = 0  # number of the first line without numbers
    # if all columns are read, numpy itself reports rows with more or fewer columns
    few = None if columns == tuple(range(head.columns)) else columns
    if few and head.unlike:
        raise SpecError(
            f"{path}:{head.unlike[0]}: a line must have as many columns as the first,"
            f" {head.columns}, has {head.unlike[1]}; mend it{LISTED}"
        )
    how: dict[str, Any] = {"comments": head.comment, "delimiter": head.delimiter, "usecols": few}
    for number, lines in lines_of(path, head.before):
        left = iter(lines)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.filterwarnings("ignore", "loadtxt: input contained no data")
                rows = np.loadtxt(left, dtype, **how, ndmin=2, quotechar='"')
        except (ValueError, OverflowError, Warning) as error:
            at = len(lines) - length_hint(left) - 1  # loadtxt stops behind the line that it refuses
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
        if columns is None and not gap and len(rows) < len(lines):
            gap = number + [line[:1] in ("", head.comment) for line in lines].index(True)
        if gap and len(rows) > max(0, gap - number):
            raise SpecError(
                f"{path}:{gap}: every line is a row, whose place counts, and this one holds no"
                " numbers; mend it, with nan for a label that is not there"
            )
        if len(rows):
            yield rows


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
    cells = [cells_of(lines[i], delimiter) for i in kept]
    columns, whole = (
        len(cells[0]),
        len(kept) - (start[-1:] not in "\r\n"),
    )  # the last may be cut off
    apart = (
        (i + 1, len(row))
        for i, row in zip(kept[1:whole], cells[1:], strict=False)
        if len(row) != columns and not {*COMMENTS, '"'} & {*lines[i]}
    )
    named = not all(map(is_number, cells[0][:ends]))
    rows, names, before = cells[named:] or [[]], cells[0], at + 1
    if not named:
        names = cells_of(lines[at - 1].lstrip("#% "), delimiter) if at else []
        names = names if len(names) == columns else []
        comments = (i for i, line in enumerate(lines) if not line.startswith(COMMENTS))
        before = at if names else next(comments)
    row = next(filter(all, rows), rows[0])
    return Head(delimiter, before, first, columns, names, row, named, next(apart, None))


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


def cells_of(line: str, delimiter: str | None) -> list[str]:
    """Split a line into cells, without blanks and quotes around each cell."""
    return [cell.strip().strip('"') for cell in line.split(delimiter)]


def is_number(text: str) -> bool:
    """Whether a cell's text is a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


# -- edge lists ------------------------------------------------------------------------------------


SOURCES = ("src", "source", "from", "src_id", "source_id", "from_id", "u", "head")
TARGETS = ("dst", "target", "to", "dst_id", "target_id", "to_id", "v", "tail", "destination")
ENDS = {*SOURCES, *TARGETS}
WEIGHTS = ("weight", "weights", "w", "edge_weight")
KONECT = re.compile(r"%\s*(sym|asym|bip)\b")
ROWS = 1 << 20  # rows of Parquet read at a time
NUMERIC = ("int", "uint", "float", "double", "halffloat", "bool")  # names of Parquet types begin so
PLACES = ("row", "col", "coords", "indices", "indptr", "offsets", "shape")  # integer arrays of .npz


def is_edge_list(path: str) -> bool:
    """Whether a text begins like an edge list: two whole numbers, after at most one header line.

    A text whose header names a source column counts too, so that an error about ids that are no
    numbers names their line."""
    head = head_of(path, 2)
    ends = [text for text in head.row if is_number(text) and float(text).is_integer()]
    return head.columns > 1 and (len(ends) > 1 or any(n.lower() in SOURCES for n in head.names))


def columns_in(
    names: Sequence[str], columns: int, numeric: Collection[int], named: bool = True
) -> tuple[list[int], tuple[str, ...], list[str]]:
    """Return the columns of both ends and of edge fields; the fields' names; a note on others.

    Ends are the columns with a usual name, if there is a header line (`named`), else the first two.
    numeric: the columns that hold numbers."""
    lower = [name.lower() for name in names]
    found = [[lower.index(name) for name in of if name in lower] for of in (SOURCES, TARGETS)]
    ends = [i for i, name in enumerate(lower) if name not in NUMBERS][:2]
    if named and all(found):
        ends = [places[0] for places in found]
    elif not named or len(ends) < 2:
        ends = [0, 1]
    fields: dict[str, int] = {}
    for i, name in enumerate(names):
        if i in numeric and i not in ends and lower[i] not in NUMBERS and NAME.fullmatch(name):
            fields.setdefault("edge_weight" if lower[i] in WEIGHTS else name, i)
    taken = [names[i] for i in ends] if names else ["the first", "the second"]
    notes = []
    if columns != 2 and (columns > 2 + len(fields) or not {*map(str.lower, taken)} & ENDS):
        shown = ascii(" and ".join(name[:MOST_SHOWN] for name in taken))[1:-1]
        others = f", and {len(fields)} as fields" if fields else ""
        remedy = "" if names else "; columns that a first line names are fields of edges"
        notes.append(f"of {columns} columns {shown} are taken{others}{remedy}")
    return [*ends, *fields.values()], tuple(fields), notes


def edge_tables(path: str, head: Head, columns: Sequence[int] = (0, 1)) -> Blocks:
    """Yield blocks of rows: the columns of source, target and edge fields."""
    names = [str(i) for i in range(len(columns))]
    # pandas writes ids as 1.0 if the column ever had an empty cell, numpy.savetxt as 1.0e+00
    points = any({*".eE"} & {*head.row[i]} for i in columns[:2] if i < len(head.row))
    ids = np.float64 if points else np.int64
    kinds = np.dtype([(name, np.float64 if i > 1 else ids) for i, name in enumerate(names)])
    for table in tables(path, kinds, head, tuple(columns)):
        src, dst, *others = (table[name].ravel() for name in names)
        yield whole(path, src), whole(path, dst), *others


def edge_list(path: str) -> Parts:
    """Read an edge per line; further columns that a header line names are edge fields."""
    head = head_of(path, 2)
    numeric = [i for i, text in enumerate(head.row) if is_number(text)]
    columns, fields, notes = columns_in(head.names, head.columns, numeric, head.named)
    konect = KONECT.match(head.first)
    if konect and konect[1] == "bip":
        raise SpecError(
            f"{path}:1: KONECT's bipartite graph has two kinds of vertices, both counted from 1,"
            " one kind is needed; number them together, from 0"
        )
    if konect:
        notes.append("KONECT's ids count from 1, here from 0: its vertex 1 is vertex 0")

    def edges() -> Blocks:
        for src, dst, *others in edge_tables(path, head, columns):
            ends = from_zero(path, "KONECT", src, dst) if konect else (src, dst)
            pairs = zip(fields, others, strict=True)
            yield *ends, *(of if name == "edge_weight" else narrow(of) for name, of in pairs)

    return Parts(path, edges(), notes=notes, columns=fields)


def from_zero(path: str, format: str, *ends: Array) -> Iterator[Array]:
    """Yield the ids, which count from 1 in `format`, less 1. Raises SpecError for ids below 1."""
    for ids in ends:
        if ids.size and (least := int(ids.min())) < 1:
            raise SpecError(
                f"{path}: ids of {format} count from 1, found {least}; add {1 - least} to all"
            )
        yield ids - 1


def matrix_market(path: str) -> Parts:
    """Read a square matrix in coordinates: entry i, j is the edge i -> j.

    The values of entries are the field edge_weight, unless all are 1."""
    # scipy's mminfo ends the process over some streams, and mmread allocates what headers claim
    numbered = (line for number, lines in lines_of(path) for line in enumerate(lines, number))
    full = (line for line in numbered if line[1].strip() and not line[1].startswith("%"))
    before, sizes = next(full, (0, ""))
    words, counts = (start_of(path) or "").partition("\n")[0].lower().split(), sizes.split()
    if len(words) < 5 or len(counts) < 2 or not all(re.fullmatch(r"\d{1,18}", n) for n in counts):
        raise SpecError(
            f"{path}:{before or 1}: not MatrixMarket: a line '%%MatrixMarket matrix coordinate"
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
    vertices, head = must_be_count(path, "rows", rows), Head(before=before, first="%")
    weighs = words[3] in ("real", "integer") and any(
        (table != 1).any() for table in tables(path, np.float64, head, (2, 2))
    )
    notes = ["ignored: complex numbers of its entries"] if words[3] == "complex" else []

    def edges() -> Blocks:
        count = 0
        for src, dst, *weights in edge_tables(path, head, range(2 + weighs)):
            src, dst = from_zero(path, "MatrixMarket", src, dst)
            count += len(src)
            yield src, dst, *weights
            if symmetry != "general":  # the file holds one triangle only
                apart, sign = src != dst, -1 if symmetry == "skew-symmetric" else 1
                yield dst[apart], src[apart], *(sign * weight[apart] for weight in weights)
        if count != entries:
            raise SpecError(
                f"{path}: its header says {entries:,} entries, but {count:,} are there; the file is"
                " cut off or damaged"
            )

    names = ("edge_weight",) if weighs else ()
    return Parts(path, edges(), vertices, notes=notes, columns=names)


def parquet(path: str) -> Parts:
    """Read columns named source and target, else the first two; other numbers are edge fields."""
    arrow = library("pyarrow.parquet")
    with reading(path, "Parquet"), arrow.ParquetFile(path) as file:
        schema = file.schema_arrow
    types = {field.name: str(field.type) for field in schema}
    if len(schema.names) < 2:
        raise SpecError(
            f"{path}: an edge list has two columns, this file has {len(schema.names)};"
            " write both ends of an edge"
        )
    numeric = [i for i, field in enumerate(schema) if str(field.type).startswith(NUMERIC)]
    columns, fields, notes = columns_in(schema.names, len(schema.names), numeric)
    names = [schema.names[i] for i in columns]
    for name in names[:2]:
        if not types[name].startswith(NUMERIC[:-1]):
            raise SpecError(
                f"{path}: {name}: vertex ids must be integers, are {types[name]}; {NUMBER_THEM}"
            )

    def edges() -> Blocks:
        with reading(path, "Parquet"), arrow.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=names):
                for name in names:
                    if empty := batch.column(name).null_count:
                        raise SpecError(
                            f"{path}: {name}: every edge needs two ids, and a number of each field,"
                            f" {empty:,} are empty; drop these rows"
                        )
                src, dst, *others = (np.asarray(batch.column(n).to_numpy(False)) for n in names)
                yield whole(path, src), whole(path, dst), *others

    return Parts(path, edges(), notes=notes, columns=fields)


def load_matrix(path: str) -> Any:
    """Load and check the matrix of a .npz by scipy.sparse.save_npz. Raises SpecError."""
    nbytes = 0
    with reading(path, "a sparse matrix"):
        with arrays_in(path) as arrays:
            for name in arrays.files:  # before scipy allocates the sizes that headers claim
                header = arrays.check(name)
                nbytes += header.nbytes
                if name in PLACES and header.dtype.kind not in "iu":  # scipy would round them
                    raise SpecError(
                        f"{path}: {name}: must hold integers, has dtype {header.dtype}; write it"
                        " again with scipy.sparse.save_npz"
                    )
            must_fit(path, "what it holds", nbytes)
        matrix = sp.load_npz(path)
    if matrix.format == "dia":  # scipy would allocate its declared shape without a check
        raise SpecError(f"{path}: holds diagonals; save it with save_npz(path, matrix.tocoo())")
    return matrix


def of_matrix(matrix: Any, path: str = "a sparse matrix") -> Parts:
    """Return the edges of a square matrix; each stored entry is an edge, stored zeros too, but for
    those of BSR.

    The values of entries are the field edge_weight, unless all are 1."""
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise SpecError(
            f"{path}: a graph's matrix is square, this one is of shape {matrix.shape}; give [N, N]"
        )
    must_be_count(path, "shape", int(matrix.shape[0]))
    with reading(path, "a sparse matrix"):
        if matrix.format in ("csr", "csc", "bsr"):
            matrix.check_format(full_check=True)  # scipy does not check index pointers otherwise
        if matrix.format == "bsr":  # zeros fill up its blocks
            matrix = matrix.tocsr()
            matrix.eliminate_zeros()
        matrix = matrix.tocoo()
    parts = Parts(path, [(matrix.row, matrix.col)], int(matrix.shape[0]))
    if (matrix.data != 1).any():
        parts.edge_fields["edge_weight"] = [np.asarray(matrix.data)]
    return parts
