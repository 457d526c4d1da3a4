"""Readers of datasets: OGB's node property datasets, and DGL GraphBolt's on-disk datasets.

OGB's have raw/ and split/; GraphBolt's have metadata.yaml, and the files that it names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, ValidationInfo

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
from gnnplan.planner.vocabulary.files import MOST_SHOWN, Document, read_yaml
from gnnplan.planner.vocabulary.spec import read_as

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
    parts = (_binary if (raw / "data.npz").is_file() else _text)(raw, path)
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


def _of_one_kind(items: list[Any]) -> list[Any]:
    if len(items) > 1:
        raise ValueError(f"one kind of vertices and one of edges are read, found {len(items)}")
    return items


def _inside(path: Path, info: ValidationInfo) -> Path:
    """Return the whole path of a file in the dataset's folder, the context of the validation."""
    folder: Any = info.context
    whole: Path = (folder / path).resolve()
    if not whole.is_relative_to(folder):
        shown = str(path)[:MOST_SHOWN]
        raise ValueError(f"must lie in the dataset's folder, is {shown}; copy it there")
    return whole


ONE_KIND = AfterValidator(_of_one_kind)


class _Edges(BaseModel):
    """A file of edges: an array [2, E], or text with columns src, dst without a header line."""

    path: Annotated[Path, AfterValidator(_inside)]
    format: Literal["csv", "numpy", "torch"]

    def array(self) -> Array:
        """Read the file, which is no text."""
        if self.format == "numpy":
            return mapped_array(self.path)
        return tensor_array(str(self.path), "it", load_tensors(str(self.path)))

    def pieces(self) -> Iterable[tuple[Array, ...]]:
        """Return the edges as blocks (src, dst)."""
        if self.format == "csv":
            return edge_tables(str(self.path), Head(","))
        return [endpoints(str(self.path), "edges", self.array())]


class _Data(_Edges):
    """A file of an array: features, a field, ids or labels."""

    format: Literal["numpy", "torch"]
    name: str | None = None
    domain: str | None = None


class _Nodes(BaseModel):
    num: int


class _Set(BaseModel):
    data: list[_Data]


class _Task(BaseModel):
    num_classes: int | None = None
    train_set: Annotated[list[_Set], ONE_KIND] = Field([])
    validation_set: Annotated[list[_Set], ONE_KIND] = Field([])
    test_set: Annotated[list[_Set], ONE_KIND] = Field([])


class _Graph(BaseModel):
    nodes: Annotated[list[_Nodes], Field(min_length=1), ONE_KIND]
    edges: Annotated[list[_Edges], Field(min_length=1), ONE_KIND]


class _Metadata(BaseModel):
    """The fields of metadata.yaml that are read."""

    graph: _Graph
    feature_data: list[_Data] | None = None
    tasks: list[_Task] | None = None


def read_graphbolt(path: str) -> Parts:
    """Read the edges, the node features named feat (or the only ones), and the first task's sets.

    All other features of nodes and edges become fields."""
    document, folder = read_yaml(Path(path) / METADATA), Path(path).resolve()
    try:
        meta = read_as(_Metadata, document.data, document, folder)
    except SpecError as error:
        raise SpecError(f"{error}; see GraphBolt's documentation of on-disk datasets") from error
    vertices = must_be_count(path, "graph.nodes.num", meta.graph.nodes[0].num)
    parts = Parts(path, meta.graph.edges[0].pieces(), vertices)
    places, on_edges = (
        {str(of.name): of for of in meta.feature_data or () if of.domain == domain}
        for domain in ("node", "edge")
    )
    name = next((name for name in FEATURES if name in places), None)
    if name is None and len(places) == 1:
        (name,) = places
    if name is not None:
        parts.x = places.pop(name).array()
    fields = {other for other in (*places, *on_edges) if NAME.fullmatch(other)}
    parts.notes += ignored({*places, *on_edges} - fields)
    for other in sorted(fields):
        if other in places:
            parts.vertex_fields[other] = places[other].array()
        if other in on_edges:
            parts.edge_fields[other] = [on_edges[other].array()]
    if meta.tasks:
        if len(meta.tasks) > 1:
            parts.notes.append(f"of {len(meta.tasks)} tasks the first is taken")
        _take_sets(meta.tasks[0], document, parts)
    return parts


def _take_sets(task: _Task, document: Document, parts: Parts) -> None:
    """Set the masks, labels and number of classes of `parts` from a task, the document's first."""
    vertices, labels = vertices_of(parts) or 0, list[tuple[Array, Array]]()
    for mask, name in SETS.items():
        for held in getattr(task, name):
            found = {of.name: of for of in held.data}
            where = ("tasks", 0, name, 0, "data")
            seeds = found.get("seeds") or found.get("seed_nodes")
            if seeds is None:
                raise document.error(
                    where,
                    "needs seeds, the ids of its vertices; other tasks than node classification"
                    " are not read",
                )
            ids = np.asarray(seeds.array())
            if "labels" in found:
                labels.append((ids, y := np.asarray(found["labels"].array())))
                if len(y) != len(ids):
                    raise document.error(
                        where,
                        f"labels must be as many as seeds ({len(ids):,}), are {len(y):,}; write one"
                        " for each",
                    )
            parts.masks[mask] = mask_of_ids(parts.path, mask, ids, vertices)
    if labels:
        parts.y = labels_of(parts.path, vertices, labels)
    if labels and task.num_classes is not None and parts.y is not None and parts.y.ndim == 1:
        parts.classes = must_be_count(parts.path, "num_classes", task.num_classes, MOST_CLASSES)
