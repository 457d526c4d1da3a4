"""Readers of edge lists: text (CSV, TSV, blanks between columns), Parquet, and matrices.

Entry i, j of a matrix is the edge i -> j, in MatrixMarket files and SciPy's sparse matrices (files
and objects). All formats but SciPy's are read some rows at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.fields import NAME
from gnnplan.planner.graph.formats.text import (
    NUMBER_THEM,
    NUMBERS,
    Head,
    head_of,
    is_number,
    lines_of,
    narrow,
    start_of,
    tables,
    whole,
)
from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.graph.npy import arrays_in, must_be_count, reading
from gnnplan.planner.graph.parts import Parts, library
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN

SOURCES = ("src", "source", "from", "src_id", "source_id", "from_id", "u", "head")
TARGETS = ("dst", "target", "to", "dst_id", "target_id", "to_id", "v", "tail", "destination")
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


def columns_of(names: Sequence[str]) -> tuple[int, int]:
    """Return the columns of source and target by their names; else the first two columns."""
    lower = [name.lower() for name in names]
    src = next((lower.index(name) for name in SOURCES if name in lower), None)
    dst = next((lower.index(name) for name in TARGETS if name in lower), None)
    if src is not None and dst is not None:
        return src, dst
    first, second, *_ = [i for i, name in enumerate(lower) if name not in NUMBERS] + [0, 1]
    return (first, second) if first < second else (0, 1)


def fields_beside(
    names: Sequence[str], columns: int, ends: tuple[int, int], is_number: Callable[[int], bool]
) -> tuple[dict[str, int], list[str]]:
    """Return the columns of edge fields, keyed by name, and a note on columns that are not read."""
    fields: dict[str, int] = {}
    for i, name in enumerate(names):
        if i not in ends and name.lower() not in NUMBERS and NAME.fullmatch(name) and is_number(i):
            fields.setdefault("edge_weight" if name.lower() in WEIGHTS else name, i)
    known = columns == 2 or {names[i].lower() for i in ends if names} & {*SOURCES, *TARGETS}
    if columns == 2 + len(fields) and known:
        return fields, []
    taken = [names[i] for i in ends] if names else ["the first", "the second"]
    shown = ascii(" and ".join(name[:MOST_SHOWN] for name in taken))[1:-1]
    others = f", and {len(fields)} as fields" if fields else ""
    remedy = "" if names else "; columns that a first line names are fields of edges"
    return fields, [f"of {columns} columns {shown} are taken{others}{remedy}"]


def edge_tables(
    path: str, head: Head, columns: Sequence[int] = (0, 1)
) -> Iterator[tuple[Array, ...]]:
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
    columns = columns_of(head.names) if head.named else (0, 1)
    numbers = {i for i, text in enumerate(head.row) if is_number(text)}
    fields, notes = fields_beside(head.names, head.columns, columns, numbers.__contains__)
    konect = KONECT.match(head.first)
    if konect and konect[1] == "bip":
        raise SpecError(
            f"{path}:1: KONECT's bipartite graph has two kinds of vertices, both counted from 1,"
            " one kind is needed; number them together, from 0"
        )
    if konect:
        notes.append("KONECT's ids count from 1, here from 0: its vertex 1 is vertex 0")

    def edges() -> Iterator[tuple[Array, ...]]:
        for src, dst, *others in edge_tables(path, head, [*columns, *fields.values()]):
            pairs = zip(fields, others, strict=True)
            yield (
                *(from_zero(path, "KONECT", src, dst) if konect else (src, dst)),
                *(column if name == "edge_weight" else narrow(column) for name, column in pairs),
            )

    return Parts(path, edges(), notes=notes, columns=tuple(fields))


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

    def edges() -> Iterator[tuple[Array, ...]]:
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
    if len(schema.names) < 2:
        raise SpecError(
            f"{path}: an edge list has two columns, this file has {len(schema.names)};"
            " write both ends of an edge"
        )
    ends = columns_of(schema.names)
    fields, notes = fields_beside(
        schema.names,
        len(schema.names),
        ends,
        lambda i: str(schema.field(i).type).startswith(NUMERIC),
    )
    names = [schema.names[i] for i in (*ends, *fields.values())]
    for name in names[:2]:
        if not str(schema.field(name).type).startswith(NUMERIC[:-1]):
            raise SpecError(
                f"{path}: {name}: vertex ids must be integers, are {schema.field(name).type};"
                f" {NUMBER_THEM}"
            )

    def edges() -> Iterator[tuple[Array, ...]]:
        with reading(path, "Parquet"), arrow.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=names):
                columns = [batch.column(name) for name in names]
                for name, column in zip(names, columns, strict=True):
                    if column.null_count:
                        raise SpecError(
                            f"{path}: {name}: every edge needs two ids, and a number of each field,"
                            f" {column.null_count:,} are empty; drop these rows"
                        )
                src, dst, *others = (np.asarray(column.to_numpy(False)) for column in columns)
                yield whole(path, src), whole(path, dst), *others

    return Parts(path, edges(), notes=notes, columns=tuple(fields))


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
