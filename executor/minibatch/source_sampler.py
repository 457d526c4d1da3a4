"""Batches whose layer 1 is split by sources (SNP).

They are drawn as in data parallel: a rank draws all that its own seeds need. Then it pushes the
edges of layer 1 whose sources others own to these owners. A row's owner is always told of it, for
the row's own part. A sum that several ranks need is made once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.minibatch.sampler import Drawn, Sampled, Sampler, absent
from gnnplan.executor.minibatch.share import Part, Picks
from gnnplan.planner.graph.sampling import Ids, taken
from gnnplan.planner.ownership.minibatch import PUSHED
from gnnplan.planner.vocabulary.numbers import ranges
from gnnplan.planner.vocabulary.schedule import Label


class SourceSampler(Sampler):
    """A sampler that pushes layer 1's edges to their sources' owners."""

    def _lay(self, made: Sampled, step: int, drawn: Sequence[Drawn]) -> None:
        if len(self.peers) == 1:
            super()._lay(made, step, drawn)
            return
        first, second, *above = drawn
        wanted, pushed = self._cut(first)
        came = self._push(made, step, pushed, self.peers)
        with self._span(made, Label("lay", step)):
            asked = [block[PUSHED:][: block[0]].astype(np.int64) for block in came]
            sums, rows = self._sums(first, came)
            made.share.parts = [
                sums,
                self._added(second, rows, asked, wanted),
                *(self._part(kind, of) for kind, of in zip(self.edges[2:], above, strict=True)),
            ]

    def _cut(self, first: Drawn) -> tuple[list[Ids], list[np.ndarray]]:
        """Layer 1 by owners: places of the rows that each has a part of, and what it is told.

        That is how many rows, their ids, how many edges each has there, and these edges' sources.
        """
        reader = np.repeat(np.arange(first.rows.size), np.diff(first.indptr))
        of_row, of_edge = self.member[first.rows], self.member[first.columns]
        wanted, pushed = [], []
        for place in range(len(self.peers)):
            its = of_edge == place
            counts = np.bincount(reader[its], minlength=first.rows.size)
            rows = np.flatnonzero((counts > 0) | (of_row == place))
            told = [[rows.size], first.rows[rows], counts[rows], first.columns[its]]
            wanted.append(rows)
            pushed.append(np.concatenate(told).astype(np.int32))
        return wanted, pushed

    def _sums(self, first: Drawn, came: Sequence[np.ndarray]) -> tuple[Part, Ids]:
        """Layer 1 over this rank's own sources, and the rows that it makes: own ones first."""
        told = [np.split(block[PUSHED:], [block[0], 2 * block[0]]) for block in came]
        ids, counts, columns = (np.concatenate(parts) for parts in zip(*told, strict=True))
        # whoever needs a row has drawn the same edges of it
        rows, at = np.unique(ids.astype(np.int64), return_index=True)
        is_own = self._owns(rows)
        order = np.concatenate([np.flatnonzero(is_own), np.flatnonzero(~is_own)])
        rows, at, own = rows[order], at[order], int(is_own.sum())
        ends, lengths = np.cumsum(counts), counts[at]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        columns = columns[ranges(ends[at] - lengths, lengths)]
        present = np.zeros(self._where.size, dtype=bool)
        present[rows[:own]] = True
        source = np.concatenate([rows[:own], absent(present, [columns])])
        self._where[source] = np.arange(source.size, dtype=np.int32)
        block = weighted_block(
            self.graph,
            self.edges[0],
            rows,
            source,
            indptr,
            self._where[columns],
            self.workload,
            self._degrees,
            drawn=True,
            part=(own, taken(self._degrees[0][rows], self.workload.fanouts[-1])),
        )
        return Part(source, source.size, first.gives, first.takes, False, block), rows

    def _added(self, second: Drawn, rows: Ids, asked: Sequence[Ids], wanted: Sequence[Ids]) -> Part:
        """Layer 2, whose sources are sums of the partial `rows` here and of peers'."""
        part, where = self._part(self.edges[1], second), self._where
        where[rows] = np.arange(rows.size, dtype=np.int32)
        give, take = list(second.gives), second.takes.copy()
        picks, ends = [], rows.size
        for peer, ids, its in zip(self.peers, asked, wanted, strict=True):
            if peer == self.me:
                picks.append(where[ids].astype(np.int64))
                continue
            give[peer], take[peer] = where[ids].astype(np.int64), its.size
            picks.append(np.arange(ends, ends + its.size))
            ends += its.size
        part.local, part.give, part.take, part.meets = rows.size, give, take, True
        places, into = (torch.from_numpy(np.concatenate(each)) for each in (picks, wanted))
        part.picks = Picks(places, ends, into, part.source.size)
        return part
