"""The work of sampling on a GPU, as executor/minibatch/device_sampling.py does it.

    draw     a random number for each neighbour, in passes over [fanout, rows]; a sort of the ids of
             rows and neighbours; reads of adjacency lists, a memory sector for each neighbour
    lay      a block's edges by destination, and by source after a sort

All work is counted in launches and bytes, and priced like computation; no constant is fitted to a
published figure. Tests compare launches and waits with a device that counts them, and bytes with
the operations that torch dispatches.

Ranks that ask each other (GSplit, spread lists, P3) draw on their GPUs, and lay out on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.ownership.layout import LayerCounts
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Op
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

# bytes per key of a radix sort: it moves int32 keys and int64 positions once per byte of the key
SORT = 4 * 2 * (4 + 8)
SECTOR = 32  # bytes that a GPU reads from its own memory for one number
FOUND = 8 + SECTOR + 5 * 4 + 8  # bytes to look up a row by its id
WAIT = 2  # launches in the time for which the host waits for a number from the GPU


class Passes(NamedTuple):
    """Launches, and bytes read and written, of an operation on a layer of a batch."""

    launches: int
    rows: float  # bytes per row
    edges: float  # bytes per edge
    sources: float  # bytes per source
    held: float  # peak of temporary memory per edge [B]

    def of(self, facts: LayerCounts) -> Number:
        """Return the bytes read and written for a layer of a batch."""
        return self.rows * facts.rows + self.edges * facts.edges + self.sources * facts.sources


DRAW = Passes(56, 407 + SORT, 54 + SORT + SECTOR, 73, 48)
# of the choice of each neighbour: passes; bytes to compare it with each neighbour chosen before
CHOICE, BEFORE = Passes(3, 393, 0, 0, 36), 5.0
LAY = {  # kind of a layer's edges (executor/layers/layer.py) -> passes
    "one": Passes(11, 52, 48 + SORT, 4, 40),
    "loop": Passes(20, 200 + SORT, 156 + SORT, 4, 56),
    "mean": Passes(18, 116, 96 + SORT, 4, 40),
    "gcn": Passes(42, 482 + SORT, 366 + SORT, 108, 68),
}


def sampled(problem: Problem, batch: MiniBatch, lane: Literal["host", "copy"]) -> Iterator[Op]:
    """Yield sampling and layout of a batch that a rank does not share with other ranks.

    lane: the lane for work ahead of the step.
    """
    layers = range(1, problem.workload.layers + 1)
    facts = [batch.facts(layer) for layer in layers]
    drawn = zip(facts, reversed(problem.workload.fanouts), strict=True)
    laid = zip(facts, problem.model.layers, strict=True)
    # one more launch each to receive the seeds' ids, and to send the ids of all rows
    draw = sum((drawing(each, fanout) for each, fanout in drawn), Compute(launches=1))
    lay = sum((laying(each, spec.edges) for each, spec in laid), Compute(launches=1 + WAIT))
    yield Op("draw", work=draw, ahead=lane)
    yield Op("lay", work=lay, ahead=lane)


def drawing(facts: LayerCounts, fanout: int) -> Compute:
    """Return the work to draw a layer's neighbours, and to find which of them are new rows."""
    draws = 0 if fanout == ALL else fanout
    choices = draws * CHOICE.of(facts) + BEFORE * draws**2 * facts.rows
    launches = DRAW.launches + draws * CHOICE.launches + 2 * WAIT
    return Compute(elementwise_bytes=np.asarray(DRAW.of(facts) + choices), launches=launches)


def laying(facts: LayerCounts, edges: str) -> Compute:
    """Return the work to build a layer's block."""
    passes = LAY[edges]
    return Compute(elementwise_bytes=np.asarray(passes.of(facts)), launches=passes.launches)


def lookup_work(facts: LayerCounts) -> Compute:
    """Return the work to find layer 1's rows in the cache: a look-up, and a sort of misses."""
    return Compute(elementwise_bytes=(FOUND + SORT) * facts.sources, launches=5)


def held(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """Return the peak bytes of a sampler, with the blocks that it builds [ranks]."""
    layers, fanouts = list(enumerate(problem.model.layers, 1)), problem.workload.fanouts[::-1]
    peak = kept = np.zeros(problem.ranks)  # kept: positions, ids and offsets of drawn layers
    for (layer, _), fanout in reversed(list(zip(layers, fanouts, strict=True))):
        f, draws = batch.facts(layer), 0 if fanout == ALL else fanout
        choosing = CHOICE.held * draws * f.rows
        peak = np.maximum(peak, kept + np.maximum(choosing, DRAW.held * (f.rows + f.edges)))
        kept = kept + 4 * f.edges + 4 * f.sources + 8 * f.rows
    for layer, spec in layers:
        f = batch.facts(layer)
        peak = np.maximum(peak, kept + LAY[spec.edges].held * (f.edges + spec.self_edges * f.rows))
        kept = kept + block(problem.model, spec, f.rows, f.sources, f.edges)
    return np.asarray(peak)
