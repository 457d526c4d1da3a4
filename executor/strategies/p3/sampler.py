"""Batches for P3: drawn as in data parallel, then layer 1's block is pushed to all peers.

Peers (a rail) have other columns of the features, and the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.minibatch.sampler import Drawn, Sampled, Sampler
from gnnplan.executor.minibatch.share import Part
from gnnplan.planner.strategies.p3.slices import HEADER
from gnnplan.planner.vocabulary.schedule import Label


@dataclass
class Pushed(Part):
    """Layer 1 of all peers' blocks merged: all peers' destinations, then all other sources.

    The rank sends each peer the sums of the peer's destinations, and receives sums of its own."""

    own: slice = field(kw_only=True)  # the rank's own destinations


class ColumnSampler(Sampler):
    """A sampler that pushes layer 1's block to its rail."""

    pushes = True

    def __init__(self, *args: Any, rail: Sequence[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self.rail = list(rail)

    def _lay(self, sampled: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        first, *above = drawn
        below, columns, index = first.below, first.columns, self._index
        index[below] = np.arange(below.size, dtype=np.int32)
        header = np.array([below.size, first.rows.size, columns.size])
        own = np.concatenate([header, below, np.diff(first.indptr), index[columns]]).astype(
            np.int32
        )
        blocks = [own] * len(self.rail)
        if len(self.rail) > 1:
            blocks = self._push(sampled, step, blocks, self.rail)
        with self._span(sampled, Label("lay", step)):
            rest = (self._part(*layer) for layer in zip(self.edges[1:], above, strict=True))
            sampled.share.parts = [self._merge_blocks(blocks), *rest]

    def _merge_blocks(self, blocks: Sequence[np.ndarray]) -> Pushed:
        """Merge the blocks of all peers. A block: header, sources' ids, degrees, positions."""
        # by peer: numbers of sources, rows, edges
        counts = np.array([block[:HEADER] for block in blocks], dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(counts[:, 1])])
        first_extra = first[-1] + np.concatenate([[0], np.cumsum(counts[:, 0] - counts[:, 1])])
        source, degrees, indices = np.empty(counts[:, 0].sum(), np.int64), [], []
        for i, (block, (sources, rows, edges)) in enumerate(
            zip(blocks, counts.tolist(), strict=True)
        ):
            ids, degree, places = np.split(block[HEADER:], [sources, sources + rows])
            index = np.concatenate(
                [first[i] + np.arange(rows), first_extra[i] + np.arange(sources - rows)]
            ).astype(np.int32)
            source[index] = ids
            degrees.append(degree)
            indices.append(index[places])
            assert places.size == edges
        indptr = np.concatenate([[0], np.cumsum(np.concatenate(degrees))])
        merged = weighted_block(
            self.graph,
            self.edges[0],
            source[: first[-1]],
            source,
            indptr,
            np.concatenate(indices),
            self.workload,
            self._degrees,
            drawn=True,
        )
        give, take = [indptr[:0]] * len(self.groups), np.zeros(len(self.groups), np.int64)
        place = self.rail.index(self.me)
        for i, peer in enumerate(self.rail):
            if i != place:
                give[peer], take[peer] = np.arange(first[i], first[i + 1]), counts[place, 1]
        own = slice(int(first[place]), int(first[place + 1]))
        return Pushed(source, source.size, give, take, False, merged, own=own)
