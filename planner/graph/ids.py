"""Ids of vertices count from 0, and are below the number of vertices, which 32 bits hold."""

from __future__ import annotations

from typing import Any

import numpy as np

from gnnplan.planner.graph.graph import MOST_VERTICES, Array
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN


def must_be_ids(
    path: str, name: str, ids: Array, vertices: int, first: int = 0, counted: str = ""
) -> None:
    """Raise SpecError for ids beyond the vertices; the first of them is number `first`.

    counted: what of the file gives the number of vertices."""
    if ids.dtype.kind not in "iu":
        raise SpecError(
            f"{path}: {name}: vertex ids must be integers, have dtype {ids.dtype}; number the"
            " vertices from 0 (numpy.unique(..., return_inverse=True))"
        )
    if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vertices:
        bad = np.flatnonzero((ids < 0) | (ids >= vertices))
        at, many = first + int(bad[0]), f" ({bad.size:,} such edges)" if counted else ""
        said = f", and {counted} give" if counted else ", and there are"
        raise SpecError(
            f"{path}: {name}[{at:,}]: vertex ids must lie in [0, {vertices - 1:,}],"
            f" found {int(ids[bad[0]])}{many}; ids count from 0"
            + ("" if vertices == MOST_VERTICES else f"{said} {vertices:,} vertices")
        )


def must_be_count(path: str, name: str, value: Any, most: int = MOST_VERTICES) -> int:
    """A number of vertices or classes that a file claims. Raises SpecError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value <= most:
        raise SpecError(
            f"{path}: {name}: must be a whole number of 0 to {most:,}, is"
            f" {str(value)[:MOST_SHOWN]}; write the file again"
        )
    return int(value)
