"""Batches whose layer 1 is split by sources (SNP).

Neighbours are drawn as in data parallel: a rank draws all that its own seeds need. Then it pushes
the edges of layer 1 to the owners of their sources. A row is always pushed to its owner, for the
row's own term. A partial sum that several ranks need is computed once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.minibatch.sampler import Drawn, Sampled, Sampler, missing
from gnnplan.executor.minibatch.share import Part, Selection
from gnnplan.planner.graph.sampling import Ids, taken
from gnnplan.planner.ownership.minibatch import PUSHED
from gnnplan.planner.vocabulary.numbers import ranges
from gnnplan.planner.vocabulary.schedule import Label


class SourceSampler(Sampler):
    """A sampler that pushes layer 1's edges to their sources' owners."""

    def _lay(self, sampled: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        if len(self.peers) == 1:
            super()._lay(sampled, step, drawn)
            return
        first, second, *above = drawn
        wanted, messages = self._split_edges(first)
        received = self._push(sampled, step, messages, self.peers)
        with self._span(sampled, Label("lay", step)):
            asked = [block[PUSHED:][: block[0]].astype(np.int64) for block in received]
            sums, rows = self._sum_part(first, received)
            sampled.share.parts = [
                sums,
                self._read_sums(second, rows, asked, wanted),
                *(
                    self._part(kind, layer)
                    for kind, layer in zip(self.edges[2:], above, strict=True)
                ),
            ]

    def _split_edges(self, first: Drawn) -> tuple[list[Ids], list[np.ndarray]]:
        """Split layer 1's edges by the sources' owners.

        Returns, by owner, the places of the rows with edges there, and a message: the number of
        rows, their ids, the number of edges of each row, and the sources of these edges.
        """
        reader = np.repeat(np.arange(first.rows.size), np.diff(first.indptr))
        row_owner, edge_owner = self.member[first.rows], self.member[first.columns]
        wanted, messages = [], []
        for place in range(len(self.peers)):
            mask = edge_owner == place
            counts = np.bincount(reader[mask], minlength=first.rows.size)
            rows = np.flatnonzero((counts > 0) | (row_owner == place))
            parts = [[rows.size], first.rows[rows], counts[rows], first.columns[mask]]
            wanted.append(rows)
            messages.append(np.concatenate(parts).astype(np.int32))
        return wanted, messages

    def _sum_part(self, first: Drawn, received: Sequence[np.ndarray]) -> tuple[Part, Ids]:
        """Make layer 1's part over own sources -> the part, ids of its rows (own rows first)."""
        parts = [np.split(block[PUSHED:], [block[0], 2 * block[0]]) for block in received]
        ids, counts, columns = (np.concatenate(field) for field in zip(*parts, strict=True))
        # all ranks that need a row have drawn the same edges of it
        rows, first_of = np.unique(ids.astype(np.int64), return_index=True)
        is_own = self._owns(rows)
        order = np.concatenate([np.flatnonzero(is_own), np.flatnonzero(~is_own)])
        rows, first_of, own = rows[order], first_of[order], int(is_own.sum())
        ends, lengths = np.cumsum(counts), counts[first_of]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        columns = columns[ranges(ends[first_of] - lengths, lengths)]
        present = np.zeros(self._index.size, dtype=bool)
        present[rows[:own]] = True
        source = np.concatenate([rows[:own], missing(present, [columns])])
        self._index[source] = np.arange(source.size, dtype=np.int32)
        block = weighted_block(
            self.graph,
            self.edges[0],
            rows,
            source,
            indptr,
            self._index[columns],
            self.workload,
            self._degrees,
            drawn=True,
            part=(own, taken(self._degrees[0][rows], self.workload.fanouts[-1])),
        )
        return Part(source, source.size, first.gives, first.takes, False, block), rows

    def _read_sums(
        self, second: Drawn, rows: Ids, asked: Sequence[Ids], wanted: Sequence[Ids]
    ) -> Part:
        """Make layer 2's part. Its sources add up partial sums of `rows`, here and on peers."""
        part, index = self._part(self.edges[1], second), self._index
        index[rows] = np.arange(rows.size, dtype=np.int32)
        give, take = list(second.gives), second.takes.copy()
        places, ends = [], rows.size
        for peer, ids, readers in zip(self.peers, asked, wanted, strict=True):
            if peer == self.me:
                places.append(index[ids].astype(np.int64))
                continue
            give[peer], take[peer] = index[ids].astype(np.int64), readers.size
            places.append(np.arange(ends, ends + readers.size))
            ends += readers.size
        part.local, part.give, part.take, part.exchanges_rows = rows.size, give, take, True
        all_places, into = (torch.from_numpy(np.concatenate(each)) for each in (places, wanted))
        part.selection = Selection(all_places, ends, into, part.source.size)
        return part
