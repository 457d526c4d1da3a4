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
    """Layer 1 of all peers' blocks side by side: the destinations of all, then other sources.

    A peer is given the sums of its destinations, and gives those of the rank's own."""

    own: slice = field(kw_only=True)  # the rank's own destinations


class ColumnSampler(Sampler):
    """A sampler that pushes layer 1's block to its rail."""

    pushes = True

    def __init__(self, *args: Any, rail: Sequence[int], **more: Any) -> None:
        super().__init__(*args, **more)
        self.rail = list(rail)

    def _lay(self, made: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        first, *above = drawn
        below, columns, position = first.below, first.columns, self._where
        position[below] = np.arange(below.size, dtype=np.int32)
        header = np.array([below.size, first.rows.size, columns.size])
        own = np.concatenate([header, below, np.diff(first.indptr), position[columns]]).astype(
            np.int32
        )
        blocks = [own] * len(self.rail)
        if len(self.rail) > 1:
            blocks = self._push(made, step, blocks, self.rail)
        with self._span(made, Label("lay", step)):
            rest = (self._part(kind, of) for kind, of in zip(self.edges[1:], above, strict=True))
            made.share.parts = [self._merged(blocks), *rest]

    def _merged(self, blocks: Sequence[np.ndarray]) -> Pushed:
        """The blocks of all peers as one. A block: header, sources' ids, degrees, positions."""
        # sources, rows, edges
        counts = np.array([block[:HEADER] for block in blocks], dtype=np.int64)
        first = np.concatenate([[0], np.cumsum(counts[:, 1])])
        beyond = first[-1] + np.concatenate([[0], np.cumsum(counts[:, 0] - counts[:, 1])])
        source, degrees, indices = np.empty(counts[:, 0].sum(), np.int64), [], []
        for i, (block, (sources, rows, edges)) in enumerate(
            zip(blocks, counts.tolist(), strict=True)
        ):
            ids, degree, places = np.split(block[HEADER:], [sources, sources + rows])
            position = np.concatenate(
                [first[i] + np.arange(rows), beyond[i] + np.arange(sources - rows)]
            ).astype(np.int32)
            source[position] = ids
            degrees.append(degree)
            indices.append(position[places])
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
