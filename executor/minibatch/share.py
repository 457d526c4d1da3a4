"""One rank's share of what ranks train on together: per layer its rows, edges and exchanges.

On a full graph it is made once, from a Layout (`share_of`). Of mini-batches the sampler makes a new
one for every step (sampler.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gnnplan.executor.layers.blocks import weighted_block
from gnnplan.executor.layers.kernels import Block
from gnnplan.executor.layers.links import LinkTargets
from gnnplan.executor.layers.targets import Targets, weight_of
from gnnplan.planner.gnn.workload import Workload
from gnnplan.planner.graph.sampling import Pairs
from gnnplan.planner.ownership.layout import Layout
from gnnplan.planner.problem.problem import Problem


@dataclass
class Picks:
    """Source rows [S, H] that are some of a rank's own rows and halo [T, H], in another order; or
    sums of some, where these are the partial sums of the layer before."""

    places: Tensor  # of those picked [P]
    there: int  # T
    into: Tensor | None  # the source row that each is added to [P]; None: it is one itself
    rows: int  # S

    @property
    def adds(self) -> bool:
        """Whether source rows are sums."""
        return self.into is not None

    def of_rows(self, rows: Tensor) -> Tensor:
        """[T, H] -> [S, H]."""
        picked = rows.index_select(0, self.places)
        if self.into is None:
            return picked
        return picked.new_zeros(self.rows, picked.shape[1]).index_add_(0, self.into, picked)

    def home(self, gradient: Tensor) -> Tensor:
        """The gradient of source rows [S, H] -> that of own rows and halo [T, H]."""
        of_picked = gradient if self.into is None else gradient.index_select(0, self.into)
        home = gradient.new_zeros(self.there, gradient.shape[1])
        return home.index_copy_(0, self.places, of_picked)


@dataclass(eq=False)
class Part:
    """A rank's share of one layer.

    Its source rows are the rank's own rows of h_{l-1}, then its halo, grouped by sender; or, with
    `picks`, what these make of them.
    """

    source: np.ndarray  # global ids [S]
    local: int  # the rank's own rows of h_{l-1}
    give: Sequence[np.ndarray]  # for each peer, positions of the own rows of h_{l-1} that it needs
    take: np.ndarray  # halo rows from each peer [ranks]
    meets: bool  # ranks exchange rows before the layer
    block: Block
    picks: Picks | None = None
    ids: Tensor | None = None  # `source`, where edges were laid out on a device

    @property
    def vertices(self) -> Tensor:
        """Global ids of its source rows [S], where its block is."""
        return torch.from_numpy(self.source) if self.ids is None else self.ids


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
    parts: list[Part]  # of layers 1 .. L; layers that are alike have the same Part
    ends: Ends | None = None  # link prediction: what the loss is of

    def laid_bytes(self, device: torch.device) -> int:
        """Bytes of a batch's edges, and of the ids of the rows that they join, sent to a GPU. Where
        edges were laid out there, of the ids that came back."""
        if self.parts[0].ids is not None:
            return self.parts[0].ids.nbytes
        on_gpu = device.type != "cpu"
        return on_gpu * sum(part.block.nbytes + part.source.nbytes for part in self.parts)


def share_of(
    layout: Layout, me: int, edges: Sequence[str], workload: Workload, degrees: str = "global"
) -> Share:
    """The share of rank `me` in a layout; `edges`: the kind of each layer's (models.Layer)."""
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
                layout.meets(layer),
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
    """Global ids of the rows that a rank's layer reads: own rows of h_{l-1}, then its halo."""
    return np.concatenate([layout.rows(rank, layer - 1), layout.piece(rank, layer).halo])


def block_of(
    layout: Layout, rank: int, layer: int, edges: str, workload: Workload, degrees: str = "global"
) -> Block:
    """A rank's edges in a layer.

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
    """What the loss of a share's rows is of: their labels, or pairs of them.

    total: what it is the mean over (Targets, LinkTargets); None: all training vertices.
    """
    if share.ends is not None:
        rows = share.own.size + share.ends.away.size
        return LinkTargets(share.ends.pairs, rows, share.total)
    return Targets(problem.data, share.own, problem.workload, device, total)
