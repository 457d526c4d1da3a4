"""Where a strategy's batches come from: who draws them, and where lists and features are.

What every strategy on batches does before it trains on one: its operations follow from this, and so
does what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from gnnplan.planner.gnn.footprint import COUNTS_AT_ENDS, block
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.minibatch.adjacency_store import NEIGHBOUR, Lists
from gnnplan.planner.strategies.minibatch.device_sampler import finding
from gnnplan.planner.strategies.minibatch.feature_store import Features
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import Copy, Exchange, Op, Sampling
from gnnplan.planner.vocabulary.outer import Outer, Pairs
from gnnplan.planner.vocabulary.schedule import Compute

ID = 8  # [B]
# [B] that a GPU reads over the host link for one neighbour: two of the four sectors of a line
SECTOR = 64
CACHING = 0.75  # share of a GPU's memory for lists and features, if its sampler runs there


@dataclass(frozen=True, eq=False)
class Supply:
    """How ranks come by their batches.

    prefetch: samplers ahead of each rank; 0: it samples in line. store: which rows each GPU caches,
    and who provides the others. lists: where adjacency lists are; None: with every sampler. pushes:
    whether ranks send each other edges that they have drawn alone (P3).
    """

    problem: Problem
    batches: Batches
    prefetch: int
    store: Features
    lists: Lists | None
    pushes: bool = False

    @property
    def lays_there(self) -> bool:
        """Whether a GPU that draws lays out its blocks, too: it asks no other rank for anything."""
        alone = self.lists is None and not self.batches.splits and not self.pushes
        return self.problem.cluster.sampler == "device" and alone

    @property
    def lists_there(self) -> float:
        """Share of the adjacency lists in the memory of a GPU that samples.

        They have `CACHING` of it, less what cached features take. A GPU has all of its lists there
        or none; if GPUs have the lists between them, it may have some of them.
        """
        stats, lists, where = self.problem.stats, self.lists, self.problem.cluster
        if where.sampler == "host":
            return 0.0
        size = ID * (stats.edges + stats.vertices) / (len(set(lists.places)) if lists else 1)
        room = CACHING * where.device.memory - self.store.held(self.problem).max()
        return min(max(room, 0.0) / max(size, 1.0), 1.0) if lists else float(room >= size)

    @property
    def picks_there(self) -> bool:
        """Whether a GPU that has laid out a batch finds its rows among those that it caches."""
        store = self.store
        return store.caches and not store.asks.any() and self.problem.model.inputs.alike

    @property
    def is_plain(self) -> bool:
        """Whether every rank reads every row from its server's memory."""
        return not self.store.caches and not self.store.asks.any()

    @property
    def samplers(self) -> int:
        """Samplers of a rank that are at work at once; a GPU that samples is one."""
        return max(self.prefetch, 1) if self.problem.cluster.sampler == "host" else 1

    # -- operations ----------------------------------------------------------------------------

    def drawing(self, batch: MiniBatch, edges: np.ndarray) -> Iterator[Op]:
        """Sampling of ranks that split no batch: so many `edges` [ranks] of all layers.

        With spread lists, ranks draw layer by layer, for whoever asks.
        """
        workload, lists = self.problem.workload, self.lists
        if lists is None:
            yield self.sampled("draw", edges)
            yield from self.reading(edges)
            return
        others = Outer.of([0] * batch.ranks, True, 1)
        layers = range(workload.layers, 0, -1)
        for layer, fanout in zip(layers, workload.fanouts, strict=True):
            asked, given, drawn = lists.of(batch, layer, fanout)
            yield from told("ask_edges", asked, others, layer=layer, ahead="host")
            yield self.sampled("draw", drawn, layer)
            yield Op("edges", layer=layer, work=Exchange(given, NEIGHBOUR), ahead="host")

    def sampled(
        self, what: Literal["draw", "lay"], edges: np.ndarray, layer: int | None = None
    ) -> Op:
        """Work of samplers on so many edges [ranks]."""
        work = Sampling(what, edges, self.samplers)
        return Op(what, layer=layer, work=work, ahead="host")

    def reading(
        self,
        edges: np.ndarray,
        layer: int | None = None,
        ahead: Literal["host", "copy"] = "host",
    ) -> Iterator[Op]:
        """Reads of a GPU's sampler: neighbours in lists for which the GPU's memory has no room."""
        there = self.lists_there
        if self.problem.cluster.sampler == "device" and there < 1.0:
            read = np.rint(SECTOR * (1 - there) * edges).astype(np.int64)
            yield Op("read", layer=layer, work=Copy(read), ahead=ahead)

    def copied(self, batch: MiniBatch, facts: Sequence[LayerFacts]) -> Copy:
        """The copy of a batch to the ranks: rows of servers' memories, and what was laid out.

        The host packs edges first, but for those that a process samples, which are packed beside
        training. facts: of layers 1 .. L.
        """
        features, there = self.store.loads_of(self.problem, batch).host, self.lays_there
        if self.problem.cluster.rates_there:
            return Copy(features.astype(np.int64))
        laid = self._laid(facts)
        return Copy((features + laid).astype(np.int64), 0 if there or self.prefetch else laid)

    def _laid(self, facts: Sequence[LayerFacts]) -> np.ndarray:
        """Bytes [ranks] of a batch's edges, and of the ids of the rows that they join.

        A GPU is sent them; on a CPU they are where they were laid out. So is what a user's module
        makes of edges, if only when a layer reads it first. Of what a GPU has laid out, the host is
        sent the ids.
        """
        if self.lays_there:
            return np.asarray(np.rint(ID * facts[0].sources).astype(np.int64))
        model, nbytes = self.problem.model, np.zeros(self.problem.ranks)
        for spec, f in zip(model.layers, facts, strict=True):
            edges = f.edges if f.away is None else f.edges - spec.self_edges * f.away
            nbytes = nbytes + block(model, spec, f.rows, f.sources, edges) + COUNTS_AT_ENDS
        return np.asarray(np.rint(nbytes * model.on_gpu).astype(np.int64))

    def gathered(self, batch: MiniBatch) -> Iterator[Op]:
        """The operations that bring each rank its own rows of h_0 that no `load` brings.

        All ranks take part in an exchange if any of them may, so that they agree without a message.
        """
        store = self.store
        loads = store.loads_of(self.problem, batch)
        if store.caches:
            moved = 2 * loads.hits.astype(np.float64)  # read and written
            pick = Compute(elementwise_bytes=moved, launches=1)
            if self.lays_there and self.picks_there:
                pick = pick + finding(batch.facts(1))
            yield Op("pick", work=pick)
        if store.asks.any():
            yield from told("ask", loads.asked, store.asks)
            yield Op("fetch", work=Exchange(loads.fetched))

    def fill(self) -> Iterator[Op]:
        """The exchange before the first step: cached rows whose home is another server."""
        if self.store.caches and (sent := self.store.filled(self.problem)).any():
            yield Op("fill", work=Exchange(sent))

    def filling(self) -> dict[str, float]:
        """Seconds before the first step: to choose which rows are where, and to fill the caches."""
        if self.is_plain:
            return {}
        held = self.store.held(self.problem).astype(float)
        loaded_s = float(np.max(self.problem.cost.load_s(held)))
        return {"feature store": self.store.seconds + setup_s(self.problem, self.fill()) + loaded_s}


def told(
    op: str,
    counts: Pairs,
    among: Pairs,
    layer: int | None = None,
    ahead: Literal["", "host"] = "",
    itemsize: int = ID,
) -> Iterator[Op]:
    """Two exchanges: ranks tell each other how many numbers follow, and then the numbers.

    counts: how many [ranks, ranks]. among: whether the one tells the other [ranks, ranks].
    """
    yield Op(op, "n", layer, work=Exchange(among, ID), ahead=ahead)
    yield Op(op, layer=layer, work=Exchange(counts, itemsize), ahead=ahead)
