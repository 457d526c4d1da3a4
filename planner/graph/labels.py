"""Labels of vertices: class ids, multi-label targets, or numbers to predict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gnnplan.planner.graph.graph import LARGEST_WHOLE, MOST_CLASSES, MOST_VERTICES, Array, must_fit
from gnnplan.planner.graph.masks import column
from gnnplan.planner.graph.npy import typed
from gnnplan.planner.vocabulary.errors import SpecError

# what libraries write for no label, besides numbers below 0: the highest of a type
NO_LABEL = [2**bits - 1 for bits in (8, 16, 31, 32, 63, 64)]


def class_ids(path: str, name: str, y: Array) -> Array:
    """Labels as class ids [N], integers, or targets [N, C], or what can be neither as it is.

    A single column is class ids, and NaN is no label. Raises SpecError for ids beyond float64."""
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
    """Labels, the number of classes (0 without labels), and which vertices have one [N].

    Class ids are int64 [N], -1 for none. Multi-label targets are uint8 or float32 [N, C]. Numbers
    are float32 [N, C], NaN for none. Without labels all vertices count as labelled."""

    y: Array
    classes: int
    labelled: Array
    numbers: bool = False  # to predict, not classes


def read_labels(
    path: str, y: Array | None, vertices: int, classes: int | None, numbers: bool = False
) -> Labels:
    """The labels of a graph. numbers: they are numbers to predict, whatever they look like.

    Else only those are that can be no labels: fractions in one column, or beyond [0, 1] in several.
    classes: as many as the source says. Raises SpecError."""
    nothing = Labels(np.full(vertices, -1, np.int64), 0, np.ones(vertices, bool))
    if y is None:
        return nothing
    y = typed(path, "y", y, "iufb", (1, 2))
    if numbers or _are_numbers(y := class_ids(path, "y", y)):
        found = _numbers(path, y)
    elif y.ndim == 2:
        labelled = ~((y == -1) | np.isnan(y)).all(1)
        found = Labels(_targets(path, y, labelled), y.shape[1], labelled)
    else:
        found = Labels(y.astype(np.int64), _classes(path, y, classes), y >= 0)
    return found if found.labelled.any() else nothing


def _are_numbers(y: Array) -> bool:
    """Whether these can be no labels."""
    if y.dtype.kind != "f":
        return False
    known = y[np.isfinite(y)]
    beyond = y.ndim == 1 or bool(((known < 0) | (known > 1)).any())
    return beyond and bool((known != np.floor(known)).any())


def _numbers(path: str, y: Array) -> Labels:
    """Numbers to predict. Raises SpecError for infinities."""
    with np.errstate(over="ignore", invalid="ignore"):
        y = y.reshape(len(y), -1).astype(np.float32)
    if np.isinf(y).any():
        raise SpecError(
            f"{path}: y{np.argwhere(np.isinf(y))[0].tolist()}: numbers to predict must be finite in"
            " float32 (NaN: none); scale them"
        )
    return Labels(y, y.shape[1], ~np.isnan(y).any(1), numbers=True)


def _targets(path: str, y: Array, labelled: Array) -> Array:
    """Targets [N, C] in [0, 1]; 0 where a vertex has none. Raises SpecError."""
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
    """The number of classes of the ids y [N]. Raises SpecError for what is no class id."""
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
    if marks or high + 1 > 2 * ids.size:  # a stray id would widen the last layer, unseen
        raise SpecError(
            f"{path}: y[{int(y.argmax())}]: labels must be class ids 0 to C-1 without large gaps,"
            f" but the highest is {high:,} and only {ids.size:,} ids occur; {_remedy_of(high)}"
        )
    return high + 1


def _remedy_of(label: int) -> str:
    """What to do with a number that is no class id."""
    write = f"write -1 for no label: y = y.astype(int); y[y == {label}] = -1"
    if label < 0 or label in NO_LABEL:
        return write
    return (
        f"if {label} marks no label, {write}; else renumber them with y[y >= 0] ="
        " numpy.unique(y[y >= 0], return_inverse=True)[1]; for numbers to predict, use"
        " --task regression"
    )


def labels_of(path: str, vertices: int, sets: Sequence[tuple[Array, Array]]) -> Array:
    """Labels [N] or [N, C] by ids of vertices and the labels of these; -1 or NaN for others."""
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
