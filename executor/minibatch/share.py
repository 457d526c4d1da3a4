"""A rank's share of the graph or of a mini-batch: the rows, edges and exchanges of each layer.

On a full graph it is made once, from a Layout (`share_of`). For mini-batches the sampler makes a
share for every step (sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.targets import LinkTargets, Targets, weight_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.sampling import Pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem


@dataclass(eq=False)
class Part:
    """A rank's share of one layer.

    Source rows are the rank's own rows of h_{l-1}, then its halo, grouped by sender; or, if given,
    the sums of these rows over the edges of `selection`.
    """

    source: np.ndarray  # global ids of source rows [S]
    local: int  # number of own rows of h_{l-1}
    give: Sequence[np.ndarray]  # for each peer, positions of the own rows of h_{l-1} to send
    take: np.ndarray  # number of halo rows from each peer [ranks]
    exchanges_rows: bool  # ranks exchange rows before the layer
    block: Block
    selection: Block | None = None
    adds: bool = False  # whether the selected rows are partial sums of the layer before
    ids: Tensor | None = None  # `source` on the device, if the edges were laid out there

    @property
    def vertices(self) -> Tensor:
        """Global ids of source rows [S], on the block's device."""
        return torch.from_numpy(self.source) if self.ids is None else self.ids


@dataclass
class Ends:
    """Link prediction: pairs that a rank scores, and the exchange of their rows of h_L."""

    pairs: Pairs  # by places among own rows, then rows received, grouped by sender
    remote: np.ndarray  # global ids of the rows received
    give: Sequence[np.ndarray]  # for each peer, places of the own rows to send
    take: np.ndarray  # number of rows from each peer [ranks]
    exchanges_rows: bool  # ranks exchange rows


@dataclass
class Share:
    """A rank's share of all layers."""

    own: np.ndarray  # global ids of own rows of h_L
    everyone: int  # number of rows of h_L on all ranks; of link prediction, number of edges
    total: float  # divisor of the summed loss of all ranks (weight_of); or number of edges
    parts: list[Part]  # of layers 1 .. L; layers of equal kind share a Part
    ends: Ends | None = None  # link prediction: pairs that the loss is over

    def laid_bytes(self, device: torch.device) -> int:
        """Return the bytes of edges and ids that are copied to a GPU; or, if the edges were laid
        out there, the bytes of ids copied to the host."""
        if self.parts[0].ids is not None:
            return self.parts[0].ids.nbytes
        on_gpu = device.type != "cpu"
        return on_gpu * sum(part.block.nbytes + part.source.nbytes for part in self.parts)


def share_of(
    layout: Layout, me: int, edges: Sequence[str], workload: Workload, degrees: str = "global"
) -> Share:
    """Make the share of rank `me` in a layout. edges: the kind of each layer's edges (Layer)."""
    part_by_kind: dict[object, Part] = {}
    parts = []
    for layer, layer_edges in enumerate(edges, 1):
        kind = layout.kind(layer), layer_edges
        if kind not in part_by_kind:
            piece = layout.piece(me, layer)
            part_by_kind[kind] = Part(
                source_of(layout, me, layer),
                piece.local,
                layout.sent(me, layer),
                piece.received,
                layout.exchanges_rows(layer),
                block_of(layout, me, layer, layer_edges, workload, degrees),
            )
        parts.append(part_by_kind[kind])
    everyone = int(layout.row_counts(layout.layers).sum())
    total = float(everyone)
    if workload.class_weights is not None:
        ranks = range(layout.ranks)
        total = sum(weight_of(layout.graph, workload, layout.own(rank)) for rank in ranks)
    return Share(layout.own(me), everyone, total, parts)


def source_of(layout: Layout, rank: int, layer: int) -> np.ndarray:
    """Return global ids of a layer's source rows: own rows of h_{l-1}, then the halo."""
    return np.concatenate([layout.rows(rank, layer - 1), layout.piece(rank, layer).halo])


def block_of(
    layout: Layout, rank: int, layer: int, edges: str, workload: Workload, degrees: str = "global"
) -> Block:
    """Make the block of a rank's edges in a layer.

    degrees: of the whole graph ('global') or of the rank's layout ('local').
    """
    return weighted_block(
        layout.graph,
        edges,
        layout.rows(rank, layer),
        source_of(layout, rank, layer),
        *layout.block(rank, layer),
        workload,
        layout.degrees(rank) if degrees == "local" else None,
    )


def targets_of(
    problem: Problem, share: Share, device: torch.device, total: float | None = None
) -> Targets | LinkTargets:
    """Make the targets of a share's loss: labels of vertices, or pairs.

    total: the divisor of the summed loss (Targets, LinkTargets); None: all training vertices.
    """
    if share.ends is not None:
        rows = share.own.size + share.ends.remote.size
        return LinkTargets(share.ends.pairs, rows, share.total)
    return Targets(problem.data, share.own, problem.workload, device, total)
