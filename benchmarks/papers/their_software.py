"""What DGL, PyG, PGL, SALIENT and SGNN do differently from us, as their sources say.

A row whose parameters name its `software` is predicted with what is here:

    operations    A program is interpreted: every operation takes the host a while (`call`), and the
                  GPU works beside it. An epoch, or a batch, takes as long as the slower of both.
    kernels       They gather whole rows. Attention is several operations along edges, each of which
                  reads and writes a number per edge and head, or in PyG a row per edge.
    samplers      So many `workers` draw and lay out batches for a rank, on cores that all ranks of
                  a server share; or the GPU does, as ours do (device_sampler.py).
    loads         The program slices features in the server's memory, and copies them from memory
                  that is not pinned, between two batches. SALIENT's and SGNN's samplers slice; or
                  the GPU reads the server's memory (`reads`). Features may have half width
                  (`feature_bytes`).

CONSTANTS are rates of software. They are found from one half of the works (HALVES), and the other
half is predicted with them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri

from gnnplan.papers.question import Params, Question, Row
from gnnplan.papers.their_passes import TheirModel, TheirProblem
from gnnplan.planner.cluster.compute import WARP_LINE
from gnnplan.planner.cluster.spec import Cluster, Link
from gnnplan.planner.gnn.amounts import EDGES, NOTHING, Amount
from gnnplan.planner.gnn.kinds import Layer
from gnnplan.planner.gnn.layer import Played
from gnnplan.planner.gnn.model import Model
from gnnplan.planner.gnn.trace import GatherOf, Work
from gnnplan.planner.strategies.minibatch.on_batches import OnBatches
from gnnplan.planner.vocabulary.files import quoted
from gnnplan.planner.vocabulary.numbers import Number
from gnnplan.planner.vocabulary.schedule import Compute

# Works in the order of their names go to the one half and the other in turn. So what is predicted
# of a program that has works in both follows from what other people print of it.
HALVES = ("dgl", "graphbolt", "pyg", "salient"), ("gnnlab", "pgl", "quiver", "salient++")
# What is believed before a row is seen, within a factor of three (the prior of calibrate.py).
CONSTANTS = {
    "call": 20e-6,  # [s] of a framework operation, on the host
    "dgl": 3e6,  # [edges/s] that a worker of this program draws and lays out
    "pyg": 2e6,
    "salient": 4e6,
    "slicing": 6e9,  # [B/s] of rows that a program picks in the server's memory
    "memory": 2e10,  # [B/s] the same, of all programs of a server together
}
PAGEABLE = 0.5  # share of a host link that copies from memory reach which is not pinned
UNSHARED = "two GPUs on one"  # a host link's provenance: alone, a GPU has twice as much of it


# -- programs --------------------------------------------------------------------------------------


class Calls(NamedTuple):
    """Framework operations of a layer by kind, forward and backward: torch's, and for a call of the
    library along edges as many as take its time."""

    gcn: tuple[int, int]
    sage: tuple[int, int]
    gat: tuple[int, int]
    gin: tuple[int, int]
    sgc: tuple[int, int] = (2, 3)  # a product alone: the aggregate is made before


# A message passing of DGL prepares frames and looks types up, some ten operations' time, and has an
# autograd function of its own; PyG's collects arguments.
DGL_CALLS = Calls(gcn=(28, 11), sage=(20, 10), gat=(58, 46), gin=(22, 14))
PYG_CALLS = Calls(gcn=(10, 6), sage=(8, 9), gat=(48, 34), gin=(14, 14))
PER_TENSOR = 10  # of a parameter: its gradient becomes zero, and Adam's step
OF_LOSS = (4, 3)

INDEX = 4  # [B] of a vertex or an edge in their kernels
SECTOR = 32  # [B] that a GPU reads for a number that stands anywhere
# Of attention per edge, forward and backward: numbers per head, indices, numbers that stand
# anywhere (by the edge's place in the transposed graph), and passes over a row.
DGL_EDGES = (14, 12, 0, 0), (19, 15, 2, 0)
PYG_EDGES = (22, 16, 0, 6), (25, 16, 0, 10)


@dataclass(frozen=True)
class Program:
    """A program: operations per layer, per edge, and what slices features."""

    calls: Calls = DGL_CALLS
    edges: tuple[tuple[int, ...], tuple[int, ...]] = DGL_EDGES
    slices: str = "in line"  # or 'ahead', as samplers do, or in line 'by all cores'
    sampler: str = "dgl"  # the constant that is its rate


PROGRAMS = {
    "dgl": Program(),
    "pgl": Program(),
    "pyg": Program(PYG_CALLS, PYG_EDGES, sampler="pyg"),
    "salient": Program(PYG_CALLS, PYG_EDGES, "ahead", "salient"),
    "sgnn": Program(slices="by all cores", sampler="salient"),
}


# -- what they run on ------------------------------------------------------------------------------


def kept(paper: str) -> dict[str, float]:
    """The constants that hold for a work: those that the other half gave."""
    column = "second" if paper in HALVES[0] else "first"
    return {line["constant"]: float(line[column]) for line in quoted("software.csv")}


def cluster_of(whole: Cluster, row: Row, constants: Mapping[str, float] | None = None) -> Cluster:
    """The row's testbed as its program drives it."""
    params = json.loads(row["strategy_params"] or "{}")
    if params.get("software") not in PROGRAMS:
        return whole
    constants = constants or kept(row["paper"])
    ranks = int(row["gpus_per_node"])
    link = _loading(whole, params, ranks, constants)
    rate = 2 * _sampling(whole, params, ranks, constants)  # each of drawing and laying out
    device = whole.device.model_copy(update={"launch": constants["call"]})
    return whole.model_copy(
        update={"host": link, "host_rates": {"draw": rate, "lay": rate}, "device": device}
    )


def _sampling(whole: Cluster, params: Params, ranks: int, constants: Mapping[str, float]) -> float:
    """Edges per second of a rank's samplers on the host."""
    workers = int(params.get("workers", 1))
    cores = np.inf if whole.cores is None else whole.cores / ranks
    return constants[PROGRAMS[params["software"]].sampler] * float(min(workers, cores))


def _loading(whole: Cluster, params: Params, ranks: int, constants: Mapping[str, float]) -> Link:
    """The host link, with the slicing before it."""
    link = whole.host or whole.intra_node
    shared = UNSHARED in whole.provenance.get("host.bandwidth", "")
    rate = link.bandwidth * (1 + (shared and 2 * ranks <= max(whole.gpus_per_server, 2)))
    reads, slices = params.get("reads", ""), PROGRAMS[params["software"]].slices
    if reads != "device" and slices != "ahead":
        of_all = 1 / constants["memory"]
        own = 0.0 if slices == "by all cores" else 1 / constants["slicing"]
        pinned = reads == "pinned" or slices != "in line"
        rate = 1 / (own + of_all * ranks + 1 / (rate * (1.0 if pinned else PAGEABLE)))
    return link.model_copy(update={"bandwidth": rate})


# -- what they compute -----------------------------------------------------------------------------


@dataclass(frozen=True)
class InterpretedModel(TheirModel):
    """A GNN whose operations are a program's.

    feature_bytes: of a number of a vertex's features, before they are on the GPU.
    """

    program: Program = PROGRAMS["dgl"]
    feature_bytes: int = 4

    def features_moved(self, rows: Number) -> Number:
        return rows * self.features * self.feature_bytes

    def played(self, layer: int, narrow: bool = False, apart: bool = False) -> Played:
        told, spec = super().played(layer, narrow, apart), self.layers[layer - 1]
        first, second = told.ways
        return replace(told, ways=(self._along(spec, first, 0), self._along(spec, second, 1)))

    def _along(self, spec: Layer, work: Work, way: int) -> Work:
        """The work with their gathers of whole rows, and their operations along edges."""
        gathers = [_whole_rows(gather, self.itemsize) for gather in work.gathers]
        if not spec.heads:
            return replace(work, gathers=gathers)
        numbers, indices, anywhere, rows = self.program.edges[way]
        nbytes = (numbers * spec.heads + rows * spec.h_out) * self.itemsize
        nbytes += indices * INDEX + anywhere * SECTOR
        moved = work.amounts.get("elementwise_bytes", NOTHING) + nbytes * EDGES
        amounts = work.amounts | {"elementwise_bytes": moved, "attention_edges": NOTHING}
        # the gradient of a weight is a product of two rows
        gathers += gathers[-1:] * way
        return replace(work, amounts=amounts, gathers=gathers)

    def _launches(self, spec: Layer, narrow: bool) -> tuple[int, int]:
        if not spec.matrices:
            return 0, 0
        ways = getattr(self.program.calls, spec.kind)
        others = self.relu + (self.dropout > 0 and spec.drops)
        return ways[0] + others, ways[1] + others

    def finish(
        self, rows: Number, edges: Number | None = None, negatives: int = 0
    ) -> tuple[Compute, Compute]:
        forward, backward = super().finish(rows, edges, negatives)
        return replace(forward, launches=OF_LOSS[0]), replace(backward, launches=OF_LOSS[1])

    def update(self, weights: Number) -> Compute:
        tensors = sum(s.matrices + s.bias + 2 * (s.heads > 0) for s in self.layers if s.matrices)
        return replace(super().update(weights), launches=PER_TENSOR * tensors)


def _whole_rows(gather: GatherOf, itemsize: int) -> GatherOf:
    """As if more rows were read from: a cache holds fewer if each has all its numbers."""
    lines = max(1.0, gather.width * itemsize / WARP_LINE)
    return gather._replace(among=lines * Amount.of(gather.among))


@dataclass(frozen=True, eq=False)
class InterpretedProblem(TheirProblem):
    """A problem for a program of PROGRAMS.

    last_heads: of attention in the last layer, whose mean is taken; 0: it has one.
    """

    program: Program = PROGRAMS["dgl"]
    feature_bytes: int = 4
    last_heads: int = 0

    @cached_property
    def model(self) -> Model:
        theirs, heads = super().model, self.last_heads
        told = {each.name: getattr(theirs, each.name) for each in fields(Model)}
        *before, last = theirs.layers
        last = replace(last, h_out=heads * last.h_out, heads=heads) if heads else last
        told |= {"program": self.program, "feature_bytes": self.feature_bytes}
        return InterpretedModel(**told | {"layers": (*before, last)})


def as_theirs(problem: TheirProblem, params: Params) -> TheirProblem:
    """The problem for the program that a row's parameters name, if they do."""
    if params.get("software") not in PROGRAMS:
        return problem
    same: dict[str, Any] = {
        each.name: getattr(problem, each.name) for each in fields(problem) if each.init
    }
    theirs: dict[str, Any] = {
        name: int(params[name]) for name in ("feature_bytes", "last_heads") if name in params
    }
    return InterpretedProblem(**same, **theirs, program=PROGRAMS[params["software"]])


# -- what an epoch takes ---------------------------------------------------------------------------

# What our operations are to a program; all others compute. Its adjacency lists are int32, and
# fit: it reads none over the host link.
PARTS = {"draw": "sample", "lay": "sample", "load": "load", "ask": "fetch", "fetch": "fetch"}
PARTS |= {"read": "left out"}
# DGL's kernels of attention have a thread per row and column, which walks the row's edges one after
# the other: two passes to memory a step [s]. So many kernels of a layer do, both ways.
STEP, WALKS = 3e-7, 7


def epoch(asked: Question) -> float:
    """Seconds of an epoch: the slower of host and GPU, and of what a program does beside it."""
    problem, chosen = asked.problem, asked.strategy
    assert isinstance(problem, InterpretedProblem)
    device = problem.cluster.device.model_copy(update={"launch": 0.0})
    at_once = replace(problem, cluster=problem.cluster.model_copy(update={"device": device}))
    of = parts(replace(asked, problem=at_once))
    called_s = parts(asked)["compute"] - of["compute"]
    compute_s = max(of["compute"] + _walked_s(asked, problem), called_s)
    if not (isinstance(chosen, OnBatches) and chosen.prefetch):
        return compute_s + of["sample"] + of["load"] + of["fetch"]
    if problem.program.slices == "in line":
        return max(of["sample"], of["load"] + of["fetch"] + compute_s)
    return max(of["sample"], of["load"], of["fetch"], compute_s)


def parts(asked: Question) -> dict[str, float]:
    """Seconds of an epoch by what a program does: sample, load, fetch, compute."""
    seconds = dict.fromkeys((*PARTS.values(), "compute"), 0.0)
    for kind, by_rank in asked.prediction.by_op.items():
        seconds[PARTS.get(kind.partition(":")[0], "compute")] += float(np.max(by_rank))
    knobs, stats, model = asked.strategy.knobs(), asked.problem.stats, asked.problem.model
    if knobs.get("hot") == "degree" and stats.directed and knobs["cache"]:
        # It serves as many reads as its rows have readers (compute.py has the curve). Batches begin
        # at few vertices, and what most vertices read is not what these do.
        cached = float(str(knobs["cache"])) / (model.features * model.itemsize) / stats.vertices
        plain = replace(asked, strategy=replace(asked.strategy, cache=0))  # type: ignore[call-arg]
        seconds["load"] = parts(plain)["load"] * (1 - ndtr(stats.spread + ndtri(cached)))
    return seconds


def _walked_s(asked: Question, problem: InterpretedProblem) -> float:
    """Seconds in which a GPU waits for the row that has most edges."""
    most = int(json.loads(asked.row["strategy_params"] or "{}").get("most_neighbours", 0))
    attends = sum(spec.heads > 0 for spec in problem.model.layers)
    return WALKS * STEP * attends * most * (problem.program.edges is DGL_EDGES)
