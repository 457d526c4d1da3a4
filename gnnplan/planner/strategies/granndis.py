"""GraNNDis, shared preloading: hidden rows of the first `depth` layers never cross servers; they are recomputed there.

    2 servers x 1 GPU, 3 layers, depth 2 (full preload)          depth 1
    setup    |preload: features 3 hops around|                   2 hops around
    compute  |forward 1 on own + 2 hops|forward 2 on own + 1 hop|forward 3 on own|loss|...     forward 2 on own only,
    comm     (nothing between servers)                                                         so halo 3 crosses
    reduce                                                                        |all_reduce|

Depth 0 is plain graph parallel, depth L the paper's full preload; every depth gives the exact gradient: each server's
copy of a row gets the gradient of that server's readers, and the all-reduce adds the copies' weight gradients. Inside
a server the enlarged graph is cut over its GPUs, which exchange halos as usual. The best depth depends on links and
graph: more depth, fewer bytes between servers, more computation.
Paper: GraNNDis (PACT 2024) Sec. 4.1; its Eq. 3-7 are in formulas.py, shown by a plan and not deciding it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from gnnplan.planner.errors import SpecError
from gnnplan.planner.job import Job
from gnnplan.planner.schedule import Schedule
from gnnplan.planner.strategies import layerwise
from gnnplan.planner.strategies.layerwise import Manner
from gnnplan.planner.strategies.strategy import Memory, Prediction, Strategy


@dataclass(frozen=True)
class GraNNDis(Strategy):
    """depth: hidden layers that a server recomputes for its surroundings; None is all (the paper's preload)."""

    depth: int | None = None
    narrow: bool = False

    family: ClassVar[str] = "granndis"
    claim: ClassVar[float] = 1e-6

    @property
    def exact(self) -> bool:
        return True

    @classmethod
    def candidates(cls, job: Job) -> Iterator[Strategy]:
        if job.cluster.servers == 1:
            return
        narrowing = any(layer.projects_first for layer in job.model.layers[1:])
        deepest = job.workload.layers - job.model.first_varying
        for depth in [*range(1, min(deepest, 5)), job.workload.layers]:
            yield cls(depth)
            if narrowing and depth < deepest:
                yield cls(depth, narrow=True)

    @classmethod
    def absent(cls, job: Job) -> str:
        return "one server: no row crosses servers, so there is nothing to preload and it would be plain graph parallel"

    def settle(self, job: Job) -> GraNNDis:
        return replace(self, depth=job.workload.layers if self.depth is None else self.depth)

    def check(self, job: Job) -> None:
        if self.depth is not None and not 0 <= self.depth <= job.workload.layers:
            raise SpecError(
                f"granndis: depth lies between 0 (plain halo) and the layers ({job.workload.layers}, full preload), not {self.depth}"
            )
        if job.ranks > job.stats.vertices:
            raise SpecError(f"granndis needs a vertex per rank (vertices: {job.stats.vertices}, ranks: {job.ranks}); use fewer ranks")

    def memory(self, job: Job) -> Memory:
        return layerwise.memory(job, job.layout(self.depth or 0), Manner(self.narrow))

    def predict(self, job: Job) -> Prediction:
        return layerwise.predict(job, job.layout(self.depth or 0), Manner(self.narrow))

    def schedule(self, job: Job, steps: int) -> Schedule:
        return layerwise.schedule(job, job.layout(self.depth or 0), Manner(self.narrow), steps)

    def placement(self, job: Job) -> list[dict[str, int]]:
        return [{"rank": r, "server": s, "gpu": r % job.cluster.gpus_per_server, "part": r} for r, s in enumerate(job.servers)]
