"""The work and the memory of sampling on a GPU, as executor/minibatch/device_sampling.py does it.

    draw     random numbers for a layer's rows, a sort of the ids of rows and neighbours, and reads
             of adjacency lists
    lay      a block's edges by destination, and by source after a sort

Work is priced like computation, by launches and by bytes per edge, which are means over batches of
five graphs with fanouts of 5 to 25 (bytes vary by 20 %). No constant is fitted to a published
figure.

Ranks that ask each other (GSplit, spread lists, P3) draw on their GPUs, and lay out on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.ownership.minibatch import MiniBatch
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.program.program import Op
from gnnplan.planner.vocabulary.schedule import Compute

DRAWN = 790.0  # bytes that are read and written to draw an edge
DRAWING = 48  # peak of temporary memory per row and edge drawn [B]
# kind of a layer's edges (executor/layers/layer.py) -> bytes that are read and written to lay out
# an edge, and peak of temporary memory per edge [B]
LAID = {"one": (155.0, 40), "loop": (295.0, 56), "mean": (210.0, 40), "gcn": (610.0, 68)}
LAUNCHES = 100, 20  # launches to draw a layer, with waits for the GPU, and to lay it out


def sampled(problem: Problem, batch: MiniBatch, lane: Literal["host", "copy"]) -> Iterator[Op]:
    """Yield sampling and layout of a batch that a rank does not share with other ranks.

    lane: the lane for work ahead of the step.
    """
    layers = problem.model.layers
    edges = [batch.facts(layer).edges for layer in range(1, len(layers) + 1)]
    drawn = DRAWN * np.sum(edges, axis=0)
    laid = sum(LAID[spec.edges][0] * each for spec, each in zip(layers, edges, strict=True))
    for name, nbytes, launches in zip(("draw", "lay"), (drawn, laid), LAUNCHES, strict=True):
        work = Compute(elementwise_bytes=np.asarray(nbytes), launches=len(layers) * launches)
        yield Op(name, work=work, ahead=lane)


def held(problem: Problem, batch: MiniBatch) -> np.ndarray:
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
        kept = kept + block(problem.model, spec, f.rows, f.sources, f.edges)
    return np.asarray(peak)
