"""Differences of DGL, PyG, PGL, SALIENT and SGNN from gnnplan, as their sources show them.

A row whose parameters name its `software` is predicted with this model:

    operations    The host calls every operation, which takes some time (`call`), while the GPU
                  works. An epoch, or a batch, takes as long as the slower of the two.
    kernels       Kernels gather whole rows. Attention is several operations along edges; each reads
                  and writes a number per edge and head, or in PyG a row per edge.
    samplers      A number of `workers` sample and build batches for a rank, on cores that all ranks
                  of a server share. Or the GPU samples, as in gnnplan (supply.py).
    loads         The program gathers features in the server's memory, and copies them from memory
                  that is not pinned. In SALIENT and SGNN the samplers gather; or the GPU reads the
                  server's memory (`reads`). Features may have half width (`feature_bytes`).
    overlap       SALIENT samples, loads and trains at the same time. All other programs do so one
                  after the other: with 4, 8 and 12 workers that sample ahead, an epoch of DGL and
                  of PyG takes a time, and a time divided by the workers (`ningsir`).

CONSTANTS are rates of software. Works of the same people (WORKS) are predicted with rates that were
fitted to all other works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from gnnplan.papers.question import Params, Question, Row, TheirModel, TheirProblem, made, params_of
from gnnplan.planner.cluster.compute import SECTOR, WARP_LINE
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.gnn.kinds import LayerSpec
from gnnplan.planner.gnn.layer import LayerRecord
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.trace import EDGES, NOTHING, Amount, Work
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.vocabulary.files import quoted
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import BothPasses, Compute, Gather

# Works by who printed them. What is predicted of a program follows from what other people print.
WORKS = (
    ("dgl", "graphbolt", "pyg"),
    ("gnnlab",),
    ("ningsir",),
    ("pgl",),
    ("quiver",),
    ("salient", "salient++"),
)
# What is believed before a row is seen, within a factor of three (the prior of calibrate.py).
CONSTANTS = {
    "call": 20e-6,  # host time of a framework operation [s]
    "sampler": 3e6,  # edges per second that one of the program's workers samples and builds
    "pyg": 2e6,  # the same for PyG's workers
    "slicing": 6e9,  # rate at which a program gathers rows in the server's memory [B/s]
    "memory": 2e10,  # the highest such rate of all programs of a server together [B/s]
}
PAGEABLE = 0.5  # share of a host link's bandwidth that copies from unpinned memory reach
# A host link with this provenance is shared by two GPUs: a single GPU has twice the bandwidth.
UNSHARED = "two GPUs on one"


# -- programs --------------------------------------------------------------------------------------


class Calls(NamedTuple):
    """Framework operations of a layer by kind, forward and backward.

    A library call along edges counts as the number of torch's operations that take its time."""

    gcn: tuple[int, int]
    sage: tuple[int, int]
    gat: tuple[int, int]
    gin: tuple[int, int]
    sgc: tuple[int, int] = (2, 3)  # only a product: the aggregate is computed before training


# A message passing of DGL prepares frames and looks up types, which takes the time of about ten
# operations, and has its own autograd function. That of PyG collects arguments.
DGL_CALLS = Calls(gcn=(28, 11), sage=(20, 10), gat=(58, 46), gin=(22, 14))
# Its softmax along edges is four kernels forward and two backward. Each was a message before 0.4.3.
OLD_DGL_CALLS = DGL_CALLS._replace(gat=(58 + 4 * 10, 46 + 2 * 10))
PYG_CALLS = Calls(gcn=(10, 6), sage=(8, 9), gat=(48, 34), gin=(14, 14))
PER_TENSOR = 10  # operations per parameter: zeroing its gradient, and Adam's step
OF_LOSS = (4, 3)  # operations of the loss, forward and backward

INDEX = 4  # bytes of a vertex or edge id in their kernels
# Attention per edge, forward and backward: numbers per head, indices, numbers at random addresses
# (by the edge's position in the transposed graph), and passes over a row.
DGL_EDGES = (14, 12, 0, 0), (19, 15, 2, 0)
PYG_EDGES = (22, 16, 0, 6), (25, 16, 0, 10)
# DGL's benchmark of PyG makes attention of both ends' rows on each edge, not of numbers per vertex.
PYG_ROWS = (22, 16, 0, 14), (25, 16, 0, 25)


@dataclass(frozen=True)
class Program:
    """A training program: operations per layer and per edge, and how it gathers features."""

    calls: Calls = DGL_CALLS
    edges: tuple[tuple[int, ...], tuple[int, ...]] = DGL_EDGES
    # gathering of features: 'in line' (by the loop), 'by all cores' (also by the loop), or 'ahead'
    # (by the samplers)
    slices: str = "in line"
    sampler: str = "sampler"  # name of the sampler's rate in CONSTANTS


PROGRAMS = {
    "dgl": Program(),
    "dgl_0.3": Program(OLD_DGL_CALLS),
    "pgl": Program(),
    "pyg": Program(PYG_CALLS, PYG_EDGES, sampler="pyg"),
    "pyg_rows": Program(PYG_CALLS, PYG_ROWS, sampler="pyg"),
    "salient": Program(PYG_CALLS, PYG_EDGES, "ahead"),
    "sgnn": Program(slices="by all cores"),
}


# -- their machines --------------------------------------------------------------------------------


def kept(paper: str) -> dict[str, float]:
    """Return the rates for a work: those that were fitted to other people's works."""
    column = next((works[0] for works in WORKS if paper in works), "nobody")
    return {line["constant"]: float(line[column]) for line in quoted("software.csv")}


def cluster_of(whole: Cluster, row: Row, constants: Mapping[str, float] | None = None) -> Cluster:
    """Return the row's testbed with the rates of the row's program."""
    params = params_of(row)
    if params.get("software") not in PROGRAMS:
        return whole
    constants = constants or kept(row["paper"])
    ranks = int(row["gpus_per_node"])
    link = _loading(whole, params, ranks, constants)
    rate = 2 * _sampling(whole, params, ranks, constants)  # for sampling, and for building blocks
    device = whole.device.model_copy(update={"launch": constants["call"]})
    rates = {"draw": rate, "lay": rate}
    there = {"host": link, "host_rates": rates, "host_call": 0.0, "device": device}
    return whole.model_copy(update=there)


def _sampling(whole: Cluster, params: Params, ranks: int, constants: Mapping[str, float]) -> float:
    """Return the edges per second of a rank's samplers on the host."""
    with_a_core = np.inf if whole.cores is None else whole.cores / ranks
    workers = min(int(params.get("workers", 1)), with_a_core)
    return constants[PROGRAMS[params["software"]].sampler] * float(workers)


def _loading(whole: Cluster, params: Params, ranks: int, constants: Mapping[str, float]) -> Link:
    """Return the host link; its bandwidth includes the gathering of features before it."""
    link = whole.host or whole.intra_node
    shared = UNSHARED in whole.provenance.get("host.bandwidth", "")
    rate = link.bandwidth * (1 + (shared and 2 * ranks <= max(whole.gpus_per_server, 2)))
    reads, slices = params.get("reads", ""), PROGRAMS[params["software"]].slices
    sliced = constants["memory"] / ranks
    if slices == "in line":
        sliced = min(sliced, constants["slicing"])
        rate *= 1.0 if reads else PAGEABLE
    if slices == "ahead":  # beside the copies
        rate = min(rate, sliced)
    elif reads != "device":
        rate = 1 / (1 / sliced + 1 / rate)
    return link.model_copy(update={"bandwidth": rate})


# -- their work ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InterpretedModel(TheirModel):
    """A GNN with the operations of a program.

    feature_bytes: bytes per number of the features in the server's memory.
    """

    program: Program = PROGRAMS["dgl"]
    feature_bytes: int = 4

    def feature_transit_bytes(self, rows: Number) -> Number:
        return rows * self.features * self.feature_bytes

    def layer_record(self, layer: int, narrow: bool = False, **how: bool) -> LayerRecord:
        ours, spec = super().layer_record(layer, narrow, **how), self.layers[layer - 1]
        first, second = ours.passes
        return replace(ours, passes=(self._along(spec, first, 0), self._along(spec, second, 1)))

    def _along(self, spec: LayerSpec, work: Work, direction: int) -> Work:
        """Return the work with gathers of whole rows, and with the operations along edges.

        direction: 0 forward, 1 backward."""
        gathers = [_whole_rows(gather, self.itemsize) for gather in work.gathers]
        if not spec.heads:
            return replace(work, gathers=gathers)
        numbers, indices, random, rows = self.program.edges[direction]
        nbytes = (numbers * spec.heads + rows * spec.h_out) * self.itemsize
        nbytes += indices * INDEX + random * SECTOR
        moved = work.amounts.get("elementwise_bytes", NOTHING) + nbytes * EDGES
        amounts = work.amounts | {"elementwise_bytes": moved, "attention_edges": NOTHING}
        # the gradient of an attention weight is a product of two rows
        gathers += gathers[-1:] * direction
        return replace(work, amounts=amounts, gathers=gathers)

    def _launches(self, spec: LayerSpec, narrow: bool) -> tuple[int, int]:
        if not spec.matrices:
            return 0, 0
        ways = getattr(self.program.calls, spec.kind)
        others = self.relu + (self.dropout > 0 and spec.drops)
        return ways[0] + others, ways[1] + others

    def finish(self, rows: Number, edges: Number | None = None, negatives: int = 0) -> BothPasses:
        forward, backward = super().finish(rows, edges, negatives)
        return BothPasses(
            replace(forward, launches=OF_LOSS[0]), replace(backward, launches=OF_LOSS[1])
        )

    def update(self, weights: Number) -> Compute:
        tensors = sum(s.matrices + s.bias + 2 * (s.heads > 0) for s in self.layers if s.matrices)
        return replace(super().update(weights), launches=PER_TENSOR * tensors)


def _whole_rows(gather: Gather, itemsize: int) -> Gather:
    """Return the gather with more source rows, since a cache holds fewer whole rows than lines."""
    lines = max(1.0, gather.width * itemsize / WARP_LINE)
    return gather._replace(sources=lines * Amount.of(gather.sources))


@dataclass(frozen=True, eq=False)
class InterpretedProblem(TheirProblem):
    """A problem for a program in PROGRAMS.

    last_heads: number of attention heads of the last layer, which averages them; 0: one head.
    """

    program: Program = PROGRAMS["dgl"]
    feature_bytes: int = 4
    last_heads: int = 0

    def _described(self) -> Model:
        theirs, heads = super()._described(), self.last_heads
        *before, last = theirs.layers
        last = replace(last, h_out=heads * last.h_out, heads=heads) if heads else last
        own = {"program": self.program, "feature_bytes": self.feature_bytes}
        return made(InterpretedModel, theirs, **own, layers=(*before, last))


def as_theirs(problem: TheirProblem, params: Params) -> TheirProblem:
    """Return the problem for the program that the row's parameters name, if any."""
    if params.get("software") not in PROGRAMS:
        return problem
    own = {name: int(params[name]) for name in ("feature_bytes", "last_heads") if name in params}
    return made(InterpretedProblem, problem, **own, program=PROGRAMS[params["software"]])


# -- seconds of an epoch ---------------------------------------------------------------------------

# gnnplan's operation -> part of a program's epoch; all other operations compute. A program's
# adjacency lists are int32 and fit the GPU, so it reads none over the host link.
PARTS = {"draw": "sample", "lay": "sample", "load": "load", "ask": "fetch", "fetch": "fetch"}
PARTS |= {"read": "left out"}
# DGL's attention kernels have a thread per row and column, which processes the row's edges one
# after the other. STEP: time of an edge, for two memory accesses [s]. WALKS: number of such kernels
# of a layer, forward and backward.
STEP, WALKS = 3e-7, 7


def epoch(case: Question) -> float:
    """Return the seconds of an epoch: of the slower of host and GPU, and of sampling and loads."""
    problem, chosen = case.problem, case.strategy
    assert isinstance(problem, InterpretedProblem)
    device = problem.cluster.device.model_copy(update={"launch": 0.0})
    at_once = replace(problem, cluster=problem.cluster.model_copy(update={"device": device}))
    of = parts(replace(case, problem=at_once))
    called_s = parts(case)["compute"] - of["compute"]
    compute_s = max(of["compute"] + _walked_s(case, problem), called_s)
    steps_s = of["sample"], of["load"], of["fetch"], compute_s
    ahead = isinstance(chosen, OnBatches) and chosen.prefetch and problem.program.slices == "ahead"
    return max(steps_s) if ahead else sum(steps_s)


def parts(case: Question) -> dict[str, float]:
    """Return the seconds of an epoch by part: sample, load, fetch, compute."""
    seconds = dict.fromkeys((*PARTS.values(), "compute"), 0.0)
    for kind, by_rank in case.prediction.by_op.items():
        seconds[PARTS.get(kind.partition(":")[0], "compute")] += float(np.max(by_rank))
    knobs, stats, model = case.strategy.knobs(), case.problem.stats, case.problem.model
    if knobs.get("hot") == "degree" and stats.directed and knobs["cache"]:
        # The cache serves as many reads as its rows have readers (the curve is that of compute.py).
        # Batches begin at few vertices, whose neighbours are not those that most vertices read.
        cached = float(str(knobs["cache"])) / (model.features * model.itemsize) / stats.vertices
        plain = replace(case, strategy=replace(case.strategy, cache=0))  # type: ignore[call-arg]
        seconds["load"] = parts(plain)["load"] * (1 - ndtr(stats.spread + ndtri(cached)))
    return seconds


def _walked_s(case: Question, problem: InterpretedProblem) -> float:
    """Return the seconds for which a GPU waits for the row with most edges."""
    most = int(params_of(case.row).get("most_neighbours", 0))
    attends = sum(spec.heads > 0 for spec in problem.model.layers)
    return WALKS * STEP * attends * most * (problem.program.edges is DGL_EDGES)
