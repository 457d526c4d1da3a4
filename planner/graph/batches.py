"""What a mini-batch is made of: training vertices, or edges with negatives (link prediction).

    task=node    items: training vertices    seeds: the same vertices
    task=link    items: edges                seeds: all ends of the edges' pairs (links.py)

An epoch goes over all items, `batch` at a time. Ranks share a batch's items, and sample around the
seeds of their share."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.graph import Graph, GraphStats
from gnnplan.planner.graph.links import Pairs, edges_of, pairs_of
from gnnplan.planner.graph.sampling import Ids, seeds_of


def count_items(workload: Workload, stats: GraphStats) -> int:
    """Items that an epoch goes over: training vertices, or edges."""
    return stats.edges if workload.task == "link" else stats.train_vertices


def per_epoch(workload: Workload, stats: GraphStats) -> int:
    """Batches of an epoch."""
    return -(-count_items(workload, stats) // workload.batch)


def items_of(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """The items of an epoch's batches."""
    draw = edges_of if workload.task == "link" else seeds_of
    return draw(graph, workload.batch, workload.seed, epoch)


def pairs_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Pairs | None:
    """The pairs that the loss of some items of a batch is of; None: it is of labels."""
    if workload.task == "node":
        return None
    return pairs_of(graph, items, workload.negatives, workload.seed, epoch, number)


def seeds_in(graph: Graph, workload: Workload, items: Ids, epoch: int, number: int) -> Ids:
    """The seeds of some items of a batch: vertices whose rows of the last layer the loss reads."""
    pairs = pairs_in(graph, workload, items, epoch, number)
    return items if pairs is None else pairs.ends


def presampled(graph: Graph, workload: Workload, epoch: int) -> list[Ids]:
    """The items of the batches that an epoch of pre-sampling looks at.

    These are all batches, but no more items than the graph has vertices. Of edges there are many
    more, in random order, so that the first of them tell what all do."""
    enough = -(-graph.stats.vertices // workload.batch)
    return items_of(graph, workload, epoch)[:enough]


def drawn_as(graph: Graph, workload: Workload) -> str:
    """All that batches and their frontiers depend on, but their epoch: for a cache on disk."""
    train = blake2b(np.ascontiguousarray(graph.train).data, digest_size=8).hexdigest()
    w = workload
    drawn = f"{graph.stats.hash} {train} {w.seed} {w.batch} {w.fanouts}"
    return drawn if w.task == "node" else f"{drawn} link {w.negatives}"
