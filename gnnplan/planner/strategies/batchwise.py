"""A mini-batch step that data parallel and GSplit share: sample, load, then layer after layer as on a full graph.

    one group per rank (data parallel)     host     |draw|lay|
                                           copy               |load|
                                           compute                 |forward 1 .. L|loss|backward L .. 1|            |update|
                                           reduce                                                       |all_reduce|

    groups that split a batch (GSplit)     host     |draw L|ids L|draw L-1|ids L-1| .. |lay|
                                           copy                                             |load|
                                           comm                                                  |halo 1 (features)|  then as graph parallel

`draw` makes a layer's edges, `ids` tells owners which of their vertices the frontier has reached (8 bytes each, and as much per
peer for how many), `lay` makes blocks of them. All of it may be done ahead: with `prefetch` p a sampler of its own is up to p
batches further, and a rank that has to wait for it says so (`wait`).

With a feature store (planner/store.py) `load` is of the rows that are in the server's memory and no cache, and more follows it:

    compute        |pick|                what its GPU caches
    copy      |load|
    comm                |ask|fetch|      rows that other ranks provide, asked for by id (8 bytes each, and per rank for how many)

With a structure that is spread (planner/structure.py) samplers who lack lists ask for neighbours, layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gnnplan.planner.cost import Number
from gnnplan.planner.errors import SpecError
from gnnplan.planner.expected import EstimatedBatch
from gnnplan.planner.graph import GraphStats
from gnnplan.planner.job import Job
from gnnplan.planner.minibatch import Batches, MiniBatch, per_epoch
from gnnplan.planner.schedule import Compute, Schedule
from gnnplan.planner.specs import Workload
from gnnplan.planner.store import EstimatedStore, Store, row_bytes
from gnnplan.planner.strategies import layerwise
from gnnplan.planner.strategies.layerwise import Manner, Op
from gnnplan.planner.strategies.strategy import Prediction, Strategy
from gnnplan.planner.structure import NEIGHBOUR, EstimatedStructure, Structure

ID = 8  # [B]
SECTOR = 64  # [B] that a GPU reads of a server's memory for a neighbour anywhere in it: two sectors of 32 bytes, of a line of four
CACHING = 0.75  # of a GPU's memory for lists and features, where its sampler runs there
Features = Store | EstimatedStore
Lists = Structure | EstimatedStructure


def step(job: Job, batch: MiniBatch, how: Manner, prefetch: int, store: Features | None = None, lists: Lists | None = None
         ) -> Iterator[Op]:  # fmt: skip
    """The operations of one step in order."""
    splits, layers = batch.meets(1), range(1, job.workload.layers + 1)
    edges = {layer: batch.facts(layer).edges for layer in layers}
    in_all = np.sum(list(edges.values()), axis=0)
    if not splits:
        yield from drawing(job, batch, in_all, lists, store)
    for layer in reversed(layers) if splits else ():
        yield Op("draw", layer=layer, host=("draw", edges[layer]), ahead=True)
        yield from reading(job, edges[layer], store, lists, layer)
        yield Op("ids", layer=layer, sent=ID * (batch.facts(layer).sends.T + peers(batch)), ahead=True)
    yield Op("lay", host=("lay", in_all), ahead=True)
    if prefetch:
        yield Op("wait", work=Compute(), idle=True)  # takes no time where the sampler is fast enough
    if store is None:
        yield Op("load", loaded=loaded_bytes(job, batch))
    else:
        yield from arrive(job, batch, store)
    if splits and job.model.first_varying == 1:
        yield Op("halo", "f", 1, sent=halo_bytes(job, batch))
    yield from layerwise.step(job, batch, how)


def reading(job: Job, edges: np.ndarray, store: Features | None, lists: Lists | None, layer: int | None = None) -> Iterator[Op]:
    """Neighbours that a sampler on a GPU draws from lists in the server's memory: those that its own has no room for."""
    there = lists_there(job, store, lists)
    if job.cluster.sampler == "device" and there < 1.0:
        yield Op("read", layer=layer, loaded=np.rint(SECTOR * (1 - there) * edges).astype(np.int64), ahead=True)


def lists_there(job: Job, store: Features | None, lists: Lists | None) -> float:
    """Share of the lists that is in the memory of a GPU that samples: three quarters of it beside cached features. Lists with all of a
    group are there or not; those that its GPUs have between them, in part."""
    if job.cluster.sampler == "host":
        return 0.0
    size = ID * (job.stats.edges + job.stats.vertices) / (len(set(lists.places)) if lists else 1)
    room = CACHING * job.cluster.device.memory - (store.held(job).max() if store else 0)
    return min(max(room, 0.0) / max(size, 1.0), 1.0) if lists else float(room >= size)


def drawing(job: Job, batch: MiniBatch, edges: np.ndarray, lists: Lists | None, store: Features | None = None) -> Iterator[Op]:
    """Ranks that split no batch draw so many edges [ranks] of all layers, each its own; or, of lists that are spread, layer by layer those
    of whoever asks."""
    if lists is None:
        yield Op("draw", host=("draw", edges), ahead=True)
        yield from reading(job, edges, store, None)
        return
    others = ~np.eye(batch.ranks, dtype=bool)
    for layer, fanout in zip(range(job.workload.layers, 0, -1), job.workload.fanouts, strict=True):
        asked, drawn = lists.of(batch, layer, fanout)
        yield Op("ask_edges", layer=layer, sent=ID * (asked + others), ahead=True)
        yield Op("draw", layer=layer, host=("draw", drawn.sum(0)), ahead=True)
        yield Op("edges", layer=layer, sent=NEIGHBOUR * drawn.T * others, ahead=True)


def arrive(job: Job, batch: MiniBatch, store: Features) -> Iterator[Op]:
    """The operations that bring each rank its own rows of h_0. All ranks ask where any may, so that they agree without a word."""
    loads = store.loads_of(job, batch)
    yield Op("load", loaded=loads.host)
    if store.caches:
        moved: Number = 2 * loads.hits  # read and written
        yield Op("pick", work=Compute(touched=moved, launches=1))
    if store.asks.any():
        yield Op("ask", sent=ID * (loads.asked + store.asks))
        yield Op("fetch", sent=loads.fetched)


def fill(job: Job, store: Features | None) -> Iterator[Op]:
    """Before the first step: cached rows that are at home on another server."""
    if store and (sent := store.filled(job)).any():
        yield Op("fill", sent=sent)


def filling(job: Job, store: Features | None) -> dict[str, float]:
    """Seconds before the first step: to choose what is where, and to fill the caches."""
    if store is None:
        return {}
    moved = sum(float(job.cost.exchange(op.sent).alone) for op in fill(job, store) if op.sent is not None)
    return {"feature store": store.seconds + moved + float(np.max(job.cost.load_s(store.held(job))))}


def worth_caching(job: Job, plain: Strategy) -> int:
    """Bytes per GPU of a cache to propose beside a strategy without one: nine tenths of the memory that it leaves, all rows at the most;
    0 where ranks are on a CPU, whose cache would be the memory that it spares."""
    if job.cluster.device.kind == "cpu":
        return 0
    left = job.cluster.device.memory - float(sum(plain.memory(job).values(), np.zeros(1)).max())
    each = row_bytes(job, np.arange(1 if job.graph is None else job.stats.vertices))
    everything = int(each[0]) * job.stats.vertices if job.graph is None else int(each.sum())
    return max(0, min(int(0.9 * left), everything))


def peers(batch: MiniBatch) -> np.ndarray:
    """Whether two ranks are different ones of a group, bool [ranks, ranks]."""
    return np.equal.outer(batch.servers, batch.servers) & ~np.eye(batch.ranks, dtype=bool)


def row_bytes_read(job: Job, batch: MiniBatch, ranks: Sequence[int], columns: range | None = None) -> int:
    """Bytes of the features (all, or these columns) of these ranks' rows of h_0."""
    if isinstance(batch, EstimatedBatch):
        return int(batch.row_counts(0)[list(ranks)].sum() * job.features_bytes(np.zeros(1, np.int64), columns)[0])
    return sum(int(job.features_bytes(batch.rows(rank, 0), columns).sum()) for rank in ranks)


def loaded_bytes(job: Job, batch: MiniBatch) -> np.ndarray:
    """Of the features of each rank's own rows of h_0 [ranks]."""
    return np.array([row_bytes_read(job, batch, [rank]) for rank in range(batch.ranks)])


def halo_bytes(job: Job, batch: MiniBatch) -> np.ndarray:
    """Of the features that cross before layer 1 [ranks, ranks]."""
    sent = np.zeros((batch.ranks,) * 2, dtype=np.int64)
    if isinstance(batch, EstimatedBatch):
        return np.asarray(batch.facts(1).sends * job.features_bytes(np.zeros(1, np.int64))[0])
    for rank in range(batch.ranks):
        piece = batch.piece(rank, 1)
        sent[:, rank] = np.add.reduceat(np.append(job.features_bytes(piece.halo), 0), _starts(piece.received)) * (piece.received > 0)
    return sent


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)[:-1]])


def predict(job: Job, batches: Batches, how: Manner, prefetch: int, store: Features | None = None, lists: Lists | None = None
            ) -> Prediction:  # fmt: skip
    """Of an epoch: the mean of its batches that are known, times as many as it has."""
    known = batches.first()
    once = sum(int(op.sent.sum()) for op in fill(job, store) if op.sent is not None)
    turns = {id(batch): list(step(job, batch, how, prefetch, store, lists)) for batch in {id(b): b for b in known}.values()}
    p = layerwise.account(job, [op for batch in known for op in turns[id(batch)]], once=once, prefetch=prefetch)
    return p if len(known) == batches.steps else scaled(p, batches.steps / len(known))


def scaled(p: Prediction, times: float) -> Prediction:
    def whole(counts: dict[str, int]) -> dict[str, int]:
        return {name: round(count * times) for name, count in counts.items()}

    def longer(seconds: Number) -> Number:
        return seconds * times

    return Prediction(longer(p.epoch_s), longer(p.compute_s), longer(p.comm_s), longer(p.bubble_s), whole(p.bytes), whole(p.bytes_by_link),
                      p.setup_bytes, {op: longer(seconds) for op, seconds in p.by_op.items()})  # fmt: skip


def schedule(job: Job, batches: Batches, how: Manner, steps: int, prefetch: int, store: Features | None = None,
             lists: Lists | None = None) -> Schedule:  # fmt: skip
    made: dict[int, list[Op]] = {}  # by the identity of a batch: several steps may have the same

    def turn(t: int) -> list[Op]:
        batch = batches.at(t)
        if id(batch) not in made:
            made[id(batch)] = list(step(job, batch, how, prefetch, store, lists))
        return made[id(batch)]

    return layerwise.score(job, turn, steps, fill(job, store), prefetch=prefetch)


def check(job: Job) -> None:
    """What every mini-batch strategy asks of a job. Raises SpecError."""
    check_batches(job.workload, job.stats, job.ranks, "use --mode full")


def check_batches(w: Workload, stats: GraphStats, ranks: int, without: str) -> None:
    """Whether the graph has such batches for so many ranks; `without`: what to do where it has none at all. Raises SpecError."""
    train = stats.train_vertices
    if not train:
        raise SpecError(f"mini-batches are drawn from training vertices, and {stats.name} has none; {without}")
    if w.batch > train:
        raise SpecError(f"a batch is at most the training vertices (batch: {w.batch:,}, training vertices: {train:,}); use --batch {train}")
    if w.batch < ranks:
        raise SpecError(f"a batch has a seed for every rank (batch: {w.batch}, ranks: {ranks}); use --batch {ranks} or more, "
                        "or fewer ranks")  # fmt: skip


def steps(job: Job) -> int:
    return per_epoch(job.workload, job.stats.train_vertices)
