"""The graph cut in chunks for a pipeline, and every chunk over the members of a stage: member i owns sub-chunk i of each.

A row that a member of another sub-chunk reads, in whichever chunk, is handed to it once per layer, when its own chunk is
processed. The same object serves the planner (counts) and the executor (indices), so bytes agree by construction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import scipy.sparse as sp

from gnnplan.planner.estimate import mixing_of
from gnnplan.planner.formulas import expected_halo_rows
from gnnplan.planner.graph import Graph, GraphStats
from gnnplan.planner.layout import neighbours
from gnnplan.planner.partition import partition_weighted, undirected


@dataclass(frozen=True)
class ChunkFacts:
    """Counts of K chunks over g members. `sources`: distinct rows that the edges into a sub-chunk read, its own included, with so many
    `numbers` of sparse features; `sends[c, i, j]`: rows of chunk c that i hands to j."""

    rows: np.ndarray  # [K, g]
    edges: np.ndarray  # [K, g]
    sources: np.ndarray  # [K, g]
    numbers: np.ndarray  # [K, g]; 0 of dense features
    sends: np.ndarray  # [K, g, g]


class Chunks:
    """The rows of every member in every chunk. chunk: int [N], the chunk of each vertex."""

    def __init__(self, graph: Graph, chunk: np.ndarray, chunks: int, members: int) -> None:
        self.graph, self.chunks, self.members = graph, chunks, members
        self.sub = np.asarray(chunk, dtype=np.int64) * members + _cut(graph, chunk, chunks, members)  # sub-chunk of each vertex
        self.order = np.argsort(self.sub, kind="stable")  # by chunk, then member, then id
        self.bounds = np.searchsorted(self.sub[self.order], np.arange(chunks * members + 1))

    def rows(self, chunk: int, member: int) -> np.ndarray:
        """Global ids of a sub-chunk."""
        at = chunk * self.members + member
        return np.asarray(self.order[self.bounds[at] : self.bounds[at + 1]])

    def own(self, member: int) -> np.ndarray:
        """Global ids of all the member's rows, chunk after chunk."""
        return np.asarray(self.order[self.sub[self.order] % self.members == member])

    def halo(self, member: int) -> np.ndarray:
        """Global ids of other members' rows that it reads: chunk after chunk, within a chunk owner after owner."""
        return self._read[2][member]

    def given(self, chunk: int, owner: int, reader: int) -> np.ndarray:
        """Positions, among the owner's rows of the chunk, of those that it hands to the reader."""
        halo = self.halo(reader)
        mine = halo[self.sub[halo] == chunk * self.members + owner]
        return np.asarray(np.searchsorted(self.rows(chunk, owner), mine))

    @cached_property
    def facts(self) -> ChunkFacts:
        shape = self.chunks, self.members
        sends = [np.bincount(self.sub[self.halo(j)], minlength=self.chunks * self.members).reshape(shape) for j in range(self.members)]
        edges = np.bincount(self.sub, weights=np.diff(self.graph.indptr), minlength=self.chunks * self.members).astype(np.int64)
        return ChunkFacts(np.diff(self.bounds).reshape(shape), edges.reshape(shape), *self._read[:2], np.stack(sends, axis=2))

    @cached_property
    def _read(self) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
        """(sources [K, g], numbers of sparse features in them [K, g], halo of each member): neighbours are marked, which for many edges is
        faster than sorting them."""
        sources, numbers = np.zeros((2, self.chunks, self.members), dtype=np.int64)
        lengths = self.graph.lengths if self.graph.stats.nonzeros else np.zeros(self.sub.size, dtype=np.int64)
        halos = []
        for member in range(self.members):
            far = np.zeros(self.sub.size, dtype=bool)
            for chunk in range(self.chunks):
                rows, read = self.rows(chunk, member), np.zeros(self.sub.size, dtype=bool)
                read[neighbours(self.graph, rows)] = True
                far |= read
                read[rows] = True
                sources[chunk, member], numbers[chunk, member] = np.count_nonzero(read), lengths[read].sum()
            far &= self.sub % self.members != member
            halos.append(self.order[far[self.order]])
        return sources, numbers, halos


def _cut(graph: Graph, chunk: np.ndarray, chunks: int, members: int) -> np.ndarray:
    """Member of each vertex: METIS inside every chunk, int64 [N]. In a chunk of fewer vertices than members some have none."""
    out = np.zeros(chunk.size, dtype=np.int64)
    if members == 1:
        return out
    indptr, indices = undirected(graph)
    adjacency = sp.csr_matrix((np.ones(len(indices), dtype=np.int8), indices, indptr), shape=(chunk.size, chunk.size))
    by_chunk = np.argsort(chunk, kind="stable")
    for c, rows in enumerate(np.split(by_chunk, np.searchsorted(chunk[by_chunk], np.arange(1, chunks)))):
        if rows.size <= members:
            out[rows] = (np.arange(rows.size) + c) % members
        else:
            inside = adjacency[rows][:, rows]
            out[rows] = partition_weighted(inside.indptr, inside.indices, None, members)
    return out


@lru_cache(maxsize=32)
def estimated_chunks(stats: GraphStats, chunks: int, members: int, method: str) -> ChunkFacts:
    """Of a graph known by statistics only: equal sub-chunks, cut as well as halos that were counted say (estimate.Mixing)."""
    n, e = stats.vertices, stats.edges
    p = min(e / n**2 * mixing_of(stats, method).at(chunks * members), 0.5)
    chunk = n // chunks + (np.arange(chunks) < n % chunks)  # shares as equal as whole numbers can be (schedule.share)
    rows = chunk[:, None] // members + (np.arange(members) < chunk[:, None] % members)
    parts = min(chunks * members, n)
    sources = rows + float(expected_halo_rows(n, parts, p)) / parts
    sends = np.zeros((chunks, members, members), dtype=np.int64)
    if members > 1:
        read = float(expected_halo_rows(n, min(members, n), p)) / (members * (members - 1))  # rows of one member that another one reads
        part = round(read) // chunks + (np.arange(chunks) < round(read) % chunks)
        sends[:] = np.minimum(part[:, None], rows)[:, :, None]
        sends[:, range(members), range(members)] = 0
    return ChunkFacts(rows, rows * (e / n), sources, sources * (stats.nonzeros / n), sends)
