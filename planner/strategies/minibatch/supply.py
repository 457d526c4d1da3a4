"""The supply of batches: samplers, the places of lists and features, and the memory of all this.

A supply has the operations before the training on a batch: sampling, and loading of features. It
also has the memory of ranks, the peak over the known batches: a batch's features, blocks and
activations (layerwise/step.py), the blocks of prefetched batches, the cache of the feature store,
and the data of evaluation. Graph data are in the servers' memories; ranks of a server share one
copy:

    features    all rows, or the rows spread to the server; P3: the columns of the server's ranks
    lists       all adjacency lists, or those spread to or cached at the server; offsets and degrees
                of all vertices
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from gnnplan.planner.cluster.compute import SECTOR
from gnnplan.planner.gnn.model import COUNTS_AT_ENDS, block_bytes, structure_work
from gnnplan.planner.gnn.trace import PIECES
from gnnplan.planner.graph.part_folder import PartGraph
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.step import blocks_bytes, constant_bytes
from gnnplan.planner.strategies.minibatch.adjacency_store import ENTRY, NEIGHBOUR, Lists, bytes_at
from gnnplan.planner.strategies.minibatch.feature_store import HOST, Features, Loads
from gnnplan.planner.strategies.program.account import Memory, Resident, machine_code
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import Copy, Exchange, Op, Sampling
from gnnplan.planner.vocabulary.numbers import Outer, RankMatrix, grouped, numbered
from gnnplan.planner.vocabulary.schedule import Compute, HostWork

ID = 8  # bytes of a vertex's id
# bytes on the host link for one neighbour that a GPU reads: a sector, and as many of headers
READ = 2 * SECTOR
LOOKED_UP = 164  # bytes that a GPU reads and writes to find a row in its cache, and to sort misses
# Calls with which a rank picks a batch's rows and opens the worker that trains on it. On a CPU, of
# which Tolokers' batches of narrow rows tell (0.24 ms on a core of an AMD EPYC, 2026-11-30); and
# with a GPU, to which it also packs and copies the blocks (assumed).
OPENING = {"cpu": 10, "cuda": 100}
# Time to find a row in a folder of parts, in times to draw an edge: its owner, its place, and the
# row in pages of the file. From one graph of 10^8 edges on an AMD EPYC, 2026-11-30.
IN_PARTS = 1.4
# Time to split off a pushed edge for its owner and put it in its place there, with the partial sums
# in theirs, in times to lay out an edge. From 15 runs on six graphs on an AMD EPYC, 2026-11-29.
RELAID = 2
# Time to find a frontier row's owner, and its place among the owner's rows, in times to draw an
# edge. From seven graphs, as above.
OWNED = 0.75
CACHING = 0.75  # share of a GPU's memory for lists and features, if the GPU samples

PLACE = 8  # bytes of an edge's position in the order of an epoch
PLACE_IN_CACHE = 4  # bytes of a vertex's position in the cache, on a GPU that lays out its batches
PLACE_AMONG_SOURCES = 4  # bytes of a vertex's position among a layer's sources


@dataclass(frozen=True, eq=False)
class Supply:
    """The sampling of batches, and the places of lists and features.

    prefetch: number of samplers of each rank; 0: the rank samples in line.
    store: which rows each GPU caches, and which rank provides the others.
    lists: the places of adjacency lists; None: every sampler has all lists.
    pushes: whether ranks send each other the edges that they have sampled (P3).
    """

    problem: Problem
    batches: Batches
    prefetch: int
    store: Features
    lists: Lists | None
    pushes: bool

    @property
    def lays_there(self) -> bool:
        """Whether a GPU both samples and lays out blocks, which needs no data of other ranks."""
        alone = self.lists is None and not self.batches.splits and not self.pushes
        return self.problem.cluster.sampler == "device" and alone

    @property
    def lists_there(self) -> float:
        """The share of a GPU's adjacency lists that are in the memory of the GPU, if it samples.

        Lists have `CACHING` of the memory, minus cached features. If every GPU needs all lists, all
        or none are in its memory; if lists are spread, some of them may be.
        """
        stats, lists, cluster = self.problem.stats, self.lists, self.problem.cluster
        if cluster.sampler == "host":
            return 0.0
        size = ID * (stats.edges + stats.vertices) / (len(set(lists.places)) if lists else 1)
        room = CACHING * cluster.device.memory - self.store.held(self.problem).max()
        return min(max(room, 0.0) / max(size, 1.0), 1.0) if lists else float(room >= size)

    @property
    def draws_there(self) -> bool:
        """Whether a GPU draws neighbours, which needs all of its lists there.

        Sampler processes always draw on the host, since a fork cannot use CUDA.
        """
        return self.lists_there == 1.0 and (self.lays_there or not self.prefetch)

    @property
    def picks_there(self) -> bool:
        """Whether a GPU that lays out blocks also looks up a batch's rows in its cache."""
        store, is_dense = self.store, self.problem.model.inputs.is_dense
        return self.lays_there and store.caches and not store.asks.any() and is_dense

    def loads(self, batch: MiniBatch) -> Loads:
        """Return the sources of a batch's rows, from the problem's cache."""
        question = "loads", self.store, batch
        return self.problem.cache.get(question, lambda: self.store.loads(self.problem, batch))

    @property
    def is_plain(self) -> bool:
        """Whether every rank reads every row from its server's memory."""
        return not self.store.caches and not self.store.asks.any()

    @property
    def samplers(self) -> int:
        """The number of samplers of a rank that work at the same time; a GPU counts as one."""
        return max(self.prefetch, 1) if self.problem.cluster.sampler == "host" else 1

    # -- operations ----------------------------------------------------------------------------

    def sampling(
        self,
        batch: MiniBatch,
        facts: Sequence[LayerCounts],
        pushed: RankMatrix | None,
        peers: RankMatrix,
    ) -> Iterator[Op]:
        """Yield the operations of samplers on a batch.

        facts: counts of layers 1 .. L, of the edges that each rank lays out. pushed: as
        `MiniBatch.pushed`. peers: 1 for every two ranks that may send each other ids or edges
        [ranks, ranks].
        """
        layers, specs = range(1, batch.layers + 1), self.problem.model.layers
        # whether a GPU's sampling is counted as computation; some clusters have a measured rate
        if self.lays_there and not self.problem.cluster.device_sampler_rates:
            # one thread samples a batch and then loads it
            yield from self._sampled_there(batch, "copy" if self.prefetch else "host")
            return
        if not batch.splits:
            yield from self._drawing(batch)
        for layer in reversed(layers) if batch.splits else ():
            drawn, asks = batch.sampled(layer), batch.asks(layer)
            yield self._sampled("draw", drawn + OWNED * asks * batch.facts(layer).sources, layer)
            yield from self._reading(drawn, layer)
            if asks:
                ids = batch.facts(layer).sends.T
                yield from sized_exchange("ids", ids, peers, layer=layer, ahead="host")
        if pushed is not None:
            yield from sized_exchange("push", pushed, peers, ahead="host", itemsize=NEIGHBOUR)
        # edges of 'mean' are the unit: others have self edges or other weights
        weights = [LAID[spec.edges][0] / LAID["mean"][0] for spec in specs]
        laid = np.sum([w * f.edges for w, f in zip(weights, facts, strict=True)], axis=0)
        relaid = 0 if batch.pushed is None else RELAID * batch.sampled(1)
        yield self._sampled("lay", laid + relaid)

    def _drawing(self, batch: MiniBatch) -> Iterator[Op]:
        """Yield the sampling of a batch that ranks do not split.

        With spread lists, ranks draw layer by layer, also for other ranks.
        """
        workload, lists = self.problem.workload, self.lists
        layers = range(workload.layers, 0, -1)
        if lists is None:
            edges = np.sum([batch.facts(layer).edges for layer in reversed(layers)], axis=0)
            yield self._sampled("draw", edges)
            yield from self._reading(edges)
            return
        others = Outer.of([0] * batch.ranks, True, 1)
        for layer, fanout in zip(layers, workload.fanouts, strict=True):
            asked, sent, drawn = lists.of(batch, layer, fanout)
            yield from sized_exchange("ask_edges", asked, others, layer=layer, ahead="host")
            yield self._sampled("draw", drawn, layer)
            yield Op("edges", layer=layer, work=Exchange(sent, NEIGHBOUR), ahead="host")

    def _sampled(self, what: HostWork, edges: np.ndarray, layer: int | None = None) -> Op:
        """Return the operation of samplers that draw or lay out these numbers of edges [ranks]."""
        layers = self.problem.workload.layers if layer is None else 1
        work = Sampling(what, edges, self.samplers, layers, self.problem.stats.vertices)
        return Op(what, layer=layer, work=work, ahead="host")

    def _sampled_there(self, batch: MiniBatch, lane: Literal["host", "copy"]) -> Iterator[Op]:
        """Yield sampling and layout, by its GPU, of a batch that a rank does not share with others.

        lane: the lane for work ahead of the step.
        """
        layers = self.problem.model.layers
        edges = [batch.facts(layer).edges for layer in range(1, len(layers) + 1)]
        drawn = DRAWN * np.sum(edges, axis=0)
        laid = sum(LAID[spec.edges][0] * each for spec, each in zip(layers, edges, strict=True))
        for name, nbytes, launches in zip(("draw", "lay"), (drawn, laid), LAUNCHES, strict=True):
            work = Compute(elementwise_bytes=np.asarray(nbytes), launches=len(layers) * launches)
            yield Op(name, work=work, ahead=lane)
        yield from self._reading(np.sum(edges, axis=0), ahead=lane)

    def _reading(
        self,
        edges: np.ndarray,
        layer: int | None = None,
        ahead: Literal["host", "copy"] = "host",
    ) -> Iterator[Op]:
        """Yield the reads of a GPU's sampler from lists in the server's memory, if any."""
        share = self.lists_there
        if self.problem.cluster.sampler == "device" and share < 1.0:
            nbytes = np.rint(READ * (1 - share) * edges).astype(np.int64)
            yield Op("read", layer=layer, work=Copy(nbytes), ahead=ahead)

    def copied(self, batch: MiniBatch, facts: Sequence[LayerCounts]) -> Copy:
        """Return the copy of a batch to its ranks: rows of servers' memories, and blocks.

        The host packs the blocks first, unless a sampler process packs them during training.
        facts: counts of layers 1 .. L.
        """
        problem, loads, on_device = self.problem, self.loads(batch), self.lays_there
        features = loads.host
        if problem.cluster.device_sampler_rates:
            return Copy(features.astype(np.int64))
        blocks = self._block_bytes(facts)
        packed = 0.0 * blocks if on_device or self.prefetch else blocks
        opening = OPENING[problem.cluster.device.kind]
        for spec, f in zip(problem.model.layers, facts, strict=True):
            structure = structure_work(problem.model, spec, f.rows, f.sources, f.edges)
            packed, opening = packed + structure[0], opening + structure[1]
        in_parts = isinstance(problem.graph, PartGraph)
        search = IN_PARTS * loads.rows[:, HOST] if in_parts else 0.0
        nbytes = (features + blocks).astype(np.int64)
        return Copy(nbytes, packed, opening, search, problem.stats.vertices, problem.on_cpu)

    def _block_bytes(self, facts: Sequence[LayerCounts]) -> np.ndarray:
        """Return the bytes of a batch's blocks that are copied to a GPU [ranks].

        They include the ids of rows, and tensors that a user's module derives from edges, although
        these are computed when a layer first reads them. Nothing is copied on a CPU. If a GPU lays
        out the batch, only the ids of rows are copied, to the host.
        """
        if self.lays_there:
            return np.asarray(np.rint(ID * facts[0].sources).astype(np.int64))
        model, nbytes = self.problem.model, np.zeros(self.problem.ranks)
        for spec, f in zip(model.layers, facts, strict=True):
            edges = f.edges if f.remote_own is None else f.edges - spec.self_edges * f.remote_own
            nbytes = nbytes + block_bytes(model, spec, f.rows, f.sources, edges) + COUNTS_AT_ENDS
        return np.asarray(np.rint(nbytes * model.on_gpu).astype(np.int64))

    def gathered(self, batch: MiniBatch) -> Iterator[Op]:
        """Yield the operations that provide rows of h_0 from caches and from other ranks.

        All ranks take part in an exchange if any rank may need it, so that they need no message to
        agree on it.
        """
        store, loads = self.store, self.loads(batch)
        if store.caches:
            hits, host = loads.hits.astype(np.float64), loads.host.astype(np.float64)
            if self.picks_there:
                moved, launches = 2 * (hits + 2 * host) + LOOKED_UP * batch.facts(1).sources, 6
            else:  # cached rows are gathered, then all rows are put in their order
                moved, launches = 2 * (hits + (hits + host) * (host * hits > 0)), 1
            yield Op("pick", work=Compute(elementwise_bytes=moved, launches=launches))
        if store.asks.any():
            yield from sized_exchange("ask", loads.asked, store.asks)
            yield Op("fetch", work=Exchange(loads.fetched))

    def fill(self) -> Iterator[Op]:
        """Yield the exchange before the first step, of cached rows from other servers, if any."""
        if self.store.caches and (sent := self.store.filled(self.problem)).any():
            yield Op("fill", work=Exchange(sent))

    def filling(self) -> dict[str, float]:
        """Return the seconds before the first step: to place rows, and to fill the caches."""
        if self.is_plain:
            return {}
        caches = self.store.held(self.problem).astype(float)
        loaded_s = float(np.max(self.problem.cost.load_s(caches)))
        return {"feature store": self.store.seconds + setup_s(self.problem, self.fill()) + loaded_s}

    # -- memory --------------------------------------------------------------------------------

    def resident(self) -> Resident:
        """Return what ranks have besides a step's tensors and graph data in servers' memories.

        A sampler in line is done before the step, which needs more memory in all known cases.
        """
        problem, store, on_cpu = self.problem, self.store, self.problem.on_cpu
        features = self.peak(partial(constant_bytes, problem))
        graph = self.peak(partial(blocks_bytes, problem))
        elsewhere = buffers = 0.0 * features
        if not self.is_plain:
            elsewhere = features + self.peak(self._arriving)
        if self.prefetch:  # sampler processes have their own memory, and the next batch is loaded
            if self.lays_there:
                sampling = self.peak(partial(held_by_sampler, problem))
                buffers = np.maximum(sampling - graph, 0.0)
            features = 2.0 * features
            graph = graph * (2 + self.prefetch * on_cpu)
        cache = 0.0 * features + store.held(problem)
        if self.picks_there:
            cache = cache + PLACE_IN_CACHE * problem.stats.vertices
        lists = self.lists_held()
        data = {"features": features, "cache": cache, "graph": graph, "lists": lists}
        return Resident(
            data | {"buffers": buffers}, code=machine_code(problem, PIECES), elsewhere=elsewhere
        )

    def peak(self, nbytes: Callable[[MiniBatch], np.ndarray]) -> np.ndarray:
        """Return the largest number of bytes over all known batches [ranks]."""
        distinct = dict.fromkeys(self.batches.first())  # estimated batches are equal
        return np.asarray(np.max([nbytes(batch) for batch in distinct], axis=0))

    def lists_held(self) -> np.ndarray:
        """Return the bytes of adjacency data in a rank's own memory, from which its sampler draws
        [ranks].

        On a CPU: degrees, the position of each vertex among the sources, the order of an epoch's
        edges for link prediction, and the rank's copy of spread lists, or of all lists if they come
        from a folder of parts. Sampler processes share a rank's degrees and copy. With a GPU all
        data are in the server's memory, unless the GPU samples and has room for all of its lists.
        """
        problem, lists, inline = self.problem, self.lists, not self.prefetch
        stats, ranks = problem.stats, range(problem.ranks)
        degrees = ENTRY * (1 + stats.directed) * stats.vertices
        copied = np.array([bytes_at(problem, lists, [rank]) for rank in ranks]) - degrees
        if not problem.on_cpu:
            return copied * self.draws_there
        order = PLACE * stats.edges * (1 + inline) * (problem.workload.task == "link")
        own = degrees + PLACE_AMONG_SOURCES * stats.vertices * inline + order
        return own + copied * (lists is not None or isinstance(problem.graph, PartGraph))

    def _arriving(self, batch: MiniBatch) -> np.ndarray:
        """Return the bytes of row buffers during loading, besides the batch's features [ranks]."""
        loads = self.loads(batch)
        buffers = loads.host + loads.hits + loads.fetched.sum(0) + loads.fetched.sum(1)
        return np.asarray(buffers, dtype=float)

    def _on_host(self, batch: MiniBatch) -> np.ndarray:
        """Return the bytes of drawn edges, and the peak while layers are laid out in turn [ranks].

        For the current layer, per edge: positions (4 bytes), numbers sorted by source (12) and a
        copy for the block (12). Then, besides positions and the block, its weights: the edge's
        reader (4) and a weight in both orders; GCN's weights are float64 first (8), with a factor
        per edge (8) and a mask of self edges (1). Per source: ids, degrees and offsets (72). Blocks
        of earlier layers stay.
        """
        model, peak, finished, drawn = self.problem.model, *np.zeros((3, self.problem.ranks))
        for layer, spec in enumerate(model.layers, 1):
            f = batch.facts(layer)
            weighing = 20 + 2 * model.itemsize + 17 * spec.self_edges
            each = max(28, weighing * spec.weighs_edges)
            edges = f.edges + f.rows if spec.self_edges else f.edges
            peak = np.maximum(peak, finished + each * edges + 72 * f.sources)
            finished = finished + block_bytes(model, spec, *f.sizes)
            drawn = drawn + 4 * batch.sampled(layer)
        return np.asarray(drawn + 2 * self.problem.stats.vertices + peak)

    def on_host(self) -> Memory:
        """Return the bytes in each server's memory of adjacency lists, offsets and degrees, and of
        sampler processes with their finished batches [servers]."""
        problem, stats = self.problem, self.problem.stats
        servers = numbered(problem.servers)
        ranks_at = grouped(range(problem.ranks), servers.__getitem__).values()
        use = {"lists": np.array([bytes_at(problem, self.lists, ranks) for ranks in ranks_at])}
        if isinstance(problem.graph, PartGraph):  # each rank gathers lists of its own
            use["lists"] = use["lists"] * [len(ranks) for ranks in ranks_at]
        if self.prefetch and not self.lays_there:
            links = problem.workload.task == "link"
            positions = PLACE_AMONG_SOURCES * stats.vertices + links * PLACE * stats.edges
            each = self.prefetch * (self.peak(self._on_host) + positions)
            use["batches"] = np.bincount(servers, weights=each)
        return use


def sized_exchange(
    op: str,
    counts: RankMatrix,
    among: RankMatrix,
    layer: int | None = None,
    ahead: Literal["", "host"] = "",
    itemsize: int = ID,
) -> Iterator[Op]:
    """Yield two exchanges: of the lengths of messages, and then of the messages' numbers.

    counts: how many numbers rank i sends to rank j [ranks, ranks]. among: whether rank i may send
    to rank j [ranks, ranks].
    """
    yield Op(op, "n", layer, work=Exchange(among, ID), ahead=ahead)
    yield Op(op, layer=layer, work=Exchange(counts, itemsize), ahead=ahead)


# -- sampling on a GPU -----------------------------------------------------------------------------

# Its work and memory, as executor/minibatch/device_sampling.py samples:
#
#     draw     random numbers for a layer's rows, a sort of the ids of rows and neighbours, and
#              reads of adjacency lists
#     lay      a block's edges by destination, and by source after a sort
#
# Work is priced like computation, by launches and by bytes per edge, which are means over batches
# of five graphs with fanouts of 5 to 25 (bytes vary by 20 %). No constant is fitted to a published
# figure. Ranks that ask each other (GSplit, spread lists, P3) draw on their GPUs, and lay out on
# the host.

DRAWN = 790.0  # bytes that are read and written to draw an edge
DRAWING = 48  # peak of temporary memory per row and edge drawn [B]
# kind of a layer's edges (executor/layers/layer.py) -> bytes that are read and written to lay out
# an edge, and peak of temporary memory per edge [B]
LAID = {"one": (155.0, 40), "loop": (295.0, 56), "mean": (210.0, 40), "gcn": (610.0, 68)}
LAUNCHES = 100, 20  # launches to draw a layer, with waits for the GPU, and to lay it out


def held_by_sampler(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Return the peak bytes of a sampler, with the blocks that it builds [ranks]."""
    layers = list(enumerate(problem.model.layers, 1))
    peak = kept = np.zeros(problem.ranks)  # kept: positions, ids and offsets of drawn layers
    for layer, _ in reversed(layers):
        f = batch.facts(layer)
        peak = np.maximum(peak, kept + DRAWING * (f.rows + f.edges))
        kept = kept + 4 * f.edges + 4 * f.sources + 8 * f.rows
    for layer, spec in layers:
        f = batch.facts(layer)
        peak = np.maximum(peak, kept + LAID[spec.edges][1] * (f.edges + spec.self_edges * f.rows))
        kept = kept + block_bytes(problem.model, spec, *f.sizes)
    return np.asarray(peak)


def all_rows_bytes(problem: Problem, sizes: Callable[[Ids], np.ndarray]) -> int:
    """Return the bytes of all vertices' rows; sizes: ids -> bytes of their rows."""
    n = problem.stats.vertices
    return (
        int(sizes(np.zeros(1, np.int64))[0]) * n
        if problem.graph is None
        else int(sizes(np.arange(n)).sum())
    )
