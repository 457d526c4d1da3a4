"""Neighbour sampling on a device, with the results of planner/graph/sampling.py, and its blocks.

    draw          draw neighbours of a layer's rows. The host waits for their number
    place_rows    find new rows among the neighbours, and the place of each neighbour: a sort. The
                  host waits for the number of rows
    lay_block     lay out a block's edges by destination, and by source after another sort

Batches stay on the device. The ids of their rows are copied to the host once, for features that are
in its memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from gnnplan.executor.layers.blocks import dtype_of
from gnnplan.executor.layers.kernels import GOLDEN, Block, mix, sent
from gnnplan.planner.gnn.workload import ALL, Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.graph.sampling import Ids


class DrawnOnDevice(NamedTuple):
    """A layer's edges on the device, all int32 but `indptr`."""

    rows: int  # number of rows of h_l, the first rows of `below`
    below: Tensor  # global ids of rows of h_{l-1} [S]
    indptr: Tensor  # [R + 1]
    indices: Tensor  # places of the drawn neighbours among `below` [E]


class DeviceGraph:
    """A graph's adjacency lists on a device."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.graph = graph
        self.indptr = torch.tensor(graph.csr_edges.indptr, device=device)
        self.indices = torch.tensor(graph.csr_edges.indices, device=device)
        self.max_degree = int(np.max(graph.degree, initial=0))

    @cached_property
    def _out_degrees(self) -> Tensor:
        """Out-degrees of all vertices of a directed graph [N]."""
        return torch.tensor(np.asarray(self.graph.out_degree), device=self.indptr.device)

    def _degrees(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return in-degrees of the first `rows` vertices [R], and out-degrees of all [S]."""
        ins = (self.indptr[ids + 1] - self.indptr[ids]).double()
        directed = self.graph.stats.directed
        return ins[:rows], self._out_degrees[ids].double() if directed else ins

    def draw(
        self, vertices: Ids, fanout: int, key: NDArray[np.uint64]
    ) -> tuple[Ids, NDArray[np.int32]]:
        """Draw neighbours of vertices [V] -> (indptr [V + 1], neighbours [edges]), on the host.

        key: the word [1] from which the layer's random numbers start (sampling.key_of).
        """
        indptr, columns = self._draw(self._to_device(vertices), fanout, key)
        return indptr.cpu().numpy(), columns.cpu().numpy()

    def draw_layers(
        self, rows: Ids, fanouts: Sequence[int], keys: Sequence[NDArray[np.uint64]]
    ) -> list[DrawnOnDevice]:
        """Draw neighbours for layers L .. 1 around distinct `rows` of h_L -> layers 1 .. L.

        fanouts and keys are in the order of layers L .. 1. The host waits twice per layer.
        """
        layer_rows, layers = self._to_device(rows).int(), list[DrawnOnDevice]()
        for fanout, key in zip(fanouts, keys, strict=True):
            indptr, columns = self._draw(layer_rows, fanout, key)
            below, indices = place_rows(layer_rows, columns)
            layers.append(DrawnOnDevice(len(layer_rows), below, indptr, indices))
            layer_rows = below
        return layers[::-1]

    def lay_block(self, edges: str, drawn: DrawnOnDevice, workload: Workload) -> Block:
        """Make the Block that `weighted_block` makes of edges of this kind, equal to the bit."""
        rows, ids, indptr, indices = drawn
        count, own = indptr.diff(), torch.arange(rows + 1, dtype=torch.int32, device=indptr.device)
        reader = own[:-1].repeat_interleave(count, output_size=len(indices))
        if edges in ("gcn", "loop"):  # self edges come last in every row
            places = torch.cat(
                [torch.arange(len(reader), device=own.device) + reader, indptr[1:] + own[:-1]]
            )
            endpoints = torch.stack([torch.cat([reader, own[:-1]]), torch.cat([indices, own[:-1]])])
            reader, indices = torch.empty_like(endpoints).index_copy_(1, places, endpoints)
            indptr = indptr + own
        block = Block.laid(indptr.int(), indices, reader, len(ids))
        if edges in ("one", "loop"):
            if workload.is_cut:
                block.source = ids.long()
            return block
        count = count.clamp(min=1).double()
        if edges == "mean":
            weight = (1.0 / count)[reader]
        else:
            degree, outs = self._degrees(ids, rows)
            # a vertex has no other edge to itself
            edges_per_sample = torch.where(indices == reader, 1.0, (degree / count)[reader])
            weight = (
                1.0 / ((degree + 1.0)[reader] * (outs + 1.0)[indices]).sqrt() * edges_per_sample
            )
        return block.weighted(weight.to(dtype_of(workload.precision)))

    def _to_device(self, ids: Ids) -> Tensor:
        return sent([torch.from_numpy(ids)], self.indptr.device)[0]

    def _draw(self, rows: Tensor, fanout: int, key: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        fanout = ALL if fanout >= self.max_degree else fanout
        indptr, places = draw(self.indptr, rows, fanout, int(key.view(np.int64)[0]))
        return indptr, self.indices[places]


def draw(indptr: Tensor, vertices: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """Draw at most `fanout` edges (ALL: all edges) into each vertex.

    -> (indptr [V + 1], places [edges] of the drawn edges in the graph's indices), int64
    """
    start = indptr[vertices]
    degree = indptr[vertices + 1] - start
    counts = degree if fanout == ALL else degree.clamp(max=fanout)
    ends = F.pad(counts.cumsum(0), (1, 0))
    if fanout == ALL:
        first = (start - ends[:-1]).repeat_interleave(degree)
        return ends, first + torch.arange(len(first), device=first.device)
    order = torch.arange(fanout, device=start.device)
    drawn = sample_without_replacement(mix((vertices.long() + key) * GOLDEN), degree, fanout)
    places = torch.where(degree > fanout, drawn, order[:, None]) + start
    return ends, places.t()[order < counts[:, None]]


def sample_without_replacement(keys: Tensor, degree: Tensor, k: int) -> Tensor:
    """Draw k distinct numbers below each degree, uniformly: int64 [k, V].

    If a degree is k or less, its numbers are undefined. Floyd's algorithm, as in
    planner/graph/sampling.py; a vertex's random words follow from its key [V].
    """
    turn = torch.arange(1, k + 1, device=keys.device)[:, None]
    last = degree + turn - (k + 1)  # Floyd's j
    upper = (mix(keys + turn * GOLDEN) >> 32) & (2**32 - 1)
    numbers = (upper * (last + 1)) >> 32
    for i in range(1, k):
        is_repeated = (numbers[:i] == numbers[i]).any(0)
        torch.where(is_repeated, last[i], numbers[i], out=numbers[i])
    return numbers


def place_rows(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Find the rows of the layer below: `rows` [R], then the other neighbours in `columns` [E].

    Returns these rows [S], new rows sorted, and the place of each neighbour among them [E], int32.
    R is known, so the host waits only for S.
    """
    distinct, inverse = torch.unique(torch.cat([rows, columns]), return_inverse=True)
    row_places, column_places = inverse.split([len(rows), len(columns)])
    new = torch.ones_like(distinct).index_fill_(0, row_places, 0)
    place = new.cumsum(0, dtype=torch.int32) + (len(rows) - 1)
    place.index_copy_(0, row_places, torch.arange(len(rows), dtype=torch.int32, device=rows.device))
    below = torch.empty_like(distinct).index_copy_(0, place.long(), distinct)
    return below, place[column_places]
