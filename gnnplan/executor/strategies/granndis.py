"""GraNNDis' shared preloading for real: graph parallel over a Layout whose servers recompute `depth` hidden layers."""

from __future__ import annotations

from gnnplan.executor.strategies.graph_parallel import Worker
from gnnplan.executor.worker import Rank
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Layout
from gnnplan.planner.strategies import GraNNDis
from gnnplan.planner.strategies.layerwise import Manner


def open_worker(rank: Rank, job: Job, strategy: GraNNDis) -> Worker:
    layout = job.layout(strategy.depth or 0)
    assert isinstance(layout, Layout)
    return Worker(rank, job, layout, Manner(strategy.narrow))
