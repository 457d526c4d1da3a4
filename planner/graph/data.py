"""Data of vertices and edges: labels, masks, features, and further fields by name.

Labels are class ids, multi-label targets, or numbers to predict (regression). Masks [N] are read,
made from lists of ids, or drawn. Features are dense, sparse, or made up."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
    Table,
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
        raise SpecError(
            f"{path}: {name}[{bad.argmax()}]: labels must be whole class ids (NaN or -1: none),"
            f" found {y[bad][0]}; if they are numbers to predict, use --task regression"
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
        wide = y.reshape(len(y), -1)
        with np.errstate(over="ignore", invalid="ignore"):
            y = wide.astype(np.float32)
        if np.isinf(y).any():
            first, *_ = np.argwhere(np.isinf(y)).tolist()
            raise SpecError(
                f"{path}: y{first}: numbers to predict must be finite in float32 (NaN: none), found"
                f" {wide[tuple(first)]:.6g}; scale them"
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
    y = np.where(labelled[:, None], y, np.zeros(1, y.dtype))
    bad = np.argwhere(~((y >= 0) & (y <= 1)))[:1]
    if y.shape[1] < 1 or bad.size:
        where, found = "".join(map(str, bad.tolist())), [y[tuple(at)].item() for at in bad]
        raise SpecError(
            f"{path}: y{where}: multi-label targets [N, C] must lie in [0, 1], found"
            f" {found or f'shape {y.shape}'}; save 0 or 1 for each class, write -1 for all classes"
            " of a vertex without labels, or save class ids as integers [N]; for numbers to"
            " predict, use --task regression"
        )
    return y.astype(np.uint8 if np.isin(y, (0, 1)).all() else np.float32)


def _classes(path: str, y: Array, classes: int | None) -> int:
    """Return the number of classes of the ids y [N]. Raises SpecError for invalid class ids."""
    allowed = classes or MOST_VERTICES
    if (bad := (y < -1) | (y >= allowed)).any():
        raise SpecError(
            f"{path}: y[{bad.argmax()}]: labels must be class ids 0 to {allowed - 1:,} (-1 = none),"
            f" found {y[bad][0]}; {_remedy_of(int(y[bad][0]))}"
        )
    if classes:
        return classes
    ids = np.unique(np.append(-1, y))  # ascending; -1: none
    high = int(ids[-1])
    marks = high in NO_LABEL and int(ids[-2]) != high - 1
    if marks or high + 1 > 2 * (ids.size - 1):  # a stray id would widen the last layer unnoticed
        raise SpecError(
            f"{path}: y[{y.argmax()}]: labels must be class ids 0 to C-1 without large gaps, but"
            f" the highest is {high:,} and only {ids.size - 1:,} ids occur; {_remedy_of(high)}"
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
    if array.dtype.kind == "b" and array.shape != (vertices,):
        raise SpecError(
            f"{path}: {name}: must have a value for each of {vertices:,} vertices, has shape"
            f" {list(array.shape)}; write all, or a list of ids"
        )
    of_each = array.dtype.kind in NUMBERS and array.shape == (vertices,)
    if not (of_each and np.isin(array, (0, 1)).all()):
        return mask_of_ids(path, name, array, vertices)
    if array.dtype.kind != "b" and 0 < vertices == np.unique(array).size:
        raise SpecError(
            f"{path}: {name}: {array.tolist()} may be ids of vertices or a mask of {vertices};"
            f" save {name}.astype(bool) if it is a mask"
        )
    return array.astype(bool)


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
        raise SpecError(
            f"{path}: {name}[{bad.argmax()}]: must hold booleans, or zeros and ones, found"
            f" {mask[bad][0]}; save True or False for each vertex"
        )
    return mask.astype(bool)


def split_of(
    path: str,
    given: Table,
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
    if not given:
        notes.append(f"random 60/20/20 split by seed {seed}: the file has no train_mask")
        given = dict(zip(MASKS, random_split(labelled, rng), strict=True))
    train, val, test = (given.get(name, np.zeros(vertices, bool)) for name in MASKS)
    if "train_mask" not in given:
        train = labelled & ~val & ~test
        notes.append(
            f"the file has no train_mask: {int(train.sum()):,} vertices are trained on, all with a"
            f" label outside of {' and '.join(given)}"
        )
    if not train.any():
        raise SpecError(
            f"{path}: train_mask: marks no vertex; at least 1 of {vertices:,} must be trained on"
        )
    if classes and (bad := train & ~labelled).any():
        raise SpecError(
            f"{path}: y[{bad.argmax()}]: a training vertex needs a label, found none"
            f" ({int(bad.sum()):,} such vertices); take them out of train_mask"
        )
    if (shared := train & test).any():
        raise SpecError(
            f"{path}: train_mask, test_mask: must not overlap, share {int(shared.sum()):,} vertices"
            f" (first: {shared.argmax()}); take these out of one"
        )
    if (train & val).any() or (val & test).any():
        notes.append("val_mask overlaps train_mask or test_mask")
    for name, mask in zip(MASKS, (train, val, test), strict=True):
        if classes and (unlabelled := int((mask & ~labelled).sum())):
            notes.append(f"took {unlabelled:,} vertices without label out of {name}")
    return [train, *(mask & labelled if classes else mask for mask in (val, test))]


def random_split(labelled: Array, rng: np.random.Generator, train: float = 0.6) -> Array:
    """Draw training, validation and test masks [3, N] that split the labelled vertices.

    train: share of training vertices; validation and test share the rest equally (60/20/20)."""
    order = rng.permutation(np.flatnonzero(labelled))
    cuts = [round(train * len(order)), round((1 + train) / 2 * len(order))]
    masks = np.zeros((3, len(labelled)), bool)
    for mask, ids in zip(masks, np.split(order, cuts), strict=True):
        mask[ids] = True
    return masks


def features_of(path: str, arrays: Table) -> Features | None:
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


def _sparse(path: str, arrays: Table) -> Features:
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
    kind, size = array.dtype.kind, array.dtype.itemsize
    if array.ndim == 0 or len(array) != rows:
        raise SpecError(
            f"{path}: {name}: has shape {list(array.shape)}, and there are {rows:,} {of}; give a"
            f" row for each of the {of}, in their order"
        )
    if kind not in NUMBERS:
        raise SpecError(
            f"{path}: {name}: must hold numbers or booleans, has dtype {array.dtype}; write numbers"
            " (numpy.unique(..., return_inverse=True) numbers texts)"
        )
    if kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise SpecError(
            f"{path}: {name}: whole numbers must be below 2^63, found {int(array.max())}; write"
            " smaller ones"
        )
    first = 0
    for piece in some_rows(array) if kind == "f" else ():
        must_be_finite(path, name, piece, first, "must be finite")
        first += len(piece)
    dtype = array.dtype.newbyteorder("=")
    if kind == "u" and size > 1:
        dtype = np.dtype(np.int64)
    elif size > 8:
        dtype = np.dtype(np.float64)
    return array if dtype == array.dtype and array.flags.c_contiguous else array.astype(dtype, "C")


def along(
    fields: Table, ends: tuple[Array, Array], vertices: int, directed: bool
) -> tuple[Table, list[str]]:
    """Return the fields of an edge list in the order of the CSR built from it, and notes.

    In an undirected graph, an edge listed in one direction has the same row in both directions; an
    edge listed in both directions keeps each direction's row. A field is dropped if an edge is
    listed twice with different rows."""
    if not fields:
        return {}, []
    given = np.flatnonzero(ends[0] != ends[1])
    src, dst = (ids[given].astype(np.int64) for ids in ends)
    keys = np.concatenate([dst * vertices + src, *([] if directed else [src * vertices + dst])])
    # an edge of the CSR has the row of the first that is listed, else of the first reversed one
    _, first, place = np.unique(keys, return_index=True, return_inverse=True)
    rows, head = np.resize(given, keys.size), first[place]
    again = np.flatnonzero((head < given.size) & (head != np.arange(keys.size)))
    turned = again >= given.size
    notes, kept, apart = list[str](), dict(fields), dict[str, Array]()
    for name, field in fields.items():
        differ = field[rows[again]] != field[rows[head[again]]]
        unlike = differ.any(tuple(range(1, field.ndim)))
        if (bad := again[unlike & ~turned]).size:
            at = bad[place[bad].argmin()]
            one, other = (
                np.array2string(field[row], threshold=6, edgeitems=2, separator=", ")
                for row in rows[[head[at], at]]
            )
            notes.append(
                f"left {name} out: {bad.size:,} edges are given again with different values, first"
                f" {src[at]} -> {dst[at]} with {one} and {other}; merge them to have it"
                " (torch_geometric.utils.coalesce, dgl.to_simple)"
            )
            del kept[name]
        elif unlike.any():
            apart[name] = place[again[unlike]]
    names = ", ".join(kept)
    if kept and (loops := len(ends[0]) - given.size):
        notes.append(f"dropped {names} of {show_count(loops, 'self-loop')} with them")
    if kept and (count := int((first >= given.size).sum())):
        notes.append(
            f"{count:,} edges are given in one direction only; their reverse edges have the same"
            f" {names}"
        )
    if apart:
        notes.append(
            f"{np.unique(np.concatenate([*apart.values()])).size:,} edges are given in both"
            f" directions with different values of {', '.join(apart)}, and keep them"
        )
    return {name: np.ascontiguousarray(field[rows[first]]) for name, field in kept.items()}, notes


def unread_by(model: str, graph: Graph | None, reads: Collection[str] = ()) -> list[str]:
    """Return a note on the graph's fields that a model does not read.

    reads: fields that the model reads, such as 'vertex pos', 'edge edge_weight'."""
    if graph is None:
        return []
    names = [n for n in graph.vertex_fields if f"vertex {n}" not in reads]
    names += [n for n in graph.edge_fields if f"edge {n}" not in reads]
    return [f"{model} does not read {', '.join(names)} of {graph.stats.name}"] if names else []
