"""What it takes that rows vanish that are not fresh: every step cuts blocks down to the others.

A rank lays its blocks out anew where they are (`lay`), and keeps the whole ones for evaluation.
Edges of the rows that come weigh as much more as there are fewer of them, which is right in a
weighted sum alone. In the executor it is executor/strategies/graph_parallel.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gnnplan.planner.gnn.footprint import block
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.exchange import ExchangeOptions
from gnnplan.planner.strategies.program.program import Op, Program
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.schedule import Compute

# A layer's edges are cut (executor/layers/kernels/block.py, Block.among): kernels, and bytes that
# they read and write for an edge. An edge's row, place and weight are gathered, either way.
LAUNCHES, LAID = 30, 230.0


def check_sums(family: str, problem: Problem) -> None:
    """Raises SpecError if a layer does more with its edges than to sum over them."""
    for number, layer in enumerate(problem.model.layers, 1):
        softmax = layer.heads or layer.sums > 1
        if softmax or (layer.counted and not layer.counted.linear):
            raise SpecError(
                f"{family}: a sample stands for all edges only in a weighted sum over them, and"
                f" layer {number} of {problem.workload.called} has"
                f" {'a softmax' if softmax else 'none'}; use graph_parallel or pipegcn, or another"
                " model"
            )


def with_laying(problem: Problem, program: Program) -> Program:
    """The program, whose steps begin with `lay` where a layer's rows cross."""
    cut = list(_cut_layers(problem))
    if not cut:
        return program
    edges = sum((problem.layout().facts(layer).edges for layer in cut), np.zeros(problem.ranks))
    lay = Op("lay", work=Compute(elementwise_bytes=LAID * edges, launches=LAUNCHES * len(cut)))
    return replace(program, ops=lambda name: [lay, *program.ops(name)])


def cut_blocks(problem: Problem, options: ExchangeOptions) -> np.ndarray:
    """Bytes of a step's own blocks, beside the whole ones [ranks]."""
    model, total = problem.model, np.zeros(problem.ranks)
    for layer in _cut_layers(problem):
        f, spec = options.facts(problem, problem.layout(), layer), model.layers[layer - 1]
        weights = 2 * model.itemsize * f.edges * (not spec.weighs_edges)  # edges that are left have
        total = total + block(model, spec, f.rows, f.sources, f.edges) + weights
    return total


def _cut_layers(problem: Problem) -> Iterator[int]:
    """Layers whose rows cross."""
    for layer in range(problem.model.first_varying + 1, problem.workload.layers + 1):
        if problem.layout().meets(layer):
            yield layer
