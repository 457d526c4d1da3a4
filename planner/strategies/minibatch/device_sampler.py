"""What a GPU's own sampler takes, as executor/minibatch/device_sampling.py draws and lays out.

    draw     a number for each neighbour, in passes over [fanout, rows]; the sorted ids of rows and
             neighbours; the adjacency lists that are read, a sector of memory for each neighbour
    lay      a block's edges by destination, and by source after a sort

All of it is launches and bytes, priced as computation is: nothing here is fitted to a figure that
somebody has printed. Tests hold launches and waits to those of a device that counts them, and bytes
to those of the operations that torch dispatches.

Ranks that ask each other (GSplit, spread lists, P3) draw on their GPUs, and lay out on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.gnn.workload import ALL
from gnnplan.planner.ownership.layout import LayerFacts
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Op
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

# A radix sort moves int32 keys and int64 places, by a byte of the keys at a time [B per key].
SORT = 4 * 2 * (4 + 8)
SECTOR = 32  # [B] that a GPU reads of its own memory for one number
FOUND = 8 + SECTOR + 5 * 4 + 8  # [B] for a row that is looked up by its id
WAIT = 2  # launches that the host could make while it waits for a number


class Passes(NamedTuple):
    """What is launched, and read and written besides [B]: per row, edge and source of a layer.

    held: the most at once [B per edge].
    """

    launches: int
    rows: float
    edges: float
    sources: float
    held: float

    def of(self, facts: LayerFacts) -> Number:
        """Bytes for a layer of a batch."""
        return self.rows * facts.rows + self.edges * facts.edges + self.sources * facts.sources


DRAW = Passes(56, 407 + SORT, 54 + SORT + SECTOR, 73, 48)
# for each neighbour that a row may have; and beside each of those that the row may have before it
CHOICE, BEFORE = Passes(3, 393, 0, 0, 36), 5.0
LAY = {  # by a layer's kind of edges (executor/layers/layer.py)
    "one": Passes(11, 52, 48 + SORT, 4, 40),
    "loop": Passes(20, 200 + SORT, 156 + SORT, 4, 56),
    "mean": Passes(18, 116, 96 + SORT, 4, 40),
    "gcn": Passes(42, 482 + SORT, 366 + SORT, 108, 68),
}


def sampled(problem: Problem, batch: MiniBatch, lane: Literal["host", "copy"]) -> Iterator[Op]:
    """Draw and lay out a batch that a rank shares with nobody, on a lane of its own or as loads."""
    layers = range(1, problem.workload.layers + 1)
    facts = [batch.facts(layer) for layer in layers]
    drawn = zip(facts, reversed(problem.workload.fanouts), strict=True)
    laid = zip(facts, problem.model.layers, strict=True)
    # ids of the seeds come, and those of all rows go, once
    draw = sum((drawing(each, fanout) for each, fanout in drawn), Compute(launches=1))
    lay = sum((laying(each, spec.edges) for each, spec in laid), Compute(launches=1 + WAIT))
    yield Op("draw", work=draw, ahead=lane)
    yield Op("lay", work=lay, ahead=lane)


def drawing(facts: LayerFacts, fanout: int) -> Compute:
    """A layer's neighbours, and which of them are new rows."""
    most = 0 if fanout == ALL else fanout
    choices = most * CHOICE.of(facts) + BEFORE * most**2 * facts.rows
    launches = DRAW.launches + most * CHOICE.launches + 2 * WAIT
    return Compute(elementwise_bytes=np.asarray(DRAW.of(facts) + choices), launches=launches)


def laying(facts: LayerFacts, edges: str) -> Compute:
    """A layer's block."""
    passes = LAY[edges]
    return Compute(elementwise_bytes=np.asarray(passes.of(facts)), launches=passes.launches)


def finding(facts: LayerFacts) -> Compute:
    """Which rows of a batch are cached and where, of layer 1's: a look-up, and a sort of misses."""
    return Compute(elementwise_bytes=(FOUND + SORT) * facts.sources, launches=5)


def held(problem: Problem, batch: MiniBatch) -> np.ndarray:
    """The most bytes that a sampler holds, the blocks that it leaves included [ranks]."""
    layers, fanouts = list(enumerate(problem.model.layers, 1)), problem.workload.fanouts[::-1]
    most = kept = np.zeros(problem.ranks)  # of drawn layers: places, rows, ends
    for (layer, _), fanout in reversed(list(zip(layers, fanouts, strict=True))):
        f, most_drawn = batch.facts(layer), 0 if fanout == ALL else fanout
        choosing = CHOICE.held * most_drawn * f.rows
        most = np.maximum(most, kept + np.maximum(choosing, DRAW.held * (f.rows + f.edges)))
        kept = kept + 4 * f.edges + 4 * f.sources + 8 * f.rows
    for layer, spec in layers:
        f = batch.facts(layer)
        most = np.maximum(most, kept + LAY[spec.edges].held * (f.edges + spec.self_edges * f.rows))
        kept = kept + block(problem.model, spec, f.rows, f.sources, f.edges)
    return np.asarray(most)
