"""Reader of DGL GraphBolt's on-disk datasets: metadata.yaml, and the files that it names."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import numpy as np

from gnnplan.planner.graph.fields import NAME
from gnnplan.planner.graph.formats.edge_lists import edge_tables
from gnnplan.planner.graph.formats.pyg import load_tensors
from gnnplan.planner.graph.formats.text import Head
from gnnplan.planner.graph.graph import MOST_CLASSES, Array
from gnnplan.planner.graph.labels import labels_of, mask_of_ids
from gnnplan.planner.graph.npy import mapped_array, must_be_count
from gnnplan.planner.graph.parts import (
    FEATURES,
    Parts,
    endpoints,
    ignored,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Document, Where, read_yaml

METADATA = "metadata.yaml"
SETS = {"train_mask": "train_set", "val_mask": "validation_set", "test_mask": "test_set"}

WORDS: dict[type, str] = {int: "a whole number", str: "text", list: "a list", dict: "a mapping"}


class _Metadata:
    """The document metadata.yaml, whose values are checked when they are used."""

    def __init__(self, path: str) -> None:
        self.folder = Path(path)
        self.document: Document = read_yaml(self.folder / METADATA)

    def get(self, where: Where, kind: type, default: Any = None) -> Any:
        """Return the value at `where`. Raises SpecError, with the line, for another type."""
        value: Any = None
        with suppress(LookupError, TypeError):  # it is absent
            value = reduce(getitem, where, cast(Any, self.document.data))
        if value is None and default is not None:
            return default
        if not isinstance(value, kind):
            raise self.document.error(
                where,
                f"must be {WORDS[kind]}, is {WORDS.get(type(value), 'empty')}; see GraphBolt's"
                " documentation of on-disk datasets",
            )
        return value

    def named(self, where: Where, **having: str) -> dict[str, Where]:
        """Return name -> location of the items of a list with the values `having`.

        Raises SpecError."""
        items = enumerate(self.get(where, list, []))
        held = [(i, of) for i, of in items if isinstance(of, dict) and {**of, **having} == of]
        return {str(of.get("name")): (*where, i) for i, of in held}

    def only(self, where: Where) -> Where:
        """Return the location of the only item of a list (one kind of vertices or edges)."""
        items = self.get(where, list)
        if len(items) != 1 or not isinstance(items[0], dict):
            raise self.document.error(
                where, f"one kind of vertices and one of edges are read, found {len(items)}"
            )
        return (*where, 0)

    def file(self, where: Where) -> tuple[str, str]:
        """Return path and format of the file that the entry at `where` describes."""
        name = self.get((*where, "path"), str)
        path = (self.folder / name).resolve()
        if not path.is_relative_to(self.folder.resolve()):
            raise self.document.error(
                (*where, "path"),
                f"must lie in the dataset's folder, is {name[:MOST_SHOWN]}; copy it there",
            )
        return str(path), self.get((*where, "format"), str)

    def array(self, where: Where) -> Array:
        """Read the array of a file in format numpy or torch."""
        path, kind = self.file(where)
        if kind == "numpy":
            return mapped_array(path)
        if kind == "torch":
            return tensor_array(path, "it", load_tensors(path))
        raise self.document.error(
            (*where, "format"), f"must be numpy or torch, is {kind[:MOST_SHOWN]}"
        )


def read(path: str) -> Parts:
    """Read the edges, the node features named feat (or the only ones), and the first task's sets.

    All other features of nodes and edges become fields."""
    meta = _Metadata(path)
    nodes = meta.only(("graph", "nodes"))
    vertices = must_be_count(path, "graph.nodes.num", meta.get((*nodes, "num"), int))
    parts = Parts(path, _edges(meta), vertices)
    places = meta.named(("feature_data",), domain="node")
    on_edges = meta.named(("feature_data",), domain="edge")
    name = next((name for name in FEATURES if name in places), None)
    if name is None and len(places) == 1:
        (name,) = places
    if name is not None:
        parts.x = meta.array(places[name])
        del places[name]
    fields = {other for other in (*places, *on_edges) if NAME.fullmatch(other)}
    parts.notes += ignored({*places, *on_edges} - fields)
    for other in sorted(fields):
        if other in places:
            parts.vertex_fields[other] = meta.array(places[other])
        if other in on_edges:
            parts.edge_fields[other] = [meta.array(on_edges[other])]
    if tasks := meta.get(("tasks",), list, []):
        if len(tasks) > 1:
            parts.notes.append(f"of {len(tasks)} tasks the first is taken")
        _sets(meta, parts)
    return parts


def _edges(meta: _Metadata) -> Iterable[tuple[Array, ...]]:
    """Return the edges as blocks (src, dst), from a .csv or an array [2, E]."""
    path, kind = meta.file(where := meta.only(("graph", "edges")))
    if kind == "csv":  # columns src, dst without a header line
        return edge_tables(path, Head(","))
    return [endpoints(path, "edges", meta.array(where))]


def _sets(meta: _Metadata, parts: Parts) -> None:
    """Set the masks, labels and number of classes of `parts` from the first task."""
    ids: dict[str, Array] = {}
    labels: list[tuple[Array, Array]] = []
    for mask, name in SETS.items():
        if not meta.get(("tasks", 0, name), list, []):
            continue
        where: Where = (*meta.only(("tasks", 0, name)), "data")
        found = meta.named(where)
        seeds = next((found[key] for key in ("seeds", "seed_nodes") if key in found), None)
        if seeds is None:
            raise meta.document.error(
                where,
                "needs seeds, the ids of its vertices; other tasks than node classification"
                " are not read",
            )
        ids[mask] = np.asarray(meta.array(seeds))
        if "labels" in found:
            y = np.asarray(meta.array(found["labels"]))
            if len(y) != len(ids[mask]):
                raise meta.document.error(
                    found["labels"],
                    f"must be as many as seeds ({len(ids[mask]):,}), are {len(y):,}; write one for"
                    " each",
                )
            labels.append((ids[mask], y))
    vertices = vertices_of(parts) or 0
    parts.masks = {name: mask_of_ids(parts.path, name, ids[name], vertices) for name in ids}
    if not labels:
        return
    parts.y = labels_of(parts.path, vertices, labels)
    if "num_classes" in meta.get(("tasks", 0), dict) and parts.y.ndim == 1:
        parts.classes = must_be_count(
            parts.path, "num_classes", meta.get(("tasks", 0, "num_classes"), int), MOST_CLASSES
        )
