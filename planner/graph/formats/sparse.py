"""SciPy's sparse matrices, in files and as objects: entry i, j is the edge i -> j.

GraphSAINT's folders have one: adj_full.npz beside feats.npy, class_map.json, role.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.graph import Array, must_fit
from gnnplan.planner.graph.labels import labels_of, mask_of, mask_of_ids, named
from gnnplan.planner.graph.npy import arrays_in, must_be_count, reading
from gnnplan.planner.graph.parts import Parts, mapped_array
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_be_file, read_json

PLACES = ("row", "col", "coords", "indices", "indptr", "offsets", "shape")  # whole numbers


def load_matrix(path: str) -> Any:
    """The matrix of a .npz by scipy.sparse.save_npz, checked. Raises SpecError."""
    nbytes = 0
    must_be_file(path, "it should hold a sparse matrix")
    with reading(path, "a sparse matrix"):
        with arrays_in(path) as arrays:
            for name in arrays.files:  # before scipy allocates what headers claim
                header = arrays.check(name)
                nbytes += header.nbytes
                if name in PLACES and header.dtype.kind not in "iu":  # scipy would round them
                    raise SpecError(
                        f"{path}: {name}: must hold integers, has dtype {header.dtype}; write it"
                        " again with scipy.sparse.save_npz"
                    )
            must_fit(path, "what it holds", nbytes)
        matrix = sp.load_npz(path)
    if matrix.format == "dia":  # whose numbers of rows and columns scipy would allocate unseen
        raise SpecError(f"{path}: holds diagonals; save it with save_npz(path, matrix.tocoo())")
    return matrix


def of_matrix(matrix: Any, path: str = "a sparse matrix") -> Parts:
    """The edges of a square matrix; what is stored is an edge, zeros too.

    Its numbers are the field edge_weight, unless all are 1."""
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise SpecError(
            f"{path}: a graph's matrix is square, this one is of shape {matrix.shape}; give [N, N]"
        )
    must_be_count(path, "shape", int(matrix.shape[0]))
    with reading(path, "a sparse matrix"):
        if matrix.format in ("csr", "csc", "bsr"):
            matrix.check_format(full_check=True)  # scipy trusts pointers blindly
        matrix = matrix.tocoo()
    parts = Parts(path, [(matrix.row, matrix.col)], int(matrix.shape[0]))
    if (matrix.data != 1).any():
        parts.edge_fields["edge_weight"] = [np.asarray(matrix.data)]
    return parts


LARGEST_JSON = 1 << 30  # [B]


def read_graphsaint(path: str) -> Parts:
    """The whole graph (adj_full), its features, its labels by class_map, its split by role."""
    folder = Path(path)
    edges = str(folder / "adj_full.npz")
    parts = of_matrix(matrix := load_matrix(edges), edges)
    parts.path, vertices = path, int(matrix.shape[0])
    if os.path.lexists(folder / "feats.npy"):
        parts.x = mapped_array(str(folder / "feats.npy"))
    if os.path.lexists(folder / "class_map.json"):
        parts.y = _labels(folder / "class_map.json", vertices)
    if os.path.lexists(folder / "role.json"):
        parts.masks = roles(folder / "role.json", vertices)
    return parts


def roles(path: Path, vertices: int) -> dict[str, Array]:
    """Masks by a JSON object of lists of ids: tr, va, te or train, val, test."""
    found = read_json(path, LARGEST_JSON, 'write {"tr": [ids], "va": [ids], "te": [ids]}')
    if not isinstance(found, dict):
        raise SpecError(f'{path}: must be an object {{"tr": [ids], "va": [ids], "te": [ids]}}')
    masks = {}
    for name, ids in named(found).items():
        with reading(str(path), f"{name}: a list of vertex ids"):
            masks[name] = mask_of(str(path), name, np.asarray(ids), vertices)
    if not masks:
        raise SpecError(f"{path}: must have lists tr, va, te of vertex ids, has none of them")
    return masks


def _labels(path: Path, vertices: int) -> Array:
    """Class ids [N], or targets [N, C], by an object of a class or a list for every vertex."""
    found: Any = read_json(path, LARGEST_JSON, 'write {"vertex": class}')
    if not isinstance(found, dict) or not found:
        raise SpecError(f'{path}: must be an object {{"vertex": class}}')
    with reading(str(path), "classes of vertices"):
        ids = np.array([int(key) for key in found])
        values = np.array(list(found.values()))
    if values.ndim > 2 or values.dtype.kind not in "iuf":
        raise SpecError(
            f"{path}: must hold a class, or as many zeros and ones, for every vertex, holds"
            f" {values.dtype} of shape {list(values.shape)}; mend its values"
        )
    mask_of_ids(str(path), "class_map", ids, vertices)
    return labels_of(str(path), vertices, [(ids, values)])
