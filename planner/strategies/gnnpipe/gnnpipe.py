"""GNNPipe: stages of consecutive layers form a pipeline, through which the graph passes in chunks.

Every rank (or group of ranks) is a stage: it has some consecutive layers, of the whole graph. The
graph is cut into chunks, which pass all stages forward and then, in reverse order, backward. A row
that a chunk reads from a chunk that comes later is historical: it is taken from an earlier epoch.

    pipeline: 3 stages, 4 chunks, one step; f: forward of the stage's layers on a chunk, b: backward
    stage 0  |f0|f1|f2|f3|                    |b3|b2|b1|b0|update
    stage 1     |f0|f1|f2|f3|              |b3|b2|b1|b0|update
    stage 2        |f0|f1|f2|f3|b3|b2|b1|b0|update

    hybrid: a stage is a group of g ranks (rank = stage * g + member), and member i owns sub-chunk i
    of every chunk; below, one chunk in a stage of 2 layers, g = 2; xx: halo exchange in the group
    member 0  receive|  |f l1|  |f l2|send      receive|b l2|  |b l1|  |send
    member 1  receive|xx|f l1|xx|f l2|send      receive|b l2|xx|b l1|xx|send
              after the last chunk: all-reduce in the group, update

Fresh and historical rows: rows of chunks that this step has already processed, the own chunk
included, are fresh; all others are historical. Because backward runs in reverse order, a fresh row
has its whole gradient before that gradient is passed on.

Hybrid: a member keeps copies of the rows of others that its own rows read. Such a row crosses once
per layer, when its own chunk is processed; its gradient goes home when backward comes to that
chunk. A remote row is thus fresh exactly when a local one would be, and the hybrid computes what
the pipeline with the same chunks computes.

Three tricks, each with its knob:

    shuffle                 a new order of chunks in every epoch, the same on all stages
    historical_gradients    True: the previous epoch's gradients are added at historical rows;
                            False: no gradient passes through them
    period (alpha)          epoch t reads the embeddings of epoch alpha * floor((t-1) / alpha);
                            1 is off

Epoch 0 is an evaluation pass with the initial weights. Our choices where the paper is silent:

    GCNII's encoder output is a hidden row like any other, so layer 1 may read it historically.
    With shuffling, historical gradients follow what was read in the step before.
    There are 4 x stages chunks by default.
    Stages get layers by cost, so that the slowest stage is as fast as possible.

Exact: the gradient of one process with one chunk and whole rows only; else historical rows, or few
bits of a row that a stage hands on, approximate it.

Bytes per epoch, for N vertices, rows of H numbers of b bytes, g ranks per stage and W weights of
all stages:

    2 (stages-1) N H b        chunks between stages; twice for GCNII, which hands initial rows on;
                              a model whose layers' rows are summed hands the sum on; with `bits`
                              such a row of d numbers is ceil(d bits / 8) + 4 bytes (bits.py)
    2 b sum_l H_{l-1} halo    hybrid: over layers whose input varies; halo: rows that other members
                              of the group read, in whichever chunk (Sec. 3.2.3)
    2 (g-1) W b               hybrid: all-reduces, each of a stage's weights in its group

Without groups no term has a factor L. Source: GNNPipe (arXiv 2308.10087), Alg. 1 and Sec. 3.2.
(Counting as halo only neighbours inside the same chunk gives two thirds of the printed bytes.)

See also pipeline.py (knobs, work of a chunk) and memory.py in this folder; program/path.py for
seconds; planner/ownership/chunks.py for chunks; executor/strategies/gnnpipe/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from gnnplan.planner.ownership.chunks import ChunkFacts
from gnnplan.planner.problem.problem import Problem
from gnnplan.planner.strategies.base import Memory, settled
from gnnplan.planner.strategies.gnnpipe.memory import memory
from gnnplan.planner.strategies.gnnpipe.pipeline import Pipeline, chunk_order
from gnnplan.planner.strategies.program.price import setup_s
from gnnplan.planner.strategies.program.program import (
    AllReduce,
    Exchange,
    Message,
    Op,
    Program,
    Receipt,
)
from gnnplan.planner.vocabulary.schedule import Compute


@dataclass(frozen=True)
class GNNPipe(Pipeline):
    """A `Pipeline` with its operations and memory."""

    def settle(self, problem: Problem) -> GNNPipe:
        layers, stages = problem.workload.layers, self.stages
        if stages is None:
            stages = next(
                s for s in range(min(problem.ranks, layers), 0, -1) if problem.ranks % s == 0
            )
        chosen = replace(
            self, stages=stages, chunks=4 * stages if self.chunks is None else self.chunks
        )
        if chosen.layers_per_stage is None and chosen._mistake(problem) is None:
            chosen = replace(
                chosen, layers_per_stage=balance(layer_seconds(chosen, problem), stages)
            )
        return chosen

    def program(self, problem: Problem) -> Program:
        """The same for all placements and clusters, so it is made once for all of them."""
        of = problem.ranks, problem.model, problem.workload
        cut = problem.graph, problem.stats, problem.method
        return problem.known.recent("pipeline", (self, *of, *cut), lambda: self._program(problem))

    def _program(self, problem: Problem) -> Program:
        chunks, seed, shuffle = settled(self.chunks), problem.workload.seed, self.shuffle
        shared, stages = _Shared(self, problem), range(settled(self.stages))
        step = [op for stage in stages for op in _stage(self, problem, stage, shared)]
        inputs = self.inputs_sent(problem)
        setup = [Op("input_halo", work=Exchange(inputs), ranks=tuple(self.group(problem, 0)))]
        return Program.of(
            step,
            setup=lambda: setup if inputs.any() else [],
            chunks=lambda t: chunk_order(seed, t, chunks, shuffle),
        )

    def memory(self, problem: Problem) -> Memory:
        return memory(self, problem)

    def preparation(self, problem: Problem) -> dict[str, float]:
        """Seconds to cut the graph, and of epoch 0: a forward pass, stage after stage."""
        partitioning_s = (
            0.0
            if problem.graph is None
            else problem.seconds_of(problem.cut(settled(self.chunks), self.members(problem)))
        )
        first_pass_s = float(self.predict(problem).by_op["forward"]) * settled(self.stages)
        return {
            "partitioning": partitioning_s,
            "features": setup_s(problem, self.built(problem).setup()),
            "first pass": first_pass_s
            / problem.cost.cores.full_load_slowdown,  # one stage at a time
        }


class _Shared:
    """What stages that are alike share: facts of all chunks, and the work that follows."""

    def __init__(self, pipe: Pipeline, problem: Problem) -> None:
        self.pipe, self.problem, self.facts = pipe, problem, pipe.facts(problem)
        self.returned = self.facts.sends.swapaxes(1, 2)  # rows whose gradients go home
        self.kept = np.array(pipe.kept(problem), dtype=float)
        self._works: dict[object, tuple[Compute, Compute]] = {}

    def works(self, piece: tuple[int, ...]) -> tuple[Compute, Compute]:
        """Forward and backward work of a piece [chunks * members]."""
        kind = self.pipe.kind_of(self.problem, piece)
        if kind not in self._works:
            self._works[kind] = self.pipe.work(self.problem, piece, self.facts)
        return self._works[kind]


def _stage(pipe: Pipeline, problem: Problem, stage: int, shared: _Shared) -> list[Op]:
    """A stage's operations in a step.

    refresh history; every chunk forward; every chunk backward, the last one first; update

    A chunk:  receive -> [exchange ->] compute ... -> send      forward, from the stage before
              receive -> compute [-> exchange] ... -> send      backward, from the stage after

    With few bits a chunk is packed before it is sent, and unpacked once it is received.
    """
    ranks, g, b = tuple(pipe.group(problem, stage)), pipe.members(problem), problem.model.itemsize
    forward: list[Op] = []
    backward: list[Op] = []  # in the forward pass' order, until reversed below
    for piece in pipe.pieces(problem, stage):
        works, row_bytes = shared.works(piece), pipe.exchanged(problem, piece) * b
        layer = piece[0] if g > 1 else None
        if row_bytes:
            there = Exchange(shared.facts.sends, row_bytes)
            back = Exchange(shared.returned, row_bytes)
            forward.append(Op("halo", "f", piece[0], work=there, ranks=ranks, chunks=1))
            backward.append(Op("halo", "b", piece[0], work=back, ranks=ranks, chunks=-1))
        forward.append(Op("forward", layer=layer, work=works[0], ranks=ranks, chunks=1))
        backward.append(Op("backward", layer=layer, work=works[1], ranks=ranks, chunks=-1))
    backward.reverse()

    def taken(way: Literal["f", "b"]) -> list[Op]:
        """From the neighbour that comes before on this way."""
        sender = stage - 1 if way == "f" else stage + 1
        sent = _message(pipe, problem, sender, way, shared)
        message = Op("receive", way, work=Receipt(sent), ranks=ranks, chunks=sent.chunks)
        if pipe.bits is None:
            return [message]
        _, work = pipe.packing(problem, min(sender, stage), shared.facts)
        unpack = Op("unpack", way, work=work, ranks=ranks, chunks=message.chunks)
        return [message, unpack]

    def given(way: Literal["f", "b"]) -> list[Op]:
        """To the neighbour that comes next on this way."""
        message = _message(pipe, problem, stage, way, shared)
        if pipe.bits is None:
            return [message]
        below = stage if way == "f" else stage - 1
        work, _ = pipe.packing(problem, below, shared.facts)
        pack = Op("pack", way, work=work, ranks=ranks, chunks=message.chunks)
        return [pack, message]

    if stage > 0:
        forward = [*taken("f"), *forward]
        backward = [*backward, *given("b")]
    if stage + 1 < settled(pipe.stages):
        forward = [*forward, *given("f")]
        backward = [*taken("b"), *backward]
    weights = pipe.weights(problem, stage)
    size = weights * problem.model.weight_itemsize
    ends = [Op("all_reduce", work=AllReduce((size,)), ranks=ranks)] if g > 1 else []
    return [
        Op("history", work=pipe.refresh_work(problem, stage, shared.kept), ranks=ranks),
        *forward,
        *backward,
        *ends,
        Op("update", work=problem.model.update(weights), ranks=ranks),
    ]


def _message(
    pipe: Pipeline, problem: Problem, stage: int, way: Literal["f", "b"], shared: _Shared
) -> Op:
    """The chunk's rows, or their gradients, to the same member of the next stage, or of the one
    before."""
    g, ranks = pipe.members(problem), tuple(pipe.group(problem, stage))
    below = stage if way == "f" else stage - 1
    handed = shared.facts.rows * pipe.handed_bytes(problem, below)
    if way == "f":
        return Op("pipeline", way, work=Message(handed, g), ranks=ranks, chunks=1)
    return Op("pipeline", way, work=Message(handed, -g), ranks=ranks, chunks=-1)


# -- layers by cost --------------------------------------------------------------------------------


def layer_seconds(pipe: Pipeline, problem: Problem) -> list[float]:
    """Seconds of each layer, forward and backward, on the mean sub-chunk, exchanges included.

    They do not depend on the stage that a layer is in.
    """
    model, facts = problem.model.aggregating_first, pipe.facts(problem)
    means = [
        float(counts.sum()) / facts.rows.size
        for counts in (facts.rows, facts.edges, facts.sources, facts.numbers, facts.sends)
    ]
    mean = ChunkFacts(
        *(np.full((1,) * axes, one) for axes, one in zip((2, 2, 2, 2, 3), means, strict=True))
    )
    cost, group, sent = problem.cost, pipe.group(problem, 0), facts.sends.mean(0)

    def seconds_of(layer: int) -> float:
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in pipe.work(problem, piece, mean)]
        computing = sum(float(np.sum(cost.compute_s(work))) for work in works)
        width = pipe.exchanged(problem, (layer,)) * model.itemsize
        exchanging = (
            sum(float(cost.exchange(way * width, group).alone) for way in (sent, sent.T))
            if width and sent.any()
            else 0.0
        )
        return computing * cost.cores.full_load_slowdown + exchanging

    alike: dict[object, float] = {}
    out = []
    for layer in range(1, len(model.layers) + 1):
        kind = pipe.kind_of(problem, (layer,))
        if kind not in alike:
            alike[kind] = seconds_of(layer)
        out.append(alike[kind])
    return out


def balance(seconds: Sequence[float], stages: int) -> tuple[int, ...]:
    """Layers per stage, at least one each, so that the slowest stage is as fast as possible.

    Of several such divisions it takes the one nearest to equal shares.

    >>> balance([1, 1, 1, 1, 1], 2), balance([4, 1, 1, 1, 1], 2)
    ((3, 2), (1, 4))
    """
    before, layers = np.concatenate([[0.0], np.cumsum(seconds)]), len(seconds)

    def latest_fill(limit: float) -> list[int]:
        """Where each stage begins if all stages, from the last on, take up to `limit` seconds."""
        out = [layers]
        for stage in reversed(range(stages)):
            out.append(max(int(np.searchsorted(before, before[out[-1]] - limit)), stage))
        return out[::-1]

    # bisect the smallest limit with which the first stage begins at layer 0
    low, high = max(seconds) * (1 - 1e-9), float(before[-1]) * (1 + 1e-9)
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if latest_fill(middle)[0] == 0 else (middle, high)
    limit = high * (1 + 1e-9)
    earliest, ends = latest_fill(limit), [0]
    for stage in range(1, stages):
        furthest = min(
            int(np.searchsorted(before, before[ends[-1]] + limit, side="right")) - 1,
            layers - (stages - stage),
        )
        even = int(np.searchsorted(before, before[-1] * stage / stages * (1 - 1e-9)))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), furthest))
    return tuple(b - a for a, b in pairwise([*ends, layers]))
