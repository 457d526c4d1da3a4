"""Features, labels and a split from separate files, for a graph that lacks them.

GraphSAINT's folders have such files: adj_full.npz, feats.npy, class_map.json, role.json."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.data import WORDS, labels_of, mask_of, mask_of_ids, named, read_labels
from gnnplan.planner.graph.formats import tables
from gnnplan.planner.graph.formats.libraries import load_tensors
from gnnplan.planner.graph.formats.tables import load_matrix, of_matrix
from gnnplan.planner.graph.graph import Array
from gnnplan.planner.graph.npy import arrays_in, mapped_array, reading
from gnnplan.planner.graph.parts import (
    FEATURES,
    LABELS,
    Extras,
    Matrix,
    Parts,
    gathered,
    streams,
    tensor_array,
    vertices_of,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_be_file, one_of, read_json

LARGEST_JSON = 1 << 30  # [B]
AS_JSON = 'write {"train": [ids], "val": [ids], "test": [ids]}'
ENDINGS = (".npy", ".csv.gz", ".csv", ".txt", ".pt")


def add(parts: Parts, extras: Extras) -> None:
    """Add the files of `extras` to the parts. Raises SpecError if the graph has such data."""
    own = {"features": parts.x is not None, "labels": parts.y is not None, "split": parts.masks}
    for word, has in own.items():
        if has and (path := getattr(extras, word)):
            raise SpecError(
                f"{parts.path}: has its own {word}, so --{word} {path} would replace them; leave it"
                " out"
            )
    if parts.choice and not extras.split:
        raise SpecError(parts.choice)
    _take(parts, extras)
    if extras.labels and parts.y is not None:  # checked here, so that an error names the file
        read_labels(extras.labels, parts.y, len(parts.y), None, extras.numbers)


def read_graphsaint(path: str) -> Parts:
    """Read the whole graph, with features, labels and the split by role."""
    edges = os.path.join(path, "adj_full.npz")
    parts = of_matrix(load_matrix(edges), edges)
    parts.path = path
    files = (os.path.join(path, name) for name in ("feats.npy", "class_map.json", "role.json"))
    x, y, split = (file if os.path.lexists(file) else None for file in files)
    _take(parts, Extras(x, y, split))
    return parts


def _take(parts: Parts, extras: Extras) -> None:
    if extras.features:
        parts.x, parts.x_path = _features(extras.features, parts, extras), extras.features
    if extras.labels:
        parts.y = np.atleast_1d(_labels(extras.labels, parts))
    if extras.split:
        parts.masks = masks_in(extras.split, parts)


def _without_targets(path: str, parts: Parts, extras: Extras) -> list[int] | None:
    """Return the columns of a table that are features; None: all are.

    Labels and masks among the columns would teach the answers. They are taken as what their names
    say if the graph has none of these, and else left out; a note says which."""
    head = tables.head_of(path)
    if not (others := head.no_features):
        return None
    labels = parts.y is not None or extras.labels or extras.stand_in_labels
    split = parts.masks or extras.split
    masks, said = dict[str, Array](), {"read as labels or masks": list[str](), "left out": []}
    for what, place in others.items():
        if labels if what == "labels" else split:
            said["left out"].append(head.names[place])
            continue
        said["read as labels or masks"].append(head.names[place])
        values = tables.whole_matrix(path, columns=[place])[:, 0]
        if what == "labels":
            parts.y = values
        else:
            masks[what] = mask_of(path, what, values, len(values))
    parts.masks |= masks
    parts.notes += (
        f"{path}: {', '.join(names)}: {are}, since their names say that they are no features;"
        " rename a column that is one"
        for are, names in said.items()
        if names
    )
    left = [i for i in range(head.columns) if i not in others.values()]
    if not set(left) - {head.ids, *head.numbers}:
        raise SpecError(
            f"{path}: {', '.join(head.names)}: holds no feature beside labels or masks; use it as"
            " --labels"
        )
    return left


def _vertices(parts: Parts) -> int:
    """Return the number of vertices; edges are read for it if no array gives the number."""
    if (said := vertices_of(parts)) is not None:
        return said
    names, pieces = next(streams(parts))
    src, dst, *fields = gathered(names, parts.path, pieces)
    parts.edges = [(src, dst, *fields)]
    return max((int(ids.max()) for ids in (src, dst) if ids.size), default=-1) + 1


def _held_in(path: str, names: Sequence[str] = ()) -> Any:
    """Return what a file holds: an array (.npy, mapped), objects (.pt), arrays or SciPy's matrix.

    None: it is no such file, so that it should be text. names: of several arrays only the first of
    these is read, if it is there."""
    must_be_file(path)
    with open(path, "rb") as stream:
        start = stream.read(6)
    if not start.startswith(b"PK"):
        return mapped_array(path) if start == b"\x93NUMPY" else None
    with arrays_in(path) as arrays:
        if "format" in arrays.files:
            return load_matrix(path).tocsr()
        if not any(info.filename.endswith(".npy") for info in arrays.files.values()):
            return load_tensors(path)
        own = [name for name in names if name in arrays.files][:1] or arrays.files
        return {name: arrays.read(name) for name in own}


def _saved(path: str, what: str, names: Sequence[str] = ()) -> Any:
    """Return the array, or SciPy's matrix, that a file holds; None: it should be text.

    names: of the array, most likely first, if the file holds several."""
    held = _held_in(path, names)
    if isinstance(held, dict):
        own = [name for name in names if name in held] or [*held]
        if len(own) != 1 and own[0] not in names:
            raise SpecError(
                f"{path}: {what} are the array {names[0]}, or a single one, and it holds"
                f" {', '.join(own)}; save one of them with numpy.save"
            )
        held = held[own[0]]
    return held if held is None or sp.issparse(held) else tensor_array(path, what, held)


def _features(path: str, parts: Parts, extras: Extras) -> Matrix:
    """Read features from a .npy (mapped), a .npz (dense or sparse), a .pt tensor, or text.

    Columns of such a table that are named as labels or masks are no features."""
    saved: Matrix | None = _saved(path, "features", FEATURES)
    if saved is not None:
        return saved
    has_ids, columns = _has_ids(path), _without_targets(path, parts, extras)
    if not has_ids:
        return tables.matrix(path, columns=columns)
    rows = tables.whole_matrix(path, columns=columns)
    if (lacking := np.flatnonzero(np.isnan(rows).all(1))).size:
        raise SpecError(
            f"{path}: vertex {lacking[0]:,} has no row ({lacking.size:,} such vertices); its rows"
            " are those of its ids, give one for each of 0 to the highest"
        )
    return rows


def _labels(path: str, parts: Parts) -> Array:
    """Read labels [N] or [N, C] from a .npy, a .pt tensor, a table in text, or JSON.

    JSON holds a list, or an object {vertex: label}, of a class or a list per vertex."""
    if (saved := _saved(path, "labels", LABELS)) is not None:
        return np.asarray(tensor_array(path, "labels", saved))
    if not (tables.start_of(path, 64) or "").lstrip().startswith(("{", "[")):
        vertices, head = _vertices(parts) if _has_ids(path) else 0, tables.head_of(path)
        columns = None
        if (place := head.no_features.get("labels")) is not None:
            columns = [place]
            if others := [n for i, n in enumerate(head.names) if i not in (place, head.ids)]:
                parts.notes.append(
                    f"{path}: {head.names[place]} is taken as labels, not {', '.join(others)}"
                )
        return tables.whole_matrix(path, vertices, columns)
    with reading(path, "classes of vertices"):
        found: Any = read_json(path, LARGEST_JSON, 'write {"vertex": class}')
        found = found if isinstance(found, dict) else dict(enumerate(found))
        ids = np.array([int(key) for key in found])
        values = np.array(list(found.values()))
    if not found or values.ndim > 2 or values.dtype.kind not in "iuf":
        raise SpecError(
            f"{path}: must hold a class, or as many zeros and ones, for every vertex, holds"
            f" {values.dtype} of shape {list(values.shape)}; mend its values"
        )
    mask_of_ids(path, "class_map", ids, vertices := _vertices(parts))
    return labels_of(path, vertices, [(ids, values)])


def _has_ids(path: str) -> bool:
    """Whether a table in text has a column of vertex ids. Raises SpecError for other files."""
    if tables.start_of(path) is None:
        raise SpecError(
            f"{path}: is no .npy, .npz, .pt or text of numbers; save it with numpy.save"
        )
    return tables.head_of(path).ids is not None


def masks_in(path: str, parts: Parts) -> dict[str, Array]:
    """Read the masks of a split: a folder of lists, a .npz or .pt of masks or lists, or a .json."""
    may_lack = False
    if os.path.isdir(path):
        files = {
            file.name.removesuffix(ending): str(file)
            for ending in reversed(ENDINGS)
            for file in Path(path).glob(f"*{ending}")
            if file.is_file()
        }
        found = {}
        for mask, file in named(files).items():
            saved = _saved(file, "ids")
            found[mask] = tables.column(file) if saved is None else np.asarray(saved)
    else:
        if may_lack := (held := _held_in(path)) is None:
            held = read_json(path, LARGEST_JSON, AS_JSON)
        if not isinstance(held, dict):
            raise SpecError(
                f"{path}: a split is a dictionary of masks or of lists of vertex ids, this is"
                f" {type(held).__name__}; {AS_JSON}"
            )
        if may_lack:
            words = [word for words in WORDS.values() for word in words]
            held = {one_of(f"{path}: set", name, words): of for name, of in held.items()}
        found = {n: tensor_array(path, n, of) for n, of in named(held).items()}
    if not found or ("train_mask" not in found and not may_lack):
        raise SpecError(
            f"{path}: a split needs train, val (or valid) and test: masks, or lists of vertex ids;"
            f" found {', '.join(found) or 'none'}"
        )
    vertices = _vertices(parts)
    return {name: mask_of(path, name, array, vertices) for name, array in found.items()}
