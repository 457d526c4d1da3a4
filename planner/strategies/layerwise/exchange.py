"""Exchange policies: which halo rows are sent in a step, the state of the others; and buckets.

A layer reads these halo rows (a, b, c, d) in the first steps:

    step              0         1         2
    graph_parallel    a b c d   a b c d   a b c d    all rows are sent in every step
    pipegcn           . . . .   a b c d   a b c d    rows lag: a step reads those sent before it
    bns               a . . d   . b . d   a b . .    rows that are not sent vanish, with their edges
    every 2nd step    a . c .   a b c d   a b c d    rows that are not sent stay as last received
                                                     (sent: a, c in step 0; b, d in 1; a, c in 2)

A policy applies to rows before a layer, and to the gradients returned after it. The planner
computes counts, bytes and memory from the policy; the executor, the exchanges, buffers and
checkpointed state (executor/strategies/halo.py). A codec encodes the rows (planner/gnn/rows.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from gnnplan.planner.gnn.rows import WHOLE, Codec
from gnnplan.planner.graph.sampling import Ids
from gnnplan.planner.ownership.estimated import EstimatedLayout
from gnnplan.planner.ownership.layout import LayerCounts, Layout
from gnnplan.planner.problem.problem import AnyLayout, Problem
from gnnplan.planner.strategies.base import Strategy
from gnnplan.planner.vocabulary.errors import SpecError
from gnnplan.planner.vocabulary.numbers import Outer, RankMatrix


class Crossing(NamedTuple):
    """An exchange of rows, or of their gradients, between their owner and one reader."""

    seed: int
    step: int
    layer: int
    reader: int


@dataclass(frozen=True)
class Policy:
    """The policy that sends all halo rows in every step; derived classes send fewer.

    others: state of rows that are not sent: 'stay' (as last received, zero before the first time)
    or 'vanish'; with 'lag' all rows are sent, and read one step later.
    period: number of steps after which the same rows are sent again; 1 also if every step sends
    different rows, but equally many.
    """

    others: Literal["stay", "vanish", "lag"] = "stay"
    period: int = 1

    def __post_init__(self) -> None:
        if self.lags and not self.sends_all:
            raise ValueError(
                f"{self}: rows that lag are all sent, so `fresh` is never called; do not define it"
            )

    def fresh(self, ids: Ids, crossing: Crossing) -> Ids:
        """Return the positions in `ids` [n], ascending, of the rows sent to the reader.

        ids: all rows of the owner that the reader reads. Owner and reader call this with the same
        arguments. The number of positions must not depend on the layer.
        """
        return np.arange(ids.size)

    def count(self, ids: Ids, crossing: Crossing) -> int:
        """Return the number of rows sent, which is the same for all layers."""
        return self.fresh(ids, crossing).size

    @property
    def sends_all(self) -> bool:
        """Whether all rows are sent in every step."""
        return type(self).fresh is Policy.fresh

    @property
    def lags(self) -> bool:
        """Whether rows are read one step after they are sent."""
        return self.others == "lag"

    @property
    def keeps_received(self) -> bool:
        """Whether some rows are not sent, and are read as last received."""
        return self.others == "stay" and not self.sends_all

    @property
    def vanishes(self) -> bool:
        """Whether some rows are not sent, and are left out with their edges."""
        return self.others == "vanish" and not self.sends_all


FRESH = Policy()  # sends all rows in every step
KNOBS = ("narrow", "checkpoint", "buckets")  # fields of ExchangeOptions that are knobs


@dataclass(frozen=True)
class ExchangeOptions:
    """The options of a step that exchanges rows before each layer."""

    narrow: bool = False  # multiply before the exchange if that makes rows narrower
    policy: Policy = FRESH
    codec: Codec = WHOLE  # encoding of rows that are sent
    checkpoint: bool = False  # keep a layer's inputs only, and recompute the layer in backward
    buckets: int = 1  # number of all-reduces of gradients per step (below)

    @classmethod
    def of(cls, strategy: Strategy, policy: Policy = FRESH) -> ExchangeOptions:
        """Make the options of a strategy with this policy, from the knobs of their names."""
        knobs = {knob: vars(strategy)[knob] for knob in KNOBS if knob in vars(strategy)}
        return cls(policy=policy, codec=strategy.codec, **knobs)

    def facts(self, problem: Problem, rows: AnyLayout, layer: int, step: int = 0) -> LayerCounts:
        """Return the counts of rows and edges of a layer in a step."""
        policy = self.policy
        if policy.sends_all or layer <= problem.model.first_varying:
            return rows.facts(layer)
        seed, phase = problem.workload.seed, step % policy.period
        return problem.cache.get(
            ("exchanged", policy, rows, rows.kind(layer), seed, phase),
            lambda: _facts_under(policy, rows, Crossing(seed, phase, layer, 0)),
        )


def _facts_under(policy: Policy, rows: AnyLayout, crossing: Crossing) -> LayerCounts:
    """Return the counts of a layer if ranks send the rows that the policy selects."""
    layer = crossing.layer
    f, sends = rows.facts(layer), _sends(policy, rows, crossing)
    if policy.keeps_received:
        return replace(f, fresh=sends)
    if isinstance(rows, EstimatedLayout):  # assumes equally many edges per row
        vanished = (f.halo_rows - sends.sum(0)) / np.maximum(f.halo_rows, 1)
        edges = f.edges - vanished * rows.leaving(rows.vertices / rows.ranks) * f.edges
    else:
        halo = np.asarray(f.halo)
        shares = np.divide(sends, halo, out=np.zeros(halo.shape), where=halo > 0)
        edges = f.edges - ((1 - shares) * _halo_edges(rows, layer)).sum(0)
    return LayerCounts(f.rows, f.local + sends.sum(0), np.rint(edges).astype(np.int64), sends)


def _sends(policy: Policy, rows: AnyLayout, crossing: Crossing) -> RankMatrix:
    """Return the number of rows that each owner sends to each reader [ranks, ranks].

    For a graph known by statistics, the policy counts among the ids 0, 1, ...
    """
    halo = rows.facts(crossing.layer).halo
    if isinstance(rows, EstimatedLayout):
        assert isinstance(halo, Outer)
        sizes, where = np.unique(halo.left, return_inverse=True)
        counts = [policy.count(np.arange(size), crossing) for size in sizes.tolist()]
        return replace(halo, left=np.array(counts)[where])
    sends = np.zeros_like(halo)
    for reader in range(rows.ranks):
        owners = rows.piece(reader, crossing.layer).by_sender
        sends[:, reader] = [policy.count(ids, crossing._replace(reader=reader)) for ids in owners]
    return sends


def _halo_edges(layout: Layout, layer: int) -> np.ndarray:
    """Return the number of edges by owner of the row read and reader [ranks, ranks]."""
    edges = np.zeros((layout.ranks, layout.ranks))
    for reader in range(layout.ranks):
        piece, (_, columns) = layout.piece(reader, layer), layout.block(reader, layer)
        reads = np.bincount(columns, minlength=piece.local + piece.halo.size)[piece.local :]
        owner = np.repeat(np.arange(layout.ranks), piece.received)
        edges[:, reader] = np.bincount(owner, weights=reads, minlength=layout.ranks)
    return edges


# -- buckets of gradients --------------------------------------------------------------------------

# All-reduces of some layers' gradients overlap with the backward pass:
#
#     one bucket   compute  |backward 3|backward 2|backward 1|. . . . . . |update|
#                  reduce                                    |all_reduce. |
#
#     buckets 3    compute  |backward 3|backward 2|backward 1|. . . |update|
#                  reduce              |all_r. 3|  |all_r. 2||a. 1. |
#
# A bucket has the weights of neighbouring layers. Its all-reduce begins when the backward pass has
# computed all gradients of the bucket, and the update waits for all buckets. Several buckets give
# the same sums as one, to rounding, and send the same bytes. Exposed are the last bucket, and
# earlier buckets that are not finished by then; every bucket pays the latency of an all-reduce.
#
# Source: Li et al., PyTorch Distributed (VLDB 2020), Sec. 3.2.3. There buckets are given by their
# size instead of their number: 25 MB, which is more than all weights of most GNNs.

# Upper bound of |closed form / simulation - 1| for a synchronous step with several buckets.
# Exchanges contend with all-reduces for ports; the closed form takes all ranks' exchanges as one.
CLAIM = 0.03
# A search tries buckets if they save at least this share of an epoch. Otherwise it would evaluate
# twice as many candidates for gains that nobody notices.
GAIN = 0.02


class Bucket(NamedTuple):
    """Neighbouring layers whose gradients are summed in one all-reduce."""

    layers: range  # layer 1 includes the encoder, the last layer the decoder
    weights: int  # number of weights
    after: int  # the layer whose backward pass completes the gradients; 0: the encoder


def buckets_of(problem: Problem, count: int, narrow: bool) -> list[Bucket]:
    """Return at most `count` buckets of nearly equal size, in the order of their completion.

    The list is empty on one rank, or if `count` is 1: the only all-reduce follows backward.

    All weights, from the last layer on, are divided into `count` equal pieces, and a layer belongs
    to the piece that contains its middle; a piece without layers is no bucket. If `narrow`, forward
    and backward of a layer's projection are done with the layer before.
    """
    model, runs, weights_before = problem.model, dict[int, range](), 0
    if problem.ranks == 1 or count == 1:
        return []
    for layer in range(len(model.layers), 0, -1):
        if weights := model.weights_of(range(layer, layer + 1)):
            piece = (2 * weights_before + weights) * count // (2 * model.weights)
            last = runs[piece].stop if piece in runs else layer + 1
            runs[piece] = range(layer, last)
            weights_before += weights
    buckets = []
    for layers in runs.values():
        after = layers.start - (narrow and model.narrow_at(layers.start))
        if layers.start == 1 and model.encoder:
            after = 0
        buckets.append(Bucket(layers, model.weights_of(layers), after))
    return buckets


def check_buckets(name: str, problem: Problem, count: int) -> None:
    """Raise SpecError if the number of buckets is not between 1 and the number of layers."""
    layers = problem.workload.layers
    if not 1 <= count <= layers:
        raise SpecError(
            f"{name}: buckets is a number of all-reduces per step, from 1 to one per layer"
            f" (buckets: {count}, layers: {layers}); use buckets={min(max(count, 1), layers)}"
        )


def pays(problem: Problem, plain: Strategy, several: Strategy) -> bool:
    """Return whether a search should evaluate variants with several buckets.

    plain: a strategy with one bucket; several: the same strategy with more buckets.
    """
    if not several.suits(problem):
        return False
    most = (1 - GAIN) * float(plain.predict(problem).epoch_s)
    return float(several.predict(problem).epoch_s) <= most
