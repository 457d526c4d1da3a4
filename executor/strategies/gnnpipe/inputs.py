"""Constant inputs of the first stage: features, and the results of layer 1 on them.

Layer 1 reads features in one of three ways. Sparse features are gathered once for each chunk.
Dense features without dropout are aggregated once. Other dense features are prepared (dropout) at
the beginning of every step. Features are never historical.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import features
from gnnplan.executor.layers.layer import Drop, no_dropout
from gnnplan.executor.layers.models import Net
from gnnplan.executor.ranks.rank import Rank
from gnnplan.executor.strategies.gnnpipe.chunks import Chunk
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.schedule import Label


class Inputs:
    """The features of a rank of the first stage."""

    def __init__(
        self, rank: Rank, problem: Problem, net: Net, chunks: Sequence[Chunk], kept: Ids, own: int
    ) -> None:
        """kept: global ids of the rows that the rank keeps. own: number of own rows, the first."""
        self.net, self.chunks = net, chunks
        exchanges = [(chunk, chunk.exchange) for chunk in chunks if chunk.exchange]
        # of the halo, if layer 1 reads it: fetched once
        self.fetched = exchanges if problem.model.first_varying > 0 else []
        self.features = self._load(rank, problem, kept, own)
        self.by_chunk: list[Tensor] = []  # chunks' source rows, if only a product reads features
        if problem.model.rows(1).multiplied_first:
            self.by_chunk = [self.features.index_select(0, chunk.sources) for chunk in chunks]
            self.features = torch.empty(0)  # `by_chunk` replaces it
        self.aggregated: list[Tensor] = []  # by chunk, if the aggregate is constant
        if problem.model.aggregate_cached(1):
            self.aggregated = [chunk.gather(net.layer(1), self.features) for chunk in chunks]
        # other dense features are prepared here in every step, unless a layer does so itself
        plain = net.encoder is None and not net.layer(1).reads_whole
        self.is_prepared = plain and not (self.by_chunk or self.aggregated)
        self.prepared = torch.empty(0)

    def _load(self, rank: Rank, problem: Problem, kept: Ids, own: int) -> Tensor:
        """Load features of own rows, and of the halo if layer 1 reads it."""
        graph = problem.data
        rows = features(graph, kept[:own], problem.workload, rank.device)
        outgoing = [exchange.pack(rows[chunk.rows]) for chunk, exchange in self.fetched]
        if not outgoing:
            return rows
        with rank.recorder.sending(
            Label("input_halo", -1), "comm", sum(each.nbytes for each in outgoing)
        ):
            halo = [
                exchange.forward(packed, lengths=graph.lengths(kept[chunk.halo]))
                for (chunk, exchange), packed in zip(self.fetched, outgoing, strict=True)
            ]
        return torch.cat([rows, *halo])

    def prepare(self, drop: Drop) -> None:
        """Apply a step's dropout to features, if layer 1 reads prepared features."""
        if self.is_prepared:
            self.prepared = self.net.layer(1).prepare(self.features, drop)

    def encode(self, chunk: Chunk, drop: Drop) -> Tensor:
        """Return the encoder's output for a chunk's own rows, with autograd graph."""
        return self.net.encode(self.features[chunk.rows], drop)

    def first_layer(self, c: int, drop: Callable[[Tensor], Drop]) -> Tensor:
        """Return layer 1's output for chunk c. drop: places -> dropout of the rows there."""
        chunk, layer, relu = self.chunks[c], self.net.layer(1), self.net.relu_after(1)
        if self.by_chunk or layer.reads_whole:
            rows = (
                self.by_chunk[c] if self.by_chunk else self.features.index_select(0, chunk.sources)
            )
            block, dropped = chunk.blocks[layer.edges], drop(chunk.sources)
            out: Tensor = layer(block, rows, dropped, None, relu)
            return out
        own = self.features[chunk.rows]
        if self.aggregated:
            return layer.update(self.aggregated[c], own, own, None, relu)
        gathered = chunk.gather(layer, self.prepared)
        return layer.update(gathered, self.prepared[chunk.rows], own, None, relu)

    def first_layer_exactly(self) -> Tensor:
        """Return layer 1's output for all own rows, without dropout."""
        self.prepare(no_dropout)
        return torch.cat(
            [self.first_layer(c, lambda _: no_dropout) for c in range(len(self.chunks))]
        )
