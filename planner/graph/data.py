"""Data of vertices and edges: labels, masks, features, and further fields by name.

Labels are class ids, multi-label targets, or numbers to predict (regression). Masks [N] are read,
made from lists of ids, or drawn. Features are dense, sparse, or made up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import (
    LARGEST_WHOLE,
    MOST_CLASSES,
    MOST_FEATURES,
    MOST_VERTICES,
    Array,
    Features,
    Graph,
    must_be_finite,
    must_fit,
    narrowed,
    some_rows,
)
from gnnplan.planner.graph.npy import must_be_ids, reading, typed
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Ints
from gnnplan.planner.vocabulary.units import show_count

T = TypeVar("T")
MASKS = ("train_mask", "val_mask", "test_mask")
# mask -> names of the mask in files, most likely first
WORDS = {
    "train_mask": ("train", "train_mask", "train_idx", "tr"),
    "val_mask": ("val", "valid", "val_mask", "val_idx", "valid_idx", "va"),
    "test_mask": ("test", "test_mask", "test_idx", "te"),
}
# values besides negative ones that libraries write for a missing label: the largest of a type
NO_LABEL = [2**width - 1 for width in (8, 16, 31, 32, 63, 64)]


def class_ids(path: str, name: str, y: Array) -> Array:
    """Convert labels with whole numbers in one column to class ids [N]; return others unchanged.

    NaN becomes -1 (no label). Raises SpecError for ids that float64 cannot represent exactly."""
    y = column(y)
    if y.ndim != 1 or y.dtype.kind in "iu":
        return y
    whole = np.where(np.isnan(y), -1.0, y)
    if (whole != np.floor(whole)).any():
        return y
    if (bad := np.abs(whole) > LARGEST_WHOLE).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: {name}[{first}]: labels must be whole class ids (NaN or -1: none), found"
            f" {y[first]}; if they are numbers to predict, use --task regression"
        )
    return whole.astype(np.int64)


class Labels(NamedTuple):
    """Labels, the number of classes (0 without labels), and a mask of labelled vertices [N].

    Class ids are int64 [N], -1 for none. Multi-label targets are uint8 or float32 [N, C]. Numbers
    are float32 [N, C], NaN for none. Without labels all vertices count as labelled."""

    y: Array
    classes: int
    labelled: Array
    numbers: bool = False  # True: y holds regression targets, not classes


def read_labels(
    path: str, y: Array | None, vertices: int, classes: int | None, numbers: bool = False
) -> Labels:
    """Return the checked labels of a graph. numbers: treat y as numbers to predict (regression).

    Without `numbers`, y is regression if it cannot be labels: fractions in one column, or fractions
    with numbers beyond [0, 1] in several. classes: declared by the source. Raises SpecError."""
    nothing = Labels(np.full(vertices, -1, np.int64), 0, np.ones(vertices, bool))
    if y is None:
        return nothing
    y = typed(path, "y", y, "iufb", (1, 2))
    if numbers or _are_numbers(y := class_ids(path, "y", y)):
        with np.errstate(over="ignore", invalid="ignore"):
            y = y.reshape(len(y), -1).astype(np.float32)
        if np.isinf(y).any():
            raise SpecError(
                f"{path}: y{np.argwhere(np.isinf(y))[0].tolist()}: numbers to predict must be"
                " finite in float32 (NaN: none); scale them"
            )
        found = Labels(y, y.shape[1], ~np.isnan(y).any(1), numbers=True)
    elif y.ndim == 2:
        labelled = ~((y == -1) | np.isnan(y)).all(1)
        found = Labels(_targets(path, y, labelled), y.shape[1], labelled)
    else:
        found = Labels(y.astype(np.int64), _classes(path, y, classes), y >= 0)
    return found if found.labelled.any() else nothing


def _are_numbers(y: Array) -> bool:
    """Whether y cannot be labels, so that it must be numbers to predict."""
    known = y[np.isfinite(y)]
    beyond = y.ndim == 1 or bool(((known < 0) | (known > 1)).any())
    return beyond and bool((known != np.floor(known)).any())


def _targets(path: str, y: Array, labelled: Array) -> Array:
    """Return targets [N, C] in [0, 1], 0 for vertices without labels. Raises SpecError."""
    with np.errstate(invalid="ignore"):
        bad = ~((y >= 0) & (y <= 1)) & labelled[:, None]
    if y.shape[1] < 1 or bad.any():
        first, found = np.argwhere(bad)[:1].tolist(), y[bad].ravel()[:1].tolist()
        raise SpecError(
            f"{path}: y{first[0] if first else ''}: multi-label targets [N, C] must lie in [0, 1],"
            f" found {found or f'shape {y.shape}'}; save 0 or 1 for each class, write -1 for all"
            " classes of a vertex without labels, or save class ids as integers [N]"
        )
    y = np.where(labelled[:, None], y, np.zeros(1, y.dtype))
    return y.astype(np.uint8 if np.isin(y, (0, 1)).all() else np.float32)


def _classes(path: str, y: Array, classes: int | None) -> int:
    """Return the number of classes of the ids y [N]. Raises SpecError for invalid class ids."""
    allowed = classes or MOST_VERTICES
    if (bad := (y < -1) | (y >= allowed)).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: y[{first}]: labels must be class ids 0 to {allowed - 1:,} (-1 = none), found"
            f" {int(y[first])}; {_remedy_of(int(y[first]))}"
        )
    if classes:
        return classes
    ids = np.unique(y[y >= 0])
    high = int(ids[-1]) if ids.size else -1
    marks = high in NO_LABEL and int(ids[-2:][0]) != high - 1
    if marks or high + 1 > 2 * ids.size:  # a stray id would widen the last layer unnoticed
        raise SpecError(
            f"{path}: y[{int(y.argmax())}]: labels must be class ids 0 to C-1 without large gaps,"
            f" but the highest is {high:,} and only {ids.size:,} ids occur; {_remedy_of(high)}"
        )
    return high + 1


def _remedy_of(label: int) -> str:
    """Return the remedy, for an error message, for a number that is no class id."""
    write = f"write -1 for no label: y = y.astype(int); y[y == {label}] = -1"
    if label < 0 or label in NO_LABEL:
        return write
    return (
        f"if {label} marks no label, {write}; else renumber them with y[y >= 0] ="
        " numpy.unique(y[y >= 0], return_inverse=True)[1]; for numbers to predict, use"
        " --task regression"
    )


def labels_of(path: str, vertices: int, sets: Sequence[tuple[Array, Array]]) -> Array:
    """Merge (vertex ids, labels) pairs to labels [N] or [N, C]; -1 or NaN for other vertices."""
    found = [(ids.ravel(), class_ids(path, "labels", y)) for ids, y in sets]
    shapes = {y.shape[1:] for _, y in found}
    if len(shapes) > 1 or any(y.ndim > 2 for _, y in found):
        raise SpecError(
            f"{path}: labels of all sets must have one shape, have {shapes}; save [rows] class ids"
            " or [rows, classes] targets in each"
        )
    (shape,) = shapes
    must_fit(path, "labels", 8.0 * vertices * min(sum(shape) or 1, MOST_CLASSES))
    dtype = np.result_type(np.int8, *(y.dtype for _, y in found))
    labels = np.full((vertices, *shape), np.nan if dtype.kind == "f" else -1, dtype)
    for ids, y in found:
        labels[ids] = y
    return labels


def named(held: Mapping[str, T]) -> dict[str, T]:
    """Return the entries of `held` whose key names a mask (WORDS), keyed by the mask."""
    words = {mask: next((w for w in words if w in held), "") for mask, words in WORDS.items()}
    return {mask: held[word] for mask, word in words.items() if word}


def mask_of_ids(path: str, name: str, ids: Array, vertices: int) -> Array:
    """Return the mask [N] of a list of vertex ids. Raises SpecError for invalid or repeated ids."""
    ids = column(ids if ids.size else ids.astype(np.int64))
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise SpecError(
            f"{path}: {name}: must be a list of vertex ids, is {ids.dtype} of shape"
            f" {list(ids.shape)}; write whole numbers"
        )
    must_be_ids(path, name, ids, vertices)
    must_fit(path, f"masks of {vertices:,} vertices", 3.0 * vertices)
    mask = np.zeros(vertices, bool)
    mask[ids] = True
    if (different := int(mask.sum())) < ids.size:
        raise SpecError(
            f"{path}: {name}: must name every vertex once, has {ids.size:,} ids of"
            f" {different:,} vertices; write each once, or booleans for all"
            f" {vertices:,} vertices if it is a mask"
        )
    return mask


def mask_of(path: str, name: str, array: Array, vertices: int) -> Array:
    """Return the mask [N] of a boolean or 0/1 mask, or of a list of vertex ids.

    Raises SpecError if the array is neither, or could be both."""
    array = column(array)
    flags = array.dtype.kind == "b"
    if flags and array.shape != (vertices,):
        raise SpecError(
            f"{path}: {name}: must have a value for each of {vertices:,} vertices, has shape"
            f" {list(array.shape)}; write all, or a list of ids"
        )
    binary = array.dtype.kind in "iuf" and array.shape == (vertices,) != (0,)
    binary = binary and bool(np.isin(array, (0, 1)).all())
    if binary and np.unique(array).size == vertices:
        raise SpecError(
            f"{path}: {name}: {array.tolist()} may be ids of vertices or a mask of {vertices};"
            f" save {name}.astype(bool) if it is a mask"
        )
    return array.astype(bool) if flags or binary else mask_of_ids(path, name, array, vertices)


def column(array: Array) -> Array:
    """Return an array [N, 1] as [N]; any other array unchanged."""
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def as_mask(path: str, name: str, mask: Array, notes: list[str]) -> Array:
    """Return a boolean or 0/1 mask as booleans [N]; of several splits [N, S] the first.

    Several splits add a note to `notes`. Raises SpecError."""
    mask = typed(path, name, mask, "biuf", (1, 2))
    if mask.ndim == 2 and mask.shape[1] >= 1:
        if mask.shape[1] > 1:
            notes.append(f"{name} holds {mask.shape[1]} splits; the first is taken")
        mask = mask[:, 0]
    if mask.dtype.kind == "b":
        return mask
    if (bad := ~np.isin(mask, (0, 1))).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: {name}[{first}]: must hold booleans, or zeros and ones, found"
            f" {mask.flat[first]}; save True or False for each vertex"
        )
    return mask.astype(bool)


def split_of(
    path: str,
    given: Mapping[str, Array],
    labels: Labels,
    rng: np.random.Generator,
    notes: list[str],
    seed: int,
) -> list[Array]:
    """Return training, validation and test masks [N]. given: the masks that were read.

    Without masks, labelled vertices (or all, without labels) are split at random, with a note.
    Without train_mask, all labelled vertices outside the other masks are training vertices, with a
    note. Raises SpecError."""
    labelled, classes, vertices = labels.labelled, labels.classes, len(labels.labelled)
    if classes == 0:
        notes.append("no labels: can be planned, not trained")
    if given:
        masks = [given.get(name, np.zeros(vertices, bool)) for name in MASKS]
    else:
        notes.append(f"random 60/20/20 split by seed {seed}: the file has no train_mask")
        masks = [*random_split(labelled, rng)]
    if given and "train_mask" not in given:
        masks[0] = labelled & ~masks[1] & ~masks[2]
        notes.append(
            f"the file has no train_mask: {int(masks[0].sum()):,} vertices are trained on, all with"
            f" a label outside of {' and '.join(given)}"
        )
    train, val, test = masks
    if not train.any():
        raise SpecError(
            f"{path}: train_mask: marks no vertex; at least 1 of {vertices:,} must be trained on"
        )
    if classes and (bad := train & ~labelled).any():
        first = int(np.flatnonzero(bad)[0])
        raise SpecError(
            f"{path}: y[{first}]: a training vertex needs a label, found none ({int(bad.sum()):,}"
            " such vertices); take them out of train_mask"
        )
    if (shared := train & test).any():
        raise SpecError(
            f"{path}: train_mask, test_mask: must not overlap, share {int(shared.sum()):,} vertices"
            f" (first: {int(np.flatnonzero(shared)[0])}); take these out of one"
        )
    if (train & val).any() or (val & test).any():
        notes.append("val_mask overlaps train_mask or test_mask")
    for name, i in (("val_mask", 1), ("test_mask", 2)):
        if classes and (unlabelled := int((masks[i] & ~labelled).sum())):
            masks[i] = masks[i] & labelled
            notes.append(f"took {unlabelled:,} vertices without label out of {name}")
    return masks


def random_split(labelled: Array, rng: np.random.Generator, train: float = 0.6) -> Array:
    """Draw training, validation and test masks [3, N] that split the labelled vertices.

    train: share of training vertices; validation and test share the rest equally (60/20/20)."""
    order = rng.permutation(np.flatnonzero(labelled))
    cuts = [round(train * len(order)), round((1 + train) / 2 * len(order))]
    masks = np.zeros((3, len(labelled)), bool)
    for mask, ids in zip(masks, np.split(order, cuts), strict=True):
        mask[ids] = True
    return masks


def features_of(path: str, arrays: Mapping[str, Array]) -> Features | None:
    """Return the features in a table of arrays, or None if it has none. Raises SpecError."""
    if "x" in arrays and "x_indptr" in arrays:
        raise SpecError(
            f"{path}: x, x_indptr: features are given twice, dense and sparse; keep one"
        )
    if "x" in arrays:
        return _dense(path, arrays["x"])
    if "x_indptr" not in arrays:
        return None
    for name in ("x_indices", "x_shape"):
        if name not in arrays:
            raise SpecError(
                f"{path}: {name}: missing; sparse features need x_indptr, x_indices and x_shape"
            )
    return _sparse(path, arrays)


def _dense(path: str, x: Array) -> Array:
    """Return features [N, F] as float32 or float64. Raises SpecError for NaN and infinities.

    Mapped features are checked for NaN and infinities later, when they are hashed (`finish`)."""
    if not isinstance(x, np.memmap):
        x = np.ascontiguousarray(narrowed(path, "x", typed(path, "x", x, "fiub", (2,))))
    elif x.dtype not in (np.float32, np.float64) or x.ndim != 2 or not x.flags.c_contiguous:
        raise SpecError(
            f"{path}: x: is mapped, not read, so it must be float32 or float64 [vertices, features]"
            f" in C order, is {x.dtype} of shape {x.shape}"
            f"{' in Fortran order' * (not x.flags.c_contiguous)}; save numpy.ascontiguousarray(x,"
            " numpy.float32)"
        )
    if not 1 <= x.shape[1] <= MOST_FEATURES:
        raise SpecError(
            f"{path}: x: must have 1 to {MOST_FEATURES:,} features, has shape {x.shape}; save"
            " [vertices, features], or leave it out"
        )
    return x


def _sparse(path: str, arrays: Mapping[str, Array]) -> Features:
    """Return features as CSR, with ones if there is no x_data.

    Raises SpecError for NaN, infinities and an invalid CSR."""
    indptr, indices, shape = (
        typed(path, name, arrays[name], "iu", (1,)) for name in ("x_indptr", "x_indices", "x_shape")
    )
    if len(shape) != 2 or not 1 <= int(shape[1]) <= MOST_FEATURES:
        raise SpecError(
            f"{path}: x_shape: must be [{indptr.size - 1}, features] with 1 to {MOST_FEATURES:,}"
            f" features, is {shape[:4].tolist()}; save the matrix's shape"
        )
    if int(indptr[-1]) != len(indices):  # scipy would silently drop the excess indices
        raise SpecError(
            f"{path}: x_indptr: must rise from 0 to len(x_indices) = {len(indices):,}, goes from"
            f" {indptr[0]} to {indptr[-1]}; save the indptr of a scipy.sparse.csr_matrix"
        )
    data = arrays.get("x_data", np.ones(len(indices), np.float32))
    data = narrowed(path, "x_data", typed(path, "x_data", data, "fiub", (1,)))
    with reading(path, "a CSR x_indptr, x_indices, x_data of x_shape"):
        x = sp.csr_matrix((data, indices, indptr), shape=tuple(map(int, shape)))
        x.check_format(full_check=True)
        x.sum_duplicates()  # sorts too
    return x


def stand_in(indptr: Ints, width: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Make up features [N, width] that do not depend on labels.

    They are normal noise, except for the last column, the standardised log degree."""
    x = rng.standard_normal((len(indptr) - 1, width), dtype=np.float32)
    degree = np.log1p(np.diff(indptr))
    spread = degree.std()
    x[:, -1] = (degree - degree.mean()) / spread if spread > 0 else 0
    return x


# -- fields ----------------------------------------------------------------------------------------


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
