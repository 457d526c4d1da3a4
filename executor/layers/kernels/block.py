"""A block: the edges of a layer, in CSR and transposed."""

from __future__ import annotations

import copy

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from gnnplan.executor.layers.kernels.page_locked import mapped
from gnnplan.planner.graph.graph import CsrEdges


class Block:
    """A bipartite subgraph in CSR over destinations, with its transpose for the backward pass.

    The first n_dst source rows are the destinations themselves (as in DGL). If some destinations
    are not sources, only the first `own` destinations are, as the first `own` source rows. All
    arrays are int32:

        indptr    [R + 1], indices   [E]   the edges by destination: positions of their sources
        t_indptr  [S + 1], t_indices [E]   the same edges by source: positions of destinations
        order     [E]                      positions in `indices` of the transposed edges

    Thanks to `order`, blocks with other weights (`weighted`) share the structure. Only a block for
    a user's module also has

        source  [S]   ids of the sources in the whole graph, int64
        graph_edges   the edges of the whole graph
    """

    source: Tensor
    graph_edges: CsrEdges

    def __init__(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        n_src: int,
        weight: np.ndarray | Tensor | None = None,
        own: int | None = None,
    ) -> None:
        """indptr [R + 1], indices [E] in [0, n_src), weight [E]; None: every edge has weight 1.

        own: number of destinations that are sources; None: all.

        Raises ValueError on arrays that do not describe such edges.
        """
        self.n_dst, self.n_src, self.edges = len(indptr) - 1, n_src, len(indices)
        self.own = self.n_dst if own is None else own
        if not self.own <= min(self.n_dst, n_src):
            raise ValueError(
                f"the {self.own} destinations must be the first of the {n_src} sources"
            )
        if self.edges >= 2**31:
            raise ValueError(
                f"a block holds at most 2^31 - 1 edges (given: {self.edges}); use more parts"
            )
        forward = sparse.csr_array(
            (np.arange(self.edges, dtype=np.int32), indices, indptr), shape=(self.n_dst, n_src)
        )
        forward.check_format(full_check=True)  # an index out of range would read other memory
        transposed = forward.tocsc()
        del forward
        self.indptr, self.indices = _int32(indptr), _int32(indices)
        self.t_indptr, self.t_indices = _int32(transposed.indptr), _int32(transposed.indices)
        self.order = _int32(transposed.data)
        self.weight: Tensor | None = None
        self.t_weight: Tensor | None = None
        if weight is not None:
            self._set_weight(weight)

    @classmethod
    def laid(cls, indptr: Tensor, indices: Tensor, reader: Tensor, n_src: int) -> Block:
        """Build a block from int32 tensors, on their device, without checks.

        reader: the destination of each edge [E].
        """
        block = cls.__new__(cls)
        block.n_dst = block.own = len(indptr) - 1
        block.n_src, block.edges = n_src, len(indices)
        block.indptr, block.indices = indptr, indices
        block.t_indptr, block.t_indices, block.order = by_column(reader, indices, n_src)
        block.weight = block.t_weight = None
        return block

    def _set_weight(self, weight: np.ndarray | Tensor) -> None:
        weight = weight if isinstance(weight, Tensor) else torch.tensor(weight)
        if weight.shape != (self.edges,):
            raise ValueError(f"{self.edges} edges need as many weights, not {tuple(weight.shape)}")
        self.weight = weight.contiguous().to(self.indptr.device)
        self.t_weight = self.weight.index_select(0, self.order)

    def own_rows(self, rows: Tensor, dim: int = 0) -> Tensor:
        """Return the destinations' rows: the first R of the sources' rows, S in dimension `dim`.

        If R = S return the rows themselves: a slice's backward pass would copy the gradient.
        """
        if rows.shape[dim] == self.n_dst:
            return rows
        return rows.narrow(dim, 0, self.n_dst) if dim else rows[: self.n_dst]

    @property
    def readers(self) -> Tensor:
        """The destination of every edge, int32 [E]."""
        rows = torch.arange(self.n_dst, dtype=torch.int32, device=self.indptr.device)
        return self.per_edge(rows)

    def per_edge(self, values: Tensor) -> Tensor:
        """Repeat a value per destination [R] for each of its edges [E]."""
        return values.repeat_interleave(self.indptr.diff(), output_size=self.edges)

    def weighted(self, weight: np.ndarray | Tensor) -> Block:
        """Return a block with other weights [E], which shares the structure."""
        block = copy.copy(self)
        block._set_weight(weight)
        return block

    def among(self, kept: Tensor, scale: Tensor, dtype: torch.dtype) -> Block:
        """Return the edges from the sources `kept`, ascending, with weights times scale [S].

        Runs on the block's device, without sorting."""
        place = torch.full_like(self.t_indptr[1:], -1)
        place[kept] = torch.arange(kept.numel(), dtype=torch.int32, device=place.device)
        source = place.index_select(0, self.indices)
        is_kept = source >= 0
        ends, t_is_kept = _counts_before(is_kept), is_kept.index_select(0, self.order)
        first = torch.cat([self.t_indptr[:-1][kept], self.t_indptr[-1:]])
        block = copy.copy(self)
        block.n_src, block.indices = kept.numel(), source[is_kept]
        block.indptr = ends.index_select(0, self.indptr)
        block.t_indptr = _counts_before(t_is_kept).index_select(0, first)
        block.t_indices = self.t_indices[t_is_kept]
        block.order = ends.index_select(0, self.order)[t_is_kept]
        block.edges = block.indices.numel()
        weight = scale.index_select(0, self.indices)
        weight = weight if self.weight is None else weight * self.weight
        block._set_weight(weight[is_kept].to(dtype))
        return block

    def mean(self, dtype: torch.dtype = torch.float32) -> Block:
        """Return a block with weights 1 / in-degree: `aggregate` takes means, 0 without edges."""
        degree = self.indptr.diff().long()
        return self.weighted((1.0 / degree.clamp(min=1).to(dtype)).repeat_interleave(degree))

    def to(self, device: torch.device | str) -> Block:
        """Copy the block to a device. A copy from page-locked memory does not block the host."""
        return mapped(self, lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    @property
    def nbytes(self) -> int:
        """Size of its arrays [B]."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def __repr__(self) -> str:
        return (
            f"Block(n_dst={self.n_dst}, n_src={self.n_src}, edges={self.edges},"
            f" weighted={self.weight is not None})"
        )


def by_column(rows: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort values at (row, column) [Z] by column: indptr [width + 1], rows and places [Z]."""
    columns, order = columns.sort(stable=True)
    starts = torch.arange(width + 1, dtype=columns.dtype, device=columns.device)
    # torch.bincount would block the host until it knows the largest column
    return torch.searchsorted(columns, starts, out_int32=True), rows[order], order.int()


def check_rows(block: Block, x: Tensor) -> None:
    """Raise ValueError unless x has a row per source of the block."""
    if x.shape[0] != block.n_src:
        raise ValueError(f"{block} needs {block.n_src} source rows, not {x.shape[0]}")


def _counts_before(is_kept: Tensor) -> Tensor:
    """Count the True values before each position: bool [E] -> int32 [E + 1]."""
    return torch.nn.functional.pad(is_kept.cumsum(0, dtype=torch.int32), (1, 0))


def _int32(array: np.ndarray) -> Tensor:
    # copied if read-only, as a graph's arrays are: torch would warn
    return torch.from_numpy(np.require(array, np.int32, ["C", "W"]))
