"""Measuring on graphs of a tenth of the size. As sitecustomize.py this file does so to every rank
that finds it on its path; `shrink(monkeypatch.setattr)` does so to the test's own process."""

import os
from collections.abc import Callable
from dataclasses import replace


def shrink(change: Callable[[object, str, object], None]) -> None:
    from gnnplan.executor.measure import measure, microbench, rehearsal

    def smaller(vertices: int, edges: int) -> tuple[int, int]:
        return max(100, vertices // 10), max(400, edges // 10)

    def shrunk(piece: rehearsal.Piece) -> rehearsal.Piece:
        vertices, edges = smaller(piece.vertices, piece.edges)
        return replace(piece, vertices=vertices, edges=edges)

    change(microbench, "PIECES", tuple(map(shrunk, rehearsal.PIECES)))
    change(rehearsal, "PIECES", microbench.PIECES)
    for name in ("BATCHES", "FAR_BATCHES"):
        piece = shrunk(getattr(rehearsal, name))
        piece = replace(piece, workload=piece.workload | {"batch": 100})
        for module in (rehearsal, microbench, measure):
            change(module, name, piece)
    change(microbench, "GRAPHS", tuple(smaller(*size) for size in microbench.GRAPHS))


if os.environ.keys() & {"RANK", "SLURM_PROCID"}:
    shrink(setattr)
