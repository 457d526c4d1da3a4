"""Fields: numbers of vertices [N, ..] and of edges [E, ..] beside features and labels, by name.

In files, the array `vertex.pos` is the vertex field pos, `edge.edge_weight` the edge field
edge_weight. A parameter of a user's module with a field's name receives the field."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import Array, Graph, must_be_finite, some_rows
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.units import show_count

VERTEX, EDGE = "vertex.", "edge."
OF_EDGES = ("edge_weight", "edge_attr", "edge_type")  # PyG's names of edge fields
NAME = re.compile(r"\w[\w .-]{0,79}", re.ASCII)  # valid field names: they become file names
NUMBERS = "biuf"  # numpy dtype kinds: boolean, integer, unsigned, float


def kind_of(path: str, name: str, rows: int, vertices: int, edges: int) -> str | None:
    """Return VERTEX or EDGE by the field's name and rows; None: no field. Raises SpecError."""
    if name in OF_EDGES:
        if rows != edges:
            raise SpecError(
                f"{path}: {name}: has {rows:,} rows, and there are {edges:,} edges; give a row for"
                " each edge, in their order"
            )
        return EDGE
    if rows == edges and (rows != vertices or "edge" in name):
        return EDGE
    return VERTEX if rows == vertices else None


def checked(path: str, name: str, array: Array, rows: int, of: str) -> Array:
    """Return a field as a contiguous array of a type that torch has. Raises SpecError.

    rows: the number of vertices or edges; `of` names which."""
    if array.ndim == 0 or len(array) != rows:
        raise SpecError(
            f"{path}: {name}: has shape {list(array.shape)}, and there are {rows:,} {of}; give a"
            f" row for each of the {of}, in their order"
        )
    if array.dtype.kind not in NUMBERS:
        raise SpecError(
            f"{path}: {name}: must hold numbers or booleans, has dtype {array.dtype}; write numbers"
            " (numpy.unique(..., return_inverse=True) numbers texts)"
        )
    if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise SpecError(
            f"{path}: {name}: whole numbers must be below 2^63, found {int(array.max())}; write"
            " smaller ones"
        )
    first = 0
    for piece in some_rows(array) if array.dtype.kind == "f" else ():
        must_be_finite(path, name, piece, first, "must be finite")
        first += len(piece)
    kind = np.dtype(
        np.int64
        if array.dtype.kind == "u" and array.dtype.itemsize > 1
        else np.float64
        if array.dtype.itemsize > 8
        else array.dtype.newbyteorder("=")
    )
    if kind == array.dtype and array.flags.c_contiguous:
        return array
    return np.ascontiguousarray(array, kind)


def along(
    fields: Mapping[str, Array], ends: tuple[Array, Array], vertices: int, directed: bool
) -> tuple[dict[str, Array], list[str]]:
    """Return the fields of an edge list in the order of the CSR built from it, and notes.

    In an undirected graph, an edge listed in one direction has the same row in both directions; an
    edge listed in both directions keeps each direction's row. A field is dropped if an edge is
    listed twice with different rows."""
    if not fields:
        return {}, []
    src, dst = ends
    given = np.flatnonzero(src != dst)
    a, b = (end[given].astype(np.int64) for end in ends)
    keys = np.concatenate([b * vertices + a, *([] if directed else [a * vertices + b])])
    order = np.argsort(keys, kind="stable")  # stable: listed edges come before reversed ones
    turned, place = order >= given.size, given[order % max(given.size, 1)]
    again = np.append(False, np.diff(keys[order]) == 0)[: order.size]

    def unlike(field: Array, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the `rows` whose field differs from the preceding row."""
        differ = field[place[rows]] != field[place[rows - 1]]
        return np.asarray(rows[differ.any(tuple(range(1, field.ndim)))])

    notes, kept = [], {}
    for name, field in fields.items():
        if not (bad := unlike(field, np.flatnonzero(again & ~turned))).size:
            kept[name] = field
            continue
        one, other = place[bad[0] - 1], place[bad[0]]
        rows = [
            np.array2string(field[at], threshold=6, edgeitems=2, separator=", ")
            for at in (one, other)
        ]
        notes.append(
            f"left {name} out: {bad.size:,} edges are given again with different values, first"
            f" {int(src[one])} -> {int(dst[one])} with {rows[0]} and {rows[1]}; merge them to have"
            " it (torch_geometric.utils.coalesce, dgl.to_simple)"
        )
    names = ", ".join(kept)
    if kept and (loops := src.size - given.size):
        notes.append(f"dropped {names} of {show_count(loops, 'self-loop')} with them")
    if kept and (count := int(np.count_nonzero(turned & ~again))):
        notes.append(
            f"{count:,} edges are given in one direction only; their reverse edges have the same"
            f" {names}"
        )
    both = np.flatnonzero(again & np.diff(turned, prepend=False))
    apart = {name: unlike(field, both) for name, field in kept.items()}
    if named := [name for name, rows in apart.items() if rows.size]:
        count = np.unique(np.concatenate([apart[name] for name in named])).size
        notes.append(
            f"{count:,} edges are given in both directions with different values of"
            f" {', '.join(named)}, and keep them"
        )
    chosen = place[~again]
    return {name: np.ascontiguousarray(field[chosen]) for name, field in kept.items()}, notes


def unread_by(model: str, graph: Graph | None, reads: Collection[str] = ()) -> list[str]:
    """Return a note on the graph's fields that a model does not read.

    reads: fields that the model reads, such as 'vertex pos', 'edge edge_weight'."""
    if graph is None:
        return []
    names = [n for n in graph.vertex_fields if f"vertex {n}" not in reads]
    names += [n for n in graph.edge_fields if f"edge {n}" not in reads]
    return [f"{model} does not read {', '.join(names)} of {graph.stats.name}"] if names else []
