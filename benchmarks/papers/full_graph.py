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
                      over TCP (helper/reducer.py)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from gnnplan.papers.question import Params, Question, Row, System, TheirProblem
from gnnplan.planner.graph.graph import GraphStats
from gnnplan.planner.ownership.estimated import (
    EstimatedLayout,
    Mixing,
    Population,
    expected_frontier,
    mixing_of,
)
from gnnplan.planner.ownership.layout import Expansion, Layout
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.layerwise.granndis import GraNNDis
from gnnplan.planner.vocabulary.numbers import PerRank

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
        self, depth: int = 0, expansion: Expansion | None = None, groups: PerRank = ()
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


# -- memory of their code in a step, tensor by tensor ----------------------------------------------

# Memory of PipeGCN's and GraNNDis' code in a step, tensor by tensor: does it fit in a GPU?
#
# Tensors are those of GATECH-EIC/PipeGCN and AIS-SNU/GraNNDis_Artifact (helper/feature_buffer.py,
# module/*.py). Brackets give a tensor's rows: a layer's output rows, or its sources (own rows and
# halo).
#
#     graph         DGL stores it by edges, by rows and by columns, with int32 ids: 8 bytes per edge
#                   each.
#     features      PipeGCN keeps its own features, and their neighbours' mean (--use-pp).
#     layer         Received rows and their gradients (f_recv, b_recv: halo). Own and halo rows in
#                   one buffer (f_buf: sources). Dropout's output and mask (sources). The mean of
#                   neighbours (rows). Norm and ReLU: before dropout in GraNNDis' ResGCN+ (sources),
#                   after the layer in PipeGCN's GraphSAGE (twice rows).
#     linear layer  Dropout's output and mask, norm and ReLU (rows): PipeGCN's last two layers on
#                   Yelp (--n-linear 2).
#     ends          GraNNDis' encoder keeps only features. Logits, their log-softmax, and the
#                   gradients of both.
#
# Nothing is kept per edge: the mean is DGL's copy_u and sum, which makes no messages. The peak is
# in the backward pass of the widest layer, with three gradients of its sources. Weights, NCCL's
# buffers and the memory of CUDA itself are not counted; presets leave a tenth of the memory for
# them.


EDGE = 24  # bytes of the graph per edge
DROPOUT = 1.25  # factor on a tensor's bytes: dropout's output, and a mask of 1 byte per number
NO_DROPOUT = ("ogbn-papers100M",)  # PipeGCN Table 3
LINEAR = {"yelp": 2}  # number of PipeGCN's last layers that aggregate nothing
MOST_BATCHES = 1024
# Factor on the counted memory for memory that is not counted (NCCL, a fragmented heap), if a row
# shows it. On GraNNDis' 2080 Ti, 112 layers on Reddit need five batches (Sec. 8.7). Five batches
# count as 6.2 GB and four as 7.3 GB, of 10.6 GB.
UNCOUNTED = {"granndis_2080ti_1gbe": 1.58}


def gave_a_factor(row: Row) -> bool:
    """Return whether a factor in UNCOUNTED was derived from the row."""
    return (
        row["testbed"] in UNCOUNTED
        and row["metric"] == "fits_in_memory"
        and row["strategy"].startswith("granndis")
    )


def fits(case: Question, any_batches: bool) -> bool:
    """Return whether the fullest rank fits its GPU.

    any_batches: GraNNDis reduces its batches until they fit (Sec. 5), so it is enough if some
    number of batches fits.
    """
    problem, strategy = case.problem, case.strategy
    memory = problem.cluster.device.memory
    if not (any_batches and isinstance(strategy, GraNNDis)):
        return needed(case) <= memory
    most = min(MOST_BATCHES, max(1, problem.stats.train_vertices // problem.ranks))
    counts = [2**power for power in range(int(np.log2(most)) + 1)]
    return any(
        needed(replace(case, strategy=replace(strategy, batches=count))) <= memory
        for count in counts
    )


def needed(case: Question) -> float:
    """Return the memory of the fullest rank [B]."""
    problem, strategy = case.problem, case.strategy
    layouts: list[Layout | EstimatedLayout] = [problem.layout()]
    if isinstance(strategy, GraNNDis):
        layouts = list(strategy.layouts(problem)) or [strategy.layout(problem)]
    factor = UNCOUNTED.get(case.row["testbed"], 1.0)
    return factor * max(_counted(case, layout) for layout in layouts)


def _counted(case: Question, layout: Layout | EstimatedLayout) -> float:
    """Return the bytes of the tensors that the module docstring lists [B]."""
    problem, model = case.problem, case.problem.model
    itemsize, layers = model.itemsize, problem.workload.layers
    pipegcn = case.row["paper"] == "pipegcn"
    linear = LINEAR.get(problem.stats.name, 0) if pipegcn else 0
    dropout = 0.0 if pipegcn and problem.stats.name in NO_DROPOUT else DROPOUT
    kept, widest = 0.0, 0.0
    for layer in range(1, layers + 1):
        facts, spec = layout.facts(layer), model.layers[layer - 1]
        rows, sources = float(facts.rows.max()), float(facts.sources.max())
        halo = sources - rows
        if layer == 1:
            kept += EDGE * float(facts.edges.max()) + rows * model.features * itemsize
        if model.encoder:
            kept += ((2 + dropout) * sources + rows + 2 * halo) * spec.h_in * itemsize
        elif layer == 1:  # the features' mean, and dropout of features and mean
            kept += (2 * dropout + 1) * rows * model.features * itemsize
            sources = rows
        elif layer > layers - linear:
            kept += dropout * rows * spec.h_in * itemsize
            sources = rows
        else:
            kept += ((1 + dropout) * sources + rows + 2 * halo) * spec.h_in * itemsize
        if not model.encoder and layer < layers:
            kept += 2 * rows * spec.h_out * itemsize
        widest = max(widest, 3 * sources * spec.h_in * itemsize)
    ends = 4 * rows * model.classes * itemsize
    return kept + ends + widest
