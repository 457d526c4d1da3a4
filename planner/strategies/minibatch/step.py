"""The operations of one mini-batch, for data parallelism and GSplit: sample, load, then the layers.

    a group per rank (data parallelism)
    host     |draw|lay|
    copy               |load|
    compute                 |forward 1 .. L|loss|backward L .. 1|            |update|
    reduce                                                       |all_reduce|

    groups that split a batch (GSplit)
    host     |draw L|ids L|draw L-1|ids L-1| .. |lay|
    copy                                             |load|
    comm                                                  |halo 1 (features)|  then graph parallel

    draw     a layer's edges are sampled
    ids      owners are told how many of their vertices the frontier has reached (8 bytes per
             peer), and then which (8 bytes each)
    push     where layer 1 is split by sources: its edges go to their sources' owners (4 bytes a
             number)
    lay      edges are laid out as blocks
    load     rows of features are copied to the device, and to a GPU also the blocks
    wait     with `prefetch` k, a batch is loaded while the one before trains, and k samplers of the
             rank make the k batches that follow, one each; a rank records its wait

Where a GPU samples for itself, `draw` and `lay` are its computation (device_sampler.py), edges stay
there, and `load` brings features and sends back the ids of rows.

With a feature store (feature_store.py) `load` brings the rows that are in the server's memory and
in no cache. More operations follow:

    compute        |pick|                rows of the GPU's own cache
    copy      |load|
    comm                |ask|fetch|      rows that other ranks provide, asked for by id: how many
                                         (8 bytes per rank), then which (8 bytes each)

With spread adjacency lists (adjacency_store.py) samplers ask each other for neighbours, layer by
layer. The layers' own operations come from layerwise/step.py; what is read from all of them is in
strategies/program/.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

import numpy as np

from gnnplan.planner.gnn.footprint import COUNTS_AT_ENDS, block
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.graph.sampling import count_items, per_epoch
from gnnplan.planner.ownership.estimated_batches import EstimatedBatch
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import Batches, MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.strategies.layerwise import step as layerwise
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.minibatch.adjacency_store import (
    NEIGHBOUR,
    EstimatedStructure,
    Structure,
)
from gnnplan.planner.strategies.minibatch.device_sampler import finding, sampled
from gnnplan.planner.strategies.minibatch.feature_store import EstimatedStore, Store, row_bytes
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import (
    Copy,
    Exchange,
    Op,
    Program,
    Sampling,
)
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.outer import Outer, Pairs
from gnnplan.planner.vocabulary.schedule import Compute

ID = 8  # [B]
# [B] that a GPU reads over the host link for one neighbour: two of the four sectors of a line
SECTOR = 64
CACHING = 0.75  # share of a GPU's memory for lists and features, if its sampler runs there
ROUNDED = 10**8  # [B] a proposed cache of this size or more has two digits
Features = Store | EstimatedStore
Lists = Structure | EstimatedStructure


def step(
    problem: Problem,
    batch: MiniBatch,
    options: ExchangeOptions,
    prefetch: int,
    store: Features | None = None,
    lists: Lists | None = None,
) -> Iterator[Op]:
    """The operations of one step, in order."""
    splits, layers = batch.splits, range(1, problem.workload.layers + 1)
    edges = {layer: batch.facts(layer).edges for layer in layers}
    in_all = np.sum(list(edges.values()), axis=0)
    there = lays_there(problem, splits, lists)
    is_counted = there and not problem.cluster.rates_there
    if is_counted:
        # a thread makes a batch and loads it, one after the other
        lane: Literal["host", "copy"] = "copy" if prefetch else "host"
        yield from sampled(problem, batch, lane)
        yield from reading(problem, in_all, store, lists, ahead=lane)
    elif not splits:
        yield from drawing(problem, batch, in_all, lists, store, prefetch)
    peers, at_work = Outer.of(batch.servers, True, 1), samplers(problem, prefetch)
    for layer in reversed(layers) if splits else ():
        drawn = batch.sampled(layer)
        yield Op("draw", layer=layer, work=Sampling("draw", drawn, at_work), ahead="host")
        yield from reading(problem, drawn, store, lists, layer)
        if batch.asks(layer):
            yield from told("ids", batch.facts(layer).returned, peers, layer=layer, ahead="host")
    if batch.pushed is not None:
        yield from told("push", batch.pushed, peers, ahead="host", itemsize=NEIGHBOUR)
    if not is_counted:
        yield Op("lay", work=Sampling("lay", in_all, at_work), ahead="host")
    loaded = store.loads_of(problem, batch).host if store else loaded_bytes(problem, batch)
    loads = copied(problem, loaded, list(map(batch.facts, layers)), prefetch, there)
    yield Op("load", work=loads, ahead="copy" if prefetch else "")
    if prefetch:
        # takes no time if the batch is there
        yield Op("wait", work=Compute(), idle=True)
    yield from gathered(problem, batch, store, there)
    if batch.meets(1) and problem.model.first_varying == 1:
        if isinstance(batch, EstimatedBatch):
            row_bytes = int(problem.features_bytes(np.zeros(1, np.int64))[0])
            yield Op("halo", "f", 1, work=Exchange(batch.facts(1).sends, row_bytes))
        else:
            yield Op("halo", "f", 1, work=Exchange(halo_bytes(problem, batch)))
    yield from layerwise.step(problem, batch, options, scored=batch.scored)


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


def lays_there(problem: Problem, splits: bool, lists: Lists | None) -> bool:
    """Whether a GPU that draws lays out its blocks as well: it asks no other rank for anything."""
    return problem.cluster.sampler == "device" and not splits and lists is None


def reading(
    problem: Problem,
    edges: np.ndarray,
    store: Features | None,
    lists: Lists | None,
    layer: int | None = None,
    ahead: Literal["host", "copy"] = "host",
) -> Iterator[Op]:
    """Reads of a sampler on a GPU: neighbours in lists for which the GPU's memory has no room."""
    on_gpu = lists_there(problem, store, lists)
    if problem.cluster.sampler == "device" and on_gpu < 1.0:
        read = np.rint(SECTOR * (1 - on_gpu) * edges).astype(np.int64)
        yield Op("read", layer=layer, work=Copy(read), ahead=ahead)


def lists_there(problem: Problem, store: Features | None, lists: Lists | None) -> float:
    """Share of the adjacency lists in the memory of a GPU that samples.

    They have `CACHING` of it, less what cached features take. A GPU has all of its lists there or
    none; if GPUs have the lists between them, it may have some of them.
    """
    if problem.cluster.sampler == "host":
        return 0.0
    size = (
        ID
        * (problem.stats.edges + problem.stats.vertices)
        / (len(set(lists.places)) if lists else 1)
    )
    room = CACHING * problem.cluster.device.memory - (store.held(problem).max() if store else 0)
    return min(max(room, 0.0) / max(size, 1.0), 1.0) if lists else float(room >= size)


def drawing(
    problem: Problem,
    batch: MiniBatch,
    edges: np.ndarray,
    lists: Lists | None,
    store: Features | None = None,
    prefetch: int = 0,
) -> Iterator[Op]:
    """Sampling of ranks that split no batch: so many `edges` [ranks] of all layers.

    With spread lists, ranks draw layer by layer, for whoever asks.
    """
    at_work = samplers(problem, prefetch)
    if lists is None:
        draws = Sampling("draw", edges, at_work)
        yield Op("draw", work=draws, ahead="host")
        yield from reading(problem, edges, store, None)
        return
    others = Outer.of([0] * batch.ranks, True, 1)
    for layer, fanout in zip(
        range(problem.workload.layers, 0, -1), problem.workload.fanouts, strict=True
    ):
        asked, given, drawn = lists.of(batch, layer, fanout)
        yield from told("ask_edges", asked, others, layer=layer, ahead="host")
        draws = Sampling("draw", drawn, at_work)
        yield Op("draw", layer=layer, work=draws, ahead="host")
        yield Op("edges", layer=layer, work=Exchange(given, NEIGHBOUR), ahead="host")


def picks_there(problem: Problem, store: Features) -> bool:
    """Whether a GPU that has laid out a batch finds its rows among those that it caches."""
    return store.caches and not store.asks.any() and not problem.model.nonzeros


def gathered(
    problem: Problem, batch: MiniBatch, store: Features | None, there: bool = False
) -> Iterator[Op]:
    """The operations that bring each rank its own rows of h_0 that no `load` brings.

    All ranks take part in an exchange if any of them may, so that they agree without a message.
    there: GPUs lay out their batches.
    """
    if store is None:
        return
    loads = store.loads_of(problem, batch)
    if store.caches:
        moved = 2 * loads.hits.astype(np.float64)  # read and written
        pick = Compute(elementwise_bytes=moved, launches=1)
        if there and picks_there(problem, store):
            pick = pick + finding(batch.facts(1))
        yield Op("pick", work=pick)
    if store.asks.any():
        yield from told("ask", loads.asked, store.asks)
        yield Op("fetch", work=Exchange(loads.fetched))


def samplers(problem: Problem, prefetch: int) -> int:
    """Samplers of a rank that are at work at once; a GPU that samples is one."""
    return max(prefetch, 1) if problem.cluster.sampler == "host" else 1


def fill(problem: Problem, store: Features | None) -> Iterator[Op]:
    """The exchange before the first step: cached rows whose home is another server."""
    if store and (sent := store.filled(problem)).any():
        yield Op("fill", work=Exchange(sent))


def filling(problem: Problem, store: Features | None) -> dict[str, float]:
    """Seconds before the first step: to choose which rows are where, and to fill the caches."""
    if store is None:
        return {}
    exchanged_s = setup_s(problem, fill(problem, store))
    loaded_s = float(np.max(problem.cost.load_s(store.held(problem).astype(float))))
    return {"feature store": store.seconds + exchanged_s + loaded_s}


def worth_caching(problem: Problem, plain: Strategy, columns: range | None = None) -> int:
    """Bytes of the cache to propose to a strategy that has none, per GPU.

    It is nine tenths of the memory that the strategy leaves, but no more than all rows need, or
    these `columns` of them. It is 0 on CPUs, where the cache would be in the memory that it spares.
    """
    if problem.cluster.device.kind == "cpu":
        return 0
    left = problem.cluster.device.memory - plain.most_memory(problem)
    vertices = problem.stats.vertices
    if problem.graph is None:
        all_rows = int(row_bytes(problem, np.arange(1), columns)[0]) * vertices
    else:
        all_rows = int(row_bytes(problem, np.arange(vertices), columns).sum())
    return max(0, min(in_two_digits(int(0.9 * left)), all_rows))


def in_two_digits(nbytes: int) -> int:
    """The size of a proposed cache, cut so that plans on any number of GPUs name one strategy."""
    return nbytes - nbytes % 10 ** (len(str(nbytes)) - 2) if nbytes >= ROUNDED else nbytes


def row_bytes_read(
    problem: Problem, batch: MiniBatch, ranks: Sequence[int], columns: range | None = None
) -> int:
    """Bytes of the features (all, or some columns) of these ranks' rows of h_0."""
    if isinstance(batch, EstimatedBatch):
        return int(
            batch.row_counts(0)[list(ranks)].sum()
            * problem.features_bytes(np.zeros(1, np.int64), columns)[0]
        )
    return sum(int(problem.features_bytes(batch.rows(rank, 0), columns).sum()) for rank in ranks)


def loaded_bytes(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Bytes of the features of each rank's own rows of h_0 [ranks]."""
    if isinstance(batch, EstimatedBatch):
        row_bytes = int(problem.features_bytes(np.zeros(1, np.int64))[0])
        return np.asarray(batch.row_counts(0) * row_bytes)
    return np.array([row_bytes_read(problem, batch, [rank]) for rank in range(batch.ranks)])


def copied(
    problem: Problem,
    features: np.ndarray,
    facts: Sequence[LayerFacts],
    prefetch: int,
    there: bool = False,
) -> Copy:
    """The copy of a batch to the ranks: `features` [ranks], bytes of rows, and what was laid out.

    The host packs edges first, but for those that a process samples, which are packed beside
    training. `there`, facts: as of `laid_bytes`.
    """
    if problem.cluster.rates_there:
        return Copy(features.astype(np.int64))
    laid = laid_bytes(problem, facts, there)
    return Copy((features + laid).astype(np.int64), 0 if there or prefetch else laid)


def laid_bytes(problem: Problem, facts: Sequence[LayerFacts], there: bool = False) -> np.ndarray:
    """Bytes [ranks] of a batch's edges, and of the ids of the rows that they join.

    A GPU is sent them; on a CPU they are where they were laid out. So is what a user's module makes
    of edges, if only when a layer reads it first. Of what was laid out `there`, on the GPU, the
    host is sent the ids. facts: of layers 1 .. L.
    """
    model, nbytes = problem.model, np.zeros(problem.ranks)
    if there:
        return np.asarray(np.rint(nbytes + ID * facts[0].sources).astype(np.int64))
    for spec, f in zip(model.layers, facts, strict=True):
        edges = f.edges if f.away is None else f.edges - spec.self_edges * f.away
        laid = block(model, spec, f.rows, f.sources, edges)
        nbytes = nbytes + laid + COUNTS_AT_ENDS
    return np.asarray(np.rint(nbytes * model.on_gpu).astype(np.int64))


def halo_bytes(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Bytes of the features that cross before layer 1 [ranks, ranks]."""
    sent = np.zeros((batch.ranks,) * 2, dtype=np.int64)
    for rank in range(batch.ranks):
        piece = batch.piece(rank, 1)
        # halo rows are sorted by sender; reduceat gives a wrong sum where there are none
        starts = np.concatenate([[0], np.cumsum(piece.received)[:-1]])
        row_sizes = np.append(problem.features_bytes(piece.halo), 0)
        sent[:, rank] = np.add.reduceat(row_sizes, starts) * (piece.received > 0)
    return sent


def program(
    problem: Problem,
    batches: Batches,
    options: ExchangeOptions,
    prefetch: int,
    store: Features | None = None,
    lists: Lists | None = None,
) -> Program:
    """A step for each mini-batch."""
    there = lays_there(problem, batches.splits, lists)

    @cache
    def step_on(batch: MiniBatch) -> list[Op]:
        return list(step(problem, batch, options, prefetch, store, lists))

    return Program(
        batches.first,
        batches.steps,
        batches.at,
        step_on,
        lambda: fill(problem, store),
        # one batch is loaded, so many are made; a GPU makes the one that is loaded
        lead=min(prefetch, 1) if there else prefetch and prefetch + 1,
        samplers=samplers(problem, prefetch),
    )


def check(problem: Problem) -> None:
    """Raises SpecError if the problem has no mini-batches for its ranks."""
    workload = problem.workload
    other = "use another graph" if workload.task == "link" else "use --mode full"
    check_batches(workload, problem.stats, problem.ranks, other)


def check_batches(w: Workload, stats: GraphStats, ranks: int, without: str) -> None:
    """Raises SpecError if the graph has no such batches for so many ranks.

    `without`: the remedy if the graph has no training vertices.
    """
    items = count_items(w, stats)
    each, name = ("an edge", "edges") if w.task == "link" else ("a seed", "training vertices")
    if not items:
        raise SpecError(f"mini-batches are drawn from {name}, and {stats.name} has none; {without}")
    if w.batch > items:
        raise SpecError(
            f"a batch is at most the {name} (batch: {w.batch:,}, {name}: {items:,}); use --batch"
            f" {items}"
        )
    if w.batch < ranks:
        raise SpecError(
            f"a batch has {each} for every rank (batch: {w.batch}, ranks: {ranks}); use --batch"
            f" {ranks} or more, or fewer ranks"
        )


def steps(problem: Problem) -> int:
    """Batches of an epoch."""
    return per_epoch(problem.workload, problem.stats)
