"""Chunks of a graph for a pipeline, each divided among the members of a stage.

The members of a stage are its ranks. Member i owns sub-chunk i of every chunk. If another member
reads a row for any chunk, the owner sends it the row once per layer, when the row's own chunk is
processed. The planner reads counts and the executor reads indices of the same object, so they agree
about bytes."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from gnnplan.planner.graph.disk_cache import cached
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.partition import (
    edges_between,
    library_of,
    partition_weighted,
    version_of,
)
from gnnplan.planner.ownership.estimated_layout import expected_halo_rows, mixing_of
from gnnplan.planner.vocabulary.outer import Outer, RankMatrix


@dataclass(frozen=True)
class ChunkCounts:
    """The counts of K chunks over g members."""

    rows: np.ndarray  # rows of each sub-chunk [K, g]
    edges: np.ndarray  # edges into each sub-chunk [K, g]
    sources: np.ndarray  # distinct source rows of these edges and own rows of the sub-chunk [K, g]
    sends: RankMatrix  # sends[c, i, j]: rows of chunk c that member i sends to member j [K, g, g]


class Chunks:
    """The rows of every member in every chunk.

    chunk: the chunk of each vertex, int [N]. method: the partitioner that divides a chunk."""

    def __init__(
        self,
        graph: Graph,
        chunk: np.ndarray,
        chunks: int,
        members: int,
        method: str = "metis",
    ) -> None:
        self.graph, self.chunks, self.members = graph, chunks, members
        # sub-chunk of each vertex [N]: chunk * members + member
        self.sub = np.asarray(chunk, dtype=np.int64) * members + cut_parts(
            graph, chunk, chunks, members, method
        )
        self.order = np.argsort(self.sub, kind="stable")  # vertices by chunk, member, id
        self.bounds = np.searchsorted(self.sub[self.order], np.arange(chunks * members + 1))
        self.sources, self.halos = self._read()

    def rows(self, chunk: int, member: int) -> np.ndarray:
        """Return the global ids of a sub-chunk's rows."""
        sub = chunk * self.members + member
        return np.asarray(self.order[self.bounds[sub] : self.bounds[sub + 1]])

    def own(self, member: int) -> np.ndarray:
        """Return the global ids of all rows of a member, chunk by chunk."""
        return np.asarray(self.order[self.sub[self.order] % self.members == member])

    def halo(self, member: int) -> np.ndarray:
        """Return the ids of other members' rows that a member reads, by chunk, then by owner."""
        return self.halos[member]

    def given(self, chunk: int, owner: int, reader: int) -> np.ndarray:
        """Return the positions of the rows sent to the reader among the owner's rows of a chunk."""
        halo = self.halo(reader)
        sent = halo[self.sub[halo] == chunk * self.members + owner]
        return np.asarray(np.searchsorted(self.rows(chunk, owner), sent))

    @property
    def facts(self) -> ChunkCounts:
        """The counts over all chunks and members."""
        shape = self.chunks, self.members
        sends = [
            np.bincount(self.sub[self.halo(j)], minlength=self.chunks * self.members).reshape(shape)
            for j in range(self.members)
        ]
        edges = np.bincount(
            self.sub, weights=self.graph.degree, minlength=self.chunks * self.members
        ).astype(np.int64)
        return ChunkCounts(
            np.diff(self.bounds).reshape(shape),
            edges.reshape(shape),
            self.sources,
            np.stack(sends, axis=2),
        )

    def _read(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return `ChunkCounts.sources` [K, g], and each member's halo.

        Neighbours are marked in a mask instead of sorted, which is faster for many edges."""
        sources, halos = np.zeros((self.chunks, self.members), dtype=np.int64), []
        for member in range(self.members):
            read_by_member = np.zeros(self.sub.size, dtype=bool)
            for chunk in range(self.chunks):
                rows, read = self.rows(chunk, member), np.zeros(self.sub.size, dtype=bool)
                read[self.graph.neighbours(rows)] = True
                read_by_member |= read
                read[rows] = True
                sources[chunk, member] = np.count_nonzero(read)
            remote = read_by_member & (self.sub % self.members != member)
            halos.append(self.order[remote[self.order]])
        return sources, halos


def cut_parts(
    graph: Graph, part: np.ndarray, parts: int, pieces: int, method: str = "metis"
) -> np.ndarray:
    """Divide every part into pieces by the method's partitioner; return the pieces, int64 [N].

    A part with fewer vertices than pieces has empty pieces."""
    if pieces == 1:
        return np.zeros(part.size, dtype=np.int64)

    def compute() -> np.ndarray:
        piece = np.zeros(part.size, np.int32)
        by_part = np.argsort(part, kind="stable")
        for p, rows in enumerate(
            np.split(by_part, np.searchsorted(part[by_part], np.arange(1, parts)))
        ):
            if rows.size <= pieces:
                piece[rows] = (np.arange(rows.size) + p) % pieces
            else:
                piece[rows] = partition_weighted(edges_between(graph, rows), None, pieces, method)
        return piece

    # A rank that finds the pieces in the cache reads no edges of other ranks' parts.
    digest = blake2b(np.ascontiguousarray(part, np.int32).data, digest_size=16).hexdigest()
    key = f"{version_of(library_of(method))} inside {graph.stats.hash} {digest} {pieces}"
    return cached(key, part.size, pieces, compute).astype(np.int64)


def estimated_chunks(stats: GraphStats, chunks: int, members: int, method: str) -> ChunkCounts:
    """Return the expected counts of a graph known by statistics only.

    Sub-chunks have equal sizes. The graph's mixing (estimated_layout.Mixing) gives the probability
    of an edge between two vertices of different sub-chunks."""
    vertices, edges = stats.vertices, stats.edges
    probability = min(edges / vertices**2 * mixing_of(stats, method).at(chunks * members), 0.5)
    # nearly equal integer shares (schedule.share)
    chunk = vertices // chunks + (np.arange(chunks) < vertices % chunks)
    rows = chunk[:, None] // members + (np.arange(members) < chunk[:, None] % members)
    parts = min(chunks * members, vertices)
    sources = rows + expected_halo_rows(vertices, parts, probability) / parts
    sent = 0 * rows  # rows that each member sends to each other member
    if members > 1:
        halo = expected_halo_rows(vertices, min(members, vertices), probability)
        # rows of one member that one other member reads
        read = round(halo / (members * (members - 1)))
        by_chunk = read // chunks + (np.arange(chunks) < read % chunks)
        sent = np.minimum(by_chunk[:, None], rows)
    return ChunkCounts(
        rows,
        rows * (edges / vertices),
        sources,
        Outer.of([0] * members, True, sent),
    )
