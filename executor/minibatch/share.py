"""One rank's share of what ranks train on together: per layer its rows, edges and exchanges.

On a full graph it is made once, from a Layout (`share_of`). Of mini-batches the sampler makes a new
one for every step (sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.targets import weight_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.links import Pairs
from gnnplan.planner.ownership.layout import Layout


@dataclass
class Part:
    """A rank's share of one layer.

    Its source rows are the rank's own rows of h_{l-1}, then its halo, grouped by sender; or, with
    `picks`, some of these in another order; or, with `into` too, sums of some, where own rows and
    halo are the partial sums of the layer before.
    """

    source: np.ndarray  # global ids [S]
    local: int  # the rank's own rows of h_{l-1}
    give: Sequence[np.ndarray]  # for each peer, positions of the own rows of h_{l-1} that it needs
    take: np.ndarray  # halo rows from each peer [ranks]
    meets: bool  # ranks exchange rows before the layer
    block: Block
    picks: np.ndarray | None = None  # place of each source row among own rows, then the halo [S]
    into: np.ndarray | None = None  # or of each row picked [P]: the source row that it is added to


@dataclass
class Ends:
    """Link prediction: pairs that a rank scores, by places among its rows of h_L.

    These are own rows, then those that other ranks send, grouped by sender.
    """

    pairs: Pairs
    away: np.ndarray  # global ids of the rows that others send
    give: Sequence[np.ndarray]  # for each peer, places of the own rows that it needs
    take: np.ndarray  # rows from each peer [ranks]
    meets: bool  # ranks exchange rows


@dataclass
class Share:
    """A rank's share of all layers."""

    own: np.ndarray  # global ids of the rows of h_L, which the loss is of
    everyone: int  # number of such rows of all ranks; of link prediction, of edges
    total: float  # what the loss of everyone's rows is divided by (weight_of); or edges
    parts: Sequence[Part]  # of layers 1 .. L; layers that are alike have the same Part
    ends: Ends | None = None  # link prediction: what the loss is of


def share_of(
    layout: Layout,
    me: int,
    edges: Sequence[str],
    workload: Workload,
    degrees: tuple[np.ndarray, np.ndarray] | None,
) -> Share:
    """The share of rank `me` in a layout; `edges`: the kind of each layer's (models.Layer)."""
    part_by_kind: dict[object, Part] = {}
    parts = []
    for layer, layer_edges in enumerate(edges, 1):
        kind = layout.kind(layer), layer_edges
        if kind not in part_by_kind:
            piece = layout.piece(me, layer)
            source = np.concatenate([layout.rows(me, layer - 1), piece.halo])
            block = weighted_block(
                layout.graph,
                layer_edges,
                layout.rows(me, layer),
                source,
                *layout.block(me, layer),
                workload,
                degrees,
            )
            part_by_kind[kind] = Part(
                source,
                piece.local,
                layout.sent(me, layer),
                piece.received,
                layout.meets(layer),
                block,
            )
        parts.append(part_by_kind[kind])
    everyone = [layout.own(rank) for rank in range(layout.ranks)]
    total = sum(weight_of(layout.graph, workload, rows) for rows in everyone)
    return Share(layout.own(me), sum(rows.size for rows in everyone), total, parts)
