"""One rank's share of what ranks train on together: per layer its source rows, its block, and the rows that cross before it.

Of a Layout (full graph) it is made once; of a mini-batch anew for every step, by a sampler (executor/sampler.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnplan.executor.data import weighted_block
from gnnplan.executor.kernels import Block
from gnnplan.planner.layout import Layout
from gnnplan.planner.specs import Workload


@dataclass
class Part:
    """Of one layer. Source rows: the rank's own rows of h_{l-1} first, then its halo, grouped by who sends it."""

    source: np.ndarray  # global ids [S]
    local: int  # own rows among them
    give: Sequence[np.ndarray]  # positions of my rows of h_{l-1} that each peer needs
    take: np.ndarray  # halo rows from each peer [ranks]
    meets: bool  # ranks exchange rows before it
    block: Block


@dataclass
class Share:
    """`parts`: of layers 1 .. L; layers that are alike have the same one."""

    own: np.ndarray  # global ids of the rows of h_L: those of the loss
    everyone: int  # how many all ranks have of them
    parts: Sequence[Part]


def share_of(layout: Layout, me: int, edges: Sequence[str], workload: Workload, degrees: tuple[np.ndarray, np.ndarray] | None) -> Share:
    """Rank me's of a layout, for layers with these kinds of `edges` (models.Layer)."""
    made: dict[object, Part] = {}
    parts = []
    for layer, kind in enumerate(edges, 1):
        alike = layout.kind(layer), kind
        if alike not in made:
            piece = layout.piece(me, layer)
            source = np.concatenate([layout.rows(me, layer - 1), piece.halo])
            block = weighted_block(layout.graph, kind, layout.rows(me, layer), source, *layout.block(me, layer), workload, degrees)
            made[alike] = Part(source, piece.local, layout.sent(me, layer), piece.received, layout.meets(layer), block)
        parts.append(made[alike])
    return Share(layout.own(me), sum(layout.own(rank).size for rank in range(layout.ranks)), parts)
