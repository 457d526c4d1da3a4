"""Edge lists in Parquet, read by pyarrow some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gnnplan.planner.graph.formats.parts import Parts, library, reading
from gnnplan.planner.graph.formats.text import columns_of
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.vocabulary.errors import SpecError

ROWS = 1 << 20  # at a time


def edge_list(path: str) -> Parts:
    """Columns named source and target, or else the first two."""
    parquet = library("pyarrow.parquet")
    with reading(path, "Parquet"), parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
    if len(schema.names) < 2:
        raise SpecError(
            f"{path}: an edge list has two columns, this file has {len(schema.names)};"
            " write both ends of an edge"
        )
    names = [schema.names[i] for i in columns_of(schema.names)]
    for name in names:
        if "int" not in str(schema.field(name).type):
            raise SpecError(
                f"{path}: {name}: vertex ids must be integers, are {schema.field(name).type};"
                " number the vertices from 0 (pandas.factorize)"
            )

    def edges() -> Iterator[tuple[Array, Array]]:
        with reading(path, "Parquet"), parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=names):
                columns = [batch.column(name) for name in names]
                for name, column in zip(names, columns, strict=True):
                    if column.null_count:
                        raise SpecError(
                            f"{path}: {name}: every edge needs two ids, {column.null_count:,} are"
                            " empty; drop these rows"
                        )
                src, dst = (np.asarray(column.to_numpy()) for column in columns)
                yield src, dst

    notes = []
    if len(schema.names) > 2:
        notes.append(f"of {len(schema.names)} columns {names[0]} and {names[1]} are taken")
    return Parts(path, edges(), notes=notes)
