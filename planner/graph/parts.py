"""`Parts`, the contents of a graph source before checks; helpers of all readers; the `Graph`.

A reader returns the contents of its file unchanged. arrays.py turns them into a table of arrays, in
memory or in files, and checks them piece by piece."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, TypeVar, cast

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.data import (
    EDGE,
    MASKS,
    NAME,
    NUMBERS,
    VERTEX,
    Labels,
    along,
    as_mask,
    checked,
    class_ids,
    mask_of,
    named,
    read_labels,
    split_of,
    stand_in,
)
from gnnplan.planner.graph.graph import (
    AT_ONCE,
    IDS_REACH,
    MOST_VERTICES,
    Array,
    Cut,
    Features,
    Graph,
    GraphStats,
    Table,
    feature_arrays,
    finish,
    in_neighbours,
    merging_note,
    must_fit,
    narrowed,
)
from gnnplan.planner.graph.npy import must_be_ids, reading, typed
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import MOST_SHOWN
from gnnplan.planner.vocabulary.units import show_count

T = TypeVar("T")
# the matrix, or an iterator over blocks of its rows for files that may exceed memory
Matrix: TypeAlias = "Features | Iterator[Array]"
Blocks: TypeAlias = Iterator[tuple[Array, ...]]  # rows of several arrays
ENDS = "src", "dst"
# names of features and labels in other libraries' graphs, most likely first
FEATURES = ("x", "feat", "feature", "features", "node_feat", "node_features")
LABELS = ("y", "label", "labels", "node_label", "node_labels")
IDS = ("train_idx", "val_idx", "valid_idx", "test_idx")  # lists of vertex ids in place of masks
SETS = ("train", "val", "valid", "test")  # masks or lists of ids; real numbers are vertex fields
# module -> argument of pip install that provides it
PACKAGES = {
    "dgl": "'gnnplan[dgl]'",
    "pyarrow": "'gnnplan[formats]'",
    "torch": "torch",
    "torch_geometric": "'gnnplan[pyg]'",
    "networkx": "networkx",
}


@dataclass
class Parts:
    """The contents of a graph source: N vertices, E edges, F features, C classes."""

    path: str  # name of the source in messages
    edges: Iterable[tuple[Array, ...]]  # blocks of edges: src, dst and each of `columns`
    vertices: int | None = None  # None: follows from the arrays or the edges
    classes: int | None = None
    x: Matrix | None = None  # [N, F]
    y: Array | None = None  # [N], [N, 1] or [N, C]; NaN or -1: no label
    masks: dict[str, Array] = field(default_factory=dict)  # keyed by names of MASKS
    notes: list[str] = field(default_factory=list)
    vertex_fields: dict[str, Array] = field(default_factory=dict)  # [N, ..]
    columns: tuple[str, ...] = ()  # names of the edge fields that `edges` yields after src and dst
    # name -> blocks of rows of other edge fields [E, ..], in the order of the edges
    edge_fields: dict[str, Iterable[Array]] = field(default_factory=dict)
    owner: Array | None = None  # part of each vertex [N], if the source is already partitioned
    choice: str = ""  # what to say unless the user chooses one of several splits
    x_path: str = ""  # name of x in messages, if x comes from another file


@dataclass(frozen=True)
class Extras:
    """User options for data that a graph lacks: additional files, and stand-in data."""

    features: str | None = None  # paths of additional files
    labels: str | None = None
    split: str | None = None
    numbers: bool = False  # labels are regression targets, whatever they look like
    width: int | None = None  # columns of stand-in features
    stand_in_labels: bool = False
    seed: int = 0  # of stand-in features, stand-in labels and random splits

    @property
    def files(self) -> bool:
        """Whether any additional file is named."""
        return any((self.features, self.labels, self.split))


def library(name: str) -> ModuleType:
    """Import a format's library. Raises SpecError, with pip's command, if it is absent."""
    try:
        with warnings.catch_warnings():  # libraries warn at import
            warnings.simplefilter("ignore")
            os.environ.setdefault("DGLBACKEND", "pytorch")  # or dgl writes a file into ~/.dgl
            return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a shared library does not load
        raise SpecError(
            f"{name} is needed for this format and cannot be imported"
            f" ({str(error).splitlines()[0][:MOST_SHOWN] if str(error) else type(error).__name__});"
            f" pip install {PACKAGES[name.partition('.')[0]]}"
        ) from error


# -- checks of all readers -------------------------------------------------------------------------


def endpoints(path: str, name: str, edge_index: Array) -> tuple[Array, Array]:
    """Return src and dst of an array [2, E]. Raises SpecError for another shape."""
    if edge_index.ndim != 2 or edge_index.shape[0] != 2:
        remedy = "row 0 are sources, row 1 destinations"
        if edge_index.ndim == 2 and edge_index.shape[1] == 2:
            remedy = f"save {name}.T"
        elif edge_index.ndim == 2 and edge_index.shape[0] == edge_index.shape[1]:
            remedy = f"if it is a matrix of edges, give numpy.stack({name}.nonzero())"
        raise SpecError(
            f"{path}: {name}: must have shape [2, edges], has {list(edge_index.shape)}; {remedy}"
        )
    return edge_index[0], edge_index[1]


def tensor_array(path: str, name: str, value: Any) -> Array:
    """Return a dense tensor or an array as a numpy array that shares the memory.

    Raises SpecError for objects, tensors that are not dense, and expanded tensors beyond memory."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        if str(value.layout) != "torch.strided":
            raise SpecError(
                f"{path}: {name}: must be a dense tensor, is {value.layout}; save its .to_dense(),"
                " or its .indices() if it is a matrix of edges"
            )
        nbytes, stored = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        must_fit(path, f"{name} of shape {list(value.shape)}", nbytes)
        if nbytes > max(stored, AT_ONCE):  # .expand() repeats a row without storing it
            raise SpecError(
                f"{path}: {name}: shape {list(value.shape)} needs {nbytes:,} B but only"
                f" {stored:,} B are stored; save its .contiguous()"
            )
        if str(value.dtype) == "torch.bfloat16":
            value = value.float()
        return np.asarray(value.detach().cpu().numpy())
    if isinstance(value, list | tuple):
        with reading(path, name):
            value = np.asarray(value)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        raise SpecError(
            f"{path}: {name}: must be a tensor or an array of numbers, is {type(value).__name__}"
            f"{f' of {value.dtype}' if isinstance(value, np.ndarray) else ''}; save it as numbers"
        )
    return value


def shown(names: Iterable[Any], most: int = 8) -> str:
    """Return at most `most` of the names as text, with control characters escaped."""
    names = sorted(str(name) for name in names)
    shown = [ascii(name)[1:-1][:MOST_SHOWN] for name in names[:most]]
    return ", ".join(shown + [f"and {len(names) - most:,} others"] * (len(names) > most))


def ignored(names: Collection[Any]) -> list[str]:
    """Return a note on names in a file that are not read."""
    return [f"ignored: {shown(names)}"] if names else []


def take_vertex_data(parts: Parts, data: Mapping[str, Any]) -> dict[str, Any]:
    """Copy features, labels and masks with usual names from `data` to `parts`; return the rest."""
    left = {name: value for name, value in data.items() if value is not None}
    for of, names in (("x", FEATURES), ("y", LABELS)):
        if name := next((name for name in names if name in left), None):
            setattr(parts, of, tensor_array(parts.path, name, left.pop(name)))
    for name in filter(left.__contains__, MASKS):
        parts.masks[name] = tensor_array(parts.path, name, left.pop(name))
    return left


def take_split(parts: Parts, vertices: int, data: Mapping[str, Any]) -> dict[str, Any]:
    """Copy masks and lists of ids named as IDS or SETS to the masks that `parts` lacks.

    Returns the rest of `data`. Raises SpecError for an array that is neither."""
    left, path = dict(data), parts.path
    held = {n: tensor_array(path, n, left[n]) for n in (*IDS, *SETS) if is_numbers(left.get(n))}
    sets = {n: n for n, array in held.items() if n in IDS or array.dtype.kind in "biu"}
    for mask, name in named(sets).items():
        if mask not in parts.masks:
            parts.masks[mask] = mask_of(path, name, held[name], vertices)
            del left[name]
    return left


def counts_of(parts: Parts) -> dict[str, int]:
    """Return the number of vertices that each array or declaration implies, keyed by its name.

    Raises SpecError if the numbers differ."""
    named = {next(iter(feature_arrays(parts.x))): parts.x, "y": parts.y}
    named |= {name: parts.masks[name] for name in MASKS if name in parts.masks}
    named |= {VERTEX + name: field for name, field in parts.vertex_fields.items()}
    shapes: dict[str, Any] = {name: getattr(each, "shape", ()) for name, each in named.items()}
    counts = {name: int(shape[0]) for name, shape in shapes.items() if shape}
    counts |= {} if parts.vertices is None else {"meta.vertices": parts.vertices}
    if len(set(counts.values())) > 1:
        raise SpecError(
            f"{parts.path}: {', '.join(counts)}: must be given for the same number of vertices, are"
            f" for {', '.join(f'{count:,}' for count in counts.values())}; give each a row per"
            " vertex"
        )
    return counts


def vertices_of(parts: Parts) -> int | None:
    """Return the number of vertices from arrays or a declaration, not from edges; else None."""
    return next(iter(counts_of(parts).values()), None)


def take_fields(
    parts: Parts, data: Mapping[str, Any], of: Callable[[str, int], str | None]
) -> None:
    """Copy the fields of vertices and edges from `data` to `parts`; note all other entries.

    of: function (name, rows) -> VERTEX, EDGE or None (no field)."""
    left = []
    for name, value in data.items():
        shape: Any = getattr(value, "shape", ())
        kind = of(str(name), int(shape[0])) if len(shape) else None
        if kind is None or not all(shape) or not NAME.fullmatch(str(name)) or not is_numbers(value):
            left.append(name)
            continue
        array = tensor_array(parts.path, str(name), value)
        if kind == VERTEX:
            parts.vertex_fields[str(name)] = array
        else:
            parts.edge_fields[str(name)] = [array]
    parts.notes += ignored(left)


def is_numbers(value: Any) -> bool:
    """Whether `value` is a dense tensor or an array of real numbers or booleans."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in NUMBERS
    return str(getattr(value, "layout", "")) == "torch.strided" and not value.is_complex()


# -- pieces ----------------------------------------------------------------------------------------


def edge_pieces(parts: Parts) -> Blocks:
    """Yield blocks of edges: src and dst as int32, and the fields of `columns`.

    Raises SpecError for ids that are not vertices."""
    vertices, first = parts.vertices or MOST_VERTICES, 0
    for src, dst, *fields in pieces_of(parts.path, "its edges", parts.edges):
        for start in range(0, len(src), AT_ONCE // 8):
            piece = slice(start, start + AT_ONCE // 8)
            for name, ids in (("src", src[piece]), ("dst", dst[piece])):
                must_be_ids(parts.path, name, ids, vertices, first + start)
            ends = src[piece].astype(np.int32), dst[piece].astype(np.int32)
            yield (*ends, *(field[piece] for field in fields))
        first += len(src)


def pieces_of(path: str, what: str, pieces: Iterable[T]) -> Iterator[T]:
    """Yield the pieces. Raises SpecError for any exception of the library that reads them."""
    with reading(path, what):
        yield from pieces


def feature_pieces(path: str, x: Array | Iterator[Array]) -> Iterator[Array]:
    """Yield blocks of feature rows as finite float32 or float64. Raises SpecError."""
    first, width = 0, None
    for rows in pieces_of(path, "its features", [x] if isinstance(x, np.ndarray) else x):
        if (
            rows.dtype.kind not in "fiub"
            or rows.ndim != 2
            or rows.shape[1] != (rows.shape[1] if width is None else width)
        ):
            raise SpecError(
                f"{path}: x: features must be numbers [vertices, features], rows of one width, are"
                f" {rows.dtype} of shape {list(rows.shape)}; save a row for each vertex"
            )
        width = rows.shape[1]
        step = max(1, AT_ONCE // max(1, 4 * width))
        for start in range(0, len(rows), step):
            yield narrowed(path, "x", rows[start : start + step], first + start)
        first += len(rows)
    if not first:
        raise SpecError(f"{path}: x: holds no rows of features; give a row for each vertex")


def gathered(names: tuple[str, ...], path: str, pieces: Blocks) -> list[Array]:
    """Concatenate the pieces to an array per name. Raises SpecError before they exceed memory."""
    kept: list[tuple[Array, ...]] = []
    nbytes = 0
    for piece in pieces:
        nbytes += sum(array.nbytes for array in piece)
        must_fit(path, f"{', '.join(names)}, of which {nbytes:,} B are read,", 2.0 * nbytes)
        kept.append(piece)
    if not kept:
        return [np.empty(0, np.int32)] * len(names)
    return [np.concatenate(arrays) for arrays in zip(*kept, strict=True)]


def streams(parts: Parts) -> Iterator[tuple[tuple[str, ...], Blocks]]:
    """Yield names and row blocks of the large arrays: edges, edge fields and dense features."""
    yield (*ENDS, *(EDGE + name for name in parts.columns)), edge_pieces(parts)
    for name, pieces in parts.edge_fields.items():
        yield (EDGE + name,), zip(pieces_of(parts.path, "its edges", pieces))
    if parts.x is not None and not sp.issparse(parts.x):
        x = cast("Array | Iterator[Array]", parts.x)
        yield ("x",), zip(feature_pieces(parts.x_path or parts.path, x))


def small_arrays(parts: Parts) -> dict[str, Array]:
    """Return all other arrays, keyed by their names in gnnplan's files."""
    arrays: dict[str, Array] = dict(parts.masks)
    arrays |= {VERTEX + name: field for name, field in parts.vertex_fields.items()}
    if parts.y is not None:
        y = typed(parts.path, "y", parts.y, "biuf", (1, 2))
        # NaN stays, since -1 may be a regression target
        lacking = y.dtype.kind == "f" and np.isnan(y).any()
        arrays["y"] = y if lacking else class_ids(parts.path, "y", y)
    if sp.issparse(parts.x):
        arrays |= feature_arrays(parts.x)
        arrays["x_shape"] = np.array(cast(Features, parts.x).shape)
    known = {"vertices": parts.vertices, "classes": parts.classes}
    if meta := {name: int(value) for name, value in known.items() if value is not None}:
        arrays["meta"] = np.array(json.dumps(meta))
    return arrays


# -- a checked and completed graph -----------------------------------------------------------------

# A `Graph` is built of `Parts`: arrays are checked, and stand-ins replace missing ones. The graph's
# notes say so.

STAND_IN_FEATURES = 128
STAND_IN_CLASSES = 16
GAPS = "if ids have gaps, number the vertices anew from 0"
STAND_IN_LABELS = "STAND-IN LABELS"  # first words of the note on stand-in labels


def must_be_a_graph(parts: Parts, numbers: bool) -> tuple[int, int]:
    """Raise SpecError where `build` would, in less memory; return (vertices, edges).

    parts: whole arrays. numbers: labels are regression targets."""
    (src, _), vertices, _ = _checked_edges(parts)
    _fields(parts, vertices, len(src))
    if parts.y is not None or parts.masks:
        found = read_labels(parts.path, parts.y, vertices, parts.classes, numbers)
        rng, notes = np.random.default_rng(0), list[str]()
        split_of(parts.path, _masks(parts, notes), found, rng, notes, 0)
    return vertices, len(src)


def build(parts: Parts, source: str, extras: Extras, directed: bool) -> Graph:
    """Return the graph of the parts, with a note for everything that was changed or made up.

    parts: whole arrays. Their edges and edge fields are removed from `parts`, since they take as
    much memory as the graph. Raises SpecError that names the array, the rule and the offending
    number."""
    path, notes = parts.path, [*parts.notes]
    (src, dst), vertices, counted = _checked_edges(parts)
    if not counted:
        notes.append("vertex count taken from the highest edge id")
        if first := min(int(src.min()), int(dst.min())):
            notes.append(
                f"no edge has vertex 0: ids begin with {first:,}; if they count from 1, subtract 1"
            )
    vertex_fields, on_edges = _fields(parts, vertices, len(src))
    stand_in_width = (extras.width or STAND_IN_FEATURES) if parts.x is None else 0
    what = f"{vertices:,} vertices{'' if counted else ' (the highest id + 1)'}"
    nbytes = vertices * (20.0 + 8 * stand_in_width)
    what += f" with {stand_in_width:,} stand-in features" * (stand_in_width > 0)
    nbytes += (120.0 if on_edges else 60.0) * len(src)
    must_fit(source, what, nbytes + sum(2.0 * field.nbytes for field in on_edges.values()))
    indptr, indices, changes = in_neighbours(src, dst, vertices, directed)
    if not counted and 2 * (bare := _without_edges(src, dst, vertices)) > vertices:
        notes.append(f"{bare:,} of {vertices:,} vertices have no edge; {GAPS}")
    edge_fields, moved = along(on_edges, (src, dst), vertices, directed)
    notes += [*changes, *moved] if len(indices) else [*changes, *moved, "the graph has no edges"]
    parts.edges, parts.edge_fields = [], {}
    del src, dst, on_edges

    rng = np.random.default_rng(extras.seed)
    x = cast("Features | None", parts.x)
    if x is None:
        x = stand_in(indptr, stand_in_width, rng)
        notes.append(
            f"stand-in features: the file has none, so {stand_in_width} made by seed"
            f" {extras.seed} (normal noise, one of log degree)"
        )
    elif extras.width is not None:
        raise SpecError(
            f"{source}: features= is the width of stand-in features, but the file has its own;"
            " drop it"
        )
    else:
        notes += merging_note(x)
    found = read_labels(path, parts.y, vertices, parts.classes, extras.numbers)
    notes += _labels_that_may_mislead(found, parts.classes)
    if found.numbers:
        several = show_count(found.classes, "number")
        notes.append(f"regression: y holds {several} per vertex to predict, no classes")
    if extras.stand_in_labels:
        if found.classes:
            raise SpecError(
                f"{source}: task none makes stand-in labels, but the graph has its own"
                f" ({found.classes:,} classes); drop --task none"
            )
        classes = parts.classes or STAND_IN_CLASSES
        found = found._replace(y=rng.integers(0, classes, vertices), classes=classes)
        notes.append(
            f"{STAND_IN_LABELS}: the graph has none, so {classes} classes were drawn by seed"
            f" {extras.seed}; time, bytes and memory are real, losses and accuracy mean nothing"
        )
    given = _masks(parts, notes)
    train, val, test = split_of(path, given, found, rng, notes, extras.seed)
    cut = None
    if parts.owner is not None:
        owner, sizes = np.ascontiguousarray(parts.owner, np.int32), np.bincount(parts.owner)
        if (empty := np.flatnonzero(sizes == 0)).size:
            raise SpecError(
                f"{path}: part {empty[0]} of {sizes.size} has no vertices; partition it again"
            )
        cut = Cut(sizes.size, "metis", owner, blake2b(owner.data, digest_size=16).hexdigest())
    stats = GraphStats(
        name=Path(path).stem,
        source=source,
        vertices=vertices,
        edges=len(indices),
        features=x.shape[1],
        classes=found.classes,
        train_vertices=int(train.sum()),
        multilabel=found.y.ndim == 2 and not found.numbers,
        numbers=found.numbers,
        hash="",
        notes=tuple(notes),
        directed=directed,
    )
    arrays = indptr, indices, x, found.y, train, val, test
    return finish(Graph(stats, *arrays, (), vertex_fields, edge_fields, cut=cut))


def _without_edges(src: Array, dst: Array, vertices: int) -> int:
    """Count the vertices without any edge."""
    bare = np.ones(vertices, bool)
    bare[src] = bare[dst] = False
    return int(bare.sum())


def _labels_that_may_mislead(found: Labels, classes: int | None) -> Iterator[str]:
    """Yield notes on labels that look wrongly encoded. classes: declared by the source."""
    if found.numbers or not found.classes:
        return
    known = found.y[found.labelled]
    if known.ndim == 1:
        if classes is None and (first := int(known.min())):
            yield f"no vertex has class 0: y begins with {first}; if it counts from 1, subtract 1"
    elif known.shape[1] > 1 and ((known == 0) | (known == 1)).all() and (known.sum(1) == 1).all():
        yield (
            f"y holds {known.shape[1]:,} labels for each vertex, of which exactly one is 1; if each"
            " vertex has one class, save y.argmax(1)"
        )


def _fields(parts: Parts, vertices: int, edges: int) -> tuple[Table, Table]:
    """Check and return vertex fields, and edge fields in edge-list order. Raises SpecError."""
    path, on_vertices = parts.path, sorted(parts.vertex_fields.items())
    on_edges = [(n, array) for n, pieces in sorted(parts.edge_fields.items()) for array in pieces]
    return (
        {n: checked(path, VERTEX + n, array, vertices, "vertices") for n, array in on_vertices},
        {n: checked(path, EDGE + n, array, edges, "edges") for n, array in on_edges},
    )


def _masks(parts: Parts, notes: list[str]) -> Table:
    """Return the masks of the parts as booleans [N]."""
    return {name: as_mask(parts.path, name, mask, notes) for name, mask in parts.masks.items()}


def _checked_edges(parts: Parts) -> tuple[tuple[Array, ...], int, str]:
    """Return the edges, the number of vertices, and the arrays that give this number (`count`).

    Raises SpecError for an id beyond the vertices."""
    (edges,) = parts.edges
    vertices, counted = count(parts)
    for name, ids in zip(("src", "dst"), edges, strict=True):
        must_be_ids(parts.path, name, ids, vertices, counted=counted or "the edges")
    return edges, vertices, counted


def count(parts: Parts) -> tuple[int, str]:
    """Return the number of vertices, and the names of the arrays that give it ('': the edges)."""
    counts = counts_of(parts)
    in_edges = (int(ids.max()) + 1 for edges in parts.edges for ids in edges if len(ids))
    vertices = next(iter(counts.values())) if counts else max(in_edges, default=0)
    if vertices < 1:
        raise SpecError(
            f"{parts.path}: {', '.join(counts) or 'src, dst'}: the graph is empty (0 vertices); at"
            " least 1 is needed"
        )
    if vertices > MOST_VERTICES:
        raise SpecError(
            f"{parts.path}: {', '.join(counts) or 'src, dst'}: {vertices:,} vertices; {IDS_REACH}"
        )
    return vertices, " and ".join(counts)
