"""Up to which width P3 sends fewer bytes than fetching features does, as a plan tells it.

P3 sends partial sums of layer 1; the alternative fetches rows of features that are spread over the
servers. As P3, Fig. 15, from the mean batch. It is shown and does not decide.
"""

from __future__ import annotations

import numpy as np

from gnnplan.planner.graph.graph import Graph
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.units import show_bytes

HIDDEN = (16, 32, 64, 128, 256, 512)  # widths as in P3's Fig. 15


def sentences(problem: Problem) -> list[str]:
    """Empty on one rank, and where only statistics are known."""
    slices = len(set(problem.servers)) if len(set(problem.servers)) > 1 else problem.ranks
    if slices == 1 or not isinstance(problem.graph, Graph):
        return []
    batches = problem.minibatches(tuple(range(problem.ranks))).first()
    rows, inputs = np.mean(
        [(batch.facts(1).rows.sum(), batch.facts(1).sources.sum()) for batch in batches], axis=0
    ).tolist()
    itemsize = problem.model.itemsize
    # numbers of a row in transit
    width = max(1, round(float(problem.model.features_moved(1.0)) / itemsize))
    even = inputs * width / (2 * slices * rows)
    fetched = (1 - 1 / slices) * inputs * width * itemsize
    sent = {hidden: 2 * (slices - 1) * rows * hidden * itemsize for hidden in HIDDEN}
    table = ", ".join(f"{hidden}: {show_bytes(nbytes)}" for hidden, nbytes in sent.items())
    # what makes the rows of layer 1 as wide as they are
    name = "hidden" if problem.model.layers[0].h_out == problem.workload.hidden else "classes"
    return [
        f"P3 stops paying at {name} {even:.0f} (feature rows of {width} numbers; {rows:,.0f} rows"
        f" of layer 1, {inputs:,.0f} inputs a batch, columns on {slices}): by {name}, partial sums"
        f" take {table} per batch; features spread so would fetch {show_bytes(fetched)}"
    ]
