"""Boundary node sampling (BNS-GCN): graph parallelism that sends a random share of the halo.

    epoch 0   rank 0 |local rows | a . . b . |      . a row that is not sent; its edges are left out
    epoch 1   rank 0 |local rows | . c . b . |      another sample; layers have different samples

Of the n halo rows that a rank reads from a peer, k = ceil(p n) are drawn in each epoch and layer,
without replacement. Every edge from a drawn row weighs n / k times as much, so that the expected
sum over neighbours is the full sum. Layers draw independently, so this holds for several linear
layers together; ReLU and the loss make the gradient biased. Owner and reader draw by the same hash
of (seed, epoch, layer, reader, vertex), so they send no ids.

Bytes per epoch and exchanging layer: 2 H_p d b, for H_p = sum of ceil(p n) drawn rows, d numbers
per row and b bytes per number. Memory for halo rows: p times that of the whole halo. Layer 1 on
constant features exchanges nothing in training and reads its whole halo. p = 1 is graph parallelism
to the bit. Evaluation exchanges the whole halo.

With `bits` the drawn rows are sent packed (planner/gnn/rows.py). Sampling and rounding are
independent, so the expected sum over neighbours is still the full sum.

A rank builds its sampled blocks in every epoch (`lay`), and keeps the full blocks for evaluation.

Source: Wan et al., BNS-GCN (MLSys 2022), Algorithm 1; there all layers of an epoch use the same
sample. See also graph_parallel.py, exchange.py and step.py; executor/strategies/graph_parallel.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gnnplan.planner.graph.sampling import BOUNDARY, GOLDEN, Ids, key_of, mix
from gnnplan.planner.strategies.base import Example, Range, Rules
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, Policy
from gnnplan.planner.strategies.layerwise.graph_parallel import OnParts

ROUNDING = 1e-9  # 0.07 of 100 rows are 7 rows, though the float 0.07 * 100 is a little more
P = 0.1  # BNS-GCN, Sec. 4: as accurate as the whole halo on the paper's graphs


@dataclass(frozen=True)
class BNS(OnParts):
    """Graph parallelism with a sample of the halo.

    p: share of the halo rows of each pair of ranks that is sent in an epoch, in [0, 1].
    narrow, checkpoint, buckets, bits: as in graph parallelism.
    """

    p: float = P
    narrow: bool = False
    checkpoint: bool = False
    buckets: int = 1
    bits: int | str | None = None

    allowed: ClassVar[Rules] = {"p": Range("the share of halo rows that is sent", 0, 1)}
    family = "bns"
    claim = 1e-6
    executor = "gnnplan.executor.strategies.graph_parallel"
    examples = (
        Example("bns(p=0.5)"),
        Example("bns(p=0.3,narrow=True)", ranks=3),
        Example("bns(p=0.5,bits=4)"),
    )

    @property
    def policy(self) -> Policy:
        return FRESH if self.p == 1 else Sample("vanish", p=self.p)


@dataclass(frozen=True)
class Sample(Policy):
    """The policy that sends a random share p of each pair's halo rows, drawn per step and layer."""

    p: float = P

    def fresh(self, ids: Ids, crossing: Crossing) -> Ids:
        count = self.count(ids, crossing)
        if count == ids.size:
            return np.arange(count)
        words = mix((ids.astype(np.uint64) + key_of(BOUNDARY, *crossing)) * GOLDEN)
        return np.sort(np.argsort(words, kind="stable")[:count])

    def count(self, ids: Ids, crossing: Crossing) -> int:
        """Return the share p of these rows, rounded up."""
        return math.ceil(self.p * ids.size - ROUNDING)
