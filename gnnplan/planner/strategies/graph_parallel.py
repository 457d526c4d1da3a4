"""Graph parallel: a part of the graph per rank, halo rows before every layer. With staleness 1 it is PipeGCN.

    staleness 0, one step (exact)
    compute  |enc| . . . |forward 1| . . . |forward 2|loss|backward 2| . . . |backward 1| . . . . . |update|
    comm           |halo1|          |halo 2|                         |halo 2 b|
    reduce                                                                              |all_reduce|

    staleness 1 (PipeGCN): halo rows and halo gradients of step t are used in step t + 1; weights are never stale
    compute  |forward 1|forward 2|loss|backward 2|backward 1|. . . . . .|update|forward 1|forward 2| ...
    comm              |halo 2 f  . . . . . . |halo 2 b . . . . . . . .              ^ waits for halo 2 f of step t
    reduce                                                  |all_reduce|

    smoothing (PipeGCN -F, -G, -GF): the receiver uses s_t = gamma s_{t-1} + (1 - gamma) v_t, s_0 = 0, in the place of what it
    has received, v_t, per halo row and layer: for rows ('f'), for gradients ('g'), or both ('gf'). Same bytes, one more buffer.

    norm=batch: before a layer all ranks add up its inputs' moments, 2 H numbers, and after it their gradient (GraNNDis likewise)
    compute  |forward 1| . . . . . . . |forward 2|loss|backward 2| . . . . . . . . . |backward 1|
    comm                         |halo2|                         |halo 2 b|
    reduce             |moments 2|                                        |moments 2 b|

Bytes per epoch: 2 b sum_{l=2..L} H_{l-1} sum_i |B_i| + 2 (M-1) W b; the features' halo is sent once, at set-up.
`narrow`: a layer that shrinks its rows multiplies before the exchange, so that min(H_{l-1}, H_l) numbers cross: exact when
synchronous; with staleness it is a variant of ours, for halo rows then lag together with the weights that they were
multiplied by.
Papers: PipeGCN (ICLR 2022) Alg. 1, Sec. 3.4; GNNPipe Sec. 2 for the baseline.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gnnplan.planner.errors import SpecError
from gnnplan.planner.grouping import Phase
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.strategies import layerwise, layerwise_memory
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy

SMOOTHINGS = ("", "f", "g", "gf")
GAMMA = 0.95  # the paper's


@dataclass(frozen=True)
class GraphParallel(Strategy):
    """staleness: steps by which halo rows and gradients lag (0 or 1). narrow: exchange the narrower side. smoothing: of stale
    rows ('f'), gradients ('g') or both ('gf'), with gamma in [0, 1). checkpoint: keep a layer's inputs only and compute it again in
    the backward pass."""

    staleness: int = 0
    narrow: bool = False
    smoothing: str = ""
    gamma: float = GAMMA
    checkpoint: bool = False

    family: ClassVar[str] = "graph_parallel"
    claim: ClassVar[float] = 0.25  # synchronous: exact; stale: exchanges and all-reduce fill different ports at different times

    @property
    def name(self) -> str:
        return f"pipegcn{'_' if self.smoothing else ''}{self.smoothing}" if self.staleness else "graph_parallel"

    @property
    def implied(self) -> dict[str, Any]:
        return {"staleness": self.staleness, "smoothing": self.smoothing if self.staleness else ""}

    @property
    def exact(self) -> bool:
        return self.staleness == 0

    def approximates_as(self, other: Strategy) -> bool:
        return isinstance(other, GraphParallel) and self.name == other.name and (not self.smoothing or self.gamma == other.gamma)

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        yield cls()
        if job.ranks > 1:
            if job.model.narrows:
                yield cls(narrow=True)
                yield cls(staleness=1, narrow=True)
            yield cls(staleness=1)
            yield cls(staleness=1, smoothing="gf")  # as fast: for those who see it converge better

    def thriftier(self) -> Strategy | None:
        return None if self.checkpoint else replace(self, checkpoint=True)

    def check(self, job: Job) -> None:
        self.must_have_its_mode(job)
        if self.staleness not in (0, 1):
            raise SpecError(f"graph_parallel: staleness is 0 (exact) or 1 (PipeGCN), not {self.staleness}; use 0 or 1")
        if self.smoothing not in SMOOTHINGS:
            raise SpecError(f"pipegcn: smoothing is '' (none), 'f' (rows), 'g' (gradients) or 'gf' (both), not {self.smoothing!r}")
        if self.smoothing and not self.staleness:
            raise SpecError("graph_parallel: only stale rows are smoothed; use staleness=1 with smoothing, as pipegcn_gf does")
        if self.gamma != GAMMA and not self.smoothing:
            raise SpecError(f"{self.name}: gamma is of smoothing, and nothing is smoothed here (gamma: {self.gamma:g}); "
                            f"use pipegcn_gf(gamma={self.gamma:g})")  # fmt: skip
        if not 0 <= self.gamma < 1:
            raise SpecError(f"pipegcn: gamma lies in [0, 1) (0: no smoothing, 1 would never use what is received), not {self.gamma:g}; "
                            "use 0.95, or 0.5 where the model overfits")  # fmt: skip
        if job.ranks > job.stats.vertices:
            raise SpecError(f"graph_parallel needs a vertex per rank (vertices: {job.stats.vertices}, ranks: {job.ranks}); use fewer ranks")

    @property
    def manner(self) -> Manner:
        return Manner(self.narrow, self.staleness, self.smoothing, self.checkpoint)

    def preparation(self, job: Job) -> dict[str, float]:
        return layerwise.preparation(job, job.layout())

    def memory(self, job: Job) -> Memory:
        return layerwise_memory.memory(job, job.layout(), self.manner)

    def predict(self, job: Job) -> Prediction:
        return layerwise.predict(job, job.layout(), self.manner)

    def schedule(self, job: Job, steps: int) -> Schedule:
        return layerwise.schedule(job, job.layout(), self.manner, steps)

    def traffic(self, job: Job) -> list[Phase]:
        return layerwise.traffic(job, job.layout(), self.manner)
