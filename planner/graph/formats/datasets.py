"""Readers of datasets: OGB's node property datasets, and DGL GraphBolt's on-disk datasets.

OGB's have raw/ and split/; GraphBolt's have metadata.yaml, and the files that it names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, cast

import numpy as np

from gnnplan.planner.graph.data import MASKS, NAME, WORDS, labels_of, mask_of_ids
from gnnplan.planner.graph.formats.extras import masks_in
from gnnplan.planner.graph.formats.libraries import load_tensors
from gnnplan.planner.graph.formats.tables import (
    Head,
    column,
    edge_tables,
    matrix,
    narrow,
    whole_matrix,
)
from gnnplan.planner.graph.graph import AT_ONCE, MOST_CLASSES, MOST_VERTICES, Array
from gnnplan.planner.graph.npy import Header, arrays_in, mapped_array, must_be_count
from gnnplan.planner.graph.parts import (
    FEATURES,
    Parts,
    endpoints,
    ignored,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Document, Where, read_yaml

# -- OGB -------------------------------------------------------------------------------------------


NAMES = LISTS, SAVED = "train.csv.gz", "split_dict.pt"  # files that mark the folder of a split


def raws_of(path: str) -> list[Path]:
    """Return the raw folder in, or at, `path` in a list; an empty list if there is none.

    Raises SpecError for a graph with several kinds of vertices or edges."""
    for folder in (Path(path) / "raw", Path(path)):
        if (folder / "data.npz").is_file() or (folder / "edge.csv.gz").is_file():
            return [folder]
        if (folder / "triplet-type-list.csv.gz").is_file() or (
            folder / "edge_index_dict.npz"
        ).is_file():
            raise SpecError(
                f"{path}: has several kinds of vertices or edges, one of each is needed; give a"
                " graph with one, such as ogbn-arxiv's"
            )
    return []


def read_ogb(path: str) -> Parts:
    """Read edges, features, labels and the official split; other arrays become fields.

    edge_feat becomes edge_attr, the name in OGB's PyG loader."""
    (raw,) = raws_of(path)
    is_binary = (raw / "data.npz").is_file()
    parts = _binary(raw, path) if is_binary else _text(raw, path)
    splits = raw.parent / "split"
    if not splits.is_dir():
        parts.notes.append("no folder split/ beside raw/")
        return parts
    found = sorted({file.parent for file in splits.glob("*/*") if file.name in NAMES})
    lists = [split if (split / LISTS).is_file() else split / SAVED for split in found]
    if len(lists) > 1:
        parts.choice = (
            f"{splits}: holds {len(lists)} splits, {', '.join(split.name for split in found)}; name"
            f" one, as --split {lists[0]}"
        )
        return parts
    if not lists:
        raise SpecError(
            f"{splits}: one split is needed, a folder with {' or '.join(NAMES)}, found none; remove"
            " split/ for a random one"
        )
    parts.notes.append(f"the official split by {found[0].name}")
    parts.masks = masks_in(str(lists[0]), parts)
    for name in MASKS:
        if name not in parts.masks or not parts.masks[name].any():
            raise SpecError(
                f"{lists[0]}: {WORDS[name][0]}: holds no vertex; repeat the download, or save it"
                " again with ogb's DatasetSaver"
            )
    return parts


def _one(path: str, name: str, counts: Array, most: int = MOST_VERTICES) -> int:
    """Return the single number in a list with an entry per graph. Raises SpecError."""
    if counts.size != 1:
        raise SpecError(
            f"{path}: {name}: node property prediction has one graph, this folder {counts.size};"
            " give a folder of ogbn-..., or repeat the download"
        )
    return must_be_count(path, name, int(counts.ravel()[0]), most)


def _text(raw: Path, path: str) -> Parts:
    """Read a raw folder of .csv.gz files; edges and edge fields are read later, in blocks."""
    nodes, ends = "num-node-list.csv.gz", "num-edge-list.csv.gz"
    vertices = _one(path, nodes, column(str(raw / nodes)))
    count = _one(path, ends, column(str(raw / ends)), 2**62)

    def edges() -> Iterator[tuple[Array, Array]]:
        file, found = str(raw / "edge.csv.gz"), 0
        for src, dst in edge_tables(file, Head(",")):
            found += len(src)
            yield src, dst
        if found != count:
            raise SpecError(
                f"{file}: num-edge-list.csv.gz says {count:,} edges, but {found:,} are there; the"
                " download is damaged, repeat it"
            )

    parts = Parts(path, edges(), vertices)
    if os.path.lexists(raw / "node-feat.csv.gz"):
        parts.x = matrix(str(raw / "node-feat.csv.gz"), np.float32)
    if os.path.lexists(raw / "node-label.csv.gz"):
        parts.y = whole_matrix(str(raw / "node-label.csv.gz"))
    if os.path.lexists(raw / "edge-feat.csv.gz"):
        parts.edge_fields["edge_attr"] = _narrowed(str(raw / "edge-feat.csv.gz"))
    for file in sorted(raw.glob("*_*.csv.gz")):
        name = file.name.removesuffix(".csv.gz")
        if name.startswith("node_"):
            parts.vertex_fields[name] = np.concatenate([*_narrowed(str(file))])
        elif name.startswith("edge_"):
            parts.edge_fields[name] = _narrowed(str(file))
    return parts


def _narrowed(path: str) -> Iterator[Array]:
    """Yield blocks of rows of a table in the types of OGB's loader: integers, else float32."""
    for piece in map(narrow, matrix(path)):
        yield piece if piece.dtype == np.int64 else piece.astype(np.float32)


# -- binary ----------------------------------------------------------------------------------------


def _binary(raw: Path, path: str) -> Parts:
    """Read a raw folder of .npz files; edges, features, edge fields are read later, in blocks."""
    data, labels = str(raw / "data.npz"), str(raw / "node-label.npz")
    vertices = _one(data, "num_nodes_list", _whole(data, "num_nodes_list"))
    shape = _header(data, "edge_index").shape
    if len(shape) != 2 or shape[0] != 2:
        raise SpecError(
            f"{data}: edge_index: must have shape [2, edges], has {list(shape)}; repeat the"
            " download"
        )
    ends = (_numbers(data, "edge_index", end * shape[1], shape[1]) for end in range(2))
    parts = Parts(path, zip(*ends, strict=True), vertices)
    if os.path.lexists(labels):
        parts.y = _whole(labels, "node_label")
    with arrays_in(data) as arrays:
        names = sorted(arrays.files)
    for name in names:
        if name == "node_feat":
            parts.x = _rows(data, name, "vertex")
        elif name.startswith("node_"):
            parts.vertex_fields[name] = _whole(data, name)
        elif name.startswith("edge_") and name != "edge_index":
            field = "edge_attr" if name == "edge_feat" else name
            parts.edge_fields[field] = _rows(data, name, "edge")
    return parts


def _rows(path: str, name: str, of: str) -> Iterator[Array]:
    """Yield blocks of rows of an array with a row for each vertex or edge."""
    shape = _header(path, name).shape
    width = math.prod(shape[1:])
    if not shape or not width:
        raise SpecError(
            f"{path}: {name}: must have a row of numbers for each {of}, has shape {list(shape)};"
            " repeat the download"
        )
    for piece in _numbers(path, name, 0, shape[0] * width, width):
        yield piece.reshape(-1, *shape[1:])


def _header(path: str, name: str) -> Header:
    """Return the header of an array in a .npz, checked against the stored size."""
    with arrays_in(path) as arrays:
        if name not in arrays.files:
            raise SpecError(f"{path}: {name}: missing; the download is damaged, repeat it")
        header = arrays.check(name, fits=False)
    if header.fortran and len(header.shape) > 1:
        raise SpecError(f"{path}: {name}: must be in C order; save numpy.ascontiguousarray")
    return header


def _whole(path: str, name: str) -> Array:
    """Read a small array of a .npz."""
    _header(path, name)
    with arrays_in(path) as arrays:
        return arrays.read(name)


def _numbers(path: str, name: str, first: int, count: int, width: int = 1) -> Iterator[Array]:
    """Yield `count` numbers of an array in a .npz from number `first`, in blocks of whole rows."""
    header, step = _header(path, name), max(1, AT_ONCE // 8 // width) * width
    with arrays_in(path) as arrays, arrays.open(name) as stream:
        stream.seek(header.begin + first * header.dtype.itemsize)
        for start in range(0, count, step):
            raw = stream.read(min(step, count - start) * header.dtype.itemsize)
            yield np.frombuffer(raw, header.dtype)


# -- GraphBolt -------------------------------------------------------------------------------------


METADATA = "metadata.yaml"
SETS = {"train_mask": "train_set", "val_mask": "validation_set", "test_mask": "test_set"}

TYPES: dict[type, str] = {int: "a whole number", str: "text", list: "a list", dict: "a mapping"}


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
                f"must be {TYPES[kind]}, is {TYPES.get(type(value), 'empty')}; see GraphBolt's"
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


def read_graphbolt(path: str) -> Parts:
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
