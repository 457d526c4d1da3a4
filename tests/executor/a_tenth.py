"""Measuring on graphs of a tenth of the size. As sitecustomize.py this file does so to every rank
that finds it on its path; `shrink(monkeypatch.setattr)` does so to the test's own process."""

import os
from collections.abc import Callable
from dataclasses import replace


def shrink(change: Callable[[object, str, object], None]) -> None:
    from gnnplan.executor.measure import microbench, rehearsal

    def smaller(vertices: int, edges: int) -> tuple[int, int]:
        return max(100, vertices // 10), max(400, edges // 10)

    pieces = []
    for piece in rehearsal.PIECES:
        vertices, edges = smaller(piece.vertices, piece.edges)
        pieces.append(replace(piece, vertices=vertices, edges=edges))
    graphs = tuple(smaller(*size) for size in microbench.GRAPHS)
    sampled = smaller(*microbench.SAMPLED)
    for module in (rehearsal, microbench):
        change(module, "PIECES", tuple(pieces))
    change(microbench, "GRAPHS", graphs)
    change(microbench, "SAMPLED", sampled)
    change(microbench, "SEEDS", microbench.SEEDS // 10)


if os.environ.keys() & {"RANK", "SLURM_PROCID"}:
    shrink(setattr)
