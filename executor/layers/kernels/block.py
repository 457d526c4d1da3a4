"""A layer's edges: a bipartite piece of the graph, in CSR and transposed."""

from __future__ import annotations

import copy

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from gnnplan.executor.layers.kernels.page_locked import mapped
from gnnplan.planner.graph.graph import Whole


class Block:
    """A bipartite piece of the graph in CSR over destinations, and its transpose for backward.

    The first n_dst source rows are the destinations themselves (as in DGL), or the first `own` are
    the first destinations, where the other destinations are no sources. All arrays are int32:

        indptr    [R + 1], indices   [E]   the edges by destination: ids of their sources
        t_indptr  [S + 1], t_indices [E]   the same edges by source: ids of their destinations
        order     [E]                      places in `indices` of the transposed edges

    With `order`, one structure carries several sets of weights (`weighted`) without sorting again.
    A block of a user's module, and no other, also has

        source  [S]   its sources' ids in the whole graph, int64
        whole         the whole graph's edges
    """

    source: Tensor
    whole: Whole

    def __init__(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        n_src: int,
        weight: np.ndarray | Tensor | None = None,
        own: int | None = None,
    ) -> None:
        """indptr [R + 1], indices [E] in [0, n_src), weight [E]; None: every edge has weight 1.

        own: destinations that are sources; None: all.

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
        forward.check_format(full_check=True)  # an index out of range would read foreign memory
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
        """The block of int32 tensors, laid out where they are; they are not checked.

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

    def own_rows(self, rows: Tensor) -> Tensor:
        """Those of the destinations, the first of the sources' rows [S, H].

        Where these are all, a slice would cost a backward pass that puts its gradient among zeros.
        """
        return rows if rows.shape[0] == self.n_dst else rows[: self.n_dst]

    @property
    def readers(self) -> Tensor:
        """The destination of every edge, int32 [E]."""
        rows = torch.arange(self.n_dst, dtype=torch.int32, device=self.indptr.device)
        return self.per_edge(rows)

    def per_edge(self, values: Tensor) -> Tensor:
        """A value per destination [R], repeated for each of its edges [E]."""
        return values.repeat_interleave(self.indptr.diff(), output_size=self.edges)

    def weighted(self, weight: np.ndarray | Tensor) -> Block:
        """The same edges with weights [E]; the structure is shared."""
        block = copy.copy(self)
        block._set_weight(weight)
        return block

    def among(self, kept: Tensor, scale: Tensor, dtype: torch.dtype) -> Block:
        """The edges from the sources `kept`, ascending, which weigh scale [S] times as much.

        All of it is done where the block is, and nothing is sorted again."""
        place = torch.full_like(self.t_indptr[1:], -1)
        place[kept] = torch.arange(kept.numel(), dtype=torch.int32, device=place.device)
        source = place.index_select(0, self.indices)
        stays = source >= 0
        ends, t_stays = _ends(stays), stays.index_select(0, self.order)
        first = torch.cat([self.t_indptr[:-1][kept], self.t_indptr[-1:]])
        block = copy.copy(self)
        block.n_src, block.indices = kept.numel(), source[stays]
        block.indptr = ends.index_select(0, self.indptr)
        block.t_indptr = _ends(t_stays).index_select(0, first)
        block.t_indices = self.t_indices[t_stays]
        block.order = ends.index_select(0, self.order)[t_stays]
        block.edges = block.indices.numel()
        weight = scale.index_select(0, self.indices)
        weight = weight if self.weight is None else weight * self.weight
        block._set_weight(weight[stays].to(dtype))
        return block

    def mean(self, dtype: torch.dtype = torch.float32) -> Block:
        """The same edges with weight 1 / in-degree: `aggregate` then takes the mean, 0 if empty."""
        degree = self.indptr.diff().long()
        return self.weighted((1.0 / degree.clamp(min=1).to(dtype)).repeat_interleave(degree))

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> Block:
        """A copy on a device; `dtype` is that of the weights (indices stay int32).

        The host does not wait for copies of page-locked memory.
        """
        return mapped(
            self,
            lambda tensor: tensor.to(
                device,
                dtype if tensor.is_floating_point() else None,
                non_blocking=tensor.is_pinned(),
            ),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def __repr__(self) -> str:
        return (
            f"Block(n_dst={self.n_dst}, n_src={self.n_src}, edges={self.edges},"
            f" weighted={self.weight is not None})"
        )


def by_column(rows: Tensor, columns: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values at these places [Z], sorted by column: indptr [width + 1], rows and places [Z]."""
    columns, order = columns.sort(stable=True)
    starts = torch.arange(width + 1, dtype=columns.dtype, device=columns.device)
    # torch.bincount would have the host wait for the largest column
    return torch.searchsorted(columns, starts, out_int32=True), rows[order], order.int()


def check_rows(block: Block, x: Tensor) -> None:
    """Raises ValueError unless x has a row per source of the block."""
    if x.shape[0] != block.n_src:
        raise ValueError(f"{block} needs {block.n_src} source rows, not {x.shape[0]}")


def _ends(stays: Tensor) -> Tensor:
    """How many of the first n stay, for every n: bool [E] -> int32 [E + 1]."""
    return torch.nn.functional.pad(stays.cumsum(0, dtype=torch.int32), (1, 0))


def _int32(array: np.ndarray) -> Tensor:
    # a copy of a graph's arrays: they are read-only, which torch warns about
    return torch.from_numpy(np.require(array, np.int32, ["C", "W"]))
