"""The differences of two papers' full-graph code (PipeGCN, GraNNDis) from ours.

Both publish their code: GATECH-EIC/PipeGCN, and AIS-SNU/GraNNDis_Artifact, which is made from it.
What follows was read there:

    --inductive       They train on the graph among training vertices: PipeGCN on Reddit and Yelp
                      (scripts/*.sh), GraNNDis on all graphs but papers100M (AE/*.py).
    array_split       GraNNDis' servers share training vertices in order of their ids, not by METIS,
                      so three quarters of the edges leave one of four servers. METIS cuts the share
                      of a server among its GPUs (our_train.py).
    sample_neighbors  Expansion-aware sampling draws from all neighbours in the whole graph, once
                      before training. It keeps those that are training vertices (sampler.py).
    GraphSAGELayer    GraNNDis' ResGCN+ aggregates with it: a mean, no softmax of messages
                      (module/model.py).
    Reducer           PipeGCN sums parameter by parameter, each in a Gloo group of its own, which
                      sends by TCP (helper/reducer.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property, partial
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
# Fields of our Workload that a row does not state. PipeGCN has dropout too, but on an aggregate of
# features that is made once; our workload with dropout would aggregate them in every step.
WORKLOADS: dict[str, dict[str, Any]] = {
    "pipegcn": {"norm": "layer"},
    "granndis": {"aggregation": "sum", "dropout": 0.5},
}
TCP_LATENCY = 5e-5  # [s] of a message: what presets assume of Ethernet
FREE = 1e18  # [B/s] of a link that takes no time


# -- systems as our strategies ---------------------------------------------------------------------


def _gamma(params: Params, problem: Problem) -> dict[str, Any]:
    return {"gamma": params["gamma"]} if "gamma" in params else {}


def _pipeline(members: int, params: Params, problem: Problem) -> dict[str, Any]:
    """Stages of so many ranks, and four chunks per rank, where the row does not say."""
    stages = params.get("stages", max(1, problem.ranks // members))
    return {"stages": int(stages), "chunks": int(params.get("chunks", 4 * problem.ranks))}


def _sampled(params: Params, problem: Problem) -> dict[str, Any]:
    return {
        "max_hop": int(params.get("max_hop", 1)),
        "fanout": int(params.get("fanout", 15)),
        "batches": int(params.get("updates_per_epoch", 1)),
    }


def _as_it_is(params: Params, problem: Problem) -> dict[str, Any]:
    return {}


# Systems in the file that train on the full graph -> our strategy and its knobs.
SYSTEMS: dict[str, System] = {
    "graph_parallel": ("graph_parallel", _as_it_is),
    **{name: (name, _gamma) for name in ("pipegcn", "pipegcn_g", "pipegcn_f", "pipegcn_gf")},
    "gnnpipe_pipeline": ("gnnpipe", partial(_pipeline, 1)),
    "gnnpipe_hybrid": ("gnnpipe", partial(_pipeline, 2)),
    "granndis": ("granndis", _sampled),
    "granndis_eas": ("granndis", _sampled),
    "granndis_preload": ("granndis", _as_it_is),
}


# -- what they train on ----------------------------------------------------------------------------


def trained_on(stats: GraphStats, paper: str) -> GraphStats:
    """The graph that the paper's code trains on.

    Where that is the graph among training vertices, it is cut as well as the whole graph: at the
    same number of parts it has the same mixing.
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
    """Halo rows of all parts together."""
    return float(vertices * (parts - 1) * -np.expm1(-mixing * edges / vertices / parts))


def halo(asked: Question) -> float:
    """Halo rows of all ranks together, one hop deep."""
    stats, parts = asked.problem.stats, asked.problem.ranks
    mixing = mixing_of(stats, asked.problem.method).at(parts)
    return _halo_rows(stats.vertices, stats.edges, parts, mixing)


def among(stats: GraphStats) -> float:
    """The share of edges' ends that are training vertices."""
    population = Population.of(stats)
    training = expected_frontier(stats, stats.train_vertices, ()).read
    return float(training @ population.readers) / population.edges


@dataclass(frozen=True)
class InOrder(EstimatedLayout):
    """The layout of GraNNDis' code: servers share vertices by id, their GPUs by METIS.

    Sharing by id is as good as sharing at random. `targets` are a server's training vertices, also
    those of a batch; `metis` is the graph's mixing when METIS cuts it; `drawn` is how many
    neighbours of a row the sampling keeps, wherever they are.
    """

    metis: Mixing = field(default_factory=Mixing)
    drawn: float = np.inf

    @property
    def _own_rows(self) -> float:
        assert self.targets is not None
        return self.targets

    def _kept_edges(self, own: float, external: float) -> float:
        return self._degree * (own + external) * (self._own_rows + self._allowed) / self.vertices

    @cached_property
    def _allowed(self) -> float:
        if not self.expansion:
            return self._external_rows
        reached, new = 0.0, self._own_rows
        for hop in range(self.expansion.max_hop):
            # neighbours of rows that were drawn count in full: they were drawn from the whole graph
            elsewhere = 1 - self._own_rows / self.vertices if hop == 0 else 1.0
            edges = new * min(self.drawn, self._degree) * elsewhere
            new = (self._external_rows - reached) * -np.expm1(-edges / self._external_rows)
            reached += new
        return float(reached)

    def _halo(self, rows: float, local: float, among: float, parts: tuple[float, float]) -> float:
        """Halo rows of a METIS part of what the server has."""
        count = among / local if local else 1.0
        if count <= 1:
            return 0.0
        degree = self._degree * among / self.vertices  # among the server's rows
        edges_per_row = self.metis.at(count) * degree / count * rows / local
        return float((among - local) * -np.expm1(-edges_per_row))


@dataclass(frozen=True, eq=False)
class GraNNDisProblem(TheirProblem):
    """A problem as GraNNDis' code cuts and samples it.

    `kept` is the share of drawn neighbours that are training vertices.
    """

    kept: float = 1.0

    def layout(
        self, depth: int = 0, expansion: Expansion | None = None, groups: tuple[int, ...] = ()
    ) -> Layout | EstimatedLayout:
        usual = super().layout(depth, expansion, groups)
        if not isinstance(usual, EstimatedLayout) or not usual.inside:
            return usual
        of = (usual.servers, usual.layers, usual.first_varying, usual.layers, usual.expansion)
        return self.known.answer(
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
    """The problem as the paper's code has it, where that is known."""
    stats = trained_on(problem.stats, paper)
    inductive = stats is not problem.stats
    if paper == "granndis":
        fields = stats, None, problem.workload, problem.cluster, problem.method
        return GraNNDisProblem(*fields, kept=among(problem.stats) if inductive else 1.0)
    return replace(problem, stats=stats) if inductive else problem


def between_servers(asked: Question) -> float:
    """Seconds by which an epoch is shorter where links between servers take no time.

    GraNNDis measures this: training with and without those exchanges.
    """
    link = asked.problem.cluster.inter_node
    if link is None:
        return 0.0
    free = link.model_copy(update={"bandwidth": FREE, "latency": 0.0})
    cluster = asked.problem.cluster.model_copy(update={"inter_node": free})
    without = replace(asked, problem=replace(asked.problem, cluster=cluster))
    return float(asked.prediction.epoch_s) - float(without.prediction.epoch_s)


def reduced(asked: Question) -> float:
    """Seconds per epoch of all-reduces."""
    seconds = float(np.max(asked.prediction.by_op["all_reduce"]))
    if asked.row["paper"] != "pipegcn":
        return seconds
    messages = tensors(asked.problem) * 2 * (asked.problem.ranks - 1)  # a ring for each parameter
    return seconds + messages * TCP_LATENCY


def tensors(problem: Problem) -> int:
    """The number of parameter tensors of PipeGCN's GraphSAGE.

    A layer has a matrix and a bias for own rows and for the aggregate (layer 1 has one pair for
    both), and every layer but the last a norm with two.
    """
    layers = problem.workload.layers
    return 4 * layers - 2 + 2 * (layers - 1)
