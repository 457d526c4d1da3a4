"""Features of vertices: those that a file holds, dense or sparse, or made up."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from gnnplan.planner.graph.graph import MOST_FEATURES, Array, narrowed
from gnnplan.planner.graph.npy import typed
from gnnplan.planner.vocabulary.errors import SpecError


def dense_features(path: str, x: Array) -> Array:
    """Features [N, F], as float32 or float64. Raises SpecError for NaN and infinities."""
    x = typed(path, "x", x, "fiub", (2,))
    if not isinstance(x, np.memmap):  # mapped features are checked when they are hashed
        x = np.ascontiguousarray(narrowed(path, "x", x))
    if not 1 <= x.shape[1] <= MOST_FEATURES:
        raise SpecError(
            f"{path}: x: must have 1 to {MOST_FEATURES:,} features, has shape {x.shape}; save"
            " [vertices, features], or leave it out"
        )
    return x


def sparse_features(
    path: str, indptr: Array, indices: Array, shape: Array, data: Array | None
) -> sp.csr_matrix:
    """Features as CSR, of ones where there are no data.

    Raises SpecError for NaN, infinities and a broken CSR."""
    indptr, indices, shape = (
        typed(path, name, array, "iu", (1,))
        for name, array in (("x_indptr", indptr), ("x_indices", indices), ("x_shape", shape))
    )
    vertices = indptr.size - 1
    if len(shape) != 2 or int(shape[0]) != vertices or not 1 <= int(shape[1]) <= MOST_FEATURES:
        raise SpecError(
            f"{path}: x_shape: must be [{vertices}, features] with 1 to {MOST_FEATURES:,} features,"
            f" is {shape[:4].tolist()}; save the matrix's shape"
        )
    if (
        int(indptr[0]) != 0
        or int(indptr[-1]) != len(indices)
        or bool((indptr[1:] < indptr[:-1]).any())
    ):
        raise SpecError(
            f"{path}: x_indptr: must rise from 0 to len(x_indices) = {len(indices):,}, goes from"
            f" {indptr[0]} to {indptr[-1]}; save the indptr of a scipy.sparse.csr_matrix"
        )
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < int(shape[1]):
        raise SpecError(
            f"{path}: x_indices: columns must lie in [0, {int(shape[1]) - 1}], found"
            f" {indices.min()} to {indices.max()}; save its indices, or widen x_shape"
        )
    if data is None:
        data = np.ones(len(indices), np.float32)
    data = narrowed(path, "x_data", typed(path, "x_data", data, "fiub", (1,)))
    if len(data) != len(indices):
        raise SpecError(
            f"{path}: x_data: must be as long as x_indices ({len(indices):,}), is"
            f" {len(data):,}; save a number for each index"
        )
    x = sp.csr_matrix(
        (data, indices.astype(np.int32), indptr.astype(np.int64)), shape=(vertices, int(shape[1]))
    )
    x.sum_duplicates()  # sorts too
    return x


def stand_in(
    indptr: NDArray[np.int64], width: int, rng: np.random.Generator
) -> NDArray[np.float32]:
    """Made-up features [N, width], without regard to labels.

    They are normal noise, except for the last column, the standardised log degree."""
    x = rng.standard_normal((len(indptr) - 1, width), dtype=np.float32)
    degree = np.log1p(np.diff(indptr))
    spread = degree.std()
    x[:, -1] = (degree - degree.mean()) / spread if spread > 0 else 0
    return x
