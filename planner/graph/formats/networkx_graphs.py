"""Readers of NetworkX graphs: GraphML files, graph objects, and pickles that the user trusts."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from gnnplan.planner.graph.fields import NAME
from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.graph.labels import MASKS
from gnnplan.planner.graph.npy import reading
from gnnplan.planner.graph.parts import (
    FEATURES,
    LABELS,
    Parts,
    ignored,
    is_numbers,
    library,
    take_vertex_data,
    tensor_array,
)
from gnnplan.planner.vocabulary.errors import SpecError

PER_BYTE = 10  # lower bound: [B] of Python objects per byte of GraphML


def read_graphml(path: str) -> Parts:
    """Read a GraphML file by NetworkX. Raises SpecError if its objects would exceed memory."""
    networkx = library("networkx")
    with reading(path, "GraphML"):
        must_fit(path, "NetworkX's objects of it", PER_BYTE * float(os.stat(path).st_size))
        return of_graph(networkx.read_graphml(path), path)


def of_graph(graph: Any, path: str = "a networkx graph") -> Parts:
    """Return the edges, in both directions if undirected, and the attributes of nodes and edges.

    Numeric attributes that all nodes, or all edges, have become fields; weight becomes edge_weight.
    Nodes named 0 to N-1, as numbers or as text, keep these ids; other nodes are numbered in the
    graph's order."""
    nodes, notes, ways = list(graph.nodes), list[str](), 1 if graph.is_directed() else 2
    texts = [str(node) for node in nodes]
    number = {node: i for i, node in enumerate(nodes)}
    if all(re.fullmatch("[0-9]{1,10}", text) for text in texts) and sorted(map(int, texts)) == list(
        range(len(nodes))
    ):
        number = {node: int(node) for node in nodes}
    else:
        notes.append("vertices are numbered in the order of the nodes")
    pairs = ((number[u], number[v]) for u, v in graph.edges())
    ends = np.fromiter(pairs, np.dtype((np.int64, 2)), graph.number_of_edges())
    edges = np.concatenate([ends, ends[:, ::-1]][:ways])
    parts = Parts(path, [(edges[:, 0], edges[:, 1])], len(nodes), notes=notes)
    fields, left = _columns([of for *_, of in graph.edges(data=True)], ())
    for name, column in fields.items():
        both = np.concatenate([column] * ways)
        parts.edge_fields["edge_weight" if name == "weight" else name] = [both]
    on_nodes = [of for _, of in sorted(graph.nodes(data=True), key=lambda each: number[each[0]])]

    data: dict[str, Array] = {}  # attribute name -> values in the order of vertex ids
    for names, missing in ((FEATURES, None), (LABELS, -1), *(((mask,), None) for mask in MASKS)):
        for name in (name for name in names if any(name in of for of in on_nodes)):
            found = [of[name] for of in on_nodes if name in of]
            if len(found) < len(nodes) and missing is None:
                raise SpecError(
                    f"{path}: {name}: {len(nodes) - len(found):,} of {len(nodes):,} nodes lack it;"
                    " give it to all or to none"
                )
            if any(isinstance(value, str) for value in found):
                continue  # text, as in Gephi's attribute label, is no class label
            none = np.full(np.shape(found[0]), missing)
            rows = [np.asarray(of.get(name, none)).tolist() for of in on_nodes]
            array = tensor_array(path, name, rows)
            data[name] = array[:, None] if names == FEATURES and array.ndim == 1 else array
            break
    take_vertex_data(parts, data)
    parts.vertex_fields, others = _columns(on_nodes, data)
    notes += ignored([*left, *others])
    return parts


def _columns(
    rows: Sequence[Mapping[str, Any]], taken: Collection[str]
) -> tuple[dict[str, Array], list[str]]:
    """Return the attributes that are numbers in all rows, except `taken`; and all other names."""
    found: dict[str, Array] = {}
    names = dict.fromkeys(name for row in rows for name in row if name not in taken)
    for name in names:
        if NAME.fullmatch(str(name)) and all(name in row for row in rows):
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                column = np.asarray([row[name] for row in rows])
                if is_numbers(column) and all(column.shape):
                    found[str(name)] = column
    return found, [str(name) for name in names if str(name) not in found]
