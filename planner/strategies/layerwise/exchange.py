"""Which halo rows cross in a step, and what becomes of the others: one policy for both halves.

    step              0         1         2
    graph_parallel    a b c d   a b c d   a b c d    all rows are fresh
    pipegcn           . . . .   a b c d   a b c d    rows lag: those of the step before are read
    bns               a . . d   . b . d   a b . .    the others vanish, with their edges
    every 2nd step    a . c .   a b c d   a b c d    the others stay as they came last (0: a, c are
                                                     fresh; 1: b, d; 2: a, c again)

A policy holds for rows before a layer, and for their gradients on the way home. From it follow
counts, bytes and memory here, and in the executor what is exchanged, kept and carried on
(executor/strategies/halo.py). How a row is written that crosses is not its concern, but a codec's
(planner/gnn/codec.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.codec import WHOLE, Codec
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerFacts, Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.vocabulary.outer import Outer, Pairs

Rows = Layout | EstimatedLayout


class Crossing(NamedTuple):
    """An exchange from one owner to one reader. Gradients go from the reader to the owner."""

    seed: int
    step: int
    layer: int
    reader: int


@dataclass(frozen=True)
class Policy:
    """All halo rows are fresh (sent) in every step; classes derived from it send fewer.

    others: whether rows that are not sent stay as they came last (zero before that) or vanish;
    'lag': rows are read one step after they are sent. period: after so many steps the same rows are
    sent again; 1 also where the number of rows that are sent, not which, is the same in every step.
    """

    others: Literal["stay", "vanish", "lag"] = "stay"
    period: int = 1

    def __post_init__(self) -> None:
        if self.lags and not self.whole:
            raise ValueError(f"{self}: rows that lag all cross, and `fresh` is not asked; leave it")

    def fresh(self, ids: Ids, crossing: Crossing) -> Ids:
        """Positions in `ids` [n], ascending, of the owner's rows that are sent to the reader.

        How many there are must not depend on the layer.
        """
        return np.arange(ids.size)

    def count(self, ids: Ids, crossing: Crossing) -> int:
        """How many of them cross; of which layer they are does not matter."""
        return self.fresh(ids, crossing).size

    @property
    def whole(self) -> bool:
        """Whether all rows cross in every step."""
        return type(self).fresh is Policy.fresh

    @property
    def lags(self) -> bool:
        """Whether what crosses is read one step later."""
        return self.others == "lag"

    @property
    def stays(self) -> bool:
        """Whether rows stay that do not cross."""
        return self.others == "stay" and not self.whole

    @property
    def vanishes(self) -> bool:
        """Whether rows that do not cross are left out, with their edges."""
        return self.others == "vanish" and not self.whole


FRESH = Policy()  # all rows are, in every step


@dataclass(frozen=True)
class ExchangeOptions:
    """How layers exchange rows, and what they keep for the backward pass."""

    narrow: bool = False  # multiply before the exchange where that shrinks the rows
    policy: Policy = FRESH
    codec: Codec = WHOLE  # how rows are written that cross
    checkpoint: bool = False  # keep a layer's inputs only, and compute the rest again
    buckets: int = 1  # all-reduces in which gradients are added up (buckets.py)

    def facts(self, problem: Problem, rows: Rows, layer: int, step: int = 0) -> LayerFacts:
        """Counts of a layer in a step."""
        policy = self.policy
        if policy.whole or layer <= problem.model.first_varying:
            return rows.facts(layer)
        seed, turn = problem.workload.seed, step % policy.period
        return problem.known.answer(
            ("exchanged", policy, rows, rows.kind(layer), seed, turn),
            lambda: _exchanged(policy, rows, Crossing(seed, turn, layer, 0)),
        )


def _exchanged(policy: Policy, rows: Rows, crossing: Crossing) -> LayerFacts:
    """Counts of a layer in which the fresh rows cross."""
    layer = crossing.layer
    f, sends = rows.facts(layer), _sends(policy, rows, crossing)
    if policy.stays:
        return replace(f, fresh=sends)
    if isinstance(rows, EstimatedLayout):  # as many edges for every row
        vanished = (f.there - sends.sum(0)) / np.maximum(f.there, 1)
        edges = f.edges - vanished * rows.leaving(rows.vertices / rows.ranks) * f.edges
    else:
        halo = np.asarray(f.halo)
        shares = np.divide(sends, halo, out=np.zeros(halo.shape), where=halo > 0)
        edges = f.edges - ((1 - shares) * _halo_edges(rows, layer)).sum(0)
    return LayerFacts(f.rows, f.local + sends.sum(0), np.rint(edges).astype(np.int64), sends)


def _sends(policy: Policy, rows: Rows, crossing: Crossing) -> Pairs:
    """Rows that are fresh [ranks, ranks]; of statistics, as many of 0, 1, .."""
    halo = rows.facts(crossing.layer).halo
    if isinstance(rows, EstimatedLayout):
        assert isinstance(halo, Outer)
        sizes, where = np.unique(halo.left, return_inverse=True)
        counts = [policy.count(np.arange(size), crossing) for size in sizes.tolist()]
        return replace(halo, left=np.array(counts)[where])
    out = np.zeros_like(halo)
    for reader in range(rows.ranks):
        owners = halo_of(rows, crossing.layer, reader)
        out[:, reader] = [policy.count(ids, crossing._replace(reader=reader)) for ids in owners]
    return out


def halo_of(layout: Layout, layer: int, reader: int) -> list[Ids]:
    """The rows that a rank reads of each owner, by their ids."""
    piece = layout.piece(reader, layer)
    return np.split(piece.halo, np.cumsum(piece.received)[:-1])


def _halo_edges(whole: Layout, layer: int) -> np.ndarray:
    """Edges of a layer by whose rows they read: [ranks, ranks], from owner to reader."""
    out = np.zeros((whole.ranks, whole.ranks))
    for reader in range(whole.ranks):
        piece, (_, columns) = whole.piece(reader, layer), whole.block(reader, layer)
        read = np.bincount(columns, minlength=piece.local + piece.halo.size)[piece.local :]
        owner = np.repeat(np.arange(whole.ranks), piece.received)
        out[:, reader] = np.bincount(owner, weights=read, minlength=whole.ranks)
    return out
