"""How many layers each stage gets, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from gnnplan.planner.ownership.chunks import ChunkFacts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline


def layer_seconds(pipe: Pipeline, problem: Problem) -> list[float]:
    """Seconds of each layer, forward and backward, on the mean sub-chunk, exchanges included.

    They do not depend on the stage that a layer is in.
    """
    model, facts = problem.model.aggregating_first, pipe.facts(problem)
    means = [
        float(counts.sum()) / facts.rows.size
        for counts in (facts.rows, facts.edges, facts.sources, facts.numbers, facts.sends)
    ]
    mean = ChunkFacts(
        *(np.full((1,) * axes, one) for axes, one in zip((2, 2, 2, 2, 3), means, strict=True))
    )
    cost, group, sent = problem.cost, pipe.group(problem, 0), facts.sends.mean(0)

    def seconds_of(layer: int) -> float:
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in pipe.work(problem, piece, mean)]
        computing = sum(float(np.sum(cost.compute_s(work))) for work in works)
        width = pipe.exchanged(problem, (layer,)) * model.itemsize
        exchanging = (
            sum(float(cost.exchange(way * width, group).alone) for way in (sent, sent.T))
            if width and sent.any()
            else 0.0
        )
        return computing * cost.cores.full_load_slowdown + exchanging

    alike: dict[object, float] = {}
    out = []
    for layer in range(1, len(model.layers) + 1):
        kind = pipe.kind_of(problem, (layer,))
        if kind not in alike:
            alike[kind] = seconds_of(layer)
        out.append(alike[kind])
    return out


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the slowest stage is as fast as possible.

    Of several such divisions it takes the one nearest to equal shares.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    before, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def latest_fill(limit: float) -> list[int]:
        """Where each stage begins if all stages, from the last on, take up to `limit` seconds."""
        out = [layers]
        for stage in reversed(range(stages)):
            out.append(max(int(np.searchsorted(before, before[out[-1]] - limit)), stage))
        return out[::-1]

    # bisect the smallest limit with which the first stage begins at layer 0
    low, high = max(seconds) * (1 - 1e-9), float(before[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if latest_fill(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = latest_fill(limit), [0]
    for stage in range(1, stages):
        furthest = min(
            int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1,
            layers - (stages - stage),
        )
        even = int(np.searchsorted(before, before[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), furthest))
    return tuple(b - a for a, b in pairwise([*ends, layers]))
