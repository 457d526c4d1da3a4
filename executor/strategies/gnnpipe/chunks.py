"""A rank's sub-chunks: their rows, their edges, and the rows that members of a stage exchange.

A rank keeps the rows of its own sub-chunks, chunk after chunk, followed by its halo: the rows of
other members of its stage that its edges read.

    [ own rows of chunk 0 | own of chunk 1 | .. | halo of chunk 0 | halo of chunk 1 | .. ]

A stage of one member has no halo. Positions in this order are called places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.layer import Layer
from gnnplan.executor.ranks.comm import Exchange
from gnnplan.executor.ranks.rank import Rank
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.ownership.chunks import Chunks


@dataclass
class Chunk:
    """A sub-chunk and the edges into it."""

    rows: slice  # places of own rows
    halo: slice  # places of the chunk's rows that other members own and this rank reads
    sources: Tensor  # int64 [S], places of source rows, own rows first
    blocks: dict[str, Block]  # by the kind of a layer's edges
    exchange: Exchange | None  # of the halo; None: no member reads another member's rows

    @property
    def size(self) -> int:
        """Number of own rows."""
        return int(self.rows.stop - self.rows.start)

    def select(self, rows: Tensor) -> Tensor:
        """Select the chunk's own rows and halo from all rows that the rank keeps."""
        return torch.cat([rows[self.rows], rows[self.halo]]) if self.exchange else rows[self.rows]

    def gather(self, layer: Layer, rows: Tensor) -> Tensor:
        """Gather the neighbourhood from all prepared rows that the rank keeps -> [size, width]."""
        return self.gather_sources(layer, rows.index_select(0, self.sources))

    def gather_sources(self, layer: Layer, sources: Tensor) -> Tensor:
        """Gather the neighbourhood from prepared source rows [S, H_in] -> [size, width]."""
        rows = layer.project(sources) if layer.projects_first else sources
        return layer.gather(self.blocks[layer.edges], rows)


def make_chunks(
    rank: Rank,
    graph: Graph,
    workload: Workload,
    cut: Chunks,
    member: int,
    group: Sequence[int],
    kinds: set[str],
) -> tuple[np.ndarray, list[Chunk]]:
    """Make a rank's sub-chunks; return global ids of all rows that it keeps, and the sub-chunks.

    cut: the graph in chunks, every chunk split over the members of a stage. member: this rank's
    number in its stage. group: the stage's ranks. kinds: kinds of edges of the stage's layers.
    """
    own, halo = cut.own(member), cut.halo(member)
    kept = np.concatenate([own, halo])
    place = np.full(graph.stats.vertices, -1, dtype=np.int64)
    place[kept] = np.arange(kept.size)
    position = np.empty(kept.size, dtype=np.int32)  # place -> position among a chunk's sources
    halo_starts = own.size + np.searchsorted(
        cut.sub[halo] // cut.members, np.arange(cut.chunks + 1)
    )
    chunks, start = [], 0
    for c in range(cut.chunks):
        ids = cut.rows(c, member)
        rows = slice(start, start + ids.size)
        start = rows.stop
        indptr = np.concatenate([[0], np.cumsum(graph.degree_of(ids))])
        columns, own_places = place[graph.neighbours(ids)], np.arange(rows.start, rows.stop)
        sources = np.concatenate([own_places, np.setdiff1d(columns, own_places)])
        position[sources] = np.arange(sources.size)
        local = position[columns]
        blocks = {
            kind: weighted_block(graph, kind, ids, kept[sources], indptr, local, workload).to(
                rank.device
            )
            for kind in kinds
        }
        chunks.append(
            Chunk(
                rows,
                slice(int(halo_starts[c]), int(halo_starts[c + 1])),
                torch.from_numpy(sources).to(rank.device),
                blocks,
                _exchange(rank, cut, c, member, group),
            )
        )
    return kept, chunks


def _exchange(
    rank: Rank, cut: Chunks, c: int, member: int, group: Sequence[int]
) -> Exchange | None:
    """Make the members' exchange of chunk c's rows; None if no member reads another's rows."""
    sends = cut.facts.sends[c]
    if not sends.any():
        return None
    give = [np.zeros(0, dtype=np.int64)] * rank.world
    take = np.zeros(rank.world, dtype=np.int64)
    for other, peer in enumerate(group):
        give[peer], take[peer] = cut.given(c, member, other), sends[other, member]
    return Exchange(rank, give, take, tuple(group))


def with_halo(chunks: Sequence[Chunk], own: Tensor) -> Tensor:
    """Append the halo to own rows [own, H], fetched from members chunk by chunk."""
    halo = [
        chunk.exchange.forward(chunk.exchange.pack(own[chunk.rows]))
        for chunk in chunks
        if chunk.exchange
    ]
    return torch.cat([own, *halo]) if halo else own
