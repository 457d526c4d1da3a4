"""Edge lists in Parquet, read by pyarrow some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gnnplan.planner.graph.formats.text import columns_of, field_columns, taken_note
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.graph.parts import Parts, library, reading
from gnnplan.planner.vocabulary.errors import SpecError

ROWS = 1 << 20  # at a time
NUMERIC = ("int", "uint", "float", "double", "halffloat", "bool")  # how its types are called


def edge_list(path: str) -> Parts:
    """Columns named source and target, or else the first two; other numbers are fields of edges."""
    parquet = library("pyarrow.parquet")
    with reading(path, "Parquet"), parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    if len(schema.names) < 2:
        raise SpecError(
            f"{path}: an edge list has two columns, this file has {len(schema.names)};"
            " write both ends of an edge"
        )
    ends = columns_of(schema.names)
    fields = {
        name: i
        for name, i in field_columns(schema.names, ends).items()
        if str(schema.field(i).type).startswith(NUMERIC)
    }
    names = [schema.names[i] for i in (*ends, *fields.values())]
    for name in names[:2]:
        if "int" not in str(schema.field(name).type):
            raise SpecError(
                f"{path}: {name}: vertex ids must be integers, are {schema.field(name).type};"
                " number the vertices from 0 (pandas.factorize)"
            )

    def edges() -> Iterator[tuple[Array, ...]]:
        with reading(path, "Parquet"), parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=names):
                columns = [batch.column(name) for name in names]
                for name, column in zip(names, columns, strict=True):
                    if column.null_count:
                        raise SpecError(
                            f"{path}: {name}: every edge needs two ids, and a number of each field,"
                            f" {column.null_count:,} are empty; drop these rows"
                        )
                yield tuple(np.asarray(column.to_numpy(False)) for column in columns)

    notes = taken_note(len(schema.names), schema.names, ends, len(fields))
    return Parts(path, edges(), notes=notes, columns=tuple(fields))
