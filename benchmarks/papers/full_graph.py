"""Differences of the full-graph code of two papers (PipeGCN, GraNNDis) from gnnplan.

Both publish their code: GATECH-EIC/PipeGCN, and AIS-SNU/GraNNDis_Artifact, which is derived from
it. The code shows these differences:

    --inductive       Training uses the graph among training vertices: PipeGCN on Reddit and Yelp
                      (scripts/*.sh), GraNNDis on all graphs except papers100M (AE/*.py).
    array_split       GraNNDis assigns training vertices to servers in the order of their ids, not
                      by METIS, so with four servers three quarters of the edges cross servers.
                      METIS divides a server's vertices among its GPUs (our_train.py).
    sample_neighbors  Expansion-aware sampling draws from all neighbours in the whole graph, once
                      before training, and keeps the training vertices (sampler.py).
    GraphSAGELayer    GraNNDis' ResGCN+ aggregates by a mean instead of a softmax of messages
                      (module/model.py).
    Reducer           PipeGCN all-reduces every parameter separately, each in its own Gloo group,
                      over TCP (helper/reducer.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gnnplan.papers.question import Params, Question, System
from gnnplan.papers.their_passes import TheirProblem
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.ownership.estimated_batches import Population, expected_frontier
from gnnplan.planner.ownership.estimated_layout import EstimatedLayout, Mixing, mixing_of
from gnnplan.planner.ownership.layout import Expansion, Layout
from gnnplan.planner.problem.problem import Problem

PAPERS = ("pipegcn", "granndis")
INDUCTIVE = {"pipegcn": ("reddit", "yelp"), "granndis": ("ogbn-arxiv", "ogbn-products", "reddit")}
# Fields of Workload that a row does not state. PipeGCN has dropout too, but after an aggregation of
# features that runs once; a Workload with dropout would aggregate features in every step.
WORKLOADS: dict[str, dict[str, Any]] = {
    "pipegcn": {"norm": "layer"},
    "granndis": {"aggregation": "sum", "dropout": 0.5},
}
TCP_LATENCY = 5e-5  # latency of a message, as presets assume it for Ethernet [s]
FREE = 1e18  # bandwidth of a link that takes no time [B/s]


# -- systems as gnnplan's strategies ---------------------------------------------------------------


def _gamma(params: Params, problem: Problem) -> dict[str, Any]:
    return {"gamma": params["gamma"]} if "gamma" in params else {}


def _pipeline(members: int, params: Params, problem: Problem) -> dict[str, Any]:
    """Return GNNPipe's knobs; default: stages of `members` ranks, and four chunks per rank."""
    stages = params.get("stages", max(1, problem.ranks // members))
    return {"stages": int(stages), "chunks": int(params.get("chunks", 4 * problem.ranks))}


def _sampled(params: Params, problem: Problem) -> dict[str, Any]:
    return {
        "max_hop": int(params.get("max_hop", 1)),
        "fanout": int(params.get("fanout", 15)),
        "batches": int(params.get("updates_per_epoch", 1)),
    }


def _without_knobs(params: Params, problem: Problem) -> dict[str, Any]:
    return {}


# Systems in the file that train on the full graph -> gnnplan's strategy and its knobs.
SYSTEMS: dict[str, System] = {
    "graph_parallel": ("graph_parallel", _without_knobs),
    **{name: (name, _gamma) for name in ("pipegcn", "pipegcn_g", "pipegcn_f", "pipegcn_gf")},
    "gnnpipe_pipeline": ("gnnpipe", partial(_pipeline, 1)),
    "gnnpipe_hybrid": ("gnnpipe", partial(_pipeline, 2)),
    "granndis": ("granndis", _sampled),
    "granndis_eas": ("granndis", _sampled),
    "granndis_preload": ("granndis", _without_knobs),
}


# -- the graph that they train on ------------------------------------------------------------------


def trained_on(stats: GraphStats, paper: str) -> GraphStats:
    """Return the statistics of the graph that the paper's code trains on.

    The graph among training vertices is assumed to partition as well as the whole graph: it has the
    same mixing for the same number of parts.
    """
    if stats.name not in INDUCTIVE.get(paper, ()):
        return stats
    vertices, edges = stats.train_vertices, round(stats.edges * among(stats) ** 2)
    halo_rows = {
        parts: round(_halo_rows(vertices, edges, parts, mixing))
        for parts, mixing in mixing_of(stats).known
    }
    return replace(
        stats,
        vertices=vertices,
        edges=edges,
        halo_rows=halo_rows,
        train_popular=False,
        hash=f"{stats.hash} among training vertices",
    )


def _halo_rows(vertices: int, edges: int, parts: int, mixing: float) -> float:
    """Return the halo rows of all parts together."""
    return float(vertices * (parts - 1) * -np.expm1(-mixing * edges / vertices / parts))


def halo(case: Question) -> float:
    """Return the halo rows of all ranks together, for one hop."""
    stats, parts = case.problem.stats, case.problem.ranks
    mixing = mixing_of(stats, case.problem.method).at(parts)
    return _halo_rows(stats.vertices, stats.edges, parts, mixing)


def among(stats: GraphStats) -> float:
    """Return the share of edge endpoints that are training vertices."""
    population = Population.of(stats)
    training = expected_frontier(stats, stats.train_vertices, ()).read
    return float(training @ population.readers) / population.edges


@dataclass(frozen=True)
class InOrder(EstimatedLayout):
    """The layout of GraNNDis' code: vertices are divided by id over servers, by METIS over GPUs.

    Division by id counts as division at random. targets: a server's training vertices, or those of
    a batch. metis: the graph's mixing under METIS. drawn: number of neighbours of a row that
    sampling keeps, on any server.
    """

    metis: Mixing = field(default_factory=Mixing)
    drawn: float = np.inf

    @property
    def _own_rows(self) -> float:
        assert self.targets is not None
        return self.targets

    def _kept_edges(self, own: float, external: float) -> float:
        return self._degree * (own + external) * (self._own_rows + self._allowed) / self.vertices

    @property
    def _allowed(self) -> float:
        if not self.expansion:
            return self._external_rows
        reached, new = 0.0, self._own_rows
        for hop in range(self.expansion.max_hop):
            # All neighbours of drawn rows count, because sampling draws from the whole graph.
            elsewhere = 1 - self._own_rows / self.vertices if hop == 0 else 1.0
            edges = new * min(self.drawn, self._degree) * elsewhere
            new = (self._external_rows - reached) * -np.expm1(-edges / self._external_rows)
            reached += new
        return float(reached)

    def _halo(self, rows: float, local: float, among: float, parts: tuple[float, float]) -> float:
        """Return the halo rows of a METIS part of the server's rows."""
        count = among / local if local else 1.0
        if count <= 1:
            return 0.0
        degree = self._degree * among / self.vertices  # degree among the server's rows
        edges_per_row = self.metis.at(count) * degree / count * rows / local
        return float((among - local) * -np.expm1(-edges_per_row))


@dataclass(frozen=True, eq=False)
class GraNNDisProblem(TheirProblem):
    """A problem as GraNNDis' code partitions and samples it.

    kept: share of the drawn neighbours that are training vertices.
    """

    kept: float = 1.0

    def layout(
        self, depth: int = 0, expansion: Expansion | None = None, groups: tuple[int, ...] = ()
    ) -> Layout | EstimatedLayout:
        usual = super().layout(depth, expansion, groups)
        if not isinstance(usual, EstimatedLayout) or not usual.inside:
            return usual
        of = (usual.servers, usual.layers, usual.first_varying, usual.layers, usual.expansion)
        return self.cache.get(
            ("in order", *of, self.stats, self.kept),
            lambda: InOrder(
                usual.vertices,
                usual.edges,
                *of,
                Mixing(),
                targets=self.stats.train_vertices / len(set(usual.servers)),
                metis=mixing_of(self.stats),
                drawn=expansion.fanout * self.kept if expansion else np.inf,
            ),
        )


def as_theirs(problem: Problem, paper: str) -> Problem:
    """Return the problem as the paper's code has it, if the code is known to differ."""
    stats = trained_on(problem.stats, paper)
    inductive = stats is not problem.stats
    if paper == "granndis":
        fields = stats, None, problem.workload, problem.cluster, problem.method
        return GraNNDisProblem(*fields, kept=among(problem.stats) if inductive else 1.0)
    return replace(problem, stats=stats) if inductive else problem


def between_servers(case: Question) -> float:
    """Return the seconds that an epoch loses on links between servers.

    GraNNDis measures epochs with and without the exchanges between servers.
    """
    link = case.problem.cluster.inter_node
    if link is None:
        return 0.0
    free = link.model_copy(update={"bandwidth": FREE, "latency": 0.0})
    cluster = case.problem.cluster.model_copy(update={"inter_node": free})
    without = replace(case, problem=replace(case.problem, cluster=cluster))
    return float(case.prediction.epoch_s) - float(without.prediction.epoch_s)


def reduced(case: Question) -> float:
    """Return the seconds per epoch of all-reduces."""
    seconds = float(np.max(case.prediction.by_op["all_reduce"]))
    if case.row["paper"] != "pipegcn":
        return seconds
    messages = tensors(case.problem) * 2 * (case.problem.ranks - 1)  # a ring for each parameter
    return seconds + messages * TCP_LATENCY


def tensors(problem: Problem) -> int:
    """Return the number of parameter tensors of PipeGCN's GraphSAGE.

    A layer has a matrix and a bias for own rows, and another pair for the aggregate (layer 1 has
    one pair for both). Every layer except the last has a norm with two tensors.
    """
    layers = problem.workload.layers
    return 4 * layers - 2 + 2 * (layers - 1)
