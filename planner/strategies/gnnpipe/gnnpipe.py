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

Exact: the gradient of one process with one chunk and whole rows only; else historical rows, or
packed rows that a stage hands on, approximate it.

Bytes per epoch, for N vertices, rows of H numbers of b bytes, g ranks per stage and W weights of
all stages:

    2 (stages-1) N H b        chunks between stages; twice for GCNII, which hands initial rows on;
                              a model whose layers' rows are summed hands the sum on; packed rows
                              are smaller (planner/gnn/codec.py)
    2 b sum_l H_{l-1} halo    hybrid: over layers whose input varies; halo: rows that other members
                              of the group read, in whichever chunk (Sec. 3.2.3)
    2 (g-1) W b               hybrid: all-reduces, each of a stage's weights in its group

Without groups no term has a factor L. Source: GNNPipe (arXiv 2308.10087), Alg. 1 and Sec. 3.2.
(Counting as halo only neighbours inside the same chunk gives two thirds of the printed bytes.)

docs/strategies/gnnpipe.md says which files to read next, in which order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np

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

Way = Literal["f", "b"]
SIGNS: dict[Way, Literal[1, -1]] = {"f": 1, "b": -1}  # chunks in order, or in reverse


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
        if chosen.layers_per_stage is None and chosen.suits(problem):
            seconds = layer_seconds(chosen, problem)
            return replace(chosen, layers_per_stage=balance(seconds, stages))
        return chosen

    def program(self, problem: Problem) -> Program:
        """The same for all placements and clusters, so it is made once for all of them."""
        asked = self, problem.ranks, problem.model, problem.workload
        cut = problem.graph, problem.stats, problem.method

        def make() -> Program:
            chunks, seed, inputs = (
                settled(self.chunks),
                problem.workload.seed,
                self.inputs_sent(problem),
            )
            first = tuple(self.group(problem, 0))
            setup = [Op("input_halo", work=Exchange(inputs), ranks=first)] * bool(inputs.any())
            return Program.of(
                list(_step(self, problem)),
                setup=lambda: setup,
                chunks=lambda t: chunk_order(seed, t, chunks, self.shuffle),
            )

        return problem.known.recent("pipeline", (*asked, *cut), make)

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


def _step(pipe: Pipeline, problem: Problem) -> Iterator[Op]:
    """The operations of a step, stage by stage. Stages that are alike share their work.

    refresh history; every chunk forward; every chunk backward, the last one first; update

    A chunk:  receive -> [exchange ->] compute ... -> send      forward, from the stage before
              receive -> compute [-> exchange] ... -> send      backward, from the stage after

    A codec may pack a chunk before it is sent, and unpack it once it is received.
    """
    g, b, facts = pipe.members(problem), problem.model.itemsize, pipe.facts(problem)
    last, kept = settled(pipe.stages) - 1, np.array(pipe.kept(problem), dtype=float)
    rows = facts.rows.astype(float).ravel()  # of each sub-chunk
    works: dict[object, tuple[Compute, Compute]] = {}  # forward and backward, by kind of piece

    def message(stage: int, way: Way) -> Op:
        """A chunk's rows, or their gradients, to the same member of the next stage on this way."""
        ranks, below = tuple(pipe.group(problem, stage)), stage - (way == "b")
        width = pipe.boundary(problem, below)
        handed = Message(facts.rows * pipe.codec.row_bytes(width, b), SIGNS[way] * g)
        return Op("pipeline", way, work=handed, ranks=ranks, chunks=SIGNS[way])

    def passed(stage: int, way: Way) -> Iterator[Op]:
        """A stage's operations on every chunk, one way."""
        sign, is_back = SIGNS[way], way == "b"
        op = partial(Op, ranks=tuple(pipe.group(problem, stage)), chunks=sign)
        if 0 <= stage - sign <= last:
            yield op("receive", way, work=Receipt(message(stage - sign, way)))
            width = pipe.boundary(problem, stage - (not is_back))
            for unpack in pipe.codec.unpack(rows, width, b, added=False):
                yield op("unpack", way, work=unpack)
        for piece in pipe.pieces(problem, stage)[::sign]:
            if (kind := pipe.kind_of(problem, piece)) not in works:
                works[kind] = pipe.work(problem, piece, facts)
            name, layer = ("forward", "backward")[is_back], piece[0] if g > 1 else None
            ops = [op(name, layer=layer, work=works[kind][is_back])]
            if row_bytes := pipe.exchanged(problem, piece) * b:
                sends = facts.sends.swapaxes(1, 2) if is_back else facts.sends
                ops.insert(0, op("halo", way, piece[0], work=Exchange(sends, row_bytes)))
            yield from ops[::sign]
        if 0 <= stage + sign <= last:
            width = pipe.boundary(problem, stage - is_back)
            for pack in pipe.codec.pack(rows, width, b, picked=False):
                yield op("pack", way, work=pack)
            yield message(stage, way)

    for stage in range(last + 1):
        ranks, weights = tuple(pipe.group(problem, stage)), pipe.weights(problem, stage)
        yield Op("history", work=pipe.refresh_work(problem, stage, kept), ranks=ranks)
        yield from passed(stage, "f")
        yield from passed(stage, "b")
        if g > 1:
            size = weights * problem.model.weight_itemsize
            yield Op("all_reduce", work=AllReduce((size,)), ranks=ranks)
        yield Op("update", work=problem.model.update(weights), ranks=ranks)


# -- layers by cost --------------------------------------------------------------------------------


def layer_seconds(pipe: Pipeline, problem: Problem) -> list[float]:
    """Seconds of each layer, forward and backward, on the mean sub-chunk, exchanges included.

    They do not depend on the stage that a layer is in.
    """
    model, facts, cost = problem.model.aggregating_first, pipe.facts(problem), problem.cost
    group, sent = pipe.group(problem, 0), facts.sends.mean(0)

    def seconds_of(layer: int) -> float:
        pieces = [(0,), (layer,)] if layer == 1 and model.encoder else [(layer,)]
        works = [work for piece in pieces for work in pipe.work(problem, piece, facts)]
        computing = sum(float(np.mean(cost.compute_s(work))) for work in works)
        width = pipe.exchanged(problem, (layer,)) * model.itemsize
        ways = (sent, sent.T) if width and sent.any() else ()
        exchanging = sum(float(cost.exchange(way * width, group).alone) for way in ways)
        return computing * cost.cores.full_load_slowdown + exchanging

    kinds = [pipe.kind_of(problem, (layer,)) for layer in range(1, len(model.layers) + 1)]
    known = {kind: seconds_of(kinds.index(kind) + 1) for kind in {*kinds}}
    return [known[kind] for kind in kinds]


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
