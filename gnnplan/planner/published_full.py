"""Printed figures of full-graph systems (PipeGCN, GraNNDis): what their code does differently from ours.

Both publish their code: GATECH-EIC/PipeGCN, and AIS-SNU/GraNNDis_Artifact, which is made from it. Read there:

    --inductive       they train on the graph among training vertices: PipeGCN on Reddit and Yelp (scripts/*.sh), GraNNDis on all but
                      papers100M (AE/*.py)
    array_split       GraNNDis' servers share training vertices in order of their ids, not by METIS, so that three quarters of the edges
                      leave one of four servers; METIS cuts the shares of a server's GPUs (our_train.py)
    sample_neighbors  expansion-aware sampling draws among all neighbours in the whole graph, once before training; training vertices
                      among those drawn stay (sampler.py)
    GraphSAGELayer    is what GraNNDis' ResGCN+ aggregates by: a mean, no softmax of messages (module/model.py)
    Reducer           PipeGCN sums parameter by parameter, each in a Gloo group of its own, which sends by TCP (helper/reducer.py)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from gnnplan.planner.estimate import EstimatedLayout, Mixing, mixing_of
from gnnplan.planner.expected import Population, expected_frontier
from gnnplan.planner.graph import GraphStats
from gnnplan.planner.job import Job
from gnnplan.planner.layout import Expansion, Layout

if TYPE_CHECKING:
    from gnnplan.planner.published import Question

PAPERS = ("pipegcn", "granndis")
INDUCTIVE = {"pipegcn": ("reddit", "yelp"), "granndis": ("ogbn-arxiv", "ogbn-products", "reddit")}
MODELS: dict[str, dict[str, Any]] = {"pipegcn": {"norm": "layer"}, "granndis": {"aggregation": "sum", "dropout": 0.5}}
TCP = 5e-5  # [s] of a message: what presets assume of Ethernet
FREE = 1e18  # [B/s]


def workload(paper: str) -> dict[str, Any]:
    """Of its models, beside what a row says. PipeGCN applies dropout too, but to an aggregate of features made once, as ours is without."""
    return MODELS.get(paper, {})


def trained_on(stats: GraphStats, paper: str) -> GraphStats:
    """The graph that the paper's code trains on: among training vertices, which are cut as well as the whole."""
    if stats.name not in INDUCTIVE.get(paper, ()):
        return stats
    ends = among(stats)
    vertices, edges = stats.train_vertices, round(stats.edges * ends**2)
    mixing = mixing_of(stats)
    halo = {m: round(vertices * (m - 1) * -np.expm1(-phi * edges / vertices / m)) for m, phi in mixing.known}
    return replace(stats, vertices=vertices, edges=edges, halo_rows=halo, train_popular=False, hash=f"{stats.hash} among training vertices")


def among(stats: GraphStats) -> float:
    """The share of edges' ends that are training vertices."""
    of = Population.of(stats)
    return float(expected_frontier(stats, stats.train_vertices, ()).read @ of.readers) / of.edges


@dataclass(frozen=True)
class InOrder(EstimatedLayout):
    """Servers share training vertices (each has `targets`, also of a batch) in order of their ids, which is as good as random; their GPUs
    what the server has of the graph, by METIS. `drawn`: neighbours of a row that sampling keeps, wherever they are."""

    metis: Mixing = field(default_factory=Mixing)
    drawn: float = np.inf

    @cached_property
    def _home(self) -> float:
        assert self.targets is not None
        return self.targets

    def _kept(self, own: float, external: float) -> float:
        return self._degree * (own + external) * (self._home + self._allowed) / self.vertices

    @cached_property
    def _allowed(self) -> float:
        if not self.expansion:
            return self._away
        reached, new = 0.0, self._home
        for hop in range(self.expansion.max_hop):
            elsewhere = 1 - self._home / self.vertices if hop == 0 else 1.0  # of the rows drawn last
            new = (self._away - reached) * -np.expm1(-new * min(self.drawn, self._degree) * elsewhere / self._away)
            reached += new
        return float(reached)

    def _halo(self, rows: float, local: float, among: float) -> float:
        """Of a METIS part of what the server has."""
        parts = among / local if local else 1.0
        kept = self._degree * among / self.vertices
        return float((among - local) * -np.expm1(-self.metis.at(parts) * kept / parts * rows / local)) if parts > 1 else 0.0


@dataclass(frozen=True)
class GraNNDisJob(Job):
    """As GraNNDis' code cuts and samples; `kept`: the share of drawn neighbours that are training vertices."""

    kept: float = 1.0

    def layout(self, depth: int = 0, expansion: Expansion | None = None, groups: tuple[int, ...] = ()) -> Layout | EstimatedLayout:
        usual = super().layout(depth, expansion, groups)
        if not isinstance(usual, EstimatedLayout) or not usual.inside:
            return usual
        key = "in order", usual.depth, usual.expansion, usual.servers
        if key not in self._layouts:
            drawn = expansion.fanout * self.kept if expansion else np.inf
            each = self.stats.train_vertices / len(set(usual.servers))
            self._layouts[key] = InOrder(usual.vertices, usual.edges, usual.servers, usual.layers, usual.first_varying, usual.depth,
                                         usual.expansion, Mixing(), each, metis=mixing_of(self.stats), drawn=drawn)  # fmt: skip
        return self._layouts[key]


def as_theirs(job: Job, paper: str) -> Job:
    """The job as the paper's code does it, where that is known."""
    stats = trained_on(job.stats, paper)
    if paper != "granndis":
        return Job(stats, None, job.workload, job.cluster, job.method) if stats is not job.stats else job
    return GraNNDisJob(stats, None, job.workload, job.cluster, job.method, kept=among(job.stats) if stats is not job.stats else 1.0)


def between_servers(asked: Question) -> float:
    """Seconds of an epoch that go where links between servers take no time (GraNNDis measures with and without those exchanges)."""
    link = asked.job.cluster.inter_node
    if link is None:
        return 0.0
    free = asked.job.cluster.model_copy(update={"inter_node": link.model_copy(update={"bandwidth": FREE, "latency": 0.0})})
    return float(asked.prediction.epoch_s) - float(replace(asked, job=replace(asked.job, cluster=free)).prediction.epoch_s)


def reduced(asked: Question) -> float:
    """Seconds per epoch of all-reduces."""
    once, job = float(np.max(asked.prediction.by_op["all_reduce"])), asked.job
    return once + (tensors(job) * 2 * (job.ranks - 1) * TCP if asked.row["paper"] == "pipegcn" else 0.0)


def tensors(job: Job) -> int:
    """Parameters of PipeGCN's GraphSAGE: a matrix and a bias for own rows and for the aggregate (of layer 1 one for both), norms."""
    layers = job.workload.layers
    return 4 * layers - 2 + 2 * (layers - 1)
