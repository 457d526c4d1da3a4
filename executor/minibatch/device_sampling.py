"""Neighbours drawn on a device as planner/graph/sampling.py draws them, and blocks laid out there.

    draw     neighbours of a layer's rows. The host waits to hear how many
    placed   which of them are new rows, and where each stands among all: a sort. The host waits to
             hear how many
    laid     a block: its edges by destination, and by source after another sort

What batches are made of stays on the device. The host is sent the ids of their rows once, for
features that are in its memory."""

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


class Drawn(NamedTuple):
    """A layer's edges on the device: int32 all, but `indptr`."""

    rows: int  # of h_l, the first of `below`
    below: Tensor  # rows of h_{l-1}, by global id [S]
    indptr: Tensor  # [R + 1]
    indices: Tensor  # places of the neighbours drawn among `below` [E]


class Lists:
    """A graph's adjacency lists on a device."""

    def __init__(self, graph: Graph, device: torch.device) -> None:
        self.graph = graph
        self.indptr = torch.tensor(graph.whole.indptr, device=device)
        self.indices = torch.tensor(graph.whole.indices, device=device)
        self.most = int(np.max(graph.degree, initial=0))

    @cached_property
    def _out_degrees(self) -> Tensor:
        """Of all vertices of a directed graph [N]."""
        return torch.tensor(np.asarray(self.graph.out_degree), device=self.indptr.device)

    def _degrees(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """In-degrees of the first vertices [R], out-degrees of all [S]."""
        ins = (self.indptr[ids + 1] - self.indptr[ids]).double()
        directed = self.graph.stats.directed
        return ins[:rows], self._out_degrees[ids].double() if directed else ins

    def draw(
        self, vertices: Ids, fanout: int, key: NDArray[np.uint64]
    ) -> tuple[Ids, NDArray[np.int32]]:
        """Neighbours drawn of these vertices [V] -> (indptr [V + 1], neighbours [edges]).

        key: the word [1] that the layer's draws start from (sampling.key_of).
        """
        indptr, columns = self._draw(self._here(vertices), fanout, key)
        return indptr.cpu().numpy(), columns.cpu().numpy()

    def drawn(
        self, rows: Ids, fanouts: Sequence[int], keys: Sequence[NDArray[np.uint64]]
    ) -> list[Drawn]:
        """What is drawn for layers 1 .. L around `rows` of h_L, all different.

        fanouts and keys are those of layers L .. 1. The host waits twice per layer.
        """
        here, found = self._here(rows).int(), list[Drawn]()
        for fanout, key in zip(fanouts, keys, strict=True):
            indptr, columns = self._draw(here, fanout, key)
            below, indices = placed(here, columns)
            found.append(Drawn(len(here), below, indptr, indices))
            here = below
        return found[::-1]

    def laid(self, edges: str, drawn: Drawn, workload: Workload) -> Block:
        """The Block that `weighted_block` makes of edges of this kind, to the bit."""
        rows, ids, indptr, indices = drawn
        count, own = indptr.diff(), torch.arange(rows + 1, dtype=torch.int32, device=indptr.device)
        reader = own[:-1].repeat_interleave(count, output_size=len(indices))
        if edges in ("gcn", "loop"):  # self edges come last in every row
            places = torch.cat(
                [torch.arange(len(reader), device=own.device) + reader, indptr[1:] + own[:-1]]
            )
            both = torch.stack([torch.cat([reader, own[:-1]]), torch.cat([indices, own[:-1]])])
            reader, indices = torch.empty_like(both).index_copy_(1, places, both)
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
            stands_for = torch.where(indices == reader, 1.0, (degree / count)[reader])
            weight = 1.0 / ((degree + 1.0)[reader] * (outs + 1.0)[indices]).sqrt() * stands_for
        return block.weighted(weight.to(dtype_of(workload.precision)))

    def _here(self, ids: Ids) -> Tensor:
        return sent([torch.from_numpy(ids)], self.indptr.device)[0]

    def _draw(self, rows: Tensor, fanout: int, key: NDArray[np.uint64]) -> tuple[Tensor, Tensor]:
        fanout = ALL if fanout >= self.most else fanout
        indptr, places = draw(self.indptr, rows, fanout, int(key.view(np.int64)[0]))
        return indptr, self.indices[places]


def draw(indptr: Tensor, vertices: Tensor, fanout: int, key: int) -> tuple[Tensor, Tensor]:
    """At most `fanout` edges (ALL: every one) into each vertex.

    -> (indptr [V + 1], places [edges] of the drawn edges in the graph's indices), int64
    """
    start = indptr[vertices]
    degree = indptr[vertices + 1] - start
    taken = degree if fanout == ALL else degree.clamp(max=fanout)
    ends = F.pad(taken.cumsum(0), (1, 0))
    if fanout == ALL:
        first = (start - ends[:-1]).repeat_interleave(degree)
        return ends, first + torch.arange(len(first), device=first.device)
    order = torch.arange(fanout, device=start.device)
    drawn = floyd(mix((vertices.long() + key) * GOLDEN), degree, fanout)
    places = torch.where(degree > fanout, drawn, order[:, None]) + start
    return ends, places.t()[order < taken[:, None]]


def floyd(keys: Tensor, degree: Tensor, k: int) -> Tensor:
    """k different numbers below each degree, uniformly: int64 [k, V]. Where a degree is k or less,
    they are any.

    Floyd's algorithm, as in planner/graph/sampling.py. The words of a vertex follow from its key
    [V].
    """
    turn = torch.arange(1, k + 1, device=keys.device)[:, None]
    last = degree + turn - (k + 1)  # Floyd's j
    upper = (mix(keys + turn * GOLDEN) >> 32) & (2**32 - 1)
    taken = (upper * (last + 1)) >> 32
    for i in range(1, k):
        again = (taken[:i] == taken[i]).any(0)
        torch.where(again, last[i], taken[i], out=taken[i])
    return taken


def placed(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the layer below: `rows` [R], then the other neighbours among `columns` [E], sorted.

    -> (these [S], the place of each neighbour among them [E]); all are int32. R of the S are
    known, so that the host waits for S alone.
    """
    found, inverse = torch.unique(torch.cat([rows, columns]), return_inverse=True)
    of_rows, of_columns = inverse.split([len(rows), len(columns)])
    new = torch.ones_like(found).index_fill_(0, of_rows, 0)
    place = new.cumsum(0, dtype=torch.int32) + (len(rows) - 1)
    place.index_copy_(0, of_rows, torch.arange(len(rows), dtype=torch.int32, device=rows.device))
    below = torch.empty_like(found).index_copy_(0, place.long(), found)
    return below, place[of_columns]
