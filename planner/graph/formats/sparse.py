"""SciPy's sparse matrices, in files and as objects: entry i, j is the edge i -> j."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.graph.graph import must_fit
from gnnplan.planner.graph.npy import arrays_in, must_be_count, reading
from gnnplan.planner.graph.parts import Parts
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.files import must_be_file

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
