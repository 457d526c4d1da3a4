"""Boundary node sampling (BNS-GCN): graph parallelism that sends a random share of the halo.

    epoch 0   rank 0 |local rows | a . . b . |      . a row that is not sent, nor are its edges
    epoch 1   rank 0 |local rows | . c . b . |      another sample, of each layer too

Of the n halo rows that a rank reads of a peer, k = ceil(p n) are drawn in each epoch and layer,
without replacement. Every edge from one of them weighs n / k times as much, so that a sum over
neighbours is on average the whole sum of its inputs. Layers draw apart from each other, so this
holds for several linear layers together; what ReLU and the loss make of it is not unbiased. Both
ends draw by a hash of (seed, epoch, layer, reader, vertex), so no ids travel.

Bytes per epoch and exchanging layer: 2 H_p d b, for the H_p = sum of ceil(p n) rows drawn, d
numbers per row and b bytes per number. Halo rows held: p times as many. Layer 1 on constant
features exchanges nothing in training and reads its whole halo. p = 1 is graph parallelism to the
bit. Evaluation exchanges the whole halo.

With `bits` the rows drawn cross packed (planner/gnn/codec.py). What is drawn and how it is rounded
are drawn apart from each other, so a sum is still on average that of all its inputs.

A rank samples its blocks anew in every epoch (`lay`). It keeps the whole ones for evaluation.

Source: Wan et al., BNS-GCN (MLSys 2022), Algorithm 1; there one sample serves all layers of an
epoch. See also on_parts.py, exchange.py and step.py; executor/strategies/graph_parallel.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gnnplan.planner.graph.sampling import BOUNDARY, GOLDEN, Ids, key_of, mix
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Example
from gnnplan.planner.strategies.layerwise.exchange import FRESH, Crossing, ExchangeOptions, Policy
from gnnplan.planner.strategies.layerwise.on_parts import OnParts
from gnnplan.planner.vocabulary.errors import SpecError

ROUNDING = 1e-9  # 0.07 of 100 rows are 7, though 0.07 * 100 is a little more
P = 0.1  # BNS-GCN, Sec. 4: as accurate as the whole halo on its graphs


@dataclass(frozen=True)
class BNS(OnParts):
    """Graph parallelism on a sample of the boundary.

    p: share of the halo rows of each pair of ranks that is sent in an epoch, in [0, 1].
    narrow, checkpoint, buckets, bits: as in graph parallelism.
    """

    p: float = P
    narrow: bool = False
    checkpoint: bool = False
    buckets: int = 1
    bits: int | str | None = None

    family: ClassVar[str] = "bns"
    claim: ClassVar[float] = 1e-6
    executor: ClassVar[str] = "gnnplan.executor.strategies.graph_parallel"
    examples: ClassVar[tuple[Example, ...]] = (
        Example("bns(p=0.5)"),
        Example("bns(p=0.3,narrow=True)", ranks=3),
        Example("bns(p=0.5,bits=4)"),
    )

    def check(self, problem: Problem) -> None:
        self.check_mode(problem)
        if not 0 <= self.p <= 1:
            raise SpecError(
                f"bns: p is the share of halo rows that is sent, in [0, 1], not {self.p:g}; use"
                f" p={P}"
            )
        super().check(problem)

    @property
    def exchange_options(self) -> ExchangeOptions:
        policy = FRESH if self.p == 1 else Sample("vanish", p=self.p)
        return ExchangeOptions(
            self.narrow,
            policy,
            checkpoint=self.checkpoint,
            buckets=self.buckets,
            codec=self.codec,
        )


@dataclass(frozen=True)
class Sample(Policy):
    """A share p of the rows of each pair of ranks is fresh, other ones in each step and layer."""

    p: float = P

    def fresh(self, ids: Ids, crossing: Crossing) -> Ids:
        count = self.count(ids, crossing)
        if count == ids.size:
            return np.arange(count)
        words = mix((ids.astype(np.uint64) + key_of(BOUNDARY, *crossing)) * GOLDEN)
        return np.sort(np.argsort(words, kind="stable")[:count])

    def count(self, ids: Ids, crossing: Crossing) -> int:
        """Their share, rounded up."""
        return math.ceil(self.p * ids.size - ROUNDING)
