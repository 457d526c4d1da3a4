"""Sparse matrices of edges, which a module makes to multiply rows with.

A product adds up a row of each column that the matrix has a number for, times that number: it is a
sum over edges from columns to rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_sparse(value: Any) -> bool:
    """Whether a value is a sparse matrix."""
    return isinstance(value, Tensor) and value.layout != torch.strided


def matrix_edges(matrix: Tensor) -> Tensor:
    """Edges [2, E] from columns to rows, where the matrix has a number."""
    return _coalesced(matrix).indices().flip(0)


def numbers(matrix: Tensor, edges: Tensor) -> Tensor:
    """What the matrix has at some edges [E, 1]; 0 where it has nothing."""
    matrix = _coalesced(matrix)
    found, wanted = (keys(some, len(matrix)) for some in (matrix.indices().flip(0), edges))
    if not len(found):
        return matrix.values().new_zeros(len(wanted), 1)
    places = torch.searchsorted(found, wanted).clamp_(max=len(found) - 1)
    return (matrix.values()[places] * (found[places] == wanted))[:, None]


def with_loops(edges: Tensor, vertices: int) -> Tensor:
    """The edges, and then one from each vertex to itself."""
    every = torch.arange(vertices)
    return torch.cat([edges, torch.stack([every, every])], 1)


def keys(edges: Tensor, vertices: int) -> Tensor:
    """A number per edge [E] by which it is known, in the order of a matrix; edges: ids [2, E]."""
    return edges[1] * vertices + edges[0]


def _coalesced(matrix: Tensor) -> Tensor:
    return (matrix if matrix.layout == torch.sparse_coo else matrix.to_sparse()).coalesce()
